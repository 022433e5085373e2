package bulk

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/archive"
	"github.com/kvd-project/kvd/internal/archive/places"
	"github.com/kvd-project/kvd/internal/buildinfo"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/units"
)

const snapshotHelp = `Keep snapshots of namespaces in a folder or a bucket, and bring them back. A snapshot has the keys
of a namespace with value, expiry, type, flags, note and version. Each was as it is there at some moment
between begin and end of the snapshot. Others may write meanwhile: a transaction may be in it by half.`

const restoreHelp = `Put the records of a snapshot into the namespace that --namespace names. They keep their
versions, so that tokens of clients stay valid, and expiry; those that have expired are left out. --bytes
creates the namespace, with what the snapshot knows of it and the other flags say.

Versions of a key only grow. --if-newer, the default, leaves keys whose version is the record's or a
later one. --if-absent leaves all that are there. --overwrite puts every record: with a new version
where the one that is there is later. Keys that the snapshot does not have stay.

With --progress a restore that was interrupted goes on behind the segments that were done; without, it
can be run again as well. At the end all is read and compared with the snapshot.`

// snapshots is what the commands share.
type snapshots struct {
	a        *commands
	from, to string // URLs
}

func (a *commands) snapshotCommand() *cobra.Command {
	s := &snapshots{a: a}
	c := &cobra.Command{Use: "snapshot", Short: "Write, check, restore and prune snapshots of namespaces",
		Long: snapshotHelp, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	c.AddCommand(s.createCommand(), s.listCommand(), s.showCommand(), s.verifyCommand(), s.restoreCommand(),
		s.pruneCommand(), s.copyCommand())
	return c
}

func (s *snapshots) fromFlag(c *cobra.Command) *cobra.Command {
	c.Flags().StringVar(&s.from, "from", "", "where the snapshots are: file:///FOLDER or s3://BUCKET/PREFIX")
	_ = c.MarkFlagRequired("from")
	return c
}

func (s *snapshots) toFlag(c *cobra.Command) *cobra.Command {
	c.Flags().StringVar(&s.to, "to", "", "where the snapshot goes: file:///FOLDER or s3://BUCKET/PREFIX")
	_ = c.MarkFlagRequired("to")
	return c
}

// open calls fn with the destination that a URL names.
func (s *snapshots) open(url string, create bool, fn func(archive.Destination) error) error {
	d, end, err := places.Open(url, create)
	if err != nil {
		return err
	}
	defer s.a.Closed("destination of snapshots", end)
	return fn(d)
}

// source calls fn with the snapshot that args name: a namespace, and an id or the newest.
func (s *snapshots) source(ctx context.Context, args []string, fn func(*archive.Snapshot) error) error {
	return s.open(s.from, false, func(d archive.Destination) error {
		snap, err := archive.Open(ctx, d, args[0], slices.Concat(args, []string{""})[1])
		if err != nil {
			return err
		}
		return fn(snap)
	})
}

// session calls fn with a session in a namespace, and what the directory says of that.
func (s *snapshots) session(ctx context.Context, namespace string, readOnly bool,
	fn func(ctl.Store, *dirpb.StatusReply, *dirpb.Namespace) error) error {
	side := *s.a
	side.Namespace = namespace
	return side.WithBackend(func(b ctl.Backend) error {
		st, err := ctl.ClusterStatus(ctx, b)
		if err != nil {
			return err
		}
		ns, err := side.OwnNamespace(st.GetMap())
		if err != nil {
			return err
		}
		x, err := b.Open(ctx, ctl.SessionOptions{ReadOnly: readOnly})
		if err != nil {
			return err
		}
		defer s.a.Closed("session", x.Close)
		return fn(x, st, ns)
	})
}

// allFlag adds --all to a command of one namespace.
func allFlag(c *cobra.Command, all *bool, usage string) {
	c.Flags().BoolVar(all, "all", false, usage)
	one := c.Args
	c.Args = func(cmd *cobra.Command, args []string) error {
		if *all {
			if len(args) > 0 {
				return ctl.Usagef("--all and %s: want one of them", ctl.Visible(args[0]))
			}
			return nil
		}
		return one(cmd, args)
	}
}

// each calls fn with every name, also when one fails, and gives the first error.
func (s *snapshots) each(ctx context.Context, names []string, fn func(name string) error) (first error) {
	for _, name := range names {
		if ctx.Err() != nil {
			return cmp.Or(first, context.Cause(ctx))
		}
		if err := fn(name); err != nil {
			s.a.Say("kvctl snapshot: namespace %s: %v", ctl.Visible(name), err)
			if first == nil {
				first = fmt.Errorf("namespace %s: %w", ctl.Visible(name), err)
			}
		}
	}
	return first
}

// namespaces are those of the store that are not being deleted.
func (s *snapshots) namespaces(ctx context.Context) (names []string, err error) {
	err = s.a.WithBackend(func(b ctl.Backend) error {
		st, err := ctl.ClusterStatus(ctx, b)
		for _, ns := range st.GetMap().GetNamespaces() {
			if !ns.GetDeleting() {
				names = append(names, ns.GetName())
			}
		}
		return err
	})
	slices.Sort(names)
	return names, err
}

func (s *snapshots) createCommand() *cobra.Command {
	var rate string
	var all bool
	c := s.toFlag(&cobra.Command{
		Use:   "create {NAMESPACE | --all}",
		Short: "Write a snapshot of a namespace, or of each",
		Long: "Read a namespace and write a snapshot of it. A folder is made if it is missing; a bucket is not. The\n" +
			"right to read is enough. It is there once all of it is; an interrupted one is none, and prune takes\n" +
			"it away. Exit status 5 if damaged records were left out.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			o := archive.CreateOptions{Now: s.a.Now}
			var err error
			if o.Rate, err = parseRate(rate); err != nil {
				return err
			}
			return s.open(s.to, true, func(d archive.Destination) error {
				if !all {
					return s.create(cmd.Context(), d, args[0], o)
				}
				names, err := s.namespaces(cmd.Context())
				if err != nil {
					return err
				}
				return s.each(cmd.Context(), names, func(name string) error {
					return s.create(cmd.Context(), d, name, o)
				})
			})
		},
	})
	allFlag(c, &all, "a snapshot of every namespace, one after the other; those that fail do not stop the others")
	c.Flags().StringVar(&rate, "rate", "",
		"read at most this much a second, such as 200MiB/s (default: no bound)")
	return c
}

