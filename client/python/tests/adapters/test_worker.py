"""What the adapters share: the thread, and the rules of blocks."""

import threading
import unittest

import standins  # noqa: F401, so that kvd is found without its library

from fake import FakeStore, Gone
from kvd.adapters._blocks import Blocks
from kvd.adapters._counters import Counters
from kvd.adapters._store import Opener, code_name
from kvd.adapters._worker import Worker


class Threads(unittest.TestCase):
    def test_each_job_is_run_or_abandoned(self):
        began, go = threading.Event(), threading.Event()
        ran, abandoned = [], []

        def run(job):
            began.set()
            go.wait()
            ran.append(job)
        worker = Worker("test", run, abandoned.append)
        for job in range(3):
            worker.submit(job)
        began.wait()
        closing = threading.Thread(target=worker.close)
        closing.start()
        with worker._changed:
            worker._changed.wait_for(lambda: worker._closed)
        worker.submit(3)
        go.set()
        closing.join(30)
        self.assertFalse(closing.is_alive())
        self.assertEqual((ran, sorted(abandoned)), ([0], [1, 2, 3]))
        worker.close()
        worker.wait_idle()


class Rules(unittest.TestCase):
    def test_an_answer_that_cannot_be(self):
        store, counters = FakeStore(), Counters()
        blocks = Blocks(Opener(lambda: store), counters)
        for n in (-1, 3, 100):
            store.exists_prefix = lambda keys: n
            self.assertEqual(blocks.leading([b"a", b"b"]), 0)
        self.assertEqual(counters.snapshot(), {"exists.protocol": 3})

    def test_a_prefix_of_several_batches(self):
        store, counters = FakeStore(), Counters()
        blocks = Blocks(Opener(lambda: store), counters)
        keys = [b"%d" % i for i in range(3000)]
        store.values.update((key, b"") for key in keys[:2500])
        self.assertEqual(blocks.leading(keys), 2500)
        self.assertEqual(sum(map(bool, blocks.exists(keys))), 2500)
        self.assertEqual(store.calls["exists"], 6)

    def test_the_store_is_not_asked_for_a_connection_all_the_time(self):
        now, tried = [0.0], []

        def connect():
            tried.append(now[0])
            raise Gone("no broker")
        counters = Counters()
        opener = Opener(connect, retry_seconds=1, clock=lambda: now[0])
        blocks = Blocks(opener, counters)
        for now[0] in (0.0, 0.5, 0.9, 1.0, 1.5, 2.5):
            self.assertEqual(blocks.load([b"k"], [memoryview(bytearray(1))]), [False])
        self.assertEqual(tried, [0.0, 1.0, 2.5])
        self.assertEqual(counters.snapshot(), {"load.unavailable": 6})
        opener.close()
        now[0] = 10
        self.assertEqual(blocks.exists([b"k"]), [None])
        self.assertEqual(len(tried), 3)

    def test_names_of_codes(self):
        self.assertEqual([code_name(code) for code in (0, 6, 21, 22, -1, None, "x")],
                         ["ok", "timeout", "system", "code_22", "code_-1", "exception", "exception"])


if __name__ == "__main__":
    unittest.main()
