package fsm

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

func initAt(level uint32) *fsmpb.Command {
	c := &fsmpb.Init{ClusterId: "c", ClusterKey: []byte("k")}
	if level > 0 {
		c.Level = &fsmpb.Level{Level: level, Version: "1.0"}
	}
	return &fsmpb.Command{Op: &fsmpb.Command_Init{Init: c}}
}

func raise(level uint32) *fsmpb.Command {
	return &fsmpb.Command{Op: &fsmpb.Command_Raise{Raise: &fsmpb.Level{Level: level, Version: "2.0"}}}
}

// At level 0 commands do what they did before there were levels: boots are not taken in, nobody is paused, and sessions
// that only read have discriminators of their own, too. A raise changes that for what comes after it, and keeps what
// was there.
func TestLevelZero(t *testing.T) {
	h := newHarness(t)
	h.do(initAt(0))
	boots := func(boot uint64) *fsmpb.Command {
		return &fsmpb.Command{Op: &fsmpb.Command_RegisterNode{RegisterNode: &fsmpb.RegisterNode{
			Node: &dirpb.RegisterNodeRequest{Name: "m1", Incarnation: 100, CapacityBytes: 1 << 30, Boot: boot,
				Keeps: true, Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "h:1"}}},
		}}}
	}
	pause := &fsmpb.Command{
		Op: &fsmpb.Command_PauseNode{PauseNode: &dirpb.PauseNodeRequest{NodeId: 1, Incarnation: 100, Millis: 100}}}
	open := func(readOnly bool) uint32 {
		return h.do(&fsmpb.Command{
			Op: &fsmpb.Command_OpenSession{
				OpenSession: &fsmpb.OpenSession{NamespaceId: 1, ReadOnly: readOnly}}}).Session.Discriminator
	}
	h.do(boots(1))
	if n := h.s.Node(1); n.Boot != 0 || n.Keeps {
		t.Fatalf("a memory node with a boot: %v", n)
	}
	if r := h.do(boots(2)); r.Arrival != ArrivalKnown {
		t.Fatalf("another boot arrived as %d", r.Arrival)
	}
	h.refuse(pause, ErrRefused, "pauses begin with level 1, and the directory is at level 0")
	h.do(create(&dirpb.CreateNamespaceRequest{Name: "a"}))
	h.refuse(rebalance(1, dirpb.Rebalancing_REBALANCING_ON), ErrRefused,
		"rebalances begin with level 1, and the directory is at level 0")
	if a, b := open(true), open(false); a != 1 || b != 2 {
		t.Fatalf("discriminators %d and %d, want 1 and 2", a, b)
	}
	h.checkCopies()

	h.do(raise(1))
	if h.s.Level() != 1 {
		t.Fatalf("level %d", h.s.Level())
	}
	h.refuse(raise(1), ErrRefused, "the directory is at level 1")
	if a, b := open(true), open(false); a != 0 || b != 4 {
		t.Fatalf("discriminators %d and %d, want 0 and 4", a, b)
	}
	if r := h.do(boots(2)); r.Arrival != ArrivalKnown || h.s.Node(1).Boot != 2 || !h.s.Node(1).Keeps {
		t.Fatalf("arrived as %d: %v", r.Arrival, h.s.Node(1))
	}
	h.do(rebalance(1, dirpb.Rebalancing_REBALANCING_ON))
	h.do(pause)
	if r := h.do(boots(3)); r.Arrival != ArrivalKept {
		t.Fatalf("another boot arrived as %d", r.Arrival)
	}
	h.checkCopies()
}

// A command of a later version is ErrLevel and changes nothing, wherever what this version does not know stands in it;
// so is a raise to a level that this version does not know.
func TestLaterCommands(t *testing.T) {
	h := newHarness(t)
	h.do(initAt(Level))
	before := h.s.Rows()
	unknown := protowire.AppendVarint(protowire.AppendTag(nil, 9999, protowire.VarintType), 1)
	alone, audited := new(fsmpb.Command), &fsmpb.Command{Audit: &dirpb.AuditEntry{Action: "later"}}
	for _, c := range []*fsmpb.Command{alone, audited} {
		c.ProtoReflect().SetUnknown(unknown)
	}
	for _, c := range []*fsmpb.Command{alone, audited, raise(Level + 1)} {
		b, err := proto.Marshal(c) // as it comes out of the log
		got := new(fsmpb.Command)
		if err = errors.Join(err, proto.Unmarshal(b, got)); err != nil {
			t.Fatal(err)
		}
		if r := Apply(h.s, got); !errors.Is(r.Err, ErrLevel) || len(r.Changes) > 0 || r.Audit != nil {
			t.Errorf("%v: %+v", c, r)
		}
	}
	if !slices.EqualFunc(before, h.s.Rows(), func(a, b Row) bool {
		return string(a.Key)+string(a.Value) == string(b.Key)+string(b.Value)
	}) {
		t.Error("the state changed")
	}
}

// Rows of a level that this version does not know, and bad rows of a level, are refused with a line that names both.
func TestLoadLevel(t *testing.T) {
	h := newHarness(t)
	h.do(initAt(Level))
	with := func(key string, m proto.Message) []Row {
		rows := slices.DeleteFunc(h.s.Rows(), func(r Row) bool { return r.Key[0] == rowLevel })
		return append(rows, encodeRow(key, m))
	}
	for _, c := range []struct {
		rows  []Row
		level bool
		want  string
	}{
		{with(levelKey, &fsmpb.Level{Level: Level + 1, Version: "2.0"}), true,
			"level 5, to which kvd 2.0 raised it, and this version knows levels up to 4: run kvd 2.0 or a later one"},
		{with(levelKey, &fsmpb.Level{}), false, "level 0"},
		{with("lx", &fsmpb.Level{Level: 1}), false, `corrupt state row "lx"`},
		{append(with(levelKey, &fsmpb.Level{Level: 1})[:1:1], Row{[]byte(levelKey), []byte{0xff}}), false,
			"corrupt state row"},
	} {
		_, err := Load(c.rows)
		if err == nil || errors.Is(err, ErrLevel) != c.level || !strings.Contains(err.Error(), c.want) {
			t.Errorf("error %v, want %q", err, c.want)
		}
	}
	if err := levelWithin(&fsmpb.Level{Level: 2, Version: "1.4"}, 3, 5); !errors.Is(err, ErrLevel) ||
		!strings.Contains(err.Error(), "level 2, of 1.4, and this version takes over none below 3: run a version in "+
			"between first") {
		t.Errorf("error %v", err)
	}
	if err := levelWithin(&fsmpb.Level{Level: 4}, 3, 5); err != nil {
		t.Error(err)
	}
}
