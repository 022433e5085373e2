package gateway

import (
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

// output is what a connection has still to send. Replies go to the socket at once if
// it takes them; what it does not take a goroutine sends, so that a client may write
// a long pipeline before it reads. A client that has too much to read waits, and one
// that reads nothing for the write timeout is disconnected.
type output struct {
	nc      net.Conn
	raw     syscall.RawConn // nil: only the goroutine writes
	fd      int             // instead of both, in a loop; else -1
	waits   func()          // in a loop: makes the connection an ordinary one
	write   func(fd uintptr) bool
	timeout time.Duration
	limit   int // bytes queued before the connection waits
	// queued is the gateway's sum; while it is over its bound every connection's limit
	// is smallOutput.
	queued      *atomic.Int64
	queuedBound int64
	written     *atomic.Uint64

	// write's argument and answers; the connection's goroutine's.
	p    []byte
	n    int
	werr error

	mu struct {
		sync.Mutex
		queue    []byte
		draining bool
		err      error
	}
	room sync.Cond // signalled when the queue was taken, or err set
}

const smallOutput = 64 << 10

func (o *output) init() {
	o.fd = -1
	o.room.L = &o.mu
	o.write = func(fd uintptr) bool {
		o.n, o.werr = syscall.Write(int(fd), o.p)
		return true // never waits
	}
}

// over says where to send to. Nothing may be queued.
func (o *output) over(nc net.Conn) {
	o.nc, o.raw = nc, nil
	switch nc.(type) {
	case *net.TCPConn, *net.UnixConn:
		if raw, err := nc.(syscall.Conn).SyscallConn(); err == nil {
			o.raw = raw
		}
	}
}

// idle reports whether all has been sent.
func (o *output) idle() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return !o.mu.draining && o.mu.err == nil
}

// send sends or queues p, which it does not keep. It waits while too much is queued.
func (o *output) send(p []byte) error {
	if len(p) == 0 {
		return nil
	}
	if o.fd >= 0 { // nothing is queued
		n, _, errno := syscall.RawSyscall(syscall.SYS_WRITE, uintptr(o.fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)))
		if errno != 0 {
			n = 0 // if it is more than a full socket, what follows meets it too
		}
		o.written.Add(uint64(n))
		if p = p[n:]; len(p) == 0 {
			return nil
		}
		o.waits()
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for o.mu.err == nil && o.mu.draining && len(o.mu.queue) > 0 && len(o.mu.queue)+len(p) > o.bound() {
		o.room.Wait()
	}
	if o.mu.err != nil {
		return o.mu.err
	}
	if !o.mu.draining && o.raw != nil {
		o.p, o.n, o.werr = p, 0, nil
		err := o.raw.Write(o.write)
		o.p = nil
		if err == nil && o.werr != nil && !errors.Is(o.werr, syscall.EAGAIN) && !errors.Is(o.werr, syscall.EINTR) {
			err = o.werr
		}
		if err != nil {
			o.mu.err = err
			return err
		}
		o.n = max(o.n, 0)
		o.written.Add(uint64(o.n))
		if p = p[o.n:]; len(p) == 0 {
			return nil
		}
	}
	o.mu.queue = append(o.mu.queue, p...)
	o.queued.Add(int64(len(p)))
	if !o.mu.draining {
		o.mu.draining = true
		go o.drain()
	}
	return nil
}

func (o *output) bound() int {
	if o.queued.Load() > o.queuedBound {
		return smallOutput
	}
	return o.limit
}

// drain sends the queue and ends. It reports the first error to send and closes
// the connection then.
func (o *output) drain() {
	var b []byte
	o.mu.Lock()
	for {
		b, o.mu.queue = o.mu.queue, b[:0]
		if cap(o.mu.queue) > smallOutput {
			o.mu.queue = nil
		}
		if len(b) == 0 || o.mu.err != nil {
			o.mu.draining = false
			o.mu.queue = nil
			o.room.Broadcast()
			o.mu.Unlock()
			return
		}
		o.room.Broadcast()
		o.mu.Unlock()
		var err error
		for p := b; len(p) > 0 && err == nil; {
			// In parts: the deadline is for some progress, not for all of it.
			part := p[:min(len(p), smallOutput)]
			o.nc.SetWriteDeadline(time.Now().Add(o.timeout))
			if _, err = o.nc.Write(part); err == nil {
				o.written.Add(uint64(len(part)))
			}
			p = p[len(part):]
		}
		o.queued.Add(-int64(len(b)))
		if err != nil {
			o.nc.Close()
		}
		o.mu.Lock()
		if err != nil {
			o.queued.Add(-int64(len(o.mu.queue)))
			o.mu.queue = nil
			o.mu.err = err
		}
	}
}

// finish waits until everything is sent or sending fails.
func (o *output) finish() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for o.mu.draining {
		o.room.Wait()
	}
}
