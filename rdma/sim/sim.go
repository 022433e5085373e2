// Package sim is the in-process provider: ordinary Go heap memory, one seeded
// schedule, and less mercy than hardware. It tears READs, lands WRITEs in
// pieces, interleaves queue pairs, delays completions and poisons buffers that
// are looked at too early. The race detector sees its memory, which it does not
// with the other providers.
//
// In auto mode (the default) a seeded generator advances pending work inside PostSend and Poll. There are no
// goroutines, and a CQ's Ready is signalled again while its QPs have work pending. In manual mode
// ([Options].Manual) PostSend only queues; the caller lists what may happen next with [Fabric.Events], makes
// it happen with [Fabric.Fire], and injects faults. Both repeat exactly, given the seed and the calls.
//
// It leaves argument checks to package rdma, and virtual time to its users.
// Start with [Fabric] and [Event]. A mutex guards a Fabric, so everything may be called concurrently as
// package driver allows. The effects of one goroutine's Poll on another's buffers happen before that one's
// next call. A Closed callback runs in the goroutine that ended the connection.
//
// The event model is that of stateless model checkers; the ordering rules are
// those of the InfiniBand Architecture vol. 1, ch. 9.
package sim

import (
	"cmp"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/kvd-project/kvd/rdma/driver"
)

// MaxPieces is the most pieces one READ or WRITE is split into. Local of a WRITE with a Value is one more.
const MaxPieces = 8

// wholeBytes is Caps.WholeBytes. Of longer messages, and of those with a Value, every word is torn.
const wholeBytes = driver.LeastWholeBytes

// Options configure a Fabric.
type Options struct {
	// Seed chooses the schedule of auto mode, and the keys.
	Seed uint64
	// Manual leaves every step to the caller.
	Manual bool
	// TearBytes is the aligned unit that is read and written whole. Rounded up
	// to a multiple of 8; default 8.
	TearBytes int
	// ReadPieces and WritePieces are into how many pieces manual mode splits a
	// message of several units. Pieces of one message take effect in any order.
	// Default 1, at most MaxPieces. Auto mode splits at random.
	ReadPieces, WritePieces int
	// DeliverEvents makes the delivery of a WC an event of its own in manual
	// mode; otherwise it comes with the effect. Auto mode always delays.
	DeliverEvents bool
	// Synchronous has PostSend return when its WRs are over, as a provider does that executes them itself. It
	// announces Synchronous and SelfFencing, nothing lands once a QP is in error, and completions are not
	// delayed. If the steps are the caller's (Manual), PostSend calls Wait until then. Wait fires events or lets
	// others do so.
	Synchronous bool
	Wait        func()
	// NoAtomicThenRead withdraws the capability: a READ may overtake atomics
	// before it unless it sets Fence.
	NoAtomicThenRead bool
	// SharedWire announces that capability, so that users take a second QP. WRs take the steps that they take anyway.
	SharedWire bool
	// NoValues withdraws MaxSGE 2, AnyMemory and Sums: package rdma makes up for that.
	NoValues bool
	// SGEs, if not 0, is MaxSGE of fabrics that withdraw AnyMemory, Sums and Maps, as adapters do. WRs name registered
	// memory alone, which is read and written until they are over.
	SGEs int
	// MaxInline and MaxMsg are bytes, MaxSendWR counts WRs. Defaults 128,
	// 4 MiB, 256. A negative MaxInline means none.
	MaxInline, MaxMsg, MaxSendWR int
}

func (o *Options) ensureDefaults() {
	o.TearBytes = max((o.TearBytes+7)&^7, 8)
	o.ReadPieces = min(max(o.ReadPieces, 1), MaxPieces)
	o.WritePieces = min(max(o.WritePieces, 1), MaxPieces)
	o.MaxInline = max(cmp.Or(o.MaxInline, 128), 0)
	o.MaxMsg = cmp.Or(max(o.MaxMsg, 0), 4<<20)
	o.MaxSendWR = cmp.Or(max(o.MaxSendWR, 0), 256)
	o.DeliverEvents = o.DeliverEvents && !o.Synchronous
}

// Fabric is a network of devices in this process.
type Fabric struct {
	o    Options
	caps driver.Caps

	mu struct {
		sync.Mutex
		rng       rand.PCG
		devices   []*device // open ones, in order of creation
		mrs       []*mr     // by key index; nil once deregistered
		again     uint64    // MRs that were given an rkey
		qps       []*qp     // not closed, by number
		cqs       []*cq     // not closed
		listeners map[string]*listener
		nextQP    uint32
		ports     int
		busy      []*qp   // auto mode: those with an enabled event
		scratch   []Event // auto mode
		total     Counters
		mapped    int // of Map, not released
	}
}

