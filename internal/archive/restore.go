package archive

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/renameio/v2"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/patient"
)

// Mode says what a restore does with a key that is there.
type Mode uint8

const (
	// IfNewer leaves it if its version is the record's or a later one.
	IfNewer Mode = 1 + iota
	// IfAbsent leaves it.
	IfAbsent
	// Overwrite puts the record all the same, by a new version where the one that is there is later.
	Overwrite
)

// RestoreOptions say how a snapshot is put into a namespace.
type RestoreOptions struct {
	Mode Mode
	// Progress is a file that has the segments which are done, so that an interrupted restore goes on; "": none. Target
	// says which namespace it goes to.
	Progress, Target string
	// Done, if not nil, is told of keys and their bytes as they are done. It may be called concurrently.
	Done func(keys, bytes int)
	Now  func() time.Time
}

// RestoreReport counts records.
type RestoreReport struct {
	Records  int64 `json:"records"`
	Restored int64 `json:"restored"`
	// Fresh are those of Restored that have a new version.
	Fresh   int64 `json:"fresh_versions"`
	Kept    int64 `json:"kept"` // there as they are, or what Mode leaves
	Expired int64 `json:"expired"`
	// Earlier are segments that an earlier run had done.
	Earlier int `json:"segments_done_earlier"`
}

// restoration is a Restore under way.
type restoration struct {
	s    Store
	snap *Snapshot
	o    *RestoreOptions
	// long is held by who has a long value in memory.
	long sync.Mutex

	records, restored, fresh, kept, expired atomic.Int64

	mu struct {
		sync.Mutex
		progress progress
	}
}

// progress is what a file of progress holds.
type progress struct {
	Snapshot string   `json:"snapshot"`
	CRC      uint32   `json:"manifest_crc32c"`
	Target   string   `json:"target"`
	Mode     Mode     `json:"mode"`
	Segments []string `json:"segments"`
}

// maxProgress bounds a file of progress, in bytes.
const maxProgress = 64 << 20

