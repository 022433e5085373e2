package nemesis

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// Kinds of faults.
const (
	killMemnode   = "kill-memnode" // and start it again, empty
	stopMemnode   = "stop-memnode"
	killDirectory = "kill-directory"
	stopDirectory = "stop-directory"
	quorum        = "quorum" // kill or stop all directory nodes
	killClient    = "kill-client"
	stopClient    = "stop-client"
	cutOneWay     = "cut-one-way"
	cutBothWays   = "cut-both-ways"
	slowLink      = "slow-link"
)

var kinds = []string{killMemnode, stopMemnode, killDirectory, stopDirectory, quorum, killClient, stopClient, cutOneWay,
	cutBothWays, slowLink}

// fault is something that goes wrong for a while.
type fault struct {
	kind    string
	victims []string
	to      string // cuts: victims[0] cannot reach it
	after   time.Duration
	hold    time.Duration
	hard    bool // quorum: kill, not stop
}

func (f *fault) String() string {
	s := f.kind + " " + strings.Join(f.victims, ",")
	if f.to != "" {
		s += "→" + f.to
	}
	if f.hard {
		s += " with kill -9"
	}
	return fmt.Sprintf("%s for %v", s, f.hold.Round(time.Millisecond))
}

// scope is what a scheduler may break.
type scope struct {
	directories, memnodes, clients []string
	gateways                       []string // only where processes are stopped, see onlyStops
	lease                          time.Duration
	replicas                       int
	only                           []string // kinds; none: all
}

// softLeases bound a fault that keeps a memory node with the last copy from the
// directory, which takes it for lost after ten.
const softLeases = 3

// endangers is the memory node that the directory may take for lost because of f.
func (s *scope) endangers(f *fault) string {
	hosts := append(slices.Clone(f.victims), f.to)
	node := ""
	for _, h := range hosts {
		if slices.Contains(s.memnodes, h) {
			node = h
		}
	}
	if f.to != "" && slices.ContainsFunc(hosts, func(h string) bool { return slices.Contains(s.clients, h) }) {
		return "" // the directory hears it
	}
	return node
}

func (s *scope) kinds() []string {
	var out []string
	for _, k := range kinds {
		if (len(s.only) == 0 || slices.Contains(s.only, k)) && (k != killMemnode || s.replicas > 1) {
			out = append(out, k)
		}
	}
	return out
}

// leases is a time from lo to hi leases.
func (s *scope) leases(rng *rand.Rand, lo, hi float64) time.Duration {
	return time.Duration((lo + rng.Float64()*(hi-lo)) * float64(s.lease))
}

func (s *scope) one(rng *rand.Rand, kind string) *fault {
	pick := func(from []string) string { return from[rng.IntN(len(from))] }
	f := &fault{kind: kind, hold: s.leases(rng, 0.1, 0.8)}
	if rng.IntN(2) == 0 {
		f.hold = s.leases(rng, 1.2, softLeases)
	}
	switch kind {
	case killMemnode, stopMemnode:
		f.victims = []string{pick(s.memnodes)}
	case killDirectory, stopDirectory:
		f.victims = []string{pick(s.directories)}
	case killClient, stopClient:
		f.victims = []string{pick(s.clients)}
	case quorum:
		f.victims, f.hard, f.hold = slices.Clone(s.directories), rng.IntN(2) == 0, s.leases(rng, 1.5, 5)
	case cutOneWay, cutBothWays:
		// Pairs that talk: directory nodes with all, clients with memory nodes.
		for f.to == "" {
			a, b := pick(slices.Concat(s.directories, s.memnodes, s.clients)),
				pick(slices.Concat(s.directories, s.memnodes, s.clients))
			served := func(x, y string) bool {
				return slices.Contains(s.directories, x) || slices.Contains(s.memnodes, x) &&
					slices.Contains(s.clients, y)
			}
			if a != b && (served(a, b) || served(b, a)) {
				f.victims, f.to = []string{a}, b
			}
		}
	case slowLink:
		f.victims = []string{pick(slices.Concat(s.directories, s.memnodes, s.clients))}
	}
	return f
}

// round draws one to three faults that happen together. They endanger at most
// one memory node, which the store must survive, and no process twice.
func (s *scope) round(rng *rand.Rand) []*fault {
	from := s.kinds()
	n := []int{1, 1, 1, 2, 2, 3}[rng.IntN(6)]
	var out []*fault
	endangered := ""
	for range 20 * n {
		if len(out) == n {
			break
		}
		f := s.one(rng, from[rng.IntN(len(from))])
		node := s.endangers(f)
		if node != "" && endangered != "" && node != endangered {
			continue
		}
		if slices.ContainsFunc(out, func(o *fault) bool {
			return slices.ContainsFunc(f.victims, func(v string) bool { return slices.Contains(o.victims, v) })
		}) {
			continue
		}
		if node != "" {
			endangered = node
		}
		if len(out) > 0 {
			f.after = s.leases(rng, 0, 1)
		}
		out = append(out, f)
	}
	return out
}
