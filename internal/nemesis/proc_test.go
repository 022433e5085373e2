package nemesis

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// proc is a process on a host of the network, in one life after another. It serves one goroutine.
type proc struct {
	name string
	log  string // file of all lives' stderr
	// died is told of an end that nobody here asked for.
	died func(*proc, *os.ProcessState)

	life    int
	cmd     *exec.Cmd // nil: does not run
	ended   chan struct{}
	asked   *atomic.Bool // to end
	stopped bool
	// urgent goes before whatever else the machine does.
	urgent bool
}

// start runs argv in the host's namespace. line gets each line of stdout.
func (p *proc) start(n *network, env, argv []string, line func(string)) error {
	if p.cmd != nil {
		return fmt.Errorf("%s runs already", p.name)
	}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	p.life++
	fmt.Fprintf(log, "---- life %d of %s\n", p.life, p.name)
	// ip becomes the program: the process id is the program's.
	if p.urgent {
		argv = append([]string{"nice", "-n", "-10"}, argv...)
	}
	cmd := exec.Command("ip", append([]string{"netns", "exec", n.ns(p.name)}, argv...)...)
	cmd.Env, cmd.Stderr = env, log
	// ^C is for the harness; its own death is everybody's.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	ended, asked := make(chan struct{}), new(atomic.Bool)
	p.cmd, p.ended, p.asked, p.stopped = cmd, ended, asked, false
	go func() {
		defer close(ended)
		in := bufio.NewReaderSize(out, 1<<16)
		for {
			l, err := in.ReadString('\n')
			if err != nil {
				break
			}
			line(strings.TrimSuffix(l, "\n"))
		}
		_ = cmd.Wait() // ProcessState says how
		if !asked.Load() {
			p.died(p, cmd.ProcessState)
		}
	}()
	return nil
}

// kill is SIGKILL, and returns when the process is gone.
func (p *proc) kill() error {
	if p.cmd == nil {
		return nil
	}
	p.asked.Store(true)
	err := p.cmd.Process.Kill()
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}
	<-p.ended
	p.cmd = nil
	return err
}

// end is SIGTERM, and wants status 0 within limit.
func (p *proc) end(limit time.Duration) error {
	if p.cmd == nil {
		return nil
	}
	p.asked.Store(true)
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return fmt.Errorf("%s: %w", p.name, err)
	}
	select {
	case <-p.ended:
	case <-time.After(limit):
		return fmt.Errorf("%s does not end within %v of SIGTERM", p.name, limit)
	}
	st := p.cmd.ProcessState
	p.cmd = nil
	if !st.Success() {
		return fmt.Errorf("%s ended with %v after SIGTERM\n%s", p.name, st, tail(p.log, 2000))
	}
	return nil
}

// stop is SIGSTOP, and returns when the process rests.
func (p *proc) stop() error {
	if err := p.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		return fmt.Errorf("%s: %w", p.name, err)
	}
	p.stopped = true
	for until := time.Now().Add(5 * time.Second); ; time.Sleep(200 * time.Microsecond) {
		resting, err := allStopped(p.cmd.Process.Pid)
		if err != nil || resting {
			return err
		}
		if time.Now().After(until) {
			return fmt.Errorf("%s runs on after SIGSTOP", p.name)
		}
	}
}

func (p *proc) resume() error {
	p.stopped = false
	return p.cmd.Process.Signal(syscall.SIGCONT)
}

// dump ends a Go program with its goroutines in its log, SIGQUIT.
func (p *proc) dump() {
	if p.cmd == nil {
		return
	}
	p.asked.Store(true)
	_ = p.cmd.Process.Signal(syscall.SIGQUIT) // it may have ended
	select {
	case <-p.ended:
	case <-time.After(5 * time.Second):
	}
}

// allStopped tells whether every thread of the process is stopped, proc(5).
func allStopped(pid int) (bool, error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil {
		return false, err
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // the thread ended
		}
		// The state follows the command's name, which may hold anything.
		if i := bytes.LastIndex(b, []byte(") ")); i < 0 || b[i+2] != 'T' {
			return false, nil
		}
	}
	return true, nil
}

// tail is about the last n bytes of a file.
func tail(file string, n int) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-n):])
}
