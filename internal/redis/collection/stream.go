package collection

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"iter"
	"math"
	"slices"
	"strconv"
)

// A stream is a head of fixed width, its consumer groups, and its entries in blocks:
//
//	format 1 | last id | greatest deleted id | entries added u64 | entries u32 | bytes of groups u32
//	groups:  name | last id | entries read i64 | consumers u32 | pending u32 | { name | seen u64 } | { id | delivered u64 | times u64 | consumer u32 }
//	block:   bytes of entries u32 | entries u16 | deleted u16 | first id | last id | { ms uvarint | seq uvarint | pairs uvarint | texts }
//
// An id is two u64. An entry's ms is counted from that of the block's first id, and so is its seq if the ms are the
// same. So a new entry appends bytes and changes numbers, a range is found by the heads of blocks, and a deletion moves
// bytes. A block is what Redis keeps in a node: it takes 100 entries, those counted that have been deleted, or 4 KiB.
// Groups, and consumers of each, are in the order of their names, and what is pending in that of ids. A stream without
// entries is stored, too.
const (
	streamFormat  = 1
	streamHead    = 1 + 16 + 16 + 8 + 4 + 4
	blockHead     = 4 + 2 + 2 + 16 + 16
	blockEntries  = 100
	blockBytes    = 4096
	pendingBytes  = 16 + 8 + 8 + 4
	groupNumbers  = 16 + 8 + 4 + 4
	consumerBytes = 8
)

// StreamID is the id of an entry.
type StreamID struct{ MS, Seq uint64 }

// MaxStreamID is the greatest id.
var MaxStreamID = StreamID{math.MaxUint64, math.MaxUint64}

// Compare orders ids.
func (a StreamID) Compare(b StreamID) int {
	return cmp.Or(cmp.Compare(a.MS, b.MS), cmp.Compare(a.Seq, b.Seq))
}

// Next is the id behind a; ok is false for the last one.
func (a StreamID) Next() (next StreamID, ok bool) {
	if a.Seq++; a.Seq == 0 {
		a.MS++
	}
	return a, a != StreamID{}
}

// Prev is the id before a; ok is false for the first one.
func (a StreamID) Prev() (prev StreamID, ok bool) {
	if a == (StreamID{}) {
		return MaxStreamID, false
	}
	if a.Seq--; a.Seq == math.MaxUint64 {
		a.MS--
	}
	return a, true
}

// Append appends the id as text.
func (a StreamID) Append(dst []byte) []byte {
	dst = append(strconv.AppendUint(dst, a.MS, 10), '-')
	return strconv.AppendUint(dst, a.Seq, 10)
}

func idAt(b []byte) StreamID {
	return StreamID{binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])}
}

func appendID(b []byte, id StreamID) []byte {
	b = binary.LittleEndian.AppendUint64(b, id.MS)
	return binary.LittleEndian.AppendUint64(b, id.Seq)
}

// Stream is an encoded stream, taken apart into its groups and the heads of its blocks. The zero value is the
// empty one. Methods that change it do so in the bytes that ParseStream was given, where there is room. These bytes
// have to be the caller's then; Bytes returns the result. Entries are checked when they are read: an error is
// ErrCorrupt.
type Stream struct {
	Last, MaxDeleted StreamID
	Added            uint64
	Groups           []*StreamGroup

	buf    []byte
	n      int // entries
	blocks []block
}

// block is the head of a block, at a byte of the stream.
type block struct {
	at, size      int
	live, deleted int
	first, last   StreamID
}

// StreamGroup is a consumer group.
type StreamGroup struct {
	Name      []byte
	Last      StreamID // delivered
	Read      int64    // entries; -1: not known
	Consumers []StreamConsumer
	Pending   Pending
}

// StreamConsumer is a consumer of a group.
type StreamConsumer struct {
	Name []byte
	Seen int64 // Unix ms
}

