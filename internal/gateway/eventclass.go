package gateway

import "strings"

// eventClass is what of it notify-keyspace-events asks for, a set of its letters.
// The letters are those of redis.conf. Without onKeyspace or onKeyevent nothing is published, whatever the other
// classes are.
type eventClass uint32

const (
	onKeyspace eventClass = 1 << iota // events in a channel for each key
	onKeyevent                        // events in a channel for each event
	onGeneric                         // commands on keys of any type
	onString
	onList
	onSet
	onHash
	onZSet
	onExpired // see expiries
	onEvicted // never: clients of a cache evict, and no gateway hears of it
	onStream
	onMiss   // a key that a command reads is not there
	onModule // never: there are no modules
	onNew    // a key that was not there
	// onNothing is of events that Redis has not, which nobody can ask for.
	onNothing
	// the letter A
	onAll = onGeneric | onString | onList | onSet | onHash | onZSet | onExpired | onEvicted | onStream | onModule
)

// eventLetters are in the order in which CONFIG GET has them.
var eventLetters = []struct {
	letter byte
	class  eventClass
}{
	{'g', onGeneric}, {'$', onString}, {'l', onList}, {'s', onSet}, {'h', onHash}, {'z', onZSet}, {'x', onExpired},
	{'e', onEvicted},
	{'t', onStream}, {'d', onModule}, {'n', onNew}, {'K', onKeyspace}, {'E', onKeyevent}, {'m', onMiss},
}

// parseEvents reads a value of notify-keyspace-events.
// The empty value is good: it asks for nothing. ok is false for a letter that Redis has not.
func parseEvents(v []byte) (c eventClass, ok bool) {
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
func (c eventClass) String() string {
	var s strings.Builder
	all := c&onAll == onAll
	if all {
		s.WriteByte('A')
	}
	for _, l := range eventLetters {
		if c&l.class != 0 && !(all && l.class&(onAll|onNew) != 0) {
			s.WriteByte(l.letter)
		}
	}
	return s.String()
}
