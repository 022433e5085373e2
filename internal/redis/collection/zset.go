package collection

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"math"
	"slices"
	"sort"

	"github.com/zeebo/xxh3"
)

// ZSet is a sorted set: the bytes of a record's value, checked. Its zero value is the empty set, which is never stored.
//
// Members stand by score, those of equal score by their bytes, and are named by their place, 0 to Len()-1, which is
// their rank. Numbers are little-endian:
//
//	+---------+-------------------+-----------------+-----------------+
//	| count 4 | scores 8 × count  | ends 4 × count  | members         |
//	+---------+-------------------+-----------------+-----------------+
//
//	count    1 and more; the top bit says that Redis would have turned the set into a skiplist, from which it never goes back
//	scores   IEEE 754 doubles, never NaN, ascending; -0 and 0 are equal
//	ends     where each member ends, counted from the begin of members; the last one is the end of the value
//	members  their bytes, one behind the other
//
// Columns of fixed width make a rank an index, and a range of scores a binary search. The search for a member is a pass
// over lengths that compares bytes only if they can be equal. A change copies the columns around it and adds to the
// ends behind it.
type ZSet struct {
	n                     int
	large                 bool
	scores, ends, members []byte
}

// ZEntry is a member with its score. Its bytes belong to whoever made it.
type ZEntry struct {
	Member []byte
	Score  float64
}

// Span is the places from Lo up to but not including Hi.
type Span struct{ Lo, Hi int }

const (
	zsetHead  = 4
	zsetEntry = 8 + 4 // of a member, beside its bytes
	zsetLarge = 1 << 31

	// Redis keeps small sorted sets in a listpack, by the defaults of zset-max-listpack-entries and
	// zset-max-listpack-value.
	zsetListpackEntries = 128
	zsetListpackValue   = 64
)

// CompareZ is the order of members: negative if a stands before b. Scores are no NaN.
func CompareZ(a, b ZEntry) int {
	if c := cmp.Compare(a.Score, b.Score); c != 0 {
		return c
	}
	return bytes.Compare(a.Member, b.Member)
}

// ParseZSet checks a value in full, so that no method of the set has to; its error is ErrCorrupt. Twice the same member
// with different scores goes unnoticed. The set then has the size that it says, and a search finds the first of them.
// The set refers to b, which must not change while it is used.
func ParseZSet(b []byte) (ZSet, error) {
	if len(b) < zsetHead {
		return ZSet{}, ErrCorrupt
	}
	word := binary.LittleEndian.Uint32(b)
	count := uint64(word &^ zsetLarge)
	if count == 0 || count > uint64(len(b)-zsetHead)/zsetEntry {
		return ZSet{}, ErrCorrupt
	}
	n := int(count)
	b = b[zsetHead:]
	z := ZSet{n: n, large: word&zsetLarge != 0, scores: b[:8*n], ends: b[8*n : zsetEntry*n], members: b[zsetEntry*n:]}
	before, start, last := math.Inf(-1), 0, 0
	for i := range n {
		score, end := z.Score(i), int(binary.LittleEndian.Uint32(z.ends[4*i:]))
		if end < start || end > len(z.members) || !(score >= before) {
			return ZSet{}, ErrCorrupt
		}
		if score == before && i > 0 && bytes.Compare(z.members[last:start], z.members[start:end]) >= 0 {
			return ZSet{}, ErrCorrupt
		}
		before, last, start = score, start, end
	}
	if start != len(z.members) {
		return ZSet{}, ErrCorrupt
	}
	return z, nil
}

// Len is the number of members.
func (z ZSet) Len() int { return z.n }

// Score is that of the member at a place.
func (z ZSet) Score(i int) float64 {
	return math.Float64frombits(binary.LittleEndian.Uint64(z.scores[8*i:]))
}

// start is where the member at a place begins; that of Len() is where the last one ends.
func (z ZSet) start(i int) int {
	if i == 0 {
		return 0
	}
	return int(binary.LittleEndian.Uint32(z.ends[4*(i-1):]))
}

// Member is the member at a place: a part of the value.
func (z ZSet) Member(i int) []byte {
	lo, hi := z.start(i), z.start(i+1)
	return z.members[lo:hi:hi]
}

// Entry is the member at a place with its score. Its bytes are a part of the value.
func (z ZSet) Entry(i int) ZEntry { return ZEntry{z.Member(i), z.Score(i)} }

// Find is the place of a member, or -1.
func (z ZSet) Find(member []byte) int {
	n := len(member)
	if n == 0 {
		for i := range z.n {
			if z.start(i) == z.start(i+1) {
				return i
			}
		}
		return -1
	}
	// Members of one length differ most often at their ends, as numbers do.
	last, start := member[n-1], 0
	for i := range z.n {
		end := int(binary.LittleEndian.Uint32(z.ends[4*i:]))
		if end-start == n && z.members[end-1] == last && bytes.Equal(z.members[start:end], member) {
			return i
		}
		start = end
	}
	return -1
}

// fewMembers is how many searches cost less than a table of the members that are looked for.
const fewMembers = 8

// Places gives the place of each member, or -1. It passes over the set once however many they are, but for a few.
func (z ZSet) Places(members [][]byte) []int {
	out := make([]int, len(members))
	if len(members) <= fewMembers {
		for i, m := range members {
			out[i] = z.Find(m)
		}
		return out
	}
	wanted := make(map[string]int, len(members)) // place + 1
	for _, m := range members {
		wanted[string(m)] = 0
	}
	for i := range z.n {
		if at, ok := wanted[string(z.Member(i))]; ok && at == 0 {
			wanted[string(z.Member(i))] = i + 1
		}
	}
	for i, m := range members {
		out[i] = wanted[string(m)] - 1
	}
	return out
}

