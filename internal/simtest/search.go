package simtest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
)

// Failure is a schedule that broke a rule.
type Failure struct {
	Err      error
	Schedule []int // the choice made at each step
	Trace    []string
}

func (f *Failure) Error() string {
	return fmt.Sprintf("%v\nschedule %v\n%s", f.Err, f.Schedule, strings.Join(f.Trace, "\n"))
}

// Replay runs a schedule again, with a trace; reduced if Exhaust made it.
func Replay(cfg Config, schedule []int, reduced bool) error {
	w, err := NewWorld(cfg, true)
	if err != nil {
		return err
	}
	w.reduce = reduced
	for _, k := range schedule {
		e := w.enabled()
		if k >= len(e) || w.err != nil {
			break
		}
		w.do(e[k])
	}
	if err := w.Finish(); err != nil {
		return &Failure{Err: err, Schedule: schedule, Trace: w.Trace}
	}
	return nil
}

// traced turns a failing schedule into a Failure with its trace, shortened by
// leaving out choices that the failure does not need.
func traced(cfg Config, err error, schedule []int, reduced bool) error {
	best := schedule
	fails := func(s []int) bool { return Replay(cfg, s, reduced) != nil }
	if fails(best) {
		for size := len(best) / 2; size > 0; size /= 2 {
			for lo := 0; lo+size <= len(best); {
				try := append(append([]int(nil), best[:lo]...), best[lo+size:]...)
				if fails(try) {
					best = try
				} else {
					lo += size
				}
			}
		}
	}
	if e := Replay(cfg, best, reduced); e != nil {
		return e
	}
	return &Failure{Err: err, Schedule: schedule}
}

// Random runs one schedule chosen by seed. Besides uniform choice it uses, by the
// seed modulo 3, priorities of clients with few change points (PCT, Burckhardt et
// al., ASPLOS 2010), and queue pairs that are slow for long: each finds what the
// others rarely meet.
func Random(cfg Config, seed uint64) error {
	w, err := NewWorld(cfg, false)
	if err != nil {
		return err
	}
	rng := rand.New(rand.NewPCG(seed, 0x6b7664))
	prio := rng.Perm(len(cfg.Scripts) + 1)
	slow, now := uint32(0), uint32(0) // the queue pair that is slow, if any
	schedule := make([]int, 0, 128)
	for n := 0; n < w.cfg.MaxSteps && w.err == nil; n++ {
		e := w.enabled()
		if len(e) == 0 {
			break
		}
		k := rng.IntN(len(e))
		switch seed % 3 {
		case 1:
			if rng.IntN(12) == 0 {
				i, j := rng.IntN(len(prio)), rng.IntN(len(prio))
				prio[i], prio[j] = prio[j], prio[i]
			}
			// The best of three draws by its client's priority.
			for range 2 {
				if o := rng.IntN(len(e)); prio[e[o].c] < prio[e[k].c] {
					k = o
				}
			}
		case 2:
			if rng.IntN(24) == 0 {
				slow, now = now, uint32(rng.IntN(12))
			}
			for try := 0; try < 12 && e[k].kind == chFire && (e[k].ev.QP == slow || e[k].ev.QP == now); try++ {
				k = rng.IntN(len(e))
			}
		}
		schedule = append(schedule, k)
		w.do(e[k])
	}
	if err := w.Finish(); err != nil {
		return traced(cfg, err, schedule, false)
	}
	return nil
}

// Result of an exhaustive search.
type Result struct {
	States    int // distinct
	Schedules int // run to their end
	Complete  bool
}

// Exhaust visits every state of the scope once, depth first, up to maxStates.
func Exhaust(cfg Config, maxStates int) (Result, error) {
	var res Result
	visited := make(map[uint64]struct{})
	type frame struct{ next, n int }
	var stack []frame
	var schedule []int
	build := func() (*World, error) {
		w, err := NewWorld(cfg, false)
		if err != nil {
			return nil, err
		}
		w.reduce = true
		for _, k := range schedule {
			w.do(w.enabled()[k])
		}
		return w, nil
	}
	w, err := build()
	if err != nil {
		return res, err
	}
	fresh := true // w stands at the end of schedule and was not yet looked at
	for {
		if fresh {
			fresh = false
			n := len(w.enabled())
			_, seen := visited[w.Sum()]
			visited[w.Sum()] = struct{}{}
			if w.err != nil || n == 0 || len(schedule) >= cfg.MaxSteps && cfg.MaxSteps > 0 {
				res.Schedules++
				if err := w.Finish(); err != nil {
					return res, traced(cfg, err, schedule, true)
				}
				w = nil
				stack = append(stack, frame{0, 0})
			} else if seen {
				w = nil
				stack = append(stack, frame{0, 0})
			} else {
				stack = append(stack, frame{0, n})
			}
			res.States = len(visited)
			if res.States >= maxStates {
				return res, nil
			}
		}
		top := &stack[len(stack)-1]
		if top.next >= top.n {
			stack = stack[:len(stack)-1]
			if len(stack) == 0 {
				res.Complete = true
				return res, nil
			}
			schedule = schedule[:len(schedule)-1]
			w = nil
			continue
		}
		if w == nil {
			if w, err = build(); err != nil {
				return res, err
			}
		}
		k := top.next
		top.next++
		schedule = append(schedule, k)
		w.do(w.enabled()[k])
		fresh = true
	}
}

// Directed runs a schedule written down step by step: each step names the choice
// to make by the beginning of its text ("c0 begins"), or "c0*" for all that
// client 0's queue pairs and wake-ups allow. A step that is not possible now is
// left out: what is possible differs with the mistake that is switched on.
func Directed(cfg Config, steps []string) error {
	w, err := NewWorld(cfg, true)
	if err != nil {
		return err
	}
	for _, s := range steps {
		name, all := strings.CutSuffix(s, "*")
		for n := 0; n < 1000 && w.err == nil; n++ {
			i := slices.IndexFunc(w.enabled(), func(ch choice) bool {
				if all {
					return fmt.Sprintf("c%d", ch.c) == name && (ch.kind == chFire || ch.kind == chWake || ch.kind == chConnect || ch.kind == chGrant)
				}
				return strings.HasPrefix(ch.String(), name)
			})
			if i < 0 {
				break
			}
			w.do(w.choices[i])
			if !all {
				break
			}
		}
	}
	if err := w.Finish(); err != nil {
		return &Failure{Err: err, Trace: w.Trace}
	}
	return nil
}
