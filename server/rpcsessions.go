package server

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/rights"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/lead"
)

// OpenSession begins a session in a namespace.
func (n *Node) OpenSession(ctx context.Context, q *dirpb.OpenSessionRequest) (*dirpb.OpenSessionReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	name := q.Namespace
	if name == "" {
		name = n.opts.DefaultNamespace
	}
	w, err := n.namespace(ctx, l, name, q.WasNamespaceId != 0)
	if err != nil {
		return nil, err
	}
	if err := checkBackground(ctx, q.Background); err != nil {
		return nil, err
	}
	caller := callerOf(ctx, q.Background)
	c := &fsmpb.OpenSession{
		NamespaceId: w.Id, Client: label(q.Client), HostId: label(q.HostId), ReadOnly: q.ReadOnly,
		Background: q.Background,
		Identity:   caller.Identity, Groups: caller.Groups, Everywhere: caller.Everywhere,
		KnowsStubs: q.KnowsStubs,
	}
	// The state machine refuses it as well; who may not come in waits for nothing, and makes no entry in the log.
	if err := n.ask(l, func(_ *lead.Leader, s *fsm.State, _ time.Duration) error {
		if rights.Caller(ctx).Role == identity.Tier {
			c.Everywhere = serves(s, w, caller.Identity)
		}
		return s.CheckOpen(c)
	}); err != nil {
		return nil, err
	}
	if err := n.awaitActive(ctx, w); err != nil {
		return nil, err
	}
	c.Epoch, _ = l.epochs()
	c.Lanes = lanesOf(w)
	c.OpenedUnixMillis = time.Now().UnixMilli()
	res, err := n.do(ctx, l, &fsmpb.Command{Op: &fsmpb.Command_OpenSession{OpenSession: c}})
	if err != nil {
		return nil, err
	}
	x := res.Session
	reply := &dirpb.OpenSessionReply{
		SessionId: x.Id, Discriminator: x.Discriminator, NamespaceId: w.Id,
		LeaseMillis: uint64(n.opts.Lease.Milliseconds()), RenewMillis: n.renewMillis(), MaxLanes: x.Lanes, Term: l.term,
	}
	n.withState(l, func(j *lead.Leader, s *fsm.State, now time.Duration) {
		reply.MapVersion = s.MapVersion()
		if reply.Epoch, reply.MinEpoch, err = j.Opened(s, x.Id, now); err != nil {
			return
		}
		if reply.Token, reply.TokenNumber, err = n.sign(s, j.Signs(s), x); err == nil {
			j.Holds(x.Id, reply.TokenNumber)
		}
	})
	if err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	return reply, nil
}

// namespace finds a namespace, and creates the default one on first use; again is a use
// that is not the first.
func (n *Node) namespace(ctx context.Context, l *leadership, name string, again bool) (*dirpb.Namespace, error) {
	var w *dirpb.Namespace
	find := func() { n.machine.view(func(s *fsm.State) { w = s.NamespaceNamed(name) }) }
	switch find(); {
	case w.GetDeleting():
		return nil, status.Errorf(codes.NotFound, "namespace %q is being deleted", name)
	case w != nil:
		return w, nil
	case again:
		return nil, status.Errorf(codes.NotFound, "namespace %.64q was deleted", name)
	case name != n.opts.DefaultNamespace:
		return nil, status.Errorf(codes.NotFound, "namespace %.64q does not exist", name)
	}
	caller := callerOf(ctx, false)
	if !caller.Everywhere {
		return nil, status.Errorf(codes.NotFound, "namespace %.64q does not exist; an operator makes it: kvctl "+
			"namespace create %s --owner WHO", name, name)
	}
	_, err := n.do(ctx, l,
		audited(ctx, createNamespace(&dirpb.CreateNamespaceRequest{Name: name, Owner: caller.Identity}),
			actCreateNamespace, name, "first-use", true))
	if err != nil && status.Code(err) != codes.AlreadyExists {
		return nil, err
	}
	if find(); w == nil {
		return nil, status.Errorf(codes.Internal, "namespace %q vanished", name)
	}
	return w, nil
}

