package inside

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/check"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/overview"
	"github.com/kvd-project/kvd/internal/patient"
	"github.com/kvd-project/kvd/internal/units"
)

// walker reads the index of a namespace, each placement group at its last copy, the
// tail. A key that changes meanwhile may be seen twice or not at all.
type walker struct {
	raw
	ctx context.Context
	m   *dirpb.Map
	ns  *dirpb.Namespace
	bar *ctl.Bar
}

// inside opens a session that looks into memory, and finds the namespace in what the directory says. The
// default one comes into being with its first session.
func (a *commands) inside(ctx context.Context, fn func(ctl.Backend, ctl.Store, *dirpb.StatusReply,
	*dirpb.Namespace) error) error {
	return a.WithBackend(func(b ctl.Backend) error {
		s, err := b.Open(ctx, ctl.SessionOptions{Lanes: 1, ReadOnly: true})
		if err != nil {
			return err
		}
		defer a.Closed("session", s.Close)
		st, err := ctl.ClusterStatus(ctx, b)
		if err != nil {
			return err
		}
		ns, err := a.OwnNamespace(st.GetMap())
		if err != nil {
			return err
		}
		return fn(b, s, st, ns)
	})
}

// walk runs fn with a walker of the namespace and what the directory says.
func (a *commands) walk(ctx context.Context, what string, fn func(*walker) error) error {
	return a.inside(ctx, func(b ctl.Backend, s ctl.Store, st *dirpb.StatusReply, ns *dirpb.Namespace) error {
		w := &walker{raw: raw{b, s}, ctx: ctx, m: st.GetMap(), ns: ns}
		w.bar = a.Bar(what, "", func() int64 { return check.Segments(w.m, w.ns.GetId()) })
		defer w.bar.End()
		return fn(w)
	})
}

// raw is a store as package check reaches it: it is patient.
type raw struct {
	b ctl.Backend
	s ctl.Store
}

func (r raw) Status(ctx context.Context) (*dirpb.StatusReply, error) {
	return ctl.ClusterStatus(ctx, r.b)
}

func (r raw) Read(ctx context.Context, pg uint32, copy int, off uint64, n int) (b []byte, err error) {
	err = patient.Do(ctx, func() (err error) {
		b, err = r.s.ReadRaw(ctx, pg, copy, off, n)
		return err
	})
	return b, err
}

func (r raw) Hash(key []byte) (uint64, error) {
	loc, err := r.s.Locate(key)
	return loc.Hash, err
}

// part is some segments of an array at the tail.
type part struct {
	*check.Part
	check.Geometry
	w  *walker
	pg *dirpb.PlacementGroup
}

// read reads n bytes at off of the part's placement group.
func (p *part) read(off uint64, n int) ([]byte, error) {
	b, err := p.w.Read(p.w.ctx, p.pg.GetId(), max(overview.Copies(p.pg), 1)-1, off, n)
	if err != nil {
		err = fmt.Errorf("placement group %d, offset %#x: %w", p.pg.GetId(), off, err)
	}
	return b, err
}

// slots lists the words that name records.
func (p *part) slots() []check.Slot { return p.Geometry.Slots(p.Off, p.Copies[0]) }

