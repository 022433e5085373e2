package layout

// AccessWord is what is known of the use of one slot's record, for sessions that choose what to evict. It
// is a hint: written by plain 8-byte WRITEs, by any session,
// and lost or wrong without harm.
//
//	63               38 37        26 25               6 5     0
//	+------------------+------------+------------------+-------+
//	| time (26)        | count (12) | expiry (20)      | tag(6)|
//	+------------------+------------+------------------+-------+
//
//	time    of the last noted access, in units of 4 ms since the Unix epoch, modulo 2^26 (3.1 days); of a pinned
//	        record, until when it is
//	count   frequency, as the writer counts it
//	expiry  Unix seconds, rounded up, modulo 2^20 (12.1 days); 0 = none
//	tag     low bits of the slot word's fingerprint: a word of another tag is about another key
//
// The access words of a group lie where its slots lie, in an array of the index's size at the start of the heap.
// The word of the slot at index offset x is at offset IndexBytes + x of the region. Zero: nothing is known.
type AccessWord uint64

// AccessTickMillis is the unit of an access word's time, in milliseconds.
const AccessTickMillis = 4

const (
	accessTimeBits   = 26
	accessCountBits  = 12
	accessExpiryBits = 20
	accessTagBits    = 6

	// MaxAccessCount is the largest count that an access word holds; more is noted as that.
	MaxAccessCount = 1<<accessCountBits - 1
	// MaxAccessExpiry bounds how far ahead an expiry can be noted, in seconds. A later expiry is noted as
	// that, and the record looked at again.
	MaxAccessExpiry = 1<<(accessExpiryBits-1) - 1
)

const _ = uint(accessTimeBits + accessCountBits + accessExpiryBits + accessTagBits - 64)
const _ = uint(64 - accessTimeBits - accessCountBits - accessExpiryBits - accessTagBits)

// MakeAccess notes an access at nowMillis of the record that w names, which expires
// at expiryMillis (Unix; 0 = never).
func MakeAccess(w Word, nowMillis uint64, count uint32, expiryMillis uint64) AccessWord {
	a := nowMillis / AccessTickMillis & (1<<accessTimeBits - 1)
	a = a<<accessCountBits | uint64(min(count, MaxAccessCount))
	a = a<<accessExpiryBits | accessExpiry(nowMillis, expiryMillis)
	return AccessWord(a<<accessTagBits | uint64(w.FP())&(1<<accessTagBits-1))
}

func accessExpiry(now, expiry uint64) uint64 {
	if expiry == 0 {
		return 0
	}
	s := min((expiry+999)/1000, now/1000+MaxAccessExpiry)
	if s &= 1<<accessExpiryBits - 1; s == 0 {
		s = 1 // a second late
	}
	return s
}

// Of reports whether a is about the key whose record w names.
func (a AccessWord) Of(w Word) bool {
	return a != 0 && uint64(a)&(1<<accessTagBits-1) == uint64(w.FP())&(1<<accessTagBits-1)
}

// Count is how often the record is used, as its noters have it: 0 to MaxAccessCount.
func (a AccessWord) Count() uint32 {
	return uint32(a>>(accessExpiryBits+accessTagBits)) & MaxAccessCount
}

// ageTicks is how long ago the last access was, modulo 2^26 ticks of 4 ms.
func (a AccessWord) ageTicks(nowMillis uint64) uint32 {
	then := uint64(a >> (accessCountBits + accessExpiryBits + accessTagBits))
	return uint32((nowMillis/AccessTickMillis - then) & (1<<accessTimeBits - 1))
}

// AccessSkewTicks is how far ahead of the reader's clock a word may be (78 minutes) to be taken as from the future.
// Such a word is not taken as from three days ago. MaxPinMillis is how far ahead of its writer's clock a pin may last:
// clocks may differ by the rest.
const (
	AccessSkewTicks = 1<<20 + 1<<17
	MaxPinMillis    = 70 * 60 * 1000
)

// PastTicks is ageTicks, or 0 if the word is from the future: clocks differ.
func (a AccessWord) PastTicks(nowMillis uint64) uint32 {
	if age := a.ageTicks(nowMillis); age < 1<<accessTimeBits-AccessSkewTicks {
		return age
	}
	return 0
}

// AheadTicks is how far the word's time is ahead of the reader's clock, 0 if it is not, or nothing is known.
func (a AccessWord) AheadTicks(nowMillis uint64) uint32 {
	if a == 0 {
		return 0 // its time would lie ahead for the last 78 minutes of each 3.1 days
	}
	if age := a.ageTicks(nowMillis); age >= 1<<accessTimeBits-AccessSkewTicks {
		return 1<<accessTimeBits - age
	}
	return 0
}

// At is a with another time, in Unix ms.
func (a AccessWord) At(millis uint64) AccessWord {
	const below = accessCountBits + accessExpiryBits + accessTagBits
	return a&(1<<below-1) | AccessWord(millis/AccessTickMillis&(1<<accessTimeBits-1)<<below)
}

// Later is a with b's time if that is later; both are of one record.
func (a AccessWord) Later(b AccessWord) AccessWord {
	const below = accessCountBits + accessExpiryBits + accessTagBits
	if (uint64(b>>below)-uint64(a>>below))&(1<<accessTimeBits-1) < 1<<(accessTimeBits-1) {
		return a&(1<<below-1) | b&^(1<<below-1)
	}
	return a
}

// Expires reports whether the record expires at all.
func (a AccessWord) Expires() bool { return a>>accessTagBits&(1<<accessExpiryBits-1) != 0 }

// Expired reports whether the record may have expired at nowMillis.
func (a AccessWord) Expired(nowMillis uint64) bool {
	e := uint64(a>>accessTagBits) & (1<<accessExpiryBits - 1)
	// Half of the circle is the past.
	return e != 0 && (nowMillis/1000-e)&(1<<accessExpiryBits-1) < 1<<(accessExpiryBits-1)
}
