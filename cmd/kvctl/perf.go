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
	"strconv"
	"strings"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/sim"
)

// perfRegion is how much memory the passive side lends, and so the longest
// message.
const perfRegion = 4 << 20

// perfPrivate opens a connection's private data.
const perfPrivate = "kvctl perf 1"

type perfOptions struct {
	verbs   []string
	sizes   []string
	iters   int
	depth   int
	server  bool
	listen  string
	connect string
}

func (a *app) perfCommand() *cobra.Command {
	var o perfOptions
	c := &cobra.Command{
		Use:   "perf",
		Short: "Measure latency and bandwidth of each verb, without the store",
		Long: "Measure READ, WRITE, CMP_AND_SWP and FETCH_ADD of one provider between two\n" +
			"processes of this machine, as perftest's ib_read_lat and ib_read_bw do: latency\nwith one verb at a time, bandwidth with chains of --depth. No store is needed.\n\n" +
			"Between two machines: kvctl perf --server --provider tcp --listen HOST:PORT\nprints what to pass to kvctl perf --connect on the other.",
		Args:    cobra.NoArgs,
		GroupID: "tools",
		RunE: func(cmd *cobra.Command, _ []string) error {
			provider := cmp.Or(a.provider, "shm")
			if o.server {
				return a.perfServe(cmd.Context(), provider, o.listen)
			}
			p, err := o.plan()
			if err != nil {
				return err
			}
			return a.perfRun(cmd.Context(), provider, o.connect, p)
		},
	}
	f := c.Flags()
	f.StringSliceVar(&o.verbs, "verbs", []string{"READ", "WRITE", "CMP_AND_SWP", "FETCH_ADD"}, "verbs to measure")
	f.StringSliceVar(&o.sizes, "sizes", []string{"8", "64", "256", "4KiB", "64KiB", "1MiB"}, "message sizes of READ and WRITE")
	f.IntVar(&o.iters, "iters", 5000, "verbs a measurement")
	f.IntVar(&o.depth, "depth", 32, "verbs behind one doorbell when measuring bandwidth")
	f.BoolVar(&o.server, "server", false, "be the passive side until stdin ends")
	f.StringVar(&o.listen, "listen", "", "passive side's address (default: a private one)")
	f.StringVar(&o.connect, "connect", "", "what a passive side printed")
	return c
}

