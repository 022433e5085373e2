package keeper

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// standIn is not systemd: it speaks the part of sd_notify(3) that the file descriptor store is. deploy/systemd_test.go
// has the real one.
type standIn struct {
	t      *testing.T
	socket string
	conn   *net.UnixConn
	done   chan struct{}

	mu    sync.Mutex
	room  int
	fds   []int // the newest first, as systemd has them
	names []string
	// pending is what the ledger said as systemd heard of each name that has watched in it.
	watched string
	pending []uint64
}

func newStandIn(t *testing.T, room int) *standIn {
	t.Helper()
	s := &standIn{t: t, socket: filepath.Join(t.TempDir(), "notify"), room: room, done: make(chan struct{})}
	var err error
	if s.conn, err = net.ListenUnixgram("unixgram", &net.UnixAddr{Name: s.socket, Net: "unixgram"}); err != nil {
		t.Fatal(err)
	}
	go s.serve()
	t.Cleanup(func() {
		_ = s.conn.Close()
		<-s.done
		for _, fd := range s.fds {
			_ = unix.Close(fd)
		}
	})
	return s
}

func (s *standIn) serve() {
	defer close(s.done)
	b, oob := make([]byte, 4096), make([]byte, 256)
	for {
		n, oobn, _, _, err := s.conn.ReadMsgUnix(b, oob)
		if err != nil {
			return
		}
		var fds []int
		msgs, _ := unix.ParseSocketControlMessage(oob[:oobn])
		for _, m := range msgs {
			got, _ := unix.ParseUnixRights(&m)
			fds = append(fds, got...)
		}
		s.hear(strings.Split(string(b[:n]), "\n"), fds)
	}
}

func (s *standIn) hear(lines []string, fds []int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := ""
	for _, l := range lines {
		if v, ok := strings.CutPrefix(l, "FDNAME="); ok {
			name = v
		}
	}
	if k := slices.Index(s.names, ledgerName); k >= 0 && s.watched != "" && strings.Contains(name, s.watched) {
		var b [16]byte
		_, _ = unix.Pread(s.fds[k], b[:], 0)
		s.pending = append(s.pending, binary.LittleEndian.Uint64(b[8:]))
	}
	switch {
	case lines[0] == "FDSTORE=1" && len(fds) == 1 && len(s.fds) < s.room && !strings.Contains(name, ":") && name != "":
		if same(s.fds, fds[0]) {
			break // systemd stores a file once
		}
		s.fds, s.names = slices.Insert(s.fds, 0, fds[0]), slices.Insert(s.names, 0, name)
		return
	case lines[0] == "FDSTOREREMOVE=1":
		for k := len(s.names) - 1; k >= 0; k-- {
			if s.names[k] == name {
				_ = unix.Close(s.fds[k])
				s.fds, s.names = slices.Delete(s.fds, k, k+1), slices.Delete(s.names, k, k+1)
			}
		}
	}
	for _, fd := range fds { // BARRIER=1 among them
		_ = unix.Close(fd)
	}
}

func same(fds []int, fd int) bool {
	var a, b unix.Stat_t
	_ = unix.Fstat(fd, &a)
	return slices.ContainsFunc(fds, func(x int) bool {
		_ = unix.Fstat(x, &b)
		return a.Dev == b.Dev && a.Ino == b.Ino
	})
}

// restart gives what another process gets: duplicates, and names.
func (s *standIn) restart() (fds []int, names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, fd := range s.fds {
		dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD, 0)
		if err != nil {
			s.t.Fatal(err)
		}
		fds = append(fds, dup)
	}
	return fds, slices.Clone(s.names)
}

// keeper is a store as the next keeper has it, and what it logs.
func (s *standIn) keeper(edit func(fds []int, names []string) ([]int, []string)) (*store, *bytes.Buffer) {
	s.t.Helper()
	fds, names := s.restart()
	if edit != nil {
		fds, names = edit(fds, names)
	}
	var log bytes.Buffer
	d, err := newSystemd(s.socket, s.room, fds, names, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		s.t.Fatal(err)
	}
	k := &store{out: d}
	if err := k.takeOver(s.t.Context(), Options{Vital: "v/", Logger: d.log}); err != nil {
		s.t.Fatal(err)
	}
	return k, &log
}

func (s *store) put(t *testing.T, name, meta string, fds ...int) {
	t.Helper()
	for k, fd := range fds {
		dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		fds[k] = dup
	}
	if err := s.change(&message{op: opPut, name: name, meta: []byte(meta)}, fds); err != nil {
		t.Fatal(err)
	}
}

