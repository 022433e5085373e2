//go:build amd64 || arm64

package shm

// prefetch tells the processor that n cache lines will be used soon: each is an address, with its lowest bit set if the
// line will be written to. Nothing is read, and an address that is not mapped does no harm.
//
//go:noescape
func prefetch(lines *uintptr, n int)
