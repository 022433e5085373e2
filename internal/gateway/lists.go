package gateway

import (
	"bytes"
	"errors"
	"math"
	"slices"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/collection"
	"github.com/kvd-project/kvd/internal/resp"
	"github.com/kvd-project/kvd/internal/units"
)

// Lists. A command walks the encoded list (internal/collection) from the end that is nearer; one that changes it edits
// a copy, which the store then writes. The order in which arguments, the key and its type are looked at is Redis's
// (t_list.c).
//
// A list is at most collection.MaxLen bytes. Walking it decodes nothing but lengths, and changing it moves the bytes
// behind the change, both well below what the store takes to write the record.

// listCommands are on one list, on several, or wait for one.
func listCommands() []*command {
	all := []*command{
		keyed("lpush", -3, 1, update, func(k *key, args [][]byte, w *resp.Writer) error {
			push(k, args, w, true, false)
			return nil
		}, "Prepends elements to a list."),
		keyed("rpush", -3, 1, update, func(k *key, args [][]byte, w *resp.Writer) error {
			push(k, args, w, false, false)
			return nil
		}, "Appends elements to a list."),
		keyed("lpushx", -3, 1, update, func(k *key, args [][]byte, w *resp.Writer) error {
			push(k, args, w, true, true)
			return nil
		}, "Prepends elements to a list that exists."),
		keyed("rpushx", -3, 1, update, func(k *key, args [][]byte, w *resp.Writer) error {
			push(k, args, w, false, true)
			return nil
		}, "Appends elements to a list that exists."),
		keyed("lpop", -2, 1, update, func(k *key, args [][]byte, w *resp.Writer) error {
			return pop(k, args, w, "lpop", true)
		}, "Removes and returns the first elements."),
		keyed("rpop", -2, 1, update, func(k *key, args [][]byte, w *resp.Writer) error {
			return pop(k, args, w, "rpop", false)
		}, "Removes and returns the last elements."),
		keyed("llen", 2, 1, read, cmdLLen, "Returns the length of a list."),
		keyed("lindex", 3, 1, read, cmdLIndex, "Returns an element by its index."),
		keyed("lrange", 4, 1, read, cmdLRange, "Returns a range of elements."),
		keyed("lpos", -3, 1, read, cmdLPos, "Returns the indices of matching elements."),
		keyed("linsert", 5, 1, update, cmdLInsert, "Inserts an element before or after another."),
		keyed("lset", 4, 1, update, cmdLSet, "Sets an element by its index."),
		keyed("lrem", 4, 1, update, cmdLRem, "Removes elements by their value."),
		keyed("ltrim", 4, 1, update, cmdLTrim, "Removes elements from both ends."),
		writes(onKeys("lmove", 5, 1, 2, 1, "list", cmdLMove, "Moves an element from one list to another.")),
		writes(onKeys("rpoplpush", 3, 1, 2, 1, "list", cmdRPopLPush,
			"Moves the last element of a list to the head of another.")),
		countedAt(1, writes(onKeys("lmpop", -4, 0, 0, 0, "list", cmdLMPop, "Pops elements from the first list that "+
			"is not empty."))),
		blockingOn("blpop", -3, 1, -2, 1, "list", parseBPop(true),
			"Pops the first element of a list, or waits for one."),
		blockingOn("brpop", -3, 1, -2, 1, "list", parseBPop(false),
			"Pops the last element of a list, or waits for one."),
		blockingOn("blmove", 6, 1, 2, 1, "list", parseBLMove,
			"Moves an element from one list to another, or waits for one."),
		blockingOn("brpoplpush", 4, 1, 2, 1, "list", parseBRPopLPush,
			"Moves the last element of a list to the head of another, or waits for one."),
		countedAt(2, blockingOn("blmpop", -5, 0, 0, 0, "list", parseBLMPop,
			"Pops elements from the first list that is not empty, or waits for one.")),
	}
	for _, c := range all {
		c.group = "list"
	}
	return all
}

