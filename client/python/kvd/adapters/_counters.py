"""Counters of an adapter."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Dict

_SECONDS_BETWEEN = 5.0

_last_said = [float("-inf")]


def complain(log: logging.Logger, text: str, *args: Any) -> None:
    """Logs a warning, unless there was one a moment ago: a store that is away fails each call."""
    now = time.monotonic()
    if now - _last_said[0] >= _SECONDS_BETWEEN:
        _last_said[0] = now
        log.warning(text, *args)


class Counters:
    """Counts events by name, such as load.ok, load.not_found and store.unknown. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Dict[str, int] = {}

    def add(self, name: str, n: int = 1) -> None:
        """Counts n events."""
        if n:
            with self._lock:
                self._counts[name] = self._counts.get(name, 0) + n

    def snapshot(self) -> Dict[str, int]:
        """Returns all counts so far."""
        with self._lock:
            return dict(self._counts)
