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

// lastPin is the last time for PutOptions.PinUntil.
var lastPin = time.Date(2105, 12, 31, 23, 59, 59, 0, time.UTC)

// CheckPinUntil is nil if a record can say that it is pinned until then, else ErrInvalid. It is what a Put asks of
// PutOptions.PinUntil, for other implementations of API.
func CheckPinUntil(until time.Time) error {
	if until.After(lastPin) {
		return fmt.Errorf("%w: pinned until %v, want %v at most", ErrInvalid, until, lastPin)
	}
	return nil
}

// pinnedUntil is until, of PutOptions, as a record with such an expiry holds it: Unix seconds, 0 if it is not pinned.
func (c *Client) pinnedUntil(until time.Time, expiry uint64) (uint32, error) {
	if until.IsZero() {
		return 0, nil
	}
	s := c.sess.Load()
	switch err := CheckPinUntil(until); {
	case err != nil:
		return 0, err
	case expiry > layout.MaxPinnedExpiry:
		return 0, fmt.Errorf("%w: pinned, and expires at %v, want %v at most", ErrInvalid, expires(expiry),
			expires(layout.MaxPinnedExpiry))
	case !s.evicts.Load() || time.Until(until) <= 0:
		return 0, nil
	case s.pinned.Load() == 0:
		return 0, ErrNoPins
	}
	return uint32(until.Add(time.Second - 1).Unix()), nil
}
