package broker

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ring"
)

// conn is a program's connection: hello, serving, draining, gone. The goroutine of serve has its socket, and takes all
// down at the end, last the memory. Each queue has goroutines of its own.
type conn struct {
	t      *tenant
	nc     *net.UnixConn
	ctx    context.Context // of its operations
	cancel context.CancelCauseFunc
	ended  atomic.Bool    // no queue takes anything more
	wg     sync.WaitGroup // whoever may touch what it shares with the program
	pidfd  sync.WaitGroup // who watches the program
	late   bool           // the socket's programs are enough without it
	// leaving was to be deregistered when the connection ended. Operations were under way there.
	leaving *memory

	// Set by the hello.
	client    *client.Client
	hello     ring.Hello
	peer      unix.Ucred
	foreign   bool // of another user: what it PUTs is copied before it is looked at
	since     time.Time
	described atomic.Bool // all these are set

	ops   atomic.Uint64
	arena atomic.Int64 // bytes of shared memory
	views views

	mu struct {
		sync.Mutex
		queues   []*queue
		memories map[uint32]*memory
		last     uint32 // number of a memory
		scans    scans
		streams  streams
	}
}

// refusal is an answer to a request, which did not happen.
type refusal struct {
	code ring.Code
	err  error
}

func (r *refusal) Error() string { return r.err.Error() }
func (r *refusal) Unwrap() error { return r.err }

func refused(code ring.Code, format string, args ...any) error {
	return &refusal{code, fmt.Errorf(format, args...)}
}

// maxMemories is how many memories a program may register.
const maxMemories = 256

// end has the connection drain; serve does the rest. A program that lives, and broke nothing, hears how what is under
// way ends. The socket stays: its end tells the program that nobody writes to its memory any more.
func (c *conn) end(cause error) {
	first := !c.ended.Swap(true)
	if !errors.Is(cause, errClosing) && !errors.Is(cause, errBye) {
		c.cancel(cause)
	} else if first {
		time.AfterFunc(grace, func() { c.cancel(errClosing) })
	}
	_ = c.nc.SetReadDeadline(time.Unix(1, 0))
}

var errBye = errors.New("the program said good-bye")

// grace is how long operations under way may take when the broker stops, or the program says good-bye.
const grace = 2 * time.Second

func (c *conn) describe() (Client, bool) {
	if !c.described.Load() {
		return Client{}, false
	}
	views := c.viewing() // which may wait until the program takes a message
	c.mu.Lock()
	defer c.mu.Unlock()
	return Client{c.t.Name, c.hello.Name, c.hello.Namespace, c.peer.Pid, c.peer.Uid, c.arena.Load(), len(c.mu.queues),
		views, c.ops.Load(), c.since}, true
}

// serve is the connection from hello to gone.
func (c *conn) serve() {
	log := c.t.b.log.With("socket", c.t.Name)
	err := c.converse()
	if !c.ended.Load() {
		c.end(err)
	}
	if cause := context.Cause(c.ctx); cause != nil && !errors.Is(err, io.EOF) {
		err = cause
	}
	if errors.Is(err, ring.ErrProtocol) {
		c.t.stats.Broken.Add(1)
		log.Warn("a program broke the protocol, and was disconnected", "pid", c.peer.Pid, "uid", c.peer.Uid,
			"program", c.hello.Name, "err", err)
	} else {
		log.Debug("a program is gone", "pid", c.peer.Pid, "program", c.hello.Name, "err", err)
	}
	c.takeDown()
	_ = c.nc.Close()
	c.t.remove(c)
}

// takeDown waits until nothing touches the program's memory, and gives all of it up.
func (c *conn) takeDown() {
	c.endViews()
	c.stopStreams()
	done := make(chan struct{})
	go func() {
		c.wg.Wait()
		close(done)
	}()
	// A program that is alive may have a queue's goroutine wait once more after it was called, so it is called again.
	for called := false; ; called = true {
		for _, q := range c.mu.queues {
			q.call()
		}
		wait := time.Millisecond
		if called {
			wait = 20 * time.Millisecond
		}
		select {
		case <-done:
		case <-time.After(wait):
			continue
		}
		break
	}
	c.cancel(errClosing)
	c.pidfd.Wait()
	for _, q := range c.mu.queues {
		q.close()
	}
	c.t.stats.Queues.Add(-int64(len(c.mu.queues)))
	for _, m := range c.mu.memories {
		c.release(m)
	}
	if c.leaving != nil {
		c.release(c.leaving)
	}
}

