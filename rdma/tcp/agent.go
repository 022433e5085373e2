package tcp

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/rdma/driver"
)

const (
	// agentIn is the size of an agent's input buffer, bytes.
	agentIn = 64 << 10
	// agentOut is how much an agent gathers before it writes, bytes. The buffer
	// starts small and grows to this.
	agentOut = 128 << 10
	// fenceGrace is how long a fenced agent may take to hand in the replies of
	// what it has executed.
	fenceGrace = 100 * time.Millisecond
)

// agent executes one connection's verbs against the memory of this process: it
// reads what has arrived, executes the WRs in order, and writes the replies when
// it runs out of input or its output buffer is full.
//
// An agent has a goroutine, which serves it from the first byte to the last. While
// the peer says little at a time, that goroutine waits and a [loop] serves the
// agent together with others. Its goroutine or loop holds exec while it touches regions or the fields below
// exec; the goroutine releases exec around every read
// and write, and the loop between two of them. Hence Deregister, after taking a
// key out of the table, need only pass through every exec once.
type agent struct {
	l      *listener
	remote string
	nc     stream
	conn   net.Conn // nc, or TLS over it
	guest  *netsrv.Guest

	exec     sync.Mutex
	pd       *pd
	access   driver.Access
	*buffers       // nil in a loop, if they would be empty
	frame    frame // what is left to execute of it; count 0: nothing
	seq      uint16
	hit      bool  // the latest CMP_AND_SWP took effect
	ahead    ahead // of function regions
	werr     error
	order    atomic.Uint32 // see barrier
	keys     *keyTable     // the PD's, since exec was taken; nil until it is needed
	last     struct {      // of keys, what was looked up last; mr nil: nothing
		rkey uint64
		mr   *mr
	}

	// When to go to a loop: once the last quiet frames, calm of them, were such as a
	// loop executes. stayed is how often a loop has read since the agent is there.
	quiet, calm, stayed int
	back                chan error // ends enter; see leave

	// link says where the agent is, to those who fence it.
	link struct {
		sync.Mutex
		loop  *loop // nil: its goroutine serves it
		paced *pd   // for a turn of which its goroutine waits, until the read deadline; or nil
		call  *call // for which its goroutine waits likewise; or nil
	}

	fenced   atomic.Bool
	accepted bool
	done     chan struct{} // closed when nothing of the connection can land
}

var _ driver.Peer = (*agent)(nil)

func (a *agent) Remote() string { return a.remote }

// Fence makes the agent stop after what it has read, and waits for that.
func (a *agent) Fence(ctx context.Context) error {
	a.fence()
	select {
	case <-a.done:
		return nil
	case <-ctx.Done():
		select {
		case <-a.done:
			return nil
		default:
			return fmt.Errorf("tcp: fence %s: %w", a.remote, ctx.Err())
		}
	}
}

func (a *agent) fence() {
	if a.fenced.Swap(true) {
		return
	}
	a.link.Lock()
	defer a.link.Unlock()
	if l := a.link.loop; l != nil {
		l.recall(a)
		return
	}
	a.applyFence()
}

// applyFence ends waiting for input at once, and for the peer to take replies
// soon.
func (a *agent) applyFence() {
	_ = a.nc.SetReadDeadline(time.Unix(1, 0))
	_ = a.nc.SetWriteDeadline(time.Now().Add(fenceGrace))
}

// resume takes exec. Regions that were looked up before may be gone.
func (a *agent) resume() {
	a.exec.Lock()
	a.keys, a.last.mr = nil, nil
}

// quiesce waits until the agent has let go of the regions it had looked up.
func (a *agent) quiesce() {
	a.exec.Lock()
	defer a.exec.Unlock()
}

// serve is the agent's goroutine.
func (a *agent) serve() {
	d := a.l.d
	a.exec.Lock()
	err := a.handshake()
	if err == nil {
		err = a.run()
	} else if e := a.guest.Err(); e != nil {
		err = e
	}
	d.mu.Lock()
	if a.accepted {
		a.pd.qps--
	}
	d.mu.Unlock()
	close(a.done)
	a.part(err)
	a.releaseBuffers()
	a.exec.Unlock()
	_ = a.nc.Close()
	a.guest.Release()

	d.mu.Lock()
	delete(d.mu.agents, a)
	d.mu.Unlock()
	if a.accepted && a.l.o.Closed != nil {
		a.l.o.Closed(a)
	}
	if f := d.o.Events.PeerClosed; f != nil {
		f(a.reason(err))
	}
	a.l.wg.Done()
}

