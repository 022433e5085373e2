package shm

import (
	"encoding/binary"
	"errors"
	"net"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/cpu"

	"github.com/kvd-project/kvd/rdma/driver"
)

// localMR is what the hot path knows of a local MR.
type localMR struct {
	lkey uint64
	lo   uintptr
	n    uintptr
}

// remoteMR is what it knows of a remote one. rkey 0, which no MR has, marks a
// free entry, whose n of 0 refuses everything.
type remoteMR struct {
	rkey   uint64
	base   unsafe.Pointer // first byte, in mapping
	n      uint64
	access driver.Access
	slot   uint32
	gen    uint64
	m      *mapping
	shown  *mapping // for reading alone, see Map; nil: not asked for yet
}

const localCache = 8 // a power of two; LKeys are consecutive numbers

// QP is the dialer's end of a connection. Fields from seq on belong to the
// goroutine that posts.
type QP struct {
	_     cpu.CacheLinePad // what an operation writes shares no cache line with what another processor uses
	cell  *cell
	table []uint64 // the passive device's mrTable
	d     *Device
	pd    *PD
	cq    *CQ
	num   uint32
	state atomic.Uint32 // driver.QPState

	// seq is what the cell's should be: odd inside PostSend. Close goes by it, and not by the cell, which the memory
	// node can write, too.
	seq    uint64
	fence  uint64              // for barrier
	hit    bool                // the latest CMP_AND_SWP took effect
	deregs uint64              // Device.deregs when local was filled
	lines  [primeLines]uintptr // of prime
	epoch  uint64              // table[0] when remote was checked
	local  [localCache]localMR
	// remote is an open-addressed hash table, at most a quarter full: rkeys are
	// random, so their low bits are the hash and the first probe nearly always
	// finds.
	remote  []remoteMR
	remotes int

	conn    *net.UnixConn
	lastReq uint32
	// asks is the operation whose requests end at askUntil: a PostSend waits once, however many rkeys it asks for.
	asks     uint64
	askUntil time.Time
	answers  chan answer   // capacity 1; from the reader
	gone     chan struct{} // closed when the reader has ended
	closing  sync.Once
	// held are the mappings behind table and each entry of remote; guarded by
	// Device.mu, because Close releases them on any goroutine.
	held []*mapping

	_ cpu.CacheLinePad
}

// Num implements driver.QP.
func (q *QP) Num() uint32 { return q.num }

// State implements driver.QP.
func (q *QP) State() driver.QPState {
	defer runtime.KeepAlive(q) // and so the cell
	if atomic.LoadUint64(&q.cell.barred) != 0 {
		q.fail() // fenced, and the socket has not said so yet; for ever, even if the memory node takes the bar away
	}
	return driver.QPState(q.state.Load())
}

// fail moves the QP to error; later posts are refused.
func (q *QP) fail() {
	q.state.CompareAndSwap(uint32(driver.StateRTS), uint32(driver.StateErr))
	q.cell.bar()
	runtime.KeepAlive(q) // and so the cell
}

