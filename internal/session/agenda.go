// Package session is one session's side of the control path: what it must ask of its directory and of memory nodes,
// and when. It is a pure machine, an [Agenda] above an engine.Core. The client performs it with goroutines and the
// simulator as choices. The data path is internal/engine.
//
// Start with [Agenda]. Its methods may be called concurrently; it owns no buffers, and a
// request that it has given belongs to the goroutine that performs it. The form is that of server/lead: a
// machine whose time and whose answers come from outside.
package session

import (
	"math"
	"sync"
	"sync/atomic"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/rdma"
)

// Agenda is what a session must ask, and when. It asks its directory for renewals of its lease, with which it
// acknowledges maps and hands memory back. It also asks the directory for grants of memory, whether other sessions
// are fenced, and for splits. It asks memory nodes for connections. It is a machine without I/O, clocks or
// goroutines, in the manner of server/lead. Lanes say what they miss: its methods Want… are most of an
// engine.Control. [Agenda.Due] gives what is to be asked now. Its caller calls [Agenda.Answer] once with what came
// of it, which tells the lanes. [Agenda.Next] is when to look again. The client performs it with goroutines, the
// simulator as choices.
//
// Memory goes home by these rules (docs/protocol.md, "Memory goes home"):
//
//   - A session forgets what a request hands back before it sends the request. It never puts that back, whatever
//     becomes of the request.
//   - Renewals are numbered, and only the reply to the latest one brings places, once.
//   - A map is acknowledged by a renewal and nowhere else. It is not acknowledged while a grant is under way that
//     was asked for under an older one.
//
// Its methods may be called concurrently.
type Agenda struct {
	core *engine.Core  // set by NewAgenda
	o    AgendaOptions // set by NewAgenda

	// All state is under its mutex; times are Options.Nanos of core.
	mu struct {
		sync.Mutex
		term uint64 // the greatest that the directory has shown; set by the reply to the latest renewal

		// The latest that a renewal's reply has brought, and its name; those of the opening before that.
		token       []byte // as in Token
		tokenNumber uint64

		// Renewals. A renewal's start writes what it tells, the latest one's answer the rest.
		renewing bool   // one is under way, so that no other begins; see Again
		number   uint64 // of the latest renewal, also Core's count of them
		next     int64  // when one is due anyway
		sent     int64  // when the one was sent that was answered last
		busy     bool   // operations were performed since the last one
		wasBusy  bool   // and before it
		awaits   uint64 // number of the renewal that was answered and said last that places are in limbo
		hurry    bool   // one is due at once
		called   bool   // somebody waits for what the session reports
		told     acks   // what the last one said; zero if it failed
		ackAt    int64  // when what is not acknowledged is looked at again, 0: never
		ackPause int64  // before the look after that; doubles from ackPause to Renew, anew with each map
		backlog  bool   // the last one could not take all that is to go

		// By what memory nodes are reached, and what the leadership of pathsTerm was told of it. Both are replaced,
		// never changed.
		paths, pathsTold *dirpb.ClientPaths
		pathsTerm        uint64

		// Grants. A placement group in grants has none asked for beside that.
		wants  map[uint32]uint32         // by placement group: units of the largest place missed; 0: none yet
		grants map[uint32]*grant         // under way, by placement group
		early  []*dirpb.GrantExtentReply // granted under a map that the session does not have yet
		ending bool                      // no more grants are asked for
		unsure bool                      // more may have been granted than was taken in
		pgs    map[uint32]*agendaPG      // by placement group; made when first needed, never dropped
		held   int64                     // when it was told what the session holds; 0: it is to be told

		// Lanes ask these questions, kept until answered and a pause is over, and miss these connections.
		fences map[uint32]*question // whether a session is fenced, by its id
		splits map[uint32]*question // by shard
		links  map[end]*link        // connections that are missed
		lately map[end]lately       // those that were dialed last
	}
	handedBack, returned, received, refused atomic.Uint64 // units, as in Counts; only grow
}

// AgendaOptions configure an Agenda; durations in nanoseconds.
type AgendaOptions struct {
	// Renew is the time between two renewals.
	Renew int64
	// Term is the directory's at the opening of the session.
	Term uint64
	// RefusedPause is how soon a grant is asked for again that found nothing. FencePause and
	// SplitPause are how soon it is asked again whether a session is fenced, and for a split,
	// once there was an answer.
	RefusedPause, FencePause, SplitPause int64
	// DialPause is how soon a connection is dialed again the first time; from then on the
	// pause doubles, up to DialPauseMost. DownPause is how long a lane waits for a memory node
	// that the map does not have up before it learns so.
	DialPause, DialPauseMost, DownPause int64
	// ReadOnly: it needs no memory.
	ReadOnly bool
	// Token opens connections to memory nodes, TokenNumber is the directory's name for it: those that the session was
	// opened with.
	Token       []byte
	TokenNumber uint64
}

// AskKind is what an Ask is about.
type AskKind uint8

const (
	AskRenew  AskKind = 1 + iota // a renewal of the lease
	AskGrant                     // memory
	AskFence                     // whether a session is fenced
	AskSplit                     // a shard to be split
	AskHangup                    // a queue pair to be closed that a lane gives up
	AskDial                      // a queue pair to be connected
)

