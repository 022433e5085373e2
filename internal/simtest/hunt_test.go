package simtest

import (
	"errors"
	"flag"
	"strings"
	"testing"
	"time"
)

var (
	flagHunt   = flag.Duration("hunt", 0, "search for so long, or until something fails")
	flagHuntIn = flag.String("hunt-in", "", "after the scenarios, search only the wide scopes whose names begin like this")
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
	seed := uint64(0)
	for limit := 250; time.Now().Before(end); limit *= 4 {
		for _, name := range sorted(scopes) {
			if *flagHuntIn != "" {
				break
			}
			if _, err := Exhaust(scopes[name], limit); err != nil {
				t.Fatalf("exhaustive %s\n%v", name, err)
			}
		}
		for ; seed < uint64(limit) && time.Now().Before(end); seed++ {
			for _, name := range sorted(wide) {
				if !strings.HasPrefix(name, *flagHuntIn) {
					continue
				}
				if err := Random(wide[name], seed); err != nil {
					t.Fatalf("random %s\n%v", replayHint(name, seed), err)
				}
			}
		}
	}
}
