package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/verbs"
)

// perfRegion is how much memory the passive side lends, and so the longest
// message.
const perfRegion = 4 << 20

type perfOptions struct {
	verbs         []string
	sizes         []string
	iters         int
	depth         int
	server        bool
	listen        string
	connect       string
	passiveDevice string
}

func (a *app) perfCommand() *cobra.Command {
	var o perfOptions
	c := &cobra.Command{
		Use:   "perf",
		Short: "Measure latency and bandwidth of each verb, without the store",
		Long: "Measure READ, WRITE, CMP_AND_SWP and FETCH_ADD of one provider between two\n" +
			"processes of this machine, as perftest's ib_read_lat and ib_read_bw do: latency\nwith one verb at a time, bandwidth with chains of --depth. No store is needed.\n\n" +
			"Latency is the time from one post to the next, the completion being waited for by\npolling, as perftest does; after " + perfSpin.String() + " without one (over tcp at once) the wait sleeps\nuntil there is a completion.\n\n" +
			"--verbs PINGPONG measures WRITE as ib_write_lat does (WRITE_PINGPONG): half the\ntime of a WRITE there and one back, each seen by polling memory. It keeps a\nprocessor busy on either side, and the passive side connects back.\n\n" +
			"Between two machines: kvctl perf --server --provider tcp --listen HOST:PORT\nprints what to pass to kvctl perf --connect on the other.",
		Args:    cobra.NoArgs,
		GroupID: "tools",
		RunE: func(cmd *cobra.Command, _ []string) error {
			provider := cmp.Or(a.provider, "shm")
			switch {
			case o.passiveDevice != "" && (o.server || o.connect != ""):
				return usagef("--passive-device: is for the passive side that this command starts; give the other --rdma-device")
			case o.passiveDevice != "" && provider != "verbs":
				return usagef("--passive-device: provider %s has no adapters", provider)
			case o.server:
				return a.perfServe(cmd.Context(), provider, o.listen)
			}
			p, err := o.plan()
			if err != nil {
				return err
			}
			return a.perfRun(cmd.Context(), provider, o, p)
		},
	}
	f := c.Flags()
	f.StringSliceVar(&o.verbs, "verbs", []string{"READ", "WRITE", "CMP_AND_SWP", "FETCH_ADD"}, "verbs to measure; also PINGPONG")
	f.StringSliceVar(&o.sizes, "sizes", []string{"8", "64", "256", "4KiB", "64KiB", "1MiB"}, "message sizes of READ and WRITE")
	f.IntVar(&o.iters, "iters", 5000, "verbs a measurement")
	f.IntVar(&o.depth, "depth", 32, "verbs behind one doorbell when measuring bandwidth")
	f.BoolVar(&o.server, "server", false, "be the passive side until stdin ends")
	f.StringVar(&o.listen, "listen", "", "passive side's address (default: a private one)")
	f.StringVar(&o.connect, "connect", "", "what a passive side printed")
	f.StringVar(&o.passiveDevice, "passive-device", "", "RDMA adapter of the passive side that is started (default: as --rdma-device)")
	return c
}

// perfCase is one line of the result.
type perfCase struct {
	op       rdma.Opcode
	pingpong bool // WRITEs back and forth
	bytes    int
	iters    int
	depth    int
}

func (c perfCase) String() string {
	if c.pingpong {
		return "WRITE_PINGPONG"
	}
	return c.op.String()
}

