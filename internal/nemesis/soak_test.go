package nemesis

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/rdma"
)

const (
	// soakLive is the part of the memory that is live, on average.
	soakLive = 0.3
	// leakLimit is how soon what a killed client held has been found.
	leakLimit = 30 * time.Second
	// lostLimit bounds what of it is left after that, as a part of the memory: by itself a
	// store bears so much of each placement group, and the account is about a second old
	// while clients work. A check of the store finds the rest.
	lostLimit = 0.05
	// heldLimit bounds what is granted and not live, as a part of the memory: what
	// clients keep, what is in limbo, and what killed ones had until it has been found.
	heldLimit = 0.6
	// longSoak is from when on a run is long enough for keptRate; a shorter one has fewer
	// samples than the machine has moods, and prints the rates alone.
	longSoak   = 5 * time.Minute
	keptRate   = 0.9
	tallyEvery = 250 * time.Millisecond
)

// TestNemesisMemory runs for as long as KVD_NEMESIS_MEMORY says: clients write and
// delete each other's values, let them expire, and are killed. With soakLive of the
// memory live, it never counts as full, and writing gets no slower.
func TestNemesisMemory(t *testing.T) {
	s := flagged(t, "KVD_NEMESIS_MEMORY", "make nemesis-memory")
	if s.soak = true; s.kills+s.zombies > 0 || s.only != nil {
		t.Fatal("TestNemesisMemory chooses its own faults")
	}
	nemesis(t, s, (*harness).soakAndKill)
}

// soakConfig is what a soaker and a measurer are told. A soaker's stdout is lines
//
//	tally  JSON  a tally
//	full   TEXT  a write was refused for want of memory
//	bad    TEXT  as of loadConfig
type soakConfig struct {
	Directory           []string
	Namespace, Provider string
	Client, Life        int
	Seed                uint64
	// Slots are how many keys there are, for all clients together. Each has a size that
	// its values do not exceed.
	Slots   int
	Workers int
	// Pace is how long a worker rests between operations, on average.
	Pace      time.Duration
	OpTimeout time.Duration
}

// tally is what a soaker did since its last one.
type tally struct {
	Seconds                          float64
	Writes, Bytes, Full, Bad, Waited int
	Reads                            int           // by the worker that does nothing else
	Longest                          time.Duration // write
	Held, InUse                      uint64        // units, by the client's own account, now
}

// slotSize is the size that values of a slot do not exceed: half of them are small.
func slotSize(i int) int {
	rng := rand.New(rand.NewPCG(uint64(i), 3))
	if rng.IntN(2) == 0 {
		return 200 + rng.IntN(4000)
	}
	return 200 + rng.IntN(200_000)
}

// Half of the operations of a soaker delete, so half of the slots are full on average,
// and less as some expire; values take three quarters of what they may.
const slotUse = 0.5 * 0.75

// slots are so many that soakLive of the memory is live.
func slots(heap uint64) (n int) {
	for sum := 0.0; sum < soakLive*float64(heap)/slotUse; n++ {
		sum += float64(slotSize(n))
	}
	return n
}

func openSoak(ctx context.Context, cfg soakConfig, device *rdma.Device, more func(*client.Options)) (*client.Client,
	error) {
	o := client.Options{Directory: cfg.Directory, Namespace: cfg.Namespace, Provider: cfg.Provider,
		Devices: []*rdma.Device{device},
		Name:    fmt.Sprintf("nemesis c%d.%d", cfg.Client, cfg.Life), OpTimeout: cfg.OpTimeout,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelInfo}))}
	if more != nil {
		more(&o)
	}
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	return client.Open(ctx, o)
}

// soaker is one life of a client process.
type soaker struct {
	soakConfig
	c  *client.Client
	mu sync.Mutex // tally and stdout
	t  tally
}

