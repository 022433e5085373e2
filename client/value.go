package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// Info is what the store knows of a value, besides its bytes.
type Info struct {
	Size    int64     // bytes of the whole value; -1, of an Exists: not known
	Version uint64    // as in Item
	Expires time.Time // as in Item
}

// Value is one version of a key's value, which is read by parts; see [Client.Open]. It holds no memory of
// the store. Once the key has been written or deleted the next part that is read says ErrConflict. ReadAt may be
// called concurrently; Read, WriteTo and Close go on from the same place, and belong to one goroutine.
type Value struct {
	Info
	Flags uint32 // as in Item
	Note  uint64 // as in Item

	at     func(p []byte, off int64) error // reads a part that is there, whole
	off    int64                           // that Read and WriteTo have come to
	buf    []byte                          // for WriteTo, and for short Reads
	lo, hi int64                           // the part of the value that buf holds

	closed atomic.Bool
}

var _ interface {
	io.ReadCloser
	io.ReaderAt
	io.WriterTo
} = (*Value)(nil)

// NewValue makes a Value for those who substitute a fake for a [Client]. at reads len(p) bytes from byte off on, which
// the value has.
func NewValue(info Info, flags uint32, note uint64, at func(p []byte, off int64) error) *Value {
	return &Value{Info: info, Flags: flags, Note: note, at: at}
}

// ReadAt is as in io.ReaderAt. A part costs what [Client.GetRange] of it costs. After an error other than io.EOF p is
// zeroes or what it was before.
func (v *Value) ReadAt(p []byte, off int64) (int, error) {
	n, err := v.part(p, off)
	if err == nil && n > 0 {
		err = v.at(p[:n], off)
	}
	switch {
	case err != nil:
		return 0, err
	case n < len(p):
		return n, io.EOF
	}
	return n, nil
}

// part is how many bytes of p the value fills from off on.
func (v *Value) part(p []byte, off int64) (int, error) {
	switch {
	case v.closed.Load():
		return 0, errValueClosed
	case off < 0:
		return 0, fmt.Errorf("%w: offset %d", ErrInvalid, off)
	}
	return int(min(int64(len(p)), max(0, v.Size-off))), nil
}

var errValueClosed = fmt.Errorf("%w: the value is closed", ErrClosed)

// aheadBytes is how much of a value Read and WriteTo read at a time.
const aheadBytes = 8 << 20

// Read is as in io.Reader. Short reads are served from a buffer of 8 MiB at most.
func (v *Value) Read(p []byte) (int, error) {
	switch {
	case v.closed.Load():
		return 0, errValueClosed
	case len(p) == 0:
		return 0, nil
	case v.off >= v.Size:
		return 0, io.EOF
	case (v.off < v.lo || v.off >= v.hi) && len(p) >= aheadBytes:
		n, err := v.ReadAt(p[:min(int64(len(p)), v.Size-v.off)], v.off)
		v.off += int64(n)
		return n, err
	}
	b, err := v.ahead()
	n := copy(p, b)
	v.off += int64(n)
	return n, err
}

// ahead is what buf has from off on, filled first if that is nothing. The value goes on at off.
func (v *Value) ahead() ([]byte, error) {
	if v.off < v.lo || v.off >= v.hi {
		n := int(min(aheadBytes, v.Size-v.off))
		if cap(v.buf) < n {
			v.buf = make([]byte, n)
		}
		v.lo, v.hi = 0, 0
		if _, err := v.ReadAt(v.buf[:n], v.off); err != nil {
			return nil, err
		}
		v.lo, v.hi = v.off, v.off+int64(n)
	}
	return v.buf[v.off-v.lo : v.hi-v.lo], nil
}