func (o *perfOptions) plan() (cases []perfCase, err error) {
	if o.iters < 1 || o.iters > 100_000_000 {
		return nil, usagef("--iters %d: want 1 to 100000000", o.iters)
	}
	if o.depth < 1 || o.depth > 64 {
		return nil, usagef("--depth %d: want 1 to 64", o.depth)
	}
	var sizes []int
	for _, s := range o.sizes {
		n, err := parseBytes(s)
		if err != nil || n == 0 || n > perfRegion {
			return nil, usagef("--sizes %q: want 1 to %d bytes", s, perfRegion)
		}
		sizes = append(sizes, int(n))
	}
	for _, v := range o.verbs {
		c := perfCase{bytes: 8, iters: o.iters, depth: o.depth}
		switch strings.ToUpper(v) {
		case "READ":
			c.op = rdma.OpRead
		case "WRITE":
			c.op = rdma.OpWrite
		case "PINGPONG", "WRITE_PINGPONG":
			c.op, c.pingpong, c.depth = rdma.OpWrite, true, 1
		case "CAS", "CMP_AND_SWP":
			c.op = rdma.OpCmpAndSwp
		case "FETCH_ADD":
			c.op = rdma.OpFetchAdd
		default:
			return nil, usagef("--verbs %q: want READ, WRITE, CMP_AND_SWP, FETCH_ADD or PINGPONG", v)
		}
		if c.op.IsAtomic() {
			cases = append(cases, c)
			continue
		}
		for _, n := range sizes {
			if c.pingpong && n < 8 {
				return nil, usagef("--sizes %d: PINGPONG wants at least 8 bytes, for a counter", n)
			}
			// Long messages: as many bytes, not as many messages.
			c.bytes, c.iters = n, min(o.iters, max(o.iters*4096/max(n, 4096), 20))
			if !c.pingpong {
				c.depth = max(min(o.depth, perfRegion/n), 1)
			}
			cases = append(cases, c)
		}
	}
	return cases, nil
}

// perfResult is one measured case.
type perfResult struct {
	Verb        string  `json:"verb"`
	Bytes       int     `json:"bytes"`
	Iterations  int     `json:"iterations"`
	MinNanos    int64   `json:"min_ns"`
	MedianNanos int64   `json:"median_ns"`
	AvgNanos    float64 `json:"avg_ns"`
	P99Nanos    int64   `json:"p99_ns"`
	MiBPerSec   float64 `json:"mib_per_second"`
	VerbsPerSec float64 `json:"verbs_per_second"`
	Depth       int     `json:"depth"`
}

func (a *app) perfRun(ctx context.Context, provider string, o perfOptions, cases []perfCase) (err error) {
	to := o.connect
	pingpong := slices.ContainsFunc(cases, func(c perfCase) bool { return c.pingpong })
	if to != "" {
		provider, _, _ = strings.Cut(to, ",")
	} else {
		child, line, err := a.perfFork(ctx, provider, o.passiveDevice)
		if err != nil {
			return err
		}
		defer a.closed("passive side", child)
		to = line
	}
	dev, err := a.perfOpen(provider)
	if err != nil {
		return err
	}
	defer a.closed("device", dev.Close)
	dctx, cancel := context.WithTimeout(ctx, a.timeout)
	p, err := perfDial(dctx, dev, to)
	cancel()
	if err != nil {
		return err
	}
	defer a.closed("connection", p.close)
	if pingpong {
		if p.home, err = a.perfHome(provider, p.addr); err != nil {
			return err
		}
	}

	var results []perfResult
	for _, c := range cases {
		measure := p.measure
		if c.pingpong {
			measure = p.pingpong
		}
		r, err := measure(ctx, c, a.timeout)
		if err != nil {
			return fmt.Errorf("%v of %d bytes: %w", c, c.bytes, err)
		}
		results = append(results, r)
	}
	if a.json() {
		return a.printJSON(map[string]any{"provider": provider, "results": results})
	}
	fmt.Fprintf(a.stdout, "provider %s\n", provider)
	us := func(ns float64) string { return strconv.FormatFloat(ns/1000, 'f', 2, 64) }
	a.printTable(row{"Verb", "Bytes", "Iterations", "Min µs", "Median µs", "Avg µs", "P99 µs", "Depth", "MiB/s", "Verbs/s"},
		mapTo(results, func(r perfResult) row {
			return row{r.Verb, r.Bytes, r.Iterations, us(float64(r.MinNanos)), us(float64(r.MedianNanos)), us(r.AvgNanos),
				us(float64(r.P99Nanos)), r.Depth, fmt.Sprintf("%.1f", r.MiBPerSec), fmt.Sprintf("%.0f", r.VerbsPerSec)}
		}))
	return nil
}

// ---- the passive side ------------------------------------------------------

// perfOpen opens the device of either side; both connect and listen.
func (a *app) perfOpen(provider string) (*rdma.Device, error) {
	cfg, err := a.tlsConfig()
	if err != nil {
		return nil, err
	}
	dev, err := providers.Open(provider, providers.Options{TLSServer: cfg, TLSClient: cfg, Verbs: verbs.Options{Device: a.rdmaDevice}})
	if err != nil {
		return nil, fmt.Errorf("--provider: %w", err)
	}
	return dev, nil
}

