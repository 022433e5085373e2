package client

import (
	"cmp"
	"os"
	"slices"
	"strings"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/verbs"
)

// Words of Path.Reason.
const (
	askedFor        = "asked-for"
	notBuilt        = "not-built"
	noAdapter       = "no-adapter"
	adapterUnusable = "adapter-unusable"
	notOffered      = "not-offered"
	dialFailed      = "dial-failed"
)

// bypass is what decides why a memory node is reached by tcp.
type bypass struct {
	offered    bool     // the memory node offers verbs
	adapters   []string // of this machine
	opened     bool     // this client has a verbs device, and may use it
	built      bool     // this program has the provider
	passedOver error    // why there is no verbs device; nil: nobody tried
	failed     error    // of the dial by verbs; nil: there was none
	node       string   // the memory node's name
}

// reason is empty if RDMA is not within reach of either end.
func (b *bypass) reason() (reason, detail string) {
	switch {
	case !b.offered && len(b.adapters) == 0 && !b.opened:
		return "", ""
	case !b.opened && b.passedOver == nil:
		return askedFor, "the settings leave no other provider"
	case !b.opened && len(b.adapters) == 0:
		return noAdapter, "this machine has no RDMA adapter, and memory node " + b.node + " has one"
	case !b.opened && !b.built:
		return notBuilt, b.passedOver.Error()
	case !b.opened:
		return adapterUnusable, "adapter " + strings.Join(b.adapters, ", ") + ": " + b.passedOver.Error()
	case b.failed != nil:
		return dialFailed, "memory node " + b.node + ": " + b.failed.Error()
	}
	return notOffered, "memory node " + b.node + " offers no RDMA"
}

// pathBy is the path of a connection by d to n; failed is why it is not by verbs, if that was tried.
func (s *sess) pathBy(d *rdma.Device, n *dirpb.Node, failed error) Path {
	p := Path{Provider: d.Name()}
	if d.Name() != "tcp" {
		return p
	}
	b := bypass{adapters: verbs.Present(), built: verbs.Built, passedOver: d.PassedOver(), failed: failed,
		node: n.GetName()}
	for _, e := range n.GetEndpoints() {
		b.offered = b.offered || e.Carrier() == "verbs"
	}
	for _, o := range s.c.o.Devices {
		b.opened = b.opened || o.Name() == "verbs" && s.c.o.Provider == ""
	}
	if s.c.o.Provider != "" {
		b.passedOver = nil
	}
	p.Reason, p.Detail = b.reason()
	return p
}

// bypassed warns of a path that is slower than it could be, once for each reason.
func (c *Client) bypassed(p Path) {
	if p.Reason == "" || p.Reason == askedFor {
		return
	}
	if _, warned := c.warned.LoadOrStore(p.Reason, true); !warned {
		c.o.Logger.Warn("tcp is used where RDMA is within reach; Options.Require, or the setting require, refuses that",
			"reason", p.Reason, "why", p.Detail)
	}
}

// pathsLocked are the paths to memory nodes of the map, by provider and reason.
func (s *sess) pathsLocked() (all []Path) {
	for id, p := range s.mu.paths {
		if s.mu.nodes[id] == nil {
			continue
		}
		i := slices.IndexFunc(all, func(x Path) bool { return x.Provider == p.Provider && x.Reason == p.Reason })
		if i < 0 {
			i, all = len(all), append(all, p)
		}
		all[i].Connections++
		all[i].Detail = min(all[i].Detail, p.Detail) // any, but always the same
	}
	slices.SortFunc(all, func(x, y Path) int {
		return cmp.Or(cmp.Compare(x.Provider, y.Provider), cmp.Compare(x.Reason, y.Reason))
	})
	return all
}

// tellPathsLocked has the directory told of them.
func (s *sess) tellPathsLocked() {
	all := s.pathsLocked()
	if len(all) == 0 {
		return
	}
	host, _ := os.Hostname() // empty: the directory shows the session without it
	m := &dirpb.ClientPaths{Host: host}
	for _, p := range all {
		m.Paths = append(m.Paths, &dirpb.ClientPath{Provider: p.Provider, Reason: p.Reason, Detail: p.Detail,
			Connections: uint32(p.Connections)})
		m.Adapter = m.Adapter || p.Provider == "verbs" || p.Reason != "" && len(verbs.Present()) > 0
	}
	s.agenda.SetPaths(m)
}