// each calls fn with every part of the index.
func (w *walker) each(fn func(*part) error) error {
	for _, pg := range overview.Groups(w.m, w.ns.GetId()) {
		if len(pg.GetMembers()) == 0 {
			continue // it is lost, and nobody is about to make it anew
		}
		p := part{w: w, pg: pg, Geometry: check.GeometryOf(pg.GetRegionBytes(), pg.GetIndexBytes(),
			pg.GetAccessBytes())}
		read := func(_ int, off uint64, n int) ([]byte, error) { return p.read(off, n) }
		err := check.Walk(check.Arrays(w.m, pg.GetId()), []int{0}, read, func(x *check.Part) error {
			at := p
			at.Part = x
			if err := fn(&at); err != nil {
				return err
			}
			w.bar.Step(len(x.Copies[0]) / layout.SegmentSize)
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// top keeps the n largest of what is added.
type top[T any] struct {
	n     int
	less  func(a, b T) int
	items []T // largest first
}

func (t *top[T]) wants(v T) bool { return len(t.items) < t.n || t.less(t.items[t.n-1], v) < 0 }

func (t *top[T]) add(v T) {
	if !t.wants(v) {
		return
	}
	i, _ := slices.BinarySearchFunc(t.items, v, func(a, b T) int { return t.less(b, a) })
	t.items = slices.Insert(t.items, i, v)
	t.items = t.items[:min(len(t.items), t.n)]
}

func (a *commands) bigkeysCommand() *cobra.Command {
	var n int
	c := &cobra.Command{
		Use:   "bigkeys",
		Short: "Find the largest keys of the namespace",
		Long: "Read the index and the heads of all records, and list the largest records, how many\n" +
			"there are of each size, and their sum. A record is key, value and 32 bytes; the\n" +
			"place that it has is at most a sixteenth longer. A value on a tier's disk counts as if\n" +
			"it were in memory. Records that changed while they were looked at are only counted.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := ctl.CheckTop(n); err != nil {
				return err
			}
			return a.bigkeys(cmd.Context(), n)
		},
	}
	ctl.TopFlag(c, &n)
	return c
}

// bigKey is a record; bytes are those of key, value and header.
type bigKey struct {
	key          []byte
	bytes, value uint64
}

// SizeClass counts the records of more than half of UpTo bytes, and at most that.
type SizeClass struct {
	UpTo  uint64 `json:"up_to"`
	Keys  uint64 `json:"keys"`
	Bytes uint64 `json:"bytes"`
}

// headBytes are read of every record: a key of any length, and a manifest.
const headBytes = layout.RecordHeaderSize + client.MaxKeyLen + 1<<10

func (a *commands) bigkeys(ctx context.Context, n int) error {
	largest := top[bigKey]{n: n, less: func(a, b bigKey) int { return cmp.Compare(a.bytes, b.bytes) }}
	var classes [65]SizeClass
	var keys, total, changed uint64
	err := a.walk(ctx, "bigkeys", func(w *walker) error {
		return w.each(func(p *part) error {
			return p.measureAll(func(k bigKey) {
				c := &classes[bits.Len64(k.bytes-1)]
				c.Keys++
				c.Bytes += k.bytes
				keys++
				total += k.bytes
				if largest.wants(k) {
					k.key = slices.Clone(k.key)
					largest.add(k)
				}
			}, func() { changed++ })
		})
	})
	if err != nil {
		return err
	}
	used := []SizeClass{}
	for i, c := range classes {
		if c.UpTo = 1 << i; c.Keys > 0 {
			used = append(used, c)
		}
	}
	if a.JSON() {
		list := make([]map[string]any, len(largest.items))
		for i, k := range largest.items {
			list[i] = map[string]any{"bytes": k.bytes, "value_bytes": k.value}
			a.SetKey(list[i], "key", k.key)
		}
		return a.PrintJSON(map[string]any{"keys": keys, "bytes": total, "changed": changed, "largest": list,
			"sizes": used})
	}
	a.PrintTable(ctl.Row{"Key", "Bytes", "Of value"}, ctl.MapTo(largest.items, func(k bigKey) ctl.Row {
		return ctl.Row{a.showShort(k.key), k.bytes, k.value}
	}))
	fmt.Fprintln(a.Stdout)
	var most uint64
	for _, c := range used {
		most = max(most, c.Keys)
	}
	a.PrintTable(ctl.Row{"Up to", "Keys", "Bytes", "% of bytes", ""}, ctl.MapTo(used, func(c SizeClass) ctl.Row {
		return ctl.Row{units.Rounded(c.UpTo), c.Keys, c.Bytes, overview.Percent(c.Bytes, total),
			strings.Repeat("█", int((c.Keys*40+most-1)/most))}
	}))
	fmt.Fprintf(a.Stdout, "\n%d keys, %s", keys, units.Rounded(total))
	if changed > 0 {
		fmt.Fprintf(a.Stdout, "; %d changed meanwhile", changed)
	}
	fmt.Fprintln(a.Stdout)
	return nil
}

// showShort is show for a cell of a table.
func (a *commands) showShort(k []byte) string {
	if len(k) > 64 {
		return a.ShowKey(k)
	}
	return a.Show(k)
}

// measureAll calls found with every record of the part, and changed with each slot that does not name one any more.
// The key that found gets is the part's memory.
func (p *part) measureAll(found func(bigKey), changed func()) error {
	slots := p.slots()
	for len(slots) > 0 { // some at a time, for what they hold in memory
		some := slots[:min(len(slots), 256)]
		slots = slots[len(some):]
		if err := check.Fetch(some, headBytes, p.read); err != nil {
			return err
		}
		for _, s := range some {
			if k, ok := p.measure(s); ok {
				found(k)
			} else {
				changed()
			}
		}
	}
	return nil
}

// measure reads the size of a record off its head, or of the one that a stub stands for. ok is false if s does not name
// it any more. The key is the part's memory.
func (p *part) measure(s check.Slot) (k bigKey, ok bool) {
	if len(s.Rec) < layout.RecordHeaderSize {
		return k, false
	}
	h := layout.HeadOf(s.Rec)
	keyLen, valueLen := int(h.KeyLen), uint64(h.ValueLen)
	if valueLen > layout.MaxRecordSize || keyLen == 0 || layout.RecordHeaderSize+keyLen > len(s.Rec) {
		return k, false
	}
	if c, ok := layout.CodeFor(layout.RecordLen(keyLen, int(valueLen))); !ok || c != s.Word.Code() {
		return k, false
	}
	k.key = s.Rec[layout.RecordHeaderSize:][:keyLen]
	if hash, err := p.w.Hash(k.key); err != nil || layout.FP(hash) != s.Word.FP() {
		return k, false
	}
	switch {
	case h.Stub:
		r, err := layout.ParseLinked(s.Rec)
		if err != nil {
			return k, false
		}
		o, _ := r.Object() // ParseLinked has checked it
		valueLen = uint64(o.ValueLen) + uint64(h.Flags.TailLen())
	case h.Flags&layout.FlagManifest != 0:
		r, err := layout.ParseRecord(s.Rec)
		if err != nil {
			return k, false
		}
		m, err := layout.ParseManifest(r.Value, p.HeapLo, p.HeapHi)
		if err != nil {
			return k, false
		}
		valueLen = m.Len
	}
	k.bytes = layout.RecordHeaderSize + uint64(keyLen) + valueLen
	if tail := uint64(h.Flags.TailLen()); valueLen >= tail {
		valueLen -= tail
	}
	k.value = valueLen
	return k, true
}

func (a *commands) hotkeysCommand() *cobra.Command {
	var n int
	c := &cobra.Command{
		Use:   "hotkeys",
		Short: "Find the most used keys of a namespace of mode cache",
		Long: "Read what clients note of the use of keys, to know what to evict, and list the\n" +
			"keys of the highest counts. A count grows by the same with every use, up to 4095,\n" +
			"and fades with time. It stands as of the last use that was noted, Idle ago. A client notes\n" +
			"uses late, several at once, be it a gateway or a program with the library.\n\n" +
			"Only namespaces of mode cache have counts. In a namespace of mode store each client knows\n" +
			"its own uses: a gateway with hot-keys shows them on its page, a program asks Client.HotKeys.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := ctl.CheckTop(n); err != nil {
				return err
			}
			return a.hotkeys(cmd.Context(), n)
		},
	}
	ctl.TopFlag(c, &n)
	return c
}

