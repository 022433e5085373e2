package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/ctl/bulk"
	looks "github.com/kvd-project/kvd/internal/ctl/inside"
	"github.com/kvd-project/kvd/internal/ctl/measure"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/layout"
)

func command(args ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "*%d\r\n", len(args))
	for _, a := range args {
		fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(a), a)
	}
	return b.String()
}

// More than a batch of every format arrives; of keys that come again the last value.
func TestPipe(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 512 << 20, Providers: []string{"shm"}})
	const keys = 3 * bulk.PipeKeys / 2
	line := map[string]func(k, v string) string{
		"resp": func(k, v string) string { return command("SET", k, v) },
		"tsv":  func(k, v string) string { return k + "\t" + v + "\n" },
		"jsonl": func(k, v string) string {
			b, err := json.Marshal(map[string]string{"key": k, "value": v})
			if err != nil {
				t.Fatal(err)
			}
			return string(b) + "\n"
		},
	}
	for format, text := range line {
		var in strings.Builder
		for round := range 3 {
			for i := range keys {
				in.WriteString(text(fmt.Sprintf("%s%d", format, i), fmt.Sprintf("%d of %d", i, round)))
			}
		}
		file := filepath.Join(t.TempDir(), "in")
		writeFile(t, file, []byte(in.String()))
		rep := decode[bulk.PipeReport](t, e.must("", "-o", "json", "pipe", file))
		if rep.Format != format || rep.OK != 3*keys || rep.Failed+rep.NoEffect != 0 || rep.Bytes != int64(in.Len()) {
			t.Errorf("%+v", rep)
		}
		for _, i := range []int{0, bulk.PipeKeys, keys - 1} {
			if got := e.must("", "get", fmt.Sprintf("%s%d", format, i)); got != fmt.Sprintf("%d of 2", i) {
				t.Errorf("%s %d: %q", format, i, got)
			}
		}
	}

	// The output of other commands can be loaded again, a value longer than a record too.
	long := strings.Repeat("0123456789abcdef", 300<<10)
	e.must(long, "put", "long", "--ttl", "100h")
	all := e.must("", "-o", "json", "scan", "--long", "--limit", "0")
	e.must("", "namespace", "create", "copy", "--bytes", "128MiB")
	if rep := decode[bulk.PipeReport](t, e.must(all, "-o", "json", "--namespace", "copy",
		"pipe")); rep.Format != "jsonl" ||
		rep.OK != 3*keys+1 {
		t.Errorf("%+v", rep)
	}
	if got := e.must("", "--namespace", "copy", "get", "long"); got != long {
		t.Errorf("%d bytes, want %d", len(got), len(long))
	}
	if got := e.must("", "--namespace", "copy", "ttl", "long"); !strings.HasPrefix(got, "99h59m") {
		t.Errorf("ttl %s", got)
	}
	// A time to live is changed without the value.
	if rep := decode[bulk.PipeReport](t, e.must(command("EXPIRE", "long", "500"), "-o", "json", "pipe")); rep.OK != 1 {
		t.Errorf("%+v", rep)
	}
	if got := e.must("", "ttl", "long"); !strings.HasPrefix(got, "8m") {
		t.Errorf("ttl %s", got)
	}
	if got := e.must("", "get", "long"); got != long {
		t.Errorf("%d bytes, want %d", len(got), len(long))
	}
}

