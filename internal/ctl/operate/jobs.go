package operate

import (
	"slices"
	"strconv"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
)

func (a *commands) printJobs(st *dirpb.StatusReply) error {
	jobs := st.GetJobs()
	slices.SortFunc(jobs, func(x, y *dirpb.Job) int { return int(int64(x.GetId()) - int64(y.GetId())) })
	if a.JSON() {
		return ctl.PrintProtos(a.App, jobs)
	}
	namespaces, owners := make(map[uint32]string), make(map[uint32]string)
	for _, ns := range st.GetMap().GetNamespaces() {
		namespaces[ns.GetId()] = ns.GetName()
	}
	for _, s := range st.GetSessions() {
		owners[s.GetId()] = s.GetClient()
	}
	number := func(n uint32) string {
		if n == 0 {
			return "-"
		}
		return strconv.FormatUint(uint64(n), 10)
	}
	a.PrintTable(ctl.Row{"ID", "Kind", "Namespace", "PG", "Shard", "Extents", "Owner", "Done", "Total", "Because",
		"Trouble"},
		ctl.MapTo(jobs, func(j *dirpb.Job) ctl.Row {
			pg, extent, owner, trouble := number(j.GetPgId()), "-", number(j.GetOwner()), j.GetTrouble()
			if t := j.GetTargetPgId(); t != 0 && t != j.GetPgId() {
				pg += " → " + number(t)
			}
			if j.GetKind() == dirpb.JobKind_JOB_RECALL {
				extent = ctl.ExtentsText(j)
			}
			if c := owners[j.GetOwner()]; c != "" {
				owner += " " + c
			}
			if trouble == "" && j.GetWaiting() {
				trouble = "waits until every session has heard of it"
			}
			return ctl.Row{j.GetId(), ctl.KindText(j), namespaces[j.GetNamespaceId()], pg, number(j.GetShardId()),
				extent,
				owner,
				j.GetDone(), j.GetTotal(), j.GetReason(), trouble}
		}))
	return nil
}
