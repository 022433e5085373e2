package lead

import (
	"slices"
	"strings"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
)

// vouchers are what memory nodes have said to this leader of the directory that they followed.
type vouchers struct {
	heard map[uint32]bool // by memory node: the state has all that it was told
	ahead map[string]*dirpb.Position
	full  bool // Trusted has been true
}

// Vouch takes in how far the directory had got that a memory node followed; id is 0 if the state does not know it. It
// reports whether this leader's state, which reflects the log up to applied, has all of that. If not, this leader is to
// decide nothing any more: memory that it takes for free may be in use.
func (l *Leader) Vouch(s *fsm.State, applied uint64, name string, id uint32, p *dirpb.Position) bool {
	if s.Lacks(p, applied) {
		l.vouchers.ahead[name] = p
		return false
	}
	if id != 0 && p.GetRecoveries() == s.Meta().Recoveries {
		l.vouchers.heard[id] = true
	}
	return len(l.vouchers.ahead) == 0
}

// Trusted reports whether this leader may decide. It may if no memory node was told more than its state has.
// Besides, half of those that are up have been heard, or a lease has run.
func (l *Leader) Trusted(s *fsm.State, now time.Duration) bool {
	if len(l.vouchers.ahead) > 0 {
		return false
	}
	if l.vouchers.full || !s.KnowsBoots() {
		return true
	}
	up, heard := 0, 0
	for _, n := range s.Nodes() {
		if n.State == dirpb.NodeState_NODE_UP {
			up++
			if l.vouchers.heard[n.Id] {
				heard++
			}
		}
	}
	l.vouchers.full = 2*heard >= up || now-l.began > l.opts.Lease
	return l.vouchers.full
}

// Ahead are the memory nodes whose directory had got further than this leader's state, by name.
func (l *Leader) Ahead() (list []*dirpb.AheadNode) {
	for name, p := range l.vouchers.ahead {
		list = append(list, &dirpb.AheadNode{Name: name, Position: p})
	}
	slices.SortFunc(list, func(a, b *dirpb.AheadNode) int { return strings.Compare(a.Name, b.Name) })
	return list
}
