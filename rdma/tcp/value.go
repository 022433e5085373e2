package tcp

import (
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/bulk"
	"github.com/kvd-project/kvd/rdma/driver"
)

// A READ with a Value is one request, whose reply the reader divides. A WRITE with one is two: the first carries the
// Value, whose CRC is taken piece by piece as it leaves, and the second Local, which so lands behind it.

// half says which part of a WRITE with a Value an sqe is; 0: it is a whole WR.
type half uint8

const (
	firstHalf half = 1 + iota
	secondHalf
)

// block is a part of a Value on its way: what one write takes, so that it is in the processor's cache when its CRC was
// taken.
type block [256 << 10]byte

var blocks = sync.Pool{New: func() any { return new(block) }}

// fitting is how many of wrs fit into room of the send queue.
func fitting(wrs []driver.WR, room int) int {
	for i := range wrs {
		if room--; wrs[i].Value != nil && wrs[i].Op == driver.OpWrite {
			room--
		}
		if room < 0 {
			return i
		}
	}
	return len(wrs)
}

// value appends the first half of w. Its Value is touched when it is written.
func (x *encoder) value(e *sqe, w *driver.WR) {
	v := w.Value
	addr := w.RemoteAddr + uint64(len(w.Local))
	if addr < w.RemoteAddr {
		addr = w.RemoteAddr // beyond every region, as is Local
	}
	x.request(e, request{op: w.Op, length: len(v.Bytes), rkey: w.RKey, addr: addr})
	x.b.refs = append(x.b.refs, payload{at: len(x.b.staged), value: v, local: w.Local, sealAt: -1})
}

// seal completes Local behind the last byte of the Value, whose CRC is crc.
func (p *payload) seal(b *doorbell, crc uint32) {
	if p.value.Seal != nil {
		p.value.Seal(p.local, crc)
	}
	if p.sealAt >= 0 {
		copy(b.staged[p.sealAt:], p.local)
	}
}

// writeValue writes what is gathered, p's Value, and what is staged from there to end. It sends from the Value itself
// where a write does not wait: then nobody who detaches it waits for the network. Else it sends copies.
func (q *qp) writeValue(b *doorbell, p *payload, end int) error {
	if !q.detached() {
		return q.writeCopied(b, p, end)
	}
	v := p.value
	crc, n := v.CRC, len(v.Bytes)
	for at, summed := 0, 0; at < n; {
		if q.sock.halted.Load() {
			return os.ErrDeadlineExceeded
		}
		bytes := v.Acquire()
		if summed == at {
			if summed = min(at+len(block{}), n); v.Seal != nil {
				crc = bulk.CRC(crc, bytes[at:summed])
			}
			if summed == n {
				p.seal(b, crc)
			}
		}
		lead := len(b.pieces)
		b.pieces = append(b.pieces, bytes[at:summed])
		if summed == n {
			b.pieces = append(b.pieces, b.staged[p.at:end])
		}
		k, werr := unix.Writev(q.sock.fd, b.pieces[:min(len(b.pieces), maxPieces)])
		v.Release()
		clear(b.pieces[lead:])
		b.pieces = b.pieces[:lead]
		at += b.wrote(max(k, 0))
		if k > 0 {
			q.progress.Add(1)
		}
		if err := q.sock.mayWrite("writev", werr); err != nil {
			return err
		}
		if at >= n {
			return q.gather(b, b.staged[p.at+at-n:end])
		}
	}
	return nil
}

// wrote takes n bytes off what is gathered, and returns how many were behind that.
func (b *doorbell) wrote(n int) (behind int) {
	done := 0
	for n > 0 && done < len(b.pieces) {
		k := min(n, len(b.pieces[done]))
		n -= k
		b.gathered -= k
		if b.pieces[done] = b.pieces[done][k:]; len(b.pieces[done]) > 0 {
			break
		}
		done++
	}
	b.pieces = slices.Delete(b.pieces, 0, done)
	return n
}

func (q *qp) writeCopied(b *doorbell, p *payload, end int) error {
	blk := blocks.Get().(*block)
	defer blocks.Put(blk)
	v := p.value
	crc, n := v.CRC, len(v.Bytes)
	for at := 0; at < n; {
		k := min(len(blk), n-at)
		from := v.Acquire()[at : at+k]
		if v.Seal != nil {
			crc = bulk.Copy(crc, blk[:k], from)
		} else {
			copy(blk[:], from)
		}
		v.Release()
		err := q.gather(b, blk[:k])
		if at += k; at == n && err == nil {
			p.seal(b, crc)
			err = q.gather(b, b.staged[p.at:end])
		}
		if err == nil {
			err = q.writeGathered(b)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// readMax bounds one read into a Value, bytes: its CRC is taken while it is in the processor's cache, and Value.Detach
// waits for it.
const readMax = 256 << 10

// filling is how far the reader is in the Value of the WR done.
type filling struct {
	open  bool
	at, n int // of its bytes that count
	waste int // to be thrown away behind them
	crc   uint32
}

// readValue reads on; see read for what it returns.
func (q *qp) readValue(e *sqe) error {
	v, f := e.value, &q.into
	if !f.open {
		*f = filling{open: true}
		f.n, f.crc = v.Open(e.local)
		f.waste = len(v.Bytes) + v.Slack - f.n
	}
	for f.at < f.n || f.waste > 0 {
		if q.r == q.w {
			if err := q.readMore(v, f); err != nil {
				return err
			}
			continue
		}
		from := q.buf[q.r:q.w]
		if f.at == f.n {
			n := min(len(from), f.waste)
			f.waste -= n
			q.r += n
			continue
		}
		to := v.Acquire()[f.at:f.n]
		from = from[:min(len(from), len(to))]
		if v.Start != nil {
			f.crc = bulk.Copy(f.crc, to, from)
		} else {
			copy(to, from)
		}
		v.Release()
		f.at += len(from)
		q.r += len(from)
	}
	if v.Start != nil {
		v.CRC = f.crc
	}
	*f = filling{}
	return nil
}

// readMore reads into the empty buffer, or into the Value itself where that is long and a read does not wait.
func (q *qp) readMore(v *driver.Value, f *filling) error {
	if f.n-f.at < len(q.buf) || !q.detached() {
		return q.fill()
	}
	q.push()
	if q.turn <= 0 {
		return os.ErrDeadlineExceeded // the poller tells of the rest anew
	}
	to := v.Acquire()
	defer v.Release()
	n, err := q.conn.Read(to[f.at:min(f.n, f.at+readMax)])
	if n == 0 {
		return err
	}
	q.turn -= n
	q.progress.Add(1)
	if v.Start != nil {
		f.crc = bulk.CRC(f.crc, to[f.at:f.at+n])
	}
	f.at += n
	return nil
}
