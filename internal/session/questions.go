package session

import (
	"math"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/ordered"
)

// question is one to the directory that lanes want asked again and again until they know: it
// is asked once at a time, and not again for a while after its answer. A lane that still
// waits then wants it again.
type question struct {
	asked bool  // under way
	until int64 // once it was answered: nobody needs to ask before; 0: to be asked
}

// want notes that a question is to be asked, and reports whether it will be: it is neither
// under way nor was it answered just now.
func want(list map[uint32]*question, id uint32, now int64) bool {
	if x := list[id]; x != nil && (x.until == 0 || now < x.until) {
		return false
	}
	list[id] = &question{}
	return true
}

// questionsDue are the ids of the questions that are to be asked now, ascending: they are
// under way from here on. Those whose pause is over are forgotten.
func questionsDue(list map[uint32]*question, now int64) (ids []uint32) {
	for _, id := range ordered.Keys(list) {
		switch x := list[id]; {
		case x.asked:
		case x.until == 0:
			x.asked = true
			ids = append(ids, id)
		case now >= x.until:
			delete(list, id)
		}
	}
	return ids
}

// answered ends a question, which is not asked again for a pause.
func answered(list map[uint32]*question, id uint32, now, pause int64) {
	if pause <= 0 {
		delete(list, id)
		return
	}
	list[id] = &question{until: now + pause}
}

// questionsNext is when the next question is to be asked: a pause that ends brings nothing.
func (a *Agenda) questionsNext() int64 {
	for _, list := range []map[uint32]*question{a.mu.fences, a.mu.splits} {
		for _, x := range list {
			if !x.asked && x.until == 0 {
				return 0
			}
		}
	}
	return math.MaxInt64
}

// WantFenced notes that a lane waits for a lock whose owner may be fenced. It reports whether
// Next has changed.
func (a *Agenda) WantFenced(session uint32) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	stirred := a.stirLocked()
	return want(a.mu.fences, session, a.core.Nanos()) || stirred
}

func (a *Agenda) fencesDue(now int64) (asks []Ask) {
	for _, id := range questionsDue(a.mu.fences, now) {
		asks = append(asks, Ask{Kind: AskFence, Fence: &dirpb.SessionStateRequest{SessionId: id}})
	}
	return asks
}

// fenceAnswered takes what the directory says of a session. A live owner is the common case,
// and so is not asked about again at once.
func (a *Agenda) fenceAnswered(q Ask, r Reply, now int64) {
	id := q.Fence.GetSessionId()
	if r.Err == nil && r.Fence.GetLife() == dirpb.SessionLife_SESSION_FENCED {
		a.core.SetFenced(id)
	}
	answered(a.mu.fences, id, now, a.o.FencePause)
}

// WantSplit notes that a shard fills up, unless the session only reads. It reports whether
// Next has changed.
func (a *Agenda) WantSplit(shard uint32) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	stirred := a.stirLocked()
	return !a.o.ReadOnly && want(a.mu.splits, shard, a.core.Nanos()) || stirred
}

func (a *Agenda) splitsDue(now int64) (asks []Ask) {
	for _, id := range questionsDue(a.mu.splits, now) {
		asks = append(asks,
			Ask{Kind: AskSplit, Split: &dirpb.RequestSplitRequest{SessionId: a.core.Session(), ShardId: id}})
	}
	return asks
}

// splitAnswered takes what the directory says of a shard. A split takes its time, and so is
// not asked for again at once.
func (a *Agenda) splitAnswered(q Ask, r Reply, now int64) {
	shard := q.Split.GetShardId()
	if r.Err == nil && !r.Split.GetGrowing() {
		a.core.SetNoGrowth(shard, r.Split.GetWhy())
	}
	answered(a.mu.splits, shard, now, a.o.SplitPause)
}
