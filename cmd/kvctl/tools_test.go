package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/cost"
	"github.com/kvd-project/kvd/internal/ctl"
	looks "github.com/kvd-project/kvd/internal/ctl/inside"
	"github.com/kvd-project/kvd/internal/ctl/measure"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/verbperf"
	"github.com/kvd-project/kvd/internal/ycsb"
)

func decode[T any](t *testing.T, s string) (v T) {
	t.Helper()
	if err := json.Unmarshal([]byte(s), &v); err != nil {
		t.Fatalf("%v in %q", err, s)
	}
	return v
}

func TestCost(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20, Nodes: 2})
	for _, p := range []string{"shm", "tcp"} {
		type table struct {
			OK         bool
			Operations []cost.Row
		}
		r := e.run("", "-o", "json", "--provider", p, "cost")
		got := decode[table](t, r.stdout)
		if r.code != ctl.ExitOK || !got.OK || len(got.Operations) != 12 {
			t.Errorf("%s: exit %d, %+v %s", p, r.code, got, r.stderr)
		}
	}
	if out := e.must("", "cost", "--trials", "4", "--batch", "8"); strings.Count(out, " ok\n") != 12 {
		t.Errorf("table:\n%s", out)
	}
	if out := e.must("", "scan"); out != "" {
		t.Errorf("keys left behind: %q", out)
	}
}

// A store whose operations cost more than they should is status 1.
func TestCostDiffers(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20, Providers: []string{"shm"}})
	e.wrap(func(s ctl.Store) ctl.Store { return &forgetful{s} })
	r := e.run("", "cost")
	if r.code != ctl.ExitNo || !strings.Contains(r.stdout, "DIFFERS") || r.stderr != "" {
		t.Errorf("%+v", r)
	}
}

// forgetful takes every GET twice.
type forgetful struct{ ctl.Store }

func (f *forgetful) Get(ctx context.Context, k []byte) (client.Item, error) {
	if it, err := f.Store.Get(ctx, k); err != nil {
		return it, err
	}
	return f.Store.Get(ctx, k)
}

// wrap puts something between kvctl and the store.
func (e *env) wrap(f func(ctl.Store) ctl.Store) {
	e.backend = func(a *ctl.App) (ctl.Backend, error) {
		b, err := ctl.OpenStore(a)
		return wrapped{b, f}, err
	}
}

type wrapped struct {
	ctl.Backend
	f func(ctl.Store) ctl.Store
}

func (w wrapped) Open(ctx context.Context, o ctl.SessionOptions) (ctl.Store, error) {
	s, err := w.Backend.Open(ctx, o)
	if err != nil {
		return nil, err
	}
	return w.f(s), nil
}

func TestPerf(t *testing.T) {
	t.Setenv(asMain, "1")
	e := &env{t: t, now: time.Now}
	for _, p := range []string{"shm", "tcp"} {
		out := e.must("", "-o", "json", "--provider", p, "perf", "--iters", "200", "--sizes", "64,64KiB")
		type table struct {
			Provider string
			Results  []verbperf.Result
		}
		got := decode[table](t, out)
		if got.Provider != p || len(got.Results) != 6 {
			t.Fatalf("%s: %s", p, out)
		}
		for _, r := range got.Results {
			if r.MinNanos <= 0 || r.MinNanos > r.MedianNanos || r.MedianNanos > r.P99Nanos ||
				r.AvgNanos < float64(r.MinNanos) ||
				r.MiBPerSec <= 0 || r.VerbsPerSec <= 0 {
				t.Errorf("%s: %+v", p, r)
			}
		}
	}
	if out := e.must("", "--provider", "tcp", "perf", "--iters", "10", "--verbs", "CAS", "--depth",
		"1"); !strings.Contains(out, "CMP_AND_SWP") {
		t.Error(out)
	}
	for _, p := range []string{"shm", "tcp"} {
		// The sizes run one behind the other: a ping-pong that is over makes room for the next.
		// The sizes are inline, not a multiple of 8, and too long to be inline.
		out := e.must("", "-o", "json", "--provider", p, "perf", "--iters", "200", "--verbs", "PINGPONG,READ",
			"--sizes", "8,61,64KiB")
		got := decode[struct{ Results []verbperf.Result }](t, out)
		if len(got.Results) != 6 {
			t.Fatalf("%s: %s", p, out)
		}
		for i, r := range got.Results[:3] {
			if r.Verb != "WRITE_PINGPONG" || r.Bytes != []int{8, 61, 64 << 10}[i] || r.MinNanos <= 0 ||
				r.MinNanos > r.MedianNanos ||
				r.MedianNanos > r.P99Nanos || r.AvgNanos < float64(r.MinNanos) || r.VerbsPerSec <= 0 {
				t.Errorf("%s: %+v", p, r)
			}
		}
	}
}

