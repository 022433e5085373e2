package shm

import (
	"sync/atomic"
	"unsafe"

	"github.com/kvd-project/kvd/internal/bulk"
	"github.com/kvd-project/kvd/rdma/driver"
)

// blockBytes is how much of a Value is moved at a time. Between two blocks a fence or Value.Detach has its turn.
const blockBytes = 1 << 20

// between is called before each block of a Value, in tests.
var between func()

// move executes a READ or WRITE with a Value whose remote bytes begin at remote. It says what became of it, and whether
// a WRITE may be in the store buffer now. It did before if wrote.
func (q *QP) move(w *driver.WR, remote unsafe.Pointer, wrote bool) (driver.Status, bool) {
	if wrote && w.Op == driver.OpRead || !tso {
		barrier(&q.fence)
	}
	local, head := unsafe.Pointer(unsafe.SliceData(w.Local)), uintptr(len(w.Local))
	v := w.Value
	far := unsafe.Slice((*byte)(unsafe.Add(remote, head)), len(v.Bytes))
	if w.Op == driver.OpWrite {
		crc, ok := q.moveBlocks(w, far, v.CRC, v.Seal != nil, true)
		if !ok {
			return driver.WRFlushErr, true
		}
		if v.Seal != nil {
			v.Seal(w.Local, crc)
		}
		if !tso {
			barrier(&q.fence)
		}
		store(remote, local, head)
		return driver.Success, true
	}
	load(local, remote, head)
	if !tso {
		barrier(&q.fence)
	}
	n, crc := v.Open(w.Local)
	crc, ok := q.moveBlocks(w, far[:n], crc, v.Start != nil, false)
	if !ok {
		return driver.WRFlushErr, false
	}
	if v.Start != nil {
		v.CRC = crc
	}
	return driver.Success, false
}

// moveBlocks copies between far, the bytes of w's Value in the mapping, and as many of the Value. It goes on with crc
// if sum. It stops, and reports false, when the QP is barred: what has been moved stays.
func (q *QP) moveBlocks(w *driver.WR, far []byte, crc uint32, sum, write bool) (uint32, bool) {
	v := w.Value
	for at := 0; at < len(far); at += blockBytes {
		if between != nil {
			between()
		}
		if write && len(far) >= granuleBytes {
			probe(q.remote, w.RKey).m.populate(far[at:min(at+blockBytes, len(far))])
		}
		if atomic.LoadUint64(&q.cell.barred) != 0 || q.state.Load() != uint32(driver.StateRTS) {
			return 0, false
		}
		end := min(at+blockBytes, len(far))
		to, from := v.Acquire()[at:end], far[at:end]
		if write {
			to, from = from, to
		}
		if sum {
			crc = bulk.Copy(crc, to, from)
		} else {
			copy(to, from)
		}
		v.Release()
	}
	return crc, true
}
