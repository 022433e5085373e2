package measure

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/doctor"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/units"
	"github.com/kvd-project/kvd/internal/verbperf"
	"github.com/kvd-project/kvd/internal/webget"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/verbs"
)

// doctorPort is where kvctl doctor --serve listens, and --against asks.
const doctorPort = "7499"

// endPath is where it tells of itself.
const endPath = "/end"

// maxEnds bounds the passive sides that are taken from the other end: one of each provider.
const maxEnds = 2

// local is this machine for doctor.
func (a *commands) local() doctor.System { return doctor.Local(verbs.Options{Device: a.RDMADevice}) }

// end is what this machine tells the other one.
func (a *commands) end() doctor.End {
	name, _ := os.Hostname()
	e, err := doctor.LocalEnd(a.local(), name)
	if err != nil {
		a.Say("kvctl doctor: %s", ctl.OneLine(err.Error()))
	}
	return e
}

// doctorServe is the second end of --against, until ctx ends.
func (a *commands) doctorServe(ctx context.Context, listen string) error {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return ctl.Usagef("--listen %q: want HOST:PORT", listen)
	}
	if a.TLSCA == "" && !a.Insecure && !ctl.IsLoopback(listen) {
		return ctl.Usagef("--listen %s is not a loopback address: want TLS flags, or --insecure", listen)
	}
	if a.TLSCA != "" && a.TLSCert == "" {
		return ctl.Usagef("--serve with --tls-ca: want --tls-cert and --tls-key as well")
	}
	cfg, err := a.TLSConfig()
	if err != nil {
		return err
	}
	var to []string
	for _, p := range []string{"tcp", "verbs"} {
		if a.Provider != "" && a.Provider != p {
			continue
		}
		s, err := a.passiveEnd(p, net.JoinHostPort(host, "0"))
		if err != nil && (p == "tcp" || a.Provider == p) {
			return fmt.Errorf("%s: %w", p, err)
		}
		if err != nil {
			a.Say("kvctl doctor --serve: without verbs: %s", ctl.OneLine(err.Error()))
			continue
		}
		defer a.Closed("passive side", s.Close)
		to = append(to, s.To())
	}
	door, err := netsrv.NewDoor(netsrv.Limits{MaxConns: 64, Replace: true, Light: true})
	if err != nil {
		return err
	}
	lis, err := net.Listen("tcp", net.JoinHostPort(host, port))
	if err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	addr := lis.Addr().String()
	lis = door.Listen(lis)
	if cfg != nil {
		lis = tls.NewListener(lis, cfg)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+endPath, func(w http.ResponseWriter, _ *http.Request) {
		e := a.end()
		e.To = to
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(e)
	})
	srv := &http.Server{Handler: mux, ReadTimeout: a.Timeout, WriteTimeout: a.Timeout, MaxHeaderBytes: 16 << 10}
	defer context.AfterFunc(ctx, func() { _ = srv.Close() })()
	fmt.Fprintf(a.Stdout, "ready: kvctl doctor --against %s\n", addr)
	if err := a.Flush(); err != nil {
		return err
	}
	if err := srv.Serve(lis); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func (a *commands) passiveEnd(provider, addr string) (*verbperf.Passive, error) {
	dev, err := a.perfOpen(provider)
	if err != nil {
		return nil, err
	}
	s, err := verbperf.Listen(dev, addr)
	if err != nil {
		return nil, err
	}
	s.Limit, s.Failed = a.Timeout, func(err error) { a.Say("kvctl doctor --serve: %s", ctl.OneLine(err.Error())) }
	return s, nil
}

// Measured is what one verb of one provider did.
type Measured struct {
	Provider string `json:"provider"`
	verbperf.Result
}

// against measures the way to a machine on which kvctl doctor --serve runs.
func (a *commands) against(ctx context.Context, target string) (findings []doctor.Finding, results []Measured,
	err error) {
	host, port, err := net.SplitHostPort(target)
	if err != nil {
		host, port = strings.Trim(target, "[]"), doctorPort
	}
	addr := net.JoinHostPort(host, port)
	if host == "" {
		return nil, nil, ctl.Usagef("--against %q: want HOST or HOST:PORT", target)
	}
	if a.TLSCA == "" && !a.Insecure && !ctl.IsLoopback(addr) {
		return nil, nil, ctl.Usagef("--against %s is not a loopback address: want TLS flags, or --insecure", target)
	}
	if _, err := a.TLSConfig(); err != nil {
		return nil, nil, err // it says nothing of the other end
	}
	group := "against " + addr
	add := func(l doctor.Level, check, found, advice string) {
		findings = append(findings, doctor.Finding{Group: group, Check: check, Level: l, Found: ctl.OneLine(found),
			Advice: advice})
	}
	m := doctor.Meeting{Before: [2]doctor.End{0: a.end()}}
	if m.Before[1], err = a.askEnd(ctx, addr); err == nil {
		m.Addrs, err = addrsTo(addr)
	}
	if err != nil {
		add(doctor.Fail, "reached", err.Error(), "there: kvctl doctor --serve --listen HOST:"+doctorPort+
			", with TLS flags or --insecure, and a firewall that lets this machine in")
		return findings, nil, nil
	}
	add(doctor.OK, "reached", m.Before[1].Host, "")
	tried := 0
	for _, to := range m.Before[1].To {
		f := strings.Split(to, ",")
		if len(f) != 4 || f[0] != "tcp" && f[0] != "verbs" || a.Provider != "" && a.Provider != f[0] ||
			tried == maxEnds {
			continue
		}
		_, p, err := net.SplitHostPort(f[1])
		if _, bad := strconv.ParseUint(p, 10, 16); err != nil || bad != nil {
			continue
		}
		tried++
		f[1] = net.JoinHostPort(host, p) // whoever answers chooses the port alone
		rs, err := a.measureEnd(ctx, f[0], strings.Join(f, ","), add)
		for _, r := range rs {
			results = append(results, r)
			rate := fmt.Sprintf("%.1f MiB/s", r.MiBPerSec)
			if r.Bytes <= 8 {
				rate = fmt.Sprintf("%.0f a second", r.VerbsPerSec)
			}
			add(doctor.OK, r.Provider+" "+r.Verb, fmt.Sprintf("%s: median %.1f µs, p99 %.1f µs, %s",
				units.Bytes(r.Bytes), float64(r.MedianNanos)/1e3, float64(r.P99Nanos)/1e3, rate), "")
		}
		if err != nil {
			a.notMeasured(f[0], err, add)
		}
	}
	if tried == 0 {
		add(doctor.Fail, "providers", "the other end serves none that is wanted here",
			"there: kvctl doctor --serve with the same --provider")
	}
	m.After[0] = a.end()
	if m.After[1], err = a.askEnd(ctx, addr); err != nil {
		add(doctor.Fail, "reached", "not any more: "+err.Error(), "look at what became of kvctl doctor --serve there")
		return findings, results, nil
	}
	return append(findings, m.Compare(group)...), results, nil
}

