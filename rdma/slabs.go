package rdma

import (
	"errors"
	"sync"
)

const (
	// slabBytes is how much memory is registered at a time for Values that are in no Arena.
	slabBytes = 2 << 20
	// slabsMost bounds the slabs of a PD. Beyond it a WR has memory of its own, which goes when the WR is over.
	slabsMost = 32
	// slackMost bounds the slack of a READ into an Arena, bytes. All such READs of a PD throw theirs away to the same
	// place.
	slackMost = 256 << 10
)

// slabSizes are what slabs are cut into, bytes.
var slabSizes = [...]int{64 << 10, 512 << 10, slabBytes}

// slab is a part of registered memory, of which a WR has used the first bytes.
type slab struct {
	of   *slabMem
	mem  []byte
	used int
	lkey uint64
}

func (s *slab) bytes() []byte { return s.mem[:s.used] }

// slabMem is registered memory, cut into slabs of one size.
type slabMem struct {
	mem   *Memory
	mr    *MR
	class int // in slabSizes; -1: it is one WR's
	out   int // slabs that WRs have
}

// slabPool has the slabs of a PD for as long as there are QPs of it.
type slabPool struct {
	sync.Mutex
	pd       *PD
	users    int // QPs
	all      []*slabMem
	free     [len(slabSizes)][]slab
	wasteMem *slabMem // for slack
}

// addUser counts a QP of pd.
func (p *slabPool) addUser(pd *PD) {
	p.Lock()
	defer p.Unlock()
	p.pd = pd
	p.users++
}

// removeUser discounts one. The last one frees all.
func (p *slabPool) removeUser() error {
	p.Lock()
	defer p.Unlock()
	if p.users--; p.users > 0 {
		return nil
	}
	var errs []error
	for _, m := range p.all {
		errs = append(errs, m.release())
	}
	if p.wasteMem != nil {
		errs = append(errs, p.wasteMem.release())
	}
	p.all, p.wasteMem = nil, nil
	clear(p.free[:])
	return errors.Join(errs...)
}

// take appends slabs for n bytes to dst: as few as can be, and at most that many.
func (p *slabPool) take(dst []slab, n, most int) ([]slab, error) {
	p.Lock()
	defer p.Unlock()
	if n > most*slabBytes {
		s, err := p.alone(n)
		if err != nil {
			return dst, err
		}
		return append(dst, s), nil
	}
	for from := len(dst); n > 0; {
		s, err := p.one(min(n, slabBytes))
		if err != nil {
			for i := range dst[from:] {
				p.giveLocked(dst[from+i])
			}
			return dst[:from], err
		}
		n -= s.used
		dst = append(dst, s)
	}
	return dst, nil
}

// one is a slab for n bytes, slabBytes at most.
func (p *slabPool) one(n int) (slab, error) {
	class := 0
	for slabSizes[class] < n {
		class++
	}
	if len(p.free[class]) == 0 && !p.recut(class) {
		if len(p.all) == slabsMost {
			return p.alone(n)
		}
		m, err := p.register(slabBytes)
		if err != nil {
			return slab{}, err
		}
		p.all = append(p.all, m)
		p.cut(m, class)
	}
	l := p.free[class]
	s := l[len(l)-1]
	p.free[class] = l[:len(l)-1]
	s.used = n
	s.of.out++
	return s, nil
}

// alone is memory for one WR.
func (p *slabPool) alone(n int) (slab, error) {
	m, err := p.register(int64(n))
	if err != nil {
		return slab{}, err
	}
	m.class = -1
	return slab{of: m, mem: m.mem.Bytes, used: n, lkey: m.mr.LKey()}, nil
}

func (p *slabPool) register(n int64) (*slabMem, error) {
	m, err := p.pd.dev.Alloc(n, AllocOptions{Name: "kvd-values"})
	if err != nil {
		return nil, err
	}
	mr, err := p.pd.RegMR(m, 0, int64(len(m.Bytes)), AccessLocal)
	if err != nil {
		return nil, errors.Join(err, m.Free())
	}
	return &slabMem{mem: m, mr: mr}, nil
}

// cut makes slabs of a class of m.
func (p *slabPool) cut(m *slabMem, class int) {
	m.class = class
	for at, size := 0, slabSizes[class]; at < slabBytes; at += size {
		p.free[class] = append(p.free[class], slab{of: m, mem: m.mem.Bytes[at : at+size : at+size], lkey: m.mr.LKey()})
	}
}

// recut cuts memory that no WR has into slabs of a class, and reports whether there was some.
func (p *slabPool) recut(class int) bool {
	for _, m := range p.all {
		if m.out > 0 {
			continue
		}
		kept := p.free[m.class][:0]
		for _, s := range p.free[m.class] {
			if s.of != m {
				kept = append(kept, s)
			}
		}
		clear(p.free[m.class][len(kept):])
		p.free[m.class] = kept
		p.cut(m, class)
		return true
	}
	return false
}

func (p *slabPool) give(s slab) {
	p.Lock()
	defer p.Unlock()
	p.giveLocked(s)
}

func (p *slabPool) giveLocked(s slab) {
	m := s.of
	if m.class < 0 {
		_ = m.release() // it is not used any more, whatever the device says
		return
	}
	m.out--
	p.free[m.class] = append(p.free[m.class], s)
}

// waste is memory of slackMost bytes that nobody reads.
func (p *slabPool) waste() (slab, error) {
	p.Lock()
	defer p.Unlock()
	if p.wasteMem == nil {
		m, err := p.register(slackMost)
		if err != nil {
			return slab{}, err
		}
		p.wasteMem = m
	}
	m := p.wasteMem
	return slab{of: m, mem: m.mem.Bytes, lkey: m.mr.LKey()}, nil
}

func (m *slabMem) release() error {
	if err := m.mr.Deregister(); err != nil {
		return err
	}
	return m.mem.Free()
}
