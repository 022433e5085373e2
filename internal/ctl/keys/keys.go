package keys

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/patient"
	"github.com/kvd-project/kvd/internal/units"
)

func (a *commands) printVersion(k []byte, version uint64) error {
	if a.JSON() {
		m := map[string]any{"version": versionText(version)}
		a.SetKey(m, "key", k)
		return a.PrintJSON(m)
	}
	fmt.Fprintf(a.Stdout, "version %d\n", version)
	return nil
}

func (a *commands) putCommand() *cobra.Command {
	var o client.PutOptions
	var ifAbsent bool
	var file string
	var pinned time.Duration
	c := &cobra.Command{
		Use:   "put KEY [VALUE|-]",
		Short: "Set a key; the value comes from stdin if it is - or missing",
		Long: `Set a key; the value comes from stdin if it is - or missing, or from --file.

A file of more than 8 MiB, on stdin or by --file, is read in pieces of that length.
Nobody sees any of it before all is there.

With --pin-for a cache does not evict what is put for so long. The next put ends that.
While more is pinned than kvctl namespace set --max-pinned allows, no pin counts.`,
		Args:              cobra.RangeArgs(1, 2),
		ValidArgsFunction: a.CompleteKey(false),
		RunE: func(cmd *cobra.Command, args []string) error {
			k, err := a.Key(args[0])
			if err != nil {
				return err
			}
			if o.TTL < 0 {
				return ctl.Usagef("--ttl %v: want > 0", o.TTL)
			}
			if pinned < 0 {
				return ctl.Usagef("--pin-for %v: want > 0", pinned)
			}
			if pinned > 0 {
				o.PinUntil = a.Now().Add(pinned)
			}
			if file != "" && len(args) > 1 {
				return ctl.Usagef("--file %s: a value is given, too", file)
			}
			f, size, err := a.valueFile(args, file)
			if err != nil {
				return err
			}
			if file != "" {
				defer f.Close()
			}
			stream := size > ctl.BatchBytes && !ifAbsent
			var v []byte
			switch {
			case f == nil:
				v, err = a.value(cmd.Context(), args, 1)
			case !stream:
				v, err = ctl.ReadFile(f, f.Name(), size)
			}
			if err != nil {
				return err
			}
			return a.With(cmd.Context(), ctl.SessionOptions{Lanes: 1}, func(s ctl.Store) error {
				var version uint64
				switch {
				case ifAbsent:
					version, err = s.PutIfAbsent(cmd.Context(), k, v, o)
				case stream:
					version, err = ctl.PutFile(cmd.Context(), s, k, f, size, o)
				default:
					version, err = s.Put(cmd.Context(), k, v, o)
				}
				if err != nil {
					return a.About(k, err)
				}
				return a.printVersion(k, version)
			})
		},
	}
	c.Flags().DurationVar(&o.TTL, "ttl", 0, "time to live (default: for ever)")
	c.Flags().DurationVar(&pinned, "pin-for", 0, "have eviction pass over it for so long")
	c.Flags().BoolVar(&ifAbsent, "if-absent", false, "only if there is no such key")
	c.Flags().StringVar(&file, "file", "", "a regular file that is the value")
	return c
}

func (a *commands) getCommand() *cobra.Command {
	return &cobra.Command{
		Annotations: map[string]string{ctl.Brief: ""},
		Use:         "get KEY",
		Short:       "Print a key's value, byte for byte",
		Long: "Print a key's value, byte for byte.\n\nIn its first 100 ms a signal ends it as the " +
			"system does, without a message.",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.CompleteKey(false),
		RunE: func(cmd *cobra.Command, args []string) error {
			k, err := a.Key(args[0])
			if err != nil {
				return err
			}
			return a.With(cmd.Context(), ctl.SessionOptions{Lanes: 1, ReadOnly: true}, func(s ctl.Store) error {
				ctx := cmd.Context()
				if !a.JSON() {
					ctx = inside.LimitMemory(ctx, ctl.LongValue)
				}
				it, err := s.Get(ctx, k)
				if errors.As(err, new(*inside.TooLargeError)) {
					return a.About(k, printLong(cmd.Context(), s, k, a.Stdout))
				}
				if err != nil {
					return a.About(k, err)
				}
				if a.JSON() {
					return a.PrintJSON(a.item(k, it))
				}
				if _, err := a.Stdout.Write(it.Value); err != nil {
					return err
				}
				if (ctl.IsTerminal(a.Stdout) || a.Parent != nil) && !bytes.HasSuffix(it.Value, []byte("\n")) {
					fmt.Fprintln(a.Stdout)
				}
				return nil
			})
		},
	}
}