// ParseStream takes a value apart.
func ParseStream(b []byte) (*Stream, error) {
	s := &Stream{buf: b}
	if len(b) == 0 {
		return s, nil
	}
	if len(b) < streamHead || b[0] != streamFormat {
		return nil, ErrCorrupt
	}
	s.Last, s.MaxDeleted, s.Added = idAt(b[1:]), idAt(b[17:]), binary.LittleEndian.Uint64(b[33:])
	n, groups := int64(binary.LittleEndian.Uint32(b[41:])), int64(binary.LittleEndian.Uint32(b[45:]))
	if groups > int64(len(b)-streamHead) || !s.parseGroups(b[streamHead:streamHead+int(groups)]) {
		return nil, ErrCorrupt
	}
	before := StreamID{}
	for at := streamHead + int(groups); at < len(b); {
		if len(b)-at < blockHead {
			return nil, ErrCorrupt
		}
		h := b[at:]
		k := block{at: at, live: int(binary.LittleEndian.Uint16(h[4:])),
			deleted: int(binary.LittleEndian.Uint16(h[6:])), first: idAt(h[8:]), last: idAt(h[24:])}
		size := int64(binary.LittleEndian.Uint32(h))
		// An entry takes three bytes at least.
		if size > int64(len(b)-at-blockHead) || k.live == 0 || 3*int64(k.live) > size || k.first.Compare(k.last) > 0 ||
			k.first.Compare(before) <= 0 {
			return nil, ErrCorrupt
		}
		k.size, before = int(size), k.last
		s.blocks = append(s.blocks, k)
		s.n += k.live
		at += blockHead + k.size
	}
	if int64(s.n) != n || before.Compare(s.Last) > 0 {
		return nil, ErrCorrupt
	}
	return s, nil
}

func (s *Stream) parseGroups(b []byte) bool {
	for len(b) > 0 {
		lo, hi := textAt(b, 0)
		if hi < 0 || len(b)-hi < groupNumbers {
			return false
		}
		g := &StreamGroup{Name: b[lo:hi:hi]}
		h := b[hi:]
		g.Last, g.Read = idAt(h), int64(binary.LittleEndian.Uint64(h[16:]))
		consumers, pending := int64(binary.LittleEndian.Uint32(h[24:])), int64(binary.LittleEndian.Uint32(h[28:]))
		b = h[groupNumbers:]
		if n := len(s.Groups); n > 0 && bytes.Compare(s.Groups[n-1].Name, g.Name) >= 0 {
			return false
		}
		for i := range consumers {
			lo, hi := textAt(b, 0)
			if hi < 0 || len(b)-hi < consumerBytes {
				return false
			}
			c := StreamConsumer{Name: b[lo:hi:hi], Seen: int64(binary.LittleEndian.Uint64(b[hi:]))}
			if i > 0 && bytes.Compare(g.Consumers[i-1].Name, c.Name) >= 0 {
				return false
			}
			g.Consumers = append(g.Consumers, c)
			b = b[hi+consumerBytes:]
		}
		if pending > int64(len(b)/pendingBytes) {
			return false
		}
		size := int(pending) * pendingBytes
		g.Pending = Pending(b[:size:size])
		b = b[size:]
		for i := range g.Pending.Len() {
			if int64(binary.LittleEndian.Uint32(g.Pending[i*pendingBytes+32:])) >= consumers || i > 0 &&
				g.Pending.id(i-1).Compare(g.Pending.id(i)) >= 0 {
				return false
			}
		}
		s.Groups = append(s.Groups, g)
	}
	return true
}

// Len counts the entries.
func (s *Stream) Len() int { return s.n }

// Bytes is the stream encoded, with its groups as they are now if they have been changed.
func (s *Stream) Bytes(groups bool) []byte {
	if len(s.buf) == 0 {
		s.buf = append(s.buf[:0], make([]byte, streamHead)...)
		s.buf[0] = streamFormat
	}
	if groups {
		g := s.encodedGroups()
		was := streamHead + int(binary.LittleEndian.Uint32(s.buf[45:]))
		s.buf = resize(s.buf, streamHead, was, len(g))
		copy(s.buf[streamHead:], g)
		binary.LittleEndian.PutUint32(s.buf[45:], uint32(len(g)))
		s.shift(0, len(g)-(was-streamHead))
	}
	h := appendID(appendID(s.buf[:1], s.Last), s.MaxDeleted)
	h = binary.LittleEndian.AppendUint64(h, s.Added)
	binary.LittleEndian.AppendUint32(h, uint32(s.n))
	return s.buf
}

