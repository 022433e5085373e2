"""The adapters with the real client. KVD_LIBRARY names libkvd, and KVD, if it is set, the program kvd with a broker.

Without KVD the broker is the client tests' own, which keeps values in a map.
"""

import os
import random
import sys
import unittest

import standins  # noqa: F401, before the adapters

if os.environ.get("KVD_LIBRARY"):
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    import support

import test_lmcache
import test_sglang
import test_vllm
from fake import LOADS
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


if __name__ == "__main__":
    unittest.main()