// PostSend implements driver.QP. It executes wrs before it returns. It makes no
// system call, except on the first use of an rkey, which asks the memory node's
// process and waits for at most Options.RequestTimeout.
func (q *QP) PostSend(wrs []driver.WR) (int, error) {
	cq := q.cq
	n, err := len(wrs), error(nil)
	if pending := int(cq.tail - cq.head); pending+n > maxSendWR || pending+n > len(cq.ring) {
		n, err = q.reserve(n)
	}
	c, seq := q.cell, q.seq
	setSeq(&q.seq, seq+1)
	if !c.beginOp(seq) || q.state.Load() != uint32(driver.StateRTS) {
		c.endOp(seq)
		setSeq(&q.seq, seq+2)
		return 0, q.refusal()
	}
	if q.d.deregs.Load() != q.deregs {
		q.forgetLocal()
	}
	if atomic.LoadUint64(&q.table[0]) != q.epoch {
		q.recheckRemote()
	}
	if n >= primeChain {
		q.prime(wrs[:n])
	}
	tail := cq.tail
	wrote := false // a WRITE of this chain may still be in the store buffer
	for i := range wrs[:n] {
		w := &wrs[i]
		size := uintptr(len(w.Local))
		local := unsafe.Pointer(unsafe.SliceData(w.Local))
		var remote unsafe.Pointer
		status := driver.Success

		l := &q.local[w.LKey%localCache]
		r := &q.remote[w.RKey&uint64(len(q.remote)-1)]
		at := uintptr(local) - l.lo
		if l.lkey == w.LKey && at <= l.n && size <= l.n-at && r.rkey == w.RKey &&
			w.RemoteAddr <= r.n && uint64(size) <= r.n-w.RemoteAddr &&
			w.Op < driver.NumOpcodes && r.access&access[w.Op] != 0 &&
			size-1 < wordLoopBytes && w.Value == nil {
			remote = unsafe.Add(r.base, w.RemoteAddr)
		} else if remote, status = q.check(w); w.Value != nil && status == driver.Success {
			status, wrote = q.move(w, remote, wrote)
			remote = nil
		}
		if !tso && i > 0 {
			barrier(&q.fence)
		}
		if remote != nil {
			switch w.Op {
			case driver.OpRead:
				if wrote {
					barrier(&q.fence)
					wrote = false
				}
				load(local, remote, size)
			case driver.OpWrite:
				if size == 8 && uintptr(remote)&7 == 0 {
					atomic.StoreUint64((*uint64)(remote), binary.NativeEndian.Uint64(w.Local))
				} else {
					store(remote, local, size)
					wrote = true
				}
			default:
				status = q.atomically(w, remote)
				wrote = false // an atomic instruction drains the store buffer; without tso there are barriers
			}
		}
		if w.Flags&driver.Signaled == 0 && status == driver.Success {
			continue
		}
		cq.push(driver.WC{ID: w.ID, QPNum: q.num, Op: w.Op, Status: status})
		if status != driver.Success {
			q.fail()
			for _, w := range wrs[i+1 : n] {
				cq.push(driver.WC{ID: w.ID, QPNum: q.num, Op: w.Op, Status: driver.WRFlushErr})
			}
			break
		}
	}
	c.endOp(seq)
	setSeq(&q.seq, seq+2)
	if cq.tail != tail {
		cq.signal()
	}
	return n, err
}

const (
	// primeChain is how many WRs are worth a prime.
	primeChain = 4
	// primeBytes is how much of a range prime names: the processor sees by itself that a longer one is read on.
	primeBytes = 256
	primeLines = 128
	lineBytes  = 64
)

// prime names the cache lines that the chain is about to use to the processor, which waits for all of them at once
// then, and not in each WR anew. A line that will be written to is asked for as such: if another processor wrote to it
// last, as to a slot or to a place that is used again, to read it first would be half of the way. It leaves alone what
// the fast path would not like.
func (q *QP) prime(wrs []driver.WR) {
	n := 0
	for i := range wrs {
		w := &wrs[i]
		size := uint64(len(w.Local))
		r := &q.remote[w.RKey&uint64(len(q.remote)-1)]
		if r.rkey != w.RKey || size == 0 || w.RemoteAddr > r.n || size > r.n-w.RemoteAddr {
			continue
		}
		first := uintptr(r.base) + uintptr(w.RemoteAddr)
		last := first + uintptr(min(size, primeBytes)) - 1
		write := uintptr(0)
		if w.Op != driver.OpRead {
			write = 1
		}
		for p := first &^ (lineBytes - 1); p <= last && n < primeLines; p += lineBytes {
			q.lines[n] = p | write
			n++
		}
	}
	prefetch(&q.lines[0], n)
}

// atomically executes an atomic whose bounds and rights have been checked.
func (q *QP) atomically(w *driver.WR, remote unsafe.Pointer) driver.Status {
	if len(w.Local) != 8 {
		return driver.LocQPOpErr
	}
	if uintptr(remote)&7 != 0 {
		return driver.RemInvReqErr
	}
	p, found, ok := (*uint64)(remote), uint64(0), false
	switch {
	case w.Op != driver.OpCmpAndSwp:
		found = atomic.AddUint64(p, w.Swap) - w.Swap
	case w.Flags&driver.IfHit != 0 && !q.hit:
		found = ^w.Compare
	default:
		if found, ok = compareAndSwap(p, w.Compare, w.Swap); !ok {
			return driver.RemOpErr
		}
		q.hit = found == w.Compare
	}
	binary.NativeEndian.PutUint64(w.Local, found)
	return driver.Success
}