// parseRate reads bytes a second; 0: no bound.
func parseRate(text string) (int64, error) {
	if text == "" {
		return 0, nil
	}
	n, err := ctl.ParseBytes(strings.TrimSuffix(text, "/s"))
	if err != nil || n == 0 || n > 1<<50 {
		return 0, ctl.Usagef("--rate %q: want such as 200MiB/s", text)
	}
	return int64(n), nil
}

func (s *snapshots) create(ctx context.Context, d archive.Destination, name string, o archive.CreateOptions) error {
	return s.session(ctx, name, true, func(x ctl.Store, st *dirpb.StatusReply, ns *dirpb.Namespace) error {
		start := time.Now()
		bar := s.a.Bar("snapshot", "keys", func() int64 { return about(ctx, x) })
		o.Done = func(keys, _ int) { bar.Step(keys) }
		o.Manifest, _ = archive.ManifestOf(st, ns.GetName(), buildinfo.Line("kvctl", s.a.Version))
		m, err := archive.Create(ctx, x, d, o)
		bar.End()
		if m == nil {
			return err
		}
		if e := s.printCreated(m, time.Since(start)); e != nil {
			return e
		}
		if err != nil {
			return ctl.ExitWith(ctl.ExitOther, err)
		}
		return nil
	})
}

// sizeOf is the bytes of a snapshot's segments.
func sizeOf(m *archive.Manifest) (n int64) {
	for _, g := range m.Segments {
		n += g.Bytes
	}
	return n
}