func (s *store) drop(t *testing.T, name string) {
	t.Helper()
	if err := s.change(&message{op: opDrop, name: name}, nil); err != nil {
		t.Fatal(err)
	}
}

// text is what a store holds, in short.
func (s *store) text() (out string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	names := s.namesLocked()
	slices.Sort(names)
	for _, n := range names {
		out += n + "(" + string(s.items[n].Meta) + ")"
		for _, fd := range s.items[n].FDs {
			out += ":" + content(fd)
		}
		out += " "
	}
	return out
}

// filled has items of every kind, and two were dropped.
func filled(t *testing.T, room int) *standIn {
	t.Helper()
	s := newStandIn(t, room)
	k, _ := s.keeper(nil)
	k.put(t, "v/1", "", memfd(t, "one"))
	k.put(t, "gone", "", memfd(t, "gone"))
	k.put(t, "cell/2", "pid 7: |%", memfd(t, "cell"), memfd(t, "process"))
	k.put(t, "listen/tcp/127.0.0.1:7402", "", memfd(t, "socket"))
	k.put(t, "v/3", "", memfd(t, "three"))
	k.drop(t, "gone")
	k.drop(t, "v/3")
	k.closeAll(true)
	return s
}

const filledText = "cell/2(pid 7: |%):cell:process listen/tcp/127.0.0.1:7402():socket v/1():one "

// TestSystemdKeeps: another keeper has all that the one before had, and that which was dropped is not there; a keeper
// that ends for good leaves nothing.
func TestSystemdKeeps(t *testing.T) {
	s := filled(t, 64)
	for life := range 3 {
		k, log := s.keeper(nil)
		if got := k.text(); got != filledText || log.Len() > 0 {
			t.Errorf("life %d has %s\n%s", life, got, log)
		}
		if life == 0 { // in whichever order they come
			k.closeAll(true)
			k, log = s.keeper(func(fds []int, names []string) ([]int, []string) {
				slices.Reverse(fds)
				slices.Reverse(names)
				return fds, names
			})
			if got := k.text(); got != filledText || log.Len() > 0 {
				t.Errorf("the other way round it has %s\n%s", got, log)
			}
			for _, i := range k.items {
				for _, fd := range i.FDs {
					if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil ||
						flags&unix.FD_CLOEXEC == 0 {
						t.Errorf("%s: a worker would have descriptor %d", i.Name, fd)
					}
				}
			}
		}
		k.put(t, "v/4", "", memfd(t, "four"))
		k.drop(t, "v/4")
		k.closeAll(life < 2)
	}
	if err := newBarrier(s); err != nil {
		t.Fatal(err)
	}
	if fds, names := s.restart(); len(names) != 0 {
		t.Errorf("after the end the store has %q", names)
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	}
}