var (
	errVerb    = errors.New("verb refused")
	errRevoked = errors.New("region deregistered during a READ")
	errFenced  = errors.New("fenced while over the limit of verbs a second")

	errFencedInCall = errors.New("fenced during a READ of a function region")
)

// part hands in the replies of what was executed and takes leave: with the
// refusal that is already there, or with a goodbye. Input left unread would turn
// the close into a reset, which may overtake them, so it is thrown away until
// the dialer closes.
func (a *agent) part(err error) {
	limit := a.l.d.o.PeerTimeout
	if a.fenced.Load() {
		limit = fenceGrace
	}
	_ = a.nc.SetDeadline(time.Now().Add(limit))
	switch {
	case errors.Is(err, errMalformed):
		return
	case errors.Is(err, errVerb), errors.Is(err, driver.ErrRefused), errors.Is(err, errBadVersion):
	case a.accepted && !errors.Is(err, errRevoked):
		a.out = appendGoodbye(a.out, a.seq)
	default:
		return
	}
	if a.flush() != nil || a.nc.CloseWrite() != nil {
		return
	}
	for {
		if _, err := a.nc.Read(a.in); err != nil {
			return
		}
	}
}

func (a *agent) reason(err error) PeerClosed {
	e := PeerClosed{Remote: a.remote, Reason: ReasonLost, Err: err}
	switch {
	case a.fenced.Load():
		e.Reason, e.Err = ReasonFenced, nil
	case errors.Is(err, driver.ErrRefused):
		e.Reason = ReasonRefused
	case !a.accepted:
		e.Reason = ReasonHandshake
	case errors.Is(err, errMalformed):
		e.Reason = ReasonMalformed
	case errors.Is(err, errVerb), errors.Is(err, errRevoked):
		e.Reason = ReasonVerb
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		e.Reason, e.Err = ReasonDeparted, nil
	}
	return e
}

// handshake brings the connection from its first byte to the first doorbell. The Door ends it if it takes too
// long.
func (a *agent) handshake() error {
	if c, ok := a.conn.(*tls.Conn); ok {
		a.exec.Unlock()
		err := c.Handshake()
		a.exec.Lock()
		if err != nil {
			return err
		}
	}
	h, err := a.need(helloSize)
	if err != nil {
		return fmt.Errorf("hello: %w", err)
	}
	n, err := parseHello(h)
	if err != nil {
		if errors.Is(err, errBadVersion) {
			a.out = appendWelcome(a.out, statusRefused, err.Error())
		}
		return err
	}
	private, err := a.need(n)
	if err != nil {
		return fmt.Errorf("hello: %w", err)
	}
	if err := a.accept(private); err != nil {
		a.out = appendWelcome(a.out, statusRefused, err.Error())
		return fmt.Errorf("%w: %w", driver.ErrRefused, err)
	}
	if !a.guest.Finish() {
		return a.guest.Err()
	}
	a.out = appendWelcome(a.out, statusAccepted, "")
	return nil
}

// accept asks the listener's user and joins the PD named.
func (a *agent) accept(private []byte) error {
	q := driver.ConnRequest{Private: private, Remote: a.remote, Peer: a}
	if c, ok := a.conn.(*tls.Conn); ok {
		s := c.ConnectionState()
		q.TLS = &s
	}
	a.exec.Unlock()
	dpd, access, err := a.l.o.Accept(q)
	a.exec.Lock()
	if err != nil {
		return err
	}
	d := a.l.d
	d.mu.Lock()
	defer d.mu.Unlock()
	p, ok := dpd.(*pd)
	if ok {
		_, ok = d.mu.pds[p]
	}
	if !ok {
		return errors.New("the memory node named a PD that is not of this device")
	}
	p.qps++
	a.pd, a.access, a.accepted = p, access, true
	return nil
}