// A ping-pong wants flags with which the passive side can connect back.
// Registration is measured for every kind of page, or it is said why there are none.
func TestPerfRegister(t *testing.T) {
	e := &env{t: t, now: time.Now}
	for _, p := range []string{"shm", "tcp"} {
		out := e.must("", "-o", "json", "--provider", p, "perf", "--register=64MiB")
		kinds := map[string]int{}
		for _, r := range decode[struct{ Registrations []verbperf.Registration }](t, out).Registrations {
			kinds[r.Pages]++
			if r.Missing != "" && r.Pages == "2MiB" {
				continue
			}
			if r.Missing != "" || r.Alloc <= 0 || r.Register <= 0 || r.Deregister <= 0 || r.Bytes != 64<<20 {
				t.Errorf("%s: %+v", p, r)
			}
		}
		if kinds["4KiB"] < 2 || kinds["THP"] != kinds["4KiB"] || kinds["2MiB"] == 0 {
			t.Errorf("%s: %v", p, kinds)
		}
	}
	if out := e.must("", "--provider", "tcp", "perf", "--register=2MiB"); !strings.Contains(out, "Register s/GiB") {
		t.Error(out)
	}
	for _, size := range []string{"0", "3MiB", "x", "2TiB"} {
		if r := e.run("", "perf", "--register="+size); r.code != ctl.ExitUsage {
			t.Errorf("--register=%s: %+v", size, r)
		}
	}
	if r := e.run("", "perf", "--register", "--server"); r.code != ctl.ExitUsage {
		t.Errorf("--register --server: %+v", r)
	}
}

func TestPerfConnect(t *testing.T) {
	e := &env{t: t, now: time.Now}
	for _, to := range []string{"", "tcp", "tcp,127.0.0.1:1,x,0", "tcp,127.0.0.1:1,1,y"} {
		if to == "" {
			continue
		}
		if r := e.run("", "perf", "--connect", to); r.code != ctl.ExitUsage {
			t.Errorf("--connect %q: %+v", to, r)
		}
	}
	if r := e.run("", "--timeout", "1s", "perf", "--connect", "tcp,127.0.0.1:1,1,0"); r.code != ctl.ExitOther &&
		r.code != ctl.ExitUnavailable {
		t.Errorf("nobody there: %+v", r)
	}
	if r := e.run("", "--provider", "tcp", "perf", "--server", "--listen", "0.0.0.0:0"); r.code != ctl.ExitUsage ||
		!strings.Contains(r.stderr, "--insecure") {
		t.Errorf("open to all in clear: %+v", r)
	}
}

func TestBench(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20})
	const records, ops = 2000, 3000
	for _, w := range []string{"A", "B", "C", "D", "E", "F"} {
		for _, batch := range []string{"1", "16"} {
			out := e.must("", "-o", "json", "bench", "-w", w, "--records", fmt.Sprint(records), "--ops",
				fmt.Sprint(ops),
				"--threads", "3", "--batch", batch, "--value-size", "50")
			r := decode[measure.BenchReport](t, out)
			n := int64(0)
			for _, o := range r.Operations {
				n += o.Count
				if o.NotFound != 0 || o.Errors != 0 || o.Calls < 1 || o.Min <= 0 || o.Min > o.P50 || o.P50 > o.P99 ||
					o.P99 > o.Max {
					t.Errorf("%s batch %s: %+v", w, batch, o)
				}
			}
			if n != ops || r.Workload != w || r.PerSecond <= 0 || r.RTTPerOp <= 0 || r.VerbsPerOp <= 0 ||
				r.LoadSeconds <= 0 {
				t.Errorf("%s batch %s: %d operations: %s", w, batch, n, out)
			}
		}
	}
	if out := e.must("", "scan"); out != "" {
		t.Errorf("records left: %.200q", out)
	}
	out := e.must("", "bench", "-w", "C", "--records", "100", "--duration", "200ms", "--distribution", "uniform")
	if !strings.Contains(out, "workload C, uniform, 100 records") || strings.Contains(out, "update") {
		t.Error(out)
	}
	// Without the records every read misses, and says so.
	r := decode[measure.BenchReport](t, e.must("", "-o", "json", "bench", "--no-load", "--prefix", "x", "-w", "C",
		"--records",
		"100", "--ops", "10"))
	if len(r.Operations) != 1 || r.Operations[0].NotFound != 10 {
		t.Errorf("%+v", r.Operations)
	}
}