func (s *snapshots) printCreated(m *archive.Manifest, took time.Duration) error {
	if s.a.JSON() {
		return s.a.PrintJSON(map[string]any{"namespace": m.Namespace.Name, "id": m.ID, "keys": m.Keys, "bytes": m.Bytes,
			"written_bytes": sizeOf(m), "segments": len(m.Segments), "left_out": m.LeftOut, "seconds": took.Seconds()})
	}
	s.a.PrintTable(ctl.Row{"Namespace", "Snapshot", "Keys", "Bytes", "Written", "Left out", "Seconds", "MiB/s"},
		[]ctl.Row{{m.Namespace.Name, m.ID, m.Keys, m.Bytes, sizeOf(m), m.LeftOut, fmt.Sprintf("%.3f", took.Seconds()),
			fmt.Sprintf("%.1f", float64(m.Bytes)/took.Seconds()/(1<<20))}})
	return nil
}

func (s *snapshots) listCommand() *cobra.Command {
	return s.fromFlag(&cobra.Command{
		Use:   "list [NAMESPACE]",
		Short: "List snapshots, the newest first",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return s.open(s.from, false, func(d archive.Destination) error {
				all, err := archive.List(cmd.Context(), d, strings.Join(args, ""))
				if err != nil {
					return err
				}
				return s.printEntries(all, nil, "")
			})
		},
	})
}

// printEntries prints snapshots, and those of away with what became of them.
func (s *snapshots) printEntries(all, away []archive.Entry, went string) error {
	if s.a.JSON() {
		if away != nil {
			return s.a.PrintJSON(map[string]any{"kept": all, strings.ReplaceAll(went, " ", "_"): away})
		}
		if all == nil {
			all = []archive.Entry{}
		}
		return s.a.PrintJSON(all)
	}
	var rows []ctl.Row
	for i, e := range slices.Concat(all, away) {
		state := "complete"
		switch {
		case i >= len(all):
			state = went
		case !e.Complete:
			state = "unfinished"
		}
		rows = append(rows, ctl.Row{e.Namespace, e.ID, e.Bytes, state})
	}
	s.a.PrintTable(ctl.Row{"Namespace", "Snapshot", "Bytes", ""}, rows)
	return nil
}

func (s *snapshots) showCommand() *cobra.Command {
	return s.fromFlag(&cobra.Command{
		Use:   "show NAMESPACE [SNAPSHOT]",
		Short: "Say what a snapshot, the newest by default, is of",
		Args:  cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return s.source(cmd.Context(), args, func(snap *archive.Snapshot) error {
				m := &snap.Manifest
				if s.a.JSON() {
					return s.a.PrintJSON(m)
				}
				const form = "2006-01-02T15:04:05.000Z"
				s.a.PrintTable(ctl.Row{"", m.Namespace.Name + "/" + m.ID}, []ctl.Row{
					{"begun", m.T0.UTC().Format(form)}, {"ended", m.T1.UTC().Format(form)},
					{"keys", m.Keys}, {"bytes", m.Bytes}, {"written", sizeOf(m)}, {"segments", len(m.Segments)},
					{"left out", m.LeftOut}, {"cluster", m.Cluster}, {"mode", m.Namespace.Mode},
					{"replicas", m.Namespace.Replicas}, {"shards", m.Namespace.Shards}, {"writer", m.Writer}})
				return nil
			})
		},
	})
}

func (s *snapshots) verifyCommand() *cobra.Command {
	var against string
	c := s.fromFlag(&cobra.Command{
		Use:   "verify NAMESPACE [SNAPSHOT]",
		Short: "Read all of a snapshot, and compare it with a namespace",
		Long: "Read all of a snapshot: with status 5 it names the first file that is damaged, and where. --against\n" +
			"compares it with a namespace: exit status 1 if a key is missing there, is older or has another value\n" +
			"by the same version. Keys that are newer there, or not in the snapshot, are counted only.",
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return s.source(cmd.Context(), args, func(snap *archive.Snapshot) error {
				if against != "" {
					return s.session(cmd.Context(), against, true, func(x ctl.Store, _ *dirpb.StatusReply,
						_ *dirpb.Namespace) error {
						return s.compare(cmd.Context(), x, snap)
					})
				}
				bar := s.a.Bar("verify", "keys", func() int64 { return snap.Keys })
				err := archive.Verify(cmd.Context(), snap, bar.Step)
				if bar.End(); err != nil {
					return err
				}
				if s.a.JSON() {
					return s.a.PrintJSON(map[string]any{"namespace": snap.Namespace.Name, "id": snap.ID,
						"keys": snap.Keys, "segments": len(snap.Segments), "ok": true})
				}
				fmt.Fprintf(s.a.Stdout, "%s of %s: %d keys in %d segments, all good\n", snap.ID, snap.Namespace.Name,
					snap.Keys, len(snap.Segments))
				return nil
			})
		},
	})
	c.Flags().StringVar(&against, "against", "", "namespace to compare with")
	return c
}

