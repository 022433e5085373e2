package netsrv

import (
	"context"
	"sync"
	"time"
)

// buffers are what shares gave back for others to take, newest last. They are cleared of nothing. While memory is short
// they become garbage.
type buffers struct {
	sync.Mutex
	kept  []keptBuffer
	bytes int64 // of kept
	timed bool  // age is due
}

type keptBuffer struct {
	b     []byte
	since time.Time
}

const (
	// A Budget keeps so many buffers at most, and this part of its bytes, for so long without a use.
	keptMost, keptPart, keptFor = 64, 8, time.Second
	// keptFrom is the least bytes of one: less is cheap to make.
	keptFrom = 64 << 10
)

// TakeBuffer is Take, and makes a buffer of n bytes, which may hold what others had in it. Its capacity is what was
// taken. The buffer goes back with Return, or is left to the garbage collector with a Drop of that.
func (s *Share) TakeBuffer(ctx context.Context, n int, patience time.Duration) (buf []byte, err error) {
	err = s.take(ctx, int64(n), patience, func() bool {
		buf = s.reuse(n)
		return buf != nil || s.Try(int64(n))
	})
	if err == nil && buf == nil {
		buf = make([]byte, n)
	}
	return buf, err
}

// reuse takes a kept buffer that fits well; nil: there is none, or the share may not have it.
func (s *Share) reuse(n int) []byte {
	k := &s.b.buffers
	k.Lock()
	defer k.Unlock()
	for i := len(k.kept) - 1; i >= 0; i-- {
		b := k.kept[i].b
		if len(b) < n || len(b) > n+n/4 {
			continue
		}
		if !s.mayHave(int64(len(b))) {
			return nil
		}
		k.kept = append(k.kept[:i], k.kept[i+1:]...)
		k.bytes -= int64(len(b))
		s.b.idle.Store(k.bytes)
		return b[:n]
	}
	return nil
}

// mayHave takes n bytes that a kept buffer has, which count as used otherwise.
func (s *Share) mayHave(n int64) bool {
	for {
		used := s.b.used.Load()
		if s.held.Load()+n > s.b.total-used {
			return false
		}
		if s.b.used.CompareAndSwap(used, used+n) {
			break
		}
	}
	if s.held.Add(n) == n {
		s.since.Store(time.Now().UnixNano())
	}
	return true
}

// Return gives back a buffer of TakeBuffer for others, who may write to it from now on.
func (s *Share) Return(buf []byte) {
	buf = buf[:cap(buf)]
	n := int64(len(buf))
	k := &s.b.buffers
	k.Lock()
	keep := n >= keptFrom && len(k.kept) < keptMost && k.bytes+n <= s.b.total/keptPart
	if keep {
		k.kept = append(k.kept, keptBuffer{buf, time.Now()})
		k.bytes += n
		s.b.idle.Store(k.bytes)
		if !k.timed {
			k.timed = true
			time.AfterFunc(keptFor, s.b.age)
		}
	}
	k.Unlock()
	if keep {
		s.Give(n)
	} else {
		s.Drop(n)
	}
}

// age lets buffers go that nobody has taken for long.
func (b *Budget) age() {
	k := &b.buffers
	k.Lock()
	defer k.Unlock()
	b.letGoLocked(time.Now().Add(-keptFor))
	if k.timed = len(k.kept) > 0; k.timed {
		time.AfterFunc(time.Until(k.kept[0].since.Add(keptFor)), b.age)
	}
}

// letGo makes all kept buffers garbage.
func (b *Budget) letGo() {
	b.buffers.Lock()
	defer b.buffers.Unlock()
	b.letGoLocked(time.Now())
}

// letGoLocked makes those garbage that were kept at a time or earlier.
func (b *Budget) letGoLocked(since time.Time) {
	k := &b.buffers
	n, bytes := 0, int64(0)
	for n < len(k.kept) && !k.kept[n].since.After(since) {
		bytes += int64(len(k.kept[n].b))
		n++
	}
	rest := copy(k.kept, k.kept[n:])
	clear(k.kept[rest:])
	k.kept = k.kept[:rest]
	b.garbage.Add(bytes)
	k.bytes -= bytes
	b.idle.Store(k.bytes)
}
