"""Blocks in a store, by the rules that all adapters keep.

A load is a success only if the store says so of the whole block. Whatever else comes back, an exception included, is a
miss, and is counted. Bytes of a load that failed belong to nobody.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

from ._counters import Counters, complain
from ._store import BUSY, DENIED, NO, NOT_FOUND, OK, UNKNOWN, UNSUPPORTED, YES, Opener, Store, code_name

log = logging.getLogger("kvd.adapters")

# What became of a block that was to be stored: it was written, it was there, it was not written, or nobody knows.
SAVED, PRESENT, FAILED, UNSURE = range(4)

BATCH = 1024  # keys of one call

MAX_PIN_SECONDS = 70 * 60  # what a store takes

# Codes of a store that answers, and does not pin.
_NO_PINS = (BUSY, DENIED, UNSUPPORTED)


class _Verdict:
    """The verdict on a key that the store gave none on."""

    def __init__(self, name: str, outcome: int, code: int) -> None:
        self.name, self.outcome, self.code, self.length = name, outcome, code, -1


class Blocks:
    """Loads and stores blocks, and counts what became of them. Its methods never raise. Safe for threads.

    pin_seconds is how long a pin lasts; 0 is no pin. Counters have a name per verdict: load.ok, load.not_found,
    load.timeout and so on; load.length is a value of another length than the block. So have exists, store, delete,
    pin, unpin.
    """

    def __init__(self, opener: Opener, counters: Counters, pin_seconds: float = 0) -> None:
        if not 0 <= pin_seconds <= MAX_PIN_SECONDS:
            raise ValueError("pin_seconds is %r, want 0 to %d" % (pin_seconds, MAX_PIN_SECONDS))
        self._opener, self._counters, self._pin_seconds = opener, counters, pin_seconds

    def load(self, keys: Sequence[Optional[bytes]], buffers: Sequence[memoryview]) -> List[bool]:
        """Reads blocks into buffers of exactly their lengths. True: the whole block is there.

        A key of None is one that cannot be a key of the store; it is a miss."""
        good = [False] * len(keys)
        for i, got in self._ask("load", keys, lambda store, names, at: store.get_many(
                names, [buffers[j] for j in at])):
            if got.outcome == YES and got.code == OK and got.length != len(buffers[i]):
                # Another layout's block. What was written must not stay there for somebody to mistake it.
                buffers[i][:] = bytes(len(buffers[i]))
                self._counters.add("load.length")
                continue
            good[i] = self._count("load", got)
        return good

    def save(self, keys: Sequence[Optional[bytes]], values: Sequence[memoryview]) -> List[int]:
        """Writes the blocks that are not there. It returns SAVED, PRESENT, FAILED or UNSURE for each."""
        out = [FAILED] * len(keys)
        missing: List[int] = []
        for i, got in self._ask("store", keys, lambda store, names, at: store.exists_many(
                names, lengths=True)):
            if got.outcome == YES and got.code == OK and got.length == len(values[i]):
                out[i] = PRESENT
                self._counters.add("store.present")
            elif got.code == NOT_FOUND or got.code == OK and got.outcome == YES:
                missing.append(i)
            else:
                self._count("store", got)
        absent = [keys[i] for i in missing]
        for n, got in self._ask("store", absent, lambda store, names, at: store.put_many(
                [(name, values[missing[j]]) for name, j in zip(names, at)]), write=True):
            if self._count("store", got):
                out[missing[n]] = SAVED
            elif got.outcome == UNKNOWN:
                out[missing[n]] = UNSURE
        return out

    def exists(self, keys: Sequence[Optional[bytes]]) -> List[Optional[bool]]:
        """Tells which blocks there are. None: the store did not say."""
        there: List[Optional[bool]] = [None] * len(keys)
        for i, got in self._ask("exists", keys, lambda store, names, at: store.exists_many(names)):
            there[i] = True if self._count("exists", got) else False if got.code == NOT_FOUND else None
        return there

    def find(self, keys: Sequence[Optional[bytes]]) -> List[Optional[bool]]:
        """Tells which blocks there are, and pins them in the same batch. None: the store did not say.

        A store that is asked to pin says whether there is the block. If it does not pin here, it is asked once more."""
        if self._pin_seconds <= 0:
            return self.exists(keys)
        there: List[Optional[bool]] = [None] * len(keys)
        unpinned: List[int] = []
        for i, got in self._ask_to_pin(keys):
            if got.code in _NO_PINS and got.outcome == NO:
                unpinned.append(i)
            else:
                there[i] = True if self._count("exists", got) else False if got.code == NOT_FOUND else None
        for i, is_there in zip(unpinned, self.exists([keys[i] for i in unpinned])):
            there[i] = is_there
        return there

    def leading(self, keys: Sequence[bytes]) -> int:
        """Tells how many blocks there are from the first on, without a gap. What the store does not say is 0."""
        total = 0
        for start in range(0, len(keys), BATCH):
            part = keys[start:start + BATCH]
            try:
                n = int(self._opener.store().exists_prefix(part))
            except Exception as err:
                self._failed("exists", err, 1)
                return total
            if not 0 <= n <= len(part):
                self._counters.add("exists.protocol")
                return total
            self._counters.add("exists.ok", n)
            self._counters.add("exists.not_found", int(n < len(part)))
            total += n
            if n < len(part):
                break
        return total

    def remove(self, keys: Sequence[Optional[bytes]]) -> List[bool]:
        """Deletes blocks. True: it is certain that there is none now."""
        gone = [False] * len(keys)
        for i, got in self._ask("delete", keys, lambda store, names, at: store.delete_many(names), write=True):
            gone[i] = self._count("delete", got) or got.code == NOT_FOUND
        return gone

    def remove_prefix(self, prefix: bytes) -> bool:
        """Deletes all blocks whose keys begin so. False: the store cannot, or did not do all of it."""
        try:
            self._opener.store().delete_prefix(prefix)  # type: ignore[attr-defined]
        except Exception as err:
            self._failed("clear", err, 1)
            return False
        self._counters.add("clear.ok")
        return True

    def pin(self, keys: Sequence[bytes]) -> int:
        """Asks the store to keep blocks for pin_seconds. If it does not, that costs a miss at worst.

        It returns how many blocks there are from the first on that have not gone meanwhile."""
        first_gone = len(keys)
        if self._pin_seconds > 0:
            for i, got in self._ask_to_pin(keys):
                if got.code == NOT_FOUND:
                    first_gone = min(first_gone, i)
        return first_gone

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Ends pins. A pin that stays ends by itself."""
        if self._pin_seconds > 0:
            for _, got in self._ask("unpin", keys, lambda store, names, at: store.unpin_many(names)):
                self._count("unpin", got)

    def _ask_to_pin(self, keys: Sequence[Optional[bytes]]) -> Iterator[Tuple[int, Any]]:
        for i, got in self._ask("pin", keys, lambda store, names, at: store.pin_many(names, self._pin_seconds)):
            self._count("pin", got)
            yield i, got

    def _ask(self, what: str, keys: Sequence[Optional[bytes]],
             call: Callable[[Store, List[bytes], List[int]], Sequence[Any]],
             write: bool = False) -> Iterator[Tuple[int, Any]]:
        """Makes calls for all keys but None, and gives each key's place with its verdict, exactly once.

        call is given the store, and the keys of a batch with their places."""
        valid = [(i, key) for i, key in enumerate(keys) if key is not None]
        self._counters.add(what + ".argument", len(keys) - len(valid))
        for start in range(0, len(valid), BATCH):
            at = [i for i, _ in valid[start:start + BATCH]]
            answer: Sequence[Any]
            try:
                answer = call(self._opener.store(), [key for _, key in valid[start:start + BATCH]], at)
                if len(answer) != len(at):  # verdicts that cannot be told apart are none
                    answer = [_Verdict("protocol", UNKNOWN if write else NO, -1)] * len(at)
            except Exception as err:
                complain(log, "%s of %d blocks: %s", what, len(at), err)
                # A client raises before it has begun, unless it says otherwise.
                outcome = getattr(err, "outcome", UNKNOWN if write else NO)
                answer = [_Verdict(code_name(getattr(err, "code", None)), outcome, -1)] * len(at)
            yield from zip(at, answer)

    def _count(self, what: str, got: Any) -> bool:
        """Counts a verdict. True: it is a success."""
        if got.outcome == YES and got.code == OK:
            self._counters.add(what + ".ok")
            return True
        name = getattr(got, "name", None)
        if not isinstance(got, _Verdict):
            name = code_name(got.code)
        if got.outcome == UNKNOWN:
            name = "unknown"
        elif got.code == OK:
            name = "protocol"  # a success that did not happen
        self._counters.add("%s.%s" % (what, name))
        return False

    def _failed(self, what: str, err: Exception, n: int) -> None:
        complain(log, "%s: %s", what, err)
        self._counters.add("%s.%s" % (what, code_name(getattr(err, "code", None))), n)