func createNamespace(q *dirpb.CreateNamespaceRequest) *fsmpb.Command {
	var seed [8]byte
	rand.Read(seed[:]) // crypto/rand: never fails
	return &fsmpb.Command{Op: &fsmpb.Command_CreateNamespace{CreateNamespace: &fsmpb.CreateNamespace{
		Namespace: q, HashSeed: binary.LittleEndian.Uint64(seed[:]),
	}}}
}

// awaitActive waits until no placement group of w is being created. When that
// takes too long, one active placement group is enough to begin. It ends before ctx does, so
// that the caller hears why.
func (n *Node) awaitActive(ctx context.Context, w *dirpb.Namespace) error {
	patience := activationWait
	if end, ok := ctx.Deadline(); ok {
		patience = min(patience, time.Until(end)*3/4)
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	others := time.NewTimer(min(othersWait, patience))
	defer others.Stop()
	enough := false // waited for the others
	for {
		changed := n.machine.move()
		var creating, usable, all int
		gone := false
		n.machine.view(func(s *fsm.State) {
			gone = s.Namespace(w.Id) == nil
			for _, pg := range s.PGs(w.Id) {
				all++
				switch pg.State {
				case dirpb.PGState_PG_CREATING:
					creating++
				case dirpb.PGState_PG_LOST:
				default:
					usable++
				}
			}
		})
		switch {
		case gone:
			return status.Errorf(codes.NotFound, "namespace %q was deleted", w.Name)
		case usable > 0 && (creating == 0 || enough):
			return nil
		}
		late := nothingDone(fmt.Sprintf("namespace %q: %d of %d placement groups are active; no session was opened",
			w.Name, usable, all))
		if creating == 0 {
			return late
		}
		select {
		case <-changed:
		case <-others.C:
			enough = true
		case <-timer.C:
			if usable > 0 {
				return nil
			}
			return late
		case <-ctx.Done():
			return late
		case <-n.ctx.Done():
			return n.stopping()
		}
	}
}

func (n *Node) stopping() error {
	return nothingDone("this directory node is stopping; nothing was done")
}

func sessionGone(id uint32) error {
	return status.Errorf(codes.NotFound, "session %d is fenced, being fenced, or was never opened", id)
}

// Renew extends a session's lease and exchanges reclaim epochs.
func (n *Node) Renew(ctx context.Context, q *dirpb.RenewRequest) (*dirpb.RenewReply, error) {
	l, err := n.confirmed(ctx)
	if err != nil {
		return nil, err
	}
	if err := n.takeStatus(ctx, l, q); err != nil {
		return nil, err
	}
	reply := &dirpb.RenewReply{LeaseMillis: uint64(n.opts.Lease.Milliseconds()), Term: l.term}
	var a lead.Answer
	n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) {
		x.Advance(s, now)
		reply.MapVersion = s.MapVersion()
		a, err = x.Renew(s, now, lead.Renewal{
			Session: q.SessionId, Report: q.ReportEpoch, Acked: q.AckedMapVersion, Quiesced: q.QuiescedMapVersion,
			Number: q.Number, Term: q.Term, HandBacks: q.HandBacks, Returns: q.Returns, Held: q.Held,
			InLimbo: q.InLimbo, Crowded: q.Crowded, Callable: len(l.mu.watches[q.SessionId]) > 0, Token: q.TokenNumber,
			Paths: cleanPaths(q.Paths),
		})
		if a.Calls {
			l.callLocked(now)
		}
		if err == nil {
			reply.Token, reply.TokenNumber, err = n.signAgain(x, s, q.SessionId, q.TokenNumber)
		}
	})
	if err != nil {
		return nil, refusal(err)
	}
	n.renewals.Add(1)
	reply.QuietMillis = uint64(a.Quiet.Milliseconds())
	reply.Epoch, reply.MinEpoch, reply.Deliveries, reply.Supply = a.Epoch, a.Least, a.Deliveries, a.Supply
	if a.Moved {
		l.wake()
	} else if a.Returned || q.InLimbo {
		l.rouse()
	}
	return reply, nil
}

