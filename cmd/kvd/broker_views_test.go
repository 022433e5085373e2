package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/ring"
	"github.com/kvd-project/kvd/internal/testutil"
)

// viewer is a program of a broker's that looks at values in place.
type viewer struct {
	t      *testing.T
	nc     *net.UnixConn
	wake   [2]int // eventfds: the broker's, and its own
	memory []byte // of the ring
	*ring.Client
	regions map[uint32][]byte
}

func newViewer(t *testing.T, path string) *viewer {
	t.Helper()
	nc, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	v := &viewer{t: t, nc: nc, regions: map[uint32][]byte{}}
	self, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(self)
	if _, _, err := nc.WriteMsgUnix((&ring.Hello{Name: "viewer"}).Message(1), unix.UnixRights(self), nil); err != nil {
		t.Fatal(err)
	}
	h, body, files := v.hear()
	if h.Kind != ring.KindWelcome || len(files) != 1+ring.FilesOfQueue {
		t.Fatalf("%+v: %q, %d files", h, body, len(files))
	}
	var st unix.Stat_t
	if err := unix.Fstat(files[1], &st); err != nil {
		t.Fatal(err)
	}
	if v.memory, err = unix.Mmap(files[1], 0, int(st.Size), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED); err != nil {
		t.Fatal(err)
	}
	l, err := ring.ParseHeader(v.memory)
	if err != nil {
		t.Fatal(err)
	}
	v.Client, v.wake = ring.NewClient(v.memory, l), [2]int{files[2], files[3]}
	_ = unix.Close(files[0])
	_ = unix.Close(files[1])
	return v
}

// close leaves the broker as a program that dies does.
func (v *viewer) close() {
	_ = v.nc.Close()
	_ = unix.Close(v.wake[0])
	_ = unix.Close(v.wake[1])
	_ = unix.Munmap(v.memory)
	for _, m := range v.regions {
		_ = unix.Munmap(m)
	}
}

// hear reads a message, whose files are the caller's.
func (v *viewer) hear() (ring.Head, []byte, []int) {
	v.t.Helper()
	b, oob := make([]byte, ring.MaxMessage), make([]byte, 256)
	if err := v.nc.SetReadDeadline(time.Now().Add(patience)); err != nil {
		v.t.Fatal(err)
	}
	n, oobn, _, _, err := v.nc.ReadMsgUnix(b, oob)
	if err != nil {
		v.t.Fatal(err)
	}
	h, body, err := ring.ParseHead(b[:n])
	if err != nil {
		v.t.Fatal(err)
	}
	var files []int
	if msgs, err := unix.ParseSocketControlMessage(oob[:oobn]); err == nil && len(msgs) == 1 {
		files, _ = unix.ParseUnixRights(&msgs[0])
	}
	return h, body, files
}

// one performs one operation.
func (v *viewer) one(s ring.Submission, key string) ring.Completion {
	v.t.Helper()
	s.KeyBytes = uint16(copy(v.Slot(0), key))
	if !v.Submit(&s) {
		v.t.Fatal("the ring is full")
	}
	if v.Publish() {
		_, _ = unix.Write(v.wake[0], binary.NativeEndian.AppendUint64(nil, 1))
	}
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if all, err := v.Reap(nil); err != nil {
			v.t.Fatal(err)
		} else if len(all) == 1 {
			return all[0]
		}
		if v.Idle() {
			_, _ = unix.Poll([]unix.PollFd{{Fd: int32(v.wake[1]), Events: unix.POLLIN}}, 100)
			var b [8]byte
			_, _ = unix.Read(v.wake[1], b[:])
		}
		v.Awake()
	}
	v.t.Fatal("no completion")
	return ring.Completion{}
}

// view looks at the key k; nil and why not, if it cannot.
func (v *viewer) view(number uint64) ([]byte, ring.Completion) {
	v.t.Helper()
	c := v.one(ring.Submission{Op: ring.OpView, Word: number, TTL: 10_000, Timeout: 2000}, "k")
	if c.Code != ring.OK {
		return nil, c
	}
	for v.regions[c.Region] == nil {
		h, body, files := v.hear()
		if h.Kind == ring.KindRegionGone {
			continue
		}
		r, err := ring.ParseRegion(body)
		if err != nil || h.Kind != ring.KindRegion || len(files) != 1 {
			v.t.Fatalf("%+v, %+v, %v", h, r, err)
		}
		if v.regions[r.Region], err = unix.Mmap(files[0], 0, int(r.Length), unix.PROT_READ,
			unix.MAP_SHARED); err != nil {
			v.t.Fatal(err)
		}
		_ = unix.Close(files[0])
	}
	return v.regions[c.Region][c.Offset:][:c.Length], c
}

// release is the verdict of a View.
func (v *viewer) release(number uint64) ring.Code {
	v.t.Helper()
	return v.one(ring.Submission{Op: ring.OpViewRelease, Word: number}, "").Code
}