// compare compares a snapshot with a namespace for verify.
func (s *snapshots) compare(ctx context.Context, x ctl.Store, snap *archive.Snapshot) error {
	r, err := s.compared(ctx, x, snap, true)
	if err != nil {
		return err
	}
	if s.a.JSON() {
		err = s.a.PrintJSON(r)
	} else {
		s.a.PrintTable(ctl.Row{"Keys", "Same", "Newer", "Older", "Missing", "Different", "Expired", "Extra"},
			[]ctl.Row{{r.Keys, r.Same, r.Newer, r.Older, r.Missing, r.Different, r.Expired, r.Extra}})
	}
	if err == nil && r.Missing+r.Different+r.Older > 0 {
		return ctl.Fail(ctl.ExitNo)
	}
	return err
}

// compared names the first keys that are not as they should be.
func (s *snapshots) compared(ctx context.Context, x ctl.Store, snap *archive.Snapshot,
	extra bool) (*archive.CompareReport,
	error) {
	const named = 10
	told := 0
	bar := s.a.Bar("compare", "keys", func() int64 { return snap.Keys })
	defer bar.End()
	return archive.Compare(ctx, x, snap, archive.CompareOptions{Extra: extra, Now: s.a.Now, Done: bar.Step,
		Found: func(what string, key []byte) {
			if told++; told <= named {
				s.a.Say("kvctl snapshot: key %s: %s", s.a.ShowKey(key), what)
			}
		}})
}

// restoreOptions are the flags of restore.
type restoreOptions struct {
	absent, newer, overwrite bool
	bytes, progress          string
	replicas, shards         uint32
}

func (s *snapshots) restoreCommand() *cobra.Command {
	var o restoreOptions
	var all bool
	c := ctl.Changes(s.fromFlag(&cobra.Command{
		Use:   "restore {NAMESPACE [SNAPSHOT] | --all}",
		Short: "Put a snapshot, the newest by default, into a namespace",
		Long:  restoreHelp,
		Args:  cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if all {
				return s.restoreAll(cmd.Context(), &o, cmd.Flags().Changed("namespace"))
			}
			if !cmd.Flags().Changed("namespace") {
				return ctl.Usagef("want --namespace: where the records go, which may be %s itself",
					ctl.Visible(args[0]))
			}
			if o.bytes == "" && (o.replicas != 0 || o.shards != 0) {
				return ctl.Usagef("--replicas and --shards are for a namespace that is made: want --bytes, too")
			}
			return s.source(cmd.Context(), args, func(snap *archive.Snapshot) error {
				return s.restore(cmd.Context(), snap, &o)
			})
		},
	}))
	allFlag(c, &all, "the newest snapshot of each namespace, into the one of its name; with --bytes those that are "+
		"missing are created")
	f := c.Flags()
	f.BoolVar(&o.newer, "if-newer", false, "leave keys that are there by the same version or a later one (default)")
	f.BoolVar(&o.absent, "if-absent", false, "leave keys that are there")
	f.BoolVar(&o.overwrite, "overwrite", false, "put all records, by new versions where there are later ones")
	c.MarkFlagsMutuallyExclusive("if-newer", "if-absent", "overwrite")
	f.StringVar(&o.bytes, "bytes", "", "create the namespace, with this memory on each node; 0 for half of what is "+
		"free")
	f.Uint32Var(&o.replicas, "replicas", 0, "with --bytes: copies of every record; 0: as the snapshot's")
	f.Uint32Var(&o.shards, "shards", 0, "with --bytes: shards to begin with, a power of two; 0: chosen")
	f.StringVar(&o.progress, "progress", "", "file that tells which segments are done; it goes at the end")
	return c
}

