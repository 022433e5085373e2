"""Values that are looked at where they are, against a real broker and against one that a test directs."""

import asyncio
import gc
import os
import time
import unittest

from support import Case, Dev, Fake, until
from test_calls import value

import kvd
import kvd.aio
from kvd import Outcome

try:
    import numpy
except ImportError:
    numpy = None


class Views:
    """The tests, for each kind of broker."""

    def test_parts(self):
        for n in (10_000, 1 << 20, 5 << 20):
            with self.subTest(bytes=n):
                version = self.client.put("v", value(n), flags=7)
                with self.client.get_view("v", hold=5) as view:
                    parts = view.parts
                    self.assertEqual(b"".join(parts), value(n))
                    self.assertEqual((view.length, view.version, view.flags, view.expires), (n, version, 7, None))
                    self.assertTrue(all(p.readonly for p in parts))
                    self.assertEqual(len(parts) > 1, n > 4 << 20)
                with self.assertRaises(kvd.Closed):
                    view.parts
                view.release()
                self.assertEqual(len(parts[0]), min(n, len(parts[0])))
                parts[0][:100].tobytes()  # it may be anything, and is there

    @unittest.skipIf(numpy is None, "numpy is not installed")
    def test_numpy(self):
        a = numpy.arange(5000, dtype="float32")
        self.client.put("a", a)
        with self.client.get_view("a") as view:
            got = view.numpy("float32")
            self.assertTrue((got == a).all())
            with self.assertRaises(ValueError):
                got[0] = 1
        self.client.put("a", value(5 << 20))
        with self.client.get_view("a") as view, self.assertRaises(ValueError):
            view.numpy()

    def test_none(self):
        self.assertIsInstance(self.raises(kvd.NotFound, Outcome.NO, self.client.get_view, "missing"), KeyError)
        self.client.put("short", b"1")
        self.raises(kvd.Unsupported, Outcome.NO, self.client.get_view, "short")
        self.raises(kvd.BadArgument, Outcome.NO, self.client.get_view, "")
        with self.assertRaises(ValueError):
            self.client.get_view("short", hold=0)

    def test_exception_inside(self):
        self.client.put("v", value(10_000))
        with self.assertRaises(ZeroDivisionError):
            with self.client.get_view("v") as view:
                raise ZeroDivisionError
        with self.assertRaises(kvd.Closed):
            view.parts

    def test_asyncio(self):
        async def main():
            async with kvd.aio.Client(self.broker.path) as client:
                await client.put("v", value(10_000))
                with await client.get_view("v") as view:
                    self.assertEqual(bytes(view.parts[0]), value(10_000))

        asyncio.run(main())


class FakeViews(Views, Case):
    broker_kind = Fake

    def count(self):
        return int(self.client.get("views"))

    def test_expired(self):
        self.client.put("over:1", value(10_000))
        view = self.client.get_view("over:1")
        for _ in range(2):
            self.raises(kvd.ViewExpired, Outcome.NO, view.release)
        with self.assertRaises(kvd.ViewExpired):
            with self.client.get_view("over:1"):
                pass
        with self.assertRaises(ZeroDivisionError):  # it says more
            with self.client.get_view("over:1"):
                raise ZeroDivisionError

    def test_forgotten(self):
        """A view that nobody looks at any more goes with the next one, and with the client."""
        self.client.put("v", value(10_000))
        client = self.open()
        part = client.get_view("v").parts[0]
        gc.collect()
        with client.get_view("v"):
            self.assertEqual(self.count(), 2)
        del part
        gc.collect()
        with client.get_view("v"):
            self.assertEqual(self.count(), 1)
        part = client.get_view("v").parts[0]
        client.close()
        self.assertEqual(part.tobytes(), value(10_000))
        del part
        gc.collect()
        until(lambda: self.count() == 0, "the view is over")

    def test_closed(self):
        """A view holds its client open."""
        self.client.put("v", value(10_000))
        client = self.open()
        with client.get_view("v") as view:
            client.close()
            self.assertEqual(bytes(view.parts[0]), value(10_000))
        self.assertEqual(self.count(), 0)
        self.raises(kvd.Closed, Outcome.NO, client.get_view, "v")

    def test_broker_dies(self):
        self.client.put("v", value(10_000))
        view = self.client.get_view("v")
        parts = view.parts
        self.raises(kvd.Unavailable, Outcome.NO, self.client.get, "die:")
        self.broker.process.wait()
        self.broker.start()
        self.assertEqual(bytes(parts[0]), value(10_000))  # nobody has changed it, and nobody says so
        self.raises(kvd.Stale, Outcome.NO, view.release)
        self.client.put("v", value(10_000, 2))
        with self.client.get_view("v") as view:
            self.assertEqual(bytes(view.parts[0]), value(10_000, 2))

    def test_forked(self):
        self.client.put("v", value(10_000))
        with self.client.get_view("v") as view:
            pid = os.fork()
            if pid == 0:
                try:
                    view.release()
                except kvd.Forked:
                    os._exit(7)
                os._exit(1)
            self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 7)


class DevViews(Views, Case):
    broker_kind = Dev

    def test_lapse(self):
        self.client.put("v", value(10_000))

        held = 0.2

        def lapsed():
            try:
                view = self.client.get_view("v", hold=held)
            except kvd.ViewExpired:  # it took that long until the answer was here
                return False
            over = time.monotonic() + held
            until(lambda: time.monotonic() > over, "its time is over")
            with self.assertRaises(kvd.ViewExpired):
                view.release()
            return True

        until(lapsed, "a view lapses")

    def test_written_meanwhile(self):
        self.client.put("v", value(10_000))
        with self.client.get_view("v", hold=10) as view:
            self.client.put("v", value(10_000, 3))
            self.assertEqual(bytes(view.parts[0]), value(10_000))


if __name__ == "__main__":
    unittest.main()