// release unmaps memory that nobody uses any more.
func (c *conn) release(m *memory) {
	n := int64(len(m.mem))
	if err := m.unmap(); err != nil {
		c.t.b.log.Error("shared memory of a program stays mapped", "err", err)
		return
	}
	c.arena.Add(-n)
	_ = c.t.takeArena(-n)
}

// converse speaks with the program until its end. io.EOF is the usual one.
func (c *conn) converse() (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r)
			c.t.b.log.Error("the broker's own fault ended a connection", "err", err, "stack", string(debug.Stack()))
		}
	}()
	if err := c.until(time.Now().Add(c.t.Limits.HelloTime)); err != nil {
		return err
	}
	h, body, files, err := c.receive()
	if err != nil {
		return c.refuse(h, err)
	}
	err = c.greet(h, body, files)
	closeAll(files)
	if err != nil {
		c.t.stats.Refused.Add(1)
		return c.refuse(h, err)
	}
	if err := c.until(time.Time{}); err != nil {
		return err
	}
	for {
		h, body, files, err := c.receive()
		if err != nil {
			return c.refuse(h, err)
		}
		err = c.request(h, body, files)
		closeAll(files)
		var no *refusal
		switch {
		case errors.As(err, &no):
			err = c.send((&ring.Refused{Outcome: ring.No, Code: no.code, Text: no.Error()}).Message(h.Serial), nil)
		case errors.Is(err, ring.ErrProtocol):
			return c.refuse(h, err)
		}
		if err != nil {
			return err
		}
	}
}

// until bounds reading. If end was before, it stays the end.
func (c *conn) until(t time.Time) error {
	err := c.nc.SetReadDeadline(t)
	if c.ended.Load() {
		err = errors.Join(err, c.nc.SetReadDeadline(time.Unix(1, 0)))
	}
	return err
}

// refuse tells why the connection ends, unless it has ended, and returns that.
func (c *conn) refuse(h ring.Head, err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, errBye) || c.ended.Load() {
		return err
	}
	x := ring.Refused{Outcome: ring.No, Code: ring.Internal, Text: err.Error()}
	var no *refusal
	switch {
	case errors.As(err, &no):
		x.Code = no.code
	case errors.Is(err, ring.ErrProtocol):
		x.Code = ring.Protocol
	case errors.Is(err, os.ErrDeadlineExceeded):
		x.Code, x.Text = ring.Timeout, fmt.Sprintf("there was no hello within %v", c.t.Limits.HelloTime)
	}
	_ = c.send(x.Message(h.Serial), nil)
	return err
}

// receive reads a message with its files, which are the caller's to close.
func (c *conn) receive() (h ring.Head, body []byte, files []int, err error) {
	b := make([]byte, ring.MaxMessage+1)
	oob := make([]byte, unix.CmsgSpace(4*(ring.MaxFiles+1)))
	n, oobn, flags, _, err := c.nc.ReadMsgUnix(b, oob)
	if err != nil {
		return h, nil, nil, err
	}
	files, ferr := filesOf(oob[:oobn])
	defer func() {
		if err != nil {
			closeAll(files)
			files = nil
		}
	}()
	switch {
	case n == 0 && len(files) == 0:
		return h, nil, files, io.EOF
	case ferr != nil:
		return h, nil, files, ferr
	case flags&(unix.MSG_CTRUNC|unix.MSG_TRUNC) != 0 || len(files) > ring.MaxFiles:
		return h, nil, files, fmt.Errorf("%w: a message is too long, or has too many descriptors",
			ring.ErrProtocol)
	}
	h, body, err = ring.ParseHead(b[:n])
	return h, body, files, err
}

// filesOf are the descriptors that came.
func filesOf(oob []byte) (files []int, err error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("%w: control messages: %w", ring.ErrProtocol, err)
	}
	for i := range msgs {
		if fds, err := unix.ParseUnixRights(&msgs[i]); err == nil {
			files = append(files, fds...)
		}
	}
	return files, nil
}

func closeAll(files []int) {
	for _, fd := range files {
		_ = unix.Close(fd)
	}
}

