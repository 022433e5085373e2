package measure

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/internal/units"
	"github.com/kvd-project/kvd/internal/verbperf"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/verbs"
)

type perfOptions struct {
	verbs         []string
	sizes         []string
	iters         int
	depth         int
	server        bool
	listen        string
	connect       string
	passiveDevice string
	register      string
}

func (a *commands) perfCommand() *cobra.Command {
	var o perfOptions
	c := &cobra.Command{
		Use:   "perf",
		Short: "Measure latency and bandwidth of each verb, without the store",
		Long: "Measure READ, WRITE, CMP_AND_SWP and FETCH_ADD of one provider between two\n" +
			"processes of this machine, as perftest's ib_read_lat and ib_read_bw do. Latency is\n" +
			"with one verb at a time, bandwidth with chains of --depth. No store is needed.\n\n" +
			"Latency is the time from one post to the next. The completion is waited for by\n" +
			"polling, as perftest does. After " + verbperf.Spin.String() + " without one (over tcp at once)\n" +
			"the wait sleeps until there is a completion.\n\n" +
			"--verbs PINGPONG measures WRITE as ib_write_lat does (WRITE_PINGPONG): half the\ntime of a WRITE there " +
			"and one back, each seen by polling memory. It keeps a\nprocessor busy on either side, and the passive " +
			"side connects back.\n\n" +
			"--register measures how long memory takes to register, in seconds a GiB, by kind of\npage and by the " +
			"threads that take the pages beforehand. A memory node registers each\nregion that it lends.\n\n" +
			"Between two machines: kvctl perf --server --provider tcp --listen HOST:PORT\nprints what to pass to " +
			"kvctl perf --connect on the other.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			provider := cmp.Or(a.Provider, "shm")
			switch {
			case o.passiveDevice != "" && (o.server || o.connect != ""):
				return ctl.Usagef(
					"--passive-device: is for the passive side that this command starts; give the other " +
						"--rdma-device")
			case o.passiveDevice != "" && provider != "verbs":
				return ctl.Usagef("--passive-device: provider %s has no adapters", provider)
			case o.register != "" && (o.server || o.connect != ""):
				return ctl.Usagef("--register: is for this process alone, without --server and --connect")
			case o.register != "":
				return a.perfRegister(cmd.Context(), provider, o.register)
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
	f.StringSliceVar(&o.verbs, "verbs", []string{"READ", "WRITE", "CMP_AND_SWP", "FETCH_ADD"},
		"verbs to measure; also PINGPONG")
	f.StringSliceVar(&o.sizes, "sizes", []string{"8", "64", "256", "4KiB", "64KiB", "1MiB"},
		"message sizes of READ and WRITE")
	f.IntVar(&o.iters, "iters", 5000, "verbs a measurement")
	f.IntVar(&o.depth, "depth", 32, "verbs behind one doorbell when measuring bandwidth")
	f.BoolVar(&o.server, "server", false, "be the passive side until stdin ends")
	f.StringVar(&o.listen, "listen", "", "passive side's address (default: a private one)")
	f.StringVar(&o.connect, "connect", "", "what a passive side printed")
	f.StringVar(&o.passiveDevice, "passive-device", "", "RDMA adapter of the passive side that is started (default: "+
		"as --rdma-device)")
	f.StringVar(&o.register, "register", "", "measure how long memory of this size takes to register instead")
	f.Lookup("register").NoOptDefVal = "1GiB"
	return c
}

// perfRegister measures what registering memory takes.
func (a *commands) perfRegister(ctx context.Context, provider, size string) error {
	n, err := ctl.ParseBytes(size)
	if err != nil || n < 2<<20 || n > 1<<40 || n%(2<<20) != 0 {
		return ctl.Usagef("--register=%s: want 2MiB to 1TiB, in steps of 2MiB", size)
	}
	dev, err := a.perfOpen(provider)
	if err != nil {
		return err
	}
	defer a.Closed("device", dev.Close)
	rs, err := verbperf.Registers(ctx, dev, int64(n))
	if err != nil {
		return err
	}
	if a.JSON() {
		return a.PrintJSON(map[string]any{"provider": provider, "registrations": rs})
	}
	fmt.Fprintf(a.Stdout, "provider %s, %s\n", provider, units.Bytes(n))
	var rows []ctl.Row
	var missing []string
	for _, r := range rs {
		if r.Missing != "" {
			missing = append(missing, fmt.Sprintf("%s pages: %s", r.Pages, ctl.OneLine(r.Missing)))
			continue
		}
		s := func(sec float64) string { return strconv.FormatFloat(sec, 'f', 4, 64) }
		rows = append(rows, ctl.Row{r.Pages, r.Threads, s(r.Alloc), s(r.Register), s(r.Alloc + r.Register),
			s(r.Deregister)})
	}
	a.PrintTable(ctl.Row{"Pages", "Threads", "Take s/GiB", "Register s/GiB", "Both s/GiB", "Deregister s/GiB"}, rows)
	for _, m := range missing {
		fmt.Fprintln(a.Stdout, m)
	}
	return nil
}

func (o *perfOptions) plan() (cases []verbperf.Case, err error) {
	if o.iters < 1 || o.iters > 100_000_000 {
		return nil, ctl.Usagef("--iters %d: want 1 to 100000000", o.iters)
	}
	if o.depth < 1 || o.depth > 64 {
		return nil, ctl.Usagef("--depth %d: want 1 to 64", o.depth)
	}
	var sizes []int
	for _, s := range o.sizes {
		n, err := ctl.ParseBytes(s)
		if err != nil || n == 0 || n > verbperf.Region {
			return nil, ctl.Usagef("--sizes %q: want 1 to %d bytes", s, verbperf.Region)
		}
		sizes = append(sizes, int(n))
	}
	for _, v := range o.verbs {
		c := verbperf.Case{Bytes: 8, Iters: o.iters, Depth: o.depth}
		switch strings.ToUpper(v) {
		case "READ":
			c.Op = rdma.OpRead
		case "WRITE":
			c.Op = rdma.OpWrite
		case "PINGPONG", "WRITE_PINGPONG":
			c.Op, c.PingPong, c.Depth = rdma.OpWrite, true, 1
		case "CAS", "CMP_AND_SWP":
			c.Op = rdma.OpCmpAndSwp
		case "FETCH_ADD":
			c.Op = rdma.OpFetchAdd
		default:
			return nil, ctl.Usagef("--verbs %q: want READ, WRITE, CMP_AND_SWP, FETCH_ADD or PINGPONG", v)
		}
		if c.Op.IsAtomic() {
			cases = append(cases, c)
			continue
		}
		for _, n := range sizes {
			if c.PingPong && n < 8 {
				return nil, ctl.Usagef("--sizes %d: PINGPONG wants at least 8 bytes, for a counter", n)
			}
			// Long messages: as many bytes, not as many messages.
			c.Bytes, c.Iters = n, min(o.iters, max(o.iters*4096/max(n, 4096), 20))
			if !c.PingPong {
				c.Depth = max(min(o.depth, verbperf.Region/n), 1)
			}
			cases = append(cases, c)
		}
	}
	return cases, nil
}

func (a *commands) perfRun(ctx context.Context, provider string, o perfOptions, cases []verbperf.Case) (err error) {
	to := o.connect
	pingpong := slices.ContainsFunc(cases, func(c verbperf.Case) bool { return c.PingPong })
	if to != "" {
		provider, _, _ = strings.Cut(to, ",")
	} else {
		child, line, err := a.perfFork(ctx, provider, o.passiveDevice)
		if err != nil {
			return err
		}
		defer a.Closed("passive side", child)
		to = line
	}
	dev, err := a.perfOpen(provider)
	if err != nil {
		return err
	}
	defer a.Closed("device", dev.Close)
	dctx, cancel := context.WithTimeout(ctx, a.Timeout)
	p, err := verbperf.Dial(dctx, dev, to)
	cancel()
	switch {
	case errors.Is(err, verbperf.ErrAddress):
		return ctl.Usagef("--connect: %w", err)
	case err != nil:
		return err
	}
	defer a.Closed("connection", p.Close)
	if pingpong {
		if p.Home, err = a.perfHome(provider, to); err != nil {
			return err
		}
	}

	var results []verbperf.Result
	for _, c := range cases {
		r, err := p.Measure(ctx, c, a.Timeout)
		if err != nil {
			return fmt.Errorf("%v of %d bytes: %w", c, c.Bytes, err)
		}
		results = append(results, r)
	}
	if a.JSON() {
		return a.PrintJSON(map[string]any{"provider": provider, "results": results})
	}
	fmt.Fprintf(a.Stdout, "provider %s\n", provider)
	us := func(ns float64) string { return strconv.FormatFloat(ns/1000, 'f', 2, 64) }
	a.PrintTable(ctl.Row{"Verb", "Bytes", "Iterations", "Min µs", "Median µs", "Avg µs", "P99 µs", "Depth", "MiB/s",
		"Verbs/s"},
		ctl.MapTo(results, func(r verbperf.Result) ctl.Row {
			return ctl.Row{r.Verb, r.Bytes, r.Iterations, us(float64(r.MinNanos)), us(float64(r.MedianNanos)),
				us(r.AvgNanos),
				us(float64(r.P99Nanos)), r.Depth, fmt.Sprintf("%.1f", r.MiBPerSec), fmt.Sprintf("%.0f", r.VerbsPerSec)}
		}))
	return nil
}

// perfOpen opens the device of either side; both connect and listen.
func (a *commands) perfOpen(provider string) (*rdma.Device, error) {
	cfg, err := a.TLSConfig()
	if err != nil {
		return nil, err
	}
	dev, err := providers.Open(provider, providers.Options{TLSServer: cfg, TLSClient: cfg, Verbs: verbs.Options{
		Device: a.RDMADevice}})
	if err != nil {
		return nil, fmt.Errorf("--provider: %w", err)
	}
	return dev, nil
}

func (a *commands) perfServe(ctx context.Context, provider, addr string) error {
	if provider != "shm" && addr != "" && a.TLSCA == "" && !a.Insecure && !ctl.IsLoopback(addr) {
		return ctl.Usagef("--listen %s is not a loopback address: want TLS flags, or --insecure", addr)
	}
	dev, err := a.perfOpen(provider)
	if err != nil {
		return err
	}
	s, err := verbperf.Listen(dev, addr)
	if err != nil {
		return err
	}
	defer a.Closed("passive side", s.Close)
	s.Limit, s.Failed = a.Timeout, func(err error) { a.Say("kvctl perf --server: %s", ctl.OneLine(err.Error())) }
	fmt.Fprintln(a.Stdout, s.To())
	if err := a.Flush(); err != nil {
		return err
	}
	// Stdin ends with the process that started this one.
	ended := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, a.Stdin)
		close(ended)
	}()
	select {
	case <-ended:
	case <-ctx.Done():
	}
	return nil
}

