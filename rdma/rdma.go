// Package rdma is the portable verbs layer over one of several providers. It has protection domains, memory
// regions, queue pairs, completion queues, work requests and completions. Package driver is the contract that
// providers satisfy.
//
// It leaves moving bytes to the provider. It adds, once for all providers, what does not depend on one. It
// checks a WR's form, and counts doorbells, verbs and bytes. It turns a WC into an error that says whether
// the verb took effect.
//
// Start with [Device], [QP] and [WR]. Device, PD and MR may be used
// concurrently; a CQ and its QPs belong to one goroutine at a time. Local
// buffers belong to the provider from PostSend until their WC, or a later one of
// the same QP, has been polled.
//
// Names are those of the verbs specification (InfiniBand Architecture vol. 1,
// ch. 10-11; ibv_post_send(3)).
package rdma

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/cpu"

	"github.com/kvd-project/kvd/rdma/driver"
)

// Types shared with the providers.
type (
	Opcode       = driver.Opcode
	SendFlags    = driver.SendFlags
	WR           = driver.WR
	WC           = driver.WC
	Value        = driver.Value
	Status       = driver.Status
	Access       = driver.Access
	Caps         = driver.Caps
	Memory       = driver.Memory
	AllocOptions = driver.AllocOptions
	QPState      = driver.QPState
	AtomicFunc   = driver.AtomicFunc
	Mapping      = driver.Mapping
)

const (
	OpRead      = driver.OpRead
	OpWrite     = driver.OpWrite
	OpCmpAndSwp = driver.OpCmpAndSwp
	OpFetchAdd  = driver.OpFetchAdd

	Signaled = driver.Signaled
	Fence    = driver.Fence
	Inline   = driver.Inline
	IfHit    = driver.IfHit

	AccessRemoteRead   = driver.AccessRemoteRead
	AccessRemoteWrite  = driver.AccessRemoteWrite
	AccessRemoteAtomic = driver.AccessRemoteAtomic
	AccessLocal        = driver.AccessLocal
)

// StateErr is the QPState of a queue pair that has failed.
const StateErr = driver.StateErr

// LeastWholeBytes is a Caps.WholeBytes that every provider has.
const LeastWholeBytes = driver.LeastWholeBytes

// Errors of PostSend. They mean "not applied" for the WRs not taken.
var (
	ErrQueueFull = driver.ErrQueueFull
	ErrClosed    = driver.ErrClosed
	ErrQPError   = driver.ErrQPError
	ErrRefused   = driver.ErrRefused
	// ErrNotSupport is of calls for what a provider does not do.
	ErrNotSupport = driver.ErrNotSupport
	// ErrBadWR means a WR's form is wrong (a bug in the caller); nothing of the
	// PostSend was posted.
	ErrBadWR = errors.New("malformed work request")
)

// WCError is a failed completion.
type WCError struct {
	WC WC
}

func (e *WCError) Error() string {
	return fmt.Sprintf("%v wr=%d qp=%d: %v", e.WC.Op, e.WC.ID, e.WC.QPNum, e.WC.Status)
}

// Applied tells whether the verb took effect: No for a WR its target or the
// local checks refused, Unknown otherwise.
func (e *WCError) Applied() Outcome {
	switch e.WC.Status {
	case driver.Success:
		return Yes
	case driver.LocLenErr, driver.LocQPOpErr, driver.LocProtErr, driver.RemInvReqErr, driver.RemAccessErr:
		return No
	default:
		return Unknown
	}
}

// Outcome answers "did it happen?". The zero value has no meaning.
type Outcome uint8

const (
	Yes Outcome = 1 + iota
	No
	Unknown
)

func (o Outcome) String() string {
	return [...]string{"invalid", "happened", "did not happen", "unknown"}[min(int(o), 3)]
}

// Device is an opened provider.
type Device struct {
	name   string
	d      driver.Device
	caps   Caps
	regMR  atomic.Uint64
	passed error // as PassedOver
}