// send sends a message. A program that does not read is disconnected.
func (c *conn) send(b []byte, files []int) error {
	if err := c.nc.SetWriteDeadline(time.Now().Add(c.t.Limits.HelloTime)); err != nil {
		return err
	}
	var oob []byte
	if len(files) > 0 {
		oob = unix.UnixRights(files...)
	}
	_, _, err := c.nc.WriteMsgUnix(b, oob, nil)
	return err
}

// want says that a message must have a number of files.
func want(files []int, n int) error {
	if len(files) != n {
		return fmt.Errorf("%w: a message with %d descriptors, want %d", ring.ErrProtocol, len(files), n)
	}
	return nil
}

// greet answers the first message.
func (c *conn) greet(h ring.Head, body []byte, files []int) error {
	if h.Kind != ring.KindHello {
		return fmt.Errorf("%w: the first message is of kind %d", ring.ErrProtocol, h.Kind)
	}
	hello, err := ring.ParseHello(body)
	if err != nil {
		return err
	}
	n := 1
	if hello.ArenaBytes > 0 {
		n = 2
	}
	if err := want(files, n); err != nil {
		return err
	}
	if c.late {
		return refused(ring.Busy, "%d programs are connected, which is this socket's limit", c.t.Limits.Clients)
	}
	if err := c.admit(&hello); err != nil {
		return err
	}
	if err := c.watch(files[0]); err != nil {
		return err
	}
	w := ring.Welcome{Depth: min(max(hello.Depth, ring.MinDepth), c.t.Limits.Depth), MaxKey: ring.MaxKey,
		MaxValue: uint64(c.client.MaxValueLen()), ArenaBytes: uint64(c.t.Limits.ArenaBytes),
		ViewBytes: uint64(c.t.Limits.ViewBytes), Name: "kvd broker, " + c.t.Name}
	if hello.Depth == 0 {
		w.Depth = min(ring.DefaultDepth, c.t.Limits.Depth)
	}
	w.Operations = w.Depth * ring.MaxQueues
	c.hello, c.since = hello, time.Now()
	c.hello.Depth = w.Depth
	if hello.ArenaBytes > 0 {
		if w.Arena, err = c.register(files[1], 0, hello.ArenaBytes); err != nil {
			return err
		}
	}
	q, err := c.addQueue()
	if err != nil {
		return err
	}
	c.described.Store(true)
	return c.send(w.Message(h.Serial), append([]int{c.t.b.self}, q.files()...))
}

// admit says whether the program may be served, and in which namespace.
func (c *conn) admit(hello *ring.Hello) error {
	raw, err := c.nc.SyscallConn()
	if err != nil {
		return err
	}
	var peer *unix.Ucred
	if cerr := raw.Control(func(fd uintptr) {
		peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); cerr != nil || err != nil {
		return errors.Join(cerr, err)
	}
	c.peer = *peer
	c.foreign = int(peer.Uid) != os.Geteuid()
	s := &c.t.Socket
	if !slices.Contains(s.UIDs, peer.Uid) {
		return refused(ring.Denied, "user %d may not use this socket", peer.Uid)
	}
	if subtle.ConstantTimeCompare([]byte(hello.Secret), []byte(s.Secret)) != 1 {
		return refused(ring.Denied, "the secret is another, or there is none")
	}
	if hello.Namespace == "" {
		hello.Namespace = s.Default
	}
	cl, ok := s.Namespaces[hello.Namespace]
	if !ok {
		return refused(ring.Denied, "namespace %q is not for this socket", hello.Namespace)
	}
	c.client = cl
	return nil
}

// watch ends the connection when the program of a pidfd is dead. A child that it forked may hold the socket open.
func (c *conn) watch(fd int) error {
	if err := unix.PidfdSendSignal(fd, 0, nil, 0); err != nil && err != unix.EPERM {
		return refused(ring.Argument, "the hello's first descriptor is no pidfd of a living process: %w", err)
	}
	mine, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("duplicate a pidfd: %w", err)
	}
	if err := unix.SetNonblock(mine, true); err != nil {
		return errors.Join(err, unix.Close(mine))
	}
	f := os.NewFile(uintptr(mine), "pidfd")
	raw, err := f.SyscallConn()
	if err != nil {
		return errors.Join(err, f.Close())
	}
	stop := context.AfterFunc(c.ctx, func() { _ = f.Close() })
	c.pidfd.Go(func() {
		defer stop()
		defer f.Close()
		err := raw.Read(func(fd uintptr) bool {
			p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, err := unix.Poll(p, 0)
			return n > 0 || err != nil && err != unix.EINTR
		})
		if err == nil {
			c.end(errDead)
		}
	})
	return nil
}

