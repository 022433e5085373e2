"""SGLang's storage backend, through its life and against a store that fails."""

import ctypes
import hashlib
import random
import unittest

import standins

standins.install_sglang()

from fake import LOADS, Faults, FakeStore, Gone, check_counts, failed
from kvd.adapters.sglang import KvdHiCache
from standins import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer

PAGE = 4  # tokens
TOKEN = 16  # bytes of a token in a component
PAGES = 64


class Tensor:
    """What an adapter sees of a tensor."""

    def __init__(self, size, fill=0):
        self.data = bytearray([fill]) * size
        self.device, self.contiguous = "cpu", True

    def data_ptr(self):
        return ctypes.addressof(ctypes.c_char.from_buffer(self.data))

    def numel(self):
        return len(self.data) // 2

    def element_size(self):
        return 2

    def is_contiguous(self):
        return self.contiguous


class Indices:
    """What a pool sees of a tensor of indices."""

    def __init__(self, numbers):
        self.numbers = list(numbers)

    def __len__(self):
        return len(self.numbers)

    def tolist(self):
        return self.numbers


class HostPool:
    """A pool in the host's memory, page first: all keys, then all values, as MHA has them; or one component."""

    def __init__(self, components=2, layout="page_first", dtype="bfloat16", page_size=PAGE):
        self.components, self.layout, self.dtype, self.page_size = components, layout, dtype, page_size
        self.kv_buffer = Tensor(components * PAGES * PAGE * TOKEN)

    def get_page_buffer_meta(self, indices):
        assert len(indices) % self.page_size == 0
        base, numbers = self.kv_buffer.data_ptr(), indices.tolist()
        addresses = [base + (c * PAGES * PAGE + numbers[i]) * TOKEN
                     for i in range(0, len(numbers), self.page_size) for c in range(self.components)]
        return addresses, [self.page_size * TOKEN] * len(addresses)

    def page(self, number, data=None):
        """Returns a page's bytes, or sets them."""
        out = b""
        for c in range(self.components):
            at = (c * PAGES * PAGE + number * self.page_size) * TOKEN
            size = self.page_size * TOKEN
            if data is not None:
                self.kv_buffer.data[at:at + size] = data[c * size:(c + 1) * size]
            out += bytes(self.kv_buffer.data[at:at + size])
        return out


def key_of(i):
    return hashlib.sha256(b"%d" % i).hexdigest()


def content(key, salt="", components=2):
    return hashlib.shake_128(("%s:%s:%d" % (salt, key, components)).encode()).digest(components * PAGE * TOKEN)


def indices(pages):
    return Indices(page * PAGE + i for page in pages for i in range(PAGE))


class Driver:
    """Does as HiCache's controller does."""

    def __init__(self, store, pool=None, salt="", pin_seconds=0, v1=1, **config):
        self.salt, self.pool = salt, pool or HostPool()
        self.cache = KvdHiCache(HiCacheStorageConfig(extra_config={
            "backend_name": "kvd", "module_path": "kvd.adapters.sglang", "class_name": "KvdHiCache", "interface_v1": v1,
            "salt": salt, "pin_seconds": pin_seconds}, **config), {}, store=store if callable(store) else lambda: store)
        self.cache.register_mem_pool_host(self.pool)

    def save(self, keys):
        for page, key in enumerate(keys):
            self.pool.page(page, content(key, self.salt, self.pool.components))
        return self.cache.batch_set_v1(keys, indices(range(len(keys))))

    def load(self, keys):
        """Returns a bool per page, and how many of them are wrong."""
        pages = range(PAGES - len(keys), PAGES)
        for page in pages:
            self.pool.page(page, b"\xee" * self.pool.components * PAGE * TOKEN)
        good = self.cache.batch_get_v1(keys, indices(pages))
        assert len(good) == len(keys) and all(ok is True or ok is False for ok in good), good
        return good, sum(ok and self.pool.page(page) != content(key, self.salt, self.pool.components)
                         for key, page, ok in zip(keys, pages, good))


