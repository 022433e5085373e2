package shm

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/mem"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/rdma/driver"
)

// Listener is the passive side: a SOCK_SEQPACKET unix socket, at a path or, with
// a leading @, in the abstract name space.
type Listener struct {
	d    *Device
	o    driver.ListenOptions
	addr string
	ln   *net.UnixListener
	stop chan struct{} // closed by Close
	// giveUp is closed when Close stops waiting for peers inside a verb.
	giveUp chan struct{}
	done   sync.WaitGroup // accept loop and one goroutine per connection
	once   sync.Once
	err    error // of Close

	mu struct {
		sync.Mutex
		closed bool
		conns  map[*net.UnixConn]struct{}
		stuck  []string // peers that Close gave up on
	}
}

// Listen implements driver.Device. A socket file that nobody answers at is what
// a process that was killed leaves behind, and is replaced.
func (d *Device) Listen(addr string, o driver.ListenOptions) (driver.Listener, error) {
	if o.Accept == nil {
		return nil, errors.New("ListenOptions.Accept is nil")
	}
	if addr == "" || addr == "@" {
		return nil, errors.New("address is empty: want a socket's path or @name")
	}
	d.mu.Lock()
	if d.mu.closed {
		d.mu.Unlock()
		return nil, driver.ErrClosed
	}
	if _, err := d.tableLocked(); err != nil {
		d.mu.Unlock()
		return nil, err
	}
	d.mu.listeners++
	d.mu.Unlock()

	ln, err := d.socket(addr)
	if err != nil {
		d.mu.Lock()
		d.mu.listeners--
		d.mu.Unlock()
		return nil, err
	}
	l := &Listener{d: d, o: o, addr: addr, ln: ln, stop: make(chan struct{}), giveUp: make(chan struct{})}
	l.mu.conns = make(map[*net.UnixConn]struct{})
	l.done.Go(l.accept)
	return l, nil
}

func (d *Device) socket(addr string) (*net.UnixListener, error) {
	if d.o.Socket == nil {
		return listenUnix(addr)
	}
	sock, err := d.o.Socket(addr, func() (net.Listener, error) { return listenUnix(addr) })
	if err != nil {
		return nil, err
	}
	ln, ok := sock.(*net.UnixListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("listen %s: not a socket of the Unix domain", addr), sock.Close())
	}
	return ln, nil
}

func listenUnix(addr string) (*net.UnixListener, error) {
	ua := &net.UnixAddr{Name: addr, Net: "unixpacket"}
	if strings.HasPrefix(addr, "@") {
		return net.ListenUnix("unixpacket", ua)
	}
	// Processes look one at a time whether the socket is stale, and replace it.
	dir, err := os.Open(filepath.Dir(addr))
	if err != nil {
		return nil, err
	}
	defer dir.Close() // unlocks
	var b backoff
	for start := time.Now(); ; b.wait(nil, nil) {
		err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			break
		}
		// Others lock directories too, and for long (systemd-tmpfiles(8)).
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) || time.Since(start) > time.Second {
			return nil, fmt.Errorf("lock directory %s: %w", dir.Name(), err)
		}
	}
	ln, err := net.ListenUnix("unixpacket", ua)
	if !errors.Is(err, unix.EADDRINUSE) {
		return ln, err
	}
	if fi, serr := os.Lstat(addr); serr != nil || fi.Mode().Type() != fs.ModeSocket {
		return nil, err // somebody's file
	}
	c, derr := net.DialUnix("unixpacket", nil, ua)
	if derr == nil {
		_ = c.Close()
	}
	if !errors.Is(derr, unix.ECONNREFUSED) {
		return nil, err // somebody answers
	}
	if err := os.Remove(addr); err != nil {
		return nil, fmt.Errorf("remove stale socket: %w", err)
	}
	return net.ListenUnix("unixpacket", ua)
}

// Addr implements driver.Listener.
func (l *Listener) Addr() string { return l.addr }

// CPUNanos implements driver.Listener: this process executes no verbs.
func (l *Listener) CPUNanos() int64 { return 0 }

func (l *Listener) accept() {
	for {
		nc, g, err := l.d.o.Door.Accept(l.ln, l.stop)
		if err != nil {
			return
		}
		c := nc.(*net.UnixConn)
		l.mu.Lock()
		if l.mu.closed {
			l.mu.Unlock()
			_ = c.Close()
			g.Release()
			return
		}
		l.mu.conns[c] = struct{}{}
		l.done.Go(func() {
			l.serve(c, g)
			_ = c.Close()
			l.mu.Lock()
			delete(l.mu.conns, c)
			l.mu.Unlock()
			g.Release()
		})
		l.mu.Unlock()
	}
}

