package gateway

import (
	"math/rand/v2"
	"strconv"
	"testing"

	"github.com/kvd-project/kvd/client/clienttest"
)

// Bits and HyperLogLogs, on a redis-server and on a gateway: the same replies, and the same bytes.
func TestBitsLikeRedis(t *testing.T) {
	likeRedis(t, randomBits, 24, clienttest.New(clienttest.Options{}))
}

func randomBits(rng *rand.Rand) [][]string {
	pick := func(s ...string) string { return s[rng.IntN(len(s))] }
	key := func() string { return "key:" + strconv.Itoa(rng.IntN(4)) }
	offset := func() string {
		if rng.IntN(8) > 0 {
			return strconv.Itoa(rng.IntN(70))
		}
		return pick("-1", "80000", "536870912", "1000", "abc", "", "9223372036854775807", "#1", "4294967296")
	}
	num := func() string {
		if rng.IntN(6) > 0 {
			return strconv.Itoa(rng.IntN(40) - 20)
		}
		return pick("9223372036854775807", "-9223372036854775808", "9223372036854775808", "abc", "1000000", "-1000000",
			"")
	}
	unit := func(s []string) []string {
		if rng.IntN(2) == 0 {
			s = append(s, pick("BIT", "byte", "BYTE", "bit", "bits"))
		}
		return s
	}
	field := func() (s []string) {
		typ := func() string {
			if rng.IntN(8) > 0 {
				return pick("i", "u") + strconv.Itoa(1+rng.IntN(63))
			}
			return pick("i64", "u64", "u0", "i65", "x8", "i", "", "u08")
		}
		at := func() string {
			if rng.IntN(3) == 0 {
				return "#" + strconv.Itoa(rng.IntN(5))
			}
			return offset()
		}
		for range 1 + rng.IntN(4) {
			switch rng.IntN(9) {
			case 0, 1, 2:
				s = append(s, pick("GET", "get"), typ(), at())
			case 3, 4:
				s = append(s, "SET", typ(), at(), num())
			case 5, 6:
				s = append(s, "INCRBY", typ(), at(), num())
			case 7:
				s = append(s, "OVERFLOW", pick("WRAP", "sat", "FAIL", "SAT", "fail", "none"))
			case 8:
				s = append(s, pick("GET", "SET", "foo"), typ())
			}
		}
		return s
	}
	elements := func() (s []string) {
		n := rng.IntN(4)
		if rng.IntN(6) == 0 {
			n = rng.IntN(900)
		}
		for range n {
			s = append(s, "e"+strconv.Itoa(rng.IntN(5000)))
		}
		return s
	}
	hll := func() string { return "hll:" + strconv.Itoa(rng.IntN(3)) }
	k := key()
	switch rng.IntN(20) {
	case 0, 1, 2:
		return [][]string{{"SETBIT", k, offset(), pick("0", "1", "1", "1", "2", "x")}, {"GET", k}}
	case 3:
		return [][]string{{"GETBIT", k, offset()}}
	case 4, 5:
		s := []string{"BITCOUNT", k}
		if rng.IntN(4) > 0 {
			s = unit(append(s, num(), num()))
		}
		return [][]string{s}
	case 6, 7:
		s := []string{"BITPOS", k, pick("0", "1", "0", "1", "2", "x")}
		if rng.IntN(4) > 0 {
			s = append(s, num())
		}
		if rng.IntN(3) > 0 {
			s = unit(append(s, num()))
		}
		return [][]string{s}
	case 8, 9, 10:
		return [][]string{append([]string{"BITFIELD", k}, field()...), {"GET", k}}
	case 11:
		return [][]string{append([]string{"BITFIELD_RO", k}, field()...)}
	case 12:
		return [][]string{
			{"SET", k, pick("", "\xff\xff\xff", "foobar", "\x00\x00", "\x00\xff\xf0", "ohmytext", "mynewtext",
				"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f")}}
	case 13:
		return [][]string{append([]string{"BITOP", pick("AND", "or", "XOR", "NOT", "not", "foo"), k, key()},
			pick2(rng, key(), k)...), {"GET", k}}
	case 14:
		return [][]string{
			append([]string{"LCS", key(), key()}, pick2(rng, "LEN", "IDX", "WITHMATCHLEN", "MINMATCHLEN", "3")...)}
	case 15, 16, 17:
		h := hll()
		return [][]string{append([]string{"PFADD", h}, elements()...), {"GET", h}}
	case 18:
		// The estimate that Redis keeps in the value would be the only difference.
		return [][]string{{"PFCOUNT", pick(hll(), k), hll()},
			{"PFDEBUG", pick("ENCODING", "TODENSE", "DECODE", "GETREG", "foo"), hll()}}
	default:
		h := pick(hll(), k)
		return [][]string{append([]string{"PFMERGE", h}, pick2(rng, hll(), k)...), {"GET", h}, {"DEL", hll()}}
	}
}
