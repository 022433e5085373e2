package server

import (
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// together are the options of three nodes that are told the same, as from one template of a container engine.
func together(fs []vfs.FS) func(i int) Options {
	pid := os.Getpid()
	var addrs []string
	for i := range fs {
		addrs = append(addrs, fmt.Sprintf("127.%d.%d.%d:7400", 64+pid>>8%128, pid&255, 10+i))
	}
	return func(i int) Options {
		return Options{ID: fmt.Sprint("d", i+1), DataDir: "data", fs: fs[i], Lease: forever,
			GRPCAddr: addrs[i], Bootstrap: true, Join: slices.Clone(addrs)}
	}
}

// TestBeginTogether: nodes that are told the same make one cluster, not before all of them are there, and the first of
// them makes no second one when it has lost its disk and the others are in the first.
func TestBeginTogether(t *testing.T) {
	fs := []vfs.FS{vfs.NewMem(), vfs.NewMem(), vfs.NewMem()}
	opts := together(fs)
	c := &cluster{t: t, fs: fs, opts: opts}
	for i := range 2 {
		c.nodes = append(c.nodes, start(t, opts(i)))
	}
	// The first asks the third, which is not there, and is told so.
	if err := c.nodes[0].enterCluster(false); err == nil {
		t.Fatal("the first node began without the third")
	}
	for _, n := range c.nodes {
		if s, err := n.Status(t.Context(), &dirpb.StatusRequest{}); err != nil || s.ClusterId != "" ||
			len(n.members()) != 0 {
			t.Fatalf("node %s is in cluster %q with %v before the third is there: %v", n.opts.ID, s.GetClusterId(),
				n.members(), err)
		}
	}
	c.nodes = append(c.nodes, start(t, opts(2)))
	c.awaitVoters(3)
	var id string
	retry(t, "status", c.all(), func(d dirpb.DirectoryClient) error {
		s, err := d.Status(testCtx(t), &dirpb.StatusRequest{})
		id = s.GetClusterId()
		return err
	})

	if err := c.nodes[0].Close(); err != nil {
		t.Fatal(err)
	}
	fs[0] = vfs.NewMem()
	c.mu.Lock()
	c.nodes[0] = start(t, opts(0))
	c.mu.Unlock()
	ready(t, c.nodes[0])
	c.awaitVoters(3)
	if s, err := c.nodes[0].Status(t.Context(), &dirpb.StatusRequest{}); err != nil || s.ClusterId != id {
		t.Errorf("the first node is in cluster %q after the loss of its disk, the others in %q: %v", s.GetClusterId(),
			id, err)
	}
}
