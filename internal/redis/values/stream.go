package values

import (
	"bytes"
	"math"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/number"
	"github.com/kvd-project/kvd/internal/redis/args"
	"github.com/kvd-project/kvd/internal/redis/collection"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

var _ = oneKey(map[string]KeyFunc{
	"xadd": cmdXAdd,
	"xdel": cmdXDel,
	"xlen": cmdXLen,
	"xrange": func(k *Key, args [][]byte, w *resp.Writer) error {
		return xrange(k, args, w, false)
	},
	"xrevrange": func(k *Key, args [][]byte, w *resp.Writer) error {
		return xrange(k, args, w, true)
	},
	"xsetid": cmdXSetID,
	"xtrim":  cmdXTrim,
})

// Streams. A command takes the value apart as far as it needs to (internal/redis/collection); one that changes it edits
// a copy. The order in which arguments, the key, its type and groups are looked at is that of Redis's t_stream.c.
//
// An encoded stream is one record, its groups with it, of collection.MaxLen bytes at most, and each change writes all
// of it. So streams are for trimming, by MAXLEN or MINID: one that only grows ends with an error of XADD. A change is
// atomic with all that it tells groups, across gateways, without a lock that somebody might not give back.

const (
	errStreamID  = "ERR Invalid stream ID specified as stream command argument"
	errStartID   = "ERR invalid start ID for the interval"
	errEndID     = "ERR invalid end ID for the interval"
	errOneTrim   = "ERR syntax error, MAXLEN and MINID options at the same time are not compatible"
	errLimitTrim = "ERR syntax error, LIMIT cannot be used without specifying a trimming strategy"
	errNoTrim    = "ERR syntax error, XTRIM must be called with at least one trimming strategy"
	errLimitOnly = "ERR syntax error, LIMIT cannot be used without the special ~ option"
)

// readStream is the key's stream, empty if there is none.
// The stream refers to the value. Its entries are checked as they are read, so each reading may find damage.
func (k *Key) readStream(name []byte) (s *collection.Stream, err error) {
	if err := k.typed(client.Stream); err != nil {
		return nil, err
	}
	return parsedStream(k.Value, name)
}

// parsedStream is the stream in b.
func parsedStream(b, name []byte) (s *collection.Stream, err error) {
	s, err = collection.ParseStream(b)
	return s, streamError(err, name)
}

// streamError is the refusal of a stream that is corrupt, nil if err is.
func streamError(err error, name []byte) error {
	if err != nil {
		return collectionError(client.Stream, name, err)
	}
	return nil
}

// editStream is the key's stream in bytes that may be edited, with room for grow bytes more.
func (k *Key) editStream(name []byte, grow int) (s *collection.Stream, err error) {
	b, err := k.editable(grow)
	if err != nil {
		return nil, err
	}
	return parsedStream(b, name)
}

// setStream makes an edited stream the key's, unless it is too long.
// groups says that they may have been changed, and are encoded anew. A stream without entries stays a key, unlike other
// collections.
func (k *Key) setStream(s *collection.Stream, groups bool, name []byte) error {
	return k.setEdited(client.Stream, s.Bytes(groups), name)
}

// parseNumber reads a part of an id as Redis does: a decimal integer, or else what C's strtoull takes.
// So "-1" is the largest number for the latter, but a negative integer for the former, which refuses it.
func parseNumber(b []byte) (n uint64, ok bool) {
	if i, ok := resp.ParseInt(b); ok {
		return uint64(i), i >= 0
	}
	n, used, inRange := number.Unsigned(b, 10)
	return n, inRange && used > 0 && used == len(b)
}

// parseIDAs reads ms, ms-seq, and if auto is set ms-*, of which all is then false; missing is the seq of an id without
// one. ms is in Unix ms by convention only. A text longer than 127 bytes is none, as in Redis.
func parseIDAs(b []byte, missing uint64, auto bool) (id collection.StreamID, all, ok bool) {
	if len(b) > 127 {
		return id, false, false
	}
	b, _, _ = bytes.Cut(b, []byte{0})
	ms, seq, has := bytes.Cut(b, []byte("-"))
	if id.MS, ok = parseNumber(ms); !ok {
		return id, false, false
	}
	switch {
	case !has:
		id.Seq = missing
	case auto && string(seq) == "*":
		return id, false, true
	default:
		id.Seq, ok = parseNumber(seq)
	}
	return id, true, ok
}

// parseID reads an id; - and + are none.
func parseID(b []byte) (id collection.StreamID, ok bool) {
	id, _, ok = parseIDAs(b, 0, false)
	return id, ok
}

// parseEdge reads an end of an interval, which with ( in front of it is not in it.
// An id without its second number stands for all of that millisecond: the first at the start of the interval, the last
// at its end.
func parseEdge(b []byte, end bool) (id collection.StreamID, err error) {
	missing := uint64(0)
	if end {
		missing = math.MaxUint64
	}
	open := len(b) > 1 && b[0] == '('
	ok := true
	switch {
	case open:
		id, _, ok = parseIDAs(b[1:], missing, false)
	case string(b) == "-":
	case string(b) == "+":
		id = collection.MaxStreamID
	default:
		id, _, ok = parseIDAs(b, missing, false)
	}
	switch {
	case !ok:
		return id, refusal(errStreamID)
	case open && !end:
		if id, ok = id.Next(); !ok {
			return id, refusal(errStartID)
		}
	case open:
		if id, ok = id.Prev(); !ok {
			return id, refusal(errEndID)
		}
	}
	return id, nil
}

func writeID(w *resp.Writer, id collection.StreamID) {
	var a [41]byte
	w.Bulk(id.Append(a[:0]))
}

// writeEntry is an entry as all commands have it: its id, and an array of fields and values by turns, in RESP3, too.
func writeEntry(w *resp.Writer, e collection.StreamEntry) {
	w.Array(2)
	writeID(w, e.ID)
	w.Array(2 * e.Pairs)
	for t := range e.Texts() {
		w.Bulk(t)
	}
}

// countRange is how many entries a range has, counted up to most unless that is 0.
func countRange(s *collection.Stream, from, to collection.StreamID, most int64) (n int, err error) {
	err = s.Range(from, to, false, func(collection.StreamEntry) bool {
		n++
		return int64(n) != most
	})
	return n, err
}

// writeRange is the first n entries of a range, from its end on in reverse: so many as countRange has found.
func writeRange(w *resp.Writer, s *collection.Stream, from, to collection.StreamID, reverse bool, n int) error {
	if w.Array(n); n == 0 {
		return nil
	}
	return s.Range(from, to, reverse, func(e collection.StreamEntry) bool {
		writeEntry(w, e)
		n--
		return n > 0
	})
}

// writeSome is writeRange for as many as there are, up to most unless that is 0. If the stream is corrupt it replies
// that in its place.
func writeSome(w *resp.Writer, s *collection.Stream, from, to collection.StreamID, reverse bool, most int64,
	name []byte) error {
	at := w.Len()
	n, err := countRange(s, from, to, most)
	if err == nil {
		err = writeRange(w, s, from, to, reverse, n)
	}
	if err != nil {
		w.Truncate(at)
	}
	return streamError(err, name)
}

// trimArgs are the options of XADD and XTRIM.
// Blocks of StreamTrim is ~: only whole blocks of entries go, which is cheaper.
type trimArgs struct {
	collection.StreamTrim
	some   bool // there is something to trim by
	noMake bool // NOMKSTREAM
	id     collection.StreamID
	given  bool     // the id, of which
	whole  bool     // seq is too
	fields [][]byte // fields and values by turns, behind the id
}

// parseTrim reads options, and for XADD the id and what is behind it.
// The error replies are Redis's, and its order of checks.
func parseTrim(args [][]byte, add bool) (a trimArgs, err error) {
	limited := false
	p := OptionsOf(args[2:])
	for done := false; p.More() && !done; {
		switch {
		case add && p.Flag("*"):
			done = true
		case p.Option("maxlen", 1):
			a.parseBound(&p, false)
		case p.Option("minid", 1):
			a.parseBound(&p, true)
		case p.Option("limit", 1):
			if limited, a.Limit = true, p.Int(); a.Limit < 0 {
				p.Refuse("ERR The LIMIT argument must be >= 0.")
			}
		case add && p.Flag("nomkstream"):
			a.noMake = true
		case add:
			var ok bool
			if a.id, a.whole, ok = parseIDAs(p.Str(), 0, true); !ok {
				p.Refuse(errStreamID)
			}
			a.given, done = true, true
		default:
			p.Wrong()
		}
	}
	if err := p.Err(); err != nil {
		return a, err
	}
	switch {
	case a.Limit > 0 && !a.some:
		return a, refusal(errLimitTrim)
	case !add && !a.some:
		return a, refusal(errNoTrim)
	// LIMIT bounds the work of a trimming that need not be exact, so it has no meaning for one that must be.
	case limited && !a.Blocks:
		return a, refusal(errLimitOnly)
	case !limited && a.Blocks:
		a.Limit = 10_000 // Redis's bound on the work of one command
	}
	a.fields = p.Rest()
	return a, nil
}

// parseBound reads the number of MAXLEN or the id of MINID, and what may be in front of it.
// Without = or ~ it is =: all that is beyond the bound goes.
func (a *trimArgs) parseBound(p *args.Parser, byID bool) {
	if a.some {
		p.Refuse(errOneTrim)
		return
	}
	a.some, a.ByID, a.Blocks = true, byID, p.Option("~", 1)
	if !a.Blocks {
		p.Option("=", 1)
	}
	if byID {
		var ok bool
		if a.MinID, ok = parseID(p.Str()); !ok {
			p.Refuse(errStreamID)
		}
		return
	}
	n := p.Int()
	if n < 0 {
		p.Refuse("ERR The MAXLEN argument must be >= 0.")
	}
	a.Max = uint64(n)
}

// cmdXAdd replies with the id. Ids of one stream ascend whatever gateways' clocks say: an id is at least the one behind
// the last. The trimming is a part of the same write.
func cmdXAdd(k *Key, args [][]byte, w *resp.Writer) error {
	a, err := parseTrim(args, true)
	switch {
	case err != nil:
		return err
	case len(a.fields) < 2 || len(a.fields)%2 != 0:
		return refusal("ERR wrong number of arguments for 'xadd' command")
	case a.given && a.whole && a.id == collection.StreamID{}:
		return refusal("ERR The ID specified in XADD must be greater than 0-0")
	}
	if err := k.typed(client.Stream); err != nil {
		return err
	}
	if !k.Present && a.noMake {
		w.Null()
		return nil
	}
	s, err := k.editStream(args[1], collection.StreamRoom(a.fields))
	if err != nil {
		return err
	}
	if s.Last == collection.MaxStreamID {
		return refusal("ERR The stream has exhausted the last possible ID, unable to add more items")
	}
	id := a.nextID(s.Last, k.Now)
	if id.Compare(s.Last) <= 0 {
		return refusal("ERR The ID specified in XADD is equal or smaller than the target stream top item")
	}
	// The entry is added before trimming, and counts for MAXLEN; a bound of 0 takes it away again.
	s.Add(id, a.fields)
	gone := 0
	if a.some {
		if gone, err = s.Trim(a.StreamTrim); err != nil {
			return streamError(err, args[1])
		}
	}
	if err := k.setStream(s, false, args[1]); err != nil {
		return err
	}
	if gone > 0 {
		k.Also = "xtrim"
	}
	writeID(w, id)
	return nil
}

// nextID is the id of a new entry, which is not behind last if the arguments ask for such a one.
// now is this gateway's clock, in Unix ms. The result is not behind last if there is none in that millisecond.
func (a *trimArgs) nextID(last collection.StreamID, now int64) collection.StreamID {
	next, _ := last.Next()
	switch {
	case !a.given && uint64(now) > last.MS: // *, in a new millisecond
		return collection.StreamID{MS: uint64(now)}
	case !a.given: // *, in the same one, or with a clock that is behind
		return next
	case !a.whole && a.id.MS == last.MS && last.Seq == math.MaxUint64:
		// ms-*, in a millisecond that is full: XADD refuses it
		return last
	case !a.whole && a.id.MS == last.MS: // ms-*, in the last entry's millisecond
		return next
	}
	return a.id
}

// cmdXLen reads the number of entries, which the encoding has.
func cmdXLen(k *Key, args [][]byte, w *resp.Writer) error {
	s, err := k.readStream(args[1])
	if err != nil {
		return err
	}
	w.Int(int64(s.Len()))
	return nil
}

// xrange is XRANGE and XREVRANGE. It walks the range twice, first to count it, since the number comes before the
// entries.
func xrange(k *Key, args [][]byte, w *resp.Writer, reverse bool) error {
	start, end := args[2], args[3]
	if reverse {
		start, end = end, start // XREVRANGE names the upper end first
	}
	from, err := parseEdge(start, false)
	if err != nil {
		return err
	}
	to, err := parseEdge(end, true)
	if err != nil {
		return err
	}
	count := int64(-1)
	p := OptionsOf(args[4:])
	for p.More() {
		if !p.Option("count", 1) {
			p.Wrong()
		}
		count = max(p.Int(), 0)
	}
	if err := p.End(); err != nil {
		return err
	}
	s, err := k.readStream(args[1])
	switch {
	case err != nil:
		return err
	case !k.Present:
		w.Array(0)
	case count == 0:
		w.NullArray()
	default:
		return writeSome(w, s, from, to, reverse, max(count, 0), args[1])
	}
	return nil
}

// parseIDs reads all arguments as ids.
func parseIDs(args [][]byte) (ids []collection.StreamID, err error) {
	for _, b := range args {
		id, ok := parseID(b)
		if !ok {
			return nil, refusal(errStreamID)
		}
		ids = append(ids, id)
	}
	return ids, nil
}

// cmdXDel leaves the entries pending in groups that had them; XCLAIM and XAUTOCLAIM forget those.
func cmdXDel(k *Key, args [][]byte, w *resp.Writer) error {
	if has, err := k.hasOrZero(client.Stream, w); !has {
		return err
	}
	ids, err := parseIDs(args[2:])
	if err != nil {
		return err
	}
	s, err := k.editStream(args[1], 0)
	if err != nil {
		return err
	}
	gone := int64(0)
	for _, id := range ids {
		was, err := s.Delete(id)
		if err != nil {
			return streamError(err, args[1])
		}
		gone += Bit(was)
	}
	// Nothing is written for ids that were not there.
	if gone > 0 {
		if err := k.setStream(s, false, args[1]); err != nil {
			return err
		}
	}
	w.Int(gone)
	return nil
}

// cmdXTrim replies with how many entries went.
func cmdXTrim(k *Key, args [][]byte, w *resp.Writer) error {
	a, err := parseTrim(args, false)
	if err != nil {
		return err
	}
	if has, err := k.hasOrZero(client.Stream, w); !has {
		return err
	}
	s, err := k.editStream(args[1], 0)
	if err != nil {
		return err
	}
	gone, err := s.Trim(a.StreamTrim)
	if err = streamError(err, args[1]); err == nil && gone > 0 {
		err = k.setStream(s, false, args[1])
	}
	if err != nil {
		return err
	}
	w.Int(int64(gone))
	return nil
}

// cmdXSetID is for those who copy streams between stores: it sets what XADD and groups count by.
func cmdXSetID(k *Key, args [][]byte, w *resp.Writer) error {
	id, ok := parseID(args[2])
	if !ok {
		return refusal(errStreamID)
	}
	added, deleted := int64(-1), collection.StreamID{}
	p := OptionsOf(args[3:])
	for p.More() {
		switch {
		case p.Option("entriesadded", 1):
			if added = p.Int(); added < 0 {
				p.Refuse("ERR entries_added must be positive")
			}
		case p.Option("maxdeletedid", 1):
			if deleted, ok = parseID(p.Str()); !ok {
				p.Refuse(errStreamID)
			} else if id.Compare(deleted) < 0 {
				p.Refuse("ERR The ID specified in XSETID is smaller than the provided max_deleted_entry_id")
			}
		default:
			p.Wrong()
		}
	}
	if err := p.End(); err != nil {
		return err
	}
	if !k.Present {
		return errNoKey
	}
	if err := k.typed(client.Stream); err != nil {
		return err
	}
	s, err := k.editStream(args[1], 0)
	if err != nil {
		return err
	}
	// An id before the last entry's would let XADD give ids a second time.
	top, err := s.Edge(true)
	switch {
	case err != nil:
		return streamError(err, args[1])
	case s.Len() > 0 && id.Compare(top) < 0:
		return refusal("ERR The ID specified in XSETID is smaller than the target stream top item")
	case s.Len() > 0 && added >= 0 && int64(s.Len()) > added:
		return refusal("ERR The entries_added specified in XSETID is smaller than the target stream length")
	}
	if s.SetLast(id, top); added >= 0 {
		s.Added = uint64(added)
	}
	if deleted != (collection.StreamID{}) {
		s.MaxDeleted = deleted
	}
	if err := k.setStream(s, false, args[1]); err != nil {
		return err
	}
	w.OK()
	return nil
}
