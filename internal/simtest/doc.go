// Package simtest runs the real code of clients, janitors and the directory under one
// scheduler, against the simulated fabric (rdma/sim). This code is internal/session over
// index, internal/janitor's plans, and server/lead over server/fsm. The scheduler chooses
// what happens next: which verb takes effect, when an operation begins, when a renewal is
// sent, served and answered. It also chooses who learns of a map, what the directory
// does, who crashes or falls silent, and when a fence is confirmed. Histories are checked
// for linearizability, remote memory and the directory's accounts for the numbered
// invariants of docs/protocol.md, after every effect.
//
// Three searches share a [World]: schedules written down, exhaustive with state hashing
// for small scopes, and seeded random. A schedule is the list of choices made; it
// replays exactly.
//
// The simulator itself plays, as choices, the blocking client (package client)
// and the memory node (package memnode). It also plays the RPCs between them
// and the directory (package server).
//
// Start with [Config] and [World]. Nothing here is concurrent.
//
// The state hash leans on clients being deterministic: what a client has been
// told determines what it will do. This is stateless search with a visited set,
// after Godefroid's VeriSoft.
package simtest
