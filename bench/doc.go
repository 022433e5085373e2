// Package bench compares the store with what people use today: a sync.Map in the
// same process, Redis and memcached on the same machine. And it compares the store
// that grows, drains a memory node or has lost one with the same store at rest.
//
// It holds tests only. TestRatios (`make bench`, KVD_BENCH=1) starts a directory
// node and a memory node as processes of their own, redis-server and memcached
// beside them, and prints one table of ratios that were measured in one run; the
// Benchmark functions take single paths apart, for profiles. Those processes are
// this test binary again: TestMain reads which part to play from the environment.
// TestGatewayRatios does the same for the gateway beside redis-server and memcached.
//
// Of caches, TestHitRatio compares what the store forgets with what LRU, LFU and
// redis-server do, and TestFullCache (`make bench-full`) keeps one full for a while and looks
// at errors, memory and latencies.
//
// TestGrowth and TestDisturbance (`make bench-growth`) run a whole store in
// this process, janitor included, and print latencies. TestMovesUnderLoad, which asks only
// that nothing fails and nothing is lost, and TestGetIntoAllocatesNothing are ordinary
// tests. Numbers and what they mean are in docs/performance.md.
package bench
