package main

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/config"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/httpd"
	"github.com/kvd-project/kvd/internal/overview"
	"github.com/kvd-project/kvd/internal/ring"
)

// greetBroker says hello at a socket, and returns what the broker answers.
func greetBroker(t *testing.T, path string, h ring.Hello) (ring.Welcome, ring.Refused) {
	t.Helper()
	nc, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	self, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(self)
	if err := nc.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := nc.WriteMsgUnix(h.Message(1), unix.UnixRights(self), nil); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, ring.MaxMessage)
	n, err := nc.Read(b) // files that come with it are closed
	if err != nil {
		t.Fatal(err)
	}
	head, body, err := ring.ParseHead(b[:n])
	if err != nil {
		t.Fatal(err)
	}
	if head.Kind == ring.KindRefused {
		r, err := ring.ParseRefused(body)
		if err != nil {
			t.Fatal(err)
		}
		return ring.Welcome{}, r
	}
	w, err := ring.ParseWelcome(body)
	if err != nil {
		t.Fatal(err)
	}
	return w, ring.Refused{}
}

// A broker serves its namespaces at a socket, tells who is there, and is started again where one has died.
func TestBroker(t *testing.T) {
	env, dir := runtimeDir(t)
	d := start(t, env, "directory", "--id=d", "--data-dir="+t.TempDir(), "--listen=127.0.0.1:0",
		"--raft-listen=127.0.0.1:0", "--bootstrap", "--lease=5s")
	addr := d.kv["directory"]
	start(t, env, "memnode", "--name=m", "--directory="+addr, "--memory=64MiB", "--shm-socket=off")
	createNamespace(t, addr, "models", nil)

	socket := filepath.Join(dir, "broker", "b.sock")
	args := []string{"broker", "--directory=" + addr, "--listen=" + socket, "--http-listen=127.0.0.1:0"}
	fails := func(what string, code int, want string, more ...string) {
		t.Helper()
		var out, errs bytes.Buffer
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if got := run(ctx, append(args, more...), &out, &errs); got != code || out.Len() > 0 ||
			!strings.Contains(errs.String(), want) {
			t.Errorf("%s: exit status %d, %q, %q", what, got, &out, &errs)
		}
	}
	fails("a namespace that is not there", exitFailure, "make it with kvctl namespace create none", "--namespaces=none")
	fails("a user who is not there", exitUsage, "users: user: unknown user nobody-of-that-name",
		"--users=nobody-of-that-name")
	secret := filepath.Join(t.TempDir(), "secret")
	fails("no file of a secret", exitUsage, "secret-file: open", "--secret-file="+secret)
	for _, text := range []string{"", "\n", "a\nb\n"} {
		if err := os.WriteFile(secret, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		fails("a secret of other than a line", exitUsage, "want "+map[bool]string{true: "one", false: "a line"}[text ==
			"a\nb\n"], "--secret-file="+secret)
	}
	if err := os.WriteFile(secret, []byte("word\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	serve := func() *process {
		return start(t, env, append(args, "--namespaces=models,default", "--secret-file="+secret)...)
	}
	p := serve()
	if p.kv["role"] != "broker" || p.kv["socket"] != socket || p.kv["namespaces"] != "models,default" {
		t.Errorf("ready line holds %v", p.kv)
	}
	if st, err := os.Stat(socket); err != nil || st.Mode().Perm() != 0o660 {
		t.Errorf("%v, %v", st, err)
	}
	fails("a socket that another has", exitFailure, "address already in use")
	if w, r := greetBroker(t, socket, ring.Hello{Secret: "word", Name: "trainer"}); w.Depth == 0 || w.MaxValue == 0 {
		t.Errorf("%+v, %+v", w, r)
	}
	if _, r := greetBroker(t, socket, ring.Hello{Secret: "other"}); r.Code != ring.Denied {
		t.Errorf("another secret: %+v", r)
	}
	if _, r := greetBroker(t, socket, ring.Hello{Secret: "word", Namespace: "cache"}); r.Code != ring.Denied {
		t.Errorf("a namespace that is not the socket's: %+v", r)
	}
	if strings.Contains(p.stderr.String(), "word") {
		t.Errorf("it tells its secret: %s", p.stderr)
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	if all := overview.Brokers(statusOf(t, addr)); len(all) != 1 || all[0].Host != host ||
		all[0].Page == nil || all[0].Page.String() != "http://"+p.kv["http"] ||
		strings.Join(all[0].Namespaces, ",") != "default,models" {
		t.Errorf("its sessions tell of %+v", all)
	}
	wantPage(t, p.kv["http"], "/readyz", 200)
	wantPage(t, p.kv["http"], "/metrics", 200, `kvd_broker_connections_total{socket="b.sock"}`, `kvd_broker_programs{socket="b.sock"}`)
	if code := p.stop(syscall.SIGKILL); code == 0 {
		t.Error("it is not dead")
	}
	p = serve() // where a dead one's socket is
	if w, r := greetBroker(t, socket, ring.Hello{Secret: "word", Namespace: "default"}); w.Depth == 0 {
		t.Errorf("%+v, %+v", w, r)
	}
	if code := p.stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit status %d: %s", code, p.stderr)
	}
	if _, err := os.Stat(socket); !os.IsNotExist(err) {
		t.Errorf("its socket is left: %v", err)
	}
	open := start(t, env, append(args, "--users=0,nobody")...)
	if st, err := os.Stat(socket); err != nil || st.Mode().Perm() != 0o666 {
		t.Errorf("%v, %v", st, err)
	}
	if code := open.stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit status %d: %s", code, open.stderr)
	}
}

func statusOf(t *testing.T, directory string) (st *dirpb.StatusReply) {
	t.Helper()
	dir, err := dirclient.Open(dirclient.Options{Addrs: []string{directory}})
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := dir.Call(ctx, func(ctx context.Context, c dirpb.DirectoryClient) (err error) {
		st, err = c.Status(ctx, &dirpb.StatusRequest{})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return st
}

// The address of a broker that listens on all of them is the one by which it reaches the directory.
func TestBrokerPage(t *testing.T) {
	web, err := httpd.Start(t.Context(), httpd.Options{Addr: "0.0.0.0:0", Role: "broker", Version: "v1"})
	if err != nil {
		t.Fatal(err)
	}
	defer web.Close()
	_, port, _ := net.SplitHostPort(web.Addr())
	c := config.DefaultBrokerNode()
	if got := brokerPage(t.Context(), web, c); got != "http://127.0.0.1:"+port {
		t.Errorf("page %s", got)
	}
	c.TLS.CA = "ca.pem"
	if got := brokerPage(t.Context(), web, c); got != "https://127.0.0.1:"+port {
		t.Errorf("page %s over TLS", got)
	}
	if got := brokerPage(t.Context(), nil, c); got != "" {
		t.Errorf("page %s without http-listen", got)
	}
}

// The folder of kvd dev's socket is one that others cannot write to.
func TestOwnFolder(t *testing.T) {
	dir := t.TempDir()
	own, open, file, link := filepath.Join(dir, "own"), filepath.Join(dir, "open"), filepath.Join(dir, "file"),
		filepath.Join(dir, "link")
	for range 2 { // it is made, and it is there
		if err := ownFolder(own); err != nil {
			t.Error(err)
		}
	}
	if err := errors.Join(os.Mkdir(open, 0o777), os.Chmod(open, 0o777), os.WriteFile(file, nil, 0o600),
		os.Symlink(own, link)); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{open, file, link, filepath.Join(dir, "none", "none")} {
		if err := ownFolder(bad); err == nil {
			t.Errorf("%s will do", bad)
		}
	}
}
