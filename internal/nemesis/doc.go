// Package nemesis breaks a whole store on purpose while clients use it, and records every operation of the clients. The
// store is real kvd processes in network namespaces of their own. A seeded scheduler kills them, stops them, cuts them
// off and slows them down. Afterwards each key's history must be linearizable, and `kvctl check` must find the memory
// in order. A bank, whose transfers are transactions, must keep its sum (bank_test.go). A store and a cache with one
// copy of everything are on the same memory nodes. They hold up nothing when one of these nodes dies (beside_test.go).
//
// It holds tests alone and leaves what a simulator can choose to internal/simtest:
// here are the kernel's sockets, real clocks and real deaths. Start with
// TestNemesis, which runs when KVD_NEMESIS gives a duration (`make nemesis`), and
// with harness. TestNemesisMemory asks instead where the memory of killed clients
// goes (`make nemesis-memory`), TestNemesisStates what becomes of frozen machines and full disks
// (`make nemesis-states`). The test binary is also the programs that run inside the
// namespaces (see TestMain). The harness is one goroutine; watcher, probes and
// checker guard themselves. Values read from the store belong to whoever read
// them.
//
// The idea of a history recorded outside of the system, checked after faults, is
// from Jepsen; the checker is porcupine.
package nemesis
