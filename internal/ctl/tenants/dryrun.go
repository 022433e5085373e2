package tenants

import (
	"context"
	"fmt"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/units"
)

func (a *commands) wouldDeleteNamespace(ctx context.Context, b ctl.Backend, name string, end bool) error {
	st, err := ctl.ClusterStatus(ctx, b)
	if err != nil {
		return err
	}
	ns, err := namespaceToDelete(st, name)
	if err != nil {
		return err
	}
	live, sessions := contentsOf(st, ns)
	if sessions > 0 && !end {
		return ctl.ExitWith(
			ctl.ExitNo, fmt.Errorf("%q would not be deleted: %d sessions live in it: --end-sessions ends them", name,
				sessions))
	}
	if a.JSON() {
		return a.PrintJSON(map[string]any{"dry_run": true, "namespace": name, "id": ns.GetId(), "live_bytes": live,
			"sessions": sessions})
	}
	a.Unchanged()
	a.PrintTable(ctl.Row{"Would delete", "ID", "Records", "Sessions ended"},
		[]ctl.Row{{name, ns.GetId(), units.Rounded(live), sessions}})
	return nil
}

// setting is a property of a namespace that would change.
type setting struct {
	Name string `json:"setting"`
	Now  string `json:"now"`
	Then string `json:"then"`
}

// wouldSet compares q with the namespace as it is. Room for more copies is the directory's to judge.
func (a *commands) wouldSet(ctx context.Context, b ctl.Backend, q *dirpb.SetNamespaceRequest) error {
	st, err := ctl.ClusterStatus(ctx, b)
	if err != nil {
		return err
	}
	ns, err := ctl.NamespaceOf(st.GetMap(), q.GetName())
	if err != nil {
		return err
	}
	changed := []setting{}
	add := func(given bool, name string, now, then any) {
		if x, y := fmt.Sprint(now), fmt.Sprint(then); given && x != y {
			changed = append(changed, setting{name, x, y})
		}
	}
	add(!q.GetKeepLimit(), "limit bytes", ns.GetLimitBytes(), q.GetLimitBytes())
	add(q.GetReplicas() != 0, "replicas", ns.GetReplicas(), q.GetReplicas())
	add(q.GetNodes() != 0, "nodes", ns.GetNodes(), q.GetNodes())
	add(q.GetMaxValueBytes() != 0, "max value bytes", maxValueOf(ns), q.GetMaxValueBytes())
	add(q.MaxPinnedPercent != nil, "max pinned percent", ns.GetMaxPinnedPercent(), q.GetMaxPinnedPercent())
	add(q.GetOwner() != "", "owner", ns.GetOwner(), q.GetOwner())
	was, will := ns.GetQuota(), q.GetQuota()
	add(will != nil, "quota sessions", was.GetSessions(), will.GetSessions())
	add(will != nil, "quota lanes", was.GetLanes(), will.GetLanes())
	add(will != nil, "quota tcp ops", was.GetTcpOpsPerSecond(), will.GetTcpOpsPerSecond())
	add(will != nil, "quota index bytes", was.GetIndexBytes(), will.GetIndexBytes())
	if a.JSON() {
		return a.PrintJSON(map[string]any{"dry_run": true, "namespace": q.GetName(), "changes": changed})
	}
	a.Unchanged()
	if len(changed) == 0 {
		fmt.Fprintf(a.Stdout, "%s is so already\n", ctl.Visible(q.GetName()))
		return nil
	}
	a.PrintTable(ctl.Row{"Setting", "Now", "Then"}, ctl.MapTo(changed, func(s setting) ctl.Row {
		return ctl.Row{s.Name, s.Now, s.Then}
	}))
	return nil
}
