package memnode

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/token"
)

// copied gives a copy of all that a keeper holds.
func (k *memory) copied(t *testing.T) *memory {
	t.Helper()
	to := newMemory(t)
	for name, fd := range k.items {
		var st unix.Stat_t
		other, err := unix.MemfdCreate("copy", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err := errors.Join(err, unix.Fstat(fd, &st), unix.Ftruncate(other, st.Size)); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, st.Size)
		if _, err := unix.Pread(fd, b, 0); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.Pwrite(other, b, 0); err != nil {
			t.Fatal(err)
		}
		if seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0); err != nil {
			t.Fatal(err)
		} else if _, err := unix.FcntlInt(uintptr(other), unix.F_ADD_SEALS, seals&^unix.F_SEAL_EXEC); err != nil {
			t.Fatal(err)
		}
		to.items[name] = other
	}
	return to
}

// TestPutBack: memory that was copied in one process's time and is put back after others have registered is not served,
// whatever boots its processes count on to, nor offered; it is kept aside.
func TestPutBack(t *testing.T) {
	for name, c := range map[string]struct{ between, unheard int }{
		"one start between": {1, 0}, "several starts": {4, 0}, "processes of the copy that were not heard": {2, 5},
	} {
		t.Run(name, func(t *testing.T) {
			dir, k := newDirectory(t), newMemory(t)
			dir.wantSince(1, 1, 7)
			n, _ := keeps(t, dir, k, same)
			key := dir.keys(1, "tcp")
			l := mustDial(t, dir, "tcp", token.Grant{Session: 5, Namespace: 1}, 0)
			if err := l.write(key.HeapRkey, key.HeapBase, "old!"); err != nil {
				t.Fatal(err)
			}
			crash(t, n)
			earlier := k.copied(t)
			for range c.between {
				n, _ = keeps(t, dir, k, same)
				if s := n.Stats(); s.Kept != KeptAll {
					t.Fatalf("%+v", s)
				}
				crash(t, n)
			}
			for range c.unheard { // each counts its boot
				dir.change(func() { dir.down = true })
				o := Options{Name: "m1", CapacityBytes: 1 << 20, Directory: dir, HostID: "host1", Keeper: earlier,
					Devices: []DeviceListen{{Device: dir.device("tcp"), Addr: "127.0.0.1:0"}}}
				n, err := Open(t.Context(), o)
				if err != nil {
					t.Fatal(err)
				}
				for n.Stats().DirectoryErr == nil {
				}
				crash(t, n)
			}
			dir.change(func() { dir.down = false })
			n, _ = keeps(t, dir, earlier, same)
			key = dir.keys(1, "tcp")
			l = mustDial(t, dir, "tcp", token.Grant{Session: 5, Namespace: 1}, 0)
			if b, err := l.read(key.HeapRkey, key.HeapBase, 4); err != nil || string(b) != "\x00\x00\x00\x00" {
				t.Errorf("%q, %v", b, err)
			}
			last := dir.registered[len(dir.registered)-1]
			if s := n.Stats(); s.Kept != KeptPutBack || len(last.Retained) != 0 ||
				last.Incarnation == dir.registered[0].Incarnation || len(dir.stale) != 1 {
				t.Errorf("%+v, registered as %v, refused %d times", s, last, len(dir.stale))
			}
			if names := earlier.names(); len(names) != 4 || !strings.HasPrefix(names[1], rescueItems) ||
				!strings.HasPrefix(names[2], rescueItems) {
				t.Errorf("held: %q", names)
			}
			// From here on it is the one that is known.
			crash(t, n)
			n, _ = keeps(t, dir, earlier, same)
			if s := n.Stats(); s.Kept != KeptAll {
				t.Errorf("%+v", s)
			}
		})
	}
}

