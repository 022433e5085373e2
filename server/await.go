package server

import (
	"context"
	"encoding/binary"
	"hash/fnv"
	"sync"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/lead"
)

// A store where nothing happens costs nothing: instead of asking again and again, memory nodes and
// janitors have their requests wait until there is an answer, and sessions are called.

// event happens again and again. The zero value is ready.
type event struct {
	mu struct {
		sync.Mutex
		ch chan struct{}
	}
}

// next is closed when the event happens next.
func (e *event) next() <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.mu.ch == nil {
		e.mu.ch = make(chan struct{})
	}
	return e.mu.ch
}

func (e *event) happens() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.mu.ch != nil {
		close(e.mu.ch)
		e.mu.ch = nil
	}
}

// waitMost is the longest that a request waits: its sender takes a directory node that is
// silent for longer for dead.
const waitMost = time.Second

// newsPause is the least time between two looks at what changed, for those who wait.
const newsPause = 10 * time.Millisecond

// await waits until answered, which is called after every happening, for so many milliseconds
// at most. It ends early with ctx, the node, or the leadership.
func (n *Node) await(ctx context.Context, l *leadership, millis uint64, next func() <-chan struct{},
	answered func() bool) {
	limit := min(time.Duration(min(millis, uint64(waitMost/time.Millisecond)))*time.Millisecond, waitMost)
	if limit <= 0 {
		answered()
		return
	}
	t := time.NewTimer(limit)
	defer t.Stop()
	for {
		happened, over := next(), n.reigns.next()
		if answered() || n.leading.Load() != l {
			return
		}
		select {
		case <-happened:
		case <-over:
		case <-t.C:
			return
		case <-ctx.Done():
			return
		case <-n.ctx.Done():
			return
		}
		// Much may change at a time, which concerns few of those who wait.
		select {
		case <-time.After(newsPause):
		case <-ctx.Done():
			return
		}
	}
}

// quotasOf is what a memory node with these regions holds their namespaces to.
func quotasOf(s *fsm.State, regions []*dirpb.WantRegion) (quotas []*dirpb.NamespaceQuota) {
	seen := make(map[uint32]bool)
	for _, r := range regions {
		if seen[r.NamespaceId] {
			continue
		}
		seen[r.NamespaceId] = true
		w := s.Namespace(r.NamespaceId)
		quotas = append(quotas, &dirpb.NamespaceQuota{NamespaceId: r.NamespaceId,
			TcpOpsPerSecond: w.GetQuota().GetTcpOpsPerSecond(), Name: w.GetName()})
	}
	return quotas
}

// newsOf sums up what a heartbeat's reply asks for, 0 for nothing. That a session was opened is
// no news: its token is younger than what the memory node knows.
func newsOf(r *dirpb.HeartbeatReply) uint64 {
	h := fnv.New64a()
	put := func(list ...uint64) {
		for _, v := range list {
			_, _ = h.Write(binary.LittleEndian.AppendUint64(nil, v)) // never fails
		}
	}
	for _, w := range r.Regions {
		published := uint64(0)
		if w.Published {
			published = 1
		}
		put(uint64(w.PgId), uint64(w.NamespaceId), w.RegionBytes, w.IndexBytes, uint64(w.Epoch), published, w.Since)
	}
	for _, id := range r.FenceSessions {
		put(uint64(id))
	}
	for _, k := range r.Keys {
		put(uint64(k.Generation))
	}
	for _, q := range r.Quotas {
		put(uint64(q.NamespaceId), q.TcpOpsPerSecond)
	}
	if r.Restart {
		put(1)
	}
	for _, pg := range r.RetainPgs {
		put(uint64(pg))
	}
	put(uint64(len(r.Regions)), uint64(len(r.Quotas)), uint64(len(r.RetainPgs)),
		uint64(r.GetSessions().GetLast())-uint64(len(r.GetSessions().GetLive())))
	return h.Sum64()
}

// callable begins a watch of the map through which a session can be called, until leave.
func (l *leadership) callable(session uint32) (call <-chan struct{}, leave func()) {
	ch := make(chan struct{}, 1)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.watches == nil {
		l.mu.watches = make(map[uint32]map[chan struct{}]bool)
	}
	if l.mu.watches[session] == nil {
		l.mu.watches[session] = make(map[chan struct{}]bool)
	}
	l.mu.watches[session][ch] = true
	return ch, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if delete(l.mu.watches[session], ch); len(l.mu.watches[session]) == 0 {
			delete(l.mu.watches, session)
		}
	}
}

// callLocked calls the sessions that somebody waits for.
func (l *leadership) callLocked(now time.Duration) {
	for _, id := range l.mu.Calls(now) {
		for ch := range l.mu.watches[id] {
			select {
			case ch <- struct{}{}:
			default: // it is being called
			}
		}
	}
}

// next is how long the planner may wait if nothing happens.
func (n *Node) next(l *leadership, x *lead.Leader, s *fsm.State, now time.Duration) time.Duration {
	calm := x.Calm(s, now)
	if l.calm.Store(calm); !calm {
		return max(min(n.opts.EpochInterval, n.opts.Lease/8)/2, 2*time.Millisecond)
	}
	pause := min(n.opts.Lease/4, calmTick)
	if at, ok := x.Lapse(now); ok {
		pause = min(pause, at-now+time.Millisecond)
	}
	return max(pause, 2*time.Millisecond)
}

// calmTick is the longest time between two looks at a state in which nothing happens: nobody
// may lack memory whose accounts are older.
const calmTick = 500 * time.Millisecond
