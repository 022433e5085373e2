"""A connection, and what keeps it open: calls under way, batches, and memory of the arena that somebody looks at."""

from __future__ import annotations

import collections
import ctypes
import os
import sys
import threading
import weakref
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, Optional, Set, Tuple

from . import _buffers, _errors, _lib

# How long a wait for a batch goes on before Python may handle a signal, in ms.
SLICE_MS = 100


class Call:
    """What a call needs beside its arguments. A thread has it alone for that time."""

    __slots__ = (
        "error",
        "error_ref",
        "length",
        "length_ref",
        "record",
        "record_ref",
        "number",
        "number_ref",
        "result",
        "result_at",
        "bytes",
        "address",
        "__weakref__",
    )
    bytes: Any  # a slice of it is bytes, which its type does not tell

    def __init__(self) -> None:
        self.error = _lib.ErrorStruct(size=ctypes.sizeof(_lib.ErrorStruct))
        self.error_ref = ctypes.byref(self.error)
        self.length = ctypes.c_uint64()
        self.length_ref = ctypes.byref(self.length)
        self.record = _lib.RecordStruct(size=ctypes.sizeof(_lib.RecordStruct))
        self.record_ref = ctypes.byref(self.record)
        self.number = ctypes.c_int64()
        self.number_ref = ctypes.byref(self.number)
        self.result = ctypes.create_string_buffer(_lib.RESULT.size)
        _lib.RESULT.pack_into(self.result, 0, _lib.RESULT.size, 0, 0, 0, 0, 0, 0, 0)
        self.result_at = ctypes.addressof(self.result)
        self.bytes = (ctypes.c_char * _lib.SMALL)()
        self.address = ctypes.addressof(self.bytes)


class Core:
    """A kvd_client. It is closed when its Client is, no call runs and nobody looks at its arena.

    A call takes a Call of `free` and puts it back, a batch when it is freed. So nobody is inside the library once all
    that live are back. An interrupt that comes between two lines may lose one, which then dies.

    Finalizers may come in anywhere, with any lock held. So nothing here waits for a lock: lists and sets are changed
    by single calls, and only `_end` excludes others.
    """

    def __init__(self, options: _lib.Options) -> None:
        error = _lib.ErrorStruct(size=ctypes.sizeof(_lib.ErrorStruct))
        handle = ctypes.c_void_p()
        if _lib.kvd_open(ctypes.byref(options), ctypes.byref(handle), ctypes.byref(error)) != 0:
            raise _errors.from_struct(error)
        self.handle: Optional[int] = handle.value
        self.pid = os.getpid()
        self.free: List[Call] = []
        self.orphans: Deque["Batch"] = collections.deque()  # batches under way for which nobody waits any more
        self.registered: Dict[int, _buffers.Pinned] = {}
        self.seen: Deque[int] = collections.deque()  # views that nobody has ended, nor looks at any more
        self.at_end: List[Callable[[], object]] = []  # called before the arena goes
        self.closed = False
        self._calls: "weakref.WeakSet[Call]" = weakref.WeakSet()
        self._pieces: Set[int] = set()  # of the arena, that somebody looks at
        self._ending = threading.Lock()
        self._again = False

    def take(self) -> Call:
        """Gives a Call of the caller's own until `give`."""
        try:
            call = self.free.pop()
        except IndexError:
            call = Call()
            self._calls.add(call)
        if self.closed:
            self.give(call)
            raise _closed()
        return call

    def give(self, call: Call) -> None:
        """Takes a Call back."""
        self.free.append(call)
        if self.closed:
            self._end()

    def close(self) -> None:
        """Lets nobody begin any more, and waits for batches for which nobody waits."""
        self.closed = True
        if os.getpid() != self.pid:
            self._end_in_child()
            return
        for b in self._taken():
            b.finish()
        self.sweep_views()
        self._end()

    def _taken(self) -> "Iterator[Batch]":
        """Takes the orphans there are now, one after another."""
        for _ in range(len(self.orphans)):
            try:
                yield self.orphans.popleft()
            except IndexError:  # another thread was faster
                return

    def _end(self) -> None:
        """Closes the connection, if that may be. Whoever comes while another tries has that one try again."""
        if os.getpid() != self.pid:
            return
        self._again = True
        while self._again and self._ending.acquire(blocking=False):
            try:
                self._again = False
                self._try_to_end()
            finally:
                self._ending.release()

    def _try_to_end(self) -> None:
        calls: List[Call] = []
        while self.free:
            try:
                calls.append(self.free.pop())
            except IndexError:  # somebody was faster, will find the client closed, and comes here then
                break
        if len(calls) < len(self._calls) or self._pieces or self.handle is None:
            self.free.extend(calls)
            return
        handle, self.handle = self.handle, None
        for end in self.at_end:
            end()
        _lib.kvd_close(handle)
        for pinned in self.registered.values():
            pinned.release()
        self.registered.clear()

    def _end_in_child(self) -> None:
        """Unmaps a forked child's copy, if nobody looks at it."""
        if not self._pieces and self.handle is not None:
            handle, self.handle = self.handle, None
            _lib.kvd_close(handle)

    def sweep(self) -> None:
        """Frees batches for which nobody waits, if they are over by now."""
        _lib.kvd_reap(self.handle)
        for b in self._taken():
            b.end()

    def sweep_views(self) -> None:
        """Releases views that nobody has ended. It asks the broker, so no finalizer does it."""
        while self.seen:
            try:
                view = self.seen.popleft()
            except IndexError:  # another thread was faster
                return
            _lib.kvd_view_release(view, None)
            self._pieces.discard(view)

    def alloc(self, length: int) -> "ctypes.Array[ctypes.c_ubyte]":
        """Takes bytes of the arena. They are given back when nobody looks at them any more."""
        call = self.take()
        try:
            address = ctypes.c_void_p()
            if _lib.kvd_alloc(self.handle, max(length, 1), ctypes.byref(address), call.error_ref) != 0:
                raise _errors.from_struct(call.error)
            at = address.value or 0
            self._pieces.add(at)
            memory = (ctypes.c_ubyte * length).from_address(at)
            weakref.finalize(memory, self._give_back, at).atexit = False
            return memory
        finally:
            self.give(call)

    def _give_back(self, address: int) -> None:
        """Frees a piece of the arena. Operations that use it hold the object that it belongs to, so it is not busy."""
        if os.getpid() != self.pid:
            return
        _lib.kvd_free(self.handle, address)
        self._pieces.discard(address)
        if self.closed:
            self._end()