// Restore puts the records of a snapshot into the namespace of a session, with their versions and expiries, several
// segments side by side. Records that have expired are left out. It may be run again, also after an error: what is
// there stays. An error says how the first record failed that did.
func Restore(ctx context.Context, s Store, snap *Snapshot, o RestoreOptions) (*RestoreReport, error) {
	r := &restoration{s: s, snap: snap, o: &o}
	earlier, err := r.resume()
	if err == nil {
		err = eachSegment(ctx, len(snap.Segments), func(ctx context.Context, i int) error {
			name := snap.Segments[i].Name
			if earlier[name] {
				return nil
			}
			if err := r.segment(ctx, i); err != nil {
				return err
			}
			return r.finished(name)
		})
	}
	rep := &RestoreReport{Records: r.records.Load(), Restored: r.restored.Load(), Fresh: r.fresh.Load(),
		Kept: r.kept.Load(), Expired: r.expired.Load(), Earlier: len(earlier)}
	if err == nil && o.Progress != "" {
		if err = os.Remove(o.Progress); errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	return rep, err
}

// eachSegment calls fn with every index below n, several at a time.
func eachSegment(ctx context.Context, n int, fn func(ctx context.Context, i int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(workers, n) {
		wg.Go(func() {
			for i := next.Add(1) - 1; i < int64(n) && ctx.Err() == nil; i = next.Add(1) - 1 {
				if err := fn(ctx, int(i)); err != nil {
					cancel(err)
				}
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// resume reads the file of progress: which segments are done.
func (r *restoration) resume() (map[string]bool, error) {
	p := &r.mu.progress
	*p = progress{Snapshot: r.snap.dir, CRC: crc32.Checksum(r.snap.raw, castagnoli), Target: r.o.Target, Mode: r.o.Mode}
	if r.o.Progress == "" {
		return nil, nil
	}
	f, err := os.Open(r.o.Progress)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var was progress
	if err := errors.Join(json.NewDecoder(io.LimitReader(f, maxProgress)).Decode(&was), f.Close()); err != nil {
		return nil, fmt.Errorf("%s is no file of a restore's progress: %w", r.o.Progress, err)
	}
	if was.Snapshot != p.Snapshot || was.CRC != p.CRC || was.Target != p.Target || was.Mode != p.Mode {
		return nil, fmt.Errorf("%s is of another restore: of snapshot %.120q into %.120q; delete it to begin anew",
			r.o.Progress, was.Snapshot, was.Target)
	}
	done := make(map[string]bool)
	for _, s := range r.snap.Segments {
		if slices.Contains(was.Segments, s.Name) {
			done[s.Name] = true
			p.Segments = append(p.Segments, s.Name)
		}
	}
	return done, nil
}

// finished writes down that a segment is done.
func (r *restoration) finished(name string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := &r.mu.progress
	if p.Segments = append(p.Segments, name); r.o.Progress == "" {
		return nil
	}
	b, err := json.Marshal(p)
	if err != nil {
		return err
	}
	return renameio.WriteFile(r.o.Progress, b, 0o600)
}

// segment puts the records of a segment, a batch at a time.
func (r *restoration) segment(ctx context.Context, i int) error {
	return batches(ctx, r.snap, i, &r.long, func(batch []Record) error {
		now := r.o.Now()
		var live []Record
		bytes := 0
		for _, rec := range batch {
			bytes += len(rec.Key) + rec.Len
			if !rec.Expired(now) {
				live = append(live, rec)
			}
		}
		r.records.Add(int64(len(batch)))
		r.expired.Add(int64(len(batch) - len(live)))
		if err := r.put(ctx, live, now); err != nil {
			return err
		}
		if r.o.Done != nil {
			r.o.Done(len(batch), bytes)
		}
		return nil
	})
}

// batches calls fn with the records of a segment, so many that they fit into batchBytes; with a longer one alone, and
// long held. They belong to fn.
func batches(ctx context.Context, snap *Snapshot, i int, long *sync.Mutex, fn func([]Record) error) error {
	seg, err := snap.Segment(ctx, i)
	if err != nil {
		return err
	}
	var batch []Record
	size := 0
	send := func() error {
		some := batch
		batch, size = nil, 0
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if len(some) == 0 {
			return nil
		}
		return fn(some)
	}
	one := func(rec *Record) error {
		if len(batch) == batchKeys || size+rec.Len > batchBytes {
			if err := send(); err != nil {
				return err
			}
		}
		if rec.Len > longValue {
			long.Lock()
			defer long.Unlock()
		}
		c := *rec
		c.Key = slices.Clone(rec.Key)
		var err error
		if c.Value, err = seg.Value(make([]byte, 0, min(rec.Len, batchBytes))); err != nil {
			return err
		}
		batch, size = append(batch, c), size+c.Len
		if c.Len > longValue {
			return send()
		}
		return nil
	}
	for err == nil {
		var rec *Record
		if rec, err = seg.Next(); err == nil {
			err = one(rec)
		}
	}
	if errors.Is(err, io.EOF) {
		err = send()
	}
	return errors.Join(err, seg.Close())
}

// mostAhead is how far a version may be ahead of the clock that is given to a record.
const mostAhead = 9 * time.Minute

// put puts records as Mode says.
func (r *restoration) put(ctx context.Context, all []Record, now time.Time) error {
	if r.o.Mode == IfAbsent {
		var err error
		if all, err = r.absent(ctx, all); err != nil {
			return err
		}
	}
	most := layout.VersionAt(uint64(now.Add(mostAhead).UnixNano()))
	var given []inside.Given
	var of, fresh []*Record
	for i := range all {
		rec := &all[i]
		if rec.Version > most {
			fresh = append(fresh, rec)
			continue
		}
		of, given = append(of, rec), append(given, inside.Given{Key: rec.Key, Value: rec.Value, Flags: rec.Flags,
			Version: rec.Version, Expiry: rec.Expiry})
	}
	err := patient.Do(ctx, func() error {
		r.s.PutGiven(ctx, given)
		var again []inside.Given
		var left []*Record
		var first error
		for i := range given {
			switch g := &given[i]; {
			case g.Err == nil:
				r.restored.Add(1)
			case errors.Is(g.Err, client.ErrConflict) && r.o.Mode == Overwrite && g.Found != g.Version:
				fresh = append(fresh, of[i])
			case errors.Is(g.Err, client.ErrConflict):
				r.kept.Add(1)
			default:
				again, left = append(again, *g), append(left, of[i])
				first = worse(first, aboutKey(g.Key, g.Err))
			}
		}
		given, of = again, left
		return first
	})
	if err != nil {
		return err
	}
	return r.putFresh(ctx, fresh)
}

// worse is the error to go on with: one that no repetition helps against.
func worse(a, b error) error {
	if a == nil || errors.Is(a, client.ErrUnavailable) || errors.Is(a, client.ErrUnknownOutcome) {
		return b
	}
	return a
}

func aboutKey(key []byte, err error) error { return fmt.Errorf("key %.64q: %w", key, err) }

// absent are those of records whose keys are not there. If others write one of them meanwhile, its version is later and
// it stays.
func (r *restoration) absent(ctx context.Context, all []Record) ([]Record, error) {
	ops := make([]client.Op, len(all))
	for i := range all {
		ops[i] = client.Op{Kind: client.OpExists, Key: all[i].Key}
	}
	if err := patient.Read(ctx, r.s, ops); err != nil {
		return nil, err
	}
	var left []Record
	for i := range ops {
		switch err := ops[i].Err; {
		case errors.Is(err, client.ErrNotFound):
			left = append(left, all[i])
		case err != nil:
			return nil, aboutKey(ops[i].Key, err)
		default:
			r.kept.Add(1)
		}
	}
	return left, nil
}

// putFresh puts records with new versions.
func (r *restoration) putFresh(ctx context.Context, all []*Record) error {
	ops := make([]client.Op, len(all))
	for i, rec := range all {
		it := itemOf(rec)
		ops[i] = client.Op{Kind: client.OpPut, Key: rec.Key, Value: it.Value, Flags: it.Flags, Note: it.Note,
			Type: it.Type, Expires: it.Expires}
		if r.o.Mode != Overwrite {
			ops[i].Cond = client.IfAbsent
		}
	}
	return patient.Do(ctx, func() error {
		r.s.Do(ctx, ops)
		var again []client.Op
		var first error
		for _, op := range ops {
			switch err := op.Err; {
			case err == nil:
				r.restored.Add(1)
				r.fresh.Add(1)
			case errors.Is(err, client.ErrExists):
				r.kept.Add(1)
			default:
				again = append(again, op)
				first = worse(first, aboutKey(op.Key, err))
			}
		}
		ops = again
		return first
	})
}

// itemOf is a record as the API has it. The value is the record's memory.
func itemOf(r *Record) client.Item {
	n := len(r.Value) - r.Flags.TailLen()
	it := client.Item{Value: r.Value[:n:n], Version: r.Version, Type: client.Type(r.Flags.TypeOf())}
	tail := r.Value[n:]
	if r.Flags&layout.FlagNote != 0 {
		it.Note, tail = le.Uint64(tail), tail[8:]
	}
	if r.Flags&layout.FlagUser != 0 {
		it.Flags = le.Uint32(tail)
	}
	if r.Expiry != 0 {
		it.Expires = time.UnixMilli(int64(min(r.Expiry, 1<<62)))
	}
	return it
}
