"""A thread that does an adapter's work, so that its callers need not wait."""

from __future__ import annotations

import collections
import threading
from typing import Any, Callable, Deque


class Worker:
    """Runs jobs one after the other in a thread of its own.

    run(job) must not raise. abandon(job) is called instead for jobs that have not begun when the worker is closed: each
    job that was submitted gets one of both. Safe for threads.
    """

    def __init__(self, name: str, run: Callable[[Any], None], abandon: Callable[[Any], None]) -> None:
        self._run, self._abandon = run, abandon
        self._changed = threading.Condition()
        self._jobs: Deque[Any] = collections.deque()
        self._running = False
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Any) -> None:
        """Hands over a job, without waiting for it."""
        with self._changed:
            if not self._closed:
                self._jobs.append(job)
                self._changed.notify_all()
                return
        self._abandon(job)

    def wait_idle(self) -> None:
        """Waits until all jobs so far are done."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs and not self._running)

    def close(self) -> None:
        """Waits for the job that runs, abandons the others, and ends the thread. It may be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job, closed = self._jobs.popleft(), self._closed
                self._running = True
            try:
                (self._abandon if closed else self._run)(job)
            finally:
                with self._changed:
                    self._running = False
                    self._changed.notify_all()
