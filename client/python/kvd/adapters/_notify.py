"""Descriptors that tell an event loop that something is done."""

from __future__ import annotations

import ctypes
import os
import sys

_NONBLOCK, _CLOEXEC = 0o4000, 0o2000000


class Notifier:
    """An eventfd. It is readable from notify on until somebody reads it."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:  # Python 3.9
            self._fd = ctypes.CDLL(None, use_errno=True).eventfd(0, _NONBLOCK | _CLOEXEC)
            if self._fd < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def fileno(self) -> int:
        """Returns the descriptor, which stays the notifier's. -1 after close."""
        return self._fd

    def notify(self) -> None:
        """Makes the descriptor readable."""
        try:
            os.write(self._fd, (1).to_bytes(8, sys.byteorder))
        except BlockingIOError:
            pass  # the count is at its end, so the descriptor is readable

    def close(self) -> None:
        """Closes the descriptor."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
