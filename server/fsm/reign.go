package fsm

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// MaxReigns is how many leaderships are kept, the latest ones.
const MaxReigns = 256

// reign begins a leadership. Entries behind its base, up to the next one's, are its own: so a number that was drawn for
// it, and an index, name an entry as Raft's term and index do, but also between folders of one cluster that have gone
// different ways.
func (s *State) reign(c *fsmpb.Reign) error {
	if !s.KnowsBoots() {
		return fmt.Errorf("%w: leaderships have numbers from level %d on, and the directory is at level %d", ErrRefused,
			levelBoots, s.Level())
	}
	if c.GetId() == 0 || c.Base == 0 || len(c.Node) > MaxNameLen {
		return fmt.Errorf("%w: leadership %d of %.64q behind entry %d", ErrInvalid, c.GetId(), c.Node, c.Base)
	}
	if err := CheckText("directory node", c.Node); err != nil {
		return err
	}
	if last := s.lastReign(); last.GetBase() >= c.Base {
		return fmt.Errorf("%w: a leadership behind entry %d, and the last began behind entry %d", ErrInvalid, c.Base,
			last.Base)
	}
	m := s.editMeta()
	m.Reigns++
	reignRows.put(s, reignSlot(m.Reigns), c)
	return nil
}

func reignSlot(number uint64) uint32 { return uint32(number % MaxReigns) }

// lastReign is the latest leadership, or nil.
func (s *State) lastReign() *fsmpb.Reign {
	if s.meta.Reigns == 0 {
		return nil
	}
	return s.reigns[reignSlot(s.meta.Reigns)]
}

// ReignTerm is Raft's term of the latest leadership, 0 if there was none.
func (s *State) ReignTerm() uint64 { return s.lastReign().GetTerm() }

// Reigns are the leaderships that are kept, the latest one first.
func (s *State) Reigns() (list []*fsmpb.Reign) {
	last := s.meta.Reigns
	for number := last; number > last-min(last, MaxReigns); number-- {
		list = append(list, s.reigns[reignSlot(number)])
	}
	return list
}

// Position is how far a state has got that has applied an entry of the latest leadership. It is nil at a
// level that does not know.
func (s *State) Position(applied uint64) *dirpb.Position {
	r := s.lastReign()
	if r == nil || applied == 0 {
		return nil
	}
	return &dirpb.Position{ClusterId: s.meta.ClusterId, Recoveries: s.meta.Recoveries, Reign: r.Id, Term: r.Term,
		Index: applied}
}

// Lacks reports whether this state lacks the entry of a position that this cluster's directory once told. The
// state reflects the log up to applied. If it lacks the entry, it was put back from a backup, or what was
// committed is lost. Lacks cannot tell of leaderships before the last MaxReigns, and says no.
func (s *State) Lacks(p *dirpb.Position, applied uint64) bool {
	switch {
	case p.GetClusterId() != s.meta.ClusterId:
		return false
	case p.GetRecoveries() != s.meta.Recoveries:
		return p.Recoveries > s.meta.Recoveries
	case p.GetReign() == 0:
		return false
	}
	last := s.meta.Reigns
	end := applied // of the leadership looked at
	for _, r := range s.Reigns() {
		if r.Id == p.Reign {
			return p.Index > end
		}
		end = r.Base
	}
	return last <= MaxReigns || p.Term >= s.reigns[reignSlot(last-MaxReigns+1)].Term
}

func (s *State) checkReigns() error {
	last := s.meta.Reigns
	if kept := min(last, MaxReigns); uint64(len(s.reigns)) != kept {
		return fmt.Errorf("%d leaderships, want the last %d of %d", len(s.reigns), kept, last)
	}
	var list []*fsmpb.Reign
	for number := last; number > last-min(last, MaxReigns); number-- {
		r := s.reigns[reignSlot(number)]
		if r.GetId() == 0 || r.Base == 0 {
			return fmt.Errorf("leadership %d is missing", number)
		}
		list = append(list, r)
	}
	if !slices.IsSortedFunc(list, func(a, b *fsmpb.Reign) int { return cmp.Compare(b.Base, a.Base) }) {
		return fmt.Errorf("the last %d leaderships are out of order", len(list))
	}
	return nil
}
