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
	by := Path{}
	x, err := s.dial(ask.Lane, lane, ask.Node, &by)
	if ask.Bulk {
		// Nobody waits for it: long values go by the first one meanwhile.
		if err != nil {
			s.c.o.Logger.Debug("no second connection", "node", ask.Node, "err", err)
		}
		s.agenda.Answer(ask, x.reply(err))
		return
	}
	s.mu.Lock()
	news, was := false, s.mu.connErr[ask.Node]
	if s.mu.connErr[ask.Node] = err; err == nil {
		news = s.mu.provider[ask.Node] != x.how && x.how != s.c.o.Devices[x.dev].Name()
		s.mu.provider[ask.Node], s.mu.paths[ask.Node] = x.how, by
		s.tellPathsLocked()
	}
	s.mu.Unlock()
	if err == nil {
		s.c.bypassed(by)
	}
	if identity.IsRefusal(err) && !identity.IsRefusal(was) {
		s.c.o.Logger.Warn("a process that is no memory node answers at a memory node's address", "node", ask.Node,
			"err", err)
	}
	if news {
		s.c.o.Logger.Info("connected; compare-and-swap costs a CPU of the memory node", "node", ask.Node, "via", x.how)
	}
	s.agenda.Answer(ask, x.reply(err))
}

// closeQP closes a queue pair, without waiting for its peer once that is declared
// lost. Nor does it wait long where there is another way: the memory node fences the queue pair before it takes the
// next one of the lane.
func (s *sess) closeQP(ask session.Ask) {
	patience := s.leftPath(ask)
	closed := make(chan struct{})
	go func() {
		_ = ask.QP.Close()
		close(closed)
	}()
	t := time.NewTicker(5 * time.Millisecond)
	defer t.Stop()
	for begin := time.Now(); ; {
		select {
		case <-closed:
			return
		case <-t.C:
			given := !s.agenda.Has(ask.Node, ask.Incarnation, ask.Version)
			if given || patience != 0 && time.Since(begin) > patience {
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

// dialed is a connection to a memory node, and how it goes.
type dialed struct {
	path
	qp  *rdma.QP
	how string // see via
}

func (x dialed) reply(err error) session.Reply {
	return session.Reply{QP: x.qp, Dev: x.dev, Endpoint: x.endpoint, Incarnation: x.incarnation, Err: err,
		Lost: errors.Is(err, errNoProvider)}
}

// dial connects to the node with the best provider that both ends have and the
// node admits, by the first of the ways that works. number is the lane's, as the node is told it. If it connects, by
// tells by which provider, and why.
func (s *sess) dial(l *engine.Lane, number, id uint32, by *Path) (dialed, error) {
	s.mu.Lock()
	n := s.mu.nodes[id]
	s.mu.Unlock()
	if n == nil {
		return dialed{}, fmt.Errorf("memory node %d is not in the map", id)
	}
	whose := lanePath{number &^ token.BulkLane, id, number&token.BulkLane != 0}
	ways, errs := s.waysTo(n, whose.lane, whose.bulk)
	tried := len(ways) > 0
	private := binary.LittleEndian.AppendUint32(slices.Clone(s.agenda.Token()), number)
	var failed error // of the last dial by verbs
	for within := firstDial; len(ways) > 0; within = lastDial {
		if len(ways) == 1 {
			within = lastDial
		}
		var slow []path
		refused := map[path]error{}
		for _, w := range ways {
			d := s.c.o.Devices[w.dev]
			ctx, cancel := context.WithTimeout(s.ctx, within)
			qp, err := d.Dial(ctx, s.core.PD(w.dev), l.CQ(w.dev), w.addr, private)
			late := ctx.Err() != nil
			cancel()
			if err == nil {
				for x, err := range refused {
					s.pathFails(x, err)
				}
				s.paths.works(w)
				s.paths.goesBy(whose, w)
				*by = s.pathBy(d, n, failed)
				return dialed{w, qp, via(d.Name(), endpointOf(n, w.endpoint).GetAtomics(), qp.AtomicsByAgent())}, nil
			}
			// A refusal is of the session, unless another way admits it.
			if errors.Is(err, rdma.ErrRefused) || identity.IsRefusal(err) {
				refused[w] = err
			} else {
				s.pathFails(w, err)
			}
			if late && within < lastDial {
				slow = append(slow, w)
				continue
			}
			errs = append(errs, err)
			if d.Name() == "verbs" {
				failed = err
			}
		}
		ways = slow
	}
	err := errors.Join(errs...)
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
	return dialed{}, err
}

func endpointOf(n *dirpb.Node, name string) *dirpb.Endpoint {
	for _, e := range n.GetEndpoints() {
		if e.GetProvider() == name {
			return e
		}
	}
	return nil
}
