package client

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/hostid"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/session"
	"github.com/kvd-project/kvd/internal/token"
	"github.com/kvd-project/kvd/rdma"
)

func (s *sess) WantConn(l *engine.Lane, node uint32, bulk bool) {
	s.agenda.WantConn(l, node, bulk)
	s.wake()
}

// dialOnce connects a lane to a memory node. The lane's owner takes the queue pair over.
func (s *sess) dialOnce(ask session.Ask) {
	lane := uint32(ask.Lane.ID())
	if ask.Bulk {
		lane |= token.BulkLane
	}
	path := Path{}
	qp, dev, how, inc, err := s.dial(ask.Lane, lane, ask.Node, &path)
	if ask.Bulk {
		// Nobody waits for it: long values go by the first one meanwhile.
		if err != nil {
			s.c.o.Logger.Debug("no second connection", "node", ask.Node, "err", err)
		}
		s.agenda.Answer(ask, session.Reply{QP: qp, Dev: dev, Incarnation: inc, Err: err,
			Lost: errors.Is(err, errNoProvider)})
		return
	}
	s.mu.Lock()
	news, was := false, s.mu.connErr[ask.Node]
	if s.mu.connErr[ask.Node] = err; err == nil {
		news = s.mu.provider[ask.Node] != how && how != s.c.o.Devices[dev].Name()
		s.mu.provider[ask.Node], s.mu.paths[ask.Node] = how, path
		s.tellPathsLocked()
	}
	s.mu.Unlock()
	if err == nil {
		s.c.bypassed(path)
	}
	if identity.IsRefusal(err) && !identity.IsRefusal(was) {
		s.c.o.Logger.Warn("a process that is no memory node answers at a memory node's address", "node", ask.Node,
			"err", err)
	}
	if news {
		s.c.o.Logger.Info("connected; compare-and-swap costs a CPU of the memory node", "node", ask.Node, "via", how)
	}
	s.agenda.Answer(ask, session.Reply{QP: qp, Dev: dev, Incarnation: inc, Err: err,
		Lost: errors.Is(err, errNoProvider)})
}

// closeQP closes a queue pair, without waiting for its peer once that is declared
// lost.
func (s *sess) closeQP(ask session.Ask) {
	closed := make(chan struct{})
	go func() {
		_ = ask.QP.Close()
		close(closed)
	}()
	t := time.NewTicker(5 * time.Millisecond)
	defer t.Stop()
	for {
		select {
		case <-closed:
			return
		case <-t.C:
			if !s.agenda.Has(ask.Node, ask.Incarnation, ask.Version) {
				_ = ask.QP.Abort()
				<-closed
				return
			}
		}
	}
}

// onLane runs f on the lane and waits for it; false if the session ended first.
func (s *sess) onLane(l *engine.Lane, f func(*engine.Lane)) bool {
	done := make(chan struct{})
	l.Deliver(func(l *engine.Lane) { f(l); close(done) })
	l.Visit()
	select {
	case <-done:
		return true
	case <-s.ctx.Done():
		return false
	}
}

var errNoProvider = errors.New("no provider in common")

// via says by what way verbs go; see Stats.Connections.
func via(provider string, by dirpb.AtomicsBy, agent bool) string {
	switch {
	case agent || by == dirpb.AtomicsBy_ATOMICS_BY_AGENT:
		return provider + " (CAS by the memory node's agent)"
	case by == dirpb.AtomicsBy_ATOMICS_BY_PROXY:
		return provider + " (CAS proxied to the adapter)"
	}
	return provider
}

// dial connects to the node with the best provider that both ends have and the
// node admits. number is the lane's, as the node is told it. If it connects, path tells how.
func (s *sess) dial(l *engine.Lane, number, id uint32, path *Path) (
	qp *rdma.QP, dev int, how string, inc uint64, err error) {
	s.mu.Lock()
	n := s.mu.nodes[id]
	s.mu.Unlock()
	if n == nil {
		return nil, 0, "", 0, fmt.Errorf("memory node %d is not in the map", id)
	}
	private := binary.LittleEndian.AppendUint32(slices.Clone(s.agenda.Token()), number)
	var errs []error
	var failed error // of the last dial by verbs
	tried := false
	for i, d := range s.c.o.Devices {
		if p := s.c.o.Provider; p != "" && p != d.Name() {
			continue
		}
		if d.Name() == "shm" && !hostid.Same(n.GetHostId(), s.host) {
			errs = append(errs, errors.New("shm: on another host"))
			continue
		}
		for _, e := range n.GetEndpoints() {
			if e.GetProvider() != d.Name() {
				continue
			}
			tried = true
			ctx, cancel := context.WithTimeout(s.ctx, 5*time.Second)
			qp, err := d.Dial(ctx, s.core.PD(i), l.CQ(i), e.GetAddr(), private)
			cancel()
			if err == nil {
				*path = s.pathBy(d, n, failed)
				return qp, i, via(d.Name(), e.GetAtomics(), qp.AtomicsByAgent()), n.GetIncarnation(), nil
			}
			errs = append(errs, err)
			if d.Name() == "verbs" {
				failed = err
			}
		}
	}
	err = errors.Join(errs...)
	if !tried {
		want := s.c.o.Provider
		if want == "" {
			want = "any of this client's"
		}
		err = fmt.Errorf("%w: memory node %q does not offer %s (%w)", errNoProvider, n.GetName(), want,
			cmp.Or(err, errors.New("none tried")))
	}
	if s.c.o.Require != "" {
		err = fmt.Errorf("require is %s, so no other provider takes its place: %w", s.c.o.Require, err)
	}
	return nil, 0, "", 0, err
}