// NewDevice wraps a provider's device; name is the provider's ("tcp").
func NewDevice(name string, d driver.Device) *Device {
	return &Device{name: name, d: d, caps: d.Caps()}
}

// PassOver notes why a better provider was left out when d was opened in its place. It is called before d is used.
func (d *Device) PassOver(why error) { d.passed = why }

// PassedOver is what PassOver noted: nil if d is the best that there is, or nobody tried another one.
func (d *Device) PassedOver() error { return d.passed }

// Name is the provider's name, as NewDevice was told it.
func (d *Device) Name() string { return d.name }

// Caps never changes.
func (d *Device) Caps() Caps { return d.caps }

// Registrations is how many times memory was registered, MRs of this package's own included.
func (d *Device) Registrations() uint64 { return d.regMR.Load() }

// Driver gives the provider's own handle, for provider-specific tests and tools.
func (d *Device) Driver() driver.Device { return d.d }

// Alloc maps size bytes of zeroed memory suited for registration; the caller
// frees it after deregistering every MR over it.
func (d *Device) Alloc(size int64, o AllocOptions) (*Memory, error) {
	if size <= 0 {
		return nil, fmt.Errorf("%s: alloc %q: size %d bytes, want > 0", d.name, o.Name, size)
	}
	return d.d.Alloc(size, o)
}

// AllocPD makes a protection domain, which the caller gives back with Dealloc.
func (d *Device) AllocPD() (*PD, error) {
	p, err := d.d.AllocPD()
	if err != nil {
		return nil, fmt.Errorf("%s: alloc pd: %w", d.name, err)
	}
	return &PD{dev: d, d: p}, nil
}

// CreateCQ makes a completion queue for at least depth WCs.
func (d *Device) CreateCQ(depth int) (*CQ, error) {
	if depth <= 0 {
		return nil, fmt.Errorf("%s: create cq: depth %d, want > 0", d.name, depth)
	}
	c, err := d.d.CreateCQ(depth)
	if err != nil {
		return nil, fmt.Errorf("%s: create cq: %w", d.name, err)
	}
	w, _ := c.(driver.Waiter)
	if !takesValues(&d.caps) {
		c, w = &stagedCQ{CQ: c, of: make(map[uint16]*stagedQP)}, nil
	}
	return &CQ{d: c, w: w}, nil
}

// Dial connects a QP of pd, completing on cq, to the listener at addr.
func (d *Device) Dial(ctx context.Context, pd *PD, cq *CQ, addr string, private []byte) (*QP, error) {
	if len(private) > driver.MaxPrivate {
		return nil, fmt.Errorf("%s: dial %s: private data %d bytes, at most %d", d.name, addr, len(private),
			driver.MaxPrivate)
	}
	c, staged := cq.d, (*stagedCQ)(nil)
	if s, ok := c.(*stagedCQ); ok {
		c, staged = s.CQ, s
	}
	q, err := d.d.Dial(ctx, driver.DialRequest{PD: pd.d, CQ: c, Addr: addr, Private: private})
	if err != nil {
		return nil, fmt.Errorf("%s: dial %s: %w", d.name, addr, err)
	}
	if staged != nil {
		q = staged.add(pd, q)
	}
	return &QP{d: q, num: q.Num(), maxMsg: d.caps.MaxMsg, maxInline: d.caps.MaxInline,
		stops: d.caps.StopAtMiss}, nil
}

// ListenOptions configure the passive side; see driver.ListenOptions.
type ListenOptions struct {
	Accept func(ConnRequest) (*PD, Access, error)
	Closed func(driver.Peer)
}

// ConnRequest is what Accept decides on.
type ConnRequest = driver.ConnRequest

// Peer is the passive side's handle on one connection.
type Peer = driver.Peer

// Listener accepts connections.
type Listener = driver.Listener

