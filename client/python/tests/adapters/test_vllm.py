"""vLLM's secondary tier, through its life and against a store that fails."""

import fcntl
import hashlib
import mmap
import os
import random
import threading
import unittest

import standins

standins.install_vllm()

from fake import LOADS, Faults, FakeStore, Gone, check_counts, failed
from kvd.adapters.vllm import KvdTier
from standins import JobMetadata, LookupResult, ReqContext, TransferJob, offloading_spec

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
ROW = 64
ROWS = 64  # a page in all


def key_of(i, group=0):
    return hashlib.sha256(b"%d" % i).digest() + group.to_bytes(4, "big")


def content(key, salt=""):
    return hashlib.shake_128(salt.encode() + b":" + key).digest(ROW)


class Driver:
    """Does as vLLM's scheduler and its CPU tier do."""

    def __init__(self, store, spec=None, job=TransferJob, **params):
        fd = os.memfd_create("rows", os.MFD_ALLOW_SEALING)
        os.truncate(fd, ROWS * ROW)
        fcntl.fcntl(fd, 1033, 2)  # F_ADD_SEALS, F_SEAL_SHRINK
        self.memory = mmap.mmap(fd, ROWS * ROW)
        os.close(fd)
        view = memoryview(self.memory).cast("B", (ROWS, ROW))
        self.salt, self.job = params.get("salt", ""), job
        self.tier = KvdTier(offloading_spec=spec or offloading_spec(), primary_kv_view=view, tier_type="KvdTier",
                            store=store if callable(store) else lambda: store, **params)
        self.jobs = 0

    def fill(self, row, data):
        self.memory[row * ROW:(row + 1) * ROW] = data

    def row(self, row):
        return bytes(self.memory[row * ROW:(row + 1) * ROW])

    def step(self):
        self.tier.on_schedule_end(None)

    def look(self, keys, req="r"):
        """Asks in step after step until there is an answer for each key."""
        context = ReqContext(req)
        while True:
            got = [self.tier.lookup(key, context) for key in keys]
            if RETRY not in got:
                return got
            self.step()
            self.tier._lookups.wait_idle()

    def submit(self, start, keys, rows):
        self.jobs += 1
        start(self.job(self.jobs, keys, rows, ReqContext("r")))
        return self.jobs

    def end(self, job):
        self.tier.drain_jobs()
        results = self.tier.get_finished_jobs()
        assert [r.job_id for r in results] == [job], results
        assert self.tier.get_finished_jobs() == []
        return results[0]

    def save(self, keys):
        rows = list(range(len(keys)))
        for row, key in zip(rows, keys):
            self.fill(row, content(key, self.salt))
        return self.end(self.submit(self.tier.submit_store, keys, rows)).success

    def load(self, keys):
        """Returns the keys that the result says are there, and how many of them have other bytes."""
        rows = list(range(ROWS - len(keys), ROWS))
        for row in rows:
            self.fill(row, b"\xee" * ROW)
        result = self.end(self.submit(self.tier.submit_load, keys, rows))
        good = list(keys) if result.success else list(result.successful_keys or ())
        assert set(good) <= set(keys) and (result.success or len(good) < len(keys)), result
        wrong = sum(self.row(row) != content(key, self.salt) for key, row in zip(keys, rows) if key in set(good))
        return good, wrong


