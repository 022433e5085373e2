package simtest

import (
	"errors"
	"flag"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"
)

var flagHunt = flag.Duration("hunt", 0, "search the scopes of memory that goes home for so long, or until something fails")

// TestHunt searches the scopes of memory that goes home, wide ones in turn, until something
// fails. TestPatches runs it against code with a mistake in it.
func TestHunt(t *testing.T) {
	if *flagHunt == 0 {
		t.Skip("-hunt says for how long; TestRandom searches these scopes, too")
	}
	end := time.Now().Add(*flagHunt)
	var names []string
	for name := range wide {
		if strings.HasPrefix(name, "home") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range slices.Sorted(maps.Keys(scenarios)) {
		if err := Directed(scenarios[name].cfg, scenarios[name].steps); err != nil && !errors.Is(err, errIdle) {
			t.Fatalf("scenario %s\n%v", name, err)
		}
	}
	for seed := uint64(0); time.Now().Before(end); seed++ {
		for _, name := range names {
			if err := Random(wide[name], seed); err != nil {
				t.Fatalf("%s seed %d\n%v", name, seed, err)
			}
		}
	}
}
