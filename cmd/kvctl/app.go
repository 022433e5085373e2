package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvd-project/kvd/internal/buildinfo"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/ctl/bulk"
	"github.com/kvd-project/kvd/internal/ctl/inside"
	"github.com/kvd-project/kvd/internal/ctl/keys"
	"github.com/kvd-project/kvd/internal/ctl/measure"
	"github.com/kvd-project/kvd/internal/ctl/operate"
	"github.com/kvd-project/kvd/internal/ctl/tenants"
	"github.com/kvd-project/kvd/internal/doctor"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/internal/spelling"
)

const longHelp = `kvctl reads, writes and inspects a kvd store.

Exit status: 0 done or found; 1 not found, a condition failed, or a check found
something; 2 wrong usage; 3 the store is unavailable or full; 4 unknown outcome:
it may have happened; 5 anything else, such as a local file; 6 no rights for it, or
nobody who has any; 130 interrupted, by Ctrl-C or SIGTERM.

Every flag below can be set as KVD_<NAME> in the environment: KVD_DIRECTORY,
KVD_NAMESPACE, KVD_TLS_CA; kvctl context keeps them by a cluster's name. KVD_DEBUG=1 logs background errors on stderr.`

// program is one invocation as a whole: flags, contexts and the tree of commands.
type program struct {
	*ctl.App
	// started is set once the command line has been understood: what fails before that is
	// wrong usage.
	started bool
	// ctx is what run was given: unlike a command's, it does not end when the user interrupts that.
	ctx context.Context
	// signals, if not nil, makes the context of a command from that of run: it ends with a signal, too;
	// that of a brief command does not begin with it.
	signals func(ctx context.Context, brief bool) context.Context
	// shell is the one that this command was typed into, if any.
	shell *shell
}

func newProgram(stdin io.Reader, stdout, stderr io.Writer) *program {
	return programOf(ctl.New(stdin, stdout, stderr))
}

// programOf gives a what it asks of the whole program.
func programOf(a *ctl.App) *program {
	p := &program{App: a}
	a.Clusters = func() ([]string, error) {
		c, _, err := loadContexts(p.flags())
		if err != nil {
			return nil, err
		}
		return c.names(), nil
	}
	a.Cluster, a.Version = cluster, version
	a.Ready = func(cmd *cobra.Command) error { return p.start(cmd, nil) }
	return p
}

// run executes one command line and returns the exit status.
func (a *program) run(ctx context.Context, args []string) int {
	// Cobra's completion and help print without buffering; everything else may be
	// many small writes.
	out := bufio.NewWriterSize(a.Stdout, 64<<10)
	tty := ctl.IsTerminal(a.Stdout)
	a.Stdout = &ctl.Output{Writer: out, Terminal: tty}
	a.ctx = ctx
	root := a.root()
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	if e := out.Flush(); e != nil && err == nil {
		err = fmt.Errorf("write stdout: %w", e)
	}
	if err == nil {
		return ctl.ExitOK
	}
	if !a.started && !errors.As(err, new(*ctl.ExitError)) {
		err = ctl.UsageError(err)
	}
	code := ctl.ExitCode(err)
	if code == ctl.ExitUnavailable && cmd.Context() != nil && cmd.Context().Err() != nil {
		code = ctl.ExitInterrupted // it is the user who did not wait, not the store that is away
	}
	if msg := err.Error(); msg != "" {
		name := strings.TrimPrefix(cmd.CommandPath(), "kvctl ")
		if cmd == root {
			fmt.Fprintf(a.Stderr, "kvctl: %s\n", ctl.OneLine(msg))
		} else {
			fmt.Fprintf(a.Stderr, "kvctl %s: %s%s\n", name, ctl.OneLine(msg), happened(cmd, err, code))
		}
	}
	return code
}

