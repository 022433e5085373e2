package tcp

import (
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kvd-project/kvd/rdma/driver"
)

const (
	// copyMax is the largest WRITE payload copied into the doorbell, bytes; a
	// larger one is sent from the caller's buffer.
	copyMax = 16 << 10
	// stageMax is how much of a doorbell is copied before payloads are sent from
	// the caller's buffers, bytes. It bounds what a QP keeps for reuse.
	stageMax = 256 << 10
	// writePiece bounds one write, so that a slow but
	// live network shows progress; bytes. A value of 256 KiB is one.
	writePiece = 264 << 10
	// turnMax is about how much of long payloads is read from one connection of a CQ before the others have their turn,
	// bytes.
	turnMax = 256 << 10
	// readBuf is the size of the reply reader's buffer; what is left of a longer
	// payload is read straight into Local.
	readBuf = 32 << 10
	// doorbellCharge stands for what the kernel spends on one small segment in a
	// socket's send buffer, bytes.
	doorbellCharge = 2 << 10
)

// ErrUnconfirmed means that a closed QP's memory node did not confirm that it has stopped. Verbs that were
// posted and have not completed may still land, until the memory node fences the connection.
var ErrUnconfirmed = errors.New("memory node did not confirm the end of the connection")

// stream is the TCP connection below TLS, or an imitation in tests.
type stream interface {
	net.Conn
	CloseWrite() error
}

// qp is the posting side of a connection.
//
// PostSend writes a doorbell itself, payloads and all, when everything not yet answered, plus this
// doorbell, fits into half the socket's send buffer: then write(2) has no reason
// to wait. Otherwise a goroutine that lives while there is something to write
// takes the doorbell over. The goroutine that reads replies, see wait.go, waits for nobody but the
// network, so the memory node can always hand in its replies and go on reading requests,
// no matter how much is under way in both directions.
type qp struct {
	// Set before anybody else has the QP.
	num    uint32   // unique in its device
	d      *device  // whose mu guards the QP's place in it
	pd     *pd      // whose keys WRs may name
	cq     *cq      // takes its completions, and perhaps reads its socket
	nc     stream   // the connection; any goroutine may close it
	sock   *sock    // nc, if that is TCP
	conn   net.Conn // nc, or TLS over it
	budget int64    // bytes that a direct write may have outstanding

	// Read by anybody.
	state     atomic.Uint32 // driver.QPState; from RTS on to Err or Closed, never back to RTS
	posted    atomic.Uint64 // WRs posted; stored under mu
	unreplied atomic.Int64  // bytes, by sqe.charge: PostSend adds, the reader takes away
	progress  atomic.Uint64 // counts reads and background writes

	// sq holds the WRs between polled and posted, at their number modulo its
	// length. PostSend fills an entry before it raises posted; the reader has it
	// until its WC is polled.
	sq     []sqe
	polled uint64 // WRs whose WC, or a later one, was polled; the lane's

	// Shared by PostSend and the background writer.
	mu struct {
		sync.Mutex
		stage *doorbell   // the next PostSend's, empty between two
		queue []*doorbell // for the background writer, in order
		free  []*doorbell // empty, for stage; at most four
		busy  bool        // the background writer runs, or has failed: nothing is written directly
	}
	writers sync.WaitGroup // the background writer; waited for before buffers are the caller's again

	by readBy // guarded by cq.own

	// The reader's: who that is, see wait.go.
	buf    []byte       // unread bytes lie in [r,w)
	r, w   int          // at most len(buf)
	done   uint64       // WRs answered
	midway bool         // within the payload of the reply to WR done
	rest   []byte       // of its Local, not filled yet
	into   filling      // of its Value, while midway
	turn   int          // bytes of long payloads that it may still take in, if detached
	batch  []completion // not pushed to the CQ yet
	repaid int64        // bytes of unreplied to give back

	// The end.
	gone      chan struct{} // closed when the last WR has completed
	confirmed bool          // the agent said that it executes nothing more; valid after gone
	closing   sync.Once     // runs close
	aborted   atomic.Bool   // Abort was called
	closeErr  error         // of closing, for every Close

	// The watch timer's, under d.mu.
	seen  uint64 // progress at the last tick that saw any
	stale int    // ticks without progress since
}