// soakMain uses the store until SIGTERM, then closes its session.
func soakMain(ctx context.Context, device *rdma.Device, cfg soakConfig) (err error) {
	s := &soaker{soakConfig: cfg}
	if s.c, err = openSoak(ctx, cfg, device, nil); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	var wg sync.WaitGroup
	for w := range cfg.Workers {
		wg.Go(func() { s.work(ctx, w) })
	}
	wg.Go(func() { s.read(ctx) })
	wg.Go(func() {
		for last := time.Now(); ctx.Err() == nil; {
			select {
			case <-ctx.Done():
			case <-time.After(tallyEvery):
			}
			st := s.c.Stats()
			s.mu.Lock()
			t := s.t
			s.t = tally{}
			s.mu.Unlock()
			t.Seconds, t.Held, t.InUse = time.Since(last).Seconds(), st.FreeUnits+st.LimboUnits, st.LiveUnits
			last = time.Now()
			b, _ := json.Marshal(t) // plain numbers
			s.print("tally", string(b))
		}
	})
	wg.Wait()
	return s.c.Close()
}

func (s *soaker) print(kind, text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Printf("%s\t%s\n", kind, text)
}

func (s *soaker) rng(worker int) *rand.Rand {
	return rand.New(rand.NewPCG(s.Seed, uint64(s.Client)<<40|uint64(s.Life)<<8|uint64(worker)))
}

// rest is the pause between two operations.
func (s *soaker) rest(ctx context.Context, rng *rand.Rand) {
	select {
	case <-ctx.Done():
	case <-time.After(time.Duration(rng.Int64N(int64(2*s.Pace) + 1))):
	}
}

// get reads a key, and checks what it finds.
func (s *soaker) get(key string) error {
	it, err := s.c.Get(context.Background(), []byte(key))
	if err == nil {
		if _, bad := parseValue(key, it.Value); bad != nil {
			s.print("bad", strconv.Quote(fmt.Sprintf("client %d: %v", s.Client, bad)))
		}
	}
	return err
}

// read reads and nothing else: writes that wait for memory do not slow it, and whatever else
// the machine does slows both.
func (s *soaker) read(ctx context.Context) {
	for rng := s.rng(s.Workers); ctx.Err() == nil; s.rest(ctx, rng) {
		if err := s.get(fmt.Sprintf("soak/%d", rng.IntN(s.Slots))); err == nil || errors.Is(err, client.ErrNotFound) {
			s.mu.Lock()
			s.t.Reads++
			s.mu.Unlock()
		}
	}
}

func (s *soaker) work(ctx context.Context, w int) {
	rng := s.rng(w)
	for seq := 0; ctx.Err() == nil; seq++ {
		i := rng.IntN(s.Slots)
		key := fmt.Sprintf("soak/%d", i)
		var err error
		// Each operation is bounded by OpTimeout, not by the process's end.
		switch what := rng.IntN(100); {
		case what < 10:
			err = s.get(key)
		case what < 55:
			size := slotSize(i)/2 + rng.IntN(slotSize(i)/2)
			var o client.PutOptions
			if rng.IntN(5) == 0 {
				o.TTL = time.Duration(200+rng.IntN(5000)) * time.Millisecond
			}
			v := makeValue(key, fmt.Sprintf("%d.%d.%d.%d", s.Client, s.Life, w, seq), size)
			began := time.Now()
			_, err = s.c.Put(context.Background(), []byte(key), v, o)
			took := time.Since(began)
			s.mu.Lock()
			if s.t.Longest = max(s.t.Longest, took); took > 50*time.Millisecond {
				s.t.Waited++
			}
			if err == nil {
				s.t.Writes++
				s.t.Bytes += len(v)
			}
			s.mu.Unlock()
		default:
			err = s.c.Delete(context.Background(), []byte(key))
		}
		switch {
		case err == nil, errors.Is(err, client.ErrNotFound):
		case errors.Is(err, client.ErrFull):
			s.mu.Lock()
			s.t.Full++
			s.mu.Unlock()
			s.print("full", strconv.Quote(err.Error()))
		default:
			s.mu.Lock()
			s.t.Bad++
			s.mu.Unlock()
			fmt.Fprintln(os.Stderr, err)
		}
		s.rest(ctx, rng)
	}
}

// measureMain prints how many units all records take.
func measureMain(cfg soakConfig) error {
	device, err := providers.Open(cfg.Provider, providers.Options{})
	if err != nil {
		return err
	}
	defer device.Close()
	ctx := context.Background()
	c, err := openSoak(ctx, cfg, device, func(o *client.Options) {
		o.ReadOnly, o.NoEviction, o.Name = true, true, "nemesis measure"
	})
	if err != nil {
		return err
	}
	units := uint64(0)
	for kv, err := range c.Scan(ctx, client.ScanOptions{Expired: true}) {
		if err != nil {
			return errors.Join(err, c.Close())
		}
		code, _ := layout.CodeFor(layout.RecordLen(len(kv.Key), len(kv.Value))) // none is too long
		units += uint64(layout.UnitsOf(code))
	}
	fmt.Println(units)
	return c.Close()
}