// Ask is one request: to the directory, or, of the last two kinds, to a memory node.
type Ask struct {
	Kind  AskKind
	Renew *dirpb.RenewRequest // AskRenew
	// Within is how long a renewal may take, in nanoseconds, before it is given up and another
	// one is tried.
	Within int64
	Grant  *dirpb.GrantExtentRequest  // AskGrant
	Ahead  bool                       // AskGrant: no operation misses it yet
	Fence  *dirpb.SessionStateRequest // AskFence
	Split  *dirpb.RequestSplitRequest // AskSplit

	Lane        *engine.Lane // AskHangup, AskDial: whose connection
	Node        uint32       // AskHangup, AskDial: and to which memory node
	Bulk        bool         // AskHangup, AskDial: it is the lane's second one
	QP          *rdma.QP     // AskHangup: to be closed; the performer's until the answer
	Incarnation uint64       // AskHangup: of the memory node that QP reaches
	Version     uint64       // AskHangup: of the map when QP was attached

	grant *grant
}

// Reply is what came of an Ask: of its kind, or Err.
type Reply struct {
	Renew *dirpb.RenewReply
	Grant *dirpb.GrantExtentReply
	Fence *dirpb.SessionStateReply
	Split *dirpb.RequestSplitReply

	QP          *rdma.QP // AskDial: connected; the lane's from now on
	Dev         int      // AskDial: the index of QP's device
	Endpoint    string   // AskDial: the name of the memory node's endpoint that it reaches
	Incarnation uint64   // AskDial: of the memory node that QP reaches

	Err error
	// Lost says that Err will not be otherwise: the connection cannot be had (AskDial).
	Lost bool
	// Sent is when the request that was answered was sent (Options.Nanos).
	Sent int64
}

type agendaPG struct {
	grow     uint32 // units to ask for next
	notUntil int64  // no grant is asked for before
	notAhead int64  // nor ahead
	paced    sample // when pace was counted
	pace     uint64 // units taken in about the time between two renewals
	samples  [4]sample
	own      int64  // when own memory was last looked at for what is too much
	lacked   uint32 // units of the largest place that was missed lately, and when
	lackedAt int64
	told     *dirpb.Held
}

// NewAgenda makes the agenda of a session that was just opened.
func NewAgenda(c *engine.Core, o AgendaOptions) *Agenda {
	a := &Agenda{core: c, o: o}
	a.mu.term, a.mu.token, a.mu.tokenNumber = o.Term, o.Token, o.TokenNumber
	a.mu.ackPause = ackPause
	a.mu.wants, a.mu.grants, a.mu.pgs = map[uint32]uint32{}, map[uint32]*grant{}, map[uint32]*agendaPG{}
	a.mu.fences, a.mu.splits, a.mu.links = map[uint32]*question{}, map[uint32]*question{}, map[end]*link{}
	a.mu.lately = map[end]lately{}
	a.mu.next = c.Nanos() + o.Renew
	return a
}

// Due gives what is to be asked now, each to be answered once; see DueWants and
// DueRenewal.
func (a *Agenda) Due(oldest func() (epoch uint64, ok bool)) []Ask {
	asks := a.DueWants()
	if q, ok := a.DueRenewal(oldest); ok {
		asks = append(asks, q)
	}
	return asks
}

// DueWants gives what is to be asked now because lanes miss it. Its order is fixed:
//
//   - grants of memory, one of a placement group at a time
//   - questions about sessions, one of a session
//   - splits, one of a shard
//   - hang-ups and dials, one of a lane's connection to a memory node
func (a *Agenda) DueWants() (asks []Ask) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.core.Nanos()
	a.takeEarly()
	for _, pg := range ordered.Keys(a.mu.wants) {
		if q, ok := a.grantDue(pg, now); ok {
			asks = append(asks, q)
		}
	}
	asks = append(asks, a.fencesDue(now)...)
	asks = append(asks, a.splitsDue(now)...)
	return append(asks, a.linksDue(now)...)
}

// Token is what opens a connection to a memory node now: the latest that the directory has given. It is not to be
// changed. A dial that is refused is to be tried again with what Token gives then, as keys are replaced.
func (a *Agenda) Token() []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.token
}

// Next is when something is due if nothing happens before (Options.Nanos).
func (a *Agenda) Next() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	next := int64(math.MaxInt64)
	if !a.mu.renewing {
		next = a.mu.next
		if at := a.mu.ackAt; at != 0 {
			next = min(next, at)
		}
	}
	for pg := range a.mu.wants {
		if p := a.mu.pgs[pg]; p != nil && a.askable(pg) {
			next = min(next, p.notUntil)
		}
	}
	return min(next, a.questionsNext(), a.linksNext())
}

// Answer takes what came of q, once, from whatever goroutine has performed it. Lanes hear of it by Deliver.
func (a *Agenda) Answer(q Ask, r Reply) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch now := a.core.Nanos(); q.Kind {
	case AskRenew:
		a.renewed(q, r, now)
	case AskGrant:
		a.granted(q, r, now)
	case AskFence:
		a.fenceAnswered(q, r, now)
	case AskSplit:
		a.splitAnswered(q, r, now)
	case AskHangup:
		a.hungUp(q)
	case AskDial:
		a.dialed(q, r, now)
	}
}

func (a *Agenda) pg(id uint32) *agendaPG {
	p := a.mu.pgs[id]
	if p == nil {
		p = &agendaPG{}
		a.mu.pgs[id] = p
	}
	return p
}
