package nemesis

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

const (
	// longEpochs is more than the reclaim epochs that a dead session's memory waits
	// for before it is granted again, and its recall.
	longEpochs = 1800
)

// zombie is a client that is stopped for longer than its lease.
type zombie struct {
	client string
	cuts   []string // memory nodes that do not hear it
	long   bool     // until its memory may be another's
	deaf   bool     // it is not told at once that it was fenced: no directory node hears it
	awake  bool
	next   time.Time // when it wakes, or hears again
}

// undead stops writing clients beyond their lease, several at a time, while the
// others reuse the memory that theirs was. Every other one is cut off from the
// memory nodes first, so that its verbs wait in the kernel and are sent when it is
// fenced already. Every other one cannot reach the directory for a while after it
// woke, and goes on as if nothing had happened. A third runs at any time. With -restarts the worker of a memory node is
// killed whenever a client has been stopped, and the next one takes its memory over while that client's verbs are under
// way.
func (h *harness) undead() error {
	if err := h.awaitServing(); err != nil {
		return err
	}
	var asleep []*zombie
	awake := slices.Clone(h.scope.clients) // the one that woke last comes last
	begun, ended := 0, 0
	for ended < h.zombies {
		if begun < h.zombies && len(asleep) < 2*h.clients/3 {
			z := &zombie{client: awake[0]}
			// Zombies are woken one at a time; the short ones take the memory up.
			z.long = !slices.ContainsFunc(asleep, func(other *zombie) bool { return other.long })
			awake = awake[1:]
			if err := h.bury(z); err != nil {
				return err
			}
			if h.restarts {
				if err := h.restartAny(); err != nil {
					return err
				}
			}
			asleep = append(asleep, z)
			begun++
			continue
		}
		next := slices.MinFunc(asleep, func(a, b *zombie) int { return a.next.Compare(b.next) })
		if err := h.sleep(time.Until(next.next)); err != nil {
			return err
		}
		if err := h.raise(next); err != nil {
			return err
		}
		if next.deaf {
			continue
		}
		asleep = slices.DeleteFunc(asleep, func(z *zombie) bool { return z == next })
		awake = append(awake, next.client)
		if ended++; ended%100 == 0 {
			h.logf("%d zombies", ended)
		}
	}
	for _, z := range asleep {
		for again := true; again; again = z.deaf {
			if err := h.raise(z); err != nil {
				return err
			}
		}
	}
	return nil
}

// bury stops z's client, perhaps with verbs on their way.
func (h *harness) bury(z *zombie) error {
	// Let it have written.
	if err := h.sleep(h.scope.leases(h.rng, 0, 0.5)); err != nil {
		return err
	}
	var errs []error
	kind := "zombie"
	if h.provider == "tcp" && (z.long || h.rng.IntN(2) == 0) {
		kind += "-with-verbs-queued"
		z.cuts = h.scope.memnodes
		for _, m := range z.cuts {
			errs = append(errs, h.net.cut(z.client, m))
		}
		errs = append(errs, h.sleep(time.Duration(h.rng.IntN(20))*time.Millisecond))
	}
	if z.deaf = z.long || h.rng.IntN(2) == 0; z.deaf {
		kind += "-deaf"
		for _, d := range h.scope.directories {
			errs = append(errs, h.net.cut(z.client, d))
		}
	}
	errs = append(errs, h.procs[z.client].stop())
	rest := h.scope.leases(h.rng, 1.3, 4)
	if z.long {
		kind += "-long"
		rest += longEpochs * h.epochInterval
	}
	h.faults[kind]++
	z.next = time.Now().Add(rest)
	return errors.Join(errs...)
}

// raise lets z's client go on, and, called again, hear.
func (h *harness) raise(z *zombie) error {
	var errs []error
	if z.awake {
		for _, d := range h.scope.directories {
			errs = append(errs, h.net.mend(z.client, d))
		}
		z.deaf = false
	} else {
		for _, m := range z.cuts {
			errs = append(errs, h.net.mend(z.client, m))
		}
		errs = append(errs, h.procs[z.client].resume())
		z.awake, z.next = true, time.Now().Add(h.scope.leases(h.rng, 0.5, 2))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("zombie %s: %w", z.client, err)
	}
	return nil
}
