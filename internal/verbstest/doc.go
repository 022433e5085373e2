// Package verbstest tries the whole store over real verbs. Directory, memory nodes and kvctl are processes
// of their own, and clients are in the test, each with an RDMA adapter of its own. The promises of a
// provider are rdma/rdmatest's to judge, and faults of processes are internal/nemesis's. Here is what only
// adapters show: refusals, that memory nodes' processors rest, fencing of queue pairs, lost packets, and
// the two atomic domains.
//
// It holds tests alone, which skip unless the environment describes a machine for
// them (`make test-verbs` runs them in a virtual machine):
//
//	KVD_VERBS=1         the adapters rxe0 to rxe3 have the addresses 10.77.1.1 to
//	                    10.77.1.4, on the network devices n0 to n3
//	KVD_VERBS_NIC       siw: they are siw0 to siw3
//	KVD_VERBS_CONNECT   rdma-connect of memory nodes; default auto
//	KVD_VERBS=none      there is neither an adapter nor the verbs library
//	KVD_BIN             folder with kvd and kvctl, built with the tag verbs
//	KVD_VERBS_PROVIDER  provider in the place of verbs: with tcp, most of the tests
//	                    run on any machine, over its loopback device
//
// Start with store, which is a store's processes, and guesser, which is somebody
// with a session and queue pairs of his own making. The tests do not run in
// parallel: all adapters have one processor or two behind them. The tables that
// they print are the ones in docs.
package verbstest
