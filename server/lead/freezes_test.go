package lead

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// A freeze ends when every session has quiesced, or is fenced, and nothing is left to
// recover.
func TestThaw(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 4)
	ns, other := w.create("n", 2, 4), w.create("other", 1, 4)
	a, b := w.open(ns), w.open(ns)
	w.quiet[w.open(other)] = true // of no concern
	w.down(2)
	w.on(1, dirpb.PGState_PG_FROZEN, 1)
	v := w.s.FrozenVersion(1)
	w.want()
	w.renew(a, 0, v)
	w.want()
	w.renew(b, 0, v-1)
	w.want()
	w.renew(b, v, 0) // the stricter word implies the other
	w.want("group 1: every session has quiesced", "group 2: every session has quiesced")

	// A session that quiesced and then fell silent still holds a freeze up, until it is fenced.
	w.ack()
	w.boot("m2", "d2", 4, 2)
	w.mute[2] = false
	w.want(`group 1: memory node "m2" is to join`, `group 2: memory node "m2" is to join`)
	w.down(3)
	w.on(3, dirpb.PGState_PG_FROZEN, 1)
	v = w.s.FrozenVersion(3)
	w.renew(a, 0, v)
	w.pass(lease / 2)
	w.renew(b, 0, v)
	w.pass(lease/2 + 1)
	w.beat()
	w.quiet[a] = true
	steps := w.plan()
	if len(steps) != 1 || !strings.HasPrefix(steps[0].Why, "fencing sessions") {
		t.Fatalf("due are %v, want a fence", steps)
	}
	w.apply(steps[0].Do)
	w.want()
	w.fence()
	w.want("group 3: every session has quiesced")
}

// A map that does not exist yet is not acknowledged, whatever a session says: when it does
// exist, everybody waits for the session as for any other.
func TestAcksOfTheFuture(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 4)
	x := w.open(w.create("n", 2, 4))
	v := w.s.MapVersion()
	w.renew(x, v+100, v+200)
	if acked, quiesced, ok := w.l.Acknowledged(x); acked != v || quiesced != v || !ok {
		t.Fatalf("acknowledged %d, quiesced %d, of maps up to %d", acked, quiesced, v)
	}
	w.down(2)
	w.on(1, dirpb.PGState_PG_FROZEN, 1)
	w.want() // not before it has quiesced
	w.renew(x, 0, w.s.FrozenVersion(1))
	w.want("group 1: every session has quiesced", "group 2: every session has quiesced")
}

// Of three copies one is lost: the others are brought in step before anyone goes on.
func TestRecover(t *testing.T) {
	w := newWorld(t)
	w.nodes(3, 4)
	ns := w.create("n", 3, 1)
	x := w.open(ns)
	w.down(1)
	for pg := range uint32(3) {
		if w.pg(pg+1).State != dirpb.PGState_PG_FROZEN {
			t.Fatalf("%v", w.pg(pg+1))
		}
	}
	if j := w.claim(x); j != nil {
		t.Fatalf("claimed %v before anyone quiesced", j)
	}
	if names := w.l.Work(w.s, w.now); len(names) != 0 || !w.l.Jobs(w.s, w.now)[0].Waiting {
		t.Fatalf("work in %q, jobs %v", names, w.l.Jobs(w.s, w.now))
	}
	w.renew(x, 0, w.s.MapVersion()) // acknowledging can wait
	w.want()
	if names := w.l.Work(w.s, w.now); !slices.Equal(names, []string{"n"}) || w.l.Jobs(w.s, w.now)[0].Waiting {
		t.Fatalf("work in %q", names)
	}
	for pg := range uint32(3) {
		w.do(x, dirpb.JobKind_JOB_RECOVER)
		w.want(fmt.Sprintf("group %d: every session has quiesced", pg+1))
	}
	w.ack()
	w.want() // nobody is left to join
}
