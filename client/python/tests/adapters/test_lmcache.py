"""LMCache's L2 adapter, through its life and against a store that fails."""

import ctypes
import hashlib
import mmap
import os
import random
import select
import tempfile
import threading
import unittest

import standins

standins.install_lmcache()

from fake import BUSY, DENIED, LOADS, TIMEOUT, UNSUPPORTED, Faults, FakeStore, Gone, Verdict, check_counts, failed
from kvd.adapters.lmcache import KvdL2Adapter
from standins import MemoryObject, ObjectKey


def content(key, size=96):
    """The bytes of an object: another for each field of its key."""
    return hashlib.shake_128(repr(key).encode()).digest(size)


class Driver:
    """Does as LMCache's controllers do."""

    def __init__(self, store, **params):
        self.adapter = KvdL2Adapter(params, store=store if callable(store) else lambda: store)

    def wait(self, fd):
        ready, _, _ = select.select([fd], [], [], 30)
        assert ready, "nothing after 30 s"
        os.read(fd, 8)

    def until(self, fd, take):
        while True:
            got = take()
            if got is not None:
                return got
            self.wait(fd)

    def save(self, keys, size=96):
        a = self.adapter
        task = a.submit_store_task(keys, [MemoryObject(content(key, size)) for key in keys])
        results = self.until(a.get_store_event_fd(), lambda: a.pop_completed_store_tasks() or None)
        assert list(results) == [task], results
        return results[task].is_successful()

    def find(self, keys):
        a = self.adapter
        task = a.submit_lookup_and_lock_task(keys, {0: "layout"})
        bits = self.until(a.get_lookup_and_lock_event_fd(), lambda: a.query_lookup_and_lock_result(task)).bits
        assert a.query_lookup_and_lock_result(task) is None, "a result was given twice"
        return bits

    def load(self, keys, size=96):
        """Returns a bit per key, and how many of the bits are wrong."""
        a = self.adapter
        objects = [MemoryObject(b"\xee" * size) for _ in keys]
        task = a.submit_load_task(keys, objects)
        bits = self.until(a.get_load_event_fd(), lambda: a.query_load_result(task)).bits
        assert a.query_load_result(task) is None, "a result was given twice"
        wrong = sum(good and bytes(obj.byte_array) != content(key, size) for key, obj, good in zip(keys, objects, bits))
        return bits, wrong


def keys_of(n, **fields):
    return [ObjectKey(chunk_hash=hashlib.sha256(b"%d" % i).digest(), model_name="org/model", kv_rank=7, **fields)
            for i in range(n)]


