package bulk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/patient"
	"github.com/kvd-project/kvd/internal/units"
)

// Bounds of a mirror. Each worker holds what a batch has at both ends: ctl.BatchBytes, or one value of the largest
// size.
const (
	mirrorKeys = 128
	// mirrorTries is how often a key is tried that others change meanwhile.
	mirrorTries = 8
	// mirrorPause is far longer than the versions of mirrorKeys writes are apart.
	mirrorPause = 100 * time.Millisecond
)

const mirrorHelp = `Copy what has changed from SRC to DST: values with their expiry, type, flags and note. SRC and DST
are each CONTEXT, CONTEXT:NAMESPACE or :NAMESPACE, which is a namespace of the store that the other
flags name; the namespaces must exist. Run again, it copies only what has changed since; if it was
interrupted, it goes on with what is missing.

A key is left alone if its version at DST is later than that at SRC by --margin: versions follow the
clocks of those who write. Any other is compared byte by byte, and copied if it differs. The clocks of
the machines that write to either store must agree, and each write be over, within half of --margin.
--compare compares all, whatever the versions say: also what somebody else has changed at DST.

Others may write to both meanwhile. A key that stood in SRC throughout is in DST at the end; of one that
changes, DST has what SRC had at some moment of the run, and the next run finds what changed after that. Keys are copied one by one: a transaction at SRC may be in DST by half until the next run.
A key that somebody writes at DST meanwhile, such as another mirror, is compared again first. With --delete
a key goes at DST if SRC had none when it was asked, and if nobody has written it at DST meanwhile.`

type mirrorOptions struct {
	prefix  string
	del     bool
	dry     bool
	compare bool
	margin  time.Duration
}

func (a *commands) mirrorCommand() *cobra.Command {
	var o mirrorOptions
	c := ctl.Changes(&cobra.Command{
		Use:   "mirror SRC DST",
		Short: "Copy what has changed from one store or namespace to another",
		Long:  mirrorHelp,
		Args:  cobra.ExactArgs(2),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			names, err := a.Clusters()
			if err != nil {
				return nil, cobra.ShellCompDirectiveError
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if o.margin < time.Second {
				return ctl.Usagef("--margin %v: want at least 1s", o.margin)
			}
			prefix, err := a.Prefix(o.prefix)
			if err != nil {
				return err
			}
			return a.mirror(cmd.Context(), args[0], args[1], prefix, &o)
		},
	})
	f := c.Flags()
	f.StringVar(&o.prefix, "prefix", "", "only keys that begin with this")
	f.BoolVar(&o.del, "delete", false, "delete keys of DST that SRC does not have")
	f.BoolVar(&o.compare, "compare", false, "compare every key byte by byte")
	f.DurationVar(&o.margin, "margin", 2*time.Minute, "compare keys whose version at DST is not later by this much")
	ctl.DryFlag(c, &o.dry)
	return c
}

// side is the app of an end of a mirror: the flags of a context, or those of a with another namespace.
func (a *commands) side(word string) (*commands, error) {
	name, namespace := word, ""
	if i := strings.LastIndexByte(word, ':'); i >= 0 {
		if name, namespace = word[:i], word[i+1:]; namespace == "" {
			return nil, ctl.Usagef("%q: want CONTEXT, CONTEXT:NAMESPACE or :NAMESPACE", word)
		}
	}
	if name == "" && namespace == "" {
		return nil, ctl.Usagef(`"": want CONTEXT, CONTEXT:NAMESPACE or :NAMESPACE`)
	}
	same := *a.App
	side := &same
	if name != "" {
		other, err := a.Cluster(a.App, name)
		if err != nil {
			return nil, err
		}
		side = other
	}
	if namespace != "" {
		side.Namespace = namespace
	}
	return &commands{side}, nil
}

// end is one end of a mirror.
type end struct {
	ctl.Store
	name string
}

// about names the end and a key in an error.
func (e end) about(a *commands, key []byte, err error) error {
	return fmt.Errorf("%s: %w", e.name, a.About(key, err))
}

