package archive

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/patient"
)

// Bounds of what each worker holds.
const (
	workers    = 4
	batchKeys  = 128
	batchBytes = 8 << 20
	// longValue is the bytes from which on a value is read by parts.
	longValue = 8 << 20
	// longTries is how often a long value is begun that others change meanwhile.
	longTries = 8
	// partBytes are read of such a value at a time.
	partBytes = 4 << 20
)

// Store is what an archive uses of a client.
type Store interface {
	client.API
	// PutGiven is as in inside.Tools. Only Restore uses it.
	PutGiven(ctx context.Context, records []inside.Given)
}

// CreateOptions say how a snapshot is made.
type CreateOptions struct {
	// Rate bounds what is read, in bytes of values a second; 0: no bound.
	Rate int64
	// Done, if not nil, is told of keys and their bytes as they are written. It may be called concurrently.
	Done func(keys, bytes int)
	// Manifest has what the caller knows: the cluster, the namespace, who writes.
	Manifest Manifest
	Now      func() time.Time
}

// Create makes a snapshot of the namespace that a session reads, which needs no right to write. Every record in it was
// its key's state at some moment between T0 and T1. A transaction may be in it by half: it equals as many single reads
// as there are keys. A key that stood there throughout is in it, perhaps twice if it has moved: the later version
// counts.
//
// An error with a manifest says what was left out, since it is damaged. Any other leaves no snapshot.
func Create(ctx context.Context, s Store, d Destination, o CreateOptions) (*Manifest, error) {
	w, err := NewWriter(ctx, d, o.Manifest.Namespace.Name, o.Now())
	if err != nil {
		return nil, err
	}
	c := &creation{s: s, w: w, o: &o, rate: pace{bytes: o.Rate, begun: time.Now()}}
	if err = c.run(ctx); err == nil {
		left := c.left()
		o.Manifest.T1, o.Manifest.LeftOut = o.Now(), c.mu.leftOut
		var m *Manifest
		if m, err = w.Commit(ctx, o.Manifest); err == nil {
			return m, left
		}
	}
	// The context may be over; files that stay are no snapshot all the same.
	tidy, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	return nil, errors.Join(err, w.Abort(tidy))
}

// creation is a Create under way.
type creation struct {
	s    Store
	w    *Writer
	o    *CreateOptions
	rate pace
	mu   struct {
		sync.Mutex
		leftOut int64
		errs    []error
	}
}

// leaveOut counts what cannot be read since it is damaged.
func (c *creation) leaveOut(err error) {
	const named = 16
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.leftOut++; len(c.mu.errs) < named {
		c.mu.errs = append(c.mu.errs, err)
	}
}

func (c *creation) left() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return patient.LeftOut(c.mu.errs)
}

