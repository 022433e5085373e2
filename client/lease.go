package client

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/alarm"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/session"
)

// control performs the session's agenda, until the session ends.
func (s *sess) control() {
	t := alarm.NewTimer(0)
	defer t.Stop()
	for s.ctx.Err() == nil {
		s.pumpIdle()
		asks := s.agenda.Due(s.oldest)
		if len(asks) == 1 && s.agenda.Next() == math.MaxInt64 {
			if !s.performAlone(asks[0]) {
				return
			}
			continue
		}
		s.turn.Lock()
		s.turn.begun += uint64(len(asks))
		s.turn.Unlock()
		for _, ask := range asks {
			s.wg.Go(func() { s.perform(ask); s.wake() })
		}
		t.Reset(max(time.Duration(s.agenda.Next()-engine.Nanos()), 0))
		select {
		case <-s.ctx.Done():
			return
		case <-t.C:
		case <-s.due:
		}
	}
}

// performAlone performs the only ask that is due when nothing else will be until something
// happens. To start a goroutine for it, and to be woken by that, would wake two more threads of an idle process.
// It returns false if something has happened meanwhile: then there is another goroutine that controls.
func (s *sess) performAlone(ask session.Ask) bool {
	s.turn.Lock()
	s.turn.away = true
	s.turn.alone++
	s.turn.Unlock()
	select {
	case <-s.due: // before it was away
		s.wake()
	default:
	}
	s.perform(ask)
	s.turn.Lock()
	back := s.turn.away
	s.turn.away = false
	s.turn.Unlock()
	if !back {
		s.wake() // it has looked at the agenda before the answer came
	}
	return back
}

func (s *sess) wakeIf(changed bool) {
	if changed {
		s.wake()
	}
}

// wake has control look at the agenda.
func (s *sess) wake() {
	s.turn.Lock()
	if s.turn.away {
		s.turn.away = false
		s.turn.begun++
		s.wg.Go(s.control) // one that is away is counted until it sees this
	}
	s.turn.Unlock()
	select {
	case s.due <- struct{}{}:
	default:
	}
}

// stir has a quiet session renew its lease as often as others: an operation waits, and
// renewals make it look again.
func (s *sess) stir() { s.wakeIf(s.agenda.Stir()) }

// crowd has a session renew its lease soon that has much in limbo.
func (s *sess) crowd() { s.wakeIf(s.agenda.Crowd()) }

// pumpIdle has idle lanes look at the map, and notes whether any is not idle.
func (s *sess) pumpIdle() {
	performed, busy := uint64(0), false
	for _, l := range s.core.Lanes() {
		if !l.TryOwn() {
			busy = true
			continue
		}
		l.Turn()
		busy = busy || l.Active() > 0
		performed += l.Performed()
		l.HandOver()
	}
	if busy || performed != s.performed {
		s.performed = performed
		s.agenda.Busy()
	}
}

// perform asks the directory, or a memory node, and tells the agenda what came of it.
func (s *sess) perform(ask session.Ask) {
	switch ask.Kind {
	case session.AskRenew:
		s.renewOnce(ask)
	case session.AskGrant:
		s.grantOnce(ask)
	case session.AskFence:
		s.fenceOnce(ask)
	case session.AskSplit:
		s.splitOnce(ask)
	case session.AskHangup:
		s.closeQP(ask)
		s.agenda.Answer(ask, session.Reply{})
	case session.AskDial:
		s.dialOnce(ask)
	}
}

// renewOnce performs one renewal. Tries after the first are renewals of their own, as the first may have been served.
func (s *sess) renewOnce(ask session.Ask) {
	ctx, cancel := alarm.WithTimeout(s.ctx, time.Duration(ask.Within))
	defer cancel()
	var r session.Reply
	tries := 0
	back := s.status.back()
	r.Err = s.c.dir.Call(ctx, func(ctx context.Context, dc dirpb.DirectoryClient) (err error) {
		if tries++; tries > 1 {
			ask = s.agenda.Again(ask)
		}
		ask.Renew.StatusBack = back
		r.Sent = engine.Nanos()
		r.Renew, err = dc.Renew(ctx, ask.Renew)
		return err
	})
	s.agenda.Answer(ask, r)
	if r.Err == nil {
		s.status.heard(back)
		for _, l := range s.core.Lanes() {
			s.sweep(l)
		}
		return
	}
	if s.ctx.Err() == nil {
		switch status.Code(r.Err) {
		case codes.NotFound, codes.PermissionDenied:
			s.lost(r.Err)
			return
		}
		s.c.o.Logger.Warn("lease not renewed", "session", s.id, "err", r.Err)
	}
}

// oldest is the least reclaim epoch at the start of any operation in flight.
func (s *sess) oldest() (epoch uint64, ok bool) {
	for _, l := range s.core.Lanes() {
		if e, some := l.Under(); some && (!ok || e < epoch) {
			epoch, ok = e, true
		}
	}
	// Then Views: a GET that was over for its lane when that was asked has become one by now.
	if e, some := s.core.OldestHeld(); some && (!ok || e < epoch) {
		epoch, ok = e, true
	}
	return epoch, ok
}

// sweep lets an idle lane release its limbo and give places back to lanes that
// starve; a busy one is told and does so itself.
func (s *sess) sweep(l *engine.Lane) {
	if l.TryOwn() {
		l.GiveBack(false)
		l.Turn()
		l.HandOver()
		return
	}
	l.Deliver(func(*engine.Lane) {})
}

var errSessionLost = errors.New("session lost")

// lost ends the session from outside; the Client opens another.
func (s *sess) lost(err error) {
	if !s.core.End() {
		return
	}
	s.c.o.Logger.Warn("session lost", "session", s.id, "err", err)
	early := s.opened.CompareAndSwap(0, 2) // openSession says so
	s.cancel(fmt.Errorf("%w: %w", errSessionLost, err))
	if !early && s.opened.Load() == 1 {
		s.c.reopen(s)
	}
}
