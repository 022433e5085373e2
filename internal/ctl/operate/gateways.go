package operate

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/hostid"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/peers/peerspb"
	"github.com/kvd-project/kvd/internal/units"
	"github.com/kvd-project/kvd/internal/wrongport"
)

const (
	// maxGatewayReply bounds a reply; a slow log has 4 MiB.
	maxGatewayReply = 16 << 20
	// gatewaysTogether is how many gateways are asked at a time.
	gatewaysTogether = 32
)

func (a *commands) gatewaysCommand() *cobra.Command {
	interval := time.Second
	c := &cobra.Command{
		Use:   "gateways",
		Short: "List gateways; their clients and slow commands; end a client's connection",
		Long: "List the gateways of the store, as the directory knows them. Shown is where other gateways\n" +
			"and operators call them (listen-peers), where clients connect, and what these do.\n" +
			"Commands/s is of --interval. Hits are the part of lookups that found their key. Slow are\n" +
			"the commands that have been in the slow log, since the gateway's start.\n\n" +
			"kvctl asks each gateway itself. A gateway with listen-peers: off is not listed, and one\n" +
			"that listens on loopback answers on its own machine alone. With TLS operators alone may ask.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if interval < 0 {
				return ctl.Usagef("--interval %v: want >= 0", interval)
			}
			return a.WithBackend(func(b ctl.Backend) error { return a.listGateways(cmd.Context(), b, interval) })
		},
	}
	c.Flags().DurationVar(&interval, "interval", interval, "time over which commands are counted; 0: they are not")
	count := uint32(10)
	slow := &cobra.Command{
		Use:   "slowlog GATEWAY",
		Short: "Show a gateway's slow log, the newest command first",
		Long: "Show the commands that took long at a gateway, as SLOWLOG GET does: arguments are cut, and\n" +
			"passwords left out. Keys and values are shown, which are somebody's data.",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeGateway(),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.onGateway(cmd.Context(), args[0], func(ctx context.Context, g peerspb.GatewaysClient) error {
				return a.printSlowLog(ctx, g, count)
			})
		},
	}
	slow.Flags().Uint32VarP(&count, "last", "n", count, "how many to show, the latest; 0: all that are kept")
	c.AddCommand(slow, &cobra.Command{
		Use:   "clients GATEWAY",
		Short: "List the connections to a gateway",
		Long: "List the connections of Redis's protocol to a gateway, as CLIENT LIST does. Flags are\n" +
			"Redis's: N none, O monitors, P subscribed, x in a transaction, b blocked, t tracks keys.\n" +
			"GATEWAY is an address of kvctl gateways, or the name there if it is the only one of it.",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeGateway(),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.onGateway(cmd.Context(), args[0], a.printClients)
		},
	}, ctl.Changes(&cobra.Command{
		Use:   "kill GATEWAY ID",
		Short: "End a client's connection to a gateway",
		Long: "End a connection, by its number in kvctl gateways clients, as CLIENT KILL ID does. Its\n" +
			"command under way may have happened, and most clients connect again. The gateway's log says who did it.",
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: a.completeGateway(),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := strconv.ParseInt(args[1], 10, 64)
			if err != nil || id < 1 {
				return ctl.Usagef("ID %q: want a number that kvctl gateways clients shows", args[1])
			}
			return a.onGateway(cmd.Context(), args[0], func(ctx context.Context, g peerspb.GatewaysClient) error {
				return a.killClient(ctx, g, args[0], id)
			})
		},
	}))
	return c
}

// gatewayName is the last part of a gateway's identity; empty: it has none.
func gatewayName(g *dirpb.GatewayInfo) string {
	return g.GetIdentity()[strings.LastIndexByte(g.GetIdentity(), '/')+1:]
}

func (a *commands) completeGateway() cobra.CompletionFunc {
	return a.Complete(func(st *dirpb.StatusReply) []string {
		return ctl.MapTo(st.GetGateways(), (*dirpb.GatewayInfo).GetAddr)
	})
}

// findGateway finds a gateway by its address, or by its name. Of several that have the same loopback address it is the
// one of this machine.
func findGateway(st *dirpb.StatusReply, name string) (*dirpb.GatewayInfo, error) {
	var found []*dirpb.GatewayInfo
	for _, g := range st.GetGateways() {
		if g.GetAddr() == name || gatewayName(g) == name {
			found = append(found, g)
		}
	}
	if here := slices.DeleteFunc(slices.Clone(found), func(g *dirpb.GatewayInfo) bool {
		return notReachable(g) != nil
	}); len(here) > 0 {
		found = here
	}
	switch len(found) {
	case 0:
		return nil, ctl.ExitWith(ctl.ExitNo, fmt.Errorf("unknown gateway %q (kvctl gateways lists them)", name))
	case 1:
		return found[0], nil
	}
	return nil, ctl.Usagef("%q is the name of %d gateways: want an address, such as %s", name, len(found),
		found[0].GetAddr())
}

