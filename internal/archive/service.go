package archive

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"
)

// Source is the store of a Service. Its methods are not called concurrently.
type Source interface {
	// Namespaces names what there is to archive.
	Namespaces(ctx context.Context) ([]string, error)
	// Open opens a session in a namespace, and says what Create's Manifest wants. close ends the session.
	Open(ctx context.Context, name string) (s Store, m Manifest, close func() error, err error)
}

// ServiceOptions say what a Service does. All but Rate, Keep, Beat and AtEnd are wanted.
type ServiceOptions struct {
	Dest   Destination
	Source Source
	// Every is the time from the begin of a namespace's snapshot to that of its next.
	Every time.Duration
	// Keep says what is pruned after each snapshot; the zero value: nothing.
	Keep Keep
	// Rate is as in CreateOptions.
	Rate int64
	// Beat is how often the holder of the destination's lock says that it lives; 0: 20 s.
	Beat time.Duration
	// Holder names who holds the lock, for people.
	Holder string
	// AtEnd has Run make a last snapshot of each namespace when its context ends, within endPatience.
	AtEnd  bool
	Now    func() time.Time
	Logger *slog.Logger
}

const (
	defaultBeat = 20 * time.Second
	// retryAfter is when what has failed is tried again, or at the next time if that is sooner.
	retryAfter = time.Minute
	// endPatience is how long the last snapshots may take.
	endPatience = 2 * time.Minute
)

// Service makes snapshots at intervals while it holds the lock of the destination. Any number of them may be there:
// one works, and others wait. Its methods may be called concurrently, but for Run.
type Service struct {
	o  ServiceOptions
	mu struct {
		sync.Mutex
		holds    bool
		err      error
		failures map[string]uint64
		spaces   map[string]*NamespaceStats
	}
}

// NamespaceStats are what a Service tells of a namespace.
type NamespaceStats struct {
	// Since is when the newest complete snapshot was begun: what was written later is lost with the store. Without a
	// snapshot it is when the Service first saw the namespace.
	Since time.Time
	// Success is when the newest snapshot was done, or begun if another Service made it; zero: there is none.
	Success  time.Time
	Failures uint64
	// LeftOut is how many keys the newest snapshot lacks since they are damaged.
	LeftOut int64
	due     time.Time
}

// ServiceStats are what a Service tells of itself.
type ServiceStats struct {
	// Holds: it holds the lock, and works.
	Holds bool
	// Err is what failed last and has not gone well since.
	Err error
	// Failures are those outside of namespaces: of the lock, and of listing what there is.
	Failures   uint64
	Namespaces map[string]NamespaceStats // only if it works
}

// NewService makes a Service that Run starts.
func NewService(o ServiceOptions) *Service {
	o.Beat = cmp.Or(o.Beat, defaultBeat)
	s := &Service{o: o}
	s.mu.failures, s.mu.spaces = make(map[string]uint64), make(map[string]*NamespaceStats)
	return s
}

// Every is that of the options.
func (s *Service) Every() time.Duration { return s.o.Every }

// Stats are the figures of this moment.
func (s *Service) Stats() ServiceStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := ServiceStats{Holds: s.mu.holds, Err: s.mu.err, Failures: s.mu.failures[""],
		Namespaces: make(map[string]NamespaceStats)}
	if s.mu.holds {
		for name, n := range s.mu.spaces {
			one := *n
			one.Failures = s.mu.failures[name]
			st.Namespaces[name] = one
		}
	}
	return st
}

// failed notes what failed, of a namespace or of none with "".
func (s *Service) failed(name string, err error) {
	s.o.Logger.Error("archive", "namespace", name, "err", err)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.failures[name]++
	s.mu.err = err
}

// Run works until ctx ends, and then leaves no half of a snapshot that it can take away. A failure has it try again. An
// error is one of the last snapshots, which AtEnd asks for.
func (s *Service) Run(ctx context.Context) error {
	work := ctx
	if s.o.AtEnd {
		var cancel context.CancelFunc
		work, cancel = context.WithCancel(context.WithoutCancel(ctx))
		defer cancel()
		defer context.AfterFunc(ctx, func() {
			if sleep(work, endPatience) == nil {
				cancel()
			}
		})()
	}
	for {
		l := &lock{d: s.o.Dest, holder: s.o.Holder + " " + rand.Text(), every: s.o.Beat}
		err := l.hold(work, func(holder string) {
			s.o.Logger.Info("another archive works in this destination; this one waits", "holder", holder)
		}, func(held context.Context) error { return s.loop(ctx, held) })
		if work.Err() != nil && !s.o.AtEnd || ctx.Err() != nil && err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("last snapshots: %w", err)
		}
		s.failed("", err)
		if sleep(ctx, min(s.o.Beat, retryAfter)) != nil && !s.o.AtEnd {
			return nil
		}
	}
}

