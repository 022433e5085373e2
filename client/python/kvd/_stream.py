"""Puts of values that come piece by piece, and are never here as a whole."""

from __future__ import annotations

import ctypes
import operator
from typing import Any, Iterable, Iterator, Optional, Union

from . import _errors, _lib
from ._buffers import Buffer, Pinned
from ._core import Core

PIECE = 1 << 20  # bytes that are read from a file at a time


def put_from(core: Core, key: bytes, source: Any, length: int, how: Optional[_lib.Write]) -> int:
    """Puts the `length` bytes that source gives, and returns the record's version."""
    n = operator.index(length)
    if not 0 <= n < 1 << 64:
        raise ValueError(f"a length of {n} bytes")
    pieces = _read(source, n) if hasattr(source, "read") else iter(source)
    call = core.take()
    stream = ctypes.c_void_p()
    try:
        if _lib.kvd_put_new(core.handle, key, len(key), n, how, ctypes.byref(stream), call.error_ref) != 0:
            raise _errors.from_struct(call.error)
        left = n
        for piece in pieces:
            pinned = Pinned(piece, False)
            try:
                if pinned.length > left:
                    raise ValueError(f"the source has more than the {n} bytes that it was said to have")
                if _lib.kvd_put_write(stream, pinned.address, pinned.length, call.error_ref) != 0:
                    raise _errors.from_struct(call.error)
                left -= pinned.length
            finally:
                pinned.release()
        if left:
            raise ValueError(f"the source has {n - left} of the {n} bytes that it was said to have")
        if _lib.kvd_put_commit(stream, call.record_ref, call.error_ref) != 0:
            raise _errors.from_struct(call.error)
        return int(call.record.version)
    finally:
        _lib.kvd_put_free(stream)  # without a commit nothing is stored
        core.give(call)


def _read(file: Any, n: int) -> Iterator[Union[bytes, memoryview]]:
    """Gives what a file has, n bytes at most; what is behind them stays unread."""
    into = getattr(file, "readinto", None)
    memory = memoryview(bytearray(min(n, PIECE))) if into is not None else memoryview(b"")
    while n > 0:
        piece: Union[bytes, memoryview]
        if into is not None:
            got = into(memory[: min(n, PIECE)])
            if got is None:
                raise BlockingIOError("the file has no bytes at the moment, and does not wait")
            piece = memory[:got]
        else:
            piece = file.read(min(n, PIECE))
            if isinstance(piece, str):
                raise TypeError("the file is one of text")
        if len(piece) == 0:
            return
        n -= len(piece)
        yield piece


Source = Union[Iterable[Buffer], Any]
"""An object with `readinto` or `read`, as files have, or an iterable of pieces."""
