package archive

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
)

// OpenFolder opens the folder of a URL such as file:///var/backups/kvd. create makes it if it is not there. The
// function returned closes it.
func OpenFolder(x *url.URL, create bool) (Destination, func() error, error) {
	if x.Scheme != "file" || x.User != nil || x.Host != "" && x.Host != "localhost" || !path.IsAbs(x.Path) ||
		x.RawQuery != "" || x.Fragment != "" {
		return nil, nil, errors.New("want file:// and an absolute path, such as file:///var/backups/kvd")
	}
	dir := filepath.FromSlash(x.Path)
	if create {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, nil, err
		}
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, nil, err
	}
	return &folder{root}, root.Close, nil
}

// folder is a Destination of files below a folder, which no name or link leads out of.
type folder struct{ root *os.Root }

var _ Destination = (*folder)(nil)

var nameForm = regexp.MustCompile(`^[A-Za-z0-9._-]{1,128}$`)

// CheckFileName refuses what a Destination does not hold.
func CheckFileName(name string) error {
	for part := range strings.SplitSeq(name, "/") {
		if !nameForm.MatchString(part) || part == "." || part == ".." {
			return fmt.Errorf("%.80q is no name of a file of an archive", name)
		}
	}
	return nil
}

func (d *folder) String() string { return (&url.URL{Scheme: "file", Path: d.root.Name()}).String() }

// temporary begins the names of files that are not there yet.
const temporary = ".new-"

func (d *folder) Create(_ context.Context, name string) (File, error) {
	if err := CheckFileName(name); err != nil {
		return nil, err
	}
	dir := path.Dir(name)
	if err := d.root.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f := &file{d: d, name: name, temp: path.Join(dir, temporary+rand.Text())}
	var err error
	f.File, err = d.root.OpenFile(f.temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	return f, nil
}

// file has another name until it is whole.
type file struct {
	*os.File
	d          *folder
	name, temp string
	done       bool
}

// Commit links the file to its name rather than rename it: that fails if there is one.
func (f *file) Commit() error {
	if f.done {
		return fs.ErrClosed
	}
	defer f.Abort()
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.d.root.Link(f.temp, f.name); err != nil {
		return err
	}
	return f.d.sync(path.Dir(f.name))
}

func (f *file) Abort() {
	if !f.done {
		f.done = true
		_ = f.Close()
		_ = f.d.root.Remove(f.temp)
	}
}

// sync makes safe which files a folder has, and the folders that lead to it.
func (d *folder) sync(dir string) error {
	for {
		f, err := d.root.Open(dir)
		if err != nil {
			return err
		}
		if err := errors.Join(f.Sync(), f.Close()); err != nil || dir == "." {
			return err
		}
		dir = path.Dir(dir)
	}
}

func (d *folder) PutIfAbsent(ctx context.Context, name string, b []byte) error {
	f, err := d.Create(ctx, name)
	if err != nil {
		return err
	}
	defer f.Abort()
	if _, err := f.Write(b); err != nil {
		return err
	}
	return f.Commit()
}

func (d *folder) Read(_ context.Context, name string) (io.ReadCloser, error) {
	if err := CheckFileName(name); err != nil {
		return nil, err
	}
	// Not to hang on a pipe.
	f, err := d.root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s: not a regular file", name)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (d *folder) Delete(_ context.Context, name string) error {
	if err := CheckFileName(name); err != nil {
		return err
	}
	if err := d.root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if dir := path.Dir(name); dir != "." {
		_ = d.root.Remove(dir) // if it is empty
	}
	return nil
}

func (d *folder) List(_ context.Context, prefix string) ([]Info, error) {
	at := "."
	if prefix != "" {
		at = strings.TrimSuffix(prefix, "/")
		if err := CheckFileName(at); err != nil {
			return nil, err
		}
	}
	var all []Info
	err := fs.WalkDir(d.root.FS(), at, func(name string, e fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil // it went meanwhile, or there is no such folder
		case err != nil:
			return err
		case !e.Type().IsRegular():
			return nil
		}
		st, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil && CheckFileName(name) == nil {
			all = append(all, Info{name, st.Size(), st.ModTime()})
		}
		return err
	})
	slices.SortFunc(all, func(a, b Info) int { return strings.Compare(a.Name, b.Name) })
	return all, err
}
