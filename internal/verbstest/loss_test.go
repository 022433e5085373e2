package verbstest

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/rdma"
)

// lose makes the network devices of the first n adapters lose packets until the
// returned function, or the test's end, mends them.
func lose(t *testing.T, n int, percent string) (mend func()) {
	t.Helper()
	tc := func(args ...string) {
		t.Helper()
		// Not by PATH: busybox has a tc of its own, which knows no netem.
		if out, err := exec.Command("/bin/tc", args...).CombinedOutput(); err != nil {
			t.Errorf("tc %s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
	mend = sync.OnceFunc(func() {
		for i := range n {
			tc("qdisc", "del", "dev", fmt.Sprintf("n%d", i), "root")
		}
	})
	for i := range n {
		tc("qdisc", "add", "dev", fmt.Sprintf("n%d", i), "root", "netem", "loss", percent)
	}
	if t.Failed() {
		t.FailNow()
	}
	t.Cleanup(mend)
	return mend
}

// adapterCounters sums what the drivers of the first n adapters count, rxe(7).
func adapterCounters(t *testing.T, n int) map[string]uint64 {
	t.Helper()
	sum := map[string]uint64{}
	for i := range n {
		files, err := filepath.Glob(fmt.Sprintf("/sys/class/infiniband/%s/ports/1/hw_counters/*", nic(i)))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			if v, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64); err == nil { // others are no counts
				sum[filepath.Base(f)] += v
			}
		}
	}
	return sum
}

// Where the network loses packets, too, a WR that succeeded did what it says: a WRITE
// has landed, a READ has fetched the bytes, and an atomic the word that it found. Of
// one that failed nobody knows, and that is said.
func TestLossyCompletions(t *testing.T) {
	needs(t, "1")
	needsVerbs(t, "nothing is lost")
	const (
		duration = 8 * time.Second
		depth    = 6 // chains under way
		size     = 64
		stale    = 0xaa
	)
	s := newStore(t, 10*time.Second, node{"m1", 0, nil})
	s.namespace("default", 1, 16<<20)
	g := s.guesser("default", false, true)
	r := g.region("m1")
	q := g.mustConnect("m1")
	header := binary.LittleEndian.Uint64(q.read(r.indexRKey, r.index, 8)) // never changes
	word := r.indexEnd - 8                                                // no array reaches that far
	if b := binary.LittleEndian.Uint64(q.read(r.indexRKey, word, 8)); b != 0 {
		t.Fatalf("the index's last word is %#x, want 0: it is in use", b)
	}

	// A chain is what an operation of the store posts on one queue pair. The word that its CAS finds is
	// known, and so is the one that its READ of the slot's last WRITE finds. A READ may be
	// repeated, and then sees a WRITE behind it; the store has none of the same bytes.
	type chain struct {
		wrs   []rdma.WR
		wants map[int]uint64 // what the first 8 bytes of a WR's buffer become
	}
	var (
		posted []chain
		last   [depth]uint64 // written, by slot
		words  = uint64(0)   // in the word
		rng    = rand.New(rand.NewPCG(1, 1))
		count  = map[string]int{}
		absent = map[string]int{} // succeeded, and the buffer is as it was
		failed = map[string]int{} // by status
		wrong  = map[string]int{}
	)
	make1 := func(n uint64) chain {
		slot := n % depth
		at := r.heapEnd - size*(1+slot)
		buf := g.mr.Bytes()[512*slot : 512*(slot+1)]
		c := chain{wants: map[int]uint64{}}
		add := func(w rdma.WR, b []byte, want uint64) {
			if w.Op == rdma.OpWrite {
				for i := 0; i < len(b); i += 8 {
					binary.LittleEndian.PutUint64(b[i:], want)
				}
			} else {
				for i := range b {
					b[i] = stale
				}
				c.wants[len(c.wrs)] = want
			}
			w.Local, w.LKey = b, g.mr.LKey()
			c.wrs = append(c.wrs, w)
		}
		write := func() {
			last[slot] = n + 1
			add(rdma.WR{Op: rdma.OpWrite, RemoteAddr: at, RKey: r.heapRKey}, buf[:size], n+1)
		}
		cas := func() {
			add(rdma.WR{Op: rdma.OpCmpAndSwp, RemoteAddr: word, RKey: r.indexRKey, Compare: words, Swap: words + 1},
				buf[size:size+8], words)
			words++
		}
		read := func(b []byte) {
			add(rdma.WR{Op: rdma.OpRead, RemoteAddr: at, RKey: r.heapRKey}, b, last[slot])
		}
		switch rng.IntN(5) {
		case 0:
			write()
			cas()
		case 1:
			read(buf[2*size : 3*size])
			read(buf[3*size : 4*size])
		case 2:
			cas()
			add(rdma.WR{Op: rdma.OpRead, RemoteAddr: r.index, RKey: r.indexRKey}, buf[2*size:3*size], header)
			write()
		case 3:
			cas()
		case 4:
			write()
		}
		c.wrs[len(c.wrs)-1].Flags = rdma.Signaled
		return c
	}
	before := adapterCounters(t, 4)
	defer lose(t, 4, "2%")()
	began := time.Now()
	for n := uint64(0); len(posted) > 0 || time.Since(began) < duration; {
		for ; len(posted) < depth && time.Since(began) < duration; n++ {
			c := make1(n)
			if k, err := q.qp.PostSend(c.wrs); k != len(c.wrs) {
				t.Fatalf("chain %d: %d of %d posted: %v", n, k, len(c.wrs), err)
			}
			posted = append(posted, c)
		}
		if wc := q.wait(); wc.Status.String() != success {
			failed[wc.Status.String()]++
			if err := q.qp.Close(); err != nil { // nothing of it can land any more
				t.Fatal(err)
			}
			posted = posted[:0]
			q = g.mustConnect("m1")
			words = binary.LittleEndian.Uint64(q.read(r.indexRKey, word, 8))
			for slot := range last {
				last[slot] = binary.LittleEndian.Uint64(q.read(r.heapRKey, r.heapEnd-size*uint64(1+slot), 8))
			}
			continue
		}
		c := posted[0]
		posted = posted[1:]
		for i, w := range c.wrs {
			count[w.Op.String()]++
			if want, ok := c.wants[i]; ok {
				switch got := binary.LittleEndian.Uint64(w.Local); got {
				case want:
				case stale * 0x0101010101010101:
					absent[w.Op.String()]++
				default:
					wrong[w.Op.String()]++
				}
			}
		}
	}
	if len(absent) > 0 || len(wrong) > 0 {
		t.Errorf("verbs that succeeded without bringing anything back: %v; with something else than was there: %v",
			absent, wrong)
	}
	if count["CMP_AND_SWP"] < 100 {
		t.Errorf("%v in %v: too few to show anything", count, duration)
	}
	after := adapterCounters(t, 4)
	fmt.Printf("\n%v, up to %d chains under way, 2%% of packets lost, %d requests repeated: brought nothing back: "+
		"%v, something wrong: %v; connections that failed: %v\n\n",
		count, depth, after["duplicate_request"]-before["duplicate_request"], absent, wrong, failed)
}

// Where the network loses packets the adapters repeat them, and what they give up is
// an unknown outcome that the client resolves: histories stay linearizable, and no
// acknowledged write is lost.
func TestPacketLoss(t *testing.T) {
	needs(t, "1")
	const (
		duration = 6 * time.Second // and until there are enough operations
		enough   = 250
		workers  = 4
		keys     = 4
	)
	s := newStore(t, 5*time.Second, node{"m1", 0, nil}, node{"m2", 1, []string{"--janitor"}})
	s.namespace("default", 2, 80<<20)
	c := s.client(provider, 2, client.Options{Lanes: 2, OpTimeout: 10 * time.Second})
	mend := func() {}
	before := map[string]uint64{}
	if provider == "verbs" { // over tcp without loss: the harness alone is tried
		before = adapterCounters(t, 3)
		mend = lose(t, 3, "2%")
	}

	l := newLoad(t)
	h := l.history
	var begun atomic.Int64
	l.run(c, workers, keys, func() bool { return begun.Add(1) <= enough || time.Since(h.began) < duration })
	mend()
	after := map[string]uint64{}
	if provider == "verbs" {
		after = adapterCounters(t, 3)
	}
	unknown := c.Stats().Unknown

	// A reader that has no hints, and no part in what was written.
	reader := s.client(provider, 3, client.Options{})
	for key, value := range l.acked {
		if it, err := reader.Get(t.Context(), []byte(key)); err != nil || string(it.Value) != value {
			t.Errorf("%s was acknowledged with %q and holds %q, %v", key, value, it.Value, err)
		}
	}
	for k := range keys {
		key := fmt.Sprintf("key%d", k)
		e := &event{verb: verbGet}
		h.record(key, e, func() {
			var it client.Item
			it, e.err = reader.Get(t.Context(), []byte(key))
			e.value = string(it.Value)
		})
		l.noteOutcome(e)
	}
	if err := h.check(); err != nil {
		t.Error(err)
	}
	var rows [][]string
	total := 0
	for _, verb := range []string{verbGet, verbPut, verbCAS, verbDel} {
		o := l.outcomes[verb]
		total += o["done"] + o["refused"]
		rows = append(rows, []string{verb, itoa(o["done"]), itoa(o["refused"]), itoa(o["unknown"]), itoa(o["failed"])})
	}
	if total < 100 || len(l.acked) < 10 {
		t.Errorf("%d operations and %d keys written once: too few to show anything", total, len(l.acked))
	}
	var check struct {
		OK bool `json:"ok"`
	}
	if out, stderr, status := s.ctl("check", "-o", "json"); status != 0 || json.Unmarshal([]byte(out), &check) != nil ||
		!check.OK {
		t.Errorf("kvctl check: exit status %d\n%s%s", status, out, stderr)
	}
	verdict := "linearizable, and nothing lost"
	if t.Failed() {
		verdict = "FAILED"
	}
	printTable(fmt.Sprintf("%d workers on %d keys for %v over %s, 2%% of packets lost, and %d keys written once: %s; "+
		"%d verbs of unknown outcome were looked up",
		workers, keys, duration, provider, len(l.acked), verdict, unknown),
		[]string{"operation", "done", "not found, conflict", "unknown", "failed"}, rows)
	if provider == "verbs" {
		rows = nil
		for _, name := range []string{"sent_pkts", "rcvd_pkts", "duplicate_request", "out_of_seq_request",
			"rcvd_seq_err", "completer_retry_err", "retry_rnr_exceeded_err", "retry_exceeded_err", "ack_deferred"} {
			if _, ok := after[name]; ok {
				rows = append(rows, []string{name, itoa(after[name] - before[name])})
			}
		}
		printTable("What the adapters counted", []string{"counter", "by how much it grew"}, rows)
		if d := after["duplicate_request"] + after["completer_retry_err"] + after["out_of_seq_request"] +
			after["rcvd_seq_err"] -
			before["duplicate_request"] - before["completer_retry_err"] - before["out_of_seq_request"] -
			before["rcvd_seq_err"]; d == 0 {
			t.Error("no adapter repeated anything: no packet was lost")
		}
	}
}