var errDead = fmt.Errorf("the program is dead: %w", syscall.ESRCH)

// request performs what the program asks for by its socket.
func (c *conn) request(h ring.Head, body []byte, files []int) error {
	n := 0
	if h.Kind == ring.KindRegister {
		n = 1
	}
	if err := want(files, n); err != nil {
		return err
	}
	switch h.Kind {
	case ring.KindQueue:
		if err := ring.ParseBare(body); err != nil {
			return err
		}
		q, err := c.addQueue()
		if err != nil {
			return err
		}
		return c.send(ring.Numbered(ring.Head{Kind: ring.KindQueued, Serial: h.Serial}, q.number), q.files())
	case ring.KindRegister:
		m, err := ring.ParseRegister(body)
		if err != nil {
			return err
		}
		number, err := c.register(files[0], m.Offset, m.Length)
		if err != nil {
			return err
		}
		return c.send(ring.Numbered(ring.Head{Kind: ring.KindDone, Serial: h.Serial}, number), nil)
	case ring.KindDeregister:
		number, err := ring.ParseNumbered(body)
		if err != nil {
			return err
		}
		c.mu.Lock()
		m := c.mu.memories[number]
		delete(c.mu.memories, number)
		c.mu.Unlock()
		if m == nil {
			return refused(ring.Argument, "there is no memory %d", number)
		}
		if !m.unused(c.ctx.Done()) {
			c.leaving = m
			return context.Cause(c.ctx)
		}
		c.release(m)
		return c.send(ring.Numbered(ring.Head{Kind: ring.KindDone, Serial: h.Serial}, number), nil)
	case ring.KindBye:
		if err := ring.ParseBare(body); err != nil {
			return err
		}
		return errBye
	}
	return fmt.Errorf("%w: a message of kind %d", ring.ErrProtocol, h.Kind)
}

// register maps memory of the program's, and returns its number.
func (c *conn) register(fd int, off, n uint64) (number uint32, err error) {
	if len(c.mu.memories) >= maxMemories { // this goroutine alone adds some
		return 0, refused(ring.Busy, "a program has %d memories at most", maxMemories)
	}
	if n > uint64(c.t.Limits.ArenaBytes) {
		return 0, refused(ring.Busy, "%d bytes of shared memory: this socket allows %d", n, c.t.Limits.ArenaBytes)
	}
	m, err := mapMemory(fd, off, n)
	if err != nil {
		return 0, &refusal{ring.Argument, err}
	}
	mapped := int64(len(m.mem))
	if err := c.t.takeArena(mapped); err != nil {
		return 0, errors.Join(&refusal{ring.Busy, err}, m.unmap())
	}
	c.arena.Add(mapped)
	// Without adapters this does nothing. With them it saves copies, and where it cannot be had they are made.
	if m.arena, err = c.client.Register(m.mem); err != nil {
		c.t.b.log.Debug("a program's memory is not registered with adapters", "err", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.memories == nil {
		c.mu.memories = map[uint32]*memory{}
	}
	for number = c.mu.last + 1; number == 0 || c.mu.memories[number] != nil; number++ {
	}
	c.mu.last = number
	c.mu.memories[number] = m
	return number, nil
}

// within finds memory for an operation under way, whose caller drops it. nil: there are no such bytes.
func (c *conn) within(number uint32, off, n uint64) (m *memory, b []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m = c.mu.memories[number]
	if m == nil {
		return nil, nil
	}
	if b = m.at(off, n); b == nil {
		return nil, nil
	}
	m.use()
	return m, b
}

// addQueue makes a queue and has it served.
func (c *conn) addQueue() (*queue, error) {
	if len(c.mu.queues) >= ring.MaxQueues { // this goroutine alone adds some
		return nil, refused(ring.Busy, "a connection has %d queues at most", ring.MaxQueues)
	}
	q, err := newQueue(c, uint32(len(c.mu.queues)))
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	c.mu.queues = append(c.mu.queues, q)
	c.mu.Unlock()
	c.t.stats.Queues.Add(1)
	q.serve()
	return q, nil
}
