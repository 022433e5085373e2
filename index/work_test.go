package index_test

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

const childOff = shardOff + layout.ClusterSize

// moveCase is one shape of a move.
type moveCase struct {
	name     string
	replicas uint8
	target   uint8 // replicas of the placement group that it goes to, 0: its own
	split    bool
}

func (m moveCase) String() string { return fmt.Sprintf("%s r=%d", m.name, m.replicas) }

func moveCases() (cases []moveCase) {
	for r := uint8(1); r <= 3; r++ {
		cases = append(cases,
			moveCase{"split", r, 0, true},
			moveCase{"split away", r, 4 - r, true},
			moveCase{"migrate", r, r, false})
	}
	return cases
}

// world makes the memory of a move that has not begun.
func (m moveCase) world() *world {
	w := newWorld(m.replicas, 1024)
	if m.target > 0 {
		w.other = newWorld(m.target, 1024)
		w.other.pg.ID = 2
	}
	return w
}

// begin puts the move into the map.
func (m moveCase) begin(w *world) {
	w.split = m.split
	w.child = &index.Route{PG: &w.pg, Shard: 9, ShardOff: childOff, Clusters: 1, MapVersion: 1}
	if m.target > 0 {
		w.child.PG, w.child.ShardOff = &w.other.pg, shardOff
	}
	if m.split {
		w.child.Depth = 1
	}
}

// fillMove stores keys of both halves, home and in the stash, with gaps that
// deleted ones left. It returns what is there.
func fillMove(t testing.TB, w *world) map[string]string {
	t.Helper()
	c := w.client(2)
	m := map[string]string{}
	var keys []string
	for i := range 14 {
		keys = append(keys, string(rune('A'+i)), string(rune('a'+i)))
	}
	// AB and ab share a fingerprint with A and a. The last ones are in the stash.
	keys = append(keys, "z1", "Z1", "Z2", "AB", "ab", "Q@5", "q@5")
	for _, k := range keys {
		must(t, c.do(t, "put", k, "v-"+k))
		m[k] = "v-" + k
	}
	for _, k := range []string{"C", "d", "Z1"} {
		must(t, c.do(t, "del", k))
		delete(m, k)
	}
	must(t, c.do(t, "put", "B", "v2-B"))
	m["B"] = "v2-B"
	if !w.groupAt(0, home()).Header().OVF() {
		t.Fatal("nothing in the stash")
	}
	return m
}

// gone are keys that are absent.
var gone = []string{"C", "d", "Z1", "Y", "y"}

// job runs a janitor's operation to its end.
func (c *client) job(t testing.TB, k index.Kind, work index.Work) *index.Op {
	t.Helper()
	c.begin(&index.Op{Kind: k, Work: work})
	if lines, err := c.run(2000); err != nil {
		t.Fatalf("s%d %v: %v\n%s", c.id, k, err, strings.Join(lines[max(0, len(lines)-80):], "\n"))
	}
	if c.op.Err != nil {
		t.Fatalf("s%d %v: %v", c.id, k, c.op.Err)
	}
	return c.op
}

func moveWork(group uint32) index.Work { return index.Work{Group: group} }

// check reads every key by a client that knows nothing.
func (w *world) check(t testing.TB, what string, want map[string]string) {
	t.Helper()
	c := w.client(90)
	for _, k := range slices.Sorted(maps.Keys(want)) {
		clear(c.hints)
		if err := c.do(t, "get", k); err != nil {
			t.Fatalf("%s: get %s: %v", what, k, err)
		}
		got := string(c.op.Record.Value)
		if c.op.Parts != nil {
			got = string(bytes.Join(c.op.Parts, nil))
		}
		if got != want[k] {
			t.Fatalf("%s: %s is %.60q, want %.60q", what, k, got, want[k])
		}
	}
	for _, k := range gone {
		clear(c.hints)
		if _, ok := want[k]; !ok {
			if err := c.do(t, "get", k); !errors.Is(err, index.ErrNotFound) {
				t.Fatalf("%s: get %s: %v, want not found", what, k, err)
			}
		}
	}
	w.sound(t, what)
	if w.other != nil {
		w.other.sound(t, what)
	}
	if len(w.wrong) > 0 {
		t.Fatalf("%s: places given up twice: %v", what, w.wrong)
	}
}