// restoreAll restores the newest snapshot of each namespace.
func (s *snapshots) restoreAll(ctx context.Context, o *restoreOptions, named bool) error {
	if named || o.progress != "" {
		return ctl.Usagef("--namespace and --progress are for one namespace: not with --all")
	}
	there, err := s.namespaces(ctx)
	if err != nil {
		return err
	}
	return s.open(s.from, false, func(d archive.Destination) error {
		all, err := archive.List(ctx, d, "")
		if err != nil {
			return err
		}
		newest := make(map[string]string)
		for _, e := range all { // the newest of each namespace first
			if e.Complete && newest[e.Namespace] == "" {
				newest[e.Namespace] = e.ID
			}
		}
		return s.each(ctx, slices.Sorted(maps.Keys(newest)), func(name string) error {
			snap, err := archive.Open(ctx, d, name, newest[name])
			if err != nil {
				return err
			}
			one, side := *o, *s.a
			if slices.Contains(there, name) {
				one.bytes = ""
			}
			side.Namespace = name
			return (&snapshots{a: &side}).restore(ctx, snap, &one)
		})
	})
}

func (s *snapshots) restore(ctx context.Context, snap *archive.Snapshot, o *restoreOptions) error {
	if o.bytes != "" {
		if err := s.makeNamespace(ctx, snap, o); err != nil {
			return err
		}
	}
	ro := archive.RestoreOptions{Mode: archive.IfNewer, Progress: o.progress, Now: s.a.Now}
	switch {
	case o.absent:
		ro.Mode = archive.IfAbsent
	case o.overwrite:
		ro.Mode = archive.Overwrite
	}
	return s.session(ctx, s.a.Namespace, false, func(x ctl.Store, st *dirpb.StatusReply, ns *dirpb.Namespace) error {
		if ns.GetMode() == dirpb.NamespaceMode_NAMESPACE_CACHE && snap.Namespace.Mode == "store" {
			return ctl.ExitWith(ctl.ExitNo,
				fmt.Errorf("%q is a cache, and the snapshot of a store: a cache evicts; want "+
					"a namespace of mode store", ns.GetName()))
		}
		ro.Target = fmt.Sprintf("%s/%d", st.GetClusterId(), ns.GetId())
		start := time.Now()
		bar := s.a.Bar("restore", "keys", func() int64 { return snap.Keys })
		ro.Done = func(keys, _ int) { bar.Step(keys) }
		r, err := archive.Restore(ctx, x, snap, ro)
		if bar.End(); err != nil {
			return ctl.Partly(r.Restored > 0, err, "after %d records were restored; run it again to go on", r.Restored)
		}
		c, err := s.compared(ctx, x, snap, false)
		if err != nil {
			return ctl.Partly(true, err, "%d records were restored, and then", r.Restored)
		}
		if err := s.printRestored(r, c, time.Since(start)); err != nil {
			return err
		}
		if c.Missing+c.Different > 0 || c.Older > 0 && ro.Mode != archive.IfAbsent {
			return ctl.Fail(ctl.ExitNo)
		}
		return nil
	})
}

func (s *snapshots) printRestored(r *archive.RestoreReport, c *archive.CompareReport, took time.Duration) error {
	if s.a.JSON() {
		return s.a.PrintJSON(map[string]any{"restore": r, "verify": c, "seconds": took.Seconds()})
	}
	s.a.PrintTable(ctl.Row{"Records", "Restored", "New versions", "Kept", "Expired", "Same", "Newer", "Older",
		"Missing",
		"Different", "Seconds"},
		[]ctl.Row{{r.Records, r.Restored, r.Fresh, r.Kept, r.Expired, c.Same, c.Newer, c.Older, c.Missing, c.Different,
			fmt.Sprintf("%.3f", took.Seconds())}})
	return nil
}

