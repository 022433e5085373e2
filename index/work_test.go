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
	"github.com/kvd-project/kvd/index/repair"
	"github.com/kvd-project/kvd/internal/layout"
)

const childOff = shardOff + layout.SegmentSize

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
			moveCase{"migrate", r, r, false},
			moveCase{"grow", r, 0, false})
	}
	return cases
}

// world makes the memory of a move that has not begun.
func (m moveCase) world() *world {
	w := newWorld(m.replicas, 1024)
	w.quiet = true
	if m.target > 0 {
		w.other = newWorld(m.target, 1024)
		w.other.pg.ID, w.other.quiet = 2, true
	}
	return w
}

// begin puts the move into the map.
func (m moveCase) begin(w *world) {
	w.split = m.split
	w.child = &index.Route{PG: &w.pg, Shard: 9, ShardOff: childOff, Segments: 1, MapVersion: 1}
	if m.target > 0 {
		w.child.PG, w.child.ShardOff = &w.other.pg, shardOff
	}
	if m.split {
		w.child.Depth = 1
	} else if m.target == 0 {
		w.child.Segments = growth
	}
}

// growth is how many segments the child of a shard that grows has.
const growth = 3

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
func (c *client) job(t testing.TB, k index.Kind, work repair.Work) *index.Op {
	t.Helper()
	c.begin(workOp(k, &work))
	if lines, err := c.run(2000); err != nil {
		t.Fatalf("s%d %v: %v\n%s", c.id, k, err, strings.Join(lines[max(0, len(lines)-80):], "\n"))
	}
	if c.op.Err != nil {
		t.Fatalf("s%d %v: %v", c.id, k, c.op.Err)
	}
	return c.op
}

func workOp(k index.Kind, w *repair.Work) *index.Op {
	return &index.Op{Kind: k, Machine: repair.New(k, w)}
}

// workOf is what an operation of a janitor's kinds was asked, and found.
func workOf(o *index.Op) *repair.Work { return &o.Machine.(*repair.Op).Work }

