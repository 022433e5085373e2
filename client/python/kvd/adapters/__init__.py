"""Adapters that keep the KV cache of a language model's server in a kvd store.

kvd.adapters.lmcache is an L2 plug-in of LMCache, kvd.adapters.sglang a storage backend of SGLang's HiCache, and
kvd.adapters.vllm a secondary tier of vLLM. Import one only where its server is installed. docs/kv-cache.md of kvd's
repository has the configuration of each.
"""