// reserve makes room in the CQ for a chain of n WRs, each of which may complete,
// and returns how many of them the QP may take.
func (q *QP) reserve(n int) (int, error) {
	// WCs of other QPs on the CQ do not count.
	if int(q.cq.tail-q.cq.head)+n > maxSendWR {
		if room := maxSendWR - q.cq.count(q.num); room < n {
			q.cq.reserve(room)
			return room, driver.ErrQueueFull
		}
	}
	q.cq.reserve(n)
	return n, nil
}

// refusal says why the cell is barred.
func (q *QP) refusal() error {
	q.fail()
	if driver.QPState(q.state.Load()) == driver.StateClosed {
		return driver.ErrClosed
	}
	return driver.ErrQPError
}

// check is PostSend's slow path: keys not seen yet, long messages, and the
// status of whatever the fast path did not like. It returns where the remote
// bytes are mapped.
func (q *QP) check(w *driver.WR) (unsafe.Pointer, driver.Status) {
	size := w.Len()
	switch {
	case w.Op == 0 || w.Op >= driver.NumOpcodes || len(w.Local) == 0:
		return nil, driver.LocQPOpErr
	case size > maxMsg:
		return nil, driver.LocLenErr
	case w.Value != nil && !w.Value.Formed(w, maxMsg):
		return nil, driver.LocQPOpErr
	case w.Flags&driver.Inline != 0 && (w.Op != driver.OpWrite || size > maxInline):
		return nil, driver.LocQPOpErr
	case w.Flags&driver.Inline == 0 && !q.findLocal(w):
		return nil, driver.LocProtErr
	case size > wordLoopBytes && (atomic.LoadUint64(&q.cell.barred) != 0 || q.state.Load() != uint32(driver.StateRTS)):
		return nil, driver.WRFlushErr // a fence need not wait for the whole chain
	}
	r, status := q.findRemote(w.RKey)
	if status != driver.Success {
		return nil, status
	}
	if w.RemoteAddr > r.n || uint64(size) > r.n-w.RemoteAddr || r.access&access[w.Op] == 0 {
		return nil, driver.RemAccessErr
	}
	return unsafe.Add(r.base, w.RemoteAddr), driver.Success
}

// findLocal tells whether w.Local lies inside the MR of w.LKey, and remembers
// that MR.
func (q *QP) findLocal(w *driver.WR) bool {
	l := &q.local[w.LKey%localCache]
	if l.lkey != w.LKey || l.lkey == 0 {
		q.d.mu.Lock()
		m := q.d.mu.lkeys[w.LKey]
		q.d.mu.Unlock()
		if m == nil || m.pd != q.pd {
			return false
		}
		*l = localMR{lkey: w.LKey, lo: uintptr(unsafe.Pointer(unsafe.SliceData(m.bytes))), n: uintptr(len(m.bytes))}
	}
	at := uintptr(unsafe.Pointer(unsafe.SliceData(w.Local))) - l.lo
	return at <= l.n && uintptr(len(w.Local)) <= l.n-at
}

// forgetLocal drops the local cache after some MR of the device has gone.
func (q *QP) forgetLocal() {
	q.deregs = q.d.deregs.Load()
	q.local = [localCache]localMR{}
}

// findRemote gives the entry of rkey, asking the passive side on first use.
func (q *QP) findRemote(rkey uint64) (*remoteMR, driver.Status) {
	if rkey == 0 {
		return nil, driver.RemAccessErr
	}
	if r := probe(q.remote, rkey); r.rkey == rkey {
		return r, driver.Success
	}
	m, status := q.resolve(rkey)
	if status != driver.Success {
		return nil, status
	}
	q.remotes++
	q.rebuildRemote(m)
	return probe(q.remote, rkey), driver.Success
}

// probe finds rkey's entry or the free one where it belongs.
func probe(t []remoteMR, rkey uint64) *remoteMR {
	for i := rkey; ; i++ {
		if r := &t[i&uint64(len(t)-1)]; r.rkey == rkey || r.rkey == 0 {
			return r
		}
	}
}

// rebuildRemote makes a table of the present entries and more.
func (q *QP) rebuildRemote(more ...remoteMR) {
	size := 16
	for size < 4*q.remotes {
		size *= 2
	}
	t := make([]remoteMR, size)
	for _, r := range append(more, q.remote...) {
		if r.rkey != 0 {
			*probe(t, r.rkey) = r
		}
	}
	q.remote = t
}

