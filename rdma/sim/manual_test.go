package sim_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/sim"
)

const all = rdma.AccessRemoteRead | rdma.AccessRemoteWrite | rdma.AccessRemoteAtomic

// world is one memory node "m" with a region and clients with a QP each.
type world struct {
	t      *testing.T
	fab    *sim.Fabric
	mem    *rdma.MR
	peers  []rdma.Peer
	closed []rdma.Peer
	lanes  []lane
}

type lane struct {
	qp    *rdma.QP
	cq    *rdma.CQ
	local *rdma.MR
}

func newWorld(t *testing.T, o sim.Options, clients int) *world {
	t.Helper()
	w := &world{t: t, fab: sim.New(o)}
	m := rdma.NewDevice("sim", w.fab.Device("m"))
	pd := must(m.AllocPD())
	w.mem = region(t, pd, all)
	must(m.Listen("m", rdma.ListenOptions{
		Accept: func(r rdma.ConnRequest) (*rdma.PD, rdma.Access, error) {
			w.peers = append(w.peers, r.Peer)
			return pd, all, nil
		},
		Closed: func(p rdma.Peer) { w.closed = append(w.closed, p) },
	}))
	for i := range clients {
		w.dial(fmt.Sprintf("c%d", i))
	}
	return w
}

func (w *world) dial(name string) lane {
	c := rdma.NewDevice("sim", w.fab.Device(name))
	pd := must(c.AllocPD())
	l := lane{cq: must(c.CreateCQ(16)), local: region(w.t, pd, rdma.AccessLocal)}
	l.qp = must(c.Dial(context.Background(), pd, l.cq, "m", nil))
	w.lanes = append(w.lanes, l)
	return l
}

