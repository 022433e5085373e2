package main

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvd-project/kvd/internal/config"
	"github.com/kvd-project/kvd/internal/ctl"
)

// Every command has an example, each of whose lines runs that command with flags and arguments that it takes.
func TestExamples(t *testing.T) {
	a := newProgram(strings.NewReader(""), &bytes.Buffer{}, io.Discard)
	paths := map[string]bool{"exit": true, "use": true} // a shell's alone
	var each func(*cobra.Command)
	each = func(c *cobra.Command) {
		path := strings.TrimPrefix(strings.TrimPrefix(c.CommandPath(), "kvctl"), " ")
		paths[path] = true
		if c.Example == "" {
			t.Errorf("kvctl %s has no example", path)
		}
		for line := range strings.Lines(c.Example) {
			if path != "" && !strings.Contains(line, "kvctl ") {
				t.Errorf("example of %s: %q runs no kvctl", path, line)
			}
			_, words, _ := strings.Cut(line, "kvctl ")
			words, _, _ = strings.Cut(words, " >")
			words, _, _ = strings.Cut(words, " |")
			words = strings.TrimRight(strings.TrimSpace(words), ")")
			root := newProgram(strings.NewReader(""), &bytes.Buffer{}, io.Discard).root()
			got, rest, err := root.Find(split(t, words))
			if err != nil {
				t.Errorf("example of %s: %q: %v", path, line, err)
				continue
			}
			if ran := got.CommandPath(); path != "" && !c.HasSubCommands() && ran != c.CommandPath() {
				t.Errorf("example of %s: %q runs %s", path, line, ran)
			}
			if err := got.ParseFlags(rest); err != nil {
				t.Errorf("example of %s: %q: %v", path, line, err)
			} else if err := got.ValidateArgs(got.Flags().Args()); err != nil {
				t.Errorf("example of %s: %q: %v", path, line, err)
			}
		}
		for _, sub := range c.Commands() {
			each(sub)
		}
	}
	each(a.root())
	for path := range examples {
		if !paths[path] {
			t.Errorf("an example of %q, which is no command", path)
		}
	}
}

// A flag that there is not gets those that are near, of the command and of all commands.
func TestNearFlags(t *testing.T) {
	for line, want := range map[string]string{
		"get --namespce x k":              `kvctl get: unknown flag: --namespce; did you mean --namespace?`,
		"--directroy a:1 get k":           `kvctl get: unknown flag: --directroy; did you mean --directory?`,
		"get --directroy a:1 k":           `kvctl get: unknown flag: --directroy; did you mean --directory?`,
		"put --tll 3s k v":                `kvctl put: unknown flag: --tll; did you mean --ttl?`,
		"bench --record 3":                `kvctl bench: unknown flag: --record; did you mean --records?`,
		"bench --noload":                  `kvctl bench: unknown flag: --noload; did you mean --no-load?`,
		"namespace create x --replica=2":  `kvctl namespace create: unknown flag: --replica; did you mean --replicas?`,
		"nodes remove m1 --dryrun":        `kvctl nodes remove: unknown flag: --dryrun; did you mean --dry-run?`,
		"status --chekc":                  `kvctl status: unknown flag: --chekc; did you mean --check?`,
		"get --frobnicate k":              `kvctl get: unknown flag: --frobnicate`,
		"get -q k":                        `kvctl get: unknown shorthand flag: 'q' in -q`,
		"certs issue m1 --rolle=memnode":  `kvctl certs issue: unknown flag: --rolle; did you mean --role?`,
		"context set p --tls-cacert=file": `kvctl context set: unknown flag: --tls-cacert; did you mean --tls-cert?`,
	} {
		var errs bytes.Buffer
		a := newProgram(strings.NewReader(""), &bytes.Buffer{}, &errs)
		if code := a.run(t.Context(), strings.Fields(line)); code != ctl.ExitUsage || errs.String() != want+"\n" {
			t.Errorf("kvctl %s: status %d, %q, want %q", line, code, &errs, want)
		}
	}
}

// Variables that nearly are a flag's are told of, those that another program of the store reads are not, and neither
// are those of orchestrators.
func TestVariables(t *testing.T) {
	var errs bytes.Buffer
	a := newProgram(strings.NewReader(""), &bytes.Buffer{}, &errs)
	flags := a.root().PersistentFlags()
	roles := []config.Settings{config.DefaultDev(), config.DefaultDirectoryNode(), config.DefaultMemNode(),
		config.DefaultJanitor(), config.DefaultGateway(), config.DefaultHealth()}
	var ours, theirs []string
	flags.VisitAll(func(f *pflag.Flag) { ours = append(ours, variable(f)+"=x") })
	for _, s := range roles {
		f := pflag.NewFlagSet("", pflag.ContinueOnError)
		config.Flags(f, s)
		f.VisitAll(func(f *pflag.Flag) { theirs = append(theirs, variable(f)+"=x") })
	}
	names := append([]string{"KVD_PORT=tcp://10.0.0.1:7400", "KVD_SERVICE_HOST=10.0.0.1", "KVD_SERVICE_PORT=7400",
		"KVD_PORT_7400_TCP_ADDR=10.0.0.1", "KVD_GATEWAY_SERVICE_PORT_REDIS=6379",
		"KVD_CONTEXTS=file", "KVD_DEBUG=1", "KVD_DIRECTROY=", "PATH=/bin", "XKVD_DIRECTROY=x"}, ours...)
	a.warnOfVariables(flags, append(names, theirs...))
	if errs.Len() > 0 {
		t.Errorf("kvctl: %s", &errs)
	}
	for _, s := range roles {
		if wrong := config.Misspelt(append(names, theirs...), s, roles...); len(wrong) > 0 &&
			(len(wrong) != 1 || wrong["KVD_DIRECTROY"] == "") {
			t.Errorf("kvd, %T: %v", s, wrong)
		}
	}
	for typed, meant := range map[string]string{"KVD_DIRECTROY": "KVD_DIRECTORY", "KVD_DIRECTORIES": "KVD_DIRECTORY",
		"KVD_TLSCA": "KVD_TLS_CA", "kvd_namespace": "KVD_NAMESPACE",
		"KVD_NAMESPCE": "KVD_NAMESPACE", "KVD_TIMOUT": "KVD_TIMEOUT"} {
		errs.Reset()
		a.warnOfVariables(flags, []string{typed + "=x"})
		if want := "kvctl: warning: " + typed + " is no setting and is not read; did you mean " + meant +
			"?\n"; errs.String() != want {
			t.Errorf("%q, want %q", &errs, want)
		}
	}
	for typed, meant := range map[string]string{"KVD_DATADIR": "KVD_DATA_DIR", "KVD_LISTN": "KVD_LISTEN",
		"KVD_BOOSTRAP": "KVD_BOOTSTRAP", "KVD_TLS_KEYS": "KVD_TLS_KEY"} {
		if wrong := config.Misspelt([]string{typed + "=x"}, config.DefaultDirectoryNode(), roles...); wrong[typed] !=
			meant {
			t.Errorf("%s: %v, want %s", typed, wrong, meant)
		}
	}
}
