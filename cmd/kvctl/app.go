package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/buildinfo"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/doctor"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/internal/spelling"
)

// Exit status. Scripts rely on it.
const (
	exitOK          = 0
	exitNo          = 1 // not found, condition failed, or a check found something
	exitUsage       = 2
	exitUnavailable = 3
	exitUnknown     = 4 // it may have happened
	exitOther       = 5 // a local file, corrupt bytes
	exitForbidden   = 6 // no rights
	exitInterrupted = 130
)

const longHelp = `kvctl reads, writes and inspects a kvd store.

Exit status: 0 done or found; 1 not found, a condition failed, or a check found
something; 2 wrong usage; 3 the store is unavailable or full; 4 unknown outcome:
it may have happened; 5 anything else, such as a local file; 6 no rights for it, or
nobody who has any; 130 interrupted, by Ctrl-C or SIGTERM.

Every flag below can be set as KVD_<NAME> in the environment: KVD_DIRECTORY,
KVD_NAMESPACE, KVD_TLS_CA; kvctl context keeps them by a cluster's name. KVD_DEBUG=1 logs background errors on stderr.`

// app is one invocation.
type app struct {
	stdin  io.Reader
	stdout io.Writer
	stderr io.Writer

	// Global flags.
	context   string
	directory []string
	namespace string
	provider  string
	require   string
	// rdmaDevice is verbs.Options.Device.
	rdmaDevice string
	timeout    time.Duration
	output     string
	hex        bool
	tlsCA      string
	tlsCert    string
	tlsKey     string
	tlsCRL     string
	tlsName    string
	identities client.Identities
	mapping    identity.Mapping // of identities
	insecure   bool

	// backend reaches the store; tests put another in its place.
	backend func(*app) (backend, error)
	// self is the command line that starts this program again.
	self func() ([]string, error)
	// started is set once the command line has been understood: what fails before that is
	// wrong usage.
	started bool
	// verb is the command that runs, without kvctl.
	verb string
	now  func() time.Time
	// ctx is what run was given: unlike a command's, it does not end when the user interrupts that.
	ctx context.Context
	// signals, if not nil, makes the context of a command from that of run: it ends with a signal, too;
	// that of a brief command does not begin with it.
	signals func(ctx context.Context, brief bool) context.Context
	// shell is the one that this command was typed into, if any.
	shell *shell
}

func newApp(stdin io.Reader, stdout, stderr io.Writer) *app {
	return &app{stdin: stdin, stdout: stdout, stderr: stderr, backend: openStore, now: time.Now,
		directory: []string{"127.0.0.1:7400"}, namespace: "default", timeout: 5 * time.Second, output: "table",
		self: func() ([]string, error) {
			p, err := os.Executable()
			return []string{p}, err
		}}
}

// run executes one command line and returns the exit status.
func (a *app) run(ctx context.Context, args []string) int {
	// Cobra's completion and help print without buffering; everything else may be
	// many small writes.
	out := bufio.NewWriterSize(a.stdout, 64<<10)
	tty := isTerminal(a.stdout)
	a.stdout = &output{Writer: out, terminal: tty}
	a.ctx = ctx
	root := a.root()
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	if e := out.Flush(); e != nil && err == nil {
		err = fmt.Errorf("write stdout: %w", e)
	}
	if err == nil {
		return exitOK
	}
	if !a.started && !errors.As(err, new(*exitError)) {
		err = usageError(err)
	}
	code := exitCode(err)
	if code == exitUnavailable && cmd.Context() != nil && cmd.Context().Err() != nil {
		code = exitInterrupted // it is the user who did not wait, not the store that is away
	}
	if msg := err.Error(); msg != "" {
		name := strings.TrimPrefix(cmd.CommandPath(), "kvctl ")
		if cmd == root {
			fmt.Fprintf(a.stderr, "kvctl: %s\n", oneLine(msg))
		} else {
			fmt.Fprintf(a.stderr, "kvctl %s: %s%s\n", name, oneLine(msg), happened(cmd, err, code))
		}
	}
	return code
}

// output is stdout; commands that print raw bytes ask whether it is a terminal.
type output struct {
	*bufio.Writer
	terminal bool
}

