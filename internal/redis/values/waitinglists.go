package values

import (
	"math"
	"math/big"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

var _ = waitingFor(map[string]WaitFunc{
	"blmove":     parseBLMove,
	"blmpop":     parseBLMPop,
	"blpop":      parseBPop(true),
	"brpop":      parseBPop(false),
	"brpoplpush": parseBRPopLPush,
})

// parseBPop is for BLPOP and BRPOP.
func parseBPop(left bool) WaitFunc {
	return func(args [][]byte) (b Blocking, err error) {
		names := args[1 : len(args)-1]
		b.Timeout, err = parseTimeout(args[len(args)-1])
		b.Names, b.Line = names, lineOfLists
		b.Try = func(t Keys, names [][]byte, again bool, w *resp.Writer) (found bool, err error) {
			return firstOf(t, names, client.List, again, func(k *Key, name []byte) error {
				err := k.popList(name, left, 1, w, func(int) {
					w.Array(2)
					w.Bulk(name)
				})
				if err == nil {
					t.Name(k, onList, endOf(left)+"pop")
				}
				return err
			})
		}
		return b, err
	}
}

// parseBLMove and those below read commands that wait; see blockingOn.
func parseBLMove(args [][]byte) (Blocking, error) {
	from, to, err := parseEnds(args[3:])
	if err != nil {
		return Blocking{}, err
	}
	return blockingMove(args, args[5], from, to)
}

func parseBRPopLPush(args [][]byte) (Blocking, error) {
	return blockingMove(args, args[3], false, true)
}

// blockingMove waits for the source alone.
// A destination that is no list is an error when there is something to move, and none before.
func blockingMove(args [][]byte, timeout []byte, fromLeft, toLeft bool) (b Blocking, err error) {
	b.Timeout, err = parseTimeout(timeout)
	b.Names, b.Line, b.One = args[1:2], lineOfLists, true
	b.Try = func(t Keys, _ [][]byte, again bool, w *resp.Writer) (found bool, err error) {
		return moveElement(t, args[1], args[2], fromLeft, toLeft, again, w)
	}
	return b, err
}

func parseBLMPop(args [][]byte) (b Blocking, err error) {
	a, err := parseMPop(args[2:], "left", "right")
	if err != nil {
		return b, err
	}
	b.Timeout, err = parseTimeout(args[1])
	b.Names, b.Line, b.Try = a.names, lineOfLists, a.try
	return b, err
}

// parseTimeout reads seconds as Redis does, whole milliseconds rounded up; 0 is for ever.
// Fractions of a second are allowed, as since Redis 6.
func parseTimeout(b []byte) (time.Duration, error) {
	f, ok := parseLongDouble(b)
	if !ok {
		return 0, refusal("ERR timeout is not a float or out of range")
	}
	ms, acc := f.Mul(f, big.NewFloat(1000)).Int64()
	if acc == big.Below && ms < math.MaxInt64 {
		ms++
	}
	switch {
	case ms < 0, f.Cmp(big.NewFloat(math.MaxInt64)) >= 0: // which overflows there
		return 0, refusal("ERR timeout is negative")
	case ms > math.MaxInt64/int64(time.Millisecond):
		return 0, nil // nobody sees the end of it
	}
	return time.Duration(ms) * time.Millisecond, nil
}

// firstOf pops from the first key that is there, which must be of a type; it returns false, without a reply, if there
// is none. The first key is most often the one, so that the others are read when they are needed. That those before it
// are not there is no condition for a client that may wait: many of them wait for the same keys, and would be in each
// other's way.
func firstOf(t Keys, names [][]byte, typ client.Type, again bool,
	pop func(k *Key, name []byte) error) (found bool, err error) {
	for i, name := range names {
		if i == 1 {
			t.Load(names[1:]...)
		}
		look := t.Key
		if t.Waits() {
			look = t.Peek
		}
		k := look(name)
		switch {
		case t.Failure() != nil:
			return true, nil
		case !k.Present, again && k.Type != typ:
			continue
		}
		if err := k.typed(typ); err != nil {
			return true, err
		}
		return true, pop(t.Key(name), name)
	}
	return false, nil
}
