package exec

import (
	"errors"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
)

// groupTries is how often a Group runs, while others write its keys.
const groupTries = 4

// Group is Plans of one key each, whose keys are read together and written together: a try is two round trips, however
// many they are. Each takes effect by itself. The zero value needs an Open. Its owner calls Close.
type Group struct {
	Members []Member
	Room    int // bytes that a value and a member's replies may have

	host   Host
	limits *Limits
	db     int
	held   int64       // bytes of the share
	ops    []client.Op // kept for their memory
}

// Member is a Plan of a Group. It is Lone.
type Member struct {
	*Plan
	name  KeyName
	Done  bool  // it has taken effect, or Err says why not
	Alone bool  // its commands are to be performed by themselves: it has done nothing
	Err   error // of the store
}

// Left reports whether the commands of a Member are to run.
func (m *Member) Left() bool { return !m.Done && !m.Alone }

// Grouped are the commands of a Group.
type Grouped interface {
	// Begin forgets what a Member has done.
	Begin(member int)
	// Run runs the commands of all Members that are Left. Those that cannot go on are Alone.
	Run(first bool)
	// Wrote is told of a Member that has taken effect, or may have if its Err says so.
	Wrote(member int)
}

// Open begins a Group of keys of a database.
func (g *Group) Open(h Host, l *Limits, db int) {
	g.host, g.limits, g.db, g.Members = h, l, db, g.Members[:0]
}

// Close gives back the memory of the share. The Members' Plans are their owner's to close.
func (g *Group) Close() {
	clear(g.Members)
	clear(g.ops[:cap(g.ops)])
	g.host.Drop(g.held)
	*g = Group{Members: g.Members[:0], ops: g.ops}
}

// Add adds a Plan for a key.
func (g *Group) Add(p *Plan, name string) {
	g.Members = append(g.Members, Member{Plan: p, name: KeyName{g.db, name}})
}

// MemberOf is the number of the Member of a key, -1 if there is none.
// A search in line is faster than a map for a few keys.
func (g *Group) MemberOf(name []byte) int {
	for i := range g.Members {
		if g.Members[i].name.Name == string(name) {
			return i
		}
	}
	return -1
}

// Perform performs what it can; the rest is Alone. now is Unix ms. Only Members whose writes were refused run again:
// others have taken effect. An error says that there is no memory, and that nothing was done.
func (g *Group) Perform(now func() int64, does Grouped) error {
	l := g.limits
	many := len(g.Members) > l.Few
	ctx := g.host.Context(many)
	if g.Room = l.OneLimit; many {
		g.Room = l.EachLimit
		n := int64(len(g.Members)) * 2 * int64(l.EachLimit)
		if err := g.host.Take(n); err != nil {
			return err
		}
		g.held += n
	}
	do := func() {
		if len(g.ops) > 0 {
			g.host.API(g.db).Do(ctx, g.ops)
		}
	}
	for try := range groupTries {
		g.reads(now(), does)
		do()
		g.takeReads()
		does.Run(try == 0)
		g.writes()
		do()
		if !g.takeWrites(does) {
			return nil
		}
	}
	for i := range g.Members {
		g.Members[i].Alone = !g.Members[i].Done
	}
	return nil
}

// reads makes operations that read the keys of the Members that are left; each begins anew.
func (g *Group) reads(now int64, does Grouped) {
	g.ops = g.ops[:0]
	for i := range g.Members {
		if m := &g.Members[i]; m.Left() {
			m.Begin(now, g.db)
			does.Begin(i)
			m.Lone, m.Room = true, g.Room
			k := m.Add(m.name)
			g.ops = append(g.ops, client.Op{Kind: client.OpGet, Key: k.Stored, Typed: true})
		}
	}
}

// takeReads takes their answers. A Member whose key could not be read leaves the Group, with nothing done.
func (g *Group) takeReads() {
	n := 0
	for i := range g.Members {
		m := &g.Members[i]
		if !m.Left() {
			continue
		}
		k := m.Keys[0]
		if err := k.TakeRead(&g.ops[n]); err != nil {
			m.Plan.Err = ErrAlone // it meets the error again, or takes memory
		}
		n++
		if k.Version != 0 {
			g.host.Sees(k.KeyName)
		}
	}
}

// writes makes operations that make the store what the Members' keys are now.
// Members that only read need no write: the read of one key was of one instant.
func (g *Group) writes() {
	clear(g.ops)
	g.ops = g.ops[:0]
	for i := range g.Members {
		if m := &g.Members[i]; m.Left() && m.Keys[0].Writes() {
			g.ops = append(g.ops, m.Keys[0].Op())
		}
	}
}

// takeWrites takes their answers, and reports whether there are Members whose commands are to run again.
// A refused write has done nothing. An unknown outcome is the reply of every command of its Member: any of them may
// have happened.
func (g *Group) takeWrites(does Grouped) (again bool) {
	n := 0
	for i := range g.Members {
		m := &g.Members[i]
		if !m.Left() {
			continue
		}
		if m.Keys[0].Writes() {
			m.Err = g.ops[n].Err
			n++
		}
		var large *inside.TooLargeError
		switch {
		case Refused(m.Err), errors.As(m.Err, &large):
			again, m.Err = true, nil
			continue
		case m.Err == nil, errors.Is(m.Err, client.ErrUnknownOutcome):
			does.Wrote(i)
		}
		m.Done = true
	}
	return again
}
