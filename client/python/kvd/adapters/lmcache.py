"""An L2 adapter of LMCache that keeps objects in a kvd store.

It follows L2AdapterInterface of LMCache (lmcache/v1/distributed/l2_adapters/base.py) at commit 000e8777, with
L2StoreResult. It takes the second argument that submit_lookup_and_lock_task has at commit 0b43a455.
LMCache loads it as a plug-in:

    --l2-adapter '{"type": "plugin", "module_path": "kvd.adapters.lmcache", "class_name": "KvdL2Adapter",
                   "adapter_params": {"path": "/run/kvd/broker.sock", "namespace": "kv"}}'
"""

from __future__ import annotations

import itertools
import logging
import threading
from typing import Any, Callable, Dict, List, Optional, Tuple

from lmcache.v1.distributed.api import KeyEntry, KeyListPage
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from ._blocks import PRESENT, SAVED, Blocks
from ._counters import Counters, complain
from ._key import block_key
from ._memory import bytes_of, memory_at, register
from ._notify import Notifier
from ._store import Opener, Store, connect
from ._worker import Worker

try:  # where it is depends on the version
    from lmcache.lmcache_native import Bitmap
except ImportError:
    from lmcache.native_storage_ops import Bitmap

log = logging.getLogger("kvd.adapters.lmcache")

_NO_RESULT = -1  # the id of tasks that nobody asks for

_PARAMS = frozenset(("path", "namespace", "salt", "pin_seconds", "max_capacity_gb", "tracked_keys"))


class _Queue:
    """Tasks of one kind: a thread that does them, their results, and the descriptor that tells of results."""

    def __init__(self, name: str, run: Callable[[Any], Any], failed: Callable[[Any], Any]) -> None:
        self.notifier = Notifier()
        self._run, self._failed = run, failed
        self._lock = threading.Lock()
        self._results: Dict[int, Any] = {}
        self._worker = Worker("kvd-lmcache-" + name, lambda task: self._finish(task, True),
                              lambda task: self._finish(task, False))

    def submit(self, task_id: int, *args: Any) -> int:
        self._worker.submit((task_id, args))
        return task_id

    def take(self, task_id: int) -> Any:
        """Returns the result of a task once, None before it is done and afterwards."""
        with self._lock:
            return self._results.pop(task_id, None)

    def take_all(self) -> Dict[int, Any]:
        """Returns the results that nobody has taken."""
        with self._lock:
            results, self._results = self._results, {}
            return results

    def stop(self) -> None:
        """Ends the thread. The descriptor stays until close."""
        self._worker.close()

    def close(self) -> None:
        self.notifier.close()

    def _finish(self, task: Tuple[int, Any], begun: bool) -> None:
        task_id, args = task
        try:
            result = (self._run if begun else self._failed)(args)
        except Exception:  # a fault of this module: the controller must get its answer all the same
            log.exception("a task failed")
            result = self._failed(args)
        if task_id == _NO_RESULT:
            return
        with self._lock:
            self._results[task_id] = result
        self.notifier.notify()


