package fsm

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

const (
	read   = dirpb.Right_RIGHT_READ
	write  = dirpb.Right_RIGHT_WRITE
	admin  = dirpb.Right_RIGHT_ADMIN
	nobody = dirpb.Right_RIGHT_UNSPECIFIED
)

// access changes the access list of namespace 1 as an operator.
func access(who string, right dirpb.Right) *fsmpb.Command {
	return accessBy(Caller{Identity: "operator/o", Everywhere: true}, who, right)
}

func accessBy(c Caller, who string, right dirpb.Right) *fsmpb.Command {
	return &fsmpb.Command{
		Op: &fsmpb.Command_SetAccess{
			SetAccess: &fsmpb.SetAccess{NamespaceId: 1, Access: &dirpb.Access{Who: who, Right: right},
				Identity: c.Identity, Groups: c.Groups, Everywhere: c.Everywhere}}}
}

func set(q *dirpb.SetNamespaceRequest) *fsmpb.Command {
	return &fsmpb.Command{Op: &fsmpb.Command_SetNamespace{SetNamespace: q}}
}

func openBy(readOnly bool, who string, groups ...string) *fsmpb.Command {
	return openAs(&fsmpb.OpenSession{NamespaceId: 1, Identity: who, Groups: groups, ReadOnly: readOnly})
}

// owned is a store of n memory nodes with a namespace of client/owner.
func owned(t tester, n int) *harness {
	return cluster(t, n, &dirpb.CreateNamespaceRequest{Name: "a", Owner: "client/owner"})
}

func TestRightOf(t *testing.T) {
	w := &dirpb.Namespace{Owner: "client/owner", Access: []*dirpb.Access{
		{Who: "client/r", Right: read}, {Who: "client/w", Right: write}, {Who: "group:admins", Right: admin},
		{Who: "group:readers", Right: read}}}
	groups := func(g ...string) []string { return g }
	for _, tc := range []struct {
		c    Caller
		want dirpb.Right
	}{
		{Caller{}, admin}, // without TLS
		{Caller{Identity: "operator/o", Everywhere: true}, admin},
		{Caller{Identity: "client/owner"}, admin},
		{Caller{Identity: "client/r"}, read},
		{Caller{Identity: "client/w"}, write},
		{Caller{Identity: "client/w", Groups: groups("readers")}, write},
		{Caller{Identity: "client/r", Groups: groups("x", "admins")}, admin},
		{Caller{Identity: "client/x", Groups: groups("readers")}, read},
		{Caller{Identity: "client/x"}, nobody},
		// a group's name is no identity's
		{Caller{Identity: "client/x", Groups: groups("client/owner", "client/w")}, nobody},
		{Caller{Identity: "group:admins"}, nobody}, // and the other way round
	} {
		if got := RightOf(w, tc.c); got != tc.want {
			t.Errorf("%+v has %v, want %v", tc.c, got, tc.want)
		}
	}
	if got := RightOf(&dirpb.Namespace{}, Caller{Identity: "client/x"}); got != write {
		t.Errorf("without an owner everybody has %v, want write", got)
	}
	if got := RightOf(&dirpb.Namespace{Owner: "group:team"},
		Caller{Identity: "client/x", Groups: groups("team")}); got != admin {
		t.Errorf("the group that owns it has %v", got)
	}
}

// A session opens with the right that it needs, and with none less.
func TestOpenNeedsRight(t *testing.T) {
	h := owned(t, 1)
	h.refuse(openBy(true, "client/x"), ErrForeign, `client/x has no right in namespace "a", and wants read`,
		"belongs to client/owner", "kvctl namespace grant a client/x read")
	h.refuse(openBy(false, "client/x y"), ErrForeign, "kvctl namespace grant a 'client/x y' write")
	h.do(access("client/x", read))
	h.do(openBy(true, "client/x"))
	h.refuse(openBy(false, "client/x"), ErrForeign, "client/x has read", "and wants write")
	h.do(access("group:team", write))
	h.do(openBy(false, "client/x", "team"))
	h.do(openBy(false, "client/owner"))
	h.do(openBy(false, "")) // without TLS
	h.do(openAs(&fsmpb.OpenSession{NamespaceId: 1, Identity: "janitor/j", Everywhere: true, Background: true}))
	h.refuse(openAs(&fsmpb.OpenSession{NamespaceId: 1, Identity: "client/y", Background: true}), ErrForeign)
	h.refuse(openBy(true, "client/owner", make([]string, identity.MaxGroups+1)...), ErrInvalid, "17 groups")
	h.refuse(openBy(true, "client/owner", "a\nb"), ErrInvalid, "group")
	h.checkCopies()
}