// makeNamespace creates the namespace that a restore goes to.
func (s *snapshots) makeNamespace(ctx context.Context, snap *archive.Snapshot, o *restoreOptions) error {
	was := &snap.Namespace
	req := &dirpb.CreateNamespaceRequest{Name: s.a.Namespace, Mode: dirpb.NamespaceMode_NAMESPACE_STORE,
		Replicas: cmp.Or(o.replicas, was.Replicas), Shards: o.shards, MaxValueBytes: was.MaxValue,
		LimitBytes: was.LimitBytes}
	if was.Mode == "cache" {
		req.Mode = dirpb.NamespaceMode_NAMESPACE_CACHE
	}
	var err error
	if req.BytesPerNode, err = ctl.ParseBytes(o.bytes); err != nil {
		return ctl.Usagef("--bytes: %w", err)
	}
	return s.a.WithBackend(func(b ctl.Backend) error {
		err := b.Directory(ctx, false, func(ctx context.Context, d dirpb.DirectoryClient) error {
			_, err := d.CreateNamespace(ctx, req)
			return err
		})
		if err != nil {
			return fmt.Errorf("create namespace %q: %w", req.Name, err)
		}
		return nil
	})
}

func (s *snapshots) pruneCommand() *cobra.Command {
	var keep archive.Keep
	var dry bool
	c := s.fromFlag(&cobra.Command{
		Use:   "prune NAMESPACE",
		Short: "Take old snapshots away",
		Long: "Take away the snapshots of a namespace that no --keep flag keeps, and what interrupted ones\n" +
			"have left a day ago or earlier. The newest stays in any case. Hours and days are those of UTC.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if keep.Last < 0 || keep.Hourly < 0 || keep.Daily < 0 || keep == (archive.Keep{}) {
				return ctl.Usagef("want --keep-last, --keep-hourly or --keep-daily, and numbers above 0")
			}
			return s.open(s.from, false, func(d archive.Destination) error {
				return s.prune(cmd.Context(), d, args[0], keep, dry)
			})
		},
	})
	f := c.Flags()
	f.IntVar(&keep.Last, "keep-last", 0, "how many of the newest to keep")
	f.IntVar(&keep.Hourly, "keep-hourly", 0, "of how many hours that have any to keep the newest")
	f.IntVar(&keep.Daily, "keep-daily", 0, "of how many days that have any to keep the newest")
	ctl.DryFlag(c, &dry)
	return c
}

func (s *snapshots) prune(ctx context.Context, d archive.Destination, name string, keep archive.Keep, dry bool) error {
	all, err := archive.List(ctx, d, name)
	if err != nil {
		return err
	}
	stay, away := keep.Prune(all, s.a.Now())
	went := "removed"
	if dry {
		went = "would be removed"
		s.a.Unchanged()
	} else {
		for i, e := range away {
			if err := archive.Remove(ctx, d, e); err != nil {
				return ctl.Partly(i > 0, err, "after %d of %d snapshots were removed", i, len(away))
			}
		}
	}
	return s.printEntries(slices.Concat([]archive.Entry{}, stay), slices.Concat([]archive.Entry{}, away), went)
}

func (s *snapshots) copyCommand() *cobra.Command {
	return s.toFlag(s.fromFlag(&cobra.Command{
		Use:   "copy NAMESPACE [SNAPSHOT]",
		Short: "Copy a snapshot, the newest by default, to another folder",
		Long: "Copy a snapshot to another folder, and look at all of it meanwhile. It is there once all of it is;\n" +
			"a copy that was interrupted goes on.",
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return s.source(cmd.Context(), args, func(snap *archive.Snapshot) error {
				return s.open(s.to, true, func(to archive.Destination) error {
					bar := s.a.Bar("copy", "B", func() int64 { return sizeOf(&snap.Manifest) })
					err := archive.Copy(cmd.Context(), snap, to, func(n int64) { bar.Step(int(n)) })
					if bar.End(); err != nil {
						return err
					}
					if s.a.JSON() {
						return s.a.PrintJSON(map[string]any{"namespace": snap.Namespace.Name, "id": snap.ID,
							"bytes": sizeOf(&snap.Manifest)})
					}
					fmt.Fprintf(s.a.Stdout, "%s of %s: %s\n", snap.ID, snap.Namespace.Name,
						units.Rounded(sizeOf(&snap.Manifest)))
					return nil
				})
			})
		},
	}))
}