func moveWork(group uint32) repair.Work { return repair.Work{Group: group} }

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
		if c.op.Parts() != nil {
			got = string(bytes.Join(c.op.Parts(), nil))
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

// arrays are the segments of a placement group's index.
func (w *world) arrays() []uint64 {
	return []uint64{shardOff, childOff, childOff + layout.SegmentSize, childOff + 2*layout.SegmentSize}
}

// sound checks what holds of a placement group in which nothing is under way: readable
// words have complete records on every replica (I3), and replicas show the same.
func (w *world) sound(t testing.TB, what string) {
	t.Helper()
	for _, at := range w.arrays() {
		for g := range layout.SegmentGroups + 1 {
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
			for g := range layout.SegmentGroups + 1 {
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

func (w *world) moveAll(t testing.TB, c *client) {
	t.Helper()
	for g := range uint32(layout.SegmentGroups) {
		c.job(t, index.Move, moveWork(g))
	}
}

func (w *world) syncAll(t testing.TB, c *client) {
	t.Helper()
	for _, id := range []uint32{1, 2} {
		for _, off := range w.arrays() {
			if w.of(id) != nil {
				c.job(t, index.Sync, repair.Work{PG: id, Off: off})
			}
		}
	}
}

// cleanAll clears what a move left, after the map changed.
func (w *world) cleanAll(t testing.TB, c *client) {
	t.Helper()
	w.moved = true
	for g := range layout.SegmentGroups + 1 {
		c.job(t, index.Clean, repair.Work{PG: 1, Off: shardOff + uint64(g)*layout.GroupSize, Wipe: !w.split,
			Target: w.child.PG.ID})
	}
	for r := range w.pg.Replicas {
		for g := range layout.SegmentGroups + 1 {
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
			w.linkedPlaces(t, "cleaned", w.arrays()...)
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
	delay int // turns until it begins
	dies  int // turns until the client dies and is fenced; 0: it lives
	begun func()
	ended func(o *index.Op, words []string, err error)
}

// step performs one access, or asks the operation what is next. It reports whether
// the script is over.
func (s *script) step() (over bool) {
	if len(s.words) == 0 {
		return true
	}
	if s.delay--; s.delay >= 0 {
		return false
	}
	if s.dies--; s.dies == 0 {
		s.c.w.fenced[s.c.id], s.words = true, nil
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
// are over. ended is called when the janitor's operation is.
func runAll(t testing.TB, what string, rng *rand.Rand, scripts []*script, janitor *client, ended func()) {
	t.Helper()
	busy := janitor != nil
	for n := 0; ; n++ {
		if n > 200000 {
			for _, s := range scripts {
				if len(s.words) > 0 {
					t.Logf("s%d %v in step %v, action %d, lock of s%d", s.c.id, s.words[0], s.c.op.Step(), s.c.action,
						s.c.op.LockOwner)
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
				if done && ended != nil {
					ended()
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
		switch (i + n) % 6 {
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
		case 5:
			words, wantErr = []string{"exists", k}, absent(index.ErrNotFound)
		}
		scripts = append(scripts,
			&script{c: c, words: [][]string{words}, ended: func(o *index.Op, words []string, err error) {
				if !errors.Is(err, wantErr) || o.Kind == index.Get && err == nil && string(o.Record.Value) != v {
					t.Errorf("%v: %v %q, want %v %q", words, err, o.Record.Value, wantErr, v)
				}
			}})
	}
	return scripts
}

// crashes stops a janitor's operation after every single access, or every stride-th,
// declares the janitor fenced and lets prepare's world go on.
func crashes(t *testing.T, what string, stride int, prepare func() (w *world, kind index.Kind, work repair.Work),
	goOn func(t testing.TB, what string, w *world, n int)) {
	t.Helper()
	for n := 0; ; n += stride {
		w, kind, work := prepare()
		c := w.client(1)
		c.begin(workOp(kind, &work))
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

// TestMoveCrash stops a janitor after every access of a Move. Clients that
// get, put, insert, delete and change every key meanwhile, and its successor, end up
// with every key as it should be.
func TestMoveCrash(t *testing.T) {
	for _, m := range moveCases() {
		t.Run(m.String(), func(t *testing.T) {
			want := map[string]string{}
			stride := 1
			if m.target > 1 {
				stride = 5 // the chain's length makes no difference to the order of things
			}
			crashes(t, m.String(), stride, func() (*world, index.Kind, repair.Work) {
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
				// A write that is acknowledged now is not lost.
				early := &script{c: w.client(80), words: [][]string{{"put", "P", "early"}}}
				must(t, early.c.start(early.words[0]))
				early.began = true
				for range 30 {
					if _, done := early.c.advance(1<<30, noFault); done {
						must(t, early.c.op.Err)
						early.words = nil
						if err := w.client(81).do(t, "get", "P"); err != nil {
							t.Fatalf("%s: get P: %v", what, err)
						}
						break
					}
				}
				scripts, want["P"] = append(scripts, early), "early"
				next := w.client(10)
				next.begin(workOp(index.Move, new(moveWork(homeGroup))))
				runAll(t, what, rand.New(rand.NewPCG(uint64(n), 1)), scripts, next, nil)
				w.check(t, what, want)
				w.moveAll(t, next)
				w.check(t, what+", all moved", want)
				w.cleanAll(t, next)
				w.check(t, what+", cleaned", want)
				w.linkedPlaces(t, what, w.arrays()...)
			})
		})
	}
}

// TestMoveFaults fails every single round of a Move once, with and without effect, or
// changes the view after it.
func TestMoveFaults(t *testing.T) {
	const newView = fault(100)
	for _, m := range moveCases() {
		for _, f := range []fault{failBefore, failAfter, failR1, newView} {
			for round := 1; ; round++ {
				w := m.world()
				want := fillMove(t, w)
				m.begin(w)
				c := w.client(1)
				c.begin(workOp(index.Move, new(moveWork(homeGroup))))
				n, done := 0, false
				for !done && n < 2000 {
					n++
					with := noFault
					if n == round && f != newView {
						with = f
					} else if n == round {
						c.op.Rebase()
					}
					_, done = c.advance(1<<30, with)
				}
				what := fmt.Sprintf("%v: fault %d in action %d", m, f, round)
				if c.op.Err != nil || !done {
					t.Fatalf("%s: %v, in step %v", what, c.op.Err, c.op.Step())
				}
				w.check(t, what, want)
				w.linkedPlaces(t, what, w.arrays()...)
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
	seeds := moveSeeds
	if testing.Short() {
		seeds /= 5
	}
	for _, m := range moveCases() {
		t.Run(m.String(), func(t *testing.T) {
			for seed := range seeds {
				interleaved(t, m, uint64(seed))
			}
		})
	}
}

// moveSeeds is how many orders each shape of a move is tried in.
var moveSeeds = 25

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
		up.c.rng = rng
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
		in := &script{c: w.client(60 + uint32(i)), words: [][]string{{"put", k, "first", "if-absent"}, {"get", k},
			{"append", k, "+"}, {"del", k}, {"get", k}, {"put", k, "again"}}}
		in.ended = func(o *index.Op, words []string, err error) {
			if missing := len(in.words) == 2; missing != errors.Is(err, index.ErrNotFound) || err != nil && !missing {
				t.Errorf("%s: %v: %v", what, words, err)
			}
		}
		scripts = append(scripts, in)
		want[k] = "again"
	}
	// Each client writes once, by a hint of before, at any time; the last ones die in it.
	for i, k := range []string{"D", "E", "F", "G", "H", "Z1@2", "I", "J", "K", "L"} {
		one := &script{c: w.client(70 + uint32(i)), delay: rng.IntN(450), words: [][]string{{"put", k, value(1)}}}
		one.c.rng = rng
		must(t, one.c.do(t, "put", k, value(0)))
		want[k] = value(1)
		if i >= 6 {
			delete(want, k)
			one.dies = 1 + rng.IntN(12)
		}
		down := &script{c: w.client(80 + uint32(i))}
		must(t, down.c.do(t, "get", k))
		for range 200 {
			down.words = append(down.words, []string{"get", k})
		}
		seen, least := value(0), value(0)
		one.ended = func(_ *index.Op, words []string, err error) {
			if err != nil {
				t.Errorf("%s: %v: %v", what, words, err)
			}
			seen = value(1)
		}
		down.begun = func() { least = seen }
		down.ended = func(o *index.Op, _ []string, err error) {
			got := string(o.Record.Value)
			if err != nil || got < least {
				t.Errorf("%s: get %s: %q, %v after %q", what, k, got, err, least)
			}
			seen = max(seen, got)
		}
		scripts = append(scripts, one, down)
	}
	m.begin(w)
	j1, j2 := w.client(1), w.client(10)
	j1.rng, j2.rng = rng, rng
	two := &script{c: j2, words: [][]string{{"move"}}, ended: func(o *index.Op, _ []string, err error) {
		if err != nil {
			t.Errorf("%s: second janitor: %v", what, err)
		}
	}}
	j1.begin(workOp(index.Move, new(moveWork(homeGroup))))
	runAll(t, what, rng, append(scripts, two), j1, nil)
	// Of what the dead have decided, some is not published.
	w.syncAll(t, j1)
	w.check(t, what, want)
	w.moveAll(t, j1)
	w.cleanAll(t, j1)
	w.check(t, what+", cleaned", want)
	w.linkedPlaces(t, what, w.arrays()...)
	if t.Failed() {
		t.FailNow()
	}
}

// TestMoveLong migrates a value of several chunks, whose places are free afterwards.
func TestMoveLong(t *testing.T) {
	m := moveCase{"migrate", 2, 2, false}
	world := func() (*world, map[string]string) {
		w := newWorld(2, 200_000)
		w.other = newWorld(2, 200_000)
		w.other.pg.ID, w.quiet, w.other.quiet = 2, true, true
		must(t, w.client(2).do(t, "put", "A", "long99", "expiry=5000"))
		must(t, w.client(2).do(t, "put", "b", "short"))
		m.begin(w)
		return w, map[string]string{"A": string(longValue(99)), "b": "short"}
	}
	w, want := world()
	must(t, w.client(2).do(t, "get", "A"))
	version := w.client(2).op.Version
	w.moveAll(t, w.client(1))
	w.check(t, "moved", want)
	if err := w.client(4).do(t, "get", "A"); err != nil || w.client(4).op.Version != version {
		t.Fatalf("version %d, %v; want %d", w.client(4).op.Version, err, version)
	}
	w.cleanAll(t, w.client(1))
	w.check(t, "cleaned", want)
	if len(w.left) != 4 { // two chunks, the manifest, b
		t.Errorf("places given up: %v", w.left)
	}
	w.millis = 6000
	if err := w.client(4).do(t, "get", "A"); !errors.Is(err, index.ErrNotFound) {
		t.Errorf("after its expiry: %v", err)
	}
	for round := 1; ; round++ {
		w, want := world()
		c := w.client(1)
		c.begin(workOp(index.Move, new(moveWork(homeGroup))))
		n, done := 0, false
		for !done && n < 500 {
			n++
			f := noFault
			if n == round {
				f = failAfter
			}
			_, done = c.advance(1<<30, f)
		}
		what := fmt.Sprintf("fault in action %d", round)
		if !done || c.op.Err != nil {
			t.Fatalf("%s: %v", what, c.op.Err)
		}
		w.check(t, what, want)
		w.cleanAll(t, c)
		w.check(t, what+", cleaned", want)
		w.linkedPlaces(t, what, shardOff)
		if n < round {
			break
		}
	}
}

// TestMoveNoMemory: without memory in the target nothing is frozen and the lock is free.
func TestMoveNoMemory(t *testing.T) {
	m := moveCase{"migrate", 2, 2, false}
	for _, memory := range []int{0, 3} {
		w := m.world()
		want := fillMove(t, w)
		m.begin(w)
		c := w.client(1)
		w.left = map[string]string{}
		c.memory = memory
		c.begin(workOp(index.Move, new(moveWork(homeGroup))))
		for c.action != index.Alloc {
			if _, done := c.advance(1<<30, noFault); done {
				t.Fatalf("done without memory: %v", c.op.Err)
			}
		}
		if pg, units := c.op.Wanted(); pg != 2 || units != 1 {
			t.Errorf("wants %d units of pg %d", units, pg)
		}
		for r := range w.pg.Replicas {
			g := w.groupAt(r, home())
			if g.Lock() != 0 || strings.Contains(showGroup(g), "FROZEN") {
				t.Errorf("R%d waits with lock %x, %s", r, g.Lock(), showGroup(g))
			}
		}
		if len(w.left) != memory {
			t.Errorf("gave back %v of %d places", w.left, memory)
		}
		w.check(t, "waiting", want)
		c.memory = -1
		for done := false; !done; {
			_, done = c.advance(1<<30, noFault)
		}
		must(t, c.op.Err)
		w.check(t, "moved", want)
	}
}

// TestMoveChildFull: where the child has no slot left the lock is free, nothing is lost,
// and the move goes on when there is room.
func TestMoveChildFull(t *testing.T) {
	m := moveCase{"split", 2, 0, true}
	w := m.world()
	want := fillMove(t, w)
	m.begin(w)
	w.fill(home()+layout.SegmentSize, layout.GroupSlots)
	w.fill(stash()+layout.SegmentSize, layout.GroupSlots)
	c := w.client(1)
	c.begin(workOp(index.Move, new(moveWork(homeGroup))))
	for c.action != index.Grow {
		if _, done := c.advance(1<<30, noFault); done {
			t.Fatalf("done without room: %v", c.op.Err)
		}
	}
	if w.groupAt(0, home()).Lock() != 0 || c.op.Route.Shard != 0 || len(workOf(c.op).Findings) != 1 {
		t.Errorf("lock %x, shard %d, findings %q", w.groupAt(0, home()).Lock(), c.op.Route.Shard, workOf(c.op).Findings)
	}
	w.check(t, "waiting", want)
	for r := range w.pg.Replicas {
		for i := range layout.GroupSlots {
			w.setSlot(r, home()+layout.SegmentSize, i, 0)
		}
	}
	if _, err := c.run(500); err != nil || c.op.Err != nil {
		t.Fatal(err, c.op.Err)
	}
	w.check(t, "moved", want)
}

// TestAbandonCrash loses the child at every stage of a move, and stops the janitor
// that undoes it after every access. Keys that were not MOVED are there; the shard works.
func TestAbandonCrash(t *testing.T) {
	for _, m := range moveCases() {
		if m.target == 0 {
			continue
		}
		t.Run(m.String(), func(t *testing.T) {
			var want map[string]string
			moved := uint64(0)
			mover := func(w *world) *client {
				m.begin(w)
				c := w.client(11)
				c.begin(workOp(index.Move, new(moveWork(homeGroup))))
				return c
			}
			// The stages at which most differs: before anything is FROZEN, while words become so,
			// MOVED in the stash alone, in the home group, SPLIT.
			w := m.world()
			fillMove(t, w)
			c := mover(w)
			stages := []int{0}
			for was, done := w.stage(), false; !done; {
				if _, done = c.advance(1, noFault); w.stage() != was {
					was = w.stage()
					stages = append(stages, c.verbs)
				}
			}
			stride := 1
			if m.replicas == 3 || !m.split {
				stride = 7 // long, and much the same
			}
			for i := 0; i < len(stages); i += 1 + len(stages)/5 {
				stage := stages[i]
				crashes(t, fmt.Sprintf("%v, child lost after %d accesses", m, stage), stride,
					func() (*world, index.Kind, repair.Work) {
						w := m.world()
						want = fillMove(t, w)
						for c := mover(w); c.verbs < stage; {
							c.advance(1, noFault)
						}
						w.fenced[11] = true
						w.child.PG = nil
						moved = 0
						for _, k := range slices.Sorted(maps.Keys(want)) {
							if _, _, x, _ := w.find(0, k); x.State() == layout.Moved {
								delete(want, k)
								moved++
							}
						}
						return w, index.Abandon, moveWork(homeGroup)
					}, func(t testing.TB, what string, w *world, n int) {
						scripts := writers(t, w, want, n)
						next := w.client(10)
						next.begin(workOp(index.Abandon, new(moveWork(homeGroup))))
						runAll(t, what, rand.New(rand.NewPCG(uint64(n), 3)), scripts, next, func() {
							w.child, w.other = nil, nil
						})
						if lost := workOf(w.client(1).op).Lost + workOf(next.op).Lost; lost > moved || n == 0 &&
							lost != moved {
							t.Errorf("%s: %d records lost, want %d", what, lost, moved)
						}
						w.check(t, what, want)
						w.linkedPlaces(t, what, shardOff)
						for r := range w.pg.Replicas {
							for _, off := range []uint64{home(), stash()} {
								g := w.groupAt(r, off)
								if g.Header().Split() || w.unfinished(r, off) {
									t.Errorf("%s: R%d %s", what, r, showGroup(g))
								}
							}
						}
					})
			}
		})
	}
}

// stage tells apart how far a move has come: the states of the first and last words of
// the moved set, at A and P, and the headers.
func (w *world) stage() (s string) {
	for _, r := range []uint8{0, w.pg.Replicas - 1} {
		for _, k := range []string{"A", "M", "AB"} {
			_, _, x, _ := w.find(r, k)
			s += x.State().String()
		}
		s += showHeader(w.groupAt(r, home()).Header())
	}
	return s
}

// unfinished reports whether a group has FROZEN or MOVED words.
func (w *world) unfinished(r uint8, off uint64) bool {
	for i := range layout.GroupSlots {
		if s := w.groupAt(r, off).Slot(i).State(); s == layout.Frozen || s == layout.Moved {
			return true
		}
	}
	return false
}

// TestCleanCrash stops a Clean after every single access, while clients work.
func TestCleanCrash(t *testing.T) {
	for _, m := range moveCases() {
		t.Run(m.String(), func(t *testing.T) {
			for _, off := range []uint64{home(), stash()} {
				var want map[string]string
				crashes(t, fmt.Sprintf("%v, group %#x", m, off), 1, func() (*world, index.Kind, repair.Work) {
					w := m.world()
					want = fillMove(t, w)
					m.begin(w)
					w.moveAll(t, w.client(1))
					w.moved = true
					return w, index.Clean, repair.Work{PG: 1, Off: off, Wipe: !m.split, Target: w.child.PG.ID}
				}, func(t testing.TB, what string, w *world, n int) {
					next := w.client(10)
					next.begin(workOp(index.Clean, workOf(w.client(1).op)))
					runAll(t, what, rand.New(rand.NewPCG(uint64(n), 4)), writers(t, w, want, n), next, nil)
					w.cleanAll(t, next)
					w.check(t, what, want)
					w.linkedPlaces(t, what, w.arrays()...)
				})
			}
		})
	}
}

// TestWipe: what is readable in an array that is to be zero stays, and is reported;
// unless nobody can ever reach it.
func TestWipe(t *testing.T) {
	for _, drop := range []bool{false, true} {
		w := newWorld(2, 64)
		must(t, w.client(2).do(t, "put", "k", "v"))
		must(t, w.client(2).do(t, "put", "j", "v"))
		must(t, w.client(2).do(t, "del", "j"))
		w.left = map[string]string{}
		o := w.client(1).job(t, index.Clean, repair.Work{PG: 1, Off: home(), Wipe: true, Drop: drop})
		_, _, _, there := w.find(1, "k")
		if there == drop || drop != (len(workOf(o).Findings) == 0) || drop != (len(w.left) == 1) {
			t.Errorf("drop %v: there %v, findings %q, places %v", drop, there, workOf(o).Findings, w.left)
		}
		for r := range w.pg.Replicas {
			g := w.groupAt(r, home())
			if g.Slot(1) != 0 || drop && len(bytes.Trim(g, "\x00")) > 0 {
				t.Errorf("drop %v: R%d %s", drop, r, showGroup(g))
			}
		}
	}
}

// recallWorld has a few keys in extent 0, which is being recalled.
func recallWorld(t testing.TB, replicas uint8) (*world, map[string]string) {
	w := newWorld(replicas, layout.ExtentUnits+8192)
	w.quiet = true
	want := map[string]string{}
	for i := range 5 {
		k := string(rune('a' + i))
		must(t, w.client(2).do(t, "put", k, "v-"+k))
		want[k] = "v-" + k
	}
	must(t, w.client(2).do(t, "del", "b"))
	delete(want, "b")
	w.pg.Recalled = []uint32{0}
	must(t, w.client(2).do(t, "put", "x", "elsewhere"))
	want["x"] = "elsewhere"
	return w, want
}

// inExtent lists what replicas still show in an extent.
func (w *world) inExtent(extent uint32) (list []string) {
	for r := range w.pg.Replicas {
		for g := range layout.SegmentGroups + 1 {
			for i := range layout.GroupSlots {
				if x := w.groupAt(r, shardOff+uint64(g)*layout.GroupSize).Slot(i); x.Readable() &&
					x.Unit()/layout.ExtentUnits == extent {
					list = append(list, fmt.Sprintf("R%d group %d slot %d: %v", r, g, i, x))
				}
			}
		}
	}
	return list
}

// TestRelocateCrash stops a Relocate after every single access, while clients work: the
// next one leaves nothing in the extent, on any replica.
func TestRelocateCrash(t *testing.T) {
	for r := uint8(1); r <= 3; r++ {
		var want map[string]string
		crashes(t, fmt.Sprintf("r=%d", r), 1, func() (*world, index.Kind, repair.Work) {
			var w *world
			w, want = recallWorld(t, r)
			return w, index.Relocate, repair.Work{PG: 1, Off: home(), Extents: []uint32{0}}
		}, func(t testing.TB, what string, w *world, n int) {
			next := w.client(10)
			next.begin(workOp(index.Relocate, &repair.Work{PG: 1, Off: home(), Extents: []uint32{0}}))
			runAll(t, what, rand.New(rand.NewPCG(uint64(n), 5)), writers(t, w, want, n), next, nil)
			if in := w.inExtent(0); len(in) > 0 {
				t.Errorf("%s: left in the extent: %v", what, in)
			}
			w.check(t, what, want)
			w.linkedPlaces(t, what, shardOff)
		})
	}
}

// TestRelocateLong: a manifest moves when a chunk of it must, and a dead writer's word at
// the tail does not stay.
func TestRelocateLong(t *testing.T) {
	w := newWorld(2, layout.ExtentUnits+200_000)
	w.quiet = true
	must(t, w.client(2).do(t, "put", "k", "old"))
	code, _ := layout.CodeFor(layout.RecordLen(0, layout.ChunkSize))
	w.nextUnit = layout.ExtentUnits - layout.UnitsOf(code)
	must(t, w.client(2).do(t, "put", "l", "long7")) // its first chunk in extent 0, the rest in 1
	_, _, x, _ := w.find(0, "l")
	if x.Unit() < layout.ExtentUnits {
		t.Fatal("the manifest is in extent 0")
	}
	w.pg.Recalled = []uint32{0}
	dead := &script{c: w.client(3), words: [][]string{{"put", "k", "new"}}}
	for {
		if _, _, at, _ := w.find(0, "k"); at.Unit() >= layout.ExtentUnits {
			break // decided, not published
		}
		dead.step()
	}
	w.fenced[3] = true
	w.left = map[string]string{}
	o := w.client(1).job(t, index.Relocate, repair.Work{PG: 1, Off: home(), Extents: []uint32{0}})
	if in := w.inExtent(0); len(in) > 0 || workOf(o).Moved != 1 || workOf(o).Synced != 1 {
		t.Errorf("moved %d, synced %d, left in the extent: %v", workOf(o).Moved, workOf(o).Synced, in)
	}
	if len(w.left) != 3 { // the manifest and two chunks
		t.Errorf("places given up: %v", w.left)
	}
	w.check(t, "relocated", map[string]string{"k": "new", "l": string(longValue(7))})
	// A move that never ends is no reason to wait for ever.
	_, i, x, _ := w.find(0, "l")
	for r := range w.pg.Replicas {
		w.setSlot(r, home(), i, x.WithState(layout.Frozen))
	}
	c := w.client(1)
	c.begin(workOp(index.Relocate, &repair.Work{PG: 1, Off: home(), Extents: []uint32{1}}))
	if _, err := c.run(2000); err != nil || c.op.Err == nil {
		t.Errorf("of a FROZEN word: %v, %v", err, c.op.Err)
	}
}

// TestRelocateCount: a recall in place leaves records where they are, tells what they keep and
// what is linked, and moves those alone that meet its window, a long value as a whole.
func TestRelocateCount(t *testing.T) {
	where := func(w *world) map[string]layout.Word {
		at := map[string]layout.Word{}
		for _, k := range []string{"a", "c", "d", "e", "l", "x"} {
			if _, _, x, ok := w.find(0, k); ok {
				at[k] = x
			}
		}
		return at
	}
	for r := uint8(1); r <= 3; r++ {
		for _, c := range []struct {
			name   string
			window func(at map[string]layout.Word, chunk repair.UnitRun) repair.UnitRun
			moves  []string
		}{
			{"no window", func(map[string]layout.Word, repair.UnitRun) repair.UnitRun { return repair.UnitRun{} }, nil},
			{"one record's last unit", func(at map[string]layout.Word, _ repair.UnitRun) repair.UnitRun {
				return repair.UnitRun{Unit: at["c"].Unit() + layout.UnitsOf(at["c"].Code()) - 1, Units: 1}
			}, []string{"c"}},
			{"from one to another", func(at map[string]layout.Word, _ repair.UnitRun) repair.UnitRun {
				return repair.UnitRun{Unit: at["c"].Unit(), Units: at["d"].Unit() + 1 - at["c"].Unit()}
			}, []string{"c", "d"}},
			{"a chunk", func(_ map[string]layout.Word, chunk repair.UnitRun) repair.UnitRun {
				return repair.UnitRun{Unit: chunk.Unit + 7, Units: 1}
			}, []string{"l"}},
			{"just before a chunk", func(_ map[string]layout.Word, chunk repair.UnitRun) repair.UnitRun {
				return repair.UnitRun{Unit: chunk.Unit - 1, Units: 1}
			}, nil},
		} {
			name := fmt.Sprintf("%s r=%d", c.name, r)
			w := newWorld(r, layout.ExtentUnits+200_000)
			w.quiet = true
			want := map[string]string{}
			for _, k := range []string{"a", "b", "c", "d", "e"} {
				must(t, w.client(2).do(t, "put", k, "v-"+k))
				want[k] = "v-" + k
			}
			must(t, w.client(2).do(t, "del", "b"))
			delete(want, "b")
			code, _ := layout.CodeFor(layout.RecordLen(0, layout.ChunkSize))
			chunk := repair.UnitRun{Unit: layout.ExtentUnits - layout.UnitsOf(code), Units: layout.UnitsOf(code)}
			w.nextUnit = chunk.Unit
			must(t, w.client(2).do(t, "put", "l", "long7"))
			want["l"] = string(longValue(7))
			w.pg.Recalled = []uint32{0}
			must(t, w.client(2).do(t, "put", "x", "elsewhere"))
			want["x"] = "elsewhere"
			before := where(w)
			if before["c"].Unit()/layout.ExtentUnits != 0 || before["x"].Unit()/layout.ExtentUnits != 1 {
				t.Fatalf("%s: the test proves nothing: %v", name, before)
			}
			window := c.window(before, chunk)
			o := w.client(1).job(t, index.Relocate, repair.Work{PG: 1, Off: home(), Extents: []uint32{0}, Count: true,
				Window: window})
			after := where(w)
			units := uint32(0)
			for k, x := range before {
				moved := after[k] != x
				if moved != slices.Contains(c.moves, k) {
					t.Errorf("%s: %q was at %v, is at %v", name, k, x, after[k])
				}
				if moved && k != "l" && after[k].Unit()/layout.ExtentUnits == 0 {
					t.Errorf("%s: %q moved inside the extent: %v", name, k, after[k])
				}
				if x := after[k]; x.Unit()/layout.ExtentUnits == 0 {
					units += layout.UnitsOf(x.Code())
					if !slices.Contains(workOf(o).Kept,
						repair.UnitRun{Unit: x.Unit(), Units: layout.UnitsOf(x.Code())}) {
						t.Errorf("%s: %q at %v is not kept: %v", name, k, x, workOf(o).Kept)
					}
				}
			}
			if kept := slices.Contains(workOf(o).Kept, chunk); kept == slices.Contains(c.moves, "l") {
				t.Errorf("%s: a chunk is kept: %v", name, kept)
			} else if kept {
				units += chunk.Units
			}
			sum := uint32(0)
			for _, k := range workOf(o).Kept {
				if sum += k.Units; window.Units > 0 && k.Unit < window.Unit+window.Units && window.Unit < k.Unit+
					k.Units {
					t.Errorf("%s: %v is kept in the window %v", name, k, window)
				}
			}
			if sum != units || workOf(o).Linked[0] != units || workOf(o).Linked[1] == 0 ||
				int(workOf(o).Moved) != len(c.moves) || int(workOf(o).Records) != len(want) {
				t.Errorf("%s: kept %d units, linked %v, want %d; moved %d of %d records", name, sum, workOf(o).Linked,
					units, workOf(o).Moved, workOf(o).Records)
			}
			w.check(t, name, want)
		}
	}
}

// TestSyncJoiner fills an empty replica, and goes on where another stopped.
func TestSyncJoiner(t *testing.T) {
	var want map[string]string
	empties := func(w *world, r uint8) (n int) {
		for i := range layout.GroupSlots {
			if x := w.groupAt(r, home()).Slot(i); x != 0 && x.State() == layout.Empty {
				n++
			}
		}
		return n
	}
	crashes(t, "sync", 1, func() (*world, index.Kind, repair.Work) {
		w := newWorld(3, 256)
		w.quiet = true
		want = fillMove(t, w)
		clear(w.region[2])
		return w, index.Sync, repair.Work{PG: 1, Off: shardOff}
	}, func(t testing.TB, what string, w *world, n int) {
		c := w.client(10)
		o := c.job(t, index.Sync, repair.Work{PG: 1, Off: shardOff})
		if n == 0 && workOf(o).Synced == 0 {
			t.Errorf("%s: nothing synced", what)
		}
		w.check(t, what, want)
		if a, j := empties(w, 0), empties(w, 2); a == 0 || a != j {
			t.Errorf("%s: %d EMPTY words with nonces at A, %d at the joiner", what, a, j)
		}
		if o := c.job(t, index.Sync, repair.Work{PG: 1, Off: shardOff}); workOf(o).Synced != 0 {
			t.Errorf("%s: %d words synced again", what, workOf(o).Synced)
		}
	})
}

// TestRelocateCountDamaged: a word that names no memory of the heap counts once, however often
// the group is looked at.
func TestRelocateCountDamaged(t *testing.T) {
	w := newWorld(1, layout.ExtentUnits+200_000)
	w.quiet = true
	must(t, w.client(2).do(t, "put", "c", "v"))
	_, _, x, _ := w.find(0, "c")
	var free int
	for free = range layout.GroupSlots {
		if w.groupAt(0, home()).Slot(free) == 0 {
			break
		}
	}
	w.setSlot(0, home(), free, layout.MakeLive(0, 1, 0, w.pg.HeapHi))
	w.nextUnit = layout.ExtentUnits // c moves there
	o := w.client(1).job(t, index.Relocate, repair.Work{PG: 1, Off: home(), Extents: []uint32{0}, Count: true,
		Window: repair.UnitRun{Unit: x.Unit(), Units: 1}})
	if workOf(o).Moved != 1 || workOf(o).Records != 1 || workOf(o).Lost != 1 || len(workOf(o).Findings) != 1 {
		t.Errorf("moved %d of %d records, lost %d, findings %q", workOf(o).Moved, workOf(o).Records, workOf(o).Lost,
			workOf(o).Findings)
	}
}

// TestScrub plants damage and counts exactly what is linked.
func TestScrub(t *testing.T) {
	w := newWorld(3, 200_000)
	w.quiet = true
	want := fillMove(t, w)
	must(t, w.client(2).do(t, "put", "O", "long5"))
	want["O"] = string(longValue(5))
	scrub := func() *index.Op { return w.client(1).job(t, index.Scrub, repair.Work{PG: 1, Off: shardOff}) }

	units := uint64(len(want) - 1) // one unit each
	_, _, manifest, _ := w.find(0, "O")
	rec, _ := layout.ParseRecord(w.region[0][manifest.Off():][:manifest.ReadLen()])
	m, err := layout.ParseManifest(rec.Value, w.pg.HeapLo, w.pg.HeapHi)
	if err != nil {
		t.Fatal(err)
	}
	units += uint64(manifest.Units())
	for _, c := range m.Chunks {
		units += uint64(layout.UnitsOf(c.Code))
	}
	o := scrub()
	if workOf(o).Records != uint64(len(want)) || workOf(o).Units != units || uint64(workOf(o).Linked[0]) != units ||
		len(workOf(o).Linked) != 1 || workOf(o).Repaired+workOf(o).Lost+workOf(o).Synced != 0 ||
		len(workOf(o).Findings) > 0 {
		t.Errorf("sound: %+v; want %d records of %d units", workOf(o), len(want), units)
	}

	// Copies that a good one repairs: a record at A, one at the last replica, a chunk.
	for r, k := range map[int]string{0: "A", 2: "AB"} {
		_, _, x, _ := w.find(0, k)
		w.region[r][x.Off()+layout.RecordHeaderSize+2] ^= 1
	}
	w.region[1][uint64(m.Chunks[1].Unit)*layout.UnitSize+100] ^= 1
	// A good CRC is not enough: the record is another's.
	_, _, x, _ := w.find(0, "e")
	layout.EncodeRecord(w.region[1][x.Off():], layout.RecordHeader{Version: 1}, []byte("@9"), []byte("v"))
	// A word that one replica missed.
	_, i, _, _ := w.find(0, "g")
	w.setSlot(2, home(), i, 0)
	o = scrub()
	if workOf(o).Repaired != 4 || workOf(o).Synced != 1 || workOf(o).Lost != 0 || len(workOf(o).Findings) > 0 ||
		workOf(o).Units != units {
		t.Errorf("repairing: %+v", workOf(o))
	}
	w.check(t, "repaired", want)
	for r := range w.pg.Replicas {
		if !bytes.Equal(w.region[r][shardOff:], w.region[0][shardOff:]) {
			t.Errorf("R%d differs from R0", r)
		}
	}

	// Damage that nobody can repair is named: no good copy; one key twice; units nowhere.
	_, _, x, _ = w.find(0, "h")
	for r := range w.pg.Replicas {
		w.region[r][x.Off()+layout.RecordHeaderSize] ^= 1
	}
	_, _, x, _ = w.find(0, "a")
	var free int
	for free = range layout.GroupSlots {
		if w.groupAt(0, stash()).Slot(free) == 0 {
			break
		}
	}
	for r := range w.pg.Replicas {
		w.setSlot(r, stash(), free, x)
		w.setSlot(r, stash(), free+1, layout.MakeLive(0, 1, 0, w.pg.HeapHi))
	}
	o = scrub()
	found := strings.Join(workOf(o).Findings, "\n")
	if workOf(o).Lost != 2 || len(workOf(o).Findings) != 3 || !strings.Contains(found, "the same key") ||
		!strings.Contains(found, "no good copy") || !strings.Contains(found, "outside the heap") {
		t.Errorf("broken: lost %d, findings\n%s", workOf(o).Lost, found)
	}
}

// TestWorkFails ends a janitor's operation from outside after every action, with its last
// round performed or not. It does not keep its lock, and whoever comes next finishes.
func TestWorkFails(t *testing.T) {
	fatal := errors.New("stopped")
	m := moveCase{"migrate", 2, 2, false}
	for k := index.Sync; int(k) < index.NumKinds; k++ {
		for _, posted := range []bool{true, false} {
			for actions := 0; ; actions++ {
				w := m.world()
				want := fillMove(t, w)
				m.begin(w)
				work := repair.Work{PG: 1, Off: shardOff, Group: homeGroup}
				switch k {
				case index.Clean:
					w.moveAll(t, w.client(1))
					w.moved, work.Wipe, work.Target, work.Off = true, true, 2, home()
				case index.Relocate:
					w, want = recallWorld(t, 2)
					work.Off = home()
				case index.Abandon:
					w.child, want["extra"] = &index.Route{}, "x"
					must(t, w.client(2).do(t, "put", "extra", "x"))
				}
				c := w.client(1)
				c.begin(workOp(k, &work))
				done := false
				for range actions {
					if _, done = c.advance(1<<30, noFault); done {
						break
					}
				}
				what := fmt.Sprintf("%v stopped after %d actions, posted %v", k, actions, posted)
				if !done && !posted {
					switch a := c.op.Next(); a {
					case index.Post:
						c.op.NotPosted()
					default:
						c.noWait()
						done = a == index.Done
					}
				}
				if !done {
					if a := c.op.Fail(fatal); a != index.Done || !errors.Is(c.op.Err, fatal) {
						t.Fatalf("%s: action %d, %v", what, a, c.op.Err)
					}
					c.noWait()
				}
				for g := range layout.SegmentGroups + 1 {
					if l := w.groupAt(0, shardOff+uint64(g)*layout.GroupSize).Lock(); l != 0 {
						t.Fatalf("%s: group %d is locked: %x", what, g, l)
					}
				}
				w.client(10).job(t, k, work)
				if k == index.Abandon {
					w.child = nil
				}
				w.check(t, what, want)
				w.linkedPlaces(t, what, shardOff)
				if done {
					break
				}
			}
		}
	}
}

// TestWanted: what an Op waits for is the place that it needs next, not all of a long
// value, nor what a Modify was given.
func TestWanted(t *testing.T) {
	chunk, _ := layout.CodeFor(layout.RecordLen(0, layout.ChunkSize))
	long := make([]byte, 2*layout.ChunkSize)
	half := long[:layout.ChunkSize/2]
	modified, _ := layout.CodeFor(layout.RecordLen(1, len(half)))
	small, _ := layout.CodeFor(layout.RecordLen(1, 1))
	for name, x := range map[string]struct {
		op     index.Op
		memory int
		code   uint8
	}{
		"first chunk":  {index.Op{Kind: index.Put, Value: long}, 0, chunk},
		"second chunk": {index.Op{Kind: index.Put, Value: long}, 1, chunk},
		"small":        {index.Op{Kind: index.Put, Value: long[:1]}, 0, small},
		"modify": {index.Op{Kind: index.Modify, Modify: func(*layout.Record) ([]byte, layout.RecordFlags, uint64,
			error) {
			return half, 0, 0, nil
		}},
			0, modified},
	} {
		w := newWorld(1, 1<<18)
		c := w.client(1)
		c.memory = x.memory
		x.op.Key = []byte("k")
		c.begin(&x.op)
		for c.action != index.Alloc {
			if _, done := c.advance(1<<30, noFault); done {
				t.Fatalf("%s: done without memory: %v", name, c.op.Err)
			}
		}
		if pg, units := c.op.Wanted(); pg != w.pg.ID || units != layout.UnitsOf(x.code) {
			t.Errorf("%s: wants %d units of placement group %d, not %d", name, units, pg, layout.UnitsOf(x.code))
		}
	}
}

// A PUT that has taken a place, and whose key has moved to another placement group meanwhile, takes another place
// there, also if a hint of somebody else's leads it there.
func TestHintAtChildWithPlace(t *testing.T) {
	for _, m := range moveCases() {
		t.Run(m.String(), func(t *testing.T) {
			w := m.world()
			want := fillMove(t, w)
			c := w.client(3)
			must(t, c.do(t, "get", "a"))
			h := c.hints["a"]
			if err := c.start([]string{"put", "a", "new"}); err != nil {
				t.Fatal(err)
			}
			m.begin(w)
			w.setSlot(0, home(), int(h.Slot), h.Word.WithState(layout.Frozen))
			for c.op.Waits == 0 { // until it has lost its CAS and waits with its place
				if _, done := c.advance(1, noFault); done {
					t.Fatalf("done: %v", c.op.Err)
				}
			}
			w.setSlot(0, home(), int(h.Slot), h.Word)
			w.moveAll(t, w.client(1))
			must(t, w.client(4).do(t, "get", "a"))
			c.hints["a"] = w.client(4).hints["a"]
			for done := false; !done; {
				_, done = c.advance(1<<30, noFault)
			}
			must(t, c.op.Err)
			c.noWait()
			w.moved = true
			want["a"] = "new"
			w.check(t, "put", want)
		})
	}
}

// Shards of one size ask for room in turns: how much of a stash is used by then depends on the shard's prefix, and two
// halves are far apart.
func TestCrowdedInTurns(t *testing.T) {
	for _, tc := range []struct {
		depth  uint8
		filler string
		used   int // slots of the stash
	}{{0, "f%02d", 2}, {0, "F%02d", 2}, {1, "f%02d", 2}, {1, "F%02d", 7}, {2, "f%02d", 2}, {2, "F%02d", 4}} {
		w := newWorld(1, 1024)
		w.quiet, w.depth = true, tc.depth
		c := w.client(1)
		n := 0
		for ; c.crowded == 0 && n < layout.GroupSlots*2; n++ {
			must(t, c.do(t, "put", fmt.Sprintf(tc.filler, n), "v"))
		}
		// The last one found so many in the stash, behind a group that is full.
		if used := n - 1 - layout.GroupSlots; used != tc.used {
			t.Errorf("depth %d, keys %s: room is asked for with %d slots of the stash used, want %d", tc.depth,
				tc.filler, used, tc.used)
		}
	}
}
