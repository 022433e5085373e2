package lead

import (
	"time"

	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// Memory goes home. A session that unlinks a record in memory that another one was granted
// hands the place back in a renewal; it waits here, in the queue of its home, for that
// one's next renewal, with the ver of its next life. The queues are the leader's alone:
// they die with its term, and what was in them is lost until it is counted. A place
// without a home, and own memory that a session gives up, become free runs by a command
// (TakeBack). docs/protocol.md, "Memory goes home", has the rules H1 to H8.

const (
	// shortFor is how long a placement group counts as short after a grant found too little.
	shortFor = 3 * time.Second
	// gather is how long what comes back is collected before a command makes it free, if
	// nobody waits for it.
	gather = 250 * time.Millisecond
	// accountEvery is the least time between two looks at all accounts.
	accountEvery = 250 * time.Millisecond
	// lostWindow is how long memory must count as lost without a break before it is
	// believed: sessions' reports are up to a second old.
	lostWindow = 4 * time.Second

	maxDelivered = 1 << 15 // places in one reply
	maxHandBacks = 1 << 16 // places taken of one renewal
	maxReturns   = 1 << 12 // runs taken of one renewal
	maxQueue     = 1 << 20 // places that wait for one home, and runs of one placement group for a TakeBack
	maxNet       = 1 << 48 // units that a session may say it has linked, net
	maxBacks     = 1 << 13 // runs in one TakeBack

	// floorUnits is what a session may always keep free of a placement group if there is
	// room (16 MiB), floorShort if there is not (1 MiB); both are cut to a part of it.
	floorUnits = 1 << 18
	floorShort = 1 << 14

	// A recall is worth it from so many units of one extent on: if nobody lacks memory,
	// and if somebody does.
	gainUnits      = layout.ExtentUnits / 8
	gainUnitsShort = layout.ExtentUnits / 64

	// retryShort is how soon a count that found nothing is repeated while memory is short,
	// at first and at last.
	retryShort, retryShortMost = time.Second, time.Minute
	// retryPieces is the most if enough is free, in pieces.
	retryPieces = 4 * time.Second
	// retryDoubted is the longest time between two counts for which writers wait because the last one is
	// in doubt: if sessions link so much that each count is, some will be told that memory is full.
	retryDoubted = 4 * time.Second
)

// place is a free place, past limbo.
type place struct {
	pg, generation, unit, units uint32
	ver                         uint16 // of its next life
	mark                        uint64 // fsm.Heap.RecallSeq when it was accepted
	after                       uint64 // it is in limbo until the least reclaim epoch in use is as great
}

// memory is what the leader knows of a placement group's memory.
type memory struct {
	generation uint32
	backs      []*fsmpb.Back // to be proposed
	since      time.Duration // of the oldest

	// Linked units are base + what the sessions that are open say they have linked, net.
	base  int64
	known bool // base is counted, not guessed
	// A count takes time, and sessions say what they have linked about once a second: base is wrong by
	// what they linked and unlinked between the last word before the count and the first one after it.
	// doubt is how much that is, by as many sessions as have spoken since; began and unsaid are what
	// sessions had said when the count began, the former while it goes on, the latter of those that have
	// not spoken since.
	doubt         uint64
	began, unsaid map[uint32]int64

	shortAt    time.Duration // 0: never
	shortSince time.Duration // when it began
	need       uint32        // the largest place that was not had while short

	window   uint64        // units of the stretch that was to be emptied last
	windowIn int64         // in this extent
	windowAt time.Duration // when
	piecesAt time.Duration // since when enough has been free, in pieces; 0: it is not
	counted  time.Duration // when a count was begun last
	claim    uint64        // what counted as lost for some time when it was begun
	retry    time.Duration // between two while memory is short
	relief   uint64        // Leader.relief, as of
	reliefAt time.Duration // 0: never looked

	account Account
	demotes bool          // tier nodes are to make room; see TierBudgets
	low     [2]uint64     // least lost of this window and of the one before
	lowAt   time.Duration // when this window began
}

// Account is how a placement group's memory is used, in units; see dirpb.PGUsage.
type Account struct {
	Heap, Granted, Recalled                  uint64
	Room, Waiting                            uint64 // not granted: may be now, and after some reclaim epochs
	Live, Free, Foreign, Limbo, Coming, Lost uint64
	Short                                    bool
}

// inherit notes what an earlier leader knew and this one does not.
func (l *Leader) inherit(s *fsm.State) {
	for _, u := range s.Usage() {
		if u.GrantedUnits > 0 {
			l.memory(s, u.PgId).known = false
		}
	}
}

func (l *Leader) memory(s *fsm.State, pg uint32) *memory {
	m, g := l.memories[pg], s.PG(pg).GetGeneration()
	if m == nil || m.generation != g {
		m = &memory{generation: g, known: true, retry: retryShort}
		l.memories[pg] = m
	}
	return m
}
