package values

import (
	"bytes"
	"math"

	"github.com/kvd-project/kvd/internal/number"
	"github.com/kvd-project/kvd/internal/redis/collection"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

var _ = oneKey(map[string]KeyFunc{
	"zcount": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zcount(k, args, w, byScore)
	},
	"zlexcount": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zcount(k, args, w, byLex)
	},
	"zpopmax": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zpop(k, args, w, true)
	},
	"zpopmin": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zpop(k, args, w, false)
	},
	"zrange": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zrange(k, args, w, zquery{auto: true})
	},
	"zrangebylex": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zrange(k, args, w, zquery{by: byLex})
	},
	"zrangebyscore": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zrange(k, args, w, zquery{by: byScore})
	},
	"zremrangebylex": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zremRange(k, args, w, byLex)
	},
	"zremrangebyrank": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zremRange(k, args, w, byRank)
	},
	"zremrangebyscore": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zremRange(k, args, w, byScore)
	},
	"zrevrange": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zrange(k, args, w, zquery{rev: true})
	},
	"zrevrangebylex": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zrange(k, args, w, zquery{by: byLex, rev: true})
	},
	"zrevrangebyscore": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zrange(k, args, w, zquery{by: byScore, rev: true})
	},
})

// scoreOf is a number as an argument must have it: all of the text is one that strtod(3) takes.
// It takes no white space, no number that has no double, and no NaN; infinities are good.
func scoreOf(b []byte) (f float64, ok bool) {
	if len(b) == 0 || number.IsSpace(b[0]) {
		return 0, false
	}
	f, used, inRange := number.Double(b)
	if !inRange && (f == 0 || math.IsInf(f, 0)) || math.IsNaN(f) {
		return 0, false
	}
	return f, used == len(b)
}

// textNumber is a number as those places of Redis take it that read C's strings: white space may stand before it,
// nothing at all is 0, and the text ends with the first zero byte.
func textNumber(b []byte) (f float64, inRange, ok bool) {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	f, used, inRange := number.Double(b)
	return f, inRange, used == len(b) && !math.IsNaN(f)
}

// bound is an end of a range of scores or of members.
// A range of scores uses score, and one of members the others.
type bound struct {
	Score  float64
	member []byte // of ranges by members
	Open   bool   // the bound itself is not in the range
	inf    int    // of members: -1 or 1 if it stands before or behind all of them
}

// scoreBound reads an end of a range of scores. Unlike elsewhere in Redis nothing at all is 0, and a number that is too
// large infinite.
func scoreBound(b []byte) (x bound, ok bool) {
	if len(b) > 0 && b[0] == '(' {
		x.Open, b = true, b[1:]
	}
	x.Score, _, ok = textNumber(b)
	return x, ok
}

// lexBound reads an end of a range of members.
// Each must say whether it is in the range, by [ or (, or be - or +.
func lexBound(b []byte) (x bound, ok bool) {
	switch {
	case len(b) == 1 && b[0] == '-':
		x.inf = -1
	case len(b) == 1 && b[0] == '+':
		x.inf = 1
	case len(b) > 0 && (b[0] == '(' || b[0] == '['):
		x.member, x.Open = b[1:], b[0] == '('
	default:
		return x, false
	}
	return x, true
}

// orderBy says what the ends of a range are.
type orderBy uint8

const (
	byRank orderBy = iota
	byScore
	byLex
)

// zspan is a range as its two ends say it; at is its places in a set.
type zspan struct {
	by           orderBy
	start, end   int64 // of ranks
	lower, upper bound // of scores and members
}

// parseSpan reads the ends of a range, and returns the error reply otherwise.
func parseSpan(by orderBy, lower, upper []byte) (s zspan, err error) {
	s.by = by
	var ok1, ok2 bool
	var bad refusal
	switch by {
	case byRank:
		s.start, ok1 = resp.ParseInt(lower)
		s.end, ok2 = resp.ParseInt(upper)
		bad = ErrNotInt
	case byScore:
		s.lower, ok1 = scoreBound(lower)
		s.upper, ok2 = scoreBound(upper)
		bad = errMinMax
	case byLex:
		s.lower, ok1 = lexBound(lower)
		s.upper, ok2 = lexBound(upper)
		bad = errMinMaxLex
	}
	if ok1 && ok2 {
		return s, nil
	}
	return s, bad
}

