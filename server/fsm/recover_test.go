package fsm

import (
	"bytes"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

func recovery(node string) *fsmpb.Command {
	return &fsmpb.Command{Op: &fsmpb.Command_Recover{Recover: &fsmpb.Recover{
		Node: node, Key: bytes.Repeat([]byte{1}, KeyBytes), PreviousKey: bytes.Repeat([]byte{2}, KeyBytes),
		UnixMillis: 9,
	}}}
}

// recover applies a recovery. It is not as do, for which versions of the map have no gaps.
func (h *harness) recover(node string) {
	h.t.Helper()
	res := Apply(h.s, recovery(node))
	if res.Err != nil {
		h.t.Fatal(res.Err)
	}
	for _, row := range res.Changes {
		if h.disk[string(row.Key)] = row.Value; row.Value == nil {
			delete(h.disk, string(row.Key))
		}
	}
	h.checkCopies()
}

// recovered is a state that was recovered, with a namespace of two copies on two memory nodes, and what they hold as
// they were told.
type recovered struct {
	*harness
	pg   uint32
	held []*dirpb.HeldRegion
}

func (r *recovered) register(node uint32, held []*dirpb.HeldRegion) {
	r.t.Helper()
	n := r.s.Node(node)
	r.do(&fsmpb.Command{
		Op: &fsmpb.Command_RegisterNode{
			RegisterNode: &fsmpb.RegisterNode{Recoveries: r.s.Meta().Recoveries, UnixMillis: 10,
				Node: &dirpb.RegisterNodeRequest{Name: n.Name, Incarnation: n.Incarnation,
					CapacityBytes: n.CapacityBytes,
					Boot:          n.Boot, Endpoints: n.Endpoints, Held: held}}}})
	r.checkCopies()
}

func newRecovered(t *testing.T) *recovered {
	h := newHarness(t)
	h.do(initAt(1))
	h.do(&fsmpb.Command{
		Op: &fsmpb.Command_PutDirectory{
			PutDirectory: &fsmpb.PutDirectory{
				Directory: &fsmpb.Directory{Id: "d1", RaftAddr: "h:1", GrpcAddr: "h:2"}}}})
	h.do(&fsmpb.Command{
		Op: &fsmpb.Command_PutDirectory{
			PutDirectory: &fsmpb.PutDirectory{
				Directory: &fsmpb.Directory{Id: "d2", RaftAddr: "h:3", GrpcAddr: "h:4"}}}})
	for i := range uint64(2) {
		h.do(&fsmpb.Command{Op: &fsmpb.Command_RegisterNode{RegisterNode: &fsmpb.RegisterNode{
			Node: &dirpb.RegisterNodeRequest{Name: []string{"m1", "m2"}[i], Incarnation: 100 + i,
				CapacityBytes: 1 << 30, Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "h:1"}}},
		}}})
	}
	h.do(create(&dirpb.CreateNamespaceRequest{Name: "a", Replicas: 2, BytesPerNode: 64 << 20}))
	pg := h.s.PGs(0)[0]
	for _, pg := range h.s.PGs(0) {
		for _, m := range pg.Members {
			h.do(&fsmpb.Command{Op: &fsmpb.Command_PublishRegion{PublishRegion: &dirpb.PublishRegionRequest{
				NodeId: m.NodeId, Incarnation: m.Incarnation, PgId: pg.Id, Since: m.Since, Keys: []*dirpb.RegionKeys{
					{Provider: "tcp"}}}}})
		}
	}
	x := h.do(&fsmpb.Command{Op: &fsmpb.Command_OpenSession{OpenSession: &fsmpb.OpenSession{NamespaceId: 1}}}).Session
	h.do(&fsmpb.Command{
		Op: &fsmpb.Command_GrantExtent{GrantExtent: &fsmpb.GrantExtent{SessionId: x.Id, PgId: pg.Id, WantUnits: 100,
			PlaceUnits: 1}}})
	r := &recovered{harness: h, pg: pg.Id}
	for _, pg := range h.s.PGs(0) {
		pg = h.s.PG(pg.Id)
		r.held = append(r.held, &dirpb.HeldRegion{PgId: pg.Id, NamespaceId: 1, Epoch: pg.Epoch,
			Since: pg.Members[0].Since, IndexEnd: layout.RegionPageSize})
	}
	h.refuse(recovery("d9"), ErrNotFound, `directory node "d9"`)
	before := proto.CloneOf(h.s.Meta())
	h.recover("d1")
	m := h.s.Meta()
	if m.Recoveries != 1 || m.SessionId <= before.SessionId+1000 || m.ShardId <= before.ShardId+1000 ||
		m.PgId <= before.PgId || m.MapVersion <= before.MapVersion+1000 ||
		m.EpochCeiling <= before.EpochCeiling+1000 || m.JobId <= before.JobId+1000 ||
		m.KeyGeneration <= before.KeyGeneration+100 || bytes.Equal(m.ClusterKey, before.ClusterKey) {
		t.Fatalf("recovered %v of %v", m, before)
	}
	if m.VolumeId != 0 || len(m.UnknownVolumes) > 0 {
		t.Errorf("volumes of a level that has none: %v", m)
	}
	if len(h.s.Directory()) != 1 || h.s.Life(x.Id) == dirpb.SessionLife_SESSION_LIVE {
		t.Fatalf("directory nodes %v, session %v", h.s.Directory(), h.s.Life(x.Id))
	}
	for _, pg := range h.s.PGs(0) {
		if hp := h.s.Heap(pg.Id); pg.State != dirpb.PGState_PG_FROZEN || hp.Watermark != hp.End || len(hp.Free)+
			len(hp.Homes) > 0 || !hp.Dirty || hp.IndexNext != pg.IndexBytes {
			t.Fatalf("placement group %v, heap %v", pg, hp)
		}
	}
	// Nobody who has not heard of it has a say.
	h.refuse(&fsmpb.Command{Op: &fsmpb.Command_RegisterNode{RegisterNode: &fsmpb.RegisterNode{
		Node: &dirpb.RegisterNodeRequest{Name: "m1", Incarnation: 100, CapacityBytes: 1 << 30,
			Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "h:1"}}}}}}, ErrRefused, "recovered 1 times")
	return r
}

