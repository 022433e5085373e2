package client

import (
	"context"
	"fmt"
	"time"

	"github.com/kvd-project/kvd/internal/layout"
)

// MaxPin is how long a pin may last from now on.
const MaxPin = layout.MaxPinMillis * time.Millisecond

// ErrNoPins: the namespace is a cache that lets no key be pinned; see kvctl namespace set --max-pinned. It is an
// ErrInvalid, too.
var ErrNoPins = fmt.Errorf("%w: no key of the namespace may be pinned (kvctl namespace set --max-pinned)", ErrInvalid)

// Pin has eviction pass over key until a time at most MaxPin from now, or returns ErrNotFound. The time goes by this
// machine's clock, and by the clocks of those who evict. The latest of several pins counts. A use or a Put of the key
// leaves it pinned; a Delete does not, and it expires as ever.
//
// A pin is a hint, written without a wait. It is lost if its WRITE is, if the key moves to another memory node, or if a
// copy is made or lost meanwhile. While more is pinned than the namespace allows (kvctl namespace set --max-pinned)
// pinned keys are evicted first. A lost pin costs a miss. In a namespace that is no cache nothing is evicted, so Pin
// only looks whether the key is there.
func (c *Client) Pin(ctx context.Context, key []byte, until time.Time) error {
	if until.IsZero() {
		return fmt.Errorf("%w: Pin: no time", ErrInvalid)
	}
	return c.pin(ctx, key, until)
}

// Unpin ends what Pin began, whoever called that, or returns ErrNotFound.
func (c *Client) Unpin(ctx context.Context, key []byte) error { return c.pin(ctx, key, time.Time{}) }

func (c *Client) pin(ctx context.Context, key []byte, until time.Time) error {
	ops := [1]Op{{Kind: OpPin, Key: key, Expires: until}}
	c.Do(ctx, ops[:])
	return ops[0].Err
}

// checkPin refuses times that are too far ahead, and pins where there are none.
func (c *Client) checkPin(until time.Time) error {
	s := c.sess.Load()
	switch d := time.Until(until); {
	case until.IsZero():
	case d > MaxPin:
		return fmt.Errorf("%w: pinned for %v, want %v at most", ErrInvalid, d.Round(time.Second), MaxPin)
	case s.evicts.Load() && s.pinned.Load() == 0:
		return ErrNoPins
	}
	return nil
}