// newBarrier waits until the stand-in has heard everything.
func newBarrier(s *standIn) error {
	d, err := newSystemd(s.socket, 1, nil, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	defer d.close()
	return d.barrier()
}

// TestSystemdHostile: unless everything that the keeper held comes back, as it was, nothing vital is believed.
func TestSystemdHostile(t *testing.T) {
	at := func(names []string, part string) int {
		return slices.IndexFunc(names, func(n string) bool { return strings.Contains(n, part) })
	}
	without := func(part string) func([]int, []string) ([]int, []string) {
		return func(fds []int, names []string) ([]int, []string) {
			k := at(names, part)
			_ = unix.Close(fds[k])
			return slices.Delete(fds, k, k+1), slices.Delete(names, k, k+1)
		}
	}
	rename := func(part, name string) func([]int, []string) ([]int, []string) {
		return func(fds []int, names []string) ([]int, []string) {
			names[at(names, part)] = name
			return fds, names
		}
	}
	for what, edit := range map[string]func([]int, []string) ([]int, []string){
		"a region is missing":      without("v%2F1"),
		"a cell is missing":        without("0|2|cell"),
		"a pidfd is missing":       without("1|2|cell"),
		"a socket is missing":      without("listen"),
		"the ledger is missing":    without(ledgerName),
		"a name is no keeper's":    rename("listen", "stored"),
		"a name is another's":      rename("listen", "0|1|v%2F9|"),
		"an index is out of range": rename("1|2|cell", "2|2|cell%2F2|"),
		"an item is of two sizes":  rename("1|2|cell", "1|1|cell%2F2|"),
		"an index comes twice":     rename("1|2|cell", "0|2|cell%2F2|"),
		"a name is not written so": rename("v%2F1", "0|1|v/1|"),
		"a name cannot be printed": rename("v%2F1", "0|1|%00|"),
		"a region and a cell are others": func(fds []int, names []string) ([]int, []string) {
			a, b := at(names, "v%2F1"), at(names, "0|2|cell")
			fds[a], fds[b] = fds[b], fds[a]
			return fds, names
		},
		"there is one more": func(fds []int, names []string) ([]int, []string) {
			fd, _ := unix.FcntlInt(uintptr(fds[0]), unix.F_DUPFD_CLOEXEC, 0)
			return append(fds, fd), append(names, "0|1|v%2F8|")
		},
		"the ledger is no ledger": func(fds []int, names []string) ([]int, []string) {
			k := at(names, ledgerName)
			fd, _ := unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0)
			_ = unix.Close(fds[k])
			fds[k] = fd
			return fds, names
		},
	} {
		t.Run(what, func(t *testing.T) {
			s := filled(t, 64)
			k, log := s.keeper(edit)
			if strings.Contains(k.text(), "v/") || !strings.Contains(log.String(), "level=") {
				t.Errorf("%s\n%s", k.text(), log)
			}
			for _, i := range k.items {
				if slices.Contains(i.FDs, -1) {
					t.Errorf("%s has descriptors %v", i.Name, i.FDs)
				}
			}
			if got := k.text(); what == "a region is missing" && got != strings.TrimSuffix(filledText, "v/1():one ") {
				t.Errorf("of what is not vital there is %s", got)
			}
			k.closeAll(true)
			if k, _ := s.keeper(nil); strings.Contains(k.text(), "v/") {
				t.Errorf("the next keeper has %s", k.text())
			} else {
				k.closeAll(false)
			}
		})
	}
	for _, text := range []string{"", "|||", "0|1|a", "0|0|a|", "-1|1|a|", "0|9|a|", "0|1||", "0|1|ledger|",
		"0|1|a|%zz", "00|1|a|", strings.Repeat("x", 300)} {
		if n, err := parseName(text); !errors.Is(err, ErrProtocol) {
			t.Errorf("%q is %+v, %v", text, n, err)
		}
	}
}

// TestSystemdDies: a keeper that dies between any two words of it to systemd leaves all or nothing of the item that it
// was about.
func TestSystemdDies(t *testing.T) {
	s := filled(t, 64)
	k, _ := s.keeper(nil)
	fd := memfd(t, "five")
	i := &Item{Name: "v/5", FDs: []int{fd}}
	k.out.say(mark(i)) // and it dies
	k.out.close()
	next, _ := s.keeper(nil)
	if got := next.text(); got != filledText {
		t.Errorf("nothing was sent: %s", got)
	}
	next.out.say(mark(i))
	if err := next.out.send(i); err != nil {
		t.Fatal(err)
	}
	next.out.close()
	next, _ = s.keeper(nil)
	if got := next.text(); got != filledText+"v/5():five " {
		t.Errorf("it was sent: %s", got)
	}
	next.out.say(-mark(i))
	next.out.close()
	next, _ = s.keeper(nil)
	if got := next.text(); got != filledText+"v/5():five " {
		t.Errorf("its end was not sent: %s", got)
	}
	next.out.say(-mark(i))
	next.out.forget("v/5")
	if err := next.out.barrier(); err != nil {
		t.Fatal(err)
	}
	next.out.close()
	next, _ = s.keeper(nil)
	if got := next.text(); got != filledText {
		t.Errorf("its end was sent: %s", got)
	}
	next.closeAll(false)
}

// TestSystemdAnnounced: the ledger says what is about to come or to go before systemd hears of it.
func TestSystemdAnnounced(t *testing.T) {
	s := newStandIn(t, 64)
	k, _ := s.keeper(nil)
	if err := newBarrier(s); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	s.watched = "v%2F1"
	s.mu.Unlock()
	k.put(t, "v/1", "", memfd(t, "one"))
	m := mark(k.items["v/1"])
	k.drop(t, "v/1")
	k.closeAll(false)
	if err := newBarrier(s); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if want := []uint64{m, -m}; !slices.Equal(s.pending, want) {
		t.Errorf("the ledger said %x as systemd heard, want %x", s.pending, want)
	}
}

