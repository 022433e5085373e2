package bulk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/patient"
	"github.com/kvd-project/kvd/internal/units"
)

// TreeWorkers bounds import and export. Each worker holds one batch, so memory stays
// below TreeWorkers times (ctl.BatchBytes plus one value of the largest size).
const (
	TreeWorkers = 4
	// exportKeys bounds a batch whose values' lengths are not known in advance.
	exportKeys = 32
)

func (a *commands) importCommand() *cobra.Command {
	var prefix string
	c := ctl.Changes(&cobra.Command{
		Use:   "import DIR",
		Short: "Store every file below a folder",
		Long: "Store every regular file below DIR; its key is the prefix and the path relative\n" +
			"to DIR with slashes, its value the file's bytes. Symbolic links, devices and\nempty folders are left " +
			"out; existing keys are overwritten.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			p, err := a.Prefix(prefix)
			if err != nil {
				return err
			}
			return a.importTree(cmd.Context(), args[0], p)
		},
	})
	c.Flags().StringVar(&prefix, "prefix", "", "begin every key with this")
	return c
}

func (a *commands) exportCommand() *cobra.Command {
	var prefix string
	var overwrite bool
	c := &cobra.Command{
		Use:   "export DIR",
		Short: "Write keys as files below a folder",
		Long: "Write every key that begins with the prefix to the file below DIR that the rest\n" +
			"of the key names. DIR is made if it is missing and must be empty otherwise. Keys\n" +
			"that are no safe relative path (absolute, with .., with NUL), and collections, are\nrefused, reported " +
			"and counted; then the exit status is 1.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			p, err := a.Prefix(prefix)
			if err != nil {
				return err
			}
			return a.exportTree(cmd.Context(), args[0], p, overwrite)
		},
	}
	c.Flags().StringVar(&prefix, "prefix", "", "only keys that begin with this, which is cut off")
	c.Flags().BoolVar(&overwrite, "overwrite", false,
		"let DIR hold files already, and replace those of the same name")
	return c
}

// TreeReport is what import and export print at the end.
type TreeReport struct {
	Files   int64   `json:"files"`
	Bytes   int64   `json:"bytes"`
	Skipped int64   `json:"skipped"` // links, devices; keys that went meanwhile
	Refused int64   `json:"refused"`
	Seconds float64 `json:"seconds"`
}

// tree counts while workers run.
type tree struct {
	a                              *commands
	verb                           string
	start                          time.Time
	bar                            *ctl.Bar
	files, bytes, skipped, refused atomic.Int64
	damaged                        atomic.Bool
	warn                           sync.Mutex
}

func (a *commands) newTree(verb, unit string, files func() int64) *tree {
	return &tree{a: a, verb: verb, start: time.Now(), bar: a.Bar(verb, unit, files)}
}

func (t *tree) done(n int) {
	t.files.Add(1)
	t.bytes.Add(int64(n))
	t.bar.Step(1)
}

// refuse reports a key or file that is left out; only the first ones by name.
func (t *tree) refuse(format string, args ...any) {
	const named = 10
	if n := t.refused.Add(1); n <= named {
		t.warn.Lock()
		defer t.warn.Unlock()
		t.a.Say("kvctl %s: "+format, append([]any{t.verb}, args...)...)
		if n == named {
			t.a.Say("kvctl %s: further ones are only counted", t.verb)
		}
	}
}

// damage reports memory that cannot be read; the rest is to be had.
func (t *tree) damage(err error) {
	t.damaged.Store(true)
	t.refuse("%v", err)
}