class Life(unittest.TestCase):
    def driver(self, store, **params):
        driver = Driver(store, **params)
        self.addCleanup(driver.tier.shutdown)
        return driver

    def test_life(self):
        store = FakeStore()
        for job in (TransferJob, JobMetadata):
            store.restart()
            d = self.driver(store, job=job)
            keys = [key_of(i) for i in range(10)]
            self.assertEqual(d.look(keys), [MISS] * 10)
            self.assertTrue(d.save(keys[:8]))
            self.assertEqual(d.look(keys), [MISS] * 10, "as long as the request lives")
            d.tier.on_request_finished(ReqContext("r"))
            self.assertEqual(d.look(keys), [HIT] * 8 + [MISS] * 2)
            self.assertEqual(d.load(keys[:8]), (keys[:8], 0))
            self.assertEqual(store.registered[-1], (bytes(8), bytes(8), ROWS * ROW))
            d.tier.on_request_finished(ReqContext("r"))
            self.assertEqual((d.tier._verdicts, d.tier._asked), ({}, {}))

    def test_results_tell_their_sizes(self):
        d = self.driver(FakeStore())
        keys = [key_of(i) for i in range(4)]
        d.save(keys[:3])
        result = d.end(d.submit(d.tier.submit_load, keys, [0, 1, 2, 3]))
        self.assertEqual((result.success, result.successful_keys), (False, tuple(keys[:3])))
        self.assertEqual(result.transfer_bytes, 3 * ROW)
        result = d.end(d.submit(d.tier.submit_load, keys[3:], [0]))
        self.assertEqual((result.success, result.successful_keys), (False, None))

    def test_one_batch_a_step(self):
        store = FakeStore()
        d = self.driver(store)
        for i in range(20):
            self.assertEqual(d.tier.lookup(key_of(i), ReqContext("r%d" % (i % 3))), RETRY)
        d.step()
        d.step()
        d.tier._lookups.wait_idle()
        self.assertEqual(store.calls["exists"], 1)

    def test_nothing_waits(self):
        store = FakeStore()
        now = [0.0]
        d = self.driver(store, clock=lambda: now[0], backlog=5, lookup_seconds=1)
        keys = [key_of(i) for i in range(4)]
        store.gate.clear()  # the store answers nothing at all
        calls = [lambda: d.tier.lookup(keys[0], ReqContext("r")), d.step,
                 lambda: d.submit(d.tier.submit_store, keys, [0, 1, 2, 3]),
                 lambda: d.submit(d.tier.submit_load, keys, [0, 1, 2, 3]), d.tier.get_finished_jobs,
                 lambda: d.tier.touch(keys, ReqContext("r")), lambda: d.tier.on_new_request(ReqContext("r"))]
        for call in calls:  # a call that waited would wait for ever
            thread = threading.Thread(target=call, daemon=True)
            thread.start()
            thread.join(30)
            self.assertFalse(thread.is_alive())
        self.assertEqual(d.tier.lookup(keys[0], ReqContext("r")), RETRY)
        now[0] = 1.0
        self.assertEqual(d.tier.lookup(keys[0], ReqContext("r")), MISS)
        self.assertEqual(d.tier.lookup(keys[0], ReqContext("r")), MISS)
        self.assertEqual(d.tier.counters.snapshot()["exists.late"], 1)
        # The backlog is full: the job ends at once.
        refused = d.submit(d.tier.submit_store, keys, [0, 1, 2, 3])
        results = d.tier.get_finished_jobs()
        self.assertEqual([(r.job_id, r.success) for r in results], [(refused, False)])
        self.assertEqual(d.tier.counters.snapshot()["store.backlog"], 4)
        store.gate.set()
        d.tier.drain_jobs()
        self.assertEqual(len(d.tier.get_finished_jobs()), 2)
        self.assertEqual(d.tier._waiting, 0)

    def test_a_failed_load_is_a_miss_for_good(self):
        store = FakeStore()
        d = self.driver(store)
        keys = [key_of(i) for i in range(3)]
        d.save(keys)
        self.assertEqual(d.look(keys), [HIT] * 3)
        store.values.pop(next(iter(store.values)))
        self.assertEqual(d.load(keys), (keys[1:], 0))
        self.assertEqual(d.look(keys), [MISS, HIT, HIT], "or the scheduler would try for ever")
        d.tier.on_request_finished(ReqContext("r"))
        d.save(keys)
        self.assertEqual(d.look(keys), [HIT] * 3)

    def test_a_key_with_two_rows(self):
        store = FakeStore()
        d = self.driver(store)
        keys = [key_of(0), key_of(1)]
        d.save(keys)
        real, asked = store._get, []

        def once(key, buffer):
            asked.append(key)
            if asked.count(key) == 2:
                store.values.pop(key, None)
            return real(key, buffer)
        store._get = once
        self.assertEqual(d.load([keys[0], keys[0], keys[1]]), (keys[1:], 0), "of its rows only one is there")

    def test_requests_share_answers(self):
        store = FakeStore()
        d = self.driver(store)
        keys = [key_of(i) for i in range(3)]
        d.look(keys, "a")
        d.look(keys, "b")
        self.assertEqual(store.calls["exists"], 1)
        d.tier.on_request_finished(ReqContext("a"))
        self.assertEqual(set(d.tier._verdicts), set(keys))
        d.tier.on_request_finished(ReqContext("b"))
        d.tier.on_request_finished(ReqContext("never seen"))
        self.assertEqual(d.tier._verdicts, {})

    def test_parts_of_models_do_not_meet(self):
        store = FakeStore()
        keys = [key_of(i) for i in range(3)]
        self.driver(store).save(keys)
        for spec in (offloading_spec(rank=1), offloading_spec(tp_size=2), offloading_spec(dtype="float16"),
                     offloading_spec(model="model2")):
            self.assertEqual(self.driver(store, spec=spec).look(keys), [MISS] * 3)
        self.assertEqual(self.driver(store, salt="another tenant").look(keys), [MISS] * 3)
        self.assertEqual(self.driver(store).look([key_of(0, 1)]), [MISS], "another group of layers")
        self.assertEqual(self.driver(store).look(keys), [HIT] * 3)
        # Ranks that have the same bytes share them.
        self.driver(store, spec=offloading_spec(rank=0, tp_size=2, agnostic=True)).save(keys)
        other = offloading_spec(rank=3, tp_size=4, agnostic=True)
        self.assertEqual(self.driver(store, spec=other).look(keys), [HIT] * 3)

    def test_rows_outside_memory(self):
        d = self.driver(FakeStore())
        keys = [key_of(i) for i in range(3)]
        for rows in ([0, 1, -1], [0, 1, ROWS], [0]):
            for start in (d.tier.submit_store, d.tier.submit_load):
                self.assertFalse(d.end(d.submit(start, keys, rows)).success)
        self.assertEqual(d.memory[:], bytes(ROWS * ROW))

    def test_pins_by_touch(self):
        store = FakeStore()
        d = self.driver(store, pin_seconds=60)
        keys = [key_of(i) for i in range(3)]
        d.save(keys)
        d.tier.touch(keys, ReqContext("r"))
        d.step()
        d.tier._lookups.wait_idle()
        self.assertEqual(len(store.pinned), 3)

    def test_a_store_that_is_away_at_first(self):
        def never():
            raise Gone("no broker")
        d = self.driver(never)
        keys = [key_of(i) for i in range(3)]
        self.assertFalse(d.save(keys))
        self.assertEqual(d.look(keys), [MISS] * 3)
        self.assertEqual(d.load(keys), ([], 0))
        self.assertEqual(d.tier.counters.snapshot(),
                         {"store.unavailable": 3, "exists.unavailable": 3, "load.unavailable": 3})

    def test_shutdown_ends_every_job(self):
        store = FakeStore()
        d = Driver(store)
        keys = [key_of(i) for i in range(3)]
        d.save(keys)
        store.gate.clear()
        for _ in range(3):
            d.submit(d.tier.submit_load, keys, [0, 1, 2])
        closing = threading.Thread(target=d.tier.shutdown)
        closing.start()
        store.gate.set()
        closing.join(30)
        self.assertFalse(closing.is_alive())
        self.assertEqual([r.job_id for r in d.tier.get_finished_jobs()], [2, 3, 4])
        self.assertTrue(store.closed)


