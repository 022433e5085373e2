package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unicode/utf8"

	"github.com/peterh/liner"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/units"
)

const shellHelp = `Read commands and run them one after the other with one session. A command is what
would follow kvctl on a command line, its flags included; words are quoted as in
redis-cli: "a\x00\n\"b" or 'it\'s'. help lists the commands, use NAMESPACE works in
another namespace from then on, exit leaves. Flags given to the shell itself hold for all
commands.

On a terminal: Tab completes commands, flags and keys, Ctrl-R searches the history
($XDG_STATE_HOME/kvctl/history, else ~/.local/state/kvctl/history), Ctrl-C cancels
the command that runs, Ctrl-D leaves. An error does not end the shell.

Otherwise: commands come from stdin, one a line; empty lines and those that begin
with # are left out. All are run; the exit status is that of the first that failed.`

func (a *program) shellCommand() *cobra.Command {
	return &cobra.Command{Use: "shell", Short: "Run commands from a prompt, or from stdin", Long: shellHelp,
		Args:    cobra.NoArgs,
		GroupID: "tools", RunE: func(cmd *cobra.Command, _ []string) error { return a.runShell(cmd.Context()) }}
}

// shell runs commands one after the other.
type shell struct {
	a    *program // its flags are the defaults of every command
	done bool
	kept *kept
}

// kept is a store whose session outlives a command.
type kept struct {
	ctl.Backend
	flags string    // that it was opened with
	s     ctl.Store // nil: not opened yet
}

// Close does nothing: the store is the shell's.
func (k *kept) Close() error { return nil }

// Session is the shell's; it has one lane.
func (k *kept) Session(ctx context.Context) (_ ctl.Store, err error) {
	if k.s == nil {
		k.s, err = k.Backend.Open(ctx, ctl.SessionOptions{Lanes: 1})
		if errors.Is(err, client.ErrForbidden) { // it may be for reading
			k.s, err = k.Backend.Open(ctx, ctl.SessionOptions{Lanes: 1, ReadOnly: true})
		}
	}
	return k.s, err
}

// drop closes what is kept.
func (sh *shell) drop() {
	k := sh.kept
	if k == nil {
		return
	}
	sh.kept = nil
	if k.s != nil {
		sh.a.Closed("session", k.s.Close)
	}
	sh.a.Closed("store", k.Backend.Close)
}

// reach lists the flags that say which store it is, and how it is reached.
func reach(a *ctl.App) string {
	return fmt.Sprintf("%#v", []any{a.Directory, a.Namespace, a.Provider, a.Require, a.RDMADevice, a.Timeout,
		a.TLSCA, a.TLSCert, a.TLSKey, a.TLSCRL, a.TLSName, a.Identities, a.Insecure})
}

// open is the backend of a command: the kept one, unless its flags name another.
func (sh *shell) open(c *ctl.App) (ctl.Backend, error) {
	flags := reach(c)
	if flags != reach(sh.a.App) {
		return sh.a.Backend(c)
	}
	if sh.kept == nil {
		b, err := sh.a.Backend(c)
		if err != nil {
			return nil, err
		}
		sh.kept = &kept{Backend: b, flags: flags}
	}
	return sh.kept, nil
}

// run runs one command line's words.
func (sh *shell) run(ctx context.Context, stdin io.Reader, stdout, stderr io.Writer, args []string) int {
	flags := *sh.a.App
	c := programOf(&flags)
	c.Stdin, c.Stdout, c.Stderr = stdin, stdout, stderr
	c.Backend, c.shell, c.Parent = sh.open, sh, sh.a.App
	return c.run(ctx, args)
}

// commands are those that only a shell has; a is the app of one of its commands.
func (sh *shell) commands(a *program) []*cobra.Command {
	return []*cobra.Command{{
		Use: "use NAMESPACE", Short: "Work in another namespace from now on", Args: cobra.ExactArgs(1),
		GroupID: "tools",
		ValidArgsFunction: a.Complete(func(st *dirpb.StatusReply) []string {
			return ctl.MapTo(st.GetMap().GetNamespaces(), (*dirpb.Namespace).GetName)
		}),
		RunE: func(cmd *cobra.Command, args []string) error {
			err := a.WithBackend(func(b ctl.Backend) error {
				st, err := ctl.ClusterStatus(cmd.Context(), b)
				if err != nil {
					return err
				}
				_, err = ctl.NamespaceOf(st.GetMap(), args[0])
				return err
			})
			// The default namespace comes into being when it is first used.
			if err != nil && (args[0] != "default" || ctl.ExitCode(err) != ctl.ExitUsage) {
				return err
			}
			sh.drop()
			sh.a.Namespace = args[0]
			return nil
		},
	}, {
		Use: "exit", Aliases: []string{"quit"}, Short: "Leave the shell", Args: cobra.NoArgs, GroupID: "tools",
		RunE: func(*cobra.Command, []string) error {
			sh.done = true
			return nil
		},
	}}
}

