"""redis-py.py PORT"""

import sys

import redis

from check import BYTES, LARGE, check, equal, raises, restart, until

port = int(sys.argv[1])
r = redis.Redis(host="127.0.0.1", port=port)
r.flushdb()


@check
def set_get_del():
    equal(r.set("k", "v"), True)
    equal(r.get("k"), b"v")
    equal(r.set("k", "w", nx=True), None)
    equal(r.set("k", "w", xx=True, get=True), b"v")
    equal(r.exists("k", "absent"), 1)
    equal(r.type("k"), b"string")
    equal(r.delete("k", "absent"), 1)
    equal(r.get("k"), None)


@check
def expiry():
    r.set("e", "v", ex=100)
    assert 98 < r.ttl("e") <= 100, r.ttl("e")
    equal(r.persist("e"), True)
    equal(r.ttl("e"), -1)
    equal(r.pexpire("e", 40), True)
    until(lambda: equal(r.get("e"), None))
    equal(r.ttl("e"), -2)


@check
def incr():
    equal(r.incr("n"), 1)
    equal(r.incrby("n", 41), 42)
    equal(r.decr("n"), 41)
    equal(r.incrbyfloat("n", 0.5), 41.5)


@check
def mset_mget():
    equal(r.mset({"m1": "a", "m2": "b"}), True)
    equal(r.mget("m1", "absent", "m2"), [b"a", None, b"b"])


@check
def strings():
    equal(r.append("s", "hello"), 5)
    equal(r.setrange("s", 5, " you"), 9)
    equal(r.getrange("s", 0, -5), b"hello")
    equal(r.strlen("s"), 9)
    equal(r.getset("s", "x"), b"hello you")
    equal(r.getdel("s"), b"x")


@check
def pipeline():
    with r.pipeline(transaction=False) as p:
        for i in range(1000):
            p.set(f"p{i}", f"v{i}")
        for i in range(1000):
            p.get(f"p{i}")
        out = p.execute()
    equal(out, [True] * 1000 + [b"v%d" % i for i in range(1000)])


@check
def transaction_on_one_key():
    with r.pipeline() as p:
        equal(p.set("t", 1).incr("t").expire("t", 100).get("t").execute(), [True, 2, True, b"2"])


@check
def watch():
    with r.pipeline() as p:
        p.watch("t")
        r.set("t", "theirs")
        p.multi()
        p.set("t", "mine")
        raises(redis.WatchError, p.execute)
    equal(r.get("t"), b"theirs")
    r.set("t", 0)
    for _ in range(10):
        r.transaction(lambda p: (n := int(p.get("t")), p.multi(), p.set("t", n + 1)), "t")
    equal(r.get("t"), b"10")


@check
def scan():
    equal(len(set(r.scan_iter("p*", count=100))), 1000)


@check
def large_value():
    r.set("large", LARGE)
    assert r.get("large") == LARGE


@check
def binary_key_and_value():
    r.set(BYTES, BYTES)
    equal(r.get(BYTES), BYTES)
    assert BYTES in r.scan_iter(count=1000)


@check
def errors():
    r.set("word", "abc")
    equal(raises(redis.ResponseError, r.incr, "word"), "value is not an integer or out of range")
    equal(raises(redis.ResponseError, r.execute_command, "GET"), "wrong number of arguments for 'get' command")


@check
def select():
    other = redis.Redis(host="127.0.0.1", port=port, db=1)
    other.flushdb()
    r.set("where", "zero")
    equal(other.get("where"), None)


@check
def health_check():
    other = redis.Redis(host="127.0.0.1", port=port, health_check_interval=1e-9, client_name="checked")
    for _ in range(10):
        equal(other.ping(), True)
    equal(other.client_getname(), "checked")


@check
def info():
    assert "redis_version" in r.info()
    assert r.info("keyspace")["db0"]["keys"] >= 1000


@check
def publish_subscribe():
    sub = r.pubsub()
    sub.subscribe("ch")
    sub.psubscribe("c*")
    for want in (1, 2):
        equal(sub.get_message(timeout=20)["data"], want)
    equal(r.publish("ch", "hello"), 2)
    for kind in ("message", "pmessage"):
        message = sub.get_message(timeout=20)
        equal((message["type"], message["data"]), (kind, b"hello"))
    sub.close()


@check
def reconnect():
    restart()
    until(lambda: r.set("again", "yes"), redis.ConnectionError)
    equal(r.get("again"), b"yes")


print("done")