// Keys of others, which a run with --prefix p meets when it loads, or when it inserts.
func TestBenchSparesOthers(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20, Providers: []string{"shm"}})
	key := func(n uint64) string { return string(ycsb.Key([]byte("p"), n)) }
	for _, c := range []struct {
		theirs uint64
		line   string
	}{
		{0, "bench --prefix p --records 1000 --ops 100 --threads 3"},
		{500, "bench --prefix p --records 1000 --ops 100 --threads 1"},
		{999, "bench --prefix p --records 1000 --ops 100 --threads 1 --value-size 0"},
		{1000, "bench --prefix p --records 1000 --ops 1000 --threads 1 -w D"},
		{1003, "bench --prefix p --records 1000 --ops 3000 --threads 2 -w D --batch 16"},
		{1001, "bench --prefix p --records 1000 --ops 3000 --threads 2 -w E"},
	} {
		e.must("", "put", key(c.theirs), "theirs")
		e.must("", "put", "pother", "theirs")
		before := e.must("", "scan", "--long")
		r := e.run("", strings.Fields(c.line)...)
		if r.code != ctl.ExitNo || !strings.Contains(r.stderr, key(c.theirs)) ||
			!strings.Contains(r.stderr, "another --prefix") || strings.Contains(r.stderr, "happen") {
			t.Errorf("%s: %+v", c.line, r)
		}
		if after := e.must("", "scan", "--long"); after != before {
			t.Errorf("%s: changed %q to %q", c.line, before, after)
		}
		e.must("", "flush", "--yes")
	}
}

// uncertain has writes done of which it says that nobody knows.
type uncertain struct {
	ctl.Store
	mu   sync.Mutex
	left int
}

func (u *uncertain) Do(ctx context.Context, ops []client.Op) {
	u.Store.Do(ctx, ops)
	u.mu.Lock()
	defer u.mu.Unlock()
	for i := range ops {
		if ops[i].Kind == client.OpPut && ops[i].Err == nil && u.left > 0 {
			u.left--
			ops[i].Err = client.ErrUnknownOutcome
		}
	}
}

// However a run ends, none of its records is left, and its own are not those of others after an unknown outcome.
func TestBenchLeavesNothing(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20, Providers: []string{"shm"}})
	e.must("", "put", "before", "theirs")
	want := e.must("", "scan", "--long")
	clean := func(what string) {
		t.Helper()
		if out := e.must("", "scan", "--long"); out != want {
			t.Errorf("%s: %.300q, want %q", what, out, want)
		}
	}
	for _, c := range []struct {
		line  string
		after int64 // calls that write until the interrupt
	}{
		{"bench --records 4096 --threads 3 --duration 10m", 1},
		{"bench --records 4096 --threads 3 --duration 10m", 5},
		{"bench --records 4096 --threads 2 --duration 10m --prefix p", 2},
		{"bench --records 64 --threads 3 --duration 10m -w D --batch 8", 9},
		{"bench --records 64 --threads 3 --duration 10m -w D", 9},
		{"bench --records 64 --threads 1 --duration 10m -w E", 5},
		{"bench --records 64 --threads 2 --batch 4 --duration 10m -w F", 5},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		e.wrap(func(s ctl.Store) ctl.Store {
			i := &interrupting{Store: s, cancel: cancel}
			i.after.Store(c.after)
			return i
		})
		if r := e.runContext(ctx, "", strings.Fields(c.line)...); r.code != ctl.ExitInterrupted {
			t.Errorf("%s: %+v", c.line, r)
		}
		cancel()
		e.wrap(func(s ctl.Store) ctl.Store { return s })
		clean(c.line)
	}
	for _, line := range []string{"bench --records 100 --ops 100 --threads 1 --prefix p",
		"bench --records 1 --ops 1000 --threads 1 -w D"} {
		e.wrap(func(s ctl.Store) ctl.Store { return &uncertain{Store: s, left: 5} })
		if r := e.run("", strings.Fields(line)...); r.code != ctl.ExitOK && r.code != ctl.ExitUnknown {
			t.Errorf("%s: %+v", line, r)
		}
		e.wrap(func(s ctl.Store) ctl.Store { return s })
		clean(line)
	}

	out := e.must("", "bench", "--keep", "--records", "100", "--ops", "10", "--threads", "1")
	_, command, ok := strings.Cut(out, "kept     the records: kvctl ")
	if !ok {
		t.Fatal(out)
	}
	if got := e.must("", "count"); got != "101\n" {
		t.Errorf("kept: %s", got)
	}
	prefix := strings.TrimSpace(strings.TrimPrefix(command, "del --prefix "))
	e.must("", "bench", "--no-load", "--prefix", prefix, "--records", "100", "--ops", "50")
	if got := e.must("", "count"); got != "101\n" {
		t.Errorf("kept: %s", got)
	}
	e.must("", "bench", "--no-load", "--prefix", prefix, "--records", "100", "--ops", "50", "--cleanup")
	clean("--no-load --cleanup")
	e.must("", "bench", "--keep", "--records", "100", "--ops", "10")
	e.must("", "del", "--prefix", "kvctl-bench/")
	clean("del --prefix")
}

