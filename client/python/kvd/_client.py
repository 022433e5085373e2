"""The blocking client."""

from __future__ import annotations

import ctypes
import datetime
import math
import mmap
import operator
import os
import struct
import time
import weakref
from types import TracebackType
from typing import (
    Any,
    Callable,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Type,
    TypeVar,
    Union,
    overload,
)

from . import _errors, _lib
from ._buffers import Buffer, Pinned, new_bytes
from ._core import Batch, Core, Result
from ._stream import Source, put_from
from ._view import View

Key = Union[bytes, str]
"""A key, of 1 to 1024 bytes; of a str those of its UTF-8."""

Seconds = Union[int, float, datetime.timedelta]
"""A time to live or a limit, of at least a millisecond."""

Path = Union[str, bytes, "os.PathLike[str]"]

T = TypeVar("T")

# How often a value may grow while it is read before its length counts as an error.
TRIES = 8
SCAN_BYTES = 64 << 10
# How long a batch tries to reach a broker that is away, and how long it waits in between. In seconds.
DIAL = 2.0
DIAL_PAUSE = 0.01

_RECORD = struct.Struct("=IIQQQ")

# What struct calls the types of numpy, for `alloc` without it.
_FORMATS = {
    "bool": "?",
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float32": "f",
    "float64": "d",
}


class Record(NamedTuple):
    """A value and what is known of it. `expires` is in seconds since 1970, or None for never."""

    value: bytes
    version: int
    flags: int
    expires: Optional[float]


def key_bytes(key: Key) -> bytes:
    """Gives the bytes of a key."""
    if type(key) is bytes:
        return key
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, (bytes, bytearray, memoryview)):
        return bytes(key)
    raise TypeError(f"a key is bytes or str, not {type(key).__name__}")


def milliseconds(value: Optional[Seconds], name: str) -> int:
    """Gives a time in milliseconds, rounded up; 0 for None."""
    if value is None:
        return 0
    seconds = value.total_seconds() if isinstance(value, datetime.timedelta) else value
    if not 0 < seconds < 1e15:
        raise ValueError(f"{name} is {value!r}, want more than 0 seconds")
    return math.ceil(round(seconds * 1000, 3))


def write(
    if_absent: bool = False,
    if_present: bool = False,
    if_version: Optional[int] = None,
    ttl: Optional[Seconds] = None,
    flags: int = 0,
    timeout: Optional[Seconds] = None,
) -> Optional[_lib.Write]:
    """Gives how to write, or None if it is as by default."""
    if not (if_absent or if_present or if_version is not None or ttl is not None or flags or timeout is not None):
        return None
    if if_absent + if_present + (if_version is not None) > 1:
        raise ValueError("if_absent, if_present and if_version exclude each other")
    condition = _lib.IF_ABSENT * if_absent + _lib.IF_PRESENT * if_present
    if if_version is not None:
        condition = _lib.IF_VERSION
    for name, n, bits in (("flags", flags, 32), ("if_version", if_version or 0, 64)):
        if not 0 <= n < 1 << bits:
            raise ValueError(f"{name} is {n}, want a number of {bits} bits")
    return _lib.Write(
        size=ctypes.sizeof(_lib.Write),
        condition=condition,
        version=if_version or 0,
        ttl_ms=milliseconds(ttl, "ttl"),
        flags=flags,
        timeout_ms=min(milliseconds(timeout, "timeout"), 0xFFFFFFFF),
    )