// run executes doorbells until the connection ends. Its error is never nil.
func (a *agent) run() error {
	for {
		switch {
		case a.frame.count > 0: // a loop began it
		case a.r == a.w && a.quiet >= a.calm:
			if err := a.enterLoop(); err != nil {
				return err
			}
			continue
		default:
			h, err := a.need(frameSize)
			if err != nil {
				return err
			}
			if a.frame, err = parseFrame(h); err != nil {
				return err
			}
		}
		a.quiet++
		if _, fits := a.survey(agentOut); !fits {
			a.quiet = 0
		}
		for a.frame.count > 0 {
			n, err := a.pace(a.frame.count)
			if err == nil {
				err = a.perform(n)
			}
			if err != nil {
				return err
			}
		}
	}
}

// perform executes the next n requests of the frame.
func (a *agent) perform(n int) error {
	f := &a.frame
	for i := range n {
		h, err := a.need(requestSize)
		if err != nil {
			return err
		}
		r, err := parseRequest(h)
		if err != nil {
			return err
		}
		if f.length -= requestSize + r.operands(); f.length < 0 {
			return fmt.Errorf("%w: requests exceed their frame", errMalformed)
		}
		status, err := a.execute(r, n-i-1)
		if err != nil {
			return err
		}
		if status != driver.Success {
			a.out = appendReply(a.out, reply{op: r.op, status: status, seq: a.seq})
			return fmt.Errorf("%w: %v of %d bytes at %#x: %v", errVerb, r.op, r.length, r.addr, status)
		}
		a.seq++
		f.count--
	}
	if f.count == 0 && f.length != 0 {
		return fmt.Errorf("%w: %d bytes behind the frame's requests", errMalformed, f.length)
	}
	return nil
}

const (
	// touchLines is how many cache lines are touched in a row: more than a processor
	// fetches at a time.
	touchLines = 64
	// touchEach is how many of one request are touched; the processor foresees the
	// others of a long one by itself.
	touchEach = 4
	lineSize  = 64
)

// survey looks at the requests of the frame that are buffered, before the first
// executes: n of them can be executed without waiting for anything, if there is
// room for so many bytes of replies. Of those it touches the memory that they name,
// so that the misses of a frame overlap instead of following each other. A request
// that will be refused is among them, as the last. fits is false if the one behind
// them cannot be executed without waiting, however much of it is buffered.
func (a *agent) survey(room int) (n int, fits bool) {
	var lines [touchLines]*uint64
	k := 0
	defer func() { touch(lines[:k]) }()
	left := a.frame.length
	for b := a.in[a.r:a.w]; n < a.frame.count && len(b) >= requestSize; n++ {
		r, err := parseRequest(b)
		size := requestSize + r.operands()
		if err != nil || size > left {
			return n + 1, true
		}
		m, status := a.check(r)
		if status != driver.Success {
			return n + 1, true
		}
		if m.fn != nil {
			return n, false
		}
		room -= replySize
		switch {
		case r.op == driver.OpRead:
			room -= r.length
		case r.op.IsAtomic():
			room -= 8
			if m.proxy.Load() != nil {
				return n, false
			}
		}
		if room < 0 || size > agentIn {
			return n, false
		}
		if size > len(b) {
			return n, true
		}
		b, left = b[size:], left-size
		at, end := r.addr&^7, min(r.addr+uint64(r.length), uint64(len(m.bytes)&^7))
		for range touchEach {
			if at >= end {
				break
			}
			if k == len(lines) {
				touch(lines[:])
				k = 0
			}
			lines[k] = m.word(at)
			k++
			at = (at + lineSize) &^ (lineSize - 1)
		}
	}
	return n, true
}

// touch loads words, nothing between two loads.
func touch(words []*uint64) {
	for _, p := range words {
		atomic.LoadUint64(p)
	}
}

