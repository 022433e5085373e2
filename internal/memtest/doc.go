// Package memtest proves that memory comes back. A namespace with little in it has
// room, whatever clients wrote, deleted, let expire or held when they were killed. Each
// case runs a whole store, set up as `kvd dev` does it, with several clients. Those
// clients that are to be killed are processes of their own. Each case keeps a model of
// what is live: while less than 80 % of the memory is, no write may fail. Writes
// may wait; the cases print how long, and judge no speed.
//
// It holds tests alone and leaves the rules by which memory moves to the packages that
// have them, and interleavings to internal/simtest. Start with rig, which is the store
// and its model, and TestMemory. A rig's methods may be called concurrently; a user is
// one client and belongs to the rig.
//
// The short form runs with every test, in little memory. KVD_MEMORY=full
// (`make test-memory`) takes the memory of `kvd dev --memory 512MiB` and writes ten times
// what a namespace has. KVD_MEMORY=half, which the gate runs, takes half of it and writes
// four times what a namespace has.
package memtest
