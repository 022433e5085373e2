"""Memory of the servers: its bytes, and the file that it is of."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from typing import Any, Optional, Tuple

from ._store import Store


def bytes_of(buffer: Any) -> memoryview:
    """Returns a buffer as a row of bytes. It raises TypeError or ValueError if it is none."""
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


@functools.lru_cache(maxsize=None)
def _array_of(size: int) -> Any:
    return ctypes.c_ubyte * size  # ctypes never frees such a type, so each is made once


def memory_at(address: int, size: int) -> memoryview:
    """Returns the bytes at an address, which its owner must keep. ValueError: that cannot be memory."""
    if address <= 0 or size <= 0:
        raise ValueError(f"{size} bytes at address {address}")
    return memoryview(_array_of(size).from_address(address)).cast("B")


def register(store: Store, memory: memoryview) -> Any:
    """Lets values move straight to and from memory, which must be of a file that the process has mapped, shared.

    It raises whatever the reason is why that cannot be. The pages that are not all within the memory are left out.
    """
    start = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (start + len(memory)) // mmap.PAGESIZE * mmap.PAGESIZE
    fd, offset = _file_of(first, end)
    try:
        return store.register(fd, memory_at(first, end - first), offset=offset)
    finally:
        os.close(fd)


def _file_of(first: int, end: int) -> Tuple[int, int]:
    """Returns a descriptor of the file that is mapped from one address to another, and the offset of the first."""
    if first >= end:
        raise ValueError("it has no whole page")
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            where, mode, offset, device, inode, *path = line.rstrip("\n").split(maxsplit=5)
            low, high = (int(part, 16) for part in where.split("-"))
            if not low <= first < high:
                continue
            if end > high:
                raise ValueError("it is of several mappings")
            if "s" not in mode or int(inode) == 0:
                raise ValueError("it is not of a file that is mapped as shared")
            fd = _open(device, int(inode), path[0] if path else "")
            if fd is None:
                raise ValueError("its file has no descriptor and no name")
            return fd, int(offset, 16) + first - low
    raise ValueError("it is not mapped")


def _open(device: str, inode: int, path: str) -> Optional[int]:
    """Opens a file by a descriptor that the process has, or by its name. None: it is another file by now, or gone."""
    want = (tuple(int(part, 16) for part in device.split(":")), inode)
    for name in [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")] + [path]:
        try:
            fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK) if _is(os.stat(name), want) else None
        except OSError:
            continue
        if fd is not None:
            if _is(os.fstat(fd), want):
                return fd
            os.close(fd)
    return None


def _is(status: os.stat_result, want: Any) -> bool:
    return bool(((os.major(status.st_dev), os.minor(status.st_dev)), status.st_ino) == want)
