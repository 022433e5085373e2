package ring

import (
	"encoding/binary"
	"sync/atomic"
	"unsafe"
)

// Layout says where the parts of a ring are.
type Layout struct {
	Depth              uint32
	SQ, CQ, Slots, Len uint64 // offsets, and the bytes of all
}

// LayoutOf is how a broker lays a ring of a depth out, which is valid.
func LayoutOf(depth uint32) Layout {
	up := func(n uint64) uint64 { return (n + page - 1) &^ (page - 1) }
	l := Layout{Depth: depth, SQ: offSubmissions}
	l.CQ = up(l.SQ + uint64(depth)*EntrySize)
	l.Slots = up(l.CQ + uint64(depth)*EntrySize)
	l.Len = up(l.Slots + uint64(depth)*SlotSize)
	return l
}

// ValidDepth reports whether a queue may have n entries.
func ValidDepth(n uint32) bool { return n >= MinDepth && n <= MaxDepth && n&(n-1) == 0 }

// Format writes the header of a new ring to memory of l.Len bytes that is all zeroes.
func (l Layout) Format(mem []byte) {
	binary.LittleEndian.PutUint32(mem, Magic)
	binary.LittleEndian.PutUint16(mem[4:], Major)
	binary.LittleEndian.PutUint16(mem[6:], Minor)
	binary.LittleEndian.PutUint32(mem[8:], l.Depth)
	for i, v := range []uint64{l.SQ, l.CQ, l.Slots, l.Len} {
		binary.LittleEndian.PutUint64(mem[16+8*i:], v)
	}
	cpu(mem, offBrokerCPU).Store(noCPU)
	cpu(mem, offClientCPU).Store(noCPU)
}

// ParseHeader is the layout of a ring in mem, which another process has formatted and may change. It is copied, and
// checked: all parts lie within mem and apart from each other.
func ParseHeader(mem []byte) (l Layout, err error) {
	if len(mem) < offSubmissions {
		return l, protocolError("a ring of %d bytes", len(mem))
	}
	var h [headerSize]byte
	copy(h[:], mem)
	u64 := func(at int) uint64 { return binary.LittleEndian.Uint64(h[at:]) }
	l = Layout{binary.LittleEndian.Uint32(h[8:]), u64(16), u64(24), u64(32), u64(40)}
	magic, major := binary.LittleEndian.Uint32(h[:]), binary.LittleEndian.Uint16(h[4:])
	switch {
	case magic != Magic:
		return l, protocolError("a ring begins with %#x, not with %#x", magic, Magic)
	case major != Major:
		return l, protocolError("a ring of version %d, not %d", major, Major)
	case !ValidDepth(l.Depth):
		return l, protocolError("a ring of depth %d", l.Depth)
	case l != LayoutOf(l.Depth):
		return l, protocolError("a ring of depth %d with parts at %d, %d, %d, and %d bytes", l.Depth, l.SQ, l.CQ,
			l.Slots, l.Len)
	case l.Len > uint64(len(mem)):
		return l, protocolError("a ring of %d bytes in %d", l.Len, len(mem))
	}
	return l, nil
}

// word and cpu are words of a ring; memory that was mapped is aligned.
func word(mem []byte, at int) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&mem[at])) }
func cpu(mem []byte, at int) *atomic.Int32   { return (*atomic.Int32)(unsafe.Pointer(&mem[at])) }

// end is what both ends of a queue are made of. An end takes entries from one ring and puts them into the other.
// Its methods are for one goroutine at a time.
type end struct {
	mem            []byte
	l              Layout
	in, out        part
	sleeps, wakes  *atomic.Uint32 // this end's, the other's
	here, there    *atomic.Int32
	taken, written uint32
}

// part is a ring of entries.
type part struct {
	entries    []byte
	head, tail *atomic.Uint32
}

func (p part) entry(l Layout, i uint32) []byte {
	at := int(i&(l.Depth-1)) * EntrySize
	return p.entries[at : at+EntrySize : at+EntrySize]
}

func newEnd(mem []byte, l Layout) end {
	return end{mem: mem, l: l}
}

func (l Layout) parts(mem []byte) (sq, cq part) {
	sq = part{mem[l.SQ:][:l.Depth*EntrySize], word(mem, offSQHead), word(mem, offSQTail)}
	cq = part{mem[l.CQ:][:l.Depth*EntrySize], word(mem, offCQHead), word(mem, offCQTail)}
	return sq, cq
}

// Slot is the memory of a tag's slot, which the other end may change.
func (e *end) Slot(tag uint32) []byte {
	at := e.l.Slots + uint64(tag&(e.l.Depth-1))*SlotSize
	return e.mem[at:][:SlotSize:SlotSize]
}

// Depth is the entries of each ring.
func (e *end) Depth() uint32 { return e.l.Depth }

// queued is how many entries wait for this end.
func (e *end) queued() (uint32, error) {
	n := e.in.tail.Load() - e.taken
	if n > e.l.Depth {
		return 0, protocolError("%d entries in a ring of %d", n, e.l.Depth)
	}
	return n, nil
}

