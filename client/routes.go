package client

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/hostid"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/session"
	"github.com/kvd-project/kvd/internal/token"
	"github.com/kvd-project/kvd/rdma"
)

// path is a way from a client to a memory node: one of its devices, and one of the endpoints of the memory node's
// process.
type path struct {
	node              uint32
	incarnation, boot uint64
	dev               int
	endpoint, addr    string // its name and address
}

// lanePath is whose connection goes by a path.
type lanePath struct {
	lane, node uint32
	bulk       bool
}

// trouble is what a path was found not to work by.
type trouble struct {
	err    error
	since  time.Time
	over   time.Time     // when it was found to work again; zero: it was not
	again  int           // how often it has failed again as soon as it was in use
	pause  time.Duration // before the next probe
	probed time.Time     // when the last one began, or the trouble
}

// paths says which ways the connections of a session take, and which ways have failed. A way that has failed is tried
// after the others, until a probe finds that it works.
type paths struct {
	mu      sync.Mutex
	used    map[lanePath]path
	failed  map[path]*trouble
	tending bool // a goroutine probes those that have failed
}

const (
	// firstDial is how long one way is tried while there are others; lastDial, when all of them took longer. Those that
	// are known to have failed come last, so few dials wait for it.
	firstDial = time.Second
	lastDial  = 5 * time.Second
	// probeWithin is how long a probe may take. It is short, since what is lost on a way that is down is sent again
	// late.
	probeWithin = 600 * time.Millisecond
	// probePause is the pause before a way that has failed is probed. It doubles up to probePauseMost with each probe.
	probePause, probePauseMost = 100 * time.Millisecond, 500 * time.Millisecond
	// A way that a probe finds to work and that fails within relapse, which is longer than a provider needs to notice,
	// is left alone for restPause. That doubles up to restMost.
	relapse             = 700 * time.Millisecond
	restPause, restMost = time.Second, 16 * time.Second
	// abortAfter is how long a queue pair that a lane gives up may take to close where there is another way.
	abortAfter = 50 * time.Millisecond
)

// waysTo gives the ways to a memory node in the order in which a connection of the lane is to try them, and why others
// are none. Providers come as in Options.Devices. The lanes' first connections are spread over a provider's ways.
// A lane's second one has another port at both ends, where there is one. Ways that have failed come last.
func (s *sess) waysTo(n *dirpb.Node, lane uint32, bulk bool) (ways []path, why []error) {
	k := int(lane)
	if bulk {
		k++
	}
	devices := s.c.o.Devices
	for first, d := range devices {
		name := d.Name()
		named := func(x *rdma.Device) bool { return x.Name() == name }
		if slices.IndexFunc(devices, named) != first || s.c.o.Provider != "" && s.c.o.Provider != name {
			continue
		}
		if name == "shm" && !hostid.Same(n.GetHostId(), s.host) {
			why = append(why, errors.New("shm: on another host"))
			continue
		}
		var here []int
		for i, x := range devices {
			if named(x) {
				here = append(here, i)
			}
		}
		var there []*dirpb.Endpoint
		for _, e := range n.GetEndpoints() {
			if e.Carrier() == name {
				there = append(there, e)
			}
		}
		ways = append(ways, s.paths.order(n, here, there, k)...)
	}
	return ways, why
}

// order gives the ways from the devices here to the endpoints there, the k-th pair of ports first.
func (p *paths) order(n *dirpb.Node, here []int, there []*dirpb.Endpoint, k int) []path {
	type ranked struct {
		path
		rank [4]int
	}
	var all []ranked
	p.mu.Lock()
	for i, dev := range here {
		for j, e := range there {
			x := ranked{path: path{node: n.GetId(), incarnation: n.GetIncarnation(), boot: n.GetBoot(), dev: dev,
				endpoint: e.GetProvider(), addr: e.GetAddr()}}
			a, b := (i+len(here)-k%len(here))%len(here), (j+len(there)-k%len(there))%len(there)
			x.rank = [4]int{0, 0, b, a}
			if p.failed[x.path].bad() {
				x.rank[0] = 1
			}
			if a != b {
				x.rank[1] = 1 // of the others, those with both ports different first
			}
			all = append(all, x)
		}
	}
	p.mu.Unlock()
	slices.SortStableFunc(all, func(x, y ranked) int { return slices.Compare(x.rank[:], y.rank[:]) })
	ways := make([]path, len(all))
	for i := range all {
		ways[i] = all[i].path
	}
	return ways
}

func (t *trouble) bad() bool { return t != nil && t.over.IsZero() }

// goesBy notes by which way a connection goes.
func (p *paths) goesBy(l lanePath, w path) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.used == nil {
		p.used = map[lanePath]path{}
	}
	p.used[l] = w
}