// Listen serves this device's MRs to dialers.
func (d *Device) Listen(addr string, o ListenOptions) (Listener, error) {
	l, err := d.d.Listen(addr, driver.ListenOptions{
		Accept: func(r driver.ConnRequest) (driver.PD, driver.Access, error) {
			pd, a, err := o.Accept(r)
			if err != nil {
				return nil, 0, err
			}
			return pd.d, a, nil
		},
		Closed: o.Closed,
	})
	if err != nil {
		return nil, fmt.Errorf("%s: listen %s: %w", d.name, addr, err)
	}
	return l, nil
}

// Close releases the device; everything made from it must be closed before.
func (d *Device) Close() error { return d.d.Close() }

// PD is a protection domain: MRs and QPs of different PDs never meet.
type PD struct {
	dev    *Device
	d      driver.PD
	arenas arenas
	slabs  slabPool
}

// Device is the one the PD was made from.
func (p *PD) Device() *Device { return p.dev }

// RegMR registers n bytes of m from byte off. off is 8-byte aligned; off and n
// are bytes and must lie inside m.
func (p *PD) RegMR(m *Memory, off, n int64, a Access) (*MR, error) {
	if err := p.inside(m, off, n); err != nil {
		return nil, err
	}
	r, err := p.d.RegMR(m, off, n, a)
	return p.registered(r, m, off, n, err)
}

func (p *PD) registered(r driver.MR, m *Memory, off, n int64, err error) (*MR, error) {
	if err != nil {
		return nil, fmt.Errorf("%s: reg mr of %d bytes: %w", p.dev.name, n, err)
	}
	p.dev.regMR.Add(1)
	return &MR{d: r, bytes: m.Bytes[off : off+n : off+n]}, nil
}

// RegMRAs is RegMR with an rkey that an earlier process had for the same memory. It is ErrNotSupport
// without Caps.ChoosesKeys.
func (p *PD) RegMRAs(m *Memory, off, n int64, a Access, rkey uint64) (*MR, error) {
	if err := p.inside(m, off, n); err != nil {
		return nil, err
	}
	k, ok := p.d.(driver.KeyChooser)
	if !ok {
		return nil, fmt.Errorf("%s: reg mr with a given rkey: %w", p.dev.name, driver.ErrNotSupport)
	}
	r, err := k.RegMRAs(m, off, n, a, rkey)
	return p.registered(r, m, off, n, err)
}

// RegFunc registers a region of n bytes whose READs f performs in up to workers goroutines; see driver.FuncRegistrar.
// It is ErrNotSupport without Caps.Functions. The MR has no Bytes.
func (p *PD) RegFunc(n int64, workers int, f driver.ReadFunc) (*MR, error) {
	k, ok := p.d.(driver.FuncRegistrar)
	if !ok {
		return nil, fmt.Errorf("%s: reg function: %w", p.dev.name, driver.ErrNotSupport)
	}
	r, err := k.RegFunc(n, workers, f)
	if err != nil {
		return nil, fmt.Errorf("%s: reg function: %w", p.dev.name, err)
	}
	p.dev.regMR.Add(1)
	return &MR{d: r}, nil
}

func (p *PD) inside(m *Memory, off, n int64) error {
	if off < 0 || n <= 0 || off%8 != 0 || off > int64(len(m.Bytes)) || n > int64(len(m.Bytes))-off {
		return fmt.Errorf("%s: reg mr: bytes [%d,+%d) of %d: want 8-byte aligned and inside", p.dev.name, off, n,
			len(m.Bytes))
	}
	return nil
}

// LimitRate bounds how many verbs a second this side executes for all peers of the PD, 0: no bound; see
// driver.RateLimiter. It is ErrNotSupport if an adapter or the peers execute them.
func (p *PD) LimitRate(perSecond uint64) error {
	l, ok := p.d.(driver.RateLimiter)
	if !ok {
		return fmt.Errorf("%s: limit the rate of verbs: %w", p.dev.name, driver.ErrNotSupport)
	}
	l.LimitRate(perSecond)
	return nil
}