func TestPipeRefusesProtocol(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 128 << 20, Providers: []string{"shm"}})
	good := command("SET", "before", "x")
	for _, c := range []struct{ in, says string }{
		{"*1000000000\r\n", "invalid multibulk length"},
		{"*2\r\n$3\r\nGET\r\n$999999999999\r\n", "invalid bulk length"},
		{"*2\r\n$3\r\nGET\r\n$-1\r\n", "invalid bulk length"},
		{"*2\r\n:3\r\n", "expected '$'"},
		{"*1\r\n$4\r\nPI", "ends within the command that begins at byte 32"},
		{"*2\r\n" + strings.Repeat("x", 70<<10), "Protocol error"},
	} {
		r := e.run(good+c.in, "-o", "json", "pipe")
		rep := decode[bulk.PipeReport](t, r.stdout)
		if r.code != ctl.ExitUsage || !strings.Contains(r.stderr, c.says) || !strings.Contains(r.stderr, "byte 32") ||
			rep.OK != 1 || rep.Failed != 0 {
			t.Errorf("%.40q: %+v", c.in, r)
		}
	}
	// Failures are counted, and not all of them told.
	r := e.run(strings.Repeat(command("HGETALL", "h"), 50)+good, "-o", "json", "pipe")
	if rep := decode[bulk.PipeReport](t, r.stdout); r.code != ctl.ExitUsage || rep.Failed != 50 || rep.OK != 1 ||
		strings.Count(r.stderr, "\n") != bulk.FailuresNamed+1 {
		t.Errorf("%+v", r)
	}
	if r := e.run(strings.Repeat("k", client.MaxKeyLen+1)+"\tv\n", "pipe"); r.code != ctl.ExitUsage ||
		!strings.Contains(r.stderr, "line 1: key of 65536 bytes") {
		t.Errorf("%+v", r)
	}
}

// full answers every PUT with an error, and everything else not at all the first
// time.
type full struct {
	ctl.Store
	calls int
}

func (f *full) Do(ctx context.Context, ops []client.Op) {
	f.calls++
	for i := range ops {
		switch {
		case ops[i].Kind == client.OpPut:
			ops[i].Err = client.ErrFull
		case f.calls == 1:
			ops[i].Err = client.ErrUnknownOutcome
		default:
			ops[i].Err = nil
		}
	}
}

func TestPipeFailures(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 128 << 20, Providers: []string{"shm"}})
	f := &full{}
	e.wrap(func(s ctl.Store) ctl.Store { f.Store = s; return f })
	r := e.run(command("SET", "a", "b")+command("DEL", "c")+command("SET", "d", "e"), "-o", "json", "pipe")
	rep := decode[bulk.PipeReport](t, r.stdout)
	if r.code != ctl.ExitUnavailable || rep.OK != 1 || rep.Failed != 2 || f.calls != 2 ||
		!strings.Contains(r.stderr, `command 3 at byte 47: "d": full`) {
		t.Errorf("%d calls, %+v", f.calls, r)
	}
}

func TestBigkeys(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 512 << 20, Nodes: 2, Providers: []string{"shm"}})
	long := strings.Repeat("x", 5<<20)
	e.must(long, "put", "manifest")
	e.must(long[:3<<20], "put", "one record")
	longKey := strings.Repeat("k", client.MaxKeyLen)
	e.must(long[:10], "put", longKey)
	for i := range 100 {
		e.must("", "put", fmt.Sprintf("k%02d", i), "0123456789")
	}
	e.must(`{"key":"flags","value":"0123","flags":7}`, "pipe")
	type report struct {
		Keys, Bytes, Changed uint64
		Largest              []struct {
			Key   string
			Bytes uint64
			Value uint64 `json:"value_bytes"`
		}
		Sizes []looks.SizeClass
	}
	rep := decode[report](t, e.must("", "-o", "json", "bigkeys", "--top", "4"))
	header := uint64(layout.RecordHeaderSize)
	want := []uint64{header + 8 + 5<<20, header + 10 + 3<<20, header + client.MaxKeyLen + 10, header + 13}
	if rep.Keys != 104 || rep.Changed != 0 || len(rep.Largest) != 4 || rep.Largest[0].Key != "manifest" ||
		rep.Largest[0].Value != 5<<20 ||
		rep.Largest[1].Key != "one record" || rep.Largest[2].Key != longKey {
		t.Fatalf("%.500v", rep)
	}
	total := header + 5 + 4 + 4
	for i, w := range want {
		if rep.Largest[i].Bytes != w {
			t.Errorf("%d: %d bytes, want %d", i, rep.Largest[i].Bytes, w)
		}
		total += w
	}
	if total += 99 * (header + 13); rep.Bytes != total {
		t.Errorf("%d bytes, want %d", rep.Bytes, total)
	}
	var keys, sum uint64
	for _, c := range rep.Sizes {
		keys += c.Keys
		sum += c.Bytes
	}
	if keys != rep.Keys || sum != rep.Bytes || rep.Sizes[0] != (looks.SizeClass{UpTo: 64, Keys: 101, Bytes: 100*(header+
		13) + header + 13}) {
		t.Errorf("%+v", rep.Sizes)
	}
	if out := e.must("", "bigkeys"); !strings.Contains(out, "\n manifest ") || !strings.Contains(out, "8.0 MiB") ||
		!strings.Contains(out, "104 keys, 8.1 MiB\n") {
		t.Error(out)
	}

	// A record that is torn, or whose place has another tenant, is counted and no more.
	torn := 0
	e.wrap(func(s ctl.Store) ctl.Store {
		return &overlay{s, func(_ int, off uint64, b []byte) {
			if i := bytes.Index(b, []byte("k000123456789")); i >= layout.RecordHeaderSize {
				torn++
				b[i+1] = 'x'
			}
		}}
	})
	if rep := decode[report](t, e.must("", "-o", "json", "bigkeys")); rep.Changed != 1 || rep.Keys != 103 || torn == 0 {
		t.Errorf("torn %d times: %+v", torn, rep)
	}
}