// at is the places of the range in a set, none of them if Lo is not less than Hi. Ranks are counted from the other end
// if rev. A range of members means something only if all scores are equal, as in Redis; otherwise it is some range, and
// harms nothing.
func (s *zspan) at(z collection.ZSet, rev bool) (p collection.Span) {
	n := z.Len()
	switch s.by {
	case byRank:
		start, end, n := s.start, s.end, int64(n)
		if start < 0 {
			start = max(start+n, 0)
		}
		if end < 0 {
			end += n
		}
		if start > end || start >= n {
			return p
		}
		p = collection.Span{Lo: int(start), Hi: int(min(end, n-1)) + 1}
		if rev {
			p.Lo, p.Hi = int(n)-p.Hi, int(n)-p.Lo
		}
	case byScore:
		p = collection.Span{Lo: z.SearchScore(s.lower.Score, s.lower.Open),
			Hi: z.SearchScore(s.upper.Score, !s.upper.Open)}
	case byLex:
		place := func(b bound, above bool) int {
			switch b.inf {
			case -1:
				return 0
			case 1:
				return n
			}
			return z.SearchMember(b.member, above)
		}
		p = collection.Span{Lo: place(s.lower, s.lower.Open), Hi: place(s.upper, !s.upper.Open)}
	}
	return collection.Span{Lo: p.Lo, Hi: max(p.Lo, p.Hi)}
}

// zquery is what ZRANGE and its relatives ask for.
// Its fields by, rev, auto and store say before parse which command it is.
type zquery struct {
	zspan
	by            orderBy
	rev           bool // from the highest on
	auto          bool // by and rev may be arguments
	store         bool // of ZRANGESTORE, whose reply has no scores
	withScores    bool
	offset, limit int64 // limit -1: none
}

// parse reads the arguments from the two ends on.
// BYSCORE and BYLEX with REV have the upper end first, as the commands do that they replace.
func (q *zquery) parse(args [][]byte) (err error) {
	q.limit = -1
	chosen, turned := !q.auto, !q.auto
	p := OptionsOf(args[2:])
	for p.More() {
		switch {
		case !q.store && p.Flag("withscores"):
			q.withScores = true
		case p.Option("limit", 2):
			q.offset, q.limit = p.Int(), p.Int()
		case !turned && p.Flag("rev"):
			q.rev, turned = true, true
		case !chosen && p.Flag("bylex"):
			q.by, chosen = byLex, true
		case !chosen && p.Flag("byscore"):
			q.by, chosen = byScore, true
		default:
			p.Wrong()
		}
	}
	if err := p.End(); err != nil {
		return err
	}
	switch {
	case q.limit != -1 && q.by == byRank:
		return refusal("ERR syntax error, LIMIT is only supported in combination with either BYSCORE or BYLEX")
	case q.withScores && q.by == byLex:
		return refusal("ERR syntax error, WITHSCORES not supported in combination with BYLEX")
	}
	// The ends of ranks are turned round with the places, and not here.
	lower, upper := args[0], args[1]
	if q.rev && q.by != byRank {
		lower, upper = upper, lower
	}
	q.zspan, err = parseSpan(q.by, lower, upper)
	return err
}

// places is where the members that are asked for stand.
// It is in the order of the set; writeMembers turns it round if rev.
func (q *zquery) places(z collection.ZSet) collection.Span {
	p := q.at(z, q.rev)
	if q.by == byRank {
		return p
	}
	n := int64(p.Hi - p.Lo)
	skip := n // a negative offset leaves nothing, as in Redis
	if q.offset >= 0 {
		skip = min(q.offset, n)
	}
	take := n - skip
	if q.limit >= 0 {
		take = min(take, q.limit)
	}
	if q.rev {
		p.Hi -= int(skip)
		p.Lo = p.Hi - int(take)
	} else {
		p.Lo += int(skip)
		p.Hi = p.Lo + int(take)
	}
	return p
}