// An identity that has less than its session needs loses it at once, and nobody else does.
func TestRevokeFences(t *testing.T) {
	h := owned(t, 2)
	h.do(access("client/a", write))
	h.do(access("group:team", write))
	h.do(access("client/c", read))
	for _, c := range []*fsmpb.Command{openBy(false, "client/a"), openBy(true, "client/a"),
		openBy(false, "client/b", "team"), openBy(false, "client/a", "team"),
		openBy(true, "client/c"), openBy(false, "client/owner"), openBy(false, "")} {
		h.do(c)
	}
	fenced := func(want string) {
		t.Helper()
		var got []string
		for _, x := range h.s.Sessions() {
			if x.Life == dirpb.SessionLife_SESSION_FENCING {
				got = append(got, fmt.Sprint(x.Id))
			}
		}
		if s := strings.Join(got, " "); s != want {
			t.Fatalf("fencing %q, want %q", s, want)
		}
	}
	fencing := func(c *fsmpb.Command, n uint32, now string) {
		t.Helper()
		if r := h.do(c); r.Fencing != n {
			t.Fatalf("%v: fences %d, want %d", c, r.Fencing, n)
		}
		fenced(now)
	}
	fencing(access("client/c", write), 0, "") // more is no reason
	fencing(access("client/c", read), 0, "")
	fencing(access("client/a", read), 1, "1") // 2 only reads, 4 is of the group
	fencing(access("client/a", nobody), 1, "1 2")
	fencing(access("client/a", write), 0, "1 2") // it opens another one
	fencing(access("client/a", nobody), 0, "1 2")
	fencing(access("group:team", nobody), 2, "1 2 3 4")
	h.do(confirm(1, 100, 1, 2, 3, 4))
	h.do(confirm(2, 100, 1, 2, 3, 4))
	if n := len(h.s.Sessions()); n != 3 {
		t.Fatalf("%d sessions are left, want 3", n)
	}
	// Another owner: the former one has what the list says.
	h.do(access("client/new", read))
	h.do(set(&dirpb.SetNamespaceRequest{Name: "a", KeepLimit: true, Owner: "client/new"}))
	fenced("6")
	if w := h.s.Namespace(1); w.Owner != "client/new" || len(w.Access) != 1 || w.Access[0].Who != "client/c" {
		t.Fatalf("%v", w)
	}
	h.checkCopies()
}

// Access lists are changed by those who administer the namespace.
func TestSetAccess(t *testing.T) {
	h := owned(t, 1)
	by := func(who string, groups ...string) Caller { return Caller{Identity: who, Groups: groups} }
	h.refuse(accessBy(by("client/x"), "client/x", read), ErrForeign, "client/x has no right", "wants admin")
	h.do(accessBy(by("client/owner"), "client/w", write))
	h.refuse(accessBy(by("client/w"), "client/x", read), ErrForeign, "client/w has write")
	h.do(accessBy(by("client/owner"), "group:admins", admin))
	h.do(accessBy(by("client/y", "admins"), "client/x", read))
	h.do(accessBy(by("client/y", "admins"), "client/w", nobody))
	// Nobody locks the owner out.
	h.refuse(accessBy(by("client/y", "admins"), "client/owner", nobody), ErrRefused, "belongs to client/owner")
	h.refuse(access("client/owner", read), ErrRefused, "kvctl namespace set a --owner WHO")
	h.refuse(access("client/z", nobody), ErrNotFound, `client/z is not in the access list of namespace "a"`)
	h.refuse(access("shop", read), ErrInvalid, `"shop" is neither an identity nor a group`)
	h.refuse(access("client/z", 4), ErrInvalid, "right 4")
	h.refuse(access("client/z", -1), ErrInvalid, "right -1")
	if r := h.do(access("client/x", read)); len(r.Changes) != 0 {
		t.Errorf("the right that he has: %d changes", len(r.Changes))
	}
	c := access("client/x", read)
	c.GetSetAccess().NamespaceId = 9
	h.refuse(c, ErrNotFound)
	for i := len(h.s.Namespace(1).Access); i < MaxAccess; i++ {
		h.do(access(fmt.Sprint("client/n", i), read))
	}
	h.refuse(access("client/z", read), ErrFull, "256 entries")
	h.do(access("client/x", write)) // in the place of the one that he has
	h.checkCopies()

	h = cluster(t, 1, &dirpb.CreateNamespaceRequest{Name: "a"})
	h.refuse(access("client/x", read), ErrRefused, "has no owner, so everybody may use it")
	h.refuse(create(&dirpb.CreateNamespaceRequest{Name: "b", Owner: "shop"}), ErrInvalid, `owner "shop"`)
	h.refuse(set(&dirpb.SetNamespaceRequest{Name: "a", Owner: "group:"}), ErrInvalid, "owner")
	h.do(set(&dirpb.SetNamespaceRequest{Name: "a", Owner: "group:team"}))
	h.do(accessBy(by("client/x", "team"), "client/x", read))
}