// refuse tells a process why it is not let in, if it has said hello. A socket that is closed with something unread
// loses what was said to the other end.
func refuse(nc net.Conn) {
	c := nc.(*net.UnixConn)
	raw, err := c.SyscallConn()
	if err != nil {
		return
	}
	said := 0
	_ = raw.Read(func(fd uintptr) bool {
		said, _ = unix.Read(int(fd), make([]byte, maxFrame)) // which does not block: net has made it so
		return true
	})
	if said > 0 {
		_ = reply(c, 0, errors.New("too many connections")) // or it is gone
	}
}

// Close implements driver.Listener. ErrUnconfirmed names the peers that were
// still inside a verb after Options.ConfirmTimeout; their PDs stay in use.
func (l *Listener) Close() error {
	l.once.Do(func() {
		l.mu.Lock()
		l.mu.closed = true
		close(l.stop)
		_ = l.ln.Close() // removes the socket file
		for c := range l.mu.conns {
			_ = c.Close() // its goroutine bars the cell and confirms
		}
		l.mu.Unlock()
		t := time.AfterFunc(l.d.o.ConfirmTimeout, func() { close(l.giveUp) })
		l.done.Wait()
		t.Stop()
		l.d.mu.Lock()
		l.d.mu.listeners--
		l.d.mu.Unlock()
		if len(l.mu.stuck) > 0 {
			l.err = fmt.Errorf("close %s: %w: %s", l.addr, ErrUnconfirmed, strings.Join(l.mu.stuck, ", "))
		}
	})
	return l.err
}

// serve is the life of one connection.
func (l *Listener) serve(c *net.UnixConn, g *netsrv.Guest) {
	// The Door ends a handshake that takes too long.
	buf := make([]byte, maxFrame)
	n, err := c.Read(buf)
	if err != nil {
		return
	}
	private, err := decodeHello(buf[:n])
	if err != nil {
		_ = reply(c, 0, err)
		return
	}
	p, err := l.newPeer(c)
	if err != nil {
		_ = reply(c, 0, err)
		return
	}
	defer p.release()
	pd, access, err := l.o.Accept(driver.ConnRequest{Private: private, Remote: p.remote, Peer: p})
	if err == nil {
		err = p.join(pd, access)
	}
	if err == nil {
		err = p.keep()
	}
	if err != nil {
		_ = reply(c, 0, err)
		return
	}
	// In this order: a dialer that is welcome does not give way any more.
	if g.Finish() && reply(c, tableSlots*8, nil, p.mem.FD, l.d.tableFD()) == nil {
		p.answerAll()
	}
	p.bar()
	if !p.confirm(l.giveUp) {
		l.mu.Lock()
		l.mu.stuck = append(l.mu.stuck, p.remote)
		l.mu.Unlock()
		return
	}
	if l.o.Closed != nil {
		l.o.Closed(p)
	}
}

func (d *Device) tableFD() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mu.table.mem.FD
}

// peer is the passive end of a QP.
type peer struct {
	l      *Listener
	conn   *net.UnixConn
	remote string
	pidfd  int
	pd     *PD
	access driver.Access
	mem    *driver.Memory // the page of its cell
	// confirmed is closed once nothing of the peer can land any more.
	confirmed chan struct{}
	settled   bool // confirmed is closed; guarded by Device.mu

	mu struct { // after Device.mu
		sync.Mutex
		cell *cell // nil once unmapped
		// orphan: the connection's goroutine gave up; who confirms, frees.
		orphan bool
		item   string // the cell's name at Options.Cells
	}
}