// fails notes that a way does not work, and reports whether somebody is to begin to probe.
func (p *paths) fails(w path, err error) (tend, news bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.failed == nil {
		p.failed = map[path]*trouble{}
	}
	now := time.Now()
	t := p.failed[w]
	if t.bad() {
		return false, false
	}
	x := &trouble{err: err, since: now, probed: now, pause: probePause}
	if t != nil && now.Sub(t.over) < relapse {
		x.again = t.again + 1
		x.pause = min(restPause<<min(t.again, 10), restMost)
	}
	p.failed[w] = x
	tend, p.tending = !p.tending, true
	return tend, true
}

// works notes that a way works.
func (p *paths) works(w path) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if t := p.failed[w]; t.bad() {
		t.over = time.Now()
	}
}

// pathFails notes that a way to the memory node does not work, if there are others of its provider.
func (s *sess) pathFails(w path, err error) {
	s.mu.Lock()
	n := s.mu.nodes[w.node]
	s.mu.Unlock()
	if n == nil || s.ctx.Err() != nil {
		return
	}
	ways, _ := s.waysTo(n, 0, false)
	if !slices.Contains(ways, w) || !slices.ContainsFunc(ways, func(x path) bool { return x != w && x.rivals(w) }) {
		return
	}
	tend, news := s.paths.fails(w, err)
	if news {
		s.c.o.Logger.Warn("a path to a memory node has failed; others are used until it works again", "node",
			n.GetName(), "endpoint", w.endpoint, "addr", w.addr, "port", s.c.portText(w.dev), "err", err)
	}
	if tend {
		s.wg.Go(s.tendPaths)
	}
}

// rivals reports whether either way can stand in for the other: it has the same provider.
func (w path) rivals(x path) bool {
	a, _, _ := strings.Cut(w.endpoint, "/")
	b, _, _ := strings.Cut(x.endpoint, "/")
	return a == b
}

// tendPaths probes the ways that have failed, until there are none, and has lanes return to those that work again.
func (s *sess) tendPaths() {
	tick := time.NewTicker(probePause / 2)
	defer tick.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-tick.C:
		}
		due, any := s.paths.due(time.Now(), s.isPath)
		var probes sync.WaitGroup
		for i, w := range due {
			probes.Go(func() {
				if err := s.probe(w, uint32(i%token.ProbeLanes)); err != nil {
					s.c.o.Logger.Debug("a path has not come back", "endpoint", w.endpoint, "addr", w.addr, "err", err)
					return
				}
				s.paths.works(w)
				s.c.o.Logger.Info("a path to a memory node works again", "endpoint", w.endpoint, "addr", w.addr, "port",
					s.c.portText(w.dev))
			})
		}
		probes.Wait()
		if !s.goHome() && !any && s.paths.rest() {
			return
		}
	}
}

// due gives the ways that are to be probed now, and reports whether any has failed and not come back. Those that is
// knows nothing of are forgotten: the memory node's process has gone.
func (p *paths) due(now time.Time, is func(path) bool) (due []path, any bool) {
	p.mu.Lock()
	failed := slices.Collect(maps.Keys(p.failed))
	p.mu.Unlock()
	gone := slices.DeleteFunc(slices.Clone(failed), is)
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, w := range gone {
		delete(p.failed, w)
	}
	for w, t := range p.failed {
		if !t.bad() {
			continue
		}
		if any = true; now.Sub(t.probed) >= t.pause {
			t.probed, t.pause = now, max(min(2*t.pause, probePauseMost), probePause)
			due = append(due, w)
		}
	}
	slices.SortFunc(due, func(a, b path) int {
		return cmp.Or(cmp.Compare(a.node, b.node), cmp.Compare(a.endpoint, b.endpoint), cmp.Compare(a.dev, b.dev))
	})
	return due, any
}

// rest ends the tending, unless a way has failed meanwhile.
func (p *paths) rest() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, t := range p.failed {
		if t.bad() {
			return false
		}
	}
	p.tending = false
	return true
}

// isPath reports whether the map has the way.
func (s *sess) isPath(w path) bool {
	s.mu.Lock()
	n := s.mu.nodes[w.node]
	s.mu.Unlock()
	return n.GetIncarnation() == w.incarnation && n.GetBoot() == w.boot
}

// goHome has the connections leave the ways that they took for want of a better one, and reports whether any is on such
// a way still.
func (s *sess) goHome() (any bool) {
	s.paths.mu.Lock()
	used := maps.Clone(s.paths.used)
	s.paths.mu.Unlock()
	type to struct{ lane, node uint32 }
	leave := map[to]bool{}
	for l, w := range used {
		s.mu.Lock()
		n := s.mu.nodes[l.node]
		s.mu.Unlock()
		if n == nil || !s.isPath(w) {
			continue
		}
		ways, _ := s.waysTo(n, l.lane, l.bulk)
		ways = slices.DeleteFunc(ways, func(x path) bool { return !x.rivals(w) })
		if len(ways) > 0 && ways[0] != w {
			leave[to{l.lane, l.node}] = true
		}
	}
	for x := range leave {
		l := s.core.Lanes()[x.lane]
		l.Deliver(func(l *engine.Lane) { l.Leave(x.node) })
		l.Visit()
	}
	return len(leave) > 0
}

