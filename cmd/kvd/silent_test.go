package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/overview"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/rdma"
)

// mixedStore is a store of three memory nodes with namespaces of every kind on each: data has two copies, page is a
// cache with one, and kept a store with one. Keys are in every placement group of each.
type mixedStore struct {
	keptStore // m is the memory node that things happen to; c is of data
	by        map[string]*client.Client
}

const mixedKeys = 64

func newMixedStore(t *testing.T) *mixedStore {
	s := &mixedStore{keptStore: keptStore{t: t}, by: make(map[string]*client.Client)}
	s.env, _ = runtimeDir(t)
	s.d = start(t, s.env, "directory", "--id=d1", "--data-dir="+t.TempDir(), "--listen=127.0.0.1:0",
		"--raft-listen=127.0.0.1:0", "--bootstrap", "--lease=1s")
	addr := s.d.kv["directory"]
	for _, name := range []string{"m1", "m3", "m2"} {
		s.args = []string{"memnode", "--name=" + name, "--directory=" + addr, "--memory=96MiB",
			"--http-listen=127.0.0.1:0"}
		s.m = start(t, s.env, s.args...)
	}
	var err error
	if s.dir, err = dirclient.Open(dirclient.Options{Addrs: []string{addr}}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.dir.Close() })
	device, err := providers.Open("tcp", providers.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = device.Close() })
	for _, q := range []*dirpb.CreateNamespaceRequest{
		{Name: "data", Replicas: 2, BytesPerNode: 16 << 20},
		{Name: "page", Replicas: 1, BytesPerNode: 8 << 20, Mode: dirpb.NamespaceMode_NAMESPACE_CACHE},
		{Name: "kept", Replicas: 1, BytesPerNode: 8 << 20},
	} {
		s.call(func(ctx context.Context, d dirpb.DirectoryClient) error {
			_, err := d.CreateNamespace(ctx, q)
			return err
		})
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		c, err := client.Open(ctx, client.Options{Directory: []string{addr}, Namespace: q.Name, Devices: []*rdma.Device{
			device}})
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() }) // the store may be gone
		s.by[q.Name] = c
		s.fill(q.Name, "before")
	}
	return s
}

// fill puts a value under every key of a namespace, however long that takes.
func (s *mixedStore) fill(ns, value string) {
	s.t.Helper()
	s.c = s.by[ns]
	for i := range mixedKeys {
		s.put(fmt.Sprint("key", i), value)
	}
}

// waits waits until kept, and nothing else, waits for m2.
func (s *mixedStore) waits() {
	s.t.Helper()
	s.until("word that kept waits for m2", func() bool {
		all := overview.Problems(s.status())
		for _, p := range all {
			if strings.Contains(p.What, "memory node m2 is silent and has the only copy of") {
				if !strings.Contains(p.What, "of namespace kept") || strings.Contains(p.What, "data") ||
					strings.Contains(p.What, "page") {
					s.t.Fatalf("%q names more than the namespace that waits", p.What)
				}
				return true
			}
		}
		return false
	})
	if n := s.node("m2"); n.State != dirpb.NodeState_NODE_UP {
		s.t.Fatalf("m2 is %v, want it waited for", n)
	}
}

func (s *mixedStore) node(name string) *dirpb.Node {
	s.t.Helper()
	for _, n := range s.status().GetMap().GetNodes() {
		if n.GetName() == name {
			return n
		}
	}
	s.t.Fatalf("no memory node %q", name)
	return nil
}

// Keeper and worker of a memory node die, which has the only copy of something. All keys that have a copy elsewhere,
// and those of a cache, can be written within a few leases; those that have none are waited for.
func TestOnlyCopyHoldsUpNothingElse(t *testing.T) {
	s := newMixedStore(t)
	worker := s.worker()
	for _, pid := range []int{s.m.cmd.Process.Pid, worker} {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			t.Fatal(err)
		}
	}
	s.fill("data", "after")
	s.fill("page", "after")
	s.waits()
	s.c = s.by["data"]
	for i := range mixedKeys {
		if v := s.get(fmt.Sprint("key", i)); v != "after" {
			t.Fatalf("data has %q, want what was put while m2 was waited for", v)
		}
	}
	if ns := overview.Namespaces(s.status()); len(ns) != 3 {
		t.Fatalf("namespaces are %v", ns)
	}
	s.call(func(ctx context.Context, d dirpb.DirectoryClient) error {
		_, err := d.GiveUpNode(ctx, &dirpb.GiveUpNodeRequest{Node: "m2"})
		return err
	})
	if n := s.node("m2"); n.State != dirpb.NodeState_NODE_DOWN {
		t.Fatalf("m2 was given up, and is %v", n)
	}
}

// A memory node stands still, and goes on later. Nothing that has a copy elsewhere waits for it; what it has the only
// copy of is there when it is back, and its other copies are made again.
func TestSilentGoesOn(t *testing.T) {
	s := newMixedStore(t)
	worker := s.worker()
	for _, pid := range []int{worker, s.m.cmd.Process.Pid} {
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGCONT) }) // it may have ended
	}
	s.fill("data", "meanwhile")
	s.fill("page", "meanwhile")
	s.waits()
	for _, pid := range []int{s.m.cmd.Process.Pid, worker} {
		if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
	}
	s.c = s.by["kept"]
	for i := range mixedKeys {
		if v := s.get(fmt.Sprint("key", i)); v != "before" {
			t.Fatalf("kept has %q, want what it had before", v)
		}
	}
	s.until("second copy of everything", func() bool {
		for _, pg := range s.status().GetMap().GetPgs() {
			if overview.Lacks(s.status().GetMap(), pg) != "" {
				return false
			}
		}
		return !s.node("m2").GetSilent()
	})
	s.c = s.by["data"]
	for i := range mixedKeys {
		if v := s.get(fmt.Sprint("key", i)); v != "meanwhile" {
			t.Fatalf("data has %q, want what was put while m2 was silent", v)
		}
	}
	if _, err := os.Stat(fmt.Sprintf("/proc/%d", worker)); err != nil {
		t.Fatalf("the worker of m2 did not live through it: %v", err)
	}
}
