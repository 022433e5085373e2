package index_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/index/repair"
	"github.com/kvd-project/kvd/internal/layout"
)

// statusOff is the i-th status word of the harness: its block is the first group of the last segment of the index.
func statusOff(i int) uint64 {
	return shardOff + 4*layout.SegmentSize + layout.SlotOff(i)
}

// startTxn makes o an operation of a transaction: prepare k put v|del|keep, decide commit|abort, settle k commit|abort;
// look or find instead of a verdict: Undecided; x=N is the status word, pg=2 where it is, seq=N the transaction, ts=N
// its age, patience=N. It returns the words that are left.
func (c *client) startTxn(o *index.Op, words []string) (rest []string) {
	at, ts := index.StatusAt{PG: 1, Seq: 1}, uint64(0)
	i := 0
	for _, w := range words {
		name, value, _ := strings.Cut(w, "=")
		switch name {
		case "x":
			_, _ = fmt.Sscan(value, &i)
		case "seq":
			_, _ = fmt.Sscan(value, &at.Seq)
		case "ts":
			_, _ = fmt.Sscan(value, &ts)
		case "patience":
			_, _ = fmt.Sscan(value, &o.Patience)
		case "pg":
			_, _ = fmt.Sscan(value, &at.PG)
		case "if", "if-absent", "if-present", "expiry", "whole":
			rest = append(rest, w)
		}
	}
	at.Off = statusOff(i)
	if c.txns == nil {
		c.txns, c.bases = map[string]*index.Txn{}, map[index.StatusAt]layout.Status{}
	}
	word := index.StatusAt{PG: at.PG, Off: at.Off}
	if now := layout.Status(binary.LittleEndian.Uint64(c.w.of(at.PG).region[0][at.Off:])); now.Seq() < at.Seq {
		c.bases[word] = now
	}
	switch words[0] {
	case "prepare":
		o.Kind = index.Prepare
		o.Txn = &index.Txn{Status: at, TS: ts, Coord: uint64(c.id)}
		switch words[2] {
		case "put":
			o.Txn.Effect, o.Value = index.PutKey, valueOf(words[3])
		case "del":
			o.Txn.Effect = index.DeleteKey
		case "keep":
			o.Txn.Effect = index.KeepKey
		}
		c.txns[words[1]] = o.Txn
	case "decide":
		o.Kind, o.Key, o.Hash = index.Decide, nil, 0
		o.Txn = &index.Txn{Status: at, Found: c.bases[word], Verdict: layout.Abort}
	case "settle":
		o.Kind = index.Settle
		t := *c.w.txnOf(c, words[1])
		o.Txn = &t
		o.Txn.Verdict = layout.Abort
	}
	switch {
	case slices.Contains(words, "commit"):
		o.Txn.Verdict = layout.Commit
	case slices.Contains(words, "look"), slices.Contains(words, "find"):
		o.Txn.Verdict = layout.Undecided
	}
	return rest
}

// txnOf is what c knows of its intent at key, or else another client of its own.
func (w *world) txnOf(c *client, key string) *index.Txn {
	for _, x := range append([]*client{c}, w.clients...) {
		if t := x.txns[key]; t != nil {
			return t
		}
	}
	return nil
}

// coordinator performs a transaction, operation by operation.
type coordinator struct {
	c        *client
	prepares []string
	at       string // options of the status word
	i        int
	stage    int // 0 prepare, 1 decide, 2 settle, 3 done
	placed   []string
	commit   bool
	answered bool // it was told that it committed
	running  bool
}

// advance performs at most so many accesses.
func (x *coordinator) advance(t testing.TB, limit int) (done bool) {
	t.Helper()
	for x.stage < 3 {
		if !x.running {
			if !x.next(t) {
				continue
			}
			x.running = true
		}
		was := x.c.verbs
		_, over := x.c.advance(limit, noFault)
		limit -= x.c.verbs - was
		if over {
			x.running = false
			x.over(t)
		}
		if limit <= 0 {
			break
		}
	}
	return x.stage == 3
}

// next starts the next operation; false: there is none in this stage.
func (x *coordinator) next(t testing.TB) bool {
	verdict := "abort"
	if x.commit {
		verdict = "commit"
	}
	var op string
	switch {
	case x.stage == 0 && x.i < len(x.prepares):
		op = "prepare " + x.prepares[x.i]
	case x.stage == 1:
		op = "decide " + verdict
	case x.stage == 2 && x.i < len(x.placed):
		op = "settle " + x.placed[x.i] + " " + verdict
	default:
		if x.stage++; x.stage == 1 {
			x.commit = len(x.placed) == len(x.prepares)
		}
		x.i = 0
		return false
	}
	if err := x.c.start(fields(op + " " + x.at)); err != nil {
		t.Fatal(err)
	}
	return true
}