func TestDump(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20, Providers: []string{"shm"}})
	e.must("some value", "put", "some key")
	out := e.must("", "dump", "some key")
	for _, want := range []string{"region header", `"kvdreg01"`, "LIVE", `8 bytes "some key"`,
		`10 bytes "some value"`} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if strings.Contains(out, "problem") {
		t.Errorf("problem in\n%s", out)
	}
	// The same by offset, as JSON.
	type object struct {
		Kind   string `json:"kind"`
		Offset uint64 `json:"offset"`
		PG     uint32 `json:"placement_group"`
		Text   string `json:"text"`
	}
	d := json.NewDecoder(strings.NewReader(e.must("", "-o", "json", "dump", "some key")))
	var objects []object
	for d.More() {
		var o object
		if err := d.Decode(&o); err != nil {
			t.Fatal(err)
		}
		objects = append(objects, o)
	}
	if len(objects) != 3 || objects[0].Kind != "region" || objects[1].Kind != "group" || objects[2].Kind != "record" {
		t.Fatalf("%+v", objects)
	}
	for _, o := range objects {
		out := e.must("", "dump", "--pg", fmt.Sprint(o.PG), "--offset", fmt.Sprint(o.Offset))
		if !strings.HasSuffix(out, o.Text+"\n") {
			t.Errorf("%s at %#x: %s\nwant %s", o.Kind, o.Offset, out, o.Text)
		}
	}
	if out := e.must("", "dump", "--pg", fmt.Sprint(objects[0].PG), "--offset", "4096", "--as",
		"segment"); !strings.Contains(out, "groups all zero") {
		t.Error(out)
	}
	if r := e.run("", "dump", "no key"); r.code != ctl.ExitNo || !strings.Contains(r.stdout, "group at") {
		t.Errorf("%+v", r)
	}
	for _, args := range [][]string{{"--as", "file"}, {"--offset", "0xffffffffffffffff"}, {"--replica", "7"}} {
		if r := e.run("", append([]string{"dump", "--pg", fmt.Sprint(objects[0].PG), "--offset", "0"},
			args...)...); r.code != ctl.ExitUsage {
			t.Errorf("%q: %+v", args, r)
		}
	}
}

// overlay shows kvctl other bytes than those in memory.
type overlay struct {
	ctl.Store
	patch func(replica int, off uint64, b []byte)
}

func (o *overlay) ReadRaw(ctx context.Context, pg uint32, replica int, off uint64, n int) ([]byte, error) {
	b, err := o.Store.ReadRaw(ctx, pg, replica, off, n)
	if err == nil {
		o.patch(replica, off, b)
	}
	return b, err
}

// setWord changes the 8 bytes at at, if b, which stands at off, holds them.
func setWord(off uint64, b []byte, at uint64, f func(uint64) uint64) {
	if at >= off && at+8 <= off+uint64(len(b)) {
		p := b[at-off:]
		binary.LittleEndian.PutUint64(p, f(binary.LittleEndian.Uint64(p)))
	}
}

