"""Verdicts, the broker's death, forks, interrupts, and memory in flight: against a broker that does as it is told."""

import _thread
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
import unittest
import warnings
import weakref

import support
from support import Case, Fake, until

import kvd
from kvd import Code, Outcome, _errors


class Memory(bytearray):
    """A bytearray whose end can be noticed."""


class Base(Case):
    broker_kind = Fake

    def setUp(self):
        super().setUp()
        self.other = self.open()

    def held(self, n=1):
        """Waits until the broker holds n entries."""
        until(lambda: int(self.other.get("held")) >= n, f"the broker holds {n}")

    def release(self):
        self.other.put("release", b"")
        until(lambda: self.other.get("held") == b"0", "the broker holds none")


class Verdicts(Base):
    def test_each_code(self):
        codes = [c for c in Code if c not in (Code.OK, Code.NOT_FOUND, Code.SHORT_BUFFER)]
        for code in codes:
            key = f"{int(code)}/x"
            e = self.raises(_errors.BY_CODE[code], Outcome.NO, self.client.get, key)
            self.assertEqual(e.text, "as the test wants it")
            r = self.client.get_many([key])[0]
            self.assertEqual((r.code, r.outcome, r.text, bool(r)), (code, Outcome.NO, e.text, False))
            self.assertIs(type(r.error()), type(e))
            copy = pickle.loads(pickle.dumps(e))
            self.assertEqual((type(copy), copy.code, copy.outcome, str(copy)), (type(e), code, e.outcome, str(e)))
        self.assertEqual(len({type(_errors.make(c, 1, "")) for c in Code if c}), len(Code) - 1)
        self.assertEqual([kvd._lib.quick.kvd_abi()], [kvd._lib.ABI])

    def test_names_of_codes(self):
        name = kvd._lib.quick.kvd_code_name
        name.restype = kvd._lib.c_char_p
        self.assertEqual([name(int(c)).decode() for c in Code], [c.name for c in Code])
        self.assertEqual(name(len(Code)), b"?")

    def test_unknown(self):
        e = self.raises(kvd.Timeout, Outcome.UNKNOWN, self.client.put, "lost:1", b"1")
        self.assertIsInstance(e, TimeoutError)
        self.assertEqual(self.client.get("lost:1"), b"1")
        results = self.client.put_many({"a": b"1", "lost:2": b"2", "13/": b"3"})
        self.assertEqual([r.outcome for r in results], [Outcome.YES, Outcome.UNKNOWN, Outcome.NO])
        self.assertEqual([r.code for r in results], [Code.OK, Code.TIMEOUT, Code.STALE])
        self.raises(kvd.Timeout, Outcome.UNKNOWN, self.client.delete, "lost:1")
        self.raises(kvd.Timeout, Outcome.UNKNOWN, results[1].check)

    def test_pins(self):
        self.client.put_many({"pin:1": b"", "pin:2": b"", "lost:pin": b""})
        self.assertTrue(self.client.pin("pin:1", 1.5))
        self.assertTrue(all(self.client.pin_many(["pin:1", "pin:2"], 70 * 60)))
        self.assertEqual(self.client.get("pins"), b"pin:1 4200000\npin:2 4200000")
        self.assertTrue(self.client.unpin("pin:1"))
        self.assertEqual(self.client.get("pins"), b"pin:2 4200000")
        self.assertTrue(self.client.unpin_many(["pin:2"])[0])
        self.raises(kvd.Unsupported, Outcome.NO, self.client.pin, "19/", 1)
        self.raises(kvd.Timeout, Outcome.UNKNOWN, self.client.pin, "lost:pin", 1)
        self.assertIs(self.client.pin_many(["19/"], 1)[0].code, Code.UNSUPPORTED)

    def test_unsupported(self):
        self.raises(kvd.Unsupported, Outcome.NO, self.client.delete_prefix, "x")