// arrays are the clusters of a placement group's index.
func (w *world) arrays() []uint64 { return []uint64{shardOff, childOff} }

// sound checks what holds of a placement group in which nothing is under way: readable
// words have complete records on every replica (I3), and replicas show the same.
func (w *world) sound(t testing.TB, what string) {
	t.Helper()
	for _, at := range w.arrays() {
		for g := range layout.ClusterGroups + 1 {
			off := at + uint64(g)*layout.GroupSize
			for i := range layout.GroupSlots {
				x := w.groupAt(0, off).Slot(i)
				for r := range w.pg.Replicas {
					if y := w.groupAt(r, off).Slot(i); y != x {
						t.Fatalf("%s: pg %d group %d of %#x slot %d: R0 %v, R%d %v", what, w.pg.ID, g, at, i, x, r, y)
					}
					if !x.Readable() {
						continue
					}
					if _, err := layout.ParseRecord(w.region[r][x.Off():][:x.ReadLen()]); err != nil {
						t.Fatalf("%s: pg %d group %d of %#x slot %d R%d %v: %v", what, w.pg.ID, g, at, i, r, x, err)
					}
				}
			}
		}
	}
}

// linkedPlaces fails if a readable word names a place that was given up.
func (w *world) linkedPlaces(t testing.TB, what string, arrays ...uint64) {
	t.Helper()
	for _, id := range []uint32{1, 2} {
		m := w.of(id)
		if m == nil {
			continue
		}
		for _, at := range arrays {
			for g := range layout.ClusterGroups + 1 {
				for i := range layout.GroupSlots {
					x := m.groupAt(0, at+uint64(g)*layout.GroupSize).Slot(i)
					name := unitName(x.Unit())
					if id == 2 {
						name = "pg 2 " + name
					}
					if how, ok := w.left[name]; ok && x.Readable() {
						t.Fatalf("%s: %v is linked at group %d of %#x; it was given up: %s", what, x, g, at, how)
					}
				}
			}
		}
	}
}

// moveAll moves every group of the shard.
func (w *world) moveAll(t testing.TB, c *client) {
	t.Helper()
	for g := range uint32(layout.ClusterGroups) {
		c.job(t, index.Move, moveWork(g))
	}
}

// cleanAll clears what a move left, after the map changed.
func (w *world) cleanAll(t testing.TB, c *client) {
	t.Helper()
	w.moved = true
	for g := range layout.ClusterGroups + 1 {
		c.job(t, index.Clean, index.Work{PG: 1, Off: shardOff + uint64(g)*layout.GroupSize, Wipe: !w.split, Target: w.child.PG.ID})
	}
	for r := range w.pg.Replicas {
		for g := range layout.ClusterGroups + 1 {
			b := w.groupAt(r, shardOff+uint64(g)*layout.GroupSize)
			if b.Header().Split() || b.Lock() != 0 {
				t.Fatalf("R%d group %d: header %v, lock %x after it was cleaned", r, g, b.Header(), b.Lock())
			}
			for i := range layout.GroupSlots {
				if s := b.Slot(i).State(); s == layout.Moved || s == layout.Frozen {
					t.Fatalf("R%d group %d slot %d: %v after it was cleaned", r, g, i, b.Slot(i))
				}
			}
			if !w.split && len(bytes.Trim(b, "\x00")) > 0 {
				t.Fatalf("R%d group %d is not all zero", r, g)
			}
		}
	}
}