// soakBook is what soakers tell. It may be used concurrently.
type soakBook struct {
	mu      sync.Mutex
	at      []int64 // of each tally
	tallies []tally
	last    map[int]tally // by client
	full    []string      // the first few
	heap    uint64        // units
	facts   []string      // for people
}

func (b *soakBook) fact(format string, a ...any) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	f := fmt.Sprintf(format, a...)
	b.facts = append(b.facts, f)
	return f
}

// between sums up what was told from one time to another.
func (b *soakBook) between(from, to int64) (sum tally) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, t := range b.tallies {
		if from <= b.at[i] && b.at[i] < to {
			sum.Seconds += t.Seconds
			sum.Writes += t.Writes
			sum.Reads += t.Reads
			sum.Bytes += t.Bytes
			sum.Full += t.Full
			sum.Bad += t.Bad
			sum.Waited += t.Waited
			sum.Longest = max(sum.Longest, t.Longest)
		}
	}
	return sum
}

// served tells which of clients has not written since then.
func (b *soakBook) served(since int64, clients int) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := len(b.tallies); n == 0 || len(b.last) < clients || b.at[n-1] < since {
		return fmt.Sprintf("%d of %d clients have written", len(b.last), clients)
	}
	return ""
}

func (b *soakBook) summary() string {
	t := b.between(0, 1<<62)
	b.mu.Lock()
	defer b.mu.Unlock()
	out := fmt.Sprintf("soak       %d writes of %.0f MiB, %.1f times the memory; %d waited, the longest %v; %d full, "+
		"%d other errors\n",
		t.Writes, float64(t.Bytes)/(1<<20), float64(t.Bytes)/float64(max(1, b.heap)*layout.UnitSize), t.Waited,
		t.Longest.Round(time.Millisecond), t.Full, t.Bad)
	for _, f := range b.facts {
		out += "           " + f + "\n"
	}
	for _, f := range b.full {
		out += "           full: " + f + "\n"
	}
	return out
}

func (h *harness) soakConfig(client, life int) soakConfig {
	st, _ := h.status.get()
	heap := usageOf(st).heap
	h.soaked.mu.Lock()
	h.soaked.heap = heap
	h.soaked.mu.Unlock()
	return soakConfig{Directory: h.directories(), Namespace: namespace, Provider: h.provider, Client: client,
		Life: life, Seed: h.seed,
		Slots: slots(heap * layout.UnitSize), Workers: 4, Pace: 15 * time.Millisecond, OpTimeout: 10 * time.Second}
}

func (h *harness) launchSoaker(p *proc, self string) error {
	n, err := strconv.Atoi(p.name[1:])
	if err != nil {
		return err
	}
	doc, err := json.Marshal(h.soakConfig(n, p.life+1))
	if err != nil {
		return err
	}
	return p.start(h.net, environ("KVD_NEMESIS_PROGRAM=soak", "KVD_NEMESIS_LOAD="+string(doc)), []string{self},
		func(l string) {
			h.soakHeard(n, l)
		})
}

