package operate

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/overview"
	"github.com/kvd-project/kvd/internal/units"
)

// brokersTogether is how many brokers are asked at a time.
const brokersTogether = 32

func (a *commands) brokersCommand() *cobra.Command {
	interval := time.Second
	c := &cobra.Command{
		Use:   "brokers",
		Short: "List brokers, and the programs in C and Python that use them",
		Long: "List the brokers of the store, by their sessions: the directory knows these. kvctl asks each\n" +
			"broker itself, at its http-listen, which socket it has and how much it is used.\n" +
			"Operations/s is of --interval. Shared is memory of programs.\n\n" +
			"A broker whose http-listen is off is listed, and says no more. On loopback a broker\n" +
			"answers on its own machine alone. With TLS operators alone may ask.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if interval < 0 {
				return ctl.Usagef("--interval %v: want >= 0", interval)
			}
			return a.WithBackend(func(b ctl.Backend) error { return a.listBrokers(cmd.Context(), b, interval) })
		},
	}
	c.Flags().DurationVar(&interval, "interval", interval, "time over which operations are counted; 0: they are not")
	c.AddCommand(&cobra.Command{
		Use:   "programs BROKER",
		Short: "List the programs that are connected to a broker",
		Long: "List the programs that are connected to a broker, with their processes and users.\n" +
			"BROKER is a name of kvctl brokers, or the address of its page there.",
		Args: cobra.ExactArgs(1),
		ValidArgsFunction: a.Complete(func(st *dirpb.StatusReply) []string {
			return ctl.MapTo(overview.Brokers(st), (*overview.Broker).Name)
		}),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.WithBackend(func(b ctl.Backend) error { return a.listPrograms(cmd.Context(), b, args[0]) })
		},
	})
	return c
}

// BrokerNumbers are what a broker tells of itself.
type BrokerNumbers struct {
	Version    string   `json:"version"`
	Socket     string   `json:"socket"`
	Programs   uint64   `json:"programs"`
	Queues     uint64   `json:"queues"`
	Shared     uint64   `json:"shared_bytes"`
	Operations uint64   `json:"operations"`
	Rate       *float64 `json:"operations_per_second"`
	Bytes      uint64   `json:"value_bytes"`
	Refused    uint64   `json:"connections_refused"`
	Broken     uint64   `json:"protocol_errors"`
}

// BrokerLine is a broker as kvctl shows it. Numbers are nil if they are not known.
type BrokerLine struct {
	Name       string   `json:"name"`
	Identity   string   `json:"identity,omitempty"`
	Namespaces []string `json:"namespaces"`
	Page       string   `json:"page,omitempty"`
	Error      string   `json:"error,omitempty"` // why it did not answer
	*BrokerNumbers
}

var (
	metricLine  = regexp.MustCompile(`^(kvd_[a-z_]+)(?:\{(.*)\})? (\S+)$`)
	metricLabel = regexp.MustCompile(`([a-z_]+)="((?:[^"\\]|\\.)*)"`)
)