// Sessions see nothing of what operators alone use of memory nodes: their keepers' sockets, whose they are, and which
// version runs.
func TestMapHidesNodes(t *testing.T) {
	h := owned(t, 1)
	h.do(&fsmpb.Command{
		Op: &fsmpb.Command_RegisterNode{
			RegisterNode: &fsmpb.RegisterNode{Identity: "memnode/x", Node: &dirpb.RegisterNodeRequest{
				Name: "x", Incarnation: 1, CapacityBytes: gib, Version: "v9", Control: "/run/kvd/keeper.sock",
				HostId: "host",
				Domain: "rack", Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "127.0.0.1:1"}},
			}}}})
	x := h.do(openBy(true, "client/owner")).Session
	find := func(m *dirpb.Map) *dirpb.Node {
		t.Helper()
		for _, n := range m.Nodes {
			if n.Name == "x" {
				return n
			}
		}
		t.Fatalf("no memory node x: %v", m)
		return nil
	}
	if n := find(h.s.Map(x)); n.Control != "" || n.Identity != "" || n.Version != "" || n.HostId != "host" ||
		len(n.Endpoints) != 1 {
		t.Errorf("a session sees %v", n)
	}
	if n := find(h.s.Map(nil)); n.Control != "/run/kvd/keeper.sock" || n.Identity != "memnode/x" || n.Version != "v9" {
		t.Errorf("an operator sees %v", n)
	}
}

// Sessions see nothing of tenancy.
func TestMapHidesTenancy(t *testing.T) {
	h := owned(t, 1)
	h.do(access("client/x", read))
	h.do(set(&dirpb.SetNamespaceRequest{
		Name: "a", Quota: &dirpb.Quota{Sessions: 9, Lanes: 2, TcpOpsPerSecond: 3, IndexBytes: 1 << 30}}))
	x := h.do(openBy(true, "client/x")).Session
	if w := h.s.Map(x).Namespaces[0]; w.Owner != "" || w.Access != nil || w.Quota != nil || w.Name != "a" {
		t.Errorf("a session sees %v", w)
	}
	if w := h.s.Map(nil).Namespaces[0]; w.Owner != "client/owner" || len(w.Access) != 1 || w.Quota.GetLanes() != 2 {
		t.Errorf("an operator sees %v", w)
	}
	h.do(set(&dirpb.SetNamespaceRequest{Name: "a", KeepLimit: true, Quota: &dirpb.Quota{}}))
	if w := h.s.Namespace(1); w.Quota != nil || w.Owner == "" {
		t.Errorf("a quota of nothing is kept: %v", w)
	}
}

func TestQuotaSessions(t *testing.T) {
	h := cluster(t, 1, &dirpb.CreateNamespaceRequest{Name: "a", Owner: "client/owner",
		Quota: &dirpb.Quota{Sessions: 2}})
	h.do(openBy(false, "client/owner"))
	h.do(openBy(true, "client/owner"))
	h.do(openAs(&fsmpb.OpenSession{NamespaceId: 1, Identity: "janitor/j", Everywhere: true, Background: true}))
	h.refuse(openBy(true, "client/owner"), ErrFull, `quota sessions: namespace "a" has 2 sessions open or being fenced, of 2`)
	h.refuse(openAs(&fsmpb.OpenSession{NamespaceId: 1, Identity: "client/owner", Background: true}), ErrFull,
		"quota sessions")
	h.do(expire(1))
	h.refuse(openBy(true, "client/owner"), ErrFull, "quota sessions") // until it is fenced
	h.do(confirm(1, 100, 1))
	h.do(openBy(true, "client/owner"))
	h.do(set(&dirpb.SetNamespaceRequest{Name: "a", Quota: &dirpb.Quota{Sessions: 3}}))
	h.do(openBy(true, "client/owner"))
	h.refuse(openBy(true, ""), ErrFull, "quota sessions") // nobody is exempt but janitors
}