// mirroring is a run of mirror. Its workers share it.
type mirroring struct {
	*tree    // counts, warns; of what was copied
	o        *mirrorOptions
	prefix   []byte
	src, dst end
	margin   uint64 // of versions

	keys, same, gone, deleted atomic.Int64
}

// MirrorReport is what mirror prints at the end: keys, by what became of them.
type MirrorReport struct {
	DryRun  bool    `json:"dry_run,omitempty"`
	Keys    int64   `json:"keys"` // of SRC
	Copied  int64   `json:"copied"`
	Bytes   int64   `json:"bytes"` // of values that were copied
	Same    int64   `json:"same"`
	Gone    int64   `json:"gone"` // deleted or expired at SRC since it was listed
	Deleted int64   `json:"deleted"`
	Refused int64   `json:"refused"`
	Seconds float64 `json:"seconds"`
}

func (a *commands) mirror(ctx context.Context, from, to string, prefix []byte, o *mirrorOptions) error {
	src, err := a.side(from)
	if err != nil {
		return fmt.Errorf("SRC: %w", err)
	}
	dst, err := a.side(to)
	if err != nil {
		return fmt.Errorf("DST: %w", err)
	}
	names := [2]string{"SRC " + ctl.Visible(from), "DST " + ctl.Visible(to)}
	err = src.With(ctx, ctl.SessionOptions{ReadOnly: true}, func(s ctl.Store) error {
		err := dst.With(ctx, ctl.SessionOptions{ReadOnly: o.dry}, func(d ctl.Store) error {
			m := &mirroring{o: o, prefix: prefix, src: end{s, names[0]}, dst: end{d, names[1]},
				margin: layout.VersionAt(uint64(o.margin)),
				tree:   a.newTree("mirror", "keys", func() int64 { return about(ctx, s) })}
			return m.run(ctx)
		})
		return inSession(names[1], err)
	})
	return inSession(names[0], err)
}

// told marks an error that says whose it is.
type told struct{ error }

func (t told) Unwrap() error { return t.error }

// inSession names the end that could not be opened.
func inSession(name string, err error) error {
	if err == nil || errors.As(err, new(told)) {
		return err
	}
	return told{fmt.Errorf("%s: %w", name, err)}
}

// about is how many keys there are, for a bar, or -1.
func about(ctx context.Context, s ctl.Store) int64 {
	n, err := s.Count(ctx)
	if err != nil {
		return -1
	}
	return int64(n)
}

func (m *mirroring) run(ctx context.Context) error {
	err := m.differ()
	if err == nil {
		err = m.copyAll(ctx)
	}
	if err == nil && m.o.del {
		err = m.deleteRest(ctx)
	}
	m.bar.End()
	if err != nil {
		done := m.files.Load() + m.deleted.Load()
		if m.o.dry {
			done = 0
		}
		return told{ctl.Partly(done > 0, err,
			"after %d of the keys that were looked at (%d copied, %d deleted); run it "+
				"again to go on", m.keys.Load(), m.files.Load(), m.deleted.Load())}
	}
	if err := m.print(); err != nil {
		return told{err}
	}
	if m.refused.Load() > 0 {
		return told{ctl.Fail(ctl.ExitNo)}
	}
	return nil
}

// differ refuses two ends that are one namespace of one cluster: only there a key has the same hash, and the same
// place.
func (m *mirroring) differ() error {
	probe := []byte("kvctl mirror")
	s, err := m.src.Locate(probe)
	if err != nil {
		return fmt.Errorf("%s: %w", m.src.name, err)
	}
	d, err := m.dst.Locate(probe)
	if err != nil {
		return fmt.Errorf("%s: %w", m.dst.name, err)
	}
	if s.Hash == d.Hash && s.PG == d.PG {
		return ctl.Usagef("%s and %s are the same namespace", m.src.name, m.dst.name)
	}
	return nil
}

