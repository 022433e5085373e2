"""Outcomes, codes and exceptions."""

from __future__ import annotations

import enum
from typing import Any, Dict, Tuple, Type

from . import _lib


class Outcome(enum.IntEnum):
    """Whether an operation happened."""

    YES = 0
    """It did, or the read is complete."""
    NO = 1
    """It did not, and will not."""
    UNKNOWN = 2
    """It may have, once at most; read the key to find out."""


class Code(enum.IntEnum):
    """Why an operation failed."""

    OK = 0
    NOT_FOUND = 1
    CONDITION = 2
    TOO_LARGE = 3
    SHORT_BUFFER = 4
    WRONG_TYPE = 5
    TIMEOUT = 6
    CANCELLED = 7
    UNAVAILABLE = 8
    DENIED = 9
    FULL = 10
    CORRUPT = 11
    ARGUMENT = 12
    STALE = 13
    FORKED = 14
    BUSY = 15
    VIEW_EXPIRED = 16
    PROTOCOL = 17
    CLOSED = 18
    UNSUPPORTED = 19
    INTERNAL = 20
    SYSTEM = 21


OUTCOMES: Tuple[Outcome, ...] = tuple(Outcome)
CODES: Tuple[Code, ...] = tuple(Code)


class Error(Exception):
    """An operation failed. Each code has a class of its own below this one.

    `outcome` tells whether the operation happened all the same, `code` why it failed, `text` says it for people, and
    `os_error` is the errno with Code.SYSTEM, else 0. `length` is the value's, in bytes, with Code.SHORT_BUFFER, else 0.
    """

    code = Code.INTERNAL

    def __init__(
        self, text: str, outcome: Outcome = Outcome.NO, code: int = -1, os_error: int = 0, length: int = 0
    ) -> None:
        super().__init__(text)
        self.text = text
        self.outcome = outcome
        self.os_error = os_error
        self.length = length
        if code >= 0:
            self.code = CODES[code]

    def __str__(self) -> str:
        return f"{self.text} ({self.code.name}, happened: {self.outcome.name.lower()})"

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), (self.text, self.outcome, int(self.code), self.os_error, self.length)


class NotFound(Error, KeyError):
    """There is no such key."""

    code = Code.NOT_FOUND


class ConditionFailed(Error):
    """The condition of a put or delete did not hold."""

    code = Code.CONDITION


class TooLarge(Error, ValueError):
    """The value is longer than the store, or the arena, takes."""

    code = Code.TOO_LARGE


class ShortBuffer(Error, BufferError):
    """The value is longer than the buffer, of which nothing was written; `length` is the value's."""

    code = Code.SHORT_BUFFER


class WrongType(Error, TypeError):
    """The record is not a number, or is a collection of the gateway."""

    code = Code.WRONG_TYPE


class Timeout(Error, TimeoutError):
    """The time of the operation is over."""

    code = Code.TIMEOUT


class Cancelled(Error):
    """The operation was cancelled before it had its answer."""

    code = Code.CANCELLED


class Unavailable(Error, ConnectionError):
    """There is no broker, or the broker reaches no store."""

    code = Code.UNAVAILABLE


class Denied(Error, PermissionError):
    """The broker or the store does not allow it."""

    code = Code.DENIED


class Full(Error):
    """There is no memory left, or the quota is used up; of `alloc`: the arena has no such run of bytes."""

    code = Code.FULL


class Corrupt(Error):
    """The bytes do not have their checksum."""

    code = Code.CORRUPT


class BadArgument(Error, ValueError):
    """An argument is out of bounds."""

    code = Code.ARGUMENT


class Stale(Error):
    """It is of a connection that is gone."""

    code = Code.STALE


class Forked(Error):
    """The client belongs to the parent process; open another one here."""

    code = Code.FORKED


class Busy(Error):
    """A limit is reached, or the memory is in use. Free something, and try again."""

    code = Code.BUSY


class ViewExpired(Error):
    """What was read through a view may be other bytes than the value's. Throw it away, with all that came of it."""

    code = Code.VIEW_EXPIRED


class ProtocolError(Error):
    """The other end broke the rules, and the connection was ended."""

    code = Code.PROTOCOL


class Closed(Error):
    """The client is closed, or the broker ended the connection."""

    code = Code.CLOSED


class Unsupported(Error, NotImplementedError):
    """This broker cannot do it."""

    code = Code.UNSUPPORTED


class Internal(Error):
    """The broker has a fault."""

    code = Code.INTERNAL


class SystemFailure(Error):
    """A call of the system failed; `os_error` has its errno."""

    code = Code.SYSTEM


BY_CODE: Dict[int, Type[Error]] = {
    int(c.code): c
    for c in (
        NotFound,
        ConditionFailed,
        TooLarge,
        ShortBuffer,
        WrongType,
        Timeout,
        Cancelled,
        Unavailable,
        Denied,
        Full,
        Corrupt,
        BadArgument,
        Stale,
        Forked,
        Busy,
        ViewExpired,
        ProtocolError,
        Closed,
        Unsupported,
        Internal,
        SystemFailure,
    )
}


def make(code: int, outcome: int, text: str, os_error: int = 0, length: int = 0) -> Error:
    """Makes the exception of a code."""
    kind = BY_CODE.get(code, Internal)
    return kind(text, OUTCOMES[outcome], int(kind.code), os_error, length)


def from_struct(e: _lib.ErrorStruct, length: int = 0) -> Error:
    """Makes the exception that a kvd_error tells."""
    return make(e.code, e.outcome, e.text.decode("utf-8", "replace"), e.os_error, length)
