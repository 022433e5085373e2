package nemesis

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/overview"
	"github.com/kvd-project/kvd/internal/testutil"
)

var testScope = scope{directories: []string{"d1", "d2", "d3"}, memnodes: []string{"m1", "m2", "m3"},
	clients: []string{"c0", "c1"},
	lease:   time.Second, replicas: 2}

// statusNode is a directory node that knows a status, or none.
type statusNode struct {
	dirpb.DirectoryClient
	st *dirpb.StatusReply
}

func (n statusNode) Status(context.Context, *dirpb.StatusRequest, ...grpc.CallOption) (*dirpb.StatusReply, error) {
	if n.st == nil {
		return nil, errors.New("dead")
	}
	return n.st, nil
}

// The watcher tells what the leader says, who knows where memory is, and what another
// directory node says where none leads.
func TestLeaderStatus(t *testing.T) {
	says := func(version uint64, leads bool) statusNode {
		return statusNode{st: &dirpb.StatusReply{RaftApplied: version, Usage: []*dirpb.PGUsage{{Estimated: leads}}}}
	}
	for name, c := range map[string]struct {
		nodes []statusNode
		want  uint64 // 0: an error
	}{
		"the first leads": {[]statusNode{says(1, true), says(2, false), says(3, false)}, 1},
		"the last leads":  {[]statusNode{says(1, false), {}, says(3, true)}, 3},
		"nobody leads":    {[]statusNode{says(1, false), says(2, false), says(3, false)}, 3},
		"one is left":     {[]statusNode{{}, says(2, false), {}}, 2},
		"nobody is left":  {[]statusNode{{}, {}, {}}, 0},
		"no memory yet":   {[]statusNode{{st: &dirpb.StatusReply{RaftApplied: 1}}, says(2, true)}, 1},
	} {
		call := func(ctx context.Context, ask func(context.Context, dirpb.DirectoryClient) error) (err error) {
			for _, n := range c.nodes {
				if err = ask(ctx, n); err == nil {
					return nil
				}
			}
			return err
		}
		st, err := leaderStatus(t.Context(), call, len(c.nodes))
		if (err != nil) != (c.want == 0) || st.GetRaftApplied() != c.want {
			t.Errorf("%s: %v, %v", name, st, err)
		}
	}
}

// A follower's status is no account of memory.
func TestUsageOfFollower(t *testing.T) {
	st := &dirpb.StatusReply{
		Map: &dirpb.Map{Namespaces: []*dirpb.Namespace{{Id: 1, Name: namespace}}, Pgs: []*dirpb.PlacementGroup{
			{Id: 1, NamespaceId: 1}}},
		Usage: []*dirpb.PGUsage{{PgId: 1, HeapUnits: 10, GrantedUnits: 5}},
	}
	if u := usageOf(st); u.known || u.heap != 10 {
		t.Errorf("of a follower: %+v", u)
	}
	st.Usage[0].LiveUnits, st.Usage[0].LostUnits, st.Usage[0].Estimated = 3, 1, true
	if u := usageOf(st); !u.known || u.live != 3 || u.lost != 1 {
		t.Errorf("of the leader: %+v", u)
	}
}

// Schedules ask the store to survive what it promises to survive, and no more.
func TestScheduleEndangersOneMemnode(t *testing.T) {
	for _, replicas := range []int{1, 2} {
		s := testScope
		s.replicas = replicas
		seen := map[string]int{}
		rng := rand.New(rand.NewPCG(1, 2))
		together := 0
		for range 5000 {
			faults := s.round(rng)
			if len(faults) == 0 {
				t.Fatal("a round without a fault")
			}
			together = max(together, len(faults))
			var nodes, victims []string
			for _, f := range faults {
				seen[f.kind]++
				victims = append(victims, f.victims...)
				if n := s.endangers(f); n != "" && !slices.Contains(nodes, n) {
					nodes = append(nodes, n)
				}
				if f.hold <= 0 || f.hold > 5*s.lease {
					t.Fatalf("%v", f)
				}
				if n := s.endangers(f); n != "" && f.hold > softLeases*s.lease {
					t.Fatalf("%v is too long for a last copy", f)
				}
			}
			if len(nodes) > 1 {
				t.Fatalf("%v endanger %v", faults, nodes)
			}
			if slices.Sort(victims); len(slices.Compact(slices.Clone(victims))) != len(victims) {
				t.Fatalf("%v hit a process twice", faults)
			}
		}
		for _, k := range kinds {
			if want := k != killMemnode || replicas > 1; (seen[k] > 0) != want {
				t.Errorf("replicas %d: %s was drawn %d times", replicas, k, seen[k])
			}
		}
		if together != 3 {
			t.Errorf("at most %d faults together, want 3", together)
		}
	}
}