func region(t *testing.T, pd *rdma.PD, a rdma.Access) *rdma.MR {
	t.Helper()
	return must(pd.RegMR(must(pd.Device().Alloc(256, rdma.AllocOptions{})), 0, 256, a))
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// wr builds a signaled WR with ID id between byte at of the region and the same
// byte of the lane's local memory.
func (w *world) wr(c int, id uint64, op rdma.Opcode, at, n int) rdma.WR {
	l := w.lanes[c]
	return rdma.WR{ID: id, Op: op, Flags: rdma.Signaled, Local: l.local.Bytes()[at : at+n], LKey: l.local.LKey(),
		RemoteAddr: w.mem.Base() + uint64(at), RKey: w.mem.RKey()}
}

func (w *world) post(c int, wrs ...rdma.WR) {
	w.t.Helper()
	if n, err := w.lanes[c].qp.PostSend(wrs); n != len(wrs) || err != nil {
		w.t.Fatalf("PostSend gave %d, %v", n, err)
	}
}

// poll gives the WCs so far as "id:STATUS".
func (w *world) poll(c int) string {
	var wcs [16]rdma.WC
	var s []string
	for _, wc := range wcs[:w.lanes[c].cq.Poll(wcs[:])] {
		s = append(s, fmt.Sprintf("%d:%v", wc.ID, wc.Status))
	}
	return strings.Join(s, " ")
}

// fire fires the one enabled event whose line contains part.
func (w *world) fire(part string) {
	w.t.Helper()
	var found []sim.Event
	for _, ev := range w.fab.Events() {
		if strings.Contains(ev.String(), part) {
			found = append(found, ev)
		}
	}
	if len(found) != 1 {
		w.t.Fatalf("%d events match %q among\n%s", len(found), part, w.events())
	}
	if err := w.fab.Fire(found[0]); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) events() string {
	var b strings.Builder
	for _, ev := range w.fab.Events() {
		b.WriteString(ev.String() + "\n")
	}
	return b.String()
}

func (w *world) wantEvents(lines ...string) {
	w.t.Helper()
	want := strings.Join(lines, "\n")
	if got := strings.TrimSuffix(w.events(), "\n"); got != want {
		w.t.Fatalf("enabled events\n%s\nwant\n%s", got, want)
	}
}

func (w *world) wantWord(at int, want uint64) {
	w.t.Helper()
	if got := word(w.mem, at); got != want {
		w.t.Fatalf("word at %d is %#x, want %#x", at, got, want)
	}
}

func word(m *rdma.MR, at int) uint64       { return binary.LittleEndian.Uint64(m.Bytes()[at:]) }
func setWord(m *rdma.MR, at int, v uint64) { binary.LittleEndian.PutUint64(m.Bytes()[at:], v) }

func TestManualListsWhatMayHappen(t *testing.T) {
	w := newWorld(t, sim.Options{Manual: true, ReadPieces: 3, WritePieces: 2, DeliverEvents: true}, 2)
	cas := w.wr(0, 8, rdma.OpCmpAndSwp, 64, 8)
	cas.Swap = 5
	w.post(0, w.wr(0, 7, rdma.OpWrite, 0, 32), cas)
	w.post(1, w.wr(1, 9, rdma.OpRead, 0, 64))
	w.wantEvents(
		"qp1 #0 WRITE 0x0+32 piece 1/2",
		"qp1 #0 WRITE 0x0+32 piece 2/2",
		"qp2 #0 READ 0x0+64 piece 1/3",
		"qp2 #0 READ 0x0+64 piece 2/3",
		"qp2 #0 READ 0x0+64 piece 3/3",
	)
	stale := w.fab.Events()[1]
	w.fire("qp1 #0 WRITE 0x0+32 piece 2/2")
	w.fire("qp2 #0 READ 0x0+64 piece 2/3")
	w.wantEvents(
		"qp1 #0 WRITE 0x0+32 piece 1/2",
		"qp2 #0 READ 0x0+64 piece 1/3",
		"qp2 #0 READ 0x0+64 piece 3/3",
	)
	if err := w.fab.Fire(stale); err == nil {
		t.Fatal("a piece fired twice")
	}
	w.fire("qp1 #0 WRITE 0x0+32 piece 1/2")
	w.wantEvents(
		"qp1 #0 WRITE WC SUCCESS",
		"qp1 #1 CMP_AND_SWP 0x40+8",
		"qp2 #0 READ 0x0+64 piece 1/3",
		"qp2 #0 READ 0x0+64 piece 3/3",
	)
	if got := w.poll(0); got != "" {
		t.Fatalf("polled %q before delivery", got)
	}
	w.fire("CMP_AND_SWP")
	w.wantWord(64, 5)
	w.fire("WRITE WC")
	w.fire("CMP_AND_SWP WC")
	if got := w.poll(0); got != "7:SUCCESS 8:SUCCESS" {
		t.Fatalf("polled %q", got)
	}
}

func TestManualDeliversWithTheEffect(t *testing.T) {
	w := newWorld(t, sim.Options{Manual: true}, 1)
	quiet := w.wr(0, 2, rdma.OpWrite, 8, 8)
	quiet.Flags = 0
	w.post(0, w.wr(0, 1, rdma.OpWrite, 0, 64), quiet, w.wr(0, 3, rdma.OpRead, 0, 8))
	for _, want := range []string{"1:SUCCESS", "", "3:SUCCESS"} {
		if n := len(w.fab.Events()); n != 1 {
			t.Fatalf("%d events", n)
		}
		w.fire("qp1")
		if got := w.poll(0); got != want {
			t.Fatalf("polled %q, want %q", got, want)
		}
	}
	w.wantEvents()
}

// A two-word WRITE and a two-word READ, in every schedule: the READ finds every
// mix of old and new words, and each schedule repeats exactly.
func TestManualTearsInEveryWay(t *testing.T) {
	w := newWorld(t, sim.Options{Manual: true, ReadPieces: 2, WritePieces: 2, DeliverEvents: true}, 2)
	seen := map[[2]uint64]int{}
	schedules := 0
	run := func(choices []int) (width []int) {
		w.fab.Reset(0)
		setWord(w.lanes[0].local, 0, 1)
		setWord(w.lanes[0].local, 8, 1)
		w.post(0, w.wr(0, 1, rdma.OpWrite, 0, 16))
		w.post(1, w.wr(1, 1, rdma.OpRead, 0, 16))
		for step := 0; ; step++ {
			evs := w.fab.Events()
			if len(evs) == 0 {
				break
			}
			width = append(width, len(evs))
			pick := 0
			if step < len(choices) {
				pick = choices[step]
			}
			if err := w.fab.Fire(evs[pick]); err != nil {
				t.Fatal(err)
			}
		}
		schedules++
		seen[[2]uint64{word(w.lanes[1].local, 0), word(w.lanes[1].local, 8)}]++
		return width
	}
	for choices := []int{}; choices != nil; {
		width := run(choices)
		full := append(slices.Clone(choices), make([]int, len(width)-len(choices))...)
		choices = nil
		for i := len(full) - 1; i >= 0; i-- {
			if full[i]+1 < width[i] {
				choices = append(full[:i:i], full[i]+1)
				break
			}
		}
	}
	// Each QP has 2 orders of its pieces, then its WC: 2*2*C(6,3).
	if schedules != 80 {
		t.Errorf("%d schedules, want 80", schedules)
	}
	for _, v := range [][2]uint64{{0, 0}, {0, 1}, {1, 0}, {1, 1}} {
		if seen[v] == 0 {
			t.Errorf("no READ found %d", v)
		}
	}
	if len(seen) != 4 {
		t.Errorf("READs found %v", seen)
	}
}

// Pieces break at 8-byte boundaries of the target, whatever the alignment.
func TestManualPiecesOfUnalignedMessages(t *testing.T) {
	w := newWorld(t, sim.Options{Manual: true, WritePieces: 2}, 1)
	l := w.lanes[0].local.Bytes()
	for i := range l {
		l[i] = 0xff
	}
	w.post(0, w.wr(0, 1, rdma.OpWrite, 5, 10)) // words 0 and 1, in part
	w.fire("piece 2/2")
	w.wantWord(0, 0)
	w.wantWord(8, 0x00ffffffffffffff)
	w.fire("piece 1/2")
	w.wantWord(0, 0xffffff0000000000)
	w.post(0, w.wr(0, 2, rdma.OpWrite, 16, 8))
	w.wantEvents("qp1 #1 WRITE 0x10+8")
}

// WRs that a killed QP had posted may land, whole pieces in posting order, with the payload of that time;
// Fence ends that.
func TestManualKillLeavesWorkInTheNetwork(t *testing.T) {
	for landed := range 5 {
		w := newWorld(t, sim.Options{Manual: true, WritePieces: 2, DeliverEvents: true}, 2)
		l := w.lanes[0]
		setWord(l.local, 0, 11)
		setWord(l.local, 8, 12)
		cas := w.wr(0, 4, rdma.OpCmpAndSwp, 32, 8)
		cas.Swap = 14
		quiet := w.wr(0, 3, rdma.OpWrite, 16, 8)
		quiet.Flags = 0
		setWord(l.local, 16, 13)
		w.post(0, w.wr(0, 1, rdma.OpRead, 48, 8), w.wr(0, 2, rdma.OpWrite, 0, 16), quiet, cas,
			w.wr(0, 5, rdma.OpRead, 56, 8))
		w.fire("READ 0x30")
		if err := w.fab.Kill(l.qp.Num()); err != nil {
			t.Fatal(err)
		}
		if s := l.qp.State(); s != driver.StateErr {
			t.Fatalf("state %d", s)
		}
		for range 5 {
			w.fire("WC")
		}
		if got := w.poll(0); got != "1:SUCCESS 2:WR_FLUSH_ERR 3:WR_FLUSH_ERR 4:WR_FLUSH_ERR 5:WR_FLUSH_ERR" {
			t.Fatalf("polled %q", got)
		}
		clear(l.local.Bytes()) // ours again
		w.wantEvents("qp1 #1 WRITE 0x0+16 piece 1/2 late", "qp1 #1 WRITE 0x0+16 piece 2/2 late")
		for i, part := range []string{"piece 2/2 late", "piece 1/2 late", "#2 WRITE 0x10+8 late",
			"#3 CMP_AND_SWP 0x20+8 late"} {
			if i < landed {
				w.fire(part)
			}
		}
		if len(w.closed) != 0 {
			t.Fatal("Closed called before the fence")
		}
		if err := w.fab.Fence(l.qp.Num()); err != nil {
			t.Fatal(err)
		}
		w.wantEvents()
		for i, at := range []int{8, 0, 16, 32} {
			want := uint64(0)
			if i < landed {
				want = []uint64{12, 11, 13, 14}[i]
			}
			w.wantWord(at, want)
		}
		if !slices.Equal(w.closed, w.peers[:1]) {
			t.Fatalf("Closed called for %v", w.closed)
		}
		for _, b := range l.local.Bytes() {
			if b != 0 {
				t.Fatal("a late WR touched a returned buffer")
			}
		}
		if s := w.lanes[1].qp.State(); s != driver.StateRTS {
			t.Fatalf("state %d of the other QP", s)
		}
	}
}

// Payload is what a WRITE will put at the target, also when its buffer is returned.
func TestManualPayload(t *testing.T) {
	w := newWorld(t, sim.Options{Manual: true}, 1)
	l := w.lanes[0]
	payload := func() []byte { return w.fab.Payload(w.fab.Events()[0]) }
	setWord(l.local, 0, 5)
	w.post(0, w.wr(0, 1, rdma.OpRead, 32, 8), w.wr(0, 2, rdma.OpWrite, 0, 8))
	if got := payload(); got != nil {
		t.Fatalf("a READ carries %v", got)
	}
	w.fire("READ")
	if got := binary.LittleEndian.Uint64(payload()); got != 5 {
		t.Fatalf("the WRITE carries %d, want 5", got)
	}
	if err := w.fab.Kill(l.qp.Num()); err != nil {
		t.Fatal(err)
	}
	clear(l.local.Bytes())
	if got := binary.LittleEndian.Uint64(payload()); got != 5 {
		t.Fatalf("late, the WRITE carries %d, want 5", got)
	}
}

func TestManualFailNextBefore(t *testing.T) {
	w := newWorld(t, sim.Options{Manual: true, WritePieces: 2}, 1)
	qp := w.lanes[0].qp.Num()
	setWord(w.lanes[0].local, 0, 1)
	setWord(w.lanes[0].local, 32, 1)
	w.post(0, w.wr(0, 1, rdma.OpWrite, 0, 16), w.wr(0, 2, rdma.OpWrite, 32, 8), w.wr(0, 3, rdma.OpWrite, 64, 8))
	w.fire("piece 1/2")
	if err := w.fab.FailNext(qp, driver.RetryExcErr, sim.BeforeEffect); err != nil {
		t.Fatal(err)
	}
	w.fire("piece 2/2") // under way already
	w.fire("0x20")
	if got := w.poll(0); got != "1:SUCCESS 2:RETRY_EXC_ERR 3:WR_FLUSH_ERR" {
		t.Fatalf("polled %q", got)
	}
	w.wantEvents()
	w.wantWord(0, 1)
	w.wantWord(32, 0)
}

func TestManualFailNextAfter(t *testing.T) {
	w := newWorld(t, sim.Options{Manual: true}, 1)
	qp := w.lanes[0].qp.Num()
	add := w.wr(0, 1, rdma.OpFetchAdd, 0, 8)
	add.Swap = 7
	w.post(0, add, add)
	if err := w.fab.FailNext(qp, driver.RetryExcErr, sim.AfterEffect); err != nil {
		t.Fatal(err)
	}
	w.fire("#0 FETCH_ADD")
	if got := w.poll(0); got != "1:RETRY_EXC_ERR 1:WR_FLUSH_ERR" {
		t.Fatalf("polled %q", got)
	}
	w.wantWord(0, 7)
	w.fire("#1 FETCH_ADD 0x0+8 late")
	w.wantWord(0, 14)

	for _, bad := range []struct {
		s driver.Status
		w sim.When
	}{{driver.Success, sim.BeforeEffect}, {0, sim.BeforeEffect}, {200, sim.BeforeEffect},
		{driver.RemAccessErr, sim.AfterEffect}, {driver.RetryExcErr, 0}} {
		if err := w.fab.FailNext(qp, bad.s, bad.w); err == nil {
			t.Errorf("FailNext took %v, %d", bad.s, bad.w)
		}
	}
	if w.fab.FailNext(99, driver.RetryExcErr, sim.BeforeEffect) == nil || w.fab.Kill(99) == nil ||
		w.fab.Fence(99) == nil {
		t.Error("a QP that does not exist")
	}
}

func TestManualCrash(t *testing.T) {
	w := newWorld(t, sim.Options{Manual: true, ReadPieces: 2}, 2)
	w.post(0, w.wr(0, 1, rdma.OpRead, 0, 16), w.wr(0, 2, rdma.OpWrite, 0, 8))
	w.fire("piece 1/2")
	setWord(w.lanes[1].local, 0, 9)
	w.post(1, w.wr(1, 1, rdma.OpWrite, 0, 8))
	if err := w.fab.Kill(w.lanes[1].qp.Num()); err != nil {
		t.Fatal(err)
	}
	before := w.fab.Hash()
	if err := w.fab.CrashDevice("m"); err != nil {
		t.Fatal(err)
	}
	if w.fab.Hash() == before {
		t.Error("the hash still counts the lost memory")
	}
	w.wantEvents("qp1 #0 READ 0x0+16 piece 2/2")
	w.fire("piece 2/2")
	if got := w.poll(0); got != "1:RETRY_EXC_ERR 2:WR_FLUSH_ERR" {
		t.Fatalf("polled %q", got)
	}
	w.wantWord(0, 0)
	c := rdma.NewDevice("sim", w.fab.Device("late"))
	pd, cq := must(c.AllocPD()), must(c.CreateCQ(1))
	if _, err := c.Dial(context.Background(), pd, cq, "m", nil); err == nil {
		t.Fatal("dialled a crashed device")
	}
	if w.fab.CrashDevice("nobody") == nil {
		t.Error("a device that does not exist crashed")
	}
	w.fab.Reset(0)
	w.post(0, w.wr(0, 1, rdma.OpRead, 0, 8))
	w.fire("READ")
	if got := w.poll(0); got != "1:SUCCESS" {
		t.Fatalf("after Reset polled %q", got)
	}

	if err := w.fab.CrashDevice("c0"); err != nil { // an initiator
		t.Fatal(err)
	}
	if s := w.lanes[0].qp.State(); s != driver.StateErr {
		t.Fatalf("state %d of a crashed initiator's QP", s)
	}
}

// Without AtomicThenRead a READ overtakes atomics, but no WRITE and no fence.
func TestManualReadOvertakesAtomic(t *testing.T) {
	w := newWorld(t, sim.Options{Manual: true, NoAtomicThenRead: true}, 1)
	add := func(id uint64) rdma.WR {
		a := w.wr(0, id, rdma.OpFetchAdd, 0, 8)
		a.Swap = 1
		a.Local = w.lanes[0].local.Bytes()[64:72]
		return a
	}
	fenced := w.wr(0, 4, rdma.OpRead, 16, 8)
	fenced.Flags |= rdma.Fence
	w.post(0, add(1), add(2), w.wr(0, 3, rdma.OpRead, 0, 8), fenced)
	w.wantEvents("qp1 #0 FETCH_ADD 0x0+8", "qp1 #2 READ 0x0+8")
	w.fire("READ")
	w.wantEvents("qp1 #0 FETCH_ADD 0x0+8")
	if got := w.poll(0); got != "" {
		t.Fatalf("polled %q before the atomic", got)
	}
	w.fire("#0")
	w.fire("#1")
	if got := w.poll(0); got != "1:SUCCESS 2:SUCCESS 3:SUCCESS" {
		t.Fatalf("polled %q", got)
	}
	if got := word(w.lanes[0].local, 0); got != 0 {
		t.Fatalf("the READ found %d, want 0", got)
	}
	w.fire("#3 READ")

	w.post(0, add(5), w.wr(0, 6, rdma.OpWrite, 32, 8), w.wr(0, 7, rdma.OpRead, 0, 8))
	w.wantEvents("qp1 #4 FETCH_ADD 0x0+8")
	w.fab.Reset(0)
	bad := w.wr(0, 2, rdma.OpRead, 0, 8)
	bad.RKey++ // must not fail before the atomic has had its turn
	w.post(0, add(1), bad)
	w.wantEvents("qp1 #0 FETCH_ADD 0x0+8")
	w.fire("#0")
	w.fire("#1")
	if got := w.poll(0); got != "1:SUCCESS 2:REM_ACCESS_ERR" {
		t.Fatalf("polled %q", got)
	}
	w.wantWord(0, 1)
}

// The state hashes agree exactly when the state does, and Reset restores both.
func TestHashes(t *testing.T) {
	w := newWorld(t, sim.Options{Manual: true, WritePieces: 2, DeliverEvents: true}, 2)
	type state struct{ mem, qp uint64 }
	now := func() state { return state{w.fab.Hash(), w.fab.QPHash()} }
	start := now()
	both := func(parts ...string) state {
		w.fab.Reset(0)
		if now() != start {
			t.Fatal("Reset left a trace")
		}
		setWord(w.lanes[0].local, 0, 1)
		setWord(w.lanes[1].local, 128, 1)
		w.post(0, w.wr(0, 1, rdma.OpWrite, 0, 16))
		w.post(1, w.wr(1, 2, rdma.OpWrite, 128, 8))
		for _, p := range parts {
			w.fire(p)
		}
		return now()
	}
	seen := map[state]string{}
	for _, parts := range [][]string{{}, {"1/2"}, {"2/2"}, {"1/2", "2/2"}, {"1/2", "2/2", "qp1 #0 WRITE WC"}, {"qp2"},
		{"qp2", "qp2"}} {
		s := both(parts...)
		if other, ok := seen[s]; ok {
			t.Errorf("%v and %s hash alike", parts, other)
		}
		seen[s] = fmt.Sprint(parts)
	}
	if both("1/2", "qp2", "2/2") != both("qp2", "2/2", "1/2") {
		t.Error("two ways to one state hash differently")
	}
	both("1/2")
	s := now()
	if err := w.fab.FailNext(w.lanes[0].qp.Num(), driver.RetryExcErr, sim.AfterEffect); err != nil || now() == s {
		t.Errorf("an injected fault (%v) does not show in the hash", err)
	}
	s = now()
	if err := w.fab.Kill(w.lanes[0].qp.Num()); err != nil || now() == s {
		t.Errorf("a killed QP (%v) does not show in the hash", err)
	}
	s = now()
	if err := w.fab.Fence(w.lanes[0].qp.Num()); err != nil || now() == s {
		t.Errorf("a fenced QP (%v) does not show in the hash", err)
	}
}

func TestManualAllocatesNothingPerStep(t *testing.T) {
	w := newWorld(t, sim.Options{Manual: true, ReadPieces: 2, WritePieces: 2, DeliverEvents: true}, 2)
	var evs []sim.Event
	wcs := make([]rdma.WC, 4)
	chain := []rdma.WR{w.wr(0, 1, rdma.OpWrite, 0, 32), w.wr(0, 2, rdma.OpCmpAndSwp, 64, 8),
		w.wr(0, 3, rdma.OpRead, 0, 32)}
	chain[0].Flags |= rdma.Inline
	schedule := func() {
		w.fab.Reset(1)
		if n, err := w.lanes[0].qp.PostSend(chain); n != 3 || err != nil {
			t.Fatal(n, err)
		}
		for {
			if evs = w.fab.AppendEvents(evs[:0]); len(evs) == 0 {
				break
			}
			if err := w.fab.Fire(evs[len(evs)-1]); err != nil {
				t.Fatal(err)
			}
		}
		if n := w.lanes[0].cq.Poll(wcs); n != 3 {
			t.Fatal(n)
		}
		w.fab.Hash()
		w.fab.QPHash()
	}
	schedule()
	if n := testing.AllocsPerRun(100, schedule); n != 0 {
		t.Errorf("%v allocations a schedule", n)
	}
}

func BenchmarkSchedule(b *testing.B) {
	w := newWorld(&testing.T{}, sim.Options{Manual: true, ReadPieces: 2, WritePieces: 2, DeliverEvents: true}, 2)
	var evs []sim.Event
	wcs := make([]rdma.WC, 4)
	chain := []rdma.WR{w.wr(0, 1, rdma.OpWrite, 0, 64), w.wr(0, 2, rdma.OpCmpAndSwp, 64, 8),
		w.wr(0, 3, rdma.OpRead, 0, 64)}
	steps := 0
	for b.Loop() {
		w.fab.Reset(1)
		if _, err := w.lanes[0].qp.PostSend(chain); err != nil {
			b.Fatal(err)
		}
		for evs = w.fab.AppendEvents(evs[:0]); len(evs) > 0; evs = w.fab.AppendEvents(evs[:0]) {
			_ = w.fab.Fire(evs[0])
			steps++
		}
		w.lanes[0].cq.Poll(wcs)
	}
	b.ReportMetric(float64(steps)/float64(b.N), "events/op")
}
