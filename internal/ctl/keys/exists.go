package keys

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
)

func (a *commands) existsCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "exists [KEY...]",
		Short: "Say which keys are there; without arguments, those on stdin, one a line",
		Long: "Say which keys are there, with their versions and when they expire. All are asked for\n" +
			"together; stdin is as scan prints it. No value is read, and a cache does not count it\n" +
			"as a use. With -o json one object a line, in the order of the keys; a missing key has\n" +
			"\"found\": false. Exit status 1 if any is missing.",
		ValidArgsFunction: a.CompleteKey(true),
		RunE: func(cmd *cobra.Command, args []string) error {
			ks, err := a.keys(cmd.Context(), args)
			if err != nil {
				return err
			}
			return a.With(cmd.Context(), ctl.SessionOptions{Lanes: 1, ReadOnly: true}, func(s ctl.Store) error {
				ops := ctl.MapTo(ks, func(k []byte) client.Op { return client.Op{Kind: client.OpExists, Key: k} })
				s.Do(cmd.Context(), ops)
				return a.printExists(ops)
			})
		},
	}
}

// printExists prints what was found of each key. Missing ones are the exit status's business.
func (a *commands) printExists(ops []client.Op) error {
	var rows []ctl.Row
	missing := false
	for i := range ops {
		o := &ops[i]
		found := o.Err == nil
		if !found && !errors.Is(o.Err, client.ErrNotFound) {
			return a.About(o.Key, o.Err)
		}
		missing = missing || !found
		if !a.JSON() {
			r := ctl.Row{a.Show(o.Key), "not found", "-"}
			if found {
				r = ctl.Row{a.Show(o.Key), o.Item.Version, ctl.When(o.Item.Expires)}
			}
			rows = append(rows, r)
			continue
		}
		m := map[string]any{"found": found}
		a.SetKey(m, "key", o.Key)
		if found {
			m["version"] = versionText(o.Item.Version)
		}
		if !o.Item.Expires.IsZero() {
			m["expires"] = ctl.When(o.Item.Expires)
		}
		if err := a.PrintJSON(m); err != nil {
			return err
		}
	}
	if !a.JSON() {
		a.PrintTable(ctl.Row{"Key", "Version", "Expires"}, rows)
	}
	if missing {
		return ctl.Fail(ctl.ExitNo)
	}
	return nil
}
