package gateway

import (
	"bytes"
	"errors"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/collection"
	"github.com/kvd-project/kvd/internal/resp"
)

func parseEnd(b []byte) (left, ok bool) {
	left = fold(b, "left")
	return left, left || fold(b, "right")
}

// cmdLMove takes from one list and adds to another in one step, whichever gateways others use.
func cmdLMove(t *staged, args [][]byte, w *resp.Writer) error {
	from, ok1 := parseEnd(args[3])
	to, ok2 := parseEnd(args[4])
	if !ok1 || !ok2 {
		return refusal(errSyntax)
	}
	if !moveElement(t, args[1], args[2], from, to, false, w) {
		w.Null()
	}
	return nil
}

func cmdRPopLPush(t *staged, args [][]byte, w *resp.Writer) error {
	if !moveElement(t, args[1], args[2], false, true, false, w) {
		w.Null()
	}
	return nil
}

// moveElement moves an element and replies with it. It returns false, without a reply, if there is none; for a client
// that has waited already a source that is no list is none. If the destination has no room neither list is changed, so
// that the element is never lost.
func moveElement(t *staged, from, to []byte, fromLeft, toLeft, again bool, w *resp.Writer) bool {
	t.load(from, to)
	src, dst := t.key(from), t.key(to)
	switch {
	case t.failed():
		return true
	case !src.present, again && src.typ != client.List:
		return false
	case !src.is(client.List, w), !dst.is(client.List, w):
		return true
	}
	n, ok := src.listLen(from, w)
	if !ok {
		return true
	}
	off, end := collection.ListStart, len(src.value)
	var e []byte
	var err error
	if fromLeft {
		e, end, err = collection.ListNext(src.value, off)
	} else {
		e, off, err = collection.ListPrev(src.value, end)
	}
	if err != nil {
		w.Error(corruptList(from))
		return true
	}
	e = bytes.Clone(e) // what it lies in is edited
	done := true
	switch {
	// The only element of a list stays where it is, and both events are told.
	case src == dst && n == 1:
	case src == dst:
		done = src.rotateList(from, off, end, e, toLeft, w)
	default:
		d, ok := dst.pushed(to, toLeft, w, e)
		if !ok {
			return true
		}
		var s []byte
		if s, done = src.splicedList(from, off, end, 1, w); done { // both or none
			dst.setList(d)
			src.setList(s)
		}
	}
	if done {
		t.name(dst, onList, endOf(toLeft)+"push")
		t.name(src, onList, endOf(fromLeft)+"pop")
		w.Bulk(e)
	}
	return true
}

// endOf is the first letter of commands on that end of a list.
// It is for the names of events.
func endOf(left bool) string {
	if left {
		return "l"
	}
	return "r"
}

// rotateList moves the element from byte off to byte end to an end of the same list, which becomes no longer; false: it
// replied with an error, or the command is to be given up.
func (k *key) rotateList(name []byte, off, end int, e []byte, left bool, w *resp.Writer) bool {
	b, ok := k.mutable(len(k.value))
	if !ok {
		return false
	}
	b, err1 := collection.ListSplice(b, off, end, 1)
	at := collection.ListStart
	if !left {
		at = len(b)
	}
	b, err2 := collection.ListSplice(b, at, at, 0, e)
	if errors.Join(err1, err2) != nil {
		w.Error(corruptList(name))
		return false
	}
	k.setList(b)
	return true
}

// popArgs are those of LMPOP and BLMPOP behind the timeout.
type popArgs struct {
	names [][]byte // of the lists, in the order in which they are tried
	left  bool     // the head's end
	count int64    // elements at most, from 1
}

// parseMPop reads what begins with the number of lists; bad is the error reply.
func parseMPop(args [][]byte) (a popArgs, bad string) {
	n, ok := resp.ParseInt(args[0])
	if !ok || n < 1 {
		return a, "ERR numkeys should be greater than 0"
	}
	if n >= int64(len(args)-1) {
		return a, errSyntax
	}
	a.names, args = args[1:1+n], args[1+n:]
	if a.left, ok = parseEnd(args[0]); !ok {
		return a, errSyntax
	}
	for args = args[1:]; len(args) > 0; args = args[2:] {
		if a.count != 0 || !fold(args[0], "count") || len(args) == 1 {
			return a, errSyntax
		}
		if a.count, ok = resp.ParseInt(args[1]); !ok || a.count < 1 {
			return a, "ERR count should be greater than 0"
		}
	}
	a.count = max(a.count, 1)
	return a, ""
}

// try pops from the first of names that has something.
func (a popArgs) try(t *staged, names [][]byte, again bool, w *resp.Writer) bool {
	return firstOf(t, names, client.List, again, w, func(k *key, name []byte) {
		if k.popList(name, a.left, a.count, w, func(n int) {
			w.Array(2)
			w.Bulk(name)
			w.Array(n)
		}) {
			t.name(k, onList, endOf(a.left)+"pop")
		}
	})
}

func cmdLMPop(t *staged, args [][]byte, w *resp.Writer) error {
	a, bad := parseMPop(args[1:])
	if bad != "" {
		return refusal(bad)
	}
	if !a.try(t, a.names, false, w) {
		w.NullArray()
	}
	return nil
}
