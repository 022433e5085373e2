package operate

import (
	"context"
	"fmt"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/overview"
	"github.com/kvd-project/kvd/internal/units"
)

// fate is what becomes of a placement group.
type fate struct {
	PG        uint32 `json:"pg"`
	Namespace string `json:"namespace"`
	Bytes     uint64 `json:"region_bytes"`
	Then      string `json:"then"`
}

// fates says what becomes of each placement group that n has a region of.
func fates(m *dirpb.Map, n *dirpb.Node, then func(*dirpb.PlacementGroup) string) []fate {
	out := []fate{}
	names := make(map[uint32]string)
	for _, ns := range m.GetNamespaces() {
		names[ns.GetId()] = ns.GetName()
	}
	for _, p := range m.GetPgs() {
		if overview.IsOn(p, n.GetId()) {
			out = append(out, fate{p.GetId(), names[p.GetNamespaceId()], p.GetRegionBytes(), then(p)})
		}
	}
	return out
}

func (a *commands) printFates(name string, all []fate) error {
	if a.JSON() {
		return a.PrintJSON(map[string]any{"dry_run": true, "node": name, "placement_groups": all})
	}
	a.Unchanged()
	if len(all) == 0 {
		fmt.Fprintf(a.Stdout, "%s holds nothing\n", ctl.Visible(name))
		return nil
	}
	a.PrintTable(ctl.Row{"PG", "Namespace", "Region", "Then"}, ctl.MapTo(all, func(f fate) ctl.Row {
		return ctl.Row{f.PG, f.Namespace, units.Rounded(f.Bytes), f.Then}
	}))
	return nil
}

func (a *commands) wouldDrain(ctx context.Context, b ctl.Backend, name string, cancel bool) error {
	m, n, err := a.node(ctx, b, name)
	if err != nil {
		return err
	}
	if why := nowhere(m, n); why != "" && !cancel {
		return ctl.ExitWith(ctl.ExitNo, fmt.Errorf("%q would not be drained: %s", name, why))
	}
	return a.printFates(name, fates(m, n, func(*dirpb.PlacementGroup) string {
		if cancel {
			return "stays"
		}
		return "its copy moves to another memory node, or its keys to other groups"
	}))
}

// without says what is left of p when n is gone at once.
func without(p *dirpb.PlacementGroup, n *dirpb.Node) string {
	left := 0
	for _, mb := range p.GetMembers()[:min(overview.Copies(p), len(p.GetMembers()))] {
		if mb.GetNodeId() != n.GetId() {
			left++
		}
	}
	switch {
	case overview.Copies(p) == 0:
		return "has no copy, and is made anew, empty"
	case left == 0:
		return "no copy is left: its keys are gone"
	case left == overview.Copies(p):
		return "no copy is lost: this one was not whole"
	}
	return fmt.Sprintf("%d of %d copies are left", left, overview.Copies(p))
}

func (a *commands) wouldForget(ctx context.Context, b ctl.Backend, name string, force bool) error {
	m, n, err := a.node(ctx, b, name)
	if err != nil {
		return err
	}
	all := fates(m, n, func(p *dirpb.PlacementGroup) string { return without(p, n) })
	if len(all) > 0 && !force {
		return ctl.ExitWith(ctl.ExitNo,
			fmt.Errorf("%q would not be removed: it has regions of %d placement groups; drain "+
				"it first, or --force it and lose them", name, len(all)))
	}
	return a.printFates(name, all)
}

func (a *commands) wouldGiveUp(ctx context.Context, b ctl.Backend, name string) error {
	m, n, err := a.node(ctx, b, name)
	if err != nil {
		return err
	}
	if !n.GetWaiting() {
		return ctl.ExitWith(ctl.ExitNo,
			fmt.Errorf("%q would not be given up: it is %s, and the store does not wait for it",
				name, overview.NodeState(n)))
	}
	return a.printFates(name, fates(m, n, func(p *dirpb.PlacementGroup) string { return without(p, n) }))
}
