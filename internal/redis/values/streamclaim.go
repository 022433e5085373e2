package values

import (
	"math"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/collection"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

var _ = oneKey(map[string]KeyFunc{
	"xautoclaim": cmdXAutoClaim,
	"xclaim":     cmdXClaim,
})

// claim is what XCLAIM and XAUTOCLAIM work on.
// It works on a copy of the stream, which becomes the key's at the end, or not at all.
type claim struct {
	s        *collection.Stream
	g        *collection.StreamGroup
	consumer int         // -1 before the first entry is claimed
	changed  bool        // there is something to write
	out      resp.Writer // what the reply has of each entry
	n        int         // entries in out
}

// beginClaim looks for the group; grow is for how many it may add to what is pending.
// args are alike in both commands: key, group and consumer. proto is the reply's.
func (k *Key) beginClaim(args [][]byte, grow, proto int) (c claim, err error) {
	if err := k.typed(client.Stream); err != nil {
		return c, err
	}
	if c.s, err = k.editStream(args[1], collection.StreamGroupRoom(args[3], grow)); err != nil {
		return c, err
	}
	if c.g = c.s.Group(args[2]); c.g == nil {
		return c, noKeyOrGroup(args[1], args[2])
	}
	c.out.Proto, c.consumer = proto, -1
	return c, nil
}

// take gives an entry to the consumer of that name, who is made if need be, and adds it to the reply.
// With justID the reply has the id alone.
func (c *claim) take(k *Key, name []byte, p collection.PendingEntry, e collection.StreamEntry, justID bool) {
	if c.consumer < 0 {
		made := false
		if c.consumer, made = c.g.See(name, k.Now); made {
			k.Also = "xgroup-createconsumer"
		}
	}
	p.Consumer = c.consumer
	c.g.Put(p)
	c.changed = true
	if c.n++; justID {
		writeID(&c.out, e.ID)
	} else {
		writeEntry(&c.out, e)
	}
}

// drop forgets a pending entry that has been deleted.
// i is its place among what is pending, and those behind it move up.
func (c *claim) drop(i int) {
	c.g.Drop(i)
	c.changed = true
}

// end makes what has changed the key's.
// A claim that found nothing writes nothing.
func (c *claim) end(k *Key, name []byte) error {
	if !c.changed {
		return nil
	}
	return k.setStream(c.s, true, name)
}

type claimArgs struct {
	ids         []collection.StreamID
	delivered   int64               // -1: not given
	times       int64               // -1: not given
	last        collection.StreamID // LASTID: the group has read up to there at least
	force, just bool                // FORCE, JUSTID
}

// parseClaim reads ids up to the first argument that is none, and then options. now is in Unix ms.
func parseClaim(args [][]byte, now int64) (a claimArgs, err error) {
	a.delivered, a.times = -1, -1
	list := args[5:]
	for len(list) > 0 {
		id, ok := parseID(list[0])
		if !ok {
			break
		}
		a.ids, list = append(a.ids, id), list[1:]
	}
	p := OptionsOf(list)
	for p.More() {
		switch {
		case p.Flag("force"):
			a.force = true
		case p.Flag("justid"):
			a.just = true
		case p.Option("idle", 1):
			a.delivered = now - p.IntFrom(math.MinInt64, "ERR Invalid IDLE option argument for XCLAIM")
		case p.Option("time", 1):
			a.delivered = p.IntFrom(math.MinInt64, "ERR Invalid TIME option argument for XCLAIM")
		case p.Option("retrycount", 1):
			a.times = p.IntFrom(math.MinInt64, "ERR Invalid RETRYCOUNT option argument for XCLAIM")
		case p.Option("lastid", 1):
			var ok bool
			if a.last, ok = parseID(p.Str()); !ok {
				p.Refuse(errStreamID)
			}
		default:
			p.Refuse(refusal("ERR Unrecognized XCLAIM option '" + asText(p.Str()) + "'"))
		}
	}
	return a, p.End()
}

// cmdXClaim gives entries that have been pending for long to another consumer, in the order of the ids that it names.
// Of two consumers that claim an entry at a time with a least time of idleness, the second one finds that it is not
// idle.
func cmdXClaim(k *Key, args [][]byte, w *resp.Writer) error {
	c, err := k.beginClaim(args, len(args), w.Proto)
	if err != nil {
		return err
	}
	idle, err := parseIntAs(args[4], "ERR Invalid min-idle-time argument for XCLAIM")
	if err != nil {
		return err
	}
	a, err := parseClaim(args, k.Now)
	if err != nil {
		return err
	}
	if a.last.Compare(c.g.Last) > 0 {
		c.g.Last, c.changed = a.last, true
	}
	// A time in the future would keep the entry from ever becoming idle.
	if a.delivered == -1 || a.delivered < 0 || a.delivered > k.Now {
		a.delivered = k.Now
	}
	for _, id := range a.ids {
		i, pending := c.g.Pending.Find(id)
		e, found, err := c.s.Find(id)
		if err != nil {
			return streamError(err, args[1])
		}
		var p collection.PendingEntry
		switch {
		case !found && pending: // it has been deleted, and nobody needs it any more
			c.drop(i)
			continue
		case pending:
			if p = c.g.Pending.At(i); idle > 0 && k.Now-p.Delivered < idle {
				continue
			}
		case !found || !a.force: // FORCE claims an entry that nobody had
			continue
		default:
			p = collection.PendingEntry{ID: id, Times: 1}
		}
		// JUSTID is no delivery, so it does not count as one, as in Redis.
		p.Delivered = a.delivered
		if a.times >= 0 {
			p.Times = a.times
		} else if !a.just {
			p.Times++
		}
		c.take(k, args[3], p, e, a.just)
	}
	if err := c.end(k, args[1]); err != nil {
		return err
	}
	w.Array(c.n)
	w.Raw(c.out.Bytes())
	return nil
}

// autoClaimTries is how many pending entries XAUTOCLAIM looks at for each that it may claim.
const autoClaimTries = 10

// cmdXAutoClaim is XCLAIM for whatever is pending from an id on. It replies with the id to go on with, 0-0 at the end,
// and with the ids of entries that were deleted meanwhile, which it forgets.
func cmdXAutoClaim(k *Key, args [][]byte, w *resp.Writer) error {
	idle, err := parseIntAs(args[4], "ERR Invalid min-idle-time argument for XAUTOCLAIM")
	if err != nil {
		return err
	}
	from, err := parseEdge(args[5], false)
	if err != nil {
		return err
	}
	count, just := int64(100), false
	p := OptionsOf(args[6:])
	for p.More() {
		switch {
		case p.Option("count", 1):
			if count = p.IntFrom(1, "ERR COUNT must be > 0"); count > math.MaxInt64/16 {
				p.Refuse("ERR COUNT must be > 0")
			}
		case p.Flag("justid"):
			just = true
		default:
			p.Wrong()
		}
	}
	if err := p.End(); err != nil {
		return err
	}
	c, err := k.beginClaim(args, 0, w.Proto)
	if err != nil {
		return err
	}
	var deleted []collection.StreamID
	i, _ := c.g.Pending.Find(from)
	// The tries bound the work of a call on a group of which little has been idle for long enough.
	for tries := count * autoClaimTries; tries > 0 && count > 0 && i < c.g.Pending.Len(); tries-- {
		p := c.g.Pending.At(i)
		e, found, err := c.s.Find(p.ID)
		switch {
		case err != nil:
			return streamError(err, args[1])
		case !found:
			c.drop(i)
			deleted = append(deleted, p.ID)
			count--
			continue
		case idle <= 0 || k.Now-p.Delivered >= idle:
			p.Delivered = k.Now
			p.Times += Bit(!just)
			c.take(k, args[3], p, e, just)
			count--
		}
		i++
	}
	next := collection.StreamID{}
	if i < c.g.Pending.Len() {
		next = c.g.Pending.At(i).ID
	}
	if err := c.end(k, args[1]); err != nil {
		return err
	}
	w.Array(3)
	writeID(w, next)
	w.Array(c.n)
	w.Raw(c.out.Bytes())
	w.Array(len(deleted))
	for _, id := range deleted {
		writeID(w, id)
	}
	return nil
}