// stubbed shows the record of a key, whose value is as long as a stub, as a stub of a value of n bytes.
func stubbed(key string, n int) func(int, uint64, []byte) {
	return func(_ int, _ uint64, b []byte) {
		i := bytes.Index(b, []byte(key)) - layout.RecordHeaderSize
		if i < 0 {
			return
		}
		r, err := layout.ParseRecord(b[i:])
		if err != nil {
			return
		}
		s := layout.StubOf(&r, r.EncodedLen()-len(r.Value)+n, 1, layout.ObjectAt{Volume: 1, At: 64})
		s.ValueLen = uint32(n)
		h := r.RecordHeader
		h.Stub = true
		layout.EncodeRecord(b[i:], h, []byte(key), layout.AppendStub(nil, &s, nil))
	}
}

// TestStubsSeen: a key whose value lies in the tier is found, and has the size of its value.
func TestStubsSeen(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20, Providers: []string{"shm"}})
	const key, n = "some key", 5000
	e.must(strings.Repeat("v", layout.StubLen(1)), "put", key)
	e.wrap(func(s ctl.Store) ctl.Store { return &overlay{s, stubbed(key, n)} })
	if out := e.must("", "dump", key); !strings.Contains(out, "volume") || strings.Contains(out, "problem") {
		t.Errorf("no stub, or a problem, in\n%s", out)
	}
	type report struct {
		Keys, Changed uint64
		Largest       []struct {
			Key   string
			Bytes uint64
			Value uint64 `json:"value_bytes"`
		}
	}
	rep := decode[report](t, e.must("", "-o", "json", "bigkeys"))
	if rep.Keys != 1 || rep.Changed != 0 || len(rep.Largest) != 1 || rep.Largest[0].Value != n ||
		rep.Largest[0].Bytes != uint64(layout.RecordLen(len(key), n)) {
		t.Errorf("%+v, want 1 key of %d bytes, with %d of value", rep, layout.RecordLen(len(key), n), n)
	}
}

// accessed shows access words that a test makes up.
type accessed struct {
	ctl.Store
	words map[uint64]layout.AccessWord // by the slot's offset, in the only placement group
	base  uint64
}

func (a *accessed) ReadRaw(ctx context.Context, pg uint32, replica int, off uint64, n int) ([]byte, error) {
	if off < a.base || off >= 2*a.base {
		return a.Store.ReadRaw(ctx, pg, replica, off, n)
	}
	b := make([]byte, n)
	for at, w := range a.words {
		setWord(off, b, a.base+at, func(uint64) uint64 { return uint64(w) })
	}
	return b, nil
}

