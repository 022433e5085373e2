package gateway

import (
	"bytes"
	"time"

	"github.com/kvd-project/kvd/internal/redis/exec"
	"github.com/kvd-project/kvd/internal/redis/live"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// Scripts that a client pipelines go to the store together, as other commands on single keys do (batch): each EVALSHA
// with one key waits in the batch for those behind it. Then their keys are read in one client.Do, the scripts run one
// after the other, in the order in which they came, and what they have written goes out in another one, each key on
// condition that it is still what was read. Those on one key run over one staged and are one write. Those on different
// keys take effect in any order, like other commands of a batch.
//
// This holds for scripts that touch no other key and need no memory of the share. A script that turns out to be no such
// one has had no effect; those before it take theirs, and then it is performed by itself.

const (
	// A group has at most so many scripts, and keys.
	maxGroup, maxGroupKeys = 64, 16
	groupTime              = time.Millisecond // see scripting.groupTime
)

// groupedScript is a command of a group.
// args are the reader's, and stay until the batch has replied.
type groupedScript struct {
	cmd    *command
	args   [][]byte
	unit   int // of the group; -1: none
	lo, hi int // its reply, in the unit's out
}

// joins reports whether a command may wait for others to make a group.
// It only looks. A script that needed more than its key once (Alone) is not tried in a group again, and scripts of a
// client that caches are performed by themselves, since their reads have to be noted.
func (b *batch) joins(cmd *command, args [][]byte) bool {
	c := b.c
	if !cmd.Is(spec.BySha) || b.heed&heedMonitor != 0 || len(args) < 4 || c.caching != live.CachingAsUsual ||
		c.tracksReads() {
		return false
	}
	if n, err := keysOfScript(args, values.ErrNotInt); err != nil || n != 1 || badKey(c.in, args[3]) != nil {
		return false
	}
	prog := c.g.scripts.cache.Find(args[1])
	return prog != nil && !prog.Alone.Load()
}

// addScript gives a command that joins to the group.
// Commands that wait already and are no scripts are performed first, for the order. An error is that of sending its
// replies.
func (b *batch) addScript(cmd *command, args [][]byte) error {
	if len(b.entries) > 0 || len(b.scripts) == maxGroup {
		if err := b.run(); err != nil {
			return err
		}
	}
	b.scripts = append(b.scripts, groupedScript{cmd: cmd, args: args})
	return nil
}

// runScripts performs the scripts that wait, and writes their replies. Its error is that of sending.
// It leaves a loop before: scripts take longer than a loop's other connections should wait.
func (b *batch) runScripts() error {
	defer func() {
		clear(b.scripts)
		b.scripts = b.scripts[:0]
	}()
	b.c.link.Waits()
	for rest := b.scripts; len(rest) > 0; {
		b.tick()
		n, err := b.runGroup(rest)
		if err != nil {
			return err
		}
		rest = rest[n:]
	}
	return nil
}

// runGroup performs the first n of some scripts, at least one, and writes their replies.
// Scripts that perform left out of g.list are for the next call. A lone script is no group, and goes the ordinary way.
func (b *batch) runGroup(list []groupedScript) (n int, err error) {
	g := &b.group
	g.open(b, list)
	defer g.free()
	if len(list) > 1 {
		g.perform()
	}
	if len(g.list) == 0 || len(list) == 1 { // by itself
		g.list = list[:1]
		list[0].unit = -1
	}
	c, w := b.c, &b.w
	took := time.Since(b.start)
	for i := range g.list {
		s := &g.list[i]
		start, errs := w.Len(), w.Errors
		w.Proto = c.proto
		switch {
		case s.unit < 0 || g.plans.Members[s.unit].Alone:
			if i > 0 {
				b.tick()
			}
			c.performSeveral(s.cmd, w, s.args, b.start)
			w.Proto, took = c.proto, time.Since(b.start)
		case g.plans.Members[s.unit].Err != nil:
			w.Error(c.stagedError(g.plans.Members[s.unit].Err))
		default:
			reply := g.units[s.unit].out.Bytes()[s.lo:s.hi]
			w.Raw(reply)
			w.Errors += int(values.Bit(bytes.HasPrefix(reply, []byte("-"))))
		}
		x := ended{cmd: s.cmd, args: s.args, start: start, errs: errs, took: took, shown: true}
		if err := b.finish(&x); err != nil {
			return 0, err
		}
	}
	b.countAlike()
	return len(g.list), nil
}

// group is scripts that are performed together. It is kept for its memory.
type group struct {
	b     *batch
	list  []groupedScript // without those that wait for the next group
	plans exec.Group
	units []*staged // of each of its Members
}

func (g *group) open(b *batch, list []groupedScript) {
	g.b, g.list = b, list
	g.plans.Open(planHost{b.c}, &planLimits, b.c.db)
}

// free gives back what the group had.
// The scripts' replies have been written by then; they are copies.
func (g *group) free() {
	for _, t := range g.units {
		t.free()
	}
	clear(g.units)
	g.plans.Close()
	g.b, g.list, g.units = nil, nil, g.units[:0]
}

// perform performs what it can of the list, which it cuts behind that. No script is left if the first is one to perform
// by itself. If there is no memory the list is empty, too, and the first script, by itself, meets that and says so.
func (g *group) perform() {
	g.makeUnits()
	first := true
	now := func() int64 {
		if !first {
			g.b.tick()
		}
		first = false
		return g.b.now
	}
	if g.plans.Perform(now, g) != nil {
		g.list = nil
	}
}

// makeUnits finds or makes the unit of each script, as far as there may be units.
func (g *group) makeUnits() {
	for i := range g.list {
		s := &g.list[i]
		if s.unit = g.plans.MemberOf(s.args[3]); s.unit >= 0 {
			continue
		}
		if len(g.units) == maxGroupKeys {
			g.list = g.list[:i]
			return
		}
		t := newStaged(g.b.c)
		g.plans.Add(&t.Plan, string(s.args[3]))
		s.unit = len(g.units)
		g.units = append(g.units, t)
	}
}

// Begin is of exec.Grouped.
func (g *group) Begin(unit int) { (*stagedCommands)(g.units[unit]).Begin() }

// Run is of exec.Grouped. The first time it cuts the list before a script that is to be performed by itself. It also
// cuts it behind one with which the group has run for long enough. Later a whole unit is performed by itself, and is
// behind the others then.
func (g *group) Run(first bool) {
	for i := range g.list {
		s := &g.list[i]
		m := &g.plans.Members[s.unit]
		if !m.Left() {
			continue
		}
		ran := g.units[s.unit].runGrouped(s, g.plans.Room)
		switch {
		case !ran && first:
			g.list = g.list[:i]
			return
		case !ran:
			m.Alone = true
		case first && time.Since(g.b.start) > g.b.c.g.scripts.groupTime:
			g.list = g.list[:i+1]
			return
		}
	}
}

// Wrote is of exec.Grouped.
func (g *group) Wrote(unit int) { g.units[unit].tookEffect(g.plans.Members[unit].Err) }

// runGrouped runs a script over the staged of its key, and reports whether that is all that it needed; else it has done
// nothing. If ok is false, everything is as the scripts of the unit before it have left it: key, changes to be told,
// and replies.
func (t *staged) runGrouped(s *groupedScript, limit int) (ok bool) {
	if t.Err != nil {
		return false
	}
	k, told, lookups := t.Keys[0], len(t.Changes), t.lookups
	before := k.Key
	s.lo = t.out.Len()
	t.scriptsEnd = time.Time{} // each has its own time
	t.run(s.cmd, s.args, &t.out)
	s.hi = t.out.Len()
	if t.Err == nil && k.Want == 0 && s.hi <= limit {
		return true
	}
	t.Cut(1)
	t.Err, t.Changes, t.lookups = nil, t.Changes[:told], lookups
	k.Key, k.Own = before, nil
	t.out.Truncate(s.lo)
	return false
}
