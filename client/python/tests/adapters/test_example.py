"""The example's model, with a store and without."""

import importlib.util
import os
import unittest

try:
    import numpy
except ImportError:
    numpy = None

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../../examples/kvcache/kvcache.py")


class Memory:
    """A store as the example wants one."""

    def __init__(self):
        self.blocks = {}

    def load(self, keys):
        found = []
        for key in keys:
            if key not in self.blocks:
                break
            found.append(self.blocks[key])
        return found

    def save(self, items):
        self.blocks.update(items)
        return len(items)


@unittest.skipIf(numpy is None, "numpy is not installed")
class Example(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        spec = importlib.util.spec_from_file_location("kvcache", PATH)
        cls.example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(cls.example)
        cls.model = cls.example.Model()

    def first(self, tokens, store):
        return self.example.first_token(self.model, tokens, store)

    def test_prefixes_are_shared(self):
        store = Memory()
        a, b = (self.example.prompt(128, 20, seed) for seed in (2, 3))
        self.assertEqual((self.first(a, store)["found"], self.first(b, store)["found"]), (0, 128))
        self.assertEqual(self.first(b, store)["token"], self.first(b, None)["token"])
        self.assertEqual(len(store.blocks), 2)
        # All blocks of a prompt are there, and its last token is computed all the same.
        self.assertEqual(self.first(a[:128], store)["found"], 64)

    def test_keys_depend_on_all_tokens_before(self):
        tokens = self.example.prompt(192, 0, 2)
        other = [tokens[0] + 1] + tokens[1:]
        self.assertEqual(len(set(self.example.keys_of(tokens) + self.example.keys_of(other))), 6)
        self.assertEqual(self.example.keys_of(tokens[:130]), self.example.keys_of(tokens)[:2])

    def test_a_store_that_fails(self):
        class Broken(Memory):
            def load(self, keys):
                raise OSError("gone")
        tokens = self.example.prompt(64, 3, 2)
        result = self.first(tokens, Broken())
        self.assertEqual((result["found"], result["stored"]), (0, 0))
        self.assertEqual(result["token"], self.first(tokens, None)["token"])


if __name__ == "__main__":
    unittest.main()
