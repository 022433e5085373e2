package gateway

import (
	heaps "container/heap"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/redis/exec"
	"github.com/kvd-project/kvd/internal/redis/live"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// expiries are the keys to which this gateway has given an expiry while somebody asked for events of class x. Nothing
// in the store tells when a record expires, so the gateway looks for itself: shortly before the time, whether it still
// holds, and behind it, whether the key is gone. It is best effort: a key that is deleted in between counts as expired,
// as does one that was deleted before and is looked at too late for the first time, and one beyond maxExpiries is not
// looked at. times says which of the entries in due still counts: a key that was written again has an older one there,
// which is passed over when its time comes. So a key that is written often has many entries, all of which maxExpiries
// bounds.
type expiries struct {
	sync.Mutex
	due     dueHeap
	times   map[stagedName]int64 // of those that still hold, as far as this gateway knows; Unix ms
	running bool                 // watchExpiries is at work
	soon    chan struct{}        // capacity 1: the first one has changed
	done    sync.WaitGroup       // of watchExpiries, for Close
}

// dueKey is a key to look at.
type dueKey struct {
	stagedName
	at    int64 // Unix ms: the expiry
	check bool  // it has been seen to hold
}

const (
	maxExpiries = 100_000
	// A key is looked at so long before its time, and so long behind it.
	// The first look is early enough to be answered before the time, on a store that is not in trouble; the second one
	// is behind it, when the store does not show the record any more.
	beforeExpiry, behindExpiry = 50 * time.Millisecond, 5 * time.Millisecond
)

// when is the time of the key's next look.
func (d dueKey) when() time.Time {
	if d.check {
		return time.UnixMilli(d.at).Add(behindExpiry)
	}
	return time.UnixMilli(d.at).Add(-beforeExpiry)
}

// dueHeap has the earliest first.
type dueHeap []dueKey

func (h dueHeap) Len() int           { return len(h) }
func (h dueHeap) Less(i, j int) bool { return h[i].when().Before(h[j].when()) }
func (h dueHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *dueHeap) Push(x any)        { *h = append(*h, x.(dueKey)) }

// Pop is of heap.Interface. It keeps the array for what comes next.
func (h *dueHeap) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}

// watchExpiry notes the expiry of a key that was written; 0: it has none, or is gone.
// It is called for each write while somebody asks for events of class x, by any connection's goroutine, and never waits
// for the store.
func (g *Gateway) watchExpiry(db int, key []byte, at int64) {
	e := &g.expiries
	name := stagedName{DB: db, Name: string(key)}
	e.Lock()
	defer e.Unlock()
	if at == 0 {
		delete(e.times, name)
		return
	}
	// A key beyond the bound expires all the same; there is only no event of it.
	if len(e.due) >= maxExpiries || g.ctx.Err() != nil {
		return
	}
	if e.times == nil {
		e.times, e.soon = make(map[stagedName]int64), make(chan struct{}, 1)
	}
	e.times[name] = at
	heaps.Push(&e.due, dueKey{name, at, false})
	if !e.running {
		e.running = true
		e.done.Go(g.watchExpiries)
	}
	select {
	case e.soon <- struct{}{}:
	default:
	}
}

// watchExpiries looks at keys when it is time, until there are none.
// A single goroutine does it, which the first key starts and which ends when there is none; Close waits for it.
func (g *Gateway) watchExpiries() {
	e := &g.expiries
	for {
		e.Lock()
		if len(e.due) == 0 {
			e.running = false
			e.Unlock()
			return
		}
		wait := time.Until(e.due[0].when())
		if wait > 0 {
			e.Unlock()
			t := time.NewTimer(wait)
			select {
			case <-t.C:
			case <-e.soon:
			case <-g.ctx.Done():
			}
			if t.Stop(); g.ctx.Err() != nil {
				return
			}
			continue
		}
		d := heaps.Pop(&e.due).(dueKey)
		holds := e.times[d.stagedName] == d.at
		e.Unlock()
		if holds {
			g.lookAtExpiry(d)
		}
	}
}

// lookAtExpiry is the first look at a key, or the second one. A store that does not answer within a second costs the
// event: nobody is told of what was not seen.
func (g *Gateway) lookAtExpiry(d dueKey) {
	late := time.Now().UnixMilli() >= d.at // for the first look: nobody can say any more whether it held
	notify := values.EventClass(g.notify.Load())
	ctx, cancel := context.WithTimeout(inside.LimitMemory(g.ctx, eachLimit), time.Second)
	defer cancel()
	db := &g.dbs[d.DB]
	ops := []client.Op{{Kind: client.OpGet, Key: db.stored([]byte(d.Name)), Typed: true}}
	db.api.Do(ctx, ops)
	// A long value's expiry is not known without reading it: then it counts as the one that was set.
	large := errors.As(ops[0].Err, new(*inside.TooLargeError))
	e := &g.expiries
	switch {
	case !d.check && notify&values.OnExpired != 0 &&
		(large || ops[0].Err == nil && ops[0].Item.Expires.UnixMilli() == d.at):
		d.check = true
		e.Lock()
		heaps.Push(&e.due, d)
		e.Unlock()
		return
	case (d.check || late) && errors.Is(ops[0].Err, client.ErrNotFound):
		var box live.Outbox
		g.event(&box, notify, d.DB, exec.Event{Class: values.OnExpired, Name: "expired"}, []byte(d.Name))
		box.Flush()
		// A client that caches the key must drop it, as it must when it is written.
		if g.tracks() {
			g.o.Peers.Changed([]byte(d.Name))
			g.tracked.Invalidate(&box, nil, []live.Written{{Name: []byte(d.Name)}})
			box.Flush()
		}
	}
	e.Lock()
	if e.times[d.stagedName] == d.at {
		delete(e.times, d.stagedName)
	}
	e.Unlock()
}