func (r *recovered) losses() []*dirpb.Loss { return r.s.Namespace(1).Losses }

// Memory nodes that hold what the state says keep it; then the index goes on where it was.
func TestRecovered(t *testing.T) {
	r := newRecovered(t)
	r.register(1, r.held)
	if r.s.Heap(r.pg).Recovered == nil {
		t.Error("it is over before every member was heard")
	}
	r.register(2, r.held)
	h, pg := r.s.Heap(r.pg), r.s.PG(r.pg)
	if h.Recovered != nil || h.IndexNext >= pg.IndexBytes || len(pg.Members) != 2 || len(r.losses()) > 0 {
		t.Errorf("%v, %v, lost %v", h, pg, r.losses())
	}
	if r.s.SessionCount() != 0 {
		t.Error("the session is not fenced by the registration of all memory nodes")
	}
}

// A copy that is not there, or was made at another time, is not believed; the other one is. Without another one the
// loss is noted.
func TestRecoveredWithoutCopy(t *testing.T) {
	r := newRecovered(t)
	other := proto.CloneOf(r.held[0])
	other.Since++
	r.register(1, append([]*dirpb.HeldRegion{other}, r.held[1:]...))
	if pg := r.s.PG(r.pg); len(pg.Members) != 1 || pg.Members[0].NodeId != 2 || len(r.losses()) > 0 {
		t.Fatalf("%v, lost %v", pg, r.losses())
	}
	r.register(2, r.held[1:])
	pg := r.s.PG(r.pg)
	if l := r.losses(); len(l) != 1 || l[0].PgId != r.pg || l[0].HeldBytes != 100*layout.UnitSize || l[0].Recovered ||
		pg.State != dirpb.PGState_PG_CREATING {
		t.Errorf("%v, lost %v", pg, l)
	}
	if h := r.s.Heap(r.pg); h.Recovered != nil || h.IndexNext >= pg.IndexBytes || h.Watermark != h.Start {
		t.Errorf("it does not start over: %v", h)
	}
}

// A later epoch of the placement group than the state has, told by either member first, is the end of all its copies:
// some have missed what others have.
func TestRecoveredBehindAnEpoch(t *testing.T) {
	for _, first := range []uint32{1, 2} {
		r := newRecovered(t)
		later := proto.CloneOf(r.held[0])
		later.Epoch++
		for _, node := range []uint32{first, 3 - first} {
			held := r.held
			if node == 1 {
				held = append([]*dirpb.HeldRegion{later}, r.held[1:]...)
			}
			r.register(node, held)
		}
		if pg, l := r.s.PG(r.pg), r.losses(); pg.State != dirpb.PGState_PG_CREATING || len(l) != 1 ||
			pg.Members[0].Since == later.Since {
			t.Errorf("first %d: %v, lost %v", first, pg, l)
		}
	}
}

// More in the index than the state knows of is not given out again, and said.
func TestRecoveredIndex(t *testing.T) {
	r := newRecovered(t)
	next := r.s.Heap(r.pg).Recovered.IndexNext
	more := proto.CloneOf(r.held[0])
	more.IndexEnd = next + 100
	r.register(1, append([]*dirpb.HeldRegion{more}, r.held[1:]...))
	r.register(2, r.held)
	if l, h := r.losses(), r.s.Heap(r.pg); len(l) != 1 || !l[0].Recovered || h.IndexNext != next+layout.SegmentSize {
		t.Errorf("lost %v, index from %d: %v", l, next, h)
	}
}
