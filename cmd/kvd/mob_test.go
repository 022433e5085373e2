package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/config"
)

// beMob makes the test binary hold connections for a test: the open files of one process are not enough for the server,
// its clients and a crowd.
const beMob = "KVD_TEST_BE_MOB"

// mob is what a process of a crowd does: it makes the idle connections and says "idle N", N the number of those that it
// has; then "go" starts the gangs, and "rest" ends what they do. It ends with its input.
type mob struct {
	Addr  string
	Idle  gang
	Gangs []gang
}

// gang is connections that do the same.
type gang struct {
	Name string
	N    int
	// Files are of the TLS handshake that each connection makes first; empty: none.
	Files config.TLS
	// Connection number I begins with Greet[I % len(Greet)], and waits for so many bytes of a welcome.
	Greet   [][]byte
	Welcome int
	// Say is said then, all of it or a byte at a time.
	Say  []byte
	Slow bool
	// Reads waits for the reply, and what it says again is on the same connection; Leaves hangs up at once. The
	// others read nothing, and hold the connection until it is closed, at most for Holds.
	Reads, Leaves bool
	Holds         time.Duration
	// Every is between two deeds of a connection.
	Every time.Duration
}

// deeds counts what gangs do.
type deeds struct{ calls, done atomic.Int64 }

// beCrowd is the process.
func beCrowd() {
	in := bufio.NewReader(os.Stdin)
	var m mob
	line, err := in.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &m)
	}
	if err != nil {
		panic(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var there atomic.Int64
	var wg sync.WaitGroup
	for w := range min(m.Idle.N, 64) {
		wg.Go(func() {
			for i := w; i < m.Idle.N; i += 64 {
				if c, err := m.Idle.call(ctx, m.Addr, i); err == nil {
					there.Add(1)
					go io.Copy(io.Discard, c) //nolint:errcheck // the server may hang up
				}
			}
		})
	}
	wg.Wait()
	fmt.Println("idle", there.Load())
	rest := func() {}
	var d deeds
	for {
		line, err := in.ReadString('\n')
		switch {
		case err != nil:
			os.Exit(0)
		case line == "go\n":
			busy, stop := context.WithCancel(ctx)
			for _, g := range m.Gangs {
				for i := range g.N {
					wg.Go(func() { g.act(busy, m.Addr, i, &d) })
				}
			}
			rest = func() { stop(); wg.Wait() }
		case line == "rest\n":
			rest()
			fmt.Println("rested", d.calls.Load(), d.done.Load())
		}
	}
}

// call makes connection number i.
func (g *gang) call(ctx context.Context, addr string, i int) (c net.Conn, err error) {
	// Hosts of their own, so that none runs out of ports.
	from := net.TCPAddr{IP: net.IPv4(127, 0, byte(1+os.Getpid()%200), byte(1+i%200))}
	limit := time.Now().Add(patience)
	d := net.Dialer{LocalAddr: &from, Deadline: limit, Control: func(_, _ string, raw syscall.RawConn) error {
		return raw.Control(func(fd uintptr) {
			if !g.Reads {
				_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 4<<10)
			}
		})
	}}
	raw, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	_ = raw.(*net.TCPConn).SetLinger(0) // a port for each connection of the last minute is more than there are
	defer func() {
		if err != nil {
			_ = raw.Close()
		}
	}()
	c = raw
	_ = c.SetDeadline(limit)
	if g.Files.Cert != "" {
		cfg, err := mobTLS(g.Files)
		if err != nil {
			return nil, err
		}
		t := tls.Client(c, cfg)
		if err := t.HandshakeContext(ctx); err != nil {
			return nil, err
		}
		c = t
	}
	if len(g.Greet) > 0 {
		if _, err := c.Write(g.Greet[i%len(g.Greet)]); err != nil {
			return nil, err
		}
	}
	if _, err := io.ReadFull(c, make([]byte, g.Welcome)); err != nil {
		return nil, err
	}
	return c, c.SetDeadline(time.Time{})
}

var mobConfig sync.Map // of *tls.Config, by certificate

func mobTLS(f config.TLS) (*tls.Config, error) {
	if cfg, ok := mobConfig.Load(f.Cert); ok {
		return cfg.(*tls.Config), nil
	}
	cfg, err := f.Load()
	if err != nil {
		return nil, err
	}
	cfg = &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: cfg.RootCAs, Certificates: cfg.Certificates,
		ServerName: "127.0.0.1"}
	mobConfig.Store(f.Cert, cfg)
	return cfg, nil
}

// act is the life of a hostile connection, again and again.
func (g *gang) act(ctx context.Context, addr string, i int, d *deeds) {
	// All at once would be a wave, and then a pause.
	pause(ctx, g.Every*time.Duration(i)/time.Duration(g.N))
	for ctx.Err() == nil {
		d.calls.Add(1)
		if c, err := g.call(ctx, addr, i); err == nil {
			stop := context.AfterFunc(ctx, func() { _ = c.Close() })
			g.misbehave(ctx, c, d)
			stop()
			_ = c.Close()
		}
		pause(ctx, g.Every)
	}
}

