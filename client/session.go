package client

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/hostid"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/session"
	"github.com/kvd-project/kvd/rdma"
)

// sess is one session with the directory: its core, its lanes, and the
// goroutines that watch the map and perform the agenda: renew the lease, dial, fetch
// memory. When the session is lost the Client opens another.
type sess struct {
	c        *Client
	core     *engine.Core
	id       uint32
	nsID     uint32
	seed     atomic.Uint64
	limit    atomic.Uint64 // bytes that sessions may hold in the namespace; 0: all there are
	evicts   atomic.Bool   // the namespace is a cache
	pinned   atomic.Uint32 // how much of it may be pinned, percent
	payload  atomic.Uint32 // bytes in a chunk of a long value
	maxValue atomic.Int64  // bytes that a value in the namespace may have
	host     string        // hostid.ID()
	renew    time.Duration
	ctx      context.Context
	cancel   context.CancelCauseFunc
	wg       sync.WaitGroup

	mu struct {
		sync.Mutex
		nodes    map[uint32]*dirpb.Node
		connErr  map[uint32]error
		provider map[uint32]string // as in Stats.Connections
		paths    map[uint32]Path   // of the connection made last, by memory node
	}
	agenda *session.Agenda
	paths  paths
	// performed is how many operations lanes had performed when control last looked.
	performed uint64
	due       chan struct{} // capacity 1: the agenda has something new
	// turn: control is away while it performs what is due itself; then wake starts another.
	turn struct {
		sync.Mutex
		away bool
		// alone is how many asks it performed itself, begun how many goroutines were started to perform or to control.
		alone, begun uint64
	}
	ready    chan struct{} // closed with the first map
	once     sync.Once
	opened   atomic.Int32 // 1: it had its first map; 2: it was lost before; set by the first of both
	closing  sync.Once
	evictor  *evictor   // nil: this session evicts nothing
	expiries []expiries // by lane: what was put, for the sweep
	counted  bool       // its lanes are in Client.mu.past; guarded by Client.mu
	status   statusWords
	replaced chan struct{} // closed when the Client has another session, or none for good
	// closed when there is none, since the namespace was deleted or lets this client in no more
	missing chan struct{}
	refusal atomic.Pointer[error] // why, from before missing is closed
}