func (x *coordinator) over(t testing.TB) {
	switch o := x.c.op; {
	case x.stage == 0 && o.Err == nil:
		x.placed = append(x.placed, string(o.Key))
		x.i++
	case x.stage == 0:
		x.stage, x.i, x.commit = 1, 0, false
	case o.Err != nil:
		t.Fatalf("stage %d: %v", x.stage, o.Err)
	case x.stage == 1:
		v, _ := o.Txn.Found.Of(o.Txn.Status.Seq)
		x.commit = v == layout.Commit
		x.answered = x.commit
		x.stage, x.i = 2, 0
	default:
		x.i++
	}
}

// run performs the transaction to its end and reports whether it committed.
func (x *coordinator) run(t testing.TB) bool {
	t.Helper()
	for range 200 {
		if x.advance(t, 1<<30) {
			return x.commit
		}
	}
	t.Fatalf("no end in stage %d", x.stage)
	return false
}

// value is what c finds under key, "" if nothing.
func (w *world) value(t testing.TB, c *client, key string) string {
	t.Helper()
	switch err := c.do(t, "get", key); {
	case errors.Is(err, index.ErrNotFound):
		return ""
	case err != nil:
		t.Fatalf("get %s: %v", key, err)
	}
	return c.got()
}

func (c *client) got() string {
	if p := c.op.Parts(); p != nil {
		return string(bytes.Join(p, nil))
	}
	return string(c.op.Record.Value)
}

// txnScripts are transactions over k and m, with what is there before and after.
var txnScripts = []struct {
	name, setup   string
	prepares      []string
	before, after [2]string
}{
	{"put-put", "put k old;put m old", []string{"k put new", "m put new"}, [2]string{"old", "old"},
		[2]string{"new", "new"}},
	{"delete-insert", "put k old", []string{"k del", "m put new"}, [2]string{"old", ""}, [2]string{"", "new"}},
	{"insert-insert", "", []string{"k put new", "m put new"}, [2]string{"", ""}, [2]string{"new", "new"}},
	{"guard-put", "put k old;put m old", []string{"k keep", "m put new"}, [2]string{"old", "old"},
		[2]string{"old", "new"}},
	{"guard-absent", "put k old", []string{"k put new", "m keep if-absent"}, [2]string{"old", ""},
		[2]string{"new", ""}},
	{"long-put-put", "put k old whole=1;put m old whole=1", []string{"k put new whole=1", "m put new"},
		[2]string{"old", "old"}, [2]string{"new", "new"}},
	{"long-guard-put", "put k old whole=1;put m old", []string{"k keep", "m put new whole=1"}, [2]string{"old", "old"},
		[2]string{"old", "new"}},
	{"long-delete-insert", "put k old whole=1", []string{"k del", "m put new whole=1"}, [2]string{"old", ""},
		[2]string{"", "new"}},
	{"reinsert", "put k old;del k;put m old", []string{"k put new if-absent", "m del"}, [2]string{"", "old"},
		[2]string{"new", ""}},
}

// TestTxn: a transaction changes all of its keys, and leaves no intent and no place behind.
func TestTxn(t *testing.T) {
	for _, s := range txnScripts {
		for r := uint8(1); r <= 3; r++ {
			for _, elsewhere := range []bool{false, true} {
				w := txnWorld(t, r, s.setup, elsewhere)
				x := &coordinator{c: w.client(1), prepares: s.prepares, at: txnAt(elsewhere)}
				what := fmt.Sprintf("%s r=%d elsewhere %v", s.name, r, elsewhere)
				if !x.run(t) {
					t.Errorf("%s: not committed", what)
				}
				for i, k := range []string{"k", "m"} {
					if v := w.value(t, w.client(5), k); v != s.after[i] {
						t.Errorf("%s: %s is %q, want %q", what, k, v, s.after[i])
					}
				}
				w.checkTidy(t, what)
			}
		}
	}
}

