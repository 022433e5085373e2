package values

import (
	"bytes"
	"slices"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

var _ = severalKeys(map[string]SeveralFunc{
	"sort":    cmdSort,
	"sort_ro": cmdSortRO,
})

// SORT and SORT_RO. Keys of the patterns are read like any other, in the step that all of it is.
//
// The keys of patterns need not be known before, so the rules of users are asked for all keys at once
// (readsEverything), and two round trips are usual: the elements, and then the keys of the BY pattern together.

// sortArgs are the options of SORT.
// from and count are LIMIT's; a negative count is all behind from.
type sortArgs struct {
	by          []byte   // nil: the elements themselves
	get         [][]byte // GET's patterns; nil: the elements
	store       []byte   // nil: reply with the result
	desc, alpha bool     // DESC; ALPHA: by bytes and not as numbers
	dontSort    bool     // BY a pattern that names the same key for all
	from, count int64
}

// parseSort reads the options. Patterns may name any key, so they are for users who may read all of them.
// The arguments are kept. A BY pattern without a star is none, and needs no right.
func parseSort(args [][]byte, readOnly bool, readsEverything func() bool) (o sortArgs, err error) {
	o.count = -1
	p := OptionsOf(args[2:])
	for p.More() {
		switch {
		case p.Flag("asc"):
			o.desc = false
		case p.Flag("desc"):
			o.desc = true
		case p.Flag("alpha"):
			o.alpha = true
		case p.Option("limit", 2):
			o.from, o.count = p.Int(), p.Int()
		case !readOnly && p.Option("store", 1):
			o.store = p.Str()
		case p.Option("by", 1):
			if o.by = p.Str(); bytes.IndexByte(o.by, '*') < 0 {
				o.dontSort = true
			} else if !readsEverything() {
				p.Refuse("ERR BY option of SORT denied due to insufficient ACL permissions.")
			}
		case p.Option("get", 1):
			if !readsEverything() { // for # as well, as in Redis
				p.Refuse("ERR GET option of SORT denied due to insufficient ACL permissions.")
			}
			o.get = append(o.get, p.Str())
		default:
			p.Wrong()
		}
	}
	return o, p.End()
}

func cmdSort(t Keys, args [][]byte, w *resp.Writer) error   { return sortKey(t, args, w, false) }
func cmdSortRO(t Keys, args [][]byte, w *resp.Writer) error { return sortKey(t, args, w, true) }

// sorted is an element, and what it is sorted by.
type sorted struct {
	element, by []byte
	score       float64 // of by, unless ALPHA
	none        bool    // there is no such key as by was to come from
}

// sortKey is both commands. Elements lie in the key's value, or are copies of integers.
func sortKey(t Keys, args [][]byte, w *resp.Writer, readOnly bool) error {
	o, err := parseSort(args, readOnly, func() bool { return t.ReadsEverything(args) })
	if err != nil {
		return err
	}
	k := t.Key(args[1])
	if k.Present && k.Type != client.List && k.Type != client.Set && k.Type != client.SortedSet {
		return errWrongType
	}
	var elements [][]byte
	if k.Present {
		if elements, err = elementsOf(k.Type, k.Value); err != nil {
			return collectionError(k.Type, args[1], err)
		}
	}
	if o.dontSort && k.Type == client.Set && o.store != nil {
		// A set has no order, and what is stored is to be the same each time.
		o.dontSort, o.alpha, o.by = false, true, nil
	}
	if o.dontSort && o.desc && k.Type != client.Set {
		slices.Reverse(elements)
	}
	list, err := sortElements(t, elements, &o)
	if err != nil {
		return err
	}
	var out [][]byte
	// The keys of GET are read here, one by one, and only for the elements that LIMIT leaves.
	for _, s := range cut(list, o.from, o.count) {
		if o.get == nil {
			out = append(out, s.element)
		}
		for _, p := range o.get {
			out = append(out, byPattern(t, p, s.element))
		}
	}
	if t.Failure() != nil {
		return nil
	}
	if o.store != nil {
		return storeList(t.Key(o.store), o.store, out, w)
	}
	w.Array(len(out))
	for _, e := range out {
		if e == nil {
			w.Null()
		} else {
			w.Bulk(e)
		}
	}
	return nil
}

// sortElements puts elements in their order. Those of equal weight are in the order of their bytes, but for BY with
// ALPHA, where they stay as they were. The keys of a pattern are read together. A key that is not there weighs 0, or
// with ALPHA stands before all others.
func sortElements(t Keys, elements [][]byte, o *sortArgs) (list []sorted, err error) {
	list = make([]sorted, len(elements))
	if o.by != nil && !o.dontSort {
		var names [][]byte
		for _, e := range elements {
			if name, _, ok := patternKey(o.by, e); ok {
				names = append(names, name)
			}
		}
		t.Load(names...)
	}
	for i, e := range elements {
		s := &list[i]
		s.element, s.by = e, e
		if o.dontSort {
			continue
		}
		if o.by != nil {
			s.by = byPattern(t, o.by, e)
			s.none = s.by == nil
		}
		if !o.alpha && !s.none {
			var ok bool
			if s.score, ok = sortScore(s.by); !ok {
				return nil, refusal("ERR One or more scores can't be converted into double")
			}
		}
	}
	if o.dontSort {
		return list, nil
	}
	// DESC turns the comparison round and not the result, so that equal elements stay in their order.
	slices.SortStableFunc(list, func(a, b sorted) int {
		n := 0
		switch {
		case !o.alpha:
			if n = compareFloats(a.score, b.score); n == 0 {
				n = bytes.Compare(a.element, b.element)
			}
		case a.none || b.none:
			n = int(Bit(b.none) - Bit(a.none))
		default:
			n = bytes.Compare(a.by, b.by)
		}
		if o.desc {
			return -n
		}
		return n
	})
	return list, nil
}

// compareFloats is for numbers only; sortScore lets no NaN through.
func compareFloats(a, b float64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// sortScore reads a number of an element or key. Unlike elsewhere one that is too small for all of its digits is none,
// as in Redis.
func sortScore(b []byte) (float64, bool) {
	f, inRange, ok := textNumber(b)
	return f, ok && inRange
}

// cut is LIMIT.
// Numbers beyond the list, or negative ones, are not wrong.
func cut(list []sorted, from, count int64) []sorted {
	n := int64(len(list))
	from = min(max(from, 0), n)
	if count < 0 || count > n-from {
		count = n - from
	}
	return list[from : from+count]
}

// patternKey is the key that a pattern names for an element, and the field of it, nil for none.
// ok is false for a pattern without a star. The element takes the place of the first star, and of no other.
func patternKey(pattern, element []byte) (name, field []byte, ok bool) {
	star := bytes.IndexByte(pattern, '*')
	if star < 0 {
		return nil, nil, false
	}
	head, tail := pattern[:star], pattern[star+1:]
	if at := bytes.Index(tail, []byte("->")); at >= 0 && at+2 < len(tail) {
		tail, field = tail[:at], tail[at+2:]
	}
	return slices.Concat(head, element, tail), field, true
}

// byPattern is the value that a pattern leads to from an element; nil: there is none.
// A name that no key may have, or a key of another type, is one that is not there.
func byPattern(t Keys, pattern, element []byte) []byte {
	if string(pattern) == "#" {
		return element
	}
	name, field, ok := patternKey(pattern, element)
	if !ok || !t.Possible(name) {
		return nil
	}
	k := t.Key(name)
	switch {
	case !k.Present:
		t.Miss(name)
		return nil
	case field != nil:
		return fieldOf(k, field)
	case k.Type != client.Plain:
		return nil
	case k.Value == nil:
		return []byte{}
	}
	return k.Value
}