func TestHotkeys(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20, Providers: []string{"shm"}})
	e.must("", "namespace", "create", "c", "--mode", "cache", "--bytes", "64MiB")
	e.flags = append(e.flags, "--namespace", "c")
	const keys = 40
	for i := range keys {
		e.must("", "put", fmt.Sprintf("k%d", i), "value")
	}
	now := time.UnixMilli(1_800_000_000_000)
	e.now = func() time.Time { return now }
	s, err := client.Open(t.Context(), client.Options{Directory: e.store.Directory(), Devices: e.store.Devices(),
		Namespace: "c"})
	if err != nil {
		t.Fatal(err)
	}
	acc := &accessed{words: make(map[uint64]layout.AccessWord)}
	for i := range keys {
		loc, err := inside.Of(s).Locate(fmt.Appendf(nil, "k%d", i))
		if err != nil {
			t.Fatal(err)
		}
		acc.base = loc.IndexBytes
		g, err := inside.Of(s).ReadRaw(t.Context(), loc.PG, 0, loc.Home, layout.GroupSize)
		if err != nil {
			t.Fatal(err)
		}
		for j := range layout.GroupSlots {
			w := layout.Group(g).Slot(j)
			if w.State() != layout.Live || w.FP() != layout.FP(loc.Hash) {
				continue
			}
			// k7 is the hottest; k0's word is about another key; k1's is not known.
			count := uint32(i)
			switch i {
			case 7:
				count = layout.MaxAccessCount
			case 0:
				w = layout.MakeLive(0, w.FP()^1, 0, 0)
			case 1:
				continue
			}
			acc.words[loc.Home+layout.SlotOff(j)] = layout.MakeAccess(w, uint64(now.UnixMilli())-uint64(i)*1000, count,
				0)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if len(acc.words) != keys-1 {
		t.Fatalf("%d slots found", len(acc.words))
	}
	e.wrap(func(s ctl.Store) ctl.Store { acc.Store = s; return acc })
	type report struct {
		Keys, Known uint64
		Hottest     []struct {
			Key   string
			Count uint32
			Idle  float64 `json:"idle_seconds"`
		}
	}
	rep := decode[report](t, e.must("", "-o", "json", "hotkeys", "--top", "3"))
	if rep.Keys != keys || rep.Known != keys-2 || len(rep.Hottest) != 3 || rep.Hottest[0].Key != "k7" ||
		rep.Hottest[0].Idle != 7 ||
		rep.Hottest[1].Key != "k39" || rep.Hottest[1].Count != 39 || rep.Hottest[2].Key != "k38" {
		t.Errorf("%+v", rep)
	}
	if out := e.must("", "hotkeys"); !strings.Contains(out, " k7    4095") ||
		!strings.Contains(out, "40 keys, the use of 38 of them is known") {
		t.Error(out)
	}
}

func TestStat(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20})
	for i := range 20 {
		e.must("", "put", fmt.Sprint(i), "value")
	}
	out := e.must("", "-o", "json", "stat", "--interval", "10ms", "--count", "3")
	d := json.NewDecoder(strings.NewReader(out))
	for range 3 {
		var l looks.StatLine
		if err := d.Decode(&l); err != nil {
			t.Fatal(err)
		}
		if l.Keys != 20 || l.Change != 0 || l.Live < 20*64 || l.Live > 20*128 || l.Free == 0 || l.Lost == nil ||
			l.Short == nil || *l.Short || l.Sessions < 1 || l.Counted < 0 || l.CPU < 0 {
			t.Errorf("%+v", l)
		}
	}
	if d.More() {
		t.Errorf("a fourth line: %s", out)
	}
	if out := e.must("", "stat", "--count", "1"); strings.Count(out, "\n") != 2 || !strings.Contains(out, "Sessions") ||
		!strings.Contains(out, "Lost") {
		t.Error(out)
	}
	// The end of a command that watches is no failure.
	ctx, cancel := context.WithCancel(t.Context())
	e.wrap(func(s ctl.Store) ctl.Store { return &overlay{s, func(int, uint64, []byte) { cancel() }} })
	if r := e.runContext(ctx, "", "stat", "--interval", "1h"); r.code != ctl.ExitOK {
		t.Errorf("%+v", r)
	}
}

