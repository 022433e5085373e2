package keeper

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Variables in which systemd tells a service of its file descriptor store. FDSTORE says how many descriptors it takes;
// systemd before 254 does not set it, so the unit does.
const (
	notifyEnv = "NOTIFY_SOCKET"
	roomEnv   = "FDSTORE"
	listenEnv = "LISTEN_FDS"
	namesEnv  = "LISTEN_FDNAMES"
	pidEnv    = "LISTEN_PID"
)

const (
	ledgerName = "ledger"
	// workerItem is the pidfd of the worker, which the next keeper sees end before it starts another one.
	workerItem = "worker"
	// maxNames bounds the bytes of all names in the store: they come back in a single variable, and the kernel starts
	// no program with one of 128 KiB.
	maxNames = 96 << 10
	// maxFDName is systemd's.
	maxFDName = 255
	// answerTime bounds a wait for systemd.
	answerTime = 5 * time.Second
)

// Systemd is the file descriptor store of the service manager, which holds what a keeper holds, so that it outlives the
// keeper. Its methods serve one goroutine at a time.
//
// A store that is full, or a manager that does not answer, refuses nothing to the worker: the item is held by the
// keeper alone. Whether the next keeper may believe the store is decided by the ledger, a memfd in it with two words of
// 8 bytes, little-endian:
//
//	0  sum      of the marks of all items that the keeper holds
//	8  pending  the mark that is being added or, negated, taken away; or 0
//
// The marks of the items that come back must give sum, or sum and pending. An item's mark is a hash of its name, its
// meta and the inodes of its descriptors. So no descriptor can be missing, and none can be another file.
type Systemd struct {
	log    *slog.Logger
	to     *unix.SockaddrUnix
	conn   int                 // a socket that sends there
	room   int                 // descriptors that fit
	bytes  int                 // of names in the store
	stored map[string][]string // names in the store by those of items
	ledger int                 // -1: there is none, and nothing is believed
	sum    uint64
	full   bool // it was said
	failed error

	came  []*Item // what came back, until Run has it
	whole bool    // all of it came back
}

// OpenSystemd gives the store of the manager that started this process, or nil if there is none. It takes over the
// descriptors that the environment names, and the environment's word about them. The process is not to have opened any
// before.
func OpenSystemd(log *slog.Logger) (*Systemd, error) {
	env := make(map[string]string)
	for _, k := range []string{notifyEnv, roomEnv, listenEnv, namesEnv, pidEnv} {
		env[k] = os.Getenv(k)
		if k != notifyEnv { // a worker says by it that it is ready
			_ = os.Unsetenv(k) // it fails for bad names alone
		}
	}
	if env[notifyEnv] == "" || env[roomEnv] == "" {
		return nil, nil
	}
	room, err := strconv.Atoi(env[roomEnv])
	if err != nil || room < 0 || room > maxItems {
		return nil, fmt.Errorf("%s is %q: want the number of descriptors that systemd stores, at most %d", roomEnv,
			env[roomEnv], maxItems)
	}
	var fds []int
	var names []string
	if n := env[listenEnv]; n != "" && n != "0" && env[pidEnv] == strconv.Itoa(os.Getpid()) {
		n, err := strconv.Atoi(env[listenEnv])
		names = strings.Split(env[namesEnv], ":")
		if err != nil || n < 0 || n > maxItems || n != len(names) {
			return nil, fmt.Errorf("%s is %q and %s has %d names: want a number, and as many names", listenEnv,
				env[listenEnv], namesEnv, len(names))
		}
		for k := range n {
			fds = append(fds, 3+k)
		}
	}
	return newSystemd(env[notifyEnv], room, fds, names, log)
}