class Life(unittest.TestCase):
    def driver(self, store, **params):
        driver = Driver(store, **params)
        self.addCleanup(driver.adapter.close)
        return driver

    def test_life(self):
        store = FakeStore()
        d = self.driver(store)
        a = d.adapter
        fds = {a.get_store_event_fd(), a.get_lookup_and_lock_event_fd(), a.get_load_event_fd()}
        self.assertEqual(len(fds), 3)
        keys = keys_of(10)
        self.assertEqual(d.find(keys), [False] * 10)
        self.assertTrue(d.save(keys[:8]))
        self.assertEqual(d.find(keys), [True] * 8 + [False] * 2)
        self.assertEqual(len(store.pinned), 8)
        self.assertEqual(d.load(keys), ([True] * 8 + [False] * 2, 0))
        self.assertEqual(a.used, {"": 8 * 96})
        self.assertEqual(a.accessed, 8)
        self.assertTrue(d.save(keys[:8]))
        self.assertEqual(a.used, {"": 8 * 96}, "what is there is not stored twice")
        self.assertEqual(store.told["put.ok"], 8)
        a.delete(keys[:3])
        self.assertEqual(a.used, {"": 5 * 96})
        self.assertEqual(d.find(keys), [False] * 3 + [True] * 5 + [False] * 2)
        self.assertTrue(a.report_status()["is_healthy"])

    def test_locks_are_counted(self):
        store = FakeStore()
        d = self.driver(store)
        keys = keys_of(4)
        d.save(keys)
        d.find(keys)
        d.find(keys)
        d.adapter.submit_unlock(keys)
        d.find([])  # behind the unlock
        self.assertEqual(len(store.pinned), 4)
        d.adapter.submit_unlock(keys + keys)  # once more than there are locks
        d.find([])
        self.assertEqual(len(store.pinned), 0)

    def test_pins_that_lapse_cost_misses(self):
        store = FakeStore()
        d = self.driver(store)
        keys = keys_of(6)
        d.save(keys)
        self.assertEqual(d.find(keys), [True] * 6)
        for key in list(store.values):
            store.evict(key)
        self.assertEqual(d.load(keys), ([True] * 6, 0), "pinned")
        store.lapse()
        for key in list(store.values)[:2]:
            store.evict(key)
        self.assertEqual(d.load(keys), ([False] * 2 + [True] * 4, 0))
        self.assertEqual(d.adapter.counters.snapshot()["load.not_found"], 2)
        self.assertEqual(d.find(keys), [False] * 2 + [True] * 4)
        self.assertEqual(d.adapter.used, {"": 4 * 96}, "what was evicted is not counted as stored")

    def test_a_lookup_is_one_batch(self):
        store = FakeStore()
        d = self.driver(store)
        keys = keys_of(4)
        d.save(keys[:3])
        store.calls.clear()
        self.assertEqual(d.find(keys), [True] * 3 + [False])
        self.assertEqual(store.calls, {"pin": 1})
        counts = d.adapter.counters.snapshot()
        self.assertEqual([counts[name] for name in ("pin.ok", "pin.not_found", "exists.ok", "exists.not_found")],
                         [3, 1, 3, 1])

    def test_a_store_that_does_not_pin(self):
        for code, name in ((UNSUPPORTED, "pin.unsupported"), (BUSY, "pin.busy"), (DENIED, "pin.denied")):
            store = FakeStore()
            d = self.driver(store)
            keys = keys_of(3)
            d.save(keys[:2])
            store.pin_many = lambda keys, seconds: [Verdict(1, code) for _ in keys]
            self.assertEqual(d.find(keys), [True] * 2 + [False], name)
            self.assertEqual(d.load(keys), ([True] * 2 + [False], 0))
            self.assertEqual(d.adapter.counters.snapshot()[name], 3)

    def test_a_pin_that_fails_is_a_miss(self):
        store = FakeStore()
        d = self.driver(store)
        keys = keys_of(3)
        d.save(keys)
        pin = store.pin_many
        store.pin_many = lambda keys, seconds: [Verdict(1, TIMEOUT), Verdict(2, TIMEOUT)] + pin(keys[2:], seconds)
        self.assertEqual(d.find(keys), [False, False, True])
        counts = d.adapter.counters.snapshot()
        self.assertEqual([counts[name] for name in ("pin.timeout", "pin.unknown", "pin.ok")], [1, 1, 1])
        self.assertEqual(d.adapter.used, {"": 3 * 96}, "nobody said that they are gone")

    def test_an_unlock_leaves_what_is_locked_again(self):
        store = FakeStore()
        d = self.driver(store)
        keys = keys_of(3)
        d.save(keys)
        d.find(keys)
        store.gate.clear()
        again = d.adapter.submit_lookup_and_lock_task(keys[:1])
        d.adapter.submit_unlock(keys)  # its job is behind that lookup
        store.gate.set()
        d.find([])
        self.assertEqual(d.adapter.query_lookup_and_lock_result(again).bits, [True])
        self.assertEqual(len(store.pinned), 1)

    def test_pin_seconds_has_bounds(self):
        for wrong in (-1, 4201, float("nan")):
            self.assertRaises(ValueError, Driver, FakeStore(), pin_seconds=wrong)

    def test_tenants_do_not_meet(self):
        store = FakeStore()
        d = self.driver(store)
        ours, theirs = keys_of(3, cache_salt="ours"), keys_of(3, cache_salt="theirs")
        d.save(ours)
        self.assertEqual(d.find(theirs), [False] * 3)
        self.assertEqual(d.load(theirs), ([False] * 3, 0))
        # Nor do deployments whose names run into those of tenants.
        a, b = self.driver(store, salt="x"), self.driver(store, salt="xy")
        a.save(keys_of(3, cache_salt="yz"))
        self.assertEqual(b.find(keys_of(3, cache_salt="z")), [False] * 3)

    def test_a_tenant_who_may_not_any_more(self):
        store = FakeStore()
        d = self.driver(store)
        keys = keys_of(3)
        d.save(keys)
        store.get_many = lambda keys, into: [Verdict(1, DENIED) for _ in keys]
        self.assertEqual(d.load(keys), ([False] * 3, 0))
        self.assertEqual(d.adapter.counters.snapshot()["load.denied"], 3)

    def test_unsure_stores_are_no_success_and_counted(self):
        store = FakeStore()
        d = self.driver(store)
        store.put_many = lambda items: [Verdict(2, 6) for _ in items]
        self.assertFalse(d.save(keys_of(3)))
        self.assertEqual(d.adapter.counters.snapshot()["store.unknown"], 3)
        self.assertEqual(d.adapter.used, {})

    def test_a_store_that_is_away_at_first(self):
        store, away = FakeStore(), [True]

        def connect():
            if away[0]:
                raise Gone("no broker")
            return store
        d = self.driver(connect)
        adapter = d.adapter
        adapter._opener._retry = 0
        keys = keys_of(3)
        self.assertFalse(d.save(keys))
        self.assertEqual(d.find(keys), [False] * 3)
        self.assertEqual(d.load(keys), ([False] * 3, 0))
        self.assertFalse(adapter.report_status()["is_healthy"])
        self.assertEqual(failed(adapter.counters, "load"), 3)
        away[0] = False
        self.assertTrue(d.save(keys))
        self.assertEqual(d.load(keys), ([True] * 3, 0))

    def test_objects_that_are_none(self):
        store = FakeStore()
        d = self.driver(store)
        a = d.adapter
        keys = keys_of(2) + [ObjectKey(b"h", "m" * 2000, 0)]
        task = a.submit_store_task(keys, [MemoryObject(b"1"), object(), MemoryObject(b"3")])
        result = d.until(a.get_store_event_fd(), lambda: a.pop_completed_store_tasks() or None)[task]
        self.assertFalse(result.is_successful())
        self.assertEqual(d.find(keys), [True, False, False])
        task = a.submit_load_task(keys, [])  # one for each key is promised
        self.assertEqual(d.until(a.get_load_event_fd(), lambda: a.query_load_result(task)).bits, [False] * 3)

    def test_another_layout_is_a_miss(self):
        d = self.driver(FakeStore())
        keys = keys_of(2)
        d.save(keys, size=64)
        self.assertEqual(d.load(keys, size=96), ([False] * 2, 0))
        self.assertEqual(d.load(keys, size=32), ([False] * 2, 0))
        self.assertEqual(d.adapter.counters.snapshot()["load.length"], 2)
        self.assertTrue(d.save(keys, size=96))  # and is replaced
        self.assertEqual(d.load(keys, size=96), ([True] * 2, 0))
        self.assertEqual(d.adapter.used, {"": 2 * 96})

    def test_listing(self):
        d = self.driver(FakeStore(), tracked_keys=7)
        a = d.adapter
        keys = keys_of(9)
        d.save(keys)
        seen, cursor = [], None
        while True:
            page = a.list_l2_keys(page_size=2, cursor=cursor)
            seen += [entry.key[1] for entry in page.entries]
            cursor = page.next_page_token
            if cursor is None:
                break
        self.assertEqual(seen, keys[2:], "the oldest are forgotten")
        self.assertEqual(a.used, {"": 7 * 96})
        self.assertEqual(a.list_l2_keys(model_name="another").entries, ())
        self.assertRaises(ValueError, a.list_l2_keys, page_size=0)
        self.assertRaises(ValueError, a.list_l2_keys, cursor="?")

    def test_close_ends_every_task(self):
        store = FakeStore()
        d = Driver(store)
        a = d.adapter
        keys = keys_of(2)
        d.save(keys)
        store.gate.clear()
        first = a.submit_load_task(keys, [MemoryObject(bytes(96)) for _ in keys])
        second = a.submit_load_task(keys, [MemoryObject(bytes(96)) for _ in keys])
        closing = threading.Thread(target=a.close)
        closing.start()
        store.gate.set()
        closing.join(30)
        self.assertFalse(closing.is_alive())
        for task in (first, second):
            self.assertIsNotNone(a.query_load_result(task))
        self.assertTrue(store.closed)

    def test_memory_is_registered(self):
        private = bytearray(1 << 20)
        at = ctypes.addressof(ctypes.c_char.from_buffer(private))

        class Desc:
            ptr, size = at + 100, (1 << 20) - 200
        store = FakeStore()
        adapter = KvdL2Adapter({}, l1_memory_desc=Desc, store=lambda: store)
        self.addCleanup(adapter.close)
        adapter.report_status()
        self.assertEqual(adapter.counters.snapshot(), {"register.failed": 1}, "memory of no file")
        with tempfile.NamedTemporaryFile() as file:
            file.truncate(1 << 20)
            memory = mmap.mmap(file.fileno(), 1 << 20)
            memory[4096:4104] = b"here I a"
            Desc.ptr = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + 100
            adapter = KvdL2Adapter({}, l1_memory_desc=Desc, store=lambda: store)
            self.addCleanup(adapter.close)
            adapter.report_status()
        self.assertEqual(adapter.counters.snapshot(), {"register.ok": 1})
        self.assertEqual(store.registered, [(b"here I a", b"here I a", (1 << 20) - 2 * 4096)])

    def test_parameters(self):
        self.assertRaises(ValueError, KvdL2Adapter, {"pathh": "/tmp/x"})
        self.assertEqual(self.driver(FakeStore(), max_capacity_gb=0.5).adapter.max_capacity_bytes, 1 << 29)


