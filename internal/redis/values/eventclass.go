package values

import "strings"

// EventClass is what of it notify-keyspace-events asks for, a set of its letters.
// The letters are those of redis.conf. Without onKeyspace or onKeyevent nothing is published, whatever the other
// classes are.
type EventClass uint32

const (
	OnKeyspace EventClass = 1 << iota // events in a channel for each key
	OnKeyevent                        // events in a channel for each event
	OnGeneric                         // commands on keys of any type
	onString
	onList
	onSet
	onHash
	onZSet
	OnExpired // see expiries
	onEvicted // never: clients of a cache evict, and no gateway hears of it
	OnStream
	OnMiss   // a key that a command reads is not there
	onModule // never: there are no modules
	OnNew    // a key that was not there
	// the letter A
	onAll = OnGeneric | onString | onList | onSet | onHash | onZSet | OnExpired | onEvicted | OnStream | onModule
)

// eventLetters are in the order in which CONFIG GET has them.
var eventLetters = []struct {
	letter byte
	class  EventClass
}{
	{'g', OnGeneric}, {'$', onString}, {'l', onList}, {'s', onSet}, {'h', onHash}, {'z', onZSet}, {'x', OnExpired},
	{'e', onEvicted},
	{'t', OnStream}, {'d', onModule}, {'n', OnNew}, {'K', OnKeyspace}, {'E', OnKeyevent}, {'m', OnMiss},
}

// ParseEvents reads a value of notify-keyspace-events.
// The empty value is good: it asks for nothing. ok is false for a letter that Redis has not.
func ParseEvents(v []byte) (c EventClass, ok bool) {
next:
	for _, b := range v {
		if b == 'A' {
			c |= onAll
			continue
		}
		for _, l := range eventLetters {
			if l.letter == b {
				c |= l.class
				continue next
			}
		}
		return 0, false
	}
	return c, true
}

// String is the value as CONFIG GET shows it.
func (c EventClass) String() string {
	var s strings.Builder
	all := c&onAll == onAll
	if all {
		s.WriteByte('A')
	}
	for _, l := range eventLetters {
		if c&l.class != 0 && !(all && l.class&(onAll|OnNew) != 0) {
			s.WriteByte(l.letter)
		}
	}
	return s.String()
}
