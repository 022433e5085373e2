package nemesis

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// probe is one access of a client's probe, see loadConfig.
type probe struct {
	client       int
	pg           uint32
	verb         string
	call, retn   int64
	out, errText string
}

func parseProbe(client int, fields []string) (p probe, err error) {
	if len(fields) != 6 {
		return p, fmt.Errorf("probe with %d fields", len(fields))
	}
	pg, err := strconv.ParseUint(fields[0], 10, 32)
	if err != nil {
		return p, err
	}
	p = probe{client: client, pg: uint32(pg), verb: fields[1], out: fields[4]}
	if p.call, err = strconv.ParseInt(fields[2], 10, 64); err != nil {
		return p, err
	}
	if p.retn, err = strconv.ParseInt(fields[3], 10, 64); err != nil {
		return p, err
	}
	p.errText, err = strconv.Unquote(fields[5])
	return p, err
}

// kill is the death of a memory node while nothing else was wrong.
type kill struct {
	victim string
	at     int64
	place  *placement // when it died
	// written are the ends of Puts that were called after the kill, by client and
	// placement group of the victim; open are those not yet written and read.
	written   map[where]int64
	open      map[where]bool
	recovered int64 // when the last was read; 0: not yet
}

type where struct {
	client int
	pg     uint32
}

// concerns tells whether a placement group is of the kill's namespace.
func (k *kill) concerns(pg uint32) bool { _, ok := k.place.members[pg]; return ok }

func (k *kill) touches(pg uint32) bool { return slices.Contains(k.place.members[pg], k.victim) }

// probes gathers what the clients' probes tell. It may be used concurrently.
type probes struct {
	mu      sync.Mutex
	kills   []*kill
	offends []string // failures of keys that a kill should not have touched
	// partings are ends of processes, see onlyStops.
	partings []*parting
	// written is the newest call of a Put that succeeded.
	written map[where]int64
	last    map[where]probe
	// counted is the newest call of an INCR that succeeded, by Redis client.
	counted map[int]int64
	// mayLack are placement groups whose only copy was killed.
	mayLack map[uint32]bool
}

func newProbes() *probes {
	return &probes{written: map[where]int64{}, last: map[where]probe{}, counted: map[int]int64{},
		mayLack: map[uint32]bool{}}
}

// killed opens a kill's window in one namespace; nil for a victim that held nothing of it.
func (s *probes) killed(victim string, at int64, place *placement, clients []int) *kill {
	k := &kill{victim: victim, at: at, place: place, written: map[where]int64{}, open: map[where]bool{}}
	for pg := range place.members {
		for _, c := range clients {
			if k.touches(pg) {
				k.open[where{c, pg}] = true
			}
		}
	}
	if len(k.open) == 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kills = append(s.kills, k)
	return k
}

func (s *probes) saw(p probe) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := where{p.client, p.pg}
	s.last[at] = p
	s.partingLocked(p.call, p.retn, p.out, true, p.verb+" of a probe: "+p.errText)
	if p.verb == verbPut && p.out == outOK {
		s.written[at] = max(s.written[at], p.call)
	}
	for _, k := range s.kills {
		if k.recovered != 0 || p.call < k.at || !k.concerns(p.pg) {
			continue
		}
		switch {
		case !k.touches(p.pg):
			if p.out == outNo || p.out == outUnknown {
				s.offends = append(s.offends, fmt.Sprintf("kill of %s: client %d, placement group %d, %s after %v: "+
					"%s %s",
					k.victim, p.client, p.pg, p.verb, time.Duration(p.retn-k.at), p.out, p.errText))
			}
		case p.out != outOK:
		case p.verb == verbPut && k.written[at] == 0:
			k.written[at] = p.retn
		case p.verb == verbGet && k.written[at] != 0 && p.call >= k.written[at]:
			if delete(k.open, at); len(k.open) == 0 {
				k.recovered = p.retn
			}
		}
	}
}

// touched adds what the load met during kills: ops that failed on keys of
// placement groups without the victim.
func (s *probes) touched(h []event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range h {
		e := &h[i]
		if e.Return != 0 {
			s.partingLocked(e.Call, e.Return, e.Out, false, e.Verb+": "+e.Err)
		}
		if e.Out != outNo && e.Out != outUnknown {
			continue
		}
		for _, k := range s.kills {
			if k.place.namespace != namespace || e.Return < k.at || k.recovered != 0 && e.Call > k.recovered {
				continue
			}
			if pg := k.place.pg(e.Key); !k.touches(pg) {
				s.offends = append(s.offends, fmt.Sprintf("kill of %s: client %d, placement group %d, %s of %q after "+
					"%v: %s",
					k.victim, e.Client, pg, e.Verb, e.Key, time.Duration(e.Return-k.at), e.Err))
			}
		}
	}
}

// missing tells which keys of k have not come back.
func (s *probes) missing(k *kill) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for w := range k.open {
		out = append(out, s.lastLocked(w))
	}
	slices.Sort(out)
	return strings.Join(out, "; ")
}

func (s *probes) lastLocked(w where) string {
	p := s.last[w]
	return fmt.Sprintf("client %d, placement group %d, whose last probe was %v ago: %s %s %s", w.client, w.pg,
		time.Duration(now()-p.retn).Round(time.Millisecond), p.verb, p.out, p.errText)
}

// served tells which of clients has not written to every placement group since
// then, and to which.
func (s *probes) served(since int64, clients []int, pgs []uint32) (client int, missing string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range clients {
		for _, pg := range pgs {
			if s.written[where{c, pg}] < since {
				return c, s.lastLocked(where{c, pg})
			}
		}
	}
	return 0, ""
}

// lastWrite is the newest call of any Put that succeeded.
func (s *probes) lastWrite() (at int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.written {
		at = max(at, t)
	}
	return at
}

// recoveries tells how long kills kept a namespace's keys away, the shortest first, and of how many kills.
func (s *probes) recoveries(namespace string) (all []time.Duration, kills int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.kills {
		if k.place.namespace != namespace {
			continue
		}
		if kills++; k.recovered != 0 {
			all = append(all, time.Duration(k.recovered-k.at))
		}
	}
	slices.Sort(all)
	return all, kills
}

// percentile of sorted, by nearest rank.
func percentile(sorted []time.Duration, p float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	i := int(p/100*float64(len(sorted)) + 0.999999)
	return sorted[min(max(i, 1), len(sorted))-1]
}
