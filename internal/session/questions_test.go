package session_test

import (
	"math"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/session"
)

// due is what is to be asked now because lanes miss it, of one kind.
func (a *agenda) due(kind session.AskKind) session.Ask {
	a.t.Helper()
	asks := a.DueWants()
	if len(asks) != 1 || asks[0].Kind != kind {
		a.t.Fatalf("due is %v, want one of kind %d", asks, kind)
	}
	if again := a.DueWants(); len(again) > 0 {
		a.t.Fatalf("due again is %v", again)
	}
	return asks[0]
}

// rests checks that nothing is to be asked because lanes miss it, and when something is.
func (a *agenda) rests(next int64) {
	a.t.Helper()
	if asks := a.DueWants(); len(asks) > 0 {
		a.t.Fatalf("due is %v", asks)
	}
	if at := a.Next(); at != next {
		a.t.Fatalf("next at %d, want %d", at, next)
	}
}

// A question is asked once at a time, and not again for a while after its answer, which may
// be none. A question that a lane still has then is asked anew, and no other.
func TestAgendaQuestions(t *testing.T) {
	type kind struct {
		kind  session.AskKind
		pause int64
		want  func(a *agenda, id uint32) bool
		id    func(q session.Ask) uint32
		reply session.Reply
	}
	for name, k := range map[string]kind{
		"fence": {session.AskFence, 2 * pause, func(a *agenda, id uint32) bool { return a.WantFenced(id) },
			func(q session.Ask) uint32 { return q.Fence.GetSessionId() },
			session.Reply{Fence: &dirpb.SessionStateReply{Life: dirpb.SessionLife_SESSION_LIVE}}},
		"split": {session.AskSplit, 3 * pause, func(a *agenda, id uint32) bool { return a.WantSplit(id) },
			func(q session.Ask) uint32 { return q.Split.GetShardId() },
			session.Reply{Split: &dirpb.RequestSplitReply{Growing: true}}},
	} {
		for what, reply := range map[string]session.Reply{"answered": k.reply, "lost": {Err: errLost}} {
			t.Run(name+" "+what, func(t *testing.T) {
				a := newAgenda(t)
				renewal := a.Next()
				if !k.want(a, 9) || k.want(a, 9) {
					t.Fatal("wanted the first time, it has no news; or the second time it has")
				}
				if at := a.Next(); at > a.now {
					t.Fatalf("next at %d, want %d", at, a.now)
				}
				q := a.due(k.kind)
				if k.id(q) != 9 {
					t.Fatalf("asked %v", q)
				}
				if k.want(a, 9) {
					t.Fatal("wanted while it is under way, it is asked again")
				}
				a.rests(renewal)
				if !k.want(a, 8) {
					t.Fatal("another one is not asked")
				}
				a.Answer(a.due(k.kind), k.reply)
				a.Answer(q, reply)
				a.now += k.pause - 1
				if k.want(a, 9) {
					t.Fatal("asked again too soon")
				}
				a.rests(renewal)
				if a.now++; !k.want(a, 9) {
					t.Fatal("not asked again")
				}
				if q = a.due(k.kind); k.id(q) != 9 {
					t.Fatalf("asked %v", q)
				}
			})
		}
	}
}

// A question that nobody has any more when its pause ends is not asked again.
func TestAgendaQuestionsOver(t *testing.T) {
	a := newAgenda(t)
	a.WantFenced(9)
	a.Answer(a.due(session.AskFence), session.Reply{Err: errLost})
	a.WantFenced(9)
	a.now += 2 * pause
	a.rests(second + renewEvery)
}

// A stirred session has news, though the question is not asked again.
func TestAgendaQuestionStirs(t *testing.T) {
	for name, want := range map[string]func(a *agenda) bool{
		"fence": func(a *agenda) bool { return a.WantFenced(9) },
		"split": func(a *agenda) bool { return a.WantSplit(9) },
	} {
		t.Run(name, func(t *testing.T) {
			a := newAgenda(t)
			want(a)
			a.DueWants()
			a.core.SetQuiet(true)
			if !want(a) || a.core.Quiet() {
				t.Fatal("it is quiet still, or nobody is told")
			}
		})
	}
}

// A session that is being fenced is not fenced yet, and one whose fate the directory does not tell neither.
func TestAgendaNotFenced(t *testing.T) {
	for _, life := range []dirpb.SessionLife{0, dirpb.SessionLife_SESSION_LIVE, dirpb.SessionLife_SESSION_FENCING} {
		a := newAgenda(t)
		a.WantFenced(9)
		a.Answer(a.due(session.AskFence), session.Reply{Fence: &dirpb.SessionStateReply{Life: life}})
		if a.core.IsFenced(9) {
			t.Errorf("%v counts as fenced", life)
		}
	}
}

func TestAgendaFence(t *testing.T) {
	a := newAgenda(t)
	a.WantFenced(9)
	a.WantFenced(8)
	asks := a.DueWants()
	if len(asks) != 2 || !proto.Equal(asks[0].Fence, &dirpb.SessionStateRequest{SessionId: 8}) ||
		asks[1].Fence.GetSessionId() != 9 {
		t.Fatalf("due is %v", asks)
	}
	a.Answer(asks[0], session.Reply{Fence: &dirpb.SessionStateReply{Life: dirpb.SessionLife_SESSION_LIVE}})
	a.Answer(asks[1], session.Reply{Fence: &dirpb.SessionStateReply{Life: dirpb.SessionLife_SESSION_FENCED}})
	if a.core.IsFenced(8) || !a.core.IsFenced(9) {
		t.Fatalf("fenced: 8 %v, 9 %v", a.core.IsFenced(8), a.core.IsFenced(9))
	}
}

func TestAgendaSplit(t *testing.T) {
	a := newAgenda(t)
	for _, growing := range []bool{true, false} {
		a.WantSplit(5)
		q := a.due(session.AskSplit)
		if want := (&dirpb.RequestSplitRequest{SessionId: 7, ShardId: 5}); !proto.Equal(q.Split, want) {
			t.Fatalf("asked %v, want %v", q.Split, want)
		}
		if a.Answer(q, session.Reply{Split: &dirpb.RequestSplitReply{Growing: growing}}); (a.core.NoGrowth(5) != 0) ==
			growing {
			t.Fatalf("growing %v: no growth since renewal %d", growing, a.core.NoGrowth(5))
		}
		a.now += 3 * pause
	}
	a.WantSplit(5)
	noGrowth := a.core.NoGrowth(5)
	a.core.BeginRenew()
	if a.Answer(a.due(session.AskSplit), session.Reply{Err: errLost}); a.core.NoGrowth(5) != noGrowth {
		t.Fatal("a call that failed says that the shard cannot grow")
	}
	b := session.NewAgenda(a.core, session.AgendaOptions{Renew: math.MaxInt64 / 2, ReadOnly: true})
	if b.WantSplit(5) || len(b.DueWants()) > 0 {
		t.Fatal("a session that only reads wants a split")
	}
}