// flush sends on what was printed so far, for a command that goes on for long.
func (a *app) flush() error {
	if o, ok := a.stdout.(*output); ok {
		if err := o.Flush(); err != nil {
			return err
		}
	}
	if a.shell != nil {
		return a.shell.a.flush()
	}
	return nil
}

func isTerminal(w any) bool {
	if o, ok := w.(*output); ok {
		return o.terminal
	}
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

func oneLine(s string) string {
	return visible(strings.ReplaceAll(strings.TrimSpace(s), "\n", "; "))
}

// visible is s with escapes in the place of what terminals obey, or show as nothing: the
// store's names and messages are others' choice.
func visible(s string) string {
	bad := func(r rune) bool { return !unicode.IsPrint(r) }
	if strings.IndexFunc(s, bad) < 0 && utf8.ValidString(s) {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		if c := s[:n]; bad(r) || r == utf8.RuneError {
			q := strconv.Quote(c)
			b.WriteString(q[1 : len(q)-1])
		} else {
			b.WriteString(c)
		}
		s = s[n:]
	}
	return b.String()
}

// Annotations of commands.
const (
	// writes marks those whose errors must tell whether they happened.
	writes = "writes"
	// brief marks those that read a key or a few, and so are over soon.
	brief = "brief"
)

// happened says what an error leaves open to somebody who ran cmd. An error that has an exit status of its
// own has told what was done.
func happened(cmd *cobra.Command, err error, code int) string {
	switch code {
	case exitUnknown:
		return " (it may have happened)"
	case exitUnavailable, exitOther, exitForbidden, exitInterrupted:
		if _, ok := cmd.Annotations[writes]; ok && !errors.As(err, new(*exitError)) {
			return " (it did not happen)"
		}
	}
	return ""
}

// partly is the error of a command that had done some of its work, which format tells.
// If that is nothing, err is as it is.
func partly(done bool, err error, format string, args ...any) error {
	if !done {
		return err
	}
	return &exitError{exitCode(err), fmt.Errorf(format+": %w", append(args, err)...)}
}

// exitError carries an exit status; with an empty text nothing is printed.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return ""
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// fail ends a command with code, after it has printed what there is to say.
func fail(code int) error { return &exitError{code: code} }

func usageError(err error) error { return &exitError{exitUsage, err} }

func usagef(format string, args ...any) error { return usageError(fmt.Errorf(format, args...)) }

func exitCode(err error) int {
	var e *exitError
	is := func(targets ...error) bool {
		for _, t := range targets {
			if errors.Is(err, t) {
				return true
			}
		}
		return false
	}
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &e):
		return e.code
	case is(client.ErrUnknownOutcome, dirclient.ErrUnknownOutcome):
		return exitUnknown
	case is(client.ErrNotFound, client.ErrExists, client.ErrConflict, client.ErrNotInteger, client.ErrOverflow):
		return exitNo
	case is(client.ErrInvalid, client.ErrTxnTooLarge, client.ErrNoNamespace, providers.ErrUnknown):
		return exitUsage
	case is(client.ErrForbidden):
		return exitForbidden
	case is(client.ErrUnavailable, client.ErrTxnContended, client.ErrFull, client.ErrClosed, providers.ErrUnavailable,
		dirclient.ErrUnavailable, dirclient.ErrClosed,
		context.Canceled, context.DeadlineExceeded):
		return exitUnavailable
	case is(fs.ErrNotExist, fs.ErrPermission, fs.ErrExist):
		return exitOther
	}
	switch status.Code(err) {
	case codes.InvalidArgument, codes.OutOfRange, codes.Unimplemented:
		return exitUsage
	case codes.NotFound, codes.AlreadyExists, codes.FailedPrecondition:
		return exitNo
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.ResourceExhausted, codes.Aborted,
		codes.DataLoss:
		return exitUnavailable
	case codes.Unauthenticated, codes.PermissionDenied:
		return exitForbidden
	}
	return exitOther
}