// ClearSystemd has the store of the manager that started this process, if there is one, forget what a keeper had there.
func ClearSystemd(log *slog.Logger) error {
	d, err := OpenSystemd(log)
	if d == nil || err != nil {
		return err
	}
	s := &store{out: d, items: make(map[string]*Item)}
	for _, i := range d.take("") {
		s.items[i.Name] = i
	}
	if n := len(s.items); n > 0 {
		log.Warn("systemd's store has what a keeper held, and there is no keeper now: it is given up", "items", n)
	}
	s.closeAll(false)
	return nil
}

// newSystemd takes over fds.
func newSystemd(socket string, room int, fds []int, names []string, log *slog.Logger) (*Systemd, error) {
	d := &Systemd{log: log, to: &unix.SockaddrUnix{Name: socket}, room: room, stored: make(map[string][]string),
		ledger: -1}
	if room == 0 && len(fds) == 0 {
		return nil, nil
	}
	for _, fd := range fds {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
			return nil, fmt.Errorf("descriptor %d, which systemd is said to have stored: %w", fd, err)
		}
	}
	var err error
	if d.conn, err = unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return nil, fmt.Errorf("socket to systemd: %w", err)
	}
	tv := unix.NsecToTimeval(answerTime.Nanoseconds())
	if err := unix.SetsockoptTimeval(d.conn, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv); err != nil {
		_ = unix.Close(d.conn)
		return nil, fmt.Errorf("socket to systemd: %w", err)
	}
	d.takeBack(fds, names)
	return d, nil
}

// takeBack makes items of what the store held, and drops what is none.
func (d *Systemd) takeBack(fds []int, names []string) {
	type parts struct {
		item *Item
		have int
	}
	all := make(map[string]*parts)
	var order []string
	for k, text := range names {
		n, err := parseName(text)
		p := all[n.item]
		switch {
		case err == nil && n.item == ledgerName && d.ledger < 0 && d.readLedger(fds[k]) == nil:
			d.ledger = fds[k]
			continue
		case err == nil && n.item == ledgerName:
			err = errors.New("it is no ledger, or the second one")
		case err == nil && p == nil:
			p = &parts{item: &Item{Name: n.item, FDs: make([]int, n.of)}}
			for i := range p.item.FDs {
				p.item.FDs[i] = -1
			}
			all[n.item] = p
			order = append(order, n.item)
		}
		if err == nil && (len(p.item.FDs) != n.of || p.item.FDs[n.index] >= 0) {
			err = errors.New("it does not go with another of this name")
		}
		if err != nil {
			d.log.Warn("systemd's store had a descriptor that is not of a keeper; it is dropped", "name", text, "err",
				err)
			_ = unix.Close(fds[k])
			_ = d.tell("FDSTOREREMOVE=1\nFDNAME=" + text) // else it comes back, and is dropped again
			continue
		}
		p.item.FDs[n.index] = fds[k]
		p.have++
		if n.index == 0 {
			p.item.Meta = n.meta
		}
		d.stored[n.item] = append(d.stored[n.item], text)
		d.bytes += len(text) + 1
	}
	var sum uint64
	for _, name := range order {
		p := all[name]
		if p.have == len(p.item.FDs) {
			sum += mark(p.item)
			d.came = append(d.came, p.item)
			continue
		}
		d.log.Warn("systemd's store had some descriptors of an item; they are dropped", "item", name, "have", p.have,
			"want", len(p.item.FDs))
		for _, fd := range p.item.FDs {
			if fd >= 0 {
				_ = unix.Close(fd)
			}
		}
		d.forget(name)
	}
	d.whole = len(names) == 0
	if d.ledger >= 0 {
		said, pending := d.sum, d.pending()
		d.whole = sum == said || sum == said+pending
	}
}

// fdName is what a descriptor is called in the store.
type fdName struct {
	item      string
	meta      []byte
	index, of int
}

// String is FDNAME, in which systemd wants neither colons nor control characters: index|of|name|meta, the texts as in
// the query of a URL.
func (n fdName) String() string {
	if n.item == ledgerName {
		return ledgerName
	}
	meta := ""
	if n.index == 0 {
		meta = url.QueryEscape(string(n.meta))
	}
	return fmt.Sprintf("%d|%d|%s|%s", n.index, n.of, url.QueryEscape(n.item), meta)
}

