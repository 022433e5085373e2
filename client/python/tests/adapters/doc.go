// Package adapters runs the tests of the Python adapters, which keep the KV cache of language models in a store.
//
// It has tests alone; start with fake.py, the store that fails, and standins.py, the classes of the servers. The
// adapters' rules are in client/python/kvd/adapters/_blocks.py, and docs/kv-cache.md tells users of them.
package adapters
