package rdb

import (
	"bytes"
	"encoding/binary"
	"math"
	"strconv"

	"github.com/kvd-project/kvd/internal/redis/collection"
)

// A stream is listpacks by the id of their first entry, numbers, and consumer groups. A listpack begins with
//
//	entries | entries that are deleted | fields | each field's name | 0
//
// and each entry in it is
//
//	flags | ms and seq, minus those of the listpack | fields, unless they are those above | names, unless they are, and values | how many of these elements there are
//
// A group has the ids of all its pending entries, and each consumer has those that are its own, again.
const (
	entryDeleted    = 1
	entrySameFields = 2
)

// pendingSize is about what a pending entry or a consumer takes beside its name.
const pendingSize = 40

// appendStream appends a stream.
func appendStream(b []byte, s *collection.Stream) []byte {
	nodes := nodesOf(s)
	first := collection.StreamID{}
	if len(nodes) > 0 {
		first = nodes[0].id
	}
	b = appendLen(append(b, typeStream2), len(nodes))
	for i := range nodes {
		b = appendString(appendString(b, appendRawID(nil, nodes[i].id)), nodes[i].pack())
	}
	b = appendLen(b, s.Len())
	for _, id := range []collection.StreamID{s.Last, first, s.MaxDeleted} {
		b = appendID(b, id)
	}
	b = appendLen(appendNumber(b, s.Added), len(s.Groups))
	for _, g := range s.Groups {
		b = appendID(appendString(b, g.Name), g.Last)
		b = appendNumber(b, uint64(g.Read))
		b = appendLen(b, g.Pending.Len())
		own := make([][]byte, len(g.Consumers)) // ids
		count := g.PendingOf()
		for i := range g.Pending.Len() {
			p := g.Pending.At(i)
			b = binary.LittleEndian.AppendUint64(appendRawID(b, p.ID), uint64(p.Delivered))
			b = appendNumber(b, uint64(p.Times))
			own[p.Consumer] = appendRawID(own[p.Consumer], p.ID)
		}
		b = appendLen(b, len(g.Consumers))
		for i, c := range g.Consumers {
			b = binary.LittleEndian.AppendUint64(appendString(b, c.Name), uint64(c.Seen))
			b = append(appendLen(b, count[i]), own[i]...)
		}
	}
	return b
}

// appendNumber is appendLen for any number.
func appendNumber(b []byte, n uint64) []byte {
	if n > math.MaxUint32 {
		return binary.BigEndian.AppendUint64(append(b, 0x81), n)
	}
	return appendLen(b, int(n))
}

func appendID(b []byte, id collection.StreamID) []byte {
	return appendNumber(appendNumber(b, id.MS), id.Seq)
}

func appendRawID(b []byte, id collection.StreamID) []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(b, id.MS), id.Seq)
}

// node is a listpack that is being written.
type node struct {
	id     collection.StreamID
	n      int // entries
	fields [][]byte
	body   packer
}

// nodeEntries and nodeBytes bound a listpack, as Redis's settings do by default.
const nodeEntries, nodeBytes = 100, 4096

func nodesOf(s *collection.Stream) (nodes []node) {
	var names, values [][]byte
	_ = s.Range(collection.StreamID{}, collection.MaxStreamID, false, func(e collection.StreamEntry) bool {
		names, values = names[:0], values[:0]
		for t := range e.Texts() {
			if len(names) > len(values) {
				values = append(values, t)
			} else {
				names = append(names, t)
			}
		}
		if n := len(nodes); n == 0 || nodes[n-1].n == nodeEntries || len(nodes[n-1].body.b) >= nodeBytes {
			nodes = append(nodes, node{id: e.ID, fields: append([][]byte(nil), names...)})
		}
		nodes[len(nodes)-1].add(e.ID, names, values)
		return true
	}) // which the caller has seen to succeed
	return nodes
}

func (n *node) add(id collection.StreamID, names, values [][]byte) {
	same := len(names) == len(n.fields)
	for i := 0; same && i < len(names); i++ {
		same = bytes.Equal(names[i], n.fields[i])
	}
	flags, parts := 0, 4+2*len(names)
	if same {
		flags, parts = entrySameFields, 3+len(names)
	}
	p := &n.body
	p.int(int64(flags))
	p.int(int64(id.MS - n.id.MS))
	p.int(int64(id.Seq - n.id.Seq))
	if !same {
		p.int(int64(len(names)))
	}
	for i := range names {
		if !same {
			p.string(names[i])
		}
		p.string(values[i])
	}
	p.int(int64(parts))
	n.n++
}

