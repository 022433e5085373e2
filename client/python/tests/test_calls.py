"""Every call, against a real broker and against one that a test directs."""

import array
import datetime
import fcntl
import mmap
import os
import tempfile
import threading
import time
import unittest

from support import PATIENCE, Case, Dev, Fake, until

import kvd
from kvd import Code, Outcome

try:
    import numpy
except ImportError:
    numpy = None

SIZES = [0, 1, 2, 100, 1000, 1024, 1025, 4096, 70_000, 5 << 20]


def value(n, seed=1):
    """Gives n bytes that are not those of another seed."""
    return (bytes((i * seed) % 251 for i in range(251)) * (n // 251 + 1))[:n]


class Calls:
    """The tests, for each kind of broker."""

    def test_get_of_put(self):
        for n in SIZES:
            with self.subTest(bytes=n):
                self.assertGreater(self.client.put(f"size:{n}", value(n)), 0)
                got = self.client.get(f"size:{n}")
                self.assertIs(type(got), bytes)
                self.assertEqual(got, value(n))

    def test_missing(self):
        self.assertIsNone(self.client.get("missing"))
        self.assertEqual(self.client.get("missing", b"else"), b"else")
        self.assertIsNone(self.client.get_record("missing"))
        self.assertIsNone(self.client.get_range("missing", 0, 5))
        buffer = bytearray(b"before")
        e = self.raises(kvd.NotFound, Outcome.NO, self.client.get_into, "missing", buffer)
        self.assertIsInstance(e, KeyError)
        self.assertEqual(buffer, b"before")

    def test_keys(self):
        self.client.put("clé", b"1")
        for key in ("clé".encode(), bytearray("clé".encode()), memoryview("clé".encode())):
            self.assertEqual(self.client.get(key), b"1")
        self.client.put(b"\x00" * 1024, b"2")
        self.assertEqual(self.client.get(b"\x00" * 1024), b"2")
        self.assertIsNone(self.client.get(b"\x00" * 1023))
        for key in ("", b"x" * 1025):
            self.assertIsInstance(self.raises(kvd.BadArgument, Outcome.NO, self.client.get, key), ValueError)
            self.raises(kvd.BadArgument, Outcome.NO, self.client.get_many, [key])
        with self.assertRaises(TypeError):
            self.client.get(5)

    def test_get_into(self):
        for n in SIZES:
            with self.subTest(bytes=n):
                self.client.put("into", value(n))
                buffer = bytearray(b"\xff" * (n + 3))
                self.assertEqual(self.client.get_into("into", buffer), n)
                self.assertEqual(buffer[:n], value(n))
                self.assertEqual(self.client.get_into("into", memoryview(buffer)[:n]), n)
                if n:
                    e = self.raises(
                        kvd.ShortBuffer, Outcome.NO, self.client.get_into, "into", memoryview(buffer)[: n - 1]
                    )
                    self.assertEqual(e.length, n)

    def test_destinations(self):
        self.client.put("d", b"12345678")
        for wrong in (b"12345678", memoryview(b"12345678"), memoryview(bytearray(16))[::2]):
            with self.assertRaises(BufferError):
                self.client.get_into("d", wrong)
            with self.assertRaises(BufferError):
                self.client.get_many(["d"], [wrong])
        with self.assertRaises(TypeError):
            self.client.get_into("d", "12345678")
        a = array.array("d", [0.0])
        self.assertEqual(self.client.get_into("d", a), 8)
        self.assertEqual(a.tobytes(), b"12345678")

    def test_sources(self):
        for source in (b"abcdefgh", bytearray(b"abcdefgh"), memoryview(b"abcdefgh"), array.array("B", b"abcdefgh")):
            self.client.put("s", source)
            self.assertEqual(self.client.get("s"), b"abcdefgh")
            self.client.put_many([("t", source)])[0].check()
            self.assertEqual(self.client.get("t"), b"abcdefgh")
        with self.assertRaises(BufferError):
            self.client.put("s", memoryview(b"abcdefgh")[::2])
        with self.assertRaises(TypeError):
            self.client.put("s", "abcdefgh")
        grown = bytearray(b"abc")
        self.client.put("s", grown)
        grown.append(1)  # which a buffer that is held refuses

    @unittest.skipIf(numpy is None, "numpy is not installed")
    def test_numpy(self):
        a = numpy.arange(3000, dtype="float32").reshape(30, 100)
        self.client.put("a", a)
        b = numpy.zeros_like(a)
        self.assertEqual(self.client.get_into("a", b), a.nbytes)
        self.assertTrue((a == b).all())
        for wrong in (b[:, ::2], b.T):
            with self.assertRaises(BufferError):
                self.client.get_into("a", wrong)
            with self.assertRaises(BufferError):
                self.client.put("a", wrong)
        b.flags.writeable = False
        self.client.put("b", b)
        with self.assertRaises(BufferError):
            self.client.get_into("a", b)

    def test_conditions(self):
        put, missing = self.client.put, "cond"
        self.client.delete(missing)
        self.assertIsNone(put(missing, b"1", if_present=True))
        self.assertIsNone(put(missing, b"1", if_version=5))
        first = put(missing, b"1", if_absent=True)
        self.assertTrue(first)
        self.assertIsNone(put(missing, b"2", if_absent=True))
        second = put(missing, b"3", if_version=first)
        self.assertGreater(second, 0)
        self.assertIsNone(put(missing, b"4", if_version=first))
        self.assertTrue(put(missing, b"5", if_present=True))
        self.assertEqual(self.client.get(missing), b"5")
        self.assertFalse(self.client.delete(missing, if_version=first))
        self.assertTrue(self.client.delete(missing, if_version=self.client.get_record(missing).version))
        with self.assertRaises(ValueError):
            put(missing, b"", if_absent=True, if_present=True)
        results = self.client.put_many({"cond": b"1", "cond2": b"2"}, if_present=True)
        self.assertEqual([bool(r) for r in results], [False, False])
        self.assertTrue(all(r.outcome is Outcome.NO for r in results))

    def test_record(self):
        for n in (3, 5000):
            version = self.client.put("rec", value(n), flags=0xFFFFFFFE, ttl=datetime.timedelta(hours=1))
            r = self.client.get_record("rec")
            self.assertEqual((r.value, r.version, r.flags), (value(n), version, 0xFFFFFFFE))
            self.assertGreater(r.expires, datetime.datetime.now().timestamp() + 3500)
            self.assertTrue(self.client.touch("rec"))
            self.assertIsNone(self.client.get_record("rec").expires)

    def test_expiry(self):
        self.client.put("ttl", b"1", ttl=0.001)
        until(lambda: self.client.get("ttl") is None, "the record has expired")
        self.client.put("ttl", b"1", ttl=1000)
        self.assertTrue(self.client.touch("ttl", 0.001))
        until(lambda: not self.client.exists("ttl"), "the record has expired")
        self.assertFalse(self.client.touch("ttl", 5))
        for wrong in (0, -1, float("nan")):
            with self.assertRaises(ValueError):
                self.client.put("ttl", b"1", ttl=wrong)

    def test_delete_exists(self):
        self.client.put("x", b"1")
        self.assertTrue(self.client.exists("x"))
        self.assertTrue(self.client.delete("x"))
        self.assertFalse(self.client.exists("x"))
        self.assertFalse(self.client.delete("x"))

    def test_pins(self):
        self.client.put("pinned", b"12345")
        self.client.delete("no")
        self.assertTrue(self.client.pin("pinned", 60))
        self.assertTrue(self.client.pin("pinned", datetime.timedelta(minutes=70)))
        self.assertFalse(self.client.pin("no", 60))
        self.assertTrue(self.client.unpin("pinned"))
        self.assertFalse(self.client.unpin("no"))
        for results in (self.client.pin_many(["pinned", "no"], 0.5), self.client.unpin_many(["pinned", "no"])):
            self.assertEqual([(r.code, r.outcome) for r in results],
                             [(Code.OK, Outcome.YES), (Code.NOT_FOUND, Outcome.NO)])  # fmt: skip
        self.assertEqual((self.client.pin_many([], 1), self.client.unpin_many([])), ([], []))
        for wrong in (0, -1, None):
            with self.assertRaises((ValueError, TypeError)):
                self.client.pin("pinned", wrong)
        self.raises(kvd.BadArgument, Outcome.NO, self.client.pin, "pinned", 4200.001)
        self.raises(kvd.BadArgument, Outcome.NO, self.client.pin_many, ["pinned"], 1e9)

    def test_lengths(self):
        self.client.put("len", b"12345")
        self.client.delete("no")
        for lengths, want in ((False, 0), (True, 5)):
            got = self.client.exists_many(["len", "no"], lengths=lengths)
            self.assertEqual([(r.code, r.length) for r in got][0], (Code.OK, want))
            self.assertIs(got[1].code, Code.NOT_FOUND)
            self.assertGreater(got[0].version, 0)

    def test_incr(self):
        self.client.delete("n")
        self.assertEqual(self.client.incr("n"), 1)
        self.assertEqual(self.client.incr("n", -(1 << 40)), 1 - (1 << 40))
        self.assertEqual(self.client.get("n"), b"%d" % (1 - (1 << 40)))
        self.client.put("n", b"no number")
        self.raises(kvd.WrongType, Outcome.NO, self.client.incr, "n")
        with self.assertRaises(ValueError):
            self.client.incr("n", 1 << 63)

    def test_range(self):
        for n in (1000, 100_000):
            self.client.put("r", value(n))
            for at, length in ((0, 10), (n - 5, 100), (n, 10), (n + 9, 10), (3, 0), (0, n), (17, n // 2), (2, 5000)):
                with self.subTest(n=n, at=at, length=length):
                    self.assertEqual(self.client.get_range("r", at, length), value(n)[at : at + length])
        with self.assertRaises(ValueError):
            self.client.get_range("r", -1, 5)

    def test_scan(self):
        keys = {b"scan:%04d:" % i + b"k" * 40 for i in range(1500)}
        for r in self.client.put_many((k, b"v") for k in keys):
            r.check()
        self.client.put("other", b"")
        self.assertEqual(sorted(self.client.scan("scan:")), sorted(keys))
        self.assertEqual(list(self.client.scan("scan-not")), [])
        self.assertIn(b"other", set(self.client.scan()))

    def test_batches(self):
        items = {f"b:{n}": value(n, 3) for n in SIZES}
        for r in self.client.put_many(items):
            self.assertIs(r.outcome, Outcome.YES)
            self.assertGreater(r.check().version, 0)
        keys = [k for pair in zip(items, (f"no:{n}" for n in SIZES)) for k in pair]
        got = self.client.get_many(keys)
        for k, r in zip(keys, got):
            if k in items:
                self.assertTrue(r)
                self.assertEqual(r.value, items[k])
                self.assertEqual(r.length, len(items[k]))
            else:
                self.assertFalse(r)
                self.assertEqual((r.code, r.outcome, r.value), (Code.NOT_FOUND, Outcome.NO, None))
                with self.assertRaises(kvd.NotFound):
                    r.check()
        buffers = [bytearray(100) for _ in keys]
        for k, r, b in zip(keys, self.client.get_many(keys, buffers), buffers):
            if k not in items:
                self.assertIs(r.code, Code.NOT_FOUND)
            elif len(items[k]) > 100:
                self.assertEqual((r.code, r.length), (Code.SHORT_BUFFER, len(items[k])))
                self.assertEqual(b, bytes(100))
            else:
                self.assertEqual(b[: r.length], items[k])
        self.assertEqual([bool(r) for r in self.client.exists_many(keys)], [k in items for k in keys])
        self.assertEqual([bool(r) for r in self.client.delete_many(keys)], [k in items for k in keys])
        self.assertFalse(any(self.client.exists_many(keys)))
        for empty in (self.client.get_many, self.client.put_many, self.client.delete_many, self.client.exists_many):
            self.assertEqual(empty([]), [])
        with self.assertRaises(ValueError):
            self.client.get_many(["a", "b"], [bytearray(1)])

    def test_large_batch(self):
        keys = [f"many:{i}" for i in range(3000)]
        self.assertTrue(all(self.client.put_many((k, k.encode()) for k in keys)))
        self.assertEqual([r.value for r in self.client.get_many(keys)], [k.encode() for k in keys])

    def test_exists_prefix(self):
        self.client.put_many({f"p:{i}": b"" for i in range(40) if i != 30})
        keys = [f"p:{i}" for i in range(40)]
        self.assertEqual(self.client.exists_prefix(keys), 30)
        self.assertEqual(self.client.exists_prefix(keys[:20]), 20)
        self.assertEqual(self.client.exists_prefix(keys[30:]), 0)

    def test_alloc(self):
        a = self.client.alloc(100_000)
        memoryview(a).cast("B")[:] = value(100_000, 7)
        self.client.put("arena", a)
        b = self.client.alloc(100_000)
        self.assertEqual(self.client.get_into("arena", b), 100_000)
        self.assertEqual(bytes(b), value(100_000, 7))
        base, length = self.client.arena()
        self.assertGreaterEqual(length, 200_000)
        self.assertNotEqual(base, 0)
        c = self.client.alloc(1 << 20)
        self.assertTrue(self.client.get_many(["arena"], [c])[0])
        self.assertEqual(bytes(c[:100_000]), value(100_000, 7))

    def test_alloc_is_freed_with_its_last_view(self):
        client = self.open(arena=1 << 20)
        a = client.alloc(700_000)
        view = memoryview(a)[5:]
        del a
        self.raises(kvd.Full, Outcome.NO, client.alloc, 700_000)
        view.release()
        del view
        client.alloc(700_000)

    def test_register(self):
        fd = os.memfd_create("mine", os.MFD_ALLOW_SEALING)
        self.addCleanup(os.close, fd)
        os.ftruncate(fd, 1 << 20)
        fcntl.fcntl(fd, 1033, 2)  # F_ADD_SEALS, F_SEAL_SHRINK
        self.client.put("reg", value(500_000))
        with self.client.register(fd) as registered:
            self.assertEqual(self.client.get_into("reg", registered.buffer[4096:]), 500_000)
            self.assertEqual(bytes(registered.buffer[4096:504_096]), value(500_000))
            self.client.put("reg2", registered.buffer[4096:504_096])
            self.raises(kvd.Busy, Outcome.NO, self.client.register, fd, registered.buffer)
        self.assertEqual(self.client.get("reg2"), value(500_000))
        registered.close()
        self.assertEqual(self.client.get_into("reg", registered.buffer[8192:]), 500_000)  # by way of the arena

    def test_register_of_a_mapping(self):
        with tempfile.TemporaryFile(dir="/dev/shm") as file, self.open() as client:
            file.truncate(1 << 20)
            mapping = mmap.mmap(file.fileno(), 1 << 20)
            client.put("reg3", value(50_000))
            try:
                registered = client.register(file.fileno(), memoryview(mapping)[4096:], offset=4096)
            except kvd.Error as e:  # a broker may want memory that is sealed
                self.assertIs(e.outcome, Outcome.NO)
                return
            self.assertEqual(client.get_into("reg3", registered.buffer), 50_000)
            self.assertEqual(mapping[4096:54_096], value(50_000))
            with self.assertRaises(BufferError):
                mapping.close()
            for wrong in ({"offset": -1}, {"length": 1 << 21}):
                with self.assertRaises(ValueError):
                    client.register(file.fileno(), mapping, **wrong)

    def test_threads(self):
        failed = []

        def work(i):
            try:
                for j in range(100):
                    key, v = f"thread:{i}:{j % 5}", value(j * 37, i + 2)
                    self.client.put(key, v)
                    if self.client.get(key) != v:
                        raise AssertionError(f"{key} has another value")
                    if [r.value for r in self.client.get_many([key, key])] != [v, v]:
                        raise AssertionError(f"{key} has another value in a batch")
            except BaseException as e:
                failed.append(e)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(failed, [])


    def test_counting_goes_on(self):
        """Another thread runs during calls. How fast is printed and not held: the machine does other things, too."""
        stop, counts = threading.Event(), [0]

        def count():
            while not stop.is_set():
                counts[0] += 1

        def rate(work):
            """Works until both have got somewhere, and gives the counts of a second."""
            before, began, done = counts[0], time.perf_counter(), 0
            while done < 100 or counts[0] < before + 1000:
                self.assertLess(time.perf_counter() - began, PATIENCE, "a thread does not run during calls")
                work()
                done += 1
            return (counts[0] - before) / (time.perf_counter() - began)

        self.client.put("count", value(4 << 20))
        buffer = self.client.alloc(4 << 20)
        thread = threading.Thread(target=count)
        thread.start()
        try:
            alone = rate(lambda: time.sleep(0.003))
            small = rate(lambda: self.client.get_range("count", 0, 100))
            large = rate(lambda: self.client.get_into("count", buffer))
        finally:
            stop.set()
            thread.join()
        print(f"\na counting thread, against alone: {small / alone:.2f} during gets of 100 bytes, {large / alone:.2f} of 4 MiB")


class FakeCalls(Calls, Case):
    broker_kind = Fake


class DevCalls(Calls, Case):
    broker_kind = Dev

    def test_delete_prefix(self):
        self.client.put_many({f"gone:{i}": b"" for i in range(50)})
        self.client.put("goner", b"")
        self.assertEqual(self.client.delete_prefix("gone:"), 50)
        self.assertEqual(list(self.client.scan("gone")), [b"goner"])

    def test_namespaces(self):
        try:
            other = self.open(namespace="no-such-namespace")
        except kvd.Error as e:
            self.assertIs(e.outcome, Outcome.NO)
        else:
            self.raises(kvd.Error, Outcome.NO, other.get, "x")


if __name__ == "__main__":
    unittest.main()
