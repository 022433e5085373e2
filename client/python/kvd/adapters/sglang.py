"""A storage backend of SGLang's HiCache that keeps pages in a kvd store.

It follows HiCacheStorage of SGLang (python/sglang/srt/mem_cache/hicache_storage.py) at commit 001067ff, with interface
v2. It gives the stop points that PoolTransferResult has at commit 00fe477f. SGLang loads it by its name:

    --hicache-storage-backend dynamic --hicache-mem-layout page_first --hicache-storage-backend-extra-config
    '{"backend_name": "kvd", "module_path": "kvd.adapters.sglang", "class_name": "KvdHiCache", "interface_v1": 1,
      "namespace": "kv"}'

The methods wait for the store, for the client's timeout at most: HiCache calls them in threads of its own.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult

from ._blocks import PRESENT, SAVED, Blocks
from ._counters import Counters, complain
from ._key import block_key, key_prefix
from ._memory import memory_at, register
from ._store import Opener, Store, connect

log = logging.getLogger("kvd.adapters.sglang")

_KV = "kv"  # the pool that every model has
_WHOLE = "page"  # the group of pages that come as one tensor

_EXTRA = frozenset(("path", "namespace", "salt", "pin_seconds"))


class _Indices(List[int]):
    """Indices as pools take them, who expect a tensor."""

    def tolist(self) -> List[int]:
        return list(self)


class KvdHiCache(HiCacheStorage):
    """Keeps HiCache's pages in a kvd store, a value per component of a page. Safe for threads.

    extra_config of the storage's configuration may have: path: the broker's socket. namespace: where the pages are.
    salt: a name that keeps deployments apart whose pages must not mix. pin_seconds (0): how long the store keeps pages
    that were found from eviction, if it can. store is for tests.
    """

    def __init__(self, storage_config: Any, _kwargs: Optional[Dict[str, Any]] = None,
                 store: Optional[Callable[[], Store]] = None) -> None:
        extra = {name: value for name, value in (storage_config.extra_config or {}).items() if name in _EXTRA}
        self.counters = Counters()
        self._salt = str(extra.get("salt", ""))
        self._model = storage_config.model_name or ""
        self._rank = _rank(storage_config)
        # Pages are either components in the pool's own layout or one tensor each: the server uses one way only.
        self._by_component = bool((storage_config.extra_config or {}).get("interface_v1", 0))
        self._pools: Dict[str, Any] = {}
        self._components: Dict[str, int] = {}
        self._forms: Dict[str, str] = {}  # what, beside the tokens, a pool's bytes depend on
        self._registered: Set[Tuple[int, int]] = set()
        self._key(_KV, 0, "0" * 64)  # a name that is too long shows here, rather than later
        self._opener = Opener(store or (lambda: connect(extra.get("path"), extra.get("namespace"))))
        self._opener.on_open(self._register_all)
        self._blocks = Blocks(self._opener, self.counters, float(extra.get("pin_seconds", 0)))

    # ---- Pools ----

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Takes the pool that pages are read into and written from."""
        super().register_mem_pool_host(mem_pool_host)
        self._add_pool(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Takes a further pool."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != _KV or _KV not in self._pools:
            self._add_pool(str(host_pool_name), host_pool)

    def _add_pool(self, name: str, pool: Any) -> None:
        self._components[name] = 0
        self._forms[name] = "%s %s %d" % (getattr(pool, "layout", ""), getattr(pool, "dtype", ""), _page_size(pool))
        self._pools[name] = pool
        if getattr(pool, "kv_buffer", None) is not None or name != _KV:
            try:
                self._components[name] = len(pool.get_page_buffer_meta(_Indices(range(_page_size(pool))))[0])
            except Exception as err:  # a layout that has no pages: each call on it is a miss
                log.warning("pool %s has no pages that the store could take: %s", name, err)
        self._opener.on_open(self._register_all)

    def _register_all(self, store: Store) -> None:
        for name, pool in list(self._pools.items()):
            try:
                for buffer in _buffers(pool):
                    at = (id(store), int(buffer.data_ptr()))
                    if at not in self._registered:
                        self._registered.add(at)
                        register(store, _tensor(buffer))
                        self.counters.add("register.ok")
            except Exception as err:  # values are copied then
                log.warning("pool %s is not registered: %s", name, err)
                self.counters.add("register.failed")

    # ---- Which pages there are ----

    def exists(self, key: str) -> bool:
        """Tells whether a page is there."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: List[str], extra_info: Any = None) -> int:
        """Tells how many pages there are from the first on, without a gap."""
        components = self._components.get(_KV, 0) if self._by_component else 1
        if components == 0:
            self.counters.add("exists.argument", len(keys))
            return 0
        group = _KV if self._by_component else _WHOLE
        names = [self._key(group, i, key) for key in keys for i in range(components)]
        pages = self._blocks.leading(names) // components
        return self._blocks.pin(names[:pages * components]) // components

    def batch_exists_v2(self, keys: List[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Tells how long a prefix can be restored from all pools, and how far each pool goes."""
        anchor = getattr(self, "mem_pool_host", None)
        logical = anchor is not None and getattr(anchor, "kv_buffer", None) is None  # has no bytes of its own
        kv_pages = len(keys) if logical else self.batch_exists(keys, extra_info)
        hits: Dict[Any, int] = {_KV: kv_pages} if kv_pages else {}
        stops = list(range(1, kv_pages + 1))  # prefixes that can be restored
        for transfer in pool_transfers or []:
            if not stops:
                break
            there = self._pages_there(str(transfer.name), keys[:kv_pages])
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
                good = [n for n in range(1, kv_pages + 1) if all(there[max(0, n - window):n])]
            else:
                leading = there.index(False) if False in there else kv_pages
                good = list(range(1, leading + 1))
            if good:
                hits[transfer.name] = good[-1]
            stops = [n for n in stops if n in set(good)]
        told = (stops[-1] if stops else 0, hits, stops)
        return PoolTransferResult(*told[:len(dataclasses.fields(PoolTransferResult))])

    def _pages_there(self, name: str, keys: Sequence[str]) -> List[bool]:
        components = self._components.get(name, 0)
        if components == 0:
            self.counters.add("exists.argument", len(keys))
            return [False] * len(keys)
        there = self._blocks.exists([self._key(name, i, key) for key in keys for i in range(components)])
        return [all(is_there is True for is_there in there[at:at + components])
                for at in range(0, len(there), components)]

    # ---- Pages of pools ----

    def batch_get_v1(self, keys: List[str], host_indices: Any, extra_info: Any = None) -> List[bool]:
        """Reads pages into the pool. True: all of the page is there."""
        return self._move(_KV, keys, host_indices, self._load)

    def batch_set_v1(self, keys: List[str], host_indices: Any, extra_info: Any = None) -> List[bool]:
        """Writes pages of the pool. True: it is certain that all of the page is stored."""
        return self._move(_KV, keys, host_indices, self._save)

    def batch_get_v2(self, transfers: List[Any], extra_info: Any = None) -> Dict[Any, List[bool]]:
        """Reads pages into several pools."""
        return {transfer.name: self._move(str(transfer.name), transfer.keys or [], transfer.host_indices, self._load)
                for transfer in transfers}

    def batch_set_v2(self, transfers: List[Any], extra_info: Any = None) -> Dict[Any, List[bool]]:
        """Writes pages of several pools."""
        return {transfer.name: self._move(str(transfer.name), transfer.keys or [], transfer.host_indices, self._save)
                for transfer in transfers}

    def _move(self, name: str, keys: Sequence[str], host_indices: Any,
              move: Callable[[List[Optional[bytes]], List[memoryview]], List[bool]]) -> List[bool]:
        try:
            pool = self._pools[name]
            if name == _KV and getattr(pool, "kv_buffer", None) is None:
                return [True] * len(keys)  # it has no bytes; the other pools do
            names, views = self._parts(name, pool, keys, host_indices)
        except Exception as err:
            complain(log, "%d pages of pool %s: %s", len(keys), name, err)
            self.counters.add("%s.argument" % ("load" if move == self._load else "store"), len(keys))
            return [False] * len(keys)
        components = len(names) // len(keys) if keys else 1
        good = move(names, views)
        return [all(good[at:at + components]) for at in range(0, len(good), components)]

    def _parts(self, name: str, pool: Any, keys: Sequence[str],
               host_indices: Any) -> Tuple[List[Optional[bytes]], List[memoryview]]:
        """Returns the keys in the store and the memory of all components of pages. It raises if they do not match."""
        components = self._components[name]
        if len(keys) * _page_size(pool) != len(host_indices):
            raise ValueError("%d indices" % len(host_indices))
        addresses, sizes = pool.get_page_buffer_meta(host_indices) if keys else ([], [])
        if not components or len(addresses) != len(keys) * components or len(sizes) != len(addresses):
            raise ValueError("%d addresses, %d sizes" % (len(addresses), len(sizes)))
        names: List[Optional[bytes]] = [self._key(name, i, key) for key in keys for i in range(components)]
        return names, [memory_at(int(address), int(size)) for address, size in zip(addresses, sizes)]

    def _load(self, names: List[Optional[bytes]], views: List[memoryview]) -> List[bool]:
        return self._blocks.load(names, views)

    def _save(self, names: List[Optional[bytes]], views: List[memoryview]) -> List[bool]:
        return [what in (SAVED, PRESENT) for what in self._blocks.save(names, views)]

    # ---- Pages as tensors, which HiCache uses without interface_v1 ----

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Reads a page into a tensor and returns it, or None."""
        return self.batch_get([key], [target_location], target_sizes)[0]

    def batch_get(self, keys: List[str], target_locations: Any = None, target_sizes: Any = None) -> List[Any]:
        """Reads pages into tensors. It returns each tensor, or None if its page is not there."""
        targets = list(target_locations or [])
        if len(targets) != len(keys):
            self.counters.add("load.argument", len(keys))
            return [None] * len(keys)
        good = self._blocks.load(*self._tensors(keys, targets))
        return [target if ok else None for target, ok in zip(targets, good)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Writes a page from a tensor."""
        return self.batch_set([key], [value])

    def batch_set(self, keys: List[str], values: Any = None, target_locations: Any = None,
                  target_sizes: Any = None) -> bool:
        """Writes pages from tensors. True: it is certain that all of them are stored."""
        values = list(values or [])
        if len(values) != len(keys):
            self.counters.add("store.argument", len(keys))
            return False
        return all(self._save(*self._tensors(keys, values)))

    def _tensors(self, keys: Sequence[str], tensors: Sequence[Any]) -> Tuple[List[Optional[bytes]], List[memoryview]]:
        names: List[Optional[bytes]] = []
        views: List[memoryview] = []
        for key, tensor in zip(keys, tensors):
            try:
                view, name = _tensor(tensor), self._key(_WHOLE, 0, key)
            except Exception as err:
                complain(log, "a page's tensor: %s", err)
                view, name = memoryview(b""), None
            names.append(name)
            views.append(view)
        return names, views

    # ---- Upkeep ----

    def clear(self) -> None:
        """Deletes all pages of this model and salt, of all its ranks."""
        self._blocks.remove_prefix(key_prefix((self._salt.encode(), self._model.encode())))

    def close(self) -> None:
        """Ends the connection."""
        self._opener.close()

    def _key(self, name: str, component: int, key: str) -> bytes:
        form = self._forms.get(_KV if name == _WHOLE else name, "")
        return block_key(self._salt, self._model, self._rank, "%s/%d %s" % (name, component, form), key.encode())


def _page_size(pool: Any) -> int:
    return int(getattr(pool, "page_size", 1) or 1)


def _buffers(pool: Any) -> List[Any]:
    """Returns the tensors that a pool consists of."""
    if hasattr(pool, "get_hybrid_pool_buffer"):
        return [buffer for buffer in pool.get_hybrid_pool_buffer() if buffer is not None]
    buffer = getattr(pool, "kv_buffer", None)
    return [] if buffer is None else [buffer]


def _tensor(tensor: Any) -> memoryview:
    """Returns the memory of a tensor. ValueError: it is not one piece of this process's memory."""
    if not tensor.is_contiguous() or str(getattr(tensor, "device", "cpu")).split(":")[0] != "cpu":
        raise ValueError("a tensor that is not contiguous, or not in the host's memory")
    return memory_at(int(tensor.data_ptr()), int(tensor.numel()) * int(tensor.element_size()))


def _rank(config: Any) -> str:
    """Returns the name of the part of the model that this process has. Ranks that have the same bytes share it."""
    parts = ["pp%d/%d" % (config.pp_rank, config.pp_size), "cp%d/%d" % (config.attn_cp_rank, config.attn_cp_size)]
    if not config.is_mla_model:
        parts.insert(0, "tp%d/%d" % (config.tp_rank, config.tp_size))
    return " ".join(parts)