// perfPassive lends perfRegion bytes to whoever connects and knows their key, and
// answers one ping-pong at a time.
type perfPassive struct {
	dev *rdma.Device
	mem *rdma.Memory
	pd  *rdma.PD
	mr  *rdma.MR
	l   rdma.Listener

	// limit bounds the silence between two messages of a ping-pong.
	limit time.Duration
	// failed hears why a ping-pong ended before the active side closed it.
	failed func(error)
	echoes sync.WaitGroup
	mu     struct {
		sync.Mutex
		peer   rdma.Peer          // of the ping-pong that is under way
		stop   context.CancelFunc // of the same; nil while there is none
		closed bool
	}
}

const perfRights = rdma.AccessRemoteRead | rdma.AccessRemoteWrite | rdma.AccessRemoteAtomic

// perfListen owns dev also when it fails.
func perfListen(dev *rdma.Device, addr string) (s *perfPassive, err error) {
	s = &perfPassive{dev: dev, limit: 5 * time.Second, failed: func(error) {}}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if s.mem, err = dev.Alloc(perfRegion, rdma.AllocOptions{Name: "kvctl-perf", Shared: true}); err != nil {
		return s, err
	}
	if s.pd, err = dev.AllocPD(); err != nil {
		return s, err
	}
	if s.mr, err = s.pd.RegMR(s.mem, 0, perfRegion, perfRights); err != nil {
		return s, err
	}
	switch {
	case addr != "":
	case dev.Name() == "shm":
		addr = fmt.Sprintf("@kvctl-perf-%d", os.Getpid())
	default:
		addr = "127.0.0.1:0"
	}
	s.l, err = dev.Listen(addr, rdma.ListenOptions{Accept: s.accept, Closed: s.gone})
	return s, err
}

// to is what the active side needs.
func (s *perfPassive) to() string {
	return fmt.Sprintf("%s,%s,%#x,%#x", s.dev.Name(), s.l.Addr(), s.mr.RKey(), s.mr.Base())
}

func (s *perfPassive) close() error {
	var errs []error
	if s.l != nil {
		errs = append(errs, s.l.Close())
	}
	s.mu.Lock()
	s.mu.closed = true
	if s.mu.stop != nil {
		s.mu.stop()
	}
	s.mu.Unlock()
	s.echoes.Wait()
	if s.mr != nil {
		errs = append(errs, s.mr.Deregister())
	}
	if s.pd != nil {
		errs = append(errs, s.pd.Dealloc())
	}
	if s.mem != nil {
		errs = append(errs, s.mem.Free())
	}
	return errors.Join(append(errs, s.dev.Close())...)
}

func (a *app) perfServe(ctx context.Context, provider, addr string) error {
	if provider != "shm" && addr != "" && a.tlsCA == "" && !a.insecure && !isLoopback(addr) {
		return usagef("--listen %s is not a loopback address: want TLS flags, or --insecure", addr)
	}
	dev, err := a.perfOpen(provider)
	if err != nil {
		return err
	}
	s, err := perfListen(dev, addr)
	if err != nil {
		return err
	}
	defer a.closed("passive side", s.close)
	s.limit, s.failed = a.timeout, func(err error) { a.say("kvctl perf --server: %s", oneLine(err.Error())) }
	fmt.Fprintln(a.stdout, s.to())
	if err := a.flush(); err != nil {
		return err
	}
	// Stdin ends with the process that started this one.
	ended := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, a.stdin)
		close(ended)
	}()
	select {
	case <-ended:
	case <-ctx.Done():
	}
	return nil
}