class Death(Base):
    def test_of_the_broker(self):
        arena = self.client.alloc(8)
        self.client.put("kept", b"12345678")
        self.client.get_into("kept", arena)
        self.assertEqual(self.client.generation, 1)
        for kill, outcome in (("get", Outcome.NO), ("put", Outcome.UNKNOWN), ("batch", Outcome.UNKNOWN)):
            with self.subTest(kill):
                if kill == "get":
                    self.raises(kvd.Unavailable, outcome, self.client.get, "die:")
                elif kill == "put":
                    self.raises(kvd.Unavailable, outcome, self.client.put, "die:", b"1")
                else:
                    results = self.client.put_many({"die:": b"", "die:2": b""})
                    self.assertEqual([r.code for r in results], [Code.UNAVAILABLE] * 2)
                    self.assertIs(results[0].outcome, outcome)
                self.assertEqual(bytes(arena), b"12345678")
                self.broker.process.wait()
                self.broker.start()
                self.assertIsNone(self.client.get("kept"))
                self.client.put("kept", arena)
                self.assertEqual(self.client.get("kept"), b"12345678")
        self.assertEqual(self.client.generation, 4)

    def test_batches_dial(self):
        self.raises(kvd.Unavailable, Outcome.NO, self.client.get, "die:")
        self.broker.process.wait()
        failed = self.start_late()
        self.assertIs(self.client.get_many(["x"])[0].code, Code.NOT_FOUND)
        failed.join()

    def start_late(self):
        t = threading.Thread(target=self.broker.start)
        t.start()
        return t

    def test_nobody_there(self):
        with self.assertRaises(ConnectionError):
            kvd.Client("/nonexistent/broker.sock", dial_timeout=0.01)
        for wrong in (
            {"path": "x" * 200},
            {"path": self.broker.path + "\0y"},
            {"path": self.broker.path, "namespace": "a\0b"},
            {"path": self.broker.path, "arena": -1},
            {"path": self.broker.path, "depth": 17},
            {"path": self.broker.path, "queues": 9},
            {"path": self.broker.path, "timeout": 0},
        ):
            with self.assertRaises(ValueError):
                kvd.Client(**wrong)

    def test_no_arena(self):
        client = self.open(arena=0)
        self.assertEqual(client.arena()[1], 0)
        client.put("x", b"small")
        self.assertEqual(client.get("x"), b"small")
        with self.assertRaises(kvd.Error):
            client.alloc(5)


