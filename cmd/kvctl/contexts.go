package main

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/renameio/v2"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/kvd-project/kvd/internal/ctl"
)

// contexts are the named clusters of a user: for each the global flags that are not as they come.
type contexts struct {
	Current string                  `yaml:"current,omitempty"`
	Named   map[string]clusterFlags `yaml:"contexts"`
}

// clusterFlags has the flags of one cluster, by their names, as they are typed.
type clusterFlags map[string]string

// noContext marks commands that use none, since they are about contexts.
const noContext = "no-context"

// notKept are the global flags that say how a command runs, and nothing of a cluster.
var notKept = []string{"context", "output", "hex", "help"}

// contextsFile is where contexts are kept: KVD_CONTEXTS, or kvd/contexts.yaml in the user's folder of settings.
func contextsFile() (string, error) {
	if f := os.Getenv("KVD_CONTEXTS"); f != "" {
		return f, nil
	}
	dir, err := os.UserConfigDir()
	if err != nil {
		return "", fmt.Errorf("no folder for contexts: %w", err)
	}
	return filepath.Join(dir, "kvd", "contexts.yaml"), nil
}

// loadContexts reads the file; without one there are none. flags are those that may be there.
func loadContexts(flags *pflag.FlagSet) (c *contexts, file string, err error) {
	c = &contexts{Named: map[string]clusterFlags{}}
	if file, err = contextsFile(); err != nil {
		return nil, "", err
	}
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return c, file, nil
	} else if err != nil {
		return nil, "", err
	}
	defer f.Close()
	d := yaml.NewDecoder(f)
	d.KnownFields(true)
	if err := d.Decode(c); err != nil {
		return nil, "", ctl.Usagef("%s: %w", file, err)
	}
	if c.Named == nil {
		c.Named = map[string]clusterFlags{}
	}
	for name, x := range c.Named {
		for flag := range x {
			if flags.Lookup(flag) == nil || slices.Contains(notKept, flag) {
				return nil, "", ctl.Usagef("%s: context %q has %q, which is no flag of a cluster", file, name, flag)
			}
		}
	}
	if _, ok := c.Named[c.Current]; c.Current != "" && !ok {
		return nil, "", ctl.Usagef("%s: the current context %q does not exist", file, c.Current)
	}
	return c, file, nil
}

func (c *contexts) save(file string) error {
	text, err := yaml.Marshal(c)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return err
	}
	return renameio.WriteFile(file, text, 0o600)
}

func (c *contexts) names() []string { return slices.Sorted(maps.Keys(c.Named)) }

// named is the context called name.
func (c *contexts) named(name string) (clusterFlags, error) {
	x, ok := c.Named[name]
	if !ok && len(c.Named) == 0 {
		return nil, ctl.Usagef("no context %q: there is none yet; kvctl context set makes one", name)
	} else if !ok {
		return nil, ctl.Usagef("no context %q: want %s", name, strings.Join(c.names(), ", "))
	}
	return x, nil
}

// useContext gives flags that neither the command line nor the environment has set the values of a context: that of
// --context, or else the current one.
func (a *program) useContext(flags *pflag.FlagSet) error {
	c, file, err := loadContexts(flags)
	if err != nil {
		if a.Context == "" && ctl.ExitCode(err) != ctl.ExitUsage {
			return nil // nobody asked for one, and there is no folder that could have it, or it cannot be read
		}
		return err
	}
	name := a.Context
	if name == "" {
		name = c.Current
	}
	if name == "" {
		return nil
	}
	x, err := c.named(name)
	if err != nil {
		return err
	}
	for _, flag := range slices.Sorted(maps.Keys(x)) {
		if f := flags.Lookup(flag); !f.Changed && os.Getenv(variable(f)) == "" {
			if err := f.Value.Set(x[flag]); err != nil {
				return ctl.Usagef("%s: context %q: %s: %w", file, name, flag, err)
			}
		}
	}
	return nil
}

