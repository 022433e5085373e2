package main

import (
	"context"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/archive"
	"github.com/kvd-project/kvd/internal/archive/places"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
)

// An archive makes snapshots of all namespaces, prunes, tells of it, and leaves nothing unfinished when it is stopped.
func TestArchive(t *testing.T) {
	env, _ := runtimeDir(t)
	d := start(t, env, "directory", "--id=d", "--data-dir="+t.TempDir(), "--listen=127.0.0.1:0",
		"--raft-listen=127.0.0.1:0", "--bootstrap")
	addr := d.kv["directory"]
	m := start(t, env, "memnode", "--name=m", "--directory="+addr, "--memory=64MiB")
	roundTrip(t, open(t, addr, "shm", nil), "k")
	backend := s3mem.New()
	if err := backend.CreateBucket("bkt"); err != nil {
		t.Fatal(err)
	}
	s3 := httptest.NewServer(gofakes3.New(backend).Server())
	defer s3.Close()
	for key, value := range map[string]string{"ENDPOINT_URL": s3.URL, "ACCESS_KEY_ID": "me",
		"SECRET_ACCESS_KEY": "secret"} {
		t.Setenv("AWS_"+key, value)
	}
	folder := "file://" + filepath.Join(t.TempDir(), "snapshots")
	for _, to := range []string{folder, folder, "s3://bkt/x"} { // the second finds the lock released
		a := start(t, env, "archive", "--directory="+addr, "--to="+to, "--every=1s", "--keep-last=1",
			"--http-listen=127.0.0.1:0")
		if a.kv["role"] != "archive" || a.kv["to"] != to {
			t.Errorf("ready line holds %v", a.kv)
		}
		wantMetric(t, a.kv["http"], `kvd_archive_last_success_timestamp_seconds{namespace="default"} 1`)
		wantMetric(t, a.kv["http"], `kvd_archive_rpo_seconds{namespace="default"} [0-9]`)
		wantMetric(t, a.kv["http"], `kvd_archive_failures_total{namespace="default"} 0`)
		wantMetric(t, a.kv["http"], `kvd_archive_holds_lock 1`)
		if code := a.stop(syscall.SIGTERM); code != 0 {
			t.Errorf("exit status %d, want 0", code)
		}
		wantSnapshots(t, to)
	}
	for i, bad := range [][]string{{"archive", "--to=ftp://x"}, {"archive"}} {
		p := spawn(t, env, append(bad, "--directory="+addr)...)
		if code := p.wait(); code != exitUsage {
			t.Error(fmt.Sprint(bad, ": exit status ", code, " of number ", i))
		}
	}
	for _, p := range []*process{m, d} {
		if code := p.stop(syscall.SIGTERM); code != 0 {
			t.Errorf("exit status %d, want 0", code)
		}
	}
}

// wantSnapshots wants one or two of the namespace default, all finished, and the newest good.
func wantSnapshots(t *testing.T, from string) {
	t.Helper()
	dest, end, err := places.Open(from, false)
	if err != nil {
		t.Fatal(err)
	}
	defer end()
	all, err := archive.List(t.Context(), dest, "")
	if err != nil || len(all) == 0 || len(all) > 2 {
		t.Fatalf("snapshots: %v, %v", all, err)
	}
	for _, e := range all {
		if !e.Complete {
			t.Errorf("%+v is unfinished", e)
		}
	}
	snap, err := archive.Open(t.Context(), dest, "default", "")
	if err == nil {
		err = archive.Verify(t.Context(), snap, nil)
	}
	if err != nil {
		t.Error(err)
	}
}

