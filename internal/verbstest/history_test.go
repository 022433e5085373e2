package verbstest

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/rdma"
)

// Verbs of a history.
const (
	verbGet = "get"
	verbPut = "put"
	verbCAS = "cas"
	verbDel = "del"
)

// event is one operation on one key, whose values are never written twice.
type event struct {
	verb      string
	value     string // that it writes; of a get, that it got
	old       string // of a cas: the value whose version it was given
	err       error
	call, end time.Duration // since the history began
}

// open tells whether nobody knows if the operation happened.
func (e *event) open() bool { return client.Outcome(e.err) == rdma.Unknown }

// model is one key: its value, "" when absent.
var model = porcupine.Model{
	Init: func() any { return "" },
	Step: func(state, in, _ any) (bool, any) {
		v, e := state.(string), in.(*event)
		absent := errors.Is(e.err, client.ErrNotFound)
		switch e.verb {
		case verbGet:
			if absent {
				return v == "", v
			}
			return v != "" && v == e.value, v
		case verbPut:
			return true, e.value
		case verbDel:
			return e.open() || absent == (v == ""), ""
		case verbCAS:
			switch {
			case v == "":
				return e.open() || absent, v
			case v != e.old:
				return e.open() || errors.Is(e.err, client.ErrConflict), v
			}
			return e.open() || e.err == nil, e.value
		}
		return false, v
	},
	Equal: func(a, b any) bool { return a.(string) == b.(string) },
	DescribeOperation: func(in, _ any) string {
		e := in.(*event)
		return fmt.Sprintf("%s %q (old %q): %v", e.verb, e.value, e.old, e.err)
	},
}

// history is what several clients did.
type history struct {
	began time.Time
	mu    sync.Mutex
	keys  map[string][]*event
}

func newHistory() *history { return &history{began: time.Now(), keys: map[string][]*event{}} }

// record runs an operation, which fills in e's outcome, and keeps it.
func (h *history) record(key string, e *event, do func()) {
	e.call = time.Since(h.began)
	do()
	e.end = time.Since(h.began)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.keys[key] = append(h.keys[key], e)
}

// check tells whether for every key some order of its operations explains their
// answers. An operation that may have happened may do so at any time after its
// call; one that did not happen explains nothing.
func (h *history) check() error {
	var errs []error
	for key, events := range h.keys {
		var ops []porcupine.Operation
		for _, e := range events {
			op := porcupine.Operation{ClientId: len(ops), Input: e, Call: int64(e.call), Return: int64(e.end)}
			switch {
			case e.open() && e.verb == verbGet, e.failed():
				continue
			case e.open():
				op.Return = math.MaxInt64
			}
			ops = append(ops, op)
		}
		if r := porcupine.CheckOperationsTimeout(model, ops, patience); r != porcupine.Ok {
			errs = append(errs, fmt.Errorf("key %q: %d operations: %v: no order of them explains their answers", key,
				len(ops), r))
		}
	}
	return errors.Join(errs...)
}

// failed tells of an error that is no answer, and says that nothing happened.
func (e *event) failed() bool {
	return e.err != nil && !e.open() && !errors.Is(e.err, client.ErrNotFound) && !errors.Is(e.err, client.ErrConflict)
}

// load is what workers do to a few keys, and to others that are written once.
type load struct {
	*history
	t     *testing.T
	guard sync.Mutex
	// outcomes counts them by verb.
	outcomes map[string]map[string]int
	// acked are the keys that are written once, and were.
	acked map[string]string
}

func newLoad(t *testing.T) *load {
	return &load{history: newHistory(), t: t, outcomes: map[string]map[string]int{}, acked: map[string]string{}}
}

func (l *load) noteOutcome(e *event) {
	l.guard.Lock()
	defer l.guard.Unlock()
	o := "done"
	switch {
	case e.open():
		o = "unknown"
	case e.failed():
		o = "failed"
		l.t.Logf("%s: %v", e.verb, e.err)
	case e.err != nil:
		o = "refused" // not found, conflict
	}
	if l.outcomes[e.verb] == nil {
		l.outcomes[e.verb] = map[string]int{}
	}
	l.outcomes[e.verb][o]++
}

// sum is how many operations ended so.
func (l *load) sum(outcomes ...string) (n int) {
	l.guard.Lock()
	defer l.guard.Unlock()
	for _, by := range l.outcomes {
		for _, o := range outcomes {
			n += by[o]
		}
	}
	return n
}

// run has workers go on while going says so.
func (l *load) run(c *client.Client, workers, keys int, going func() bool) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for w := range workers {
		wg.Go(func() { l.work(c, w, keys, going) })
	}
}

func (l *load) work(c *client.Client, w, keys int, going func() bool) {
	ctx := l.t.Context()
	rng := rand.New(rand.NewPCG(uint64(w), 7))
	type sight struct {
		value   string
		version uint64
	}
	seen := map[string]sight{}
	for n := 0; going(); n++ {
		key, value := fmt.Sprintf("key%d", rng.IntN(keys)), fmt.Sprintf("%d.%d", w, n)
		e := &event{verb: verbPut, value: value}
		var version uint64
		switch p := rng.IntN(20); {
		case p < 8:
			e.verb = verbGet
		case p < 13:
		case p < 16 && seen[key].version != 0:
			e.verb, e.old = verbCAS, seen[key].value
		case p < 18:
			e.verb = verbDel
		default:
			key = "once" + value // several hundred of them
		}
		l.record(key, e, func() {
			k, v := []byte(key), []byte(value)
			switch e.verb {
			case verbGet:
				var it client.Item
				it, e.err = c.Get(ctx, k)
				e.value, version = string(it.Value), it.Version
			case verbPut:
				version, e.err = c.Put(ctx, k, v, client.PutOptions{})
			case verbCAS:
				version, e.err = c.CompareAndSwap(ctx, k, seen[key].version, v, client.PutOptions{})
			case verbDel:
				e.err = c.Delete(ctx, k)
			}
		})
		l.noteOutcome(e)
		if e.err == nil && version != 0 {
			seen[key] = sight{e.value, version}
		}
		if e.err == nil && strings.HasPrefix(key, "once") {
			l.guard.Lock()
			l.acked[key] = value
			l.guard.Unlock()
		}
	}
}
