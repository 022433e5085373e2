"""libkvd as ctypes sees it: structs, functions, and where the library lies.

Functions of `wait` may wait for the broker, so they run without the GIL. Functions of `quick` look at memory only
and keep the GIL: a thread that computes could otherwise hold up each of them for a switch interval.
"""

from __future__ import annotations

import ctypes
import os
import struct
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any, List, Tuple

ABI = 1
MAX_KEY = 1024  # bytes
SMALL = 1024  # bytes of a value that always go by the ring when they are read

NO_ARENA = 1

IF_ABSENT = 1
IF_PRESENT = 2
IF_VERSION = 4


class ErrorStruct(ctypes.Structure):
    """kvd_error."""

    _fields_ = [
        ("size", c_uint32),
        ("outcome", c_int32),
        ("code", c_int32),
        ("os_error", c_int32),
        ("text", ctypes.c_char * 240),
    ]


class Options(ctypes.Structure):
    """kvd_options."""

    _fields_ = [
        ("size", c_uint32),
        ("flags", c_uint32),
        ("path", c_char_p),
        ("namespace_name", c_char_p),
        ("secret", c_char_p),
        ("secret_bytes", c_uint64),
        ("program", c_char_p),
        ("arena_bytes", c_uint64),
        ("queues", c_uint32),
        ("depth", c_uint32),
        ("timeout_ms", c_uint32),
        ("dial_ms", c_uint32),
    ]


class RecordStruct(ctypes.Structure):
    """kvd_record."""

    _fields_ = [
        ("size", c_uint32),
        ("flags", c_uint32),
        ("length", c_uint64),
        ("version", c_uint64),
        ("expires_ms", c_uint64),
    ]


class Write(ctypes.Structure):
    """kvd_write."""

    _fields_ = [
        ("size", c_uint32),
        ("condition", c_uint32),
        ("version", c_uint64),
        ("ttl_ms", c_uint64),
        ("flags", c_uint32),
        ("timeout_ms", c_uint32),
    ]


class Part(ctypes.Structure):
    """kvd_part."""

    _fields_ = [("address", c_void_p), ("length", c_uint64)]


# kvd_result: size, outcome, code, flags, length, version, expires_ms, number. One unpack is faster than eight fields.
RESULT = struct.Struct("=IiiIQQQq")


def _find() -> str:
    """Gives the library: that of KVD_LIBRARY, else the one inside the package, else the system's."""
    given = os.environ.get("KVD_LIBRARY")
    if given:
        return given
    inside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libkvd.so")
    return inside if os.path.exists(inside) else "libkvd.so.0"


path = _find()
try:
    wait = ctypes.CDLL(path)
    quick = ctypes.PyDLL(path)
except OSError as e:
    raise ImportError(
        f"kvd needs the library libkvd: {e}. Install the wheel or Debian's libkvd0, or name it in KVD_LIBRARY."
    ) from e

quick.kvd_abi.restype = c_uint32
if quick.kvd_abi() != ABI:
    raise ImportError(f"{path} has interface {quick.kvd_abi()}, and this package wants {ABI}")
quick.kvd_version.restype = c_char_p

_error = POINTER(ErrorStruct)
_record = POINTER(RecordStruct)
_how = POINTER(Write)
_length = POINTER(c_uint64)
_client = c_void_p
_batch = c_void_p
_key: Tuple[Any, Any] = (c_char_p, c_uint64)  # ctypes gives the address of a bytes object, which keeps it alive