func TestCheckFinds(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20, Providers: []string{"shm"}})
	for i := range 50 {
		e.must("value", "put", fmt.Sprintf("key%d", i))
	}
	e.must(strings.Repeat("long", 2<<20), "put", "long")
	rep := decode[looks.CheckReport](t, e.must("", "-o", "json", "check", "--no-repair"))
	if !rep.OK || rep.Live != 51 || rep.Records != 51 || rep.Unreachable != 0 || rep.Held != 0 || rep.Chunks != 5 ||
		rep.Total != 0 || rep.Busy != 0 || rep.PGs != 1 || rep.Replicas != 1 {
		t.Fatalf("clean store: %+v", rep)
	}

	// Find a key's slot, and one of another group.
	var loc, loc2 inside.Location
	var at, at2, free uint64
	var word layout.Word
	s, err := openSession(t, e)
	if err != nil {
		t.Fatal(err)
	}
	slotOf := func(s ctl.Store, key string) (l inside.Location, at, free uint64, w layout.Word) {
		l, err := s.Locate([]byte(key))
		if err != nil {
			t.Fatal(err)
		}
		b, err := s.ReadRaw(t.Context(), l.PG, 0, l.Home, layout.GroupSize)
		if err != nil {
			t.Fatal(err)
		}
		for i := range layout.GroupSlots {
			switch x := layout.Group(b).Slot(i); {
			case x.State() == layout.Live && x.FP() == layout.FP(l.Hash):
				at, w = l.Home+layout.SlotOff(i), x
			case x == 0:
				free = l.Home + layout.SlotOff(i)
			}
		}
		if w == 0 || free == 0 {
			t.Fatalf("no slot of %q", key)
		}
		return l, at, free, w
	}
	loc, at, free, word = slotOf(s, "key1")
	for i := 2; loc2.Home == 0 || loc2.Home == loc.Home; i++ {
		loc2, at2, _, _ = slotOf(s, fmt.Sprintf("key%d", i))
	}
	longLoc, _, _, longWord := slotOf(s, "long")
	rec, err := s.ReadRaw(t.Context(), longLoc.PG, 0, longWord.Off(), longWord.ReadLen())
	if err != nil {
		t.Fatal(err)
	}
	long, err := layout.ParseRecord(rec)
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := layout.ParseManifest(long.Value, 0, 1<<32-1)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	set := func(at uint64, w layout.Word) func(int, uint64, []byte) {
		return func(_ int, off uint64, b []byte) { setWord(off, b, at, func(uint64) uint64 { return uint64(w) }) }
	}
	flip := func(at uint64, bit int) func(int, uint64, []byte) {
		return func(_ int, off uint64, b []byte) { setWord(off, b, at, func(x uint64) uint64 { return x ^ 1<<bit }) }
	}
	for _, c := range []struct {
		name  string
		patch func(int, uint64, []byte)
		want  []string
	}{
		{"region magic", flip(0, 0), []string{"not a kvd region"}},
		{"region of another group", func(_ int, off uint64, b []byte) {
			if off == 0 {
				layout.InitRegion(b[:layout.RegionPageSize], layout.RegionHeader{PG: 99, RegionBytes: loc.RegionBytes,
					IndexBytes: loc.IndexBytes})
			}
		}, []string{"is not that of the map"}},
		{"reserved header bits", flip(loc.Home, 20), []string{"reserved header bits"}},
		{"a record's byte", flip(word.Off()+24, 40), []string{"CRC-32C"}},
		{"fingerprint", flip(at, 41), []string{"fingerprint"}},
		{"size code", flip(at, 38), []string{"size code"}},
		{"outside the heap", set(at, layout.MakeLive(word.Ver(), word.FP(), word.Code(), 1)),
			[]string{"outside the heap"}},
		{"key twice", set(free, word), []string{"is in the slot at", "overlap"}},
		{"another group's key", set(at2, word), []string{"belongs to group", "overlap"}},
		{"no record", set(
			at, layout.MakeLive(word.Ver(), word.FP(), word.Code(),
				uint32(loc.RegionBytes/layout.UnitSize)-word.Units())), []string{"CRC-32C"}},
		{"a chunk's byte", flip(uint64(manifest.Chunks[2].Unit)*layout.UnitSize+64, 5), []string{"chunk 2", "CRC-32C"}},
		{"stash without OVF", set(loc.Stash+layout.GroupSlotsOff, word), []string{"no OVF flag", "is in the slot at"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := *e
			e.t = t
			e.wrap(func(s ctl.Store) ctl.Store { return &overlay{s, c.patch} })
			r := e.run("", "-o", "json", "check", "--no-repair")
			rep := decode[looks.CheckReport](t, r.stdout)
			if r.code != ctl.ExitNo || rep.OK || rep.Total == 0 {
				t.Fatalf("exit %d, %+v %s", r.code, rep, r.stderr)
			}
			text := fmt.Sprint(rep.Findings)
			if !slices.ContainsFunc(c.want, func(w string) bool { return strings.Contains(text, w) }) {
				t.Errorf("findings %s, want one of %q", text, c.want)
			}
			if r := e.run("", "check", "--no-repair"); r.code != ctl.ExitNo || !strings.Contains(r.stdout, "findings") {
				t.Errorf("as a table: %+v", r)
			}
		})
	}

	// A record that changes while it is looked at is no finding.
	n := 0
	e2 := *e
	e2.wrap(func(s ctl.Store) ctl.Store {
		return &overlay{s, func(_ int, off uint64, b []byte) {
			if end := off + uint64(len(b)); word.Off() >= off && word.Off() < end {
				n++
				if n == 1 { // torn once
					b[word.Off()-off+25] ^= 1
				}
			}
		}}
	})
	if r := e2.run("", "check", "--no-repair"); r.code != ctl.ExitOK || n < 2 {
		t.Errorf("torn once, read %d times: %+v", n, r)
	}
}