func (s *Stream) encodedGroups() (b []byte) {
	for _, g := range s.Groups {
		b = appendID(appendText(b, g.Name), g.Last)
		b = binary.LittleEndian.AppendUint64(b, uint64(g.Read))
		b = binary.LittleEndian.AppendUint32(b, uint32(len(g.Consumers)))
		b = binary.LittleEndian.AppendUint32(b, uint32(g.Pending.Len()))
		for _, c := range g.Consumers {
			b = binary.LittleEndian.AppendUint64(appendText(b, c.Name), uint64(c.Seen))
		}
		b = append(b, g.Pending...)
	}
	return b
}

// shift says that blocks from the i-th on have moved.
func (s *Stream) shift(i, by int) {
	for ; i < len(s.blocks); i++ {
		s.blocks[i].at += by
	}
}

// StreamEntry is an entry: its fields, each behind which its value is, lie in the stream.
type StreamEntry struct {
	ID     StreamID
	Pairs  int
	texts  []byte
	lo, hi int // in its block
}

// Texts are fields and values by turns.
func (e StreamEntry) Texts() iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		for at := 0; at < len(e.texts); {
			lo, hi := textAt(e.texts, at)
			if !yield(e.texts[lo:hi:hi]) {
				return
			}
			at = hi
		}
	}
}

// entryIn reads the entry at a byte of a block's entries.
func (k *block) entryIn(b []byte, at int) (e StreamEntry, ok bool) {
	e.lo = at
	var numbers [3]uint64
	for i := range numbers {
		u, w := binary.Uvarint(b[at:])
		if w <= 0 {
			return e, false
		}
		numbers[i], at = u, at+w
	}
	if e.ID = (StreamID{k.first.MS + numbers[0], numbers[1]}); e.ID.MS < k.first.MS ||
		numbers[2] > uint64(len(b)-at)/2 {
		return e, false
	}
	if numbers[0] == 0 {
		if e.ID.Seq += k.first.Seq; e.ID.Seq < k.first.Seq {
			return e, false
		}
	}
	e.Pairs = int(numbers[2])
	from := at
	for range 2 * e.Pairs {
		_, hi := textAt(b, at)
		if hi < 0 {
			return e, false
		}
		at = hi
	}
	e.texts, e.hi = b[from:at:at], at
	return e, e.ID.Compare(k.last) <= 0
}

// each calls f with the entries of a block, until it returns false.
func (s *Stream) each(k *block, f func(e StreamEntry) bool) error {
	b := s.buf[k.at+blockHead:][:k.size]
	n := 0
	before := StreamID{}
	for at := 0; at < len(b); n++ {
		e, ok := k.entryIn(b, at)
		if !ok || n > 0 && e.ID.Compare(before) <= 0 {
			return ErrCorrupt
		}
		if !f(e) {
			return nil
		}
		before, at = e.ID, e.hi
	}
	if n != k.live {
		return ErrCorrupt
	}
	return nil
}

// blockOf is the first block that has ids from id on.
func (s *Stream) blockOf(id StreamID) int {
	i, _ := slices.BinarySearchFunc(s.blocks, id, func(k block, id StreamID) int { return k.last.Compare(id) })
	return i
}

// Range calls f with the entries from one id to another one, in reverse if so told, until it returns false.
func (s *Stream) Range(from, to StreamID, reverse bool, f func(e StreamEntry) bool) error {
	if reverse {
		return s.rangeBack(from, to, f)
	}
	more := true
	for i := s.blockOf(from); more && i < len(s.blocks) && s.blocks[i].first.Compare(to) <= 0; i++ {
		if err := s.each(&s.blocks[i], func(e StreamEntry) bool {
			if e.ID.Compare(to) > 0 {
				more = false
			} else if e.ID.Compare(from) >= 0 {
				more = f(e)
			}
			return more
		}); err != nil {
			return err
		}
	}
	return nil
}