// pack is the listpack.
func (n *node) pack() []byte {
	p := packer{b: make([]byte, 6)}
	p.int(int64(n.n))
	p.int(0)
	p.int(int64(len(n.fields)))
	for _, f := range n.fields {
		p.string(f)
	}
	p.int(0)
	p.b = append(append(p.b, n.body.b...), 0xff)
	binary.LittleEndian.PutUint32(p.b, uint32(len(p.b)))
	binary.LittleEndian.PutUint16(p.b[4:], uint16(min(p.n+n.body.n, math.MaxUint16))) // which says: not known
	return p.b
}

// packer appends elements of a listpack.
type packer struct {
	b []byte
	n int // elements
}

func (p *packer) int(n int64) {
	at := len(p.b)
	switch {
	case n >= 0 && n < 1<<7:
		p.b = append(p.b, byte(n))
	case n >= -1<<12 && n < 1<<12:
		p.b = append(p.b, 0xc0|byte(n>>8)&0x1f, byte(n))
	case n == int64(int16(n)):
		p.b = binary.LittleEndian.AppendUint16(append(p.b, 0xf1), uint16(n))
	case n >= -1<<23 && n < 1<<23:
		p.b = append(p.b, 0xf2, byte(n), byte(n>>8), byte(n>>16))
	case n == int64(int32(n)):
		p.b = binary.LittleEndian.AppendUint32(append(p.b, 0xf3), uint32(n))
	default:
		p.b = binary.LittleEndian.AppendUint64(append(p.b, 0xf4), uint64(n))
	}
	p.end(at)
}

// string writes integers as such, as Redis does.
func (p *packer) string(s []byte) {
	if len(s) <= 20 {
		if n, err := strconv.ParseInt(string(s), 10, 64); err == nil && strconv.FormatInt(n, 10) == string(s) {
			p.int(n)
			return
		}
	}
	at := len(p.b)
	switch {
	case len(s) < 1<<6:
		p.b = append(p.b, 0x80|byte(len(s)))
	case len(s) < 1<<12:
		p.b = append(p.b, 0xe0|byte(len(s)>>8), byte(len(s)))
	default:
		p.b = binary.LittleEndian.AppendUint32(append(p.b, 0xf0), uint32(len(s)))
	}
	p.b = append(p.b, s...)
	p.end(at)
}

// end writes the length of the element that begins at at behind it: seven bits in a byte, the last byte first.
func (p *packer) end(at int) {
	n := len(p.b) - at
	for i := backLen(n) - 1; i >= 0; i-- {
		c := byte(n>>(7*i)) & 0x7f
		if i != backLen(n)-1 {
			c |= 0x80
		}
		p.b = append(p.b, c)
	}
	p.n++
}

// backLen is how many bytes the length of an element of n bytes takes behind it. From two on, Redis does not use the
// last length of each.
func backLen(n int) int {
	switch {
	case n < 1<<7:
		return 1
	case n < 1<<14-1:
		return 2
	case n < 1<<21-1:
		return 3
	case n < 1<<28-1:
		return 4
	}
	return 5
}

// IsStream reports whether a payload is of a stream, if it is one of anything.
func IsStream(payload []byte) bool {
	return len(payload) > 0 && (payload[0] == typeStream || payload[0] == typeStream2)
}

// number reads what appendNumber writes.
func (r *reader) number() (u uint64) {
	if len(r.b) == 0 || r.b[0]>>6 != 2 {
		n, _, encoded := r.length()
		if encoded {
			r.fail()
		}
		return uint64(n)
	}
	size := 4
	if c := r.byte(); c == 0x81 {
		size = 8
	} else if c != 0x80 {
		r.fail()
	}
	for _, c := range r.take(size) {
		u = u<<8 | uint64(c)
	}
	return u
}

func (r *reader) id() collection.StreamID {
	ms := r.number()
	return collection.StreamID{MS: ms, Seq: r.number()}
}

func rawID(b []byte) (id collection.StreamID, ok bool) {
	if len(b) != 16 {
		return id, false
	}
	return collection.StreamID{MS: binary.BigEndian.Uint64(b), Seq: binary.BigEndian.Uint64(b[8:])}, true
}

func (r *reader) rawID() collection.StreamID {
	id, ok := rawID(r.take(16))
	if !ok {
		r.fail()
	}
	return id
}

