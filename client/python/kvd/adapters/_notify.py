"""Descriptors that tell an event loop that something is done."""

from __future__ import annotations

import ctypes
import os
import sys


class Notifier:
    """An eventfd. It is readable from notify on until somebody reads it."""

    def __init__(self) -> None:
        # os.eventfd is there from Python 3.10 on.
        self._fd = int(ctypes.CDLL(None, use_errno=True).eventfd(0, os.O_NONBLOCK | os.O_CLOEXEC))
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
