package archive

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"time"
)

// Destination holds files by names such as shop/20261122T003000Z-full/MANIFEST.json, whose parts are of a-z, A-Z, 0-9
// and . _ - and are neither . nor .. alone. A file does not change once it is there. Its methods may be called
// concurrently. An error of a name that is not there is fs.ErrNotExist.
type Destination interface {
	// Create begins a file, which is not there before its Commit.
	Create(ctx context.Context, name string) (File, error)
	// Read gives all of a file.
	Read(ctx context.Context, name string) (io.ReadCloser, error)
	// List gives files whose names begin with prefix, which is "" or ends in a slash, in order of their names.
	List(ctx context.Context, prefix string) ([]Info, error)
	// Delete takes a file away; that it is not there is no error.
	Delete(ctx context.Context, name string) error
	// PutIfAbsent makes a file of b that is safe when PutIfAbsent returns. fs.ErrExist: there is one.
	PutIfAbsent(ctx context.Context, name string, b []byte) error
	// String is where it is, for people.
	String() string
}

// File is one that is being written, by one goroutine.
type File interface {
	io.Writer
	// Commit makes the file be there, whole and safe.
	Commit() error
	// Abort leaves nothing of it. After a Commit it does nothing.
	Abort()
}

// Info is what List tells of a file.
type Info struct {
	Name  string
	Bytes int64
	Time  time.Time // when it was written
}

// readAll reads a file of at most most bytes.
func readAll(ctx context.Context, d Destination, name string, most int64) ([]byte, error) {
	r, err := d.Read(ctx, name)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.LimitReader(r, most+1))
	switch err = errors.Join(err, r.Close()); {
	case err != nil:
		return nil, err
	case int64(len(b)) > most:
		return nil, &CorruptError{name, most, errors.New("it is longer than any such file")}
	}
	return b, nil
}

// exists reports whether a file is there already that somebody was to make.
func exists(err error) bool { return errors.Is(err, fs.ErrExist) }