func (t *tree) finish(err error) error {
	t.bar.End()
	r := TreeReport{Files: t.files.Load(), Bytes: t.bytes.Load(), Skipped: t.skipped.Load(), Refused: t.refused.Load(),
		Seconds: time.Since(t.start).Seconds()}
	if err != nil {
		return ctl.Partly(r.Files > 0, err, "after %d files (%s)", r.Files, units.Rounded(r.Bytes))
	}
	if t.a.JSON() {
		err = t.a.PrintJSON(r)
	} else {
		t.a.PrintTable(ctl.Row{"Files", "Bytes", "Skipped", "Refused", "Seconds", "Files/s", "MiB/s"},
			[]ctl.Row{{r.Files, r.Bytes, r.Skipped, r.Refused, fmt.Sprintf("%.3f", r.Seconds),
				fmt.Sprintf("%.0f", float64(r.Files)/r.Seconds),
				fmt.Sprintf("%.1f", float64(r.Bytes)/r.Seconds/(1<<20))}})
	}
	switch {
	case err == nil && t.damaged.Load():
		return ctl.Fail(ctl.ExitOther)
	case err == nil && r.Refused > 0:
		return ctl.Fail(ctl.ExitNo)
	}
	return err
}

func (a *commands) importTree(ctx context.Context, dir string, prefix []byte) error {
	// WalkDir does not follow a link, not even its root.
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return err
	}
	root, err := os.OpenRoot(real)
	if err != nil {
		return err
	}
	defer root.Close()
	return a.With(ctx, ctl.SessionOptions{}, func(s ctl.Store) error {
		t := a.newTree("import", "files", func() int64 { return countFiles(real) })
		paths := make(chan string, 4*ctl.BatchKeys)
		c := ctl.NewCrew(ctx)
		c.Run(1, func(ctx context.Context) error {
			defer close(paths)
			return t.walk(ctx, real, paths)
		})
		c.Run(TreeWorkers, func(ctx context.Context) error { return t.store(ctx, s, root, prefix, paths) })
		return t.finish(c.Wait())
	})
}

func countFiles(dir string) (n int64) {
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			n++
		}
		return nil
	})
	return n
}

// walk sends the relative path of every regular file.
func (t *tree) walk(ctx context.Context, dir string, paths chan<- string) error {
	return filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir():
			return nil
		case !d.Type().IsRegular():
			t.skipped.Add(1)
			return nil
		}
		rel, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		select {
		case paths <- rel:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	})
}