const (
	errNotPositive = "ERR value is out of range, must be positive"
	errIndex       = "ERR index out of range"
)

func corruptList(name []byte) string { return "ERR kvd: corrupt list '" + clip(name, 64) + "'" }

// editList is the key's list in a buffer that may be edited, with room for more bytes of elements; ok is false if the
// command is to be given up, perhaps with an error reply.
// more may be negative. A list that has become too long by a lowered limit may still be made shorter.
func (k *key) editList(name []byte, more int, w *resp.Writer) (b []byte, ok bool) {
	n := collection.ListGrown(k.value, more)
	if limit := min(collection.MaxLen, k.maxValue); more > 0 && n > limit {
		w.Error("ERR kvd: list '" + clip(name, 64) + "' would take " + units.Bytes(n) + ", of at most " +
			units.Bytes(limit) + "; nothing was done")
		return nil, false
	}
	return k.mutable(max(n, len(k.value)))
}

// setList makes an edited buffer the key's list; the empty list is no key.
// The expiry stays, unless the key goes.
func (k *key) setList(b []byte) {
	k.own = b
	if len(b) == 0 {
		k.delete()
		return
	}
	k.setAs(client.List, b, k.expires)
}

// spliceList is collection.ListSplice on the key; false: it replied with an error, or the command is to be given up.
// from and to are bytes of the list, and n is how many elements lie between them, which elems replace.
func (k *key) spliceList(name []byte, from, to, n int, w *resp.Writer, elems ...[]byte) bool {
	b, ok := k.splicedList(name, from, to, n, w, elems...)
	if ok {
		k.setList(b)
	}
	return ok
}

// splicedList is the same without making it the key's.
func (k *key) splicedList(name []byte, from, to, n int, w *resp.Writer, elems ...[]byte) (b []byte, ok bool) {
	// The elements that go make room for those that come.
	more := from - to
	for _, e := range elems {
		more += collection.ListSize(e)
	}
	if b, ok = k.editList(name, more, w); !ok {
		return nil, false
	}
	b, err := collection.ListSplice(b, from, to, n, elems...)
	if err != nil {
		w.Error(corruptList(name))
	}
	return b, err == nil
}

// listLen is the length of the key's list, which is there; false: it replied with an error.
func (k *key) listLen(name []byte, w *resp.Writer) (n int, ok bool) {
	// A record with an empty list cannot be of a gateway's making, since the last element takes the key with it.
	n, err := collection.ListLen(k.value)
	if err != nil || n == 0 { // none is stored
		w.Error(corruptList(name))
		return 0, false
	}
	return n, true
}

// pushed is splicedList that adds elements to an end of the list, each beyond the one before.
// LPUSH of several elements leaves the last of them at the head, as in Redis.
func (k *key) pushed(name []byte, left bool, w *resp.Writer, elems ...[]byte) (b []byte, ok bool) {
	if !left {
		return k.splicedList(name, len(k.value), len(k.value), 0, w, elems...)
	}
	// They are the command's arguments, which a second try needs as they are.
	elems = slices.Clone(elems)
	slices.Reverse(elems)
	return k.splicedList(name, collection.ListStart, collection.ListStart, 0, w, elems...)
}

// push is LPUSH, RPUSH and the two that want a list to be there.
// It replies with the list's new length. A list that is not there is made, unless it has to exist.
func push(k *key, args [][]byte, w *resp.Writer, left, exists bool) {
	if !k.is(client.List, w) {
		return
	}
	if !k.present && exists {
		w.Int(0)
		return
	}
	if b, ok := k.pushed(args[1], left, w, args[2:]...); ok {
		k.setList(b)
		k.replyLen(args[1], w)
	}
}

// replyLen is the length of a list that has just been changed.
func (k *key) replyLen(name []byte, w *resp.Writer) {
	if n, ok := k.listLen(name, w); ok {
		w.Int(int64(n))
	}
}