// printLong writes a long value to w by parts. All of them are of one version.
func printLong(ctx context.Context, s ctl.Store, k []byte, w io.Writer) error {
	for {
		v, err := s.Open(ctx, k)
		if err != nil {
			return err
		}
		n, err := v.WriteTo(w)
		v.Close()
		switch {
		case err == nil || !errors.Is(err, client.ErrConflict):
			return err
		case n > 0:
			return fmt.Errorf("%s of %s of version %d were printed, and the value has changed meanwhile: %w",
				units.Bytes(n), units.Bytes(v.Size), v.Version, err)
		}
	}
}

// versionText is a version in JSON: a string, since a number above 2^53 does not survive
// most readers.
func versionText(v uint64) string { return strconv.FormatUint(v, 10) }

// item is a key's JSON object.
func (a *commands) item(k []byte, it client.Item) map[string]any {
	m := map[string]any{"version": versionText(it.Version)}
	a.SetKey(m, "key", k)
	if longAsText(it.Value) {
		m["value_base64"] = base64.StdEncoding.EncodeToString(it.Value)
	} else {
		ctl.SetBytes(m, "value", it.Value)
	}
	if it.Flags != 0 {
		m["flags"] = it.Flags
	}
	if it.Note != 0 {
		m["note"] = strconv.FormatUint(it.Note, 10) // as versionText
	}
	if it.Type != client.Plain {
		m["type"] = it.Type.String()
	}
	if !it.Expires.IsZero() {
		m["expires"] = ctl.When(it.Expires)
	}
	return m
}

// longAsText reports whether a text of JSON would be far longer than the value, so that pipe might refuse the line: a
// control character takes six bytes.
func longAsText(v []byte) bool {
	if len(v) < 1<<20 {
		return false
	}
	n := 0
	for _, c := range v {
		if c < ' ' {
			n++
		}
	}
	return n > len(v)/8
}