// notReachable says why a gateway's address means nothing on this machine.
func notReachable(g *dirpb.GatewayInfo) error {
	if ctl.IsLoopback(g.GetAddr()) && !hostid.Same(g.GetHostId(), hostid.ID()) {
		return errors.New("it listens on its own machine only: run kvctl there, or set its listen-peers")
	}
	return nil
}

// callGateway calls a gateway where other gateways do. The caller closes the connection.
func (a *commands) callGateway(g *dirpb.GatewayInfo) (*grpc.ClientConn, error) {
	if err := notReachable(g); err != nil {
		return nil, err
	}
	conf, err := a.TLSConfig()
	if err != nil {
		return nil, err
	}
	creds := insecure.NewCredentials()
	switch {
	case conf != nil:
		host, _, err := net.SplitHostPort(g.GetAddr())
		if err != nil {
			return nil, err
		}
		if conf, err = certs.ForHost(a.Mapping.Called(conf, identity.Gateway), host); err != nil {
			return nil, err
		}
		creds = credentials.NewTLS(conf)
	case !a.Insecure && !ctl.IsLoopback(g.GetAddr()):
		return nil, ctl.Usagef("it is not on this machine: want --tls-ca, or --insecure to send everything in clear")
	}
	return grpc.NewClient("passthrough:///"+g.GetAddr(),
		grpc.WithTransportCredentials(wrongport.Creds(creds, "a gateway's listen-peers", nil)), grpc.WithNoProxy(),
		grpc.WithDisableServiceConfig(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxGatewayReply)))
}

// onGateway calls a gateway by its name.
func (a *commands) onGateway(ctx context.Context, name string, f func(context.Context,
	peerspb.GatewaysClient) error) error {
	return a.WithBackend(func(b ctl.Backend) error {
		st, err := ctl.ClusterStatus(ctx, b)
		if err != nil {
			return err
		}
		g, err := findGateway(st, name)
		if err != nil {
			return err
		}
		conn, err := a.callGateway(g)
		if err != nil {
			return fmt.Errorf("gateway %s: %w", name, err)
		}
		defer a.Closed("connection", conn.Close)
		ctx, cancel := context.WithTimeout(ctx, a.Timeout)
		defer cancel()
		if err := f(ctx, peerspb.NewGatewaysClient(conn)); err != nil {
			return fmt.Errorf("gateway %s: %w", name, err)
		}
		return nil
	})
}

// gatewayLine is a gateway as kvctl shows it. Numbers are nil if they are not known.
type gatewayLine struct {
	Addr       string   `json:"addr"`
	Name       string   `json:"name,omitempty"`
	Identity   string   `json:"identity,omitempty"`
	Namespaces []string `json:"namespaces"`
	Error      string   `json:"error,omitempty"` // why it did not answer
	*gatewayNumbers
}

// gatewayNumbers are what a gateway tells of itself.
type gatewayNumbers struct {
	Version  string   `json:"version"`
	Seconds  float64  `json:"uptime_seconds"`
	Listen   []string `json:"listen"`
	Clients  uint32   `json:"clients"`
	Limit    uint32   `json:"max_clients"`
	Blocked  uint32   `json:"blocked"`
	Monitors uint32   `json:"monitors"`
	Commands uint64   `json:"commands"`
	Rate     *float64 `json:"commands_per_second"`
	Hits     uint64   `json:"hits"`
	Misses   uint64   `json:"misses"`
	HitRatio *float64 `json:"hit_ratio"`
	Memory   uint64   `json:"memory_bytes"`
	Buffers  uint64   `json:"buffer_bytes"`
	Slow     uint64   `json:"slow_commands"`
	Paused   string   `json:"paused,omitempty"`
}

// numbersOf puts together what a gateway has told; before is what it told some time ago, if it did.
func numbersOf(before, d *peerspb.DescribeReply) *gatewayNumbers {
	n := &gatewayNumbers{Version: d.GetVersion(), Seconds: float64(d.GetUptimeMillis()) / 1000, Listen: d.GetListen(),
		Clients: d.GetClients(), Limit: d.GetMaxClients(),
		Blocked: d.GetBlocked(), Monitors: d.GetMonitors(), Commands: d.GetCommands(), Hits: d.GetHits(),
		Misses: d.GetMisses(), Memory: d.GetMemoryBytes(),
		Buffers: d.GetBufferBytes(), Slow: d.GetSlowCommands(), Paused: d.GetPaused()}
	// A gateway that was started anew counts from 0.
	if ms := d.GetUptimeMillis() - before.GetUptimeMillis(); before != nil &&
		d.GetUptimeMillis() > before.GetUptimeMillis() && d.GetCommands() >= before.GetCommands() {
		rate := float64(d.GetCommands()-before.GetCommands()) * 1000 / float64(ms)
		n.Rate = &rate
	}
	if all := n.Hits + n.Misses; all > 0 {
		ratio := float64(n.Hits) / float64(all)
		n.HitRatio = &ratio
	}
	return n
}