// TestMove moves a shard's keys and finds every one of them: while the map names parent
// and child, when it names the child alone, and when the parent has been cleaned.
func TestMove(t *testing.T) {
	for _, m := range moveCases() {
		t.Run(m.String(), func(t *testing.T) {
			w := m.world()
			want := fillMove(t, w)
			for k := range want { // a client with a hint of each
				must(t, w.client(3).do(t, "get", k))
			}
			m.begin(w)
			w.moveAll(t, w.client(1))
			w.check(t, "moved", want)
			for r := range w.pg.Replicas {
				if h := w.groupAt(r, home()).Header(); !h.Split() || !h.OVF() {
					t.Fatalf("R%d: header %s", r, showHeader(h))
				}
			}
			for k, v := range want {
				if err := w.client(3).do(t, "get", k); err != nil || string(w.client(3).op.Record.Value) != v {
					t.Fatalf("get %s by its old hint: %v", k, err)
				}
			}
			w.client(1).job(t, index.Move, moveWork(homeGroup)) // again: nothing to do
			// Writes reach the child under either map.
			for i, k := range []string{"A", "Y", "a", "y", "Z2", "Z1"} {
				must(t, w.client(4).do(t, "put", k, "new"))
				want[k] = "new"
				if i == 2 {
					w.check(t, "written", want)
					w.moved = true
				}
			}
			must(t, w.client(4).do(t, "del", "AB"))
			delete(want, "AB")
			w.check(t, "written under the new map", want)
			w.cleanAll(t, w.client(1))
			w.check(t, "cleaned", want)
			w.linkedPlaces(t, "cleaned", shardOff, childOff)
			for _, k := range []string{"B", "e", "W", "x"} {
				must(t, w.client(3).do(t, "put", k, "last"))
				want[k] = "last"
			}
			w.check(t, "at last", want)
		})
	}
}

// script is a list of operations that a client does one after the other.
type script struct {
	c     *client
	words [][]string
	began bool
	begun func()
	ended func(o *index.Op, words []string, err error)
}

// step performs one access, or asks the operation what is next. It reports whether
// the script is over.
func (s *script) step() (over bool) {
	if len(s.words) == 0 {
		return true
	}
	if !s.began {
		s.began = true
		if s.begun != nil {
			s.begun()
		}
		if err := s.c.start(s.words[0]); err != nil {
			panic(err)
		}
	}
	if _, done := s.c.advance(1, noFault); done {
		if s.ended != nil {
			s.ended(s.c.op, s.words[0], s.c.op.Err)
		}
		s.words, s.began = s.words[1:], false
	}
	return len(s.words) == 0
}

// runAll lets scripts and a janitor take turns in an order that rng chooses, until all
// are over.
func runAll(t testing.TB, what string, rng *rand.Rand, scripts []*script, janitor *client) {
	t.Helper()
	busy := janitor != nil
	for n := 0; ; n++ {
		if n > 200000 {
			for _, s := range scripts {
				if len(s.words) > 0 {
					t.Logf("s%d %v in step %v", s.c.id, s.words[0], s.c.op.Step())
				}
			}
			if busy {
				t.Logf("janitor in step %v", janitor.op.Step())
			}
			t.Fatalf("%s: no end", what)
		}
		over := !busy
		i := rng.IntN(len(scripts) + 1)
		for _, s := range scripts {
			over = over && len(s.words) == 0
		}
		if over {
			return
		}
		if i == len(scripts) {
			if busy {
				_, done := janitor.advance(1, noFault)
				busy = !done
				if done && janitor.op.Err != nil {
					t.Fatalf("%s: %v: %v", what, janitor.op.Kind, janitor.op.Err)
				}
			}
			continue
		}
		scripts[i].step()
	}
}

