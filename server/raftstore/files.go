package raftstore

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// ownerOnly makes the operating system's files with mode 0600: Pebble asks for 0666, and
// leaves the rest to the umask.
type ownerOnly struct{ vfs.FS }

const fileMode = 0o600

// make makes an empty file, which must not exist.
func (ownerOnly) make(name string) error {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, fileMode)
	if err != nil {
		return err
	}
	return f.Close()
}

// Create implements vfs.FS: a file of that name is removed first.
func (o ownerOnly) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err := o.make(name); err != nil {
		return nil, err
	}
	return o.FS.OpenReadWrite(name, category)
}

// OpenReadWrite implements vfs.FS: a file that is missing is made.
func (o ownerOnly) OpenReadWrite(name string, category vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File,
	error) {
	if err := o.makeMissing(name); err != nil {
		return nil, err
	}
	return o.FS.OpenReadWrite(name, category, opts...)
}

// Lock implements vfs.FS: a file that is missing is made.
func (o ownerOnly) Lock(name string) (io.Closer, error) {
	if err := o.makeMissing(name); err != nil {
		return nil, err
	}
	return o.FS.Lock(name)
}

func (o ownerOnly) makeMissing(name string) error {
	if err := o.make(name); !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// mend takes from others what they may do with the files in dir, which an earlier version
// or a copy has left, and tells how many there were.
func (ownerOnly) mend(dir string) (mended int, err error) {
	all, err := os.ReadDir(dir)
	if err != nil {
		return 0, err
	}
	for _, e := range all {
		st, err := e.Info()
		if err != nil {
			return mended, err
		}
		if !st.Mode().IsRegular() || st.Mode().Perm()&0o077 == 0 {
			continue
		}
		if err := os.Chmod(filepath.Join(dir, e.Name()), fileMode); err != nil {
			return mended, fmt.Errorf("others may read %s, which may hold the cluster's key: %w", e.Name(), err)
		}
		mended++
	}
	return mended, nil
}
