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

// kill searches until something fails.
func kill() (by string, err error) {
	for _, limit := range []int{400, 40_000} {
		for name, cfg := range scopes {
			if _, err := Exhaust(cfg, limit); err != nil {
				return "exhaustive " + name, err
			}
		}
		for seed := range uint64(min(limit, 3000)) {
			for name, cfg := range wide {
				if err := Random(cfg, seed); err != nil {
					return "random " + name, err
				}
			}
		}
	}
	return "", nil
}
