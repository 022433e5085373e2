"""The keys that blocks have in the store."""

from __future__ import annotations

from typing import Iterable, List, Tuple

MAX_KEY = 1024  # bytes of the longest key of a store

_FORMAT = b"kv1"
_FIELDS = 5


def key_prefix(fields: Iterable[bytes]) -> bytes:
    """Returns what all keys begin with whose first fields are these.

    Each field has its length in front, in two bytes, so no two lists of fields give the same bytes. A field that is
    longer than MAX_KEY is a ValueError.
    """
    parts: List[bytes] = [_FORMAT]
    for field in fields:
        if len(field) > MAX_KEY:
            raise ValueError("a field of a key has %d bytes, want at most %d" % (len(field), MAX_KEY))
        parts.append(len(field).to_bytes(2, "big"))
        parts.append(field)
    return b"".join(parts)


def block_key(salt: str, model: str, rank: str, group: str, digest: bytes) -> bytes:
    """Returns the key of one block: two blocks have the same key only if all five fields are the same.

    salt keeps tenants apart; model is the model and all else that makes bytes of one useless to another; rank is the
    part of the model; group is the pool or the component; digest is the hash of the tokens up to the block's end.
    ValueError: the key would be longer than MAX_KEY.
    """
    key = key_prefix((salt.encode(), model.encode(), rank.encode(), group.encode(), digest))
    if len(key) > MAX_KEY:
        raise ValueError("a key has %d bytes, want at most %d: shorten the model's name" % (len(key), MAX_KEY))
    return key


def split_key(key: bytes) -> Tuple[str, str, str, str, bytes]:
    """Returns the fields that block_key was given. ValueError: it did not make this key."""
    if not key.startswith(_FORMAT):
        raise ValueError("no key of a block")
    fields: List[bytes] = []
    at = len(_FORMAT)
    while at < len(key):
        end = at + 2 + int.from_bytes(key[at:at + 2], "big")
        if at + 2 > len(key) or end > len(key):
            raise ValueError("a key of a block ends early")
        fields.append(key[at + 2:end])
        at = end
    if len(fields) != _FIELDS:
        raise ValueError("a key of a block has %d fields, want %d" % (len(fields), _FIELDS))
    salt, model, rank, group, digest = fields
    return salt.decode(), model.decode(), rank.decode(), group.decode(), digest