// kvd dev with an archive has after a stop what it had, and refuses to start with a snapshot that is damaged.
func TestDevArchive(t *testing.T) {
	env, _ := runtimeDir(t)
	folder := filepath.Join(t.TempDir(), "snapshots")
	args := []string{"dev", "--listen=127.0.0.1:0", "--memory=96MiB", "--memnodes=1", "--redis=off", "--memcached=off",
		"--http=off", "--broker=off", "--archive=" + folder}
	dev := func() (*process, *client.Client) {
		t.Helper()
		p := spawn(t, env, args...)
		p.ready()
		return p, open(t, p.kv["directory"], "shm", nil)
	}
	stop := func(p *process) {
		t.Helper()
		if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		<-p.exited
		if code := p.cmd.ProcessState.ExitCode(); code != 0 {
			t.Fatalf("exit status %d, want 0", code)
		}
	}
	p, c := dev()
	roundTrip(t, c, "first")
	stop(p)
	p, c = dev()
	wantValue(t, c, "first")
	roundTrip(t, c, "second")
	createNamespace(t, p.kv["directory"], "another", nil)
	stop(p)
	p, c = dev()
	wantValue(t, c, "first")
	wantValue(t, c, "second")
	st, err := openSource(sourceOptions{directory: []string{p.kv["directory"]}})
	if err != nil {
		t.Fatal(err)
	}
	defer st.dir.Close()
	if all, err := st.Namespaces(t.Context()); err != nil || !slices.Contains(all, "another") {
		t.Errorf("namespaces %q, %v", all, err)
	}
	stop(p)

	files, err := filepath.Glob(folder + "/default/*/seg-*.kvs")
	if err != nil || len(files) == 0 {
		t.Fatalf("segments %q, %v", files, err)
	}
	for _, f := range files {
		if err := os.WriteFile(f, []byte("other"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if code := spawn(t, env, args...).wait(); code != exitFailure {
		t.Errorf("with damaged files: exit status %d, want %d", code, exitFailure)
	}
}

// An archive over TLS needs its role and the right to read, in each namespace: what it may not read fails, and what it
// may has a snapshot.
func TestArchiveOverTLS(t *testing.T) {
	env, dir := runtimeDir(t)
	files := newCertificates(t)
	kvd := func(role string, args ...string) *process {
		t.Helper()
		return start(t, env, append(append([]string{role}, files.flags(role)...), args...)...)
	}
	addr := kvd("directory", "--id=d", "--data-dir="+t.TempDir(), "--listen=127.0.0.1:0",
		"--raft-listen="+freeAddr(t), "--bootstrap").kv["directory"]
	kvd("memnode", "--name=m", "--directory="+addr, "--memory=64MiB", "--listen-tcp=127.0.0.1:0",
		"--shm-socket="+filepath.Join(dir, "memnode.sock"))
	operator, owner := files.load("operator"), files.identity("client")
	for _, name := range []string{"secret", "shop"} {
		createNamespace(t, addr, name, operator, owner)
	}
	c, err := client.Open(t.Context(), client.Options{Directory: []string{addr}, Namespace: "shop", Provider: "tcp",
		TLS: files.load("client")})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	roundTrip(t, c, "k")
	to := "file://" + filepath.Join(t.TempDir(), "snapshots")
	a := kvd("archive", "--directory="+addr, "--to="+to, "--every=1s")
	testutil.Until(t, "it says which right it lacks", func() bool {
		return strings.Contains(a.stderr.String(), "kvctl namespace grant shop "+files.identity("archive")+" read")
	})
	d, err := dirclient.Open(dirclient.Options{Addrs: []string{addr}, TLS: operator})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err = d.CallOnce(ctx, func(ctx context.Context, c dirpb.DirectoryClient) error {
		_, err := c.GrantAccess(ctx, &dirpb.GrantAccessRequest{Namespace: "shop",
			Access: &dirpb.Access{Who: files.identity("archive"), Right: dirpb.Right_RIGHT_READ}})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	dest, end, err := places.Open(to, false)
	if err != nil {
		t.Fatal(err)
	}
	defer end()
	testutil.Until(t, "a snapshot", func() bool {
		all, err := archive.List(t.Context(), dest, "")
		if err != nil {
			t.Fatal(err)
		}
		if slices.ContainsFunc(all, func(e archive.Entry) bool { return e.Namespace == "secret" }) {
			t.Fatalf("of what it may not read: %v", all)
		}
		return slices.ContainsFunc(all, func(e archive.Entry) bool { return e.Complete })
	})
	snap, err := archive.Open(t.Context(), dest, "shop", "")
	if err == nil {
		err = archive.Verify(t.Context(), snap, nil)
	}
	if err != nil || snap.Keys != 1 {
		t.Errorf("%+v, %v", snap, err)
	}
	if code := a.stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit status %d, want 0", code)
	}
}
