package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/units"
)

// tierCommand is hidden until something moves values to tier nodes.
func (a *app) tierCommand() *cobra.Command {
	c := &cobra.Command{Use: "tier", Short: "List tier nodes, and give them up", Args: cobra.NoArgs, Hidden: true,
		Example: "  kvctl tier list"}
	var volume uint32
	giveUp := changes(&cobra.Command{
		Use:   "give-up NODE",
		Short: "Declare what a tier node holds lost",
		Long: "Declare a tier node's folder lost for good, with what it holds. Keys whose values\n" +
			"were there alone are gone: from a store, where that is noted as a loss, and from a\n" +
			"cache. A tier node that is heard is refused: stop it first.",
		Example: "  kvctl tier give-up t1",
		Args:    cobra.ExactArgs(1),
		ValidArgsFunction: a.complete(func(st *dirpb.StatusReply) []string {
			return mapTo(st.GetMap().GetVolumes(), (*dirpb.Volume).GetName)
		}),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withBackend(func(b backend) error {
				rep, err := call(cmd.Context(), b, false, func(ctx context.Context, d dirpb.DirectoryClient) (
					*dirpb.GiveUpTierReply, error) {
					return d.GiveUpTier(ctx, &dirpb.GiveUpTierRequest{Name: args[0], VolumeId: volume})
				})
				if err != nil {
					return fmt.Errorf("%q: %w", args[0], err)
				}
				if a.json() {
					return a.printProto(rep)
				}
				_, err = fmt.Fprintf(a.stdout, "%s: given up; what volume %d held is lost\n", args[0],
					rep.GetVolumeId())
				return err
			})
		},
	})
	giveUp.Flags().Uint32Var(&volume, "volume", 0, "only if it has this volume; 0: whichever it has")
	list := a.viewCommand("list", "List tier nodes", a.printTiers)
	list.Example = "  kvctl tier list -o json"
	c.AddCommand(list, giveUp)
	return c
}

func (a *app) printTiers(st *dirpb.StatusReply) error {
	m := st.GetMap()
	if a.json() {
		return printProtos(a, m.GetVolumes())
	}
	names := make(map[uint32]string)
	for _, w := range m.GetNamespaces() {
		names[w.GetId()] = w.GetName()
	}
	a.printTable(row{"Tier node", "Volume", "State", "Heard", "Used", "Size", "Domain", "Namespaces", "Address"},
		mapTo(m.GetVolumes(), func(v *dirpb.Volume) row {
			spaces := mapTo(v.GetRegions(), func(r *dirpb.VolumeRegion) string { return names[r.GetNamespaceId()] })
			heard := "-"
			if st.GetLeads() {
				heard = (time.Duration(v.GetSilentMillis()) * time.Millisecond).String() + " ago"
			}
			return row{v.GetName(), v.GetId(), strings.ToLower(strings.TrimPrefix(v.GetState().String(), "VOLUME_")),
				heard, units.Bytes(v.GetUsedBytes()), units.Bytes(v.GetCapacityBytes()), v.GetDomain(),
				strings.Join(spaces, ","), dirpb.Addresses(v.GetEndpoints())}
		}))
	return nil
}
