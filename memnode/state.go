package memnode

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/kvd-project/kvd/internal/bulk"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
)

// state is all that a process of this node says to the next one.
type state struct {
	cluster, node, host string
	nodeID              uint32
	incarnation, boot   uint64
	lives               []uint64 // nonces of processes, of which one has registered last
	told                position // of the cluster
	regions             []*keptRegion
}

// keptRegion is a region whose memory the keeper holds.
type keptRegion struct {
	item                   string // its name at the keeper
	pg, namespace, epoch   uint32
	since                  uint64
	regionBytes, indexSize uint64
	pageBytes              uint64 // 0: normal pages
	incarnation            uint64
	keys                   []keptKeys // none: it is retained, and nobody may use it
}

// keptKeys are a region's rkeys at a provider.
type keptKeys struct {
	provider    string
	index, heap uint64
}

// The state lies in two pages, which say the same. Numbers are little-endian:
//
//	0   magic     "kvdkeep1"; 0: nothing is here, or it was not written to the end
//	8   format    u32
//	12  crc       u32, CRC-32C of all from 16 to the end of body, and then of format
//	16  sequence  u64, twice the number of the change, and 1 in the second page
//	24  length    u64, of body
//	32  body      cluster, node, host; node id u32, incarnation u64, boot u64; lives u8, of each: nonce u64; regions u32, of each:
//	              item, pg u32, namespace u32, epoch u32, since u64, region u64, index u64, page u64 bytes, incarnation u64;
//	              keys u8, of each: provider, index u64, heap u64; then what the directory was at: recoveries, reign, term, index, u64 each
//
// A text is its length, u16, and its bytes. The magic is stored last, so that a process that dies while it writes a
// page leaves the other one, whole. Nothing is done that depends on a change before both pages have it. So a page that
// is whole may be believed whatever became of the other one: it is the change that was made last, or one that nobody
// has acted on, or the one before such a change.
const (
	stateMagic    = 0x31_70_65_65_6b_64_76_6b // "kvdkeep1"
	stateFormat   = 3
	statePage     = 1 << 20
	stateHead     = 32
	maxStateText  = 1 << 10
	maxRegionKeys = 16
	maxLives      = 16 // as fsm.MaxAfter
)

// StateBytes is how much memory the state takes in a folder with pages of this size, 0: normal ones.
func StateBytes(pageBytes int) int64 { return int64(max(2*statePage, pageBytes)) }

// Why a state is of no use. errStateNone is that of a node's first process.
var (
	errStateNone    = errors.New("no earlier process has left memory")
	errStateDamaged = errors.New("what the earlier process left of its state is damaged")
	errStateFormat  = errors.New("the earlier process was of another version, which wrote its state otherwise")
	errStateFull    = errors.New("there are more regions than a keeper's state has room for")
)

func (s *state) encode() []byte {
	le := binary.LittleEndian
	text := func(b []byte, t string) []byte { return append(le.AppendUint16(b, uint16(len(t))), t...) }
	b := text(text(text(nil, s.cluster), s.node), s.host)
	b = le.AppendUint64(le.AppendUint64(le.AppendUint32(b, s.nodeID), s.incarnation), s.boot)
	b = append(b, byte(len(s.lives)))
	for _, n := range s.lives {
		b = le.AppendUint64(b, n)
	}
	b = le.AppendUint32(b, uint32(len(s.regions)))
	for _, r := range s.regions {
		b = le.AppendUint32(le.AppendUint32(le.AppendUint32(text(b, r.item), r.pg), r.namespace), r.epoch)
		for _, n := range []uint64{r.since, r.regionBytes, r.indexSize, r.pageBytes, r.incarnation} {
			b = le.AppendUint64(b, n)
		}
		b = append(b, byte(len(r.keys)))
		for _, k := range r.keys {
			b = le.AppendUint64(le.AppendUint64(text(b, k.provider), k.index), k.heap)
		}
	}
	for _, n := range []uint64{s.told.recoveries, s.told.reign, s.told.term, s.told.index} {
		b = le.AppendUint64(b, n)
	}
	return b
}

// stateReader takes a body apart; after the first problem it gives zeroes.
type stateReader struct {
	b  []byte
	ok bool
}

func (r *stateReader) take(n int) []byte {
	if !r.ok || n > len(r.b) {
		r.ok = false
		return make([]byte, 8)
	}
	b := r.b[:n]
	r.b = r.b[n:]
	return b
}

func (r *stateReader) u32() uint32 { return binary.LittleEndian.Uint32(r.take(4)) }
func (r *stateReader) u64() uint64 { return binary.LittleEndian.Uint64(r.take(8)) }

func (r *stateReader) text() string {
	n := int(binary.LittleEndian.Uint16(r.take(2)))
	if n > maxStateText {
		r.ok = false
	}
	if !r.ok {
		return ""
	}
	return string(r.take(n))
}