// happened says what an error leaves open to somebody who ran cmd. An error that has an exit status of its
// own has told what was done.
func happened(cmd *cobra.Command, err error, code int) string {
	switch code {
	case ctl.ExitUnknown:
		return " (it may have happened)"
	case ctl.ExitUnavailable, ctl.ExitOther, ctl.ExitForbidden, ctl.ExitInterrupted:
		if _, ok := cmd.Annotations[ctl.Writes]; ok && !errors.As(err, new(*ctl.ExitError)) {
			return " (it did not happen)"
		}
	}
	return ""
}

func (a *program) root() *cobra.Command {
	// not cobra's Version, which needs a template: the linker could leave out no method of any type
	var showVersion bool
	root := &cobra.Command{
		Use:           "kvctl",
		Short:         "Use and inspect a kvd store",
		Long:          longHelp,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.NoArgs,
		PersistentPreRunE: func(cmd *cobra.Command, args []string) error {
			if err := a.start(cmd, args); err != nil {
				return err
			}
			if a.signals != nil {
				_, short := cmd.Annotations[ctl.Brief]
				cmd.SetContext(a.signals(cmd.Context(), short))
			}
			a.Verb = strings.TrimPrefix(cmd.CommandPath(), "kvctl ")
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if showVersion {
				return a.printRelease()
			}
			if a.shell == nil && ctl.IsTerminal(a.Stdin) && ctl.IsTerminal(a.Stdout) {
				return a.runShell(cmd.Context())
			}
			return cmd.Help()
		},
	}
	root.Flags().BoolVarP(&showVersion, "version", "v", false, "print the version")
	globalFlags(a.App, root.PersistentFlags())
	root.SetFlagErrorFunc(nearFlags)
	_ = root.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"table", "json"},
		cobra.ShellCompDirectiveNoFileComp))
	_ = root.RegisterFlagCompletionFunc("provider",
		cobra.FixedCompletions(providers.Names(), cobra.ShellCompDirectiveNoFileComp))

	root.AddGroup(&cobra.Group{ID: "keys", Title: "Keys and values:"},
		&cobra.Group{ID: "cluster", Title: "Cluster:"},
		&cobra.Group{ID: "tools", Title: "Measuring and looking inside:"})
	for _, g := range groups {
		for _, c := range g.commands(a.App) {
			if c.GroupID == "" {
				c.GroupID = g.id
			}
			root.AddCommand(c)
		}
	}
	root.AddCommand(a.versionCommand(), a.contextCommand())
	if a.shell == nil {
		root.AddCommand(a.shellCommand())
	} else {
		root.AddCommand(a.shell.commands(a)...)
	}
	root.SetHelpCommand(a.helpCommand())
	root.SetIn(a.Stdin)
	root.SetOut(a.Stdout) // the completion command keeps it
	root.SetErr(a.Stderr)
	root.InitDefaultCompletionCmd()
	root.InitDefaultHelpCmd()
	a.checked(root)
	explainUse(root)
	return root
}

// groups are kvctl's commands, by the heading of the help text that those of a group have unless they say another.
var groups = []struct {
	id       string
	commands func(*ctl.App) []*cobra.Command
}{
	{"keys", keys.Commands},
	{"keys", bulk.Commands},
	{"cluster", operate.Commands},
	{"cluster", tenants.Commands},
	{"tools", inside.Commands},
	{"tools", measure.Commands},
}

// flags are the global ones as they come.
func (a *program) flags() *pflag.FlagSet {
	f := pflag.NewFlagSet("kvctl", pflag.ContinueOnError)
	globalFlags(ctl.New(nil, nil, nil), f)
	return f
}