// SearchScore is the place of the first member whose score is at least that, or above it; Len() if there is none.
func (z ZSet) SearchScore(score float64, above bool) int {
	return sort.Search(z.n, func(i int) bool { return z.Score(i) > score || !above && z.Score(i) == score })
}

// SearchMember is SearchScore for the bytes of members. It means something only if all scores are equal.
func (z ZSet) SearchMember(member []byte, above bool) int {
	return sort.Search(z.n, func(i int) bool {
		c := bytes.Compare(z.Member(i), member)
		return c > 0 || !above && c == 0
	})
}

// ChangedLen is how many bytes AppendChanged appends.
func (z ZSet) ChangedLen(drop []Span, add []ZEntry) int {
	n := zsetHead + zsetEntry*(z.n+len(add)) + len(z.members)
	for _, d := range drop {
		n -= zsetEntry*(d.Hi-d.Lo) + z.start(d.Hi) - z.start(d.Lo)
	}
	for _, e := range add {
		n += len(e.Member)
	}
	return n
}

// run is a part of a changed set: members that stay, or one that is new.
type run struct {
	Span     // of the old set
	new  int // in add; -1: none
}

// AppendChanged appends the set without the members at drop and with those of add to dst. The spans of drop ascend and
// do not overlap; add is in the order of CompareZ, and names no member that stays. dst is no part of the set's value,
// but may be behind its end. Nothing is to be stored if no member is left. As in Redis a small set has no -0: it
// becomes 0.
func (z ZSet) AppendChanged(dst []byte, drop []Span, add []ZEntry) []byte {
	runs := z.runs(drop, add)
	n := z.n + len(add)
	for _, d := range drop {
		n -= d.Hi - d.Lo
	}
	word, none := uint32(n), 0.0
	if z.large || n > zsetListpackEntries || slices.ContainsFunc(add, func(e ZEntry) bool {
		return len(e.Member) > zsetListpackValue
	}) {
		word, none = word|zsetLarge, math.Copysign(0, -1)
	}
	dst = slices.Grow(dst, z.ChangedLen(drop, add))
	dst = binary.LittleEndian.AppendUint32(dst, word)
	for _, r := range runs {
		if r.new >= 0 {
			dst = binary.LittleEndian.AppendUint64(dst, math.Float64bits(add[r.new].Score+none))
			continue
		}
		dst = append(dst, z.scores[8*r.Lo:8*r.Hi]...)
	}
	end := 0
	for _, r := range runs {
		if r.new >= 0 {
			end += len(add[r.new].Member)
			dst = binary.LittleEndian.AppendUint32(dst, uint32(end))
			continue
		}
		moved := uint32(end - z.start(r.Lo)) // modulo 2³²
		for i := r.Lo; i < r.Hi; i++ {
			dst = binary.LittleEndian.AppendUint32(dst, binary.LittleEndian.Uint32(z.ends[4*i:])+moved)
		}
		end += z.start(r.Hi) - z.start(r.Lo)
	}
	for _, r := range runs {
		if r.new >= 0 {
			dst = append(dst, add[r.new].Member...)
			continue
		}
		dst = append(dst, z.members[z.start(r.Lo):z.start(r.Hi)]...)
	}
	return dst
}

// runs puts what stays and what is new in order. The place of a new member is found among the old ones, dropped or not.
func (z ZSet) runs(drop []Span, add []ZEntry) []run {
	runs := make([]run, 0, 2*(len(drop)+len(add))+1)
	at := 0
	stay := func(to int) {
		for len(drop) > 0 && drop[0].Lo < to {
			if at < drop[0].Lo {
				runs = append(runs, run{Span{at, drop[0].Lo}, -1})
			}
			at, drop = drop[0].Hi, drop[1:]
		}
		if at < to { // else the new member stands among those that go
			runs = append(runs, run{Span{at, to}, -1})
			at = to
		}
	}
	for i, e := range add {
		stay(sort.Search(z.n, func(j int) bool { return CompareZ(z.Entry(j), e) >= 0 }))
		runs = append(runs, run{new: i})
	}
	stay(z.n)
	return runs
}

// Small reports whether Redis would keep the set in a listpack by its default settings.
func (z ZSet) Small() bool { return !z.large }

// scanHashes is how many hashes there are for a scan, and zscanCalls into how many parts it divides them at most: each
// call reads the whole record.
const (
	scanHashes = 1 << 32
	zscanCalls = 64
)

// Scan is the places of the members that a call of ZSCAN gives, with the next call's cursor. It gives all of a small
// set at once, as Redis does. From a large one it gives those whose hashes lie in a part of all hashes. That part
// begins at the cursor and has about count of them. So a member that is there all the time is given once, however the
// set changes meanwhile.
func (z ZSet) Scan(cursor uint64, count int64) (places []int, next uint64) {
	from, to := uint64(0), uint64(scanHashes)
	if z.large {
		width := uint64(scanHashes)
		if count < int64(z.n) {
			width = max(scanHashes/zscanCalls, scanHashes/uint64(z.n)*uint64(count))
		}
		if from = cursor; from < scanHashes && from+width < scanHashes {
			to, next = from+width, from+width
		}
	}
	for i := range z.n {
		if h := xxh3.Hash(z.Member(i)) >> 32; h >= from && h < to {
			places = append(places, i)
		}
	}
	return places, next
}