// sqe is a posted WR.
type sqe struct {
	id       uint64
	local    []byte        // where READs and atomics put their answer; nil otherwise
	value    *driver.Value // and a READ what is behind local's
	charge   int64
	op       driver.Opcode
	wire     driver.Opcode
	refused  driver.Status // by this side, or 0
	signaled bool
	half     half
}

// doorbell is the encoded form of one PostSend: staged bytes with references to
// large payloads in between.
type doorbell struct {
	staged []byte
	refs   []payload
	sent   int // bytes of staged that were written, up to the first of refs at most

	// While it is written: pieces, of gathered bytes, make the next write, of which rest is to come.
	pieces, rest net.Buffers
	gathered     int
}

// clear makes b empty; its memory stays.
func (b *doorbell) clear() {
	for i := range b.refs {
		if x := b.refs[i].block; x != nil {
			blocks.Put(x)
		}
	}
	clear(b.refs)
	b.staged, b.refs, b.sent = b.staged[:0], b.refs[:0], 0
}

type payload struct {
	at    int // offset in staged that the payload precedes
	data  []byte
	block *block // that data lies in, or nil
}

var _ driver.QP = (*qp)(nil)

func newQP(d *device, pd *pd, cq *cq, nc stream, conn net.Conn, budget int64) *qp {
	q := &qp{d: d, pd: pd, cq: cq, nc: nc, conn: conn, budget: budget,
		sq:  make([]sqe, maxSendWR),
		buf: make([]byte, readBuf), gone: make(chan struct{})}
	q.sock, _ = nc.(*sock)
	q.batch = make([]completion, 0, 64)
	q.mu.stage = &doorbell{}
	q.state.Store(uint32(driver.StateRTS))
	return q
}

func (q *qp) Num() uint32           { return q.num }
func (q *qp) State() driver.QPState { return driver.QPState(q.state.Load()) }

func (q *qp) PostSend(wrs []driver.WR) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch q.State() {
	case driver.StateErr:
		return 0, driver.ErrQPError
	case driver.StateClosed:
		return 0, driver.ErrClosed
	}
	posted := q.posted.Load()
	n, err := len(wrs), error(nil)
	if room := maxSendWR - int(posted-q.polled); 2*n > room {
		if n = fitting(wrs, room); n < len(wrs) {
			err = driver.ErrQueueFull
		}
	}
	if n == 0 {
		return 0, err
	}
	x, ok := q.encodeLocked(wrs[:n], posted)
	outstanding := q.post(&x)
	if !ok {
		q.state.CompareAndSwap(uint32(driver.StateRTS), uint32(driver.StateErr))
	}
	b := q.mu.stage
	if !q.mu.busy {
		direct := outstanding <= q.budget
		werr := x.failed
		switch {
		case werr != nil:
		case direct:
			werr = q.writeOut(b)
		case x.begun:
			direct, werr = q.writeNow(b)
		}
		if werr != nil {
			q.writeFailed()
		}
		if direct || werr != nil {
			b.clear()
			return n, err
		}
	}
	q.mu.queue = append(q.mu.queue, b)
	q.mu.stage = &doorbell{}
	if k := len(q.mu.free); k > 0 {
		q.mu.stage, q.mu.free = q.mu.free[k-1], q.mu.free[:k-1]
	}
	if !q.mu.busy {
		q.mu.busy = true
		q.writers.Add(1)
		go q.drain()
	}
	return n, err
}

// post lets the reader see what is encoded, and returns the bytes that are outstanding.
func (q *qp) post(x *encoder) (outstanding int64) {
	q.posted.Store(x.number)
	outstanding = q.unreplied.Add(x.charge)
	x.charge = 0
	return outstanding
}

