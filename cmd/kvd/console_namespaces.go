package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/httpd"
	"github.com/kvd-project/kvd/internal/overview"
	"github.com/kvd-project/kvd/internal/units"
)

const (
	// useWindow is the time that rates are of.
	useWindow = time.Minute
	// Keys are counted while somebody looks at the page: at most once in countPause, and for a hundredth of the time.
	countPause, countShare, countTimeout = 5 * time.Second, 100, 30 * time.Second
)

// use is what a process's clients know of a namespace.
type use struct {
	keys      uint64
	counted   bool    // keys is known
	perSecond float64 // operations, over useWindow; -1: this is the first look
	hits      float64 // the share of lookups that found their key; -1: there were none
	stats     client.Stats
}

// usage tells how the namespaces of a process's clients are used, from one look to the next.
type usage struct {
	cancel context.CancelFunc
	ctx    context.Context
	wg     sync.WaitGroup

	mu  sync.Mutex
	all []*watched
}

// watched is a namespace.
type watched struct {
	name  string
	stats func() client.Stats
	count func(context.Context) (uint64, error)

	samples  []sample // over useWindow, the oldest first
	keys     uint64
	known    bool
	counting bool
	next     time.Time // no count before it
}

type sample struct {
	at                   time.Time
	ops, lookups, absent uint64
}

// newUsage watches the clients by the names of their namespaces. close ends it, before the clients are closed.
func newUsage(names []string, clients []*client.Client) *usage {
	u := &usage{}
	u.ctx, u.cancel = context.WithCancel(context.Background())
	for i, c := range clients {
		u.all = append(u.all, &watched{name: names[i], stats: c.Stats, count: c.Count})
	}
	return u
}

func (u *usage) close() {
	if u == nil {
		return
	}
	u.mu.Lock()
	u.cancel()
	u.mu.Unlock()
	u.wg.Wait()
}

