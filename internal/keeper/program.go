package keeper

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"
	"unicode"

	"golang.org/x/sys/unix"
)

// A keeper's control socket lets an operator of the machine choose the program of the next worker. Each connection is
// one choice, lines of JSON: a choice from the caller, then whether it is taken, and when another worker has come up,
// what became of it. The choice is the connection's: it is forgotten with that, unless a worker has begun with it.
//
// A program on trial has to say in time that it is up. If it does not, the next worker is of the program before it.

type choice struct {
	Program string `json:"program"` // absolute path
}

type verdict struct {
	Error   string `json:"error,omitempty"`   // the program was not taken, or did not come up
	Version string `json:"version,omitempty"` // of the worker that is up; empty in the first answer
}

const (
	maxChoice = 8 << 10
	maxPath   = 4 << 10
	// askTimeout bounds how long a caller takes to say its choice, and to take an answer.
	askTimeout = 5 * time.Second
	// choiceTimeout bounds the life of a choice: to the end of the present worker, and until the next is up.
	choiceTimeout = 2 * time.Minute
	// maxAskers bounds connections.
	maxAskers = 8
)

const defaultUpTimeout = 15 * time.Second

// ErrNotUp means that a program was tried and did not come up; a worker of the one before it serves.
var ErrNotUp = errors.New("the program did not come up, and a process of the one before it serves")

// programs knows which program the next worker is of.
type programs struct {
	o  Options
	ln *net.UnixListener // nil: nobody chooses
	wg sync.WaitGroup

	mu struct {
		sync.Mutex
		path   string // of the last program that came up, or the first
		asked  *trial // for the next worker
		failed *trial // by the worker before this one
		up     bool   // some worker was
		conns  map[*net.UnixConn]bool
		closed bool
	}
}

// trial is a choice.
type trial struct {
	path   string
	why    string       // it failed
	result chan verdict // capacity 1
}

// life is one worker's program.
type life struct {
	path string
	file *os.File // the checked program; nil: path is as good
	t    *trial   // nil: it is not on trial
	up   bool     // guarded by programs.mu
}

func openPrograms(o Options) (*programs, error) {
	o.UpTimeout = cmp.Or(o.UpTimeout, defaultUpTimeout)
	p := &programs{o: o}
	p.mu.path, p.mu.conns = o.Path, make(map[*net.UnixConn]bool)
	if o.Control == "" {
		return p, nil
	}
	// Two keepers do not share a folder: what lies there is of one that was killed.
	if fi, err := os.Lstat(o.Control); err == nil && fi.Mode().Type() == os.ModeSocket {
		if c, err := net.Dial("unix", o.Control); err == nil {
			return nil, errors.Join(fmt.Errorf("control socket %s: another keeper listens there", o.Control), c.Close())
		}
		if err := os.Remove(o.Control); err != nil {
			return nil, fmt.Errorf("control socket: %w", err)
		}
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: o.Control, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	if err := os.Chmod(o.Control, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("control socket: %w", err), ln.Close())
	}
	p.ln = ln
	p.wg.Go(p.accept)
	return p, nil
}

func (p *programs) close() {
	if p.ln == nil {
		return
	}
	_ = p.ln.Close() // nothing was written by it
	p.mu.Lock()
	p.mu.closed = true
	for c := range p.mu.conns {
		_ = c.Close() // likewise
	}
	p.mu.Unlock()
	p.wg.Wait()
}

func (p *programs) accept() {
	for {
		c, err := p.ln.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // no descriptors are left, for a moment
			time.Sleep(minPause)
			continue
		}
		p.mu.Lock()
		take := !p.mu.closed && len(p.mu.conns) < maxAskers
		if take {
			p.mu.conns[c] = true
		}
		p.mu.Unlock()
		if !take {
			_ = c.Close()
			continue
		}
		p.wg.Go(func() {
			p.serve(c)
			p.mu.Lock()
			delete(p.mu.conns, c)
			p.mu.Unlock()
			_ = c.Close()
		})
	}
}

