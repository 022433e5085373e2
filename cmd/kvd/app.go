package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvd-project/kvd/internal/config"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/spelling"
	"github.com/kvd-project/kvd/server/raftstore"
)

const (
	exitFailure = 1
	exitUsage   = 2
)

// app is one run of the command.
type app struct {
	stdout, stderr io.Writer
	// args are the command line without the name.
	args []string
	// given tells whether the user set a setting of the role that runs.
	given func(key string) bool
	// settings reads the settings of the role again, from where they came.
	settings func() (config.Settings, error)
	// misspelt are variables that nearly are settings of the role that runs, and what they nearly are.
	misspelt map[string]string
	// command is what stands behind --, for a role that takes a command.
	command []string
	live    live
}

// usageError is the user's to mend.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// run runs the command line args until it is done or ctx ends, and returns the
// exit status.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := newRoot(&app{stdout: stdout, stderr: stderr, args: args})
	root.SetArgs(args)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	e := (*exec.ExitError)(nil) // the user's own command has said why
	if errors.As(err, &e) && err.Error() == e.Error() {
		return commandStatus(e)
	}
	if s := workerStatus(0); errors.As(err, &s) {
		return int(s) // it has said why, too
	}
	fmt.Fprintln(stderr, "kvd: "+strings.ReplaceAll(err.Error(), "\n", "\nkvd: "))
	switch {
	case errors.As(err, new(usageError)):
		return exitUsage
	case e != nil:
		return commandStatus(e)
	}
	return exitFailure
}

// commandStatus is the exit status of a command that failed, as shells give it.
func commandStatus(e *exec.ExitError) int {
	if w, ok := e.Sys().(syscall.WaitStatus); ok && w.Signaled() {
		return 128 + int(w.Signal())
	}
	return e.ExitCode()
}

func newRoot(a *app) *cobra.Command {
	var version bool // not cobra's Version, which needs a template; see internal/httpd's page
	root := &cobra.Command{
		Use:           "kvd",
		Short:         "A key-value store in the memory of other machines",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if version {
				return a.printVersion()
			}
			return cmd.Help()
		},
	}
	root.Flags().BoolVarP(&version, "version", "v", false, "print the version")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usageError{fmt.Errorf("%w%s (see %s --help)", err, nearFlags(cmd, err), cmd.CommandPath())}
	})
	roles := []role{a.devRole(), a.directoryRole(), a.memnodeRole(), a.janitorRole(), a.gatewayRole(), a.brokerRole(),
		a.archiveRole(), a.tierRole()}
	for _, r := range roles {
		c := a.roleCommand(r)
		if r.name == "directory" {
			c.AddCommand(a.recoverCommand())
		}
		root.AddCommand(c)
	}
	root.AddCommand(a.configCommand(roles...), a.healthCommand(), a.versionCommand())

	root.SetHelpCommand(&cobra.Command{
		Use:   "help [COMMAND]",
		Short: "Explain a command",
		RunE: func(cmd *cobra.Command, args []string) error {
			c, rest, err := cmd.Root().Find(args)
			if err != nil || len(rest) > 0 {
				if len(rest) == 0 {
					rest = args
				}
				return usageError{
					fmt.Errorf("no command %q (see kvd --help)%s", strings.Join(args, " "),
						nearCommands(cmp.Or(c, cmd.Root()), rest))}
			}
			c.InitDefaultHelpFlag()
			return c.Help()
		},
	})
	root.SetOut(a.stdout) // the completion command keeps it
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		if c.Name() == "completion" { // cobra's own, which takes any argument for a question
			c.Args = usageArgs(cobra.NoArgs)
			c.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		}
	}
	return root
}

// usageArgs makes the refusals of check usage errors.
func usageArgs(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return usageError{fmt.Errorf("%w%s (see %s --help)", err, nearCommands(cmd, args), cmd.CommandPath())}
		}
		return nil
	}
}

// nearCommands asks for the commands below cmd that the first of words is nearly.
func nearCommands(cmd *cobra.Command, words []string) string {
	var names []string
	for _, c := range cmd.Commands() {
		names = append(names, c.Name())
	}
	if len(words) == 0 {
		return ""
	}
	return spelling.DidYouMean(spelling.Near(words[0], names))
}

// nearFlags asks for the flags of cmd that the one that err does not know is nearly.
func nearFlags(cmd *cobra.Command, err error) string {
	unknown := (*pflag.NotExistError)(nil)
	if !errors.As(err, &unknown) || unknown.GetSpecifiedShortnames() != "" {
		return ""
	}
	var names []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	near := spelling.Near(unknown.GetSpecifiedName(), names)
	for i := range near {
		near[i] = "--" + near[i]
	}
	return spelling.DidYouMean(near)
}