func (a *commands) delCommand() *cobra.Command {
	var version uint64
	var prefix string
	var dry, lost bool
	c := &cobra.Command{
		Use:   "del [KEY...]",
		Short: "Delete keys: those named, those on stdin, or all with a prefix",
		Long: "Delete keys. Without arguments and --prefix, those on stdin, one a line, as scan prints\n" +
			"them. kvctl scan --limit 0 | kvctl del deletes what scan lists, whatever is in a key.\n" +
			"A line that begins with a quote is quoted as in Go. --prefix deletes every key that\n" +
			"begins so, and prints how many they were. Damaged records stay: see flush.\n" +
			"--lost is for a key whose memory is so damaged that no copy tells whose record it is. get\n" +
			"and put call such a key corrupt. --lost frees what may be the key's record.",
		ValidArgsFunction: a.CompleteKey(true),
		RunE: func(cmd *cobra.Command, args []string) error {
			byVersion := cmd.Flags().Changed("version")
			if cmd.Flags().Changed("prefix") {
				p, err := a.Key(prefix)
				switch {
				case err != nil:
					return ctl.Usagef("--prefix: %w", err)
				case len(args) > 0, byVersion:
					return ctl.Usagef("--prefix: want no keys and no --version with it")
				}
				if dry {
					return a.wouldErase(cmd.Context(), ctl.Matcher(p, ""))
				}
				return a.With(cmd.Context(), ctl.SessionOptions{}, func(s ctl.Store) error {
					return a.erase(cmd.Context(), s, "del", ctl.Matcher(p, ""))
				})
			}
			ks, err := a.keys(cmd.Context(), args)
			if err != nil {
				return err
			}
			if byVersion && len(ks) != 1 {
				return ctl.Usagef("--version: want one key, not %d", len(ks))
			}
			switch {
			case lost && (byVersion || dry):
				return ctl.Usagef("--lost: want no --version and no --dry-run with it")
			case lost:
				return a.With(cmd.Context(), ctl.SessionOptions{Lanes: 1}, func(s ctl.Store) error {
					return a.freeKeys(cmd.Context(), s, ks)
				})
			case dry:
				return a.wouldDelete(cmd.Context(), ks, byVersion, version)
			}
			return a.With(cmd.Context(), ctl.SessionOptions{Lanes: 1}, func(s ctl.Store) error {
				if byVersion {
					return a.About(ks[0], s.DeleteVersion(cmd.Context(), ks[0], version))
				}
				var deleted, missing int
				var firstMissing []byte
				var failed error
				for i, r := range s.MultiDelete(cmd.Context(), ks) {
					switch {
					case r.Err == nil:
						deleted++
					case errors.Is(r.Err, client.ErrNotFound):
						if missing++; missing == 1 {
							firstMissing = ks[i]
						}
					// An unknown outcome is what the caller must hear of.
					case failed == nil || ctl.ExitCode(failed) != ctl.ExitUnknown &&
						ctl.ExitCode(r.Err) == ctl.ExitUnknown:
						failed = a.About(ks[i], r.Err)
					}
				}
				if a.JSON() {
					if err := a.PrintJSON(map[string]any{"deleted": deleted, "not_found": missing}); err != nil {
						return err
					}
				}
				switch {
				case failed != nil:
					return ctl.Partly(deleted > 0, failed, "after %d of %d keys were deleted", deleted, len(ks))
				case missing == 1:
					return a.About(firstMissing, client.ErrNotFound)
				case missing > 1:
					return fmt.Errorf("%d of %d keys, the first of them %w", missing, len(ks),
						a.About(firstMissing, client.ErrNotFound))
				}
				return nil
			})
		},
	}
	c.Flags().Uint64Var(&version, "version", 0, "only if the key has this version")
	c.Flags().StringVar(&prefix, "prefix", "", "delete every key that begins with this")
	c.Flags().BoolVar(&lost, "lost", false, "free what no copy tells any more and may be the key's")
	ctl.DryFlag(c, &dry)
	return c
}

func (a *commands) casCommand() *cobra.Command {
	var o client.PutOptions
	c := &cobra.Command{
		Use:               "cas KEY VERSION [VALUE|-]",
		Short:             "Set a key if it still has a version, as put, get and mget print it",
		Args:              cobra.RangeArgs(2, 3),
		ValidArgsFunction: a.CompleteKey(false),
		RunE: func(cmd *cobra.Command, args []string) error {
			k, err := a.Key(args[0])
			if err != nil {
				return err
			}
			version, err := strconv.ParseUint(args[1], 0, 64)
			if err != nil {
				return ctl.Usagef("version %q: want a number", args[1])
			}
			if o.TTL < 0 {
				return ctl.Usagef("--ttl %v: want > 0", o.TTL)
			}
			v, err := a.value(cmd.Context(), args, 2)
			if err != nil {
				return err
			}
			return a.With(cmd.Context(), ctl.SessionOptions{Lanes: 1}, func(s ctl.Store) error {
				next, err := s.CompareAndSwap(cmd.Context(), k, version, v, o)
				if err != nil {
					return a.About(k, err)
				}
				return a.printVersion(k, next)
			})
		},
	}
	c.Flags().DurationVar(&o.TTL, "ttl", 0, "time to live (default: for ever)")
	return c
}