// Queued reports whether there is something to take.
func (e *end) Queued() bool { return e.in.tail.Load() != e.taken }

// Idle says that this end is about to sleep. It reports false if there is something after all.
func (e *end) Idle() bool {
	e.sleeps.Store(1) // sequentially consistent: before the look
	if e.in.tail.Load() != e.taken {
		e.sleeps.Store(0)
		return false
	}
	return true
}

// Awake says that this end does not sleep any more.
func (e *end) Awake() { e.sleeps.Store(0) }

// publish lets the other end see what was written, and reports whether it has to be woken.
func (e *end) publish() (wake bool) {
	e.out.tail.Store(e.written)
	return e.wakes.Load() != 0 && e.wakes.Swap(0) != 0
}

// At notes on which processor this end looks at the ring.
func (e *end) At(processor int) { e.here.Store(int32(processor)) }

// Beside reports whether the other end last looked at the ring from another processor than this. Then it pays to wait
// for it without sleeping.
func (e *end) Beside(processor int) bool {
	there := e.there.Load()
	return there >= 0 && there != int32(processor)
}

// Server is a broker's end of a queue.
type Server struct {
	end
	live []bool // by slot
	n    uint32 // of live
}

// NewServer is for memory that was formatted with l, whatever the client has made of it since.
func NewServer(mem []byte, l Layout) *Server {
	s := &Server{end: newEnd(mem, l), live: make([]bool, l.Depth)}
	s.in, s.out = l.parts(mem)
	s.sleeps, s.wakes = word(mem, offBrokerSleeps), word(mem, offClientSleeps)
	s.here, s.there = cpu(mem, offBrokerCPU), cpu(mem, offClientCPU)
	return s
}

// Take appends the submissions that are queued, and passes them: if the broker dies from now on the client does not
// know whether they happened. Each has a slot that no other one under way has. The error is ErrProtocol.
func (s *Server) Take(to []Submission) ([]Submission, error) {
	n, err := s.queued()
	for ; n > 0 && err == nil; n-- {
		var b [EntrySize]byte
		copy(b[:], s.in.entry(s.l, s.taken))
		var x Submission
		if x, err = ParseSubmission(b[:]); err != nil {
			break
		}
		slot := x.Tag & (s.l.Depth - 1)
		if s.live[slot] {
			err = protocolError("slot %d has two submissions", slot)
			break
		}
		s.live[slot] = true
		s.n++
		s.taken++
		to = append(to, x)
	}
	s.in.head.Store(s.taken)
	return to, err
}

// Live is how many submissions were taken and are not complete.
func (s *Server) Live() int { return int(s.n) }

// Complete queues a completion of a submission that was taken. There is room, since no two have one slot.
func (s *Server) Complete(c *Completion) {
	slot := c.Tag & (s.l.Depth - 1)
	if !s.live[slot] {
		panic("ring: a completion of nothing")
	}
	s.live[slot] = false
	s.n--
	c.Put(s.out.entry(s.l, s.written))
	s.written++
}

// Publish lets the client see completions, and reports whether it has to be woken.
func (s *Server) Publish() (wake bool) { return s.publish() }

// Client is a client's end.
type Client struct {
	end
	live []bool
}

// NewClient is for memory of a broker's whose header was parsed.
func NewClient(mem []byte, l Layout) *Client {
	c := &Client{end: newEnd(mem, l), live: make([]bool, l.Depth)}
	c.out, c.in = l.parts(mem)
	c.sleeps, c.wakes = word(mem, offClientSleeps), word(mem, offBrokerSleeps)
	c.here, c.there = cpu(mem, offClientCPU), cpu(mem, offBrokerCPU)
	return c
}

// Submit queues a submission whose slot is filled. It reports false if the ring is full, or the slot in use.
func (c *Client) Submit(s *Submission) bool {
	slot := s.Tag & (c.l.Depth - 1)
	if c.live[slot] || c.written-c.out.head.Load() >= c.l.Depth {
		return false
	}
	c.live[slot] = true
	s.Put(c.out.entry(c.l, c.written))
	c.written++
	return true
}

// Publish lets the broker see submissions, and reports whether it has to be woken.
func (c *Client) Publish() (wake bool) { return c.publish() }

// Passed is how many submissions the broker has taken, of all.
func (c *Client) Passed() uint32 { return c.out.head.Load() }

// Reap appends completions. The error is ErrProtocol.
func (c *Client) Reap(to []Completion) ([]Completion, error) {
	n, err := c.queued()
	for ; n > 0 && err == nil; n-- {
		var b [EntrySize]byte
		copy(b[:], c.in.entry(c.l, c.taken))
		var x Completion
		if x, err = ParseCompletion(b[:]); err != nil {
			break
		}
		slot := x.Tag & (c.l.Depth - 1)
		if !c.live[slot] {
			err = protocolError("a completion for slot %d, which has no submission", slot)
			break
		}
		c.live[slot] = false
		c.taken++
		to = append(to, x)
	}
	c.in.head.Store(c.taken)
	return to, err
}
