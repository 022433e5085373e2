// Package bench compares the store with what people use today: a sync.Map in the
// same process, Redis and memcached on the same machine. And it compares the store
// that grows, drains a memory node or has lost one with the same store at rest.
//
// It holds tests only. TestRatios (`make bench`, KVD_BENCH=1) prints one table of ratios that were measured in
// turns. It starts the store of `kvd dev` as a process of its own, and a gateway, redis-server and memcached beside
// it. The Benchmark functions take single paths apart, for profiles. The store's process is this test binary again:
// TestMain reads which part to play from the environment. A [report] is a table, and takes rows from duels; every
// figure of it has to be a number above 0.
//
// Two tests are of caches. TestHitRatio (`make hit-ratio`) compares what the store forgets with what LRU, LFU and
// redis-server forget. TestFullCache (`make bench-full`) keeps a cache full for a while and looks at errors, memory
// and latencies. TestRecords (`make bench-records`) reads from namespaces of up to 15 million records.
// TestDirectoryScale (`make bench-directory`) has 10,000 sessions that do nothing but renew their leases and
// acknowledge maps. TestClients (`make bench-clients`) counts queue pairs and memory of up to 1,000 clients.
//
// TestGrowth and TestDisturbance (`make bench-growth`) run a whole store in
// this process, janitor included, and print latencies. TestMovesUnderLoad, which asks only
// that nothing fails and nothing is lost, and TestGetIntoAllocatesNothing are ordinary
// tests. Numbers and what they mean are in docs/performance.md.
//
// With KVD_BENCH=smoke (`make bench-smoke`) each of them is small and takes seconds, so that CI sees
// whether it works.
package bench
