package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// jobName says what a job does.
func jobName(j *dirpb.Job) string {
	switch s := short(j.GetKind()); j.GetKind() {
	case dirpb.JobKind_JOB_MOVE, dirpb.JobKind_JOB_ABANDON:
		return fmt.Sprintf("%s of shard %d", s, j.GetShardId())
	case dirpb.JobKind_JOB_RECALL:
		return fmt.Sprintf("%s of extent %s of placement group %d", s, extentsText(j), j.GetPgId())
	default:
		return fmt.Sprintf("%s of placement group %d", s, j.GetPgId())
	}
}

// extentsText lists the extents that a job recalls.
func extentsText(j *dirpb.Job) string {
	return strings.Join(mapTo(j.GetExtents(), func(x uint32) string { return strconv.FormatUint(uint64(x), 10) }), ",")
}

// kindText is the kind of a job, and how it goes about it.
func kindText(j *dirpb.Job) string {
	switch s := short(j.GetKind()); {
	case j.GetInPlace():
		return s + " in place"
	case j.GetCount():
		return s + ", count only"
	default:
		return s
	}
}

// jobsText says how far the jobs are that somebody works on.
func jobsText(st *dirpb.StatusReply) string {
	var parts []string
	for _, j := range st.GetJobs() {
		if j.GetOwner() != 0 {
			parts = append(parts, fmt.Sprintf("(%s: %d/%d)", jobName(j), j.GetDone(), j.GetTotal()))
		}
	}
	return strings.Join(parts, " ")
}

// troubles says why jobs do not get on.
func troubles(st *dirpb.StatusReply) string {
	var out strings.Builder
	for _, j := range st.GetJobs() {
		if j.GetTrouble() != "" {
			fmt.Fprintf(&out, "; %s: %s", jobName(j), visible(j.GetTrouble()))
		}
	}
	return out.String()
}

func (a *app) printJobs(st *dirpb.StatusReply) error {
	jobs := st.GetJobs()
	slices.SortFunc(jobs, func(x, y *dirpb.Job) int { return int(int64(x.GetId()) - int64(y.GetId())) })
	if a.json() {
		return printProtos(a, jobs)
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
	a.printTable(row{"ID", "Kind", "Namespace", "PG", "Shard", "Extents", "Owner", "Done", "Total", "Because",
		"Trouble"},
		mapTo(jobs, func(j *dirpb.Job) row {
			pg, extent, owner, trouble := number(j.GetPgId()), "-", number(j.GetOwner()), j.GetTrouble()
			if t := j.GetTargetPgId(); t != 0 && t != j.GetPgId() {
				pg += " → " + number(t)
			}
			if j.GetKind() == dirpb.JobKind_JOB_RECALL {
				extent = extentsText(j)
			}
			if c := owners[j.GetOwner()]; c != "" {
				owner += " " + c
			}
			if trouble == "" && j.GetWaiting() {
				trouble = "waits until every session has heard of it"
			}
			return row{j.GetId(), kindText(j), namespaces[j.GetNamespaceId()], pg, number(j.GetShardId()), extent,
				owner,
				j.GetDone(), j.GetTotal(), j.GetReason(), trouble}
		}))
	return nil
}