class KvdL2Adapter(L2AdapterInterface):
    """Keeps LMCache's objects in a kvd store. Safe for threads.

    params may have:
    path: the broker's socket. namespace: where the objects are. salt: a name that keeps deployments apart whose
    objects must not mix, beside LMCache's own cache_salt. pin_seconds (60): how long the store keeps objects that were
    looked up from eviction, if it can; 0 is not at all. max_capacity_gb (0): what LMCache's own eviction may fill; 0
    leaves eviction to the store. tracked_keys (1048576): the most objects that list_l2_keys and get_usage know.
    store is for tests.
    """

    def __init__(self, params: Optional[Dict[str, Any]] = None, l1_memory_desc: Any = None,
                 store: Optional[Callable[[], Store]] = None, **_later: Any) -> None:
        given: Dict[str, Any] = dict(params or {})
        unknown = set(given) - _PARAMS
        if unknown:
            raise ValueError("adapter_params has %s; it may have %s" % (sorted(unknown), sorted(_PARAMS)))
        super().__init__(max_capacity_bytes=int(float(given.get("max_capacity_gb", 0)) * (1 << 30)))
        self.counters = Counters()
        self._salt = str(given.get("salt", ""))
        self._tracked_keys = int(given.get("tracked_keys", 1 << 20))
        self._opener = Opener(store or (lambda: connect(given.get("path"), given.get("namespace"))))
        self._blocks = Blocks(self._opener, self.counters, float(given.get("pin_seconds", 60)))
        if l1_memory_desc is not None:
            self._opener.on_open(lambda opened: self._register(opened, l1_memory_desc))

        self._ids = itertools.count()
        self._lock = threading.Lock()  # of the fields up to the next blank line
        self._locks: Dict[Any, int] = {}  # how often an object is locked
        self._sizes: Dict[Any, Tuple[int, int]] = {}  # of objects known to be stored: a number that grows, and bytes
        self._stored = 0

        self._stores = _Queue("store", self._store, lambda args: self._refuse("store", args, L2StoreResult(False, 0)))
        self._lookups = _Queue("lookup", self._lookup, lambda args: self._refuse("exists", args, Bitmap(len(args[0]))))
        self._loads = _Queue("load", self._load, lambda args: self._refuse("load", args, Bitmap(len(args[0]))))

    # ---- Descriptors ----

    def get_store_event_fd(self) -> int:
        """Returns the descriptor that tells of stores."""
        return self._stores.notifier.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """Returns the descriptor that tells of lookups."""
        return self._lookups.notifier.fileno()

    def get_load_event_fd(self) -> int:
        """Returns the descriptor that tells of loads."""
        return self._loads.notifier.fileno()

    # ---- Tasks ----

    def submit_store_task(self, keys: List[Any], objects: List[Any]) -> int:
        """Starts to store objects. The task is a success only if it is certain of each object that it is stored."""
        return self._stores.submit(next(self._ids), list(keys), list(objects))

    def pop_completed_store_tasks(self) -> Dict[int, Any]:
        """Returns the results of stores that are done, once."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: List[Any], group_layout_descs: Any = None) -> int:
        """Starts to look which objects there are, and to pin them."""
        return self._lookups.submit(next(self._ids), list(keys))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Returns a bit per object, once, or None while the task goes on."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: List[Any]) -> None:
        """Starts to unpin objects. If the store does not do it, their pins end by themselves."""
        free: List[Any] = []
        with self._lock:
            for key in keys:
                held = self._locks.get(key, 0)
                if held > 1:
                    self._locks[key] = held - 1
                elif held:
                    del self._locks[key]
                    free.append(key)
        if free:
            # In the lookups' thread, behind the lookups that pinned them.
            self._lookups.submit(_NO_RESULT, free, True)

    def submit_load_task(self, keys: List[Any], objects: List[Any]) -> int:
        """Starts to load objects into the given buffers. A buffer without its bit afterwards has nothing of use."""
        return self._loads.submit(next(self._ids), list(keys), list(objects))

    def query_load_result(self, task_id: int) -> Any:
        """Returns a bit per object, once, or None while the task goes on."""
        return self._loads.take(task_id)

    # ---- Upkeep ----

    def delete(self, keys: List[Any]) -> None:
        """Deletes objects, and waits for it."""
        gone = self._blocks.remove([self._key(key) for key in keys])
        self._forget([key for key, certain in zip(keys, gone) if certain])

    def list_l2_keys(self, model_name: Optional[str] = None, page_size: int = 500, cursor: Optional[str] = None) -> Any:
        """Lists objects that this adapter has stored, and that it has not seen missing since, oldest first."""
        if page_size <= 0:
            raise ValueError("page_size is %d" % page_size)
        after = -1 if cursor is None else int(cursor)  # a ValueError, as it should be
        with self._lock:
            found = list(itertools.islice(((key, number, size) for key, (number, size) in self._sizes.items()
                                           if number > after and model_name in (None, key.model_name)), page_size + 1))
        page = found[:page_size]
        entries = tuple(KeyEntry(key=key.to_encoded_object_key(), size_bytes=size) for key, _, size in page)
        return KeyListPage(entries=entries, next_page_token=str(page[-1][1]) if len(found) > page_size else None)

    def report_status(self) -> Dict[str, Any]:
        """Returns the counters. is_healthy says whether there is a connection."""
        try:
            self._opener.store()
            healthy = True
        except Exception:
            healthy = False
        return {"is_healthy": healthy, "type": "kvd", "counters": self.counters.snapshot()}

    def close(self) -> None:
        """Waits for tasks that have begun, fails the others, and ends the connection."""
        for queue in (self._stores, self._lookups, self._loads):
            queue.stop()
        self._opener.close()
        for queue in (self._stores, self._lookups, self._loads):
            queue.close()

    # ---- In the threads ----

    def _store(self, args: Any) -> Any:
        keys, objects = args
        values, names = self._prepare("store", keys, objects)
        became = self._blocks.save(names, values)
        done = [i for i, what in enumerate(became) if what in (SAVED, PRESENT)]
        self._note([keys[i] for i in done], [len(values[i]) for i in done])
        written = sum(len(values[i]) for i, what in enumerate(became) if what == SAVED)
        return L2StoreResult(len(done) == len(keys), written)

    def _lookup(self, args: Any) -> Any:
        keys = args[0]
        if len(args) > 1:
            with self._lock:  # lookups may have locked some again
                keys = [key for key in keys if key not in self._locks]
            self._blocks.unpin([name for name in map(self._key, keys) if name is not None])
            return None
        there = self._blocks.find([self._key(key) for key in keys])
        bits = Bitmap(len(keys))
        found: List[Any] = []
        self._forget([key for key, is_there in zip(keys, there) if is_there is False])  # evicted
        with self._lock:
            for i, (key, is_there) in enumerate(zip(keys, there)):
                if is_there:
                    bits.set(i)
                    found.append(key)
                    self._locks[key] = self._locks.get(key, 0) + 1
        self._notify_keys_accessed(found)
        return bits

    def _load(self, args: Any) -> Any:
        keys, objects = args
        buffers, names = self._prepare("load", keys, objects)
        bits = Bitmap(len(keys))
        for i, good in enumerate(self._blocks.load(names, buffers)):
            if good:
                bits.set(i)
        return bits

    def _refuse(self, what: str, args: Any, result: Any) -> Any:
        self.counters.add(what + ".abandoned", len(args[0]))
        return result

    def _prepare(self, what: str, keys: List[Any],
                 objects: List[Any]) -> Tuple[List[memoryview], List[Optional[bytes]]]:
        """Returns the objects' bytes and their keys in the store; the key is None if either cannot be had."""
        if len(keys) != len(objects):
            raise ValueError("%s of %d keys with %d objects" % (what, len(keys), len(objects)))
        views, names = [], []
        for key, obj in zip(keys, objects):
            try:
                view = bytes_of(obj.byte_array)
                name = self._key(key)
            except Exception as err:
                complain(log, "%s: %s", what, err)
                view, name = memoryview(b""), None
            views.append(view)
            names.append(name)
        return views, names

    def _key(self, key: Any) -> Optional[bytes]:
        try:
            salt = "%d:%s%s" % (len(self._salt), self._salt, key.cache_salt)
            return block_key(salt, key.model_name, str(key.kv_rank), str(key.object_group_id), key.chunk_hash)
        except (ValueError, AttributeError, TypeError) as err:
            complain(log, "no key for %.200r: %s", key, err)
            return None

    def _register(self, store: Store, memory: Any) -> None:
        try:
            register(store, memory_at(memory.ptr, memory.size))
            self.counters.add("register.ok")
        except Exception as err:  # values are copied then
            log.warning("L1 memory is not registered: %s", err)
            self.counters.add("register.failed")

    # ---- What LMCache is told of stored objects ----

    def _note(self, keys: List[Any], sizes: List[int]) -> None:
        replaced, fresh, dropped = [], [], []
        with self._lock:
            for key, size in zip(keys, sizes):
                known = self._sizes.get(key)
                if known is None or known[1] != size:
                    if known is not None:
                        replaced.append((key, self._sizes.pop(key)[1]))
                    self._sizes[key] = (self._stored, size)
                    self._stored += 1
                    fresh.append((key, size))
            while len(self._sizes) > self._tracked_keys:
                oldest = next(iter(self._sizes))
                dropped.append((oldest, self._sizes.pop(oldest)[1]))
        for tell, told in ((self._notify_keys_deleted, replaced), (self._notify_keys_stored, fresh),
                           (self._notify_keys_deleted, dropped)):
            if told:
                tell([key for key, _ in told], [size for _, size in told])

    def _forget(self, keys: List[Any]) -> None:
        dropped = []
        with self._lock:
            for key in keys:
                known = self._sizes.pop(key, None)
                if known is not None:
                    dropped.append((key, known[1]))
        if dropped:
            self._notify_keys_deleted([key for key, _ in dropped], [size for _, size in dropped])