def options(
    path: Optional[Path],
    namespace: Optional[str],
    secret: Optional[bytes] = None,
    arena: Optional[int] = None,
    queues: int = 0,
    depth: int = 0,
    timeout: Optional[Seconds] = None,
    dial_timeout: Optional[Seconds] = None,
    program: Optional[str] = None,
) -> _lib.Options:
    """Gives what kvd_open is told."""
    if arena is not None and arena < 0:
        raise ValueError(f"arena is {arena}, want bytes")
    names = {"path": path, "namespace": namespace, "program": program}
    strings = {k: None if v is None else os.fsencode(v) for k, v in names.items()}
    for k, v in strings.items():
        if v is not None and b"\0" in v:
            raise ValueError(f"{k} is {v!r}, want no zero byte")
    return _lib.Options(
        size=ctypes.sizeof(_lib.Options),
        flags=_lib.NO_ARENA if arena == 0 else 0,
        path=strings["path"],
        namespace_name=strings["namespace"],
        secret=secret or None,
        secret_bytes=len(secret or b""),
        program=strings["program"],
        arena_bytes=arena or 0,
        queues=queues,
        depth=depth,
        timeout_ms=min(milliseconds(timeout, "timeout"), 0xFFFFFFFF),
        dial_ms=min(milliseconds(dial_timeout, "dial_timeout"), 0xFFFFFFFF),
    )


class Registered:
    """Memory that the broker moves values to and from without a copy, until `close`. `buffer` is a memoryview of it.

    It is a context manager.
    """

    def __init__(self, core: Core, address: int, buffer: memoryview) -> None:
        self._core: Optional[Core] = core
        self._address = address
        self.buffer = buffer

    def close(self) -> None:
        """Ends it. Busy: an operation uses the memory."""
        core = self._core
        if core is None:
            return
        try:
            call = core.take()
        except _errors.Closed:  # with the client
            self._core = None
            return
        try:
            if _lib.kvd_deregister(core.handle, self._address, call.error_ref) != 0:
                raise _errors.from_struct(call.error)
            core.registered.pop(self._address).release()
            self._core = None
        finally:
            core.give(call)

    def __enter__(self) -> "Registered":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], e: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()


