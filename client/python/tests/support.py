"""Brokers for tests, and the client's library.

KVD_LIBRARY names libkvd, and KVD the program kvd, whose `dev` has a broker in it. `make test-python` sets both.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent
sys.path.insert(0, str(HERE.parent))

import kvd  # noqa: E402

PATIENCE = 60  # seconds until a test that waits gives up


def until(condition, what):
    """Waits until a condition is true, and returns its value."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited in vain until {what}")
        time.sleep(0.005)
    return value


class Fake:
    """A process of fakebroker.py."""

    name = "fakebroker"

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="kvd-python-")
        self.path = os.path.join(self.folder, "broker.sock")
        self.start()

    def start(self):
        """Starts it, again if it has ended."""
        if os.path.exists(self.path):
            os.unlink(self.path)
        self.process = subprocess.Popen([sys.executable, str(HERE / "fakebroker.py"), self.path])
        until(lambda: os.path.exists(self.path), "the broker listens")

    def stop(self):
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder)


class Dev:
    """A process of `kvd dev`, with its broker."""

    name = "kvd dev"

    @staticmethod
    def there():
        """Tells whether KVD names a program with a broker."""
        return bool(os.environ.get("KVD"))

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="kvd-python-")
        self.path = os.path.join(self.folder, "broker.sock")
        self.log = open(os.path.join(self.folder, "log"), "w+", encoding="utf-8")
        flags = ["--broker", self.path, "--listen", "127.0.0.1:0", "--memory", "512MiB"]
        flags += ["--redis", "off", "--memcached", "off", "--http", "off"]
        self.process = subprocess.Popen(
            [os.environ["KVD"], "dev", *flags], stdout=self.log, stderr=self.log, cwd=self.folder
        )
        until(lambda: os.path.exists(self.path) or self.process.poll() is not None, "kvd dev listens")
        if self.process.poll() is not None:
            self.log.seek(0)
            raise AssertionError(f"kvd dev ended: {self.log.read()}")

    def stop(self):
        self.process.terminate()
        self.process.wait()
        self.log.close()
        shutil.rmtree(self.folder)


class Case(unittest.TestCase):
    """Tests with a broker, which is that of the class, and a client of their own."""

    broker_kind = Fake

    @classmethod
    def setUpClass(cls):
        if cls.broker_kind is Dev and not Dev.there():
            raise unittest.SkipTest("KVD does not name a program with a broker")
        cls.broker = cls.broker_kind()
        cls.addClassCleanup(lambda: cls.broker.stop())

    def setUp(self):
        self.client = self.open()

    def open(self, **options):
        """Gives a client that the end of the test closes."""
        client = kvd.Client(self.broker.path, dial_timeout=PATIENCE, **options)
        self.addCleanup(client.close)
        return client

    def raises(self, kind, outcome, function, *arguments, **named):
        """Holds the exception of a call, and returns it."""
        with self.assertRaises(kind) as raised:
            function(*arguments, **named)
        self.assertIs(raised.exception.outcome, outcome)
        self.assertIs(raised.exception.code, kind.code)
        return raised.exception
