package tcp

import (
	"os"
	"sync"

	"github.com/kvd-project/kvd/internal/bulk"
	"github.com/kvd-project/kvd/rdma/driver"
)

// A READ with a Value is one request, whose reply the reader divides. A WRITE with one is two: the first carries the
// Value, copied while its CRC is taken, and the second Local, which so lands behind it.

// half says which part of a WRITE with a Value an sqe is; 0: it is a whole WR.
type half uint8

const (
	firstHalf half = 1 + iota
	secondHalf
)

// block is a part of a Value on its way.
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

// value appends the first half of w, and has Local sealed. Of a Value of several blocks each leaves as soon as it is
// there, if the connection has room: the kernel copies it while it is in the processor's cache.
func (x *encoder) value(q *qp, e *sqe, w *driver.WR) {
	v := w.Value
	addr := w.RemoteAddr + uint64(len(w.Local))
	if addr < w.RemoteAddr {
		addr = w.RemoteAddr // beyond every region, as is Local
	}
	x.request(e, request{op: w.Op, length: len(v.Bytes), rkey: w.RKey, addr: addr})
	leaves := len(v.Bytes) > len(block{}) && q.detached() && !q.mu.busy && x.failed == nil
	if leaves {
		x.close() // a frame says how much it has
		q.post(x)
	}
	crc := v.CRC
	for at := 0; at < len(v.Bytes); {
		blk := blocks.Get().(*block)
		n := min(len(blk), len(v.Bytes)-at)
		from := v.Acquire()[at : at+n]
		if v.Seal != nil {
			crc = copyCached(crc, blk[:n], from)
		} else {
			copy(blk[:], from)
		}
		v.Release()
		x.b.refs = append(x.b.refs, payload{at: len(x.b.staged), data: blk[:n], block: blk})
		if at += n; leaves {
			x.begun = true
			leaves, x.failed = q.writeNow(x.b)
		}
	}
	if v.Seal != nil {
		v.Seal(w.Local, crc)
	}
}

// copyCached is bulk.Copy with stores that stay in the processor's caches, from where the kernel takes the bytes next.
func copyCached(crc uint32, dst, src []byte) uint32 {
	const most = bulk.StreamFrom / 2
	for len(src) > 0 {
		n := min(len(src), most)
		crc = bulk.Copy(crc, dst[:n], src[:n])
		dst, src = dst[n:], src[n:]
	}
	return crc
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