func TestLatency(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 128 << 20, Providers: []string{"shm"}})
	e.must("", "put", "k", "v")
	good := func(l measure.LatencyLine, gets, missing int64) {
		t.Helper()
		if l.Gets != gets || l.NotFound != missing || l.Errors != 0 || l.Min <= 0 || float64(l.Min) > l.Avg ||
			l.Min > l.P50 || l.P50 > l.P99 || l.P99 > l.Max {
			t.Errorf("%+v", l)
		}
	}
	good(decode[measure.LatencyLine](t, e.must("", "-o", "json", "latency", "k", "--count", "50", "--pause", "0s")), 50,
		0)
	good(decode[measure.LatencyLine](t, e.must("", "-o", "json", "latency", "--count", "5", "--pause", "1ms")), 5, 5)
	out := e.must("", "-o", "json", "latency", "k", "--history", "--interval", "20ms", "--pause", "1ms", "--count",
		"100")
	if n := strings.Count(out, "\n"); n < 2 {
		t.Errorf("%d lines: %s", n, out)
	}
	if out := e.must("", "latency", "k", "--count", "3"); strings.Count(out, "\n") != 2 ||
		!strings.Contains(out, "µs") {
		t.Error(out)
	}
	e.wrap(func(s ctl.Store) ctl.Store { return &failing{s, client.ErrUnavailable} })
	r := e.run("", "-o", "json", "latency", "k", "--count", "3", "--pause", "0s")
	if l := decode[measure.LatencyLine](t, r.stdout); r.code != ctl.ExitUnavailable || l.Errors != 3 || l.Gets != 0 {
		t.Errorf("%+v", r)
	}
}

func TestCompleteKeys(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 128 << 20, Providers: []string{"shm"}})
	if out := e.must("", "__complete", "get", ""); !strings.HasPrefix(out, ":4\n") {
		t.Errorf("no namespace: %q", out)
	}
	if r := e.run("", "shards"); r.code != ctl.ExitUsage {
		t.Errorf("completion made the namespace: %+v", r)
	}
	var in strings.Builder
	for i := range 2 * ctl.CompleteMost {
		fmt.Fprintf(&in, "many%d\tx\n", i)
	}
	in.WriteString("one\tx\nline\x01\tx\n")
	e.must(in.String(), "pipe")
	if out := e.must("", "__completeNoDesc", "get", "on"); out != "one\n:4\n" {
		t.Errorf("%q", out)
	}
	if out := e.must("", "__completeNoDesc", "mget", "one", "li"); out != ":4\n" {
		t.Errorf("a key that is no text: %q", out)
	}
	if out := e.must("", "__completeNoDesc", "del", "x", "many"); strings.Count(out, "many") != ctl.CompleteMost {
		t.Errorf("%d keys", strings.Count(out, "many"))
	}
}

// The state is the leader's, whichever directory node is asked first: it alone knows how memory is used.
// While none leads, the state is that of any node that answers.
func TestStatusOfTheLeader(t *testing.T) {
	e := newEnv(t, devstore.Options{Directories: 3, Dir: t.TempDir(), Replicas: 1, CapacityBytes: 64 << 20})
	e.must("", "put", "k", "v")
	dirs := e.store.Directory()
	known := func(first int) bool {
		t.Helper()
		e.flags = []string{"--timeout", "20s", "--directory",
			strings.Join(append(dirs[first:len(dirs):len(dirs)], dirs[:first]...), ",")}
		var st struct {
			Memory struct {
				PGs []struct {
					Lost *uint64 `json:"lost_bytes"`
				} `json:"placement_groups"`
			} `json:"memory"`
		}
		if err := json.Unmarshal([]byte(e.must("", "-o", "json", "status")), &st); err != nil {
			t.Fatal(err)
		}
		return len(st.Memory.PGs) == 1 && st.Memory.PGs[0].Lost != nil
	}
	for first := range dirs {
		if !known(first) {
			t.Errorf("asked directory node %d first: it does not know how memory is used", first)
		}
	}
	for i := range 2 { // no majority is left
		if err := e.store.StopDirectory(i); err != nil {
			t.Fatal(err)
		}
	}
	for first := range dirs {
		// The one that is left may have led, and does so until it misses the others.
		for t.Context().Err() == nil && known(first) {
		}
	}
}