// openSession opens a session, waits for its first map and puts it in force. was is the namespace of the
// session that it replaces, 0 if there is none.
func (c *Client) openSession(ctx context.Context, was uint32) (*sess, error) {
	var rep *dirpb.OpenSessionReply
	sent := engine.Nanos()
	err := c.dir.Call(ctx, func(ctx context.Context, dc dirpb.DirectoryClient) (err error) {
		sent = engine.Nanos()
		rep, err = dc.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: c.o.Namespace, Client: c.o.Name,
			HostId: hostid.ID(), ReadOnly: c.o.ReadOnly, Background: c.o.Background, WasNamespaceId: was})
		return err
	})
	if err != nil {
		switch status.Code(err) {
		case codes.NotFound:
			return nil, fmt.Errorf("%w: %s", ErrNoNamespace, dirclient.Message(err))
		case codes.PermissionDenied, codes.Unauthenticated:
			return nil, fmt.Errorf("%w: %s", ErrForbidden,
				strings.TrimPrefix(dirclient.Message(err), ErrForbidden.Error()+": "))
		}
		// A session that was opened unheard dies by itself; no operation has begun.
		return nil, fmt.Errorf("%w: open session: %w", ErrUnavailable, dirclient.NoEffect(err))
	}
	s := &sess{c: c, id: rep.SessionId, nsID: rep.NamespaceId, host: hostid.ID(), due: make(chan struct{}, 1),
		ready: make(chan struct{}), replaced: make(chan struct{}), missing: make(chan struct{})}
	s.renew = min(time.Duration(rep.RenewMillis)*time.Millisecond, 100*time.Millisecond)
	if s.renew <= 0 {
		s.renew = 100 * time.Millisecond
	}
	s.status.s, s.status.mu.pgs = s, map[uint32]*statusPG{}
	s.mu.nodes = map[uint32]*dirpb.Node{}
	s.mu.connErr, s.mu.provider, s.mu.paths = map[uint32]error{}, map[uint32]string{}, map[uint32]Path{}
	lanes := c.o.Lanes
	if m := int(rep.MaxLanes); m > 0 && lanes > m {
		lanes = m
	}
	s.core, err = engine.NewCore(engine.Options{Session: rep.SessionId, Discriminator: rep.Discriminator,
		Lanes: lanes, BulkLane: c.bulkLane && (rep.MaxLanes == 0 || lanes < int(rep.MaxLanes)),
		CacheBytes: c.o.CacheBytes, MirrorBytes: c.o.MirrorBytes, Devices: c.o.Devices, Control: s,
		FullFor: int64(600 * time.Millisecond), ReadOnly: c.o.ReadOnly, Hash: s.hash, Frequency: frequency{c},
		Broken: func(err error) {
			c.o.Logger.Error("the directory contradicts itself", "session", rep.SessionId, "err", err)
		},
		HoldBytes: c.o.ViewBytes, MostHolds: c.o.Views,
		OpTimeout: int64(c.o.OpTimeout), WillWait: inside.WillWait, Limit: inside.MemoryLimit, Expiring: s.expiring,
		Stirred: s.stir, Crowded: s.crowd, Nanos: engine.Nanos, Millis: engine.Millis})
	if err != nil {
		return nil, err
	}
	c.arenas.addSession(s)
	s.core.SetEpoch(rep.Epoch)
	seq := s.core.BeginRenew()
	s.core.EndRenew(seq, rep.Epoch, rep.MinEpoch, sent+int64(rep.LeaseMillis)*int64(time.Millisecond))
	s.agenda = session.NewAgenda(s.core, session.AgendaOptions{Renew: int64(s.renew), Term: rep.Term,
		ReadOnly: c.o.ReadOnly, Token: rep.Token, TokenNumber: rep.TokenNumber,
		RefusedPause: int64(50 * time.Millisecond), FencePause: int64(20 * time.Millisecond),
		SplitPause: int64(100 * time.Millisecond),
		DialPause:  int64(time.Millisecond), DialPauseMost: int64(250 * time.Millisecond),
		DownPause: int64(20 * time.Millisecond)})
	s.expiries = make([]expiries, len(s.core.Lanes()))
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	if !c.o.ReadOnly && !c.o.NoEviction {
		s.evictor = newEvictor(s)
		s.wg.Add(1)
		go s.evictor.run()
	}
	if c.o.MirrorBytes > 0 {
		s.wg.Go(s.readImages)
	}
	s.wg.Go(s.watch)
	s.wg.Go(s.control)
	select {
	case <-s.ready:
		old := c.sess.Swap(s) // before lost may replace it
		if s.opened.CompareAndSwap(0, 1) {
			return s, nil
		}
		c.sess.Store(old)
		close(s.replaced)
	case <-s.ctx.Done(): // see lost
		s.opened.CompareAndSwap(0, 2)
	case <-ctx.Done():
		s.close(context.Background())
		return nil, fmt.Errorf("%w: no map for namespace %q: %w", ErrUnavailable, c.o.Namespace, context.Cause(ctx))
	}
	s.close(context.Background())
	return nil, fmt.Errorf("%w: no map for namespace %q: %w", ErrUnavailable, c.o.Namespace, context.Cause(s.ctx))
}

func (s *sess) WantMemory(pg, units uint32) {
	s.stir()
	if v := s.core.View(); s.evictor != nil && s.core.Exhausted(pg) && v != nil && v.PGs[pg] != nil &&
		v.PGs[pg].Cache {
		s.evictor.starves(pg, units) // which asks the directory again now and then
		return
	}
	s.agenda.WantMemory(pg, units)
	s.wake()
}

// grantOnce asks for memory. A reply that is lost leaks its run to recall, so a call whose
// fate is unknown is not repeated blindly; the task that waits asks anew.
func (s *sess) grantOnce(ask session.Ask) {
	ctx, cancel := context.WithTimeout(s.ctx, 5*time.Second)
	defer cancel()
	pg, units := ask.Grant.GetPgId(), ask.Grant.GetPlaceUnits()
	var r session.Reply
	r.Err = s.c.dir.CallOnce(ctx, func(ctx context.Context, dc dirpb.DirectoryClient) (err error) {
		r.Grant, err = dc.GrantExtent(ctx, ask.Grant)
		return err
	})
	s.agenda.Answer(ask, r)
	switch {
	case r.Err != nil:
		if s.ctx.Err() == nil {
			s.c.o.Logger.Warn("no memory granted", "pg", pg, "err", r.Err)
		}
		return // renewals make the waiting ask again
	case len(r.Grant.GetRuns()) == 0 && ask.Ahead:
		return
	case len(r.Grant.GetRuns()) == 0 && s.evictor != nil && !s.core.Idle(pg, r.Grant.GetComingUnits()):
		s.evictor.starves(pg, units)
	}
	for _, l := range s.core.Lanes() {
		l.Deliver(func(*engine.Lane) {})
		l.Visit()
	}
}

func (s *sess) WantFenced(id uint32) { s.wakeIf(s.agenda.WantFenced(id)) }