// pop is LPOP and RPOP.
// Without a count it replies with one element, and with a count with an array, also of a single one. name is for an
// error.
func pop(k *key, args [][]byte, w *resp.Writer, name string, left bool) error {
	count, ok := int64(0), true
	switch len(args) {
	case 2:
	case 3:
		if count, ok = resp.ParseInt(args[2]); !ok || count < 0 {
			return refusal(errNotPositive)
		}
	default:
		return refusal("ERR wrong number of arguments for '" + name + "' command")
	}
	switch {
	case !k.present && len(args) == 3:
		w.NullArray()
	case !k.present:
		w.Null()
	case !k.is(client.List, w):
	case len(args) == 2:
		k.popList(args[1], left, 1, w, nil)
	case count == 0:
		w.Array(0)
	default:
		k.popList(args[1], left, count, w, func(n int) { w.Array(n) })
	}
	return nil
}

// popList takes up to count elements from an end of a list that is there and writes them, from that end on; head writes
// what comes before so many. If it replies with an error, or the command is to be given up, the list is as it was, and
// it returns false.
func (k *key) popList(name []byte, left bool, count int64, w *resp.Writer, head func(n int)) bool {
	n, ok := k.listLen(name, w)
	if !ok {
		return false
	}
	take := int(min(count, int64(n)))
	at := w.Len()
	if head != nil {
		head(take)
	}
	off, step := len(k.value), collection.ListPrev
	if left {
		off, step = collection.ListStart, collection.ListNext
	}
	from := off
	for range take {
		var e []byte
		var err error
		if e, off, err = step(k.value, off); err != nil {
			w.Truncate(at)
			w.Error(corruptList(name))
			return false
		}
		w.Bulk(e)
	}
	if k.spliceList(name, min(from, off), max(from, off), take, w) {
		return true
	}
	w.Truncate(at)
	if k.want == 0 { // else it comes again
		w.Error(corruptList(name))
	}
	return false
}

// cmdLLen reads nothing but the head.
func cmdLLen(k *key, args [][]byte, w *resp.Writer) error {
	switch {
	case !k.present:
		w.Int(0)
	case k.is(client.List, w):
		k.replyLen(args[1], w)
	}
	return nil
}

// elementAt is where the element of an index as in Redis, negative from the end, begins; ok is false if there is
// none, and off is negative then. With bad it replied with an error.
// The list must be there and of the type. It walks from the nearer end, so the middle costs most.
func (k *key) elementAt(name []byte, index int64, w *resp.Writer) (off int, bad bool) {
	n, ok := k.listLen(name, w)
	if !ok {
		return 0, true
	}
	if index < 0 {
		index += int64(n)
	}
	if index < 0 || index >= int64(n) {
		return -1, false
	}
	off, err := collection.ListSeek(k.value, int(index))
	if err != nil {
		w.Error(corruptList(name))
		return 0, true
	}
	return off, false
}

// cmdLIndex replies null for an index beyond the list. That the index is a number is looked at behind the key, as in
// Redis.
func cmdLIndex(k *key, args [][]byte, w *resp.Writer) error {
	if !k.present {
		w.Null()
		return nil
	}
	if err := k.typed(client.List); err != nil {
		return err
	}
	index, ok := resp.ParseInt(args[2])
	if !ok {
		return refusal(errNotInt)
	}
	off, bad := k.elementAt(args[1], index, w)
	switch {
	case bad:
		return nil
	case off < 0:
		w.Null()
		return nil
	}
	e, _, err := collection.ListNext(k.value, off)
	if err != nil {
		return refusal(corruptList(args[1]))
	}
	w.Bulk(e)
	return nil
}

// cmdLSet never makes a list, and refuses an index beyond it.
func cmdLSet(k *key, args [][]byte, w *resp.Writer) error {
	if !k.present {
		return refusal(errNoKey)
	}
	if err := k.typed(client.List); err != nil {
		return err
	}
	index, ok := resp.ParseInt(args[2])
	if !ok {
		return refusal(errNotInt)
	}
	off, bad := k.elementAt(args[1], index, w)
	switch {
	case bad:
		return nil
	case off < 0:
		return refusal(errIndex)
	}
	_, next, err := collection.ListNext(k.value, off)
	if err != nil {
		return refusal(corruptList(args[1]))
	}
	if k.spliceList(args[1], off, next, 1, w, args[3]) {
		w.OK()
	}
	return nil
}

