package engine

import (
	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// Objects is how lanes come to the tier. Any goroutine may call it, and it does not block.
type Objects interface {
	index.Tier
	// Fetch reads the n bytes of an object. It calls answer once, in bounded time, with bytes that nobody changes any
	// more, or nil if they could not be read.
	Fetch(at layout.ObjectAt, n int, answer func(got []byte))
	// Store keeps an object, which nobody changes any more, durably enough for the namespace. It calls answer once,
	// with where the copies are, at least one, or with an error.
	Store(object []byte, answer func(at []layout.ObjectAt, err error))
}

// Volume is index.Env.
func (t *Task) Volume(id uint32) index.VolumeState {
	if o := t.lane.core.opts.Objects; o != nil {
		return o.Volume(id)
	}
	return index.VolumeAway
}

// askDisk begins what t's Op waits for, action a: Fetch or Store. Until the answer nothing wakes t but its deadline.
func (l *Lane) askDisk(t *Task, a index.Action) {
	l.postNoWait(t)
	l.park(t, a, 0)
	t.disk = true
	gen, objects := t.gen, l.core.opts.Objects
	answer := func(f func()) {
		l.Deliver(func(l *Lane) {
			if t.gen == gen && t.disk && t.state == taskWaiting {
				f()
				t.disk, t.events = false, l.events-1
			}
		})
	}
	if a == index.Fetch {
		x := &t.Op.Object
		objects.Fetch(x.At, x.Len, func(got []byte) { answer(func() { t.Op.Object.Got = got }) })
		return
	}
	objects.Store(t.Op.Tiered.Object, func(at []layout.ObjectAt, err error) {
		answer(func() {
			// An error ends the Task, which has changed nothing.
			t.Op.Tiered.To, t.orphan = at, err
		})
	})
}

// waitsForDisk reports whether t counts as not begun: it keeps nothing that it has seen.
func (t *Task) waitsForDisk() bool {
	return t.state == taskWaiting && (t.want == index.Fetch || t.want == index.Store)
}