// runShell runs the commands that are typed, or that stdin holds. ctx ends with an
// interrupt.
func (a *program) runShell(ctx context.Context) error {
	sh := &shell{a: a}
	defer sh.drop()
	if ctl.IsTerminal(a.Stdin) && ctl.IsTerminal(a.Stdout) && liner.TerminalSupported() {
		return sh.prompt(endsWith(a.ctx, syscall.SIGTERM)) // interrupts end commands only
	}
	return sh.script(ctx)
}

// maxLine bounds a line of a script: a key and a value may be quoted \xHH.
const maxLine = 1 << 20

// inScript answers a command of a script that wants to read stdin.
type inScript struct{}

func (inScript) Read([]byte) (int, error) { return 0, ctl.Usagef("stdin holds the commands") }

func (sh *shell) script(ctx context.Context) error {
	first := ctl.ExitOK
	sc := bufio.NewScanner(sh.a.Stdin)
	sc.Buffer(nil, maxLine)
	n := 0
	for !sh.done && sc.Scan() {
		n++
		if strings.HasPrefix(strings.TrimSpace(sc.Text()), "#") {
			continue
		}
		code := ctl.ExitUsage
		if args, err := words(sc.Text()); err != nil {
			sh.a.Say("kvctl: line %d: %v", n, err)
		} else if len(args) == 0 {
			continue
		} else {
			code = sh.run(ctx, inScript{}, sh.a.Stdout, sh.a.Stderr, args)
		}
		if first == ctl.ExitOK {
			first = code
		}
		if err := sh.a.Flush(); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	switch err := sc.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return ctl.Usagef("line %d: longer than %s", n+1, units.Bytes(maxLine))
	case err != nil:
		return fmt.Errorf("read commands from stdin: %w", err)
	case first != ctl.ExitOK:
		return ctl.Fail(first)
	}
	return nil
}

// prompt runs what is typed until the user leaves or ctx ends.
func (sh *shell) prompt(ctx context.Context) error {
	// Interrupts are for the command that runs, and end nothing else.
	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, os.Interrupt)
	defer signal.Stop(interrupts)
	cooked, err := liner.TerminalMode()
	if err != nil {
		return fmt.Errorf("terminal: %w", err)
	}
	l := liner.NewLiner()
	defer l.Close()
	// liner turns Ctrl-C's signal off only after it has shown its prompt, and the signal drops what has been typed
	// since.
	if err := noSignals(); err != nil {
		return fmt.Errorf("terminal: %w", err)
	}
	raw, err := liner.TerminalMode()
	if err != nil {
		return fmt.Errorf("terminal: %w", err)
	}
	l.SetCtrlCAborts(true)
	l.SetTabCompletionStyle(liner.TabPrints)
	l.SetWordCompleter(func(line string, pos int) (string, []string, string) { return sh.complete(ctx, line, pos) })
	h := openHistory()
	h.load(l)
	for !sh.done {
		line, err := sh.ask(ctx, l)
		switch {
		case errors.Is(err, liner.ErrPromptAborted):
			continue
		case errors.Is(err, io.EOF):
			fmt.Fprintln(sh.a.Stdout)
			return nil
		case err != nil:
			return err
		}
		args, err := words(line)
		if err != nil {
			sh.a.Say("kvctl: %v", err)
		}
		if strings.TrimSpace(line) != "" {
			h.add(l, line, sh.a.Say)
		}
		if len(args) == 0 {
			continue
		}
		// From here on Ctrl-C is an interrupt, also before the command listens.
		running, stop := signal.NotifyContext(ctx, os.Interrupt)
		if err := cooked.ApplyMode(); err != nil {
			stop()
			return fmt.Errorf("terminal: %w", err)
		}
		sh.run(running, sh.a.Stdin, sh.a.Stdout, sh.a.Stderr, args)
		stop()
		if err := sh.a.Flush(); err != nil {
			return err
		}
		if err := raw.ApplyMode(); err != nil {
			return fmt.Errorf("terminal: %w", err)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	return nil
}

// noSignals has the terminal give Ctrl-C and the like to the shell as characters.
func noSignals() error {
	t, err := unix.IoctlGetTermios(unix.Stdin, unix.TCGETS)
	if err != nil {
		return err
	}
	t.Lflag &^= unix.ISIG
	return unix.IoctlSetTermios(unix.Stdin, unix.TCSETS, t)
}

// ask reads a line. When ctx ends, the read goes on until the process ends.
func (sh *shell) ask(ctx context.Context, l *liner.State) (line string, err error) {
	if err := sh.a.Flush(); err != nil {
		return "", err
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		line, err = l.Prompt(strings.ToValidUTF8(sh.a.Namespace, "?") + "> ")
	}()
	select {
	case <-done:
		return line, err
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
}

// maxRemembered bounds a line of the history; liner bounds their number.
const maxRemembered = 4096

// history is the file that outlives a shell; "" is none.
type history string

func openHistory() history {
	dir := os.Getenv("XDG_STATE_HOME")
	if !filepath.IsAbs(dir) {
		home, err := os.UserHomeDir()
		if err != nil {
			return ""
		}
		dir = filepath.Join(home, ".local", "state")
	}
	return history(filepath.Join(dir, "kvctl", "history"))
}

// load takes what earlier shells have left; a file that cannot be read is none.
func (h history) load(l *liner.State) {
	b, err := os.ReadFile(string(h))
	if err != nil {
		return
	}
	for line := range strings.Lines(string(b)) {
		if line = strings.TrimSuffix(line, "\n"); line != "" && len(line) <= maxRemembered && utf8.ValidString(line) {
			l.AppendHistory(line)
		}
	}
}

// add remembers a line, here and in the file.
func (h *history) add(l *liner.State, line string, say func(string, ...any)) {
	if len(line) > maxRemembered {
		return
	}
	l.AppendHistory(line)
	if *h == "" {
		return
	}
	var b bytes.Buffer
	_, err := l.WriteHistory(&b)
	if err == nil {
		err = h.write(b.Bytes())
	}
	if err != nil {
		say("kvctl: warning: the history is not kept: %v", err)
		*h = ""
	}
}

// write replaces the file.
func (h history) write(b []byte) error {
	dir := filepath.Dir(string(h))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, ".history-") // of mode 0600
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), string(h))
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

