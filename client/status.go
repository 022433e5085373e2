package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
)

// statusWord is a status word of the session. It serves one transaction after another, one at a time.
type statusWord struct {
	at   index.StatusAt // Seq: of the last transaction
	word layout.Status  // what it holds
}

// statusWords are the status words that the directory has granted to a session, by placement group.
type statusWords struct {
	s  *sess
	mu struct {
		sync.Mutex
		pgs     map[uint32]*statusPG
		busy    int  // words that are taken
		aside   int  // words that nobody uses again
		closing bool // none is taken any more
		ended   bool // the session's goroutines are waited for
	}
}

// statusPG is what a session has of one placement group.
type statusPG struct {
	generation uint32
	blocks     []uint64 // offsets, in the order of their grants
	free       []*statusWord
	given      int           // words that are taken, or put aside
	asking     bool          // for another block
	changed    chan struct{} // closed when a word is free, or the asking has ended; nil: nobody waits for that
	leaving    []*dirpb.StatusBlock
}

// A session has at most so many blocks of a placement group: as many transactions under way, times
// layout.GroupSlots.
const maxStatusBlocks = 32

// take takes a status word of a placement group, and waits for one if all are in use.
func (w *statusWords) take(ctx context.Context, pg uint32) (*statusWord, error) {
	var until time.Time // zero: not waited yet
	for {
		x, changed, ask, err := w.tryTake(pg)
		switch {
		case x != nil || err != nil:
			return x, err
		case ask >= 0:
			if err := w.ask(ctx, pg, ask); err != nil {
				return nil, err
			}
			continue
		}
		if until.IsZero() {
			until = time.Now().Add(w.s.c.o.OpTimeout)
		}
		t := time.NewTimer(time.Until(until))
		select {
		case <-changed:
		case <-ctx.Done():
			err = context.Cause(ctx)
		case <-w.s.ctx.Done():
			err = engine.ErrLease
		case <-t.C:
			err = fmt.Errorf("%w: all status words of placement group %d are in use", ErrUnavailable, pg)
		}
		if t.Stop(); err != nil {
			return nil, err
		}
	}
}