def _declare(library: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Types a function of the library and returns it."""
    function = getattr(library, name)
    function.restype = result
    function.argtypes = list(arguments)
    return function


kvd_open = _declare(wait, "kvd_open", c_int, POINTER(Options), POINTER(c_void_p), _error)
kvd_close = _declare(wait, "kvd_close", c_int, _client)
kvd_generation = _declare(quick, "kvd_generation", c_uint64, _client)
kvd_max_value = _declare(wait, "kvd_max_value", c_uint64, _client)

kvd_alloc = _declare(wait, "kvd_alloc", c_int, _client, c_uint64, POINTER(c_void_p), _error)
kvd_free = _declare(wait, "kvd_free", c_int, _client, c_void_p)
kvd_arena = _declare(wait, "kvd_arena", c_int, _client, POINTER(c_void_p), _length, _error)
kvd_register = _declare(wait, "kvd_register", c_int, _client, c_int, c_uint64, c_uint64, c_void_p, _error)
kvd_deregister = _declare(wait, "kvd_deregister", c_int, _client, c_void_p, _error)

kvd_get_into = _declare(wait, "kvd_get_into", c_int, _client, *_key, c_void_p, c_uint64, _length, _record, _error)
kvd_get_range = _declare(
    wait, "kvd_get_range", c_int, _client, *_key, c_uint64, c_void_p, c_uint64, _length, _record, _error
)
kvd_put_if = _declare(wait, "kvd_put_if", c_int, _client, *_key, c_void_p, c_uint64, _how, _record, _error)
kvd_put_new = _declare(wait, "kvd_put_new", c_int, _client, *_key, c_uint64, _how, POINTER(c_void_p), _error)
kvd_put_write = _declare(wait, "kvd_put_write", c_int, c_void_p, c_void_p, c_uint64, _error)
kvd_put_commit = _declare(wait, "kvd_put_commit", c_int, c_void_p, _record, _error)
kvd_put_free = _declare(wait, "kvd_put_free", c_int, c_void_p)
kvd_delete_if = _declare(wait, "kvd_delete_if", c_int, _client, *_key, _how, _error)
kvd_incr = _declare(wait, "kvd_incr", c_int, _client, *_key, c_int64, POINTER(c_int64), _record, _error)
kvd_touch = _declare(wait, "kvd_touch", c_int, _client, *_key, c_uint64, _record, _error)
kvd_exists = _declare(wait, "kvd_exists", c_int, _client, *_key, _record, _error)
kvd_view = _declare(wait, "kvd_view", c_int, _client, *_key, c_uint32, POINTER(c_void_p), _record, _error)
kvd_view_parts = _declare(quick, "kvd_view_parts", c_int, c_void_p, POINTER(POINTER(Part)), _length, _error)
kvd_view_end = _declare(wait, "kvd_view_end", c_int, c_void_p, _error)
kvd_view_release = _declare(wait, "kvd_view_release", c_int, c_void_p, _error)
kvd_pin = _declare(wait, "kvd_pin", c_int, _client, *_key, c_uint64, _error)
kvd_unpin = _declare(wait, "kvd_unpin", c_int, _client, *_key, _error)
kvd_exists_prefix = _declare(
    wait, "kvd_exists_prefix", c_int, _client, POINTER(c_char_p), _length, c_uint64, _length, _error
)
kvd_scan_next = _declare(wait, "kvd_scan_next", c_int, _client, *_key, _length, c_void_p, c_uint64, _length, _error)
kvd_delete_prefix = _declare(wait, "kvd_delete_prefix", c_int, _client, *_key, _length, _error)

kvd_batch_new = _declare(quick, "kvd_batch_new", c_int, _client, c_uint32, POINTER(c_void_p), _error)
kvd_batch_add_get_into = _declare(
    quick, "kvd_batch_add_get_into", c_int, _batch, *_key, c_void_p, c_uint64, _error
)
kvd_batch_add_get_range = _declare(
    quick, "kvd_batch_add_get_range", c_int, _batch, *_key, c_uint64, c_void_p, c_uint64, _error
)
kvd_batch_add_put = _declare(quick, "kvd_batch_add_put", c_int, _batch, *_key, c_void_p, c_uint64, _how, _error)
kvd_batch_add_delete = _declare(quick, "kvd_batch_add_delete", c_int, _batch, *_key, _how, _error)
kvd_batch_add_incr = _declare(quick, "kvd_batch_add_incr", c_int, _batch, *_key, c_int64, _error)
kvd_batch_add_touch = _declare(quick, "kvd_batch_add_touch", c_int, _batch, *_key, c_uint64, _error)
kvd_batch_add_exists = _declare(quick, "kvd_batch_add_exists", c_int, _batch, *_key, _error)
kvd_batch_add_length = _declare(quick, "kvd_batch_add_length", c_int, _batch, *_key, _error)
kvd_batch_add_pin = _declare(quick, "kvd_batch_add_pin", c_int, _batch, *_key, c_uint64, _error)
kvd_batch_add_unpin = _declare(quick, "kvd_batch_add_unpin", c_int, _batch, *_key, _error)
kvd_batch_submit = _declare(wait, "kvd_batch_submit", c_int, _batch, _error)
kvd_batch_pending = _declare(quick, "kvd_batch_pending", c_uint32, _batch)
kvd_batch_wait = _declare(wait, "kvd_batch_wait", c_int, _batch, c_int64, _error)
kvd_batch_result = _declare(quick, "kvd_batch_result", c_int, _batch, c_uint32, c_void_p, _error)
kvd_batch_error = _declare(quick, "kvd_batch_error", c_int, _batch, c_uint32, _error)
kvd_batch_cancel = _declare(wait, "kvd_batch_cancel", c_int, _batch, _error)
kvd_batch_free = _declare(quick, "kvd_batch_free", c_int, _batch)

kvd_fd = _declare(quick, "kvd_fd", c_int, _client)
kvd_arm = _declare(wait, "kvd_arm", c_int, _client)
kvd_reap = _declare(wait, "kvd_reap", c_int64, _client)

# The calls that move a value, in the arena or not, for tests that every name is there.
names: List[str] = [n for n in dir() if n.startswith("kvd_")]