func parseName(text string) (n fdName, err error) {
	if text == ledgerName {
		return fdName{item: ledgerName}, nil
	}
	part := strings.Split(text, "|")
	if len(part) != 4 || len(text) > maxFDName {
		return n, fmt.Errorf("%w: name %q", ErrProtocol, text)
	}
	var errs [4]error
	var meta string
	n.index, errs[0] = strconv.Atoi(part[0])
	n.of, errs[1] = strconv.Atoi(part[1])
	n.item, errs[2] = url.QueryUnescape(part[2])
	meta, errs[3] = url.QueryUnescape(part[3])
	if n.index == 0 {
		n.meta = []byte(meta)
	}
	if errors.Join(errs[:]...) != nil || n.item == ledgerName || n.index < 0 || n.index >= n.of || n.String() != text {
		return fdName{}, fmt.Errorf("%w: name %q", ErrProtocol, text)
	}
	_, err = decode((&message{op: opItem, name: n.item, meta: n.meta}).encode(), n.of)
	return n, err
}

// mark says what an item is; it is not 0.
func mark(i *Item) uint64 {
	h := fnv.New64a()
	fmt.Fprintf(h, "%q %q", i.Name, i.Meta)
	for _, fd := range i.FDs {
		var st unix.Stat_t
		_ = unix.Fstat(fd, &st) // of one that is not open it says nothing, which is another mark
		fmt.Fprintf(h, " %d.%d.%o", st.Dev, st.Ino, st.Mode)
	}
	return max(h.Sum64(), 1)
}

// readLedger takes the sum from what may be the ledger.
func (d *Systemd) readLedger(fd int) error {
	var b [16]byte
	n, err := unix.Pread(fd, b[:], 0)
	if err != nil || n != len(b) {
		return errors.Join(fmt.Errorf("%d bytes", n), err)
	}
	d.sum = binary.LittleEndian.Uint64(b[:])
	return nil
}

func (d *Systemd) pending() uint64 {
	var b [16]byte
	_, _ = unix.Pread(d.ledger, b[:], 0) // readLedger could
	return binary.LittleEndian.Uint64(b[8:])
}

// say writes the ledger. A process that dies writes all of these bytes or none.
func (d *Systemd) say(pending uint64) {
	if d.ledger < 0 {
		return
	}
	b := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, d.sum), pending)
	if n, err := unix.Pwrite(d.ledger, b, 0); err != nil || n != len(b) {
		d.trouble(fmt.Errorf("write the ledger: %d bytes, %w", n, err))
	}
}

// take gives what came back. If that is not all that the keeper before held, what is vital is not among it.
func (d *Systemd) take(vital string) []*Item {
	var items []*Item
	for _, i := range d.came {
		if !d.whole && strings.HasPrefix(i.Name, vital) {
			i.Close()
			d.forget(i.Name)
			continue
		}
		items = append(items, i)
	}
	if !d.whole {
		d.log.Error("systemd's store does not hold all that the keeper held: the memory in it is given up", "items",
			len(d.came), "given_up", len(d.came)-len(items))
		if err := d.barrier(); err != nil {
			d.trouble(err)
		}
	}
	d.came = nil
	d.begin(items)
	return items
}

// begin has a ledger say what is held.
func (d *Systemd) begin(items []*Item) {
	if d.ledger < 0 {
		fd, err := unix.MemfdCreate("kvd-ledger", unix.MFD_CLOEXEC)
		if err != nil {
			d.trouble(fmt.Errorf("ledger: %w", err))
			return
		}
		d.ledger = fd
		_ = d.tell("FDSTOREREMOVE=1\nFDNAME=" + ledgerName) // there is none, unless it is not to be believed
	}
	d.sum = 0
	for _, i := range items {
		d.sum += mark(i)
	}
	d.say(0)
	if err := d.tell("FDSTORE=1\nFDPOLL=0\nFDNAME="+ledgerName, d.ledger); err != nil { // once more does nothing
		d.trouble(err)
	}
}

