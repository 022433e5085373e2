"""Values that are put piece by piece, against a real broker."""

import asyncio
import io
import os
import subprocess
import sys
import tempfile
import unittest
import warnings

import support
from support import Case, Dev
from test_calls import value

import kvd
import kvd.aio
from kvd import Outcome

LONG = 9 << 20  # bytes, more than the arena of these clients


class Reader:
    """A file that has `read` alone, and gives less than it is asked for."""

    def __init__(self, data):
        self.file = io.BytesIO(data)

    def read(self, n):
        return self.file.read(min(n, 100_001))


class Streams(Case):
    broker_kind = Dev

    def setUp(self):
        super().setUp()
        self.small = self.open(arena=2 << 20)

    def stored(self, key, want):
        whole = b"".join(self.small.get_range(key, at, 1 << 20) for at in range(0, len(want), 1 << 20))
        self.assertEqual((self.small.get_range(key, len(want), 9), whole), (b"", want))

    def test_sources(self):
        data = value(LONG)
        with tempfile.TemporaryFile() as file:
            file.write(data + b"behind it")
            file.seek(0)
            self.assertGreater(self.small.put_from("file", file, LONG), 0)
            self.assertEqual(file.read(), b"behind it")
        self.stored("file", data)
        self.small.put_from("reader", Reader(data), LONG)
        self.stored("reader", data)
        pieces = [data[:1], b"", bytearray(data[1:5000]), memoryview(data)[5000:]]
        version = self.small.put_from("pieces", (p for p in pieces), LONG, ttl=50)
        self.stored("pieces", data)
        self.assertEqual(self.client.get_record("pieces").version, version)
        self.assertIsNotNone(self.client.get_record("pieces").expires)
        self.small.put_from("none", [], 0, flags=3)
        self.assertEqual((self.small.get("none"), self.small.get_record("none").flags), (b"", 3))

    def test_nothing_is_stored(self):
        self.small.put("k", b"older")

        def fails():
            yield value(LONG // 2)
            raise OSError("the source is gone")

        for source, length, error in (
            (io.BytesIO(b"123"), 4, ValueError),
            ([b"123"], 2, ValueError),
            ([value(LONG)], LONG - 1, ValueError),
            ([], 1, ValueError),
            (fails(), LONG, OSError),
            ([1], 1, TypeError),
            (io.StringIO("123"), 3, TypeError),
            ([], -1, ValueError),
            ([], 1 << 60, kvd.TooLarge),
        ):
            with self.subTest(error=error, length=length), self.assertRaises(error):
                self.small.put_from("k", source, length)
        self.assertEqual(self.small.get("k"), b"older")
        for _ in range(20):  # more than a broker allows at a time: all of those have ended
            self.small.put_from("k", [b"1"], 1)

    def test_asyncio(self):
        async def main():
            async with kvd.aio.Client(self.broker.path) as client:
                await client.put_from("a", io.BytesIO(value(LONG)), LONG)

        asyncio.run(main())
        self.stored("a", value(LONG))

    def test_forked(self):
        """A child's stream is of no use, and the parent's goes on."""
        parent, children = os.getpid(), []

        def pieces():
            yield b"01234"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there are other threads
                children.append(os.fork())
            yield b"56789"

        try:
            self.small.put_from("f", pieces(), 10)
        except kvd.Forked as e:
            os._exit(7 if e.outcome is Outcome.NO else 8)
        finally:
            if os.getpid() != parent:
                os._exit(1)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]), 7)
        self.assertEqual(self.small.get("f"), b"0123456789")

    def test_program_dies(self):
        """Nothing is stored of a stream whose program was killed, and the broker has room for others."""
        self.small.put("d", b"older")
        program = """
import os, signal, sys, kvd
def pieces():
    yield bytes(5000)
    os.kill(os.getpid(), signal.SIGKILL)
kvd.Client(sys.argv[1]).put_from("d", pieces(), 5001)
"""
        env = dict(os.environ, PYTHONPATH=str(support.HERE.parent))
        done = subprocess.run([sys.executable, "-c", program, self.broker.path], env=env, timeout=support.PATIENCE)
        self.assertEqual(done.returncode, -9)
        self.assertEqual(self.small.get("d"), b"older")
        self.small.put_from("d", [b"newer"], 5)
        self.assertEqual(self.small.get("d"), b"newer")

    def test_broker_dies(self):
        """A stream whose broker was killed says that nothing was stored, and does not hang."""
        broker = Dev()
        self.addCleanup(broker.stop)
        client = kvd.Client(broker.path, dial_timeout=0.3)
        self.addCleanup(client.close)

        def pieces():
            yield bytes(5000)
            broker.process.kill()
            broker.process.wait()
            yield bytes(5000)

        with self.assertRaises(kvd.Error) as raised:
            client.put_from("b", pieces(), 10_000)
        self.assertIs(raised.exception.outcome, Outcome.NO)


if __name__ == "__main__":
    unittest.main()