// loop makes snapshots until ctx ends, while it holds the lock. An error is one of the lock or of the last snapshots.
func (s *Service) loop(ctx, held context.Context) error {
	if err := s.learn(held); err != nil {
		return err
	}
	s.hold(true)
	defer s.hold(false)
	for {
		last := ctx.Err() != nil
		wait, err := s.round(held, last)
		switch {
		case held.Err() != nil:
			return context.Cause(held)
		case last:
			return err
		case err == nil:
			s.mu.Lock()
			s.mu.err = nil
			s.mu.Unlock()
		}
		select { // a context that has ended in the round makes the next one the last
		case <-time.After(wait):
		case <-ctx.Done():
		case <-held.Done():
		}
	}
}

func (s *Service) hold(holds bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.holds = holds
}

// learn looks which snapshots there are, so that a Service that begins anew makes none too early.
func (s *Service) learn(ctx context.Context) error {
	all, err := List(ctx, s.o.Dest, "")
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.spaces = make(map[string]*NamespaceStats)
	for _, e := range all { // the newest of each namespace first
		if e.Complete && s.mu.spaces[e.Namespace] == nil {
			// A snapshot of the future, by a clock that was wrong, does not hold up others.
			begun := e.Begun
			if now := s.o.Now(); begun.After(now) {
				begun = now
			}
			s.mu.spaces[e.Namespace] = &NamespaceStats{Since: begun, Success: begun, due: begun.Add(s.o.Every)}
		}
	}
	return nil
}

// round makes a snapshot of each namespace that is due, or of all. wait is the time until another is due.
func (s *Service) round(ctx context.Context, all bool) (wait time.Duration, err error) {
	soon := min(s.o.Every, retryAfter)
	names, err := s.o.Source.Namespaces(ctx)
	if err != nil {
		if ctx.Err() == nil {
			s.failed("", err)
		}
		return soon, err
	}
	s.meet(names)
	wait = soon // a namespace that is new is found then
	for _, name := range names {
		s.mu.Lock()
		n := *s.mu.spaces[name]
		s.mu.Unlock()
		if now := s.o.Now(); all || !n.due.After(now) {
			n.due = now.Add(s.o.Every)
			was := n.Success
			if e := s.once(ctx, name, &n); e != nil {
				if ctx.Err() != nil {
					return 0, errors.Join(err, e)
				}
				e = fmt.Errorf("namespace %q: %w", name, e)
				s.failed(name, e)
				if err = errors.Join(err, e); !n.Success.After(was) { // else a prune alone has failed
					n.due = now.Add(soon)
				}
			}
			s.mu.Lock()
			s.mu.spaces[name] = &n
			s.mu.Unlock()
		}
		wait = min(wait, n.due.Sub(s.o.Now()))
	}
	return max(wait, 0), err
}

// meet forgets namespaces that are gone, and notes new ones, which are due.
func (s *Service) meet(names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.mu.spaces, func(name string, _ *NamespaceStats) bool { return !slices.Contains(names, name) })
	maps.DeleteFunc(s.mu.failures, func(name string, _ uint64) bool {
		return name != "" && !slices.Contains(names, name)
	})
	for _, name := range names {
		if now := s.o.Now(); s.mu.spaces[name] == nil {
			s.mu.spaces[name] = &NamespaceStats{Since: now, due: now}
		}
	}
}

// once makes a snapshot, and prunes.
func (s *Service) once(ctx context.Context, name string, n *NamespaceStats) (err error) {
	x, m, end, err := s.o.Source.Open(ctx, name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	made, err := Create(ctx, x, s.o.Dest, CreateOptions{Rate: s.o.Rate, Manifest: m, Now: s.o.Now})
	if made == nil {
		return err
	}
	if err != nil {
		s.o.Logger.Warn("a snapshot leaves out what is damaged", "namespace", name, "id", made.ID, "keys", made.LeftOut,
			"err", err)
	}
	s.o.Logger.Info("a snapshot is there", "namespace", name, "id", made.ID, "keys", made.Keys, "bytes", made.Bytes,
		"took", made.T1.Sub(made.T0))
	n.Since, n.Success, n.LeftOut = made.T0, made.T1, made.LeftOut
	if s.o.Keep == (Keep{}) {
		return nil
	}
	all, err := List(ctx, s.o.Dest, name)
	if err != nil {
		return fmt.Errorf("prune: %w", err)
	}
	_, away := s.o.Keep.Prune(all, s.o.Now())
	for _, e := range away {
		if e := Remove(ctx, s.o.Dest, e); e != nil {
			err = errors.Join(err, fmt.Errorf("prune: %w", e))
		}
	}
	return err
}
