// Package lead is what the directory's leader knows and does not replicate, and what it decides from that. It
// has leases of memory nodes and sessions, what sessions reported and acknowledged, and the reclaim epoch E.
// It has the progress of background jobs, and which command is due.
//
// It leaves to others how a command becomes part of the state (package server, by
// raft; the simulator, directly) and what it then does (server/fsm). Time is a
// parameter: a duration since any moment that stays the same for one Leader.
// Nothing here waits, logs or draws a random number, and the same calls give the same
// answers.
//
// Start with [Leader] and [Leader.Plan]. A Leader is not safe for concurrent use. A new
// one begins with every term that a directory node leads, and ends with it.
//
// Leases that only the leader keeps are etcd's lessor. A planner that looks at the whole state and proposes
// the next step, again and again, is TiKV's placement driver and Kubernetes' controllers.
package lead

import (
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/invariants"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// maxPause bounds how long a placement group is left alone after a command for it was
// refused, however long the lease.
const maxPause = time.Second

// Options of a Leader. All are required, except that a ScrubInterval of 0 means
// that nothing is scrubbed unless an operator asks, and that BalanceUnits has a default.
type Options struct {
	// Lease is how long a session or a memory node lives without being heard.
	Lease time.Duration
	// LastCopyLeases is how many leases a memory node may be silent that holds the
	// only copy of something and does not keep its memory.
	LastCopyLeases int
	// LastCopyWait is how long one may be silent that keeps it; 0: for ever.
	LastCopyWait time.Duration
	// EpochInterval is the least time between two reclaim epochs.
	EpochInterval time.Duration
	// EpochBlock is how many reclaim epochs are reserved at once. The next block is
	// asked for when half of one is left.
	EpochBlock uint64
	// ScrubInterval is the least time between two automatic counts of what is linked in
	// one placement group if nobody lacks memory.
	ScrubInterval time.Duration
	// Term is the leadership's, which is the only one that renewals with it are for.
	Term uint64
	// BalanceUnits is the smallest heap, in units, of a placement group that shards leave by
	// themselves when it is fuller than others. Default 16 MiB: in less, one record is
	// too large a part of the whole.
	BalanceUnits uint64
}

// Leader is the judgement of one leadership.
//
// The reclaim epoch. E starts at the ceiling that earlier leaders reserved, so
// it never goes backward, and stays at or below what this one has reserved. A session counts with
// its last report to this leader, or its E at open until it reports; a report never
// decreases. So the minimum is at most every session's true value, and grows during a
// leadership. A session whose OpenSession has not been answered yet has begun
// nothing: it counts with E until the E of its reply takes that place.
//
// Acknowledgements. A session has quiesced at map version v when no verb that it posted under an older map is
// under way. It has acknowledged v when no operation that it began under an older one is in flight; the
// second implies the first. Freezes end, and survivors are synced, once all sessions of the namespace have
// quiesced. Every other job, and every voluntary change of a placement group, waits until all have
// acknowledged. A session being fenced holds both back until it is fenced, whatever it said before. A session
// that is opened has acknowledged the version it was opened with. A new leader knows of no acknowledgement;
// the next renewals tell it.
type Leader struct {
	// Its methods alone write what is here, under the caller's lock. Times count from an origin of the caller's.
	opts     Options       // set by New
	began    time.Duration // New
	planned  time.Duration // the last Plan
	epoch    uint64        // E, at most the state's ceiling; only grows
	advanced time.Duration // when the reclaim epoch last grew
	awaited  uint64        // somebody waits until every session reports more, or did
	first    uint64        // the least that was awaited since everybody had reported enough
	rushed   uint64        // the latest reclaim epoch for which sessions are called, as one is crowded
	rushing  bool          // they are to be called

	nodes    map[uint32]*node // of memory nodes, by id; Plan drops those that are gone
	sessions sessions         // see roll.go for its books
	jobs     map[uint32]*job  // how far jobs are, by id; those of which a janitor has told

	// Books of the sessions, which follow from these; see roll.go.
	reports tally               // of reclaim epochs, by all sessions
	votes   map[uint32]*votes   // by namespace
	leases  leases              // in the order in which they run out
	resting map[uint32]*session // those that are quiet
	writers map[uint32]*session // those that may hold memory, of which there are at most fsm.MaxWriters
	changes uint64              // of sessions that the state has had and the books show
	changed []uint32            // sessions of these at which Plan has not looked
	routed  bool                // places wait for sessions that Calls has not looked at

	paused map[uint32]time.Duration // by placement group: no voluntary change before

	// Jobs that operators and scrubs asked for and that have not begun. The next leader does not know of them.
	queue []*fsmpb.StartJob
	spent map[uint32]bool // namespaces whose rebalance ends: a step of it was refused

	extended map[uint32]time.Duration // by namespace: when it was last spread over more memory nodes

	memories   map[uint32]*memory // by placement group
	accounted  time.Duration      // when they were worked out last; 0: they are to be
	shortUntil time.Duration      // no placement group is short any more then, unless somebody says so
	hasty      bool               // E runs, since somebody waits for memory that waits for it
	// By placement group. The next leader knows none of it, and waits a lease before it
	// balances.
	worked map[uint32]time.Duration // when something last worked on it
	frozen map[uint32]time.Duration // since when it has been
	took   map[uint32]took          // what balancing last gave it
	eased  time.Duration            // when Plan last looked for moves
	rests  map[uint32]time.Duration // by namespace: until when none of its placement groups begins to swap members
	// By placement group: when a SETTLE job was last there, as long as another one is due.
	settling map[uint32]time.Duration

	troubles map[uint32]trouble  // by memory node: why no process of it comes up, as its keeper said last
	stays    map[uint32]string   // likewise: why its process was not replaced
	volumes  map[uint32]*volume  // of tier nodes, by id; Plan drops those that are gone
	rivals   map[uint32]*rival   // likewise: who asked for its name beside its owner
	arrivals map[string]*arrival // by the name of the memory node, while it registers
	vouchers vouchers            // by which Trusted judges

	signs  uint32 // generation of the key that signs tokens, as it was worked out last
	called uint32 // the same, when Calls looked at all that rest
}

type node struct {
	incarnation uint64
	expires     time.Duration
	stats       *dirpb.NodeStats
	// The latest key whose tokens it takes, by its generation; 0: it has not said so to this leader.
	keyGeneration uint32
	// When this leader saw that it leaves, and the map then; 0: it does not.
	leaves  time.Duration
	leavesV uint64
	// When this leader saw that its process is being replaced, and for how long heartbeats are not expected then;
	// 0: it is not.
	paused, pause time.Duration
	// beat numbers its heartbeats, and broken says that the latest was broken off by its end, at broke.
	beat   uint64
	broken bool
	broke  time.Duration
}

// due is until when the memory node may be silent.
func (x *node) due() time.Duration {
	if x.pause == 0 {
		return x.expires
	}
	return max(x.expires, x.paused+x.pause)
}

// session is laid out so that a renewal of one that nothing special happens to touches its first 128 bytes alone.
type session struct {
	id         uint32
	namespace  uint32 // whose memory it may hand back
	expired    bool   // given up; no renewal revives it
	readOnly   bool   // it hands none back
	tokenKnown bool   // it has said so to this leader, or was given it by this one
	leased     bool   // it is in Leader.leases
	votes      bool   // it is in Leader.votes, so it lives
	quiet      bool   // it was let be, and was not called since
	crowded    bool   // it said so last

	expires  time.Duration
	heard    time.Duration
	number   uint64 // of the last renewal that was heeded
	report   uint64
	acked    uint64 // map version
	quiesced uint64 // map version, at least acked
	token    uint64 // number of the one that it shows, 0 for none

	before, behind *session // in Leader.leases

	queue []place                // on their way to it, which is their home
	give  map[uint32]uint64      // units that it is asked to hand over
	held  map[uint32]*dirpb.Held // as it said last, by placement group
	told  time.Duration          // when it said so

	// Its last words (Leader.Closing).
	back []*dirpb.FreePlaces
	last []*dirpb.Held

	paths *dirpb.ClientPaths // as it said last; never changed
}

func newSession(x *fsmpb.Session, report uint64) *session {
	return &session{id: x.GetId(), report: report, namespace: x.GetNamespaceId(), readOnly: x.GetReadOnly()}
}

// job is what janitors said about a background job.
type job struct {
	done, total uint64
	trouble     string
	pause       time.Duration // after the next trouble
	retry       time.Duration // not handed out before
}

// New begins a leadership. Everyone gets a full lease: nobody could be heard during the
// election.
func New(o Options, s *fsm.State, now time.Duration) *Leader {
	l := &Leader{
		opts: o, began: now, planned: now, epoch: s.Meta().EpochCeiling, advanced: now,
		nodes: make(map[uint32]*node), jobs: make(map[uint32]*job),
		votes: make(map[uint32]*votes), resting: make(map[uint32]*session), writers: make(map[uint32]*session),
		paused: make(map[uint32]time.Duration),
		spent:  make(map[uint32]bool), extended: make(map[uint32]time.Duration), memories: make(map[uint32]*memory),
		worked: make(map[uint32]time.Duration), frozen: make(map[uint32]time.Duration),
		rests: make(map[uint32]time.Duration), took: make(map[uint32]took), settling: make(map[uint32]time.Duration),
		troubles: make(map[uint32]trouble), rivals: make(map[uint32]*rival), stays: make(map[uint32]string),
		volumes:  make(map[uint32]*volume),
		arrivals: make(map[string]*arrival),
		vouchers: vouchers{heard: make(map[uint32]bool), ahead: make(map[string]*dirpb.Position)},
	}
	if o.BalanceUnits == 0 {
		l.opts.BalanceUnits = defaultBalanceUnits
	}
	for _, m := range s.Nodes() {
		l.nodes[m.Id] = &node{incarnation: m.Incarnation, expires: now + o.Lease}
	}
	for _, x := range s.Sessions() {
		l.enterSession(s, newSession(x, x.Epoch), now)
	}
	_, l.changes, _ = s.ChangedSessions(0)
	l.inherit(s)
	return l
}

// Epochs returns the reclaim epoch E and the minimum.
func (l *Leader) Epochs() (epoch, least uint64) {
	return l.epoch, min(l.epoch, l.reports.least(l.epoch))
}

// Opened answers the opening of a session, which begins with s's map version.
func (l *Leader) Opened(s *fsm.State, id uint32, now time.Duration) (epoch, least uint64, err error) {
	if old := l.sessions.of(id); old != nil && old.expired || s.Life(id) != dirpb.SessionLife_SESSION_LIVE {
		return 0, 0, fmt.Errorf("%w: session %d ran out before it could be answered; open another", fsm.ErrUnavailable,
			id)
	}
	v := s.MapVersion()
	x := newSession(s.Session(id), l.epoch)
	x.acked, x.quiesced = v, v
	l.enterSession(s, x, now)
	epoch, least = l.Epochs()
	return epoch, least, nil
}

// Renewal is what a session tells; see dirpb.RenewRequest.
type Renewal struct {
	Session         uint32
	Report          uint64
	Acked, Quiesced uint64 // map versions
	Number, Term    uint64
	HandBacks       []*dirpb.FreePlaces
	Returns         []*dirpb.ReturnedRun
	Held            []*dirpb.Held
	InLimbo         bool
	Crowded         bool   // much of its memory is in limbo; see rush
	Token           uint64 // number of the one that it shows; see TokenNumber
	// Callable: the session hears when somebody waits for it, so it may be let be quiet.
	Callable bool
	Paths    *dirpb.ClientPaths // replaces what the session said before, which nil leaves as it is
}

// Answer is the reply to a Renewal.
type Answer struct {
	Epoch, Least uint64
	// Moved says that the session acknowledged, or quiesced, something new, so that Plan may find something to do.
	// Returned says that it handed memory back that TakeBack may propose.
	// Calls says that sessions are to be called without delay; see Leader.Calls.
	Moved, Returned, Calls bool
	Deliveries             []*dirpb.FreePlaces
	Supply                 []*dirpb.Supply
	// Quiet is how long the session may be silent, 0: not longer than usual.
	Quiet time.Duration
}

// Renew extends a session's lease and heeds the rest of its latest renewal. A renewal that arrives behind a
// later one extends the lease and nothing else.
func (l *Leader) Renew(s *fsm.State, now time.Duration, r Renewal) (a Answer, err error) {
	l.catchUp(s)
	x := l.sessions.of(r.Session)
	if x == nil || x.expired || !x.votes {
		return a, fmt.Errorf("session %d is fenced, being fenced, or was never opened: %w", r.Session, fsm.ErrNotFound)
	}
	if r.Report > l.epoch {
		return a, fmt.Errorf("%w: session %d reports reclaim epoch %d, but it is %d", fsm.ErrInvalid, r.Session,
			r.Report, l.epoch)
	}
	if invariants.On {
		l.check(s)
		defer l.check(s)
	}
	l.heard(x, now)
	if r.Number <= x.number {
		a.Epoch, a.Least = l.Epochs()
		return a, nil
	}
	x.number = r.Number
	x.token, x.tokenKnown = r.Token, true
	l.reported(x, max(x.report, r.Report))
	// A follower may have shown a version before this node applied it.
	acked := max(x.acked, min(r.Acked, s.MapVersion()))
	quiesced := max(x.quiesced, acked, min(r.Quiesced, s.MapVersion()))
	a.Moved = acked > x.acked || quiesced > x.quiesced
	l.acknowledged(x, acked, quiesced)
	if r.Term == l.opts.Term {
		l.handBack(s, now, r.Session, x, r.HandBacks, 0)
		l.giveUp(s, now, r.Session, r.Returns)
		a.Returned = len(r.HandBacks)+len(r.Returns) > 0
	}
	if l.hold(s, r.Session, x, r.Held); len(r.Held) > 0 {
		x.told = now
	}
	if x.crowded = r.Crowded; r.Crowded {
		a.Calls = l.rush(s, now)
	}
	if r.Paths != nil {
		x.paths = r.Paths
	}
	a.Epoch, a.Least = l.Epochs()
	a.Deliveries = x.deliver(s, r.Session, a.Least)
	a.Supply = l.supply(s, now, x, x.namespace, len(r.Held) > 0)
	if r.InLimbo {
		l.await(a.Epoch)
	}
	a.Quiet = l.quiet(now, x, a.Moved, r.Callable)
	return a, nil
}

// Heard extends a session's lease as a renewal does that says nothing new.
func (l *Leader) Heard(s *fsm.State, now time.Duration, id uint32) {
	if x := l.sessions.of(id); x != nil && !x.expired && s.Life(id) == dirpb.SessionLife_SESSION_LIVE {
		l.heard(x, now)
	}
}

// Closing notes a session's last words before its end becomes part of the state. They say which of others' memory it
// hands back, and what it holds. A plan may be the first to see the end. Without words a session takes its last ones
// back: it has not ended by itself.
func (l *Leader) Closing(id uint32, back []*dirpb.FreePlaces, held []*dirpb.Held) {
	if x := l.sessions.of(id); x != nil { // else its memory is lost until it is counted
		x.back, x.last = back, held
	}
}

// Closed forgets a session that has ended by itself, once that is part of the state, and heeds its last words.
func (l *Leader) Closed(s *fsm.State, now time.Duration, id uint32) { l.ended(s, now, id) }

// Acknowledged is what a session has acknowledged and quiesced, as this leader knows.
func (l *Leader) Acknowledged(id uint32) (acked, quiesced uint64, ok bool) {
	x := l.sessions.of(id)
	if x == nil {
		return 0, 0, false
	}
	return x.acked, x.quiesced, true
}

// Report is the reclaim epoch that a session counts with, if this leader knows it.
func (l *Leader) Report(id uint32) (epoch uint64, ok bool) {
	x := l.sessions.of(id)
	if x == nil {
		return 0, false
	}
	return x.report, true
}

// Paths are by what a session reaches memory nodes, as it said last to this leader; nil: it has not.
func (l *Leader) Paths(id uint32) *dirpb.ClientPaths {
	if x := l.sessions.of(id); x != nil {
		return x.paths
	}
	return nil
}

// Advance moves the reclaim epoch on while anybody has use for it. That is a session, or an extent whose
// recall waits for a reclaim epoch to pass. It goes on by the number of intervals since it did so last: a
// leader looks rarely while nothing happens.
//
// E runs while somebody waits for memory that was handed back and waits for reclaim epochs to pass. All the
// reclaim epochs of a reuse then take reuseHaste. That is safe, since nothing counts them but by what every
// session has reported. It costs remembered words, which grow too old.
func (l *Leader) Advance(s *fsm.State, now time.Duration) {
	if !l.needsEpochs(s) || l.epoch >= s.Meta().EpochCeiling {
		l.advanced = now
		return
	}
	n, since := uint64(0), now-l.advanced
	switch every := l.opts.EpochInterval; {
	case every == 0:
		n = 1
	case l.hasty:
		n = uint64(max(fsm.ReuseEpochs*since/reuseHaste, since/every))
	default:
		n = uint64(since / every)
	}
	if n = min(n, fsm.ReuseEpochs); n > 0 {
		l.Run(s, n)
		l.advanced = now
	}
}

// Run moves the reclaim epoch on by up to n, and to the last reserved one at most.
func (l *Leader) Run(s *fsm.State, n uint64) {
	l.epoch = max(l.epoch, min(l.epoch+n, s.Meta().EpochCeiling))
}

// reuseHaste is how long memory waits that somebody waits for.
const reuseHaste = time.Second

func (l *Leader) needsEpochs(s *fsm.State) bool {
	return l.sessions.n > 0 || slices.ContainsFunc(s.PGs(0), func(pg *dirpb.PlacementGroup) bool {
		return len(pg.Recalled) > 0
	})
}

// Heartbeat extends a memory node's lease; false means that this process of it is not
// part of the state. Nil stats say nothing new.
func (l *Leader) Heartbeat(s *fsm.State, now time.Duration, id uint32, incarnation uint64,
	stats *dirpb.NodeStats) bool {
	m := s.Node(id)
	if m == nil || m.Incarnation != incarnation || m.State != dirpb.NodeState_NODE_UP {
		return false
	}
	lease := l.nodes[id]
	if lease == nil || lease.incarnation != incarnation {
		lease = &node{incarnation: incarnation}
		l.nodes[id] = lease
	}
	lease.expires = now + l.opts.Lease
	lease.beat, lease.broken = lease.beat+1, false
	if r := l.rivals[id]; r != nil {
		r.both = true
	}
	delete(l.troubles, id)
	if stats != nil {
		lease.stats = stats
	}
	return true
}

// Stats are the memory nodes' latest, by node.
func (l *Leader) Stats() map[uint32]*dirpb.NodeStats {
	out := make(map[uint32]*dirpb.NodeStats)
	for id, m := range l.nodes {
		if m.stats != nil {
			out[id] = m.stats
		}
	}
	return out
}

// Claimable is a job that a live session should work on now beside those it knows of, or nil. It is one that
// the session has already, whose answer was lost. Else it is the first that nobody works on, whose barrier
// has passed and which may run. Recovery and joins, without which data is a loss away from being gone, come
// first. Jobs that settle intents that others may wait for follow.
//
// A job whose owner is being fenced is still the owner's. A job that was given back with trouble rests for
// a lease, then twice as long each time, to at most ten leases.
func (l *Leader) Claimable(s *fsm.State, id uint32, now time.Duration, working ...uint32) *dirpb.Job {
	x := s.Session(id)
	if x == nil || x.Life != dirpb.SessionLife_SESSION_LIVE || x.ReadOnly {
		return nil
	}
	var best *dirpb.Job
	v := l.newView(s, now)
	for _, j := range v.all {
		switch {
		case j.NamespaceId != x.NamespaceId:
		case slices.Contains(working, j.Id):
		case j.Owner == id:
			return v.shown(j)
		case v.startable(j) && (best == nil || urgency(j) > urgency(best)):
			best = j
		}
	}
	if best == nil {
		return nil
	}
	return v.shown(best)
}

// Work names the namespaces that have a job which a janitor could claim now, sorted.
func (l *Leader) Work(s *fsm.State, now time.Duration) []string {
	names := make(map[string]bool)
	v := l.newView(s, now)
	for _, j := range v.all {
		if v.startable(j) {
			names[s.Namespace(j.NamespaceId).GetName()] = true
		}
	}
	return ordered.Keys(names)
}

// Progress notes what a job's owner reports. Trouble means that it gives the job back:
// note it before the job is free, so that nobody takes it at once.
func (l *Leader) Progress(id uint32, done, total uint64, trouble string, now time.Duration) {
	k := l.jobs[id]
	if k == nil {
		k = &job{pause: l.opts.Lease}
		l.jobs[id] = k
	}
	k.done, k.total, k.trouble = done, total, trouble
	if trouble != "" {
		k.retry = now + k.pause
		k.pause = min(2*k.pause, 10*l.opts.Lease)
	}
}

// Jobs are the background jobs by id, with what only the leader knows filled in.
func (l *Leader) Jobs(s *fsm.State, now time.Duration) []*dirpb.Job {
	v := l.newView(s, now)
	out := make([]*dirpb.Job, len(v.all))
	for i, j := range v.all {
		out[i] = v.shown(j)
	}
	return out
}

// shown is a copy of j with what only the leader knows filled in.
func (v *view) shown(j *dirpb.Job) *dirpb.Job {
	j = proto.CloneOf(j)
	j.Waiting, j.Calm = v.waiting(j), v.calm(j)
	if k := v.l.jobs[j.Id]; k != nil {
		j.Done, j.Total, j.Trouble = k.done, k.total, k.trouble
	}
	return j
}

// Refused notes that a step of Plan's changed nothing. The step's placement groups are left alone for a
// while, and a rebalance that it was part of ends. A job that was asked for goes on waiting if something else
// was faster; otherwise it cannot be, and is forgotten.
func (l *Leader) Refused(s *fsm.State, step Step, now time.Duration) {
	pause := l.pause(now)
	switch op := step.Do.GetOp().(type) {
	case *fsmpb.Command_PlanJoin:
		l.paused[op.PlanJoin.PgId] = pause
		if step.balances {
			l.spent[s.PG(op.PlanJoin.PgId).GetNamespaceId()] = true
		}
	case *fsmpb.Command_StartLeave:
		l.paused[op.StartLeave.PgId] = pause
	case *fsmpb.Command_RemakePg:
		l.paused[op.RemakePg.PgId] = pause
	case *fsmpb.Command_CreatePg:
		l.spent[op.CreatePg.NamespaceId] = true
	case *fsmpb.Command_StartJob:
		q := op.StartJob
		pg := q.PgId
		if q.Kind == dirpb.JobKind_JOB_MOVE {
			sh := s.Shard(q.ShardId)
			pg = sh.GetPgId()
			if q.Reason == reasonBalance {
				l.spent[sh.GetNamespaceId()] = true
			}
			delete(l.took, q.TargetPgId)
		}
		if step.asked && l.Busy(s, q, now) != "" {
			l.enqueue(q)
		}
		for _, id := range places(pg, q.TargetPgId) {
			l.paused[id] = pause
		}
	}
}

// pause is until when a placement group is left alone.
func (l *Leader) pause(now time.Duration) time.Duration { return now + min(l.opts.Lease, maxPause) }
