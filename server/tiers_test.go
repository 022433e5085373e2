package server

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/lead"
)

func volume(name string, boot uint64) *dirpb.Volume {
	return &dirpb.Volume{Name: name, Folder: 7, Boot: boot, Process: boot, CapacityBytes: 1 << 40,
		Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "h:1"}}}
}

func leading(c *cluster) *Node {
	for _, n := range c.all() {
		if n.leading.Load() != nil {
			return n
		}
	}
	return c.all()[0]
}

// keptVolumes counts entries of KeepVolume in a directory node's log.
func keptVolumes(t *testing.T, n *Node) (count int) {
	t.Helper()
	first, err := n.store.FirstIndex()
	for i := first; err == nil && i <= n.machine.appliedIndex(); i++ {
		e, c := new(raft.Log), new(fsmpb.Command)
		if err = n.store.GetLog(i, e); err == nil && e.Type == raft.LogCommand {
			err = proto.Unmarshal(e.Data, c)
		}
		if c.GetKeepVolume() != nil {
			count++
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return count
}

// A tier node hears all that it needs to serve sessions, and what it says again makes no entry in the log.
func TestKeepVolume(t *testing.T) {
	c := newCluster(t, 3, forever)
	var first *dirpb.KeepVolumeReply
	keep := func(v *dirpb.Volume) (r *dirpb.KeepVolumeReply) {
		t.Helper()
		retry(t, "keep", c.all(), func(d dirpb.DirectoryClient) (err error) {
			r, err = d.KeepVolume(testCtx(t), &dirpb.KeepVolumeRequest{Volume: v, UsedBytes: 9})
			return err
		})
		return r
	}
	testutil.Until(t, "the level", func() bool { return leading(c).level() >= 4 })
	first = keep(volume("t1", 1))
	if first.VolumeId != 1 || len(first.Keys) == 0 || first.Sessions == nil || first.ClusterId == "" ||
		first.AgainMillis == 0 {
		t.Fatalf("%v", first)
	}
	kept := keptVolumes(t, leading(c))
	if again := keep(volume("t1", 1)); again.VolumeId != 1 {
		t.Fatalf("%v", again)
	}
	if now := keptVolumes(t, leading(c)); now != kept || now == 0 {
		t.Errorf("%d entries after %d: what was said again made one", now, kept)
	}
	_, err := dial(t, leading(c)).KeepVolume(testCtx(t), &dirpb.KeepVolumeRequest{Volume: volume("t1", 1),
		ClusterId: "another"})
	wantCode(t, err, codes.FailedPrecondition, `is of the store "another"`)
	_, err = dial(t, leading(c)).KeepVolume(testCtx(t), &dirpb.KeepVolumeRequest{})
	wantCode(t, err, codes.InvalidArgument, "tier node name")
	s, err := dial(t, leading(c)).Status(testCtx(t), &dirpb.StatusRequest{})
	if err != nil || len(s.Map.Volumes) != 1 || s.Map.Volumes[0].UsedBytes != 9 {
		t.Fatalf("%v: %v", s.GetMap().GetVolumes(), err)
	}
}

// A tier node opens background sessions in the namespaces that name it, and no others; its name is its own.
func TestTierRole(t *testing.T) {
	x := newTenants(t)
	ops, tier, other, client := x.as("operator", "ops"), x.as("tier", "t1"), x.as("tier", "t2"), x.as("client", "ann")
	if _, err := tier.KeepVolume(testCtx(t), &dirpb.KeepVolumeRequest{Volume: volume("t1", 1)}); err != nil {
		t.Fatal(err)
	}
	_, err := other.KeepVolume(testCtx(t), &dirpb.KeepVolumeRequest{Volume: volume("t1", 2)})
	wantCode(t, err, codes.PermissionDenied, "belongs to", "not to")
	_, err = client.KeepVolume(testCtx(t), &dirpb.KeepVolumeRequest{Volume: volume("t9", 2)})
	wantCode(t, err, codes.PermissionDenied)
	for _, name := range []string{"cold", "plain"} {
		q := &dirpb.CreateNamespaceRequest{Name: name, Replicas: 1, BytesPerNode: 16 << 20}
		if name == "cold" {
			q.Tier = &dirpb.Tier{Nodes: []string{"t1"}, Copies: 1, Bytes: 1 << 30}
		}
		x.create(ops, q)
	}
	audit, err := ops.Audit(testCtx(t), &dirpb.AuditRequest{})
	if err != nil || !slices.ContainsFunc(audit.Entries, func(e *dirpb.AuditEntry) bool {
		return e.Object == "cold" && strings.Contains(e.Detail, "tier-nodes=t1 tier-copies=1 tier-bytes=1073741824")
	}) {
		t.Errorf("%v: %v", audit, err)
	}
	open := func(c dirpb.DirectoryClient, namespace string, background, knows bool) error {
		_, err := c.OpenSession(testCtx(t), &dirpb.OpenSessionRequest{Namespace: namespace, Background: background,
			KnowsStubs: knows})
		return err
	}
	if err := open(tier, "cold", true, true); err != nil {
		t.Fatal(err)
	}
	wantCode(t, open(tier, "cold", false, true), codes.PermissionDenied, "background sessions alone")
	wantCode(t, open(tier, "plain", true, true), codes.PermissionDenied, "has no right")
	wantCode(t, open(other, "cold", true, true), codes.PermissionDenied, "has no right")
	wantCode(t, open(ops, "cold", false, false), codes.FailedPrecondition, "run a later version")
	if err := open(ops, "cold", false, true); err != nil {
		t.Fatal(err)
	}
	who, err := tier.WhoAmI(testCtx(t), &dirpb.WhoAmIRequest{})
	if err != nil || len(who.Namespaces) != 1 || who.Namespaces[0].Namespace != "cold" {
		t.Fatalf("%v: %v", who, err)
	}
	_, err = tier.GiveUpTier(testCtx(t), &dirpb.GiveUpTierRequest{Name: "t1"})
	wantCode(t, err, codes.PermissionDenied)
	_, err = ops.GiveUpTier(testCtx(t), &dirpb.GiveUpTierRequest{Name: "t1", VolumeId: 9})
	wantCode(t, err, codes.NotFound, `tier node "t1", volume 9`)
	_, err = ops.GiveUpTier(testCtx(t), &dirpb.GiveUpTierRequest{Name: "t1"})
	wantCode(t, err, codes.FailedPrecondition, "was heard", "stop it first")
	x.n.withState(x.n.leading.Load(), func(l *lead.Leader, _ *fsm.State, now time.Duration) {
		l.KeptVolume(1, 1, 0, now-x.n.opts.Lease)
	})
	if r, err := ops.GiveUpTier(testCtx(t), &dirpb.GiveUpTierRequest{Name: "t1"}); err != nil || r.VolumeId != 1 {
		t.Fatalf("%v: %v", r, err)
	}
	back := proto.CloneOf(volume("t1", 2))
	back.Id = 1
	_, err = tier.KeepVolume(testCtx(t), &dirpb.KeepVolumeRequest{Volume: back})
	wantCode(t, err, codes.NotFound, "was given up")
}
