package values

import (
	"cmp"
	"slices"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/collection"
	"github.com/kvd-project/kvd/internal/redis/glob"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

var _ = oneKey(map[string]KeyFunc{
	"sadd":        cmdSAdd,
	"scard":       cmdSCard,
	"sismember":   cmdSIsMember,
	"smembers":    cmdSMembers,
	"smismember":  cmdSMIsMember,
	"spop":        cmdSPop,
	"srandmember": cmdSRandMember,
	"srem":        cmdSRem,
	"sscan":       cmdSScan,
})

var _ = severalKeys(map[string]SeveralFunc{
	"sdiff":       cmdSDiff,
	"sdiffstore":  cmdSDiffStore,
	"sinter":      cmdSInter,
	"sintercard":  cmdSInterCard,
	"sinterstore": cmdSInterStore,
	"smove":       cmdSMove,
	"sunion":      cmdSUnion,
	"sunionstore": cmdSUnionStore,
})

// Sets of a few integers are encoded as such, as in Redis, so their members are made into text when they are told.

// members is the key's set, empty if there is none.
// The caller has looked at the type.
func (k *Key) members() collection.Set { return collection.Set(k.Value) }

// setLen counts the members.
func (k *Key) setLen(name []byte) (n int, err error) {
	if err := k.typed(client.Set); err != nil {
		return 0, err
	}
	if n, err = k.members().Len(); err != nil {
		return 0, collectionError(client.Set, name, err)
	}
	return n, nil
}

// cmdSAdd replies with how many members are new.
func cmdSAdd(k *Key, args [][]byte, w *resp.Writer) error {
	if err := k.typed(client.Set); err != nil {
		return err
	}
	n, err := k.addMembers(args[1], args[2:])
	if err != nil {
		return err
	}
	w.Int(int64(n))
	return nil
}

// addMembers adds members to what is a set. It writes only if there is a new one.
func (k *Key) addMembers(name []byte, members [][]byte) (added int, err error) {
	size := 0
	for _, m := range members {
		size += len(m)
	}
	b, err := k.editable(k.members().Room(len(members), size))
	if err != nil {
		return 0, err
	}
	s, n, err := collection.Set(b).AddAll(members)
	if err != nil {
		return 0, collectionError(client.Set, name, err)
	}
	if n > 0 {
		err = k.setEdited(client.Set, s, name)
	}
	return n, err
}

// cmdSRem deletes the key with its last member, as all commands on collections do.
func cmdSRem(k *Key, args [][]byte, w *resp.Writer) error {
	if err := k.typed(client.Set); err != nil {
		return err
	}
	n, err := k.removeMembers(args[1], args[2:])
	if err != nil {
		return err
	}
	w.Int(int64(n))
	return nil
}

// removeMembers is addMembers for their removal.
func (k *Key) removeMembers(name []byte, members [][]byte) (removed int, err error) {
	b, err := k.editable(0)
	if err != nil {
		return 0, err
	}
	s, n, err := collection.Set(b).Remove(members)
	if err != nil {
		return 0, collectionError(client.Set, name, err)
	}
	if n > 0 {
		err = k.setEdited(client.Set, s, name)
	}
	return n, err
}

// cmdSIsMember and the commands below that only read walk the encoded set, which is up to collection.MaxLen bytes.
func cmdSIsMember(k *Key, args [][]byte, w *resp.Writer) error {
	if err := k.typed(client.Set); err != nil {
		return err
	}
	is, err := k.members().Has(args[2])
	if err != nil {
		return collectionError(client.Set, args[1], err)
	}
	w.Int(Bit(is))
	return nil
}

// cmdSMIsMember passes over the set once, however many members it is asked for.
func cmdSMIsMember(k *Key, args [][]byte, w *resp.Writer) error {
	if err := k.typed(client.Set); err != nil {
		return err
	}
	var few [16]bool
	has, err := k.members().HasAll(few[:0], args[2:])
	if err != nil {
		return collectionError(client.Set, args[1], err)
	}
	w.Array(len(has))
	for _, is := range has {
		w.Int(Bit(is))
	}
	return nil
}

func cmdSCard(k *Key, args [][]byte, w *resp.Writer) error {
	n, err := k.setLen(args[1])
	if err != nil {
		return err
	}
	w.Int(int64(n))
	return nil
}

// cmdSMembers is a set in RESP3 and an array in RESP2. Its order is the encoding's.
func cmdSMembers(k *Key, args [][]byte, w *resp.Writer) error {
	n, err := k.setLen(args[1])
	if err != nil {
		return err
	}
	w.Set(n)
	for m := range k.members().All() {
		w.Bulk(m)
	}
	return nil
}

// cmdSPop replies before it removes, since members lie in the value.
// Its choice is made anew in each try, and the reply is that of the try that took effect: no member is popped twice.
func cmdSPop(k *Key, args [][]byte, w *resp.Writer) error {
	count, ok := int64(1), true
	if len(args) > 3 {
		return ErrSyntax
	}
	if len(args) == 3 {
		if count, ok = resp.ParseInt(args[2]); !ok || count < 0 {
			return refusal("ERR value is out of range, must be positive")
		}
	}
	n, err := k.setLen(args[1])
	switch {
	case err != nil:
		return err
	case n == 0 && len(args) == 2:
		w.Null()
		return nil
	case n == 0, count == 0:
		w.Set(0)
		return nil
	}
	b, err := k.editable(0)
	if err != nil {
		return err
	}
	s := collection.Set(b)
	var few [128]collection.Place
	// The count is not negative, so randomPlaces does not refuse.
	places, _ := randomPlaces(s.Places(few[:0]), count, len(b))
	if len(args) == 3 {
		w.Set(len(places))
	}
	replyMembers(s, places, w)
	slices.Sort(places)
	return k.setEdited(client.Set, s.RemovePlaces(places), args[1])
}

// replyMembers is the members at places, as a part of a reply.
// Integers are written as text, for which a small buffer serves all of them.
func replyMembers(s collection.Set, places []collection.Place, w *resp.Writer) {
	var room [64]byte
	text := room[:0]
	for _, p := range places {
		text = s.At(text[:0], p)
		w.Bulk(text)
	}
}

// cmdSRandMember with a negative count may give a member several times, as many as the count says.
func cmdSRandMember(k *Key, args [][]byte, w *resp.Writer) error {
	count, err := int64(1), error(nil)
	if len(args) > 3 {
		return ErrSyntax
	}
	if len(args) == 3 {
		if count, err = randomCount(args[2]); err != nil {
			return err
		}
	}
	n, err := k.setLen(args[1])
	switch {
	case err != nil:
		return err
	case n == 0 && len(args) == 2:
		w.Null()
		return nil
	case n == 0:
		w.Array(0)
		return nil
	}
	var few [128]collection.Place
	places, err := randomPlaces(k.members().Places(few[:0]), count, len(k.Value))
	if err != nil {
		return err
	}
	if len(args) == 3 {
		w.Array(len(places))
	}
	replyMembers(k.members(), places, w)
	return nil
}

// cmdSScan copies members that are integers, since Scan writes each of them to the same place.
func cmdSScan(k *Key, args [][]byte, w *resp.Writer) error {
	a, some, err := k.scanOf(client.Set, args, w)
	if !some {
		return err
	}
	s := k.members()
	var found [][]byte
	next, err := s.Scan(a.cursor, a.count, func(member []byte) {
		if a.pattern == nil || glob.Match(a.pattern, member) {
			if s.Ints() {
				member = slices.Clone(member)
			}
			found = append(found, member)
		}
	})
	if err != nil {
		return collectionError(client.Set, args[1], err)
	}
	replyScan(next, found, w)
	return nil
}

// cmdSMove is nothing but a question if source and destination are the same.
// Both sets change in one step: nobody sees the member in neither of them, or in both.
func cmdSMove(t Keys, args [][]byte, w *resp.Writer) error {
	t.Load(args[1], args[2])
	from, to := t.Key(args[1]), t.Key(args[2])
	if !from.Present {
		w.Int(0)
		return nil
	}
	if err := cmp.Or(from.typed(client.Set), to.typed(client.Set)); err != nil {
		return err
	}
	member := args[3:4]
	is, err := from.members().Has(member[0])
	if err != nil {
		return collectionError(client.Set, args[1], err)
	}
	if !is || from == to {
		w.Int(Bit(is))
		return nil
	}
	n, err := to.addMembers(args[2], member)
	if err != nil {
		return err
	}
	if _, err := from.removeMembers(args[1], member); err != nil {
		return err
	}
	t.Name(from, onSet, "srem")
	if n > 0 {
		t.Name(to, onSet, "sadd")
	}
	w.Int(1)
	return nil
}

// operand is a set that a command on several works on.
// n is how many members it has. The set lies in the key's value.
type operand struct {
	collection.Set
	n int // members
}

// operands reads the sets of those names. All types are looked at, as in Redis, even if one that is empty already
// decides. The error is the reply, or why all of it is given up.
func operands(t Keys, names [][]byte) (all []operand, err error) {
	t.Load(names...)
	for _, name := range names {
		k := t.Key(name)
		n, err := k.setLen(name)
		if err = cmp.Or(err, t.Failure()); err != nil {
			return nil, err
		}
		all = append(all, operand{k.members(), n})
	}
	return all, nil
}

// namesOf has the members of a set to find them in. Its memory is a part of what the connection may have.
// If there is none all of it is given up. names refers to the set's bytes.
func namesOf(t Keys, a operand, names *collection.Names) error {
	if !t.Take(int64(a.n) * collection.NameBytes) {
		return t.Failure()
	}
	for _, m := range a.Members(nil) {
		names.Add(m)
	}
	return nil
}

// intersection is the members that all sets have, at most limit of them; 0: no limit.
// The smallest set is looked up, and the others are passed over once, so that memory goes with the smallest.
func intersection(t Keys, sets []operand, limit int64) (found [][]byte, err error) {
	sets = slices.Clone(sets)
	slices.SortStableFunc(sets, func(a, b operand) int { return cmp.Compare(a.n, b.n) })
	if sets[0].n == 0 {
		return nil, nil
	}
	var names collection.Names
	if err := namesOf(t, sets[0], &names); err != nil {
		return nil, err
	}
	// A member that is in the first j sets has seen j, so one number does for all of them.
	seen := make([]int32, names.Len()) // of the other sets, as long as all had it
	for j, s := range sets[1:] {
		for m := range s.All() {
			if i := names.Find(m); i >= 0 && seen[i] == int32(j) {
				seen[i]++
			}
		}
	}
	for i, n := range seen {
		if int(n) == len(sets)-1 {
			found = append(found, names.At(i))
			if limit > 0 && int64(len(found)) == limit {
				break
			}
		}
	}
	return found, nil
}

// union is the members that any of the sets has.
func union(t Keys, sets []operand) (found [][]byte, err error) {
	var names collection.Names
	for _, s := range sets {
		if err := namesOf(t, s, &names); err != nil {
			return nil, err
		}
	}
	for i := range names.Len() {
		found = append(found, names.At(i))
	}
	return found, nil
}

// difference is the members that the first set has and no other.
func difference(t Keys, sets []operand) (found [][]byte, err error) {
	var names collection.Names
	if err := namesOf(t, sets[0], &names); err != nil {
		return nil, err
	}
	gone := make([]bool, names.Len())
	for _, s := range sets[1:] {
		for m := range s.All() {
			if i := names.Find(m); i >= 0 {
				gone[i] = true
			}
		}
	}
	for i, is := range gone {
		if !is {
			found = append(found, names.At(i))
		}
	}
	return found, nil
}

// unlimited is SINTER's intersection.
func unlimited(t Keys, sets []operand) ([][]byte, error) { return intersection(t, sets, 0) }

func cmdSInter(t Keys, args [][]byte, w *resp.Writer) error {
	return replySets(t, args, w, unlimited)
}
func cmdSUnion(t Keys, args [][]byte, w *resp.Writer) error {
	return replySets(t, args, w, union)
}
func cmdSDiff(t Keys, args [][]byte, w *resp.Writer) error {
	return replySets(t, args, w, difference)
}

// replySets is a command that replies with the result.
func replySets(t Keys, args [][]byte, w *resp.Writer, f func(Keys, []operand) ([][]byte, error)) error {
	sets, err := operands(t, args[1:])
	if err != nil {
		return err
	}
	found, err := f(t, sets)
	if err != nil {
		return err
	}
	w.Set(len(found))
	for _, m := range found {
		w.Bulk(m)
	}
	return nil
}

func cmdSInterStore(t Keys, args [][]byte, w *resp.Writer) error {
	return storeSets(t, args, w, unlimited)
}
func cmdSUnionStore(t Keys, args [][]byte, w *resp.Writer) error {
	return storeSets(t, args, w, union)
}
func cmdSDiffStore(t Keys, args [][]byte, w *resp.Writer) error {
	return storeSets(t, args, w, difference)
}

// storeSets makes the result a key's, whatever that was, or deletes it.
// The destination may be a source, too: it is read before. Its expiry goes.
func storeSets(t Keys, args [][]byte, w *resp.Writer, f func(Keys, []operand) ([][]byte, error)) error {
	t.Load(args[1:]...)
	sets, err := operands(t, args[2:])
	if err != nil {
		return err
	}
	found, err := f(t, sets)
	if err != nil {
		return err
	}
	to := t.Key(args[1])
	if len(found) == 0 {
		if to.Present {
			to.Delete()
		}
		w.Int(0)
		return nil
	}
	size := 0
	for _, m := range found {
		size += len(m)
	}
	// Members of found lie in the sources' values, so the new value is made beside them.
	n := collection.Set(nil).Room(len(found), size)
	if n > to.Room {
		to.Want = n
		return ErrRoom
	}
	s, _, err := collection.Set(make([]byte, 0, n)).AddAll(found)
	if err != nil || len(s) > min(to.MaxValue, collection.MaxLen) {
		return collectionError(client.Set, args[1], collection.ErrTooLong)
	}
	to.Flags = 0
	to.SetAs(client.Set, s, 0)
	w.Int(int64(len(found)))
	return nil
}

// cmdSInterCard looks at its options before it looks at any key.
// With LIMIT it stops counting there; 0 is no limit.
func cmdSInterCard(t Keys, args [][]byte, w *resp.Writer) error {
	n, ok := resp.ParseInt(args[1])
	switch {
	case !ok || n < 1:
		return refusal("ERR numkeys should be greater than 0")
	case n > int64(len(args)-2):
		return refusal("ERR Number of keys can't be greater than number of args")
	}
	limit := int64(0)
	p := OptionsOf(args[2+n:])
	for p.More() {
		if !p.Option("limit", 1) {
			p.Wrong()
		}
		limit = p.IntFrom(0, "ERR LIMIT can't be negative")
	}
	if err := p.End(); err != nil {
		return err
	}
	sets, err := operands(t, args[2:2+n])
	if err != nil {
		return err
	}
	found, err := intersection(t, sets, limit)
	if err != nil {
		return err
	}
	w.Int(int64(len(found)))
	return nil
}
