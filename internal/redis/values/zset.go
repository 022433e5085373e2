package values

import (
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/internal/redis/args"
	"github.com/kvd-project/kvd/internal/redis/collection"
	"github.com/kvd-project/kvd/internal/redis/glob"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/units"
)

var _ = oneKey(map[string]KeyFunc{
	"zadd":        cmdZAdd,
	"zcard":       cmdZCard,
	"zincrby":     cmdZIncrBy,
	"zmscore":     cmdZMScore,
	"zrandmember": cmdZRandMember,
	"zrank": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zrank(k, args, w, false)
	},
	"zrem": cmdZRem,
	"zrevrank": func(k *Key, args [][]byte, w *resp.Writer) error {
		return zrank(k, args, w, true)
	},
	"zscan":  cmdZScan,
	"zscore": cmdZScore,
})

// Sorted sets. A set is parsed where a command begins, and nothing behind that can fail but for want of room. Replies,
// and the order in which arguments are looked at, are those of t_zset.c.

const (
	errMinMax    = "ERR min or max is not a float"
	errMinMaxLex = "ERR min or max not valid string range item"
	errPositive  = "ERR value is out of range, must be positive"
)

// sortedSet is the sorted set of a key, empty if there is none.
// The set refers to the key's value, and is good until that changes.
func (k *Key) sortedSet(name []byte) (z collection.ZSet, err error) {
	if err := k.typed(client.SortedSet); err != nil || !k.Present {
		return z, err
	}
	if z, err = collection.ParseZSet(k.Value); err != nil {
		return z, collectionError(client.SortedSet, name, err)
	}
	return z, nil
}

// changeSortedSet makes z, without the spans of drop and with add, the key's value, and deletes the key if nothing is
// left. If it could not, the command is to be given up: errRoom, if the key says how much room it wants. drop
// and add are as in collection.ZSet.AppendChanged. The expiry stays.
func (k *Key) changeSortedSet(z collection.ZSet, drop []collection.Span, add []collection.ZEntry) error {
	// Only how many are left decides whether there is a key; what they are, AppendChanged finds out.
	left := z.Len() + len(add)
	for _, d := range drop {
		left -= d.Hi - d.Lo
	}
	if left == 0 {
		if k.Present {
			k.Delete()
		}
		return nil
	}
	n := z.ChangedLen(drop, add)
	if n > min(collection.MaxLen, k.MaxValue) && n > len(k.Value) { // a limit that was lowered does not keep members
		return collectionError(client.SortedSet, nil, collection.ErrTooLong)
	}
	if n > k.Room {
		k.Want = n
		return ErrRoom
	}
	// The value may be in own already, by a command of the same unit, and is still read.
	b := k.Own[:0]
	if cap(b) < n || len(k.Value) > 0 && &b[:1][0] == &k.Value[0] {
		b = make([]byte, 0, n)
	}
	k.Own = z.AppendChanged(b, drop, add)
	k.SetAs(client.SortedSet, k.Own, k.Expires)
	return nil
}

// storeSortedSet replaces the key, whatever it was, by a set of these members.
// list is put in order; its members may lie in any key's value, also in this one's. An empty list deletes the key.
func (k *Key) storeSortedSet(list []collection.ZEntry) error {
	slices.SortFunc(list, collection.CompareZ)
	// They are put back if the command is given up, which leaves the key as it was.
	expires, flags := k.Expires, k.Flags
	k.Expires, k.Flags = 0, 0
	err := k.changeSortedSet(collection.ZSet{}, nil, list)
	if err != nil {
		k.Expires, k.Flags = expires, flags
	}
	return err
}

// cmdZCard reads the number of members, which the encoding has, though the store reads all of the value.
func cmdZCard(k *Key, args [][]byte, w *resp.Writer) error {
	z, err := k.sortedSet(args[1])
	if err != nil {
		return err
	}
	w.Int(int64(z.Len()))
	return nil
}

// cmdZScore is null for a member that is not there. Scores are doubles in RESP3, and text in RESP2.
func cmdZScore(k *Key, args [][]byte, w *resp.Writer) error {
	z, err := k.sortedSet(args[1])
	if err != nil {
		return err
	}
	writeScore(w, z, z.Find(args[2]))
	return nil
}

// writeScore replies with the score of the member at a place, -1 for none.
func writeScore(w *resp.Writer, z collection.ZSet, at int) {
	if at < 0 {
		w.Null()
		return
	}
	w.Double(z.Score(at))
}

// cmdZMScore passes over the set once for many members, and searches for a few.
func cmdZMScore(k *Key, args [][]byte, w *resp.Writer) error {
	z, err := k.sortedSet(args[1])
	if err != nil {
		return err
	}
	w.Array(len(args) - 2)
	for _, at := range z.Places(args[2:]) {
		writeScore(w, z, at)
	}
	return nil
}