// encodeLocked fills the stage and the send queue from number on. It reports false if a WR was refused by this side;
// that one and those behind it are not sent. Long Values leave as they are encoded.
func (q *qp) encodeLocked(wrs []driver.WR, number uint64) (x encoder, ok bool) {
	b := q.mu.stage
	x = encoder{b: b, number: number, charge: doorbellCharge}
	ok = true
	local := localKeys{table: q.pd.keys.Load()}
	for i := range wrs {
		w := &wrs[i]
		e := &q.sq[x.number%maxSendWR]
		x.number++
		*e = sqe{id: w.ID, op: w.Op, wire: w.Op, signaled: w.Flags&driver.Signaled != 0}
		if i == 0 {
			e.charge = doorbellCharge
		}
		if !ok {
			continue
		}
		r := request{op: w.Op, ifHit: w.Flags&driver.IfHit != 0, length: len(w.Local), rkey: w.RKey, addr: w.RemoteAddr}
		if e.refused = q.check(w, &local); e.refused != 0 {
			ok = false
			e.wire, r = opAbort, request{op: opAbort}
		} else if w.Value != nil {
			if w.Op == driver.OpRead {
				e.value, r.length = w.Value, w.Len()
			} else {
				second := &q.sq[x.number%maxSendWR]
				*second = *e
				second.charge, second.half = 0, secondHalf
				e.signaled, e.half = false, firstHalf
				x.value(q, e, w)
				x.number++
				e = second
			}
		}
		x.request(e, r)
		switch r.op {
		case driver.OpRead:
			e.local = w.Local
		case driver.OpWrite:
			if w.Flags&driver.Inline == 0 && (r.length > copyMax || len(b.staged)+r.length > stageMax) {
				b.refs = append(b.refs, payload{at: len(b.staged), data: w.Local})
			} else {
				b.staged = append(b.staged, w.Local...)
			}
		case driver.OpCmpAndSwp:
			e.local = w.Local
			b.staged = appendWord(appendWord(b.staged, w.Compare), w.Swap)
		case driver.OpFetchAdd:
			e.local = w.Local
			b.staged = appendWord(b.staged, w.Swap)
		}
	}
	x.close()
	return x, ok
}

// encoder appends requests to a doorbell.
type encoder struct {
	b      *doorbell
	f      frame  // the one that is being filled
	head   int    // where it begins
	number uint64 // of the next entry of the send queue
	charge int64  // of what was not posted yet

	begun  bool  // a part of the doorbell was written
	failed error // of that
}

// close ends the frame that is being filled, if there is one.
func (x *encoder) close() {
	if x.f.count > 0 {
		putFrame(x.b.staged[x.head:], x.f)
	}
	x.f = frame{}
}

// request appends r, without operands and payload, in a new frame if need be.
func (x *encoder) request(e *sqe, r request) {
	size := requestSize + r.operands()
	e.charge += int64(size)
	x.charge += int64(size)
	if x.f.count == 0 || x.f.length+size > maxFrame {
		x.close()
		x.head = len(x.b.staged)
		x.b.staged = append(x.b.staged, make([]byte, frameSize)...)
	}
	x.f.count++
	x.f.length += size
	x.b.staged = appendRequest(x.b.staged, r)
}

// localKeys looks up lkeys; the WRs of a doorbell mostly name the same one.
type localKeys struct {
	table *keyTable
	lkey  uint64
	mr    *mr // of lkey; nil: nothing was looked up
}

func (k *localKeys) of(lkey uint64) *mr {
	if k.mr == nil || k.lkey != lkey {
		k.lkey, k.mr = lkey, k.table.byLKey[lkey]
	}
	return k.mr
}

// check is the part of a WR's refusal that an RNIC does by itself.
func (q *qp) check(w *driver.WR, keys *localKeys) driver.Status {
	switch w.Op {
	case driver.OpRead, driver.OpWrite:
		if w.Len() > maxMsg {
			return driver.LocLenErr
		}
		if w.Flags&driver.IfHit != 0 || len(w.Local) == 0 || w.Value != nil && !w.Value.Formed(w, maxMsg) {
			return driver.LocQPOpErr
		}
	case driver.OpCmpAndSwp, driver.OpFetchAdd:
		if w.Flags&driver.IfHit != 0 && w.Op == driver.OpFetchAdd {
			return driver.LocQPOpErr
		}
		if len(w.Local) != 8 || w.Value != nil || uintptr(unsafe.Pointer(unsafe.SliceData(w.Local)))%8 != 0 {
			return driver.LocQPOpErr
		}
	default:
		return driver.LocQPOpErr
	}
	if w.Flags&driver.Inline != 0 {
		if w.Op != driver.OpWrite || len(w.Local) > maxInline {
			return driver.LocQPOpErr
		}
		return 0 // copied now: ibv_post_send(3) looks at no lkey either
	}
	if r := keys.of(w.LKey); r == nil || !r.covers(w.Local) {
		return driver.LocProtErr
	}
	return 0
}