class Shown:
    """What keeps the bytes of a kvd_view mapped: the view itself, and each part that somebody looks at.

    Nothing here says whether the bytes are the value.
    """

    def __init__(self, core: Core, view: int) -> None:
        self._core, self._view, self._ended = core, view, False
        self._left: List[None] = []  # one for each part that is looked at; a pop is one step
        core._pieces.add(view)

    def memories(self, parts: List[Tuple[int, int]]) -> "List[ctypes.Array[ctypes.c_ubyte]]":
        """Gives the parts, of which there is at least one. Whoever looks at one keeps it."""
        all = [(ctypes.c_ubyte * length).from_address(address) for address, length in parts]
        self._left.extend([None] * len(all))
        for memory in all:
            weakref.finalize(memory, self._leave).atexit = False
        return all

    def end(self, call: Call) -> int:
        """Asks the broker for its verdict, and gives a code."""
        code: int = _lib.kvd_view_end(self._view, call.error_ref)
        self._ended = True
        return code

    def _leave(self) -> None:
        """Counts parts down. The last one lets the memory go."""
        self._left.pop()
        core = self._core
        if self._left or os.getpid() != core.pid:
            return
        if not self._ended:
            core.seen.append(self._view)
            if core.closed:
                core.close()
            return
        _lib.kvd_view_release(self._view, None)  # asks nobody
        core._pieces.discard(self._view)
        if core.closed:
            core._end()


def _closed() -> _errors.Error:
    return _errors.Closed("the client is closed")