// checkTidy: no intent is left, and every place is one thing, or was in the hands of a client that died.
func (w *world) checkTidy(t testing.TB, what string) {
	t.Helper()
	linked := map[string]bool{}
	for r := range w.pg.Replicas {
		for _, g := range []uint64{home(), stash()} {
			for i := range layout.GroupSlots {
				if x := w.groupAt(r, g).Slot(i); x.State() == layout.Frozen {
					t.Errorf("%s: R%d has %v in slot %d", what, r, x, i)
				} else if x.Readable() {
					w.addLinked(t, linked, r, x)
				}
			}
		}
	}
	for _, s := range w.wrong {
		t.Errorf("%s: %s", what, s)
	}
	for _, p := range w.taken {
		u := p.Unit
		switch how, left := w.left[unitName(u)]; {
		case left && linked[unitName(u)]:
			t.Errorf("%s: %s is linked and was given up (%s)", what, unitName(u), how)
		case !left && !linked[unitName(u)] && len(w.fenced) == 0: // those who died took some with them
			t.Errorf("%s: %s is nobody's", what, unitName(u))
		}
	}
}

// addLinked adds the places of the record that x names in R[r], and of its chunks.
func (w *world) addLinked(t testing.TB, linked map[string]bool, r uint8, x layout.Word) {
	t.Helper()
	linked[unitName(x.Unit())] = true
	rec, err := layout.ParseRecord(w.region[r][x.Off():][:x.ReadLen()])
	if err != nil || rec.Flags&layout.FlagManifest == 0 {
		return
	}
	m, err := layout.ParseManifest(rec.Value, w.pg.HeapLo, w.pg.HeapHi)
	must(t, err)
	for i, c := range m.Chunks {
		linked[unitName(c.Unit)] = true
		b := w.region[r][uint64(c.Unit)*layout.UnitSize:][:layout.SizeOf(c.Code)]
		if p, err := layout.ParseRecord(b); err != nil || p.Version != m.ID || p.Expiry != uint64(i) {
			t.Errorf("R%d: %s names %s, which is no chunk %d of it: %v", r, unitName(x.Unit()), unitName(c.Unit), i,
				err)
		}
	}
}

func txnAt(elsewhere bool) string {
	if elsewhere {
		return "x=3 pg=2"
	}
	return "x=3"
}

func txnWorld(t testing.TB, r uint8, setup string, elsewhere bool) *world {
	w := newWorld(r, 512)
	if elsewhere {
		w.other = newWorld(r, 64)
		w.other.pg.ID = 2
	}
	for op := range strings.SplitSeq(setup, ";") {
		if op != "" {
			must(t, w.client(2).do(t, fields(op)...))
		}
	}
	return w
}

// TestTxnCrashAtEveryStep stops a coordinator after every single access, declares it fenced and lets others work on its
// keys. They finish; all agree on whether it happened from the first of them on; and what was answered did happen.
func TestTxnCrashAtEveryStep(t *testing.T) {
	nexts := []string{"get k", "exists k", "put k mine", "put k mine if-absent", "put k mine if-present", "del k",
		"append k *", "put kk other", "prepare", "settle"}
	crashes := 0
	for _, s := range txnScripts {
		for r := uint8(1); r <= 3; r++ {
			for _, next := range nexts {
				elsewhere := len(next)%2 == 0
				for accesses := 0; ; accesses++ {
					what := fmt.Sprintf("%s r=%d, crash after %d accesses, then %s", s.name, r, accesses, next)
					w := txnWorld(t, r, s.setup, elsewhere)
					x := &coordinator{c: w.client(1), prepares: s.prepares, at: txnAt(elsewhere)}
					old := w.client(3)
					for i, k := range []string{"k", "m"} {
						if s.before[i] != "" {
							must(t, old.do(t, "get", k)) // a hint of the old word
						}
					}
					done := accesses > 0 && x.advance(t, accesses)
					w.fenced[1] = true
					crashes++
					w.followTxn(t, what, s.before, s.after, next, x.answered)
					if done {
						break
					}
				}
			}
		}
	}
	t.Logf("%d crashes", crashes)
}

// settleAll has c find the verdict on every intent that was posted, and settle it.
func (w *world) settleAll(t *testing.T, what string, c *client) {
	t.Helper()
	for _, k := range []string{"k", "m"} {
		if x := w.txnOf(c, k); x != nil && x.Placed.Word != 0 {
			must(t, c.do(t, "settle", k, "find"))
		}
	}
	w.checkSettled(t, what)
}