// byName is how the namespaces are used, as of now. It does not wait for the store. It may be called concurrently.
func (u *usage) byName() map[string]use {
	if u == nil {
		return nil
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	all := make(map[string]use, len(u.all))
	for _, w := range u.all {
		all[w.name] = w.now(time.Now())
		u.recount(w)
	}
	return all
}

func (w *watched) now(at time.Time) use {
	s := w.stats()
	l := sample{at: at, lookups: s.Ops["get"] + s.Ops["exists"], absent: s.Absent}
	for kind, n := range s.Ops {
		if kind != index.Scan.String() && kind != index.Raw.String() { // the page's counting, and mirrors, are these
			l.ops += n
		}
	}
	w.samples = append(w.samples, l)
	old := slices.IndexFunc(w.samples, func(x sample) bool { return at.Sub(x.at) <= useWindow })
	w.samples = slices.Delete(w.samples, 0, max(0, old))
	first := w.samples[0]
	out := use{keys: w.keys, counted: w.known, perSecond: -1, hits: -1, stats: s}
	if took := at.Sub(first.at).Seconds(); took > 0 {
		out.perSecond = float64(l.ops-first.ops) / took
	}
	if n := l.lookups - first.lookups; n > 0 {
		out.hits = 1 - float64(l.absent-first.absent)/float64(n)
	}
	return out
}

// recount has w's keys counted if it is time.
func (u *usage) recount(w *watched) {
	if w.counting || u.ctx.Err() != nil || time.Now().Before(w.next) {
		return
	}
	w.counting = true
	u.wg.Go(func() {
		ctx, cancel := context.WithTimeout(u.ctx, countTimeout)
		defer cancel()
		begin := time.Now()
		n, err := w.count(ctx)
		took := time.Since(begin)
		u.mu.Lock()
		defer u.mu.Unlock()
		if w.counting, w.next = false, time.Now().Add(max(countPause, countShare*took)); err == nil {
			w.keys, w.known = n, true
		}
	})
}

// cells are the columns of a table of namespaces that a process's clients know of: keys, hits %, operations a second.
func (x use) cells() []string {
	keys, hits := "-", "-"
	if x.counted {
		keys = strconv.FormatUint(x.keys, 10)
	}
	if x.hits >= 0 {
		hits = percent(x.hits)
	}
	rate := "-"
	if x.perSecond >= 0 {
		rate = strconv.FormatFloat(x.perSecond, 'f', 0, 64)
	}
	return []string{keys, hits, rate}
}

var useHeader = []string{"keys", "hits %", "operations a second"}

// table is the namespaces of a process that knows no more of them than its clients do.
func (u *usage) table() httpd.Table {
	t := httpd.Table{Title: "Namespaces", Header: slices.Concat([]string{"name"}, useHeader, []string{"evicted records",
		"in bytes", "expired records"})}
	all := u.byName()
	for _, w := range u.all {
		x := all[w.name]
		t.Rows = append(t.Rows, slices.Concat([]string{w.name}, x.cells(), x.removed(), x.details()))
	}
	return t
}

func (x use) removed() []string {
	return []string{strconv.FormatUint(x.stats.Evicted, 10), units.Rounded(x.stats.EvictedBytes),
		strconv.FormatUint(x.stats.Expired, 10)}
}

// details are what somebody sees who opens the row of a namespace.
func (x use) details() []string {
	var kinds []string
	for kind, n := range x.stats.Ops {
		if n > 0 {
			kinds = append(kinds, fmt.Sprintf("%s %d", kind, n))
		}
	}
	slices.Sort(kinds)
	all := []string{"operations since the start: " + cmp.Or(strings.Join(kinds, ", "), "none"),
		fmt.Sprintf("began with a hint: %d; lost a race: %d; of unknown outcome: %d", x.stats.CacheHits,
			x.stats.CASLosses, x.stats.Unknown)}
	if len(x.stats.Connections) > 0 {
		var ways []string
		for node, by := range x.stats.Connections {
			ways = append(ways, node+" by "+by)
		}
		slices.Sort(ways)
		all = append(all, "connections: "+strings.Join(ways, ", "))
	}
	return all
}

// namespacesTable has what the directory knows of each namespace, and what the process's clients do, if it has some.
func namespacesTable(st *dirpb.StatusReply, used map[string]use) httpd.Table {
	var columns []string
	if used != nil {
		columns = useHeader
	}
	t := httpd.Table{Title: "Namespaces", Header: slices.Concat([]string{"name"}, columns,
		[]string{"memory", "live %", "mode", "copies", "copies missing", "lost", "sessions"})}
	of := make(map[string]*overview.Memory)
	for _, m := range overview.Sums(overview.Memories(st)) {
		of[m.Namespace] = m
	}
	for i, ns := range overview.Namespaces(st) {
		name := ns.Name
		if ns.Deleting {
			name += " (being deleted)"
		}
		x, here := used[ns.Name]
		var cells []string
		switch {
		case here:
			cells = x.cells()
		case used != nil:
			cells = []string{"-", "-", "-"}
		}
		live := "-"
		if m := of[ns.Name]; m != nil && m.Known && m.Heap > 0 {
			live = percent(float64(m.Live) / float64(m.Heap))
		}
		row := slices.Concat([]string{name}, cells, []string{units.Rounded(ns.HeapBytes), live, ns.Mode,
			strconv.Itoa(ns.Replicas), strconv.Itoa(ns.Missing), strconv.Itoa(ns.Losses), strconv.Itoa(ns.Live)},
			namespaceDetails(ns, st.GetMap().GetNamespaces()[i]))
		if here {
			removed := x.removed()
			row = append(row, fmt.Sprintf("evicted: %s records of %s; expired: %s records", removed[0], removed[1],
				removed[2]))
			row = append(row, x.details()...)
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

func namespaceDetails(ns *overview.Namespace, n *dirpb.Namespace) []string {
	all := []string{
		fmt.Sprintf("shards: %d, of which %d split or move", ns.Shards, ns.Moving),
		fmt.Sprintf("placement groups: %d, of which %d are active", ns.PGs, ns.PGState[dirpb.PGState_PG_ACTIVE]),
		fmt.Sprintf("memory: %s granted of %s", units.Rounded(ns.GrantedBytes), units.Rounded(ns.HeapBytes)),
		"owner: " + cmp.Or(n.GetOwner(), "everybody"),
	}
	for _, x := range n.GetAccess() {
		all = append(all, "right to "+rightText(x.GetRight())+": "+x.GetWho())
	}
	return all
}

func rightText(r dirpb.Right) string {
	return strings.ToLower(strings.TrimPrefix(r.String(), "RIGHT_"))
}

// nodeDetails are what somebody sees who opens the row of a memory node.
func nodeDetails(st *dirpb.StatusReply, n *dirpb.Node) []string {
	var all []string
	for _, e := range n.GetEndpoints() {
		by := strings.ToLower(strings.TrimPrefix(e.GetAtomics().String(), "ATOMICS_BY_"))
		all = append(all, fmt.Sprintf("endpoint %s: %s, atomics by %s", e.GetProvider(), e.GetAddr(), by))
	}
	heads, members := 0, 0
	var lacking []string
	for _, g := range sortedGroups(st) {
		i := slices.IndexFunc(g.GetMembers(), func(x *dirpb.Member) bool { return x.GetNodeId() == n.GetId() })
		if i < 0 {
			continue
		}
		if members++; i == 0 {
			heads++
		}
		if overview.Lacks(st.GetMap(), g) != "" {
			lacking = append(lacking, strconv.Itoa(int(g.GetId())))
		}
	}
	all = append(all, fmt.Sprintf("placement groups: %d, head of %d", members, heads))
	if len(lacking) > 0 {
		all = append(all, "of these lack something: "+strings.Join(lacking, ", "))
	}
	kept := "is lost with the process"
	if n.GetKeeps() {
		kept = "outlives the process"
	}
	all = append(all, "memory: "+kept, "version: "+cmp.Or(n.GetVersion(), "unknown"),
		"identity: "+cmp.Or(n.GetIdentity(), "-"), "host: "+cmp.Or(n.GetHostId(), "-"))
	if n.GetTrouble() != "" {
		all = append(all, "trouble: "+n.GetTrouble())
	}
	return all
}