func openSession(t *testing.T, e *env) (ctl.Store, error) {
	c, err := client.Open(t.Context(), client.Options{Directory: e.store.Directory(), Devices: e.store.Devices()})
	if err != nil {
		return nil, err
	}
	return ctl.Opened{Client: c, Tools: inside.Of(c)}, nil
}

// failing answers every write, and read, with an error.
type failing struct {
	ctl.Store
	err error
}

func (f *failing) Put(context.Context, []byte, []byte, client.PutOptions) (uint64, error) {
	return 0, f.err
}

func (f *failing) Get(context.Context, []byte) (client.Item, error) { return client.Item{}, f.err }

func (f *failing) MultiDelete(_ context.Context, ks [][]byte) []client.Result {
	rs := make([]client.Result, len(ks))
	rs[0].Err = client.ErrNotFound
	rs[len(ks)-1].Err = f.err
	return rs
}

func TestErrorsTellWhetherItHappened(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 128 << 20, Providers: []string{"shm"}})
	for _, c := range []struct {
		err  error
		code int
		says string
	}{
		{fmt.Errorf("put: %w: deadline", client.ErrUnknownOutcome), ctl.ExitUnknown, "(it may have happened)"},
		{fmt.Errorf("put: %w", client.ErrUnavailable), ctl.ExitUnavailable, "(it did not happen)"},
		{client.ErrFull, ctl.ExitUnavailable, "(it did not happen)"},
		{context.Canceled, ctl.ExitUnavailable, "(it did not happen)"},
		{&layout.CorruptError{What: "record"}, ctl.ExitOther, "(it did not happen)"},
		{fmt.Errorf("open: %w", client.ErrForbidden), ctl.ExitForbidden, "(it did not happen)"},
		{status.Error(codes.PermissionDenied, "no right in namespace"), ctl.ExitForbidden, "(it did not happen)"},
		{status.Error(codes.Unauthenticated, "no certificate"), ctl.ExitForbidden, "(it did not happen)"},
		{client.ErrExists, ctl.ExitNo, "key exists\n"},
		{client.ErrInvalid, ctl.ExitUsage, "invalid argument\n"},
	} {
		e.wrap(func(s ctl.Store) ctl.Store { return &failing{s, c.err} })
		r := e.run("", "put", "k", "v")
		if r.code != c.code || !strings.Contains(r.stderr, c.says) || strings.Count(r.stderr, "\n") != 1 ||
			r.stdout != "" {
			t.Errorf("put, %v: %+v", c.err, r)
		}
		// Nothing can have happened when a key is read.
		if r := e.run("", "get", "k"); r.code != c.code || strings.Contains(r.stderr, "not happen") {
			t.Errorf("get, %v: %+v", c.err, r)
		}
	}
	e.wrap(func(s ctl.Store) ctl.Store { return &failing{s, client.ErrUnknownOutcome} })
	if r := e.run("", "del", "a", "b", "c"); r.code != ctl.ExitUnknown ||
		!strings.Contains(r.stderr, `after 1 of 3 keys were deleted: "c"`) {
		t.Errorf("del: %+v", r)
	}
}

func TestCount(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 128 << 20, Providers: []string{"shm"}})
	for i := range 9 {
		e.must("", "put", fmt.Sprintf("s:%d", i%3), "v")
	}
	e.must("", "put", "other", "v")
	for line, want := range map[string]string{
		"count":                                        "4\n",
		"count --prefix s:":                            "3\n",
		"count --pattern *:[12]":                       "2\n",
		"count --prefix o --pattern *:*":               "0\n",
		"-o json count":                                "{\"keys\":4}\n",
		"--hex count --prefix 733a":                    "3\n",
		"-o json --namespace default count --prefix x": "{\"keys\":0}\n",
	} {
		if got := e.must("", strings.Fields(line)...); got != want {
			t.Errorf("kvctl %s: %q, want %q", line, got, want)
		}
	}
	if r := e.run("", "count", "k"); r.code != ctl.ExitUsage {
		t.Errorf("%+v", r)
	}
}

func TestCancel(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20, Providers: []string{"shm"}})
	ctx, cancel := context.WithCancel(t.Context())
	e.wrap(func(s ctl.Store) ctl.Store { return &cancelling{s, cancel} })
	r := e.runContext(ctx, "", "bench", "--duration", "10m", "--records", "10")
	if r.code != ctl.ExitInterrupted || strings.Count(r.stderr, "\n") != 1 {
		t.Errorf("%+v", r)
	}
	dir := t.TempDir()
	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	if r := e.runContext(ctx, "", "import", dir); r.code != ctl.ExitInterrupted {
		t.Errorf("%+v", r)
	}
}

