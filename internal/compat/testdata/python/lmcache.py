"""lmcache.py PORT: asks as LMCache's RESP connector does, and takes the answers as strictly.

The connector (csrc/storage_backends/redis of LMCache at commit 2827f8e8) sends one command at a time on each
connection, with its name in capitals. It reads exactly the bytes that it expects: 5 of SET, 4 of EXISTS and DEL, and of
GET a line with the length that it knows, the value and the line's end. It reads no further into an answer that is
another. LMCache's older connector (lmcache/v1/storage_backend/connector/redis_connector.py) keeps two keys for an
object; it uses redis-py.
"""

import hashlib
import socket
import sys
import threading

from check import check, equal, restart

port = int(sys.argv[1])
MIB = 1 << 20


class Miss(Exception):
    """The value is not there; the connection is as it was."""


class Worker:
    """A connection, as each thread of the connector has one."""

    def __init__(self, user=None, password=None):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=15)
        if password is not None:
            self.send(b"AUTH", *([user, password] if user is not None else [password]))
            self.greeting = self.line()

    def send(self, *parts):
        head = b"*%d\r\n" % len(parts)
        for part in parts[:-1]:
            head += b"$%d\r\n%s\r\n" % (len(part), part)
        # The last part and its length come in pieces of their own, as a value does.
        self.socket.sendmsg([head, b"$%d\r\n" % len(parts[-1])])
        self.socket.sendall(parts[-1])
        self.socket.sendall(b"\r\n")

    def exactly(self, n):
        out = bytearray(n)
        view = memoryview(out)
        while view:
            got = self.socket.recv_into(view)
            if got == 0:
                raise EOFError("the connection ended")
            view = view[got:]
        return bytes(out)

    def line(self):
        out = b""
        while not out.endswith(b"\r\n"):
            out += self.exactly(1)
        return out

    def set(self, key, value):
        self.send(b"SET", key, value)
        equal(self.exactly(5), b"+OK\r\n")

    def exists(self, key):
        self.send(b"EXISTS", key)
        return {b":1\r\n": True, b":0\r\n": False}[self.exactly(4)]

    def delete(self, key):
        self.send(b"DEL", key)
        return {b":1\r\n": True, b":0\r\n": False}[self.exactly(4)]

    def get(self, key, size):
        self.send(b"GET", key)
        line = self.line()
        if line == b"$-1\r\n":
            raise Miss(key)
        equal(line, b"$%d\r\n" % size)
        value = self.exactly(size)
        equal(self.exactly(2), b"\r\n")
        return value


def key_of(i, salt=""):
    """A key as LMCache writes it: model, rank, group, hash, and a salt if there is one."""
    key = "org/model-70b@%08x@%x@%s" % (0x02010201, 0, hashlib.sha256(b"%d" % i).hexdigest())
    return (key + "@" + salt if salt else key).encode()


def value_of(i, size):
    block = hashlib.sha512(b"%d" % i).digest()
    return (block * (size // len(block) + 1))[:size]


@check
def objects_of_the_usual_sizes():
    w = Worker()
    for i, size in enumerate((MIB // 2, MIB, 4 * MIB, 16 * MIB, 40 * MIB)):
        equal(w.exists(key_of(i)), False)
        w.set(key_of(i), value_of(i, size))
        equal(w.exists(key_of(i)), True)
        assert w.get(key_of(i), size) == value_of(i, size), size
        equal(w.delete(key_of(i)), True)
        equal(w.delete(key_of(i)), False)
        equal(w.exists(key_of(i)), False)


@check
def a_miss_leaves_the_connection_in_step():
    w = Worker()
    for i in range(20):
        try:
            w.get(key_of(1000 + i), MIB)
            raise AssertionError("there is none")
        except Miss:
            pass
        w.set(key_of(i), value_of(i, 4096))
        assert w.get(key_of(i), 4096) == value_of(i, 4096)
        equal(w.delete(key_of(i)), True)


@check
def bytes_that_look_like_answers():
    w = Worker()
    value = b"\r\n$-1\r\n+OK\r\n:1\r\n" * 4096
    w.set(key_of(0, "salt"), value)
    equal(w.exists(key_of(0)), False)
    assert w.get(key_of(0, "salt"), len(value)) == value
    equal(w.delete(key_of(0, "salt")), True)


@check
def eight_threads():
    size, failed = MIB // 4, []
    values = [value_of(i, size) for i in range(64)]

    def work(n):
        try:
            w = Worker()
            for i in range(n, 64, 8):
                w.set(key_of(i), values[i])
            for i in range(64):  # what others are writing meanwhile is there as a whole, or not at all
                try:
                    assert w.get(key_of(i), size) == values[i], i
                except Miss:
                    assert not i % 8 == n, i
            for i in range(n, 64, 8):
                assert w.exists(key_of(i)), i
        except Exception as err:
            failed.append(err)
    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    equal(failed, [])
    w = Worker()
    equal([w.delete(key_of(i)) for i in range(64)], [True] * 64)


@check
def auth():
    # Without a password of its own a server takes any for its user default, and refuses one without a user.
    w = Worker(b"default", b"any")
    equal(w.greeting, b"+OK\r\n")
    w.set(key_of(0), b"v")
    equal(w.delete(key_of(0)), True)
    w = Worker(None, b"any")
    equal(w.greeting[:1], b"-")
    equal(w.exists(key_of(0)), False)


@check
def the_older_connector():
    w = Worker()
    w.set(key_of(0) + b"kv_bytes", value_of(0, MIB))
    w.set(key_of(0) + b"metadata", b"\0" * 28)
    equal(w.exists(key_of(0) + b"metadata"), True)
    assert w.get(key_of(0) + b"kv_bytes", MIB) == value_of(0, MIB)
    equal(w.delete(key_of(0) + b"kv_bytes"), True)
    equal(w.delete(key_of(0) + b"metadata"), True)


@check
def a_restart_is_an_end_and_no_wrong_bytes():
    w = Worker()
    w.set(key_of(0), value_of(0, MIB))
    restart()
    try:
        value = w.get(key_of(0), MIB)
    except (EOFError, OSError):
        pass
    else:
        raise AssertionError("the connection lived on, and gave %d bytes" % len(value))
    w = Worker()
    if w.exists(key_of(0)):
        assert w.get(key_of(0), MIB) == value_of(0, MIB)
        equal(w.delete(key_of(0)), True)


print("done", flush=True)
