package memnode

import (
	"github.com/kvd-project/kvd/internal/dirpb"
)

// position is how far the directory had got when this node last acted on an answer of it: it is kept with the regions, and shown to the
// directory, which may have been put back from a backup since, and then must not say what is to become of them. The zero value says nothing.
type position struct {
	recoveries, reign, term, index uint64
}

// of is what the directory is shown of p, nil if p says nothing.
func (p position) of(cluster string) *dirpb.Position {
	if p == (position{}) {
		return nil
	}
	return &dirpb.Position{ClusterId: cluster, Recoveries: p.recoveries, Reign: p.reign, Term: p.term, Index: p.index}
}

// take takes over what an answer says, if it says anything.
func (p *position) take(q *dirpb.Position) {
	if q != nil {
		*p = position{q.GetRecoveries(), q.GetReign(), q.GetTerm(), q.GetIndex()}
	}
}

// noteTold takes in, and writes down, what the directory was at when it answered a heartbeat.
func (n *Node) noteTold(reg *registration, rep *dirpb.HeartbeatReply) error {
	n.mu.Lock()
	before := n.mu.told
	n.mu.told.take(rep.GetPosition())
	same := before == n.mu.told
	n.mu.Unlock()
	if same {
		return nil
	}
	return n.saveState(reg)
}
