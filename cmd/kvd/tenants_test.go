package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/rdma"
)

// outcome is what a Put of a key said.
type outcome struct {
	key string
	rdma.Outcome
}

// TestRevoke: a client in the middle of its work loses the right to write. Its session is fenced at the memory node at
// once, what its operations said holds, and it goes on when it has the right again.
func TestRevoke(t *testing.T) {
	env, _ := runtimeDir(t)
	files := newCertificates(t)
	d := start(t, env,
		append([]string{"directory", "--id=d", "--data-dir=" + t.TempDir(), "--listen=127.0.0.1:0",
			"--raft-listen=127.0.0.1:0", "--bootstrap", "--lease=5s"}, files.flags("directory")...)...)
	addr := d.kv["directory"]
	start(t, env, append([]string{"memnode", "--name=m", "--directory=" + addr, "--memory=64MiB", "--shm-socket=off"},
		files.flags("memnode")...)...)
	createNamespace(t, addr, "shop", files.load("operator"), files.identity("gateway"), files.identity("client"))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	open := func(role string, readOnly bool) (*client.Client, error) {
		return client.Open(ctx, client.Options{Directory: []string{addr}, Namespace: "shop", Provider: "tcp",
			TLS: files.load(role), ReadOnly: readOnly, OpTimeout: patience})
	}
	opened := func(role string, readOnly bool) *client.Client {
		t.Helper()
		c, err := open(role, readOnly)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	owner, tenant := opened("client", false), opened("gateway", false)
	if _, err := open("archive", true); !errors.Is(err, client.ErrForbidden) ||
		!strings.Contains(err.Error(), "has no right in namespace") {
		t.Fatalf("another tenant opens a session: %v", err)
	}
	dir, err := dirclient.Open(dirclient.Options{Addrs: []string{addr}, TLS: files.load("client")})
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	owns := func(call func(ctx context.Context, d dirpb.DirectoryClient) error) {
		t.Helper()
		if err := dir.Call(ctx, call); err != nil {
			t.Fatal(err)
		}
	}
	grant := func(right dirpb.Right) {
		t.Helper()
		owns(func(ctx context.Context, d dirpb.DirectoryClient) error {
			_, err := d.GrantAccess(ctx, &dirpb.GrantAccessRequest{
				Namespace: "shop", Access: &dirpb.Access{Who: files.identity("gateway"), Right: right}})
			return err
		})
	}

	// Puts go on until the first that fails, and then once more.
	var done atomic.Int64
	results := make(chan outcome, 1<<16)
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := 0; ; i++ {
				key := fmt.Sprintf("w%d-%d", w, i)
				_, err := tenant.Put(ctx, []byte(key), []byte("v"), client.PutOptions{})
				results <- outcome{key, client.Outcome(err)}
				if err == nil {
					done.Add(1)
					continue
				}
				if client.Outcome(err) == rdma.No && errors.Is(err, client.ErrForbidden) {
					if !strings.Contains(err.Error(), "kvctl namespace grant shop "+files.identity("gateway")+
						" write") {
						t.Errorf("the error does not say what to do: %v", err)
					}
					return
				}
				if !errors.Is(err, client.ErrUnknownOutcome) && !errors.Is(err, client.ErrUnavailable) {
					t.Errorf("a Put of a session that is fenced: %v", err)
					return
				}
			}
		})
	}
	for done.Load() < 100 && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
	}
	was := time.Now()
	grant(dirpb.Right_RIGHT_READ)
	told := time.Since(was)
	for {
		var st dirpb.SessionLife
		owns(func(ctx context.Context, d dirpb.DirectoryClient) error {
			r, err := d.ShowNamespace(ctx, &dirpb.ShowNamespaceRequest{Name: "shop"})
			if r.GetSessions() == 1 { // the owner's: that of the tenant is fenced
				st = dirpb.SessionLife_SESSION_FENCED
			}
			return err
		})
		if st == dirpb.SessionLife_SESSION_FENCED {
			break
		}
	}
	t.Logf("told after %v, fenced after %v, %d Puts before", told, time.Since(was), done.Load())
	fenced := done.Load()
	wg.Wait()
	if n := done.Load(); n != fenced && n > fenced+4 { // replies that were on their way
		t.Errorf("%d Puts were done when the session was fenced, %d later", fenced, n)
	}
	close(results)
	counts := make(map[rdma.Outcome]int)
	for r := range results {
		counts[r.Outcome]++
		_, err := owner.Get(ctx, []byte(r.key))
		if r.Outcome == rdma.Yes && err != nil || r.Outcome == rdma.No && !errors.Is(err, client.ErrNotFound) ||
			err != nil && !errors.Is(err, client.ErrNotFound) {
			t.Fatalf("%s: outcome %v, and it is there: %v", r.key, r.Outcome, err)
		}
	}
	t.Logf("outcomes %v", counts)

	// To read is left.
	reader := opened("gateway", true)
	if _, err := reader.Get(ctx, []byte("w0-0")); err != nil {
		t.Error(err)
	}
	if _, err := reader.Put(ctx, []byte("k"), []byte("v"), client.PutOptions{}); !errors.Is(err, client.ErrInvalid) ||
		!strings.Contains(err.Error(), "read-only") {
		t.Errorf("a Put of a reader: %v", err)
	}
	grant(dirpb.Right_RIGHT_WRITE)
	for {
		_, err := tenant.Put(ctx, []byte("again"), []byte("v"), client.PutOptions{})
		if err == nil {
			break
		}
		if !errors.Is(err, client.ErrForbidden) {
			t.Fatal(err)
		}
	}
}