// A shard does not grow beyond its namespace's quota, but moves.
func TestQuotaIndex(t *testing.T) {
	const segment = layout.SegmentSize
	h := cluster(t, 2, &dirpb.CreateNamespaceRequest{Name: "a", Replicas: 1, Shards: 2, Segments: 2,
		Quota: &dirpb.Quota{IndexBytes: 6*segment + 1}})
	if n := h.s.IndexBytes(1); n != 4*segment {
		t.Fatalf("%d bytes of index, want %d", n, 4*segment)
	}
	split := func(shard uint32) *fsmpb.Command {
		return startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE, ShardId: shard, Split: true})
	}
	h.refuse(startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE, ShardId: 1, Segments: 4}), ErrFull, "quota index")
	h.do(split(1))
	h.refuse(split(2), ErrFull, `quota index: namespace "a" has 25.5 KiB of index, of 25.5 KiB, and wants 8.5 KiB more`)
	// less than there is: nothing is taken
	h.do(set(&dirpb.SetNamespaceRequest{Name: "a", Quota: &dirpb.Quota{IndexBytes: segment}}))
	s := h.s
	h = cluster(t, 2, &dirpb.CreateNamespaceRequest{Name: "a", Replicas: 1, Shards: 2, Segments: 2,
		Quota: &dirpb.Quota{IndexBytes: 4 * segment}})
	h.refuse(split(1), ErrFull, "quota index")
	// as a whole, for a while on both
	h.do(startJob(&fsmpb.StartJob{Kind: dirpb.JobKind_JOB_MOVE, ShardId: 1, TargetPgId: 2}))
	if s.IndexBytes(1) != 6*segment {
		t.Errorf("%d bytes of index", s.IndexBytes(1))
	}

	h.refuse(create(&dirpb.CreateNamespaceRequest{Name: "b", Shards: 4, Segments: 3, BytesPerNode: 1 << 26,
		Quota: &dirpb.Quota{IndexBytes: 12*segment - 1}}), ErrInvalid, "quota index: 4 shards of 3 segments")
	w := h.do(create(&dirpb.CreateNamespaceRequest{Name: "b", Shards: 4, BytesPerNode: 1 << 26,
		Quota: &dirpb.Quota{IndexBytes: 64 * segment}})).Namespace
	if n := h.s.IndexBytes(w.Id); n != 8*segment {
		t.Errorf("a new namespace begins with %d bytes of index, want an eighth of %d", n, 64*segment)
	}
}

// Rows of an access list that the machine would not make are refused.
func TestLoadChecksAccess(t *testing.T) {
	h := owned(t, 1)
	h.do(access("client/a", read))
	h.do(access("client/b", write))
	for name, change := range map[string]func(w *dirpb.Namespace){
		"no owner":       func(w *dirpb.Namespace) { w.Owner = "" },
		"a bad owner":    func(w *dirpb.Namespace) { w.Owner = "me" },
		"twice":          func(w *dirpb.Namespace) { w.Access[1].Who = "client/a" },
		"not sorted":     func(w *dirpb.Namespace) { w.Access[0].Who = "client/c" },
		"no right":       func(w *dirpb.Namespace) { w.Access[0].Right = 0 },
		"unknown right":  func(w *dirpb.Namespace) { w.Access[0].Right = 4 },
		"nobody":         func(w *dirpb.Namespace) { w.Access[0].Who = "" },
		"the owner, too": func(w *dirpb.Namespace) { w.Owner = "client/a" },
		"more than there": func(w *dirpb.Namespace) {
			w.Access = append(w.Access, make([]*dirpb.Access, MaxAccess)...)
		},
	} {
		w := proto.CloneOf(h.s.Namespace(1))
		change(w)
		if name == "more than there" {
			for i := range w.Access {
				w.Access[i] = &dirpb.Access{Who: fmt.Sprintf("client/%05d", i), Right: read}
			}
		}
		var rows []Row
		for _, r := range h.s.Rows() {
			if r.Key[0] == rowNamespace {
				r = encodeRow(string(r.Key), w)
			}
			rows = append(rows, r)
		}
		if _, err := Load(rows); err == nil || errors.Is(err, ErrNotFound) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