// perfCase is one line of the result.
type perfCase struct {
	op    rdma.Opcode
	bytes int
	iters int
	depth int
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
		op, ok := map[string]rdma.Opcode{"READ": rdma.OpRead, "WRITE": rdma.OpWrite, "CAS": rdma.OpCmpAndSwp,
			"CMP_AND_SWP": rdma.OpCmpAndSwp, "FETCH_ADD": rdma.OpFetchAdd}[strings.ToUpper(v)]
		switch {
		case !ok:
			return nil, usagef("--verbs %q: want READ, WRITE, CMP_AND_SWP or FETCH_ADD", v)
		case op.IsAtomic():
			cases = append(cases, perfCase{op, 8, o.iters, o.depth})
		default:
			for _, n := range sizes {
				// Long messages: as many bytes, not as many messages.
				iters := min(o.iters, max(o.iters*4096/max(n, 4096), 20))
				cases = append(cases, perfCase{op, n, iters, max(min(o.depth, perfRegion/n), 1)})
			}
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

func (a *app) perfRun(ctx context.Context, provider, connect string, cases []perfCase) (err error) {
	var dev *rdma.Device
	var to string
	switch {
	case provider == "sim":
		if connect != "" {
			return usagef("--connect: provider sim lives in one process")
		}
		f := sim.New(sim.Options{Seed: 1})
		passive := rdma.NewDevice("sim", f.Device("passive"))
		l, stop, err := perfListen(passive, "sim", "")
		if err != nil {
			return err
		}
		defer a.closed("passive side", stop)
		to, dev = l, rdma.NewDevice("sim", f.Device("active"))
	case connect != "":
		to, provider = connect, strings.SplitN(connect, ",", 2)[0]
	default:
		child, line, err := a.perfFork(ctx, provider)
		if err != nil {
			return err
		}
		defer a.closed("passive side", child)
		to = line
	}
	if dev == nil {
		cfg, err := a.tlsConfig()
		if err != nil {
			return err
		}
		if dev, err = providers.Open(provider, providers.Options{TLSClient: cfg}); err != nil {
			return fmt.Errorf("--provider: %w", err)
		}
	}
	defer a.closed("device", dev.Close)
	dctx, cancel := context.WithTimeout(ctx, a.timeout)
	p, err := perfDial(dctx, dev, to)
	cancel()
	if err != nil {
		return err
	}
	defer a.closed("connection", p.close)

	var results []perfResult
	for _, c := range cases {
		r, err := p.measure(ctx, c, a.timeout)
		if err != nil {
			return fmt.Errorf("%v of %d bytes: %w", c.op, c.bytes, err)
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

// perfListen lends perfRegion bytes to whoever connects and knows their key. It
// returns what the active side needs.
func perfListen(dev *rdma.Device, provider, addr string) (to string, stop func() error, err error) {
	var undo []func() error
	stop = func() error {
		var errs []error
		for i := len(undo) - 1; i >= 0; i-- {
			errs = append(errs, undo[i]())
		}
		return errors.Join(errs...)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, stop())
		}
	}()
	undo = append(undo, dev.Close)
	m, err := dev.Alloc(perfRegion, rdma.AllocOptions{Name: "kvctl-perf", Shared: true})
	if err != nil {
		return "", nil, err
	}
	undo = append(undo, m.Free)
	pd, err := dev.AllocPD()
	if err != nil {
		return "", nil, err
	}
	undo = append(undo, pd.Dealloc)
	const rights = rdma.AccessRemoteRead | rdma.AccessRemoteWrite | rdma.AccessRemoteAtomic
	mr, err := pd.RegMR(m, 0, perfRegion, rights)
	if err != nil {
		return "", nil, err
	}
	undo = append(undo, mr.Deregister)
	if addr == "" {
		addr = map[string]string{"tcp": "127.0.0.1:0", "shm": fmt.Sprintf("@kvctl-perf-%d", os.Getpid())}[provider]
		addr = cmp.Or(addr, "perf")
	}
	l, err := dev.Listen(addr, rdma.ListenOptions{Accept: func(r rdma.ConnRequest) (*rdma.PD, rdma.Access, error) {
		if string(r.Private) != perfPrivate {
			return nil, 0, errors.New("not kvctl perf of this version")
		}
		return pd, rights, nil
	}})
	if err != nil {
		return "", nil, err
	}
	undo = append(undo, l.Close)
	return fmt.Sprintf("%s,%s,%#x,%#x", provider, l.Addr(), mr.RKey(), mr.Base()), stop, nil
}

func (a *app) perfServe(ctx context.Context, provider, addr string) error {
	cfg, err := a.tlsConfig()
	if err != nil {
		return err
	}
	if provider == "tcp" && addr != "" && cfg == nil && !a.insecure && !isLoopback(addr) {
		return usagef("--listen %s is not a loopback address: want TLS flags, or --insecure", addr)
	}
	dev, err := providers.Open(provider, providers.Options{TLSServer: cfg, TLSClient: cfg})
	if err != nil {
		return fmt.Errorf("--provider: %w", err)
	}
	to, stop, err := perfListen(dev, provider, addr)
	if err != nil {
		return err
	}
	defer a.closed("passive side", stop)
	fmt.Fprintln(a.stdout, to)
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
func (a *app) perfFork(ctx context.Context, provider string) (stop func() error, to string, err error) {
	self, err := a.self()
	if err != nil {
		return nil, "", err
	}
	args := append(self[1:], "perf", "--server", "--provider", provider)
	for _, f := range [][2]string{{"--tls-ca", a.tlsCA}, {"--tls-cert", a.tlsCert}, {"--tls-key", a.tlsKey}} {
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
	mem        *rdma.Memory
	pd         *rdma.PD
	mr         *rdma.MR
	cq         *rdma.CQ
	qp         *rdma.QP
	rkey, base uint64
	wrs        []rdma.WR
	wcs        []rdma.WC
}

// perfBuffer holds two chains of the longest kind.
const perfBuffer = 2 * perfRegion

func perfDial(ctx context.Context, dev *rdma.Device, to string) (_ *perfConn, err error) {
	f := strings.Split(to, ",")
	if len(f) != 4 || f[0] != dev.Name() {
		return nil, usagef("--connect %q: want provider,address,rkey,base of a passive side", to)
	}
	p := &perfConn{dev: dev, wcs: make([]rdma.WC, 16)}
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
	if p.qp, err = dev.Dial(ctx, p.pd, p.cq, f[1], []byte(perfPrivate)); err != nil {
		return nil, err
	}
	return p, nil
}

func (p *perfConn) close() error {
	var errs []error
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

// post rings one doorbell for n verbs; only the last is signaled. half chooses
// the half of the buffer, so that two chains can be under way.
func (p *perfConn) post(c perfCase, n, half int) error {
	p.wrs = p.wrs[:0]
	for i := range n {
		off := half*perfRegion + i*((c.bytes+63)&^63)%perfRegion
		if off+c.bytes > (half+1)*perfRegion {
			off = half * perfRegion
		}
		w := rdma.WR{ID: uint64(half), Op: c.op, Local: p.mr.Bytes()[off : off+c.bytes : off+c.bytes], LKey: p.mr.LKey(),
			RemoteAddr: p.base + uint64(off-half*perfRegion), RKey: p.rkey, Swap: 1}
		if c.op.IsAtomic() {
			w.RemoteAddr = p.base
		}
		if i == n-1 {
			w.Flags = rdma.Signaled
		}
		p.wrs = append(p.wrs, w)
	}
	_, err := p.qp.PostSend(p.wrs)
	return err
}

// wait takes one completion.
func (p *perfConn) wait(ctx context.Context, limit *time.Timer) error {
	for {
		n := p.cq.Poll(p.wcs[:1])
		if n == 1 {
			if p.wcs[0].Status != driver.Success {
				return &rdma.WCError{WC: p.wcs[0]}
			}
			return nil
		}
		select {
		case <-p.cq.Ready():
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-limit.C:
			return fmt.Errorf("no completion: %w", context.DeadlineExceeded)
		}
	}
}

// minBandwidthTime is how long bandwidth is measured at least; the iterations
// asked for may be over much sooner.
const minBandwidthTime = 100 * time.Millisecond

// measure runs one case; limit is for a single wait.
func (p *perfConn) measure(ctx context.Context, c perfCase, limit time.Duration) (perfResult, error) {
	t := time.NewTimer(limit)
	defer t.Stop()
	r := perfResult{Verb: c.op.String(), Bytes: c.bytes, Iterations: c.iters, Depth: c.depth}
	h := hdrhistogram.New(1, int64(time.Minute), 3)
	for i := range c.iters + c.iters/10 {
		t.Reset(limit)
		begin := time.Now()
		if err := p.post(c, 1, 0); err != nil {
			return r, err
		}
		if err := p.wait(ctx, t); err != nil {
			return r, err
		}
		if i >= c.iters/10 { // behind the warm-up
			_ = h.RecordValue(int64(time.Since(begin)))
		}
	}
	r.MinNanos, r.MedianNanos, r.AvgNanos, r.P99Nanos = h.Min(), h.ValueAtQuantile(50), h.Mean(), h.ValueAtQuantile(99)

	// Two chains are under way, so that the wire does not idle between doorbells.
	begin, posted, done := time.Now(), 0, 0
	var chain [2]int
	for half := 0; posted == 0 || done < posted; half ^= 1 {
		t.Reset(limit)
		if n := chain[half]; n > 0 {
			if err := p.wait(ctx, t); err != nil {
				return r, err
			}
			done += n
			chain[half] = 0
		}
		if posted < c.iters || time.Since(begin) < minBandwidthTime {
			if err := p.post(c, c.depth, half); err != nil {
				return r, err
			}
			posted += c.depth
			chain[half] = c.depth
		}
	}
	sec := time.Since(begin).Seconds()
	r.VerbsPerSec = float64(done) / sec
	r.MiBPerSec = r.VerbsPerSec * float64(c.bytes) / (1 << 20)
	return r, nil
}
