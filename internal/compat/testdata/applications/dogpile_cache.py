"""dogpile_cache.py REDIS MEMCACHED DB: dogpile.cache in both, with its lock among processes."""

import sys
import threading

import dogpile
from dogpile.cache import make_region
from dogpile.cache.api import NO_VALUE

from check import check, equal, version

redis, memcached, db = sys.argv[1:]
version(dogpile.__version__)


def use(name, backend, **arguments):
    def named(what):
        def wrap(f):
            f.__name__ = f"{name} {what}"
            check(f)
        return wrap

    def region():
        return make_region(key_mangler=lambda k: f"dogpile_{name}_{k}").configure(backend, expiration_time=3600, arguments=arguments)

    @named("set get delete")
    def _():
        r = region()
        r.set("k", {"a": 1})
        equal(r.get("k"), {"a": 1})
        r.delete("k")
        equal(r.get("k"), NO_VALUE)

    @named("multi")
    def _():
        r = region()
        r.set_multi({"m1": 1, "m2": 2})
        equal(r.get_multi(["m1", "absent", "m2"]), [1, NO_VALUE, 2])
        r.delete_multi(["m1", "m2"])
        equal(r.get_multi(["m1", "m2"]), [NO_VALUE, NO_VALUE])

    @named("cache_on_arguments")
    def _():
        r, calls = region(), []

        @r.cache_on_arguments(namespace="n")
        def double(x):
            calls.append(x)
            return 2 * x

        double.invalidate(4)
        equal([double(4), double(4), double.refresh(4), double.get(4)], [8] * 4)
        equal(calls, [4, 4])

    @named("lock of many at once, a single creator")
    def _():
        calls, got, begin = [], [], threading.Barrier(8)
        region().delete("made")

        def create():
            calls.append(1)
            return "made"

        def run():
            r = region()  # of its own, as in another process
            begin.wait(10)
            got.append(r.get_or_create("made", create))

        threads = [threading.Thread(target=run, daemon=True) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(12)
        equal(got, ["made"] * 8)
        equal(len(calls), 1)


use("redis", "dogpile.cache.redis", host="127.0.0.1", port=int(redis), db=int(db), distributed_lock=True, thread_local_lock=False,
    lock_timeout=30, redis_expiration_time=7200)
use("pymemcache", "dogpile.cache.pymemcache", url=[f"127.0.0.1:{memcached}"], distributed_lock=True)
use("pylibmc", "dogpile.cache.pylibmc", url=[f"127.0.0.1:{memcached}"], distributed_lock=True)
use("pylibmc binary", "dogpile.cache.pylibmc", url=[f"127.0.0.1:{memcached}"], distributed_lock=True, binary=True,
    behaviors={"connect_timeout": 2000, "receive_timeout": 2_000_000, "send_timeout": 2_000_000})
print("done")
