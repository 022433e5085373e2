package values

import (
	"strconv"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/collection"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

var _ = oneKey(map[string]KeyFunc{
	"xack":                  cmdXAck,
	"xgroup|create":         cmdXGroupCreate,
	"xgroup|createconsumer": cmdXGroupCreateConsumer,
	"xgroup|delconsumer":    cmdXGroupDelConsumer,
	"xgroup|destroy":        cmdXGroupDestroy,
	"xgroup|setid":          cmdXGroupSetID,
	"xpending":              cmdXPending,
})

// Consumer groups: XGROUP, XACK, XPENDING.

// A group is a part of its stream's record: the last id that it has read, its consumers, and the entries that were
// delivered to them and not acknowledged, which are pending. So a delivery, an XACK or a claim is one update of the
// record, and of two gateways that deliver at a time one does so again, on what the other has left.

// groupArgs are the options of XGROUP CREATE and SETID.
// make is MKSTREAM, and read ENTRIESREAD, -1 if that is not given or not known.
type groupArgs struct {
	make bool
	read int64
}

// parseGroup reads what is behind the id. SETID has the same options but for MKSTREAM.
func parseGroup(args [][]byte, create bool) (a groupArgs, err error) {
	a.read = -1
	p := OptionsOf(args[5:])
	for p.More() {
		switch {
		case create && p.Flag("mkstream"):
			a.make = true
		case p.Option("entriesread", 1):
			if a.read = p.Int(); a.read < -1 {
				p.Refuse("ERR value for ENTRIESREAD must be positive or -1")
			}
		default:
			p.Refuse(wrongGroupArgs(args))
		}
	}
	return a, p.End()
}

func wrongGroupArgs(args [][]byte) refusal {
	return refusal("ERR unknown subcommand or wrong number of arguments for '" + Clip(args[1], 128) +
		"'. Try XGROUP HELP.")
}

// hasStream is nil if XGROUP has a stream.
func (k *Key) hasStream() error {
	if !k.Present {
		return refusal("ERR The XGROUP subcommand requires the key to exist. Note that for CREATE you may want to " +
			"use the MKSTREAM option to create an empty stream automatically.")
	}
	return k.typed(client.Stream)
}

// cmdXGroupCreate looks at the id only when it knows that there is a stream, or is to be one; $ is the stream's last
// id.
func cmdXGroupCreate(k *Key, args [][]byte, w *resp.Writer) error {
	a, err := parseGroup(args, true)
	if err != nil {
		return err
	}
	if a.make {
		err = k.typed(client.Stream)
	} else {
		err = k.hasStream()
	}
	if err != nil {
		return err
	}
	if len(args) > 8 {
		return wrongGroupArgs(args)
	}
	s, err := k.editStream(args[2], collection.StreamGroupRoom(args[3], 0))
	if err != nil {
		return err
	}
	id := s.Last
	if string(args[4]) != "$" {
		var ok bool
		if id, ok = parseID(args[4]); !ok {
			return refusal(errStreamID)
		}
	}
	if !s.AddGroup(&collection.StreamGroup{Name: args[3], Last: id, Read: a.read}) {
		return refusal("BUSYGROUP Consumer Group name already exists")
	}
	if err := k.setStream(s, true, args[2]); err != nil {
		return err
	}
	w.OK()
	return nil
}

// editGroup is a group of the key's stream, to be edited, for subcommands of XGROUP. grow is in bytes. A change takes
// effect with setStream.
func (k *Key) editGroup(args [][]byte, grow int) (s *collection.Stream, g *collection.StreamGroup, err error) {
	if err := k.hasStream(); err != nil {
		return nil, nil, err
	}
	if s, err = k.editStream(args[2], grow); err != nil {
		return nil, nil, err
	}
	if g = s.Group(args[3]); g == nil {
		return nil, nil, noGroup(args[2], args[3])
	}
	return s, g, nil
}

// cmdXGroupSetID changes nothing of what is pending.
func cmdXGroupSetID(k *Key, args [][]byte, w *resp.Writer) error {
	a, err := parseGroup(args, false)
	if err != nil {
		return err
	}
	s, g, err := k.editGroup(args, 0)
	if err != nil {
		return err
	}
	if len(args) != 5 && len(args) != 7 {
		return wrongGroupArgs(args)
	}
	switch string(args[4]) {
	case "$":
		g.Last = s.Last
	case "-":
		g.Last = collection.StreamID{}
	case "+":
		g.Last = collection.MaxStreamID
	default:
		var ok bool
		if g.Last, ok = parseID(args[4]); !ok {
			return refusal(errStreamID)
		}
	}
	g.Read = a.read
	if err := k.setStream(s, true, args[2]); err != nil {
		return err
	}
	w.OK()
	return nil
}

// cmdXGroupDestroy wakes the group's clients that wait, as every write of a stream does; they are told that it is gone.
func cmdXGroupDestroy(k *Key, args [][]byte, w *resp.Writer) error {
	if err := k.hasStream(); err != nil {
		return err
	}
	s, err := k.editStream(args[2], 0)
	if err != nil {
		return err
	}
	// All that was pending goes with the group.
	was := s.RemoveGroup(args[3])
	if was {
		if err := k.setStream(s, true, args[2]); err != nil {
			return err
		}
	}
	w.Int(Bit(was))
	return nil
}

// cmdXGroupCreateConsumer is for tools: a consumer is made when it is first heard of.
func cmdXGroupCreateConsumer(k *Key, args [][]byte, w *resp.Writer) error {
	s, g, err := k.editGroup(args, collection.StreamGroupRoom(args[4], 0))
	if err != nil {
		return err
	}
	// A consumer that is there is not seen by this: its idle time goes on.
	if _, found := g.Consumer(args[4]); found {
		w.Int(0)
		return nil
	}
	g.See(args[4], k.Now)
	if err := k.setStream(s, true, args[2]); err != nil {
		return err
	}
	w.Int(1)
	return nil
}

// cmdXGroupDelConsumer forgets what was pending for the consumer, which nobody gets any more, and replies how much that
// was.
func cmdXGroupDelConsumer(k *Key, args [][]byte, w *resp.Writer) error {
	s, g, err := k.editGroup(args, 0)
	if err != nil {
		return err
	}
	pending := 0
	if i, found := g.Consumer(args[4]); found {
		pending = g.RemoveConsumer(i)
		if err := k.setStream(s, true, args[2]); err != nil {
			return err
		}
	}
	w.Int(int64(pending))
	return nil
}

// cmdXAck looks at the ids when it knows that there is a group.
// It counts those that were pending, and writes only if there are some.
func cmdXAck(k *Key, args [][]byte, w *resp.Writer) error {
	if err := k.typed(client.Stream); err != nil {
		return err
	}
	s, err := k.editStream(args[1], 0)
	if err != nil {
		return err
	}
	g := s.Group(args[2])
	if g == nil {
		w.Int(0)
		return nil
	}
	ids, err := parseIDs(args[3:])
	if err != nil {
		return err
	}
	n := int64(0)
	for _, id := range ids {
		if i, found := g.Pending.Find(id); found {
			g.Drop(i)
			n++
		}
	}
	if n > 0 {
		if err := k.setStream(s, true, args[1]); err != nil {
			return err
		}
	}
	w.Int(n)
	return nil
}

// pendingArgs are those of XPENDING with a range.
// idle is in ms, 0 for any; from and to are both in the range.
type pendingArgs struct {
	idle, count int64
	from, to    collection.StreamID
	consumer    []byte // if some
	some        bool   // a consumer is named
}

// parsePending reads XPENDING with a range; without one there is nothing to read.
func parsePending(args [][]byte) (a pendingArgs, err error) {
	if len(args) < 6 || len(args) > 9 {
		return a, ErrSyntax
	}
	p := OptionsOf(args[3:])
	if p.Flag("idle") {
		if a.idle = p.Int(); len(args) < 8 {
			p.Wrong()
		}
	}
	from, to := p.Str(), p.Str()
	a.count = p.Int()
	if p.More() {
		a.consumer, a.some = p.Str(), true
	}
	if err := p.Err(); err != nil {
		return a, err
	}
	if a.from, err = parseEdge(from, false); err == nil {
		a.to, err = parseEdge(to, true)
	}
	return a, err
}

// cmdXPending is a read: unlike XREADGROUP it does not note that a consumer was seen.
func cmdXPending(k *Key, args [][]byte, w *resp.Writer) error {
	var a pendingArgs
	if len(args) != 3 {
		var err error
		if a, err = parsePending(args); err != nil {
			return err
		}
	}
	s, err := k.readStream(args[1])
	if err != nil {
		return err
	}
	g := s.Group(args[2])
	switch {
	case g == nil:
		return noKeyOrGroup(args[1], args[2])
	case len(args) == 3:
		writePending(w, g)
	default:
		a.write(w, g, k.Now)
	}
	return nil
}

// writePending is all that is pending, in numbers.
// The numbers of consumers are text there, as in Redis, and those with nothing pending are left out.
func writePending(w *resp.Writer, g *collection.StreamGroup) {
	w.Array(4)
	n := g.Pending.Len()
	if w.Int(int64(n)); n == 0 {
		w.Null()
		w.Null()
		w.NullArray()
		return
	}
	writeID(w, g.Pending.At(0).ID)
	writeID(w, g.Pending.At(n-1).ID)
	of := g.PendingOf()
	busy := 0
	for _, n := range of {
		busy += int(Bit(n > 0))
	}
	w.Array(busy)
	for i, n := range of {
		if n > 0 {
			w.Array(2)
			w.Bulk(g.Consumers[i].Name)
			w.BulkString(strconv.Itoa(n))
		}
	}
}

// write is the entries of the range, with their consumer, the ms since they were delivered, and how often they were.
func (a *pendingArgs) write(w *resp.Writer, g *collection.StreamGroup, now int64) {
	consumer, found := -1, true
	if a.some {
		consumer, found = g.Consumer(a.consumer)
	}
	var list []collection.PendingEntry
	i, _ := g.Pending.Find(a.from)
	// Without that consumer there is nothing pending for it.
	for ; found && i < g.Pending.Len() && int64(len(list)) < a.count; i++ {
		p := g.Pending.At(i)
		if p.ID.Compare(a.to) > 0 {
			break
		}
		if (consumer < 0 || p.Consumer == consumer) && (a.idle == 0 || now-p.Delivered >= a.idle) {
			list = append(list, p)
		}
	}
	w.Array(len(list))
	for _, p := range list {
		w.Array(4)
		writeID(w, p.ID)
		w.Bulk(g.Consumers[p.Consumer].Name)
		w.Int(max(0, now-p.Delivered))
		w.Int(p.Times)
	}
}