// soakHeard takes a line of a soaker.
func (h *harness) soakHeard(client int, line string) {
	kind, rest, _ := strings.Cut(line, "\t")
	b := &h.soaked
	switch text, err := strconv.Unquote(rest); kind {
	case "tally":
		var t tally
		if json.Unmarshal([]byte(rest), &t) != nil {
			return // cut short by its end
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.last == nil {
			b.last = map[int]tally{}
		}
		b.at, b.tallies = append(b.at, now()), append(b.tallies, t)
		if _, seen := b.last[client]; seen || t.Writes > 0 {
			b.last[client] = t
		}
	case "full":
		b.mu.Lock()
		defer b.mu.Unlock()
		if err == nil && len(b.full) < 3 {
			b.full = append(b.full, fmt.Sprintf("after %.1fs, client %d: %s", time.Duration(now()-h.began).Seconds(),
				client, text))
		}
	case "bad":
		if err == nil {
			h.fail(text)
		}
	default:
		h.fail(fmt.Sprintf("client %d said %q", client, line))
	}
}

// soaking waits until every soaker has written.
func (h *harness) soaking(since int64) error {
	return h.until("every client writes", recoverLimit, func() string {
		return h.soaked.served(since, len(h.scope.clients))
	})
}

// usage is what the directory knows of the namespace's memory, in units.
type usage struct {
	heap, granted, returned uint64
	// live and lost are the leader's own estimate; known tells whether a leader answered.
	live, lost uint64
	known      bool
}

func usageOf(st *dirpb.StatusReply) (u usage) {
	ns := namespaceOf(st.GetMap(), namespace)
	u.known = len(st.GetUsage()) > 0
	for _, p := range st.GetMap().GetPgs() {
		for _, g := range st.GetUsage() {
			if p.GetNamespaceId() != ns.GetId() || g.GetPgId() != p.GetId() {
				continue
			}
			u.heap += g.GetHeapUnits()
			u.granted += g.GetGrantedUnits()
			u.returned += g.GetReturnedUnits()
			u.live += g.GetLiveUnits()
			u.lost += g.GetLostUnits()
			u.known = u.known && g.GetEstimated()
		}
	}
	return u
}

func (u usage) String() string {
	s := fmt.Sprintf("memory %.1f, granted %.1f, returned %.1f MiB", inMiB(u.heap), inMiB(u.granted), inMiB(u.returned))
	if u.known {
		s += fmt.Sprintf(", live %.1f and lost %.1f by the directory's account", inMiB(u.live), inMiB(u.lost))
	}
	return s
}

func inMiB(units uint64) float64 { return float64(units) * layout.UnitSize / (1 << 20) }

// measure counts what is live, in units.
func (h *harness) measure() (units uint64, err error) {
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	doc, err := json.Marshal(h.soakConfig(0, 0))
	if err != nil {
		return 0, err
	}
	cmd := exec.CommandContext(h.failed, "ip", "netns", "exec", h.net.ns("op"), self)
	cmd.Env = environ("KVD_NEMESIS_PROGRAM=measure", "KVD_NEMESIS_LOAD="+string(doc))
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return 0, fmt.Errorf("measure: %w\n%s", err, &errs)
	}
	return strconv.ParseUint(strings.TrimSpace(out.String()), 10, 64)
}

// soakAndKill kills soakers, one after another, for the run's duration, and then sees
// where the memory is.
func (h *harness) soakAndKill() error {
	began, end := time.Now(), time.Now().Add(h.duration)
	window := min(h.duration/6, time.Minute)
	firstFrom := now() + int64(window) // after a warm-up
	lastFrom := now() + int64(h.duration-window)
	var held []float64 // what is granted and not live, as a part of the memory, late in the run
	for time.Now().Before(end) {
		if err := h.sleep(min(h.scope.leases(h.rng, 1, 4), time.Until(end))); err != nil {
			return err
		}
		victim := h.scope.clients[h.rng.IntN(len(h.scope.clients))]
		h.faults[killClient]++
		if err := h.killClient(victim); err != nil {
			return err
		}
		live, err := h.measure()
		if err != nil {
			return err
		}
		st, _ := h.status.get()
		u := usageOf(st)
		h.logf("killed %s: %v; %.1f live: %.1f held", victim, u, inMiB(live), inMiB(u.granted-min(live, u.granted)))
		if time.Since(began) > h.duration/2 {
			held = append(held, float64(u.granted-min(live, u.granted))/float64(u.heap))
		}
		if err := h.sleep(h.scope.leases(h.rng, 0.1, 2)); err != nil {
			return err
		}
		if err := h.launch(victim, nil); err != nil {
			return err
		}
	}
	stopped := now()
	h.rates(firstFrom, lastFrom, stopped, window)
	if slices.Sort(held); len(held) > 0 {
		m := held[len(held)/2]
		h.logf("%s", h.soaked.fact("held       %.0f %% of the memory is granted and not live, by the median of the "+
			"second half", 100*m))
		if m > heldLimit {
			h.fail(fmt.Sprintf("%.0f %% of the memory is granted and not live, want at most %.0f %%", 100*m,
				100*heldLimit))
		}
	}
	if t := h.soaked.between(0, stopped); t.Full > 0 {
		h.fail(fmt.Sprintf("the memory counted as full %d times", t.Full))
	}
	return h.leak()
}