// words splits a line as redis-cli does.
func words(line string) ([]string, error) {
	args, _, open, err := splitWords(line)
	if err == nil && open {
		err = ctl.Usagef("unbalanced quotes")
	}
	return args, err
}

// splitWords also tells where the last word begins, len(line) if the line ends
// between words, and whether its quotes are open.
func splitWords(line string) (args []string, last int, open bool, err error) {
	for i := 0; ; {
		for i < len(line) && isSpace(line[i]) {
			i++
		}
		last = i
		if i == len(line) {
			return args, last, false, nil
		}
		var w []byte
		quote := byte(0)
		for ; i < len(line) && (quote != 0 || !isSpace(line[i])); i++ {
			c := line[i]
			switch {
			case quote == 0 && (c == '"' || c == '\''):
				quote = c
			case c == quote && quote != 0:
				quote = 0
				if i+1 < len(line) && !isSpace(line[i+1]) {
					return nil, 0, false, ctl.Usagef("byte %d: want a space behind the closing quote", i+2)
				}
			case quote == '"' && c == '\\' && i+1 < len(line):
				i++
				b, n := unescape(line[i:])
				w = append(w, b)
				i += n - 1
			case quote == '\'' && c == '\\' && i+1 < len(line) && line[i+1] == '\'':
				i++
				w = append(w, '\'')
			default:
				w = append(w, c)
			}
		}
		args = append(args, string(w))
		if i == len(line) {
			return args, last, quote != 0, nil
		}
	}
}

func isSpace(c byte) bool { return c == ' ' || '\t' <= c && c <= '\r' }

// unescape decodes what follows a backslash and returns how many bytes that are.
func unescape(s string) (b byte, n int) {
	if s[0] == 'x' && len(s) >= 3 {
		if v, err := strconv.ParseUint(s[1:3], 16, 8); err == nil {
			return byte(v), 3
		}
	}
	if i := strings.IndexByte("nrtba", s[0]); i >= 0 {
		return "\n\r\t\b\a"[i], 1
	}
	return s[0], 1
}

// quoteWord is w as words reads it back.
func quoteWord(w string) string {
	plain := func(r rune) bool { return r > ' ' && r < 0x7f && r != '"' && r != '\'' }
	if w != "" && strings.IndexFunc(w, func(r rune) bool { return !plain(r) }) < 0 {
		return w
	}
	var b strings.Builder
	b.WriteByte('"')
	for i := 0; i < len(w); {
		r, n := utf8.DecodeRuneInString(w[i:])
		switch {
		case r == '"' || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r == utf8.RuneError && n == 1 || !strconv.IsPrint(r):
			for _, c := range []byte(w[i : i+n]) {
				fmt.Fprintf(&b, `\x%02x`, c)
			}
		default:
			b.WriteRune(r)
		}
		i += n
	}
	b.WriteByte('"')
	return b.String()
}

// complete is what Tab offers for the word that ends at rune pos of line: what the
// completion of bash and its like would.
func (sh *shell) complete(ctx context.Context, line string, pos int) (head string, list []string, tail string) {
	r := []rune(line)
	before, tail := string(r[:pos]), string(r[pos:])
	args, last, _, err := splitWords(before)
	if err != nil {
		return before, nil, tail
	}
	if last == len(before) {
		args = append(args, "")
	}
	var out bytes.Buffer
	sh.run(ctx, bytes.NewReader(nil), &out, io.Discard, append([]string{cobra.ShellCompNoDescRequestCmd}, args...))
	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	n := len(lines) - 1
	directive, err := strconv.Atoi(strings.TrimPrefix(lines[n], ":"))
	if err != nil || directive&int(cobra.ShellCompDirectiveError) != 0 {
		return before, nil, tail
	}
	for _, w := range lines[:n] {
		if w == "" || !strings.HasPrefix(w, args[len(args)-1]) {
			continue
		}
		end := " "
		if directive&int(cobra.ShellCompDirectiveNoSpace) != 0 || strings.HasSuffix(w, "=") {
			end = ""
		}
		list = append(list, quoteWord(w)+end)
	}
	slices.Sort(list)
	return before[:last], slices.Compact(list), tail
}
