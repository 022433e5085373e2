package simtest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
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

func (f *Failure) Unwrap() error { return f.Err }

// errIdle is of a schedule written down that does not come to what it is about. With a
// mistake in the code that says nothing.
var errIdle = errors.New("the schedule misses its point")

// Replay runs a schedule again, with a trace; reduced if Exhaust made it.
func Replay(cfg Config, schedule []int, reduced bool) error {
	w, err := NewWorld(cfg, true)
	if err != nil {
		return err
	}
	defer w.Close()
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
	defer w.Close()
	schedule := w.runRandom(seed)
	if err := w.Finish(); err != nil {
		return traced(cfg, err, schedule, false)
	}
	return nil
}

// runRandom makes seed's choices.
func (w *World) runRandom(seed uint64) (schedule []int) {
	rng := rand.New(rand.NewPCG(seed, 0x6b7664))
	prio := rng.Perm(len(w.cls) + 1)
	prioOf := func(ch choice) int { return prio[min(ch.c+1, len(w.cls))] } // the directory is one of them
	slow, now := uint32(0), uint32(0)                                      // the queue pairs that are slow, if any
	schedule = make([]int, 0, 128)
	for n := 0; n < w.cfg.MaxSteps && w.err == nil; n++ {
		e := w.enabled()
		if len(e) == 0 {
			break
		}
		k := rng.IntN(len(e))
		if e[k].kind > faults {
			k = rng.IntN(len(e)) // faults are few, and not all at the start
		}
		switch seed % 3 {
		case 1:
			if rng.IntN(12) == 0 {
				i, j := rng.IntN(len(prio)), rng.IntN(len(prio))
				prio[i], prio[j] = prio[j], prio[i]
			}
			// The best of three draws by its client's priority.
			for range 2 {
				if o := rng.IntN(len(e)); prioOf(e[o]) < prioOf(e[k]) {
					k = o
				}
			}
		case 2:
			if rng.IntN(24) == 0 {
				slow, now = now, 1+uint32(rng.IntN(max(1, len(w.owners)-1)))
			}
			for try := 0; try < 12 && e[k].kind == chFire && (e[k].ev.QP == slow || e[k].ev.QP == now); try++ {
				k = rng.IntN(len(e))
			}
		}
		schedule = append(schedule, k)
		w.do(e[k])
	}
	return schedule
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
				err := w.Finish()
				w.Close()
				if err != nil {
					return res, traced(cfg, err, schedule, true)
				}
				w = nil
				stack = append(stack, frame{0, 0})
			} else if seen {
				w.Close()
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

// Directed runs a schedule written down step by step. A step names the choice to make
// by the beginning of its text ("c0 begins", "c1 m0 CAS"), or by that and its end ("c0 late *
// answered"), or several:
//
//	c0*            all that client 0's queue pairs, wake-ups, grants and its job allow
//	c0* -m1        the same but for verbs at m1
//	c0>publish     as c0*, until an operation of it is in that step
//	c0|m1 CAS|2    as c0*, until the second verb that would be "m1 CAS…" could take effect
//	c0 renews      a renewal is sent, served and answered
//	c0 hands back  it renews until a renewal hands memory back, which is sent and not served
//	c1 is done     nothing: client 1 has nothing under way
//	freed          nothing: an extent has been recalled and is free again
//	directory*     all that is due with the directory and the memory nodes
//	all*           everything that is no fault, no wish and begins no script step
//	all* -c1       the same without client 1
//
// A step that is not possible now is left out: what is possible differs with the mistake
// that is switched on.
func Directed(cfg Config, steps []string) error {
	w, err := NewWorld(cfg, true)
	if err != nil {
		return err
	}
	defer w.Close()
	for _, s := range steps {
		w.traceLine("-- %s", s)
		w.direct(s)
	}
	w.traceLine("-- finish")
	if err := w.Finish(); err != nil {
		return &Failure{Err: err, Trace: w.Trace}
	}
	return nil
}

func (w *World) direct(s string) {
	name, except, _ := strings.Cut(s, " -")
	own := func(ch choice, who string) bool {
		if fmt.Sprintf("c%d", ch.c) != who || ch.kind >= chBegin && ch.kind != chAskSplit {
			return false
		}
		return except == "" || ch.kind != chFire || !strings.HasPrefix(ch.String(), who+" "+except)
	}
	switch {
	case s == "freed":
		if w.freed == 0 {
			w.fail(fmt.Errorf("%w: no extent was recalled", errIdle))
		}
	case s == "directory*":
		w.repeat(func(ch choice) bool { return ch.kind == chDirectory || ch.kind == chChore })
	case name == "all*":
		w.repeat(func(ch choice) bool {
			return fmt.Sprintf("c%d", ch.c) != except && ch.kind < faults && ch.kind != chBegin &&
				ch.kind != chBeginTwo && ch.kind != chAct && ch.kind != chAdvance && ch.kind != chResume &&
				ch.kind != chHear && ch.kind != chNodeBack && ch.kind != chAdopt
		})
	case strings.HasSuffix(name, "*"):
		w.repeat(func(ch choice) bool { return own(ch, name[:len(name)-1]) })
	case strings.Contains(s, "|"):
		part := strings.Split(s, "|")
		n, _ := strconv.Atoi(part[2])
		is := func(ch choice) bool {
			return ch.kind == chFire && strings.HasPrefix(ch.String(), part[0]+" "+part[1])
		}
		for w.err == nil {
			w.repeat(func(ch choice) bool { return own(ch, part[0]) && !is(ch) })
			i := slices.IndexFunc(w.enabled(), is)
			if n--; i < 0 || n == 0 {
				return
			}
			w.do(w.choices[i])
		}
	case strings.Contains(name, ">"):
		who, step, _ := strings.Cut(name, ">")
		there := func() bool {
			for _, c := range w.cls {
				if fmt.Sprintf("c%d", c.i) == who {
					for _, r := range c.run {
						if r.t.Op.Step().String() == step {
							return true
						}
					}
				}
			}
			return false
		}
		w.repeat(func(ch choice) bool { return !there() && own(ch, who) })
	case strings.HasSuffix(s, " is done"):
		for _, c := range w.cls {
			if fmt.Sprintf("c%d", c.i) == strings.TrimSuffix(s, " is done") && len(c.run) > 0 {
				w.fail(fmt.Errorf("client %d waits: %s", c.i, c.underWay()))
			}
		}
	case strings.HasSuffix(s, " hands back"):
		w.handsBack(strings.TrimSuffix(s, "hands back"))
	case strings.HasSuffix(s, " renews"):
		for _, what := range []string{"sends renewal", "renewal served", "renewal answered"} {
			w.one(strings.TrimSuffix(s, "renews") + what)
		}
	default:
		w.one(s)
	}
}

func (w *World) handsBack(who string) {
	for range 8 {
		w.one(who + "sends renewal")
		for _, c := range w.cls {
			q := c.renew.ask.Renew
			if c.renew.stage == 1 && fmt.Sprintf("c%d ", c.i) == who && len(q.HandBacks)+len(q.Returns) > 0 {
				return
			}
		}
		w.one(who + "renewal served")
		w.one(who + "renewal answered")
	}
	w.fail(fmt.Errorf("%w: %shands nothing back", errIdle, who))
}

// repeat makes the first choice that is allowed, again and again; but whoever waits looks
// again a few times only.
func (w *World) repeat(allowed func(choice) bool) {
	wakes := 0
	for n := 0; n < 3000 && w.err == nil; n++ {
		i := slices.IndexFunc(w.enabled(), func(ch choice) bool {
			return (ch.kind != chWake || wakes < 20) && allowed(ch)
		})
		if i < 0 {
			return
		}
		if w.choices[i].kind == chWake {
			wakes++
		}
		w.do(w.choices[i])
	}
}

func (w *World) one(text string) {
	if w.err != nil {
		return
	}
	from, to, _ := strings.Cut(text, " * ")
	is := func(ch choice) bool {
		return strings.HasPrefix(ch.String(), from) && strings.HasSuffix(ch.String(), to)
	}
	if i := slices.IndexFunc(w.enabled(), is); i >= 0 {
		w.do(w.choices[i])
		return
	}
	w.traceLine("      (not possible)")
}
