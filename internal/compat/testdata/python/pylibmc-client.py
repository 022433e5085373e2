"""pylibmc-client.py PORT: each check in text and in the binary protocol, which is libmemcached's"""

import sys

import pylibmc

from check import BYTES, LARGE, check, equal, raises, restart, until

server = "127.0.0.1:" + sys.argv[1]


def client(binary):
    return pylibmc.Client([server], binary=binary, behaviors={"cas": True, "tcp_nodelay": True})


def both(f):
    """f with a client of each protocol"""
    for binary in (False, True):

        def run(binary=binary):
            c = client(binary)
            c.flush_all()
            f(c)

        run.__name__ = f.__name__ + ("_binary" if binary else "_text")
        check(run)
    return f


@both
def set_get_delete(c):
    equal(c.set("k", "v"), True)
    equal(c.get("k"), "v")
    equal(c.add("k", "w"), False)
    equal(c.replace("k", "w"), True)
    if c.binary:  # libmemcached tells it in other words
        raises(pylibmc.NotFound, c.replace, "absent", "w")
    else:
        equal(c.replace("absent", "w"), False)
    equal(c.delete("k"), True)
    equal(c.delete("k"), False)
    equal(c.get("k"), None)


@both
def expiry(c):
    c.set("soon", "v", time=1)
    until(lambda: equal(c.get("soon"), None))
    c.set("e", "v", time=1)
    if c.binary:
        equal(c.touch("e", 100), True)
        equal(c.touch("absent", 100), False)
        equal(c.get("e"), "v")


@both
def incr_decr(c):
    c.set("n", 41)
    equal(c.incr("n"), 42)
    equal(c.incr("n", 8), 50)
    equal(c.decr("n", 100), 0)
    raises(pylibmc.NotFound, c.incr, "absent")


@both
def cas(c):
    c.set("c", "1")
    value, token = c.gets("c")
    equal(value, "1")
    equal(c.cas("c", "2", token), True)
    equal(c.cas("c", "3", token), False)
    equal(c.get("c"), "2")


@both
def append_prepend(c):
    c.set("a", "b")
    equal(c.append("a", "c"), True)
    equal(c.prepend("a", "a"), True)
    equal(c.get("a"), "abc")
    equal(c.append("absent", "c"), False)


@both
def many(c):
    pairs = {"m%d" % i: "v%d" % i for i in range(1000)}
    equal(c.set_multi(pairs), [])
    equal(c.get_multi(list(pairs) + ["absent"]), pairs)
    equal(c.delete_multi(["m1", "m2"]), True)
    equal(c.get_multi(["m1", "m3"]), {"m3": "v3"})


@both
def kinds_of_values(c):
    for v in (b"bytes", "text \u00e4", 7, 1 << 40, True, [1, {"a": None}], BYTES, ""):
        c.set("v", v)
        equal(c.get("v"), v)


@both
def large_value(c):
    value = LARGE[: 1000 << 10]  # memcached's limit of 1 MiB includes what it keeps beside the value
    equal(c.set("large", value), True)
    assert c.get("large") == value
    raises(pylibmc.TooBig, c.set, "large", LARGE + LARGE)
    equal(c.get("large"), None)


@both
def stats(c):
    assert "curr_connections" in c.get_stats()[0][1]


@check
def reconnect():
    text, binary = client(False), client(True)
    restart()
    until(lambda: text.set("again", "yes"), pylibmc.Error)
    until(lambda: equal(binary.get("again"), "yes"), pylibmc.Error)


print("done")