// store puts the files that come over paths, a batch at a time.
func (t *tree) store(ctx context.Context, s ctl.Store, root *os.Root, prefix []byte, paths <-chan string) error {
	var batch []client.KV
	size := 0
	flush := func() error {
		err := t.putAll(ctx, s, batch)
		batch, size = batch[:0], 0
		return err
	}
	for p := range paths {
		key := append(bytes.Clone(prefix), filepath.ToSlash(p)...)
		if len(key) > client.MaxKeyLen {
			return fmt.Errorf("%q: key of %d bytes, at most %d: nothing of the file was stored", p, len(key),
				client.MaxKeyLen)
		}
		f, n, err := ctl.OpenFile(p, root.OpenFile)
		if err != nil {
			return err
		}
		if n > ctl.BatchBytes {
			err := errors.Join(flush(), t.putFile(ctx, s, key, f, n), f.Close())
			if err != nil {
				return err
			}
			continue
		}
		v, err := ctl.ReadFile(f, p, n)
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
		if size > 0 && size+len(v) > ctl.BatchBytes {
			if err := flush(); err != nil {
				return err
			}
		}
		batch = append(batch, client.KV{Key: key, Value: v})
		if size += len(v); size >= ctl.BatchBytes || len(batch) == ctl.BatchKeys {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return flush()
}

// putFile puts a file of size bytes, which is read a little at a time.
func (t *tree) putFile(ctx context.Context, s ctl.Store, key []byte, f *os.File, size int64) error {
	err := patient.Do(ctx, func() error {
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return err
		}
		_, err := ctl.PutFile(ctx, s, key, f, size, client.PutOptions{})
		return err
	})
	if err != nil {
		return t.a.About(key, err)
	}
	t.done(int(size))
	return nil
}

// putAll puts every pair, again those that the store could not serve.
func (t *tree) putAll(ctx context.Context, s ctl.Store, pairs []client.KV) error {
	for len(pairs) > 0 {
		err := patient.Do(ctx, func() error {
			var again []client.KV
			var first error
			for i, r := range s.MultiPut(ctx, pairs) {
				if r.Err == nil {
					t.done(len(pairs[i].Value))
					continue
				}
				again = append(again, pairs[i])
				if first == nil {
					first = t.a.About(pairs[i].Key, r.Err)
				}
			}
			pairs = again
			return first
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (a *commands) exportTree(ctx context.Context, dir string, prefix []byte, overwrite bool) error {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	if !overwrite {
		d, err := root.Open(".")
		if err != nil {
			return err
		}
		names, err := d.Readdirnames(1)
		_ = d.Close()
		if err == nil {
			return ctl.Usagef("%s: holds %q already; want an empty folder, or --overwrite", dir, names[0])
		} else if !errors.Is(err, io.EOF) {
			return err
		}
	}
	return a.With(ctx, ctl.SessionOptions{ReadOnly: true}, func(s ctl.Store) error {
		t := a.newTree("export", "files", func() int64 { return -1 })
		keys := make(chan []byte, 4*exportKeys)
		c := ctl.NewCrew(ctx)
		c.Run(1, func(ctx context.Context) error {
			defer close(keys)
			// A scan may give a key twice whose shard moves meanwhile; its file is written once.
			seen := make(map[string]struct{})
			err := patient.Keys(ctx, s, client.ScanOptions{KeysOnly: true, Match: ctl.Matcher(prefix, "")},
				func(kv client.KV) (bool, error) {
					if err := safePath(string(kv.Key[len(prefix):])); err != nil {
						t.refuse("key %s: %v", a.ShowKey(kv.Key), err)
						return true, nil
					}
					if _, ok := seen[string(kv.Key)]; ok {
						return true, nil
					}
					seen[string(kv.Key)] = struct{}{}
					select {
					case keys <- kv.Key:
						return true, nil
					case <-ctx.Done():
						return false, context.Cause(ctx)
					}
				})
			if errors.Is(err, client.ErrCorrupt) {
				t.damage(err)
				return nil
			}
			return err
		})
		made := &folders{seen: map[string]bool{".": true}}
		c.Run(TreeWorkers, func(ctx context.Context) error { return t.fetch(ctx, s, root, made, len(prefix), keys) })
		return t.finish(c.Wait())
	})
}

// safePath refuses what would leave the folder, or name no file in it.
func safePath(p string) error {
	switch {
	case p == "":
		return errors.New("refused: nothing is left of it behind the prefix")
	case strings.ContainsRune(p, 0):
		return errors.New("refused: holds a NUL byte")
	case strings.HasPrefix(p, "/"):
		return errors.New("refused: an absolute path")
	case path.Clean(p) != p, !filepath.IsLocal(filepath.FromSlash(p)), p == ".":
		return errors.New("refused: not a plain relative path (.., . or an empty component)")
	}
	return nil
}

// fetch gets the keys that come over the channel, and writes their files. It
// learns from the values so far how many keys to ask for at once.
func (t *tree) fetch(ctx context.Context, s ctl.Store, root *os.Root, made *folders, prefixLen int,
	keys <-chan []byte) error {
	want := 1
	var batch [][]byte
	flush := func() error {
		most, err := t.getAll(ctx, s, root, made, prefixLen, batch)
		batch = batch[:0]
		want = min(max(ctl.BatchBytes/max(most, 1), 1), 2*want, exportKeys)
		return err
	}
	for k := range keys {
		if batch = append(batch, k); len(batch) >= want {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	_, err := t.getAll(ctx, s, root, made, prefixLen, batch)
	return err
}

// getAll fetches keys and writes their files; it returns the longest value's
// length.
func (t *tree) getAll(ctx context.Context, s ctl.Store, root *os.Root, made *folders, prefixLen int, keys [][]byte) (
	most int, err error) {
	for len(keys) > 0 {
		err := patient.Do(ctx, func() error {
			var again [][]byte
			var first error
			for i, r := range s.MultiGet(inside.LimitMemory(ctx, ctl.LongValue), keys) {
				p := filepath.FromSlash(string(keys[i][prefixLen:]))
				if large := (*inside.TooLargeError)(nil); errors.As(r.Err, &large) {
					most = max(most, ctl.LongValue)
					var stop error
					if r.Err, stop = t.stream(ctx, s, root, made, p, keys[i]); stop != nil {
						return stop
					}
				} else if r.Err == nil {
					most = max(most, len(r.Value))
					if err := t.write(root, made, p, func(w io.Writer) (int64, error) {
						n, err := w.Write(r.Value)
						return int64(n), err
					}); err != nil {
						return err
					}
				}
				switch {
				case r.Err == nil:
				case errors.Is(r.Err, client.ErrNotFound):
					t.skipped.Add(1)
				case errors.Is(r.Err, client.ErrWrongType):
					t.refuse("key %s: refused: a collection, which no file can be: kvctl scan --long -o json keeps "+
						"it, and kvctl mirror copies it to another store", t.a.ShowKey(keys[i]))
				case errors.Is(r.Err, client.ErrCorrupt):
					t.damage(t.a.About(keys[i], r.Err))
				default:
					again = append(again, keys[i])
					if first == nil {
						first = t.a.About(keys[i], r.Err)
					}
				}
			}
			keys = again
			return first
		})
		if err != nil {
			return most, err
		}
	}
	return most, nil
}

// stream writes the file of a long value, which it reads by parts, all of one version. failed is what the key answers,
// stop what ends the export.
func (t *tree) stream(ctx context.Context, s ctl.Store, root *os.Root, made *folders, p string, key []byte) (failed,
	stop error) {
	for {
		v, err := s.Open(ctx, key)
		if err != nil {
			return err, nil
		}
		r := &remembering{r: v}
		stop = t.write(root, made, p, func(w io.Writer) (int64, error) { return io.Copy(w, r) })
		v.Close()
		switch {
		case r.err == nil:
			return nil, stop
		case !errors.Is(r.err, client.ErrConflict):
			return r.err, nil
		}
	}
}

// remembering keeps an error of r, which is not one of where its bytes go.
type remembering struct {
	r   io.Reader
	err error
}

func (r *remembering) Read(b []byte) (n int, err error) {
	if n, err = r.r.Read(b); err != io.EOF {
		r.err = err
	}
	return n, err
}

// write writes one file, which has its name once it is whole. A key that cannot be a file beside the others (a/b when
// a is a file) is refused; a full or broken disk ends the export.
func (t *tree) write(root *os.Root, made *folders, p string, fill func(w io.Writer) (int64, error)) error {
	var n int64
	err := made.make(root, filepath.Dir(p))
	if err == nil {
		part := filepath.Join(filepath.Dir(p), fmt.Sprintf(".kvctl-%016x", rand.Uint64()))
		if n, err = fillFile(root, part, fill); err == nil {
			err = root.Rename(part, p)
		}
		if err != nil {
			_ = root.Remove(part)
		}
	}
	for _, e := range []error{syscall.EISDIR, syscall.ENOTDIR, syscall.EEXIST, syscall.ENAMETOOLONG, syscall.EINVAL,
		syscall.EILSEQ} {
		if errors.Is(err, e) {
			t.refuse("key %s: cannot be a file here: %v", t.a.ShowKey([]byte(p)), e)
			return nil
		}
	}
	if err == nil {
		t.done(int(n))
	}
	return err
}

func fillFile(root *os.Root, name string, fill func(w io.Writer) (int64, error)) (int64, error) {
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return 0, err
	}
	n, err := fill(f)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return n, err
}

// folders remembers which folders exist, so that each is made once.
type folders struct {
	mu   sync.Mutex
	seen map[string]bool
}

func (f *folders) make(root *os.Root, dir string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.seen[dir] {
		return nil
	}
	if err := root.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	f.seen[dir] = true
	return nil
}