func (a *app) root() *cobra.Command {
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
				_, short := cmd.Annotations[brief]
				cmd.SetContext(a.signals(cmd.Context(), short))
			}
			a.verb = strings.TrimPrefix(cmd.CommandPath(), "kvctl ")
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if showVersion {
				return a.printRelease()
			}
			if a.shell == nil && isTerminal(a.stdin) && isTerminal(a.stdout) {
				return a.runShell(cmd.Context())
			}
			return cmd.Help()
		},
	}
	root.Flags().BoolVarP(&showVersion, "version", "v", false, "print the version")
	a.globalFlags(root.PersistentFlags())
	root.SetFlagErrorFunc(nearFlags)
	_ = root.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"table", "json"},
		cobra.ShellCompDirectiveNoFileComp))
	_ = root.RegisterFlagCompletionFunc("provider",
		cobra.FixedCompletions(providers.Names(), cobra.ShellCompDirectiveNoFileComp))

	root.AddGroup(&cobra.Group{ID: "keys", Title: "Keys and values:"},
		&cobra.Group{ID: "cluster", Title: "Cluster:"},
		&cobra.Group{ID: "tools", Title: "Measuring and looking inside:"})
	a.addKeyCommands(root)
	a.addTreeCommands(root)
	root.AddCommand(a.mirrorCommand(), a.snapshotCommand(), a.tierCommand())
	a.addClusterCommands(root)
	root.AddCommand(a.costCommand(), a.perfCommand(), a.benchCommand(), a.latencyCommand(), a.bigkeysCommand(),
		a.duCommand(), a.hotkeysCommand(),
		a.dumpCommand(), a.checkCommand(), a.doctorCommand())
	root.AddCommand(a.versionCommand(), a.contextCommand())
	if a.shell == nil {
		root.AddCommand(a.shellCommand())
	} else {
		root.AddCommand(a.shell.commands(a)...)
	}
	root.SetHelpCommand(a.helpCommand())
	root.SetIn(a.stdin)
	root.SetOut(a.stdout) // the completion command keeps it
	root.SetErr(a.stderr)
	root.InitDefaultCompletionCmd()
	root.InitDefaultHelpCmd()
	a.checked(root)
	explainUse(root)
	return root
}

// globalFlags are those of every command; the current values are their defaults.
func (a *app) globalFlags(f *pflag.FlagSet) {
	f.StringVar(&a.context, "context", a.context, "context to take global flags from that are not given: kvctl "+
		"context list (default: the current one, if any)")
	f.StringSliceVar(&a.directory, "directory", a.directory, "gRPC addresses of directory nodes")
	f.StringVar(&a.namespace, "namespace", a.namespace, "namespace to work in")
	f.StringVar(&a.provider, "provider", a.provider, "force a provider: "+strings.Join(providers.Names(), ", ")+
		" (default: the best that both ends have)")
	f.StringVar(&a.require, "require", a.require, "rdma: reach memory nodes by RDMA alone, and fail with the reason "+
		"where that cannot be (default: by what there is)")
	f.StringVar(&a.rdmaDevice, "rdma-device", a.rdmaDevice, "RDMA adapter to use: NAME, NAME/PORT or "+
		"NAME/PORT/GIDINDEX; several with commas between (default: the best)")
	f.DurationVar(&a.timeout, "timeout", a.timeout, "limit of one operation, and of finding the store")
	f.StringVarP(&a.output, "output", "o", a.output, "output format: table or json")
	f.BoolVar(&a.hex, "hex", a.hex, "keys are given and shown in hexadecimal")
	f.StringVar(&a.tlsCA, "tls-ca", a.tlsCA, "file of CA certificates (PEM) that must have signed the store's; turns "+
		"TLS on")
	f.StringVar(&a.tlsCert, "tls-cert", a.tlsCert, "file of this client's certificate (PEM)")
	f.StringVar(&a.tlsKey, "tls-key", a.tlsKey, "file of this client's key (PEM)")
	f.StringVar(&a.tlsCRL, "tls-crl", a.tlsCRL, "file of lists of certificates that the CAs of --tls-ca have revoked "+
		"(PEM)")
	f.StringVar(&a.tlsName, "tls-server-name", a.tlsName, "name that the store's certificates have (default: the "+
		"address that is called)")
	f.StringVar(&a.identities.TrustDomain, "identity-trust-domain", a.identities.TrustDomain,
		"trust domain of the store's certificates (default: any that --tls-ca vouches for)")
	f.StringSliceVar(&a.identities.Units, "identity-units", a.identities.Units,
		"roles of certificates without a SPIFFE id by an organizational unit, such as storage=memnode")
	f.BoolVar(&a.insecure, "insecure", a.insecure, "allow an address that is not loopback without TLS")
}