class Life(unittest.TestCase):
    def test_life(self):
        for components in (1, 2, 3):
            store = FakeStore()
            d = Driver(store, HostPool(components), is_mla_model=components == 1)
            keys = [key_of(i) for i in range(10)]
            self.assertEqual(d.cache.batch_exists(keys), 0)
            self.assertEqual(d.save(keys[:8]), [True] * 8)
            self.assertEqual(store.told["put.ok"], 8 * components)
            self.assertEqual(d.cache.batch_exists(keys), 8)
            self.assertEqual((d.cache.exists(keys[0]), d.cache.exists(keys[9])), (True, False))
            self.assertEqual(d.load(keys), ([True] * 8 + [False] * 2, 0))
            self.assertEqual(d.save(keys[:8]), [True] * 8)
            self.assertEqual(store.told["put.ok"], 8 * components, "what is there is not stored twice")
            self.assertEqual(d.cache.counters.snapshot()["register.failed"], 1, "memory of no file")
            d.cache.clear()
            self.assertEqual(d.cache.batch_exists(keys), 0)
            d.cache.close()
            self.assertTrue(store.closed)

    def test_a_page_without_a_component_is_none(self):
        store = FakeStore()
        d = Driver(store)
        keys = [key_of(i) for i in range(4)]
        d.save(keys)
        del store.values[list(store.values)[3]]  # a component of the second page
        self.assertEqual(d.cache.batch_exists(keys), 1)
        self.assertEqual(d.load(keys), ([True, False, True, True], 0))
        self.assertEqual(d.cache.counters.snapshot()["load.not_found"], 1)

    def test_whole_pages(self):
        store = FakeStore()
        d = Driver(store, v1=0)
        tensors = [Tensor(128, i + 1) for i in range(4)]
        keys = [key_of(i) for i in range(5)]
        self.assertTrue(d.cache.batch_set(keys[:4], tensors))
        self.assertTrue(d.cache.set(keys[0], tensors[0]))
        self.assertEqual(d.cache.batch_exists(keys), 4)
        self.assertTrue(d.cache.exists(keys[3]))
        targets = [Tensor(128) for _ in keys]
        got = d.cache.batch_get(keys, targets)
        self.assertEqual([t is target for t, target in zip(got, targets)], [True] * 4 + [False])
        self.assertIsNone(got[4])
        self.assertEqual([t.data for t in targets[:4]], [t.data for t in tensors])
        self.assertIsNone(d.cache.get(keys[0], Tensor(64)), "a page of another length")
        self.assertIs(d.cache.get(keys[0], targets[4]), targets[4])
        self.assertEqual(d.cache.batch_get(keys, None), [None] * 5)
        self.assertFalse(d.cache.batch_set(keys, None))
        elsewhere, loose = Tensor(128), Tensor(128)
        elsewhere.device, loose.contiguous = "cuda:0", False
        self.assertEqual(d.cache.batch_get(keys[:2], [elsewhere, loose]), [None] * 2)
        self.assertFalse(d.cache.batch_set(keys[:2], [elsewhere, loose]))

    def test_further_pools(self):
        store = FakeStore()
        d = Driver(store)
        side = HostPool(1)
        d.cache.register_mem_host_pool_v2(side, PoolName.SWA)
        keys = [key_of(i) for i in range(6)]
        d.save(keys)

        def transfer(keys, pages, **more):
            return PoolTransfer(PoolName.SWA, indices(pages), keys, **more)
        for page, key in enumerate(keys):
            side.page(page, content(key, "side", 1))
        self.assertEqual(d.cache.batch_set_v2([transfer([keys[1], keys[2], keys[4]], [1, 2, 4])]), {"swa": [True] * 3})
        for policy, window, hits, stops in ((PoolHitPolicy.ALL_PAGES, keys, 0, []),
                                            (PoolHitPolicy.TRAILING_PAGES, keys[:1], 5, [2, 3, 5]),
                                            (PoolHitPolicy.TRAILING_PAGES, keys[:2], 3, [3])):
            got = d.cache.batch_exists_v2(keys, [transfer(window, range(6), hit_policy=policy)])
            self.assertEqual((got.kv_hit_pages, got.restorable), (hits, stops))
            self.assertEqual(got.extra_pool_hit_pages, dict({"kv": 6}, **({"swa": hits} if hits else {})))
        self.assertEqual(d.cache.batch_exists_v2(keys).kv_hit_pages, 6)
        self.assertEqual(d.cache.batch_exists_v2([key_of(99)]).extra_pool_hit_pages, {})
        self.assertEqual(d.cache.batch_get_v2([transfer(keys[:3], [10, 11, 12])]), {"swa": [False, True, True]})
        self.assertEqual(side.page(11), content(keys[1], "side", 1))
        # A pool that nobody has registered.
        self.assertEqual(d.cache.batch_get_v2([PoolTransfer("draft", indices([0]), keys[:1])]), {"draft": [False]})
        self.assertEqual(d.cache.batch_exists_v2(keys, [PoolTransfer("draft", indices([0]), keys[:1])]).kv_hit_pages, 0)

    def test_a_pool_without_bytes(self):
        d = Driver(FakeStore())
        d.pool.kv_buffer = None
        d.cache.register_mem_pool_host(d.pool)
        keys = [key_of(0)]
        self.assertEqual(d.cache.batch_get_v1(keys, indices([0])), [True])
        self.assertEqual(d.cache.batch_set_v1(keys, indices([0])), [True])
        self.assertEqual(d.cache.batch_exists_v2(keys).kv_hit_pages, 1)

    def test_calls_that_do_not_fit(self):
        d = Driver(FakeStore())
        keys = [key_of(i) for i in range(3)]
        d.save(keys)
        self.assertEqual(d.cache.batch_get_v1(keys, indices([0, 1])), [False] * 3)
        self.assertEqual(d.cache.batch_set_v1(keys, Indices([0] * 11)), [False] * 3)
        self.assertEqual(d.cache.batch_get_v1([], Indices([])), [])
        d.pool.get_page_buffer_meta = lambda indices: ([0] * 6, [64] * 6)
        self.assertEqual(d.cache.batch_get_v1(keys, indices([0, 1, 2])), [False] * 3)
        d.pool.get_page_buffer_meta = lambda indices: ([1] * 5, [64] * 5)
        self.assertEqual(d.cache.batch_get_v1(keys, indices([0, 1, 2])), [False] * 3)
        counts = d.cache.counters.snapshot()
        self.assertEqual((counts["load.argument"], counts["store.argument"]), (9, 3))

    def test_ranks(self):
        store = FakeStore()
        keys = [key_of(i) for i in range(3)]
        Driver(store, tp_size=2).save(keys)
        for other in (Driver(store, tp_size=2, tp_rank=1), Driver(store), Driver(store, tp_size=2, model_name="other"),
                      Driver(store, tp_size=2, pp_size=2), Driver(store, tp_size=2, attn_cp_size=2),
                      Driver(store, tp_size=2, salt="another tenant"),
                      Driver(store, HostPool(layout="page_first_direct"), tp_size=2),
                      Driver(store, HostPool(dtype="float16"), tp_size=2)):
            self.assertEqual(other.cache.batch_exists(keys), 0)
            self.assertEqual(other.load(keys), ([False] * 3, 0))
        self.assertEqual(Driver(store, tp_size=2).cache.batch_exists(keys), 3)
        # Ranks of an MLA model have the same bytes.
        Driver(store, HostPool(1), is_mla_model=True, tp_size=2).save(keys)
        other = Driver(store, HostPool(1), is_mla_model=True, tp_size=2, tp_rank=1)
        self.assertEqual(other.cache.batch_exists(keys), 3)

    def test_clear_is_of_a_model_and_a_salt(self):
        store = FakeStore()
        keys = [key_of(i) for i in range(3)]
        ours, theirs, other = Driver(store), Driver(store, salt="theirs"), Driver(store, model_name="model2")
        for d in (ours, theirs, other):
            d.save(keys)
        ours.cache.clear()
        self.assertEqual([d.cache.batch_exists(keys) for d in (ours, theirs, other)], [0, 3, 3])

    def test_pins_by_exists(self):
        store = FakeStore()
        d = Driver(store, pin_seconds=60)
        keys = [key_of(i) for i in range(3)]
        d.save(keys[:2])
        self.assertEqual(d.cache.batch_exists(keys), 2)
        self.assertEqual(len(store.pinned), 4)
        there = store.exists_prefix
        store.exists_prefix = lambda keys: (there(keys), store.values.pop(keys[2]))[0]  # evicted before it is pinned
        self.assertEqual(d.cache.batch_exists(keys), 1)
        self.assertEqual(d.cache.counters.snapshot()["pin.not_found"], 1)

    def test_a_store_that_is_away(self):
        def never():
            raise Gone("no broker")
        d = Driver(never)
        keys = [key_of(i) for i in range(3)]
        self.assertEqual(d.save(keys), [False] * 3)
        self.assertEqual(d.cache.batch_exists(keys), 0)
        self.assertEqual(d.load(keys), ([False] * 3, 0))
        d.cache.clear()
        self.assertEqual(d.cache.counters.snapshot(),
                         {"store.unavailable": 6, "exists.unavailable": 1, "load.unavailable": 6,
                          "clear.unavailable": 1})

    def test_a_name_that_is_too_long_shows_at_once(self):
        self.assertRaises(ValueError, Driver, FakeStore(), model_name="m" * 1000)