// fenceOnce asks whether another session is fenced: until it is, its locks are not broken.
func (s *sess) fenceOnce(ask session.Ask) {
	ctx, cancel := context.WithTimeout(s.ctx, 5*time.Second)
	defer cancel()
	var r session.Reply
	r.Err = s.c.dir.Call(ctx, func(ctx context.Context, dc dirpb.DirectoryClient) (err error) {
		r.Fence, err = dc.SessionState(ctx, ask.Fence)
		return err
	})
	s.agenda.Answer(ask, r)
}

func (s *sess) WantSplit(shard uint32) { s.wakeIf(s.agenda.WantSplit(shard)) }

// splitOnce tells the directory of a shard that lacks room. The map brings the answer.
func (s *sess) splitOnce(ask session.Ask) {
	ctx, cancel := context.WithTimeout(s.ctx, 5*time.Second)
	defer cancel()
	shard := ask.Split.GetShardId()
	var r session.Reply
	r.Err = s.c.dir.Call(ctx, func(ctx context.Context, dc dirpb.DirectoryClient) (err error) {
		r.Split, err = dc.RequestSplit(ctx, ask.Split)
		return err
	})
	s.agenda.Answer(ask, r)
	switch {
	case r.Err != nil:
		s.c.o.Logger.Warn("no split", "shard", shard, "err", r.Err)
	case !r.Split.GetGrowing():
		s.c.o.Logger.Warn("shard cannot grow", "shard", shard, "why", r.Split.GetWhy())
	}
}

// close ends the session: operations under way get until ctx, queue pairs are
// closed, memory goes back. A lost session (ctx of it cancelled) only frees what
// is local; the directory fences it. It is idempotent.
func (s *sess) close(ctx context.Context) {
	s.closing.Do(func() { s.end(ctx) })
}

// end closes the session in the order that loses nothing: no more operations, then no more grants, then what the
// session holds is handed back with its end, and only then its connections and memory go.
func (s *sess) end(ctx context.Context) {
	graceful := s.ctx.Err() == nil
	settled := s.status.drain(ctx)
	s.core.Shut()
	if s.evictor != nil {
		s.evictor.stop() // what it waits for may not come: a memory node that is silent, and has the only copy
	}
	lanes := s.core.Lanes()
	held := 0
	hold := func() {
		if lanes[held].TryOwn() {
			held++
		} else {
			lanes[held].Kick()
			time.Sleep(200 * time.Microsecond)
		}
	}
	for graceful && held < len(lanes) && ctx.Err() == nil {
		hold()
	}
	// Memory that a grant under way brings is to go back with the rest.
	for end := time.Now().Add(endGrants); graceful && !s.agenda.Ending() && ctx.Err() == nil && s.ctx.Err() == nil &&
		time.Now().Before(end); {
		time.Sleep(200 * time.Microsecond)
	}
	// Owners of lanes give up now; a lane's buffers must not go before its owner.
	s.core.End()
	s.cancel(ErrClosed)
	s.status.end()
	for held < len(lanes) {
		hold()
	}
	s.wg.Wait()
	s.core.Wait()
	// From here on the lanes are nobody else's.
	clean := graceful
	lanes[0].GiveUpAll()
	for _, l := range lanes {
		l.Pump() // may bring a queue pair that was dialed meanwhile
		if l.Active() > 0 {
			clean = false
		}
		l.Conns(func(_ uint32, _ int, qp *rdma.QP) { _ = qp.Close() })
		s.c.mu.Lock()
		s.c.mu.past.add(l)
		s.counted = l == lanes[len(lanes)-1]
		if s.counted {
			s.c.mu.past.wentBy(s.agenda.Counts(), session.Counts{})
		}
		s.c.mu.Unlock()
		l.GiveBack(true)
	}
	if clean {
		before := s.agenda.Counts()
		s.giveBack(ctx, settled)
		s.c.mu.Lock()
		s.c.mu.past.wentBy(s.agenda.Counts(), before)
		s.c.mu.Unlock()
	}
	if err := errors.Join(s.c.arenas.removeSession(s), s.core.Close()); err != nil {
		s.c.o.Logger.Warn("closing session buffers", "err", err)
	}
}

// endGrants is how long the end of a session waits for a grant under way.
const endGrants = time.Second

// giveBack closes the session at the directory with the memory it holds; settled: it left no intent.
func (s *sess) giveBack(ctx context.Context, settled bool) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	req := s.agenda.Close()
	req.Settled = settled
	err := s.c.dir.Call(ctx, func(ctx context.Context, dc dirpb.DirectoryClient) error {
		_, err := dc.CloseSession(ctx, req)
		return err
	})
	if err != nil {
		s.c.o.Logger.Info("session not closed; it will be fenced", "session", s.id, "err", err)
	}
}

func defaultName() string {
	return fmt.Sprintf("%s pid %d", filepath.Base(os.Args[0]), os.Getpid())
}