// breakConn ends the connection; the reader notices and flushes.
func (q *qp) breakConn() {
	_ = q.nc.Close()
}

// writeFailed leaves the connection to Close if that is why.
func (q *qp) writeFailed() {
	if q.State() != driver.StateClosed {
		q.breakConn()
	}
}

// drain writes queued doorbells until there are none.
func (q *qp) drain() {
	defer q.writers.Done()
	var last *doorbell
	for {
		q.mu.Lock()
		if last != nil {
			last.clear()
			if len(q.mu.free) < 4 && cap(last.staged) <= 2*stageMax {
				q.mu.free = append(q.mu.free, last)
			}
		}
		if len(q.mu.queue) == 0 {
			q.mu.busy = false
			q.mu.Unlock()
			return
		}
		last = q.mu.queue[0]
		q.mu.queue[0] = nil
		q.mu.queue = q.mu.queue[1:]
		q.mu.Unlock()
		if err := q.writeOut(last); err != nil {
			// busy stays true: nothing is written any more.
			q.writeFailed()
			return
		}
	}
}

// writeOut writes a doorbell, what is staged and the payloads in between together, in writes
// of writePiece.
func (q *qp) writeOut(b *doorbell) error {
	if len(b.refs) == 0 && len(b.staged) <= writePiece {
		_, err := q.conn.Write(b.staged[b.sent:])
		return err
	}
	at := b.sent
	for _, p := range b.refs {
		if err := q.gather(b, b.staged[at:p.at]); err != nil {
			return err
		}
		at = p.at
		if err := q.gather(b, p.data); err != nil {
			return err
		}
	}
	if err := q.gather(b, b.staged[at:]); err != nil {
		return err
	}
	return q.writeGathered(b)
}

// writeNow writes what a detached connection has room for of a doorbell. It reports whether that was all.
func (q *qp) writeNow(b *doorbell) (all bool, err error) {
	for {
		pieces, n := b.pieces[:0], 0
		add := func(p []byte) {
			if p = p[:min(len(p), writePiece-n)]; len(p) > 0 {
				pieces, n = append(pieces, p), n+len(p)
			}
		}
		at := b.sent
		for _, p := range b.refs {
			add(b.staged[at:p.at])
			add(p.data)
			if at = p.at; n == writePiece {
				break
			}
		}
		add(b.staged[at:])
		b.pieces = pieces
		if n == 0 {
			return true, nil
		}
		wrote, err := q.sock.writeSome(pieces)
		clear(b.pieces)
		b.advance(wrote)
		if wrote > 0 {
			q.progress.Add(1)
		}
		if wrote < n || err != nil {
			return false, err
		}
	}
}

// advance forgets the first n bytes that are to be written.
func (b *doorbell) advance(n int) {
	for done := 0; ; done++ {
		end := len(b.staged)
		if done < len(b.refs) {
			end = b.refs[done].at
		}
		k := min(n, end-b.sent)
		b.sent, n = b.sent+k, n-k
		if n == 0 || done == len(b.refs) {
			b.refs = slices.Delete(b.refs, 0, done)
			return
		}
		p := &b.refs[done]
		k = min(n, len(p.data))
		p.data, n = p.data[k:], n-k
		if len(p.data) > 0 {
			b.refs = slices.Delete(b.refs, 0, done)
			return
		}
		if p.block != nil {
			blocks.Put(p.block)
			p.block = nil
		}
	}
}

// gather adds p to what is to be written, and writes once that is writePiece.
func (q *qp) gather(b *doorbell, p []byte) error {
	for len(p) > 0 {
		n := min(len(p), writePiece-b.gathered)
		b.pieces = append(b.pieces, p[:n])
		b.gathered += n
		p = p[n:]
		if b.gathered == writePiece {
			if err := q.writeGathered(b); err != nil {
				return err
			}
		}
	}
	return nil
}

