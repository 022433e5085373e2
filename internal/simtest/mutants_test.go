//go:build kvdmutants

package simtest

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/kvd-project/kvd/index"
)

// TestMutants switches on one protocol mistake at a time; the searches must
// notice every one.
func TestMutants(t *testing.T) {
	defer index.SetMutant(index.NoMutant)
	for m := index.NoMutant + 1; m < index.NumMutants; m++ {
		t.Run(m.String(), func(t *testing.T) {
			index.SetMutant(m)
			defer index.SetMutant(index.NoMutant)
			began := time.Now()
			by, err := kill()
			if err == nil {
				t.Fatalf("not noticed in %v", time.Since(began))
			}
			var f *Failure
			if errors.As(err, &f) {
				err = f.Err
			}
			t.Logf("noticed by %s after %v: %.200v", by, time.Since(began).Round(time.Millisecond), err)
		})
	}
}

// kill searches until something fails or a minute has passed.
func kill() (by string, err error) {
	end := time.Now().Add(time.Minute)
	if by, err := killDirected(); err != nil {
		return by, err
	}
	for limit := 250; time.Now().Before(end); limit *= 4 {
		for _, name := range sorted(scopes) {
			if _, err := Exhaust(scopes[name], limit); err != nil {
				return "exhaustive " + name, err
			}
		}
		for seed := range uint64(limit) {
			for _, name := range sorted(wide) {
				if err := Random(wide[name], seed); err != nil {
					return "random " + name, err
				}
			}
			if time.Now().After(end) {
				return "", nil
			}
		}
	}
	return "", nil
}

func killDirected() (by string, err error) {
	for _, name := range sorted(scenarios) {
		if err := Directed(scenarios[name].cfg, scenarios[name].steps); err != nil && !errors.Is(err, errIdle) {
			return "scenario " + name, err
		}
	}
	return "", nil
}

func sorted[V any](m map[string]V) (names []string) {
	for name := range m {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}
