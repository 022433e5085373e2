package cost

import (
	"context"
	"errors"
	"maps"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/rdma"
)

// fake is a store whose operations cost what the test says.
type fake struct {
	keys   map[string]bool
	open   int
	getRTT uint64 // more round trips for a GET without a hint
	// decideRTT are more round trips for each transaction.
	decideRTT uint64
	chains    bool // a transaction is one chain
	every     int  // every so many operations take one verb more; 0: none
	ops       int
	failPut   error
}

type fakeSession struct {
	f     *fake
	known map[string]bool
	// image: it has images of the groups of known keys, and no hints
	image bool
	s     client.Stats
}

func newFake() *fake { return &fake{keys: map[string]bool{}} }

func (f *fake) session(context.Context) (Session, error) {
	f.open++
	s := &fakeSession{f: f, known: map[string]bool{}}
	s.s.Rounds, s.s.Ops = map[string]uint64{}, map[string]uint64{}
	if f.chains {
		s.s.Connections = map[string]string{"m1": "tcp"}
	}
	return s, nil
}

func (f *fake) mirrored(ctx context.Context) (Session, error) {
	s, err := f.session(ctx)
	s.(*fakeSession).image = true
	return s, err
}

func (s *fakeSession) take(kind string, rtt, verbs uint64) {
	s.s.Rounds[kind] += rtt
	s.s.Verbs.Doorbells += rtt
	if s.f.ops++; s.f.every > 0 && s.f.ops%s.f.every == 0 {
		verbs++
	}
	s.s.Verbs.Verbs[rdma.OpRead] += verbs
}

func (s *fakeSession) Get(_ context.Context, key []byte) (client.Item, error) {
	k := string(key)
	if !s.f.keys[k] {
		return client.Item{}, client.ErrNotFound
	}
	if s.known[k] {
		s.take("get", 1, 2)
	} else {
		s.take("get", 2+s.f.getRTT, 2)
	}
	s.known[k] = true
	return client.Item{}, nil
}

func (s *fakeSession) Put(_ context.Context, key, _ []byte, _ client.PutOptions) (uint64, error) {
	k := string(key)
	if s.f.failPut != nil && strings.Contains(k, "one/") {
		return 0, s.f.failPut
	}
	switch {
	case s.known[k] && s.image:
		s.take("put", 2, 4)
	case s.known[k]:
		s.take("put", 1, 2)
	case s.f.keys[k]:
		s.take("put", 3, 6)
	default:
		s.take("put", 2, 5)
	}
	s.known[k], s.f.keys[k] = true, true
	return 1, nil
}

func (s *fakeSession) Delete(_ context.Context, key []byte) error {
	if !s.f.keys[string(key)] {
		return client.ErrNotFound
	}
	s.take("delete", 1, 1)
	delete(s.f.keys, string(key))
	return nil
}

func (s *fakeSession) MultiGet(ctx context.Context, keys [][]byte) []client.Result {
	rs := make([]client.Result, len(keys))
	for i, k := range keys {
		_, rs[i].Err = s.Get(ctx, k)
	}
	return rs
}

// MultiCAS costs what a transaction with one replica does, settled before the answer.
func (s *fakeSession) MultiCAS(_ context.Context, ops []client.Op) error {
	if s.s.Connections != nil && s.known[string(ops[0].Key)] {
		s.take("transact", 1+s.f.decideRTT, 5*uint64(len(ops)))
		return nil
	}
	for _, o := range ops {
		s.known[string(o.Key)], s.f.keys[string(o.Key)] = true, true
		s.take("prepare", 1, 3)
		s.take("settle", 1, 1)
		s.s.Ops["settle"]++
	}
	s.s.Ops["decide"]++
	s.take("decide", 1+s.f.decideRTT, 1)
	return nil
}

func (s *fakeSession) Stats() client.Stats {
	c := s.s
	c.Rounds, c.Ops = maps.Clone(s.s.Rounds), maps.Clone(s.s.Ops)
	return c
}

func (s *fakeSession) Close() error { s.f.open--; return nil }

func measure(t *testing.T, f *fake) []Row {
	t.Helper()
	rows, err := Measure(t.Context(), Options{Open: f.session, OpenMirrored: f.mirrored, Prefix: "cost/"})
	if err != nil {
		t.Fatal(err)
	}
	if f.open != 0 || len(f.keys) != 0 {
		t.Errorf("%d sessions open and %d keys left", f.open, len(f.keys))
	}
	return rows
}

func TestTable(t *testing.T) {
	rows := measure(t, newFake())
	if len(rows) != 12 || !AllOK(rows) {
		t.Errorf("rows %+v", rows)
	}
	for _, r := range rows {
		if r.Agree != r.Trials || r.Trials == 0 || r.Doorbells < r.RTT {
			t.Errorf("%s: %+v", r.Operation, r)
		}
	}
}

// Where a chain stops at a miss, a transaction of one placement group is one chain.
func TestChains(t *testing.T) {
	f := newFake()
	f.chains = true
	rows := measure(t, f)
	for _, r := range rows {
		if !r.OK {
			t.Errorf("%+v", r)
		}
		if n, found := strings.CutPrefix(r.Operation, "MULTI-CAS of "); found {
			if want := map[byte]uint64{'2': 10, '4': 20}[n[0]]; r.RTT != 1 || r.Verbs != want || r.Behind != 0 {
				t.Errorf("%s: %d / %d + %d, want 1 / %d", r.Operation, r.RTT, r.Verbs, r.Behind, want)
			}
		}
	}
	if f.decideRTT = 1; AllOK(measure(t, f)) {
		t.Error("a further round trip is not noticed")
	}
}

