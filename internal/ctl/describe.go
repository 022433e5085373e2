package ctl

import (
	"fmt"
	"strings"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/overview"
)

// JobName says what a job does.
func JobName(j *dirpb.Job) string {
	switch s := Short(j.GetKind()); j.GetKind() {
	case dirpb.JobKind_JOB_MOVE, dirpb.JobKind_JOB_ABANDON:
		return fmt.Sprintf("%s of shard %d", s, j.GetShardId())
	case dirpb.JobKind_JOB_RECALL:
		return fmt.Sprintf("%s of extent %s of placement group %d", s, overview.ExtentsText(j), j.GetPgId())
	default:
		return fmt.Sprintf("%s of placement group %d", s, j.GetPgId())
	}
}

// JobsText says how far the jobs are that somebody works on.
func JobsText(st *dirpb.StatusReply) string {
	var parts []string
	for _, j := range st.GetJobs() {
		if j.GetOwner() != 0 {
			parts = append(parts, fmt.Sprintf("(%s: %d/%d)", JobName(j), j.GetDone(), j.GetTotal()))
		}
	}
	return strings.Join(parts, " ")
}

// Troubles says why jobs do not get on.
func Troubles(st *dirpb.StatusReply) string {
	var out strings.Builder
	for _, j := range st.GetJobs() {
		if j.GetTrouble() != "" {
			fmt.Fprintf(&out, "; %s: %s", JobName(j), Visible(j.GetTrouble()))
		}
	}
	return out.String()
}

// DeletingText says what a namespace that is being deleted waits for, "" if it is gone.
func DeletingText(st *dirpb.StatusReply, id uint32) string {
	for _, ns := range st.GetMap().GetNamespaces() {
		if ns.GetId() != id {
			continue
		}
		fencing := 0
		for _, s := range st.GetSessions() {
			if s.GetNamespace() == ns.GetName() {
				fencing++
			}
		}
		return fmt.Sprintf("%s waits for %d sessions to be fenced", ns.GetName(), fencing)
	}
	return ""
}

// NamespacesText lists the namespaces, and what those wait for that are being deleted.
func NamespacesText(st *dirpb.StatusReply) string {
	return strings.Join(MapTo(st.GetMap().GetNamespaces(), func(ns *dirpb.Namespace) string {
		if ns.GetDeleting() {
			return fmt.Sprintf("%s (being deleted: %s)", ns.GetName(), strings.TrimPrefix(DeletingText(st, ns.GetId()),
				ns.GetName()+" "))
		}
		if ns.GetRebalancing() == dirpb.Rebalancing_REBALANCING_ON {
			return ns.GetName() + " (being rebalanced)"
		}
		return ns.GetName()
	}), ", ")
}