// Paced is how long peers of the PD have waited for LimitRate's bound, all together; false if there can be none.
func (p *PD) Paced() (time.Duration, bool) {
	l, ok := p.d.(driver.RateLimiter)
	if !ok {
		return 0, false
	}
	return l.Paced(), true
}

// Dealloc fails while MRs, Arenas or QPs of the PD remain.
func (p *PD) Dealloc() error {
	if n := len(p.arenas.all()); n > 0 {
		return fmt.Errorf("%s: dealloc pd: %d arenas remain", p.dev.name, n)
	}
	return p.d.Dealloc()
}

// MR is a registered memory region.
type MR struct {
	d     driver.MR
	bytes []byte
}

// LKey is the key for WR.LKey.
func (m *MR) LKey() uint64 { return m.d.LKey() }

// RKey is the key the owner hands to peers.
func (m *MR) RKey() uint64 { return m.d.RKey() }

// Base is the remote address of the first byte.
func (m *MR) Base() uint64 { return m.d.Base() }

// ProxyAtomics has f execute the atomics on the MR; see driver.AtomicProxier. It is
// ErrNotSupport if the device executes them.
func (m *MR) ProxyAtomics(f AtomicFunc) error {
	p, ok := m.d.(driver.AtomicProxier)
	if !ok {
		return driver.ErrNotSupport
	}
	p.ProxyAtomics(f)
	return nil
}

// Bytes is the registered memory itself.
func (m *MR) Bytes() []byte { return m.bytes }

// Deregister revokes the keys. Verbs that arrive later fail with RemAccessErr.
func (m *MR) Deregister() error { return m.d.Deregister() }

// CQ collects the completions of the QPs that were made with it.
type CQ struct {
	d driver.CQ
	w driver.Waiter // the provider's, or nil
}

// Poll fills wcs and never blocks.
func (c *CQ) Poll(wcs []WC) int { return c.d.Poll(wcs) }

// Ready receives when Poll may find something; see driver.CQ.
func (c *CQ) Ready() <-chan struct{} { return c.d.Ready() }

// CanWait says whether Wait may ever be of use.
func (c *CQ) CanWait() bool { return c.w != nil }

// Wait blocks the polling goroutine until Poll may find something, after Wake, or for d. It returns false, at
// once, if the provider cannot or would not: wait for Ready then. See driver.Waiter.
func (c *CQ) Wait(d time.Duration) bool { return c.w != nil && c.w.Wait(d) }

// Wake ends a Wait, the next one if none is under way. Any goroutine may call it.
func (c *CQ) Wake() {
	if c.w != nil {
		c.w.Wake()
	}
}

// Close releases the queue; its QPs must be closed before.
func (c *CQ) Close() error { return c.d.Close() }

// Counters count what a QP posted. They are plain words owned by the QP's
// goroutine; bytes are payload, without headers.
type Counters struct {
	// CopiedBytes are of Values that an adapter did not reach, since they lay in no Arena.
	CopiedBytes uint64

	Doorbells  uint64
	Verbs      [driver.NumOpcodes]uint64
	ReadBytes  uint64
	WriteBytes uint64
	Mapped     uint64 // mappings that Map has made
}

// Add accumulates o into c.
func (c *Counters) Add(o *Counters) {
	c.CopiedBytes += o.CopiedBytes
	c.Doorbells += o.Doorbells
	for i := range c.Verbs {
		c.Verbs[i] += o.Verbs[i]
	}
	c.ReadBytes += o.ReadBytes
	c.WriteBytes += o.WriteBytes
	c.Mapped += o.Mapped
}

// Total is the number of verbs of every kind.
func (c *Counters) Total() (n uint64) {
	for _, v := range c.Verbs {
		n += v
	}
	return n
}

