package fsm

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// Level is the latest level. A level says which commands there are and what each of them does. So directory
// nodes of different versions, which apply the same log, reach the same state. A state has the level of the
// version that made it until its leader raises it. The leader does so when every directory node runs a
// version that knows the next one. Then none of an earlier version can take part any more.
//
//	0  the first: memory nodes without boots; 4,096 sessions, each with a discriminator of its own
//	1  memory nodes that keep their memory: the command PauseNode, and what RegisterNode, NodeDown and PublishRegion
//	   say of boots and nonces; 65,536 sessions, and discriminators for those alone that may write; the commands Rebalance, Reign, Recover and
//	   LoseMembers; placement groups that start over elsewhere (Spares), and sessions that are fenced where their namespace has memory
//	   alone; namespaces of some memory nodes; directory nodes enter with the incarnation of their data folder
//	2  namespaces say how long a value may be, and new ones have chunks that fill places of 2 MiB
//	3  caches say how much of them may be pinned
//	4  volumes of tier nodes, the commands KeepVolume, SilenceVolume and GiveUpVolume; namespaces that have a tier, and
//	   sessions that say that they know stubs
//
// A change of what a command does, or of what a state may hold, belongs to a level above those that have been
// released. The code asks Level, as it does for levelBoots, and goes the old way below. The rows of each
// level stay readable until a release says that it takes over none of that level (oldestLevel).
const (
	Level       = levelTiers
	oldestLevel = 0

	levelBoots = 1
	levelLong  = 2
	levelPins  = 3
	levelTiers = 4
)

// ErrLevel says that a state or a command is of a level that this version does not know. Nothing was changed.
var ErrLevel = errors.New("this version of kvd does not know the directory's level")

// levelKey is the key of the row of the level. A version that knows no levels refuses the row and prints its key.
const levelKey = string(rowLevel) + "evel of a later version of kvd, which alone can use this data folder"

// Level is the level of the state: that of its latest command Init or Raise.
func (s *State) Level() uint32 { return s.level.GetLevel() }

// KnowsBoots reports whether the state's level has memory nodes with boots.
func (s *State) KnowsBoots() bool { return s.Level() >= levelBoots }

// KnowsLong reports whether the state's level has namespaces that say how long a value may be.
func (s *State) KnowsLong() bool { return s.Level() >= levelLong }

// KnowsTiers reports whether the state's level has tier nodes.
func (s *State) KnowsTiers() bool { return s.Level() >= levelTiers }

func checkLevel(l *fsmpb.Level) error { return levelWithin(l, oldestLevel, Level) }

func levelWithin(l *fsmpb.Level, oldest, latest uint32) error {
	by := l.GetVersion()
	if by == "" {
		by = "a version that knows no levels"
	}
	switch n := l.GetLevel(); {
	case n > latest:
		return fmt.Errorf("%w: level %d, to which kvd %s raised it, and this version knows levels up to %d: run kvd "+
			"%[3]s or a later one",
			ErrLevel, n, by, latest)
	case n < oldest:
		return fmt.Errorf("%w: level %d, of %s, and this version takes over none below %d: run a version in between "+
			"first",
			ErrLevel, n, by, oldest)
	}
	return CheckText("version", l.GetVersion())
}

func (s *State) raise(c *fsmpb.Level) error {
	if err := checkLevel(c); err != nil {
		return err
	}
	if c.GetLevel() <= s.Level() {
		return fmt.Errorf("%w: the directory is at level %d, and was to be raised to %d", ErrRefused, s.Level(),
			c.GetLevel())
	}
	s.putLevel(c)
	return nil
}

func (s *State) putLevel(l *fsmpb.Level) {
	if s.level = l; s.Level() > 0 {
		s.mark(levelKey, l)
	} else {
		s.mark(levelKey, nil)
	}
	s.takeLevel()
}

// takeLevel brings what follows from the level in line with it.
func (s *State) takeLevel() {
	s.roster.readersToo = !s.KnowsBoots()
	clear(s.roster.discriminators)
	for _, x := range s.sessions {
		if s.roster.hasDiscriminator(x) {
			s.roster.discriminators[x.Discriminator] = true
		}
	}
}

// loadLevel takes the level from the rows of a state. Rows without one are of level 0; a state without rows is yet to
// begin.
func (s *State) loadLevel(rows []Row) error {
	if len(rows) == 0 {
		return nil
	}
	s.level = &fsmpb.Level{}
	for _, r := range rows {
		if len(r.Key) == 0 || r.Key[0] != rowLevel {
			continue
		}
		if err := proto.Unmarshal(r.Value, s.level); err != nil {
			return fmt.Errorf("corrupt state row %q: %w", r.Key, err)
		}
		if string(r.Key) != levelKey || s.Level() == 0 {
			return fmt.Errorf("corrupt state row %q: level %d", r.Key, s.Level())
		}
	}
	if err := checkLevel(s.level); err != nil {
		return err
	}
	s.takeLevel()
	return nil
}

// mostSessions is how many sessions there may be that are not yet fenced.
func (s *State) mostSessions() int {
	if !s.KnowsBoots() {
		return MaxWriters
	}
	return MaxSessions
}

// asOfLevel returns a registration as the state's level knows it.
func (s *State) asOfLevel(c *dirpb.RegisterNodeRequest) *dirpb.RegisterNodeRequest {
	if s.KnowsBoots() {
		return c
	}
	c = proto.CloneOf(c)
	c.Boot, c.Keeps, c.Version, c.Control = 0, false, "", ""
	c.Retained, c.Nonce, c.After = nil, 0, nil
	return c
}

// bootAsOfLevel returns a boot as the state's level knows it.
func (s *State) bootAsOfLevel(boot uint64) uint64 {
	if s.KnowsBoots() {
		return boot
	}
	return 0
}
