"""pymemcache-client.py PORT"""

import sys

from pymemcache.client.base import Client
from pymemcache.exceptions import MemcacheClientError, MemcacheServerError

from check import BYTES, LARGE, check, equal, raises, restart, until

port = int(sys.argv[1])
c = Client(("127.0.0.1", port), default_noreply=False)
c.flush_all()


@check
def set_get_delete():
    equal(c.set("k", "v"), True)
    equal(c.get("k"), b"v")
    equal(c.add("k", "w"), False)
    equal(c.replace("k", "w"), True)
    equal(c.replace("absent", "w"), False)
    equal(c.delete("k"), True)
    equal(c.delete("k"), False)
    equal(c.get("k"), None)


@check
def expiry():
    c.set("e", "v", expire=1)
    equal(c.touch("e", expire=100), True)
    equal(c.touch("absent", expire=100), False)
    c.set("gone", "v", expire=-1)
    equal(c.get("gone"), None)
    c.set("soon", "v", expire=1)
    until(lambda: equal(c.get("soon"), None))
    equal(c.get("e"), b"v")


@check
def incr_decr():
    c.set("n", "41")
    equal(c.incr("n", 1), 42)
    equal(c.decr("n", 50), 0)
    equal(c.incr("absent", 1), None)
    c.set("n", "18446744073709551615")
    equal(c.incr("n", 1), 0)


@check
def cas():
    c.set("c", "1")
    value, token = c.gets("c")
    equal(value, b"1")
    equal(c.cas("c", "2", token), True)
    equal(c.cas("c", "3", token), False)
    equal(c.cas("absent", "3", token), None)


@check
def append_prepend():
    c.set("a", "b")
    equal(c.append("a", "c"), True)
    equal(c.prepend("a", "a"), True)
    equal(c.get("a"), b"abc")
    equal(c.append("absent", "c"), False)


@check
def many():
    pairs = {f"m{i}": b"v%d" % i for i in range(1000)}
    equal(c.set_many(pairs), [])
    equal(c.get_many(list(pairs)), pairs)
    equal(len(c.gets_many(["m1", "m2", "absent"])), 2)
    equal(c.delete_many(["m1", "absent"]), True)
    equal(c.get("m1"), None)


@check
def flags():
    class Serde:
        def serialize(self, key, value):
            return value, 0xFFFFFFFF

        def deserialize(self, key, value, flags):
            return value, flags

    f = Client(("127.0.0.1", port), default_noreply=False, serde=Serde())
    f.set("f", "v")
    equal(f.get("f"), (b"v", 0xFFFFFFFF))


@check
def noreply():
    for i in range(100):
        c.set("q", str(i), noreply=True)
    equal(c.get("q"), b"99")


@check
def large_value():
    value = LARGE[: 1000 << 10]  # memcached's limit of 1 MiB includes what it keeps beside the value
    equal(c.set("large", value), True)
    assert c.get("large") == value
    raises(MemcacheServerError, c.set, "large", LARGE + LARGE)
    equal(c.get("k"), None)


@check
def binary_value():
    c.set("binary", BYTES)
    equal(c.get("binary"), BYTES)


@check
def errors():
    c.set("word", "abc")
    raises(MemcacheClientError, c.incr, "word", 1)


@check
def stats_and_version():
    assert b"curr_connections" in c.stats()
    assert c.version()


@check
def reconnect():
    restart()
    until(lambda: c.set("again", "yes"), (OSError, MemcacheServerError))
    equal(c.get("again"), b"yes")


print("done")
