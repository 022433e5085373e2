package keeper

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"
	"unsafe"

	"golang.org/x/sys/unix"
)

// deathSignal is the main thread's, on which packages are initialised.
var deathSignal = func() (sig int32) {
	if err := unix.Prctl(unix.PR_GET_PDEATHSIG, uintptr(unsafe.Pointer(&sig)), 0, 0, 0); err != nil {
		return -1
	}
	return sig
}()

// looks is a worker that tells by its status what is wrong with how it was started.
func looks(c *Client) int {
	switch {
	case IsWorker() || os.Getenv(outlivesEnv) != "":
		return 61 // a child of its own would take itself for one
	case unix.Getpgrp() != os.Getpid():
		return 62 // a terminal's ^C reaches it twice
	case deathSignal != int32(unix.SIGKILL):
		return 63 // it outlives its keeper
	case c.Outlives():
		return 64
	}
	return 65
}

// TestWorkerIsOnes: a worker dies with its keeper, is in a group of its own, and its children are no workers.
func TestWorkerIsOnes(t *testing.T) {
	if status, log := run(t, t.Context(), "looks"); status != 65 {
		t.Errorf("status %d\n%s", status, log)
	}
	s := newStandIn(t, 64)
	before, _ := s.keeper(nil)
	status, err := Run(t.Context(), Options{Path: os.Args[0], Env: []string{programEnv + "=looks"}, Vital: "v/",
		Logger: slog.New(slog.DiscardHandler), Store: before.out})
	if status != 64 || err != nil {
		t.Errorf("with a store: status %d, %v", status, err)
	}
}