// checkSettled: no replica holds an intent.
func (w *world) checkSettled(t testing.TB, what string) {
	t.Helper()
	for r := range w.pg.Replicas {
		for i := range layout.GroupSlots {
			if x := w.groupAt(r, home()).Slot(i); x.State() == layout.Frozen {
				t.Fatalf("%s: R%d has %v in slot %d", what, r, x, i)
			}
		}
	}
}

// TestTxnStatusRead: a Decide without a verdict tells what the status word holds at the head, once every replica shows
// that, and changes nothing.
func TestTxnStatusRead(t *testing.T) {
	for r := uint8(1); r <= 3; r++ {
		w := txnWorld(t, r, "put k old", false)
		c := w.client(1)
		must(t, c.do(t, "prepare", "k", "put", "new", "x=3", "seq=4"))
		must(t, c.start(fields("decide x=3 seq=4 commit")))
		c.advance(1, noFault) // at the head alone
		d := w.client(2)
		must(t, d.do(t, "decide", "x=3", "seq=9", "look"))
		if f := d.op.Txn.Found; f != layout.MakeStatus(4, layout.Commit, 0) {
			t.Errorf("r=%d: found %v", r, f)
		}
		for k := range r {
			if f := layout.Status(binary.LittleEndian.Uint64(w.region[k][statusOff(3):])); f != d.op.Txn.Found {
				t.Errorf("r=%d: R%d holds %v, and %v was answered", r, k, f, d.op.Txn.Found)
			}
		}
	}
}

// TestTxnNoStatusWord: a Decide whose status word lies outside the index, or between two words, is refused.
func TestTxnNoStatusWord(t *testing.T) {
	for _, off := range []uint64{0, layout.RegionPageSize, statusOff(0) + 4, heapLo * layout.UnitSize, 1 << 60} {
		w := txnWorld(t, 1, "", false)
		c := w.client(1)
		must(t, c.start(fields("decide x=0 seq=1 commit")))
		c.op.Txn.Status.Off = off
		if _, err := c.run(5); err != nil {
			t.Fatal(err)
		}
		if c.op.Err == nil || c.verbs != 0 {
			t.Errorf("offset %#x: %v after %d accesses", off, c.op.Err, c.verbs)
		}
	}
}

// followTxn runs next by a client that knows nothing of the transaction, and checks that all see it happen, or not, as
// one.
func (w *world) followTxn(t *testing.T, what string, before, after [2]string, next string, answered bool) {
	t.Helper()
	c := w.client(4)
	var want [][2]string // what may be there afterwards
	add := func(happened bool, k string) {
		v := before
		if happened {
			v = after
		}
		if k != "=" {
			v[0] = k
		}
		want = append(want, v)
	}
	states := []bool{false, true}
	if answered {
		states = states[1:]
	}
	if next == "prepare" {
		x := &coordinator{c: c, prepares: []string{"k put mine", "m put mine"}, at: "x=7 ts=9"}
		if !x.run(t) {
			t.Fatalf("%s: not committed", what)
		}
		for _, k := range []string{"k", "m"} {
			for _, id := range []uint32{3, 5} {
				if v := w.value(t, w.client(id), k); v != "mine" {
					t.Fatalf("%s: %s is %q", what, k, v)
				}
			}
		}
		return
	}
	if next == "settle" {
		w.settleAll(t, what, c)
		next = "get k"
	}
	err := c.do(t, fields(next)...)
	for _, happened := range states {
		v := before[0]
		if happened {
			v = after[0]
		}
		switch next {
		case "get k":
			if err == nil && v == c.got() || v == "" && errors.Is(err, index.ErrNotFound) {
				add(happened, "=")
			}
		case "exists k":
			if err == nil && v != "" || v == "" && errors.Is(err, index.ErrNotFound) {
				add(happened, "=")
			}
		case "put k mine":
			if err == nil {
				add(happened, "mine")
			}
		case "put k mine if-absent":
			if v == "" && err == nil {
				add(happened, "mine")
			} else if v != "" && errors.Is(err, index.ErrExists) {
				add(happened, "=")
			}
		case "put k mine if-present":
			if v != "" && err == nil {
				add(happened, "mine")
			} else if v == "" && errors.Is(err, index.ErrNotFound) {
				add(happened, "=")
			}
		case "del k":
			if v != "" && err == nil || v == "" && errors.Is(err, index.ErrNotFound) {
				add(happened, "")
			}
		case "append k *":
			if err == nil {
				add(happened, v+"*")
			}
		case "put kk other":
			if err == nil {
				add(happened, "=")
			}
		}
	}
	// A client with old hints, then one with none; each key first in turn.
	got := [2]string{w.value(t, w.client(3), "k"), w.value(t, w.client(3), "m")}
	if !slices.Contains(want, got) {
		t.Fatalf("%s: answered %v, then k, m are %q; want one of %q", what, err, got, want)
	}
	m := w.value(t, w.client(5), "m")
	if again := [2]string{w.value(t, w.client(5), "k"), m}; again != got {
		t.Fatalf("%s: k, m are %q, then %q for another client", what, got, again)
	}
	must(t, w.client(5).do(t, "put", "k", "last"))
	must(t, w.client(5).do(t, "put", "m", "last"))
	for _, k := range []string{"k", "m"} {
		if v := w.value(t, w.client(3), k); v != "last" {
			t.Fatalf("%s: %s is %q after the last put", what, k, v)
		}
	}
}

