package verbstest

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
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

// Where the network loses packets the adapters repeat them, and what they give up is
// an unknown outcome that the client resolves: histories stay linearizable, and no
// acknowledged write is lost.
func TestPacketLoss(t *testing.T) {
	needs(t, "1")
	const (
		duration = 15 * time.Second
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

	h := newHistory()
	var (
		wg       sync.WaitGroup
		mu       sync.Mutex
		outcomes = map[string]map[string]int{} // by verb
		acked    = map[string]string{}         // keys that are written once
	)
	note := func(e *event) {
		mu.Lock()
		defer mu.Unlock()
		o := "done"
		switch {
		case e.open():
			o = "unknown"
		case e.failed():
			o = "failed"
			t.Logf("%s: %v", e.verb, e.err)
		case e.err != nil:
			o = "refused" // not found, conflict
		}
		if outcomes[e.verb] == nil {
			outcomes[e.verb] = map[string]int{}
		}
		outcomes[e.verb][o]++
	}
	for w := range workers {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), 7))
			type sight struct {
				value   string
				version uint64
			}
			seen := map[string]sight{}
			for n := 0; time.Since(h.began) < duration; n++ {
				key, value := fmt.Sprintf("key%d", rng.IntN(keys)), fmt.Sprintf("%d.%d", w, n)
				e := &event{verb: verbPut, value: value}
				var version uint64
				switch p := rng.IntN(20); {
				case p < 8:
					e.verb = verbGet
				case p < 13:
				case p < 16 && seen[key].version != 0:
					e.verb, e.old = verbCAS, seen[key].value
				case p < 18:
					e.verb = verbDel
				default:
					key = "once" + value // several hundred of them
				}
				h.record(key, e, func() {
					k, v := []byte(key), []byte(value)
					switch e.verb {
					case verbGet:
						var it client.Item
						it, e.err = c.Get(t.Context(), k)
						e.value, version = string(it.Value), it.Version
					case verbPut:
						version, e.err = c.Put(t.Context(), k, v, client.PutOptions{})
					case verbCAS:
						version, e.err = c.CompareAndSwap(t.Context(), k, seen[key].version, v, client.PutOptions{})
					case verbDel:
						e.err = c.Delete(t.Context(), k)
					}
				})
				note(e)
				if e.err == nil && version != 0 {
					seen[key] = sight{e.value, version}
				}
				if e.err == nil && strings.HasPrefix(key, "once") {
					mu.Lock()
					acked[key] = value
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	mend()
	after := map[string]uint64{}
	if provider == "verbs" {
		after = adapterCounters(t, 3)
	}
	unknown := c.Stats().Unknown

	// A reader that has no hints, and no part in what was written.
	reader := s.client(provider, 3, client.Options{})
	for key, value := range acked {
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
		note(e)
	}
	if err := h.check(); err != nil {
		t.Error(err)
	}
	var rows [][]string
	total := 0
	for _, verb := range []string{verbGet, verbPut, verbCAS, verbDel} {
		o := outcomes[verb]
		total += o["done"] + o["refused"]
		rows = append(rows, []string{verb, itoa(o["done"]), itoa(o["refused"]), itoa(o["unknown"]), itoa(o["failed"])})
	}
	if total < 100 || len(acked) < 10 {
		t.Errorf("%d operations and %d keys written once in %v: too few to show anything", total, len(acked), duration)
	}
	var check struct {
		OK bool `json:"ok"`
	}
	if out, stderr, status := s.ctl("check", "-o", "json"); status != 0 || json.Unmarshal([]byte(out), &check) != nil || !check.OK {
		t.Errorf("kvctl check: exit status %d\n%s%s", status, out, stderr)
	}
	printTable(fmt.Sprintf("%d workers on %d keys for %v over %s, 2%% of packets lost: linearizable; %d keys written once are all there; %d verbs of unknown outcome were looked up",
		workers, keys, duration, provider, len(acked), unknown), []string{"operation", "done", "not found, conflict", "unknown", "failed"}, rows)
	if provider == "verbs" {
		rows = nil
		for _, name := range []string{"sent_pkts", "rcvd_pkts", "duplicate_request", "out_of_seq_request", "rcvd_seq_err", "completer_retry_err", "retry_rnr_exceeded_err", "retry_exceeded_err", "ack_deferred"} {
			if _, ok := after[name]; ok {
				rows = append(rows, []string{name, itoa(after[name] - before[name])})
			}
		}
		printTable("What the adapters counted", []string{"counter", "by how much it grew"}, rows)
		if d := after["duplicate_request"] + after["completer_retry_err"] + after["out_of_seq_request"] + after["rcvd_seq_err"] -
			before["duplicate_request"] - before["completer_retry_err"] - before["out_of_seq_request"] - before["rcvd_seq_err"]; d == 0 {
			t.Error("no adapter repeated anything: no packet was lost")
		}
	}
}
