package ctl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/units"
)

// LongValue is the bytes from which on a value is read by parts.
const LongValue = 8 << 20

// PutFile puts the size bytes of f from where it is read, and goes there. Bytes that come to f meanwhile are left out.
func PutFile(ctx context.Context, s Store, key []byte, f *os.File, size int64, o client.PutOptions) (version uint64,
	err error) {
	at, err := f.Seek(0, io.SeekCurrent)
	if err != nil {
		return 0, err
	}
	if version, err = s.PutFrom(ctx, key, io.NewSectionReader(f, at, size), size, o); err == nil {
		_, _ = f.Seek(at+size, io.SeekStart) // the value is there in any case
	}
	return version, err
}

// Bounds of the keys and of the bytes that one call to the store moves.
const (
	BatchKeys  = 128
	BatchBytes = 8 << 20
)

// OpenFile opens a regular file of at most MaxValueLen bytes, and says how many there are.
func OpenFile(p string, open func(string, int, os.FileMode) (*os.File, error)) (*os.File, int64, error) {
	// Not to hang on a pipe that has taken the file's place.
	f, err := open(p, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0, err
	}
	st, err := f.Stat()
	switch {
	case err != nil:
	case !st.Mode().IsRegular():
		err = fmt.Errorf("%q: not a regular file", p)
	case st.Size() > client.MaxValueLen:
		err = tooLong(p, st.Size())
	default:
		return f, st.Size(), nil
	}
	return nil, 0, errors.Join(err, f.Close())
}

// ReadFile reads f, which was named p and had size bytes.
func ReadFile(f io.Reader, p string, size int64) ([]byte, error) {
	b := bytes.NewBuffer(make([]byte, 0, size+1))
	if n, err := b.ReadFrom(io.LimitReader(f, client.MaxValueLen+1)); err != nil {
		return nil, fmt.Errorf("%q: %w", p, err)
	} else if n > client.MaxValueLen {
		return nil, tooLong(p, n)
	}
	return b.Bytes(), nil
}

func tooLong(p string, n int64) error {
	return fmt.Errorf("%q: file of %s, at most %s fit in a value: nothing of it was stored", p, units.Bytes(n),
		units.Bytes(client.MaxValueLen))
}
