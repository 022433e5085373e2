package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"

	"github.com/kvd-project/kvd/internal/config"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/httpd"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/metrics"
	"github.com/kvd-project/kvd/internal/overview"
	"github.com/kvd-project/kvd/memnode"
	"github.com/kvd-project/kvd/server"
)

// http serves a role's HTTP endpoints at addr, which the setting key holds; nil if they are
// off. It is not ready before the role says so. m reads the certificates of callers, if creds is not nil.
func (a *app) http(ctx context.Context, role, key, addr string, creds *tls.Config, m identity.Mapping,
	log *slog.Logger) (*httpd.Server, error) {
	if addr == config.Off {
		return nil, nil
	}
	s, err := httpd.Start(ctx, httpd.Options{Addr: addr, TLS: creds, Identities: m, Role: role, Version: versionText(),
		Logger: log})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", key, err)
	}
	if err := s.Register(metrics.TLS(a.sources), metrics.RDMA(os.DirFS("/sys/class/infiniband"))); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

var errStopping = errors.New("stopping")

// stopping makes ready say so once ctx has ended.
func stopping(ctx context.Context, ready func() error) func() error {
	return func() error {
		if ctx.Err() != nil {
			return errStopping
		}
		return ready()
	}
}

// done is a context that has ended, for questions that shall not wait.
func done() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

var errNoLeader = errors.New("no directory node is known to lead")

func directoryReady(n *server.Node) error {
	if n.Ready(done()) != nil {
		return errNoLeader
	}
	return nil
}

func memnodeReady(n *memnode.Node) error {
	s := n.Stats()
	if s.Registered {
		return nil
	}
	if s.DirectoryErr != nil {
		return fmt.Errorf("not registered with the directory: %w", s.DirectoryErr)
	}
	return memnode.ErrNotRegistered
}

func problemsTable(st *dirpb.StatusReply) httpd.Table {
	t := httpd.Table{Title: "Problems", Header: []string{"problem", "what mends it"}}
	for _, p := range overview.Problems(st) {
		t.Rows = append(t.Rows, []string{p.What, p.Mend})
	}
	return t
}

func membersTable(st *dirpb.StatusReply) httpd.Table {
	return tableOf("Directory nodes", overview.DirectoryColumns(st), st.GetDirectory())
}

func nodesTable(st *dirpb.StatusReply) httpd.Table {
	nodes := st.GetMap().GetNodes()
	// A row begins with a name that people know.
	t := tableOf("Memory nodes", overview.NodeColumns(st.GetMap()).Without("ID"), nodes)
	for i, n := range nodes {
		t.Rows[i] = append(t.Rows[i], nodeDetails(st, n)...)
	}
	return t
}

func nodeState(n *dirpb.Node) string {
	state := overview.NodeState(n)
	if state == "up" && n.GetDraining() {
		return "draining"
	}
	return state
}

// memoryTable has a row for each placement group, and one for all of a namespace. A figure that only the
// leader knows is shown as - by other directory nodes.
func memoryTable(st *dirpb.StatusReply) httpd.Table {
	all := overview.Memories(st)
	rows := slices.Concat(overview.Sums(all), all)
	slices.SortStableFunc(rows, func(a, b *overview.Memory) int { return cmp.Compare(a.Namespace, b.Namespace) })
	return tableOf("Memory", overview.MemoryColumns, rows)
}
