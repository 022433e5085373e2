package alarm

import (
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// timerFD is a waker that the runtime's poller sees as a descriptor which can be read. Nobody
// reads it: setting it anew takes back that it can.
type timerFD struct {
	fd    int
	file  *os.File
	ended bool // guarded by the queue's lock
}

func newWaker(q *queue) waker {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return newGoTimer(q)
	}
	t := &timerFD{fd: fd, file: os.NewFile(uintptr(fd), "timerfd")}
	go t.wait(q)
	return t
}

// wait has the queue look whenever the time is over, until close.
func (t *timerFD) wait(q *queue) {
	defer t.file.Close() // not by others, who would wait for the goroutine that reads
	conn, err := t.file.SyscallConn()
	if err == nil {
		err = conn.Read(func(uintptr) (ended bool) {
			q.due()
			q.mu.Lock()
			defer q.mu.Unlock()
			return t.ended
		})
	}
	if err == nil {
		return
	}
	q.mu.Lock() // it cannot be polled
	defer q.mu.Unlock()
	if q.mu.waker == t {
		q.mu.waker, q.mu.armed = newGoTimer(q), -1
		q.armLocked(q.now())
	}
}

func (t *timerFD) close() {
	t.ended = true
	t.set(0)
}

func (t *timerFD) set(d time.Duration) {
	var spec unix.ItimerSpec // zero: never
	if d >= 0 {
		spec.Value = unix.NsecToTimespec(max(int64(d), 1))
	}
	// It never waits, so the processor need not be given up for the call, which would wake the runtime's monitor.
	_, _, errno := syscall.RawSyscall6(unix.SYS_TIMERFD_SETTIME, uintptr(t.fd), 0, uintptr(unsafe.Pointer(&spec)), 0, 0,
		0)
	if errno != 0 {
		panic("bug: timerfd_settime: " + errno.Error()) // of a descriptor and a time that are ours
	}
}