func (s *Stream) rangeBack(from, to StreamID, f func(e StreamEntry) bool) error {
	var few [blockEntries]StreamEntry
	for i := min(s.blockOf(to), len(s.blocks)-1); i >= 0 && s.blocks[i].last.Compare(from) >= 0; i-- {
		found := few[:0]
		if err := s.each(&s.blocks[i], func(e StreamEntry) bool {
			if e.ID.Compare(from) >= 0 && e.ID.Compare(to) <= 0 {
				found = append(found, e)
			}
			return e.ID.Compare(to) < 0
		}); err != nil {
			return err
		}
		for _, e := range slices.Backward(found) {
			if !f(e) {
				return nil
			}
		}
	}
	return nil
}

// Find is the entry with an id.
func (s *Stream) Find(id StreamID) (e StreamEntry, found bool, err error) {
	err = s.Range(id, id, false, func(x StreamEntry) bool {
		e, found = x, true
		return false
	})
	return e, found, err
}

// Edge is the id of the first entry, or of the last one; that of an empty stream is 0-0.
func (s *Stream) Edge(last bool) (id StreamID, err error) {
	err = s.Range(StreamID{}, MaxStreamID, last, func(e StreamEntry) bool {
		id = e.ID
		return false
	})
	return id, err
}

// Add appends an entry, whose id is behind Last. texts are fields and values by turns.
func (s *Stream) Add(id StreamID, texts [][]byte) {
	if len(s.buf) == 0 {
		s.Bytes(false)
	}
	var k *block
	if n := len(s.blocks); n > 0 {
		k = &s.blocks[n-1]
	}
	if k == nil || k.live+k.deleted >= blockEntries || k.size >= blockBytes {
		s.blocks = append(s.blocks, block{at: len(s.buf), first: id})
		k = &s.blocks[len(s.blocks)-1]
		s.buf = append(s.buf, make([]byte, blockHead)...)
	}
	was := len(s.buf)
	seq := id.Seq
	if id.MS == k.first.MS {
		seq -= k.first.Seq
	}
	s.buf = binary.AppendUvarint(binary.AppendUvarint(s.buf, id.MS-k.first.MS), seq)
	s.buf = binary.AppendUvarint(s.buf, uint64(len(texts)/2))
	for _, t := range texts {
		s.buf = appendText(s.buf, t)
	}
	k.last, k.size, k.live = id, k.size+len(s.buf)-was, k.live+1
	s.n++
	s.Last = id
	s.Added++
	s.writeHead(k)
}

// SetLast sets the last id; top is that of the last entry, which is not behind it. The last block may have ended with a
// deleted one that is.
func (s *Stream) SetLast(id, top StreamID) {
	s.Last = id
	if n := len(s.blocks); n > 0 && s.blocks[n-1].last.Compare(id) > 0 {
		s.blocks[n-1].last = top
		s.writeHead(&s.blocks[n-1])
	}
}

// StreamRoom is about how many bytes an entry adds at most.
func StreamRoom(texts [][]byte) int {
	n := streamHead + blockHead + 3*binary.MaxVarintLen64
	for _, t := range texts {
		n += textLen(t)
	}
	return n
}

func (s *Stream) writeHead(k *block) {
	h := binary.LittleEndian.AppendUint32(s.buf[k.at:k.at], uint32(k.size))
	h = binary.LittleEndian.AppendUint16(h, uint16(k.live))
	h = binary.LittleEndian.AppendUint16(h, uint16(k.deleted))
	appendID(appendID(h, k.first), k.last)
}

// cut takes bytes out, which are before the i-th block.
func (s *Stream) cut(lo, hi, i int) {
	s.buf = append(s.buf[:lo], s.buf[hi:]...)
	s.shift(i, lo-hi)
}

