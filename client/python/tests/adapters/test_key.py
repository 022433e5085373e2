"""The keys of blocks."""

import itertools
import unittest

import standins  # noqa: F401, so that kvd is found without its library

from kvd.adapters import _key


class Keys(unittest.TestCase):
    def test_no_two_lists_of_fields_share_a_key(self):
        # Parts that run into each other if they are only joined, and bytes that look like lengths.
        texts = ["", "a", "b", "ab", "a/b", "/", "\0", "\0\1a", "a\0\1", "\0\0", "kv1"]
        seen = {}
        for fields in itertools.product(texts, repeat=4):
            for digest in (b"", b"a", b"\0\1a", b"\0\0", b"\xff" * 32):
                key = _key.block_key(*fields, digest)
                self.assertNotIn(key, seen, (fields, digest))
                seen[key] = fields
                self.assertEqual(_key.split_key(key), fields + (digest,))
        self.assertEqual(len(seen), len(texts) ** 4 * 5)

    def test_no_key_begins_another(self):
        keys = sorted(_key.block_key(*fields, digest) for fields in itertools.product(["", "a", "aa", "\0"], repeat=4)
                      for digest in (b"", b"a", b"aa"))
        for shorter, longer in zip(keys, keys[1:]):
            self.assertFalse(longer.startswith(shorter))

    def test_a_prefix_is_of_whole_fields(self):
        self.assertTrue(_key.block_key("s", "model", "0", "g", b"h").startswith(_key.key_prefix((b"s", b"model"))))
        self.assertFalse(_key.block_key("s", "model2", "0", "g", b"h").startswith(_key.key_prefix((b"s", b"model"))))

    def test_what_is_too_long_is_refused(self):
        rest = len(_key.block_key("", "", "", "", b""))
        self.assertEqual(len(_key.block_key("", "m" * (_key.MAX_KEY - rest), "", "", b"")), _key.MAX_KEY)
        for fields in (("", "m" * (_key.MAX_KEY - rest + 1), "", "", b""), ("s" * 70000, "", "", "", b""),
                       ("s" * 1000, "m" * 1000, "", "", b"")):
            self.assertRaises(ValueError, _key.block_key, *fields)

    def test_what_is_no_key_is_refused(self):
        key = _key.block_key("s", "m", "0", "g", b"h")
        for bad in (b"", b"k", key[:-1], key + b"\0", key + b"\0\0", b"x" + key, b"kv1"):
            self.assertRaises(ValueError, _key.split_key, bad)