// globalFlags are those of every command; the current values are their defaults.
func globalFlags(a *ctl.App, f *pflag.FlagSet) {
	f.StringVar(&a.Context, "context", a.Context, "context to take global flags from that are not given: kvctl "+
		"context list (default: the current one, if any)")
	f.StringSliceVar(&a.Directory, "directory", a.Directory, "gRPC addresses of directory nodes")
	f.StringVar(&a.Namespace, "namespace", a.Namespace, "namespace to work in")
	f.StringVar(&a.Provider, "provider", a.Provider, "force a provider: "+strings.Join(providers.Names(), ", ")+
		" (default: the best that both ends have)")
	f.StringVar(&a.Require, "require", a.Require, "rdma: reach memory nodes by RDMA alone, and fail with the reason "+
		"where that cannot be (default: by what there is)")
	f.StringVar(&a.RDMADevice, "rdma-device", a.RDMADevice, "RDMA adapter to use: NAME, NAME/PORT or "+
		"NAME/PORT/GIDINDEX; several with commas between (default: the best)")
	f.DurationVar(&a.Timeout, "timeout", a.Timeout, "limit of one operation, and of finding the store")
	f.StringVarP(&a.Output, "output", "o", a.Output, "output format: table or json")
	f.BoolVar(&a.Hex, "hex", a.Hex, "keys are given and shown in hexadecimal")
	f.StringVar(&a.TLSCA, "tls-ca", a.TLSCA, "file of CA certificates (PEM) that must have signed the store's; turns "+
		"TLS on")
	f.StringVar(&a.TLSCert, "tls-cert", a.TLSCert, "file of this client's certificate (PEM)")
	f.StringVar(&a.TLSKey, "tls-key", a.TLSKey, "file of this client's key (PEM)")
	f.StringVar(&a.TLSCRL, "tls-crl", a.TLSCRL, "file of lists of certificates that the CAs of --tls-ca have revoked "+
		"(PEM)")
	f.StringVar(&a.TLSName, "tls-server-name", a.TLSName, "name that the store's certificates have (default: the "+
		"address that is called)")
	f.StringVar(&a.Identities.TrustDomain, "identity-trust-domain", a.Identities.TrustDomain,
		"trust domain of the store's certificates (default: any that --tls-ca vouches for)")
	f.StringSliceVar(&a.Identities.Units, "identity-units", a.Identities.Units,
		"roles of certificates without a SPIFFE id by an organizational unit, such as storage=memnode")
	f.BoolVar(&a.Insecure, "insecure", a.Insecure, "allow an address that is not loopback without TLS")
}

// checked has every command below c start only when cobra has nothing more to say about
// its command line. A group of commands takes no arguments.
func (a *program) checked(c *cobra.Command) {
	if run := c.RunE; run != nil {
		c.RunE = func(cmd *cobra.Command, args []string) error {
			a.started = true
			return run(cmd, args)
		}
	} else if c.Run == nil && c.HasParent() {
		c.Args = cobra.NoArgs
		c.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	}
	for _, sub := range c.Commands() {
		a.checked(sub)
	}
}

func (a *program) helpCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "help [COMMAND]",
		Short: "Explain a command",
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			c, rest, err := cmd.Root().Find(args)
			if err != nil || len(rest) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return ctl.MapTo(c.Commands(), (*cobra.Command).Name), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			c, rest, err := cmd.Root().Find(args)
			if err != nil || len(rest) > 0 {
				near := ""
				if len(rest) > 0 {
					near = didYouMean(c, rest[0])
				} else if len(args) > 0 {
					near = didYouMean(cmd.Root(), args[0])
				}
				return ctl.Usagef("no command %q (kvctl help lists them)%s", strings.Join(args, " "), near)
			}
			c.InitDefaultHelpFlag()
			return c.Help()
		},
	}
}

func (a *program) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Print the version of kvctl",
		Args:    cobra.NoArgs,
		GroupID: "tools",
		RunE: func(*cobra.Command, []string) error {
			if a.JSON() {
				return a.PrintJSON(map[string]any{"version": buildinfo.Version(version), "go": runtime.Version(),
					"os": runtime.GOOS, "arch": runtime.GOARCH})
			}
			return a.printRelease()
		},
	}
}

func (a *program) printRelease() error {
	_, err := fmt.Fprintln(a.Stdout, buildinfo.Line("kvctl", version))
	return err
}

