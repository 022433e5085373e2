package nemesis

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// parting is the end of a process that the others go on without, asked for or not.
type parting struct {
	who string // leader, follower, memory node or gateway
	how syscall.Signal
	// From just before the signal until everybody was served again without the victim;
	// end is 0 until then.
	begin, end int64
	took       time.Duration // from the signal to the process's end
	lost       int           // sessions
	// Operations that were under way in that time; own of the unknown ones were on a key
	// that nobody else writes.
	unknown, own, refused int
	longest               time.Duration
	examples              []string
}

// parts opens a parting's window.
func (s *probes) parts(who string, how syscall.Signal) *parting {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := &parting{who: who, how: how, begin: now()}
	s.partings = append(s.partings, p)
	return p
}

// over closes p's window.
func (s *probes) over(p *parting) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p.end = now()
}

// partingLocked notes an operation with every parting that it was under way in.
func (s *probes) partingLocked(call, retn int64, out string, own bool, what string) {
	for _, p := range s.partings {
		if retn < p.begin || p.end != 0 && call > p.end {
			continue
		}
		p.longest = max(p.longest, time.Duration(retn-call))
		switch out {
		case outUnknown:
			p.unknown++
			if own {
				p.own++
			}
		case outNo:
			p.refused++
		default:
			continue
		}
		if len(p.examples) < 3 {
			p.examples = append(p.examples, fmt.Sprintf("%v after the signal: %s: %s", time.Duration(retn-p.begin), out,
				what))
		}
	}
}

// partingTable has a line for each kind of process and signal.
func (s *probes) partingTable() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.partings) == 0 {
		return ""
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%-12s %-8s %5s %8s %8s %8s %8s %13s %14s %12s\n", "stop of", "signal", "times", "unknown",
		"own keys", "refused", "sessions", "longest stall", "median longest", "longest stop")
	for _, who := range []string{leaderNode, followerNode, memoryNode, gatewayNode} {
		for _, how := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
			sum, stalls, took := parting{}, []time.Duration{}, time.Duration(0)
			for _, p := range s.partings {
				if p.who != who || p.how != how {
					continue
				}
				sum.unknown, sum.own, sum.refused, sum.lost = sum.unknown+p.unknown, sum.own+p.own, sum.refused+
					p.refused, sum.lost+p.lost
				stalls, took = append(stalls, p.longest), max(took, p.took)
			}
			if len(stalls) == 0 {
				continue
			}
			slices.Sort(stalls)
			signal := map[syscall.Signal]string{syscall.SIGTERM: "SIGTERM", syscall.SIGKILL: "SIGKILL"}[how]
			fmt.Fprintf(&b, "%-12s %-8s %5d %8d %8d %8d %8d %13v %14v %12v\n", who, signal, len(stalls), sum.unknown,
				sum.own, sum.refused, sum.lost,
				stalls[len(stalls)-1].Round(time.Millisecond), percentile(stalls, 50).Round(time.Millisecond),
				took.Round(time.Millisecond))
		}
	}
	return b.String()
}

// rude gives what operations noticed of processes that were asked to end: nothing, but
// that a word which a memory node has decided alone goes with it, and its writer does not
// learn what became of it if another client writes the key first.
func (s *probes) rude() (out []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.partings {
		unknown := p.unknown
		if p.who == memoryNode {
			unknown = p.own
		}
		if p.how == syscall.SIGTERM && (unknown > 0 || p.refused > 0 || p.lost > 0) {
			out = append(out, fmt.Sprintf("SIGTERM of a %s: %d unknown outcomes, %d refused, %d sessions lost: %s",
				p.who, p.unknown, p.refused, p.lost, strings.Join(p.examples, "; ")))
		}
	}
	return out
}

const (
	leaderNode   = "leader"
	followerNode = "follower"
	memoryNode   = "memory node"
	gatewayNode  = "gateway"
)

// onlyStops ends the directory's leader, each of its followers, a memory node and a gateway,
// by SIGTERM and by SIGKILL, so many times.
func (h *harness) onlyStops() error {
	for range h.stops {
		for _, who := range []string{leaderNode, followerNode, followerNode, memoryNode, gatewayNode} {
			for _, how := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
				if err := h.calm(0.1, 0.5); err != nil {
					return err
				}
				if err := h.part(who, how); err != nil {
					return err
				}
			}
		}
	}
	return h.awaitServing()
}

// part ends one process, waits until everybody is served without it, and starts it again.
func (h *harness) part(who string, how syscall.Signal) error {
	st, _ := h.status.get()
	var from []string
	switch who {
	case memoryNode:
		from = placementOf(st, namespace).holders()
	case gatewayNode:
		from = slices.Clone(h.scope.gateways)
	}
	for _, d := range st.GetDirectory() {
		if who == leaderNode && d.GetLeader() || who == followerNode && !d.GetLeader() {
			from = append(from, d.GetId())
		}
	}
	if len(from) == 0 {
		return fmt.Errorf("no %s to stop", who)
	}
	slices.Sort(from)
	// Followers and gateways take turns.
	turn := h.faults[who+" "+how.String()]
	victim := from[turn%len(from)]
	h.faults[who+" "+how.String()]++
	if n := nodeNamed(st.GetMap(), victim); n.GetState() == dirpb.NodeState_NODE_UP {
		h.gone[n.GetIncarnation()] = true
	}
	h.logf("%v of %s, a %s", how, victim, who)
	h.count()
	lost := h.lost
	p := h.probes.parts(who, how)
	var err error
	if how == syscall.SIGTERM {
		err = h.procs[victim].end(endLimit)
	} else {
		err = h.procs[victim].kill()
	}
	if err != nil {
		return err
	}
	p.took = time.Duration(now() - p.begin)
	// A lease later everybody has noticed.
	if err := h.sleep(h.lease); err != nil {
		return err
	}
	if err := h.serving(now()); err != nil {
		return err
	}
	h.probes.over(p)
	h.count()
	p.lost = h.lost - lost
	// A process that has not begun yet would die of the next SIGTERM.
	return h.launchReady(victim)
}
