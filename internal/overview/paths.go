package overview

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// askedFor is the reason of a path by tcp that the settings ask for: no problem.
const askedFor = "asked-for"

// Bypass is clients of one machine that reach memory nodes by tcp, for one reason, though RDMA is within reach.
type Bypass struct {
	Host    string // its name, as clients say it
	Adapter bool   // the machine has an RDMA adapter; otherwise memory nodes alone have
	Reason  string // a word, as in client.Path
	Detail  string // of one of them, for people
	Clients int    // processes, by their names
}

// mostBypasses bounds how many hosts and reasons clients can make up.
const mostBypasses = 100

// Bypasses are those of live sessions, by host and reason; one that the settings ask for is none. The leader alone
// knows them.
func Bypasses(st *dirpb.StatusReply) []*Bypass {
	type key struct{ host, reason string }
	by, names := make(map[key]*Bypass), make(map[key]map[string]bool)
	for _, s := range st.GetSessions() {
		if s.GetLife() != dirpb.SessionLife_SESSION_LIVE {
			continue
		}
		for _, p := range s.GetPaths().GetPaths() {
			if p.GetProvider() != "tcp" || p.GetReason() == "" || p.GetReason() == askedFor {
				continue
			}
			k := key{cmp.Or(s.GetPaths().GetHost(), "unknown"), p.GetReason()}
			if by[k] == nil && len(by) == mostBypasses {
				continue
			}
			if by[k] == nil {
				by[k], names[k] = &Bypass{Host: k.host, Reason: k.reason, Detail: p.GetDetail()}, make(map[string]bool)
			}
			names[k][s.GetClient()] = true
			b := by[k]
			b.Clients, b.Detail, b.Adapter = len(names[k]), min(b.Detail, p.GetDetail()),
				b.Adapter || s.GetPaths().GetAdapter()
		}
	}
	return slices.SortedFunc(maps.Values(by), func(x, y *Bypass) int {
		return cmp.Or(cmp.Compare(x.Host, y.Host), cmp.Compare(x.Reason, y.Reason))
	})
}

// shownBypasses is how many of them are told apart as problems.
const shownBypasses = 8

// bypassProblems are those of machines with an adapter: others may be as they shall be.
func bypassProblems(st *dirpb.StatusReply) (all []Problem) {
	rest := 0
	for _, b := range Bypasses(st) {
		switch {
		case !b.Adapter:
		case len(all) == shownBypasses:
			rest++
		default:
			all = append(all, Problem{fmt.Sprintf("%s of host %s: tcp is used though an RDMA adapter is there (%s): %s",
				plural(b.Clients, "client"), b.Host, b.Reason, b.Detail), mends[b.Reason]})
		}
	}
	if rest > 0 {
		last := &all[len(all)-1]
		last.What += fmt.Sprintf("; kvctl stats -o json has %d more like it", rest)
	}
	return all
}

// mends are by reason; clients of later versions may have others.
var mends = map[string]string{
	"not-built":        "run kvd of make build-verbs there; or, if tcp is meant: provider: tcp",
	"adapter-unusable": "on that host: kvctl doctor; or, if tcp is meant: provider: tcp",
	"not-offered":      "kvd memnode --listen-verbs auto, if it has an adapter; or, for clients, provider: tcp",
	"dial-failed":      "on that host: kvctl doctor; kvctl nodes shows where RDMA connections are set up",
}

// PathsText says for people by what sessions reach memory nodes, if some could do so by RDMA and do not; else "".
func PathsText(st *dirpb.StatusReply) string {
	var parts []string
	for _, b := range Bypasses(st) {
		parts = append(parts, fmt.Sprintf("%s %s (%s)", b.Host, plural(b.Clients, "client"), b.Reason))
	}
	if n := len(parts); n > shownBypasses {
		parts = append(parts[:shownBypasses], fmt.Sprintf("and %d more", n-shownBypasses))
	}
	return strings.Join(parts, ", ")
}
