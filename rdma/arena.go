package rdma

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kvd-project/kvd/rdma/driver"
)

// ErrArena means that memory cannot be registered as an Arena for a reason that the caller can see.
var ErrArena = errors.New("memory for an arena")

// Arena is memory of the caller's that is registered with a PD. A Value whose Bytes lie in it is moved by the adapter
// itself. Elsewhere that changes no result. It may be used concurrently.
type Arena struct {
	pd  *PD
	mem []byte
	mr  *MR // nil: the provider takes memory of any kind, or none

	mu   sync.Mutex
	uses int         // WRs under way
	cqs  []*stagedCQ // of such, at some time
	gone bool
}

// arenas are those of a PD, by address. The list is replaced, never changed.
type arenas struct {
	sync.Mutex
	list atomic.Pointer[[]*Arena]
}

func (a *arenas) all() []*Arena {
	if l := a.list.Load(); l != nil {
		return *l
	}
	return nil
}

func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// search says where in a list an Arena that begins at an address is, or would be.
func search(all []*Arena, address uintptr) (at int, there bool) {
	return slices.BinarySearchFunc(all, address, func(a *Arena, address uintptr) int {
		return cmp.Compare(addressOf(a.mem), address)
	})
}

// has reports whether all of b lies in the Arena.
func (a *Arena) has(b []byte) bool {
	at := addressOf(b) - addressOf(a.mem) // wraps for what is below
	return at <= uintptr(len(a.mem)) && uintptr(len(b)) <= uintptr(len(a.mem))-at
}

// RegArena registers mem, which stays the caller's, and pins it if the provider is an adapter. mem begins at a multiple
// of 8 bytes, and overlaps no other Arena of the PD: ErrArena says so. Until Deregister it must stay mapped and
// writable.
func (p *PD) RegArena(mem []byte) (*Arena, error) {
	p.arenas.Lock()
	defer p.arenas.Unlock()
	all := p.arenas.all()
	at, there := search(all, addressOf(mem))
	switch end := addressOf(mem) + uintptr(len(mem)); {
	case len(mem) == 0:
		return nil, fmt.Errorf("%s: %w: no bytes", p.dev.name, ErrArena)
	case addressOf(mem)%8 != 0:
		return nil, fmt.Errorf("%s: %w: it begins at %#x, want a multiple of 8", p.dev.name, ErrArena, addressOf(mem))
	case there && len(all[at].mem) == len(mem):
		return nil, fmt.Errorf("%s: %w: it is registered already", p.dev.name, ErrArena)
	case there, at < len(all) && addressOf(all[at].mem) < end,
		at > 0 && addressOf(all[at-1].mem)+uintptr(len(all[at-1].mem)) > addressOf(mem):
		return nil, fmt.Errorf("%s: %w: %d bytes at %#x overlap others that are registered", p.dev.name, ErrArena,
			len(mem), addressOf(mem))
	}
	a := &Arena{pd: p, mem: mem}
	if c := &p.dev.caps; c.MaxSGE >= 2 && !takesValues(c) {
		var err error
		m := driver.NewMemory(mem, -1, AllocOptions{Name: "arena"}, nil)
		a.mr, err = p.RegMR(m, 0, int64(len(mem)), AccessLocal)
		if err != nil {
			return nil, err
		}
	}
	all = slices.Insert(slices.Clone(all), at, a)
	p.arenas.list.Store(&all)
	return a, nil
}

// use finds the Arena that b lies in, and counts a WR of c's until unuse; nil if there is none that has an MR.
func (p *PD) use(b []byte, c *stagedCQ) *Arena {
	all := p.arenas.all()
	at, there := search(all, addressOf(b))
	if !there {
		at--
	}
	if at < 0 || all[at].mr == nil || !all[at].has(b) {
		return nil
	}
	a := all[at]
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.gone {
		return nil
	}
	if a.uses++; !slices.Contains(a.cqs, c) {
		a.cqs = append(a.cqs, c)
	}
	return a
}

func (a *Arena) unuse() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.uses--
}

// Bytes is the memory.
func (a *Arena) Bytes() []byte { return a.mem }

// Deregister waits for WRs under way that have memory of the Arena, and lets go of it: the adapter does not touch it
// afterwards. A second one is ErrClosed. If the provider fails the Arena stays as it was.
func (a *Arena) Deregister() error {
	a.mu.Lock()
	was := a.gone
	a.gone = true // WRs that are posted from now on do without
	a.mu.Unlock()
	if was {
		return fmt.Errorf("%s: deregister arena: %w", a.pd.dev.name, ErrClosed)
	}
	a.wait()
	p := a.pd
	p.arenas.Lock()
	defer p.arenas.Unlock()
	if a.mr != nil {
		if err := a.mr.Deregister(); err != nil {
			a.mu.Lock()
			defer a.mu.Unlock()
			a.gone = false
			return err
		}
	}
	all := slices.DeleteFunc(slices.Clone(p.arenas.all()), func(x *Arena) bool { return x == a })
	p.arenas.list.Store(&all)
	return nil
}

// wait returns when no WR has memory of a. It takes their completions itself, since their lane may have no reason to.
func (a *Arena) wait() {
	pause := time.NewTicker(gatherPause)
	defer pause.Stop()
	for {
		a.mu.Lock()
		uses, cqs := a.uses, a.cqs
		a.mu.Unlock()
		if uses == 0 {
			return
		}
		for _, c := range cqs {
			c.gather()
		}
		<-pause.C
	}
}