// rates compares the last part of the run with the first: how many writes a client made to
// one read, so that a machine that is busier by then slows both. A client that is dead or about to
// die does not count.
func (h *harness) rates(firstFrom, lastFrom, end int64, window time.Duration) {
	first, last := h.soaked.between(firstFrom, firstFrom+int64(window)), h.soaked.between(lastFrom, end)
	rate := func(t tally) float64 { return float64(t.Writes) / float64(max(t.Reads, 1)) }
	second := func(t tally) float64 { return float64(t.Writes) / max(t.Seconds, 1e-3) }
	kept := rate(last) / max(rate(first), 1e-3)
	h.logf("%s", h.soaked.fact("throughput %.1f writes/s of a client in the first %v, %.1f in the last; %.2f and "+
		"%.2f to a read of its reader: %.2f",
		second(first), window.Round(time.Second), second(last), rate(first), rate(last), kept))
	if h.duration >= longSoak && kept < keptRate { // in a short run the windows are of a few seconds
		h.fail(fmt.Sprintf("in the end a client writes to one read %.2f of what it wrote in the beginning, want %.2f",
			kept, keptRate))
	}
}

// leak kills one client more and waits until most of what it held has been found, while the
// others go on, by the directory's account, and, when they have closed, by what is granted
// and not live. A check finds what is left then.
func (h *harness) leak() error {
	victim := h.scope.clients[h.rng.IntN(len(h.scope.clients))]
	if err := h.soaking(now()); err != nil {
		return err
	}
	if err := h.sleep(h.scope.leases(h.rng, 1, 2)); err != nil {
		return err
	}
	st, _ := h.status.get()
	before := usageOf(st)
	h.faults[killClient]++
	if err := h.killClient(victim); err != nil {
		return err
	}
	killed := time.Now()
	limit := uint64(lostLimit * float64(before.heap))
	since := now() + int64(2*h.lease) // nobody can know before that
	var u usage
	good := int64(0) // since when
	err := h.until("what a killed client held is found", leakLimit, func() string {
		st, at := h.status.get()
		if u = usageOf(st); at < since || !u.known || u.lost > limit {
			good = 0
			return u.String()
		}
		if good == 0 {
			good = at
		}
		if at < good+int64(3*h.lease) {
			return "not for long: " + u.String()
		}
		return ""
	})
	if err != nil {
		return err
	}
	h.logf("%s", h.soaked.fact(
		"leak       %.1f MiB by the directory's account, as for 3 leases, %v after the last kill", inMiB(u.lost),
		time.Since(killed).Round(100*time.Millisecond)))
	for _, c := range h.scope.clients {
		if err := h.procs[c].end(endLimit); err != nil {
			return err
		}
	}
	ended := time.Now()
	lost, left, err := uint64(0), "", error(nil)
	settled := func(limit uint64) func() string {
		return func() string {
			asked := now()
			live, err := h.measure()
			if err != nil {
				return err.Error()
			}
			st, at := h.status.get()
			u := usageOf(st)
			if left = fmt.Sprintf("%v, live %.1f", u, inMiB(live)); at < asked || u.granted > live+limit {
				return left
			}
			lost = u.granted - min(live, u.granted)
			return ""
		}
	}
	if err = h.until("what is granted is live", leakLimit, settled(limit)); err != nil {
		return err
	}
	h.logf("%s", h.soaked.fact("leak       %.1f MiB %v after the last kill, %v after the others closed: %s",
		inMiB(lost), time.Since(killed).Round(100*time.Millisecond),
		time.Since(ended).Round(100*time.Millisecond), left))
	h.count()
	began := time.Now()
	if err = h.sound(); err != nil {
		return err
	}
	if err = h.until("all that is granted is live", leakLimit, settled(0)); err != nil {
		return err
	}
	h.logf("%s", h.soaked.fact("leak       0 after a check, which took %v: %s",
		time.Since(began).Round(100*time.Millisecond), left))
	return nil
}