func (a *commands) incrCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "incr KEY [DELTA]",
		Short: "Add to the decimal number that a key holds, and print the sum",
		Long: "Add DELTA (default 1; after -- it may be negative) to the decimal number that\na key " +
			"holds, and print the sum. A missing key counts as 0.",
		Args:              cobra.RangeArgs(1, 2),
		ValidArgsFunction: a.CompleteKey(false),
		RunE: func(cmd *cobra.Command, args []string) error {
			k, err := a.Key(args[0])
			if err != nil {
				return err
			}
			delta := int64(1)
			if len(args) > 1 {
				if delta, err = strconv.ParseInt(args[1], 10, 64); err != nil {
					return ctl.Usagef("delta %q: want a decimal 64-bit number", args[1])
				}
			}
			return a.With(cmd.Context(), ctl.SessionOptions{Lanes: 1}, func(s ctl.Store) error {
				n, err := s.Incr(cmd.Context(), k, delta)
				if err != nil {
					return a.About(k, err)
				}
				if a.JSON() {
					m := map[string]any{"value": n}
					a.SetKey(m, "key", k)
					return a.PrintJSON(m)
				}
				fmt.Fprintln(a.Stdout, n)
				return nil
			})
		},
	}
}

func (a *commands) ttlCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "ttl KEY [DURATION|none]",
		Short:             "Print a key's time to live, or set it",
		Args:              cobra.RangeArgs(1, 2),
		ValidArgsFunction: a.CompleteKey(false),
		RunE: func(cmd *cobra.Command, args []string) error {
			k, err := a.Key(args[0])
			if err != nil {
				return err
			}
			if len(args) == 1 {
				return a.With(cmd.Context(), ctl.SessionOptions{Lanes: 1, ReadOnly: true}, func(s ctl.Store) error {
					in, err := s.Exists(cmd.Context(), k)
					if err != nil {
						return a.About(k, err)
					}
					return a.printTTL(k, in.Expires)
				})
			}
			ttl := time.Duration(0)
			if args[1] != "none" {
				if ttl, err = time.ParseDuration(args[1]); err != nil || ttl < time.Millisecond {
					return ctl.Usagef("duration %q: want at least 1ms, such as 90s or 24h, or none", args[1])
				}
			}
			return a.With(cmd.Context(), ctl.SessionOptions{Lanes: 1}, func(s ctl.Store) error {
				return a.About(k, s.Touch(cmd.Context(), k, ttl))
			})
		},
	}
}

func (a *commands) printTTL(k []byte, expires time.Time) error {
	left := expires.Sub(a.Now()).Round(time.Millisecond)
	if a.JSON() {
		m := map[string]any{"expires": nil, "ttl_seconds": nil}
		a.SetKey(m, "key", k)
		if !expires.IsZero() {
			m["expires"], m["ttl_seconds"] = ctl.When(expires), left.Seconds()
		}
		return a.PrintJSON(m)
	}
	if expires.IsZero() {
		fmt.Fprintln(a.Stdout, "none")
	} else {
		fmt.Fprintln(a.Stdout, left)
	}
	return nil
}

func (a *commands) mgetCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "mget [KEY...]",
		Short: "Print several keys; without arguments, those on stdin, one a line",
		Long: "Print several keys, fetched together; stdin is as scan prints it. With -o json one " +
			"object a line, in the\norder of the keys; a missing key has \"found\": false. Exit status 1 if any " +
			"is\nmissing.",
		ValidArgsFunction: a.CompleteKey(true),
		RunE: func(cmd *cobra.Command, args []string) error {
			ks, err := a.keys(cmd.Context(), args)
			if err != nil {
				return err
			}
			return a.With(cmd.Context(), ctl.SessionOptions{Lanes: 1, ReadOnly: true}, func(s ctl.Store) error {
				var rows []ctl.Row
				missing := false
				for i, r := range s.MultiGet(cmd.Context(), ks) {
					found := r.Err == nil
					if !found && !errors.Is(r.Err, client.ErrNotFound) {
						return a.About(ks[i], r.Err)
					}
					missing = missing || !found
					switch {
					case a.JSON():
						m := map[string]any{}
						if found {
							m = a.item(ks[i], r.Item)
						} else {
							a.SetKey(m, "key", ks[i])
						}
						m["found"] = found
						if err := a.PrintJSON(m); err != nil {
							return err
						}
					case found:
						rows = append(rows, ctl.Row{a.Show(ks[i]), r.Version, ctl.When(r.Expires), len(r.Value),
							clip(r.Value)})
					default:
						rows = append(rows, ctl.Row{a.Show(ks[i]), "-", "-", "-", "not found"})
					}
				}
				if !a.JSON() {
					a.PrintTable(ctl.Row{"Key", "Version", "Expires", "Bytes", "Value"}, rows)
				}
				if missing {
					return ctl.Fail(ctl.ExitNo)
				}
				return nil
			})
		},
	}
}

