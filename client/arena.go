package client

import (
	"errors"
	"fmt"
	"sync"

	"github.com/kvd-project/kvd/internal/units"
	"github.com/kvd-project/kvd/rdma"
)

// Arena is memory of the program's that a [Client] has registered. Values of 8 KiB and more go straight between it and
// memory nodes over verbs; see [Client.Register].
type Arena struct {
	c   *Client
	mem []byte
}

// arenas are the Client's, and where they are registered. Registering in a session, and its end, take turns.
type arenas struct {
	sync.Mutex
	closed bool
	// by is each Arena's registrations, of all sessions that there are: a lost one goes on for a while.
	by map[*Arena]map[*sess][]*rdma.Arena
	in map[*sess]bool
}

// Register registers mem with the adapters of this Client, now and in all sessions to come. A GetInto, a GetRange or a
// Put whose buffer lies in mem as a whole then needs no copy over verbs. Results are the same as with any memory. The
// other providers copy from and to any memory, so Register takes next to nothing there. A value must not change while
// it is put: the adapter reads it when its CRC has been taken.
//
// mem stays the caller's. It begins at a multiple of 8 bytes, as the memory of make and mmap does. If it does not, or
// overlaps another Arena of the Client, the error is ErrInvalid. An adapter pins it, so it counts against
// RLIMIT_MEMLOCK, once for each adapter and session; the error names the limit. Registering takes long, so do it once
// for much memory. mem must stay mapped and writable until Deregister, or until Close of the Client. Register may be
// called concurrently.
func (c *Client) Register(mem []byte) (*Arena, error) {
	r := &c.arenas
	r.Lock()
	defer r.Unlock()
	if r.closed {
		return nil, ErrClosed
	}
	a := &Arena{c: c, mem: mem}
	to := map[*sess][]*rdma.Arena{}
	for s := range r.in {
		l, err := s.register(mem)
		if err != nil {
			for _, l := range to {
				err = errors.Join(err, deregister(l))
			}
			if errors.Is(err, rdma.ErrArena) {
				return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
			}
			return nil, fmt.Errorf("register %s of memory: %w", units.Bytes(len(mem)), err)
		}
		to[s] = l
	}
	if r.by == nil {
		r.by = map[*Arena]map[*sess][]*rdma.Arena{}
	}
	r.by[a] = to
	return a, nil
}

// Bytes is the memory, as Register was given it.
func (a *Arena) Bytes() []byte { return a.mem }

// Deregister waits until no adapter touches the memory, and unpins it. Operations under way with a buffer there go on,
// and end as they would have. It returns ErrClosed if it was called before, or the Client is closed.
func (a *Arena) Deregister() error {
	r := &a.c.arenas
	r.Lock()
	defer r.Unlock()
	to, ok := r.by[a]
	if !ok {
		return fmt.Errorf("deregister arena: %w", ErrClosed)
	}
	delete(r.by, a)
	var errs []error
	for _, l := range to {
		errs = append(errs, deregister(l))
	}
	return errors.Join(errs...)
}

// register registers mem with all devices or none.
func (s *sess) register(mem []byte) (l []*rdma.Arena, err error) {
	for i := range s.c.o.Devices {
		a, err := s.core.PD(i).RegArena(mem)
		if err != nil {
			return nil, errors.Join(err, deregister(l))
		}
		l = append(l, a)
	}
	return l, nil
}

func deregister(l []*rdma.Arena) error {
	var errs []error
	for _, a := range l {
		errs = append(errs, a.Deregister())
	}
	return errors.Join(errs...)
}

// addSession registers the Client's Arenas in a session that begins. Those that it cannot have are other memory to it.
func (r *arenas) addSession(s *sess) {
	r.Lock()
	defer r.Unlock()
	if r.in == nil {
		r.in = map[*sess]bool{}
	}
	r.in[s] = true
	for a, to := range r.by {
		l, err := s.register(a.mem)
		if err != nil {
			s.c.o.Logger.Warn("an arena is not registered in a new session: its values are copied", "session", s.id,
				"bytes", len(a.mem), "err", err)
			continue
		}
		to[s] = l
	}
}

// removeSession takes the Arenas out of a session that has no connections any more.
func (r *arenas) removeSession(s *sess) error {
	r.Lock()
	defer r.Unlock()
	delete(r.in, s)
	var errs []error
	for _, to := range r.by {
		errs = append(errs, deregister(to[s]))
		delete(to, s)
	}
	return errors.Join(errs...)
}

// close forgets all Arenas, when there is no session any more.
func (r *arenas) close() {
	r.Lock()
	defer r.Unlock()
	r.closed, r.by = true, nil
}