// add has systemd hold an item, if there is room.
func (d *Systemd) add(i *Item) {
	m := mark(i)
	d.say(m)
	if err := d.send(i); err != nil {
		d.trouble(err)
	}
	d.sum += m
	d.say(0)
}

func (d *Systemd) send(i *Item) error {
	var names []string
	size := 0
	for k := range i.FDs {
		n := fdName{i.Name, i.Meta, k, len(i.FDs)}.String()
		if len(n) > maxFDName {
			return fmt.Errorf("the name of %q takes %d bytes, at most %d", i.Name, len(n), maxFDName)
		}
		names = append(names, n)
		size += len(n) + 1
	}
	// The ledger and its name take some, and so does every item that is there, whatever it has.
	if maxFiles*(len(d.stored)+1)+1 > d.room || d.bytes+size+len(ledgerName) > maxNames {
		if !d.full {
			d.full = true
			d.log.Warn("systemd's store is full: what the memory node has does not outlive its keeper until "+
				"connections of this machine have closed",
				"items", len(d.stored), "descriptors", d.room, "bytes_of_names", d.bytes)
		}
		return nil
	}
	d.stored[i.Name] = names
	d.bytes += size
	for k, n := range names {
		// FDPOLL=0: a pidfd that hangs up says that its process is dead, and that is to be known.
		if err := d.tell("FDSTORE=1\nFDPOLL=0\nFDNAME="+n, i.FDs[k]); err != nil {
			return err
		}
	}
	return d.barrier()
}

// remove has systemd close an item.
func (d *Systemd) remove(i *Item) {
	m := mark(i)
	d.say(-m)
	if len(d.stored[i.Name]) > 0 {
		d.forget(i.Name)
		if err := d.barrier(); err != nil {
			d.trouble(err)
		}
		d.full = false
	}
	d.sum -= m
	d.say(0)
}

// forget sends what makes systemd close an item's descriptors.
func (d *Systemd) forget(item string) {
	for _, n := range d.stored[item] {
		d.bytes -= len(n) + 1
		if err := d.tell("FDSTOREREMOVE=1\nFDNAME=" + n); err != nil {
			d.trouble(err)
		}
	}
	delete(d.stored, item)
}

// end has systemd close the ledger too.
func (d *Systemd) end() {
	_ = d.tell("FDSTOREREMOVE=1\nFDNAME=" + ledgerName) // a ledger alone says that nothing is held
	d.close()
}

func (d *Systemd) close() {
	if d.ledger >= 0 {
		_ = unix.Close(d.ledger)
	}
	for _, i := range d.came {
		i.Close()
	}
	_ = unix.Close(d.conn) // nothing is unsent
}

// trouble logs an error that is not the one before.
func (d *Systemd) trouble(err error) {
	if d.failed == nil || d.failed.Error() != err.Error() {
		d.log.Error("systemd's store: what the memory node has may not outlive its keeper", "err", err)
	}
	d.failed = err
}

// tell sends a message of sd_notify(3).
func (d *Systemd) tell(text string, fds ...int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	for {
		err := unix.Sendmsg(d.conn, []byte(text), oob, d.to, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("tell systemd at %s: %w", d.to.Name, err)
		}
		return nil
	}
}

// barrier waits until systemd has done what it was told: it closes its end of a pipe then (sd_notify_barrier(3)). The
// last words of a process that dies are not heard otherwise.
func (d *Systemd) barrier() error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	err = d.tell("BARRIER=1", int(w.Fd()))
	if err = errors.Join(err, w.Close(), r.SetReadDeadline(time.Now().Add(answerTime))); err != nil {
		return err
	}
	if _, err := r.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("systemd has not taken a descriptor for %v", answerTime)
	}
	return nil
}
