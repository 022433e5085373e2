"""The part of kvd.Client that the adapters need, and how they come by one."""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, Optional, Protocol, Sequence, Tuple

# Whether an operation happened.
YES, NO, UNKNOWN = 0, 1, 2

# Codes that the adapters tell apart.
OK, NOT_FOUND, UNAVAILABLE, DENIED, BUSY, UNSUPPORTED = 0, 1, 8, 9, 15, 19

# What counters call the codes, by their numbers.
CODE_NAMES = (
    "ok", "not_found", "condition", "too_large", "short_buffer", "wrong_type", "timeout", "cancelled", "unavailable",
    "denied", "full", "corrupt", "argument", "stale", "forked", "busy", "view_expired", "protocol", "closed",
    "unsupported", "internal", "system",
)


def code_name(code: Any) -> str:
    """Returns what counters call a code."""
    try:
        number = int(code)
    except (TypeError, ValueError):
        return "exception"
    return CODE_NAMES[number] if 0 <= number < len(CODE_NAMES) else "code_%d" % number


class Verdict(Protocol):
    """What became of one key of a batch."""

    @property
    def outcome(self) -> int:
        """YES, NO or UNKNOWN."""

    @property
    def code(self) -> int:
        """OK, or why not."""

    @property
    def length(self) -> int:
        """Bytes of the record's value, of a read, and of exists if it was asked for lengths."""


class Store(Protocol):
    """The calls of kvd.Client that the adapters make. Each gives a verdict per key, in the order of the keys.

    A client that has delete_prefix(prefix), too, can be cleared. The calls wait, for the client's timeout at most, and
    may be made from any thread. They raise if none of the batch was started.
    """

    def get_many(self, keys: Sequence[bytes], into: Sequence[Any]) -> Sequence[Verdict]:
        """Reads values into writable buffers."""

    def put_many(self, items: Sequence[Tuple[bytes, Any]]) -> Sequence[Verdict]:
        """Writes keys with their values."""

    def exists_many(self, keys: Sequence[bytes], *, lengths: bool = False) -> Sequence[Verdict]:
        """Tells which keys there are, and the lengths of their values if they are asked for. It moves no value."""

    def exists_prefix(self, keys: Sequence[bytes]) -> int:
        """Tells how many keys there are from the first on, without a gap."""

    def pin_many(self, keys: Sequence[bytes], seconds: float) -> Sequence[Verdict]:
        """Has eviction pass over keys for a time, and tells which of them there are. UNSUPPORTED: this store cannot."""

    def unpin_many(self, keys: Sequence[bytes]) -> Sequence[Verdict]:
        """Ends pins."""

    def delete_many(self, keys: Sequence[bytes]) -> Sequence[Verdict]:
        """Deletes keys."""

    def register(self, fd: int, buffer: Any, *, offset: int) -> Any:
        """Lets values move straight to and from a buffer, where a file is mapped from an offset on."""

    def close(self) -> None:
        """Ends the connection."""


class Away(Exception):
    """There is no connection to a broker, and it is too early to try again."""

    code = UNAVAILABLE
    outcome = NO


class Opener:
    """Opens the store when it is first used, so that a server starts without one.

    After an attempt that failed it answers Away for a while instead of making each caller wait. Safe for threads.
    """

    def __init__(self, connect: Callable[[], Store], retry_seconds: float = 1.0,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._connect, self._retry, self._clock = connect, retry_seconds, clock
        self._lock = threading.Lock()
        self._store: Optional[Store] = None
        self._not_before = clock()
        self._closed = False
        self._opened: Optional[Callable[[Store], None]] = None

    def on_open(self, opened: Callable[[Store], None]) -> None:
        """Has opened called with each store that is opened from now on, and with the one that is open."""
        with self._lock:
            self._opened = opened
            if self._store is not None:
                opened(self._store)

    def store(self) -> Store:
        """Returns the store. It raises Away, or what opening the store raised."""
        with self._lock:
            if self._store is None:
                if self._closed or self._clock() < self._not_before:
                    raise Away("no connection to a broker")
                try:
                    self._store = self._connect()
                except Exception:
                    self._not_before = self._clock() + self._retry
                    raise
                if self._opened is not None:
                    self._opened(self._store)
            return self._store

    def close(self) -> None:
        """Ends the connection, for good."""
        with self._lock:
            self._closed = True
            store, self._store = self._store, None
        if store is not None:
            store.close()


def connect(path: Optional[str], namespace: Optional[str]) -> Store:
    """Opens a client of the broker at a socket; None is the default of kvd.Client. It raises what that raises."""
    import kvd  # here, so that the adapters can be imported, and tested, without the library

    return kvd.Client(path, namespace)
