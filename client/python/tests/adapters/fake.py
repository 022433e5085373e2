"""A store in memory that fails as a real one may, and worse, and that keeps account of it."""

import collections
import mmap
import os
import random
import threading

from kvd.adapters import _store as codes

# How many loads each adapter goes through; 1,000,000 in the long test.
LOADS = int(os.environ.get("KVD_ADAPTER_LOADS", "10000"))

TIMEOUT, UNAVAILABLE, DENIED, FULL, CORRUPT, STALE, BUSY, UNSUPPORTED = 6, 8, 9, 10, 11, 13, 15, 19


class Verdict:
    def __init__(self, outcome=codes.YES, code=codes.OK, length=0):
        self.outcome, self.code, self.length = outcome, code, length


class Gone(Exception):
    """What a client raises when the broker went away before the batch began."""

    code, outcome = UNAVAILABLE, codes.NO


class Faults:
    """Decides by chance what fails. rate is the part of keys, and a tenth of it that of batches."""

    def __init__(self, seed, rate):
        self.random, self.rate = random.Random(seed), rate

    def key(self, choices):
        return self.random.choice(choices) if self.random.random() < self.rate else ""

    def batch(self, choices):
        return self.random.choice(choices) if self.random.random() < self.rate / 10 else ""


class FakeStore:
    """Keeps values by key. told has how many verdicts of each kind it gave, by call, as adapters should count them."""

    def __init__(self, faults=None):
        self.values, self.pinned = {}, set()
        self.faults = faults or Faults(0, 0)
        self.told = collections.Counter()
        self.registered = []
        self.closed = False
        self.lock = threading.RLock()
        self.gate = threading.Event()  # calls wait while it is not set
        self.gate.set()
        self.calls = collections.Counter()

    # ---- What happens to it ----

    def evict(self, key):
        if key not in self.pinned:
            self.values.pop(key, None)

    def restart(self):
        """Loses everything, pins too."""
        with self.lock:
            self.values.clear()
            self.pinned.clear()

    def lapse(self):
        """Ends all pins."""
        with self.lock:
            self.pinned.clear()

    # ---- Calls ----

    def _begin(self, what, keys):
        self.gate.wait()
        self.calls[what] += 1
        assert all(isinstance(key, bytes) and 1 <= len(key) <= 1024 for key in keys), keys
        fault = self.faults.batch(("raise", "restart", "short"))
        if fault == "restart":
            self.restart()
        if fault == "raise":
            self.told["%s.unavailable" % what] += len(keys)
            raise Gone("the broker is gone")
        return fault == "short"

    def _end(self, what, verdicts, short, names):
        """Leaves a verdict out, so that nobody knows which it was."""
        if short and verdicts:
            self.told["%s.%s" % (what, "protocol" if what != "put" else "unknown")] += len(verdicts)
            return verdicts[:-1]
        for name in names:
            self.told["%s.%s" % (what, name)] += 1
        return verdicts

    def get_many(self, keys, into):
        assert len(keys) == len(into)
        with self.lock:
            short = self._begin("load", keys)
            verdicts, names = [], []
            for key, buffer in zip(keys, into):
                verdict, name = self._get(key, buffer)
                verdicts.append(verdict)
                names.append(name)
            return self._end("load", verdicts, short, names)

    def _get(self, key, buffer):
        fault = self.faults.key(("evict", "timeout", "corrupt", "stale", "partial", "lie", "maybe"))
        if fault == "evict":
            self.evict(key)
        if key not in self.values:
            return Verdict(codes.NO, codes.NOT_FOUND), "not_found"
        value = self.values[key]
        if fault in ("timeout", "corrupt", "stale", "lie", "maybe"):
            half = len(buffer) // 2
            buffer[:half] = bytes(value[:half]).ljust(half, b"?")  # a broken promise: something was written
        if fault == "timeout":
            return Verdict(codes.NO, TIMEOUT), "timeout"
        if fault == "corrupt":
            return Verdict(codes.NO, CORRUPT), "corrupt"
        if fault == "stale":
            return Verdict(codes.NO, STALE), "stale"
        if fault == "lie":
            return Verdict(codes.NO, codes.OK, len(value)), "protocol"
        if fault == "maybe":
            return Verdict(codes.UNKNOWN, codes.OK, len(value)), "unknown"
        if fault == "partial":
            value = value[:-1]
        if len(value) > len(buffer):
            return Verdict(codes.NO, 4, len(value)), "short_buffer"
        buffer[:len(value)] = value
        return Verdict(length=len(value)), "ok" if len(value) == len(buffer) else "length"

    def put_many(self, items):
        with self.lock:
            short = self._begin("put", [key for key, _ in items])
            verdicts, names = [], []
            for key, value in items:
                fault = self.faults.key(("full", "lost", "done", "partial"))
                if fault in ("", "done"):
                    self.values[key] = bytes(value)
                if fault == "partial":
                    self.values[key] = bytes(value)[:-1]  # another layout's, which must never be taken for this one
                unsure = fault in ("lost", "done")
                verdicts.append(Verdict(codes.NO, FULL) if fault == "full" else
                                Verdict(codes.UNKNOWN, TIMEOUT) if unsure else Verdict())
                names.append("full" if fault == "full" else "unknown" if unsure else "ok")
            return self._end("put", verdicts, short, names)

    def exists_many(self, keys, *, lengths=False):
        with self.lock:
            short = self._begin("exists", keys)
            verdicts, names = [], []
            for key in keys:
                if self.faults.key(("timeout",)):
                    verdicts.append(Verdict(codes.NO, TIMEOUT))
                    names.append("timeout")
                elif key in self.values:
                    verdicts.append(Verdict(length=len(self.values[key]) if lengths else 0))
                    names.append("ok")
                else:
                    verdicts.append(Verdict(codes.NO, codes.NOT_FOUND))
                    names.append("not_found")
            return self._end("exists", verdicts, short, names)

    def exists_prefix(self, keys):
        with self.lock:
            if self._begin("exists", keys):
                return len(keys) + 1  # nonsense
            n = 0
            while n < len(keys) and keys[n] in self.values:
                n += 1
            return n

    def delete_many(self, keys):
        with self.lock:
            short = self._begin("delete", keys)
            verdicts, names = [], []
            for key in keys:
                there = self.values.pop(key, None) is not None
                verdicts.append(Verdict() if there else Verdict(codes.NO, codes.NOT_FOUND))
                names.append("ok" if there else "not_found")
            return self._end("delete", verdicts, short, names)

    def delete_prefix(self, prefix):
        with self.lock:
            for key in [key for key in self.values if key.startswith(prefix)]:
                del self.values[key]

    def pin_many(self, keys, seconds):
        assert 0 < seconds <= 4200
        with self.lock:
            return self._hint("pin", keys, self.pinned.add)

    def unpin_many(self, keys):
        with self.lock:
            return self._hint("unpin", keys, self.pinned.discard)

    def _hint(self, what, keys, act):
        short = self._begin(what, keys)
        verdicts, names = [], []
        for key in keys:
            fault = "not_found" if key not in self.values else self.faults.key(("timeout", "busy", "unknown", "lost"))
            verdict = {"not_found": (codes.NO, codes.NOT_FOUND), "timeout": (codes.NO, TIMEOUT),
                       "busy": (codes.NO, BUSY), "unknown": (codes.UNKNOWN, TIMEOUT)}.get(fault, ())
            if not fault:  # a pin that is lost is said to be one
                act(key)
            verdicts.append(Verdict(*verdict))
            names.append(fault if verdict else "ok")
        return self._end(what, verdicts, short, names)

    def register(self, fd, buffer, *, offset):
        size = memoryview(buffer).nbytes
        assert offset % mmap.PAGESIZE == size % mmap.PAGESIZE == 0 and offset + size <= os.fstat(fd).st_size
        self.registered.append((os.pread(fd, 8, offset), bytes(buffer[:8]), size))

    def close(self):
        self.closed = True


def failed(counters, what):
    """How many failures an adapter has counted."""
    return sum(n for name, n in counters.snapshot().items() if name.startswith(what + ".") and name != what + ".ok")


def check_counts(test, counters, store):
    """Compares what the adapter has counted of loads and pins with what the store has told, verdict by verdict."""
    kinds = ("load.", "pin.", "unpin.")
    counted = {name: n for name, n in counters.snapshot().items() if name.startswith(kinds)}
    told = {name: n for name, n in store.told.items() if name.startswith(kinds) and n}
    test.assertEqual(counted, told)