// cancelling plays the user who has had enough when the first GET comes.
type cancelling struct {
	ctl.Store
	cancel context.CancelFunc
}

func (c *cancelling) GetInto(ctx context.Context, k, dst []byte) (int, error) {
	c.cancel()
	return c.Store.GetInto(ctx, k, dst)
}

func TestHelpAndCompletion(t *testing.T) {
	e := &env{t: t, now: time.Now}
	help := e.must("", "--help")
	for _, c := range []string{"put", "get", "del", "cas", "txn", "incr", "ttl", "mget", "exists", "scan", "import",
		"export", "status", "nodes", "shards",
		"count", "stats", "namespace", "directory", "drain", "rebalance", "jobs", "stat", "pipe", "shell", "latency",
		"bigkeys", "hotkeys", "cost", "perf", "bench", "dump", "check", "flush", "version", "completion"} {
		if !strings.Contains(help, "\n  "+c+" ") {
			t.Errorf("help does not list %s", c)
		}
	}
	if !strings.Contains(help, "4 unknown outcome") || !strings.Contains(help, "KVD_DIRECTORY") {
		t.Error("help does not tell exit statuses and environment")
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if out := e.must("", "completion", shell); !strings.Contains(out, "kvctl") {
			t.Errorf("%s: %.100q", shell, out)
		}
	}
	if out := e.must("", "__complete", "bench", "--workload", ""); !strings.Contains(out, "A\nB\n") {
		t.Errorf("completion of --workload: %q", out)
	}
}

func TestStatusCommands(t *testing.T) {
	e := newEnv(t, devstore.Options{Nodes: 2, CapacityBytes: 128 << 20})
	e.must("", "put", "k", "v")
	for cmd, want := range map[string][]string{
		"status": {"1 nodes, leader d1", "2 up, 0 down", "256.0 MiB lent", "default", "At sessions",
			"Live %"},
		"nodes":               {"m1", "m2", "up", "128.0 MiB", "tcp 127.0.0.1:"},
		"shards":              {"active", "m1", "m2", "Segments"},
		"stats":               {"reclaim epoch", "At sessions", "Lost", "Short", "Granted", "Memory node"},
		"namespace list":      {"default", "store"},
		"directory join-info": {"cluster ", "join     127.0.0.1:"},
	} {
		out := e.must("", strings.Fields(cmd)...)
		for _, w := range want {
			if !strings.Contains(out, w) {
				t.Errorf("%s: no %q in\n%s", cmd, w, out)
			}
		}
		d := json.NewDecoder(strings.NewReader(e.must("", append([]string{"-o", "json"}, strings.Fields(cmd)...)...)))
		n := 0
		for ; d.More(); n++ {
			var v map[string]any
			if err := d.Decode(&v); err != nil {
				t.Errorf("%s: %v", cmd, err)
				break
			}
		}
		if n == 0 {
			t.Errorf("%s: no JSON", cmd)
		}
	}
	if strings.Contains(e.must("", "-o", "json", "status"), `_rkey":"1`) {
		t.Error("status shows rkeys")
	}
}

// A value that was set or swapped comes back with its version and its time to live.
func TestVersionsAndTTL(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 128 << 20, Providers: []string{"shm"}})
	type item struct {
		Version uint64 `json:",string"`
		Value   string
		Expires string
		TTL     float64 `json:"ttl_seconds"`
	}
	put := decode[item](t, e.must("", "-o", "json", "put", "k", "one"))
	if got := decode[item](t, e.must("", "-o", "json", "get", "k")); got.Version != put.Version || got.Value != "one" {
		t.Errorf("put %+v, got %+v", put, got)
	}
	version := fmt.Sprint(put.Version)
	cas := decode[item](t, e.must("two", "-o", "json", "cas", "k", version, "-"))
	if cas.Version <= put.Version {
		t.Errorf("version %d after %d", cas.Version, put.Version)
	}
	if r := e.run("", "cas", "k", version, "three"); r.code != ctl.ExitNo {
		t.Errorf("%+v", r)
	}
	if got := e.must("", "get", "k"); got != "two" {
		t.Errorf("value %q", got)
	}
	e.must("", "ttl", "k", "1h")
	start := time.Now()
	e.now = func() time.Time { return start }
	if got := decode[item](t, e.must("", "-o", "json", "ttl", "k")); got.TTL < 3590 || got.TTL > 3600 ||
		got.Expires == "" {
		t.Errorf("%+v", got)
	}
	if got := e.must("", "ttl", "k"); !strings.HasPrefix(got, "59m5") && !strings.HasPrefix(got, "1h") {
		t.Errorf("ttl %q", got)
	}
	got := decode[item](t, e.must("", "-o", "json", "get", "k"))
	e.must("", "del", "--version", fmt.Sprint(got.Version), "k")
	if r := e.run("", "get", "k"); r.code != ctl.ExitNo {
		t.Errorf("%+v", r)
	}
}

