package values

import (
	"math"
	"slices"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/collection"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

var _ = severalKeys(map[string]SeveralFunc{
	"zdiff":       zcombine("zdiff", subtractSets, 1),
	"zdiffstore":  zcombine("zdiffstore", subtractSets, 2),
	"zinter":      zcombine("zinter", intersectSets, 1),
	"zintercard":  zcombine("zintercard", intersectSets, 1),
	"zinterstore": zcombine("zinterstore", intersectSets, 2),
	"zmpop":       cmdZMPop,
	"zrangestore": cmdZRangeStore,
	"zunion":      zcombine("zunion", uniteSets, 1),
	"zunionstore": zcombine("zunionstore", uniteSets, 2),
})

var _ = waitingFor(map[string]WaitFunc{
	"bzmpop":   parseBZMPop,
	"bzpopmax": parseBZPop(true),
	"bzpopmin": parseBZPop(false),
})

// cmdZRangeStore stores what ZRANGE returns.
// Source and destination may be the same key.
func cmdZRangeStore(t Keys, args [][]byte, w *resp.Writer) error {
	q := zquery{auto: true, store: true}
	if err := q.parse(args[3:]); err != nil {
		return err
	}
	t.Load(args[1], args[2])
	z, err := t.Key(args[2]).sortedSet(args[2])
	if err != nil {
		return err
	}
	var list []collection.ZEntry
	for p := q.places(z); p.Lo < p.Hi; p.Lo++ {
		list = append(list, z.Entry(p.Lo))
	}
	if err := t.Key(args[1]).storeSortedSet(list); err != nil {
		return err
	}
	w.Int(int64(len(list)))
	return nil
}

// zpopArgs are popArgs for sorted sets.
type zpopArgs popArgs

// try pops from the first of names that has something, and replies with its name behind a head. In nested replies a
// member and its score are an array. names are those of the sets whose turn it is; false: none of them has a member,
// and nothing was written.
func (a zpopArgs) try(t Keys, names [][]byte, again bool, w *resp.Writer, begin func(name []byte, n int),
	nested bool) (found bool, err error) {
	return firstOf(t, names, client.SortedSet, again, func(k *Key, name []byte) error {
		z, err := k.sortedSet(name)
		if err == nil {
			if err = popMembers(k, z, a.count, a.last, w, func(n int) { begin(name, n) }, nested); a.last {
				t.Name(k, onZSet, "zpopmax")
			} else {
				t.Name(k, onZSet, "zpopmin")
			}
		}
		return err
	})
}

// tryNested is try with the reply of ZMPOP.
func (a zpopArgs) tryNested(t Keys, names [][]byte, again bool, w *resp.Writer) (found bool, err error) {
	return a.try(t, names, again, w, func(name []byte, n int) {
		w.Array(2)
		w.Bulk(name)
		w.Array(n)
	}, true)
}

func cmdZMPop(t Keys, args [][]byte, w *resp.Writer) error {
	a, err := parseMPop(args[1:], "min", "max")
	if err != nil {
		return err
	}
	found, err := zpopArgs(a).tryNested(t, a.names, false, w)
	if err == nil && !found {
		w.NullArray()
	}
	return err
}

// parseBZPop is for BZPOPMIN and BZPOPMAX.
// Each takes one member of one set, the first that has some.
func parseBZPop(top bool) WaitFunc {
	return func(args [][]byte) (b Blocking, err error) {
		a := zpopArgs{last: top, count: 1}
		b.Timeout, err = parseTimeout(args[len(args)-1])
		b.Names, b.Line = args[1:len(args)-1], lineOfZSets
		b.Try = func(t Keys, names [][]byte, again bool, w *resp.Writer) (found bool, err error) {
			return a.try(t, names, again, w, func(name []byte, n int) {
				w.Array(1 + 2*n)
				w.Bulk(name)
			}, false)
		}
		return b, err
	}
}

// parseBZMPop reads a timeout and then what ZMPOP has; a wrong count is found before a wrong timeout, as in Redis.
func parseBZMPop(args [][]byte) (b Blocking, err error) {
	a, err := parseMPop(args[2:], "min", "max")
	if err != nil {
		return b, err
	}
	b.Timeout, err = parseTimeout(args[1])
	b.Names, b.Line, b.Try = a.names, lineOfZSets, zpopArgs(a).tryNested
	return b, err
}

// zsource is a set that is combined with others.
// The set refers to a key's value, or to bytes of its own if the key is a set without scores.
type zsource struct {
	z      collection.ZSet
	weight float64 // 1 without WEIGHTS
}

// aggregate makes one score of two.
// Neither argument is a NaN, unless a product was.
type aggregate func(a, b float64) float64

// combination is what ZUNION and its relatives ask for.
// It is made for one try, and may be used up by it.
type combination struct {
	sources    []zsource
	aggregate  aggregate // of the scores of one member in several sets
	withScores bool
	limit      int64 // of what ZINTERCARD counts; 0: none
}

// A combiner makes one list of several sets, in any order. It may use up the sources.
type combiner func(x *combination) []collection.ZEntry

// zcombine makes a command whose argument at is the number of sets. If there is an argument before it, that is where
// the result goes. Sets of a few members are combined without asking for memory, and others after it was taken, by how
// many members they have together.
func zcombine(name string, combine combiner, at int) SeveralFunc {
	return func(t Keys, args [][]byte, w *resp.Writer) error {
		x, err := readCombination(t, name, args[at:])
		if err != nil {
			return err
		}
		members := 0
		for _, s := range x.sources {
			members += s.z.Len()
		}
		if members > freeMembers && !t.Take(int64(members)*memberCost) {
			return t.Failure()
		}
		list := combine(x)
		switch {
		case at > 1:
			if err := t.Key(args[1]).storeSortedSet(list); err != nil {
				return err
			}
			w.Int(int64(len(list)))
		case name == "zintercard":
			n := int64(len(list))
			if x.limit > 0 {
				n = min(n, x.limit)
			}
			w.Int(n)
		default:
			slices.SortFunc(list, collection.CompareZ)
			beginMembers(w, len(list), x.withScores)
			for _, e := range list {
				writeMember(w, e, x.withScores)
			}
		}
		return nil
	}
}

// A combination may keep freeMembers without taking memory, and memberCost bytes for each member beyond these: an
// entry, and one of a table.
const freeMembers, memberCost = 512, 128

// readCombination reads the sets and then the options, as Redis does: of several mistakes the same one is found.
// args begin with the number of sets. All sets are conditions
// of what is written.
func readCombination(t Keys, name string, args [][]byte) (x *combination, err error) {
	n, ok := resp.ParseInt(args[0])
	switch {
	case !ok:
		return nil, ErrNotInt
	case n < 1:
		return nil, refusal("ERR at least 1 input key is needed for '" + name + "' command")
	case n > int64(len(args)-1):
		return nil, ErrSyntax
	}
	x = &combination{aggregate: addScores}
	names := args[1 : 1+n]
	t.Load(names...)
	// All sets are looked at before the options, also those that cannot matter any more: the first error must be
	// Redis's.
	for _, name := range names {
		z, err := membersOf(t, name)
		switch {
		case err != nil:
			return nil, err
		case t.Failure() != nil:
			return nil, t.Failure()
		}
		x.sources = append(x.sources, zsource{z, 1})
	}
	if err := x.parse(name, args[1+n:]); err != nil {
		return nil, err
	}
	return x, nil
}

// membersOf is the sorted set of a key, or one made of a set's members, all of score 1.
func membersOf(t Keys, name []byte) (z collection.ZSet, err error) {
	k := t.Key(name)
	if !k.Present || k.Type != client.Set {
		return k.sortedSet(name)
	}
	set := collection.Set(k.Value)
	n, err := set.Len()
	if err == nil {
		if n > freeMembers && !t.Take(int64(n)*memberCost) {
			return z, t.Failure()
		}
		var list []collection.ZEntry
		for _, m := range set.Members(nil) {
			list = append(list, collection.ZEntry{Member: m, Score: 1})
		}
		slices.SortFunc(list, collection.CompareZ)
		z, err = collection.ParseZSet(z.AppendChanged(nil, nil, list))
	}
	if err != nil {
		return z, collectionError(client.Set, name, err)
	}
	return z, nil
}

// parse reads the options.
// Each command has some of the options: those that store give no scores, and differences have neither weights nor
// aggregates.
func (x *combination) parse(name string, opts [][]byte) error {
	stores, counts, weighs := slices.Contains([]string{"zunionstore", "zinterstore", "zdiffstore"}, name),
		name == "zintercard", name != "zdiff" && name != "zdiffstore"
	weighs = weighs && !counts
	p := OptionsOf(opts)
	for p.More() {
		switch {
		case weighs && p.Option("weights", len(x.sources)):
			for i := range x.sources {
				var ok bool
				if x.sources[i].weight, ok = scoreOf(p.Str()); !ok {
					p.Refuse("ERR weight value is not a float")
					break
				}
			}
		case weighs && p.Option("aggregate", 1):
			x.aggregate = []func(a, b float64) float64{addScores, lesserScore, greaterScore}[p.Choice("sum", "min",
				"max")]
		case !stores && !counts && p.Flag("withscores"):
			x.withScores = true
		case counts && p.Option("limit", 1):
			var ok bool
			if x.limit, ok = resp.ParseInt(p.Str()); !ok || x.limit < 0 {
				p.Refuse("ERR LIMIT can't be negative")
			}
		default:
			p.Wrong()
		}
	}
	return p.End()
}

// addScores takes 0 for the sum of both infinities, as Redis does.
func addScores(a, b float64) float64 {
	if sum := a + b; !math.IsNaN(sum) {
		return sum
	}
	return 0
}

// lesserScore and greaterScore keep a if the scores are equal, which tells 0 from -0 as Redis does.
func lesserScore(a, b float64) float64 {
	if b < a {
		return b
	}
	return a
}

func greaterScore(a, b float64) float64 {
	if b > a {
		return b
	}
	return a
}

// weighed is a score with its weight; nothing times infinity is 0.
func (s *zsource) weighed(score float64) float64 {
	if score *= s.weight; !math.IsNaN(score) {
		return score
	}
	return 0
}

// smallestFirst is the order in which scores are added up, which the last digits of a sum tell.
func (x *combination) smallestFirst() {
	slices.SortStableFunc(x.sources, func(a, b zsource) int { return a.z.Len() - b.z.Len() })
}

// uniteSets is ZUNION.
// Members are found by a map of all of them, which memberCost stands for.
func uniteSets(x *combination) (list []collection.ZEntry) {
	x.smallestFirst()
	at := make(map[string]int)
	for i := range x.sources {
		s := &x.sources[i]
		for j := range s.z.Len() {
			e := s.z.Entry(j)
			e.Score = s.weighed(e.Score)
			if old, ok := at[string(e.Member)]; ok {
				list[old].Score = x.aggregate(list[old].Score, e.Score)
				continue
			}
			at[string(e.Member)] = len(list)
			list = append(list, e)
		}
	}
	return list
}

// intersectSets is ZINTER: the members of the smallest set, less those that another one lacks.
func intersectSets(x *combination) []collection.ZEntry {
	x.smallestFirst()
	first := &x.sources[0]
	list, names := membersIn(first.z)
	for i := range list {
		list[i].Score = first.weighed(list[i].Score)
	}
	for _, s := range x.sources[1:] {
		n := 0
		for i, at := range s.z.Places(names) {
			if at < 0 {
				continue
			}
			// A product that is no number takes part as it is, as in Redis.
			list[n] = collection.ZEntry{
				Member: list[i].Member, Score: x.aggregate(list[i].Score, s.z.Score(at)*s.weight)}
			names[n] = names[i]
			n++
		}
		list, names = list[:n], names[:n]
	}
	return list
}

// subtractSets is ZDIFF.
// Scores are those of the first set.
func subtractSets(x *combination) []collection.ZEntry {
	list, names := membersIn(x.sources[0].z)
	for _, s := range x.sources[1:] {
		n := 0
		for i, at := range s.z.Places(names) {
			if at < 0 {
				list[n], names[n] = list[i], names[i]
				n++
			}
		}
		list, names = list[:n], names[:n]
	}
	return list
}

// membersIn lists the members of a set, with and without their scores.
// Both lists are the caller's; the members' bytes are the set's.
func membersIn(z collection.ZSet) (list []collection.ZEntry, names [][]byte) {
	for i := range z.Len() {
		list = append(list, z.Entry(i))
		names = append(names, list[i].Member)
	}
	return list, names
}
