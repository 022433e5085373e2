"""A secondary tier of vLLM that keeps chunks of its CPU tier in a kvd store.

It follows SecondaryTierManager of vLLM 0.32 (vllm/v1/kv_offload/tiering/base.py), and takes jobs that name rows by
block_ids, as up to 0.26, too. vLLM loads it by its name:

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
        "secondary_tiers": [{"type": "KvdTier", "module_path": "kvd.adapters.vllm", "namespace": "kv"}]}}'

All methods run in vLLM's scheduler. None of them waits for the store, except shutdown and drain_jobs, whose task it is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import queue
import time
from typing import Any, Callable, Dict, Iterable, List, Optional, Set

from vllm.v1.kv_offload.base import (
    LookupResult,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from ._blocks import PRESENT, SAVED, Blocks
from ._counters import Counters
from ._key import block_key
from ._memory import register
from ._store import Opener, Store, connect
from ._worker import Worker

log = logging.getLogger("kvd.adapters.vllm")

_RESULT_FIELDS = frozenset(field.name for field in dataclasses.fields(JobResult))


class _Verdict:
    """What is known of a key, for as long as requests ask for it. Only the scheduler's thread touches it."""

    def __init__(self, now: float) -> None:
        self.there: Optional[bool] = None  # None: nobody has said yet
        self.late = False  # it took too long, and was answered as a miss
        self.since = now
        self.requests: Set[str] = set()