// zrange is ZRANGE and its relatives.
func zrange(k *Key, args [][]byte, w *resp.Writer, q zquery) error {
	if err := q.parse(args[2:]); err != nil {
		return err
	}
	z, err := k.sortedSet(args[1])
	if err != nil {
		return err
	}
	writeMembers(w, z, q.places(z), q.rev, q.withScores)
	return nil
}

func writeMembers(w *resp.Writer, z collection.ZSet, p collection.Span, rev, withScores bool) {
	beginMembers(w, p.Hi-p.Lo, withScores)
	for i := range p.Hi - p.Lo {
		at := p.Lo + i
		if rev {
			at = p.Hi - 1 - i
		}
		writeMember(w, z.Entry(at), withScores)
	}
}

// beginMembers begins an array of members: in RESP2 their scores are elements of their own, in RESP3 a member
// and its score are an array.
// So many writeMember must follow.
func beginMembers(w *resp.Writer, n int, withScores bool) {
	if withScores && w.Proto != 3 {
		n *= 2
	}
	w.Array(n)
}

func writeMember(w *resp.Writer, e collection.ZEntry, withScores bool) {
	if withScores && w.Proto == 3 {
		w.Array(2)
	}
	w.Bulk(e.Member)
	if withScores {
		w.Double(e.Score)
	}
}

// spanOf reads a range from min to max, and finds it in a key's sorted set.
func spanOf(k *Key, args [][]byte, by orderBy) (z collection.ZSet, p collection.Span, err error) {
	s, err := parseSpan(by, args[2], args[3])
	if err != nil {
		return z, p, err
	}
	if z, err = k.sortedSet(args[1]); err != nil {
		return z, p, err
	}
	return z, s.at(z, false), nil
}

// zremRange removes a range.
// It replies with how many members went, and deletes the key with its last one.
func zremRange(k *Key, args [][]byte, w *resp.Writer, by orderBy) error {
	z, p, err := spanOf(k, args, by)
	if err != nil {
		return err
	}
	if p.Lo < p.Hi {
		if err := k.changeSortedSet(z, []collection.Span{p}, nil); err != nil {
			return err
		}
	}
	w.Int(int64(p.Hi - p.Lo))
	return nil
}

// zcount counts a range.
// It searches both ends, and looks at no member between them.
func zcount(k *Key, args [][]byte, w *resp.Writer, by orderBy) error {
	_, p, err := spanOf(k, args, by)
	if err != nil {
		return err
	}
	w.Int(int64(p.Hi - p.Lo))
	return nil
}

// zpop is ZPOPMIN and ZPOPMAX.
// Without a count it replies flat in RESP3, too, as Redis does.
func zpop(k *Key, args [][]byte, w *resp.Writer, top bool) error {
	n, nested := int64(1), false
	if len(args) > 3 {
		return ErrSyntax
	}
	if len(args) == 3 {
		var ok bool
		if n, ok = resp.ParseInt(args[2]); !ok || n < 0 {
			return refusal(errPositive)
		}
		nested = w.Proto == 3
	}
	z, err := k.sortedSet(args[1])
	if err != nil {
		return err
	}
	return popMembers(k, z, n, top, w, func(n int) {
		if nested {
			w.Array(n)
		} else {
			w.Array(2 * n)
		}
	}, nested)
}

// popMembers removes up to n members from an end of a set and replies with them, behind what begin writes for their
// number. In nested replies a member and its score are an array. z still refers to the value of before, in a buffer
// that the change did not touch. If there is no room yet it writes nothing.
func popMembers(k *Key, z collection.ZSet, n int64, top bool, w *resp.Writer, begin func(n int), nested bool) error {
	p := collection.Span{Hi: int(min(n, int64(z.Len())))}
	if top {
		p = collection.Span{Lo: z.Len() - p.Hi, Hi: z.Len()}
	}
	if p.Lo < p.Hi {
		if err := k.changeSortedSet(z, []collection.Span{p}, nil); err != nil {
			return err
		}
	}
	begin(p.Hi - p.Lo)
	for i := range p.Hi - p.Lo {
		at := p.Lo + i
		if top {
			at = p.Hi - 1 - i
		}
		if nested {
			w.Array(2)
		}
		w.Bulk(z.Member(at))
		w.Double(z.Score(at))
	}
	return nil
}
