package tenants

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
)

func (a *commands) tokenKeysCommand() *cobra.Command {
	c := &cobra.Command{Use: "keys", Short: "Show and replace the key that signs session tokens", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	var force bool
	rotate := ctl.Changes(&cobra.Command{
		Use:   "rotate",
		Short: "Make a new key for session tokens, while the store is used",
		Long: `Make a new key for session tokens, while the store is used. The directory signs with it
once every memory node that is up has it, and gives sessions new tokens. The key
before it is good until the next time. So a key that leaked is good for nothing after
two rotations. No connection ends, and no operation fails.

It is refused while a memory node that is up, or a session that lives, has not taken
over the present key. kvctl keys show names them. That takes up to 0.3 s, and 2 s if
another directory node has just begun to lead.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.WithBackend(func(b ctl.Backend) error {
				rep, err := ctl.Call(cmd.Context(), b, false, func(ctx context.Context, d dirpb.DirectoryClient) (
					*dirpb.RotateKeyReply, error) {
					return d.RotateKey(ctx, &dirpb.RotateKeyRequest{Force: force})
				})
				if err != nil {
					return err
				}
				if a.JSON() {
					return a.PrintProto(rep)
				}
				fmt.Fprintf(a.Stdout, "generation %d\n", rep.GetGeneration())
				return nil
			})
		},
	})
	rotate.Flags().BoolVar(&force, "force", false, "also while some have not taken over the present key: what they "+
		"show memory nodes is refused until they have")
	c.AddCommand(a.ViewCommand("show", "Show the key for session tokens: its age, and who has not taken it over",
		a.printKeyUse), rotate)
	return c
}

// printKeyUse shows nothing of the key itself, which the directory tells memory nodes alone.
func (a *commands) printKeyUse(st *dirpb.StatusReply) error {
	u := st.GetKeyUse()
	if u == nil {
		return errors.New("the directory does not tell of its keys")
	}
	if a.JSON() {
		return a.PrintProto(u)
	}
	made, age := "with the cluster", "-"
	if at := time.UnixMilli(u.GetMadeUnixMillis()); u.GetMadeUnixMillis() != 0 {
		made, age = at.UTC().Format(time.RFC3339), a.Now().Sub(at).Round(time.Second).String()
	}
	signs, nodes, sessions := "-", "-", "-" // the leader knows
	if u.GetSigns() != 0 {
		signs, nodes, sessions = fmt.Sprintf("generation %d", u.GetSigns()), "none", "none"
		if x := u.GetNodesBehind(); len(x) > 0 {
			nodes = strings.Join(x, ", ")
		}
		if x := u.GetSessionsBehind(); len(x) > 0 {
			sessions = strings.Trim(strings.ReplaceAll(fmt.Sprint(x), " ", ", "), "[]")
		}
	}
	a.PrintTable(ctl.Row{"Generation", "Made", "Age", "Signs", "Memory nodes behind", "Sessions behind"},
		[]ctl.Row{{u.GetGeneration(), made, age, signs, nodes, sessions}})
	return nil
}
