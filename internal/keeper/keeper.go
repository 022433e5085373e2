// Package keeper lets what a process is made of outlive it. A parent process, the keeper, holds descriptors of memory
// and sockets for a child, the worker. It starts another worker when one dies.
//
// The keeper maps nothing and knows nothing of what it holds, so there is little in it that could fail. Which
// descriptors there are, and what another worker does with them, is the worker's.
//
// Start with [Run], the keeper, and [Client], the worker's end; wire.go draws what they say. A Client's methods may be
// called concurrently. Descriptors are duplicated on their way: both sides close their own.
//
// The idea is systemd's file descriptor store (sd_pid_notify_with_fds(3)). Where there is one, a keeper puts its
// descriptors there too ([Systemd]), and they outlive the keeper. Where processes share a folder in memory, as
// containers may, [Folder] does without a keeper.
package keeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// socketEnv tells a worker the descriptor of its keeper's socket; outlivesEnv, that what is held outlives the keeper.
const (
	socketEnv   = "KVD_KEEPER_SOCKET"
	outlivesEnv = "KVD_KEEPER_STORE"
)

// ErrInterrupted is the cause of a context that ended since this process is to stop for good. SIGINT asks for that;
// SIGTERM does not, since it comes before another start, too.
var ErrInterrupted = errors.New("interrupted")

// Options configure a keeper.
type Options struct {
	// Path and Args are the worker's program and its arguments without the name. Required.
	Path string
	Args []string
	// Env is added to this process's environment.
	Env []string
	// Vital begins the names of items for which a worker is tried whatever the one before it died of. While none is
	// held, and no worker has said that it is up, the keeper ends as its worker did, unless that was killed. Required.
	Vital string
	// Store, if not nil, holds what the keeper holds beyond it. Run closes it.
	Store *Systemd
	// Control is where a socket is made by which an operator of this machine chooses the program of the next worker;
	// see [Choose]. Empty: there is none.
	Control string
	// UpTimeout is how long a program that was chosen may take until it says that it is up. Default 15 s.
	UpTimeout time.Duration
	// Logger is told of workers that die. Required.
	Logger *slog.Logger
	// Trouble, if not nil, is told why there is no worker, before each pause. There is a pause when none can be
	// started, or when the second in a row ended soon. It must not block.
	Trouble func(string)
}

// troubleFile names the memfd in which a keeper has what Trouble was told, until a worker lives for a second: those who
// may look at its descriptors, as kvctl doctor does, can read it.
const troubleFile = "kvd-trouble"

// A worker that lives for less than soon is followed by the next after a pause, which doubles from minPause to
// maxPause.
const (
	soon               = time.Second
	minPause, maxPause = 50 * time.Millisecond, 10 * time.Second
)

// Again is the exit status of a worker that wants another one to take over at once, whatever is held.
const Again = 75