// execute does one verb and appends the reply of a success. behind is how many requests behind it may execute.
func (a *agent) execute(r request, behind int) (driver.Status, error) {
	m, status := a.check(r)
	if status != driver.Success {
		return status, nil
	}
	if m.fn != nil {
		return a.readFunc(m, r, behind)
	}
	ok := reply{op: r.op, status: driver.Success, seq: a.seq}
	switch r.op {
	case driver.OpRead:
		ok.length = r.length
		a.out = appendReply(a.out, ok)
		if r.length >= readDirectFrom && a.isDirect() {
			return driver.Success, a.readDirect(m, r)
		}
		return driver.Success, a.read(m, r)
	case driver.OpWrite:
		status, err := a.write(m, r)
		if err == nil && status == driver.Success {
			a.out = appendReply(a.out, ok)
		}
		return status, err
	}
	operands, err := a.need(r.operands())
	if err != nil {
		return 0, err
	}
	if m.dead.Load() { // waiting for the operands let go of exec
		return driver.RemAccessErr, nil
	}
	var compare uint64
	swap := word(operands)
	if r.op == driver.OpCmpAndSwp {
		compare, swap = swap, word(operands[8:])
	}
	found := ^compare
	if !r.ifHit || a.hit {
		if found, status = m.atomic(r.op, r.addr, compare, swap); status != driver.Success {
			return status, nil
		}
	}
	if r.op == driver.OpCmpAndSwp {
		a.hit = found == compare
	}
	ok.length = 8
	a.out = appendWord(appendReply(a.out, ok), found)
	return driver.Success, nil
}

// rights that each verb takes.
var rights = [driver.NumOpcodes]driver.Access{
	driver.OpRead:      driver.AccessRemoteRead,
	driver.OpWrite:     driver.AccessRemoteWrite,
	driver.OpCmpAndSwp: driver.AccessRemoteAtomic,
	driver.OpFetchAdd:  driver.AccessRemoteAtomic,
}

// lookup finds the region of a key; nil if there is none. While exec is held it
// gives the same answer each time: a region that is deregistered meanwhile stays
// until exec is released. Doorbells name the same key again and again.
func (a *agent) lookup(rkey uint64) *mr {
	if a.last.mr != nil && a.last.rkey == rkey {
		return a.last.mr
	}
	if a.keys == nil {
		a.keys = a.pd.keys.Load()
	}
	a.last.rkey, a.last.mr = rkey, a.keys.byRKey[rkey]
	return a.last.mr
}

// check finds the region and decides whether r may touch it.
func (a *agent) check(r request) (*mr, driver.Status) {
	if r.op >= driver.NumOpcodes { // opAbort
		return nil, driver.RemInvReqErr
	}
	m := a.lookup(r.rkey)
	need := rights[r.op]
	if m == nil || m.access&need == 0 || a.access&need == 0 ||
		r.addr > m.size() || uint64(r.length) > m.size()-r.addr {
		return nil, driver.RemAccessErr
	}
	if r.op.IsAtomic() && r.addr%8 != 0 {
		return nil, driver.RemInvReqErr
	}
	return m, driver.Success
}

// read copies region memory to the output, in parts if it is long.
func (a *agent) read(m *mr, r request) error {
	for at, end := r.addr, r.addr+uint64(r.length); at < end; {
		n := min(int(end-at), agentOut-len(a.out))
		if n < int(end-at) {
			n -= int((at + uint64(n)) & 7) // no word in two halves
		}
		if n <= 0 {
			if err := a.flush(); err != nil {
				return err
			}
			if m.dead.Load() {
				return errRevoked
			}
			continue
		}
		b := len(a.out)
		a.out = grow(a.out, n)
		loadWords(a.out[b:], m.bytes[at:at+uint64(n)])
		at += uint64(n)
	}
	return nil
}

// grow appends n bytes of any content.
func grow(b []byte, n int) []byte {
	if n <= cap(b)-len(b) {
		return b[:len(b)+n]
	}
	return append(b, make([]byte, n)...)
}

