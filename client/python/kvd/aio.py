"""The client for asyncio: the calls of kvd.Client as coroutines.

    async with kvd.aio.Client() as client:
        await client.put("greeting", b"hello")
        results = await client.get_many(["greeting", "farewell"])

The loop watches the library's descriptor. A batch has one future, however many entries it has, so batches cost much
less than a coroutine for each key. A cancelled call lets go at once, and its memory is held until the broker has
let go of it, too.
"""

from __future__ import annotations

import asyncio
import functools
from types import TracebackType
from typing import (
    Any,
    AsyncIterator,
    Callable,
    Dict,
    Iterable,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Type,
    TypeVar,
    Union,
    overload,
)

from . import _client, _errors, _lib
from ._buffers import Buffer, Pinned, new_bytes
from ._client import Key, Record, Registered, Seconds
from ._core import Batch, Result
from ._stream import Source
from ._view import View

T = TypeVar("T")

# How often a turn of the loop may reap before others have theirs.
TURNS = 16


class Client:
    """A connection of one event loop to the broker of this machine. It is an asynchronous context manager.

    All of it belongs to the loop's thread. Arguments are those of kvd.Client.
    """

    def __init__(self, path: Optional[_client.Path] = None, namespace: Optional[str] = None, **options: Any) -> None:
        self._path, self._namespace, self._options = path, namespace, options
        self._client: Optional[_client.Client] = None
        self._flight: Dict[Batch, "asyncio.Future[None]"] = {}
        self._fd = -1
        self._turn: Optional[asyncio.Handle] = None

    async def open(self) -> None:
        """Connects."""
        loop = asyncio.get_running_loop()
        if self._client is not None:
            raise _errors.Busy("the client is open")

        def connect() -> _client.Client:
            return _client.Client(self._path, self._namespace, **self._options)

        self._client = await loop.run_in_executor(None, connect)
        self._loop = loop
        self._fd = _lib.kvd_fd(self._client._core.handle)
        loop.add_reader(self._fd, self._pump)
        self._pump()

    async def close(self) -> None:
        """Cancels what is under way, waits for its end, and closes the connection."""
        client = self._client
        if client is None:
            return
        for b in list(self._flight):
            b.cancel()
        self._pump()
        if self._flight:
            await asyncio.wait(list(self._flight.values()))
        if self._turn is not None:
            self._turn.cancel()
        self._client = None
        self._loop.remove_reader(self._fd)
        await self._loop.run_in_executor(None, client.close)

    async def __aenter__(self) -> "Client":
        await self.open()
        return self

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], e: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        await self.close()

    def _opened(self) -> _client.Client:
        if self._client is None:
            raise _errors.Closed("the client is closed")
        return self._client

    def _pump(self) -> None:
        """Takes what is there, tells those who wait, and has the descriptor tell of the next."""
        self._turn = None
        client = self._client
        if client is None:
            return
        handle = client._core.handle
        for _ in range(TURNS):
            if _lib.kvd_reap(handle) < 0:  # a forked child, whose loop has nothing to wait for
                for future in self._flight.values():
                    if not future.done():
                        future.set_exception(_errors.Forked("the client belongs to the parent process"))
                self._flight.clear()
                return
            for b in [b for b in self._flight if b.pending() == 0]:
                future = self._flight.pop(b)
                if not future.done():
                    future.set_result(None)
            if _lib.kvd_arm(handle) <= 0:
                return
        self._turn = self._loop.call_soon(self._pump)

    async def _batch(self, add: Callable[[Batch], object], n: int, take: Callable[[Batch], T]) -> T:
        """Carries out a batch, and gives what `take` finds in it."""
        client = self._opened()
        batch = Batch(client._core, n)
        try:
            add(batch)
            await self._submit(client, batch)
            future = self._loop.create_future()
            self._flight[batch] = future
            self._pump()
            try:
                # The future is the pump's: a cancelled caller leaves it, and the batch, to end.
                await asyncio.shield(future)
            except asyncio.CancelledError:
                batch.cancel()
                self._pump()
                raise
            return take(batch)
        finally:
            if batch in self._flight:
                self._flight[batch].add_done_callback(lambda _: batch.end())
            else:
                batch.end()

    async def _submit(self, client: _client.Client, batch: Batch) -> None:
        deadline = self._loop.time() + client._dial
        while True:
            try:
                return batch.submit()
            except _errors.Unavailable:
                if self._loop.time() >= deadline:
                    raise
            await asyncio.sleep(_client.DIAL_PAUSE)

    async def _aside(self, function: Callable[[], T]) -> T:
        """Calls something that waits, in a thread of the loop's executor."""
        return await self._loop.run_in_executor(None, function)

    async def _one(self, add: Callable[[Batch], object]) -> Result:
        """Carries out a batch of one."""
        return (await self._batch(add, 1, Batch.results))[0]

    # Values

    @overload
    async def get(self, key: Key) -> Optional[bytes]: ...

    @overload
    async def get(self, key: Key, default: T) -> Union[bytes, T]: ...

    async def get(self, key: Key, default: Any = None) -> Any:
        """Gives a value as bytes, or `default` if there is no such key."""
        r = (await self.get_many((key,)))[0]
        if r.code is _errors.Code.NOT_FOUND:
            return default
        return r.check().value

    async def get_record(self, key: Key) -> Optional[Record]:
        """Gives a value with its version, flags and expiry, or None if there is no such key."""
        r = (await self.get_many((key,)))[0]
        if r.code is _errors.Code.NOT_FOUND:
            return None
        r.check()
        return Record(r.value or b"", r.version, r.flags, r.expires)

    async def get_into(self, key: Key, buffer: Buffer) -> int:
        """Reads a value into memory, and gives its length in bytes. Exceptions are those of kvd.Client.get_into."""
        return (await self.get_many((key,), (buffer,)))[0].check().length

    async def get_range(self, key: Key, offset: int, length: int) -> Optional[bytes]:
        """Gives at most `length` bytes of a value from `offset` on, or None if there is no such key."""
        k = _client.key_bytes(key)
        if offset < 0 or length < 0:
            raise ValueError("offset and length count bytes from 0 on")
        if length == 0:
            return b"" if await self.exists(k) else None
        value = new_bytes(max(length, 2))

        def add(b: Batch) -> None:
            b.hold(value)
            b.get_range(k, offset, Pinned(value, False).address, length)

        r = await self._one(add)
        if r.code is _errors.Code.NOT_FOUND:
            return None
        n = r.check().length
        return value if n == len(value) else value[:n]

    async def put(
        self,
        key: Key,
        value: Buffer,
        *,
        if_absent: bool = False,
        if_present: bool = False,
        if_version: Optional[int] = None,
        ttl: Optional[Seconds] = None,
        flags: int = 0,
        timeout: Optional[Seconds] = None,
    ) -> Optional[int]:
        """Writes a value. It gives the record's new version, or None if the condition did not hold."""
        how = _client.write(if_absent, if_present, if_version, ttl, flags, timeout)
        add, _ = _client.put_adder([(key, value)], how)
        r = await self._one(add)
        if how is not None and how.condition and r.code in (_errors.Code.CONDITION, _errors.Code.NOT_FOUND):
            return None
        return r.check().version

    async def delete(self, key: Key, *, if_version: Optional[int] = None) -> bool:
        """Deletes a record. False: there was none, or it had another version."""
        k, how = _client.key_bytes(key), _client.write(if_version=if_version)
        return _yes(await self._one(lambda b: b.delete(k, how)))

    async def exists(self, key: Key) -> bool:
        """Tells whether there is a record."""
        k = _client.key_bytes(key)
        return _yes(await self._one(lambda b: b.exists(k)))

    async def touch(self, key: Key, ttl: Optional[Seconds] = None) -> bool:
        """Lets a record live for `ttl` from now on, or for ever. False: there is none."""
        k, ms = _client.key_bytes(key), _client.milliseconds(ttl, "ttl")
        return _yes(await self._one(lambda b: b.touch(k, ms)))

    async def pin(self, key: Key, seconds: Seconds) -> bool:
        """Has eviction pass over a record for a time from now on, as kvd.Client.pin does. False: there is none."""
        k, ms = _client.key_bytes(key), _client.milliseconds(seconds, "seconds")
        return _yes(await self._one(lambda b: b.pin_all([k], ms)))

    async def unpin(self, key: Key) -> bool:
        """Ends the pins of a record, of whoever began them. False: there is none."""
        k = _client.key_bytes(key)
        return _yes(await self._one(lambda b: b.unpin_all([k])))

    async def incr(self, key: Key, delta: int = 1) -> int:
        """Adds to a decimal number, and gives the new one. A record that is absent counts as 0."""
        k = _client.key_bytes(key)
        if not -(1 << 63) <= delta < 1 << 63:
            raise ValueError(f"delta is {delta}, want a number of 64 bits")

        def take(b: Batch) -> int:
            b.results()[0].check()
            return b.raws()[0][-1]

        return await self._batch(lambda b: b.incr(k, delta), 1, take)

    async def get_view(self, key: Key, *, hold: Optional[Seconds] = None) -> View:
        """Shows a value where it is, as kvd.Client.get_view does. A thread of the loop's executor asks for it.

        Leave its `with` as ever: that asks the broker, and takes some microseconds.
        """
        return await self._aside(functools.partial(self._opened().get_view, key, hold=hold))

    async def put_from(
        self,
        key: Key,
        source: Source,
        length: int,
        *,
        ttl: Optional[Seconds] = None,
        flags: int = 0,
        timeout: Optional[Seconds] = None,
    ) -> int:
        """Writes a value piece by piece, as kvd.Client.put_from does. A thread of the loop's executor does that.

        The source is read there. Cancelling the call does not end it.
        """
        call = self._opened().put_from
        return await self._aside(functools.partial(call, key, source, length, ttl=ttl, flags=flags, timeout=timeout))

    # Many records

    async def get_many(self, keys: Iterable[Key], into: Optional[Sequence[Buffer]] = None) -> List[Result]:
        """Reads many values at once: a Result per key, in order. Values are in `value`, or with `into` in buffers."""
        ks = [_client.key_bytes(k) for k in keys]
        if not ks:
            return []
        if into is not None:
            return await self._batch(_client.into_adder(ks, into), len(ks), Batch.results)
        results: List[Result] = [None] * len(ks)  # type: ignore[list-item]
        want, capacities = list(range(len(ks))), [_lib.SMALL] * len(ks)
        for _ in range(_client.TRIES):
            places = _client.Places(capacities)
            got = await self._batch(places.adder([ks[i] for i in want]), len(want), Batch.results)
            want, capacities = places.collect(want, got, results)
            if not want:
                break
        return results

    async def put_many(
        self,
        items: Union[Mapping[Any, Buffer], Iterable[Tuple[Key, Buffer]]],
        *,
        if_absent: bool = False,
        if_present: bool = False,
        ttl: Optional[Seconds] = None,
        flags: int = 0,
        timeout: Optional[Seconds] = None,
    ) -> List[Result]:
        """Writes many values at once: a Result per item, in order."""
        add, n = _client.put_adder(items, _client.write(if_absent, if_present, None, ttl, flags, timeout))
        return await self._batch(add, n, Batch.results) if n else []

    async def delete_many(self, keys: Iterable[Key]) -> List[Result]:
        """Deletes many records at once: a Result per key, in order."""
        ks = [_client.key_bytes(k) for k in keys]
        return await self._batch(lambda b: b.delete_all(ks), len(ks), Batch.results) if ks else []

    async def exists_many(self, keys: Iterable[Key], *, lengths: bool = False) -> List[Result]:
        """Asks for many records at once: a Result per key, in order, which is true if there is one.

        `lengths` has results tell how long the values are, which costs more.
        """
        ks = [_client.key_bytes(k) for k in keys]
        return await self._batch(lambda b: b.exists_all(ks, lengths), len(ks), Batch.results) if ks else []

    async def pin_many(self, keys: Iterable[Key], seconds: Seconds) -> List[Result]:
        """Pins many records at once, as `pin` does: a Result per key, in order; Code.NOT_FOUND: there is none."""
        ks, ms = [_client.key_bytes(k) for k in keys], _client.milliseconds(seconds, "seconds")
        return await self._batch(lambda b: b.pin_all(ks, ms), len(ks), Batch.results) if ks else []

    async def unpin_many(self, keys: Iterable[Key]) -> List[Result]:
        """Ends the pins of many records at once: a Result per key, in order; Code.NOT_FOUND: there is none."""
        ks = [_client.key_bytes(k) for k in keys]
        return await self._batch(lambda b: b.unpin_all(ks), len(ks), Batch.results) if ks else []

    async def exists_prefix(self, keys: Iterable[Key]) -> int:
        """Tells how many of the keys there are, from the first one on without a gap."""
        results = await self.exists_many(keys)
        for n, r in enumerate(results):
            if r.code is _errors.Code.NOT_FOUND:
                return n
            r.check()
        return len(results)

    async def scan(self, prefix: Key = b"") -> AsyncIterator[bytes]:
        """Lists keys that begin with a prefix, in no order. A thread of the loop's executor asks for them."""
        pages = self._opened()._pages(b"" if not prefix else _client.key_bytes(prefix))

        def turn() -> Optional[List[bytes]]:
            return next(pages, None)

        while (page := await self._aside(turn)) is not None:
            for k in page:
                yield k

    async def delete_prefix(self, prefix: Key) -> int:
        """Deletes the records whose keys begin with a prefix, and tells how many. It runs in a thread, too."""
        return await self._aside(functools.partial(self._opened().delete_prefix, prefix))

    # Memory

    def alloc(self, shape: Union[int, Sequence[int]], dtype: Any = "uint8") -> Any:
        """Takes memory of the arena, as kvd.Client.alloc does."""
        return self._opened().alloc(shape, dtype)

    def register(
        self, fd: int, buffer: Optional[Buffer] = None, *, offset: int = 0, length: Optional[int] = None
    ) -> Registered:
        """Lets values move straight to and from a file in memory, as kvd.Client.register does."""
        return self._opened().register(fd, buffer, offset=offset, length=length)


def _yes(r: Result) -> bool:
    if r.code in (_errors.Code.NOT_FOUND, _errors.Code.CONDITION):
        return False
    r.check()
    return True