// TestNoProgramForNow: a keeper that holds memory of the one before does not end because its program is gone, for a
// moment perhaps.
func TestNoProgramForNow(t *testing.T) {
	s := newStandIn(t, 64)
	k, _ := s.keeper(nil)
	fd, err := unix.Dup(memfd(t, "kept"))
	if err != nil {
		t.Fatal(err)
	}
	if err := k.change(&message{op: opPut, name: "v/1"}, []int{fd}); err != nil {
		t.Fatal(err)
	}
	k.closeAll(true)
	fds, names := s.restart()
	d, err := newSystemd(s.socket, 64, fds, names, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	told := ""
	_, err = Run(ctx, Options{Path: filepath.Join(t.TempDir(), "none"), Vital: "v/",
		Logger: slog.New(slog.DiscardHandler), Store: d,
		Trouble: func(text string) { told = text; cancel() }})
	cancel()
	if err != nil || !strings.Contains(told, "cannot start a worker") || !strings.Contains(told, "holds the memory") {
		t.Errorf("ended with %v, told %q", err, told)
	}
}

// TestExitStatus: a keeper's exit status is what a shell gives of its worker.
func TestExitStatus(t *testing.T) {
	for script, want := range map[string]int{"exit 3": 3, "kill -9 $$": 137} {
		cmd := exec.Command("sh", "-c", script)
		if err := cmd.Run(); err == nil {
			t.Fatal(script)
		}
		if got := exitStatus(cmd.ProcessState); got != want {
			t.Errorf("%s: %d, want %d", script, got, want)
		}
	}
}

// TestTroubleText: a trouble is what the directory takes.
func TestTroubleText(t *testing.T) {
	for text, want := range map[string]string{
		"as it is": "as it is", "a\nb\x00c\xff": "a?b?c?", strings.Repeat("x", maxTrouble): strings.Repeat(
			"x", maxTrouble), strings.Repeat("x", maxTrouble+1): strings.Repeat("x", maxTrouble),
		strings.Repeat("é", maxTrouble): strings.Repeat("é", maxTrouble/2), "x" + strings.Repeat("é", maxTrouble): "x" +
			strings.Repeat("é", maxTrouble/2-1),
	} {
		if got := Trouble(text); got != want || !utf8.ValidString(got) {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

// TestConnectToNoKeeper: a socket of another kind is no keeper's.
func TestConnectToNoKeeper(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[1])
	defer unix.Close(fds[0])
	t.Setenv(socketEnv, fmt.Sprint(fds[0]))
	if c, err := Connect(); c != nil || err == nil {
		t.Errorf("%v %v", c, err)
		fds[0] = -1
	}
}

// TestUpOnce: a program that was chosen is up in time if it says so, and a second time says nothing more.
func TestUpOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, err := openPrograms(Options{Path: "before", UpTimeout: time.Second, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		killed := 0
		try := func(up bool) *life {
			l := &life{path: "chosen", t: &trial{path: "chosen", result: make(chan verdict, 1)}}
			stop := p.expire(l, func() error { killed++; return nil })
			if up {
				p.isUp(l, "v1")
			}
			time.Sleep(2 * time.Second)
			synctest.Wait()
			stop()
			return l
		}
		l := try(true)
		if v := <-l.t.result; killed != 0 || v != (verdict{Version: "v1"}) {
			t.Errorf("killed %d times though it was up: %+v", killed, v)
		}
		p.isUp(l, "v2")
		if len(l.t.result) != 0 {
			t.Error("a second verdict, which nobody takes")
		}
		if try(false); killed != 1 {
			t.Errorf("killed %d times, want once", killed)
		}
	})
}

// TestAskersAreBounded: the control socket is this user's alone, and so many may ask at a time.
func TestAskersAreBounded(t *testing.T) {
	o := Options{Path: "p", Control: filepath.Join(t.TempDir(), "s"), Logger: slog.New(slog.DiscardHandler)}
	p, err := openPrograms(o)
	if err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(o.Control); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
	ask := func() error {
		c, err := net.Dial("unix", o.Control)
		if err != nil {
			return err
		}
		defer c.Close()
		_, werr := c.Write([]byte("nonsense\n"))
		b, err := io.ReadAll(c)
		if len(b) == 0 {
			return cmpErr(err, werr)
		}
		return nil
	}
	if err := ask(); err != nil {
		t.Errorf("no answer: %v", err)
	}
	p.mu.Lock()
	for range maxAskers {
		p.mu.conns[new(net.UnixConn)] = true
	}
	p.mu.Unlock()
	if err := ask(); err == nil {
		t.Errorf("%d others ask, and one more is answered", maxAskers)
	}
	p.close()
	if n := len(p.mu.conns); n != maxAskers {
		t.Errorf("%d connections are left of those that have ended", n-maxAskers)
	}
}

// cmpErr is why a connection ended without a word.
func cmpErr(errs ...error) error {
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return io.EOF
}

// TestHostileKeeper: an answer that is none ends the use of the socket, and leaves no descriptor; a long version is
// cut.
func TestHostileKeeper(t *testing.T) {
	ends := func() (c *Client, keeper *net.UnixConn) {
		t.Helper()
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		conns := make([]*net.UnixConn, 2)
		for i := range conns {
			if conns[i], err = connOf(fds[i]); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = conns[i].Close() })
		}
		return &Client{conn: conns[0]}, conns[1]
	}
	fd, err := unix.MemfdCreate("answer", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	item := &message{op: opItem, name: "x"}

	c, k := ends()
	if err := errors.Join(send(k, item, []int{fd}), send(k, &message{op: opOK}, nil),
		send(k, &message{op: opOK}, nil)); err != nil {
		t.Fatal(err)
	}
	if err := c.Drop("a"); !errors.Is(err, ErrProtocol) {
		t.Errorf("an item as the answer to a drop: %v", err)
	}
	if err := c.Drop("b"); !errors.Is(err, ErrProtocol) {
		t.Errorf("the answer to another question is taken: %v", err)
	}

	c, k = ends()
	if err := errors.Join(send(k, item, []int{fd}), send(k, &message{op: opRefuse}, nil)); err != nil {
		t.Fatal(err)
	}
	if items, err := c.List(); len(items) != 0 || !errors.Is(err, ErrRefused) {
		t.Errorf("a list that ends before its end: %v, %v", items, err)
	}
	if files, err := openFiles("/memfd:answer"); err != nil || len(files) != 1 {
		t.Errorf("%d descriptors are open, want one: %v", len(files), err)
	}

	c, k = ends()
	if err := send(k, &message{op: opOK}, nil); err != nil {
		t.Fatal(err)
	}
	if err := c.Up(strings.Repeat("v", maxMeta+1)); err != nil {
		t.Errorf("a long version: %v", err)
	}
}
