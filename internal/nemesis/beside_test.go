package nemesis

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/overview"
)

// Namespaces with one copy of everything, beside that of the run: a store, and a cache.
const (
	single = "single"
	pages  = "pages"
)

// oneCopy are they, as `kvctl namespace create` makes them.
var oneCopy = []struct {
	name string
	args []string
}{
	{single, []string{"--replicas", "1", "--bytes", "16MiB"}},
	{pages, []string{"--replicas", "1", "--bytes", "16MiB", "--mode", "cache"}},
}

// fewLeases is how soon what does not wait for a dead memory node is back. The quickest of a run's kills has to be: any
// other may be slow with the machine.
const fewLeases = 5

// namespaces are those that clients use: the run's first.
func (h *harness) namespaces() []string {
	all := []string{namespace}
	if h.beside {
		for _, b := range oneCopy {
			all = append(all, b.name)
		}
	}
	return all
}

func (h *harness) createBeside() error {
	for _, b := range oneCopy {
		if out, err := h.kvctl(append([]string{"namespace", "create", b.name}, b.args...)...); err != nil {
			return fmt.Errorf("%w\n%s", err, out)
		}
	}
	return nil
}

// heardGone takes word that a probe found nothing where it had written. A cache may do that; the store only where its
// only copy was killed.
func (h *harness) heardGone(client int, f []string) error {
	if len(f) != 2 {
		return fmt.Errorf("client %d said gone with %d fields", client, len(f))
	}
	pg, err := strconv.ParseUint(f[1], 10, 32)
	if err != nil {
		return err
	}
	h.probes.mu.Lock()
	defer h.probes.mu.Unlock()
	if f[0] != pages && !h.probes.mayLack[uint32(pg)] {
		return fmt.Errorf("client %d: what it had written to placement group %d of %s is gone, whose memory node was "+
			"not killed", client, pg, f[0])
	}
	return nil
}

// victim is a memory node to be killed: one that holds something of the run's namespace and of the cache, if any does.
func (h *harness) victim(st *dirpb.StatusReply) string {
	from := placementOf(st, namespace).holders() // the last victim may still be empty
	if h.beside {
		cached := placementOf(st, pages).holders()
		if both := slices.DeleteFunc(slices.Clone(from), func(n string) bool {
			return !slices.Contains(cached, n)
		}); len(both) > 0 {
			from = both
		}
	}
	return from[h.rng.IntN(len(from))]
}

// killNode kills a memory node: its worker and its keeper, if it has one.
func (h *harness) killNode(name string, alone bool) error {
	st, _ := h.status.get()
	h.probes.mu.Lock()
	for _, ns := range h.namespaces()[1:] {
		for pg, members := range placementOf(st, ns).members {
			h.probes.mayLack[pg] = h.probes.mayLack[pg] || slices.Contains(members, name)
		}
	}
	h.probes.mu.Unlock()
	if pid := h.procs[name].worker(); pid != 0 {
		_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended, and dies with its keeper
	}
	if err := h.procs[name].kill(); err != nil {
		return err
	}
	h.gone[nodeNamed(st.GetMap(), name).GetIncarnation()] = true
	if alone {
		for _, ns := range h.namespaces() {
			h.probes.killed(name, now(), placementOf(st, ns), h.clientNumbers())
		}
	}
	return nil
}

// back waits until what a kill took away is back.
func (h *harness) back(k *kill) error {
	return h.until(fmt.Sprintf("keys of %s that %s had are back", k.place.namespace, k.victim), recoverLimit,
		func() string {
			return h.probes.missing(k)
		})
}

// killAndMiss kills a memory node, and starts it again when everything is back that has to be back without it: the
// run's namespace has another copy, and a cache starts over elsewhere. Of the only copies of the store the status says
// that they are waited for, and of nothing else.
func (h *harness) killAndMiss(victim string) error {
	f := &fault{kind: killMemnode, victims: []string{victim}}
	h.logf("begin %s %s, until it is missed no more", f.kind, victim)
	before := len(h.probes.kills)
	if err := h.inflict(f, true); err != nil {
		return err
	}
	waits := false
	for _, k := range h.probes.kills[before:] {
		if k.place.namespace == single {
			waits = true
		} else if err := h.back(k); err != nil {
			return err
		}
	}
	if waits {
		if err := h.until("the status says that only "+single+" waits for "+victim, recoverLimit, func() string {
			st, _ := h.status.get()
			return waitsAlone(overview.Problems(st), victim)
		}); err != nil {
			return err
		}
	}
	h.logf("end   %s %s", f.kind, victim)
	return h.relieve(f)
}

// waitsAlone is empty if a status says that single waits for a memory node, and nothing else does.
func waitsAlone(all []overview.Problem, victim string) string {
	for _, p := range all {
		if !strings.Contains(p.What, "memory node "+victim+" is silent and has the only copy of") {
			continue
		}
		if !strings.Contains(p.What, "of namespace "+single) || strings.Contains(p.What, namespace) ||
			strings.Contains(p.What, pages) {
			return p.What
		}
		return ""
	}
	return fmt.Sprintf("no word of it: %v", all)
}

// soonBack wants what does not wait for a dead memory node to have been back within a few leases.
func (h *harness) soonBack() error {
	for _, ns := range h.namespaces() {
		all, kills := h.probes.recoveries(ns)
		switch {
		case ns == single:
		case kills == 0:
			return fmt.Errorf("no kill concerned namespace %s", ns)
		case len(all) == 0 || all[0] > fewLeases*h.lease:
			return fmt.Errorf("namespace %s was back %v after kills, want one of them within %d leases of %v", ns, all,
				fewLeases, h.lease)
		}
	}
	return nil
}

// besideLate wants a cache to serve, and nothing to wait for it, while a memory node that had all of one of its
// placement groups stays away.
func (h *harness) besideLate(late string) error {
	began := time.Now()
	err := h.until("the cache serves without "+late, recoverLimit, func() string {
		st, _ := h.status.get()
		place := placementOf(st, pages)
		if slices.Contains(place.holders(), late) {
			return late + " still has a placement group of it"
		}
		for _, key := range place.keys("late") {
			if out, err := h.kvctl("put", key, "v", "--namespace", pages, "--timeout", "1s"); err != nil {
				return fmt.Sprintf("put %s: %v\n%s", key, err, out)
			}
		}
		return ""
	})
	h.logf("while %s is waited for, every placement group of the cache serves after %v", late,
		time.Since(began).Round(time.Millisecond))
	return err
}