// TestAnswersUnheard: processes that register and end before they hear of it, however many, do not cost the next one
// the memory.
func TestAnswersUnheard(t *testing.T) {
	dir, k := newDirectory(t), newMemory(t)
	dir.want(1, 1)
	n, _ := keeps(t, dir, k, same)
	dir.keys(1, "tcp")
	first := n.Stats()
	crash(t, n)
	for i := range 2*maxLives + 3 {
		dir.change(func() { dir.mute = true }) // it registers, and the process does not take the answer
		known := len(dir.registered) + len(dir.stale)
		o := Options{Name: "m1", CapacityBytes: 1 << 20, Directory: dir, HostID: "host1", Keeper: k,
			Devices: []DeviceListen{{Device: dir.device("tcp"), Addr: "127.0.0.1:0"}}}
		n, err := Open(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		dir.until("a registration", func() bool { return len(dir.registered)+len(dir.stale) > known })
		crash(t, n)
		if i%5 == 4 { // one is not even heard
			dir.change(func() { dir.refuse = status.Error(codes.Unavailable, "busy") })
			n, err := Open(t.Context(), Options{Name: "m1", CapacityBytes: 1 << 20, Directory: dir, HostID: "host1",
				Keeper:  k,
				Devices: []DeviceListen{{Device: dir.device("tcp"), Addr: "127.0.0.1:0"}}})
			if err != nil {
				t.Fatal(err)
			}
			for n.Stats().DirectoryErr == nil {
			}
			crash(t, n)
			dir.change(func() { dir.refuse = nil })
		}
	}
	dir.change(func() { dir.mute = false })
	n, _ = keeps(t, dir, k, same)
	if s := n.Stats(); s.Kept != KeptAll || s.Incarnation != first.Incarnation || len(dir.stale) != 0 {
		t.Errorf("%+v, refused %d times", s, len(dir.stale))
	}
	for i, q := range dir.registered[1:] { // each says itself once, or twice
		if before := dir.registered[i]; q.Boot <= before.Boot && (i == 0 || q.Nonce != before.Nonce) {
			t.Errorf("boot %d registered after boot %d", q.Boot, before.Boot)
		}
	}
	if q := dir.registered[len(dir.registered)-1]; !slices.Contains(q.After, q.Nonce) || len(q.After) != maxLives {
		t.Errorf("the last registration: %v", q)
	}
}

// TestNameTakenMeanwhile: what a process retains is not offered if another one has registered its name meanwhile.
func TestNameTakenMeanwhile(t *testing.T) {
	dir := newDirectory(t)
	dir.wantSince(1, 1, 7)
	open(t, dir, 1<<20, "shm")
	dir.keys(1, "shm")
	open(t, dir, 1<<20, "tcp")
	dir.keys(1, "tcp")
	known := func() int { return len(dir.registered) + len(dir.stale) }
	var stale []*dirpb.RegisterNodeRequest
	for before := 2; len(stale) == 0; before++ { // it is the second one's turn, too, which is the last
		dir.change(func() { dir.forget = true })
		dir.until("a registration", func() bool { stale = dir.stale; return known() > before })
	}
	first := dir.registered[0]
	dir.until("the first one's registration", func() bool {
		last := dir.registered[len(dir.registered)-1]
		return last.Nonce == first.Nonce && len(last.Retained) == 0 && len(last.After) == 0 &&
			last.Incarnation != first.Incarnation
	})
	if len(stale) != 1 || stale[0].Nonce != first.Nonce || len(stale[0].Retained) != 1 {
		t.Errorf("refused: %v", stale)
	}
}

// TestRescueGivesWayToNoMemory: a region that gets no memory though it would fit gets what is kept aside.
func TestRescueGivesWayToNoMemory(t *testing.T) {
	dir, k := newDirectory(t), newMemory(t)
	k.items[rescueItems+"region/9/1"], _ = unix.MemfdCreate("aside", unix.MFD_CLOEXEC)
	n, _ := keeps(t, dir, k, same)
	k.mu.Lock()
	k.short = true
	k.mu.Unlock()
	dir.want(1, 1)
	dir.keys(1, "tcp")
	if s := n.Stats(); s.Regions[0].Err != nil || len(k.names()) != 2 {
		t.Errorf("%+v, held: %q", s, k.names())
	}
}