// notMeasured says why a provider was not.
func (a *commands) notMeasured(provider string, err error, add func(doctor.Level, string, string, string)) {
	switch {
	case a.Provider == provider || provider == "tcp":
		add(doctor.Fail, provider, err.Error(), "look for a firewall: the passive side listens at ports that the "+
			"kernel chooses, and connects back for a ping-pong")
	default:
		add(doctor.Warn, provider, "the other end serves it; here: "+err.Error(), "see above what is in the way")
	}
}

// askEnd asks what the other end tells of itself.
func (a *commands) askEnd(ctx context.Context, addr string) (e doctor.End, err error) {
	cfg, err := a.TLSConfig()
	if err != nil {
		return e, err
	}
	u := &url.URL{Scheme: "http", Host: addr, Path: endPath}
	if cfg != nil {
		u.Scheme = "https"
	}
	ctx, cancel := context.WithTimeout(ctx, a.Timeout)
	defer cancel()
	status, page, err := webget.Get(ctx, u, cfg, doctor.MaxEndBytes)
	if err != nil {
		return e, err
	}
	if status != http.StatusOK {
		return e, fmt.Errorf("%s: status %d, want what kvctl doctor --serve says", addr, status)
	}
	return doctor.ParseEnd(page)
}

// addrsTo are the addresses that this machine and the other one would talk by.
func addrsTo(addr string) (out [2]netip.Addr, err error) {
	c, err := net.Dial("udp", addr) // sends nothing
	if err != nil {
		return out, err
	}
	defer c.Close()
	for i, a := range []net.Addr{c.LocalAddr(), c.RemoteAddr()} {
		p, err := netip.ParseAddrPort(a.String())
		if err != nil {
			return out, err
		}
		out[i] = p.Addr().WithZone("")
	}
	return out, nil
}

// EndCases are what is measured of each provider.
var EndCases = []verbperf.Case{
	{Op: rdma.OpWrite, PingPong: true, Bytes: 8, Iters: 50, Depth: 1},
	{Op: rdma.OpRead, Bytes: 64 << 10, Iters: 200, Depth: 16},
	{Op: rdma.OpWrite, Bytes: 64 << 10, Iters: 200, Depth: 16},
	{Op: rdma.OpCmpAndSwp, Bytes: 8, Iters: 500, Depth: 16},
	{Op: rdma.OpFetchAdd, Bytes: 8, Iters: 500, Depth: 16},
}

// measureEnd measures a provider, and gives what it has if a verb fails.
func (a *commands) measureEnd(ctx context.Context, provider, to string, add func(doctor.Level, string, string, string),
) (rs []Measured, err error) {
	dev, err := a.perfOpen(provider)
	if err != nil {
		return nil, err
	}
	defer a.Closed("device", dev.Close)
	dctx, cancel := context.WithTimeout(ctx, a.Timeout)
	p, err := verbperf.Dial(dctx, dev, to)
	cancel()
	if err != nil {
		return nil, err
	}
	defer a.Closed("connection", p.Close)
	cases := slices.Clone(EndCases)
	if p.Home, err = a.perfHome(provider, to); err != nil {
		add(doctor.Note, provider+" "+cases[0].String(), "not measured: "+err.Error(), "")
		cases = cases[1:]
	}
	for _, c := range cases {
		r, err := p.Measure(ctx, c, min(a.Timeout, 10*time.Second))
		if err != nil {
			return rs, fmt.Errorf("%v of %d bytes: %w", c, c.Bytes, err)
		}
		rs = append(rs, Measured{provider, r})
	}
	return rs, nil
}

// doctorListen is the address that --serve takes without --listen.
func doctorListen(flag string) string { return cmp.Or(flag, "127.0.0.1:"+doctorPort) }
