package main

import (
	"context"
	"strings"
	"syscall"
	"testing"

	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
)

// A tier node has the files of namespaces that name it, as the same volume after it is killed and started again. A
// second process is refused, and so is a folder that was given up.
func TestTier(t *testing.T) {
	env, _ := runtimeDir(t)
	d := start(t, env, "directory", "--id=d", "--data-dir="+t.TempDir(), "--listen=127.0.0.1:0",
		"--raft-listen=127.0.0.1:0", "--bootstrap")
	addr := d.kv["directory"]
	m := start(t, env, "memnode", "--name=m", "--directory="+addr, "--memory=64MiB")
	args := []string{"tier", "--name=t1", "--directory=" + addr, "--folder=" + t.TempDir(), "--size=1GiB",
		"--http-listen=127.0.0.1:0"}
	n := start(t, env, args...)
	if n.kv["role"] != "tier" || n.kv["volume"] != "1" || n.kv["tcp"] == "" {
		t.Errorf("ready line holds %v", n.kv)
	}
	dir, err := dirclient.Open(dirclient.Options{Addrs: []string{addr}})
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	call := func(fn func(context.Context, dirpb.DirectoryClient) error) {
		t.Helper()
		if err := dir.Call(t.Context(), fn); err != nil {
			t.Fatal(err)
		}
	}
	call(func(ctx context.Context, c dirpb.DirectoryClient) error {
		_, err := c.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: "cold", BytesPerNode: 16 << 20,
			Tier: &dirpb.Tier{Nodes: []string{"t1"}}})
		return err
	})
	holds := func(boot uint64) {
		t.Helper()
		testutil.Until(t, "the volume to have the namespace", func() bool {
			var v *dirpb.Volume
			call(func(ctx context.Context, c dirpb.DirectoryClient) error {
				s, err := c.Status(ctx, &dirpb.StatusRequest{})
				v = s.GetMap().GetVolumes()[0]
				return err
			})
			return v.Id == 1 && v.Boot == boot && len(v.Regions) == 1
		})
	}
	holds(1)
	wantMetric(t, n.kv["http"], `kvd_tier_file_bytes{namespace="cold"} [0-9]`)
	wantMetric(t, n.kv["http"], `kvd_tier_directory_silence_seconds [0-9]`)
	wantMetric(t, n.kv["http"], `kvd_tier_closed_namespaces 0`)
	p := spawn(t, env, args...)
	if code := p.wait(); code != exitFailure || !strings.Contains(p.stderr.String(), "another process") {
		t.Errorf("a second process: exit status %d: %s", code, p.stderr.String())
	}
	n.stop(syscall.SIGKILL)
	n = start(t, env, args...)
	holds(2)
	if code := n.stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit status %d, want 0", code)
	}
	testutil.Until(t, "the tier node to be given up", func() bool {
		return dir.CallOnce(t.Context(), func(ctx context.Context, c dirpb.DirectoryClient) error {
			_, err := c.GiveUpTier(ctx, &dirpb.GiveUpTierRequest{Name: "t1"})
			return err
		}) == nil
	})
	n = spawn(t, env, args...)
	if code := n.wait(); code != exitFailure || !strings.Contains(n.stderr.String(), "was given up") {
		t.Errorf("a folder that was given up: exit status %d: %s", code, n.stderr.String())
	}
	args[3] = "--folder=" + t.TempDir()
	n = start(t, env, args...)
	if n.kv["volume"] != "2" {
		t.Errorf("ready line holds %v", n.kv)
	}
	for _, p := range []*process{n, m, d} {
		if code := p.stop(syscall.SIGTERM); code != 0 {
			t.Errorf("exit status %d, want 0", code)
		}
	}
}