// TestSystemdRoomAgain: names that are gone take no room in the store.
func TestSystemdRoomAgain(t *testing.T) {
	s := newStandIn(t, 64)
	k, _ := s.keeper(nil)
	long := "v/" + strings.Repeat("x", maxName-2)
	for range maxNames/maxName + 10 {
		k.put(t, long, "", memfd(t, "x"))
		k.drop(t, long)
	}
	k.put(t, long, "", memfd(t, "one"))
	k.closeAll(true)
	if k, _ = s.keeper(nil); k.text() != long+"():one " {
		t.Errorf("the next keeper has %s", k.text())
	}
	k.closeAll(false)
}

// TestSystemdFull: items for which the store has no room are held all the same; while there are any, the store alone is
// not believed, and afterwards it is.
func TestSystemdFull(t *testing.T) {
	for what, room := range map[string]int{"as it was told": 12, "less than it was told": 64} {
		t.Run(what, func(t *testing.T) {
			s := newStandIn(t, room)
			s.mu.Lock()
			s.room = 12
			s.mu.Unlock()
			open := func() *store {
				t.Helper()
				fds, names := s.restart()
				d, err := newSystemd(s.socket, room, fds, names, slog.New(slog.DiscardHandler))
				if err != nil {
					t.Fatal(err)
				}
				k := &store{out: d}
				if err := k.takeOver(t.Context(), Options{Vital: "v/", Logger: d.log}); err != nil {
					t.Fatal(err)
				}
				return k
			}
			k := open()
			k.put(t, "v/0", "", memfd(t, "zero"))
			for n := range 20 {
				k.put(t, fmt.Sprintf("cell/%d", n), "", memfd(t, "cell"), memfd(t, "process"))
			}
			k.closeAll(true)
			if k = open(); strings.Contains(k.text(), "v/") {
				t.Errorf("of a store that was full came %s", k.text())
			}
			k.put(t, "v/0", "", memfd(t, "zero"))
			for _, n := range k.namesLocked() {
				if n != "v/0" {
					k.drop(t, n)
				}
			}
			k.closeAll(true)
			if k = open(); k.text() != "v/0():zero " && what == "as it was told" {
				t.Errorf("of a store with room came %s", k.text())
			}
			k.closeAll(false)
		})
	}
}

// TestOpenSystemd: the environment is another's word.
func TestOpenSystemd(t *testing.T) {
	for what, c := range map[string]struct {
		env  map[string]string
		want string
	}{
		"no systemd": {map[string]string{roomEnv: "8"}, ""},
		"no store":   {map[string]string{notifyEnv: "/none"}, ""},
		"no room":    {map[string]string{notifyEnv: "/none", roomEnv: "0"}, ""},
		"nothing stored": {
			map[string]string{notifyEnv: "/none", roomEnv: "8", listenEnv: "0", pidEnv: fmt.Sprint(os.Getpid())}, "ok"},
		"another process's": {map[string]string{notifyEnv: "/none", roomEnv: "8", listenEnv: "77", pidEnv: "1"}, "ok"},
		"room is no number": {map[string]string{notifyEnv: "/none", roomEnv: "x"}, roomEnv},
		"room below none":   {map[string]string{notifyEnv: "/none", roomEnv: "-1"}, roomEnv},
		"too much room":     {map[string]string{notifyEnv: "/none", roomEnv: "1000000"}, roomEnv},
		"no number": {
			map[string]string{notifyEnv: "/none", roomEnv: "8", listenEnv: "x", pidEnv: fmt.Sprint(os.Getpid())},
			listenEnv},
		"fewer names": {map[string]string{notifyEnv: "/none", roomEnv: "8", listenEnv: "2", namesEnv: "a",
			pidEnv: fmt.Sprint(os.Getpid())}, listenEnv},
	} {
		for _, k := range []string{notifyEnv, roomEnv, listenEnv, namesEnv, pidEnv} {
			t.Setenv(k, c.env[k])
		}
		d, err := OpenSystemd(slog.New(slog.DiscardHandler))
		switch {
		case c.want == "" && (d != nil || err != nil), c.want == "ok" && (d == nil || err != nil):
			t.Errorf("%s: %v %v", what, d, err)
		case c.want != "" && c.want != "ok" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: %v, want %q", what, err, c.want)
		}
		if d != nil {
			d.close()
		}
		if got := os.Getenv(notifyEnv); got != c.env[notifyEnv] {
			t.Errorf("%s: the worker is told of %q, by which it says that it is ready; want %q", what, got,
				c.env[notifyEnv])
		}
	}
}