// write copies input to region memory as it arrives. It gives REM_OP_ERR, whose
// effect is unknown, if the region is deregistered on the way.
func (a *agent) write(m *mr, r request) (driver.Status, error) {
	direct := r.length >= writeDirectFrom && a.isDirect()
	for at, end := r.addr, r.addr+uint64(r.length); at < end; {
		if direct && a.r == a.w {
			n, err := a.writeDirect(m, m.bytes[at:min(end, at+directMost)])
			if err != nil {
				return 0, err
			}
			if m.dead.Load() {
				return driver.RemOpErr, nil
			}
			at += uint64(n)
			continue
		}
		if err := a.awaitFor(int(min(end-at, 8)), at); err != nil {
			return 0, err
		}
		if m.dead.Load() { // await may have let go of exec
			return driver.RemOpErr, nil
		}
		n := min(int(end-at), a.w-a.r)
		if n < int(end-at) {
			n -= int((at + uint64(n)) & 7) // no word in two halves; n was at least 8
		}
		storeWords(m.bytes[at:at+uint64(n)], a.in[a.r:a.r+n])
		a.r += n
		at += uint64(n)
	}
	a.barrier()
	return driver.Success, nil
}

// barrier orders this agent's plain stores before whatever it does next: a
// locked instruction on amd64, an acquire-release one on arm64.
func (a *agent) barrier() { a.order.Add(1) }

// need returns the next n bytes of input, n at most half of agentIn, and
// consumes them. They stay valid until the next call.
func (a *agent) need(n int) ([]byte, error) {
	if err := a.await(n); err != nil {
		return nil, err
	}
	a.r += n
	return a.in[a.r-n : a.r], nil
}

// await returns when n bytes of input are buffered.
func (a *agent) await(n int) error { return a.awaitFor(n, 0) }

// awaitFor is await for input that goes to addr of a region: whatever it has to read lies to the words of
// the input buffer as to those of the region, for storeWords.
func (a *agent) awaitFor(n int, addr uint64) error {
	for skew := int(addr & 7); a.w-a.r < n; {
		if len(a.out) > 0 {
			if err := a.flush(); err != nil {
				return err
			}
		}
		if a.r != skew {
			a.w = skew + copy(a.in[skew:], a.in[a.r:a.w])
			a.r = skew
		}
		a.exec.Unlock()
		k, err := a.conn.Read(a.in[a.w:])
		a.resume()
		a.w += k
		if k == 0 && err != nil {
			return err
		}
	}
	return nil
}

func (a *agent) flush() error {
	if a.werr != nil {
		return a.werr
	}
	a.exec.Unlock()
	_, err := a.conn.Write(a.out)
	a.resume()
	a.out, a.werr = a.out[:0], err
	return err
}

// meteredConn is a TCP connection that adds the time its one goroutine spends
// running, rather than waiting for the socket, to a counter. While an agent is in
// a loop it is detached: a descriptor that only the loop uses.
type meteredConn struct {
	socket
	fd      int // while detached; else -1
	local   net.Addr
	remote  net.Addr
	raw     syscall.RawConn
	cpu     *atomic.Int64
	since   time.Duration // when it began to run; 0 while it waits
	buf     []byte
	n       int
	err     error
	tryRead func(fd uintptr) bool
	tryWrit func(fd uintptr) bool
}

// socket is a [net.TCPConn], or the [os.File] of one that was detached.
type socket interface {
	syscall.Conn
	Close() error
	SetDeadline(time.Time) error
	SetReadDeadline(time.Time) error
	SetWriteDeadline(time.Time) error
}

var epoch = time.Now()

// now is a monotonic clock.
func now() time.Duration { return time.Since(epoch) }

func newMeteredConn(s socket, local, remote net.Addr, cpu *atomic.Int64) (*meteredConn, error) {
	raw, err := s.SyscallConn()
	if err != nil {
		return nil, err
	}
	m := &meteredConn{socket: s, fd: -1, local: local, remote: remote, raw: raw, cpu: cpu, since: now()}
	// Made once: a closure made per call would be an allocation per call.
	m.tryRead = func(fd uintptr) bool { return m.try(fd, syscall.Read) }
	m.tryWrit = func(fd uintptr) bool { return m.try(fd, syscall.Write) }
	return m, nil
}

func (m *meteredConn) LocalAddr() net.Addr  { return m.local }
func (m *meteredConn) RemoteAddr() net.Addr { return m.remote }

