package overview

import (
	"fmt"
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
	used := InUse(m)
	switch {
	case slices.ContainsFunc(m.GetNamespaces(), func(n *dirpb.Namespace) bool { return len(n.GetLosses()) > 0 }):
		return Lost
	case len(st.GetDirectory()) > 0 && !slices.ContainsFunc(st.GetDirectory(), (*dirpb.DirectoryNode).GetLeader),
		slices.ContainsFunc(m.GetPgs(), func(p *dirpb.PlacementGroup) bool { return Copies(p) == 0 && used(p) }),
		slices.ContainsFunc(m.GetNodes(), (*dirpb.Node).GetWaiting):
		return Unavailable
	case len(Problems(st)) > 0:
		return Degraded
	}
	return Healthy
}

// Summary says in a line how the store is by st, and what mends the worst that is wrong with it, if anything is.
func Summary(st *dirpb.StatusReply) (line, mend string) {
	var why string
	switch all := Problems(st); len(all) {
	case 0:
		n, g, j := len(st.GetMap().GetNodes()), len(st.GetMap().GetPgs()), len(st.GetJobs())
		why = fmt.Sprintf("%s up, %s with all copies, %s under way", plural(n, "memory node"),
			plural(g, "placement group"), plural(j, "job"))
	case 1:
		why, mend = all[0].What, all[0].Mend
	default:
		why, mend = fmt.Sprintf("%d problems, first: %s", len(all), all[0].What), all[0].Mend
	}
	return fmt.Sprintf("%s: %s", VerdictOf(st), why), mend
}

func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
