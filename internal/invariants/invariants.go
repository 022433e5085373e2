// Package invariants has assertions that a build with the tag kvdinvariants checks, at every hand-over. Hand-overs are
// between an operation and its lane, a lane and its connections, memory and whose it is, a session and its directory.
// Simulations and CI's race run are built with it. In all other builds On is the constant false, and the compiler drops
// what stands behind it.
//
// A failed assertion panics: the state is not what the code relies on, and no error could tell what happened. It is
// about the program's own state alone, never about bytes that others wrote.
package invariants

import "fmt"

// Assert panics if On and ok is false. Arguments are computed in any case: callers on the data path ask for On first.
func Assert(ok bool, format string, args ...any) {
	if On && !ok {
		panic("invariant: " + fmt.Sprintf(format, args...))
	}
}
