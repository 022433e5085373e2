package gateway

import (
	"bytes"
	"errors"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/redis/exec"
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
	// groupTries is how often scripts run as a group, while others write their keys.
	groupTries = 4
)

// groupedScript is a command of a group.
// args are the reader's, and stay until the batch has replied.
type groupedScript struct {
	cmd    *command
	args   [][]byte
	unit   int // of the group
	lo, hi int // its reply, in the unit's out
}

// groupUnit is what a group does to one key.
// Its staged has the one key, grouped, and runs all of the group's scripts that name it, one after the other.
type groupUnit struct {
	*staged
	done  bool  // it has taken effect, or err says why not
	alone bool  // its scripts are performed by themselves, when their replies are due
	err   error // of the store
}

// joins reports whether a command may wait for others to make a group.
// It only looks. A script that needed more than its key once (Alone) is not tried in a group again, and scripts of a
// client that caches are performed by themselves, since their reads have to be noted.
func (b *batch) joins(cmd *command, args [][]byte) bool {
	c := b.c
	if !cmd.Is(spec.BySha) || b.heed&heedMonitor != 0 || len(args) < 4 || c.caching != cachingAsUsual ||
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
	g := group{b: b, list: list, units: b.groupUnits[:0]}
	defer g.free()
	if len(list) > 1 {
		g.perform()
	}
	if len(g.list) == 0 || len(list) == 1 { // by itself
		g.list = list[:1]
		g.units = append(g.units, groupUnit{alone: true})
		list[0].unit = len(g.units) - 1
	}
	c, w := b.c, &b.w
	took := time.Since(b.start)
	for i := range g.list {
		s := &g.list[i]
		u := &g.units[s.unit]
		start, errs := w.Len(), w.Errors
		w.Proto = c.proto
		switch {
		case u.alone:
			if i > 0 {
				b.tick()
			}
			c.performSeveral(s.cmd, w, s.args, b.start)
			w.Proto, took = c.proto, time.Since(b.start)
		case u.err != nil:
			w.Error(c.stagedError(u.err))
		default:
			reply := u.out.Bytes()[s.lo:s.hi]
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

// group is scripts that are performed together.
type group struct {
	b     *batch
	list  []groupedScript // without those that wait for the next group
	units []groupUnit     // one for each key of list
	limit int             // bytes of a value, and of a unit's replies
	held  int64           // bytes of the share
}

// free gives back what the group had.
// The scripts' replies have been written by then; they are copies.
func (g *group) free() {
	for i := range g.units {
		if t := g.units[i].staged; t != nil {
			t.free()
		}
	}
	clear(g.units)
	g.b.groupUnits = g.units[:0]
	g.b.c.share.Drop(g.held)
}

// perform performs what it can of the list, which it cuts behind that. No script is left if the first is one to perform
// by itself. Each try is two round trips, whatever the number of scripts. Only units that were refused run again: what
// others have written is done. If there is no memory the list is empty, too, and the first script, by itself, meets
// that and says so.
func (g *group) perform() {
	c := g.b.c
	g.makeUnits()
	ctx := c.ctx
	if g.limit = oneLimit; len(g.units) > freeUnits {
		ctx, g.limit = c.smallCtx, eachLimit
		g.held = int64(len(g.units)) * 2 * eachLimit
		if c.take(g.held) != nil {
			g.list, g.held = nil, 0
			return
		}
	}
	do := func(n int) {
		if n > 0 {
			c.in.api.Do(ctx, g.b.ops[:n])
		}
	}
	for try := 0; ; try++ {
		reads := g.reads()
		do(reads)
		g.takeReads()
		g.runScripts(try == 0)
		do(g.writes())
		again := g.takeWrites()
		clear(g.b.ops[:reads])
		g.b.ops = g.b.ops[:0]
		switch {
		case !again:
			return
		case try == groupTries-1:
			for i := range g.units {
				u := &g.units[i]
				u.alone = !u.done
			}
			return
		}
		g.b.tick()
	}
}

// makeUnits finds or makes the unit of each script, as far as there may be units.
// A search in line is faster than a map for 16 keys.
func (g *group) makeUnits() {
next:
	for i := range g.list {
		s := &g.list[i]
		name := s.args[3]
		for j := range g.units {
			if g.units[j].Keys[0].Name == string(name) {
				s.unit = j
				continue next
			}
		}
		if len(g.units) == maxGroupKeys {
			g.list = g.list[:i]
			return
		}
		t := newStaged(g.b.c)
		t.DB = g.b.c.db
		t.Add(stagedName{DB: t.DB, Name: string(name)})
		s.unit = len(g.units)
		g.units = append(g.units, groupUnit{staged: t})
	}
}

// reads are operations that read the keys of the units that are not done; each unit begins anew.
// n is how many operations there are in b.ops, in the order of the units.
func (g *group) reads() (n int) {
	b := g.b
	b.ops = b.ops[:0]
	for i := range g.units {
		u := &g.units[i]
		if u.done || u.alone {
			continue
		}
		t := u.staged
		k := t.Keys[0]
		t.Now, t.Room, t.Lone, t.Err, t.Changes = b.now, g.limit, true, nil, t.Changes[:0]
		t.out.Reset(keepReply)
		t.out.Proto = b.c.proto
		*k = exec.Key{KeyName: k.KeyName, Stored: k.Stored}
		k.Now, k.MaxValue, k.Room, k.Limits = t.Now, b.c.g.o.MaxValueBytes, t.Room, &b.c.g.encodings
		b.ops = append(b.ops, client.Op{Kind: client.OpGet, Key: k.Stored, Typed: true})
	}
	return len(b.ops)
}

// takeReads takes their answers.
// An error of a read makes the unit's scripts leave the group, with nothing done.
func (g *group) takeReads() {
	n := 0
	for i := range g.units {
		if u := &g.units[i]; !u.done && !u.alone {
			o := &g.b.ops[n]
			n++
			if err := u.Keys[0].TakeRead(o); err != nil {
				u.staged.Err = exec.ErrAlone // it meets the error again, or takes memory
			}
			if k := u.Keys[0]; k.Version != 0 {
				g.b.c.sees(k.KeyName)
			}
		}
	}
}

// runScripts runs the scripts of the units that are not done. The first time it cuts the list before one that is to be
// performed by itself, and behind one with which the group has run for long enough; later its whole unit is, and is
// behind the others then.
func (g *group) runScripts(first bool) {
	for i := range g.list {
		s := &g.list[i]
		u := &g.units[s.unit]
		if u.done || u.alone {
			continue
		}
		ran := u.runGrouped(s, g.limit)
		switch {
		case !ran && first:
			g.list = g.list[:i]
			return
		case !ran:
			u.alone = true
		case first && time.Since(g.b.start) > g.b.c.g.scripts.groupTime:
			g.list = g.list[:i+1]
			return
		}
	}
}

// runGrouped runs a script over the staged of its key, and reports whether that is all that it needed; else it has done
// nothing. If ok is false, everything is as the scripts of the unit before it have left it: key, changes to be told,
// and replies.
func (t *staged) runGrouped(s *groupedScript, limit int) (ok bool) {
	if t.Err != nil {
		return false
	}
	k, told := t.Keys[0], len(t.Changes)
	before := k.Key
	s.lo = t.out.Len()
	t.scriptsEnd = time.Time{} // each has its own time
	t.run(s.cmd, s.args, &t.out)
	s.hi = t.out.Len()
	if t.Err == nil && k.Want == 0 && s.hi <= limit {
		return true
	}
	t.Cut(1)
	t.Err, t.Changes = nil, t.Changes[:told]
	k.Key, k.Own = before, nil
	t.out.Truncate(s.lo)
	return false
}

// writes are operations that make the store what the units' keys are now.
// Units that only read need no write: the read of one key was of one instant.
func (g *group) writes() (n int) {
	b := g.b
	b.ops = b.ops[:0]
	for i := range g.units {
		if u := &g.units[i]; !u.done && !u.alone && u.Keys[0].Writes() {
			b.ops = append(b.ops, u.Keys[0].Op())
		}
	}
	return len(b.ops)
}

// takeWrites takes their answers, and reports whether there are units whose scripts are to run again.
// A refused write has done nothing. An unknown outcome is the reply of every script of its unit: any of them may have
// happened.
func (g *group) takeWrites() (again bool) {
	n := 0
	for i := range g.units {
		u := &g.units[i]
		if u.done || u.alone {
			continue
		}
		if u.Keys[0].Writes() {
			u.err = g.b.ops[n].Err
			n++
		}
		switch {
		case u.err == nil:
			u.announce()
			u.tellOfWrites()
		case exec.Refused(u.err), tooLarge(u.err):
			again, u.err = true, nil
			continue
		case errors.Is(u.err, client.ErrUnknownOutcome):
			u.Changes = nil
			u.tellOfWrites()
		}
		u.done = true
	}
	return again
}

// tooLarge reports whether an operation was not performed since it needs more memory than it was allowed.
func tooLarge(err error) bool {
	var large *inside.TooLargeError
	return errors.As(err, &large)
}