class Soak(unittest.TestCase):
    """Every fault at once. A key that is said to be loaded has the right row, and each failure is counted."""

    def test_no_wrong_success(self):
        store = FakeStore(Faults(3, 0.1))
        tenants = [Driver(store, salt=salt, pin_seconds=10) for salt in ("a", "b")]
        for d in tenants:
            self.addCleanup(d.tier.shutdown)
        r = random.Random(4)
        pool = [key_of(i, group) for i in range(300) for group in (0, 1)]
        loads = wrong = hits = 0
        while loads < LOADS:
            d = r.choice(tenants)
            keys = r.sample(pool, 16)
            d.save(keys)
            d.tier.touch(keys[:4], ReqContext("r"))
            found = [key for key, there in zip(keys, d.look(keys)) if there == HIT]
            want = found + [key for key in r.sample(pool, 8) if key not in set(found)]
            if r.random() < 0.01:
                store.lapse()
            good, bad = d.load(want)
            loads, wrong, hits = loads + len(want), wrong + bad, hits + len(good)
            missed = [key for key in keys if key in set(want) - set(good)]
            self.assertEqual(d.look(missed), [MISS] * len(missed))
            d.tier.on_request_finished(ReqContext("r"))
        self.assertEqual(wrong, 0)
        self.assertGreater(hits, loads // 3)
        self.assertEqual(sum(failed(d.tier.counters, "load") for d in tenants), loads - hits)
        for other in tenants[1:]:  # counted per adapter, told per store
            for name, n in other.tier.counters.snapshot().items():
                tenants[0].tier.counters.add(name, n)
        check_counts(self, tenants[0].tier.counters, store)
        self.assertEqual(tenants[0].tier.counters.snapshot()["store.unknown"], store.told["put.unknown"])


if __name__ == "__main__":
    unittest.main()
