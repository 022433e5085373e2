package operate

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"runtime"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/buildinfo"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/webget"
)

// Bounds of what a bundle takes of each source.
const (
	maxPageBytes = 32 << 20
	maxLogBytes  = 8 << 20
)

type bundleOptions struct {
	pages, logs []string
	profiles    bool
}

func (a *commands) supportCommand() *cobra.Command {
	c := &cobra.Command{Use: "support", Short: "Collect what helps others to help you"}
	var o bundleOptions
	bundle := &cobra.Command{
		Use:   "bundle FILE",
		Short: "Write the store's state, metrics, logs and profiles to a file (.tar.gz)",
		Long: "Write what somebody needs who is to find out what is wrong with the store:\n\n" +
			"  its state, as kvctl status -o json has it\n" +
			"  metrics of each process that --http names\n" +
			"  profiles of its goroutines and heap, with --profiles\n" +
			"  the last 8 MiB of each log that --log names\n\n" +
			"No values, keys or secrets are in it. Lines of logs that kvd did not write are left out. The\n" +
			"others are cut to the time, the level, the message, and fields that are numbers or name a\n" +
			"part of the store. Names of namespaces, memory nodes and clients, addresses and\n" +
			"identities are in it: look at it before it leaves the house.\n\n" +
			"A source that does not answer is left out; exit status 1 tells, and the bundle says which.\n" +
			"A FILE that exists is not overwritten.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return a.bundle(cmd.Context(), args[0], o) },
	}
	f := bundle.Flags()
	f.StringArrayVar(&o.pages, "http", nil, "http or https address of a process (its http-listen), such as "+
		"http://127.0.0.1:7480; may be repeated")
	f.StringArrayVar(&o.logs, "log", nil, "file that a process logs to; may be repeated")
	f.BoolVar(&o.profiles, "profiles", false, "profiles of the goroutines and the heap of each --http, too")
	c.AddCommand(bundle)
	return c
}

// bundleFile is a bundle that is being written.
type bundleFile struct {
	tar     *tar.Writer
	now     time.Time
	files   []string
	missing []string
}

// add writes a file; err says why there is none, which is told at the end.
func (b *bundleFile) add(name string, content []byte, err error) error {
	if err != nil {
		b.missing = append(b.missing, fmt.Sprintf("%s: %s", name, ctl.OneLine(err.Error())))
		return nil
	}
	b.files = append(b.files, name)
	if err := b.tar.WriteHeader(&tar.Header{Name: "kvd-support/" + name, Mode: 0o600, Size: int64(len(content)),
		ModTime: b.now}); err != nil {
		return err
	}
	_, err = b.tar.Write(content)
	return err
}

func (a *commands) bundle(ctx context.Context, name string, o bundleOptions) error {
	pages, err := parsePages(o.pages)
	if err != nil {
		return err
	}
	cfg, err := a.TLSConfig()
	if err != nil {
		return err
	}
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	zip := gzip.NewWriter(f)
	b := &bundleFile{tar: tar.NewWriter(zip), now: a.Now()}
	err = a.fillBundle(ctx, b, pages, cfg, o)
	for _, end := range []func() error{b.tar.Close, zip.Close, f.Sync, f.Close} {
		if e := end(); err == nil {
			err = e
		}
	}
	if err != nil {
		return errors.Join(fmt.Errorf("%s: %w", name, err), os.Remove(name))
	}
	if a.JSON() {
		if b.missing == nil {
			b.missing = []string{}
		}
		err = a.PrintJSON(map[string]any{"file": name, "files": b.files, "missing": b.missing})
	} else {
		for _, x := range b.files {
			fmt.Fprintln(a.Stdout, ctl.Visible(x))
		}
	}
	for _, m := range b.missing {
		a.Say("kvctl support bundle: left out: %s", m)
	}
	if len(b.missing) > 0 && err == nil {
		return ctl.Fail(ctl.ExitNo)
	}
	return err
}

// parsePages checks addresses of processes; a path, a user or a password have no place in them.
func parsePages(pages []string) ([]*url.URL, error) {
	var out []*url.URL
	for i, p := range pages {
		u, err := url.Parse(p)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil ||
			strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" {
			return nil, ctl.Usagef("--http number %d: want http://HOST:PORT or https://HOST:PORT and no more", i+1)
		}
		u.Path = ""
		out = append(out, u)
	}
	return out, nil
}