// writers are clients with one operation on each of many keys. want becomes what the
// keys hold once all are done. Half of them have a hint.
func writers(t testing.TB, w *world, want map[string]string, n int) (scripts []*script) {
	t.Helper()
	for i, k := range append(slices.Sorted(maps.Keys(want)), "W", "w", "Y", "y") {
		v, present := want[k]
		c := w.client(20 + uint32(i))
		if present && (i+n)%2 == 0 {
			must(t, c.do(t, "get", k))
		}
		absent := func(err error) error { // what an operation answers on an absent key
			if present {
				return nil
			}
			return err
		}
		var words []string
		var wantErr error
		switch (i + n) % 5 {
		case 0:
			words, want[k] = []string{"put", k, "put"}, "put"
		case 1:
			words, wantErr = []string{"get", k}, absent(index.ErrNotFound)
		case 2:
			words, wantErr = []string{"del", k}, absent(index.ErrNotFound)
			delete(want, k)
		case 3:
			words = []string{"put", k, "insert", "if-absent"}
			if wantErr = index.ErrExists; !present {
				wantErr, want[k] = nil, "insert"
			}
		case 4:
			words, want[k] = []string{"append", k, "+"}, v+"+"
		}
		scripts = append(scripts, &script{c: c, words: [][]string{words}, ended: func(o *index.Op, words []string, err error) {
			if !errors.Is(err, wantErr) || o.Kind == index.Get && err == nil && string(o.Record.Value) != v {
				t.Errorf("%v: %v %q, want %v %q", words, err, o.Record.Value, wantErr, v)
			}
		}})
	}
	return scripts
}

// crashes stops a janitor's operation after every single access, declares the janitor
// fenced and lets prepare's world go on.
func crashes(t *testing.T, what string, prepare func() (w *world, kind index.Kind, work index.Work), goOn func(t testing.TB, what string, w *world, n int)) {
	t.Helper()
	for n := 0; ; n++ {
		w, kind, work := prepare()
		c := w.client(1)
		c.begin(&index.Op{Kind: kind, Work: work})
		done := false
		for left := n; left > 0 && !done; {
			was := c.verbs
			_, done = c.advance(left, noFault)
			left -= c.verbs - was
		}
		w.fenced[1] = true
		goOn(t, fmt.Sprintf("%s, crash after %d accesses", what, n), w, n)
		if t.Failed() {
			t.Fatalf("%s, crash after %d accesses", what, n)
		}
		if done {
			t.Logf("%s: %d crashes", what, n)
			return
		}
	}
}

// TestMoveCrash stops a janitor after every single access of a Move. Clients that
// get, put, insert, delete and change every key meanwhile, and its successor, end up
// with every key as it should be.
func TestMoveCrash(t *testing.T) {
	for _, m := range moveCases() {
		t.Run(m.String(), func(t *testing.T) {
			want := map[string]string{}
			crashes(t, m.String(), func() (*world, index.Kind, index.Work) {
				w := m.world()
				want = fillMove(t, w)
				m.begin(w)
				return w, index.Move, moveWork(homeGroup)
			}, func(t testing.TB, what string, w *world, n int) {
				scripts := writers(t, w, want, n)
				for range n % 3 * 8 {
					for _, s := range scripts {
						s.step() // before there is a successor
					}
				}
				next := w.client(10)
				next.begin(&index.Op{Kind: index.Move, Work: moveWork(homeGroup)})
				runAll(t, what, rand.New(rand.NewPCG(uint64(n), 1)), scripts, next)
				w.check(t, what, want)
				w.moveAll(t, next)
				w.check(t, what+", all moved", want)
				w.cleanAll(t, next)
				w.check(t, what+", cleaned", want)
				w.linkedPlaces(t, what, shardOff, childOff)
			})
		})
	}
}