// perfFork starts the passive side in a process of its own.
func (a *app) perfFork(ctx context.Context, provider, device string) (stop func() error, to string, err error) {
	self, err := a.self()
	if err != nil {
		return nil, "", err
	}
	args := append(self[1:], "perf", "--server", "--provider", provider, "--timeout", a.timeout.String())
	for _, f := range [][2]string{{"--rdma-device", cmp.Or(device, a.rdmaDevice)}, {"--tls-ca", a.tlsCA}, {"--tls-cert", a.tlsCert}, {"--tls-key", a.tlsKey}} {
		if f[1] != "" {
			args = append(args, f[0], f[1])
		}
	}
	cmd := exec.CommandContext(ctx, self[0], args...)
	cmd.Stderr = a.stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, "", err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, "", err
	}
	if err := cmd.Start(); err != nil {
		return nil, "", fmt.Errorf("start the passive side: %w", err)
	}
	stop = func() error {
		_ = in.Close()
		if err := cmd.Wait(); err != nil && ctx.Err() == nil {
			return err
		}
		return nil
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return nil, "", errors.Join(errors.New("the passive side did not start"), stop())
	}
	return stop, strings.TrimSpace(line), nil
}

// ---- the active side -------------------------------------------------------

// perfConn is one connection with its registered buffer.
type perfConn struct {
	dev        *rdma.Device
	addr, home string // the passive side's; where this side listens for ping-pongs
	mem        *rdma.Memory
	pd         *rdma.PD
	mr         *rdma.MR
	cq         *rdma.CQ
	qp         *rdma.QP
	rkey, base uint64
	wcs        [1]rdma.WC
	// spin is how long a wait polls before it sleeps.
	spin  time.Duration
	timer *time.Timer // of a wait that sleeps
	begin time.Time   // what stamps count from
	// stamps are one batch's; the histogram is filled between batches.
	stamps [4096]int64
}

// perfBuffer holds two chains of the longest kind.
const perfBuffer = 2 * perfRegion