class KvdTier(SecondaryTierManager):
    """Keeps chunks in a kvd store.

    path: the broker's socket. namespace: where the chunks are. salt: a name that keeps deployments apart whose chunks
    must not mix. lookup_seconds (1): how long a request waits for the store to say whether it has a chunk. pin_seconds
    (0): how long the store keeps chunks from eviction that vLLM says are in use, if it can. backlog (4096): the most
    chunks that wait to be stored; more are not stored. store and clock are for tests.
    """

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str,
                 backpressure_detector: Any = None, path: Optional[str] = None, namespace: Optional[str] = None,
                 salt: str = "", lookup_seconds: float = 1.0, pin_seconds: float = 0, backlog: int = 4096,
                 store: Optional[Callable[[], Store]] = None, clock: Callable[[], float] = time.monotonic) -> None:
        given = {} if backpressure_detector is None else {"backpressure_detector": backpressure_detector}
        super().__init__(offloading_spec=offloading_spec, primary_kv_view=primary_kv_view, tier_type=tier_type, **given)
        if primary_kv_view.ndim != 2 or not primary_kv_view.c_contiguous:
            raise ValueError("the CPU tier's memory is not rows one after the other")
        self.counters = Counters()
        self._salt, self._lookup_seconds, self._clock = salt, lookup_seconds, clock
        self._model, self._rank = _identity(offloading_spec)
        self._block_key(bytes(36))  # a name that is too long shows here, rather than later
        self._row_bytes = primary_kv_view.nbytes // max(1, len(primary_kv_view))
        self._memory = primary_kv_view.cast("B")

        self._opener = Opener(store or (lambda: connect(path, namespace)))
        self._opener.on_open(self._register)
        self._blocks = Blocks(self._opener, self.counters, pin_seconds)

        self._verdicts: Dict[bytes, _Verdict] = {}
        self._asked: Dict[str, Set[bytes]] = {}  # by request
        self._to_ask: List[bytes] = []  # of this step
        self._to_touch: Set[bytes] = set()
        self._pins = pin_seconds > 0
        self._backlog, self._waiting = backlog, 0
        self._loading: Dict[int, List[bytes]] = {}
        self._storing: Dict[int, int] = {}
        self._answers: "queue.SimpleQueue[Any]" = queue.SimpleQueue()  # lists of (key, there)
        self._finished: "queue.SimpleQueue[Any]" = queue.SimpleQueue()  # (job id, a bool per key, seconds)

        self._lookups = Worker("kvd-vllm-lookup", self._look, lambda job: None)
        self._loads = Worker("kvd-vllm-load", self._load, self._abandon)
        self._stores = Worker("kvd-vllm-store", self._store, self._abandon)

    # ---- Lookups ----

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Says HIT or MISS, or RETRY while the store has not answered.

        A chunk whose load failed is a MISS for the requests that asked for it, so that they do not try for ever."""
        self._take_answers()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = _Verdict(self._clock())
            self._to_ask.append(key)
        verdict.requests.add(req_context.req_id)
        self._asked.setdefault(req_context.req_id, set()).add(key)
        if verdict.there is None:
            if not verdict.late and self._clock() - verdict.since >= self._lookup_seconds:
                verdict.late = True
                self.counters.add("exists.late")
            return LookupResult.MISS if verdict.late else LookupResult.RETRY
        return LookupResult.HIT if verdict.there else LookupResult.MISS

    def on_new_request(self, req_context: Any) -> Any:
        """Has no wishes for a request."""
        return RequestOffloadingContext()

    def on_schedule_end(self, context: Any) -> None:
        """Sends the step's lookups to the store, all at once."""
        self._take_answers()
        if self._to_ask or self._to_touch:
            self._lookups.submit((self._to_ask, list(self._to_touch)))
            self._to_ask, self._to_touch = [], set()

    def on_request_finished(self, req_context: Any) -> None:
        """Forgets what only this request wanted to know."""
        for key in self._asked.pop(req_context.req_id, ()):
            verdict = self._verdicts.get(key)
            if verdict is not None:
                verdict.requests.discard(req_context.req_id)
                if not verdict.requests:
                    del self._verdicts[key]

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Has chunks pinned with the step's lookups, if pin_seconds is set."""
        if self._pins:
            self._to_touch.update(keys)

    # ---- Jobs ----

    def submit_store(self, job_metadata: Any) -> None:
        """Starts to store rows of the CPU tier."""
        keys = list(job_metadata.keys)
        if self._waiting + len(keys) > self._backlog:
            self.counters.add("store.backlog", len(keys))
            self._finished.put((job_metadata.job_id, [False] * len(keys), 0.0))
            return
        self._waiting += len(keys)
        self._storing[job_metadata.job_id] = len(keys)
        self._stores.submit((job_metadata.job_id, keys, _rows(job_metadata)))

    def submit_load(self, job_metadata: Any) -> None:
        """Starts to load rows of the CPU tier."""
        keys = list(job_metadata.keys)
        self._loading[job_metadata.job_id] = keys
        self._loads.submit((job_metadata.job_id, keys, _rows(job_metadata)))

    def get_finished_jobs(self) -> List[Any]:
        """Returns the jobs that have ended since the last call.

        A load that failed in part names the keys that it has."""
        results: List[Any] = []
        while True:
            try:
                job_id, good, seconds = self._finished.get_nowait()
            except queue.Empty:
                return results
            self._waiting -= self._storing.pop(job_id, 0)
            keys = self._loading.pop(job_id, None)
            told = {"job_id": job_id, "success": all(good), "transfer_time": seconds,
                    "transfer_bytes": sum(good) * self._row_bytes}
            if keys is not None and not all(good):
                failed = {key for key, ok in zip(keys, good) if not ok}  # of a key with two rows, both count
                told["successful_keys"] = tuple(key for key in keys if key not in failed) or None
                for key in failed:
                    if key in self._verdicts:
                        self._verdicts[key].there = False
            results.append(JobResult(**{name: value for name, value in told.items() if name in _RESULT_FIELDS}))

    def drain_jobs(self) -> None:
        """Waits until all jobs have ended."""
        self._loads.wait_idle()
        self._stores.wait_idle()

    def shutdown(self) -> None:
        """Waits for jobs that have begun, fails the others, and ends the connection."""
        for worker in (self._lookups, self._loads, self._stores):
            worker.close()
        self._opener.close()

    # ---- In the threads ----

    def _look(self, job: Any) -> None:
        keys, touched = job
        try:
            there = self._blocks.exists([self._block_key(key) for key in keys])
        except Exception:
            log.exception("lookups failed")
            there = [None] * len(keys)
        self._answers.put([(key, is_there is True) for key, is_there in zip(keys, there)])
        self._blocks.pin([self._block_key(key) for key in touched])

    def _load(self, job: Any) -> None:
        self._transfer(job, lambda keys, rows: self._blocks.load(keys, rows))

    def _store(self, job: Any) -> None:
        self._transfer(job, lambda keys, rows: [what in (SAVED, PRESENT) for what in self._blocks.save(keys, rows)])

    def _transfer(self, job: Any, move: Callable[[List[Optional[bytes]], List[memoryview]], List[bool]]) -> None:
        job_id, keys, row_ids = job
        began = time.monotonic()
        good = [False] * len(keys)
        try:
            names: List[Optional[bytes]] = []
            rows: List[memoryview] = []
            for key, row in zip(keys, row_ids):
                inside = 0 <= row < len(self._memory) // self._row_bytes
                names.append(self._block_key(key) if inside else None)
                at = row * self._row_bytes if inside else 0
                rows.append(self._memory[at:at + self._row_bytes] if inside else memoryview(b""))
            if len(row_ids) == len(keys):
                good = move(names, rows)
            else:
                self.counters.add("job.argument", len(keys))
        except Exception:  # a fault of this module: the job must end all the same
            log.exception("a job failed")
            self.counters.add("job.exception", len(keys))
        self._finished.put((job_id, good, time.monotonic() - began))

    def _abandon(self, job: Any) -> None:
        self.counters.add("job.abandoned", len(job[1]))
        self._finished.put((job[0], [False] * len(job[1]), 0.0))

    def _take_answers(self) -> None:
        while True:
            try:
                answers = self._answers.get_nowait()
            except queue.Empty:
                return
            for key, there in answers:
                verdict = self._verdicts.get(key)
                if verdict is not None and verdict.there is None:
                    verdict.there = there

    def _block_key(self, key: bytes) -> bytes:
        group = str(get_offload_group_idx(key))
        return block_key(self._salt, self._model, self._rank, group, get_offload_block_hash(key))

    def _register(self, store: Store) -> None:
        try:
            register(store, self._memory)
            self.counters.add("register.ok")
        except Exception as err:  # values are copied then
            log.warning("the CPU tier's memory is not registered: %s", err)
            self.counters.add("register.failed")


def _rows(job: Any) -> List[int]:
    """Returns the numbers of a job's rows, whatever the version calls them."""
    ids = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
    return [int(i) for i in ids]


def _identity(spec: Any) -> Any:
    """Returns the name of the model, with all that makes its bytes, and that of the part of it."""
    config = spec.config
    parallel = config.parallel
    replicated = bool(getattr(config, "replicated_layout", False))
    agnostic = bool(getattr(parallel, "is_parallelism_agnostic", False)) or replicated
    canonical = str(config.kv_cache_layout) if getattr(config, "canonical_layout", False) else None
    layout = {
        "model": config.model.name,
        "dtype": str(config.model.dtype),
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": spec.blocks_per_chunk,
        "canonical": canonical,
        "format": getattr(spec, "storage_format", None),
        "replicated": replicated,
        "groups": [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
    }
    sizes = ["tp_size", "pp_size", "pcp_size", "dcp_size"]
    if not agnostic:
        layout["parallel"] = [getattr(parallel, size) for size in sizes]
    digest = hashlib.sha256(json.dumps(layout, sort_keys=True).encode()).hexdigest()[:32]
    return "%s/%s" % (config.model.name, digest), "any" if agnostic else str(parallel.rank)
