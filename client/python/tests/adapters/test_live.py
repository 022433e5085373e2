"""The adapters with the real client. KVD_LIBRARY names libkvd, and KVD, if it is set, the program kvd with a broker.

Without KVD the broker is the client tests' own, which keeps values in a map.
"""

import os
import random
import re
import subprocess
import sys
import unittest

import standins  # noqa: F401, before the adapters

if os.environ.get("KVD_LIBRARY"):
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    import support

import test_lmcache
import test_sglang
import test_vllm
from fake import LOADS, failed
from kvd.adapters._store import connect
from test_vllm import HIT


@unittest.skipIf(not os.environ.get("KVD_LIBRARY"), "KVD_LIBRARY is not set; run make test-python")
class Live(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.broker = support.Dev() if support.Dev.there() else support.Fake()
        cls.addClassCleanup(cls.broker.stop)

    def connect(self):
        return connect(self.broker.path, None)

    def test_lmcache(self):
        d = test_lmcache.Driver(self.connect, pin_seconds=1)
        self.addCleanup(d.adapter.close)
        r = random.Random(1)
        pool = [key for salt in ("", "a", "b") for key in test_lmcache.keys_of(200, cache_salt=salt)]
        loads = wrong = hits = 0
        while loads < LOADS // 4:
            keys = r.sample(pool, 16)
            self.assertTrue(d.save(keys))
            self.assertEqual(d.find(keys), [True] * 16)
            want = keys + r.sample(pool, 8)
            bits, bad = d.load(want)
            self.assertEqual(bits[:16], [True] * 16)
            loads, wrong, hits = loads + len(want), wrong + bad, hits + sum(bits)
            d.adapter.submit_unlock(keys)
            d.adapter.delete(keys[:4])
        self.assertEqual(wrong, 0)
        counts = d.adapter.counters.snapshot()
        self.assertEqual((counts["load.ok"], counts.get("load.not_found", 0)), (hits, loads - hits))
        large = test_lmcache.keys_of(4, object_group_id=9)
        self.assertTrue(d.save(large, size=3 << 20))
        self.assertEqual(d.load(large, size=3 << 20), ([True] * 4, 0))
        self.assertEqual(d.load(large, size=1 << 20), ([False] * 4, 0))
        self.assertEqual(d.load(large, size=4 << 20), ([False] * 4, 0))
        d.adapter.delete(large)
        self.assertTrue(d.adapter.report_status()["is_healthy"])

    def test_sglang(self):
        d = test_sglang.Driver(self.connect, salt="live")
        self.addCleanup(d.cache.close)
        keys = [test_sglang.key_of(i) for i in range(24)]
        loads = 0
        while loads < LOADS // 4:
            self.assertEqual(d.save(keys[:20]), [True] * 20)
            self.assertEqual(d.cache.batch_exists(keys), 20)
            self.assertEqual(d.load(keys), ([True] * 20 + [False] * 4, 0))
            loads += 24
        if support.Dev.there():  # the other broker deletes no prefixes
            d.cache.clear()
            self.assertEqual(d.cache.batch_exists(keys), 0)
        tensors = [test_sglang.Tensor(1 << 20, i + 1) for i in range(2)]
        whole = test_sglang.Driver(self.connect, salt="live", v1=0)
        self.addCleanup(whole.cache.close)
        self.assertTrue(whole.cache.batch_set(keys[:2], tensors))
        got = whole.cache.batch_get(keys[:3], [test_sglang.Tensor(1 << 20) for _ in range(3)])
        self.assertEqual([t and t.data for t in got], [tensors[0].data, tensors[1].data, None])

    def test_vllm(self):
        d = test_vllm.Driver(self.connect, salt="live")
        self.addCleanup(d.tier.shutdown)
        r = random.Random(2)
        pool = [test_vllm.key_of(i, group) for i in range(200) for group in (0, 1)]
        loads = 0
        while loads < LOADS // 4:
            keys = r.sample(pool, 16)
            self.assertTrue(d.save(keys))
            self.assertEqual(d.look(keys), [HIT] * 16)
            missing = [test_vllm.key_of(10 ** 6 + i) for i in range(4)]
            self.assertEqual(d.load(keys + missing), (keys, 0))
            d.tier.on_request_finished(standins.ReqContext("r"))
            loads += 20
        self.assertEqual(d.tier.counters.snapshot()["register.ok"], 1)

    @unittest.skipIf(bool(os.environ.get("KVD")), "kvd dev is not started again")
    def test_a_broker_that_dies(self):
        """Nothing is there in the next broker; all that fails is a miss, and the adapter goes on by itself."""
        d = test_lmcache.Driver(self.connect)
        self.addCleanup(d.adapter.close)
        keys = test_lmcache.keys_of(8, object_group_id=5)
        for _ in range(3):
            self.assertTrue(d.save(keys))
            self.assertEqual(d.load(keys), ([True] * 8, 0))
            self.broker.process.kill()
            self.broker.process.wait()
            self.broker.start()
            self.assertEqual(d.load(keys), ([False] * 8, 0))
            support.until(lambda: d.find(keys) == [False] * 8 and d.save(keys), "the adapter has the next broker")


class Killed(test_lmcache.Driver):
    """An adapter at a broker that is a process of its own, and is killed."""

    def __init__(self, dev):
        ready = support.until(lambda: self.find_ready(dev), "kvd dev is ready")
        directory = ready.group(1)
        self.path = os.path.join(dev.folder, "killed.sock")
        self.command = [os.environ["KVD"], "broker", "--directory", directory, "--listen", self.path,
                        "--namespaces", "cache"]
        self.log = open(os.path.join(dev.folder, "killed.log"), "w", encoding="utf-8")
        self.start()
        super().__init__(lambda: connect(self.path, None), pin_seconds=0)

    @staticmethod
    def find_ready(dev):
        with open(os.path.join(dev.folder, "log"), encoding="utf-8") as log:
            return re.search(r"^ready .*directory=(\S+)", log.read(), re.M)

    def start(self):
        self.process = subprocess.Popen(self.command, stdout=self.log, stderr=self.log)
        support.until(lambda: os.path.exists(self.path), "the broker listens")

    def kill(self):
        self.process.kill()
        self.process.wait()
        os.unlink(self.path)

    def stop(self):
        self.adapter.close()
        self.process.kill()
        self.process.wait()
        self.log.close()


@unittest.skipIf(not os.environ.get("KVD") or not os.environ.get("KVD_LIBRARY"), "KVD is not set; run make test-python")
class Nemesis(unittest.TestCase):
    """A store that evicts, and a broker that is killed with loads and stores under way."""

    SIZE = 256 << 10

    def test_no_wrong_success(self):
        dev = support.Dev()
        self.addCleanup(dev.stop)
        d = Killed(dev)
        self.addCleanup(d.stop)
        r = random.Random(7)
        pool = test_lmcache.keys_of(3000)  # more than the namespace holds
        a, hits, loads, cut = d.adapter, 0, 0, 0
        content = test_lmcache.content
        for i in range(60):
            keys, want = r.sample(pool, 40), r.sample(pool, 16)
            objects = [standins.MemoryObject(b"\xee" * self.SIZE) for _ in want]
            values = [standins.MemoryObject(content(key, self.SIZE)) for key in keys]
            storing, loading = a.submit_store_task(keys, values), a.submit_load_task(want, objects)
            if i % 4 == 3:
                d.kill()
                d.start()
                cut += 1
            bits = d.until(a.get_load_event_fd(), lambda: a.query_load_result(loading)).bits
            stored = d.until(a.get_store_event_fd(), lambda: a.pop_completed_store_tasks() or None)
            self.assertEqual(list(stored), [storing])
            for good, obj, key in zip(bits, objects, want):
                self.assertTrue(not good or bytes(obj.byte_array) == content(key, self.SIZE))
            more = r.sample(keys, 16)
            support.until(lambda: a.report_status()["is_healthy"], "there is a broker")
            found, wrong = d.load(more, size=self.SIZE)
            self.assertEqual(wrong, 0)
            hits, loads = hits + sum(bits) + sum(found), loads + 32
        counts = a.counters.snapshot()
        self.assertEqual((counts["load.ok"], failed(a.counters, "load")), (hits, loads - hits))
        self.assertGreater(hits, loads // 4)
        self.assertGreater(counts["load.not_found"], 0)


if __name__ == "__main__":
    unittest.main()