// zrank is ZRANK and ZREVRANK, which count from 0. Members of equal score are in the order of their bytes.
func zrank(k *Key, args [][]byte, w *resp.Writer, rev bool) error {
	z, err := k.sortedSet(args[1])
	if err != nil {
		return err
	}
	at := z.Find(args[2])
	switch {
	case at < 0:
		w.Null()
	case rev:
		w.Int(int64(z.Len() - 1 - at))
	default:
		w.Int(int64(at))
	}
	return nil
}

// cmdZRem counts a member that is named twice once.
func cmdZRem(k *Key, args [][]byte, w *resp.Writer) error {
	z, err := k.sortedSet(args[1])
	if err != nil {
		return err
	}
	// A place comes as often as its member is named, and must be dropped once.
	places := z.Places(args[2:])
	slices.Sort(places)
	places = slices.Compact(places)
	var drop []collection.Span
	for _, at := range places {
		if at >= 0 {
			drop = append(drop, collection.Span{Lo: at, Hi: at + 1})
		}
	}
	if len(drop) > 0 {
		if err := k.changeSortedSet(z, drop, nil); err != nil {
			return err
		}
	}
	w.Int(int64(len(drop)))
	return nil
}

type zaddArgs struct {
	nx, xx, gt, lt, ch, incr bool
	scores                   []float64
	members                  [][]byte // as many as scores
}

// parseZAdd reads options, scores and members.
func parseZAdd(args [][]byte) (a zaddArgs, err error) {
	p := OptionsOf(args)
	for p.More() {
		switch {
		case p.Flag("nx"):
			a.nx = true
		case p.Flag("xx"):
			a.xx = true
		case p.Flag("ch"):
			a.ch = true
		case p.Flag("incr"):
			a.incr = true
		case p.Flag("gt"):
			a.gt = true
		case p.Flag("lt"):
			a.lt = true
		default:
			err = a.parsePairs(&p)
			return a, err
		}
	}
	return a, ErrSyntax
}

// parsePairs reads what follows the options. All scores are good before any member is touched.
func (a *zaddArgs) parsePairs(p *args.Parser) error {
	switch {
	case p.Left()%2 != 0:
		return ErrSyntax
	case a.nx && a.xx:
		return refusal("ERR XX and NX options at the same time are not compatible")
	case a.gt && a.nx || a.lt && a.nx || a.gt && a.lt:
		return refusal("ERR GT, LT, and/or NX options at the same time are not compatible")
	case a.incr && p.Left() > 2:
		return refusal("ERR INCR option supports a single increment-element pair")
	}
	for p.More() {
		a.scores, a.members = append(a.scores, p.Float(scoreOf)), append(a.members, p.Str())
	}
	return p.End()
}

// cmdZAdd replies with how many members are new, with CH how many are new or have another score, and with INCR with the
// score, or null if the options forbade it.
func cmdZAdd(k *Key, args [][]byte, w *resp.Writer) error {
	a, err := parseZAdd(args[2:])
	if err != nil {
		return err
	}
	return zadd(k, args[1], &a, w)
}

// cmdZIncrBy is ZADD with INCR, and makes a member that is not there.
func cmdZIncrBy(k *Key, args [][]byte, w *resp.Writer) error {
	by, ok := scoreOf(args[2])
	if !ok {
		return ErrNotFloat
	}
	return zadd(k, args[1], &zaddArgs{incr: true, scores: []float64{by}, members: args[3:]}, w)
}

// zmember is a member that ZADD names: where it stands, and the score that it is to have.
type zmember struct {
	at      int  // in the old set; -1: nowhere
	present bool // it is in the set, or has just been added
	score   float64
	changed bool // score is not that of the old set
}

// set gives the member a score as the options allow, and says whether it did nothing at all. A sum that is
// not a number is ok false.
func (m *zmember) set(a *zaddArgs, score float64) (added, updated, nothing, ok bool) {
	if !m.present {
		if a.xx {
			return false, false, true, true
		}
		m.present, m.score, m.changed = true, score, true
		return true, false, false, true
	}
	if a.nx {
		return false, false, true, true
	}
	if a.incr {
		if score += m.score; math.IsNaN(score) {
			return false, false, false, false
		}
	}
	if a.lt && score >= m.score || a.gt && score <= m.score {
		return false, false, true, true
	}
	if score == m.score {
		return false, false, false, true
	}
	m.score, m.changed = score, true
	return false, true, false, true
}

