package inside

import (
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/check"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/overview"
)

type dumpOptions struct {
	pg      uint32
	replica int
	offset  string
	as      string
}

func (a *commands) dumpCommand() *cobra.Command {
	var o dumpOptions
	c := &cobra.Command{
		Use:   "dump [KEY]",
		Short: "Print remote bytes with their meaning",
		Long: "Print, from one replica's memory, the region header, the group that KEY hashes to\n" +
			"and every record there that may be KEY's. With --offset print what stands there.\n" +
			"Exit status 1 if no record of KEY is found.",
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch byOffset := cmd.Flags().Changed("offset"); {
			case byOffset == (len(args) == 1):
				return ctl.Usagef("want either a key or --offset")
			case byOffset != cmd.Flags().Changed("pg"):
				return ctl.Usagef("--pg and --offset: want both or none")
			case byOffset:
				off, err := strconv.ParseUint(o.offset, 0, 64)
				if err != nil {
					return ctl.Usagef("--offset %q: want a number such as 0x1000", o.offset)
				}
				return a.dumpOffset(cmd.Context(), &o, off)
			}
			k, err := a.Key(args[0])
			if err != nil {
				return err
			}
			return a.With(cmd.Context(), ctl.SessionOptions{Lanes: 1, ReadOnly: true}, func(s ctl.Store) error {
				return a.dumpKey(cmd.Context(), s, &o, k)
			})
		},
	}
	f := c.Flags()
	f.Uint32Var(&o.pg, "pg", 0, "placement group to read at --offset")
	f.StringVar(&o.offset, "offset", "", "byte of the region to read at")
	f.StringVar(&o.as, "as", "", "what stands there: region, group, segment, record or status (default: from the "+
		"offset)")
	f.IntVar(&o.replica, "replica", -1, "replica to read, from 0, the head (default: the last, the tail)")
	return c
}

// dumper reads one replica and prints what it finds.
type dumper struct {
	a       *commands
	ctx     context.Context
	s       ctl.Store
	pg      uint32
	replica int
	check.Geometry
}

func (d *dumper) read(off uint64, n int) ([]byte, error) {
	n = int(min(uint64(n), d.RegionBytes-min(off, d.RegionBytes)))
	if n == 0 {
		return nil, ctl.Usagef("offset %#x: the region has %#x bytes", off, d.RegionBytes)
	}
	b, err := d.s.ReadRaw(d.ctx, d.pg, d.replica, off, n)
	if err != nil {
		return nil, fmt.Errorf("placement group %d, replica %d, offset %#x: %w", d.pg, d.replica, off, err)
	}
	return b, nil
}

// print prints b as what it is said to be.
func (d *dumper) print(kind string, off uint64, b []byte) error {
	var text bytes.Buffer
	var err error
	switch kind {
	case "region":
		err = layout.DumpRegion(&text, b)
	case "group":
		err = layout.DumpGroup(&text, off, b, d.HeapLo, d.HeapHi)
	case "segment":
		err = layout.DumpSegment(&text, off, b, d.HeapLo, d.HeapHi)
	case "record":
		err = layout.DumpRecord(&text, off, b)
	case "status":
		err = layout.DumpStatus(&text, off, b)
	default:
		err = ctl.Usagef("--as %q: want region, group, segment, record or status", kind)
	}
	if err != nil {
		return err
	}
	if d.a.JSON() {
		return d.a.PrintJSON(map[string]any{"placement_group": d.pg, "replica": d.replica, "kind": kind, "offset": off,
			"bytes_hex": hex.EncodeToString(b), "text": text.String()})
	}
	_, err = fmt.Fprintf(d.a.Stdout, "placement group %d, replica %d: %s\n", d.pg, d.replica, text.Bytes())
	return err
}

// regionHeaderBytes are what is shown of a region's first page.
const regionHeaderBytes = 64