// The columns are those of docs/protocol.md, and rows are judged by the column of
// the replicas that there are.
func TestReplicas(t *testing.T) {
	f := newFake()
	rows, err := Measure(t.Context(), Options{Open: f.session, OpenMirrored: f.mirrored, Prefix: "cost/", Replicas: 2,
		Batch: 2})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string][3]Cost{
		"GET cached":             {{RTT: 1, Verbs: 2}, {RTT: 1, Verbs: 2}, {RTT: 1, Verbs: 2}},
		"GET, mirrored":          {{RTT: 1, Verbs: 2}, {RTT: 1, Verbs: 2}, {RTT: 1, Verbs: 2}},
		"GET":                    {{RTT: 2, Verbs: 2}, {RTT: 2, Verbs: 2}, {RTT: 2, Verbs: 2}},
		"UPDATE cached":          {{RTT: 1, Verbs: 2}, {RTT: 2, Verbs: 4}, {RTT: 3, Verbs: 6}},
		"UPDATE, mirrored":       {{RTT: 2, Verbs: 4}, {RTT: 3, Verbs: 6}, {RTT: 4, Verbs: 8}},
		"UPDATE, no hint":        {{RTT: 3, Verbs: 6}, {RTT: 4, Verbs: 9}, {RTT: 5, Verbs: 11}},
		"INSERT":                 {{RTT: 2, Verbs: 5}, {RTT: 3, Verbs: 8}, {RTT: 4, Verbs: 10}},
		"DELETE cached":          {{RTT: 1, Verbs: 1}, {RTT: 2, Verbs: 2}, {RTT: 3, Verbs: 3}},
		"MULTI-GET of 2, cached": {{RTT: 1, Verbs: 4}, {RTT: 1, Verbs: 4}, {RTT: 1, Verbs: 4}},
		"MULTI-GET of 2":         {{RTT: 2, Verbs: 4}, {RTT: 2, Verbs: 4}, {RTT: 2, Verbs: 4}},
		"MULTI-CAS of 2, cached": {{2, 7, 2}, {4, 14, 4}, {6, 21, 6}},
		"MULTI-CAS of 4, cached": {{2, 13, 4}, {4, 26, 8}, {6, 39, 12}},
	}
	for _, r := range rows {
		if r.Table != want[r.Operation] || (Cost{r.WantRTT, r.WantVerbs, r.WantBehind}) != r.Table[1] {
			t.Errorf("%s: table %v, judged by %d / %d", r.Operation, r.Table, r.WantRTT, r.WantVerbs)
		}
		// The fake's writes cost what one replica does.
		if reads := strings.Contains(r.Operation, "GET"); r.OK != reads {
			t.Errorf("%s: OK is %v", r.Operation, r.OK)
		}
	}
}

// An operation that costs more shows in its own rows only.
func TestDifferenceIsReported(t *testing.T) {
	f := newFake()
	f.getRTT, f.decideRTT = 1, 1
	rows := measure(t, f)
	if AllOK(rows) {
		t.Fatal("AllOK")
	}
	for _, r := range rows {
		bad := r.Operation == "GET" || r.Operation == "MULTI-GET of 32" || strings.HasPrefix(r.Operation, "MULTI-CAS")
		if r.OK == bad {
			t.Errorf("%s: OK is %v with %d round trips, want %d", r.Operation, r.OK, r.RTT, r.WantRTT)
		}
		if bad && (r.RTT != r.WantRTT+1 || r.Agree != 0) {
			t.Errorf("%s: %+v", r.Operation, r)
		}
	}
}

// A rare dearer trial (a shared fingerprint) does not fail a row but is counted.
func TestRareExtraVerb(t *testing.T) {
	f := newFake()
	f.every = 10
	rows := measure(t, f)
	less := 0
	for _, r := range rows {
		if r.Keys == 1 && !r.OK {
			t.Errorf("%s: %+v", r.Operation, r)
		}
		if r.Agree < r.Trials {
			less++
		}
	}
	if less == 0 {
		t.Error("no row tells of the dearer trials")
	}
}

func TestFailureCleansUp(t *testing.T) {
	f := newFake()
	f.failPut = client.ErrFull
	_, err := Measure(t.Context(), Options{Open: f.session, OpenMirrored: f.mirrored, Prefix: "cost/"})
	if !errors.Is(err, client.ErrFull) || !strings.Contains(err.Error(), "INSERT") {
		t.Errorf("error %v", err)
	}
	if f.open != 0 || len(f.keys) != 0 {
		t.Errorf("%d sessions open and %d keys left", f.open, len(f.keys))
	}
}

func TestValidate(t *testing.T) {
	f := newFake()
	for name, o := range map[string]Options{
		"open":   {Prefix: "p"},
		"prefix": {Open: f.session, OpenMirrored: f.mirrored},
		"trials": {Open: f.session, OpenMirrored: f.mirrored, Prefix: "p", Trials: -1},
		"batch":  {Open: f.session, OpenMirrored: f.mirrored, Prefix: "p", Batch: 65},
		"value":  {Open: f.session, OpenMirrored: f.mirrored, Prefix: "p", ValueBytes: -1},
		"copies": {Open: f.session, OpenMirrored: f.mirrored, Prefix: "p", Replicas: -1},
	} {
		if _, err := Measure(t.Context(), o); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
