// Package patient reads and writes many keys of a store through package client, and bears with a store that cannot
// serve it for a while. It is for programs that go through whole namespaces. It leaves to them what they do with the
// keys.
//
// Start with [Do], which the others use. [Keys] goes through the keys of a namespace, and [Read] gets what they hold.
// All may be called concurrently; keys and values belong to the caller.
//
// A scan leaves damaged records out and tells of them at its end, as fsck does of files.
package patient

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/kvd-project/kvd/client"
)

// Patience is for how long Do repeats what the store could not serve, before it gives up.
const Patience = 30 * time.Second

// Store is what is used of a client.API.
type Store interface {
	Do(ctx context.Context, ops []client.Op)
	Scan(ctx context.Context, o client.ScanOptions) iter.Seq2[client.KV, error]
}

// Do repeats fn, which is idempotent, while the store cannot serve it, until Patience is over.
func Do(ctx context.Context, fn func() error) error {
	bo := backoff.NewExponentialBackOff()
	bo.InitialInterval, bo.MaxInterval = 20*time.Millisecond, time.Second
	_, err := backoff.Retry(ctx, func() (struct{}, error) {
		err := fn()
		if err != nil && !errors.Is(err, client.ErrUnavailable) && !errors.Is(err, client.ErrUnknownOutcome) ||
			ctx.Err() != nil {
			return struct{}{}, backoff.Permanent(err)
		}
		return struct{}{}, err
	}, backoff.WithBackOff(bo), backoff.WithMaxElapsedTime(Patience))
	if p := (*backoff.PermanentError)(nil); errors.As(err, &p) {
		return p.Err
	}
	return err
}

// Keys calls fn with every key that o selects, until fn returns false or fails. Corrupt records are left out, and an
// error at the end tells of them: LeftOut's.
func Keys(ctx context.Context, s Store, o client.ScanOptions, fn func(client.KV) (bool, error)) error {
	cur := client.Cursor{}
	o.Cursor, o.Count = &cur, 256
	var left []error
	for !cur.Done {
		var kvs []client.KV
		// A page that fails is tried again from where the cursor stands.
		err := Do(ctx, func() error {
			from := cur
			for kv, err := range s.Scan(ctx, o) {
				switch {
				case errors.Is(err, client.ErrCorrupt) && cur != from:
					left = append(left, err)
				case err != nil:
					return err
				default:
					kvs = append(kvs, kv)
				}
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("scan: %w", err)
		}
		for _, kv := range kvs {
			if more, err := fn(kv); !more || err != nil {
				return errors.Join(err, LeftOut(left))
			}
		}
	}
	return LeftOut(left)
}

// LeftOut is the error of a scan that is done but for what these say.
func LeftOut(left []error) error {
	const most = 8
	if n := len(left) - most; n > 0 {
		left = append(left[:most:most], fmt.Errorf("and of %d more places", n))
	}
	if len(left) == 0 {
		return nil
	}
	return fmt.Errorf("what is here was left out: %w", errors.Join(left...))
}

// Read performs reads, again those that the store could not serve. The error is of one of those; other errors are in
// the ops.
func Read(ctx context.Context, s Store, ops []client.Op) error {
	left := make([]*client.Op, len(ops))
	for i := range ops {
		left[i] = &ops[i]
	}
	return Do(ctx, func() error {
		some := make([]client.Op, len(left))
		for i, op := range left {
			some[i] = *op
		}
		s.Do(ctx, some)
		var again []*client.Op
		var first error
		for i, op := range some {
			*left[i] = op
			if errors.Is(op.Err, client.ErrUnavailable) || errors.Is(op.Err, client.ErrUnknownOutcome) ||
				op.Err != nil && ctx.Err() != nil {
				again = append(again, left[i])
				if first == nil {
					first = fmt.Errorf("key %.64q: %w", op.Key, op.Err)
				}
			}
		}
		left = again
		return first
	})
}
