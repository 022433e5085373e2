package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"go.uber.org/goleak"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/devstore"
)

// asMain makes this test binary be kvctl, for commands that fork themselves.
const asMain = "KVCTL_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(asMain) != "" {
		main()
	}
	ctl.CompleteFor = time.Minute
	goleak.VerifyTestMain(m)
}

// env is a store and a way to run kvctl against it.
type env struct {
	t       *testing.T
	store   *devstore.Store
	flags   []string
	backend func(*ctl.App) (ctl.Backend, error) // nil: the real one
	now     func() time.Time
}

func newEnv(t *testing.T, o devstore.Options) *env {
	t.Helper()
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	for _, v := range os.Environ() {
		if name, _, _ := strings.Cut(v, "="); strings.HasPrefix(name, "KVD_") {
			t.Setenv(name, "")
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	s, err := devstore.Start(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close store: %v", err)
		}
	})
	return &env{t: t, store: s, flags: []string{"--timeout", "20s", "--directory", strings.Join(s.Directory(), ",")},
		now: time.Now}
}

type result struct {
	stdout, stderr string
	code           int
}

// run runs kvctl in this process.
func (e *env) run(stdin string, args ...string) result {
	e.t.Helper()
	return e.runContext(e.t.Context(), stdin, args...)
}

func (e *env) runContext(ctx context.Context, stdin string, args ...string) result {
	var out, errs bytes.Buffer
	a := newProgram(strings.NewReader(stdin), &out, &errs)
	a.Now = e.now
	if e.backend != nil {
		a.Backend = e.backend
	}
	code := a.run(ctx, append(append([]string(nil), e.flags...), args...))
	return result{out.String(), errs.String(), code}
}

// must runs kvctl and wants status 0.
func (e *env) must(stdin string, args ...string) string {
	e.t.Helper()
	r := e.run(stdin, args...)
	if r.code != ctl.ExitOK {
		e.t.Fatalf("kvctl %q: exit %d: %s%s", args, r.code, r.stdout, r.stderr)
	}
	return r.stdout
}

// split is a command line's words; quoted ones are Go strings.
func split(t *testing.T, s string) (args []string) {
	t.Helper()
	for s = strings.TrimSpace(s); s != ""; s = strings.TrimSpace(s) {
		if s[0] == '"' {
			q, err := strconv.QuotedPrefix(s)
			if err != nil {
				t.Fatalf("%s: %v", s, err)
			}
			v, _ := strconv.Unquote(q)
			args, s = append(args, v), s[len(q):]
			continue
		}
		w, rest, _ := strings.Cut(s, " ")
		args, s = append(args, w), rest
	}
	return args
}

var volatile = []struct {
	re *regexp.Regexp
	to string
}{
	{regexp.MustCompile(`\b\d{18,20}\b`), "<version>"},
	{regexp.MustCompile(`version \d+`), "version <version>"},
	{regexp.MustCompile(`"version":"\d+"`), `"version":"<version>"`},
	{regexp.MustCompile(`127\.0\.0\.1:\d\d+`), "<addr>"},
	{regexp.MustCompile(`"incarnation":"[0-9a-f]{16}"`), `"incarnation":"<folder>"`},
	{regexp.MustCompile(`kvd-\d+`), "kvd-<n>"},
	{regexp.MustCompile(`"seconds":[0-9.e-]+`), `"seconds":<s>`},
	{regexp.MustCompile(`"expires":"21\d\d-[^"]*"`), `"expires":"<time>"`},
}

// Each script runs against a store of its own: one kvctl command line a test,
// what follows it is stdin.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/script", func(t *testing.T, path string) {
		e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20})
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			line, stdin, _ := strings.Cut(d.Input, "\n")
			flags := e.flags
			defer func() { e.flags = flags }()
			switch d.Cmd {
			case "kvctl":
			case "plain": // without the flags that name the store
				e.flags = nil
			default:
				d.Fatalf(t, "unknown command %q", d.Cmd)
			}
			for _, a := range d.CmdArgs {
				if a.Key == "env" { // for this command alone
					os.Setenv(a.Vals[0], a.Vals[1])
					defer os.Unsetenv(a.Vals[0])
				}
			}
			r := e.run(stdin, split(t, line)...)
			for _, v := range volatile {
				r.stdout = v.re.ReplaceAllString(r.stdout, v.to)
				r.stderr = v.re.ReplaceAllString(r.stderr, v.to)
			}
			var out strings.Builder
			out.WriteString(r.stdout)
			if r.stdout != "" && !strings.HasSuffix(r.stdout, "\n") {
				out.WriteString("<no newline>\n")
			}
			out.WriteString(r.stderr)
			if r.code != ctl.ExitOK {
				fmt.Fprintf(&out, "exit %d\n", r.code)
			}
			return out.String()
		})
	})
}
