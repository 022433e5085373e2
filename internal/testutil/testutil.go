// Package testutil is how tests wait for what other goroutines and processes do, and where they listen. It is for tests
// alone.
//
// A test that waits has no opinion on speed: a machine may give it a twentieth of a processor. So [Until] and
// [UntilNone] end when a condition holds, and [Limit] only keeps a broken test from using up the time of its whole
// package. All may be used concurrently.
package testutil

import (
	"net"
	"os"
	"testing"
	"time"
)

// Limit bounds a wait for what has to come, however busy the machine is. A test that passes never waits for so long.
const Limit = 3 * time.Minute

// LimitEnv names a shorter limit, of processes that run a test which is to fail.
const LimitEnv = "KVD_TEST_LIMIT"

var limit = limitOf(os.Getenv(LimitEnv)) // written here alone

func limitOf(env string) time.Duration {
	if d, err := time.ParseDuration(env); err == nil && d > 0 {
		return min(d, Limit)
	}
	return Limit
}

// Until waits until cond holds, and looks every 1 to 10 ms. It fails the test with what was waited for after [Limit].
// It is called by the test's own goroutine, as [testing.T.FailNow] is.
func Until(t testing.TB, what string, cond func() bool) {
	t.Helper()
	if !poll(cond) {
		t.Fatalf("not within %v: %s", limit, what)
	}
}

// UntilNone is [Until] for what says what is left: an error, a text, a number. Nothing is left when that is nil, empty
// or 0. A failure shows what was left last.
func UntilNone[T comparable](t testing.TB, what string, left func() T) {
	t.Helper()
	var none, last T
	if !poll(func() bool { last = left(); return last == none }) {
		t.Fatalf("not within %v: %s: %v", limit, what, last)
	}
}

// poll tells whether cond has held before Limit.
func poll(cond func() bool) bool {
	pause := time.Millisecond
	for end := time.Now().Add(limit); !cond(); time.Sleep(pause) {
		if time.Now().After(end) {
			return false
		}
		pause = min(pause*5/4, 10*time.Millisecond)
	}
	return true
}

// Listen listens on a port of 127.0.0.1 that the kernel chooses, until the test ends or the caller closes it.
func Listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}