// newPeer finds out who called and makes its control cell.
func (l *Listener) newPeer(c *net.UnixConn) (*peer, error) {
	p := &peer{l: l, conn: c, pidfd: -1, confirmed: make(chan struct{})}
	rc, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	cerr := rc.Control(func(fd uintptr) {
		if cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err != nil {
			return
		}
		// SO_PEERPIDFD (Linux 6.5) cannot meet another process with a
		// recycled pid.
		if p.pidfd, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PEERPIDFD); errors.Is(
			err, unix.ENOPROTOOPT) {
			p.pidfd, err = unix.PidfdOpen(int(cred.Pid), 0)
		}
	})
	if err = errors.Join(cerr, err); err != nil {
		return nil, fmt.Errorf("cannot watch the dialing process: %w", err)
	}
	p.remote = fmt.Sprintf("pid %d uid %d", cred.Pid, cred.Uid)
	// Not mem.Alloc, whose Free would clear the bar under the dialer.
	p.mem, err = mem.AllocControl(64, "kvd-cell", false)
	if err != nil {
		_ = unix.Close(p.pidfd)
		return nil, err
	}
	p.mu.cell = cellOf(p.mem.Bytes)
	return p, nil
}

// freeLocked gives back what newPeer took.
func (p *peer) freeLocked() {
	if p.mu.cell == nil {
		return
	}
	p.mu.cell = nil
	_ = unix.Close(p.pidfd)
	_ = p.mem.Free()
}

// release ends the connection's goroutine's part in the peer. A peer that could not be confirmed keeps its
// cell, and its place in the PD.
func (p *peer) release() {
	defer p.forget()
	p.l.d.mu.Lock()
	defer p.l.d.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pd == nil || p.settled {
		p.freeLocked()
	} else {
		p.mu.orphan = true
	}
}

// join makes the peer's QP one of pd's.
func (p *peer) join(pd driver.PD, a driver.Access) error {
	q, ok := pd.(*PD)
	d := p.l.d
	if !ok || q == nil || q.d != d {
		return fmt.Errorf("accepted into a PD: %w", ErrForeign)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if q.dealloc {
		return fmt.Errorf("accepted into a PD: %w", driver.ErrClosed)
	}
	if p.settled {
		return fmt.Errorf("%w: fenced while being accepted", driver.ErrRefused)
	}
	p.pd, p.access = q, a&remoteRights
	q.peers[p] = struct{}{}
	return nil
}

// Remote implements driver.Peer.
func (p *peer) Remote() string { return p.remote }

// Fence implements driver.Peer. It confirms when the peer's cell is barred and
// idle, or its process dead. A process stopped inside a verb (SIGSTOP, a
// debugger) is neither, until it is continued or killed.
func (p *peer) Fence(ctx context.Context) error {
	p.bar()
	_ = p.conn.Close() // the dialer's end notices
	if !p.confirm(ctx.Done()) {
		return fmt.Errorf("fence %s: %w: %w", p.remote, ErrUnconfirmed, ctx.Err())
	}
	return nil
}

func (p *peer) bar() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.cell != nil {
		p.mu.cell.bar()
	}
}

// inside tells whether the peer's process is inside a verb, and which.
func (p *peer) inside() (seq uint64, busy bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.cell == nil {
		return 0, false
	}
	seq, busy = p.mu.cell.inside()
	return seq, busy && !p.deadLocked()
}

// deadLocked tells whether all threads of the peer's process have ended.
func (p *peer) deadLocked() bool {
	return ended(p.pidfd)
}

// confirm waits until nothing of the barred peer can land any more, and tells
// whether that came before giveUp.
func (p *peer) confirm(giveUp <-chan struct{}) bool {
	var b backoff
	for !p.settleBarred() {
		select {
		case <-giveUp:
			return false
		default:
		}
		b.wait(giveUp, p.confirmed)
	}
	return true
}

// settleBarred records that a barred peer is outside for ever, if it is.
func (p *peer) settleBarred() bool {
	if _, busy := p.inside(); busy {
		return false
	}
	defer p.forget()
	p.l.d.mu.Lock()
	defer p.l.d.mu.Unlock()
	return p.settleLocked()
}

func (p *peer) settleLocked() bool {
	if _, busy := p.inside(); busy {
		return false
	}
	if p.settled {
		return true
	}
	p.settled = true
	close(p.confirmed)
	if p.pd != nil {
		delete(p.pd.peers, p)
	}
	if p.orphaned() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.freeLocked()
	}
	return true
}

func (p *peer) orphaned() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.orphan
}

// answerAll answers requests for MRs until the connection ends.
func (p *peer) answerAll() {
	buf := make([]byte, maxFrame)
	for {
		n, err := p.conn.Read(buf)
		if err != nil {
			return
		}
		req, err := decodeRequest(buf[:n])
		if err != nil {
			return
		}
		a := p.answer(req)
		_ = p.conn.SetWriteDeadline(time.Now().Add(p.l.d.o.RequestTimeout))
		err = a.send(p.conn)
		a.close()
		if err != nil {
			return
		}
	}
}