func (q *qp) writeGathered(b *doorbell) error {
	var err error
	if q.detached() {
		err = q.sock.writeAll(b.pieces)
	} else {
		b.rest = b.pieces
		_, err = b.rest.WriteTo(q.conn) // writev(2) on a TCP connection
	}
	clear(b.pieces)
	b.pieces, b.rest, b.gathered = b.pieces[:0], nil, 0
	if err == nil {
		q.progress.Add(1)
	}
	return err
}

// readReplies is the reader goroutine.
func (q *qp) readReplies() {
	if status := q.read(); status != 0 {
		q.finish(status)
	}
}

// readOut is the reader goroutine of a detached connection whose QP is being closed.
func (q *qp) readOut() {
	until := time.Now().Add(q.d.o.PeerTimeout)
	for {
		q.sock.drained, q.turn = false, math.MaxInt
		if status := q.read(); status != 0 {
			q.finish(status)
			return
		}
		left := time.Until(until)
		if left <= 0 {
			q.finish(driver.RetryExcErr)
			return
		}
		q.sock.awaitInput(int(left.Milliseconds()) + 1)
	}
}

// detached reports whether the connection is read by its CQ.
func (q *qp) detached() bool { return q.sock != nil && q.sock.detached() }

// due says whether replies are outstanding; the reader's.
func (q *qp) due() bool { return q.done != q.posted.Load() }

// finish ends the connection and completes every WR not answered: the oldest with
// status.
func (q *qp) finish(status driver.Status) {
	q.breakConn()
	q.mu.Lock()
	if !q.state.CompareAndSwap(uint32(driver.StateRTS), uint32(driver.StateErr)) &&
		q.State() == driver.StateClosed && status == driver.RetryExcErr {
		status = driver.WRFlushErr
	}
	posted := q.posted.Load()
	q.mu.Unlock()
	q.writers.Wait() // nobody reads the caller's buffers any more
	q.push()
	q.into = filling{}
	done := q.done
	for ; q.done < posted; q.done++ {
		e := &q.sq[q.done%maxSendWR]
		e.local, e.value = nil, nil
		switch e.half {
		case firstHalf:
			continue // the second one says so
		case secondHalf:
			if q.done == done && (status == driver.RemAccessErr || status == driver.RemInvReqErr) {
				status = driver.RemOpErr // the first half has landed
			}
		}
		wc := driver.WC{ID: e.id, QPNum: q.num, Op: e.op, Status: status}
		if e.refused != 0 && status != driver.WRFlushErr {
			wc.Status = e.refused
		}
		status = driver.WRFlushErr
		q.batch = append(q.batch, completion{wc, q, q.done + 1})
	}
	q.push()
	close(q.gone)
}

// read handles replies until the connection is of no more use, and returns the
// status of the oldest WR not answered; or 0 where it would have to wait and the socket
// has been told not to, or after a turn. It goes on from there when it is called again.
func (q *qp) read() driver.Status {
	for {
		if !q.midway {
			for q.w-q.r < replySize {
				if err := q.fill(); err != nil {
					return q.stop(err)
				}
			}
			if q.due() && isPaced(q.buf[q.r:], uint16(q.done)) {
				q.r += replySize // fill has counted the progress
				continue
			}
			if status := q.begin(); status != 0 {
				return status
			}
		}
		for len(q.rest) > 0 {
			var n int
			var err error
			switch {
			case q.r < q.w:
				n = copy(q.rest, q.buf[q.r:q.w])
				q.r += n
			case len(q.rest) >= len(q.buf):
				q.push()
				if q.turn <= 0 && q.detached() {
					return 0 // the poller tells of the rest anew
				}
				if n, err = q.conn.Read(q.rest); n > 0 {
					q.turn -= n
					q.progress.Add(1)
				}
			default:
				err = q.fill()
			}
			if n == 0 && err != nil {
				return q.stop(err)
			}
			q.rest = q.rest[n:]
		}
		e := &q.sq[q.done%maxSendWR]
		if e.value != nil {
			if err := q.readValue(e); err != nil {
				return q.stop(err)
			}
		}
		q.midway, q.rest = false, nil
		e.local, e.value = nil, nil
		q.done++
		q.repaid += e.charge
		if e.signaled {
			q.batch = append(q.batch, completion{driver.WC{ID: e.id, QPNum: q.num, Op: e.op, Status: driver.Success}, q,
				q.done})
			if len(q.batch) == cap(q.batch) {
				q.push()
			}
		}
	}
}