func (m *mirroring) print() error {
	r := MirrorReport{DryRun: m.o.dry, Keys: m.keys.Load(), Copied: m.files.Load(), Bytes: m.bytes.Load(),
		Same: m.same.Load(), Gone: m.gone.Load(),
		Deleted: m.deleted.Load(), Refused: m.refused.Load(), Seconds: time.Since(m.start).Seconds()}
	if m.a.JSON() {
		return m.a.PrintJSON(r)
	}
	head := ctl.Row{"Keys", "Copied", "Bytes", "Same", "Gone", "Deleted", "Refused", "Seconds"}
	if m.o.dry {
		m.a.Unchanged()
		head[1], head[5] = "Would copy", "Would delete"
	}
	m.a.PrintTable(head,
		[]ctl.Row{{r.Keys, r.Copied, r.Bytes, r.Same, r.Gone, r.Deleted, r.Refused, fmt.Sprintf("%.3f", r.Seconds)}})
	return nil
}

// batches sends the keys of an end, so many that their values fit into ctl.BatchBytes, to workers that fn is.
func (m *mirroring) batches(ctx context.Context, of end, fn func(context.Context, []client.KV) error) error {
	c, work := ctl.NewCrew(ctx), make(chan []client.KV)
	c.Run(1, func(ctx context.Context) error {
		defer close(work)
		var batch []client.KV
		size := 0
		send := func() error {
			some := batch
			batch, size = nil, 0
			select {
			case work <- some:
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		err := patient.Keys(ctx, of, client.ScanOptions{KeysOnly: true, Match: ctl.Matcher(m.prefix, "")},
			func(kv client.KV) (bool, error) {
				if len(batch) == mirrorKeys || len(batch) > 0 && size+kv.Len > ctl.BatchBytes {
					if err := send(); err != nil {
						return false, err
					}
				}
				batch, size = append(batch, kv), size+kv.Len
				return true, nil
			})
		if errors.Is(err, client.ErrCorrupt) { // the rest is to be had
			m.refuse("%s: %v", of.name, err)
			err = nil
		}
		if err != nil {
			return fmt.Errorf("%s: %w", of.name, err)
		}
		if len(batch) > 0 {
			return send()
		}
		return nil
	})
	c.Run(TreeWorkers, func(ctx context.Context) error {
		for batch := range work {
			if err := fn(ctx, batch); err != nil {
				return err
			}
		}
		return nil
	})
	return c.Wait()
}

// pair is a key at both ends.
type pair struct {
	key     []byte
	version uint64 // at SRC, when it was listed
	compare bool   // whatever the versions say
	src     client.Item
	dst     client.Item
	there   bool // at DST
	wrote   bool // a put of it was posted
	counted bool
}

// count counts a pair once, as copied if it was.
func (m *mirroring) count(p *pair, as *atomic.Int64) {
	if p.counted {
		return
	}
	p.counted = true
	if p.wrote {
		as = &m.files
		m.bytes.Add(int64(len(p.src.Value)))
	}
	as.Add(1)
}

func (m *mirroring) copyAll(ctx context.Context) error {
	return m.batches(ctx, m.src, func(ctx context.Context, kvs []client.KV) error {
		m.keys.Add(int64(len(kvs)))
		want := 1
		for len(kvs) > 0 {
			some := kvs[:min(want, len(kvs))]
			kvs = kvs[len(some):]
			pairs := ctl.MapTo(some, func(kv client.KV) *pair {
				return &pair{key: kv.Key, version: kv.Version, compare: m.o.compare}
			})
			if err := m.settlePairs(ctx, pairs); err != nil {
				return err
			}
			want = wanted(want, pairs)
			m.bar.Step(len(some))
		}
		return nil
	})
}

// wanted is how many keys to ask for at once, after so many whose values were such: the end that was not listed may
// have longer ones.
func wanted(want int, pairs []*pair) int {
	most := 1
	for _, p := range pairs {
		most = max(most, len(p.src.Value), len(p.dst.Value))
	}
	return min(max(ctl.BatchBytes/most, 1), 2*want, mirrorKeys)
}

// settlePairs copies what differs, and again what others changed meanwhile.
func (m *mirroring) settlePairs(ctx context.Context, pairs []*pair) error {
	for try := 0; len(pairs) > 0; try++ {
		if try == mirrorTries {
			for _, p := range pairs {
				m.refuse("key %s: changes faster than it is copied: run it again", m.a.ShowKey(p.key))
			}
			return nil
		}
		var again []*pair
		err := patient.Do(ctx, func() error {
			var err error
			pairs, again, err = m.stepPairs(ctx, pairs, again)
			return err
		})
		if err != nil {
			return err
		}
		pairs = again
	}
	return nil
}

// faults gathers what an end could not serve.
type faults struct {
	m    *mirroring
	ctx  context.Context
	left []*pair // to be tried again
	err  error   // the first of them
}

func (f *faults) add(e end, p *pair, why error) {
	why = e.about(f.m.a, p.key, why)
	if f.ctx.Err() == nil && !errors.Is(why, client.ErrUnavailable) && !errors.Is(why, client.ErrUnknownOutcome) {
		f.m.refuse("%v", why)
		return
	}
	f.left = append(f.left, p)
	if f.err == nil {
		f.err = why
	}
}

// stepPairs goes once through pairs. left are those that the store could not serve, with err; again are added those
// that have changed meanwhile.
func (m *mirroring) stepPairs(ctx context.Context, pairs, again []*pair) (left, _ []*pair, _ error) {
	start := layout.VersionAt(uint64(time.Now().UnixNano()))
	f := &faults{m: m, ctx: ctx}
	pairs = m.read(ctx, m.dst, pairs, f, func(p *pair, it client.Item, there bool) bool {
		p.dst, p.there = it, there
		// A version of the future is of a clock that is wrong, and says nothing.
		later := there && it.Version > p.version && it.Version-p.version > m.margin && it.Version < start+m.margin/2
		if later && !p.compare {
			m.count(p, &m.same)
			return false
		}
		return true
	})
	pairs = m.read(ctx, m.src, pairs, f, func(p *pair, it client.Item, there bool) bool {
		p.src = it
		switch {
		case !there, !it.Expires.IsZero() && !it.Expires.After(m.a.Now()):
			m.count(p, &m.gone)
		case p.there && SameItem(p.src, p.dst):
			m.count(p, &m.same)
		case m.o.dry:
			p.wrote = true // it would be
			m.count(p, &m.files)
		default:
			return true
		}
		return false
	})
	ops := ctl.MapTo(pairs, func(p *pair) client.Op {
		op := client.Op{Kind: client.OpPut, Key: p.key, Value: p.src.Value, Expires: p.src.Expires, Flags: p.src.Flags,
			Note: p.src.Note, Type: p.src.Type, Cond: client.IfAbsent}
		if p.there {
			op.Cond, op.Version = client.IfVersion, p.dst.Version
		}
		return op
	})
	m.dst.Do(ctx, ops)
	var full error
	for i, p := range pairs {
		p.compare = true // if it is seen again
		switch why := ops[i].Err; {
		case why == nil:
			p.wrote = true
			m.count(p, &m.files)
			// A write to SRC after it was read has a version of start or later, but for clocks that differ.
			if ops[i].Item.Version > start+m.margin/2 {
				again = append(again, p)
			}
		case errors.Is(why, client.ErrConflict), errors.Is(why, client.ErrExists), errors.Is(why, client.ErrNotFound):
			again = append(again, p)
		case errors.Is(why, client.ErrFull):
			full = fmt.Errorf("%s has no room for %s of %s: %w", m.dst.name, m.a.ShowKey(p.key),
				units.Rounded(len(p.src.Value)), why)
		default:
			p.wrote = p.wrote || errors.Is(why, client.ErrUnknownOutcome)
			f.add(m.dst, p, why)
		}
	}
	if full != nil {
		return nil, nil, full
	}
	m.keepPace(ctx, ops)
	return f.left, again, f.err
}

// keepPace waits a little if the versions of what was written run ahead of the clock, as those of many writes of one
// session do: a version at DST must not be later than what is written at SRC afterwards.
func (m *mirroring) keepPace(ctx context.Context, ops []client.Op) {
	limit := layout.VersionAt(uint64(time.Now().UnixNano())) + m.margin/4
	if !slices.ContainsFunc(ops, func(op client.Op) bool { return op.Err == nil && op.Item.Version > limit }) {
		return
	}
	select {
	case <-time.After(mirrorPause):
	case <-ctx.Done():
	}
}

// read gets pairs from an end, and keeps those that keep wants.
func (m *mirroring) read(ctx context.Context, e end, pairs []*pair, f *faults,
	keep func(p *pair, it client.Item, there bool) bool) []*pair {
	ops := ctl.MapTo(pairs, func(p *pair) client.Op { return client.Op{Kind: client.OpGet, Key: p.key, Typed: true} })
	e.Do(ctx, ops)
	return slices.DeleteFunc(slices.Clone(pairs), func(p *pair) bool {
		op := ops[0]
		ops = ops[1:]
		switch {
		case op.Err == nil:
			return !keep(p, op.Item, true)
		case errors.Is(op.Err, client.ErrNotFound):
			return !keep(p, client.Item{}, false)
		}
		f.add(e, p, op.Err)
		return true
	})
}

// SameItem compares all but versions; expiry to the millisecond, as it is kept.
func SameItem(a, b client.Item) bool {
	return bytes.Equal(a.Value, b.Value) && a.Flags == b.Flags && a.Note == b.Note && a.Type == b.Type &&
		a.Expires.Equal(b.Expires)
}

// deleteRest deletes at DST what SRC does not have, unless SRC has nothing, or cannot be read whole.
func (m *mirroring) deleteRest(ctx context.Context) error {
	switch {
	case m.refused.Load() > 0:
		m.a.Say("kvctl mirror: nothing was deleted, since not all of %s could be read or copied", m.src.name)
		return nil
	case m.keys.Load() == 0:
		return ctl.ExitWith(ctl.ExitNo,
			fmt.Errorf("%s has no such key: nothing was deleted. If that is meant, kvctl del "+
				"--prefix or kvctl flush does it", m.src.name))
	}
	return m.batches(ctx, m.dst, func(ctx context.Context, kvs []client.KV) error {
		want := 1
		for len(kvs) > 0 {
			some := kvs[:min(want, len(kvs))]
			kvs = kvs[len(some):]
			pairs := ctl.MapTo(some, func(kv client.KV) *pair { return &pair{key: kv.Key, version: kv.Version} })
			left := pairs
			err := patient.Do(ctx, func() (err error) {
				left, err = m.deleteSome(ctx, left)
				return err
			})
			if err != nil {
				return err
			}
			want = wanted(want, pairs)
		}
		return nil
	})
}

// deleteSome deletes those of pairs, of DST, that SRC does not have; left are those that could not be served.
func (m *mirroring) deleteSome(ctx context.Context, pairs []*pair) (left []*pair, err error) {
	f := &faults{m: m, ctx: ctx}
	pairs = m.read(ctx, m.src, pairs, f, func(p *pair, it client.Item, there bool) bool {
		p.src = it
		return !there
	})
	if m.o.dry {
		m.deleted.Add(int64(len(pairs)))
		return f.left, f.err
	}
	ops := ctl.MapTo(pairs, func(p *pair) client.Op {
		return client.Op{Kind: client.OpDelete, Key: p.key, Cond: client.IfVersion, Version: p.version}
	})
	m.dst.Do(ctx, ops)
	for i, p := range pairs {
		switch why := ops[i].Err; {
		case why == nil:
			m.deleted.Add(1)
		case errors.Is(why, client.ErrNotFound), errors.Is(why, client.ErrConflict):
			// it expired, or somebody has written it
		default:
			f.add(m.dst, p, why)
		}
	}
	return f.left, f.err
}