// Run keeps a worker running until one ends by itself with status 0, or ctx ends. A worker that ends by itself before
// there was anything to keep or any was up is the last one, too. When ctx ends, the worker is asked to end with
// SIGTERM, or SIGINT if the cause is ErrInterrupted. SIGHUP and SIGQUIT are passed on. It gives the last worker's exit
// status as a shell would. A worker dies with the keeper, and the next one starts when the kernel has taken the one
// before apart.
//
// Run closes all that it holds before it returns. If ctx ended for another cause than ErrInterrupted, the Store holds
// on, for the next keeper. That one waits until the worker of this one has ended, should it be there still.
func Run(ctx context.Context, o Options) (status int, err error) {
	// Pdeathsig is of the thread that starts the worker, so that has to live as long as this process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	passed := make(chan os.Signal, 4)
	signal.Notify(passed, syscall.SIGHUP, syscall.SIGQUIT)
	defer signal.Stop(passed)
	held := &store{out: o.Store}
	defer func() { held.closeAll(ctx.Err() != nil && !interrupted(ctx)) }()
	if err := held.takeOver(ctx, o); err != nil {
		return 1, err
	}
	programs, err := openPrograms(o)
	if err != nil {
		return 1, err
	}
	defer programs.close()
	said := trouble{tell: o.Trouble}
	defer said.over()
	for pause, deaths := time.Duration(0), 0; ; {
		began := time.Now()
		l, w, err := start(o, held, programs)
		why := ""
		if err != nil {
			if programs.hasFailed(l, err.Error()) {
				continue
			}
			why = fmt.Sprintf("its keeper cannot start a worker: %v", err)
			// The program may be gone for a moment: somebody replaces it.
			if !held.hasAny(o.Vital) && !programs.wasUp() {
				return 1, err
			}
			o.Logger.Error("cannot start the worker; trying again", "err", err)
		} else {
			well := time.AfterFunc(soon, said.over)
			stop := programs.expire(l, w.cmd.Process.Kill)
			state := w.wait(ctx, passed)
			stop()
			well.Stop()
			status = exitStatus(state)
			if ctx.Err() == nil && programs.hasFailed(l, state.String()) {
				pause = 0
				continue
			}
			if ctx.Err() == nil && status == Again {
				o.Logger.Info("the worker asks for another one", "pid", state.Pid(), "lived",
					time.Since(began).Round(time.Millisecond))
				pause = 0
				continue
			}
			if status == 0 || ctx.Err() != nil || !wasKilled(state) && !held.hasAny(o.Vital) && !programs.wasUp() {
				return status, nil
			}
			o.Logger.Error("the worker died; another one takes over what it had", "pid", state.Pid(), "how",
				state.String(), "lived", time.Since(began).Round(time.Millisecond))
			if deaths++; time.Since(began) >= soon {
				deaths = 0
			}
			if deaths > 1 {
				why = fmt.Sprintf("its workers die soon after their start: %d now, the last with %v after %v", deaths,
					state, time.Since(began).Round(time.Millisecond))
			}
		}
		if pause = nextPause(pause, time.Since(began)); pause > 0 {
			o.Logger.Warn("workers die soon after their start: waiting before the next", "pause", pause)
		}
		if pause > 0 && why != "" {
			what := "holds the memory, and starts"
			if !held.hasAny(o.Vital) {
				what = "starts"
			}
			said.say(fmt.Sprintf("%s; its keeper %s the next after %v", why, what, pause))
		}
		select {
		case <-ctx.Done():
			return status, nil
		case <-time.After(pause):
		}
	}
}

// maxTrouble is how many bytes of a trouble the directory takes.
const maxTrouble = 256

// Trouble makes of a text what the directory takes as the trouble of a memory node: of some length, and without what
// cannot be printed.
func Trouble(text string) string {
	text = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) || r == utf8.RuneError {
			return '?'
		}
		return r
	}, text)
	for len(text) > maxTrouble {
		_, n := utf8.DecodeLastRuneInString(text)
		text = text[:len(text)-n]
	}
	return text
}

// trouble says why there is no worker. It may be used concurrently.
type trouble struct {
	tell func(string)
	mu   sync.Mutex
	fd   int // of troubleFile; 0: there is none
}

func (t *trouble) say(text string) {
	t.over()
	if fd, err := unix.MemfdCreate(troubleFile, unix.MFD_CLOEXEC); err == nil { // the log has it in any case
		_, _ = unix.Write(fd, []byte(text))
		t.mu.Lock()
		t.fd = fd
		t.mu.Unlock()
	}
	if t.tell != nil {
		t.tell(text)
	}
}

// over says that there is a worker.
func (t *trouble) over() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.fd > 0 {
		_ = unix.Close(t.fd)
	}
	t.fd = 0
}

// nextPause is how long the next worker waits, after a pause before the one that lived so long.
func nextPause(pause, lived time.Duration) time.Duration {
	if lived >= soon {
		return 0
	}
	return min(max(2*pause, minPause), maxPause)
}

func interrupted(ctx context.Context) bool { return errors.Is(context.Cause(ctx), ErrInterrupted) }