// Bounds of what is kept of a session's paths.
const (
	mostPaths   = 8
	pathWord    = 32 // bytes
	longestPath = 200
)

// cleanPaths is what a session says of its paths, bounded, and without what could write over a terminal.
func cleanPaths(p *dirpb.ClientPaths) *dirpb.ClientPaths {
	if p == nil {
		return nil
	}
	own := &dirpb.ClientPaths{Host: clean(p.Host, 64), Adapter: p.Adapter}
	for _, x := range p.Paths[:min(len(p.Paths), mostPaths)] {
		own.Paths = append(own.Paths, &dirpb.ClientPath{Provider: clean(x.GetProvider(), pathWord),
			Reason: clean(x.GetReason(), pathWord), Detail: clean(x.GetDetail(), longestPath),
			Connections: x.GetConnections()})
	}
	return own
}

// cleanStats likewise bounds what a memory node says of its adapters.
func cleanStats(x *dirpb.NodeStats) *dirpb.NodeStats {
	if x == nil {
		return nil
	}
	x.Fabrics = slices.DeleteFunc(x.Fabrics[:min(len(x.Fabrics), 4)], func(f *dirpb.Fabric) bool { return f == nil })
	for _, f := range x.Fabrics {
		f.Device, f.Gid, f.GidType = clean(f.Device, 64), clean(f.Gid, 64), clean(f.GidType, pathWord)
	}
	return x
}

// clean is s in printable characters and at most n bytes.
func clean(s string, n int) string {
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) || r == utf8.RuneError {
			return -1
		}
		return r
	}, s[:min(len(s), n)])
	return strings.Clone(s) // not a part of the message
}

// Renewals is how many renewals of sessions this process has answered, as the leader.
func (n *Node) Renewals() uint64 { return n.renewals.Load() }

// CloseSession ends a session whose client has stopped.
func (n *Node) CloseSession(ctx context.Context, q *dirpb.CloseSessionRequest) (*dirpb.CloseSessionReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	epoch, _ := l.epochs()
	n.withState(l, func(x *lead.Leader, _ *fsm.State, _ time.Duration) { x.Closing(q.SessionId, q.HandBacks, q.Held) })
	_, err = n.do(ctx, l, &fsmpb.Command{Op: &fsmpb.Command_CloseSession{CloseSession: &fsmpb.CloseSession{
		SessionId: q.SessionId, Runs: q.Runs, Epoch: epoch, Leaked: q.Leaked, Settled: q.Settled,
	}}})
	if err != nil {
		n.withState(l, func(x *lead.Leader, _ *fsm.State, _ time.Duration) { x.Closing(q.SessionId, nil, nil) })
		return nil, err
	}
	n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) { x.Closed(s, now, q.SessionId) })
	return &dirpb.CloseSessionReply{}, nil
}

// GrantExtent gives a session memory, or tells how much is on its way.
func (n *Node) GrantExtent(ctx context.Context, q *dirpb.GrantExtentRequest) (*dirpb.GrantExtentReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	c := &fsmpb.GrantExtent{SessionId: q.SessionId, PgId: q.PgId, WantUnits: q.WantUnits, PlaceUnits: q.PlaceUnits}
	var reply *dirpb.GrantExtentReply
	for again := true; again; {
		// Most that find nothing, of which there may be many, need no entry in the log.
		if err := n.ask(l, func(x *lead.Leader, s *fsm.State, _ time.Duration) (err error) {
			_, c.MinEpoch = x.Epochs()
			c.PlaceUnits = q.PlaceUnits
			reply, err = s.FitGrant(c)
			return err
		}); err != nil {
			return nil, err
		}
		if len(reply.Runs) == 0 {
			break
		}
		res, err := n.do(ctx, l, &fsmpb.Command{Op: &fsmpb.Command_GrantExtent{GrantExtent: c}})
		if err != nil {
			return nil, err
		}
		reply = res.Grant
		n.withState(l, func(x *lead.Leader, s *fsm.State, _ time.Duration) { x.Granted(s, q.PgId) })
		// Others may have been granted the longer runs meanwhile, and there are shorter ones.
		again = len(reply.Runs) == 0 && c.PlaceUnits > q.PlaceUnits
	}
	reply.Term = l.term
	if len(reply.Runs) == 0 {
		n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) {
			x.Short(s, q.PgId, q.PlaceUnits, now)
			reply.ComingUnits = x.Coming(s, s.PG(q.PgId).GetNamespaceId(), q.PgId, q.PlaceUnits, now)
		})
		l.rouse()
	}
	return reply, nil
}