// answer decides what the peer may do with an rkey.
func (p *peer) answer(req request) answer {
	a := answer{id: req.id, fd: -1, status: driver.RemAccessErr}
	d := p.l.d
	d.mu.Lock()
	defer d.mu.Unlock()
	m := d.mu.rkeys[req.rkey]
	if m == nil || m.pd != p.pd || m.access&p.access == 0 {
		return a
	}
	a.access = m.access & p.access
	fd, err := m.exportFDLocked(a.access)
	if err != nil { // out of descriptors
		a.status = driver.RemOpErr
		return a
	}
	a.status, a.fd = driver.Success, fd
	a.slot, a.gen = m.slot, m.gen
	a.off, a.n, a.fileBytes = uint64(m.off), uint64(len(m.bytes)), uint64(len(m.mem.Bytes))
	return a
}

// Dial implements driver.Device.
func (d *Device) Dial(ctx context.Context, r driver.DialRequest) (driver.QP, error) {
	pd, ok1 := r.PD.(*PD)
	cq, ok2 := r.CQ.(*CQ)
	if !ok1 || !ok2 || pd.d != d || cq.d != d {
		return nil, fmt.Errorf("PD or CQ: %w", ErrForeign)
	}
	if len(r.Private) > driver.MaxPrivate {
		return nil, fmt.Errorf("private data is %d bytes, at most %d", len(r.Private), driver.MaxPrivate)
	}
	q := &QP{d: d, pd: pd, cq: cq, num: d.lastNum.Add(1), remote: make([]remoteMR, 16),
		answers: make(chan answer, 1), gone: make(chan struct{})}
	q.state.Store(uint32(driver.StateRTS))
	d.mu.Lock()
	if d.mu.closed || pd.dealloc || cq.closed {
		d.mu.Unlock()
		return nil, driver.ErrClosed
	}
	d.mu.qps++
	pd.qps++
	cq.qps++
	d.mu.Unlock()
	if err := q.connect(ctx, r); err != nil {
		d.mu.Lock()
		d.mu.qps--
		pd.qps--
		cq.qps--
		for _, m := range q.held {
			d.unmapLocked(m)
		}
		d.mu.Unlock()
		return nil, err
	}
	go q.read() // ended by Close
	return q, nil
}

// connect sends the hello and maps what the welcome brings.
func (q *QP) connect(ctx context.Context, r driver.DialRequest) (err error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "unixpacket", r.Addr)
	if err != nil {
		return err
	}
	q.conn = c.(*net.UnixConn)
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer func() {
		if !stop() && err == nil {
			err = ctx.Err()
		}
		if err != nil {
			_ = c.Close()
			if ctx.Err() != nil {
				err = ctx.Err()
			}
		}
	}()
	if _, err := c.Write(encodeHello(r.Private)); err != nil {
		return err
	}
	tableBytes, fds, err := readWelcome(q.conn)
	defer closeFDs(fds)
	if err != nil {
		return err
	}
	page, err := mem.Map(fds[0], int64(os.Getpagesize()), unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		return fmt.Errorf("map control cell: %w", err)
	}
	q.cell = cellOf(page)
	// Not in Close: its owner may be on the way into the cell then.
	runtime.AddCleanup(q, func(b []byte) { _ = mem.Unmap(b) }, page)
	table, err := q.hold(fds[1], uint64(tableBytes), false)
	if err != nil {
		return fmt.Errorf("map MR table: %w", err)
	}
	q.table = words(table.bytes)
	q.epoch = q.table[0]
	return nil
}

// The handshake: one packet of the socket a message, little-endian.
//
//	hello     dialer    magic u64, version u32, zero u32, private bytes (0..512)
//	welcome   passive   magic u64, version u32, outcome u32 (1 accepted, 2 refused),
//	                    table bytes u32, zero u32; accepted: descriptors of the
//	                    control cell and the MR table; refused: text (0..512 bytes)
//	request   dialer    id u32, zero u32, rkey u64
//	answer    passive   id u32, status u32 (driver.Status), access u32, slot u32,
//	                    gen u64, off u64, n u64, file bytes u64; SUCCESS: the
//	                    descriptor of the memfd, read-only if access is
const (
	magic       = 0x0a6d68736476_6b00 // "\0kvdshm\n"
	version     = 1
	helloSize   = 16
	welcomeSize = 24
	requestSize = 16
	answerSize  = 48
	maxText     = 512
	// maxFrame is longer than any message, so that one too long shows.
	maxFrame = 1024

	accepted = 1
	refused  = 2
)