func TestScheduleFollowsSeed(t *testing.T) {
	draw := func(seed uint64) (out []string) {
		rng := rand.New(rand.NewPCG(seed, 0))
		for range 20 {
			out = append(out, fmt.Sprint(testScope.round(rng)))
		}
		return out
	}
	if a, b := draw(5), draw(5); !reflect.DeepEqual(a, b) {
		t.Errorf("one seed, two schedules:\n%v\n%v", a, b)
	}
	if a, b := draw(5), draw(6); reflect.DeepEqual(a, b) {
		t.Error("two seeds, one schedule")
	}
}

func TestScheduleOnly(t *testing.T) {
	s := testScope
	s.only = []string{slowLink, quorum}
	rng := rand.New(rand.NewPCG(1, 1))
	for range 200 {
		for _, f := range s.round(rng) {
			if !slices.Contains(s.only, f.kind) {
				t.Fatalf("%v, want only %v", f, s.only)
			}
		}
	}
}

func TestEndangers(t *testing.T) {
	for _, tc := range []struct {
		f    fault
		want string
	}{
		{fault{kind: killMemnode, victims: []string{"m2"}}, "m2"},
		{fault{kind: slowLink, victims: []string{"m3"}}, "m3"},
		{fault{kind: cutOneWay, victims: []string{"m1"}, to: "d2"}, "m1"},
		{fault{kind: cutBothWays, victims: []string{"d1"}, to: "m3"}, "m3"},
		{fault{kind: cutBothWays, victims: []string{"c1"}, to: "m3"}, ""},
		{fault{kind: cutOneWay, victims: []string{"m3"}, to: "c0"}, ""},
		{fault{kind: quorum, victims: []string{"d1", "d2", "d3"}}, ""},
		{fault{kind: stopClient, victims: []string{"c0"}}, ""},
	} {
		if got := testScope.endangers(&tc.f); got != tc.want {
			t.Errorf("%v endangers %q, want %q", &tc.f, got, tc.want)
		}
	}
}

func TestValues(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for _, most := range []int{2 * longLeast, 8 << 20} {
		least, longest := most, 0
		for range 5000 {
			n := longSize(rng, most)
			least, longest = min(least, n), max(longest, n)
		}
		if least < longLeast || least > longLeast*11/10 || longest >= most || longest < most*9/10 {
			t.Errorf("long values have %d to %d bytes, want %d to nearly %d", least, longest, longLeast, most)
		}
	}
	for _, size := range []int{0, 10, 50, 5000, 1 << 20} {
		v := makeValue("r1/0/2", "1.1.0.7", size)
		if id, err := parseValue("r1/0/2", v); id != "1.1.0.7" || err != nil || len(v) < size {
			t.Errorf("size %d: %q, %v, %d bytes", size, id, err, len(v))
		}
	}
	v := makeValue("r1/0/2", "1.1.0.7", 200)
	other := makeValue("r1/0/2", "1.1.0.8", 200)
	for i := range v {
		torn := slices.Concat(v[:i], other[i:])
		if i > 0 && !slices.Equal(torn, v) && !slices.Equal(torn, other) {
			if id, err := parseValue("r1/0/2", torn); err == nil {
				t.Errorf("torn at byte %d passes as %q", i, id)
			}
		}
	}
	if _, err := parseValue("r1/0/3", v); err == nil || !strings.Contains(err.Error(), `key "r1/0/2"'s`) {
		t.Errorf("a foreign value: %v", err)
	}
	for _, b := range [][]byte{nil, {1}, []byte("1234567890")} {
		if _, err := parseValue("k", b); err == nil {
			t.Errorf("%q passes", b)
		}
	}
}