// run lists the keys and has workers read and write them.
func (c *creation) run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	work := make(chan []client.Op)
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(work)
		if err := c.list(ctx, work); err != nil {
			cancel(err)
		}
	})
	for range workers {
		wg.Go(func() {
			if err := c.work(ctx, work); err != nil {
				cancel(err)
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// list sends the keys, so many that what they hold fits into batchBytes.
func (c *creation) list(ctx context.Context, work chan<- []client.Op) error {
	var batch []client.Op
	size := 0
	send := func() error {
		some := batch
		batch = nil
		if err := c.rate.take(ctx, size); err != nil {
			return err
		}
		size = 0
		select {
		case work <- some:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	err := patient.Keys(ctx, c.s, client.ScanOptions{KeysOnly: true}, func(kv client.KV) (bool, error) {
		if len(batch) == batchKeys || len(batch) > 0 && size+kv.Len > batchBytes {
			if err := send(); err != nil {
				return false, err
			}
		}
		batch = append(batch, client.Op{Kind: client.OpGet, Key: kv.Key, Typed: true})
		size += len(kv.Key) + kv.Len
		return true, nil
	})
	if errors.Is(err, client.ErrCorrupt) { // the rest is to be had
		c.leaveOut(err)
		err = nil
	}
	if err == nil && len(batch) > 0 {
		err = send()
	}
	return err
}

// work reads batches and writes them to segments of its own.
func (c *creation) work(ctx context.Context, work <-chan []client.Op) error {
	seg := c.w.Segment()
	defer seg.Abort()
	limited := inside.LimitMemory(ctx, longValue)
	for ops := range work {
		if err := patient.Read(limited, c.s, ops); err != nil {
			return err
		}
		for i := range ops {
			if err := c.write(ctx, seg, &ops[i]); err != nil {
				return err
			}
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return seg.Close()
}

// write writes what a read has found.
func (c *creation) write(ctx context.Context, seg *SegmentWriter, op *client.Op) error {
	n := len(op.Item.Value)
	switch large := (*inside.TooLargeError)(nil); {
	case op.Err == nil:
		r := recordOf(op.Key, &op.Item)
		if err := seg.Add(ctx, &r); err != nil {
			return err
		}
	case errors.Is(op.Err, client.ErrNotFound):
		return nil // it was deleted, or has expired, since it was listed
	case errors.As(op.Err, &large):
		size, err := c.stream(ctx, op.Key)
		switch {
		case errors.Is(err, client.ErrNotFound):
			return nil
		case errors.Is(err, client.ErrCorrupt):
			c.leaveOut(fmt.Errorf("key %.64q: %w", op.Key, err))
			return nil
		case err != nil:
			return err
		}
		n = size
	case errors.Is(op.Err, client.ErrCorrupt):
		c.leaveOut(fmt.Errorf("key %.64q: %w", op.Key, op.Err))
		return nil
	default:
		return fmt.Errorf("key %.64q: %w", op.Key, op.Err)
	}
	if c.o.Done != nil {
		c.o.Done(1, len(op.Key)+n)
	}
	return nil
}

// stream writes a long value, which it reads by parts of one version, to a segment of its own: that is forgotten if the
// value changes meanwhile. size is the value's.
func (c *creation) stream(ctx context.Context, key []byte) (size int, err error) {
	for range longTries {
		var again bool
		err := patient.Do(ctx, func() error {
			size, again, err = c.streamOnce(ctx, key)
			return err
		})
		if !again {
			return size, err
		}
	}
	// It changes faster than it is read by parts: it is read whole.
	op := []client.Op{{Kind: client.OpGet, Key: key, Typed: true}}
	if err := patient.Read(ctx, c.s, op); err != nil {
		return 0, err
	}
	if op[0].Err != nil {
		return 0, op[0].Err
	}
	seg := c.w.Segment()
	defer seg.Abort()
	r := recordOf(key, &op[0].Item)
	if err := seg.Add(ctx, &r); err != nil {
		return 0, err
	}
	return len(op[0].Item.Value), seg.Close()
}

// streamOnce is a try of stream. again says that the value has changed, or has a type.
func (c *creation) streamOnce(ctx context.Context, key []byte) (size int, again bool, err error) {
	v, err := c.s.Open(ctx, key)
	if errors.Is(err, client.ErrWrongType) {
		return 0, true, nil
	}
	if err != nil {
		return 0, false, err
	}
	defer v.Close()
	seg := c.w.Segment()
	defer seg.Abort()
	tail, flags := tailOf(v.Flags, v.Note, 0)
	r := Record{Key: key, Version: v.Version, Expiry: expiryOf(v.Expires), Flags: flags}
	off, buf := int64(0), []byte(nil)
	err = seg.AddFrom(ctx, &r, int(v.Size)+len(tail), func(part []byte) error {
		for len(part) > 0 {
			if len(buf) == 0 && off < v.Size {
				buf = append(buf[:0], make([]byte, min(partBytes, v.Size-off))...)
				if _, err := v.ReadAt(buf, off); err != nil {
					return err
				}
				off += int64(len(buf))
			}
			if len(buf) == 0 {
				buf, tail = tail, nil
			}
			if len(buf) == 0 {
				return io.ErrUnexpectedEOF
			}
			n := copy(part, buf)
			part, buf = part[n:], buf[n:]
		}
		return nil
	})
	if errors.Is(err, client.ErrConflict) {
		return 0, true, nil
	}
	if err != nil {
		return 0, false, err
	}
	return int(v.Size), false, seg.Close()
}

// recordOf is what was read of a key.
func recordOf(key []byte, it *client.Item) Record {
	tail, flags := tailOf(it.Flags, it.Note, it.Type)
	v := it.Value
	if len(tail) > 0 {
		v = append(v[:len(v):len(v)], tail...)
	}
	return Record{Key: key, Value: v, Len: len(v), Version: it.Version, Expiry: expiryOf(it.Expires), Flags: flags}
}

// tailOf is what stands behind a value for a note and user flags, and the flags of a record with a value of type t.
func tailOf(user uint32, note uint64, t client.Type) ([]byte, layout.RecordFlags) {
	f, b := layout.Type(t).Flags(), []byte(nil)
	if note != 0 {
		b, f = le.AppendUint64(b, note), f|layout.FlagNote
	}
	if user != 0 {
		b, f = le.AppendUint32(b, user), f|layout.FlagUser
	}
	return b, f
}

// expiryOf is a time as records hold it.
func expiryOf(t time.Time) uint64 {
	if t.IsZero() {
		return 0
	}
	return uint64(max(t.UnixMilli(), 1))
}

// pace has so many bytes a second go on, on the average since it was begun. It belongs to one goroutine.
type pace struct {
	bytes int64 // a second; 0: all
	begun time.Time
	taken int64
}

func (p *pace) take(ctx context.Context, n int) error {
	if p.bytes == 0 {
		return nil
	}
	p.taken += int64(n)
	due := time.Duration(float64(p.taken) / float64(p.bytes) * float64(time.Second))
	wait := time.Until(p.begun.Add(due))
	if wait <= 0 {
		return nil
	}
	select {
	case <-time.After(wait):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