// stream reads a stream, in the form of Redis 5 if old. All that is in order in what Redis has written must be so:
// entries, groups, consumers and what is pending.
func (r *reader) stream(old bool) *collection.Stream {
	s, _ := collection.ParseStream(nil)
	for i, n := 0, r.count(); i < n && !r.bad; i++ {
		left := r.left
		id, ok := rawID(r.string())
		pack := r.string()
		if !ok {
			r.fail()
		}
		r.entries(s, id, pack)
		r.left = left // s has copies
	}
	r.pay(len(s.Bytes(false)))
	top := s.Last
	if n := r.number(); n != uint64(s.Len()) {
		r.fail()
	}
	last := r.id()
	if last.Compare(top) < 0 {
		r.fail()
	}
	s.Last, s.Added = last, uint64(s.Len())
	first, err := s.Edge(false)
	if err != nil {
		r.fail()
	}
	if !old {
		r.id() // of the first entry
		s.MaxDeleted, s.Added = r.id(), r.number()
	}
	for i, n := 0, r.count(); i < n && !r.bad; i++ {
		g := &collection.StreamGroup{Name: r.name(), Last: r.id()}
		if old {
			g.Read = s.CountTo(g.Last, first)
		} else {
			g.Read = int64(r.number())
		}
		if i > 0 && bytes.Compare(s.Groups[i-1].Name, g.Name) >= 0 {
			r.fail()
		}
		r.group(g)
		s.AddGroup(g)
	}
	return s
}

// name reads the name of a group or consumer.
func (r *reader) name() []byte {
	s := r.string()
	r.pay(len(s) + pendingSize)
	return s
}

// pay takes n bytes of the limit.
func (r *reader) pay(n int) {
	if r.left -= n; r.left < 0 {
		r.fail()
	}
}

// group reads what is pending in a group, and its consumers.
func (r *reader) group(g *collection.StreamGroup) {
	n := r.count()
	r.pay(n * pendingSize)
	for i := 0; i < n && !r.bad; i++ {
		p := collection.PendingEntry{ID: r.rawID(), Delivered: int64(r.uint(8)), Times: int64(r.number()), Consumer: -1}
		if i > 0 && g.Pending.At(i-1).ID.Compare(p.ID) >= 0 {
			r.fail()
			return
		}
		g.Put(p)
	}
	owned := make([]bool, g.Pending.Len())
	for i, n := 0, r.count(); i < n && !r.bad; i++ {
		c := collection.StreamConsumer{Name: r.name(), Seen: int64(r.uint(8))}
		if i > 0 && bytes.Compare(g.Consumers[i-1].Name, c.Name) >= 0 {
			r.fail()
		}
		g.Consumers = append(g.Consumers, c)
		for j, n := 0, r.count(); j < n && !r.bad; j++ {
			at, found := g.Pending.Find(r.rawID())
			if !found || owned[at] {
				r.fail()
				return
			}
			p := g.Pending.At(at)
			p.Consumer, owned[at] = i, true
			g.Pending.Set(at, p)
		}
	}
	for _, is := range owned {
		if !is {
			r.fail() // pending for nobody
		}
	}
}

// entries adds the entries of a listpack to s. The memory of s is within what is left of the limit, and so is that of
// the listpack's elements.
func (r *reader) entries(s *collection.Stream, id collection.StreamID, pack []byte) {
	if r.bad {
		return
	}
	var v Value
	in := &reader{b: pack, left: r.left}
	if in.listpack(&v); in.bad || len(in.b) > 0 {
		r.fail()
		return
	}
	e := &elements{parts: v.Parts}
	count, deleted := e.int(), e.int()
	names := e.next(e.int())
	if e.int() != 0 {
		e.bad = true
	}
	var texts [][]byte
	for len(e.parts) > 0 && !e.bad {
		had := len(e.parts)
		flags := e.int()
		at := collection.StreamID{MS: id.MS + uint64(e.int()), Seq: id.Seq + uint64(e.int())}
		texts = texts[:0]
		if flags&entrySameFields != 0 {
			for i, value := range e.next(int64(len(names))) {
				texts = append(texts, names[i], value)
			}
		} else {
			n := e.int()
			if n < 0 || n > int64(len(e.parts)) {
				e.bad = true
			}
			texts = append(texts, e.next(2*n)...)
		}
		if parts := had - len(e.parts); e.int() != int64(parts) || flags&^(entryDeleted|entrySameFields) != 0 ||
			len(texts) == 0 {
			e.bad = true
		}
		if flags&entryDeleted != 0 {
			deleted--
			continue
		}
		count--
		if e.bad || at.Compare(s.Last) <= 0 {
			r.fail()
			return
		}
		if s.Add(at, texts); len(s.Bytes(false)) > r.left {
			r.fail()
			return
		}
	}
	if e.bad || count != 0 || deleted != 0 {
		r.fail()
	}
}

// elements are those of a listpack. Once something is wrong bad is set.
type elements struct {
	parts [][]byte
	bad   bool
}

func (e *elements) next(n int64) [][]byte {
	if n < 0 || n > int64(len(e.parts)) {
		e.bad, e.parts = true, nil
		return nil
	}
	t := e.parts[:n]
	e.parts = e.parts[n:]
	return t
}

func (e *elements) int() int64 {
	t := e.next(1)
	if t == nil {
		return 0
	}
	n, err := strconv.ParseInt(string(t[0]), 10, 64)
	e.bad = e.bad || err != nil
	return n
}