func TestHistoryFile(t *testing.T) {
	dir := t.TempDir()
	file := historyFile(dir, 1, 2, 3)
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	put := event{ID: 1, Client: 1, Life: 2, Verb: verbPut, Key: "k", Value: "a.1", Call: 10}
	get := event{ID: 2, Client: 1, Life: 2, Worker: 1, Verb: verbGet, Key: "k", Call: 11}
	got := reply{Return: 20, Out: outOK, Got: "a.1", Version: 9}
	for _, v := range []any{&put, &get, &ended{ID: 2, reply: got}} {
		if err := writeLine(f, v); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := f.WriteString(`{"id":1,"r":30,"ou`); err != nil { // the client died here
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	h, err := loadHistory(file)
	if err != nil {
		t.Fatal(err)
	}
	get.reply = got
	if want := []event{put, get}; !reflect.DeepEqual(h, want) {
		t.Errorf("read %+v\nwant %+v", h, want)
	}
	if !h[0].pending() || h[1].pending() {
		t.Errorf("pending: %v, %v", h[0].pending(), h[1].pending())
	}

	saved := filepath.Join(dir, "saved")
	if err := saveHistory(saved, h); err != nil {
		t.Fatal(err)
	}
	if again, err := loadHistory(saved); err != nil || !reflect.DeepEqual(again, h) {
		t.Errorf("saved and read again: %+v, %v", again, err)
	}
	for _, bad := range []string{"{\n", `{"id":7,"r":1,"out":"ok"}` + "\n", `{"v":"get"}` + "\n"} {
		if _, err := readHistory(strings.NewReader(bad)); err == nil {
			t.Errorf("%q is a history", bad)
		}
	}
}

// ev is an event from words: verb, value written or - , expected value or -,
// outcome, value got or -.
func ev(call, ret int64, words string) event {
	w := strings.Fields(words)
	clean := func(s string) string { return strings.TrimPrefix(s, "-") }
	return event{Key: "k", Verb: w[0], Value: clean(w[1]), Old: clean(w[2]), Call: call,
		reply: reply{Return: ret, Out: clean(w[3]), Got: clean(w[4])}}
}

func TestVerdict(t *testing.T) {
	for _, tc := range []struct {
		name string
		h    []event
		ok   bool
	}{
		{"nothing there", []event{ev(1, 2, "get - - notfound -")}, true},
		{"read your write", []event{ev(1, 2, "put a - ok -"), ev(3, 4, "get - - ok a")}, true},
		{"a stale read", []event{ev(1, 2, "put a - ok -"), ev(3, 4, "put b - ok -"), ev(5, 6, "get - - ok a")}, false},
		{"a lost write", []event{ev(1, 2, "put a - ok -"), ev(3, 4, "get - - notfound -")}, false},
		{"a value of nobody", []event{ev(1, 2, "get - - ok z")}, false},
		{"concurrent writes in either order", []event{ev(1, 9, "put a - ok -"), ev(2, 8, "put b - ok -"),
			ev(10, 11, "get - - ok a")}, true},
		{"reads that disagree about the order", []event{ev(1, 9, "put a - ok -"), ev(1, 9, "put b - ok -"),
			ev(10, 11, "get - - ok a"), ev(12, 13, "get - - ok b")}, false},
		{"an unknown write that shows late", []event{ev(1, 2, "put a - ok -"), ev(3, 4, "put b - unknown -"),
			ev(5, 6, "get - - ok a"), ev(7, 8, "get - - ok b")}, true},
		{"an unknown write that never shows", []event{ev(1, 2, "put a - ok -"), ev(3, 4, "put b - unknown -"),
			ev(5, 6, "get - - ok a")}, true},
		{"a dead client's write", []event{ev(1, 0, "put a - - -"), ev(5, 6, "get - - ok a")}, true},
		{"an unknown write cannot show twice", []event{ev(1, 2, "put b - unknown -"), ev(3, 4, "get - - ok b"),
			ev(5, 6, "del - - ok -"), ev(7, 8, "get - - ok b")}, false},
		{"a write that did not happen shows", []event{ev(1, 2, "put a - no -"), ev(3, 4, "get - - ok a")}, false},
		{"two inserts", []event{ev(1, 9, "add a - ok -"), ev(2, 8, "add b - ok -")}, false},
		{"an insert and a refusal", []event{ev(1, 9, "add a - ok -"), ev(2, 8, "add b - exists -")}, true},
		{"a refusal without a reason", []event{ev(1, 2, "add b - exists -")}, false},
		{"cas", []event{ev(1, 2, "put a - ok -"), ev(3, 4, "cas b a ok -"), ev(5, 6, "get - - ok b")}, true},
		{"cas of what is gone", []event{ev(1, 2, "put a - ok -"), ev(3, 4, "put c - ok -"), ev(5, 6, "cas b a ok -")},
			false},
		{"two cas of one version", []event{ev(1, 2, "put a - ok -"), ev(3, 9, "cas b a ok -"),
			ev(3, 9, "cas c a ok -")}, false},
		{"a conflict without a reason", []event{ev(1, 2, "put a - ok -"), ev(3, 4, "cas b a conflict -")}, false},
		{"a conflict because of a dead client", []event{ev(1, 2, "put a - ok -"), ev(3, 0, "put d - - -"),
			ev(5, 6, "cas b a conflict -")}, true},
		{"delete", []event{ev(1, 2, "put a - ok -"), ev(3, 4, "del - - ok -"), ev(5, 6, "get - - notfound -"),
			ev(7, 8, "del - - notfound -")}, true},
		{"a deleted key comes back", []event{ev(1, 2, "put a - ok -"), ev(3, 4, "del - - ok -"),
			ev(5, 6, "get - - ok a")}, false},
		{"delif", []event{ev(1, 2, "put a - ok -"), ev(3, 4, "delif - a ok -"), ev(5, 6, "delif - a notfound -")},
			true},
		{"counting", []event{ev(1, 2, "incr 2 - ok 2"), ev(3, 4, "incr 3 - ok 5"), ev(5, 6, "get - - ok 5")}, true},
		{"a lost count", []event{ev(1, 9, "incr 1 - ok 1"), ev(2, 8, "incr 1 - ok 1")}, false},
		{"a count that may have happened", []event{ev(1, 2, "incr 1 - ok 1"), ev(3, 0, "incr 1 - - -"),
			ev(5, 6, "incr 1 - ok 3")}, true},
		{"a count that happened twice", []event{ev(1, 2, "incr 1 - ok 1"), ev(3, 0, "incr 1 - - -"),
			ev(5, 6, "incr 1 - ok 4")}, false},
	} {
		if err := linearizable(tc.h, time.Minute); (err == nil) != tc.ok {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
}

// The search for an order gives up in time, which is no success.
func TestNoVerdict(t *testing.T) {
	var h []event
	for i := range 40 {
		h = append(h, ev(1, 1000, fmt.Sprintf("put v%d - ok -", i)))
	}
	for i := range 40 {
		h = append(h, ev(1, 1000, fmt.Sprintf("get - - ok v%d", i)))
	}
	h = append(h, ev(2000, 2001, "get - - notfound -"))
	if err := linearizable(h, 50*time.Millisecond); err == nil ||
		!strings.Contains(err.Error(), "no verdict on 81 operations") {
		t.Errorf("%v, want no verdict", err)
	}
}

func TestVersions(t *testing.T) {
	at := func(words string, version, old uint64) event {
		e := ev(1, 2, words)
		e.Version, e.OldVersion = version, old
		return e
	}
	for _, tc := range []struct {
		name string
		h    []event
		want string
	}{
		{"good", []event{at("put a.1 - ok -", 5, 0), at("get - - ok a.1", 5, 0), at("cas b.1 a.1 ok -", 7, 5),
			at("incr 1 - ok 1", 0, 0)}, ""},
		{"a counter's value comes again", []event{at("get - - ok 1", 5, 0), at("get - - ok 1", 6, 0)}, ""},
		{"shared", []event{at("put a.1 - ok -", 5, 0), at("put b.1 - ok -", 5, 0)}, "version 5 is both"},
		{"moved", []event{at("put a.1 - ok -", 5, 0), at("get - - ok a.1", 6, 0)}, "has versions 5 and 6"},
		{"backward", []event{at("cas b.1 a.1 ok -", 7, 7)}, "made version 7"},
		{"none", []event{at("put a.1 - ok -", 0, 0)}, "version 0"},
	} {
		switch err := versions(tc.h); {
		case tc.want == "" && err != nil:
			t.Errorf("%s: %v", tc.name, err)
		case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)):
			t.Errorf("%s: %v, want %q", tc.name, err, tc.want)
		}
	}
}

// A round is checked when nobody can add to it, its failing keys are kept, and
// its files are gone.
func TestChecker(t *testing.T) {
	dir, keep := t.TempDir(), t.TempDir()
	var failed []string
	c := newChecker(dir, keep, time.Millisecond, func(s string) { failed = append(failed, s) }, nil)
	c.mu.next = 3 // long ago
	c.mu.lives = []*life{{client: 0, life: 1, over: 3}, {client: 1, life: 1, dead: true}}
	if _, _, ok := c.ready(); ok {
		t.Fatal("round 3 was ready while client 0 used it")
	}
	write := func(client int, h ...event) {
		for i := range h {
			h[i].ID, h[i].Client, h[i].Life = uint64(i+1), client, 1
		}
		if err := saveHistory(historyFile(dir, client, 1, 3), h); err != nil {
			t.Fatal(err)
		}
	}
	good, bad := ev(1, 2, "put a.1 - ok -"), ev(3, 4, "get - - notfound -")
	good.Version = 1
	write(0, good)
	write(1, bad)
	c.over(0, 1, 4)
	round, files, ok := c.ready()
	if !ok || round != 3 || len(files) != 2 {
		t.Fatalf("ready: %d, %q, %v", round, files, ok)
	}
	c.check(round, files)
	if len(failed) != 1 || !strings.Contains(failed[0], `key "k": no order`) {
		t.Fatalf("failures: %q", failed)
	}
	if b, err := os.ReadFile(filepath.Join(keep, "history-k.jsonl")); err != nil ||
		strings.Count(string(b), "\n") != 2 {
		t.Errorf("kept %q, %v", b, err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) != 0 {
		t.Errorf("left behind: %q", left)
	}
	if s := c.summary(); !strings.Contains(s, "NOT linearizable: 1 keys") || !strings.Contains(s, "operations 2") {
		t.Errorf("summary:\n%s", s)
	}
}

func testStatus() *dirpb.StatusReply {
	node := func(id uint32, name string) *dirpb.Node {
		return &dirpb.Node{Id: id, Name: name, Incarnation: uint64(id) * 100, State: dirpb.NodeState_NODE_UP}
	}
	member := func(id uint32) *dirpb.Member { return &dirpb.Member{NodeId: id, Incarnation: uint64(id) * 100} }
	pg := func(id, a, b uint32) *dirpb.PlacementGroup {
		return &dirpb.PlacementGroup{Id: id, NamespaceId: 1, State: dirpb.PGState_PG_ACTIVE, Members: []*dirpb.Member{
			member(a), member(b)}}
	}
	return &dirpb.StatusReply{Directory: []*dirpb.DirectoryNode{{Id: "d1", Leader: true}}, Map: &dirpb.Map{
		Nodes:      []*dirpb.Node{node(1, "m1"), node(2, "m2"), node(3, "m3")},
		Namespaces: []*dirpb.Namespace{{Id: 1, Name: namespace, Replicas: 2, HashSeed: 42}},
		Pgs:        []*dirpb.PlacementGroup{pg(1, 1, 2), pg(2, 2, 3), pg(3, 3, 1)},
		Shards: []*dirpb.Shard{{Id: 1, NamespaceId: 1, Prefix: 0, Depth: 2, PgId: 1},
			{Id: 2, NamespaceId: 1, Prefix: 1, Depth: 2, PgId: 2},
			{Id: 3, NamespaceId: 1, Prefix: 1, Depth: 1, PgId: 3}},
	}}
}

func TestWhole(t *testing.T) {
	if err := whole(testStatus(), 3, nil); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(*dirpb.StatusReply){
		"no leader":              func(s *dirpb.StatusReply) { s.Directory[0].Leader = false },
		"2 memory nodes of 3":    func(s *dirpb.StatusReply) { s.Map.Nodes = s.Map.Nodes[:2] },
		"NODE_DOWN":              func(s *dirpb.StatusReply) { s.Map.Nodes[1].State = dirpb.NodeState_NODE_DOWN },
		"death is not known":     func(s *dirpb.StatusReply) { s.Map.Nodes[1].Incarnation = 666 },
		"PG_FROZEN":              func(s *dirpb.StatusReply) { s.Map.Pgs[1].State = dirpb.PGState_PG_FROZEN },
		"joins or leaves":        func(s *dirpb.StatusReply) { s.Map.Pgs[1].Joining = true },
		"1 replicas of 2":        func(s *dirpb.StatusReply) { s.Map.Pgs[1].Members = s.Map.Pgs[1].Members[:1] },
		"of another incarnation": func(s *dirpb.StatusReply) { s.Map.Pgs[1].Members[0].Incarnation++ },
	} {
		st := testStatus()
		change(st)
		if err := whole(st, 3, map[uint64]bool{666: true}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

func TestPlacement(t *testing.T) {
	p := placementOf(testStatus(), namespace)
	keys := p.keys("probe/0/1")
	if len(keys) != 3 {
		t.Fatalf("keys of %d placement groups, want 3: %v", len(keys), keys)
	}
	for pg, key := range keys {
		if got := p.pg(key); got != pg {
			t.Errorf("%q belongs to %d, want %d", key, got, pg)
		}
	}
	if got := p.holders(); !slices.Equal(got, []string{"m1", "m2", "m3"}) {
		t.Errorf("holders: %q", got)
	}
	if got := p.members[3]; !slices.Equal(got, []string{"m3", "m1"}) {
		t.Errorf("members of 3: %q", got)
	}
}

func TestCrowd(t *testing.T) {
	st := testStatus()
	st.Map.Shards = []*dirpb.Shard{{NamespaceId: 1, Depth: 1, Prefix: 0, Segments: 3, PgId: 1},
		{NamespaceId: 1, Depth: 1, Prefix: 1, Segments: 3, PgId: 2}}
	c := placementOf(st, namespace).crowd()
	groups := map[group]bool{}
	for round := range int64(20) {
		first := c.group([]byte(c.key(round, 0, 0)))
		groups[first] = true
		for k := range 8 {
			if key := c.key(round, 1, k); c.group([]byte(key)) != first || key != c.key(round, 1, k) {
				t.Errorf("round %d: %q is in group %v, others in %v", round, key, c.group([]byte(key)), first)
			}
		}
	}
	if len(groups) < 5 {
		t.Errorf("20 rounds use %d groups", len(groups))
	}
	if got := (*crowd)(nil).key(3, 2, 1); got != "r3/2/1" {
		t.Errorf("without a crowd: %q", got)
	}
}

func TestRecovery(t *testing.T) {
	s := newProbes()
	place := placementOf(testStatus(), namespace) // m1 holds 1 and 3
	k := s.killed("m1", 1000, place, []int{0})
	saw := func(pg uint32, verb string, call, ret int64, out string) {
		t.Helper()
		line := fmt.Sprintf("%d\t%s\t%d\t%d\t%s\t%q", pg, verb, call, ret, out, "why")
		p, err := parseProbe(0, strings.Split(line, "\t"))
		if err != nil {
			t.Fatal(err)
		}
		s.saw(p)
	}
	saw(1, verbPut, 900, 1100, outOK)  // called before the kill
	saw(2, verbPut, 1100, 1200, outOK) // of others
	saw(1, verbGet, 1150, 1200, outOK) // readable, not known to be writable
	saw(3, verbPut, 1300, 1400, outNo) // not back yet
	saw(3, verbPut, 1500, 1600, outOK)
	saw(3, verbGet, 1601, 1700, outOK)
	saw(1, verbPut, 1800, 1900, outOK)
	if k.recovered != 0 || !strings.HasPrefix(s.missing(k), "client 0, placement group 1,") {
		t.Fatalf("recovered at %d, missing %q", k.recovered, s.missing(k))
	}
	saw(1, verbGet, 1901, 2000, outOK)
	if got, kills := s.recoveries(namespace); !slices.Equal(got, []time.Duration{1000}) || kills != 1 {
		t.Errorf("recoveries %v of %d kills", got, kills)
	}
	if len(s.offends) != 0 {
		t.Errorf("offends: %q", s.offends)
	}
	if s.killed("m4", 2500, place, []int{0}) != nil {
		t.Error("the death of a memory node without memory counts")
	}
	s.killed("m1", 3000, place, []int{0})
	saw(2, verbGet, 3100, 3200, outUnknown)
	s.touched([]event{{Key: place.keys("a")[2], Verb: verbGet, Call: 3100, reply: reply{Return: 3200, Out: outNo}},
		{Key: place.keys("a")[1], Verb: verbGet, Call: 3100, reply: reply{Return: 3200, Out: outNo}},
		{Key: place.keys("a")[2], Verb: verbGet, Call: 2100, reply: reply{Return: 2200, Out: outNo}}})
	if len(s.offends) != 2 {
		t.Errorf("offends: %q, want the probe and one of the load", s.offends)
	}
	if _, missing := s.served(1850, []int{0}, []uint32{1, 3}); !strings.HasPrefix(missing,
		"client 0, placement group 1,") {
		t.Errorf("served since 1850, but for %q", missing)
	}
	if _, missing := s.served(1400, []int{0}, []uint32{1, 3}); missing != "" {
		t.Errorf("served since 1400, but for %q", missing)
	}
}

// A namespace beside counts for itself: a kill judges the keys of its namespace alone, and only keys whose memory node
// was killed may be gone.
func TestBeside(t *testing.T) {
	h := &harness{settings: settings{beside: true}, probes: newProbes()}
	st := testStatus()
	st.Map.Namespaces = append(st.Map.Namespaces, &dirpb.Namespace{Id: 2, Name: single, Replicas: 1, HashSeed: 43})
	st.Map.Pgs = append(st.Map.Pgs, &dirpb.PlacementGroup{Id: 4, NamespaceId: 2, State: dirpb.PGState_PG_LOST,
		Members: st.Map.Pgs[0].Members[:1]})
	if err := lost(st); err != nil {
		t.Errorf("the only copy beside: %v", err)
	}
	k := h.probes.killed("m1", 1000, placementOf(st, namespace), []int{0})
	h.probes.saw(probe{pg: 4, verb: verbPut, call: 1100, retn: 1200, out: outNo})
	if len(h.probes.offends) != 0 || k.concerns(4) {
		t.Errorf("a kill in another namespace is blamed: %q", h.probes.offends)
	}
	h.probes.killed("m1", 1000, placementOf(st, single), []int{0})
	if _, kills := h.probes.recoveries(single); kills != 1 {
		t.Errorf("%d kills concern %s, want 1", kills, single)
	}
	gone := func(ns, pg string) bool { return h.heardGone(0, []string{ns, pg}) != nil }
	h.probes.mayLack[4] = true
	if gone(single, "4") || gone(pages, "6") || !gone(single, "5") {
		t.Error("what may be gone is not told apart")
	}
	what := "memory node m1 is silent and has the only copy of placement group 4 of namespace "
	for text, alone := range map[string]bool{what + single: true, what + pages: false, what + single +
		", 1 of namespace " + namespace: false, "other": false} {
		if left := waitsAlone([]overview.Problem{{What: text}}, "m1"); (left == "") != alone {
			t.Errorf("%q: %q", text, left)
		}
	}
}

func TestPercentile(t *testing.T) {
	var all []time.Duration
	for i := range 50 {
		all = append(all, time.Duration(i+1))
	}
	for p, want := range map[float64]time.Duration{50: 25, 99: 50, 1: 1, 100: 50} {
		if got := percentile(all, p); got != want {
			t.Errorf("p%v is %d, want %d", p, got, want)
		}
	}
	if got := percentile(nil, 50); got != 0 {
		t.Errorf("of nothing: %v", got)
	}
}

func TestSettings(t *testing.T) {
	good := settings{provider: "tcp", replicas: 2}
	if err := good.check(); err != nil || good.seed == 0 || good.lease != time.Second {
		t.Errorf("%+v, %v", good, err)
	}
	for want, s := range map[string]settings{
		"-provider":     {provider: "udp", replicas: 2},
		"-replicas 0":   {provider: "tcp"},
		"want one":      {provider: "tcp", replicas: 2, kills: 1, zombies: 1},
		"with -zombies": {provider: "tcp", replicas: 2, kills: 1, restarts: true},
		"-control":      {provider: "tcp", replicas: 2, restarts: true, control: true},
		"costs its":     {provider: "tcp", replicas: 1, kills: 1},
		"want some of":  {provider: "tcp", replicas: 2, only: []string{"flood"}},
	} {
		if err := s.check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// A Redis client sends again what was refused and what it could not send; what has no reply it
// does not know.
func TestRedisClient(t *testing.T) {
	const closed, silent, refuses, wrong = "", "silent", "-LOADING kvd: the gateway is stopping; nothing was done\r\n",
		"-ERR unknown outcome: x\r\n"
	serve := func(reply string) string {
		l := testutil.Listen(t)
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				if reply != closed {
					r := bufio.NewReader(c)
					for n, err := 0, error(nil); err == nil; n++ {
						if _, err = r.ReadString('\n'); n%5 == 4 && reply != silent {
							_, err = io.WriteString(c, reply)
						} else if n%5 == 4 {
							break
						}
					}
				}
				c.Close()
			}
		}()
		return l.Addr().String()
	}
	good := serve(":7\r\n")
	for _, c := range []struct {
		first  string
		unsure bool
	}{{":7\r\n", false}, {refuses, false}, {silent, true}, {wrong, true}} {
		r := redisClient{cfg: redisConfig{Gateways: []string{serve(c.first), good}, Timeout: 10 * time.Second},
			key: "k"}
		got, err := r.add(t.Context(), 1)
		var unsure *unsureError
		if errors.As(err, &unsure) != c.unsure || !c.unsure && (got != 7 || err != nil) {
			t.Errorf("%q first: %d, %v", c.first, got, err)
		}
		r.hangUp()
	}
	// It looks before it sends.
	r := redisClient{cfg: redisConfig{Gateways: []string{serve(closed), good}, Timeout: 10 * time.Second}, key: "k"}
	if err := r.connect(); err != nil {
		t.Fatal(err)
	}
	for !r.closed() {
		time.Sleep(time.Millisecond)
	}
	if got, err := r.add(t.Context(), 1); got != 7 || err != nil {
		t.Errorf("closed by the gateway: %d, %v", got, err)
	}
	r.hangUp()
}