type hotKey struct {
	key   []byte
	count uint32
	idle  time.Duration
	part  *part // where slot is; without the part's bytes
	slot  check.Slot
}

func (a *commands) hotkeys(ctx context.Context, n int) error {
	var keys, known uint64
	// More than are asked for, since some may be gone when they are looked at.
	hot := top[hotKey]{n: n + n/2 + 8, less: func(a, b hotKey) int {
		return cmp.Or(cmp.Compare(a.count, b.count), cmp.Compare(b.idle, a.idle))
	}}
	now := uint64(a.Now().UnixMilli())
	err := a.walk(ctx, "hotkeys", func(w *walker) error {
		if w.ns.GetMode() != dirpb.NamespaceMode_NAMESPACE_CACHE {
			return ctl.Usagef("namespace %q is of mode %s: the use of keys is noted only if keys are evicted, in mode "+
				"cache. Ask the clients: a gateway's page with hot-keys, a program's Client.HotKeys",
				w.ns.GetName(), ctl.Short(w.ns.GetMode()))
		}
		err := w.each(func(p *part) error {
			slots := p.slots()
			keys += uint64(len(slots))
			if p.pg.GetAccessBytes() < p.Off+uint64(len(p.Copies[0])) || len(slots) == 0 {
				return nil // it was made without them
			}
			b, err := p.read(p.pg.GetIndexBytes()+p.Off, len(p.Copies[0]))
			if err != nil {
				return err
			}
			at := *p
			at.Part = nil
			for _, s := range slots {
				acc := layout.AccessWord(binary.LittleEndian.Uint64(b[s.Off-p.Off:]))
				if !acc.Of(s.Word) {
					continue
				}
				known++
				hot.add(hotKey{count: acc.Count(), idle: time.Duration(acc.PastTicks(now)) * layout.AccessTickMillis *
					time.Millisecond, part: &at, slot: s})
			}
			return nil
		})
		if err != nil {
			return err
		}
		return nameHot(&hot, n)
	})
	if err != nil {
		return err
	}
	if a.JSON() {
		list := make([]map[string]any, len(hot.items))
		for i, k := range hot.items {
			list[i] = map[string]any{"count": k.count, "idle_seconds": k.idle.Seconds()}
			a.SetKey(list[i], "key", k.key)
		}
		return a.PrintJSON(map[string]any{"keys": keys, "known": known, "hottest": list})
	}
	a.PrintTable(ctl.Row{"Key", "Count", "Idle"}, ctl.MapTo(hot.items, func(k hotKey) ctl.Row {
		return ctl.Row{a.showShort(k.key), k.count, k.idle.Round(time.Millisecond)}
	}))
	fmt.Fprintf(a.Stdout, "\n%d keys, the use of %d of them is known\n", keys, known)
	return nil
}

// nameHot reads the keys of the first n that are still there.
func nameHot(hot *top[hotKey], n int) error {
	var named []hotKey
	for _, k := range hot.items {
		if len(named) == n {
			break
		}
		one := []check.Slot{k.slot}
		if err := check.Fetch(one, headBytes, k.part.read); err != nil {
			return err
		}
		if m, ok := k.part.measure(one[0]); ok {
			k.key = m.key
			named = append(named, k)
		}
	}
	hot.items = named
	return nil
}