func (g *gang) misbehave(ctx context.Context, c net.Conn, d *deeds) {
	ends := time.Now().Add(g.Holds)
	buf := make([]byte, 4<<10)
	for ctx.Err() == nil {
		if g.Slow {
			for _, b := range g.Say {
				if _, err := c.Write([]byte{b}); err != nil {
					return
				}
				pause(ctx, g.Every)
			}
			d.done.Add(1)
			continue
		}
		_ = c.SetWriteDeadline(time.Now().Add(time.Second))
		if _, err := c.Write(g.Say); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
		d.done.Add(1)
		switch {
		case g.Leaves:
			return
		case g.Reads:
			_ = c.SetReadDeadline(time.Now().Add(patience))
			if _, err := c.Read(buf); err != nil {
				return
			}
			pause(ctx, g.Every)
		default:
			// Whether the server has hung up is seen without reading what it has said.
			for time.Now().Before(ends) && !hungUp(c) {
				if pause(ctx, 500*time.Millisecond); ctx.Err() != nil {
					return
				}
			}
			return
		}
	}
}

// hungUp reports whether the other side has closed or reset the connection.
func hungUp(c net.Conn) bool {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		return true
	}
	gone := false
	err = raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		gone = err != nil || info.State != 1 // TCP_ESTABLISHED
	})
	return gone || err != nil
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// mobProcess is a process of a crowd.
type mobProcess struct {
	t   *testing.T
	in  io.WriteCloser
	out *bufio.Reader
}

// split gives the servers half of the processors, and an honest client and the crowd a quarter each, so that the work
// of attacking is not taken for that of being attacked; all nil on a machine with fewer than four.
func split(t *testing.T) (servers, client, crowd *unix.CPUSet) {
	t.Helper()
	var all unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		t.Fatal(err)
	}
	n := all.Count()
	if n < 4 {
		return nil, nil, nil
	}
	servers, client, crowd = new(unix.CPUSet), new(unix.CPUSet), new(unix.CPUSet)
	for cpu, seen := 0, 0; seen < n; cpu++ {
		if !all.IsSet(cpu) {
			continue
		}
		switch seen++; {
		case seen <= n/2:
			servers.Set(cpu)
		case seen <= n/2+n/4:
			client.Set(cpu)
		default:
			crowd.Set(cpu)
		}
	}
	return servers, client, crowd
}

// on runs fn in a thread that is bound to cpus, as what it starts will be.
func on(t *testing.T, cpus *unix.CPUSet, fn func()) {
	t.Helper()
	if cpus == nil {
		fn()
		return
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var was unix.CPUSet
	if err := errors.Join(unix.SchedGetaffinity(0, &was), unix.SchedSetaffinity(0, cpus)); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.SchedSetaffinity(0, &was) }() // it was allowed before
	fn()
}

// stayOn binds all threads of this process until the test ends, as well as those that they start.
func stayOn(t *testing.T, cpus *unix.CPUSet) {
	t.Helper()
	if cpus == nil {
		return
	}
	var was unix.CPUSet
	if err := unix.SchedGetaffinity(0, &was); err != nil {
		t.Fatal(err)
	}
	bind := func(to *unix.CPUSet) {
		tasks, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range tasks {
			if tid, err := strconv.Atoi(x.Name()); err == nil {
				_ = unix.SchedSetaffinity(tid, to) // it may have ended
			}
		}
	}
	procs := runtime.GOMAXPROCS(cpus.Count())
	bind(cpus)
	t.Cleanup(func() { runtime.GOMAXPROCS(procs); bind(&was) })
}

func startMob(t *testing.T, cpus *unix.CPUSet, m mob) *mobProcess {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), beMob+"=1")
	cmd.Stderr = os.Stderr
	p := &mobProcess{t: t}
	if p.in, err = cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewReader(out)
	on(t, cpus, func() { err = cmd.Start() })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
	})
	if err := json.NewEncoder(p.in).Encode(m); err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *mobProcess) tell(word string) {
	p.t.Helper()
	if _, err := io.WriteString(p.in, word+"\n"); err != nil {
		p.t.Fatal(err)
	}
}

// hear waits for a line that begins with word, and gives the numbers in it.
func (p *mobProcess) hear(word string) (n []int) {
	p.t.Helper()
	line, err := p.out.ReadString('\n')
	words := strings.Fields(line)
	if err != nil || len(words) == 0 || words[0] != word {
		p.t.Fatalf("a process of the crowd says %q, %v, want %s", line, err, word)
	}
	for _, w := range words[1:] {
		x, err := strconv.Atoi(w)
		if err != nil {
			p.t.Fatal(err)
		}
		n = append(n, x)
	}
	return n
}
