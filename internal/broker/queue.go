package broker

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/ring"
)

// queue serves a ring. A goroutine takes submissions, and performs all that it has found at once together. If that
// takes long another one takes what comes meanwhile.
type queue struct {
	c      *conn
	number uint32
	ring   shared
	submit *os.File // eventfd that wakes the broker
	comple *os.File // eventfd that wakes the program

	mu      sync.Mutex // over server, in all but Idle and Awake
	server  *ring.Server
	running map[uint32]context.CancelFunc // by tag: operations that are alone
}

const (
	// spin is how long a taker looks for more before it sleeps, if the program is on another processor.
	spin = 50 * time.Microsecond
	// handOver is how long a group may take before others take what comes.
	handOver = time.Millisecond
	// maxTakers bounds the groups of a queue under way.
	maxTakers = 32
)

func newQueue(c *conn, number uint32) (q *queue, err error) {
	q = &queue{c: c, number: number, running: map[uint32]context.CancelFunc{}}
	l := ring.LayoutOf(c.hello.Depth)
	if q.ring, err = newRing(l); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			q.ring.close()
		}
	}()
	if q.submit, err = eventFile("submissions"); err != nil {
		return nil, err
	}
	if q.comple, err = eventFile("completions"); err != nil {
		return nil, errors.Join(err, q.submit.Close())
	}
	q.server = ring.NewServer(q.ring.mem, l)
	return q, nil
}

func eventFile(name string) (*os.File, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// files are what the program gets. They stay the queue's.
func (q *queue) files() []int {
	return []int{q.ring.fd, descriptor(q.submit), descriptor(q.comple)}
}

// descriptor is f's, which stays as it is; Fd would make it a blocking one.
func descriptor(f *os.File) (fd int) {
	raw, err := f.SyscallConn()
	if err != nil {
		return -1
	}
	_ = raw.Control(func(n uintptr) { fd = int(n) })
	return fd
}

// close gives up what the queue has. None of its goroutines runs.
func (q *queue) close() {
	_ = q.submit.Close()
	_ = q.comple.Close()
	q.ring.close()
}

// call wakes the queue's goroutines, whatever the program has made of the eventfds.
func (q *queue) call() {
	for _, f := range []*os.File{q.submit, q.comple} {
		raw, err := f.SyscallConn()
		if err != nil {
			continue
		}
		_ = raw.Control(func(fd uintptr) {
			_ = unix.SetNonblock(int(fd), true)
			var b [8]byte
			_, _ = unix.Read(int(fd), b[:]) // whoever waits to write goes on
			binary.NativeEndian.PutUint64(b[:], 1)
			_, _ = unix.Write(int(fd), b[:])
		})
	}
}

// wakeClient wakes a program that sleeps.
func (q *queue) wakeClient() {
	raw, err := q.comple.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		b := [8]byte{}
		binary.NativeEndian.PutUint64(b[:], 1)
		_, _ = unix.Write(int(fd), b[:]) // if it is full the program is awake
	})
}

// taker is who takes submissions at the moment, and the groups under way.
type taker struct {
	q     *queue
	baton chan struct{} // whoever has it takes
	most  chan struct{} // one of each for each goroutine
}

// serve begins to take.
func (q *queue) serve() {
	t := &taker{q, make(chan struct{}, 1), make(chan struct{}, maxTakers)}
	t.baton <- struct{}{}
	t.start()
}

// start has another goroutine take. It does nothing if there are enough.
func (t *taker) start() {
	select {
	case t.most <- struct{}{}:
	default:
		return
	}
	t.q.c.wg.Go(func() {
		defer func() { <-t.most }()
		if r := recoverFrom(func() { t.run() }); r != nil {
			t.q.c.t.b.log.Error("the broker's own fault ended a connection", "err", r)
			t.q.c.end(r)
		}
	})
}

// recoverFrom calls f, and makes a panic an error.
func recoverFrom(f func()) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	f()
	return nil
}

// run takes groups and performs them for as long as it has the baton.
func (t *taker) run() {
	q := t.q
	g := newGroup(q)
	late := time.AfterFunc(time.Hour, func() { // a group takes long
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.working && !g.handed {
			g.handed = true
			g.cancellable()
			t.baton <- struct{}{}
			t.start()
		}
	})
	defer late.Stop()
	if !t.takes() {
		return
	}
	for !q.c.ended.Load() {
		subs, err := q.take(g.subs[:0])
		if err != nil {
			q.c.end(err)
			return
		}
		if g.subs = subs; len(subs) == 0 {
			q.wait()
			continue
		}
		g.begin()
		late.Reset(handOver)
		g.perform()
		late.Stop()
		if g.end() && !t.takes() {
			return
		}
	}
}

// takes reports whether it is the caller who takes from now on. A goroutine that was not started, since there are
// enough, has left the baton to whoever ends first.
func (t *taker) takes() bool {
	select {
	case <-t.baton:
		return true
	default:
		return false
	}
}

// take takes what is queued.
func (q *queue) take(to []ring.Submission) ([]ring.Submission, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.server.Take(to)
}

// wait returns when something may be queued, or the connection has ended.
func (q *queue) wait() {
	at := processor()
	q.server.At(at)
	if q.server.Beside(at) {
		for end := time.Now().Add(spin); time.Now().Before(end); {
			for range 20 {
				if q.server.Queued() || q.c.ended.Load() {
					return
				}
			}
		}
	}
	if !q.server.Idle() {
		return
	}
	if !q.c.ended.Load() {
		q.sleep()
	}
	q.server.Awake()
}

// sleep waits for the eventfd: in a thread of its own, which is woken sooner, or with Go's poller.
func (q *queue) sleep() {
	var b [8]byte
	if !q.c.t.b.threads.takeThread() {
		_, _ = q.submit.Read(b[:])
		return
	}
	defer q.c.t.b.threads.leaveThread()
	raw, err := q.submit.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		if n, _ := unix.Poll(p, -1); n > 0 {
			_, _ = unix.Read(int(fd), b[:])
		}
	})
}

// processor is where the caller runs.
func processor() int {
	var cpu, node uint32
	_, _, errno := unix.RawSyscall(unix.SYS_GETCPU, uintptr(ptr(&cpu)), uintptr(ptr(&node)), 0)
	if errno != 0 {
		return 0
	}
	return int(cpu)
}