// zadd adds members in the order in which they are named, one of them perhaps several times, and then makes one new set
// of all that has changed. If one of the sums is no number nothing is changed. The cost is that of the whole set, once,
// however many members there are.
func zadd(k *Key, name []byte, a *zaddArgs, w *resp.Writer) error {
	z, err := k.sortedSet(name)
	if err != nil {
		return err
	}
	places := z.Places(a.members)
	list := make([]zmember, len(a.members))
	var first map[string]int // where a member is in list, if it may be named twice
	if len(list) > 1 {
		first = make(map[string]int, len(list))
	}
	added, updated, nothing := 0, 0, false
	for i, name := range a.members {
		m := &list[i]
		m.at = places[i]
		// A member that is named again goes on from what its first mention has made of it, as if the commands had been
		// two.
		if first != nil {
			if j, again := first[string(name)]; again {
				m = &list[j]
			} else {
				first[string(name)] = i
			}
		}
		if m == &list[i] && m.at >= 0 {
			m.present, m.score = true, z.Score(m.at)
		}
		add, change, none, ok := m.set(a, a.scores[i])
		if !ok {
			return refusal("ERR resulting score is not a number (NaN)")
		}
		added += int(Bit(add))
		updated += int(Bit(change))
		nothing = none
	}
	var drop []collection.Span
	var add []collection.ZEntry
	for i := range list {
		m := &list[i]
		if !m.changed {
			continue
		}
		if m.at >= 0 {
			drop = append(drop, collection.Span{Lo: m.at, Hi: m.at + 1})
		}
		add = append(add, collection.ZEntry{Member: a.members[i], Score: m.score})
	}
	if len(add) > 0 {
		ordered.Sort(drop, func(x, y collection.Span) int { return x.Lo - y.Lo })
		slices.SortFunc(add, collection.CompareZ)
		if err := k.changeSortedSet(z, drop, add); err != nil {
			return err
		}
	}
	switch {
	case a.incr && nothing:
		w.Null()
	case a.incr:
		w.Double(list[0].score)
	case a.ch:
		w.Int(int64(added + updated))
	default:
		w.Int(int64(added))
	}
	return nil
}

// maxRandomBytes bounds the reply for members that may come again and again, since their number is the client's.
const maxRandomBytes = collection.MaxLen

// cmdZRandMember with a positive count gives different members, and with a negative one so many, some of them perhaps
// again.
func cmdZRandMember(k *Key, args [][]byte, w *resp.Writer) error {
	if len(args) == 2 {
		z, err := k.sortedSet(args[1])
		switch {
		case err != nil:
			return err
		case z.Len() == 0:
			w.Null()
		default:
			w.Bulk(z.Member(rand.IntN(z.Len())))
		}
		return nil
	}
	p := OptionsOf(args[2:])
	n, err := randomCount(p.Str())
	if err != nil {
		return err
	}
	withScores := p.Flag("withscores")
	switch err := p.End(); {
	case err != nil:
		return err
	case withScores && (n < -math.MaxInt64/2 || n > math.MaxInt64/2):
		return refusal("ERR value is out of range")
	}
	z, err := k.sortedSet(args[1])
	switch {
	case err != nil:
		return err
	case z.Len() == 0 || n == 0:
		w.Array(0)
	case n < 0:
		return writeRandom(w, z, -n, withScores)
	case n >= int64(z.Len()):
		writeMembers(w, z, collection.Span{Hi: z.Len()}, false, withScores)
	default:
		beginMembers(w, int(n), withScores)
		for _, at := range rand.Perm(z.Len())[:n] {
			writeMember(w, z.Entry(at), withScores)
		}
	}
	return nil
}

// writeRandom replies with n members, some of them several times.
// A reply that becomes too long is taken back, and an error takes its place.
func writeRandom(w *resp.Writer, z collection.ZSet, n int64, withScores bool) error {
	start := w.Len()
	if n <= maxRandomBytes {
		beginMembers(w, int(n), withScores)
		for ; n > 0 && w.Len()-start <= maxRandomBytes; n-- {
			writeMember(w, z.Entry(rand.IntN(z.Len())), withScores)
		}
	}
	if n > 0 {
		w.Truncate(start)
		return refusal("ERR kvd: random members of more than " + units.Bytes(maxRandomBytes))
	}
	return nil
}

// cmdZScan gives all of a small set at once, as Redis does, and of a larger one the part that the cursor and COUNT
// choose.
func cmdZScan(k *Key, args [][]byte, w *resp.Writer) error {
	a, some, err := k.scanOf(client.SortedSet, args, w)
	if !some {
		return err
	}
	z, err := k.sortedSet(args[1])
	if err != nil {
		return err
	}
	found, next := z.Scan(a.cursor, a.count)
	if a.pattern != nil {
		found = slices.DeleteFunc(found, func(i int) bool { return !glob.Match(a.pattern, z.Member(i)) })
	}
	w.Array(2)
	w.BulkString(strconv.FormatUint(next, 10))
	w.Array(2 * len(found))
	for _, i := range found {
		w.Bulk(z.Member(i))
		w.BulkString(scoreText(z.Score(i), z.Small()))
	}
	return nil
}

// scoreText is a score where Redis sends no double. In a listpack it has integers as such.
// small says that Redis would keep the set in a listpack.
func scoreText(f float64, small bool) string {
	switch {
	case math.IsInf(f, 0):
		return strings.TrimPrefix(strings.ToLower(strconv.FormatFloat(f, 'g', -1, 64)), "+")
	case small && math.Abs(f) <= math.MaxInt64/2 && f == math.Trunc(f):
		return strconv.FormatInt(int64(f), 10)
	}
	return strconv.FormatFloat(f, 'g', 17, 64)
}