// begin takes the head of the next reply out of the buffer. It returns the status of
// the WR if that ends the connection.
func (q *qp) begin() driver.Status {
	if isGoodbye(q.buf[q.r:], uint16(q.done)) {
		q.confirmed = true
		return driver.RetryExcErr
	}
	if !q.due() {
		return driver.GeneralErr
	}
	e := &q.sq[q.done%maxSendWR]
	payload := len(e.local)
	if e.value != nil {
		payload += len(e.value.Bytes) + e.value.Slack
	}
	r, err := parseReply(q.buf[q.r:], e.wire, uint16(q.done), payload)
	if err != nil {
		return driver.GeneralErr
	}
	q.r += replySize
	if r.status != driver.Success {
		q.confirmed = true
		return r.status
	}
	q.midway, q.rest = true, e.local
	return 0
}

// stop says what a failed read means; see read.
func (q *qp) stop(err error) driver.Status {
	if q.detached() && errors.Is(err, os.ErrDeadlineExceeded) {
		return 0
	}
	return driver.RetryExcErr
}

// fill reads more, after handing on what is complete.
func (q *qp) fill() error {
	q.push()
	if q.r > 0 {
		q.w = copy(q.buf, q.buf[q.r:q.w])
		q.r = 0
	}
	n, err := q.conn.Read(q.buf[q.w:])
	q.w += n
	if n > 0 {
		q.progress.Add(1)
		return nil
	}
	return err
}

func (q *qp) push() {
	if q.repaid != 0 {
		q.unreplied.Add(-q.repaid)
		q.repaid = 0
	}
	q.cq.push(q.batch)
	q.batch = q.batch[:0]
}

// watch counts the ticks without progress while something is outstanding.
func (q *qp) watch() {
	p := q.progress.Load()
	if q.unreplied.Load() == 0 || p != q.seen {
		q.seen, q.stale = p, 0
		return
	}
	// The limit is one tick more than a PeerTimeout: the first may have come just after the post.
	if q.stale++; q.stale > watchTicks {
		q.breakConn()
	}
}

// Close lets the memory node finish what has reached it and waits for its
// confirmation, at most PeerTimeout. It returns ErrUnconfirmed without one; the
// QP is closed all the same, and no buffer is touched any more.
func (q *qp) Close() error {
	q.closing.Do(func() { q.closeErr = q.close() })
	return q.closeErr
}

// Abort is Close without the wait, also of a Close under way.
func (q *qp) Abort() error {
	q.aborted.Store(true)
	if !q.detached() {
		_ = q.nc.SetReadDeadline(time.Unix(1, 0))
	} else if q.State() == driver.StateClosed {
		q.breakConn()
	}
	return q.Close()
}

func (q *qp) close() error {
	q.state.Store(uint32(driver.StateClosed))
	// A goroutine that is writing stops, perhaps within a request, which the agent then does not complete.
	if q.detached() {
		q.sock.halted.Store(true)
	} else {
		_ = q.nc.SetWriteDeadline(time.Unix(1, 0))
	}
	q.mu.Lock()
	//lint:ignore SA2001 a PostSend that saw the old state has returned
	q.mu.Unlock()
	q.writers.Wait()
	q.cq.detach(q)
	switch aborted := q.aborted.Load(); {
	case q.detached():
		if aborted {
			q.breakConn()
		}
	case aborted:
		_ = q.nc.SetReadDeadline(time.Unix(1, 0))
	default:
		_ = q.nc.SetReadDeadline(time.Now().Add(q.d.o.PeerTimeout))
	}
	_ = q.nc.CloseWrite()
	<-q.gone
	if q.detached() {
		q.sock.release()
	}

	d := q.d
	d.mu.Lock()
	delete(d.mu.qps, q)
	q.pd.qps--
	q.cq.qps--
	if len(d.mu.qps) == 0 && d.mu.watch != nil {
		d.mu.watch.Stop()
		d.mu.watch = nil
	}
	d.mu.Unlock()
	if !q.confirmed {
		return fmt.Errorf("tcp: close qp %d: %w", q.num, ErrUnconfirmed)
	}
	return nil
}
