"""Memory of Python objects, held still while the library uses it."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Optional, Union

PyBUF_SIMPLE = 0
PyBUF_WRITABLE = 1


class _PyBuffer(ctypes.Structure):
    """Py_buffer of CPython, which has been the same since 3.0."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


# Prototypes of our own: attributes of ctypes.pythonapi are shared with everybody else in the process.
_get_buffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release = ctypes.PYFUNCTYPE(None, ctypes.POINTER(_PyBuffer))(("PyBuffer_Release", ctypes.pythonapi))
_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)

Buffer = Union[bytes, bytearray, memoryview, Any]
"""Contiguous memory: an object with the buffer protocol, as numpy arrays are, or a torch tensor on the CPU."""


class Pinned:
    """The memory of an object: `address` and `length` in bytes.

    The object cannot go or change its size before `release`, which the end of this one calls, too.
    """

    __slots__ = ("address", "length", "_view", "_tensor")

    def __init__(self, thing: Buffer, writable: bool) -> None:
        self._view: Optional[_PyBuffer] = None
        self._tensor: Any = None
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(thing, torch.Tensor):
            self.address, self.length = _of_tensor(torch, thing)
            self._tensor = thing
            return
        view = _PyBuffer()
        try:
            _get_buffer(thing, view, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        except ValueError as e:  # as numpy says it
            raise BufferError(str(e)) from e
        self._view = view
        self.address = view.buf or 0
        self.length = view.len

    def release(self) -> None:
        """Lets the object go. It may be called again."""
        view, self._view, self._tensor = self._view, None, None
        if view is not None:
            _release(view)

    def __del__(self) -> None:
        if self._view is not None:
            self.release()


def _of_tensor(torch: Any, t: Any) -> "tuple[int, int]":
    """Gives address and bytes of a tensor, if they are all of it and nothing else."""
    if t.device.type != "cpu":
        raise BufferError(f"the tensor is on {t.device}: kvd.torch copies to devices")
    if t.layout != torch.strided or not t.is_contiguous() or t.is_conj() or t.is_neg():
        raise BufferError("the tensor is not contiguous")
    return t.data_ptr(), t.numel() * t.element_size()


def new_bytes(length: int) -> bytes:
    """Gives a bytes object whose content is not set yet. Nobody else may see it before it is.

    CPython keeps single objects for lengths 0 and 1, so it has 2 bytes or more.
    """
    if length < 2:
        raise ValueError("too short for bytes that are filled in later")
    if length > sys.maxsize:
        raise MemoryError(f"a value of {length} bytes")
    made: bytes = _new_bytes(None, length)
    return made