class Forks(Base):
    def in_child(self, check):
        """Runs a check in a forked child, and holds that it passes."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are other threads, which is the point
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                check()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        self.assertEqual(os.waitpid(pid, 0)[1], 0)

    def test_child(self):
        arena = self.client.alloc(8)
        memoryview(arena).cast("B")[:] = b"12345678"
        self.client.put("f", arena)

        def check():
            assert bytes(arena) == b"12345678"
            for call in (
                lambda: self.client.get("f"),
                lambda: self.client.put("f", b""),
                lambda: self.client.get_many(["f"]),
                lambda: self.client.alloc(5),
                lambda: self.client.arena(),
                lambda: list(self.client.scan()),
            ):
                try:
                    call()
                except kvd.Forked as e:
                    assert (e.code, e.outcome) == (Code.FORKED, Outcome.NO)
                else:
                    raise AssertionError("the child could call")
            with kvd.Client(self.broker.path) as mine:
                assert mine.get("f") == b"12345678"
            self.client.close()
            assert bytes(arena) == b"12345678"
            self.other.close()

        self.in_child(check)
        self.assertEqual(self.client.get("f"), b"12345678")
        self.assertEqual(bytes(arena), b"12345678")

    def test_child_with_a_batch_under_way(self):
        thread = threading.Thread(target=self.client.get_many, args=(["hold:f"],))
        thread.start()
        self.held()

        def check():
            gc.collect()
            self.client.close()
            try:
                self.client.get("f")
            except kvd.Error as e:
                assert e.code in (Code.CLOSED, Code.FORKED)

        self.in_child(check)
        self.release()
        thread.join()


class InFlight(Base):
    def setUp(self):
        super().setUp()
        threads = [threading.Thread(target=self.other.put, args=(k, b"arrived")) for k in ("hold:i", "stuck:i")]
        for t in threads:
            t.start()
        helper = self.open()
        until(lambda: int(helper.get("held")) >= 2, "the puts are held")
        helper.put("release", b"")
        for t in threads:
            t.join()

    def interrupted(self, function):
        """Interrupts a call once the broker holds its entry."""

        def interrupt():
            self.held()
            _thread.interrupt_main()

        # A shell has what it starts in the background ignore the signal.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            with self.assertRaises(KeyboardInterrupt):
                function()
        finally:
            thread.join()
            signal.signal(signal.SIGINT, before)

    def test_interrupt(self):
        memory = Memory(100)
        self.interrupted(lambda: self.client.get_many(["stuck:i"], [memory]))
        self.assertFalse(self.swept())
        with self.assertRaises(BufferError):
            memory.append(1)
        self.release()
        until(lambda: self.swept(), "the batch is over")
        memory.append(1)
        self.assertEqual(memory[:7], b"arrived")

    def test_interrupted_and_cancelled(self):
        memory = Memory(100)
        self.interrupted(lambda: self.client.get_many(["hold:i"], [memory]))
        until(lambda: self.swept(), "the batch is over")
        memory.append(1)
        self.assertEqual(memory, bytes(100) + b"\x01")

    def swept(self):
        self.client.exists_many(["x"])
        return not self.client._core.orphans

    def test_memory_outlives_its_names(self):
        memory = Memory(100)
        gone = []
        weakref.finalize(memory, gone.append, True)
        self.interrupted(lambda: self.client.get_many(["stuck:i"], [memory]))
        del memory
        self.client.exists("x")
        gc.collect()
        self.assertEqual(gone, [])
        self.release()
        until(lambda: self.swept(), "the batch is over")
        gc.collect()
        self.assertEqual(gone, [True])

    def test_sources_outlive_their_names(self):
        gone, results = [], []
        memory = Memory(b"v" * 5000)
        weakref.finalize(memory, gone.append, True)
        items = [("hold:source", memory)]
        thread = threading.Thread(target=lambda i: results.extend(self.client.put_many(i)), args=(items,))
        thread.start()
        self.held()
        del memory
        items.clear()
        gc.collect()
        self.assertEqual(gone, [])
        self.release()
        thread.join()
        self.assertTrue(results[0])
        self.assertEqual(results[0].length, 5000)

    def test_close_waits_for_memory(self):
        memory = Memory(100)
        self.interrupted(lambda: self.client.get_many(["hold:i"], [memory]))
        self.client.close()
        memory.append(1)
        self.assertIsNone(self.client._core.handle)

    def test_close_during_a_call(self):
        got = []
        thread = threading.Thread(target=lambda: got.append(self.client.get("hold:i")))
        thread.start()
        self.held()
        self.client.close()
        self.raises(kvd.Closed, Outcome.NO, self.client.get, "x")
        self.assertIsNotNone(self.client._core.handle)
        self.release()
        thread.join()
        self.assertEqual(got, [b"arrived"])
        self.assertIsNone(self.client._core.handle)

    def test_close_among_calls(self):
        """Whoever comes last closes the connection: a call, a batch, or the end of memory in the arena."""
        for _ in range(10):
            client, ends = kvd.Client(self.broker.path, arena=8 << 20), []

            def work(client=client, ends=ends):
                try:
                    while True:
                        memory = client.alloc(10_000)
                        client.put("among", memory)
                        client.get_many(["among", "x"], [memory, bytearray(5)])
                        client.get("among")
                except BaseException as e:
                    ends.append(type(e))

            threads = [threading.Thread(target=work) for _ in range(4)]
            for t in threads:
                t.start()
            until(lambda: self.other.exists("among"), "somebody has put")
            client.close()
            for t in threads:
                t.join()
            self.assertEqual(ends, [kvd.Closed] * 4)
            gc.collect()
            self.assertIsNone(client._core.handle)
            self.other.delete("among")

    def test_arena_outlives_its_client(self):
        arena = self.client.alloc(100)
        memoryview(arena).cast("B")[:5] = b"still"
        self.client.close()
        self.client.close()
        self.assertEqual(bytes(arena[:5]), b"still")
        self.assertIsNotNone(self.client._core.handle)
        core = self.client._core
        del arena
        self.assertIsNone(core.handle)

    def test_forgotten_client(self):
        client = kvd.Client(self.broker.path)
        core = client._core
        client.get("x")
        del client
        gc.collect()
        self.assertIsNone(core.handle)


class Copies(Base):
    """Values in the arena and in registered memory move without a copy: the broker is told where they are."""

    def moves(self):
        return [tuple(map(int, m.split())) for m in self.client.get("moves").decode().splitlines()]

    def test_places(self):
        arena = self.client.alloc(100_000)
        address = kvd._buffers.Pinned(arena, True).address
        offset = address - self.client.arena()[0]
        self.client.put("c", arena)
        self.client.get_into("c", arena)
        self.client.put_many([("c", arena)])
        self.client.get_many(["c"], [arena])
        self.client.get_into("c", memoryview(arena)[:])
        put, get = (2, 1, offset), (1, 1, offset)
        self.assertEqual(self.moves()[-5:], [put, get, put, get, get])

    def test_bounces(self):
        memory = bytearray(100_000)
        self.client.put("c", memory)
        self.client.get_into("c", memory)
        self.assertEqual([m[:2] for m in self.moves()[-2:]], [(2, 1), (1, 1)])  # by bytes of the arena
        self.client.put("c", b"small")
        self.client.get("c")
        self.assertEqual(self.moves()[-2:], [(2, 0, 0), (1, 0, 0)])  # by the ring


class Processes(unittest.TestCase):
    """What needs a process of its own."""

    def run_python(self, program, *arguments, **environment):
        env = dict(os.environ, PYTHONPATH=str(support.HERE.parent), **environment)
        return subprocess.run(
            [sys.executable, "-X", "dev", "-W", "error", "-c", program, *arguments],
            env=env, capture_output=True, text=True, timeout=support.PATIENCE,
        )  # fmt: skip

    def test_without_numpy(self):
        broker = Fake()
        self.addCleanup(broker.stop)
        done = self.run_python(
            """
