//go:build kvdmutants

package index

import "sync/atomic"

var mutant atomic.Uint32

// SetMutant switches m on for the whole process; tests only.
func SetMutant(m Mutant) { mutant.Store(uint32(m)) }

// Mutation reports whether m is switched on.
func Mutation(m Mutant) bool { return mutant.Load() == uint32(m) }