class Soak(unittest.TestCase):
    """Every fault at once. A bit that is set has the right bytes behind it, and each failure is counted."""

    def test_no_wrong_success(self):
        store = FakeStore(Faults(1, 0.1))
        d = Driver(store)
        self.addCleanup(d.adapter.close)
        r = random.Random(2)
        pool = [key for salt in ("", "a", "b") for group in (0, 1)
                for key in keys_of(200, cache_salt=salt, object_group_id=group)]
        loads = wrong = hits = 0
        while loads < LOADS:
            keys = r.sample(pool, 16)
            d.save(keys)
            found = d.find(keys)
            want = [key for key, there in zip(keys, found) if there] + r.sample(pool, 8)
            if r.random() < 0.01:
                store.lapse()
            bits, bad = d.load(want)
            loads, wrong, hits = loads + len(want), wrong + bad, hits + sum(bits)
            d.adapter.submit_unlock(keys)
            if r.random() < 0.02:
                d.adapter.delete(r.sample(pool, 4))
        self.assertEqual(wrong, 0)
        self.assertGreater(hits, loads // 3)
        self.assertEqual(failed(d.adapter.counters, "load"), loads - hits)
        check_counts(self, d.adapter.counters, store)
        self.assertEqual(d.adapter.counters.snapshot()["store.unknown"], store.told["put.unknown"])

    def test_two_controllers(self):
        """LMCache stores from one thread and looks up and loads from another."""
        store = FakeStore(Faults(8, 0.1))
        d = Driver(store)
        self.addCleanup(d.adapter.close)
        pool = keys_of(100)
        stop, broken = threading.Event(), []

        def save():
            r = random.Random(9)
            try:
                while not stop.is_set():
                    d.save(r.sample(pool, 8))
            except Exception as err:
                broken.append(err)
        saving = threading.Thread(target=save)
        saving.start()
        r = random.Random(10)
        loads = wrong = hits = 0
        while loads < LOADS // 4:
            keys = r.sample(pool, 8)
            d.find(keys)
            bits, bad = d.load(keys)
            loads, wrong, hits = loads + 8, wrong + bad, hits + sum(bits)
            d.adapter.submit_unlock(keys)
        stop.set()
        saving.join(30)
        self.assertEqual((wrong, broken), (0, []))
        self.assertGreater(hits, 0)
        self.assertEqual(failed(d.adapter.counters, "load"), loads - hits)
        check_counts(self, d.adapter.counters, store)


if __name__ == "__main__":
    unittest.main()