func (a *program) contextCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "context",
		Short: "Name clusters, and choose among them",
		Long: `Name clusters, and choose among them. A context has the global flags of a cluster: the
addresses of its directory, files of certificates, a namespace. A flag that is typed wins
over the environment, that over the context, and that over the default.

They are kept in ~/.config/kvd/contexts.yaml, or in the file KVD_CONTEXTS. Certificates and
keys stay where they are: a context has their paths.`,
		Example: `  kvctl --directory d1.example:7400,d2.example:7400 --tls-ca ca.pem --tls-cert me.pem --tls-key me-key.pem context set prod
  kvctl context use prod
  kvctl --context staging status`,
		GroupID:     "tools",
		Annotations: map[string]string{noContext: ""},
	}
	named := func(use, short string,
		run func(c *contexts, file, name string, cmd *cobra.Command) error) *cobra.Command {
		return &cobra.Command{Use: use + " NAME", Short: short, Args: cobra.ExactArgs(1),
			Annotations: map[string]string{noContext: ""},
			ValidArgsFunction: func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
				c, _, err := loadContexts(cmd.Root().PersistentFlags())
				if err != nil {
					return nil, cobra.ShellCompDirectiveError
				}
				return c.names(), cobra.ShellCompDirectiveNoFileComp
			},
			RunE: func(cmd *cobra.Command, args []string) error {
				c, file, err := loadContexts(cmd.Root().PersistentFlags())
				if err != nil {
					return err
				}
				return run(c, file, args[0], cmd)
			}}
	}
	c.AddCommand(
		named("set", "Keep the global flags of this command line as a context; the first one becomes the current one",
			a.setContext),
		named("use", "Make a context the current one", func(c *contexts, file, name string, _ *cobra.Command) error {
			if _, err := c.named(name); err != nil {
				return err
			}
			c.Current = name
			return c.save(file)
		}),
		named("delete", "Forget a context; the cluster stays as it is",
			func(c *contexts, file, name string, _ *cobra.Command) error {
				if _, err := c.named(name); err != nil {
					return err
				}
				delete(c.Named, name)
				if c.Current == name {
					c.Current = ""
				}
				return c.save(file)
			}),
		&cobra.Command{Use: "list", Short: "List contexts; the current one has a star", Args: cobra.NoArgs,
			Annotations: map[string]string{noContext: ""},
			RunE: func(cmd *cobra.Command, _ []string) error {
				return a.listContexts(cmd.Root().PersistentFlags())
			}},
	)
	return c
}

// setContext takes the flags as they are typed, files by their whole paths.
func (a *program) setContext(c *contexts, file, name string, cmd *cobra.Command) error {
	if name == "" || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
		return ctl.Usagef("context %q: want a name without spaces", name)
	}
	x := clusterFlags{}
	var bad error
	cmd.Root().PersistentFlags().VisitAll(func(f *pflag.Flag) {
		if !f.Changed || slices.Contains(notKept, f.Name) {
			return
		}
		v := f.Value.String()
		if l, ok := f.Value.(pflag.SliceValue); ok {
			v = strings.Join(l.GetSlice(), ",")
		}
		if strings.HasPrefix(f.Name, "tls-") && f.Name != "tls-server-name" {
			path, err := filepath.Abs(v)
			bad, v = errors.Join(bad, err), path
		}
		x[f.Name] = v
	})
	if bad != nil {
		return bad
	}
	if len(x) == 0 {
		return ctl.Usagef("no global flag is given: want at least --directory")
	}
	if c.Named[name] = x; len(c.Named) == 1 {
		c.Current = name
	}
	return c.save(file)
}

func (a *program) listContexts(flags *pflag.FlagSet) error {
	c, _, err := loadContexts(flags)
	if err != nil {
		return err
	}
	if a.JSON() {
		return a.PrintJSON(map[string]any{"current": c.Current, "contexts": c.Named})
	}
	a.PrintTable(ctl.Row{"", "Name", "Directory", "Namespace", "Certificate"}, ctl.MapTo(c.names(),
		func(name string) ctl.Row {
			mark := ""
			if name == c.Current {
				mark = "*"
			}
			x := c.Named[name]
			return ctl.Row{mark, name, x["directory"], x["namespace"], x["tls-cert"]}
		}))
	return nil
}

// cluster is a with the flags of the context called name.
func cluster(a *ctl.App, name string) (*ctl.App, error) {
	side := programOf(ctl.New(a.Stdin, a.Stdout, a.Stderr)).App
	side.Backend, side.Timeout = a.Backend, a.Timeout
	flags := pflag.NewFlagSet("context", pflag.ContinueOnError)
	globalFlags(side, flags)
	all, file, err := loadContexts(flags)
	if err != nil {
		return nil, err
	}
	x, err := all.named(name)
	if err != nil {
		return nil, err
	}
	for flag, v := range x {
		if err := flags.Set(flag, v); err != nil {
			return nil, ctl.Usagef("%s: context %q: %s: %w", file, name, flag, err)
		}
	}
	if err := checkFlags(side); err != nil {
		return nil, fmt.Errorf("%s: context %q: %w", file, name, err)
	}
	return side, nil
}