// asked is a gateway, and what it answered.
type asked struct {
	*dirpb.GatewayInfo
	conn *grpc.ClientConn
	err  error
	was  *peerspb.DescribeReply // before, if it was asked before
	is   *peerspb.DescribeReply
}

func (a *commands) listGateways(ctx context.Context, b ctl.Backend, interval time.Duration) error {
	st, err := ctl.ClusterStatus(ctx, b)
	if err != nil {
		return err
	}
	all := ctl.MapTo(st.GetGateways(), func(g *dirpb.GatewayInfo) *asked {
		x := &asked{GatewayInfo: g}
		x.conn, x.err = a.callGateway(g)
		return x
	})
	defer func() {
		for _, x := range all {
			if x.conn != nil {
				a.Closed("connection", x.conn.Close)
			}
		}
	}()
	a.describe(ctx, all)
	if interval > 0 && slices.ContainsFunc(all, func(x *asked) bool { return x.err == nil }) {
		if !ctl.Pause(ctx, interval) {
			return ctx.Err()
		}
		a.describe(ctx, all)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return a.printGateways(all)
}

// describe asks gateways how they are, those that have answered so far.
func (a *commands) describe(ctx context.Context, all []*asked) {
	var wg sync.WaitGroup
	room := make(chan struct{}, gatewaysTogether)
	for _, x := range all {
		if x.err != nil {
			continue
		}
		room <- struct{}{}
		wg.Go(func() {
			defer func() { <-room }()
			ctx, cancel := context.WithTimeout(ctx, a.Timeout)
			defer cancel()
			x.was = x.is
			x.is, x.err = peerspb.NewGatewaysClient(x.conn).Describe(ctx, &peerspb.DescribeRequest{})
		})
	}
	wg.Wait()
}

func (a *commands) printGateways(all []*asked) error {
	lines := ctl.MapTo(all, func(x *asked) gatewayLine {
		l := gatewayLine{Addr: x.GetAddr(), Name: gatewayName(x.GatewayInfo), Identity: x.GetIdentity(),
			Namespaces: x.GetNamespaces()}
		if x.err != nil {
			l.Error = ctl.OneLine(status.Convert(x.err).Message())
		} else {
			l.gatewayNumbers = numbersOf(x.was, x.is)
		}
		return l
	})
	silent := 0
	for _, l := range lines {
		if l.Error != "" {
			silent++
		}
		if a.JSON() {
			if err := a.PrintJSON(l); err != nil {
				return err
			}
		} else if l.Error != "" {
			a.Say("kvctl gateways: %s: %s", l.Addr, l.Error)
		}
	}
	if !a.JSON() {
		a.PrintTable(ctl.Row{"Gateway", "Name", "Databases", "Listens", "Clients", "Commands/s", "Hits", "Memory",
			"Slow",
			"State"}, ctl.MapTo(lines, gatewayLine.row))
	}
	if silent > 0 {
		return ctl.ExitWith(ctl.ExitUnavailable, fmt.Errorf("%d of %d gateways did not answer", silent, len(lines)))
	}
	return nil
}

// databasesText is a gateway's list as its setting databases may have it: cache*16.
func databasesText(namespaces []string) string {
	var all []string
	for i, n := 0, 0; i < len(namespaces); i += n {
		for n = 1; i+n < len(namespaces) && namespaces[i+n] == namespaces[i]; n++ {
		}
		if name := namespaces[i]; n > 1 {
			all = append(all, fmt.Sprintf("%s*%d", name, n))
		} else {
			all = append(all, name)
		}
	}
	return strings.Join(all, ",")
}

func (l gatewayLine) row() ctl.Row {
	name, databases := cmp.Or(l.Name, "-"), databasesText(l.Namespaces)
	n := l.gatewayNumbers
	if n == nil {
		return ctl.Row{l.Addr, name, databases, "-", "-", "-", "-", "-", "-", "no answer"}
	}
	rate, hits, state := "-", "-", "up"
	if n.Rate != nil {
		rate = fmt.Sprintf("%.0f", *n.Rate)
	}
	if n.HitRatio != nil {
		hits = fmt.Sprintf("%.1f %%", 100**n.HitRatio)
	}
	if n.Paused != "" {
		state = "paused: " + n.Paused
	}
	return ctl.Row{l.Addr, name, databases, strings.Join(n.Listen, " "), n.Clients, rate, hits, units.Rounded(n.Memory),
		n.Slow,
		state}
}

func (a *commands) printClients(ctx context.Context, g peerspb.GatewaysClient) error {
	stream, err := g.ListClients(ctx, &peerspb.ListClientsRequest{})
	if err != nil {
		return err
	}
	var all []*peerspb.Client
	for {
		r, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		all = append(all, r.GetClients()...)
	}
	if a.JSON() {
		return ctl.PrintProtos(a.App, all)
	}
	seconds := func(n int64) string { return (time.Duration(n) * time.Second).String() }
	a.PrintTable(ctl.Row{"ID", "Address", "Name", "User", "DB", "Age", "Idle", "Flags", "Command", "Unread", "Memory",
		"Library"}, ctl.MapTo(all, func(c *peerspb.Client) ctl.Row {
		library := c.GetLibrary()
		if v := c.GetLibraryVersion(); v != "" {
			library += " " + v
		}
		return ctl.Row{c.GetId(), c.GetAddr(), cmp.Or(c.GetName(), "-"), c.GetUser(), c.GetDb(),
			seconds(c.GetAgeSeconds()),
			seconds(c.GetIdleSeconds()), c.GetFlags(),
			cmp.Or(c.GetCommand(), "-"), units.Rounded(c.GetOutputBytes()), units.Rounded(c.GetMemoryBytes()),
			cmp.Or(library, "-")}
	}))
	return nil
}

// shellWord is an argument such that its end is to be seen.
func shellWord(b []byte) string {
	if s := string(b); s == "" || strings.Contains(s, " ") {
		return strconv.Quote(s)
	}
	return ctl.Printable(b)
}

// slowLine is a command of a slow log for scripts. Arguments that are no text are all in base64.
type slowLine struct {
	ID     int64    `json:"id"`
	Time   string   `json:"time"`
	Micros int64    `json:"took_micros"`
	Args   []string `json:"args,omitempty"`
	Base64 []string `json:"args_base64,omitempty"`
	Addr   string   `json:"client_addr"`
	Name   string   `json:"client_name,omitempty"`
}

func (a *commands) printSlowLog(ctx context.Context, g peerspb.GatewaysClient, count uint32) error {
	r, err := g.SlowLog(ctx, &peerspb.SlowLogRequest{Count: count})
	if err != nil {
		return err
	}
	at := func(s *peerspb.SlowCommand) string { return ctl.When(time.UnixMicro(s.GetUnixMicros())) }
	if !a.JSON() {
		a.PrintTable(ctl.Row{"ID", "Time", "Took", "Client", "Name", "Command"},
			ctl.MapTo(r.GetCommands(), func(s *peerspb.SlowCommand) ctl.Row {
				return ctl.Row{s.GetId(), at(s), (time.Duration(s.GetTookMicros()) * time.Microsecond).String(),
					s.GetAddr(),
					cmp.Or(s.GetName(), "-"),
					strings.Join(ctl.MapTo(s.GetArgs(), shellWord), " ")}
			}))
		return nil
	}
	for _, s := range r.GetCommands() {
		l := slowLine{ID: s.GetId(), Time: at(s), Micros: s.GetTookMicros(), Addr: s.GetAddr(), Name: s.GetName()}
		if slices.ContainsFunc(s.GetArgs(), func(b []byte) bool { return !utf8.Valid(b) }) {
			l.Base64 = ctl.MapTo(s.GetArgs(), base64.StdEncoding.EncodeToString)
		} else {
			l.Args = ctl.MapTo(s.GetArgs(), func(b []byte) string { return string(b) })
		}
		if err := a.PrintJSON(l); err != nil {
			return err
		}
	}
	return nil
}

func (a *commands) killClient(ctx context.Context, g peerspb.GatewaysClient, name string, id int64) error {
	if _, err := g.Describe(ctx, &peerspb.DescribeRequest{}); err != nil {
		return err // nothing was asked for
	}
	r, err := g.KillClient(ctx, &peerspb.KillClientRequest{Id: id})
	switch code := status.Code(err); {
	case code == codes.Unavailable || code == codes.DeadlineExceeded || code == codes.Canceled:
		return ctl.ExitWith(ctl.ExitUnknown, err)
	case err != nil:
		return err
	case !r.GetFound():
		return ctl.ExitWith(ctl.ExitNo, fmt.Errorf("no client %d (kvctl gateways clients %s lists them)", id, name))
	case a.JSON():
		return a.PrintJSON(map[string]any{"gateway": name, "id": id, "addr": r.GetAddr()})
	}
	a.PrintTable(ctl.Row{"Gateway", "ID", "Ended"}, []ctl.Row{{name, id, r.GetAddr()}})
	return nil
}