// role is a command that serves until it is stopped.
type role struct {
	name, short, long, example string
	hidden                     bool // from help: nothing uses it yet
	// takesCommand: a command may follow behind --.
	takesCommand bool
	// defaults makes the settings and what runs with them.
	defaults func() (config.Settings, func(context.Context) error)
}

func (a *app) roleCommand(r role) *cobra.Command {
	s, serve := r.defaults()
	cmd := &cobra.Command{Use: r.name, Short: r.short, Long: r.long, Example: r.example, Args: usageArgs(cobra.NoArgs),
		Hidden: r.hidden}
	if r.takesCommand {
		cmd.Use += " [flags] [-- COMMAND [ARG]...]"
		cmd.DisableFlagsInUseLine = true
		cmd.Args = usageArgs(commandBehindDash)
	}
	file := settingFlags(cmd, s)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		a.command = args
		var err error
		if a.given, err = config.LoadGiven(s, *file, cmd.Flags()); err != nil {
			return usageError{err}
		}
		if err := checkFiles(s); err != nil {
			return err
		}
		a.misspelt = a.misspeltFor(s)
		a.settings = loader(r, *file, cmd.Flags())
		defer a.keepFresh(s, a.settings)()
		err = serve(cmd.Context())
		if cmd.Context().Err() != nil && errors.Is(err, context.Canceled) {
			return nil // stopped while it started
		}
		return explain(err)
	}
	return cmd
}

// misspeltFor finds variables that nearly are settings of s and that nothing reads.
func (a *app) misspeltFor(s config.Settings) map[string]string {
	return config.Misspelt(os.Environ(), s, config.DefaultDev(), config.DefaultDirectoryNode(), config.DefaultMemNode(),
		config.DefaultJanitor(), config.DefaultGateway(), config.DefaultBrokerNode(), config.DefaultArchive(),
		config.DefaultTier(), config.DefaultHealth())
}

// commandBehindDash refuses arguments that are not a command behind --.
func commandBehindDash(cmd *cobra.Command, args []string) error {
	switch dash := cmd.ArgsLenAtDash(); {
	case dash != 0:
		return cobra.NoArgs(cmd, args)
	case len(args) == 0:
		return errors.New("want a command behind --")
	}
	return nil
}

// settingFlags defines --config and a flag for every setting.
func settingFlags(cmd *cobra.Command, s config.Settings) (file *string) {
	config.Flags(cmd.Flags(), s)
	cmd.Flags().SortFlags = false
	return cmd.Flags().String("config", "", "file with the settings: .yaml, .toml or .json")
}

// explain adds what the user can do about err.
func explain(err error) error {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("%w: another process has that address; stop it, or listen elsewhere", err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return fmt.Errorf("%w: this machine has no such address", err)
	case errors.Is(err, raftstore.ErrLocked):
		return fmt.Errorf("%w: is another kvd running on it?", err)
	case errors.Is(err, syscall.ENOSPC):
		return fmt.Errorf("%w: make room on that disk and start again", err)
	case errors.Is(err, syscall.EROFS):
		return fmt.Errorf("%w: mount it for writing and start again", err)
	}
	return err
}

// announce tells the world that the role serves: a line for people and scripts,
// a notification for systemd. Keys and values alternate in kv; empty values are
// left out.
func (a *app) announce(log *slog.Logger, role string, kv ...string) error {
	return a.announceNext(log, "", role, kv...)
}

// announceNext is announce with lines for people behind the line.
func (a *app) announceNext(log *slog.Logger, next, role string, kv ...string) error {
	var b strings.Builder
	b.WriteString("ready role=" + role)
	for i := 0; i < len(kv); i += 2 {
		if v := kv[i+1]; v != "" {
			if strings.ContainsAny(v, " \t\n\"=") {
				v = fmt.Sprintf("%q", v)
			}
			b.WriteString(" " + kv[i] + "=" + v)
		}
	}
	// In one write: a reader of the first line may be gone for the second.
	if _, err := fmt.Fprint(a.stdout, b.String()+"\n"+next); err != nil {
		return fmt.Errorf("announce on stdout: %w", err)
	}
	notify(log, daemon.SdNotifyReady)
	return nil
}

// notify does nothing if systemd did not ask to be told.
func notify(log *slog.Logger, state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		log.Warn("systemd was not notified", "state", state, "err", err)
	}
}

// endpoints gives the addresses that clients dial, by memory node and provider.
func endpoints(ctx context.Context, c *dirclient.Client) (map[string]map[string]string, error) {
	byNode := make(map[string]map[string]string)
	err := c.Call(ctx, func(ctx context.Context, d dirpb.DirectoryClient) error {
		st, err := d.Status(ctx, &dirpb.StatusRequest{})
		for _, n := range st.GetMap().GetNodes() {
			byNode[n.GetName()] = make(map[string]string)
			for _, e := range n.GetEndpoints() {
				byNode[n.GetName()][e.GetProvider()] = e.GetAddr()
			}
		}
		return err
	})
	return byNode, err
}