// version is set when a release is linked.
var version = ""

// variable is the name that a global flag has in the environment.
func variable(f *pflag.Flag) string {
	return "KVD_" + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
}

// start completes the flags from the environment and from a context, and checks them.
func (a *program) start(cmd *cobra.Command, _ []string) error {
	var bad error
	flags := cmd.Root().PersistentFlags()
	if _, without := cmd.Annotations[noContext]; !without && a.shell == nil {
		if f := flags.Lookup("context"); !f.Changed {
			a.Context = os.Getenv(variable(f))
		}
		bad = a.useContext(flags)
	}
	flags.VisitAll(func(f *pflag.Flag) {
		name := variable(f)
		if v, ok := os.LookupEnv(name); ok && v != "" && !f.Changed && a.shell == nil {
			if err := f.Value.Set(v); err != nil && bad == nil {
				bad = fmt.Errorf("%s=%q: %w", name, v, err)
			}
		}
	})
	if bad != nil {
		return ctl.UsageError(bad)
	}
	if a.shell == nil {
		a.warnOfVariables(flags, os.Environ())
	}
	return checkFlags(a.App)
}

// readElsewhere are variables of the environment that kvctl reads beside its flags', and kvd's that are nearly one of
// them.
var readElsewhere = []string{"KVD_CONTEXTS", "KVD_DEBUG"}

// warnOfVariables tells of variables that nearly are those of a flag. Other programs of the store have settings in the
// environment, too, and orchestrators make up names: those that are like none are left alone.
func (a *program) warnOfVariables(flags *pflag.FlagSet, environ []string) {
	var names []string // without KVD_
	flags.VisitAll(func(f *pflag.Flag) { names = append(names, strings.TrimPrefix(variable(f), "KVD_")) })
	for _, v := range environ {
		name, value, _ := strings.Cut(v, "=")
		rest, ours := strings.CutPrefix(strings.ToUpper(name), "KVD_")
		if !ours || value == "" || slices.Contains(readElsewhere, name) || name == "KVD_"+rest &&
			slices.Contains(names, rest) {
			continue
		}
		if near := spelling.Near(rest, names); len(near) > 0 {
			a.Say("kvctl: warning: %s is no setting and is not read; did you mean KVD_%s?", name, near[0])
		}
	}
}

// checkFlags refuses global flags that say nothing, or not enough.
func checkFlags(a *ctl.App) error {
	switch {
	case a.Output != "table" && a.Output != "json":
		return ctl.Usagef("--output %q: want table or json", a.Output)
	case a.Provider == "sim":
		return ctl.Usagef("--provider sim: want one of %s; kvctl has no store of its own, but kvd dev -- kvctl "+
			"COMMAND gives it one", strings.Join(doctor.Providers, ", "))
	case a.Timeout <= 0:
		return ctl.Usagef("--timeout %v: want > 0", a.Timeout)
	case (a.TLSCert == "") != (a.TLSKey == ""):
		return ctl.Usagef("--tls-cert and --tls-key: want both or none")
	case a.TLSCert != "" && a.TLSCA == "":
		return ctl.Usagef("--tls-cert: want --tls-ca as well")
	case a.TLSCRL != "" && a.TLSCA == "":
		return ctl.Usagef("--tls-crl: want --tls-ca as well")
	case a.TLSName != "" && a.TLSCA == "":
		return ctl.Usagef("--tls-server-name: want --tls-ca as well")
	}
	err := providers.CheckRequire(a.Require, a.Provider)
	if err != nil {
		return ctl.Usagef("--require %q: %w", a.Require, err)
	}
	if _, err = identity.ParseMapping(a.Identities.TrustDomain, nil); err != nil {
		return ctl.Usagef("--identity-trust-domain: %w", err)
	}
	if a.Mapping, err = identity.ParseMapping(a.Identities.TrustDomain, a.Identities.Units); err != nil {
		return ctl.Usagef("--identity-units: %w", err)
	}
	return nil
}