// recheckRemote forgets the MRs that the passive side has deregistered. Rkeys
// never come back, so the next use of one asks and is refused.
func (q *QP) recheckRemote() {
	// Before the generations, which change first: at worst we look twice.
	q.epoch = atomic.LoadUint64(&q.table[0])
	dead := 0
	for i := range q.remote {
		if r := &q.remote[i]; r.rkey != 0 && atomic.LoadUint64(&q.table[r.slot]) != r.gen {
			q.release(r.m)
			if r.shown != nil && r.shown != hidden {
				q.release(r.shown)
			}
			*r = remoteMR{}
			dead++
		}
	}
	if dead > 0 {
		q.remotes -= dead
		q.rebuildRemote() // probe chains must have no holes
	}
}

// resolve asks the passive side for an rkey, once per rkey and QP, and maps what it may use.
func (q *QP) resolve(rkey uint64) (remoteMR, driver.Status) {
	a, status := q.ask(rkey)
	if status != driver.Success {
		return remoteMR{}, status
	}
	defer a.close()
	m, err := q.hold(a.fd, a.fileBytes, writable(a.access))
	if err != nil {
		return remoteMR{}, driver.GeneralErr
	}
	return remoteMR{rkey: rkey, base: unsafe.Pointer(&m.bytes[a.off]), n: a.n,
		access: a.access, slot: a.slot, gen: a.gen, m: m}, driver.Success
}

// ask is one request to the passive side. Of an answer that is a success the caller closes the descriptor.
func (q *QP) ask(rkey uint64) (answer, driver.Status) {
	q.lastReq++
	if q.asks != q.seq {
		q.asks, q.askUntil = q.seq, time.Now().Add(q.d.o.RequestTimeout)
	}
	t := time.NewTimer(time.Until(q.askUntil))
	defer t.Stop()
	_ = q.conn.SetWriteDeadline(q.askUntil)
	if _, err := q.conn.Write(request{id: q.lastReq, rkey: rkey}.encode()); errors.Is(err, os.ErrDeadlineExceeded) {
		return answer{}, driver.RetryExcErr
	} else if err != nil {
		return answer{}, driver.WRFlushErr
	}
	var a answer
	select {
	case a = <-q.answers:
	case <-q.gone:
		return answer{}, driver.WRFlushErr
	case <-t.C:
		return answer{}, driver.RetryExcErr
	}
	if a.id != q.lastReq {
		a.close()
		return answer{}, driver.GeneralErr
	}
	if a.status != driver.Success {
		a.close()
		return answer{}, a.status
	}
	return a, driver.Success
}

// hold maps a memfd of the passive side until release or Close.
func (q *QP) hold(fd int, size uint64, writable bool) (*mapping, error) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	m, err := q.d.mapLocked(fd, int64(size), writable)
	if err == nil {
		q.held = append(q.held, m)
	}
	return m, err
}

func (q *QP) release(m *mapping) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	i := slices.Index(q.held, m)
	q.held = slices.Delete(q.held, i, i+1)
	q.d.unmapLocked(m)
}

// read hands the passive side's answers to resolve until the socket ends, which
// is how a dialer learns that its memory node has fenced it or died.
func (q *QP) read() {
	defer close(q.gone)
	for {
		a, err := readAnswer(q.conn, len(q.table))
		if err != nil {
			break
		}
		select {
		case q.answers <- a:
			continue
		default: // more answers than questions
			a.close()
		}
		break
	}
	q.fail()
	_ = q.conn.Close()
	q.cq.signal()
}

// Close implements driver.QP.
func (q *QP) Close() error {
	q.closing.Do(func() {
		q.state.Store(uint32(driver.StateClosed))
		q.cell.bar()
		_ = q.conn.Close()
		<-q.gone
		// PostSend of another goroutine ends soon: nothing in it waits for the memory node any more.
		for i := 0; atomic.LoadUint64(&q.seq)&1 != 0; i++ {
			if i < 100 {
				runtime.Gosched()
			} else {
				time.Sleep(100 * time.Microsecond)
			}
		}
		// The owner may still enter the cell, which stays mapped as long as
		// the QP can be reached, but is turned away there.
		select {
		case a := <-q.answers:
			a.close()
		default:
		}
		q.d.mu.Lock()
		for _, m := range q.held {
			q.d.unmapLocked(m)
		}
		q.held = nil
		q.d.mu.qps--
		q.pd.qps--
		q.cq.qps--
		q.d.mu.Unlock()
	})
	return nil
}