// New makes an empty fabric.
func New(o Options) *Fabric {
	o.ensureDefaults()
	f := &Fabric{o: o, caps: driver.Caps{
		AtomicScope:    driver.AtomicHCA,
		AtomicThenRead: !o.NoAtomicThenRead,
		StopAtMiss:     true,
		TearBytes:      o.TearBytes,
		MaxInline:      o.MaxInline,
		MaxMsg:         o.MaxMsg,
		MaxSendWR:      o.MaxSendWR,
		WholeBytes:     wholeBytes,
		MaxSGE:         1,
		EnforcesRights: true,
		SharedWire:     o.SharedWire && !o.Synchronous,
		Synchronous:    o.Synchronous,
		SelfFencing:    o.Synchronous,
		Maps:           !o.NoValues && o.SGEs == 0,
	}}
	switch {
	case o.NoValues:
	case o.SGEs != 0:
		f.caps.MaxSGE = o.SGEs
	default:
		f.caps.MaxSGE, f.caps.AnyMemory, f.caps.Sums = 2, true, true
	}
	f.mu.listeners = make(map[string]*listener)
	f.mu.nextQP = 1
	f.seedLocked(o.Seed)
	return f
}

func (f *Fabric) seedLocked(seed uint64) { f.mu.rng = *rand.NewPCG(seed, 0x6b7664) }

func (f *Fabric) belowLocked(n int) int {
	hi, _ := bits.Mul64(f.mu.rng.Uint64(), uint64(n))
	return int(hi)
}

// Device opens the device of that name, or returns the open one.
func (f *Fabric) Device(name string) driver.Device {
	f.mu.Lock()
	defer f.mu.Unlock()
	if d := f.deviceLocked(name); d != nil {
		return d
	}
	d := &device{f: f, name: name}
	f.mu.devices = append(f.mu.devices, d)
	return d
}

func (f *Fabric) deviceLocked(name string) *device {
	for _, d := range f.mu.devices {
		if d.name == name {
			return d
		}
	}
	return nil
}

func (f *Fabric) qpLocked(num uint32) (*qp, error) {
	i, ok := slices.BinarySearchFunc(f.mu.qps, num, func(q *qp, n uint32) int { return cmp.Compare(q.num, n) })
	if !ok {
		return nil, fmt.Errorf("sim: no open qp %d", num)
	}
	return f.mu.qps[i], nil
}

// Reset starts over with a new seed. Registered memory is zeroed; queues, CQs, counters and injected faults
// are cleared. QPs are ready again and crashed devices are back. Devices, MRs, QPs and listeners stay as they
// are open or closed. Nobody else may be using the fabric.
func (f *Fabric) Reset(seed uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.seedLocked(seed)
	for _, d := range f.mu.devices {
		d.crashed = false
	}
	for _, m := range f.mu.mrs {
		if m != nil {
			clear(m.bytes)
		}
	}
	for _, c := range f.mu.cqs {
		c.q, c.head = c.q[:0], 0
	}
	for _, q := range f.mu.qps {
		q.resetLocked()
	}
	f.mu.nextQP = 1
	if n := len(f.mu.qps); n > 0 {
		f.mu.nextQP = f.mu.qps[n-1].num + 1
	}
	f.mu.total = Counters{}
}

// Counters count what was posted. Doorbells are PostSend calls that took
// something: the round trips of a caller that waits after each. Bytes are
// payload.
type Counters struct {
	Doorbells  uint64
	Verbs      [driver.NumOpcodes]uint64
	ReadBytes  uint64
	WriteBytes uint64
}

func (c *Counters) count(w *driver.WR) {
	c.Verbs[w.Op]++
	switch w.Op {
	case driver.OpRead:
		c.ReadBytes += uint64(w.Len())
	case driver.OpWrite:
		c.WriteBytes += uint64(w.Len())
	}
}

// QPCounters are one QP's.
type QPCounters struct {
	Num uint32
	Counters
}

// Stats are a fabric's counters since New or Reset.
type Stats struct {
	Total Counters     // closed QPs included
	QPs   []QPCounters // open ones, by number
}

// Stats gives the counters so far.
func (f *Fabric) Stats() Stats {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := Stats{Total: f.mu.total, QPs: make([]QPCounters, len(f.mu.qps))}
	for i, q := range f.mu.qps {
		s.QPs[i] = QPCounters{q.num, q.count}
	}
	return s
}