class Result:
    """The verdict on an entry of a batch. It is true if the operation succeeded.

    `value` is what `get_many` read, or None; `length` the bytes of the whole value, also with Code.SHORT_BUFFER. It is
    0 where nobody asked for it.
    `version`, `flags` and `expires` (seconds since 1970, or None for never) are the record's.
    """

    __slots__ = ("_raw", "value", "text")

    def __init__(self, raw: Tuple[int, ...], value: Optional[bytes] = None, text: str = "") -> None:
        self._raw = raw
        self.value = value
        self.text = text

    @property
    def outcome(self) -> _errors.Outcome:
        return _errors.OUTCOMES[self._raw[1]]

    @property
    def code(self) -> _errors.Code:
        return _errors.CODES[self._raw[2]]

    @property
    def flags(self) -> int:
        return self._raw[3]

    @property
    def length(self) -> int:
        return self._raw[4]

    @property
    def version(self) -> int:
        return self._raw[5]

    @property
    def expires(self) -> Optional[float]:
        return self._raw[6] / 1000 if self._raw[6] else None

    def __bool__(self) -> bool:
        return self._raw[2] == 0

    def __repr__(self) -> str:
        return f"<kvd.Result {self.code.name} {self.outcome.name} length={self.length} version={self.version}>"

    def error(self) -> Optional[_errors.Error]:
        """Gives the exception that the call of one record would have raised, or None."""
        if self:
            return None
        text = self.text or self.code.name.lower().replace("_", " ")
        return _errors.make(self.code, self.outcome, text, 0, self.length)

    def check(self) -> "Result":
        """Raises `error()` if there is one, and returns the result else."""
        error = self.error()
        if error is not None:
            raise error
        return self


# Numbers of codes whose text tells nothing more, so nobody asks for it.
_SILENT = tuple(int(c) for c in (_errors.Code.OK, _errors.Code.NOT_FOUND, _errors.Code.SHORT_BUFFER))


