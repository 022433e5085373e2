package values

import (
	"bytes"
	"errors"
	"math"
	"slices"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/collection"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/units"
)

var _ = oneKey(map[string]KeyFunc{
	"lindex":  cmdLIndex,
	"linsert": cmdLInsert,
	"llen":    cmdLLen,
	"lpop": func(k *Key, args [][]byte, w *resp.Writer) error {
		return pop(k, args, w, "lpop", true)
	},
	"lpos": cmdLPos,
	"lpush": func(k *Key, args [][]byte, w *resp.Writer) error {
		return push(k, args, w, true, false)
	},
	"lpushx": func(k *Key, args [][]byte, w *resp.Writer) error {
		return push(k, args, w, true, true)
	},
	"lrange": cmdLRange,
	"lrem":   cmdLRem,
	"lset":   cmdLSet,
	"ltrim":  cmdLTrim,
	"rpop": func(k *Key, args [][]byte, w *resp.Writer) error {
		return pop(k, args, w, "rpop", false)
	},
	"rpush": func(k *Key, args [][]byte, w *resp.Writer) error {
		return push(k, args, w, false, false)
	},
	"rpushx": func(k *Key, args [][]byte, w *resp.Writer) error {
		return push(k, args, w, false, true)
	},
})

// Lists. A command walks the encoded list (internal/redis/collection) from the end that is nearer; one that changes it
// edits a copy, which the store then writes. The order in which arguments, the key and its type are looked at is
// Redis's (t_list.c).
//
// A list is at most collection.MaxLen bytes. Walking it decodes nothing but lengths, and changing it moves the bytes
// behind the change, both well below what the store takes to write the record.

const (
	errNotPositive = "ERR value is out of range, must be positive"
	errIndex       = "ERR index out of range"
)

func corruptList(name []byte) error { return refusal("ERR kvd: corrupt list '" + Clip(name, 64) + "'") }

// editList is the key's list in a buffer that may be edited, with room for more bytes of elements.
// more may be negative. A list that has become too long by a lowered limit may still be made shorter.
func (k *Key) editList(name []byte, more int) (b []byte, err error) {
	n := collection.ListGrown(k.Value, more)
	if limit := min(collection.MaxLen, k.MaxValue); more > 0 && n > limit {
		return nil, refusal("ERR kvd: list '" + Clip(name, 64) + "' would take " + units.Bytes(n) + ", of at most " +
			units.Bytes(limit) + "; nothing was done")
	}
	return k.mutable(max(n, len(k.Value)))
}

// setList makes an edited buffer the key's list; the empty list is no key.
// The expiry stays, unless the key goes.
func (k *Key) setList(b []byte) {
	k.Own = b
	if len(b) == 0 {
		k.Delete()
		return
	}
	k.SetAs(client.List, b, k.Expires)
}

// spliceList is collection.ListSplice on the key.
// from and to are bytes of the list, and n is how many elements lie between them, which elems replace.
func (k *Key) spliceList(name []byte, from, to, n int, elems ...[]byte) error {
	b, err := k.splicedList(name, from, to, n, elems...)
	if err == nil {
		k.setList(b)
	}
	return err
}

// splicedList is the same without making it the key's.
func (k *Key) splicedList(name []byte, from, to, n int, elems ...[]byte) (b []byte, err error) {
	// The elements that go make room for those that come.
	more := from - to
	for _, e := range elems {
		more += collection.ListSize(e)
	}
	if b, err = k.editList(name, more); err != nil {
		return nil, err
	}
	if b, err = collection.ListSplice(b, from, to, n, elems...); err != nil {
		return nil, corruptList(name)
	}
	return b, nil
}

// listLen is the length of the key's list, which is there.
func (k *Key) listLen(name []byte) (n int, err error) {
	// A record with an empty list cannot be of a gateway's making, since the last element takes the key with it.
	if n, err = collection.ListLen(k.Value); err != nil || n == 0 {
		return 0, corruptList(name)
	}
	return n, nil
}

// pushed is splicedList that adds elements to an end of the list, each beyond the one before.
// LPUSH of several elements leaves the last of them at the head, as in Redis.
func (k *Key) pushed(name []byte, left bool, elems ...[]byte) (b []byte, err error) {
	if !left {
		return k.splicedList(name, len(k.Value), len(k.Value), 0, elems...)
	}
	// They are the command's arguments, which a second try needs as they are.
	elems = slices.Clone(elems)
	slices.Reverse(elems)
	return k.splicedList(name, collection.ListStart, collection.ListStart, 0, elems...)
}

