package clienttest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
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

// View is as in client.API. The hook is shown an OpGet. The View has a copy, which expires when o.Hold is over.
func (s *Store) View(ctx context.Context, key []byte, o client.ViewOptions) (*client.View, error) {
	it, err := s.Get(ctx, key)
	if err != nil {
		return nil, err
	}
	if o.Hold <= 0 {
		o.Hold = time.Second
	}
	var parts [][]byte
	if len(it.Value) > 0 {
		parts = [][]byte{it.Value}
	}
	return client.NewView(infoOf(&it), it.Flags, it.Note, parts, until(time.Now().Add(o.Hold))), nil
}

// until is a client.ViewHolder of what stands until then.
type until time.Time

func (t until) Stands() bool  { return time.Now().Before(time.Time(t)) }
func (t until) Release() bool { return t.Stands() }

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
