package simtest

import (
	"errors"
	"flag"
	"math"
	"strings"
	"testing"
	"time"
)

var (
	flagHunt = flag.Duration("hunt", 0, "search for so long, or until something fails; -states bounds the "+
		"exhaustive part of it")
	flagHuntIn = flag.String("hunt-in", "", "after the scenarios, search only the scopes whose names begin like "+
		"this; those with transactions, or that publish speculatively, if asked for")
	flagHuntSeed = flag.Uint64("hunt-seed", 0, "the first seed of random schedules, so that a hunt goes on where "+
		"another ended")
)

// TestHunt tries the scenarios and then searches, wide scopes in turn, until something fails.
// TestMutants runs it against code with a mistake in it.
func TestHunt(t *testing.T) {
	if *flagHunt == 0 {
		t.Skip("-hunt says for how long; TestExhaustive and TestRandom search these scopes, too")
	}
	end := time.Now().Add(*flagHunt)
	for _, name := range sorted(scenarios) {
		if err := Directed(scenarios[name].cfg, scenarios[name].steps); err != nil && !errors.Is(err, errIdle) {
			t.Fatalf("scenario %s\n%v", name, err)
		}
	}
	fails := func(cfg Config, name string, seed uint64) {
		if err := Random(cfg, seed); err != nil {
			t.Fatalf("random %s\n%v", replayHint(name, cfg.Synchronous, seed), err)
		}
	}
	states := *flagStates
	if states == 0 {
		states = math.MaxInt
	}
	seed, random := *flagHuntSeed, 0
	for limit := 250; time.Now().Before(end); limit *= 4 {
		for _, name := range sorted(scopes) {
			if !hunted(name) {
				continue
			}
			for _, sync := range []bool{false, true} {
				cfg := scopes[name]
				cfg.Synchronous = sync
				if _, err := Exhaust(cfg, min(limit, states)); err != nil {
					t.Fatalf("exhaustive %s, synchronous: %t\n%v", name, sync, err)
				}
			}
		}
		for ; seed < *flagHuntSeed+uint64(limit) && time.Now().Before(end); seed++ {
			for _, name := range sorted(wide) {
				if !hunted(name) {
					continue
				}
				fails(wide[name], name, seed)
				fails(inMode(wide[name], true), name, seed)
				random += 2
			}
		}
	}
	t.Logf("%d random schedules; the next seed is %d", random, seed)
}

// txnPrefix begins the names of scopes with transactions, which show mistakes in transactions.
const txnPrefix = "txn"

// hunted reports whether a scope is searched.
func hunted(name string) bool {
	for _, prefix := range []string{txnPrefix, specPrefix} {
		if strings.HasPrefix(name, prefix) && !strings.HasPrefix(*flagHuntIn, prefix) {
			return false
		}
	}
	return strings.HasPrefix(name, *flagHuntIn)
}