class Batch:
    """Operations that start together. It holds their memory until each has its verdict, whatever becomes of the caller."""

    __slots__ = ("core", "handle", "n", "_holds", "_call", "__weakref__")

    def __init__(self, core: Core, capacity: int) -> None:
        self.handle = ctypes.c_void_p()  # the library fills it in, so that no interrupt comes in between
        self.core = core
        self.n = 0
        self._holds: List[Any] = []
        self._call: Optional[Call] = core.take()
        if core.orphans:
            core.sweep()
        if _lib.kvd_batch_new(core.handle, capacity, ctypes.byref(self.handle), self._call.error_ref) != 0:
            error = _errors.from_struct(self._call.error)
            self._let_go()
            raise error

    def _added(self, code: int) -> None:
        if code != 0:
            raise _errors.from_struct(self._own().error)
        self.n += 1

    def hold(self, *things: Any) -> None:
        """Keeps what entries point to. It comes before the first of these, as an interrupt may come at any time."""
        self._holds.extend(things)

    def get_all(self, keys: Iterable[bytes], places: Iterable[Tuple[int, int]]) -> None:
        """Adds a GET for each key into an address with a capacity, of memory that is held."""
        error, handle, add = self._own().error_ref, self.handle.value, _lib.kvd_batch_add_get_into
        for key, (address, capacity) in zip(keys, places):
            self._added(add(handle, key, len(key), address, capacity, error))

    def get_range(self, key: bytes, offset: int, address: int, capacity: int) -> None:
        """Adds a GET of a part of a value into memory that is held."""
        call = self._own()
        self._added(
            _lib.kvd_batch_add_get_range(self.handle, key, len(key), offset, address, capacity, call.error_ref)
        )

    def put(self, key: bytes, address: int, length: int, how: Optional[_lib.Write]) -> None:
        """Adds a PUT of memory that is held."""
        call = self._own()
        self._added(_lib.kvd_batch_add_put(self.handle, key, len(key), address, length, how, call.error_ref))

    def delete(self, key: bytes, how: Optional[_lib.Write] = None) -> None:
        """Adds a DELETE."""
        call = self._own()
        self._added(_lib.kvd_batch_add_delete(self.handle, key, len(key), how, call.error_ref))

    def delete_all(self, keys: List[bytes]) -> None:
        """Adds a DELETE for each key."""
        for key in keys:
            self.delete(key)

    def exists(self, key: bytes) -> None:
        """Adds a question whether there is a record."""
        call = self._own()
        self._added(_lib.kvd_batch_add_exists(self.handle, key, len(key), call.error_ref))

    def exists_all(self, keys: List[bytes], lengths: bool = False) -> None:
        """Adds a question for each key, which may ask for the value's length, too."""
        error, handle = self._own().error_ref, self.handle.value
        add = _lib.kvd_batch_add_length if lengths else _lib.kvd_batch_add_exists
        for key in keys:
            self._added(add(handle, key, len(key), error))

    def pin_all(self, keys: List[bytes], ms: int) -> None:
        """Adds a pin for each key."""
        error, handle = self._own().error_ref, self.handle.value
        for key in keys:
            self._added(_lib.kvd_batch_add_pin(handle, key, len(key), ms, error))

    def unpin_all(self, keys: List[bytes]) -> None:
        """Adds the end of pins for each key."""
        error, handle = self._own().error_ref, self.handle.value
        for key in keys:
            self._added(_lib.kvd_batch_add_unpin(handle, key, len(key), error))

    def touch(self, key: bytes, ttl_ms: int) -> None:
        """Adds a new time to live; 0: for ever."""
        call = self._own()
        self._added(_lib.kvd_batch_add_touch(self.handle, key, len(key), ttl_ms, call.error_ref))

    def incr(self, key: bytes, delta: int) -> None:
        """Adds an INCR, whose new number is the last of `raws`."""
        call = self._own()
        self._added(_lib.kvd_batch_add_incr(self.handle, key, len(key), delta, call.error_ref))

    def _own(self) -> Call:
        if self._call is None:
            raise _closed()
        return self._call

    def submit(self) -> None:
        """Starts all entries. An exception says that none was started."""
        call = self._own()
        if _lib.kvd_batch_submit(self.handle, call.error_ref) != 0:
            raise _errors.from_struct(call.error)

    def pending(self) -> int:
        """Tells how many entries have no verdict yet."""
        n: int = _lib.kvd_batch_pending(self.handle)
        return n

    def wait(self) -> None:
        """Waits for all verdicts. Signals are handled meanwhile, and their exceptions leave the batch under way."""
        call = self._own()
        while True:
            code = _lib.kvd_batch_wait(self.handle, SLICE_MS, call.error_ref)
            if code == 0:
                return
            if code != _errors.Code.TIMEOUT:
                raise _errors.from_struct(call.error)

    def raws(self) -> List[Tuple[int, ...]]:
        """Gives the fields of kvd_result of each entry."""
        call, handle, out = self._own(), self.handle.value, []
        get, unpack, result, at, error = (
            _lib.kvd_batch_result, _lib.RESULT.unpack_from, call.result, call.result_at, call.error_ref
        )  # fmt: skip
        for i in range(self.n):
            if get(handle, i, at, error) != 0:
                raise _errors.from_struct(call.error)
            out.append(unpack(result))
        return out

    def results(self) -> List[Result]:
        """Gives the verdicts, in the order of the entries."""
        return [Result(raw, None, "" if raw[2] in _SILENT else self.text(i)) for i, raw in enumerate(self.raws())]

    def text(self, index: int) -> str:
        """Gives the text of an entry that failed."""
        call = self._own()
        _lib.kvd_batch_error(self.handle, index, call.error_ref)
        text: bytes = call.error.text
        return text.decode("utf-8", "replace")

    def cancel(self) -> None:
        """Asks to end entries that have no verdict; each still gets one."""
        if self.handle:
            _lib.kvd_batch_cancel(self.handle, None)

    def end(self) -> None:
        """Frees the batch, or leaves it to the core if it is under way. It may be called again."""
        if not self.handle:
            return
        if os.getpid() != self.core.pid:  # the child's copy of the handle is of no use, and its memory is small
            self.handle.value = None
            return
        if self.pending() != 0:
            self.cancel()
            if self.core.closed:
                self.finish()
            else:
                self.core.orphans.append(self)
            return
        self._free()

    def finish(self) -> None:
        """Waits until the batch is over and frees it; the broker ends each operation in its time."""
        while self.pending() != 0:
            _lib.kvd_batch_wait(self.handle, SLICE_MS, None)
        self._free()

    def _free(self) -> None:
        """Frees a batch that is over. The handle is forgotten first: an interrupt in between must not free it twice."""
        handle, self.handle.value = self.handle.value, None
        _lib.kvd_batch_free(handle)
        self._let_go()

    def _let_go(self) -> None:
        call, self._call = self._call, None
        holds, self._holds = self._holds, []
        for h in holds:
            if isinstance(h, _buffers.Pinned):
                h.release()
        if call is not None:
            self.core.give(call)

    def __del__(self) -> None:
        if self.handle and not sys.is_finalizing():
            self.end()
