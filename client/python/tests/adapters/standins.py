"""Stand-ins for the classes of LMCache, SGLang and vLLM that the adapters derive from.

They have the names, arguments and promises of the versions that the adapters name, in words of our own, and nothing
of what the servers do with them.
"""

import abc
import dataclasses
import enum
import os
import sys
import threading
import types
import typing


def module(name, **contents):
    """Puts a module where an import finds it."""
    made = types.ModuleType(name)
    made.__dict__.update(contents)
    sys.modules[name] = made
    parent, _, child = name.rpartition(".")
    if parent:
        if parent not in sys.modules:
            module(parent)
        setattr(sys.modules[parent], child, made)


if not os.environ.get("KVD_LIBRARY"):  # the adapters do not need the client as long as they do not connect
    module("kvd", __path__=[os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "kvd")])


def abstract(*names):
    """Methods that a class must have."""
    def never(self, *args, **kwargs):
        raise NotImplementedError
    return {name: abc.abstractmethod(types.FunctionType(never.__code__, globals(), name)) for name in names}


# ---- LMCache ----

@dataclasses.dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""

    def to_encoded_object_key(self):
        return ("encoded", self)


@dataclasses.dataclass(frozen=True)
class KeyEntry:
    key: typing.Any
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class KeyListPage:
    entries: tuple
    next_page_token: typing.Optional[str]


class L2StoreResult(int):
    def __new__(cls, success, bytes_transferred):
        return super().__new__(cls, bytes_transferred if success else -1)

    def is_successful(self):
        return int(self) >= 0


class Bitmap:
    def __init__(self, size):
        self.bits = [False] * size

    def set(self, i):
        self.bits[i] = True

    def test(self, i):
        return self.bits[i]


def _account(self, keys, sizes, sign):
    with self.usage_lock:
        for key, size in zip(keys, sizes):
            self.used[key.cache_salt] = self.used.get(key.cache_salt, 0) + sign * size
            assert self.used[key.cache_salt] >= 0, "more is deleted than was stored"


def _l2_init(self, max_capacity_bytes=0):
    self.max_capacity_bytes, self.used, self.accessed = max_capacity_bytes, {}, 0
    self.usage_lock = threading.Lock()


def _accessed(self, keys):
    self.accessed += len(keys)


L2AdapterInterface = abc.ABCMeta("L2AdapterInterface", (), dict(
    abstract("get_store_event_fd", "get_lookup_and_lock_event_fd", "get_load_event_fd", "submit_store_task",
             "pop_completed_store_tasks", "submit_lookup_and_lock_task", "query_lookup_and_lock_result",
             "submit_unlock", "submit_load_task", "query_load_result", "close"),
    __init__=_l2_init,
    _notify_keys_stored=lambda self, keys, sizes: _account(self, keys, sizes, 1),
    _notify_keys_deleted=lambda self, keys, sizes: _account(self, keys, sizes, -1),
    _notify_keys_accessed=_accessed))


class MemoryObject:
    """An object of LMCache: all that adapters see of it is its bytes."""

    def __init__(self, data):
        self.byte_array = memoryview(bytearray(data))


def install_lmcache():
    module("lmcache.v1.distributed.api", KeyEntry=KeyEntry, KeyListPage=KeyListPage)
    module("lmcache.v1.distributed.internal_api", L2StoreResult=L2StoreResult)
    module("lmcache.v1.distributed.l2_adapters.base", L2AdapterInterface=L2AdapterInterface)
    module("lmcache.lmcache_native", Bitmap=Bitmap)


# ---- SGLang ----

@dataclasses.dataclass
class HiCacheStorageConfig:
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    model_name: typing.Optional[str] = "model"
    extra_config: typing.Optional[dict] = None


class PoolName(str, enum.Enum):
    KV = "kv"
    SWA = "swa"

    def __str__(self):
        return self.value


class PoolHitPolicy(str, enum.Enum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"


@dataclasses.dataclass
class PoolTransfer:
    name: typing.Any
    host_indices: typing.Any = None
    keys: typing.Any = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclasses.dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict
    restorable: list


def _register_mem_pool_host(self, mem_pool_host):
    self.mem_pool_host = mem_pool_host


HiCacheStorage = abc.ABCMeta("HiCacheStorage", (), dict(
    abstract("get", "batch_get", "set", "batch_set", "exists"),
    register_mem_pool_host=_register_mem_pool_host,
    register_mem_host_pool_v2=lambda self, host_pool, host_pool_name: None))


def install_sglang():
    module("sglang.srt.mem_cache.hicache_storage", HiCacheStorage=HiCacheStorage, PoolHitPolicy=PoolHitPolicy,
           PoolTransferResult=PoolTransferResult)


# ---- vLLM ----

class LookupResult(enum.Enum):
    MISS = enum.auto()
    HIT = enum.auto()
    HIT_PENDING = enum.auto()
    RETRY = enum.auto()


@dataclasses.dataclass
class RequestOffloadingContext:
    policy: str = "chunk_level"


@dataclasses.dataclass
class ReqContext:
    req_id: str


@dataclasses.dataclass
class TransferJob:
    job_id: int
    keys: list
    chunk_ids: list
    req_context: ReqContext


@dataclasses.dataclass
class JobMetadata:
    """The job of earlier versions."""

    job_id: int
    keys: list
    block_ids: list
    req_context: ReqContext


@dataclasses.dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: typing.Any = None
    transfer_time: typing.Optional[float] = None
    transfer_bytes: typing.Optional[int] = None


def _tier_init(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None):
    self.tier_type, self.backpressure_detector = tier_type, backpressure_detector


SecondaryTierManager = abc.ABCMeta("SecondaryTierManager", (), dict(
    abstract("lookup", "submit_store", "submit_load", "get_finished_jobs", "on_new_request", "drain_jobs"),
    __init__=_tier_init))


def offloading_spec(model="model", rank=0, tp_size=1, dtype="bfloat16", agnostic=False):
    """What vLLM says of the model and its parts."""
    ns = types.SimpleNamespace
    return ns(blocks_per_chunk=1, storage_format=None, config=ns(
        model=ns(name=model, dtype=dtype), cache=ns(tokens_per_hash=16), canonical_layout=False,
        replicated_layout=False,
        groups=[ns(tokens_per_block=16, layer_names=["a", "b"])],
        parallel=ns(tp_size=tp_size, pp_size=1, pcp_size=1, dcp_size=1, rank=rank, is_parallelism_agnostic=agnostic)))


def install_vllm():
    module("vllm.v1.kv_offload.base", LookupResult=LookupResult, RequestOffloadingContext=RequestOffloadingContext,
           get_offload_block_hash=lambda key: key[:-4],
           get_offload_group_idx=lambda key: int.from_bytes(key[-4:], "big"))
    module("vllm.v1.kv_offload.tiering.base", JobResult=JobResult, SecondaryTierManager=SecondaryTierManager)