// serve hears one choice and says what becomes of it.
func (p *programs) serve(c *net.UnixConn) {
	say := func(v verdict) bool {
		_ = c.SetWriteDeadline(time.Now().Add(askTimeout))
		return json.NewEncoder(c).Encode(v) == nil
	}
	t, who, err := p.hear(c)
	if err != nil {
		p.o.Logger.Warn("a choice of a program for the next worker was refused", "by", who, "err", err)
		say(verdict{Error: err.Error()})
		return
	}
	defer p.forget(t)
	p.o.Logger.Info("the next worker is to be of another program", "program", t.path, "by", who)
	if !say(verdict{}) {
		return
	}
	gone := make(chan struct{})
	_ = c.SetReadDeadline(time.Now().Add(choiceTimeout))
	go func() {
		defer close(gone)
		_, _ = io.ReadFull(c, make([]byte, 1)) // nothing more is said
	}()
	select {
	case v := <-t.result:
		say(v)
		_ = c.SetReadDeadline(time.Now())
		<-gone
	case <-gone:
	}
}

// hear reads a choice and registers it.
func (p *programs) hear(c *net.UnixConn) (t *trial, who string, err error) {
	uid, pid, err := peerOf(c)
	who = fmt.Sprintf("uid %d, pid %d", uid, pid)
	if err == nil {
		err = mayChoose(uid)
	}
	if err != nil {
		return nil, who, err
	}
	_ = c.SetReadDeadline(time.Now().Add(askTimeout))
	var q choice
	if err := json.NewDecoder(io.LimitReader(c, maxChoice)).Decode(&q); err != nil {
		return nil, who, fmt.Errorf("no choice of a program: %w", err)
	}
	f, err := openProgram(q.Program)
	if err != nil {
		return nil, who, err
	}
	_ = f.Close() // it is looked at again
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.asked != nil || p.mu.failed != nil {
		return nil, who, errors.New("another program was chosen for the next worker, which has not come up yet")
	}
	p.mu.asked = &trial{path: q.Program, result: make(chan verdict, 1)}
	return p.mu.asked, who, nil
}

// forget ends what the caller of t waits for.
func (p *programs) forget(t *trial) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.asked == t {
		p.mu.asked = nil
	}
	if p.mu.failed == t {
		p.mu.failed = nil
	}
}

func peerOf(c *net.UnixConn) (uid, pid int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return -1, 0, err
	}
	var cred *unix.Ucred
	if cerr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); cerr != nil {
		err = cerr
	}
	if err != nil {
		return -1, 0, fmt.Errorf("who calls is not known: %w", err)
	}
	return int(cred.Uid), int(cred.Pid), nil
}

// mayChoose lets root choose, and the user that the keeper runs as.
func mayChoose(uid int) error {
	if uid != 0 && uid != os.Geteuid() {
		return fmt.Errorf("user %d may not choose a program here: only root and user %d may", uid, os.Geteuid())
	}
	return nil
}

// openProgram opens a program that may be a worker: nobody but root and this user can have written it. It is executed
// by its descriptor, so nobody can put another one in its place.
func openProgram(path string) (*os.File, error) {
	if !filepath.IsAbs(path) || len(path) > maxPath || strings.ContainsFunc(path, func(r rune) bool {
		return !unicode.IsPrint(r)
	}) {
		return nil, fmt.Errorf("program %.64q: want an absolute path", path)
	}
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("program %s: %w", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, errors.Join(fmt.Errorf("program %s: %w", path, err), f.Close())
	}
	why := ""
	switch mode := st.Mode; {
	case mode&unix.S_IFMT != unix.S_IFREG:
		why = "is no regular file"
	case st.Uid != 0 && int(st.Uid) != os.Geteuid():
		why = fmt.Sprintf("is user %d's: want root's or user %d's", st.Uid, os.Geteuid())
	case mode&0o022 != 0:
		why = fmt.Sprintf("has mode %04o: others than its owner may write it", mode&0o7777)
	case mode&0o111 == 0:
		why = fmt.Sprintf("has mode %04o: it cannot be executed", mode&0o7777)
	}
	if why != "" {
		return nil, errors.Join(fmt.Errorf("program %s %s", path, why), f.Close())
	}
	return f, nil
}