// push is LPUSH, RPUSH and the two that want a list to be there.
// It replies with the list's new length. A list that is not there is made, unless it has to exist.
func push(k *Key, args [][]byte, w *resp.Writer, left, exists bool) error {
	if err := k.typed(client.List); err != nil {
		return err
	}
	if !k.Present && exists {
		w.Int(0)
		return nil
	}
	b, err := k.pushed(args[1], left, args[2:]...)
	if err != nil {
		return err
	}
	k.setList(b)
	return k.replyLen(args[1], w)
}

// replyLen is the length of a list that has just been changed.
func (k *Key) replyLen(name []byte, w *resp.Writer) error {
	n, err := k.listLen(name)
	if err != nil {
		return err
	}
	w.Int(int64(n))
	return nil
}

// pop is LPOP and RPOP.
// Without a count it replies with one element, and with a count with an array, also of a single one. name is for an
// error.
func pop(k *Key, args [][]byte, w *resp.Writer, name string, left bool) error {
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
	switch err := k.typed(client.List); {
	case !k.Present && len(args) == 3:
		w.NullArray()
	case !k.Present:
		w.Null()
	case err != nil:
		return err
	case len(args) == 2:
		return k.popList(args[1], left, 1, w, nil)
	case count == 0:
		w.Array(0)
	default:
		return k.popList(args[1], left, count, w, func(n int) { w.Array(n) })
	}
	return nil
}

// popList takes up to count elements from an end of a list that is there and writes them, from that end on; head writes
// what comes before so many. Behind an error the list is as it was, and nothing is written.
func (k *Key) popList(name []byte, left bool, count int64, w *resp.Writer, head func(n int)) error {
	n, err := k.listLen(name)
	if err != nil {
		return err
	}
	take := int(min(count, int64(n)))
	at := w.Len()
	if head != nil {
		head(take)
	}
	off, step := len(k.Value), collection.ListPrev
	if left {
		off, step = collection.ListStart, collection.ListNext
	}
	from := off
	for range take {
		var e []byte
		var err error
		if e, off, err = step(k.Value, off); err != nil {
			w.Truncate(at)
			return corruptList(name)
		}
		w.Bulk(e)
	}
	if err := k.spliceList(name, min(from, off), max(from, off), take); err != nil {
		w.Truncate(at)
		return err
	}
	return nil
}

// cmdLLen reads nothing but the head.
func cmdLLen(k *Key, args [][]byte, w *resp.Writer) error {
	if has, err := k.hasOrZero(client.List, w); !has {
		return err
	}
	return k.replyLen(args[1], w)
}

// elementAt is where the element of an index as in Redis, negative from the end, begins; off is negative if there is
// none.
// The list must be there and of the type. It walks from the nearer end, so the middle costs most.
func (k *Key) elementAt(name []byte, index int64) (off int, err error) {
	n, err := k.listLen(name)
	if err != nil {
		return 0, err
	}
	if index < 0 {
		index += int64(n)
	}
	if index < 0 || index >= int64(n) {
		return -1, nil
	}
	if off, err = collection.ListSeek(k.Value, int(index)); err != nil {
		return 0, corruptList(name)
	}
	return off, nil
}

// cmdLIndex replies null for an index beyond the list. That the index is a number is looked at behind the key, as in
// Redis.
func cmdLIndex(k *Key, args [][]byte, w *resp.Writer) error {
	if !k.Present {
		w.Null()
		return nil
	}
	if err := k.typed(client.List); err != nil {
		return err
	}
	index, ok := resp.ParseInt(args[2])
	if !ok {
		return ErrNotInt
	}
	off, err := k.elementAt(args[1], index)
	switch {
	case err != nil:
		return err
	case off < 0:
		w.Null()
		return nil
	}
	e, _, err := collection.ListNext(k.Value, off)
	if err != nil {
		return corruptList(args[1])
	}
	w.Bulk(e)
	return nil
}

