package sim

import "github.com/kvd-project/kvd/rdma/driver"

// Map implements driver.Mapper: the memory itself, as it is from one effect to the next.
func (q *qp) Map(rkey, addr uint64, n int) (*driver.Mapping, bool, error) {
	f := q.f
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case q.state == driver.StateClosed:
		return nil, false, driver.ErrClosed
	case q.state == driver.StateErr, q.targetPD.dev.crashed:
		return nil, false, driver.ErrQPError
	}
	w := work{wr: driver.WR{Op: driver.OpRead, RKey: rkey, RemoteAddr: addr}, bytes: n}
	b := q.remoteLocked(&w)
	if n <= 0 || b == nil {
		return nil, false, driver.ErrNoAccess
	}
	f.mu.mapped++
	return driver.NewMapping(b[:n:n], -1, 0, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.mu.mapped--
	}), false, nil
}

// Mapped is how many mappings of Map are not released.
func (f *Fabric) Mapped() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mu.mapped
}
