package server

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/lead"
)

// A majority of data folders may be put back from a backup, and then raft knows nothing of what was committed since.
// Memory nodes do: they keep the position that the directory told them last. A leader decides nothing before memory
// nodes have vouched for its state, and nothing at all once one of them was told more.

// trustPause is how often somebody who waits for memory nodes to vouch looks.
const trustPause = 5 * time.Millisecond

// beginReign makes the leadership part of the state, from when on memory nodes are told of positions.
func (n *Node) beginReign(ctx context.Context, l *leadership) error {
	_, err := n.do(ctx, l,
		&fsmpb.Command{Op: &fsmpb.Command_Reign{
			Reign: &fsmpb.Reign{Id: dirpb.RandomID(), Term: l.term, Base: n.lastBefore(l.term), Node: n.opts.ID}}})
	return err
}

// lastBefore is the last entry of the log of a term before the one that this node leads. Memory nodes may have been
// told of later ones of those terms, which it has replaced or does not have.
func (n *Node) lastBefore(term uint64) uint64 {
	i := n.raft.LastIndex()
	for e := new(raft.Log); n.store.GetLog(i, e) == nil && e.Term >= term; i-- {
	}
	return i
}

// vouch takes in what a memory node says of the directory that it followed. An error refuses the memory node, as any
// other.
func (n *Node) vouch(l *leadership, name string, id uint32, p *dirpb.Position) error {
	said := false
	var err error
	l.mu.Lock()
	n.machine.viewAt(func(s *fsm.State, applied uint64) {
		before := len(l.mu.Ahead())
		l.mu.Vouch(s, applied, name, id, p)
		said = len(l.mu.Ahead()) > before
		err = lacks(l.mu.Leader)
	})
	l.mu.Unlock()
	if said {
		n.log.Error("directory: the data folders are older than what memory nodes were told: nothing is decided from "+
			"here on", "memory_node", name,
			"told_term", p.GetTerm(), "told_index", p.GetIndex(), "applied", n.machine.appliedIndex(), "err", err)
	}
	return err
}

// recoveredSince is how often the cluster was recovered, if a memory node that shows a position has not heard of the
// last time, or 0.
func (n *Node) recoveredSince(p *dirpb.Position) (of uint64) {
	n.machine.view(func(s *fsm.State) {
		of = s.Meta().Recoveries
		if p.GetClusterId() == s.Meta().ClusterId && p.GetRecoveries() == of {
			of = 0
		}
	})
	return of
}

// lacks is the answer of a leader whose state some memory node's directory was ahead of, or nil.
func lacks(x *lead.Leader) error {
	ahead := x.Ahead()
	if len(ahead) == 0 {
		return nil
	}
	var names []string
	for _, a := range ahead {
		names = append(names, fmt.Sprintf("%s (term %d, entry %d)", a.Name, a.Position.Term, a.Position.Index))
	}
	return status.Error(codes.DataLoss, label("the directory's data folders are older than what memory nodes were "+
		"told: "+strings.Join(names, ", ")+
		"; nothing was done; kvctl status says what to do"))
}

// behind is lacks for a leadership that has begun.
func (n *Node) behind(l *leadership) (err error) {
	n.withState(l, func(x *lead.Leader, _ *fsm.State, _ time.Duration) { err = lacks(x) })
	return err
}

// awaitTrust waits until c may be proposed, which is at once but for the first moments of a leadership. A memory node's
// word of itself waits for nothing.
func (n *Node) awaitTrust(ctx context.Context, l *leadership, c *fsmpb.Command) error {
	if l.began.IsZero() {
		return nil // accede's
	}
	if err := n.behind(l); err != nil || l.trusted.Load() {
		return err
	}
	switch c.Op.(type) {
	case *fsmpb.Command_RegisterNode, *fsmpb.Command_ConfirmFence, *fsmpb.Command_PublishRegion, *fsmpb.Command_Raise:
		return nil
	}
	tick := time.NewTicker(trustPause)
	defer tick.Stop()
	for !n.trusted(l) {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nothingDone("the directory has a new leader, which waits for memory nodes to say that it knows " +
				"what they were told; nothing was done")
		case <-n.ctx.Done():
			return n.stopping()
		}
		if err := n.behind(l); err != nil {
			return err
		}
		if n.raft.CurrentTerm() != l.term {
			return n.notLeader()
		}
	}
	return nil
}

// trusted reports whether the leadership may decide.
func (n *Node) trusted(l *leadership) (ok bool) {
	n.withState(l, func(x *lead.Leader, s *fsm.State, now time.Duration) { ok = x.Trusted(s, now) })
	l.trusted.Store(ok)
	return ok
}