// TestMoveFaults fails every single round of a Move once, with and without effect.
func TestMoveFaults(t *testing.T) {
	for _, m := range moveCases() {
		for _, f := range []fault{failBefore, failAfter, failR1} {
			for round := 1; ; round++ {
				w := m.world()
				want := fillMove(t, w)
				m.begin(w)
				c := w.client(1)
				c.begin(&index.Op{Kind: index.Move, Work: moveWork(homeGroup)})
				n, done := 0, false
				for !done && n < 2000 {
					n++
					with := noFault
					if n == round {
						with = f
					}
					_, done = c.advance(1<<30, with)
				}
				what := fmt.Sprintf("%v: fault %d in action %d", m, f, round)
				if c.op.Err != nil || !done {
					t.Fatalf("%s: %v, in step %v", what, c.op.Err, c.op.Step())
				}
				w.check(t, what, want)
				w.linkedPlaces(t, what, shardOff, childOff)
				if n < round {
					break
				}
			}
		}
	}
}

// TestMoveInterleaved lets updaters, inserters, readers with hints and two janitors
// take turns by single accesses in random orders. No read is older than what was
// acknowledged before it began; no acknowledged write is lost.
func TestMoveInterleaved(t *testing.T) {
	seeds := 60
	if testing.Short() {
		seeds = 5
	}
	for _, m := range moveCases() {
		t.Run(m.String(), func(t *testing.T) {
			for seed := range seeds {
				interleaved(t, m, uint64(seed))
			}
		})
	}
}

func interleaved(t *testing.T, m moveCase, seed uint64) {
	what := fmt.Sprintf("%v seed %d", m, seed)
	w := m.world()
	want := fillMove(t, w)
	rng := rand.New(rand.NewPCG(seed, 2))
	acked := map[string]int{}
	value := func(n int) string { return fmt.Sprintf("n%06d", n) }
	var scripts []*script
	keys := []string{"A", "B", "M", "Z2", "AB", "Q@5", "a"}
	for i, k := range keys {
		up := &script{c: w.client(20 + uint32(i))}
		for n := range 12 {
			up.words = append(up.words, []string{"put", k, value(n + 1)})
		}
		up.ended = func(_ *index.Op, words []string, err error) {
			if err != nil {
				t.Errorf("%s: %v: %v", what, words, err)
			}
			acked[k]++
		}
		must(t, up.c.do(t, "put", k, value(0)))
		want[k] = value(12)
		// A reader whose get began after n writes were acknowledged sees the n-th at least.
		down := &script{c: w.client(40 + uint32(i))}
		must(t, down.c.do(t, "get", k))
		least := 0
		for range 25 {
			down.words = append(down.words, []string{"get", k})
		}
		down.ended = func(o *index.Op, _ []string, err error) {
			if got := string(o.Record.Value); err != nil || got < value(least) {
				t.Errorf("%s: get %s: %q, %v after %d were acknowledged", what, k, got, err, least)
			}
		}
		down.begun = func() { least = acked[k] }
		scripts = append(scripts, up, down)
	}
	for i, k := range []string{"R", "S", "T", "U", "r", "AC", "BC", "R@5"} {
		in := &script{c: w.client(60 + uint32(i)), words: [][]string{{"put", k, "first", "if-absent"}, {"get", k}, {"append", k, "+"}, {"del", k}, {"get", k}, {"put", k, "again"}}}
		in.ended = func(o *index.Op, words []string, err error) {
			if missing := len(in.words) == 2; missing != errors.Is(err, index.ErrNotFound) || err != nil && !missing {
				t.Errorf("%s: %v: %v", what, words, err)
			}
		}
		scripts = append(scripts, in)
		want[k] = "again"
	}
	m.begin(w)
	j1, j2 := w.client(1), w.client(10)
	two := &script{c: j2, words: [][]string{{"move"}}, ended: func(o *index.Op, _ []string, err error) {
		if err != nil {
			t.Errorf("%s: second janitor: %v", what, err)
		}
	}}
	j1.begin(&index.Op{Kind: index.Move, Work: moveWork(homeGroup)})
	runAll(t, what, rng, append(scripts, two), j1)
	w.check(t, what, want)
	w.moveAll(t, j1)
	w.cleanAll(t, j1)
	w.check(t, what+", cleaned", want)
	w.linkedPlaces(t, what, shardOff, childOff)
	if t.Failed() {
		t.FailNow()
	}
}
