package memcached

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
)

// laterFlush is the flush_all with a delay that was asked for last, as memcached has one. This Server alone knows of
// it.
type laterFlush struct {
	sync.Mutex
	cancel context.CancelFunc // nil: none is due
	wg     sync.WaitGroup
}

// flushRetry is the pause before a flush that was due, and failed, is tried again.
const flushRetry = time.Second

// flushAll flushes at a time, the zero one or one that has passed being now. It takes the place of one that is still
// due.
func (c *conn) flushAll(at time.Time) reply {
	wait := time.Duration(0)
	if !at.IsZero() {
		wait = at.Sub(c.s.o.Now())
	}
	c.s.flushLater(wait)
	if wait > 0 {
		return ok
	}
	c.link.Waits()
	return c.outcome(c.s.flush(c.smallCtx, c.remove), ok, ok)
}

// flushLater ends what is due, and lets a flush be due after wait if that is not 0.
func (s *Server) flushLater(wait time.Duration) {
	f := &s.later
	f.Lock()
	defer f.Unlock()
	if f.cancel != nil {
		f.cancel()
		f.cancel = nil
	}
	if wait <= 0 || s.ctx.Err() != nil {
		return
	}
	ctx, cancel := context.WithCancel(s.ctx)
	f.cancel = cancel
	f.wg.Go(func() {
		defer cancel()
		s.flushAfter(ctx, wait)
	})
}

// flushAfter waits, and then flushes until that succeeds.
func (s *Server) flushAfter(ctx context.Context, wait time.Duration) {
	share := s.o.Budget.Share(func(int64) {}) // it holds little, and for a moment
	defer share.Close()
	remove := func(key []byte) error {
		err := s.o.Client.Delete(inside.LimitMemory(ctx, eachLimit), key)
		if large := (*inside.TooLargeError)(nil); errors.As(err, &large) {
			n := readCost * int64(large.Want)
			if err := share.Take(ctx, n, memoryPatience); err != nil {
				return err
			}
			defer share.Drop(n)
			err = s.o.Client.Delete(inside.LimitMemory(ctx, large.Want), key)
		}
		return err
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		err := s.flush(inside.LimitMemory(ctx, eachLimit), remove)
		if err == nil || ctx.Err() != nil {
			return
		}
		s.o.Logger.Warn("a flush_all that was due failed, and is tried again", "err", err, "after", flushRetry)
		timer.Reset(flushRetry)
	}
}

// flush deletes every key that clients may name; ctx limits the memory of a batch, and remove deletes a key that needs
// more.
func (s *Server) flush(ctx context.Context, remove func(key []byte) error) error {
	var damaged error // of the first place whose keys are left
	for at := (client.Cursor{}); !at.Done; {
		var keys [][]byte
		from := at
		for kv, err := range s.o.Client.Scan(s.ctx, client.ScanOptions{Cursor: &at, Count: 256, KeysOnly: true,
			Expired: true}) {
			switch {
			case errors.Is(err, client.ErrCorrupt) && at != from:
				damaged = cmp.Or(damaged, err)
			case err != nil:
				return err
			default:
				if n, _ := inside.DatabaseOf(kv.Key); n == 0 {
					// the others' keys are those of gateways and of their other databases
					keys = append(keys, kv.Key)
				}
			}
		}
		for i, r := range s.o.Client.MultiDelete(ctx, keys) {
			err := r.Err
			if errors.As(err, new(*inside.TooLargeError)) {
				err = remove(keys[i])
			}
			if err != nil && !errors.Is(err, client.ErrNotFound) {
				return err
			}
		}
	}
	return damaged
}