// WriteTo is as in io.WriterTo: it writes what Read has not come to. It has a buffer of 8 MiB at most.
func (v *Value) WriteTo(w io.Writer) (n int64, err error) {
	if v.closed.Load() {
		return 0, errValueClosed
	}
	for v.off < v.Size {
		b, err := v.ahead()
		if err != nil {
			return n, err
		}
		k, err := w.Write(b)
		n, v.off = n+int64(k), v.off+int64(k)
		if err == nil && k < len(b) {
			err = io.ErrShortWrite
		}
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

// Close ends the use of the Value: reads that follow return ErrClosed. Its buffer goes. The error is nil.
func (v *Value) Close() error {
	v.closed.Store(true)
	v.buf, v.lo, v.hi = nil, 0, 0
	return nil
}

// GetRange reads the bytes of key's value from byte off on into dst. n is less than len(dst) if the value ends before
// that, and 0 if it ends before off. A part of a value in chunks costs those chunks that it touches, each of them
// whole. A part of another value costs the whole record. dst is the Client's until GetRange returns; after an error
// each byte of it is zero or what it was before.
func (c *Client) GetRange(ctx context.Context, key []byte, off int64, dst []byte) (n int, in Info, err error) {
	if off < 0 {
		return 0, Info{}, fmt.Errorf("%w: offset %d", ErrInvalid, off)
	}
	q, in, err := c.part(ctx, key, &index.Part{Off: uint64(off), Len: uint64(len(dst))}, dst)
	defer q.free()
	return q.n, in, err
}

// part reads p to dst. The call is freed by who calls part.
func (c *Client) part(ctx context.Context, key []byte, p *index.Part, dst []byte) (*call, Info, error) {
	q := newCall(index.Get, key)
	if q.Err = checkKey(key); q.Err != nil {
		return q, Info{}, q.Err
	}
	q.Part, q.dst = p, dst
	if err := c.do(ctx, q); err != nil {
		q.n = 0
		return q, Info{}, err
	}
	return q, Info{Size: int64(p.Size), Version: q.own.Version, Expires: q.own.Expires}, nil
}

// takePart takes what was found for a Part: the whole of a record's value, or of one in chunks what was asked for.
func (q *call) takePart(r *layout.Record) {
	p := q.Part
	if p.Version != 0 && p.Version != r.Version {
		isThere(q.dst, r.Value, 0)
		q.Err = ErrConflict
		return
	}
	q.own = Item{Version: r.Version, Expires: expires(r.Expiry)}
	if r.Flags&layout.FlagManifest == 0 {
		v, flags, note := splitTail(r.Value, r.Flags)
		q.own.Flags, q.own.Note, p.Size, q.n, p.Known = flags, note, uint64(len(v)), 0, nil
		if p.Off < uint64(len(v)) {
			q.n = copy(q.dst, v[p.Off:])
		}
		return
	}
	if q.n = len(r.Value); p.Tail {
		_, q.own.Flags, q.own.Note = splitTail(r.Value, r.Flags)
		q.n = 0
	} else if !isThere(q.dst, r.Value, q.n) {
		copy(q.dst, r.Value)
	}
}

// Open begins to read the value of key by parts, or returns ErrNotFound. All parts are of one version. ctx holds for
// reads of the Value, too; each of them ends after Options.OpTimeout at the latest. A part of a value in chunks
// takes one round trip while the key's hint is remembered.
func (c *Client) Open(ctx context.Context, key []byte) (*Value, error) {
	p := &index.Part{Tail: true}
	q, in, err := c.part(ctx, key, p, make([]byte, maxTail))
	defer q.free()
	if err != nil {
		return nil, err
	}
	key = bytes.Clone(key)
	var known atomic.Pointer[index.Long]
	known.Store(p.Known)
	return NewValue(in, q.own.Flags, q.own.Note, func(b []byte, off int64) error {
		p := &index.Part{Off: uint64(off), Len: uint64(len(b)), Version: in.Version, Known: known.Load()}
		q, _, err := c.part(ctx, key, p, b)
		defer q.free()
		switch {
		case errors.Is(err, ErrNotFound), errors.Is(err, ErrWrongType):
			return ErrConflict
		case err == nil && q.n < len(b):
			clear(b[:q.n])
			return fmt.Errorf("get %q: %w: version %d has fewer bytes than it had", shortKey(key), ErrCorrupt,
				in.Version)
		case err == nil && p.Known != nil:
			known.Store(p.Known)
		}
		return err
	}), nil
}

// maxTail is the most that flags and a note take behind a value, bytes.
const maxTail = 12