class Client:
    """A connection to the broker of this machine, and an arena. It is a context manager, for any number of threads.

    A forked child opens a client of its own: calls of its parent's raise Forked there.
    A call for one record lasts as long as the operation; Ctrl-C is handled when it ends. Calls for many records
    handle signals while they wait.
    """

    def __init__(
        self,
        path: Optional[Path] = None,
        namespace: Optional[str] = None,
        *,
        secret: Optional[bytes] = None,
        arena: Optional[int] = None,
        queues: int = 0,
        depth: int = 0,
        timeout: Optional[Seconds] = None,
        dial_timeout: Optional[Seconds] = None,
        program: Optional[str] = None,
    ) -> None:
        """Connects.

        path: the broker's socket; without one the variable KVD_BROKER, else /run/kvd/broker.sock.
        namespace: without one the broker's default for this socket.
        secret: of the socket, if it wants one.
        arena: its size in bytes, 64 MiB by default; 0: none.
        queues: most queues that threads share, at most and by default 8.
        depth: operations under way in a queue, a power of two of 16 to 1024; by default the broker's.
        timeout: of each operation; by default the broker's.
        dial_timeout: how long a call tries to reach a broker that is away, 2 s by default.
        program: a name for the broker's list of clients.
        """
        given = options(path, namespace, secret, arena, queues, depth, timeout, dial_timeout, program)
        self._dial = given.dial_ms / 1000 or DIAL
        self._core = Core(given)
        weakref.finalize(self, self._core.close).atexit = False

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], e: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection once its calls are over. The arena goes with the last object that looks at it."""
        self._core.close()

    @property
    def generation(self) -> int:
        """How many connections there have been: 1 at first, one more after each new one."""
        return self._ask(_lib.kvd_generation)

    @property
    def max_value(self) -> int:
        """The bytes of the longest value that the broker takes; 0 in a forked child."""
        return self._ask(_lib.kvd_max_value)

    def _ask(self, function: Callable[[Any], int]) -> int:
        core = self._core
        call = core.take()
        try:
            return function(core.handle)
        finally:
            core.give(call)

    # Values

    @overload
    def get(self, key: Key) -> Optional[bytes]: ...

    @overload
    def get(self, key: Key, default: T) -> Union[bytes, T]: ...

    def get(self, key: Key, default: Any = None) -> Any:
        """Gives a value as bytes, or `default` if there is no such key."""
        k = key if type(key) is bytes else key_bytes(key)
        core = self._core
        call = core.take()
        try:
            code = _lib.kvd_get_into(
                core.handle, k, len(k), call.address, _lib.SMALL, call.length_ref, None, call.error_ref
            )
            if code == 0:
                return call.bytes[: call.length.value]
            if code == 1:
                return default
            value = self._long(call, k)
            return default if value is None else value
        finally:
            core.give(call)

    def get_record(self, key: Key) -> Optional[Record]:
        """Gives a value with its version, flags and expiry, or None if there is no such key."""
        k = key_bytes(key)
        core = self._core
        call = core.take()
        try:
            code = _lib.kvd_get_into(
                core.handle, k, len(k), call.address, _lib.SMALL, call.length_ref, call.record_ref, call.error_ref
            )
            if code == 0:
                value = call.bytes[: call.length.value]
            elif code == 1:
                return None
            else:
                long = self._long(call, k, call.record_ref)
                if long is None:
                    return None
                value = long
            _, flags, _, version, expires = _RECORD.unpack_from(call.record)
            return Record(value, version, flags, expires / 1000 if expires else None)
        finally:
            core.give(call)

    def _long(self, call: Any, k: bytes, record: Any = None) -> Optional[bytes]:
        """Reads a value whose length a KVD_SHORT_BUFFER told. It raises other errors, which `call` has, too."""
        for _ in range(TRIES):
            if call.error.code != _errors.Code.SHORT_BUFFER:
                break
            value = new_bytes(call.length.value)
            address = Pinned(value, False).address  # the value stays here until the call is over
            code = _lib.kvd_get_into(
                self._core.handle, k, len(k), address, len(value), call.length_ref, record, call.error_ref
            )
            if code == 0:
                return value if call.length.value == len(value) else value[: call.length.value]
            if code == 1:
                return None
        raise _errors.from_struct(call.error, call.length.value)

    def get_into(self, key: Key, buffer: Buffer) -> int:
        """Reads a value into memory, and gives its length in bytes.

        It raises NotFound, a KeyError, if there is no such key: nothing was written, and the buffer is no value.
        ShortBuffer: the value is longer than the buffer. BufferError: it is read-only or not contiguous.
        """
        k = key_bytes(key)
        core = self._core
        pinned = Pinned(buffer, True)
        call = core.take()
        try:
            code = _lib.kvd_get_into(
                core.handle, k, len(k), pinned.address, pinned.length, call.length_ref, None, call.error_ref
            )
            if code != 0:
                raise _errors.from_struct(call.error, call.length.value)
            return int(call.length.value)
        finally:
            core.give(call)
            pinned.release()

    def get_range(self, key: Key, offset: int, length: int) -> Optional[bytes]:
        """Gives at most `length` bytes of a value from `offset` on, or None if there is no such key.

        They are fewer, perhaps none, at the value's end.
        """
        k = key_bytes(key)
        if offset < 0 or length < 0:
            raise ValueError("offset and length count bytes from 0 on")
        if length == 0:
            return b"" if self.exists(key) else None
        core = self._core
        call = core.take()
        try:
            small = length <= _lib.SMALL
            value = b"" if small else new_bytes(length)
            address = call.address if small else Pinned(value, False).address
            code = _lib.kvd_get_range(
                core.handle, k, len(k), offset, address, length, call.length_ref, None, call.error_ref
            )
            if code == 1:
                return None
            if code != 0:
                raise _errors.from_struct(call.error)
            n = call.length.value
            return call.bytes[:n] if small else value if n == length else value[:n]
        finally:
            core.give(call)

    def put(
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
        """Writes a value. It gives the record's new version, which is never 0, or None if the condition did not hold.

        if_absent, if_present, if_version: write only if there is no such key, there is one, it has that version.
        ttl: how long the record lives; for ever by default. flags: a number of 32 bits kept with the value.
        """
        k = key if type(key) is bytes else key_bytes(key)
        how = write(if_absent, if_present, if_version, ttl, flags, timeout)
        core = self._core
        pinned = None if type(value) is bytes else Pinned(value, False)
        address, length = (value, len(value)) if pinned is None else (pinned.address, pinned.length)
        call = core.take()
        try:
            code = _lib.kvd_put_if(core.handle, k, len(k), address, length, how, call.record_ref, call.error_ref)
            if code == 0:
                return int(call.record.version)
            if how is not None and how.condition and code in (1, 2):
                return None
            raise _errors.from_struct(call.error)
        finally:
            core.give(call)
            if pinned is not None:
                pinned.release()

    def put_from(
        self,
        key: Key,
        source: Source,
        length: int,
        *,
        ttl: Optional[Seconds] = None,
        flags: int = 0,
        timeout: Optional[Seconds] = None,
    ) -> int:
        """Writes a value of `length` bytes piece by piece, and gives its version. It needs no memory for all of it.

        source: a file, of which it reads as many bytes, or an iterable of pieces, which has as many. ValueError: it
        has not, and nothing is stored; nor is anything if the source raises. Nobody sees a part: an older value stays
        until the last piece was written. `timeout` is that of each piece.
        """
        return put_from(self._core, key_bytes(key), source, length, write(ttl=ttl, flags=flags, timeout=timeout))

    def delete(self, key: Key, *, if_version: Optional[int] = None) -> bool:
        """Deletes a record. False: there was none, or it had another version."""
        how = write(if_version=if_version)
        return self._yes(_lib.kvd_delete_if, key, how)

    def exists(self, key: Key) -> bool:
        """Tells whether there is a record. It moves no value, and does not count as a use of the record."""
        return self._yes(_lib.kvd_exists, key, None)

    def touch(self, key: Key, ttl: Optional[Seconds] = None) -> bool:
        """Lets a record live for `ttl` from now on, or for ever. False: there is none."""
        return self._yes(_lib.kvd_touch, key, milliseconds(ttl, "ttl"), None)

    def pin(self, key: Key, seconds: Seconds) -> bool:
        """Has eviction pass over a record for a time from now on, 70 minutes at most. False: there is none.

        It is a hint: a pin that is lost costs a miss. It raises Unsupported in a cache that allows no pins
        (`kvctl namespace set --max-pinned`), and Busy beyond the socket's limit.
        """
        return self._yes(_lib.kvd_pin, key, milliseconds(seconds, "seconds"))

    def unpin(self, key: Key) -> bool:
        """Ends the pins of a record, of whoever began them. False: there is none."""
        return self._yes(_lib.kvd_unpin, key)

    def _yes(self, function: Callable[..., int], key: Key, *rest: Any) -> bool:
        k = key_bytes(key)
        core = self._core
        call = core.take()
        try:
            code = function(core.handle, k, len(k), *rest, call.error_ref)
            if code == 0:
                return True
            if code in (1, 2):
                return False
            raise _errors.from_struct(call.error)
        finally:
            core.give(call)

    def incr(self, key: Key, delta: int = 1) -> int:
        """Adds to a decimal number, and gives the new one. A record that is absent counts as 0."""
        k = key_bytes(key)
        if not -(1 << 63) <= delta < 1 << 63:
            raise ValueError(f"delta is {delta}, want a number of 64 bits")
        core = self._core
        call = core.take()
        try:
            if _lib.kvd_incr(core.handle, k, len(k), delta, call.number_ref, None, call.error_ref) != 0:
                raise _errors.from_struct(call.error)
            return int(call.number.value)
        finally:
            core.give(call)

    def get_view(self, key: Key, *, hold: Optional[Seconds] = None) -> View:
        """Shows a value where it is, without a copy, for `hold`: 1 s, and 10 s at most.

        It raises NotFound, a KeyError, if there is no such key. Unsupported: the broker allows no views, or the value
        is short, or in memory of another machine; use `get`. Busy: there are as many views as the broker allows.
        """
        return View(self._core, key_bytes(key), min(milliseconds(hold, "hold"), 0xFFFFFFFF))

    # Many records

    def get_many(self, keys: Iterable[Key], into: Optional[Sequence[Buffer]] = None) -> List[Result]:
        """Reads many values at once: a Result per key, in order.

        Values are in `value`, as bytes. With `into`, a buffer per key, they are there instead, `length` bytes of each.
        """
        ks = [key_bytes(k) for k in keys]
        if into is not None:
            return self._run(into_adder(ks, into), len(ks))
        results: List[Result] = [None] * len(ks)  # type: ignore[list-item]
        want, capacities = list(range(len(ks))), [_lib.SMALL] * len(ks)
        for _ in range(TRIES):
            places = Places(capacities)
            got = self._run(places.adder([ks[i] for i in want]), len(want))
            want, capacities = places.collect(want, got, results)
            if not want:
                break
        return results

    def put_many(
        self,
        items: Union[Mapping[Any, Buffer], Iterable[Tuple[Key, Buffer]]],
        *,
        if_absent: bool = False,
        if_present: bool = False,
        ttl: Optional[Seconds] = None,
        flags: int = 0,
        timeout: Optional[Seconds] = None,
    ) -> List[Result]:
        """Writes many values at once: a Result per item, in order. Options are those of `put`, for each."""
        add, n = put_adder(items, write(if_absent, if_present, None, ttl, flags, timeout))
        return self._run(add, n)

    def delete_many(self, keys: Iterable[Key]) -> List[Result]:
        """Deletes many records at once: a Result per key, in order; Code.NOT_FOUND: there was none."""
        ks = [key_bytes(k) for k in keys]
        return self._run(lambda b: b.delete_all(ks), len(ks))

    def exists_many(self, keys: Iterable[Key], *, lengths: bool = False) -> List[Result]:
        """Asks for many records at once: a Result per key, in order, which is true if there is one.

        It is no use of the records. `lengths` has results tell how long the values are, which costs more.
        """
        ks = [key_bytes(k) for k in keys]
        return self._run(lambda b: b.exists_all(ks, lengths), len(ks))

    def pin_many(self, keys: Iterable[Key], seconds: Seconds) -> List[Result]:
        """Pins many records at once, as `pin` does: a Result per key, in order; Code.NOT_FOUND: there is none."""
        ks, ms = [key_bytes(k) for k in keys], milliseconds(seconds, "seconds")
        return self._run(lambda b: b.pin_all(ks, ms), len(ks))

    def unpin_many(self, keys: Iterable[Key]) -> List[Result]:
        """Ends the pins of many records at once: a Result per key, in order; Code.NOT_FOUND: there is none."""
        ks = [key_bytes(k) for k in keys]
        return self._run(lambda b: b.unpin_all(ks), len(ks))

    def _run(self, add: Callable[[Batch], object], n: int) -> List[Result]:
        if n == 0:
            return []
        batch = Batch(self._core, n)
        try:
            add(batch)
            self._submit(batch)
            batch.wait()
            return batch.results()
        finally:
            batch.end()

    def _submit(self, batch: Batch) -> None:
        deadline = time.monotonic() + self._dial
        while True:
            try:
                return batch.submit()
            except _errors.Unavailable:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(DIAL_PAUSE)

    def exists_prefix(self, keys: Iterable[Key]) -> int:
        """Tells how many of the keys there are, from the first one on without a gap. It is no use of the records."""
        ks = [key_bytes(k) for k in keys]
        core = self._core
        call = core.take()
        try:
            addresses = (ctypes.c_char_p * len(ks))(*ks)
            lengths = (ctypes.c_uint64 * len(ks))(*map(len, ks))
            code = _lib.kvd_exists_prefix(core.handle, addresses, lengths, len(ks), call.length_ref, call.error_ref)
            if code != 0:
                raise _errors.from_struct(call.error)
            return int(call.length.value)
        finally:
            core.give(call)

    def scan(self, prefix: Key = b"") -> Iterator[bytes]:
        """Lists keys that begin with a prefix, in no order. A key that is written meanwhile may come twice or not."""
        for page in self._pages(b"" if not prefix else key_bytes(prefix)):
            yield from page

    def _pages(self, prefix: bytes) -> Iterator[List[bytes]]:
        cursor = ctypes.c_uint64(0)
        while True:
            yield self._scan_next(prefix, cursor)
            if cursor.value == 0:
                return

    def _scan_next(self, prefix: bytes, cursor: ctypes.c_uint64) -> List[bytes]:
        core = self._core
        call = core.take()
        try:
            keys = ctypes.create_string_buffer(SCAN_BYTES)
            code = _lib.kvd_scan_next(
                core.handle, prefix, len(prefix), ctypes.byref(cursor), keys, SCAN_BYTES, call.length_ref, call.error_ref
            )
            if code != 0:
                raise _errors.from_struct(call.error)
            return split(keys.raw[: call.length.value])
        finally:
            core.give(call)

    def delete_prefix(self, prefix: Key) -> int:
        """Deletes the records whose keys begin with a prefix, and tells how many. An empty one is all of the namespace."""
        p = b"" if not prefix else key_bytes(prefix)
        core = self._core
        call = core.take()
        try:
            if _lib.kvd_delete_prefix(core.handle, p, len(p), call.length_ref, call.error_ref) != 0:
                raise _errors.from_struct(call.error)
            return int(call.length.value)
        finally:
            core.give(call)

    # Memory

    def alloc(self, shape: Union[int, Sequence[int]], dtype: Any = "uint8") -> Any:
        """Takes memory of the arena, which values move to and from without a copy.

        It gives a numpy array, or a memoryview where numpy is not installed; then dtype is a name such as "float32".
        The bytes are not cleared. They are given back when the array and all views of it are gone.
        """
        try:
            import numpy
        except ImportError:
            return self._alloc_view(shape, dtype)
        kind = numpy.dtype(dtype)
        if kind.hasobject:
            raise TypeError("objects of Python cannot be in the arena")
        dims = dimensions(shape)
        memory = self._core.alloc(math.prod(dims) * kind.itemsize)
        return numpy.ndarray(dims, kind, buffer=memoryview(memory))

    def _alloc_view(self, shape: Union[int, Sequence[int]], dtype: Any) -> memoryview:
        form = _FORMATS.get(dtype, dtype) if isinstance(dtype, str) else ""
        if form not in _FORMATS.values():
            raise TypeError(f"without numpy dtype is one of {', '.join(_FORMATS)}, not {dtype!r}")
        dims = dimensions(shape)
        n = math.prod(dims)
        view = memoryview(self._core.alloc(n * struct.calcsize(form))).cast("B")
        if n == 0 or len(dims) == 0:
            return view.cast(form)
        return view.cast(form, dims)

    def arena(self) -> Tuple[int, int]:
        """Gives address and bytes of the arena, as for registering it with a device; 0 bytes if there is none."""
        core = self._core
        call = core.take()
        try:
            address = ctypes.c_void_p()
            if _lib.kvd_arena(core.handle, ctypes.byref(address), call.length_ref, call.error_ref) != 0:
                raise _errors.from_struct(call.error)
            return address.value or 0, int(call.length.value)
        finally:
            core.give(call)

    def register(
        self, fd: int, buffer: Optional[Buffer] = None, *, offset: int = 0, length: Optional[int] = None
    ) -> Registered:
        """Lets values move straight to and from a file in memory, which is best a memfd sealed against shrinking.

        `buffer` is where the caller has mapped it, shared, from `offset` on; without one it is mapped here, `length`
        bytes or all. Offset and address are multiples of the page size. The fd may be closed afterwards.
        """
        if buffer is None:
            size = os.fstat(fd).st_size - offset if length is None else length
            buffer = memoryview(mmap.mmap(fd, size, offset=offset))
        pinned = Pinned(buffer, True)
        core = self._core
        call = core.take()
        try:
            n = pinned.length if length is None else length
            if not 0 <= n <= pinned.length or offset < 0:
                raise ValueError(f"offset {offset} and length {n} of a buffer of {pinned.length} bytes")
            if pinned.address in core.registered:
                raise _errors.Busy("the memory is registered")
            core.registered[pinned.address] = pinned  # first: an interrupt may come behind the call
            code = _lib.kvd_register(core.handle, fd, offset, n, pinned.address, call.error_ref)
            if code != 0:
                del core.registered[pinned.address]
                raise _errors.from_struct(call.error)
            return Registered(core, pinned.address, memoryview(buffer))
        finally:
            core.give(call)


def dimensions(shape: Union[int, Sequence[int]]) -> List[int]:
    """Gives a shape as a list."""
    dims = [shape] if isinstance(shape, int) else [operator.index(n) for n in shape]
    if any(n < 0 for n in dims):
        raise ValueError(f"shape is {shape!r}, want no negative numbers")
    return dims


def split(entries: bytes) -> List[bytes]:
    """Cuts what kvd_scan_next wrote into keys."""
    keys, at = [], 0
    while at + 2 <= len(entries):
        n = int.from_bytes(entries[at : at + 2], "little")
        keys.append(entries[at + 2 : at + 2 + n])
        at += 2 + n
    return keys


class Places:
    """Where a batch of `get_many` reads to: small values side by side, each longer one to bytes of its own."""

    def __init__(self, capacities: List[int]) -> None:
        small = sum(c <= _lib.SMALL for c in capacities)
        self._block: Any = (ctypes.c_char * (small * _lib.SMALL))()
        self._made: List[Optional[bytes]] = [None if c <= _lib.SMALL else new_bytes(c) for c in capacities]

    def __iter__(self) -> Iterator[Tuple[int, int]]:
        """Gives address and capacity of each place."""
        small = ctypes.addressof(self._block)
        for made in self._made:
            if made is None:
                yield small, _lib.SMALL
                small += _lib.SMALL
            else:
                yield Pinned(made, False).address, len(made)

    def adder(self, keys: List[bytes]) -> Callable[[Batch], None]:
        """Gives what adds a GET for each key to a batch."""

        def add(b: Batch) -> None:
            b.hold(self)
            b.get_all(keys, self)

        return add

    def collect(self, want: List[int], got: List[Result], results: List[Result]) -> Tuple[List[int], List[int]]:
        """Fills in results, and gives which ones are longer than their place, with their lengths."""
        again, capacities, at, block = [], [], 0, self._block
        for i, r, made in zip(want, got, self._made):
            results[i] = r
            if r:
                n = r.length
                r.value = block[at : at + n] if made is None else made if n == len(made) else made[:n]
            elif r.code is _errors.Code.SHORT_BUFFER:
                again.append(i)
                capacities.append(r.length)
            if made is None:
                at += _lib.SMALL
        return again, capacities


def into_adder(keys: List[bytes], into: Sequence[Buffer]) -> Callable[[Batch], None]:
    """Gives what adds a GET into a buffer for each key to a batch."""
    if len(into) != len(keys):
        raise ValueError(f"{len(into)} buffers for {len(keys)} keys")
    pins = [Pinned(b, True) for b in into]

    def add(b: Batch) -> None:
        b.hold(*pins)
        b.get_all(keys, [(p.address, p.length) for p in pins])

    return add


def put_adder(
    items: Union[Mapping[Any, Buffer], Iterable[Tuple[Key, Buffer]]], how: Optional[_lib.Write]
) -> Tuple[Callable[[Batch], None], int]:
    """Gives what adds a PUT for each item to a batch, and how many there are."""
    pairs = items.items() if isinstance(items, Mapping) else items
    pinned = [(key_bytes(k), Pinned(v, False)) for k, v in pairs]

    def add(b: Batch) -> None:
        b.hold(*(p for _, p in pinned))
        for k, p in pinned:
            b.put(k, p.address, p.length, how)

    return add, len(pinned)
