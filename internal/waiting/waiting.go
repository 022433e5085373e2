// Package waiting is how tests wait for what other goroutines and processes do. It is for tests alone.
//
// A test that waits has no opinion on speed: a machine may give it a twentieth of a processor. So [Until] ends when a
// condition holds, and [Limit] only keeps a broken test from using up the time of its whole package. Both may be used
// concurrently.
package waiting

import (
	"testing"
	"time"
)

// Limit bounds a wait for what has to come, however busy the machine is. A test that passes never waits for so long.
const Limit = 3 * time.Minute

// Until waits until cond holds, and looks every 1 to 10 ms. It fails the test with what was waited for after [Limit].
// It is called by the test's own goroutine, as [testing.T.FailNow] is.
func Until(t testing.TB, what string, cond func() bool) {
	t.Helper()
	pause := time.Millisecond
	for end := time.Now().Add(Limit); !cond(); time.Sleep(pause) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", Limit, what)
		}
		pause = min(pause*5/4, 10*time.Millisecond)
	}
}
