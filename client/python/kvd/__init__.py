"""kvd: a key-value store in the memory of other machines.

A Client talks to the broker of this machine by way of shared memory; kvd.aio is for asyncio, kvd.torch for tensors.

    import kvd

    with kvd.Client() as client:
        client.put("greeting", b"hello")
        client.get("greeting")

Exceptions are below kvd.Error. Each has `outcome`, which tells whether the operation happened, and `code`.
"""

from ._client import Client, Key, Record, Registered, Seconds
from ._core import Result
from ._view import View
from ._buffers import Buffer
from ._errors import (
    BadArgument,
    Busy,
    Cancelled,
    Closed,
    Code,
    ConditionFailed,
    Corrupt,
    Denied,
    Error,
    Forked,
    Full,
    Internal,
    NotFound,
    Outcome,
    ProtocolError,
    ShortBuffer,
    Stale,
    SystemFailure,
    Timeout,
    TooLarge,
    Unavailable,
    Unsupported,
    ViewExpired,
    WrongType,
)
from ._lib import quick as _quick

__version__: str = _quick.kvd_version().decode()
"""The release of the library."""

__all__ = [
    "BadArgument",
    "Buffer",
    "Busy",
    "Cancelled",
    "Client",
    "Closed",
    "Code",
    "ConditionFailed",
    "Corrupt",
    "Denied",
    "Error",
    "Forked",
    "Full",
    "Internal",
    "Key",
    "NotFound",
    "Outcome",
    "ProtocolError",
    "Record",
    "Registered",
    "Result",
    "Seconds",
    "ShortBuffer",
    "Stale",
    "SystemFailure",
    "Timeout",
    "TooLarge",
    "Unavailable",
    "Unsupported",
    "View",
    "ViewExpired",
    "WrongType",
]