// next gives the program of another worker.
func (p *programs) next() (*life, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := &life{path: p.mu.path}
	if t := p.mu.asked; t != nil {
		f, err := openProgram(t.path)
		if err == nil {
			p.mu.asked = nil
			l.path, l.file, l.t = t.path, f, t
			return l, nil
		}
		p.mu.asked = nil
		t.result <- verdict{Error: err.Error()}
	}
	if l.path == p.o.Path {
		return l, nil // as this process was started
	}
	f, err := openProgram(l.path)
	l.file = f
	return l, err
}

// command executes the program of l, once.
func (l *life) command(args []string) *exec.Cmd {
	cmd := exec.Command(l.path, args...)
	if l.file != nil {
		cmd.Path, cmd.Err = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), l.file.Fd()), nil
	}
	return cmd
}

func (l *life) close() {
	if l.file != nil {
		_ = l.file.Close() // it was read alone
	}
}

// isUp notes that l's worker is up.
func (p *programs) isUp(l *life, version string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if l.up {
		return
	}
	l.up, p.mu.up = true, true
	if l.t != nil {
		p.mu.path = l.path
		l.t.result <- verdict{Version: version}
		p.o.Logger.Info("the program that was chosen is up", "program", l.path, "version", version)
	}
	if t := p.mu.failed; t != nil {
		p.mu.failed = nil
		t.result <- verdict{Error: t.why, Version: version}
	}
}

// wasUp reports whether a worker has said that it is up, ever.
func (p *programs) wasUp() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.up
}

// expire has kill end the worker of a program on trial that is not up in time.
func (p *programs) expire(l *life, kill func() error) (stop func() bool) {
	if l.t == nil {
		return func() bool { return true }
	}
	return time.AfterFunc(p.o.UpTimeout, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if !l.up {
			l.t.why = fmt.Sprintf("it was not up within %v", p.o.UpTimeout)
			_ = kill() // or it has just ended
		}
	}).Stop
}

// hasFailed reports whether a program on trial never came up, so that the one before it is to follow.
func (p *programs) hasFailed(l *life, how string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if l.t == nil || l.up {
		return false
	}
	if l.t.why == "" {
		l.t.why = how
	}
	p.mu.failed = l.t
	p.o.Logger.Error("the program that was chosen did not come up: the one before it follows", "program", l.path, "why",
		l.t.why, "follows", p.mu.path)
	return true
}

// Choice is a program that a keeper is to start next. It holds while it is open.
type Choice struct {
	c    *net.UnixConn
	in   *json.Decoder
	path string
}

// Choose has the keeper with this control socket start its next worker of another program. That is a regular file that
// root or the keeper's user owns and nobody else can write. An error says that nothing was done.
func Choose(ctx context.Context, socket, path string) (*Choice, error) {
	c, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("the keeper's control socket: %w", err)
	}
	x := &Choice{c: c.(*net.UnixConn), path: path}
	x.in = json.NewDecoder(io.LimitReader(c, 4*maxChoice))
	werr := json.NewEncoder(c).Encode(choice{Program: path}) // a keeper may refuse without listening
	v, err := x.hear(ctx)
	if err != nil {
		err = errors.Join(err, werr)
	}
	if err == nil && v.Error != "" {
		err = fmt.Errorf("%w: %s", ErrRefused, v.Error)
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return x, nil
}

// Wait gives the version of the next worker that is up; with [ErrNotUp] it is of the program before.
func (x *Choice) Wait(ctx context.Context) (version string, err error) {
	v, err := x.hear(ctx)
	if err == nil && v.Error != "" {
		err = fmt.Errorf("%s: %w: %s", x.path, ErrNotUp, v.Error)
	}
	return v.Version, err
}

func (x *Choice) hear(ctx context.Context) (v verdict, err error) {
	defer context.AfterFunc(ctx, func() { _ = x.c.SetReadDeadline(time.Unix(1, 0)) })()
	if err := x.in.Decode(&v); err != nil {
		return v, fmt.Errorf("the keeper does not say what became of the choice: %w",
			errors.Join(context.Cause(ctx), err))
	}
	return v, nil
}

// Close takes the choice back, if no worker has begun with it.
func (x *Choice) Close() error { return x.c.Close() }
