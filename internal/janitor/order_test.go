package janitor

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// While a placement group is recovered other jobs begin nothing, for a while; recoveries wait for nobody.
func TestRecoveriesGoFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const recovers, joins = dirpb.JobKind_JOB_RECOVER, dirpb.JobKind_JOB_JOIN
		var o order
		turn := func(ctx context.Context, kind dirpb.JobKind) (done chan time.Duration) {
			done = make(chan time.Duration, 1)
			began := time.Now()
			go func() { o.turn(ctx, kind); done <- time.Since(began) }()
			synctest.Wait()
			return done
		}
		takes := func(what string, done chan time.Duration, want time.Duration) {
			t.Helper()
			if got := <-done; got != want {
				t.Errorf("%s waits %v, want %v", what, got, want)
			}
		}
		o.begin(joins)
		takes("a join beside another", turn(t.Context(), joins), 0)
		first, second := o.begin(recovers), o.begin(recovers)
		takes("a recovery beside others", turn(t.Context(), recovers), 0)
		join := turn(t.Context(), joins)
		first()
		time.Sleep(turnMost / 2)
		second()
		takes("a join beside two recoveries", join, turnMost/2)
		takes("a join behind them", turn(t.Context(), joins), 0)

		third := o.begin(recovers)
		defer third()
		takes("a join beside a recovery that lasts", turn(t.Context(), joins), turnMost)
		ctx, cancel := context.WithCancel(t.Context())
		join = turn(ctx, joins)
		cancel()
		takes("a janitor that ends", join, 0)
	})
}