func encodeHello(private []byte) []byte {
	b := make([]byte, helloSize, helloSize+len(private))
	binary.LittleEndian.PutUint64(b, magic)
	binary.LittleEndian.PutUint32(b[8:], version)
	return append(b, private...)
}

func decodeHello(b []byte) (private []byte, err error) {
	switch {
	case len(b) < helloSize || binary.LittleEndian.Uint64(b) != magic:
		return nil, fmt.Errorf("%w: no hello", ErrProtocol)
	case binary.LittleEndian.Uint32(b[8:]) != version:
		return nil, fmt.Errorf("%w: dialer %d, memory node %d: upgrade the older of the two", ErrVersion,
			binary.LittleEndian.Uint32(b[8:]), version)
	case binary.LittleEndian.Uint32(b[12:]) != 0:
		return nil, fmt.Errorf("%w: reserved bits in hello", ErrProtocol)
	case len(b) > helloSize+driver.MaxPrivate:
		return nil, fmt.Errorf("%w: private data longer than %d bytes", ErrProtocol, driver.MaxPrivate)
	}
	return b[helloSize:], nil
}

// reply sends a welcome; fds are of the cell and the table if err is nil.
func reply(c *net.UnixConn, tableBytes uint32, err error, fds ...int) error {
	b := make([]byte, welcomeSize)
	binary.LittleEndian.PutUint64(b, magic)
	binary.LittleEndian.PutUint32(b[8:], version)
	binary.LittleEndian.PutUint32(b[12:], accepted)
	binary.LittleEndian.PutUint32(b[16:], tableBytes)
	var oob []byte
	if err != nil {
		binary.LittleEndian.PutUint32(b[12:], refused)
		text := err.Error()
		b = append(b, text[:min(len(text), maxText)]...)
	} else {
		oob = unix.UnixRights(fds...)
	}
	_, _, werr := c.WriteMsgUnix(b, oob, nil)
	return werr
}

// readWelcome returns the two descriptors, which the caller closes also when
// there is an error.
func readWelcome(c *net.UnixConn) (tableBytes uint32, fds []int, err error) {
	buf := make([]byte, maxFrame)
	n, fds, err := readFrame(c, buf)
	if err != nil {
		return 0, fds, err
	}
	b := buf[:n]
	if n < welcomeSize || n > welcomeSize+maxText || binary.LittleEndian.Uint64(b) != magic {
		return 0, fds, fmt.Errorf("%w: no welcome", ErrProtocol)
	}
	if v := binary.LittleEndian.Uint32(b[8:]); v != version {
		return 0, fds, fmt.Errorf("%w: dialer %d, memory node %d: upgrade the older of the two", ErrVersion, version, v)
	}
	tableBytes = binary.LittleEndian.Uint32(b[16:])
	switch binary.LittleEndian.Uint32(b[12:]) {
	case refused:
		return 0, fds, fmt.Errorf("%w: %s", driver.ErrRefused, bytes.ToValidUTF8(b[welcomeSize:], []byte("?")))
	case accepted:
		if len(fds) != 2 || n != welcomeSize || tableBytes < 8 || tableBytes%8 != 0 ||
			binary.LittleEndian.Uint32(b[20:]) != 0 {
			return 0, fds, fmt.Errorf("%w: bad welcome", ErrProtocol)
		}
		return tableBytes, fds, nil
	}
	return 0, fds, fmt.Errorf("%w: unknown outcome in welcome", ErrProtocol)
}

// request asks what an rkey names.
type request struct {
	id   uint32
	rkey uint64
}

func (r request) encode() []byte {
	b := make([]byte, requestSize)
	binary.LittleEndian.PutUint32(b, r.id)
	binary.LittleEndian.PutUint64(b[8:], r.rkey)
	return b
}

func decodeRequest(b []byte) (request, error) {
	if len(b) != requestSize || binary.LittleEndian.Uint32(b[4:]) != 0 {
		return request{}, fmt.Errorf("%w: bad request", ErrProtocol)
	}
	return request{id: binary.LittleEndian.Uint32(b), rkey: binary.LittleEndian.Uint64(b[8:])}, nil
}

