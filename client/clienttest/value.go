package clienttest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/kvd-project/kvd/client"
)

// GetRange is as in client.API. The hook is shown an OpGet.
func (s *Store) GetRange(ctx context.Context, key []byte, off int64, dst []byte) (n int, in client.Info, err error) {
	if off < 0 {
		return 0, client.Info{}, fmt.Errorf("%w: offset %d", client.ErrInvalid, off)
	}
	it, err := s.Get(ctx, key)
	if err != nil {
		return 0, client.Info{}, err
	}
	if off < int64(len(it.Value)) {
		n = copy(dst, it.Value[off:])
	}
	return n, infoOf(&it), nil
}

func infoOf(it *client.Item) client.Info {
	return client.Info{Size: int64(len(it.Value)), Version: it.Version, Expires: it.Expires}
}

// View is as in client.API. The hook is shown an OpGet. The View has a copy, which expires when o.Hold is
// over by the Store's clock.
func (s *Store) View(ctx context.Context, key []byte, o client.ViewOptions) (*client.View, error) {
	if o.Hold < 0 || o.Hold > 10*time.Second {
		return nil, fmt.Errorf("%w: Hold %v", client.ErrInvalid, o.Hold)
	}
	it, err := s.Get(ctx, key)
	if err != nil {
		return nil, err
	}
	if o.Hold == 0 {
		o.Hold = time.Second
	}
	var parts [][]byte
	if len(it.Value) > 0 {
		parts = [][]byte{it.Value}
	}
	return client.NewView(infoOf(&it), it.Flags, it.Note, parts, &held{s.o.Now, s.o.Now().Add(o.Hold)}), nil
}

// held is a client.ViewHolder of a View that stands until some time.
type held struct {
	now   func() time.Time
	until time.Time
}

func (h *held) Stands() bool  { return h.now().Before(h.until) }
func (h *held) Release() bool { return h.Stands() }

// Open is as in client.API. The hook is shown an OpGet, also for each part that is read.
func (s *Store) Open(ctx context.Context, key []byte) (*client.Value, error) {
	it, err := s.Get(ctx, key)
	if err != nil {
		return nil, err
	}
	key = bytes.Clone(key)
	return client.NewValue(infoOf(&it), it.Flags, it.Note, func(p []byte, off int64) error {
		now, err := s.Get(ctx, key)
		switch {
		case errors.Is(err, client.ErrNotFound), errors.Is(err, client.ErrWrongType),
			err == nil && now.Version != it.Version:
			return client.ErrConflict
		case err != nil:
			return err
		}
		copy(p, now.Value[off:])
		return nil
	}), nil
}

// PutFrom is as in client.API, but for how much memory it takes. The hook is shown an OpPut.
func (s *Store) PutFrom(ctx context.Context, key []byte, r io.Reader, size int64, o client.PutOptions) (uint64,
	error) {
	if err := checkKey(key); err != nil {
		return 0, err
	}
	if size < 0 {
		return 0, fmt.Errorf("%w: size %d", client.ErrInvalid, size)
	}
	if err := client.CheckLen(size, s.o.MaxValueLen); err != nil {
		return 0, err
	}
	if _, err := s.expiresIn(o.TTL); err != nil {
		return 0, err
	}
	v := make([]byte, size)
	if err := client.ReadAll(ctx, r, v, true); err != nil {
		return 0, fmt.Errorf("put %q: %w", key, err)
	}
	return s.Put(ctx, key, v, o)
}

// Pin is as in client.API. Eviction passes over a pinned key while another can go.
func (s *Store) Pin(ctx context.Context, key []byte, until time.Time) error {
	if until.IsZero() {
		return fmt.Errorf("%w: Pin: no time", client.ErrInvalid)
	}
	return s.pin(ctx, key, until)
}

// Unpin is as in client.API.
func (s *Store) Unpin(ctx context.Context, key []byte) error { return s.pin(ctx, key, time.Time{}) }

func (s *Store) pin(ctx context.Context, key []byte, until time.Time) error {
	o := client.Op{Kind: client.OpPin, Key: key, Expires: until}
	s.do(ctx, &o)
	return o.Err
}

// Exists is as in client.API.
func (s *Store) Exists(ctx context.Context, key []byte) (client.Info, error) {
	o := client.Op{Kind: client.OpExists, Key: key}
	if s.do(ctx, &o); o.Err != nil {
		return client.Info{}, o.Err
	}
	return client.Info{Size: -1, Version: o.Item.Version, Expires: o.Item.Expires}, nil
}