// QP is a connected queue pair. It serves one goroutine at a time.
type QP struct {
	_         cpu.CacheLinePad // what an operation writes shares no cache line with what another processor uses
	d         driver.QP
	num       uint32
	maxMsg    int
	maxInline int
	stops     bool // Caps.StopAtMiss
	count     Counters

	_ cpu.CacheLinePad
}

// Num is the QP's number on its device, as in WC.QPNum.
func (q *QP) Num() uint32 { return q.num }

// Counters gives what was posted so far.
func (q *QP) Counters() Counters {
	c := q.count
	if s, ok := q.d.(*stagedQP); ok {
		c.CopiedBytes = s.copied()
	}
	return c
}

// State may be called from any goroutine.
func (q *QP) State() QPState { return q.d.State() }

// Close flushes and disconnects; see driver.QP.
func (q *QP) Close() error { return q.d.Close() }

// Abort is Close for a peer whose memory has been given up. It does not wait for a confirmation that nothing
// can land there any more.
func (q *QP) Abort() error {
	if a, ok := q.d.(driver.Aborter); ok {
		return a.Abort()
	}
	return q.d.Close()
}

// AtomicsByAgent tells whether this connection's atomics are messages that the
// memory node's CPU answers.
func (q *QP) AtomicsByAgent() bool {
	a, ok := q.d.(driver.AgentAtomics)
	return ok && a.AtomicsByAgent()
}

// Map shows remote memory without READs; see driver.Mapper. It is ErrNotSupport without Caps.Maps.
func (q *QP) Map(rkey, addr uint64, n int) (*Mapping, error) {
	d, ok := q.d.(driver.Mapper)
	if !ok {
		return nil, driver.ErrNotSupport
	}
	m, made, err := d.Map(rkey, addr, n)
	if made {
		q.count.Mapped++
	}
	return m, err
}

// PostSend posts wrs behind one doorbell and returns how many were taken; see
// driver.QP. A malformed WR refuses the whole call with ErrBadWR.
func (q *QP) PostSend(wrs []WR) (int, error) {
	for i := range wrs {
		if w := &wrs[i]; !q.formed(w) || w.Value != nil && !w.Value.Formed(w, q.maxMsg) {
			return 0, q.badWR(w)
		}
	}
	n, err := q.d.PostSend(wrs)
	if n > 0 {
		q.count.Doorbells++
		for i := range wrs[:n] {
			w := &wrs[i]
			q.count.Verbs[w.Op]++
			switch w.Op {
			case OpRead:
				q.count.ReadBytes += uint64(w.Len())
			case OpWrite:
				q.count.WriteBytes += uint64(w.Len())
			}
		}
	}
	return n, err
}

// formed checks what every device refuses without looking at its tables:
// ibv_post_send(3) answers EINVAL for these. Values are checked besides.
func (q *QP) formed(w *WR) bool {
	n := len(w.Local)
	if w.Flags&IfHit != 0 && (w.Op != OpCmpAndSwp || !q.stops) {
		return false
	}
	switch w.Op {
	case OpRead:
		return n > 0 && n <= q.maxMsg && w.Flags&Inline == 0
	case OpWrite:
		return n > 0 && n <= q.maxMsg && (w.Flags&Inline == 0 || n <= q.maxInline)
	case OpCmpAndSwp, OpFetchAdd:
		return n == 8 && w.Flags&Inline == 0 &&
			(uint64(uintptr(unsafe.Pointer(unsafe.SliceData(w.Local))))|w.RemoteAddr)%8 == 0
	}
	return false
}

func (q *QP) badWR(w *WR) error {
	return fmt.Errorf("%w: %v of %d bytes at %#x flags %#x (message at most %d, inline at most %d; atomics are 8 "+
		"aligned bytes; IfHit %t)",
		ErrBadWR, w.Op, w.Len(), w.RemoteAddr, w.Flags, q.maxMsg, q.maxInline, q.stops)
}
