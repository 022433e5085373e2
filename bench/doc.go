// Package bench compares the store with what people use today: a sync.Map in the
// same process, Redis and memcached on the same machine.
//
// It holds tests only. TestRatios (`make bench`, KVD_BENCH=1) starts a directory
// node and a memory node as processes of their own, redis-server and memcached
// beside them, and prints one table of ratios that were measured in one run; the
// Benchmark functions take single paths apart, for profiles;
// TestGetIntoAllocatesNothing is an ordinary test. Numbers and what they mean are
// in docs/performance.md.
//
// The processes are this test binary again: TestMain reads which part to play
// from the environment.
package bench