// listRange makes Redis's range of a list of n elements, which may be negative from the end, one from from up to before
// to. from and to are equal if nothing is in it.
func listRange(start, stop int64, n int) (from, to int) {
	if start < 0 {
		start = max(0, start+int64(n))
	}
	if stop < 0 {
		stop += int64(n)
	}
	if start > stop || start >= int64(n) {
		return 0, 0
	}
	return int(start), int(min(stop, int64(n)-1)) + 1
}

// rangeArgs are those of LRANGE and LTRIM; ok is false if it replied with an error.
func rangeArgs(args [][]byte, w *resp.Writer) (start, stop int64, ok bool) {
	start, ok1 := resp.ParseInt(args[2])
	stop, ok2 := resp.ParseInt(args[3])
	if !ok1 || !ok2 {
		w.Error(errNotInt)
	}
	return start, stop, ok1 && ok2
}

// cmdLRange writes as it walks. Damage that it meets on the way takes the place of all that it has written.
func cmdLRange(k *key, args [][]byte, w *resp.Writer) error {
	start, stop, ok := rangeArgs(args, w)
	if !ok {
		return nil
	}
	if !k.present {
		w.Array(0)
		return nil
	}
	if err := k.typed(client.List); err != nil {
		return err
	}
	n, ok := k.listLen(args[1], w)
	if !ok {
		return nil
	}
	from, to := listRange(start, stop, n)
	off, err := collection.ListSeek(k.value, from)
	at := w.Len()
	w.Array(to - from)
	for i := from; i < to && err == nil; i++ {
		var e []byte
		if e, off, err = collection.ListNext(k.value, off); err == nil {
			w.Bulk(e)
		}
	}
	if err != nil {
		w.Truncate(at)
		return refusal(corruptList(args[1]))
	}
	return nil
}

// cmdLTrim writes nothing if all of the list stays.
func cmdLTrim(k *key, args [][]byte, w *resp.Writer) error {
	start, stop, ok := rangeArgs(args, w)
	if !ok {
		return nil
	}
	if !k.present {
		w.OK()
		return nil
	}
	if err := k.typed(client.List); err != nil {
		return err
	}
	n, ok := k.listLen(args[1], w)
	if !ok {
		return nil
	}
	from, to := listRange(start, stop, n)
	switch {
	case to-from == n:
	case from == to:
		k.delete()
	default:
		head, err1 := collection.ListSeek(k.value, from)
		tail, err2 := collection.ListSeek(k.value, to)
		if errors.Join(err1, err2) != nil {
			return refusal(corruptList(args[1]))
		}
		b, ok := k.mutable(len(k.value))
		if !ok {
			return nil
		}
		// The tail first: the offset of the head stays.
		b, err1 = collection.ListSplice(b, tail, len(b), n-to)
		b, err2 = collection.ListSplice(b, collection.ListStart, head, from)
		if errors.Join(err1, err2) != nil {
			return refusal(corruptList(args[1]))
		}
		k.setList(b)
	}
	w.OK()
	return nil
}

// cmdLInsert looks for the pivot from the head on.
// It replies with the new length, 0 if there is no list, and -1 if there is no pivot.
func cmdLInsert(k *key, args [][]byte, w *resp.Writer) error {
	after := fold(args[2], "after")
	if !after && !fold(args[2], "before") {
		return refusal(errSyntax)
	}
	if !k.hasOrZero(client.List, w) {
		return nil
	}
	n, ok := k.listLen(args[1], w)
	if !ok {
		return nil
	}
	off := collection.ListStart
	for range n {
		e, next, err := collection.ListNext(k.value, off)
		if err != nil {
			return refusal(corruptList(args[1]))
		}
		if bytes.Equal(e, args[3]) {
			if after {
				off = next
			}
			if k.spliceList(args[1], off, off, 0, w, args[4]) {
				k.replyLen(args[1], w)
			}
			return nil
		}
		off = next
	}
	w.Int(-1)
	return nil
}