func TestExitCodes(t *testing.T) {
	for _, c := range []struct {
		err  error
		want int
	}{
		{nil, 0}, {client.ErrNotFound, 1}, {client.ErrConflict, 1}, {client.ErrNotInteger, 1},
		{client.ErrNoNamespace, 2},
		{ctl.Usagef("x"), 2}, {client.ErrUnavailable, 3}, {client.ErrFull, 3}, {context.DeadlineExceeded, 3},
		{errors.Join(client.ErrUnavailable, client.ErrUnknownOutcome), 4}, {errors.New("disk"), 5},
	} {
		if got := ctl.ExitCode(c.err); got != c.want {
			t.Errorf("exitCode(%v) = %d, want %d", c.err, got, c.want)
		}
	}
}

func TestTLSFlags(t *testing.T) {
	e := &env{t: t, now: time.Now}
	junk := filepath.Join(t.TempDir(), "junk")
	writeFile(t, junk, []byte("no certificate"))
	if r := e.run("", "--tls-ca", junk, "status"); r.code != ctl.ExitUsage ||
		!strings.Contains(r.stderr, "no certificate in it") {
		t.Errorf("%+v", r)
	}
	// Plain text to another host takes a word of consent; then it is tried.
	if r := e.run("", "--directory", "192.0.2.1:1", "--timeout", "100ms", "--insecure", "status"); r.code !=
		ctl.ExitUnavailable {
		t.Errorf("%+v", r)
	}
}

// The dump of a key that a transaction is about to change shows the intent, the records before and after, and the
// status word.
func TestDumpIntent(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20, Providers: []string{"shm"}})
	e.must("value", "put", "key")
	s, err := openSession(t, e)
	if err != nil {
		t.Fatal(err)
	}
	l, err := s.Locate([]byte("key"))
	if err != nil {
		t.Fatal(err)
	}
	b, err := s.ReadRaw(t.Context(), l.PG, 0, l.Home, layout.GroupSize)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	before := layout.Group(b).Slot(0)
	at := before.Unit() + 1000
	code, _ := layout.CodeFor(layout.RecordLen(3, layout.IntentLen))
	intent, after := layout.MakeLive(1, before.FP(), code, at), layout.MakeLive(1, before.FP(), 0, at+10)
	in := layout.Intent{Kind: layout.IntentPut, PG: l.PG, Off: layout.RegionPageSize + 40*layout.GroupSize +
		layout.SlotOff(2), Seq: 7, Parent: before, Final: after}
	var v [layout.IntentLen]byte
	layout.EncodeIntent(v[:], &in)
	record := func(h layout.RecordHeader, value []byte) []byte {
		r := make([]byte, layout.RecordLen(3, len(value)))
		layout.EncodeRecord(r, h, []byte("key"), value)
		return r
	}
	planted := map[uint64][]byte{
		l.Home + layout.SlotOff(0): binary.LittleEndian.AppendUint64(nil, uint64(intent.WithState(layout.Frozen))),
		intent.Off():               record(layout.RecordHeader{Version: 9, Flags: layout.FlagIntent}, v[:]),
		after.Off():                record(layout.RecordHeader{Version: 9}, []byte("later")),
		in.Off: binary.LittleEndian.AppendUint64(
			nil, uint64(layout.MakeStatus(7, layout.Commit, 3))),
	}
	e.wrap(func(s ctl.Store) ctl.Store {
		return &overlay{s, func(_ int, off uint64, b []byte) {
			for at, p := range planted {
				if at >= off && at < off+uint64(len(b)) {
					copy(b[at-off:], p)
				}
			}
		}}
	})
	out := e.must("", "dump", "key")
	rest := out
	for _, want := range []string{"FROZEN", "INTENT", "transaction 7", `"value"`, `"later"`, "status word at",
		"transaction 7 COMMIT of s3"} {
		_, after, found := strings.Cut(rest, want)
		if !found {
			t.Fatalf("no %q behind the ones before in\n%s", want, out)
		}
		rest = after
	}
	if out := e.must("", "dump", "--pg", fmt.Sprint(l.PG), "--offset", fmt.Sprint(in.Off), "--as",
		"status"); !strings.Contains(out, "transaction 7 COMMIT of s3") {
		t.Error(out)
	}
}
