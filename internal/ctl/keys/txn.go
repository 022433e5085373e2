package keys

import (
	"context"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
)

func (a *commands) txnCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "txn {put KEY VALUE|- | del KEY | require KEY VERSION|present|absent}...",
		Short: "Put, delete and require keys in one step: all of it happens, or nothing",
		Long: "Put, delete and require keys in one step: all of it happens at one instant, or nothing does.\n\n" +
			"require KEY VERSION is fulfilled if the key has that version, as put, get and mget print it, at\n" +
			"that instant. present is fulfilled if there is such a key, absent if not. A key may be required and\n" +
			"put or deleted, too. del without a requirement does not mind whether the key is there. The value of\n" +
			"one put may come from stdin (-). Printed is each key with its version afterwards, - for none. Exit\n" +
			"status 1 if a requirement is not fulfilled.\n\n" +
			"  kvctl txn require from 1764148823961337857 put from 90 put to 110 del order:7",
		Args: cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			ops, err := a.txnOps(cmd.Context(), args)
			if err != nil {
				return err
			}
			return a.With(cmd.Context(), ctl.SessionOptions{Lanes: 1}, func(s ctl.Store) error {
				if err := s.MultiCAS(cmd.Context(), ops); err != nil {
					for i := range ops {
						if o := &ops[i]; o.Err != nil {
							return a.About(o.Key, o.Err)
						}
					}
					return err
				}
				return a.printTxn(ops)
			})
		},
	}
}

// txnOps reads the steps of a transaction. A key has one Op, which says what is required and what is done.
func (a *commands) txnOps(ctx context.Context, args []string) ([]client.Op, error) {
	type asked struct{ at, requires, writes int }
	seen := map[string]*asked{}
	var ops []client.Op
	input := false
	for len(args) > 0 {
		verb, n := args[0], 3
		switch verb {
		case "put", "require":
		case "del":
			n = 2
		default:
			return nil, ctl.Usagef("%q: want put KEY VALUE, del KEY or require KEY VERSION", verb)
		}
		if len(args) < n {
			return nil, ctl.Usagef("%s: want %d words behind it, not %d", verb, n-1, len(args)-1)
		}
		k, err := a.Key(args[1])
		if err != nil {
			return nil, err
		}
		x := seen[string(k)]
		if x == nil {
			x = &asked{at: len(ops)}
			seen[string(k)] = x
			ops = append(ops, client.Op{Kind: client.OpKeep, Key: k})
		}
		o := &ops[x.at]
		if verb == "require" {
			x.requires++
			err = require(o, args[2])
		} else {
			x.writes++
			o.Kind = client.OpDelete
		}
		if verb == "put" {
			if args[2] == "-" && input {
				return nil, ctl.Usagef("put: want one value from stdin")
			}
			input = input || args[2] == "-"
			o.Kind = client.OpPut
			o.Value, err = a.value(ctx, args[:n], 2)
		}
		if err != nil {
			return nil, err
		}
		if x.requires > 1 || x.writes > 1 {
			return nil, ctl.Usagef("%s: want one requirement and one put or del for a key", a.ShowKey(k))
		}
		args = args[n:]
	}
	return ops, nil
}

// require makes o depend on what a key has to be.
func require(o *client.Op, want string) (err error) {
	switch want {
	case "present":
		o.Cond = client.IfPresent
	case "absent":
		o.Cond = client.IfAbsent
	default:
		o.Cond = client.IfVersion
		if o.Version, err = strconv.ParseUint(want, 0, 64); err != nil {
			return ctl.Usagef("version %q: want a number, present or absent", want)
		}
	}
	return nil
}

// printTxn shows what keys have become.
func (a *commands) printTxn(ops []client.Op) error {
	var rows []ctl.Row
	for i := range ops {
		o := &ops[i]
		found := o.Item.Version != 0
		if a.JSON() {
			m := map[string]any{"found": found}
			a.SetKey(m, "key", o.Key)
			if found {
				m["version"] = versionText(o.Item.Version)
			}
			if err := a.PrintJSON(m); err != nil {
				return err
			}
			continue
		}
		version := "-"
		if found {
			version = fmt.Sprint(o.Item.Version)
		}
		rows = append(rows, ctl.Row{a.Show(o.Key), version})
	}
	if !a.JSON() {
		a.PrintTable(ctl.Row{"Key", "Version"}, rows)
	}
	return nil
}
