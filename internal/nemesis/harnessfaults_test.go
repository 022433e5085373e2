package nemesis

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// inflict lets f begin.
func (h *harness) inflict(f *fault, alone bool) error {
	h.faults[f.kind]++
	switch f.kind {
	case killMemnode:
		return h.killNode(f.victims[0], alone)
	case killDirectory:
		return h.procs[f.victims[0]].kill()
	case killClient:
		return h.killClient(f.victims[0])
	case stopMemnode, stopDirectory, stopClient:
		return h.procs[f.victims[0]].stop()
	case quorum:
		var errs []error
		for _, d := range f.victims {
			if f.hard {
				errs = append(errs, h.procs[d].kill())
			} else {
				errs = append(errs, h.procs[d].stop())
			}
		}
		return errors.Join(errs...)
	case cutOneWay:
		return h.net.cut(f.victims[0], f.to)
	case cutBothWays:
		return errors.Join(h.net.cut(f.victims[0], f.to), h.net.cut(f.to, f.victims[0]))
	case slowLink:
		return h.net.slow(f.victims[0])
	}
	return fmt.Errorf("fault of unknown kind %q", f.kind)
}

func (h *harness) killClient(name string) error {
	p := h.procs[name]
	err := p.kill()
	n, _ := strconv.Atoi(name[1:]) // made by newHarness
	h.checker.died(n, p.life)
	return err
}

// relieve ends f.
func (h *harness) relieve(f *fault) error {
	switch f.kind {
	case killMemnode, killDirectory, killClient:
		return h.launch(f.victims[0], nil)
	case stopMemnode, stopDirectory, stopClient:
		return h.procs[f.victims[0]].resume()
	case quorum:
		var errs []error
		for _, d := range f.victims {
			if f.hard {
				errs = append(errs, h.launch(d, nil))
			} else {
				errs = append(errs, h.procs[d].resume())
			}
		}
		return errors.Join(errs...)
	case cutOneWay:
		return h.net.mend(f.victims[0], f.to)
	case cutBothWays:
		return errors.Join(h.net.mend(f.victims[0], f.to), h.net.mend(f.to, f.victims[0]))
	case slowLink:
		return h.net.fast(f.victims[0])
	}
	return nil
}

// suffer lets faults happen together, and returns when all have ended.
func (h *harness) suffer(faults []*fault) error {
	type step struct {
		at time.Duration
		do func() error
	}
	var steps []step
	for _, f := range faults {
		alone := len(faults) == 1
		var silent int64 // when all directory nodes were silent
		steps = append(steps, step{f.after, func() error {
			h.logf("begin %v", f)
			err := h.inflict(f, alone)
			silent = now()
			return err
		}}, step{f.after + f.hold, func() error {
			// No lease outlives the directory's silence, and over tcp, where nothing
			// else tells a client that it is fenced, nothing is answered without one.
			if late := h.probes.lastWrite(); f.kind == quorum && h.provider == "tcp" && late > silent+int64(h.lease) {
				h.fail(fmt.Sprintf("a write that was called %v after all directory nodes fell silent succeeded; the "+
					"lease is %v",
					time.Duration(late-silent), h.lease))
			}
			h.logf("end   %s %s", f.kind, strings.Join(f.victims, ","))
			return h.relieve(f)
		}})
	}
	slices.SortStableFunc(steps, func(a, b step) int { return cmp.Compare(a.at, b.at) })
	began := time.Now()
	for _, s := range steps {
		if err := h.sleep(max(0, s.at-time.Since(began))); err != nil {
			return err
		}
		if err := s.do(); err != nil {
			return err
		}
	}
	return nil
}

// awaitServing waits until the store is whole and serves everybody.
func (h *harness) awaitServing() error {
	healed := now()
	if err := h.whole(wholeLimit); err != nil {
		return err
	}
	return h.serving(healed)
}

// calm is awaitServing, and then lo to hi leases without a fault.
func (h *harness) calm(lo, hi float64) error {
	if err := h.awaitServing(); err != nil {
		return err
	}
	return h.sleep(h.scope.leases(h.rng, lo, hi))
}

// mixed breaks things for the run's duration.
func (h *harness) mixed() error {
	for end := time.Now().Add(h.duration); time.Now().Before(end); {
		if err := h.calm(0, 1); err != nil {
			return err
		}
		if err := h.suffer(h.scope.round(h.rng)); err != nil {
			return err
		}
	}
	return nil
}

// onlyKills kills one memory node after another, and nothing else.
func (h *harness) onlyKills() error {
	for n := range h.kills {
		if err := h.calm(0.5, 1.5); err != nil {
			return err
		}
		st, _ := h.status.get()
		victim, before := h.victim(st), len(h.probes.kills)
		if n%2 == 0 {
			if err := h.killAndMiss(victim); err != nil {
				return err
			}
		} else if err := h.suffer(
			[]*fault{{kind: killMemnode, victims: []string{victim}, hold: h.scope.leases(h.rng, 0.2, 4)}}); err != nil {
			return err
		}
		for _, k := range h.probes.kills[before:] { // appended by this goroutine alone
			if err := h.back(k); err != nil {
				return err
			}
		}
	}
	if err := h.soonBack(); err != nil {
		return err
	}
	h.probes.mu.Lock()
	defer h.probes.mu.Unlock()
	if n := len(h.probes.offends); n > 0 {
		h.fail(fmt.Sprintf("%d errors on keys that no kill concerns, the first: %s", n, h.probes.offends[0]))
	}
	return nil
}
