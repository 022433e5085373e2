package overview

import (
	"slices"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// Verdict is how the store is, in a word.
type Verdict string

// The verdicts, the best first.
const (
	// Healthy is a store without a problem.
	Healthy Verdict = "healthy"
	// Degraded is one that serves every key, and has a problem.
	Degraded Verdict = "degraded"
	// Unavailable is one that does not serve some keys, or no new sessions: it waits for processes.
	Unavailable Verdict = "unavailable"
	// Lost is one that has lost keys, which nobody has accepted yet.
	Lost Verdict = "lost"
)

// VerdictOf judges the store by st, whose problems are Problems(st).
func VerdictOf(st *dirpb.StatusReply) Verdict {
	m := st.GetMap()
	switch {
	case slices.ContainsFunc(m.GetNamespaces(), func(n *dirpb.Namespace) bool { return len(n.GetLosses()) > 0 }):
		return Lost
	case len(st.GetDirectory()) > 0 && !slices.ContainsFunc(st.GetDirectory(), (*dirpb.DirectoryNode).GetLeader),
		slices.ContainsFunc(m.GetPgs(), func(p *dirpb.PlacementGroup) bool { return Copies(p) == 0 }),
		slices.ContainsFunc(m.GetNodes(), (*dirpb.Node).GetWaiting):
		return Unavailable
	case len(Problems(st)) > 0:
		return Degraded
	}
	return Healthy
}