func perfDial(ctx context.Context, dev *rdma.Device, to string) (_ *perfConn, err error) {
	f := strings.Split(to, ",")
	if len(f) != 4 || f[0] != dev.Name() {
		return nil, usagef("--connect %q: want provider,address,rkey,base of a passive side", to)
	}
	p := &perfConn{dev: dev, addr: f[1], spin: perfSpin, timer: time.NewTimer(time.Hour), begin: time.Now()}
	if dev.Name() == "tcp" {
		// Completions come through goroutines that a busy one would keep from running.
		p.spin = 0
	}
	if p.rkey, err = strconv.ParseUint(f[2], 0, 64); err != nil {
		return nil, usagef("--connect: rkey %q", f[2])
	}
	if p.base, err = strconv.ParseUint(f[3], 0, 64); err != nil {
		return nil, usagef("--connect: base %q", f[3])
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	if p.mem, err = dev.Alloc(perfBuffer, rdma.AllocOptions{Name: "kvctl-perf-local"}); err != nil {
		return nil, err
	}
	if p.pd, err = dev.AllocPD(); err != nil {
		return nil, err
	}
	if p.mr, err = p.pd.RegMR(p.mem, 0, perfBuffer, rdma.AccessLocal); err != nil {
		return nil, err
	}
	if p.cq, err = dev.CreateCQ(256); err != nil {
		return nil, err
	}
	if p.qp, err = dev.Dial(ctx, p.pd, p.cq, p.addr, []byte(perfPlain)); err != nil {
		return nil, err
	}
	return p, nil
}

func (p *perfConn) close() error {
	var errs []error
	p.timer.Stop()
	if p.qp != nil {
		errs = append(errs, p.qp.Close())
	}
	if p.cq != nil {
		errs = append(errs, p.cq.Close())
	}
	if p.mr != nil {
		errs = append(errs, p.mr.Deregister())
	}
	if p.pd != nil {
		errs = append(errs, p.pd.Dealloc())
	}
	if p.mem != nil {
		errs = append(errs, p.mem.Free())
	}
	return errors.Join(errs...)
}

// chain makes the WRs of one doorbell with n verbs; only the last is signaled.
// half chooses the half of the buffer, so that two chains can be under way.
func (p *perfConn) chain(c perfCase, n, half int) []rdma.WR {
	wrs := make([]rdma.WR, n)
	for i := range wrs {
		off := half*perfRegion + i*((c.bytes+63)&^63)%perfRegion
		if off+c.bytes > (half+1)*perfRegion {
			off = half * perfRegion
		}
		w := &wrs[i]
		*w = rdma.WR{ID: uint64(half), Op: c.op, Local: p.mr.Bytes()[off : off+c.bytes : off+c.bytes], LKey: p.mr.LKey(),
			RemoteAddr: p.base + uint64(off-half*perfRegion), RKey: p.rkey, Swap: 1}
		if c.op.IsAtomic() {
			w.RemoteAddr = p.base
		}
	}
	wrs[n-1].Flags = rdma.Signaled
	return wrs
}

// perfSpin is long against any adapter's latency.
const perfSpin = time.Millisecond

// wait takes one completion. It polls for p.spin, and then sleeps until there may
// be one; the clock is read now and then only.
func (p *perfConn) wait(ctx context.Context, limit time.Duration) error {
	var began time.Duration
	for polls := 0; ; polls++ {
		if p.cq.Poll(p.wcs[:]) == 1 {
			if p.wcs[0].Status != driver.Success {
				return &rdma.WCError{WC: p.wcs[0]}
			}
			return nil
		}
		if p.spin > 0 {
			if polls%32 != 0 {
				continue
			}
			now := time.Since(p.begin)
			if polls == 0 {
				began = now
			}
			if now-began < p.spin {
				continue
			}
		}
		p.timer.Reset(limit)
		select {
		case <-p.cq.Ready():
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-p.timer.C:
			return fmt.Errorf("no completion: %w", context.DeadlineExceeded)
		}
	}
}

// latency times iters runs of f behind a tenth as many to warm up. A run lasts
// from the end of the one before to its own: the clock is read once a run, as
// perftest does, and nothing else happens in between.
func (p *perfConn) latency(iters int, f func() error) (*hdrhistogram.Histogram, error) {
	h := hdrhistogram.New(1, int64(time.Minute), 3)
	for i := -iters / 10; i < iters; {
		until := iters
		if i < 0 {
			until = 0
		}
		batch := p.stamps[:min(until-i, len(p.stamps))]
		last := int64(time.Since(p.begin))
		for j := range batch {
			if err := f(); err != nil {
				return nil, err
			}
			batch[j] = int64(time.Since(p.begin))
		}
		for _, stamp := range batch {
			if i >= 0 {
				_ = h.RecordValue(stamp - last)
			}
			last = stamp
			i++
		}
	}
	return h, nil
}

// take copies the latencies; each is the time of per verbs.
func (r *perfResult) take(h *hdrhistogram.Histogram, per int64) {
	r.MinNanos, r.MedianNanos, r.P99Nanos = h.Min()/per, h.ValueAtQuantile(50)/per, h.ValueAtQuantile(99)/per
	r.AvgNanos = h.Mean() / float64(per)
}

// minBandwidthTime is how long bandwidth is measured at least; the iterations
// asked for may be over much sooner.
const minBandwidthTime = 100 * time.Millisecond

// measure runs one case; limit is for a single wait.
func (p *perfConn) measure(ctx context.Context, c perfCase, limit time.Duration) (perfResult, error) {
	r := perfResult{Verb: c.String(), Bytes: c.bytes, Iterations: c.iters, Depth: c.depth}
	one := p.chain(c, 1, 0)
	h, err := p.latency(c.iters, func() error {
		if _, err := p.qp.PostSend(one); err != nil {
			return err
		}
		return p.wait(ctx, limit)
	})
	if err != nil {
		return r, err
	}
	r.take(h, 1)

	// Two chains are under way, so that the wire does not idle between doorbells.
	chains := [2][]rdma.WR{p.chain(c, c.depth, 0), p.chain(c, c.depth, 1)}
	begin, posted, done := time.Now(), 0, 0
	var busy [2]bool
	for half := 0; posted == 0 || done < posted; half ^= 1 {
		if busy[half] {
			if err := p.wait(ctx, limit); err != nil {
				return r, err
			}
			done += c.depth
			busy[half] = false
		}
		if posted < c.iters || time.Since(begin) < minBandwidthTime {
			if _, err := p.qp.PostSend(chains[half]); err != nil {
				return r, err
			}
			posted += c.depth
			busy[half] = true
		}
	}
	sec := time.Since(begin).Seconds()
	r.VerbsPerSec = float64(done) / sec
	r.MiBPerSec = r.VerbsPerSec * float64(c.bytes) / (1 << 20)
	return r, nil
}