// TestTxnBooks: whatever becomes of an intent, and whoever takes it away, each place that it named is linked or given
// up afterwards, and each was given up once: records and chunks, which a guard's two records and the copy after an
// abort share.
func TestTxnBooks(t *testing.T) {
	n := 0
	for _, before := range []string{"", "old", "old whole=1"} {
		for _, effect := range []string{"put new", "put new whole=1", "del", "keep"} {
			for _, verdict := range []string{"commit", "abort"} {
				for _, then := range []string{"", "put k mine", "put k mine whole=1", "del k", "append k *",
					"append k * whole=1",
					"prepare k put mine", "prepare k put mine whole=1", "prepare k del", "prepare k keep"} {
					for _, second := range []string{"commit", "abort"} {
						if n++; second == "abort" && !strings.HasPrefix(then, "prepare") {
							continue
						}
						txnBooks(t, before, effect, verdict, then, second)
					}
				}
			}
		}
	}
	t.Logf("%d cases", n)
}

func txnBooks(t *testing.T, before, effect, verdict, then, second string) {
	t.Helper()
	what := fmt.Sprintf("over %q, %s: %s; then %q: %s", before, effect, verdict, then, second)
	value := func(now, effect string) string {
		switch f := strings.Fields(effect); f[0] {
		case "put":
			return f[len(f)-1-b2i(strings.Contains(effect, "whole"))]
		case "del":
			return ""
		case "append":
			return now + "*"
		}
		return now
	}
	for r := uint8(1); r <= 3; r++ {
		w := newWorld(r, 512)
		want := ""
		if before != "" {
			must(t, w.client(2).do(t, fields("put k "+before)...))
			want = "old"
		}
		c, o := w.client(1), w.client(3)
		must(t, c.do(t, fields("prepare k "+effect+" x=3")...))
		must(t, c.do(t, "decide", verdict, "x=3"))
		if verdict == "commit" {
			want = value(want, effect)
		}
		if then != "" {
			if rest, ok := strings.CutPrefix(then, "prepare k "); ok {
				must(t, o.do(t, fields(then+" x=7")...))
				must(t, o.do(t, "decide", second, "x=7"))
				must(t, o.do(t, "settle", "k", second, "x=7"))
				if second == "commit" {
					want = value(want, rest)
				}
			} else if err := o.do(t, fields(then)...); !errors.Is(err, index.ErrNotFound) || want != "" {
				must(t, err)
				want = value(want, then)
			}
		}
		must(t, c.do(t, "settle", "k", []string{verdict, "find"}[r%2], "x=3"))
		if v := w.value(t, w.client(5), "k"); v != want {
			t.Errorf("%s: k is %q, want %q", what, v, want)
		}
		w.checkTidy(t, what)
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// TestTxnCounted: a scrub and a recall count the places that an intent names, chunks among them, and a recall of the
// extent of any of these waits until the intent is settled.
func TestTxnCounted(t *testing.T) {
	for _, prepare := range []string{"k keep", "k put new whole=1", "k del"} {
		w := newWorld(2, layout.ExtentUnits+64)
		w.quiet = true
		must(t, w.client(2).do(t, fields("put k old whole=1")...))
		must(t, w.client(1).do(t, fields("prepare "+prepare+" x=3")...))
		must(t, w.client(3).do(t, "scrub"))
		units := uint64(0)
		for _, p := range w.taken {
			units += uint64(p.Units)
		}
		if got := workOf(w.client(3).op); got.Units != units || got.Lost != 0 || len(got.Findings) != 0 {
			t.Errorf("%s: a scrub counts %d units, %d lost, %q; want %d", prepare, got.Units, got.Lost, got.Findings,
				units)
		}
		count := workOf(
			w.client(3).job(t, index.Relocate, repair.Work{PG: 1, Off: home(), Extents: []uint32{0}, Count: true}))
		slices.SortFunc(count.Kept, func(a, b repair.UnitRun) int { return int(a.Unit) - int(b.Unit) })
		if !slices.Equal(count.Kept, w.taken) {
			t.Errorf("%s: a recall keeps %v, want %v", prepare, count.Kept, w.taken)
		}
		for _, p := range w.taken {
			c := w.client(3)
			c.begin(workOp(index.Relocate, &repair.Work{PG: 1, Off: home(), Count: true, Window: p}))
			if _, err := c.run(40); err == nil {
				t.Errorf("%s: a recall of %v does not wait: %v", prepare, p, c.op.Err)
			}
		}
		must(t, w.client(1).do(t, "decide", "abort", "x=3"))
		must(t, w.client(1).do(t, "settle", "k", "abort", "x=3"))
		w.pg.Recalled = []uint32{0}
		w.nextUnit = layout.ExtentUnits
		o := w.client(3).job(t, index.Relocate, repair.Work{PG: 1, Off: home(), Extents: []uint32{0}})
		if in := w.inExtent(0); len(in) > 0 || workOf(o).Moved != 1 {
			t.Errorf("%s: settled, and left in the extent: %v; moved %d", prepare, in, workOf(o).Moved)
		}
		if v := w.value(t, w.client(5), "k"); v != "old" {
			t.Errorf("%s: k is %q", prepare, v)
		}
	}
}

// TestTxnManyChunks: a transaction replaces a value of two chunks by another, or does not, and a joiner gets all of
// them.
func TestTxnManyChunks(t *testing.T) {
	code, _ := layout.CodeFor(layout.RecordLen(0, layout.ChunkSize))
	for _, verdict := range []string{"commit", "abort"} {
		w := newWorld(2, 5*layout.UnitsOf(code))
		w.quiet = true
		must(t, w.client(2).do(t, "put", "k", "long5"))
		c := w.client(1)
		must(t, c.do(t, fields("prepare k put long9 x=3")...))
		w.pg.Joining = true
		clear(w.region[1])
		must(t, w.client(3).do(t, "get", "k"))
		must(t, c.do(t, "decide", verdict, "x=3"))
		must(t, w.client(3).do(t, "get", "k"))
		w.pg.Joining = false
		want := map[string]string{"commit": string(longValue(9)), "abort": string(longValue(5))}[verdict]
		for range 2 {
			if v := w.value(t, w.client(5), "k"); v != want {
				t.Errorf("%s: k has %d bytes, want %d, or other ones", verdict, len(v), len(want))
			}
			must(t, c.do(t, "settle", "k", verdict, "x=3"))
		}
		w.checkTidy(t, verdict)
	}
}

// TestSettledByEither: a settle whose compare-and-swap was not heard of finds the record's word in the slot, which
// another one has put there. The places that went with the intent are the other one's.
func TestSettledByEither(t *testing.T) {
	for _, effect := range []string{"put new", "put new whole=1", "keep"} {
		for _, f := range []fault{failBefore, failAfter} {
			for r := uint8(1); r <= 3; r++ {
				w := txnWorld(t, r, "put k old", false)
				c := w.client(1)
				must(t, c.do(t, fields("prepare k "+effect+" x=3")...))
				must(t, c.do(t, "decide", "commit", "x=3"))
				must(t, c.start(fields("settle k commit x=3")))
				for c.op.Step().String() != "cas-slot" || !c.posted {
					if _, done := c.advance(0, noFault); done {
						t.Fatal("done before it has settled")
					}
				}
				c.advance(1<<30, f)
				must(t, w.client(2).do(t, "settle", "k", "find", "x=3"))
				if _, err := c.run(100); err != nil || c.op.Err != nil {
					t.Fatal(err, c.op.Err)
				}
				what := fmt.Sprintf("%s, fault %d, r=%d", effect, f, r)
				if w.fenced[1] = f == failAfter; !w.fenced[1] {
					// else it has them, and does not know: a recall finds them
					delete(w.fenced, 1)
				}
				w.checkTidy(t, what)
			}
		}
	}
}
