"""The wheel installs in a bare environment, without a compiler and a network, and works there."""

import base64
import csv
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

import support
from support import Dev, Fake

import kvd
import wheel


class Wheel(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="kvd-wheel-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def build(self, name="out"):
        library = Path(kvd._lib.path).resolve()
        return wheel.build(library, kvd.__version__, self.folder / name, support.ROOT / "LICENSE")

    def test_form(self):
        path = self.build()
        self.assertEqual(path.read_bytes(), self.build("again").read_bytes())
        with zipfile.ZipFile(path) as z:
            names = z.namelist()
            for name in ("__init__.py", "aio.py", "torch.py", "py.typed", "libkvd.so"):
                self.assertIn(f"kvd/{name}", names)
            rows = list(csv.reader(io.StringIO(z.read(names[-1]).decode())))
            self.assertEqual([r[0] for r in rows], names)
            for name, digest, size in rows[:-1]:
                data = z.read(name)
                self.assertEqual(len(data), int(size))
                want = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
                self.assertEqual(digest, "sha256=" + want)
            metadata = next(n for n in names if n.endswith("WHEEL"))
            self.assertIn(f"Tag: {path.stem.split('-', 2)[2]}\n", z.read(metadata).decode())

    def test_tags(self):
        def elf(machine, text):
            return b"\x7fELF\x02\x01" + bytes(10) + b"\x03\x00" + bytes([machine, 0]) + text

        for library, want in (
            (elf(62, b"\0GLIBC_2.2.5\0GLIBC_2.34\0"), "manylinux_2_34_x86_64"),
            (elf(62, b"\0GLIBC_2.2.5\0"), "manylinux_2_17_x86_64"),
            (elf(183, b"\0GLIBC_2.27\0"), "manylinux_2_27_aarch64"),
            (elf(183, b"\0libc.musl-aarch64.so.1\0"), "musllinux_1_2_aarch64"),
        ):
            self.assertEqual(wheel.tag(library), want)
        for wrong in (b"", b"\x7fELF\x01\x01" + bytes(20), elf(3, b"")):
            with self.assertRaises(ValueError):
                wheel.tag(wrong)
        with self.assertRaises(ValueError):
            wheel.build(Path(kvd._lib.path), "v1-dirty", self.folder, support.ROOT / "LICENSE")

    def test_installed(self):
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("KVD", "PYTHON"))}
        environment["PATH"] = "/nonexistent"  # no compiler

        def run(*command, **more):
            done = subprocess.run(
                command, env=dict(environment, **more), cwd=self.folder, capture_output=True, text=True,
                timeout=4 * support.PATIENCE,
            )  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            return done.stdout

        python = str(self.folder / "venv/bin/python")
        run(sys.executable, "-m", "venv", self.folder / "venv")
        run(python, "-m", "pip", "install", "--no-index", "--disable-pip-version-check", self.build())
        broker = (Dev if Dev.there() else Fake)()
        self.addCleanup(broker.stop)
        program = (
            "import kvd; c = kvd.Client(); c.put('k', b'v'); print(c.get('k'), kvd.__file__, kvd._lib.path, sep='\\n')"
        )
        got, package, library = run(python, "-c", program, KVD_BROKER=broker.path).splitlines()
        self.assertEqual(got, "b'v'")
        for path in (package, library):
            self.assertTrue(path.startswith(str(self.folder / "venv")), path)


class Examples(unittest.TestCase):
    def test_arrays(self):
        try:
            import numpy  # noqa: F401
        except ImportError:
            self.skipTest("numpy is not installed (Debian: python3-numpy)")
        broker = (Dev if Dev.there() else Fake)()
        self.addCleanup(broker.stop)
        environment = dict(os.environ, KVD_BROKER=broker.path, PYTHONPATH=str(support.HERE.parent))
        program = support.ROOT / "examples/python/arrays.py"
        done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "[[0. 1. 2.]\n [3. 4. 5.]]\n", ""))


if __name__ == "__main__":
    unittest.main()