// fillBundle adds everything. Only an error of the bundle's own file ends it early.
func (a *commands) fillBundle(ctx context.Context, b *bundleFile, pages []*url.URL, cfg *tls.Config,
	o bundleOptions) error {
	about := fmt.Sprintf("%s\n%s %s/%s\n%s\n", buildinfo.Line("kvctl", a.Version), runtime.Version(), runtime.GOOS,
		runtime.GOARCH, b.now.UTC().Format(time.RFC3339))
	if err := b.add("kvctl.txt", []byte(about), nil); err != nil {
		return err
	}
	state, err := a.stateForBundle(ctx)
	if err := b.add("status.json", state, err); err != nil {
		return err
	}
	paths := [][2]string{{"metrics", "/metrics"}}
	if o.profiles {
		paths = append(paths, [2]string{"goroutines", "/debug/pprof/goroutine?debug=1"},
			[2]string{"heap", "/debug/pprof/heap"})
	}
	for i, u := range pages {
		for _, p := range paths {
			page, err := a.fetchPage(ctx, u, p[1], cfg)
			if err := b.add(fmt.Sprintf("http-%d-%s/%s", i+1, strings.NewReplacer(":", "-", "/", "-").Replace(u.Host),
				p[0]), page, err); err != nil {
				return err
			}
		}
	}
	for i, p := range o.logs {
		lines, err := safeLog(p)
		if err := b.add(fmt.Sprintf("logs/%d.log", i+1), lines, err); err != nil {
			return err
		}
	}
	if len(b.missing) == 0 {
		return nil
	}
	return b.add("missing.txt", []byte(strings.Join(b.missing, "\n")+"\n"), nil)
}

func (a *commands) stateForBundle(ctx context.Context) (state []byte, err error) {
	err = a.WithBackend(func(be ctl.Backend) error {
		st, err := ctl.ClusterView(ctx, be)
		if err != nil {
			return err
		}
		state, err = ctl.ProtoJSON(st)
		return err
	})
	return append(state, '\n'), err
}

func (a *commands) fetchPage(ctx context.Context, process *url.URL, path string, cfg *tls.Config) ([]byte, error) {
	u, err := process.Parse(path)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, a.Timeout)
	defer cancel()
	code, page, err := webget.Get(ctx, u, cfg, maxPageBytes)
	if err == nil && code != http.StatusOK {
		err = fmt.Errorf("%s answers with status %d", u, code)
	}
	return page, err
}

// namesParts are fields of log lines that name a part of the store, never a key or what it holds.
var namesParts = map[string]bool{"node": true, "namespace": true, "role": true, "id": true, "addr": true, "state": true,
	"kind": true}

var (
	logField  = regexp.MustCompile(`([A-Za-z_][A-Za-z0-9_.-]*)=("(?:[^"\\]|\\.)*"|[^\s"]*)(?:\s+|$)`)
	logNumber = regexp.MustCompile(`^-?[0-9][0-9.]*(ns|µs|ms|s|m|h|[0-9.hmsµn]+)?$|^(true|false)$`)
)

// safeLog gives the end of a log without what may be a key, a value or a secret.
func safeLog(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: want a regular file", name)
	}
	text, err := io.ReadAll(io.NewSectionReader(f, max(0, st.Size()-maxLogBytes), maxLogBytes))
	if err != nil {
		return nil, err
	}
	if st.Size() > maxLogBytes { // it begins within a line
		_, text, _ = bytes.Cut(text, []byte("\n"))
	}
	var out bytes.Buffer
	left := 0
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		if safe := safeLine(line); safe != "" {
			fmt.Fprintln(&out, safe)
		} else {
			left++
		}
	}
	fmt.Fprintf(&out, "lines that kvd did not write, left out: %d\n", left)
	return out.Bytes(), nil
}

// safeLine is what a bundle tells of a line of a log; empty: it is none of kvd's.
func safeLine(line string) string {
	var fields [][2]string
	if strings.HasPrefix(line, "{") {
		fields = jsonFields(line)
	} else {
		rest := line
		for rest != "" {
			m := logField.FindStringSubmatchIndex(rest)
			if m == nil || m[0] != 0 {
				return ""
			}
			fields = append(fields, [2]string{rest[m[2]:m[3]], rest[m[4]:m[5]]})
			rest = rest[m[1]:]
		}
	}
	if len(fields) < 3 || fields[0][0] != "time" || fields[1][0] != "level" || fields[2][0] != "msg" {
		return ""
	}
	parts := make([]string, len(fields))
	for i, f := range fields {
		if value := f[1]; i > 2 && !logNumber.MatchString(strings.Trim(value, `"`)) && !namesParts[f[0]] || i > 2 &&
			secretName(f[0]) {
			f[1] = "…"
		}
		parts[i] = f[0] + "=" + f[1]
	}
	return ctl.Visible(strings.Join(parts, " "))
}

// secretName reports whether a field may hold a key, a value or a secret, even if that is a number.
func secretName(name string) bool {
	name = strings.ToLower(name)
	for _, s := range []string{"key", "value", "pass", "token", "secret", "auth", "arg", "pattern", "prefix", "match"} {
		if strings.Contains(name, s) {
			return true
		}
	}
	return false
}

// jsonFields are the members of a line of JSON in their order; those that are neither texts nor numbers
// are shown as …. nil: it is no such line.
func jsonFields(line string) (fields [][2]string) {
	d := json.NewDecoder(strings.NewReader(line))
	d.UseNumber()
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil
	}
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return nil
		}
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			return nil
		}
		value := string(raw)
		if raw[0] == '{' || raw[0] == '[' {
			value = "…"
		}
		fields = append(fields, [2]string{fmt.Sprint(name), value})
	}
	return fields
}