// remove takes entries out of the i-th block, n of them, whose bytes are from lo to hi in it.
func (s *Stream) remove(i, lo, hi, n int) {
	k := &s.blocks[i]
	s.n -= n
	if k.live == n {
		s.cut(k.at, k.at+blockHead+k.size, i+1)
		s.blocks = slices.Delete(s.blocks, i, i+1)
		return
	}
	s.cut(k.at+blockHead+lo, k.at+blockHead+hi, i+1)
	k.live, k.deleted, k.size = k.live-n, k.deleted+n, k.size-(hi-lo)
	s.writeHead(k)
}

// Delete takes out the entry with an id, and reports whether there was one.
func (s *Stream) Delete(id StreamID) (bool, error) {
	i := s.blockOf(id)
	if i == len(s.blocks) {
		return false, nil
	}
	var at StreamEntry
	found, n := false, 0
	if err := s.each(&s.blocks[i], func(e StreamEntry) bool {
		if e.ID == id {
			at, found = e, true
		}
		n++
		return true
	}); err != nil || !found {
		return false, err
	}
	s.remove(i, at.lo, at.hi, 1)
	if id.Compare(s.MaxDeleted) > 0 {
		s.MaxDeleted = id
	}
	return true, nil
}

// StreamTrim says what to take out of a stream, from its begin on.
type StreamTrim struct {
	ByID  bool
	Max   uint64   // entries that stay at most, unless ByID
	MinID StreamID // the least id that stays
	// Blocks: only whole blocks go.
	Blocks bool
	Limit  int64 // of entries that go; 0: none
}

// Trim takes out entries, and counts them.
func (s *Stream) Trim(t StreamTrim) (gone int, err error) {
	whole, i := 0, 0
	for ; i < len(s.blocks); i++ {
		k := &s.blocks[i]
		all := uint64(s.n-whole-k.live) >= t.Max
		if t.ByID {
			all = k.last.Compare(t.MinID) < 0
		}
		if !t.ByID && uint64(s.n-whole) <= t.Max || t.Limit > 0 && int64(whole+k.live) > t.Limit || !all {
			break
		}
		whole += k.live
	}
	part, hi := 0, 0
	if i < len(s.blocks) && !t.Blocks && (t.Limit == 0 || int64(whole+s.blocks[i].live) <= t.Limit) {
		if err := s.each(&s.blocks[i], func(e StreamEntry) bool {
			if t.ByID && e.ID.Compare(t.MinID) < 0 || !t.ByID && uint64(s.n-whole-part) > t.Max {
				part, hi = part+1, e.hi
			}
			return true
		}); err != nil {
			return 0, err
		}
	}
	if part > 0 {
		s.remove(i, 0, hi, part)
	}
	if i > 0 {
		first := s.blocks[0].at
		end := len(s.buf)
		if i < len(s.blocks) {
			end = s.blocks[i].at
		}
		s.cut(first, end, i)
		s.blocks = slices.Delete(s.blocks, 0, i)
		s.n -= whole
	}
	return whole + part, nil
}

// Nodes is how many keys and nodes the radix tree would have in which Redis has blocks by their first ids.
func (s *Stream) Nodes() (keys, nodes int) {
	ids := make([][16]byte, len(s.blocks))
	for i, k := range s.blocks {
		binary.BigEndian.PutUint64(ids[i][:], k.first.MS)
		binary.BigEndian.PutUint64(ids[i][8:], k.first.Seq)
	}
	if len(ids) == 0 {
		return 0, 1
	}
	return len(ids), radixNodes(ids, 0)
}

// radixNodes counts the nodes for keys that have their first bytes in common.
func radixNodes(keys [][16]byte, depth int) (n int) {
	if len(keys) == 1 {
		return 1 + int(min(1, 16-depth))
	}
	common := depth
	for keys[0][common] == keys[len(keys)-1][common] {
		common++
	}
	if n = 1; common > depth {
		n = 2
	}
	for from := 0; from < len(keys); {
		to := from + 1
		for to < len(keys) && keys[to][common] == keys[from][common] {
			to++
		}
		n += radixNodes(keys[from:to], common+1)
		from = to
	}
	return n
}
