package operate

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/units"
)

// tierCommand is hidden until something moves values to tier nodes.
func (a *commands) tierCommand() *cobra.Command {
	c := &cobra.Command{Use: "tier", Short: "List tier nodes, and give them up", Args: cobra.NoArgs, Hidden: true,
		Example: "  kvctl tier list"}
	var volume uint32
	giveUp := ctl.Changes(&cobra.Command{
		Use:   "give-up NODE",
		Short: "Declare what a tier node holds lost",
		Long: "Declare a tier node's folder lost for good, with what it holds. Keys whose values\n" +
			"were there alone are gone: from a store, where that is noted as a loss, and from a\n" +
			"cache. A tier node that is heard is refused: stop it first.",
		Example: "  kvctl tier give-up t1",
		Args:    cobra.ExactArgs(1),
		ValidArgsFunction: a.Complete(func(st *dirpb.StatusReply) []string {
			return ctl.MapTo(st.GetMap().GetVolumes(), (*dirpb.Volume).GetName)
		}),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.WithBackend(func(b ctl.Backend) error {
				rep, err := ctl.Call(cmd.Context(), b, false, func(ctx context.Context, d dirpb.DirectoryClient) (
					*dirpb.GiveUpTierReply, error) {
					return d.GiveUpTier(ctx, &dirpb.GiveUpTierRequest{Name: args[0], VolumeId: volume})
				})
				if err != nil {
					return fmt.Errorf("%q: %w", args[0], err)
				}
				if a.JSON() {
					return a.PrintProto(rep)
				}
				_, err = fmt.Fprintf(a.Stdout, "%s: given up; what volume %d held is lost\n", args[0],
					rep.GetVolumeId())
				return err
			})
		},
	})
	giveUp.Flags().Uint32Var(&volume, "volume", 0, "only if it has this volume; 0: whichever it has")
	list := a.ViewCommand("list", "List tier nodes", a.printTiers)
	list.Example = "  kvctl tier list -o json"
	c.AddCommand(list, giveUp)
	return c
}

func (a *commands) printTiers(st *dirpb.StatusReply) error {
	m := st.GetMap()
	if a.JSON() {
		return ctl.PrintProtos(a.App, m.GetVolumes())
	}
	names := make(map[uint32]string)
	for _, w := range m.GetNamespaces() {
		names[w.GetId()] = w.GetName()
	}
	a.PrintTable(ctl.Row{"Tier node", "Volume", "State", "Heard", "Used", "Size", "Domain", "Namespaces", "Address"},
		ctl.MapTo(m.GetVolumes(), func(v *dirpb.Volume) ctl.Row {
			spaces := ctl.MapTo(v.GetRegions(), func(r *dirpb.VolumeRegion) string { return names[r.GetNamespaceId()] })
			heard := "-"
			if st.GetLeads() {
				heard = (time.Duration(v.GetSilentMillis()) * time.Millisecond).String() + " ago"
			}
			state := strings.ToLower(strings.TrimPrefix(v.GetState().String(), "VOLUME_"))
			return ctl.Row{v.GetName(), v.GetId(), state, heard, units.Bytes(v.GetUsedBytes()),
				units.Bytes(v.GetCapacityBytes()), v.GetDomain(), strings.Join(spaces, ","),
				dirpb.Addresses(v.GetEndpoints())}
		}))
	return nil
}
