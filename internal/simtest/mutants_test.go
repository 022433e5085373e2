//go:build kvdmutants

package simtest

import (
	"errors"
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
	for name, s := range scenarios {
		if err := Directed(s.cfg, s.steps); err != nil {
			return "scenario " + name, err
		}
	}
	end := time.Now().Add(time.Minute)
	for limit := 500; limit <= 8_000; limit *= 4 {
		for name, cfg := range scopes {
			if _, err := Exhaust(cfg, limit); err != nil {
				return "exhaustive " + name, err
			}
		}
		for seed := range uint64(limit) {
			for name, cfg := range wide {
				if err := Random(cfg, seed); err != nil {
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