// again looks until the broker shows the value once more, and believes the verdict of each look.
func (v *viewer) again(what string, value []byte, wait func(c ring.Code) bool) {
	v.t.Helper()
	testutil.Until(v.t, what, func() bool {
		b, c := v.view(2)
		if b == nil {
			return wait(c.Code)
		}
		is := bytes.Equal(b, value)
		code := v.release(2)
		if code == ring.OK && !is {
			v.t.Fatalf("%s: a View that held has shown other bytes", what)
		}
		return wait(code)
	})
}

// shares counts what a broker has of programs.
func shares(t *testing.T, p *process) (n int) {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", p.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if to, err := os.Readlink(f); err == nil && (strings.Contains(to, "memfd:kvd ring") ||
			strings.Contains(to, "pidfd")) {
			n++
		}
	}
	return n
}

// TestBrokerViews: a program looks at a value when its tenant loses the right to read, and when the process of the
// memory node ends and the next one takes over its memory. A View that held has shown the value.
func TestBrokerViews(t *testing.T) {
	env, dir := runtimeDir(t)
	files := newCertificates(t)
	d := start(t, env,
		append([]string{"directory", "--id=d", "--data-dir=" + t.TempDir(), "--listen=127.0.0.1:0",
			"--raft-listen=127.0.0.1:0", "--bootstrap", "--lease=1s"}, files.flags("directory")...)...)
	addr := d.kv["directory"]
	m := start(t, env, append([]string{"memnode", "--name=m", "--directory=" + addr, "--memory=64MiB"},
		files.flags("memnode")...)...)
	createNamespace(t, addr, "shop", files.load("operator"), files.identity("gateway"), files.identity("client"))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	owner, err := client.Open(ctx, client.Options{Directory: []string{addr}, Namespace: "shop", Provider: "tcp",
		TLS: files.load("client"), OpTimeout: patience})
	if err != nil {
		t.Fatal(err)
	}
	defer owner.Close()
	value := bytes.Repeat([]byte("value "), 20_000)
	if _, err := owner.Put(ctx, []byte("k"), value, client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "broker", "b.sock")
	b := start(t, env, append([]string{"broker", "--directory=" + addr, "--listen=" + socket, "--namespaces=shop",
		"--view-memory=64MiB", "--views=2", "--provider=shm"}, files.flags("gateway")...)...)
	before := shares(t, b)
	v := newViewer(t, socket)
	got, c := v.view(1)
	if !bytes.Equal(got, value) {
		t.Fatalf("%d bytes, %+v", len(got), c)
	}
	access, err := dirclient.Open(dirclient.Options{Addrs: []string{addr}, TLS: files.load("client")})
	if err != nil {
		t.Fatal(err)
	}
	defer access.Close()
	change := func(call func(ctx context.Context, d dirpb.DirectoryClient) error) {
		t.Helper()
		if err := access.Call(ctx, call); err != nil {
			t.Fatal(err)
		}
	}
	change(func(ctx context.Context, d dirpb.DirectoryClient) error {
		_, err := d.RevokeAccess(ctx, &dirpb.RevokeAccessRequest{Namespace: "shop", Who: files.identity("gateway")})
		return err
	})
	v.again("the right is gone", value, func(code ring.Code) bool { return code == ring.Denied })
	if code := v.release(1); code != ring.ViewExpired {
		t.Errorf("a View that outlasted its right: code %d", code)
	}
	change(func(ctx context.Context, d dirpb.DirectoryClient) error {
		_, err := d.GrantAccess(ctx, &dirpb.GrantAccessRequest{Namespace: "shop",
			Access: &dirpb.Access{Who: files.identity("gateway"), Right: dirpb.Right_RIGHT_WRITE}})
		return err
	})
	shown := func(code ring.Code) bool { return code == ring.OK }
	v.again("the right is back", value, shown)

	s := &keptStore{t: t, m: m}
	for round := range 3 {
		if got, c = v.view(1); !bytes.Equal(got, value) {
			t.Fatalf("round %d: %d bytes, %+v", round, len(got), c)
		}
		if err := syscall.Kill(s.worker(), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		m.ready()
		value = bytes.Repeat(fmt.Appendf(nil, "other%d", round), 20_000)
		was := bytes.Clone(got)
		if code := v.release(1); code == ring.OK && !bytes.Equal(was, got) {
			t.Errorf("round %d: a View that held has shown other bytes", round)
		} else if code != ring.OK && code != ring.ViewExpired {
			t.Errorf("round %d: code %d", round, code)
		}
		if _, err := owner.Put(ctx, []byte("k"), value, client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		v.again("the memory is there again", value, shown)
	}
	if it, err := owner.Get(ctx, []byte("k")); err != nil || !bytes.Equal(it.Value, value) {
		t.Errorf("the value has %d bytes, %v", len(it.Value), err)
	}
	if got, c = v.view(1); !bytes.Equal(got, value) {
		t.Errorf("%d bytes, %+v", len(got), c)
	}
	v.close() // with that View
	testutil.UntilNone(t, "what the broker shares with programs", func() int { return shares(t, b) - before })
	v = newViewer(t, socket)
	defer v.close()
	for number, want := range []ring.Code{ring.OK, ring.OK, ring.Busy} { // as if there had been none
		if _, c := v.view(uint64(number)); c.Code != want {
			t.Errorf("the next program's View %d: code %d, want %d", number, c.Code, want)
		}
	}
}
