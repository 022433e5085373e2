package main

import (
	"fmt"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/kvd-project/kvd/internal/archive"
)

// An archive makes snapshots of all namespaces, prunes, tells of it, and leaves nothing unfinished when it is stopped.
func TestArchive(t *testing.T) {
	env, _ := runtimeDir(t)
	d := start(t, env, "directory", "--id=d", "--data-dir="+t.TempDir(), "--listen=127.0.0.1:0",
		"--raft-listen=127.0.0.1:0", "--bootstrap")
	addr := d.kv["directory"]
	m := start(t, env, "memnode", "--name=m", "--directory="+addr, "--memory=64MiB")
	roundTrip(t, open(t, addr, "shm", nil), "k")
	to := filepath.Join(t.TempDir(), "snapshots")
	args := []string{"archive", "--directory=" + addr, "--to=file://" + to, "--every=1s", "--keep-last=1",
		"--http-listen=127.0.0.1:0"}
	for range 2 { // the second finds the lock released
		a := start(t, env, args...)
		if a.kv["role"] != "archive" || a.kv["to"] != "file://"+to {
			t.Errorf("ready line holds %v", a.kv)
		}
		wantMetric(t, a.kv["http"], `kvd_archive_last_success_timestamp_seconds{namespace="default"} 1`)
		wantMetric(t, a.kv["http"], `kvd_archive_rpo_seconds{namespace="default"} [0-9]`)
		wantMetric(t, a.kv["http"], `kvd_archive_failures_total{namespace="default"} 0`)
		wantMetric(t, a.kv["http"], `kvd_archive_holds_lock 1`)
		if code := a.stop(syscall.SIGTERM); code != 0 {
			t.Errorf("exit status %d, want 0", code)
		}
	}
	dest, end, err := archive.OpenDestination("file://"+to, false)
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