// answer says where the MR of an rkey lies.
type answer struct {
	id        uint32
	status    driver.Status
	access    driver.Access
	slot      uint32
	gen       uint64
	off       uint64 // of the MR in the memfd, bytes
	n         uint64 // of the MR, bytes
	fileBytes uint64
	fd        int // -1 unless status is Success; the holder of the answer closes it
}

func (a answer) close() {
	if a.fd >= 0 {
		_ = unix.Close(a.fd)
	}
}

func (a answer) send(c *net.UnixConn) error {
	b := make([]byte, answerSize)
	binary.LittleEndian.PutUint32(b, a.id)
	binary.LittleEndian.PutUint32(b[4:], uint32(a.status))
	binary.LittleEndian.PutUint32(b[8:], uint32(a.access))
	binary.LittleEndian.PutUint32(b[12:], a.slot)
	binary.LittleEndian.PutUint64(b[16:], a.gen)
	binary.LittleEndian.PutUint64(b[24:], a.off)
	binary.LittleEndian.PutUint64(b[32:], a.n)
	binary.LittleEndian.PutUint64(b[40:], a.fileBytes)
	var oob []byte
	if a.fd >= 0 {
		oob = unix.UnixRights(a.fd)
	}
	_, _, err := c.WriteMsgUnix(b, oob, nil)
	return err
}

// readAnswer checks everything about an answer that does not need the memfd.
// tableWords bounds the slot.
func readAnswer(c *net.UnixConn, tableWords int) (a answer, err error) {
	var buf [maxFrame]byte
	n, fds, err := readFrame(c, buf[:])
	if err != nil {
		closeFDs(fds)
		return answer{}, err
	}
	a, err = decodeAnswer(buf[:n], fds, tableWords)
	if err != nil {
		closeFDs(fds)
	}
	return a, err
}

func decodeAnswer(b []byte, fds []int, tableWords int) (answer, error) {
	bad := func(what string) (answer, error) {
		return answer{}, fmt.Errorf("%w: answer with bad %s", ErrProtocol, what)
	}
	if len(b) != answerSize {
		return bad("length")
	}
	status, rights := binary.LittleEndian.Uint32(b[4:]), binary.LittleEndian.Uint32(b[8:])
	a := answer{
		id:     binary.LittleEndian.Uint32(b),
		status: driver.Status(status),
		access: driver.Access(rights),
		slot:   binary.LittleEndian.Uint32(b[12:]),
		gen:    binary.LittleEndian.Uint64(b[16:]),
		off:    binary.LittleEndian.Uint64(b[24:]),
		n:      binary.LittleEndian.Uint64(b[32:]),
		fd:     -1,
	}
	a.fileBytes = binary.LittleEndian.Uint64(b[40:])
	switch status {
	case uint32(driver.RemAccessErr), uint32(driver.RemOpErr):
		if len(fds) != 0 {
			return bad("descriptors")
		}
		return a, nil
	case uint32(driver.Success):
	default:
		return bad("status")
	}
	switch {
	case rights == 0 || rights&^uint32(remoteRights) != 0:
		return bad("access")
	case a.slot == 0 || uint64(a.slot) >= uint64(tableWords):
		return bad("slot")
	case a.gen&1 == 0:
		return bad("generation")
	case a.n == 0 || a.off%8 != 0 || a.fileBytes > 1<<62 || a.off > a.fileBytes || a.n > a.fileBytes-a.off:
		return bad("bounds")
	case len(fds) != 1:
		return bad("descriptors")
	}
	a.fd = fds[0]
	return a, nil
}

// readFrame reads one packet with the descriptors that came along, which the
// caller closes. It refuses a packet that did not fit.
func readFrame(c *net.UnixConn, buf []byte) (n int, fds []int, err error) {
	oob := make([]byte, 64) // room for more descriptors than any message has
	n, oobn, flags, _, err := c.ReadMsgUnix(buf, oob)
	if err != nil {
		return 0, nil, err
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return 0, nil, fmt.Errorf("%w: control message", ErrProtocol)
	}
	for _, m := range msgs {
		if got, err := unix.ParseUnixRights(&m); err == nil {
			fds = append(fds, got...)
		}
	}
	if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		return 0, fds, fmt.Errorf("%w: message too long", ErrProtocol)
	}
	return n, fds, nil
}

func closeFDs(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

func writable(a driver.Access) bool {
	return a&(driver.AccessRemoteWrite|driver.AccessRemoteAtomic) != 0
}