import sys
sys.modules["numpy"] = None
import kvd
with kvd.Client(sys.argv[1]) as c:
    a = c.alloc((2, 3), "float32")
    assert isinstance(a, memoryview) and a.shape == (2, 3) and a.format == "f"
    a[1, 2] = 1.5
    c.put("a", a)
    b = c.alloc(6, "f")
    assert c.get_into("a", b) == 24 and b[5] == 1.5
    assert c.alloc((0, 5)).nbytes == 0
    try:
        c.alloc(5, "complex64")
    except TypeError:
        print("done")
""",
            broker.path,
        )
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "done\n", ""))

    def test_no_library(self):
        done = self.run_python("import kvd", KVD_LIBRARY="/nonexistent/libkvd.so")
        self.assertIn("ImportError: kvd needs the library libkvd", done.stderr)

    def test_end_of_the_process(self):
        broker = Fake()
        self.addCleanup(broker.stop)
        done = self.run_python(
            """
import sys, threading, kvd
c = kvd.Client(sys.argv[1])
a = c.alloc(500)
c.put("a", a)
threading.Thread(target=c.get_many, args=(["hold:a"],), daemon=True).start()
while c.get("held") != b"1":
    pass
print("done")
""",
            broker.path,
        )
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "done\n", ""))


if __name__ == "__main__":
    unittest.main()