// probe shows whether a way works: it connects, and READs a page of a region. number is below token.ProbeLanes, and of
// those that are under way no other one has it.
func (s *sess) probe(w path, number uint32) (err error) {
	d := s.c.o.Devices[w.dev]
	keys, ok := s.keysBy(w)
	if !ok {
		return fmt.Errorf("memory node %d has no region with keys of %s", w.node, w.endpoint)
	}
	cq, err := d.CreateCQ(16)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cq.Close()) }()
	mem, err := d.Alloc(layout.RegionPageSize, rdma.AllocOptions{Name: "probe"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, mem.Free()) }()
	pd := s.core.PD(w.dev)
	mr, err := pd.RegMR(mem, 0, layout.RegionPageSize, rdma.AccessLocal)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, mr.Deregister()) }()
	ctx, cancel := context.WithTimeout(s.ctx, probeWithin)
	defer cancel()
	qp, err := d.Dial(ctx, pd, cq, w.addr, binary.LittleEndian.AppendUint32(slices.Clone(s.agenda.Token()),
		token.ProbeLane+number))
	if err != nil {
		return err
	}
	defer func() { _ = qp.Abort() }() // before what it uses goes
	if _, err := qp.PostSend([]rdma.WR{{Op: rdma.OpRead, Flags: rdma.Signaled, Local: mr.Bytes(), LKey: mr.LKey(),
		RemoteAddr: keys.IndexBase, RKey: keys.IndexRKey}}); err != nil {
		return err
	}
	var wcs [1]rdma.WC
	for cq.Poll(wcs[:]) == 0 {
		select {
		case <-cq.Ready():
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if e := (&rdma.WCError{WC: wcs[0]}); e.Applied() != rdma.Yes {
		return e
	}
	return nil
}

// keysBy are those of some region of the memory node that are good for a way.
func (s *sess) keysBy(w path) (engine.Keys, bool) {
	v := s.core.View()
	if v == nil {
		return engine.Keys{}, false
	}
	for _, pg := range v.PGs {
		for i := range pg.Members {
			if m := &pg.Members[i]; m.Node == w.node && m.Incarnation == w.incarnation {
				if k, ok := m.Keys[w.endpoint]; ok {
					return k, true
				}
			}
		}
	}
	return engine.Keys{}, false
}

// leftPath notes what the end of a connection says of its way, and gives how long its queue pair may take to close; 0:
// as long as it wants.
func (s *sess) leftPath(ask session.Ask) time.Duration {
	l := lanePath{uint32(ask.Lane.ID()), ask.Node, ask.Bulk}
	s.paths.mu.Lock()
	w, ok := s.paths.used[l]
	delete(s.paths.used, l)
	s.paths.mu.Unlock()
	s.mu.Lock()
	n := s.mu.nodes[ask.Node]
	s.mu.Unlock()
	if !ok || n == nil {
		return 0
	}
	if ask.QP.State() == rdma.StateErr {
		s.pathFails(w, errBroke)
	}
	if ways, _ := s.waysTo(n, l.lane, l.bulk); len(ways) > 1 {
		return abortAfter
	}
	return 0
}

var errBroke = errors.New("a connection broke")

// maxDevices bounds Options.Devices: each has a completion queue on every lane, and buffers are registered with each.
const maxDevices = 8

// portText names a device for people.
func (c *Client) portText(dev int) string {
	d := c.o.Devices[dev]
	return cmp.Or(d.Caps().Port, d.Name())
}

// routeStats are those of all memory nodes; see Stats.Routes.
func (s *sess) routeStats() (all []RouteStats) {
	s.mu.Lock()
	nodes := slices.Collect(maps.Values(s.mu.nodes))
	s.mu.Unlock()
	slices.SortFunc(nodes, func(a, b *dirpb.Node) int { return cmp.Compare(a.GetName(), b.GetName()) })
	for _, n := range nodes {
		ways, _ := s.waysTo(n, 0, false)
		s.paths.mu.Lock()
		used := map[path]int{}
		for _, w := range s.paths.used {
			used[w]++
		}
		for _, w := range ways {
			if !slices.ContainsFunc(ways, func(x path) bool { return x != w && x.rivals(w) }) {
				continue
			}
			p := RouteStats{Node: n.GetName(), Endpoint: w.endpoint, Addr: w.addr, Port: s.c.portText(w.dev),
				Connections: used[w]}
			if t := s.paths.failed[w]; t.bad() {
				p.Failed, p.Err = t.since, t.err.Error()
			}
			all = append(all, p)
		}
		s.paths.mu.Unlock()
	}
	slices.SortStableFunc(all, func(a, b RouteStats) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Endpoint, b.Endpoint), cmp.Compare(a.Port, b.Port))
	})
	return all
}