// parseBroker reads a broker's page of metrics.
func parseBroker(page []byte) (*BrokerNumbers, error) {
	n := &BrokerNumbers{}
	sums := map[string]*uint64{"kvd_broker_programs": &n.Programs, "kvd_broker_queues": &n.Queues,
		"kvd_broker_arena_bytes": &n.Shared, "kvd_broker_operations_total": &n.Operations,
		"kvd_broker_value_bytes_total": &n.Bytes, "kvd_broker_connections_refused_total": &n.Refused,
		"kvd_broker_protocol_errors_total": &n.Broken}
	role := ""
	lines := bufio.NewScanner(bytes.NewReader(page))
	for lines.Scan() {
		m := metricLine.FindStringSubmatch(lines.Text())
		if m == nil {
			continue
		}
		labels := map[string]string{}
		for _, l := range metricLabel.FindAllStringSubmatch(m[2], -1) {
			labels[l[1]] = l[2]
		}
		if m[1] == "kvd_build_info" {
			role, n.Version = labels["role"], labels["version"]
		}
		sum := sums[m[1]]
		if sum == nil {
			continue
		}
		v, err := strconv.ParseFloat(m[3], 64)
		if err != nil || !(v >= 0 && v < 1<<63) {
			return nil, fmt.Errorf("%s is %.64q, want a number", m[1], m[3])
		}
		*sum += uint64(v)
		n.Socket = cmp.Or(n.Socket, labels["socket"])
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if role != "broker" {
		return nil, fmt.Errorf("a process of the role %.64q answers, and no broker", role)
	}
	return n, nil
}

// askBroker asks a broker for a page of its http-listen.
func (a *commands) askBroker(ctx context.Context, b *overview.Broker, path string) ([]byte, error) {
	conf, err := a.TLSConfig()
	if err != nil {
		return nil, err
	}
	host, _ := os.Hostname() // empty: it is no broker's
	switch near := ctl.IsLoopback(b.Page.Host); {
	case near && b.Host != host:
		return nil, errors.New("it listens on its own machine only: run kvctl there, or set its http-listen")
	case b.Page.Scheme == "https" && conf == nil:
		return nil, ctl.Usagef("it has TLS: want --tls-ca")
	case b.Page.Scheme == "http" && !near && !a.Insecure:
		return nil, ctl.Usagef("it is not on this machine, and without TLS: want --insecure to ask it in clear")
	}
	return a.fetchPage(ctx, b.Page, path, conf)
}

// heard is a broker, and what it answered.
type heard struct {
	*overview.Broker
	err error
	was *BrokerNumbers // before, if it was asked before
	is  *BrokerNumbers // nil: it has no page
}

// measure asks brokers how they are, those that have answered so far.
func (a *commands) measure(ctx context.Context, all []*heard) {
	var wg sync.WaitGroup
	room := make(chan struct{}, brokersTogether)
	for _, x := range all {
		if x.err != nil || x.Page == nil {
			continue
		}
		room <- struct{}{}
		wg.Go(func() {
			defer func() { <-room }()
			page, err := a.askBroker(ctx, x.Broker, "/metrics")
			x.was, x.is, x.err = x.is, nil, err
			if err == nil {
				x.is, x.err = parseBroker(page)
			}
		})
	}
	wg.Wait()
}

func (a *commands) listBrokers(ctx context.Context, b ctl.Backend, interval time.Duration) error {
	st, err := ctl.ClusterStatus(ctx, b)
	if err != nil {
		return err
	}
	all := ctl.MapTo(overview.Brokers(st), func(b *overview.Broker) *heard { return &heard{Broker: b} })
	a.measure(ctx, all)
	if interval > 0 && slices.ContainsFunc(all, func(x *heard) bool { return x.is != nil }) {
		began := time.Now()
		if !ctl.Pause(ctx, interval) {
			return ctx.Err()
		}
		a.measure(ctx, all)
		seconds := time.Since(began).Seconds()
		for _, x := range all {
			// A broker that was started anew counts from 0.
			if x.was != nil && x.is != nil && x.is.Operations >= x.was.Operations {
				rate := float64(x.is.Operations-x.was.Operations) / seconds
				x.is.Rate = &rate
			}
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return a.printBrokers(all)
}

func (a *commands) printBrokers(all []*heard) error {
	silent := 0
	lines := ctl.MapTo(all, func(x *heard) BrokerLine {
		l := BrokerLine{Name: x.Name(), Identity: x.Identity, Namespaces: x.Namespaces, BrokerNumbers: x.is}
		if x.Page != nil {
			l.Page = x.Page.String()
		}
		if x.err != nil {
			l.Error = ctl.OneLine(x.err.Error())
			silent++
		}
		return l
	})
	for _, l := range lines {
		if a.JSON() {
			if err := a.PrintJSON(l); err != nil {
				return err
			}
		} else if l.Error != "" {
			a.Say("kvctl brokers: %s: %s", l.Name, l.Error)
		}
	}
	if !a.JSON() {
		a.PrintTable(ctl.Row{"Broker", "Namespaces", "Page", "Socket", "Programs", "Operations/s", "Shared", "State"},
			ctl.MapTo(lines, BrokerLine.row))
	}
	if silent > 0 {
		return ctl.ExitWith(ctl.ExitUnavailable, fmt.Errorf("%d of %d brokers did not answer", silent, len(lines)))
	}
	return nil
}

func (l BrokerLine) row() ctl.Row {
	namespaces, page := strings.Join(l.Namespaces, ","), cmp.Or(l.Page, "-")
	n := l.BrokerNumbers
	if n == nil {
		state := "no answer"
		if l.Error == "" {
			state = "http-listen is off"
		}
		return ctl.Row{l.Name, namespaces, page, "-", "-", "-", "-", state}
	}
	rate := "-"
	if n.Rate != nil {
		rate = fmt.Sprintf("%.0f", *n.Rate)
	}
	return ctl.Row{l.Name, namespaces, page, n.Socket, n.Programs, rate, units.Rounded(n.Shared), "up"}
}

// findBroker finds a broker by its name, or by the address of its page.
func findBroker(st *dirpb.StatusReply, name string) (*overview.Broker, error) {
	var found []*overview.Broker
	for _, b := range overview.Brokers(st) {
		if b.Name() == name || b.Page != nil && (b.Page.Host == name || b.Page.String() == name) {
			found = append(found, b)
		}
	}
	switch {
	case len(found) == 0:
		return nil, ctl.ExitWith(ctl.ExitNo, fmt.Errorf("unknown broker %q (kvctl brokers lists them)", name))
	case len(found) > 1:
		return nil, ctl.Usagef("%q is the name of %d brokers: want the address of a page", name, len(found))
	case found[0].Page == nil:
		return nil, ctl.ExitWith(ctl.ExitNo, fmt.Errorf("broker %s: its http-listen is off", name))
	}
	return found[0], nil
}

func (a *commands) listPrograms(ctx context.Context, b ctl.Backend, name string) error {
	st, err := ctl.ClusterStatus(ctx, b)
	if err != nil {
		return err
	}
	found, err := findBroker(st, name)
	if err != nil {
		return err
	}
	t, err := a.programsOf(ctx, found)
	if usage := (*ctl.ExitError)(nil); errors.As(err, &usage) {
		return fmt.Errorf("broker %s: %w", name, err)
	}
	if err != nil {
		return ctl.ExitWith(ctl.ExitUnavailable, fmt.Errorf("broker %s: %w", name, err))
	}
	if t.More > 0 {
		defer a.Say("kvctl brokers programs: %d more are left out", t.More)
	}
	if !a.JSON() {
		cells := func(r []string) ctl.Row { return ctl.MapTo(r, func(s string) any { return s }) }
		a.PrintTable(cells(ctl.MapTo(t.Header, func(s string) string {
			return strings.ToUpper(s[:min(1, len(s))]) + s[min(1, len(s)):]
		})), ctl.MapTo(t.Rows, cells))
		return nil
	}
	for _, r := range t.Rows {
		line := map[string]any{}
		for i, cell := range r {
			key := strings.ReplaceAll(t.Header[i], " ", "_")
			line[key] = cell
			if n, err := strconv.ParseUint(cell, 10, 64); err == nil && key != "program" && key != "namespace" {
				line[key] = n
			}
		}
		if err := a.PrintJSON(line); err != nil {
			return err
		}
	}
	return nil
}

// programsTable is a table of a broker's page.
type programsTable struct {
	Title  string     `json:"title"`
	Header []string   `json:"header"`
	Rows   [][]string `json:"rows"`
	More   int        `json:"more"` // rows that are left out
}

// programsOf asks a broker who is connected. Each row has as many cells as the header.
func (a *commands) programsOf(ctx context.Context, b *overview.Broker) (*programsTable, error) {
	text, err := a.askBroker(ctx, b, "/state.json")
	if err != nil {
		return nil, err
	}
	var page struct {
		Role   string          `json:"role"`
		Tables []programsTable `json:"tables"`
	}
	if err := json.Unmarshal(text, &page); err != nil {
		return nil, err
	}
	if page.Role != "broker" || len(page.Tables) == 0 || page.Tables[0].Title != "Programs" {
		return nil, fmt.Errorf("a process of the role %.64q answers, and shows no programs", page.Role)
	}
	t := &page.Tables[0]
	for _, r := range t.Rows {
		if len(r) != len(t.Header) {
			return nil, fmt.Errorf("a program with %d fields, want %d", len(r), len(t.Header))
		}
	}
	return t, nil
}
