package memnode

import (
	"cmp"
	"slices"

	"github.com/kvd-project/kvd/internal/admit"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
)

// position is how far the directory had got when this node last acted on an answer of it: it is kept with the regions,
// and shown to the directory, which may have been put back from a backup since, and then must not say what is to become
// of them. The zero value says nothing.
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
	for _, w := range rep.GetRegions() {
		if r := n.mu.regions[w.GetPgId()]; r != nil && sameLayout(w, r.want) {
			r.epoch = w.GetEpoch()
		}
	}
	same := before == n.mu.told
	n.mu.Unlock()
	if same {
		return nil
	}
	return n.saveState(reg)
}

// heardOfRecovery notes that the cluster was recovered so often, when nothing that was posted before can land any more.
// From here on the tokens and sessions of before mean nothing.
func (n *Node) heardOfRecovery(cluster string, recoveries uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.clusterID, n.mu.keys = cluster, nil
	n.mu.told, n.mu.sessions = position{recoveries: recoveries}, admit.Sessions{}
	n.log.Warn("the directory was recovered from one node's folder: everybody was fenced, and it is told which "+
		"regions are here", "recoveries", recoveries, "regions", len(n.mu.regions))
}

// lastEpoch is the latest epoch of r's placement group that the directory told. Node.mu is held.
func (r *region) lastEpoch() uint32 { return max(r.epoch, r.want.GetEpoch()) }

// heldLocked are the regions that a directory is told of that was recovered since this node registered last, else none.
func (n *Node) heldLocked() (list []heldRegion) {
	if n.mu.told.recoveries == 0 || n.mu.told.reign != 0 {
		return nil
	}
	for pg, r := range n.mu.regions {
		if !r.dying && r.keys != nil {
			list = append(list,
				heldRegion{&dirpb.HeldRegion{PgId: pg, NamespaceId: r.want.GetNamespaceId(), Epoch: r.lastEpoch(),
					Since: r.want.GetSince()},
					r.mem.Bytes[:r.want.GetIndexBytes()]})
		}
	}
	return list
}

// heldRegion is what is said of a region, and its index.
type heldRegion struct {
	region *dirpb.HeldRegion
	index  []byte
}

// reportHeld looks for the end of each index. Nobody writes there meanwhile.
func reportHeld(list []heldRegion) (regions []*dirpb.HeldRegion) {
	for _, h := range list {
		end := len(h.index)
		for end > layout.RegionPageSize && h.index[end-1] == 0 {
			end--
		}
		h.region.IndexEnd = uint64(end)
		regions = append(regions, h.region)
	}
	slices.SortFunc(regions, func(a, b *dirpb.HeldRegion) int { return cmp.Compare(a.GetPgId(), b.GetPgId()) })
	return regions
}
