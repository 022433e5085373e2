"""A value that is looked at where it is."""

from __future__ import annotations

import ctypes
import struct
from types import TracebackType
from typing import Any, List, Optional, Type

from . import _errors, _lib
from ._core import Call, Core, Shown

_RECORD = struct.Struct("=IIQQQ")


class View:
    """One version of a value, in memory of the store. It is a context manager, for one thread at a time.

        with client.get_view("weights") as view:
            total = view.numpy("float32").sum()
        use(total)

    Use what it shows inside of the `with`, and believe what came of that behind it. At its end, unless that comes by
    another exception, ViewExpired is raised if the bytes were not the value all the time: throw `total` away then.
    Other errors of a release mean the same. Writing to the key meanwhile changes nothing.

    Parts and arrays may outlive the view. They can be read then, but are anything. To write to one is an error.

    `length` is in bytes, `expires` in seconds since 1970 or None for never; `version` and `flags` are the record's.
    """

    def __init__(self, core: Core, key: bytes, hold_ms: int) -> None:
        self._shown: Optional[Shown] = None
        self._call: Optional[Call] = None
        self._failed: Optional[_errors.Error] = None
        core.sweep_views()
        self._core = core
        call = core.take()
        try:
            view = ctypes.c_void_p()
            code = _lib.kvd_view(
                core.handle, key, len(key), hold_ms, ctypes.byref(view), call.record_ref, call.error_ref
            )
            if code != 0:
                raise _errors.from_struct(call.error)
            at = view.value or 0
            parts, n = ctypes.POINTER(_lib.Part)(), call.length
            if _lib.kvd_view_parts(at, ctypes.byref(parts), call.length_ref, call.error_ref) != 0:
                error = _errors.from_struct(call.error)
                _lib.kvd_view_release(at, None)
                raise error
            self._shown = Shown(core, at)
            self._memories = self._shown.memories([(parts[i].address, parts[i].length) for i in range(n.value)])
            _, self.flags, self.length, self.version, expires = _RECORD.unpack_from(call.record)
            self.expires: Optional[float] = expires / 1000 if expires else None
            self._call = call
        finally:
            if self._call is None:
                core.give(call)

    @property
    def parts(self) -> List[memoryview]:
        """The bytes, in order: a read-only memoryview, or several of 2 MiB and a shorter one."""
        if self._shown is None:
            raise _errors.Closed("the view is released")
        return [memoryview(m).toreadonly().cast("B") for m in self._memories]

    def numpy(self, dtype: Any = "uint8") -> Any:
        """Gives a read-only array of numpy on the bytes, of one dimension. ValueError: they lie in several parts."""
        import numpy

        parts = self.parts
        if len(parts) != 1:
            raise ValueError(f"the value lies in {len(parts)} parts: use `parts`")
        return numpy.frombuffer(parts[0], dtype)

    def release(self) -> None:
        """Ends the view, and raises ViewExpired if what was read may not be the value. Later calls do the same."""
        shown, self._shown = self._shown, None
        call, self._call = self._call, None
        if shown is not None and call is not None:
            try:
                if shown.end(call) != 0:
                    self._failed = _errors.from_struct(call.error)
            finally:
                self._memories.clear()
                self._core.give(call)
        if self._failed is not None:
            raise self._failed

    def __enter__(self) -> "View":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], e: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        try:
            self.release()
        except _errors.Error:
            if e is None:
                raise

    def __repr__(self) -> str:
        return f"<kvd.View length={self.length} version={self.version}>"