// tryTake takes a word that is free. Otherwise changed is closed when there may be one, or the caller is to ask for
// another block: there are ask of them.
func (w *statusWords) tryTake(pg uint32) (x *statusWord, changed <-chan struct{}, ask int, err error) {
	v := w.s.core.View()
	p := v.PG(pg)
	if p == nil {
		return nil, nil, -1, fmt.Errorf("%w: no placement group %d", engine.ErrLease, pg)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.mu.closing {
		return nil, nil, -1, engine.ErrLease
	}
	q := w.mu.pgs[pg]
	if q == nil || q.generation < p.Generation {
		q = &statusPG{generation: p.Generation}
		w.mu.pgs[pg] = q
	}
	if n := len(q.free); n > 0 {
		x, q.free = q.free[n-1], q.free[:n-1]
		q.given++
		w.mu.busy++
		return x, nil, -1, nil
	}
	if q.asking || len(q.leaving) > 0 || len(q.blocks) >= maxStatusBlocks {
		if q.changed == nil {
			q.changed = make(chan struct{})
		}
		return nil, q.changed, -1, nil
	}
	q.asking = true
	return nil, nil, len(q.blocks), nil
}

// wakeLocked tells those who wait for a word.
func (q *statusPG) wakeLocked() {
	if q.changed != nil {
		close(q.changed)
		q.changed = nil
	}
}

// ask asks the directory for one more block than held, and reads its words.
func (w *statusWords) ask(ctx context.Context, pg uint32, held int) (err error) {
	b, words, err := w.grant(ctx, pg, held)
	w.mu.Lock()
	defer w.mu.Unlock()
	q := w.mu.pgs[pg]
	q.asking = false
	defer q.wakeLocked()
	if err != nil {
		return err
	}
	if b.GetGeneration() != q.generation {
		// the map is about to say so
		return fmt.Errorf("%w: placement group %d has lost its memory", engine.ErrLease, pg)
	}
	if slices.Contains(q.blocks, b.GetOffset()) {
		return fmt.Errorf("%w: the directory granted the status block at %#x of placement group %d twice",
			ErrUnavailable, b.GetOffset(), pg)
	}
	q.blocks = append(q.blocks, b.GetOffset())
	for i, x := range slices.Backward(words) { // the first one is taken first
		// The last owner may have begun the next transaction, and an intent of that be lost with the only copy, which
		// somebody has read. It says nothing, so this owner begins with the one after it.
		seq := x.Seq() + 1
		if seq >= layout.MaxStatusSeq-1 {
			continue
		}
		q.free = append(
			q.free, &statusWord{
				word: x, at: index.StatusAt{PG: pg, Generation: q.generation, Off: b.GetOffset() + layout.SlotOff(i),
					Seq: seq}})
	}
	return nil
}

// grant asks for a block and reads it.
func (w *statusWords) grant(ctx context.Context, pg uint32, held int) (*dirpb.StatusBlock, []layout.Status, error) {
	s := w.s
	var rep *dirpb.GrantStatusReply
	err := s.c.dir.Call(ctx, func(ctx context.Context, dc dirpb.DirectoryClient) (err error) {
		rep, err = dc.GrantStatus(ctx, &dirpb.GrantStatusRequest{SessionId: s.id, PgId: pg, Held: uint32(held)})
		return err
	})
	if err != nil {
		kind := ErrUnavailable
		switch status.Code(err) {
		case codes.ResourceExhausted:
			kind = ErrFull
		case codes.NotFound, codes.PermissionDenied:
			kind = engine.ErrLease // the session has ended, or the map changed
		}
		return nil, nil, fmt.Errorf("%w: status words of placement group %d: %w", kind, pg, dirclient.NoEffect(err))
	}
	b := rep.GetBlock()
	p := s.core.View().PG(pg)
	if p == nil || p.Generation != b.GetGeneration() {
		return b, nil, nil
	}
	end := p.IndexBytes
	if off := b.GetOffset(); b.GetPgId() != pg || off%layout.GroupSize != 0 || off < layout.RegionPageSize ||
		off > end-layout.GroupSize {
		return nil, nil, fmt.Errorf("%w: the directory granted a status block at %#x of placement group %d, whose "+
			"index ends at %#x", ErrUnavailable, off, b.GetPgId(), end)
	}
	words, err := w.readBlock(ctx, b)
	return b, words, err
}

// readBlock reads the words of a block at the head, and brings the other replicas up: their last owner may have died in
// between.
func (w *statusWords) readBlock(ctx context.Context, b *dirpb.StatusBlock) ([]layout.Status, error) {
	var calls [layout.GroupSlots]call
	var txns [layout.GroupSlots]index.Txn
	reqs := make([]*engine.Op, len(calls))
	for i := range calls {
		q := &calls[i]
		txns[i].Status = index.StatusAt{PG: b.GetPgId(), Generation: b.GetGeneration(), Off: b.GetOffset() +
			layout.SlotOff(i), Seq: 1}
		q.Kind, q.Lane, q.Asker, q.item, q.Txn = index.Decide, 1, q, &q.own, &txns[i]
		reqs[i] = &q.Op
	}
	w.s.core.Do(ctx, reqs)
	words := make([]layout.Status, len(calls))
	for i := range calls {
		switch err := calls[i].Err; {
		case errors.Is(err, index.ErrStatusLost):
			return nil, fmt.Errorf("%w: placement group %d has lost its memory", engine.ErrLease, b.GetPgId())
		case err != nil:
			return nil, w.s.c.public(w.s, &calls[i])
		}
		words[i] = txns[i].Found
		if err := words[i].Check(txns[i].Status.Off); err != nil {
			return nil, fmt.Errorf("%w: placement group %d: %w", ErrCorrupt, b.GetPgId(), err)
		}
	}
	return words, nil
}

// put gives back a word that no intent names. aside: one that some intent may name still, or come to name; nobody uses
// it again.
func (w *statusWords) put(x *statusWord, aside bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.busy--
	if aside {
		w.mu.aside++
	}
	q := w.mu.pgs[x.at.PG]
	if q == nil || q.generation != x.at.Generation || aside {
		return
	}
	q.given--
	if x.at.Seq < layout.MaxStatusSeq-1 {
		q.free = append(q.free, x)
	}
	q.wakeLocked()
}

// drain lets no transaction begin any more, and waits until those under way are settled. It reports whether none of the
// session's intents is left.
func (w *statusWords) drain(ctx context.Context) (settled bool) {
	for {
		w.mu.Lock()
		w.mu.closing = true
		busy, aside := w.mu.busy, w.mu.aside
		w.mu.Unlock()
		if busy == 0 {
			return aside == 0
		}
		select {
		case <-time.After(200 * time.Microsecond):
		case <-ctx.Done():
			return false
		case <-w.s.ctx.Done():
			return false
		}
	}
}

// work counts a goroutine among the session's that is about to start; false: there are to be no more.
func (w *statusWords) work() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.mu.ended {
		w.s.wg.Add(1)
	}
	return !w.mu.ended
}

// end lets no goroutine start any more.
func (w *statusWords) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.closing, w.mu.ended = true, true
}

// back gives the blocks that the session can give back: it has none to write to in their placement groups any more.
// They are named until the directory has heard of them.
func (w *statusWords) back() (list []*dirpb.StatusBlock) {
	v := w.s.core.View()
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, q := range w.mu.pgs {
		p := v.PG(id)
		if p == nil || p.Generation > q.generation {
			delete(w.mu.pgs, id) // its memory has gone
			continue
		}
		if q.given == 0 && !q.asking && len(q.blocks) > 0 && !slices.ContainsFunc(v.Shards, func(s engine.Shard) bool {
			return s.PG == p
		}) {
			for _, off := range q.blocks {
				q.leaving = append(q.leaving, &dirpb.StatusBlock{PgId: id, Generation: q.generation, Offset: off})
			}
			q.blocks, q.free = nil, nil
		}
		list = append(list, q.leaving...)
	}
	return list
}

// heard notes that the directory has taken list back.
func (w *statusWords) heard(list []*dirpb.StatusBlock) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, b := range list {
		if q := w.mu.pgs[b.GetPgId()]; q != nil && q.generation == b.GetGeneration() {
			q.leaving = slices.DeleteFunc(q.leaving, func(x *dirpb.StatusBlock) bool {
				return x.GetOffset() == b.GetOffset()
			})
			q.wakeLocked()
		}
	}
}