// cmdLRem removes the first equal elements, or the last ones for a negative count, or all for 0. It writes only if
// there are some.
func cmdLRem(k *key, args [][]byte, w *resp.Writer) error {
	limit, ok := resp.ParseInt(args[2])
	if !ok {
		return refusal(errNotInt)
	}
	if !k.hasOrZero(client.List, w) {
		return nil
	}
	b, ok := k.editList(args[1], 0, w)
	if !ok {
		return nil
	}
	b, removed, err := collection.ListRemove(b, args[3], int(limit))
	if err != nil {
		return refusal(corruptList(args[1]))
	}
	if removed > 0 {
		k.setList(b)
	}
	w.Int(int64(removed))
	return nil
}

// posArgs are LPOS's options; count is -1 without COUNT.
// rank counts matches from 1, from the tail if it is negative; most is how many elements are compared, 0 for all.
type posArgs struct{ rank, count, most int64 }

// parsePos reads them.
func parsePos(opts [][]byte) (a posArgs, err error) {
	a = posArgs{rank: 1, count: -1}
	p := optionsOf(opts)
	positive := func(name string) int64 {
		n, ok := resp.ParseInt(p.Str())
		if !ok || n < 0 {
			p.Refuse(refusal("ERR " + name + " can't be negative"))
		}
		return n
	}
	for p.More() {
		switch {
		case p.Option("rank", 1):
			if a.rank = p.Int(); a.rank == 0 {
				p.Refuse("ERR RANK can't be zero: use 1 to start from the first match, 2 from the second ... or use " +
					"negative to start from the end of the list")
			}
		case p.Option("count", 1):
			a.count = positive("COUNT")
		case p.Option("maxlen", 1):
			a.most = positive("MAXLEN")
		default:
			p.Wrong()
		}
	}
	return a, p.End()
}

// cmdLPos walks from the end that RANK says. It collects the matches first, since their number comes before them.
func cmdLPos(k *key, args [][]byte, w *resp.Writer) error {
	a, err := parsePos(args[3:])
	if err != nil {
		return err
	}
	if !k.present {
		replyPositions(a, nil, w)
		return nil
	}
	if err := k.typed(client.List); err != nil {
		return err
	}
	n, ok := k.listLen(args[1], w)
	if !ok {
		return nil
	}
	off, step := collection.ListStart, collection.ListNext
	if a.rank < 0 {
		off, step = len(k.value), collection.ListPrev
	}
	skip := max(a.rank, -a.rank) - 1
	if a.rank == math.MinInt64 { // which Redis's arithmetic makes the first match, and no limit
		skip, a.count = 0, min(a.count, 0)
	}
	var found []int
	for i := 0; i < n && (a.most == 0 || int64(i) < a.most); i++ {
		var e []byte
		var err error
		if e, off, err = step(k.value, off); err != nil {
			return refusal(corruptList(args[1]))
		}
		if !bytes.Equal(e, args[2]) {
			continue
		}
		if skip > 0 {
			skip--
			continue
		}
		at := i
		if a.rank < 0 {
			at = n - 1 - i
		}
		if found = append(found, at); a.count != 0 && int64(len(found)) >= max(a.count, 1) {
			break
		}
	}
	replyPositions(a, found, w)
	return nil
}

// replyPositions is an array with COUNT, and otherwise one index or null.
func replyPositions(a posArgs, found []int, w *resp.Writer) {
	switch {
	case a.count >= 0:
		w.Array(len(found))
		for _, at := range found {
			w.Int(int64(at))
		}
	case len(found) > 0:
		w.Int(int64(found[0]))
	default:
		w.Null()
	}
}