class Soak(unittest.TestCase):
    """Every fault at once. A page that is said to be loaded has the right bytes, and each failure is counted."""

    def test_no_wrong_success(self):
        store = FakeStore(Faults(5, 0.05))
        tenants = [Driver(store, salt=salt, pin_seconds=10) for salt in ("a", "b")]
        r = random.Random(6)
        prefixes = [[key_of(100 * p + i) for i in range(24)] for p in range(20)]
        loads = wrong = hits = 0
        while loads < LOADS:
            d, prefix = r.choice(tenants), r.choice(prefixes)
            d.save(prefix[:r.randrange(1, 25)])
            d.cache.batch_exists(prefix)
            if r.random() < 0.02:
                store.lapse()
            good, bad = d.load(prefix)
            loads, wrong, hits = loads + len(prefix), wrong + bad, hits + sum(good)
        self.assertEqual(wrong, 0)
        self.assertGreater(hits, loads // 3)
        for other in tenants[1:]:  # counted per adapter, told per store
            for name, n in other.cache.counters.snapshot().items():
                tenants[0].cache.counters.add(name, n)
        self.assertGreaterEqual(failed(tenants[0].cache.counters, "load"), loads - hits)  # a page is two values
        check_counts(self, tenants[0].cache.counters, store)
        self.assertEqual(tenants[0].cache.counters.snapshot()["store.unknown"], store.told["put.unknown"])


if __name__ == "__main__":
    unittest.main()