// SessionState tells whether a session is fenced. Breaking the locks of a session that lives would be wrong.
// So an id that is unknown here counts as fenced only once a quorum confirms that this node leads.
func (n *Node) SessionState(ctx context.Context, q *dirpb.SessionStateRequest) (*dirpb.SessionStateReply, error) {
	if _, err := n.confirmed(ctx); err != nil {
		return nil, err
	}
	reply := &dirpb.SessionStateReply{}
	n.machine.view(func(s *fsm.State) { reply.Life = s.Life(q.SessionId) })
	return reply, nil
}

// WatchMap streams the map as it changes. A watcher that falls behind skips to
// the newest version. The leader calls sessions through it, too.
func (n *Node) WatchMap(q *dirpb.WatchMapRequest, stream grpc.ServerStreamingServer[dirpb.Map]) error {
	sent := q.AfterVersion
	if q.SessionId == 0 {
		if err := mayWatchAll(stream.Context()); err != nil {
			return err
		}
	}
	if err := n.awaitSession(stream.Context(), q.SessionId); err != nil {
		return err
	}
	var under *leadership
	call, leave := (<-chan struct{})(nil), func() {}
	defer func() { leave() }()
	for {
		reigns, moved := n.reigns.next(), n.machine.move()
		if l := n.leading.Load(); l != under && q.SessionId != 0 {
			leave()
			call, leave, under = nil, func() {}, l
			if l != nil {
				call, leave = l.callable(q.SessionId)
			}
		}
		var m *sharedMap
		var ended <-chan struct{}
		var err error
		n.machine.view(func(s *fsm.State) {
			x := s.Session(q.SessionId)
			switch {
			case q.SessionId == 0:
			case x == nil || x.Life != dirpb.SessionLife_SESSION_LIVE:
				err = sessionGone(q.SessionId)
			default:
				err = ownedBy(stream.Context(), fmt.Sprintf("session %d", q.SessionId), x.Identity)
				ended = n.machine.end(x.Id)
			}
			if err == nil && s.MapVersion() > sent {
				m = n.machine.maps.show(s, x)
			}
		})
		if err != nil {
			return err
		}
		if m != nil {
			sent = m.version
			b, err := m.encode()
			if err != nil {
				return status.Errorf(codes.Internal, "the map: %v", err)
			}
			if err := stream.SendMsg(b); err != nil {
				return err
			}
		}
		select {
		case <-moved:
		case <-ended:
		case <-reigns:
		case <-call:
			if err := stream.Send(&dirpb.Map{Version: sent, Renew: proto.Bool(true)}); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		case <-n.ctx.Done():
			return n.stopping()
		}
	}
}

// awaitSession refuses an id that this node may be too far behind to know: only
// a confirmed leader can say that it was never given out.
func (n *Node) awaitSession(ctx context.Context, id uint32) error {
	var last uint32
	n.machine.view(func(s *fsm.State) { last = s.Meta().SessionId })
	if id <= last {
		return nil
	}
	if _, err := n.confirmed(ctx); err != nil {
		return status.Errorf(codes.Unavailable, "session %d is not known here yet; nothing was done", id)
	}
	return nil
}