// clip shows the beginning of a value.
func clip(v []byte) string {
	const most = 48
	if len(v) <= most {
		return ctl.Printable(v)
	}
	return ctl.Printable(v[:most]) + "…"
}

func (a *commands) scanCommand() *cobra.Command {
	var prefix, pattern string
	var limit int
	var long bool
	c := &cobra.Command{
		Use:   "scan",
		Short: "List keys, in no particular order",
		Long: "List keys, one a line, in the order of their hashes. A key is quoted as in Go if it is\n" +
			"not printable or begins with a quote. So del and mget read what scan prints.\n" +
			"A key that is there all the time is listed; one that changes meanwhile may be\nlisted twice. With -o " +
			"json one object a line.\n" +
			"With --long it has all that is kept of a key, and every key unless --limit says\notherwise: kvctl pipe " +
			"brings it back.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			p, err := a.Prefix(prefix)
			if err != nil {
				return err
			}
			if limit < 0 {
				return ctl.Usagef("--limit %d: want >= 0", limit)
			}
			most := limit
			if !cmd.Flags().Changed("limit") {
				most++ // to know whether there are more
				if long && a.JSON() {
					most, limit = 0, 0
				}
			}
			return a.With(cmd.Context(), ctl.SessionOptions{Lanes: 1, ReadOnly: true}, func(s ctl.Store) error {
				var rows []ctl.Row
				given := 0
				// next counts a key; ok is false if it is not to be printed.
				next := func() (ok, more bool) {
					if given == limit && most > limit {
						a.Say("kvctl scan: there are more than %d keys; --limit 0 lists all", limit)
						return false, false
					}
					given++
					return true, given != most
				}
				o := client.ScanOptions{KeysOnly: true, Match: ctl.Matcher(p, pattern)}
				var err error
				if long {
					err = eachItem(cmd.Context(), s, o, most, func(key []byte, it client.Item) (bool, error) {
						ok, more := next()
						if !ok {
							return false, nil
						}
						if a.JSON() {
							return more, a.PrintJSON(a.item(key, it))
						}
						rows = append(rows, ctl.Row{a.Show(key), it.Version, ctl.When(it.Expires), len(it.Value),
							clip(it.Value)})
						return more, nil
					})
				} else {
					err = patient.Keys(cmd.Context(), s, o, func(kv client.KV) (bool, error) {
						ok, more := next()
						if !ok {
							return false, nil
						}
						if a.JSON() {
							m := map[string]any{"version": versionText(kv.Version)}
							a.SetKey(m, "key", kv.Key)
							return more, a.PrintJSON(m)
						}
						_, err := fmt.Fprintln(a.Stdout, a.Show(kv.Key))
						return more, err
					})
				}
				if err != nil && !errors.Is(err, client.ErrCorrupt) {
					return err
				}
				if long && !a.JSON() {
					a.PrintTable(ctl.Row{"Key", "Version", "Expires", "Bytes", "Value"}, rows)
				}
				return err
			})
		},
	}
	c.Flags().StringVar(&prefix, "prefix", "", "only keys that begin with this")
	c.Flags().StringVar(&pattern, "pattern", "", `only keys that match this as Redis has it: * ? [a-z] [^a] \x`)
	c.Flags().IntVar(&limit, "limit", 100, "how many keys to list at most; 0: all, as without it --long -o json does")
	c.Flags().BoolVarP(&long, "long", "l", false, "with values, versions and expiry")
	return c
}
