package gateway

import (
	"cmp"
	"time"

	"github.com/kvd-project/kvd/internal/hotkeys"
	"github.com/kvd-project/kvd/internal/ordered"
)

// maxHotArgs bounds the keys of a command that are counted.
const maxHotArgs = 16

// countHot counts the keys of a command, if it is in the sample.
// It is called for commands that are about to be performed, whether they then fail or not. The lock is taken for a
// sample of them only.
func (c *conn) countHot(cmd *command, args [][]byte) {
	if c.g.hot == nil || !c.sampled() {
		return
	}
	var keys [maxHotArgs][]byte
	n := 0
	for _, s := range both(cmd.keySpans(args)) {
		for i := s.First; s.First > 0 && i <= s.Last && i < len(args) && n < maxHotArgs; i += s.Step {
			keys[n] = args[i]
			n++
		}
	}
	c.g.hot.Add(uint16(c.db), keys[:n]...)
}

func (c *conn) sampled() bool {
	if c.untilSample == 0 {
		c.untilSample = hotkeys.Next()
	}
	c.untilSample--
	return c.untilSample == 0
}

// HotKey is a key that is used much. Share is its part of the uses of all keys lately, and at least Least, by a sample.
// Key has no more than its first bytes.
type HotKey struct {
	Database, Key string  // as operators call it; bytes of its name
	Share, Least  float64 // 0 to 1
}

// HotKeys are those that are used most, the most used one first; none unless [Options].HotKeys says so.
func (g *Gateway) HotKeys() (all []HotKey) {
	for _, k := range g.hot.All() {
		all = append(all, HotKey{g.label(int(k.Group)), k.Key, k.Share, k.Least})
	}
	return all
}

// CommandCost is what a command has taken since the Gateway began.
type CommandCost struct {
	Name          string        // lower case, "config|get"
	Calls, Failed uint64        // failed ones are calls, too
	Took          time.Duration // all of them together
}

// Costs are the commands that have been called, the one that took most time in all first.
// Costs may be called at any time. Its numbers are read one after the other, while commands go on.
func (g *Gateway) Costs() []CommandCost {
	var all []CommandCost
	for _, cmd := range commandsByID {
		s := &g.m.commands[cmd.ID]
		failed := s.failed.Load()
		if n := s.ok.Load() + failed; n > 0 {
			all = append(all, CommandCost{cmd.Name, n, failed, time.Duration(s.nanos.Load())})
		}
	}
	ordered.Sort(all, func(a, b CommandCost) int {
		return cmp.Or(cmp.Compare(b.Took, a.Took), cmp.Compare(a.Name, b.Name))
	})
	return all
}
