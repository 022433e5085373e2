package values

import (
	"slices"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/collection"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

var _ = waitingFor(map[string]WaitFunc{
	"xread":      parseRead(false),
	"xreadgroup": parseRead(true),
})

// XREAD and XREADGROUP, which are on several streams and may wait for them.

// blockedCount is how many entries a client that has waited gets at most if it gave no COUNT, as in Redis.
const blockedCount = 1000

// readArgs are those of XREAD and XREADGROUP.
// It lives as long as the command waits. from and news are by the place in names.
type readArgs struct {
	ofGroup         bool     // XREADGROUP
	group, consumer []byte   // of XREADGROUP
	noAck           bool     // NOACK: what is delivered is not pending
	count           int64    // 0: all
	names, ids      [][]byte // of the streams, and from where on each is read

	from []collection.StreamID // that names have been read up to, since the first try
	news []bool                // the id is >
}

// parseRead is for XREAD and XREADGROUP.
// Clients of XREAD wait in no line, since they take nothing, and those of a group in the group's.
func parseRead(ofGroup bool) WaitFunc {
	return func(args [][]byte) (Blocking, error) {
		a := &readArgs{ofGroup: ofGroup}
		timeout, err := a.parse(args)
		b := Blocking{Names: a.names, Timeout: timeout, Reads: true, Try: a.try}
		if ofGroup {
			b.Line = "group " + string(a.group)
		}
		return b, err
	}
}

// parse reads the arguments but for the ids, which Redis looks at when it knows the streams. The timeout is noWait
// without BLOCK. The arguments are kept.
func (a *readArgs) parse(args [][]byte) (timeout time.Duration, err error) {
	timeout = NoWait
	p := OptionsOf(args[1:])
	for p.More() {
		switch {
		case p.Option("block", 1):
			if timeout, err = parseMillis(p.Str()); err != nil {
				return 0, err
			}
		case p.Option("count", 1):
			a.count = max(p.Int(), 0)
		case p.Option("streams", 1):
			return timeout, a.parseStreams(p.Rest())
		// The group and the consumer may be named again, and the last ones count.
		case p.Option("group", 2):
			if !a.ofGroup {
				p.Refuse("ERR The GROUP option is only supported by XREADGROUP. You called XREAD instead.")
			}
			a.group, a.consumer = p.Str(), p.Str()
		case p.Flag("noack"):
			if !a.ofGroup {
				p.Refuse("ERR The NOACK option is only supported by XREADGROUP. You called XREAD instead.")
			}
			a.noAck = true
		default:
			p.Wrong()
		}
	}
	p.Wrong() // there is no STREAMS
	return 0, p.Err()
}

// parseStreams reads what is behind STREAMS, which is the end of the options.
func (a *readArgs) parseStreams(rest [][]byte) error {
	switch {
	case len(rest)%2 != 0: // of XREADGROUP, too
		return refusal("ERR Unbalanced XREAD list of streams: for each stream key an ID or '$' must be specified.")
	case a.ofGroup && a.group == nil:
		return refusal("ERR Missing GROUP option for XREADGROUP")
	}
	a.names, a.ids = rest[:len(rest)/2], rest[len(rest)/2:]
	a.from, a.news = make([]collection.StreamID, len(a.ids)), make([]bool, len(a.ids))
	return nil
}

// parseMillis reads the timeout of BLOCK; 0 is for ever.
func parseMillis(b []byte) (time.Duration, error) {
	ms, ok := resp.ParseInt(b)
	switch {
	case !ok:
		return 0, refusal("ERR timeout is not an integer or out of range")
	case ms < 0:
		return 0, refusal("ERR timeout is negative")
	case ms > int64(time.Duration(1<<63-1)/time.Millisecond):
		return 0, nil // nobody sees the end of it
	}
	return time.Duration(ms) * time.Millisecond, nil
}

// streamOf is the key of a stream. That others change it is no matter for a client of XREAD that may wait, which reads
// one as it was at some time. Without that, every XADD to one of its streams would make it read all of them again.
func (a *readArgs) streamOf(t Keys, name []byte) *Key {
	if t.Waits() && !a.ofGroup {
		return t.Peek(name)
	}
	return t.Key(name)
}

// begin looks at a stream and its id when the client comes.
// $ is what the stream has last at this moment, and stays that while the client waits.
func (a *readArgs) begin(t Keys, i int) error {
	k, name, id := a.streamOf(t, a.names[i]), a.names[i], string(a.ids[i])
	s, err := k.readStream(name)
	if err != nil {
		return err
	}
	if a.ofGroup && s.Group(a.group) == nil {
		return noKeyOrGroup(name, a.group) + " in XREADGROUP with GROUP option"
	}
	a.news[i] = false
	switch {
	case id == "$" && a.ofGroup:
		return refusal("ERR The $ ID is meaningless in the context of XREADGROUP: you want to read the history of " +
			"this consumer by specifying a proper ID, or use the > ID to get new messages. The $ ID would just " +
			"return an empty result set.")
	case id == "$":
		a.from[i] = s.Last
	case id == ">" && !a.ofGroup:
		return refusal("ERR The > ID can be specified only when calling XREADGROUP using the GROUP <group> " +
			"<consumer> option.")
	case id == ">":
		a.news[i] = true
	default:
		var ok bool
		if a.from[i], ok = parseID(a.ids[i]); !ok {
			return refusal(errStreamID)
		}
		a.news[i] = a.ofGroup && a.from[i] == collection.MaxStreamID // which is Redis's word for >
	}
	return nil
}

// try reads what there is in streams of these names. A client that waits has its ids from the first time.
// A stream named twice is read twice. It returns false, without a reply, if there is nothing new in any of them.
func (a *readArgs) try(t Keys, names [][]byte, again bool, w *resp.Writer) (found bool, err error) {
	t.Load(names...)
	if !again {
		for i := range a.names {
			if err := a.begin(t, i); err != nil {
				return true, err
			}
		}
	}
	// The number of streams comes before them, so they are put together apart.
	var out resp.Writer
	out.Proto = w.Proto
	n := 0
	for i, name := range a.names {
		if !slices.ContainsFunc(names, func(s []byte) bool { return string(s) == string(name) }) {
			continue
		}
		// A stream that has gone, or is of another type by now, is an error to a group's client that has waited, and
		// nothing new to others.
		k := a.streamOf(t, name)
		if t.Failure() != nil {
			return true, nil
		}
		served, err := false, error(nil)
		switch {
		case k.Present && k.Type == client.Stream:
			served, err = a.read(t, k, i, again, &out)
		case a.ofGroup:
			err = refusal("UNBLOCKED the stream key no longer exists")
		}
		if err != nil {
			if n > 0 && err != ErrRoom { // what has been read before it has not been read then
				t.Fail(ResultError(err.Error()))
			}
			return true, err
		}
		n += int(Bit(served))
	}
	if n == 0 {
		return false, nil
	}
	if w.Proto == 3 {
		w.Map(n)
	} else {
		w.Array(n)
	}
	w.Raw(out.Bytes())
	return true, nil
}

// limit is how many entries the reply may have of each stream.
// 0 is no limit.
func (a *readArgs) limit(again bool) int64 {
	if again && a.count == 0 {
		return blockedCount
	}
	return a.count
}

// read reads one stream.
// served says that the reply has the stream: XREADGROUP of what is pending has it even if that is nothing.
func (a *readArgs) read(t Keys, k *Key, i int, again bool, out *resp.Writer) (served bool, err error) {
	name := a.names[i]
	s, err := parsedStream(k.Value, name)
	if err != nil {
		return false, err
	}
	from := a.from[i]
	if a.ofGroup {
		g := s.Group(a.group)
		switch {
		case g == nil:
			return false, refusal("NOGROUP the consumer group this client was blocked on no longer exists")
		case !a.news[i]:
			return true, a.readAgain(t, k, i, out)
		}
		from = g.Last
	}
	// Nearly always a client that is up to date is told so by the last id, without a look at entries.
	start, ok := from.Next()
	if !ok || start.Compare(s.Last) > 0 {
		return false, nil
	}
	n, err := countRange(s, start, collection.MaxStreamID, a.limit(again))
	if err != nil || n == 0 {
		return false, streamError(err, name)
	}
	a.head(name, out)
	if err := writeRange(out, s, start, collection.MaxStreamID, false, n); err != nil {
		return false, streamError(err, name)
	}
	if a.ofGroup {
		return true, a.deliver(t, k, name, start, n)
	}
	return true, nil
}

// head begins what the reply has of a stream.
// The whole is a map from names to entries in RESP3, and in RESP2 an array of pairs.
func (a *readArgs) head(name []byte, out *resp.Writer) {
	if out.Proto != 3 {
		out.Array(2)
	}
	out.Bulk(name)
}

// deliver notes that n entries from start on go to the consumer. It may change the bytes in which the reply found them.
// It is a part of the same step as the read, so an entry goes to one consumer of a group, whichever gateways they use.
// If the reply is lost on its way the entry is pending, and the consumer reads it again.
func (a *readArgs) deliver(t Keys, k *Key, name []byte, start collection.StreamID, n int) error {
	s, err := k.editStream(name, collection.StreamGroupRoom(a.consumer, n))
	if err != nil {
		return err
	}
	first, err := s.Edge(false)
	if err != nil {
		return streamError(err, name)
	}
	g := s.Group(a.group)
	consumer := a.see(t, k, g)
	err = s.Range(start, collection.MaxStreamID, false, func(e collection.StreamEntry) bool {
		// As long as no entry in between was deleted, the group's count goes up by one for each; else it is counted
		// anew, if it can be.
		if g.Read != -1 && !s.HasDeleted(e.ID, first) {
			g.Read++
		} else if s.Added > 0 {
			g.Read = s.CountTo(e.ID, first)
		}
		g.Last = e.ID
		if !a.noAck {
			g.Put(collection.PendingEntry{ID: e.ID, Delivered: k.Now, Times: 1, Consumer: consumer})
		}
		n--
		return n > 0
	})
	if err != nil {
		return streamError(err, name)
	}
	return k.setStream(s, true, name)
}

// see notes that the consumer was seen, and makes it if it is new.
// consumer is its place among the group's.
func (a *readArgs) see(t Keys, k *Key, g *collection.StreamGroup) (consumer int) {
	consumer, made := g.See(a.consumer, k.Now)
	if made {
		t.Name(k, OnStream, "xgroup-createconsumer")
	}
	return consumer
}

// readAgain gives what is pending for the consumer once more.
// It counts as another delivery of each. Entries that were deleted are ids with null.
func (a *readArgs) readAgain(t Keys, k *Key, i int, out *resp.Writer) error {
	name := a.names[i]
	s, err := k.editStream(name, collection.StreamGroupRoom(a.consumer, 0))
	if err != nil {
		return err
	}
	g := s.Group(a.group)
	consumer := a.see(t, k, g)
	var list resp.Writer
	list.Proto = out.Proto
	n := int64(0)
	// The consumer's own history is what is pending for it, which others' acknowledgements do not touch.
	start, more := a.from[i].Next()
	j, _ := g.Pending.Find(start)
	for ; more && j < g.Pending.Len() && (a.count == 0 || n < a.count); j++ {
		p := g.Pending.At(j)
		if p.Consumer != consumer {
			continue
		}
		n++
		e, found, err := s.Find(p.ID)
		switch {
		case err != nil:
			return streamError(err, name)
		case found:
			p.Delivered, p.Times = k.Now, p.Times+1
			g.Pending.Set(j, p)
			writeEntry(&list, e)
		default: // it has been deleted
			list.Array(2)
			writeID(&list, p.ID)
			list.NullArray()
		}
	}
	if err := k.setStream(s, true, name); err != nil {
		return err
	}
	a.head(name, out)
	out.Array(int(n))
	out.Raw(list.Bytes())
	return nil
}