// perfFork starts the passive side in a process of its own.
func (a *commands) perfFork(ctx context.Context, provider, device string) (stop func() error, to string, err error) {
	self, err := a.Self()
	if err != nil {
		return nil, "", err
	}
	args := append(self[1:], "perf", "--server", "--provider", provider, "--timeout", a.Timeout.String())
	for _, f := range [][2]string{{"--rdma-device", cmp.Or(device, a.RDMADevice)}, {"--tls-ca", a.TLSCA},
		{"--tls-cert", a.TLSCert}, {"--tls-key", a.TLSKey}, {"--tls-crl", a.TLSCRL}, {"--tls-server-name", a.TLSName}} {
		if f[1] != "" {
			args = append(args, f[0], f[1])
		}
	}
	cmd := exec.CommandContext(ctx, self[0], args...)
	cmd.Stderr = a.Stderr
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

// perfHome is where the passive side that said to connects back to.
func (a *commands) perfHome(provider, to string) (string, error) {
	home, local, err := verbperf.Home(provider, strings.Split(to, ",")[1])
	switch {
	case err != nil || provider == "shm":
		return home, err
	case a.TLSCA != "" && a.TLSCert == "":
		return "", ctl.Usagef("--verbs PINGPONG: the passive side connects back, want --tls-cert and --tls-key")
	case a.TLSCA == "" && !a.Insecure && !local:
		return "", ctl.Usagef(
			"--verbs PINGPONG: the passive side connects back to %s, which is not a loopback address: "+
				"want TLS flags, or --insecure", strings.TrimSuffix(home, ":0"))
	}
	return home, nil
}
