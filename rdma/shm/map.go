package shm

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/rdma/driver"
)

// Map implements driver.Mapper. The first one of a region asks the memory node's process for its memfd, and maps that
// without the right to write. All QPs of the device share this mapping. It stays until they have forgotten the region
// and every Mapping is released. Memory in huge pages is not shown. A hole in it may give SIGBUS, and memory
// nodes punch one when they free a region.
func (q *QP) Map(rkey, addr uint64, n int) (*driver.Mapping, bool, error) {
	// As in PostSend: Close waits until the QP's mappings are not in use.
	c, seq := q.cell, q.seq
	setSeq(&q.seq, seq+1)
	defer func() {
		c.endOp(seq)
		setSeq(&q.seq, seq+2)
	}()
	if !c.beginOp(seq) || q.state.Load() != uint32(driver.StateRTS) {
		return nil, false, q.refusal()
	}
	if atomic.LoadUint64(&q.table[0]) != q.epoch {
		q.recheckRemote()
	}
	r, status := q.findRemote(rkey)
	if status == driver.Success && (n <= 0 || addr > r.n || uint64(n) > r.n-addr ||
		r.access&driver.AccessRemoteRead == 0) {
		status = driver.RemAccessErr
	}
	made := false
	if status == driver.Success && r.shown == nil {
		made, status = q.show(r)
	}
	switch {
	case status == driver.RemAccessErr:
		return nil, false, driver.ErrNoAccess
	case status != driver.Success:
		return nil, false, fmt.Errorf("map a region: %v", status)
	case r.shown == hidden:
		return nil, false, driver.ErrNotSupport
	}
	m, d := r.shown, q.d
	off := int64(uintptr(r.base)-uintptr(unsafe.Pointer(unsafe.SliceData(r.m.bytes)))) + int64(addr)
	d.mu.Lock()
	m.refs++
	d.mu.Unlock()
	return driver.NewMapping(m.bytes[off:off+int64(n):off+int64(n)], m.fd, off, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.unmapLocked(m)
	}), made, nil
}

// hidden is remoteMR.shown of memory that is not shown.
var hidden = &mapping{}

// show maps the memory of r for reading alone, or finds that somebody has.
func (q *QP) show(r *remoteMR) (made bool, _ driver.Status) {
	a, status := q.ask(r.rkey)
	if status != driver.Success {
		return false, status
	}
	defer a.close()
	var fs unix.Statfs_t
	if err := unix.Fstatfs(a.fd, &fs); err != nil {
		return false, driver.GeneralErr
	}
	if fs.Type == unix.HUGETLBFS_MAGIC {
		r.shown = hidden
		return false, driver.Success
	}
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	m, err := q.d.mapLocked(a.fd, int64(a.fileBytes), false)
	if err != nil || int64(len(m.bytes)) < int64(len(r.m.bytes)) {
		if err == nil {
			q.d.unmapLocked(m) // another file than at first
		}
		return false, driver.GeneralErr
	}
	made = m.refs == 1
	if m.fd < 0 {
		// The descriptor that came may allow writing.
		if m.fd, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d", a.fd), unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			m.fd = -1 // whoever wants to hand it on hears so
		}
	}
	q.held = append(q.held, m)
	r.shown = m
	return made, driver.Success
}
