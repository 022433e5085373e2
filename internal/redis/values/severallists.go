package values

import (
	"bytes"
	"cmp"
	"errors"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/collection"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

var _ = severalKeys(map[string]SeveralFunc{
	"lmove":     cmdLMove,
	"lmpop":     cmdLMPop,
	"rpoplpush": cmdRPopLPush,
})

// parseEnds reads from which end of a list an element goes, and to which one.
func parseEnds(args [][]byte) (fromLeft, toLeft bool, err error) {
	p := OptionsOf(args[:2])
	fromLeft, toLeft = p.Choice("left", "right") == 0, p.Choice("left", "right") == 0
	return fromLeft, toLeft, p.End()
}

// cmdLMove takes from one list and adds to another in one step, whichever gateways others use.
func cmdLMove(t Keys, args [][]byte, w *resp.Writer) error {
	from, to, err := parseEnds(args[3:])
	if err != nil {
		return err
	}
	return moveOrNull(t, args, from, to, w)
}

func cmdRPopLPush(t Keys, args [][]byte, w *resp.Writer) error {
	return moveOrNull(t, args, false, true, w)
}

func moveOrNull(t Keys, args [][]byte, fromLeft, toLeft bool, w *resp.Writer) error {
	moved, err := moveElement(t, args[1], args[2], fromLeft, toLeft, false, w)
	if err == nil && !moved {
		w.Null()
	}
	return err
}

// moveElement moves an element and replies with it. It returns false, without a reply, if there is none; for a client
// that has waited already a source that is no list is none. If the destination has no room neither list is changed, so
// that the element is never lost.
func moveElement(t Keys, from, to []byte, fromLeft, toLeft, again bool, w *resp.Writer) (found bool, err error) {
	t.Load(from, to)
	src, dst := t.Key(from), t.Key(to)
	switch {
	case t.Failure() != nil:
		return true, nil
	case !src.Present, again && src.Type != client.List:
		return false, nil
	}
	if err := cmp.Or(src.typed(client.List), dst.typed(client.List)); err != nil {
		return true, err
	}
	n, err := src.listLen(from)
	if err != nil {
		return true, err
	}
	off, end := collection.ListStart, len(src.Value)
	var e []byte
	if fromLeft {
		e, end, err = collection.ListNext(src.Value, off)
	} else {
		e, off, err = collection.ListPrev(src.Value, end)
	}
	if err != nil {
		return true, corruptList(from)
	}
	e = bytes.Clone(e) // what it lies in is edited
	switch {
	// The only element of a list stays where it is, and both events are told.
	case src == dst && n == 1:
	case src == dst:
		if err := src.rotateList(from, off, end, e, toLeft); err != nil {
			return true, err
		}
	default:
		d, err := dst.pushed(to, toLeft, e)
		if err != nil {
			return true, err
		}
		s, err := src.splicedList(from, off, end, 1)
		if err != nil {
			return true, err
		}
		dst.setList(d) // both or none
		src.setList(s)
	}
	t.Name(dst, onList, endOf(toLeft)+"push")
	t.Name(src, onList, endOf(fromLeft)+"pop")
	w.Bulk(e)
	return true, nil
}

// endOf is the first letter of commands on that end of a list.
// It is for the names of events.
func endOf(left bool) string {
	if left {
		return "l"
	}
	return "r"
}

// rotateList moves the element from byte off to byte end to an end of the same list, which becomes no longer.
func (k *Key) rotateList(name []byte, off, end int, e []byte, left bool) error {
	b, err := k.mutable(len(k.Value))
	if err != nil {
		return err
	}
	b, err1 := collection.ListSplice(b, off, end, 1)
	at := collection.ListStart
	if !left {
		at = len(b)
	}
	b, err2 := collection.ListSplice(b, at, at, 0, e)
	if errors.Join(err1, err2) != nil {
		return corruptList(name)
	}
	k.setList(b)
	return nil
}

// popArgs are those of LMPOP, ZMPOP and their like that wait, behind the timeout: from the first of some lists or
// sorted sets that has something.
type popArgs struct {
	names [][]byte // in the order in which they are tried
	last  bool     // the list's tail, or the highest scores
	count int64    // elements at most, from 1
}

// parseMPop reads what begins with the number of keys. ends are the words for the first end and the last one.
func parseMPop(args [][]byte, ends ...string) (a popArgs, err error) {
	n, ok := resp.ParseInt(args[0])
	switch {
	case !ok || n < 1:
		return a, refusal("ERR numkeys should be greater than 0")
	case n >= int64(len(args)-1):
		return a, ErrSyntax
	}
	a.names = args[1 : 1+n]
	p := OptionsOf(args[1+n:])
	a.last = p.Choice(ends...) == 1
	for p.More() {
		if a.count != 0 || !p.Option("count", 1) {
			p.Wrong()
		}
		a.count = p.IntFrom(1, "ERR count should be greater than 0")
	}
	a.count = max(a.count, 1)
	return a, p.End()
}

// try pops from the first of names that has something.
func (a popArgs) try(t Keys, names [][]byte, again bool, w *resp.Writer) (found bool, err error) {
	return firstOf(t, names, client.List, again, func(k *Key, name []byte) error {
		err := k.popList(name, !a.last, a.count, w, func(n int) {
			w.Array(2)
			w.Bulk(name)
			w.Array(n)
		})
		if err == nil {
			t.Name(k, onList, endOf(!a.last)+"pop")
		}
		return err
	})
}

func cmdLMPop(t Keys, args [][]byte, w *resp.Writer) error {
	a, err := parseMPop(args[1:], "left", "right")
	if err != nil {
		return err
	}
	found, err := a.try(t, a.names, false, w)
	if err == nil && !found {
		w.NullArray()
	}
	return err
}
