package evict

// Wheel remembers which hashes expire when, so that their groups are looked at soon after. It is a hint. It forgets
// what it has no room for, the longest-lived first, since those that live for a short time are what fills the
// memory. It serves one goroutine at a time.
//
// An entry is its hash alone: its bucket tells when it is due. Buckets are as wide as 1/16 of what they lie ahead,
// or 32 ms. An entry is due at the end of its bucket, so never too early, and not much too late. (Varghese, Lauck,
// "Hashed and Hierarchical Timing Wheels", SOSP 1987, without the moves between the levels.)
type Wheel struct {
	levels    [wheelLevels]wheelLevel
	free      *wheelBlock // at most wheelSpare
	spare     int
	blocks    int // in buckets
	max       int
	horizon   uint64 // while there is no room: what is due then or later is forgotten; 0: none
	forgotten uint64
}

// wheelLevel has buckets of one width.
type wheelLevel struct {
	taken   uint64 // bucket number: this and those before it have been taken
	n       int    // entries
	buckets [wheelBuckets]*wheelBlock
}

// wheelBlock is a piece of a bucket.
type wheelBlock struct {
	next   *wheelBlock
	n      int
	hashes [wheelBlockHashes]uint64
}

const (
	wheelLevels      = 4
	wheelBuckets     = 256
	wheelBlockHashes = 126 // 1 KiB in all
	wheelBlockBytes  = 1 << 10
	wheelSpare       = 64 // blocks kept for reuse
	wheelTickMillis  = 32
)

// wheelWidth is that of a level's buckets, ms.
func wheelWidth(level int) uint64 { return wheelTickMillis << (4 * level) }

// NewWheel makes a Wheel that starts at a time (Unix ms) and takes at most maxBytes,
// beside 8 KiB.
func NewWheel(nowMillis uint64, maxBytes int) *Wheel {
	w := &Wheel{max: max(maxBytes/wheelBlockBytes, 1)}
	for i := range w.levels {
		w.levels[i].taken = nowMillis / wheelWidth(i)
	}
	return w
}

// Add remembers a hash, whose key expires then (Unix ms). Keys that expire in more than nine hours are not remembered.
func (w *Wheel) Add(expiryMillis, hash uint64) {
	for i := range w.levels {
		l, width := &w.levels[i], wheelWidth(i)
		b := max(expiryMillis/width, l.taken) + 1
		if b-l.taken >= wheelBuckets {
			continue
		}
		at := &l.buckets[b%wheelBuckets]
		if *at == nil || (*at).n == wheelBlockHashes {
			x := w.block(b * width)
			if x == nil {
				w.forgotten++
				return
			}
			x.next, *at = *at, x
		}
		(*at).hashes[(*at).n] = hash
		(*at).n++
		l.n++
		return
	}
	w.forgotten++
}

// block is room for what is due then, or nil.
func (w *Wheel) block(due uint64) *wheelBlock {
	if w.horizon != 0 && due >= w.horizon {
		return nil
	}
	if w.blocks == w.max {
		l, b, at := w.farthest()
		if w.horizon = at; due >= at {
			return nil
		}
		x := l.buckets[b]
		w.forgotten += uint64(x.n)
		l.n -= x.n
		l.buckets[b] = x.next
		*x = wheelBlock{}
		return x
	}
	w.blocks++
	if x := w.free; x != nil {
		w.free = x.next
		w.spare--
		*x = wheelBlock{}
		return x
	}
	return new(wheelBlock)
}

// farthest is the bucket that is due last, and when.
func (w *Wheel) farthest() (l *wheelLevel, bucket int, due uint64) {
	for i := range w.levels {
		for b := w.levels[i].taken + wheelBuckets - 1; b > w.levels[i].taken; b-- {
			if w.levels[i].buckets[b%wheelBuckets] == nil {
				continue
			}
			if at := b * wheelWidth(i); at > due {
				l, bucket, due = &w.levels[i], int(b%wheelBuckets), at
			}
			break
		}
	}
	return l, bucket, due
}

// Take appends to dst what is due, while its capacity lasts, the shortest-lived first.
func (w *Wheel) Take(nowMillis uint64, dst []uint64) []uint64 {
	for i := range w.levels {
		l := &w.levels[i]
		for now := nowMillis / wheelWidth(i); l.taken < now; l.taken++ {
			if l.n == 0 {
				l.taken = now
				break
			}
			at := &l.buckets[(l.taken+1)%wheelBuckets]
			for *at != nil {
				x := *at
				n := min(x.n, cap(dst)-len(dst))
				if n == 0 {
					return dst
				}
				dst = append(dst, x.hashes[x.n-n:x.n]...)
				x.n -= n
				l.n -= n
				if x.n == 0 {
					*at = x.next
					w.release(x)
				}
			}
		}
	}
	return dst
}

func (w *Wheel) release(x *wheelBlock) {
	w.blocks--
	w.horizon = 0
	if w.spare == wheelSpare {
		return
	}
	x.next, w.free = w.free, x
	w.spare++
}

// Next is when something is due next (Unix ms), false if nothing ever is.
func (w *Wheel) Next() (millis uint64, ok bool) {
	for i := range w.levels {
		l := &w.levels[i]
		if l.n == 0 {
			continue
		}
		for b := l.taken + 1; b < l.taken+wheelBuckets; b++ {
			if l.buckets[b%wheelBuckets] != nil {
				if at := b * wheelWidth(i); !ok || at < millis {
					millis, ok = at, true
				}
				break
			}
		}
	}
	return millis, ok
}

// Len is how many entries there are.
func (w *Wheel) Len() (n int) {
	for i := range w.levels {
		n += w.levels[i].n
	}
	return n
}

// Forgotten is how many entries there ever was no room for.
func (w *Wheel) Forgotten() uint64 { return w.forgotten }

// Bytes is what the entries take.
func (w *Wheel) Bytes() int { return (w.blocks + w.spare) * wheelBlockBytes }