// decodeState checks a body whose checksum is right.
func decodeState(b []byte) (*state, error) {
	r := &stateReader{b, true}
	s := &state{cluster: r.text(), node: r.text(), host: r.text(), nodeID: r.u32(), incarnation: r.u64(), boot: r.u64()}
	for n := r.take(1)[0]; n > 0 && r.ok; n-- {
		s.lives = append(s.lives, r.u64())
	}
	seen := make(map[uint32]bool)
	for n := r.u32(); n > 0 && r.ok; n-- {
		k := &keptRegion{item: r.text(), pg: r.u32(), namespace: r.u32(), epoch: r.u32(), since: r.u64(),
			regionBytes: r.u64(), indexSize: r.u64(), pageBytes: r.u64(), incarnation: r.u64()}
		keys := int(r.take(1)[0])
		for range min(keys, maxRegionKeys) {
			k.keys = append(k.keys, keptKeys{r.text(), r.u64(), r.u64()})
		}
		if r.ok && (keys > maxRegionKeys || seen[k.pg] || k.item == "" || k.pageBytes > 1<<30 ||
			k.regionBytes > 1<<50 || checkLayout(k.regionBytes, k.indexSize) != nil) {
			return nil, fmt.Errorf("%w: region of placement group %d", errStateDamaged, k.pg)
		}
		seen[k.pg] = true
		s.regions = append(s.regions, k)
	}
	s.told = position{r.u64(), r.u64(), r.u64(), r.u64()}
	if !r.ok || len(r.b) > 0 || s.incarnation == 0 || s.boot == 0 || s.boot == ^uint64(0) || len(s.lives) > maxLives {
		return nil, fmt.Errorf("%w: %d bytes of body", errStateDamaged, len(b))
	}
	return s, nil
}

// checkLayout refuses a region that no directory wants.
func checkLayout(size, index uint64) error {
	if index < layout.RegionPageSize || index >= size || index%layout.UnitSize != 0 || size%layout.UnitSize != 0 {
		return fmt.Errorf("region of %d bytes with an index of %d: want multiples of %d and %d <= index < region",
			size, index, layout.UnitSize, layout.RegionPageSize)
	}
	return nil
}

// stateFile is the state's memory, which the keeper holds too. Its methods serve one goroutine at a time.
type stateFile struct {
	mem *rdma.Memory // of 2 * statePage bytes
	seq uint64       // number of the last change
	// whole is the page that was believed, which is written after the other one. torn says that the other one does not
	// say the same, and spoiled why it cannot be believed, if it was not just being written.
	whole   uint64
	torn    bool
	spoiled error
}

func (f *stateFile) page(k uint64) []byte { return f.mem.Bytes[k*statePage:][:statePage] }

// sumOf is the checksum of a page with n bytes of body. It did not cover the format before 3.
func sumOf(p []byte, n uint64) uint32 {
	sum := bulk.CRC(0, p[16:stateHead+n])
	if binary.LittleEndian.Uint32(p[8:]) >= 3 {
		sum = bulk.CRC(sum, p[8:12])
	}
	return sum
}

// readPage gives the state that page k has, and the number of its change; nil, 0, nil if nothing was written there to
// the end.
func (f *stateFile) readPage(k uint64) (s *state, seq uint64, err error) {
	p, le := f.page(k), binary.LittleEndian
	switch magic := le.Uint64(p); {
	case magic == 0:
		return nil, 0, nil
	case magic != stateMagic:
		return nil, 0, fmt.Errorf("%w: magic %#x in page %d", errStateDamaged, magic, k)
	}
	n, seq := le.Uint64(p[24:]), le.Uint64(p[16:])
	switch {
	case n > statePage-stateHead:
		return nil, 0, fmt.Errorf("%w: %d bytes of body in page %d", errStateDamaged, n, k)
	case sumOf(p, n) != le.Uint32(p[12:]):
		return nil, 0, fmt.Errorf("%w: checksum of page %d", errStateDamaged, k)
	case le.Uint32(p[8:]) != stateFormat:
		return nil, 0, fmt.Errorf("%w: format %d in page %d, want %d", errStateFormat, le.Uint32(p[8:]), k, stateFormat)
	case seq%2 != k:
		return nil, 0, fmt.Errorf("%w: sequence %d in page %d", errStateDamaged, seq, k)
	}
	if s, err = decodeState(slices.Clone(p[stateHead : stateHead+n])); err != nil {
		return nil, 0, fmt.Errorf("page %d: %w", k, err)
	}
	return s, seq / 2, nil
}

// read gives the state as one page that is whole has it, the later one of two, or says why there is none: errStateNone
// if nothing was written.
func (f *stateFile) read() (*state, error) {
	var last *state
	var errs []error
	seqs := make([]uint64, 2)
	for k := range uint64(2) {
		s, seq, err := f.readPage(k)
		errs = append(errs, err)
		if s != nil && (last == nil || seq > f.seq) {
			last, f.seq, f.whole = s, seq, k
		}
		seqs[k] = seq
	}
	err := errors.Join(errs...)
	if last == nil {
		return nil, cmp.Or(err, errStateNone)
	}
	f.torn, f.spoiled = seqs[0] != seqs[1], err
	return last, nil
}

// write makes s the state. A process that dies inside leaves the one before, or this one.
func (f *stateFile) write(s *state) error {
	body := s.encode()
	if len(body) > statePage-stateHead {
		return fmt.Errorf("%w: %d regions take %d bytes of %d", errStateFull, len(s.regions), len(body),
			statePage-stateHead)
	}
	f.seq++
	f.writePage(1-f.whole, body)
	f.writePage(f.whole, body)
	f.torn, f.spoiled = false, nil
	return nil
}

func (f *stateFile) writePage(k uint64, body []byte) {
	p, le := f.page(k), binary.LittleEndian
	magic := (*uint64)(unsafe.Pointer(unsafe.SliceData(p)))
	atomic.StoreUint64(magic, 0)
	le.PutUint32(p[8:], stateFormat)
	le.PutUint64(p[16:], 2*f.seq+k)
	le.PutUint64(p[24:], uint64(len(body)))
	copy(p[stateHead:], body)
	le.PutUint32(p[12:], sumOf(p, uint64(len(body))))
	var m [8]byte
	le.PutUint64(m[:], stateMagic)
	atomic.StoreUint64(magic, binary.NativeEndian.Uint64(m[:]))
}
