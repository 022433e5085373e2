"""Tensors, on the CPU; CUDA's part with a runtime that only notes what it is asked."""

import os
import subprocess
import sys
import types
import unittest
from unittest import mock

import support
from support import Case, Dev, Fake

import kvd

try:
    import torch
except ImportError:
    raise unittest.SkipTest("torch is not installed (Debian: python3-torch)") from None

import kvd.torch


class Tensors:
    """The tests, for each kind of broker."""

    def test_types(self):
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
            with self.subTest(dtype=dtype):
                t = (torch.arange(6000) % 2).to(dtype).view(60, 100)
                self.assertGreater(kvd.torch.save(self.client, "t", t), 0)
                got = kvd.torch.get(self.client, "t", (60, 100), dtype)
                self.assertEqual((got.dtype, got.shape), (t.dtype, t.shape))
                self.assertTrue(torch.equal(got, t))
                into = torch.zeros_like(t)
                kvd.torch.load(self.client, "t", into)
                self.assertTrue(torch.equal(into, t))
                self.assertEqual(self.client.get_into("t", into), t.numel() * t.element_size())

    def test_misfits(self):
        self.client.put("eight", b"12345678")
        self.assertIsNone(kvd.torch.get(self.client, "missing", 2))
        with self.assertRaises(kvd.NotFound):
            kvd.torch.load(self.client, "missing", torch.zeros(2))
        with self.assertRaises(ValueError):
            kvd.torch.load(self.client, "eight", torch.zeros(3))
        with self.assertRaises(kvd.ShortBuffer):
            kvd.torch.load(self.client, "eight", torch.zeros(1))
        for wrong in (torch.zeros(4, 4)[:, ::2], torch.zeros(3, 4).t(), torch.zeros(4, dtype=torch.complex64).conj()):
            for call in (self.client.put, self.client.get_into):
                with self.assertRaises(BufferError):
                    call("eight", wrong)
        with self.assertRaises(BufferError):
            self.client.put("eight", torch.zeros(2, device="meta"))
        self.assertEqual(self.client.get("eight"), b"12345678")
        self.client.put("grad", torch.zeros(2, requires_grad=True))
        kvd.torch.save(self.client, "grad", torch.ones(2, requires_grad=True), ttl=50)
        self.assertIsNotNone(self.client.get_record("grad").expires)

    def test_views(self):
        for n in (10_000, 2_500_000):  # floats: a part, and several
            with self.subTest(n=n):
                t = torch.arange(n, dtype=torch.float32).view(100, -1)
                kvd.torch.save(self.client, "v", t)
                got = torch.zeros_like(t)
                loading = kvd.torch.start_load(self.client, "v", got)
                self.assertTrue(loading.done())
                loading.wait()
                self.assertTrue(torch.equal(got, t))
        for wrong, error in (("v", ValueError), ("absent", kvd.NotFound)):
            before = torch.ones(5000)
            with self.assertRaises(error):
                kvd.torch.start_load(self.client, wrong, before)
            self.assertTrue(torch.equal(before, torch.ones(5000)))
        with self.assertRaises(BufferError):
            kvd.torch.start_load(self.client, "v", torch.zeros(4, 4)[:, ::2])
        with self.client.get_view("v"):  # none of the others is left
            pass

    def test_empty(self):
        t = kvd.torch.empty(self.client, (0, 5))
        kvd.torch.save(self.client, "none", t)
        self.assertEqual(kvd.torch.get(self.client, "none", (0, 5)).shape, (0, 5))
        scalar = kvd.torch.empty(self.client, ())
        scalar.fill_(2.5)
        kvd.torch.save(self.client, "one", scalar)
        self.assertEqual(kvd.torch.get(self.client, "one", ()).item(), 2.5)

    def test_arena(self):
        client = self.open(arena=1 << 20)
        base, length = client.arena()
        t = kvd.torch.empty(client, 200_000)
        self.assertTrue(base <= t.data_ptr() < base + length)
        view = t[5:]
        del t
        with self.assertRaises(kvd.Full):
            kvd.torch.empty(client, 200_000)
        del view
        kvd.torch.empty(client, 200_000)

    def test_register(self):
        if not torch.cuda.is_available():
            self.assertFalse(kvd.torch.register(self.client))
        asked = []
        runtime = types.SimpleNamespace(
            cudaHostRegister=lambda *a: asked.append(("register", *a)) or 0,
            cudaHostUnregister=lambda *a: asked.append(("unregister", *a)) or 0,
        )
        base, length = self.client.arena()
        with mock.patch("torch.cuda.is_available", lambda: True), mock.patch("torch.cuda.cudart", lambda: runtime):
            self.assertTrue(kvd.torch.register(self.client))
            self.assertFalse(kvd.torch.register(self.open(arena=0)))
            runtime.cudaHostRegister = lambda *a: 2
            with self.assertRaises(kvd.SystemFailure):
                kvd.torch.register(self.client)
        self.assertEqual(asked, [("register", base, length, 0)])
        t = kvd.torch.empty(self.client, 5)
        self.client.close()
        self.assertEqual(len(asked), 1)  # the arena is still looked at
        del t
        self.assertEqual(asked[1:], [("unregister", base)])

    @unittest.skipUnless(torch.cuda.is_available(), "there is no CUDA")
    def test_cuda(self):
        self.assertTrue(kvd.torch.register(self.client))
        t = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
        kvd.torch.save(self.client, "cuda", t)
        self.assertTrue(torch.equal(kvd.torch.get(self.client, "cuda", 1 << 20, device="cuda"), t))
        got = torch.zeros_like(t)
        kvd.torch.start_load(self.client, "cuda", got).wait()
        self.assertTrue(torch.equal(got, t))


class Example(Case):
    """The program of the documents does what it says."""

    broker_kind = Dev

    def test_tensors(self):
        environment = dict(os.environ, KVD_BROKER=self.broker.path, PYTHONPATH=str(support.HERE.parent))
        program = support.ROOT / "examples/torch/tensors.py"
        done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        lines = done.stdout.splitlines()
        self.assertEqual(lines[0], "4 tensors of 1048576 bytes, and none was copied here")
        self.assertEqual(lines[1], "a view of 1048576 bytes held")
        self.assertEqual(lines[2] == "no device here", not torch.cuda.is_available())


class FakeTensors(Tensors, Case):
    broker_kind = Fake

    def test_expired(self):
        kvd.torch.save(self.client, "over:1", torch.ones(5000))
        loading = kvd.torch.start_load(self.client, "over:1", torch.zeros(5000))
        for _ in range(2):
            self.raises(kvd.ViewExpired, kvd.Outcome.NO, loading.wait)
        self.assertEqual(self.client.get("views"), b"0")


class DevTensors(Tensors, Case):
    broker_kind = Dev


if __name__ == "__main__":
    unittest.main()