// CloseWrite sends a FIN behind what was written.
func (m *meteredConn) CloseWrite() error {
	var err error
	cerr := m.raw.Control(func(fd uintptr) { err = unix.Shutdown(int(fd), unix.SHUT_WR) })
	return errors.Join(cerr, os.NewSyscallError("shutdown", err))
}

// detach takes the connection out of the runtime's poller, which would wake a
// thread for whatever arrives. If it fails, nothing has changed.
func (m *meteredConn) detach() (fd int, err error) {
	cerr := m.raw.Control(func(f uintptr) { fd, err = unix.FcntlInt(f, unix.F_DUPFD_CLOEXEC, 0) })
	if cerr != nil || err != nil {
		return -1, errors.Join(cerr, os.NewSyscallError("fcntl", err))
	}
	if m.since != 0 {
		m.pause()
	}
	_ = m.socket.Close() // fd stays
	m.socket, m.raw, m.fd = nil, nil, fd
	return fd, nil
}

// attach undoes detach. It needs no further descriptor.
func (m *meteredConn) attach() {
	f := os.NewFile(uintptr(m.fd), "tcp") // non-blocking, so the runtime polls it
	m.socket, m.fd = f, -1
	m.raw, _ = f.SyscallConn() // fails for a nil file alone
}

// readNow reads what is there, of a detached connection: io.EOF at its end, EAGAIN
// if it is nothing.
func (m *meteredConn) readNow(p []byte) (int, error) {
	for {
		switch n, err := syscall.Read(m.fd, p); {
		case err == syscall.EINTR:
		case err == nil && n == 0:
			return 0, io.EOF
		default:
			return max(n, 0), err
		}
	}
}

// writeNow writes what there is room for, to a detached connection.
func (m *meteredConn) writeNow(p []byte) (int, error) {
	for {
		if n, err := syscall.Write(m.fd, p); err != syscall.EINTR {
			return max(n, 0), err
		}
	}
}

// try makes one attempt; false sends the goroutine to wait for the socket.
func (m *meteredConn) try(fd uintptr, call func(int, []byte) (int, error)) bool {
	if m.since == 0 {
		m.since = now()
	}
	for {
		m.n, m.err = call(int(fd), m.buf)
		if m.err != syscall.EINTR {
			break
		}
	}
	m.n = max(m.n, 0)
	if m.err == syscall.EAGAIN {
		m.pause()
		return false
	}
	return true
}

// book counts the time since the goroutine began to run, or was last booked.
func (m *meteredConn) book() {
	t := now()
	m.cpu.Add(int64(t - m.since))
	m.since = t
}

func (m *meteredConn) pause() {
	m.book()
	m.since = 0
}

// awaitEnd waits until the peer closes the connection, which is io.EOF, or it breaks; nil: the read deadline was
// there first. It reads nothing.
func (m *meteredConn) awaitEnd() error {
	if m.since != 0 {
		m.pause()
	}
	err := m.raw.Read(hungUp)
	m.since = now()
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil
	case err != nil:
		return err
	}
	broken := 0
	err = m.raw.Control(func(fd uintptr) { broken, _ = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR) })
	switch {
	case err != nil:
		return err
	case broken != 0:
		return os.NewSyscallError("poll", syscall.Errno(broken))
	}
	return io.EOF
}

func (m *meteredConn) Read(p []byte) (int, error) {
	m.buf, m.n, m.err = p, 0, nil
	err := m.raw.Read(m.tryRead)
	m.buf = nil
	switch {
	case err != nil:
		return 0, err
	case m.err != nil:
		return 0, os.NewSyscallError("read", m.err)
	case m.n == 0 && len(p) > 0:
		return 0, io.EOF
	}
	return m.n, nil
}

func (m *meteredConn) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		m.buf, m.n, m.err = p[done:], 0, nil
		err := m.raw.Write(m.tryWrit)
		m.buf = nil
		done += m.n
		if err != nil {
			return done, err
		}
		if m.err != nil {
			return done, os.NewSyscallError("write", m.err)
		}
	}
	m.book() // a busy agent may not wait for long
	return done, nil
}

func (m *meteredConn) Close() error {
	if m.since != 0 {
		m.pause()
	}
	return m.socket.Close()
}