// cmdLSet never makes a list, and refuses an index beyond it.
func cmdLSet(k *Key, args [][]byte, w *resp.Writer) error {
	if !k.Present {
		return errNoKey
	}
	if err := k.typed(client.List); err != nil {
		return err
	}
	index, ok := resp.ParseInt(args[2])
	if !ok {
		return ErrNotInt
	}
	off, err := k.elementAt(args[1], index)
	switch {
	case err != nil:
		return err
	case off < 0:
		return refusal(errIndex)
	}
	_, next, err := collection.ListNext(k.Value, off)
	if err != nil {
		return corruptList(args[1])
	}
	if err := k.spliceList(args[1], off, next, 1, args[3]); err != nil {
		return err
	}
	w.OK()
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

// rangeArgs are those of LRANGE and LTRIM.
func rangeArgs(args [][]byte) (start, stop int64, err error) {
	p := OptionsOf(args[2:4])
	start, stop = p.Int(), p.Int()
	return start, stop, p.Err()
}

// cmdLRange writes as it walks. Damage that it meets on the way takes the place of all that it has written.
func cmdLRange(k *Key, args [][]byte, w *resp.Writer) error {
	start, stop, err := rangeArgs(args)
	if err != nil {
		return err
	}
	if !k.Present {
		w.Array(0)
		return nil
	}
	if err := k.typed(client.List); err != nil {
		return err
	}
	n, err := k.listLen(args[1])
	if err != nil {
		return err
	}
	from, to := listRange(start, stop, n)
	off, err := collection.ListSeek(k.Value, from)
	at := w.Len()
	w.Array(to - from)
	for i := from; i < to && err == nil; i++ {
		var e []byte
		if e, off, err = collection.ListNext(k.Value, off); err == nil {
			w.Bulk(e)
		}
	}
	if err != nil {
		w.Truncate(at)
		return corruptList(args[1])
	}
	return nil
}

// cmdLTrim writes nothing if all of the list stays.
func cmdLTrim(k *Key, args [][]byte, w *resp.Writer) error {
	start, stop, err := rangeArgs(args)
	if err != nil {
		return err
	}
	if !k.Present {
		w.OK()
		return nil
	}
	if err := k.typed(client.List); err != nil {
		return err
	}
	n, err := k.listLen(args[1])
	if err != nil {
		return err
	}
	from, to := listRange(start, stop, n)
	switch {
	case to-from == n:
	case from == to:
		k.Delete()
	default:
		head, err1 := collection.ListSeek(k.Value, from)
		tail, err2 := collection.ListSeek(k.Value, to)
		if errors.Join(err1, err2) != nil {
			return corruptList(args[1])
		}
		b, err := k.mutable(len(k.Value))
		if err != nil {
			return err
		}
		// The tail first: the offset of the head stays.
		b, err1 = collection.ListSplice(b, tail, len(b), n-to)
		b, err2 = collection.ListSplice(b, collection.ListStart, head, from)
		if errors.Join(err1, err2) != nil {
			return corruptList(args[1])
		}
		k.setList(b)
	}
	w.OK()
	return nil
}

// cmdLInsert looks for the pivot from the head on.
// It replies with the new length, 0 if there is no list, and -1 if there is no pivot.
func cmdLInsert(k *Key, args [][]byte, w *resp.Writer) error {
	p := OptionsOf(args[2:3])
	after := p.Choice("before", "after") == 1
	if err := p.End(); err != nil {
		return err
	}
	if has, err := k.hasOrZero(client.List, w); !has {
		return err
	}
	n, err := k.listLen(args[1])
	if err != nil {
		return err
	}
	off := collection.ListStart
	for range n {
		e, next, err := collection.ListNext(k.Value, off)
		if err != nil {
			return corruptList(args[1])
		}
		if bytes.Equal(e, args[3]) {
			if after {
				off = next
			}
			if err := k.spliceList(args[1], off, off, 0, args[4]); err != nil {
				return err
			}
			return k.replyLen(args[1], w)
		}
		off = next
	}
	w.Int(-1)
	return nil
}

// cmdLRem removes the first equal elements, or the last ones for a negative count, or all for 0. It writes only if
// there are some.
func cmdLRem(k *Key, args [][]byte, w *resp.Writer) error {
	limit, ok := resp.ParseInt(args[2])
	if !ok {
		return ErrNotInt
	}
	if has, err := k.hasOrZero(client.List, w); !has {
		return err
	}
	b, err := k.editList(args[1], 0)
	if err != nil {
		return err
	}
	b, removed, err := collection.ListRemove(b, args[3], int(limit))
	if err != nil {
		return corruptList(args[1])
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
	p := OptionsOf(opts)
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
func cmdLPos(k *Key, args [][]byte, w *resp.Writer) error {
	a, err := parsePos(args[3:])
	if err != nil {
		return err
	}
	if !k.Present {
		replyPositions(a, nil, w)
		return nil
	}
	if err := k.typed(client.List); err != nil {
		return err
	}
	n, err := k.listLen(args[1])
	if err != nil {
		return err
	}
	off, step := collection.ListStart, collection.ListNext
	if a.rank < 0 {
		off, step = len(k.Value), collection.ListPrev
	}
	skip := max(a.rank, -a.rank) - 1
	if a.rank == math.MinInt64 { // which Redis's arithmetic makes the first match, and no limit
		skip, a.count = 0, min(a.count, 0)
	}
	var found []int
	for i := 0; i < n && (a.most == 0 || int64(i) < a.most); i++ {
		var e []byte
		var err error
		if e, off, err = step(k.Value, off); err != nil {
			return corruptList(args[1])
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
