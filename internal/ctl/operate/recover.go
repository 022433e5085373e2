package operate

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
)

// recoverCommand has kvd, which knows what is in a data folder, go on with one.
func (a *commands) recoverCommand() *cobra.Command {
	var id, dir string
	var yes bool
	c := ctl.Changes(&cobra.Command{
		Use:   "recover --id ID --data-dir DIR --yes",
		Short: "Go on with one directory node's data folder when the majority is gone for good",
		Long: "Make the data folder of one directory node, which does not run, a cluster of its own. " +
			"It is for when a\n" +
			"majority of the directory nodes, or of their data folders, is gone for good. Without --yes it says what " +
			"the\n" +
			"folder has and what would be lost, and changes nothing.\n\n" +
			"It runs kvd directory recover, on the machine where the folder is: the kvd that lies beside kvctl, or " +
			"else\n" +
			"the one on the PATH. It must be of the version that the directory node had, or of a later one. See\n" +
			"kvd directory recover --help for all of it.",
		Args:                  cobra.NoArgs,
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if id == "" || dir == "" {
				return ctl.Usagef("want --id and --data-dir")
			}
			return a.recoverDirectory(cmd.Context(), id, dir, yes)
		},
	})
	c.Flags().StringVar(&id, "id", "", "the directory node's")
	c.Flags().StringVar(&dir, "data-dir", "", "its data folder, on this machine")
	c.Flags().BoolVar(&yes, "yes", false, "do it")
	return c
}

func (a *commands) recoverDirectory(ctx context.Context, id, dir string, yes bool) error {
	kvd, err := a.kvd()
	if err != nil {
		return err
	}
	args := []string{"directory", "recover", "--id=" + id, "--data-dir=" + dir}
	if yes {
		args = append(args, "--yes")
	}
	c := exec.CommandContext(ctx, kvd, args...)
	c.Cancel = func() error { return c.Process.Signal(syscall.SIGTERM) }
	c.Stdout, c.Stderr = a.Stdout, a.Stderr
	err = c.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return nil
	case !errors.As(err, &exit):
		return fmt.Errorf("start %s: %w", kvd, err) // whoever has no process has done nothing
	case exit.ExitCode() == ctl.ExitUsage:
		return ctl.Fail(ctl.ExitUsage) // kvd has said why
	case exit.ExitCode() > 0:
		return ctl.Fail(ctl.ExitNo)
	}
	return ctl.ExitWith(ctl.ExitUnknown,
		fmt.Errorf("%s: %w; the data folder may be recovered in part: repeat the command",
			kvd, err))
}

// kvd is the path of the program that lies beside this one, or else of the one on the PATH.
func (a *commands) kvd() (string, error) {
	self, err := a.Self()
	if err != nil {
		return "", err
	}
	beside := filepath.Join(filepath.Dir(self[0]), "kvd")
	if s, err := os.Stat(beside); err == nil && s.Mode().IsRegular() && s.Mode()&0o111 != 0 {
		return beside, nil
	}
	path, err := exec.LookPath("kvd")
	if err != nil {
		return "", ctl.ExitWith(ctl.ExitOther,
			fmt.Errorf("this needs the program kvd, which is neither at %s nor on the "+
				"PATH (%w); nothing was done. Run it on the machine of the directory node", beside, err))
	}
	return path, nil
}