// checked has every command below c start only when cobra has nothing more to say about
// its command line. A group of commands takes no arguments.
func (a *app) checked(c *cobra.Command) {
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

func (a *app) helpCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "help [COMMAND]",
		Short: "Explain a command",
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			c, rest, err := cmd.Root().Find(args)
			if err != nil || len(rest) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return mapTo(c.Commands(), (*cobra.Command).Name), cobra.ShellCompDirectiveNoFileComp
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
				return usagef("no command %q (kvctl help lists them)%s", strings.Join(args, " "), near)
			}
			c.InitDefaultHelpFlag()
			return c.Help()
		},
	}
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Print the version of kvctl",
		Args:    cobra.NoArgs,
		GroupID: "tools",
		RunE: func(*cobra.Command, []string) error {
			if a.json() {
				return a.printJSON(map[string]any{"version": buildinfo.Version(version), "go": runtime.Version(),
					"os": runtime.GOOS, "arch": runtime.GOARCH})
			}
			return a.printRelease()
		},
	}
}

func (a *app) printRelease() error {
	_, err := fmt.Fprintln(a.stdout, buildinfo.Line("kvctl", version))
	return err
}

// version is set when a release is linked.
var version = ""

// variable is the name that a global flag has in the environment.
func variable(f *pflag.Flag) string {
	return "KVD_" + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
}

// start completes the flags from the environment and from a context, and checks them.
func (a *app) start(cmd *cobra.Command, _ []string) error {
	var bad error
	flags := cmd.Root().PersistentFlags()
	if _, without := cmd.Annotations[noContext]; !without && a.shell == nil {
		if f := flags.Lookup("context"); !f.Changed {
			a.context = os.Getenv(variable(f))
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
		return usageError(bad)
	}
	if a.shell == nil {
		a.warnOfVariables(flags, os.Environ())
	}
	return a.checkFlags()
}

// readElsewhere are variables of the environment that kvctl reads beside its flags', and kvd's that are nearly one of
// them.
var readElsewhere = []string{"KVD_CONTEXTS", "KVD_DEBUG"}

// warnOfVariables tells of variables that nearly are those of a flag. Other programs of the store have settings in the
// environment, too, and orchestrators make up names: those that are like none are left alone.
func (a *app) warnOfVariables(flags *pflag.FlagSet, environ []string) {
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
			a.say("kvctl: warning: %s is no setting and is not read; did you mean KVD_%s?", name, near[0])
		}
	}
}

// checkFlags refuses global flags that say nothing, or not enough.
func (a *app) checkFlags() error {
	switch {
	case a.output != "table" && a.output != "json":
		return usagef("--output %q: want table or json", a.output)
	case a.provider == "sim":
		return usagef("--provider sim: want one of %s; kvctl has no store of its own, but kvd dev -- kvctl COMMAND "+
			"gives it one", strings.Join(doctor.Providers, ", "))
	case a.timeout <= 0:
		return usagef("--timeout %v: want > 0", a.timeout)
	case (a.tlsCert == "") != (a.tlsKey == ""):
		return usagef("--tls-cert and --tls-key: want both or none")
	case a.tlsCert != "" && a.tlsCA == "":
		return usagef("--tls-cert: want --tls-ca as well")
	case a.tlsCRL != "" && a.tlsCA == "":
		return usagef("--tls-crl: want --tls-ca as well")
	case a.tlsName != "" && a.tlsCA == "":
		return usagef("--tls-server-name: want --tls-ca as well")
	}
	err := providers.CheckRequire(a.require, a.provider)
	if err != nil {
		return usagef("--require %q: %w", a.require, err)
	}
	if _, err = identity.ParseMapping(a.identities.TrustDomain, nil); err != nil {
		return usagef("--identity-trust-domain: %w", err)
	}
	if a.mapping, err = identity.ParseMapping(a.identities.TrustDomain, a.identities.Units); err != nil {
		return usagef("--identity-units: %w", err)
	}
	return nil
}