func (a *commands) dumpKey(ctx context.Context, s ctl.Store, o *dumpOptions, key []byte) error {
	loc, err := s.Locate(key)
	if err != nil {
		return err
	}
	d := &dumper{a: a, ctx: ctx, s: s, pg: loc.PG, replica: o.replica,
		Geometry: check.GeometryOf(loc.RegionBytes, loc.IndexBytes, loc.AccessBytes)}
	if d.replica < 0 {
		d.replica = loc.Replicas - 1
	}
	b, err := d.read(0, regionHeaderBytes)
	if err != nil {
		return err
	}
	if err := d.print("region", 0, b); err != nil {
		return err
	}
	found := false
	for _, off := range []uint64{loc.Home, loc.Stash} {
		if b, err = d.read(off, layout.GroupSize); err != nil {
			return err
		}
		if err := d.print("group", off, b); err != nil {
			return err
		}
		g := layout.Group(b)
		for i := range layout.GroupSlots {
			w := g.Slot(i)
			if !w.Readable() || w.FP() != layout.FP(loc.Hash) || !layout.InHeap(w, d.HeapLo, d.HeapHi) {
				continue
			}
			rec, err := d.read(w.Off(), w.ReadLen())
			if err != nil {
				return err
			}
			if err := d.print("record", w.Off(), rec); err != nil {
				return err
			}
			r, err := layout.ParseLinked(rec)
			if err == nil && bytes.Equal(r.Key, key) {
				found = true
			}
			if err == nil && r.Flags&layout.FlagIntent != 0 {
				if err := d.intent(&r); err != nil {
					return err
				}
			}
		}
		if !g.Header().OVF() {
			break // nothing of this group is in the stash
		}
	}
	if !found {
		return a.About(key, client.ErrNotFound)
	}
	return nil
}

// intent prints what a transaction's intent names: the records before and after, and the status word at its head, which
// says whose the key's value is.
func (d *dumper) intent(r *layout.Record) error {
	in, err := layout.ParseIntent(r.Value, d.HeapLo, d.HeapHi)
	if err != nil {
		return nil // the record's dump says so
	}
	for _, w := range []layout.Word{in.Parent, in.Final} {
		if w.State() != layout.Live {
			continue
		}
		b, err := d.read(w.Off(), w.ReadLen())
		if err == nil {
			err = d.print("record", w.Off(), b)
		}
		if err != nil {
			return err
		}
	}
	status := *d
	status.pg, status.replica = in.PG, 0
	b, err := d.s.ReadRaw(d.ctx, in.PG, 0, in.Off, 8)
	if err != nil {
		return fmt.Errorf("placement group %d, replica 0, offset %#x: %w", in.PG, in.Off, err)
	}
	return status.print("status", in.Off, b)
}

func (a *commands) dumpOffset(ctx context.Context, o *dumpOptions, off uint64) error {
	return a.inside(ctx, func(_ ctl.Backend, s ctl.Store, st *dirpb.StatusReply, ns *dirpb.Namespace) error {
		var geo check.Geometry
		replicas := 0
		for _, p := range overview.Groups(st.GetMap(), ns.GetId()) {
			if p.GetId() == o.pg {
				geo, replicas = check.GeometryOf(p.GetRegionBytes(), p.GetIndexBytes(), p.GetAccessBytes()),
					len(p.GetMembers())
			}
		}
		if replicas == 0 {
			return ctl.Usagef("--pg %d: namespace %q has no such placement group (kvctl shards lists them)", o.pg,
				a.Namespace)
		}
		d := &dumper{a: a, ctx: ctx, s: s, pg: o.pg, replica: o.replica, Geometry: geo}
		if d.replica < 0 {
			d.replica = replicas - 1
		}
		kind := o.as
		if kind == "" {
			switch {
			case off == 0:
				kind = "region"
			case off < geo.IndexBytes:
				kind = "group"
			default:
				kind = "record"
			}
		}
		n := map[string]int{"region": regionHeaderBytes, "group": layout.GroupSize, "segment": layout.SegmentSize,
			"status": 8}[kind]
		if kind == "record" {
			head, err := d.read(off, layout.RecordHeaderSize)
			if err != nil {
				return err
			}
			n = check.RecordSpan(head)
		}
		p, err := d.read(off, max(n, 1))
		if err != nil {
			return err
		}
		return d.print(kind, off, p)
	})
}