// takeOver begins with what an earlier keeper had in the Store, once its worker has ended.
func (s *store) takeOver(ctx context.Context, o Options) error {
	if s.out == nil {
		return nil
	}
	s.items = make(map[string]*Item)
	for _, i := range s.out.take(o.Vital) {
		s.items[i.Name] = i
		s.order = append(s.order, i.Name)
	}
	w := s.items[workerItem]
	if w == nil {
		return nil
	}
	for said := false; ; said = true {
		fds := []unix.PollFd{{Fd: int32(w.FDs[0]), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, int(soon.Milliseconds()))
		switch {
		case err != nil && err != unix.EINTR:
			return fmt.Errorf("worker of an earlier keeper: %w", err)
		case n == 1 && fds[0].Revents&unix.POLLNVAL == 0:
			return s.change(&message{op: opDrop, name: workerItem}, nil)
		case ctx.Err() != nil:
			return ctx.Err()
		case !said:
			o.Logger.Error("the worker of an earlier keeper has not ended: waiting for it")
		}
	}
}

func exitStatus(s *os.ProcessState) int {
	if w, ok := s.Sys().(syscall.WaitStatus); ok && w.Signaled() {
		return 128 + int(w.Signal())
	}
	return s.ExitCode()
}

func wasKilled(s *os.ProcessState) bool {
	w, ok := s.Sys().(syscall.WaitStatus)
	return ok && w.Signaled()
}

// worker is one life of the child.
type worker struct {
	cmd    *exec.Cmd
	served chan struct{} // closed when all that it said has been heard
	ended  chan struct{} // closed when it has been reaped
}

// start begins a life of the program that is next; it is known after an error, too.
func start(o Options, held *store, p *programs) (*life, *worker, error) {
	l, err := p.next()
	started := false
	defer func() {
		if !started {
			l.close()
		}
	}()
	if err != nil {
		return l, nil, err
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return l, nil, fmt.Errorf("socket for the worker: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "worker")
	defer theirs.Close()
	conn, err := connOf(fds[0])
	if err != nil {
		return l, nil, err
	}
	w := &worker{cmd: l.command(o.Args), served: make(chan struct{}), ended: make(chan struct{})}
	w.cmd.Env = append(slices.Concat(os.Environ(), o.Env), socketEnv+"=3")
	if o.Store != nil {
		w.cmd.Env = append(w.cmd.Env, outlivesEnv+"=1")
	}
	w.cmd.Stdin, w.cmd.Stdout, w.cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	w.cmd.ExtraFiles = []*os.File{theirs}
	// In a group of its own it gets a terminal's ^C once, from here.
	w.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := w.cmd.Start(); err != nil {
		_ = conn.Close()
		return l, nil, fmt.Errorf("start %s: %w", l.path, err)
	}
	started = true
	// Before it is answered the worker has nothing, and before it is waited for its pid is its own.
	noted, err := held.noteWorker(w.cmd.Process.Pid)
	if err != nil {
		o.Logger.Error("cannot note who the worker is", "err", err)
	}
	go func() {
		defer close(w.served)
		defer conn.Close()
		held.serve(conn, func(version string) { p.isUp(l, version) })
	}()
	go func() {
		_ = w.cmd.Wait() // ProcessState says how
		l.close()        // no sooner: the interpreter of a script opens it by its name in /proc
		if noted {
			_ = held.change(&message{op: opDrop, name: workerItem}, nil) // unless the worker did that
		}
		close(w.ended)
	}()
	return l, w, nil
}

// noteWorker has the Store hold a pidfd of the worker.
func (s *store) noteWorker(pid int) (bool, error) {
	if s.out == nil {
		return false, nil
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err == nil {
		err = s.change(&message{op: opPut, name: workerItem}, []int{fd})
	}
	return err == nil, err
}

// wait returns when the worker has been reaped and all that it said was heard.
func (w *worker) wait(ctx context.Context, passed <-chan os.Signal) *os.ProcessState {
	stop := ctx.Done()
	for {
		select {
		case <-stop:
			sig := syscall.SIGTERM
			if interrupted(ctx) {
				sig = syscall.SIGINT
			}
			_ = w.cmd.Process.Signal(sig) // or it has just ended
			stop = nil
		case s := <-passed:
			_ = w.cmd.Process.Signal(s) // likewise
		case <-w.ended:
			<-w.served
			return w.cmd.ProcessState
		}
	}
}

// connOf takes over fd.
func connOf(fd int) (*net.UnixConn, error) {
	f := os.NewFile(uintptr(fd), "keeper")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("keeper's socket: %w", err)
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		_ = c.Close()
		return nil, errors.New("keeper's socket is not of the Unix domain")
	}
	return u, nil
}

// IsWorker tells whether this process is one, until it calls Connect.
func IsWorker() bool { return os.Getenv(socketEnv) != "" }

// Connect is for a process that may be a worker: nil if it is none. It is called once.
func Connect() (*Client, error) {
	text := os.Getenv(socketEnv)
	if text == "" {
		return nil, nil
	}
	outlives := os.Getenv(outlivesEnv) != ""
	// A child of the worker is none. They fail for bad names alone.
	_, _ = os.Unsetenv(socketEnv), os.Unsetenv(outlivesEnv)
	fd, err := strconv.Atoi(text)
	if err != nil || fd < 3 {
		return nil, fmt.Errorf("%s is %q: want the number of a descriptor above 2", socketEnv, text)
	}
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil || kind != unix.SOCK_SEQPACKET {
		return nil, fmt.Errorf("%s is %d, which is no socket of a keeper", socketEnv, fd)
	}
	c, err := connOf(fd)
	if err != nil {
		return nil, err
	}
	return &Client{conn: c, outlives: outlives}, nil
}
