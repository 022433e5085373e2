"""The client for asyncio, against a real broker and against one that a test directs."""

import asyncio
import gc
import logging
import threading
import unittest
import weakref

from support import Case, Dev, Fake, until
from test_calls import SIZES, value
from test_faults import Memory

import kvd
import kvd.aio
from kvd import Code, Outcome

logging.getLogger("asyncio").setLevel(logging.ERROR)  # not that a turn of the loop took long, as on busy machines


class AioCase(Case):
    """Runs coroutines with a client of theirs."""

    def run_with(self, test):
        async def main():
            async with kvd.aio.Client(self.broker.path) as client:
                return await test(client)

        return asyncio.run(asyncio.wait_for(main(), 60))


class Calls:
    """The tests, for each kind of broker."""

    def test_every_call(self):
        async def test(c):
            for n in SIZES:
                self.assertGreater(await c.put("v", value(n)), 0)
                self.assertEqual(await c.get("v"), value(n))
                buffer = bytearray(n + 1)
                self.assertEqual(await c.get_into("v", buffer), n)
                self.assertEqual(buffer[:n], value(n))
                self.assertEqual(await c.get_range("v", n // 3, n), value(n)[n // 3 :])
            self.assertIsNone(await c.get("missing"))
            self.assertEqual(await c.get("missing", 5), 5)
            self.assertIsNone(await c.get_range("missing", 0, 5))
            self.assertIsNone(await c.get_record("missing"))
            with self.assertRaises(kvd.NotFound):
                await c.get_into("missing", bytearray(5))
            self.assertEqual(await c.get_range("v", 5, 0), b"")
            await c.delete("cond")
            self.assertIsNone(await c.put("cond", b"", if_present=True))
            version = await c.put("cond", b"1", if_absent=True, flags=7)
            self.assertEqual((await c.get_record("cond"))[:3], (b"1", version, 7))
            self.assertIsNone(await c.put("cond", b"", if_version=version + 1))
            self.assertFalse(await c.delete("cond", if_version=version + 1))
            self.assertTrue(await c.touch("cond", 100))
            self.assertIsNotNone((await c.get_record("cond")).expires)
            self.assertEqual(await c.incr("cond", 4), 5)
            self.assertTrue(await c.exists("cond"))
            self.assertTrue(await c.pin("cond", 60))
            self.assertTrue(await c.unpin("cond"))
            self.assertFalse(await c.pin("absent", 60))
            self.assertFalse(await c.unpin("absent"))
            self.assertTrue(await c.delete("cond"))
            self.assertFalse(await c.delete("cond"))
            self.assertFalse(await c.exists("cond"))
            self.assertFalse(await c.touch("cond"))
            await c.put("text", b"no number")
            with self.assertRaises(kvd.WrongType):
                await c.incr("text")
            for wrong in (c.get(""), c.put("x" * 1025, b""), c.get_many([""])):
                with self.assertRaises(kvd.BadArgument):
                    await wrong
            with self.assertRaises(BufferError):
                await c.get_into("v", b"read-only")

        self.run_with(test)

    def test_batches(self):
        async def test(c):
            items = {f"aio:{n}": value(n) for n in SIZES}
            self.assertTrue(all(await c.put_many(items)))
            results = await c.get_many([*items, "no"])
            self.assertEqual([r.value for r in results], [*items.values(), None])
            self.assertEqual((results[-1].code, results[-1].outcome), (Code.NOT_FOUND, Outcome.NO))
            into = [bytearray(len(v)) for v in items.values()]
            self.assertTrue(all(await c.get_many(items, into)))
            self.assertEqual(into, list(items.values()))
            self.assertEqual(await c.exists_prefix([*items, "no", *items]), len(items))
            self.assertEqual(await c.exists_prefix(items), len(items))
            self.assertEqual([bool(r) for r in await c.exists_many([*items, "no"])], [True] * len(items) + [False])
            lengths = [r.length for r in await c.exists_many(items, lengths=True)]
            self.assertEqual(lengths, [len(v) for v in items.values()])
            both = [*items, "no"]
            for results in (await c.pin_many(both, 60), await c.unpin_many(both)):
                self.assertEqual([bool(r) for r in results], [True] * len(items) + [False])
            self.assertEqual((await c.pin_many([], 60), await c.unpin_many([])), ([], []))
            self.assertEqual({k async for k in c.scan("aio:")}, {k.encode() for k in items})
            self.assertTrue(all(await c.delete_many(items)))
            self.assertEqual([await c.get_many([]), await c.put_many([]), await c.delete_many([])], [[]] * 3)
            self.assertEqual(await c.exists_many([]), [])
            a = c.alloc(5000)
            await c.put("arena", a)
            self.assertEqual(await c.get_into("arena", a), 5000)

        self.run_with(test)

    def test_many_at_once(self):
        async def one(c, i):
            key, v = f"at:{i}", value(i * 31, i + 1)
            await c.put(key, v)
            self.assertEqual(await c.get(key), v)
            self.assertEqual([r.value for r in await c.get_many([key] * 3)], [v] * 3)

        async def test(c):
            await asyncio.gather(*(one(c, i) for i in range(200)))

        self.run_with(test)


class FakeAio(Calls, AioCase):
    broker_kind = Fake

    async def held(self, n):
        while int(await asyncio.get_running_loop().run_in_executor(None, self.client.get, "held")) < n:
            pass

    def test_loop_goes_on(self):
        async def test(c):
            await c.put("x", b"1")
            waiting = asyncio.ensure_future(c.get("hold:x"))
            await self.held(1)
            self.assertEqual(await c.get("x"), b"1")
            self.assertFalse(waiting.done())
            await c.put("release", b"")
            self.assertIsNone(await waiting)

        self.run_with(test)

    def test_cancelled(self):
        memory, gone = Memory(5000), []
        weakref.finalize(memory, gone.append, True)

        async def test(c):
            nonlocal memory
            waiting = asyncio.ensure_future(c.put("stuck:put", memory))
            await self.held(1)
            waiting.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await waiting
            del waiting
            with self.assertRaises(BufferError):
                memory.append(1)
            memory = None
            gc.collect()
            self.assertEqual(gone, [])
            await c.put("release", b"")
            while not gone:
                gc.collect()
                await c.get("x")
            self.assertEqual(c._flight, {})

        self.run_with(test)

    def test_close_in_flight(self):
        async def test():
            c = kvd.aio.Client(self.broker.path)
            with self.assertRaises(kvd.Closed):
                await c.get("x")
            await c.open()
            waiting = [asyncio.ensure_future(c.get(f"hold:{i}")) for i in range(5)]
            await self.held(5)
            await c.close()
            for w in waiting:
                with self.assertRaises(kvd.Cancelled):
                    await w
            with self.assertRaises(kvd.Closed):
                await c.get("x")
            await c.close()

        asyncio.run(asyncio.wait_for(test(), 60))

    def test_loop_ends_first(self):
        async def test():
            c = kvd.aio.Client(self.broker.path)
            await c.open()
            task = asyncio.ensure_future(c.get("hold:x"))
            await self.held(1)
            return c._client._core, task

        core, task = asyncio.run(asyncio.wait_for(test(), 60))
        del task
        until(lambda: gc.collect() >= 0 and core.handle is None, "the connection is closed")

    def test_death_of_the_broker(self):
        async def test(c):
            waiting = asyncio.ensure_future(c.put("hold:x", b"1"))
            await self.held(1)
            with self.assertRaises(kvd.Unavailable):
                await c.get("die:")
            with self.assertRaises(kvd.Unavailable) as raised:
                await waiting
            self.assertIs(raised.exception.outcome, Outcome.UNKNOWN)
            self.broker.process.wait()
            late = threading.Thread(target=self.broker.start)
            late.start()
            self.assertIsNone(await c.get("x"))
            late.join()

        self.run_with(test)


class DevAio(Calls, AioCase):
    broker_kind = Dev


if __name__ == "__main__":
    unittest.main()
