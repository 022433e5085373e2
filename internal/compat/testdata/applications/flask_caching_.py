"""flask_caching_.py REDIS MEMCACHED DB: Flask-Caching in both."""

import sys

import flask_caching
from flask import Flask

from check import check, equal, version

redis, memcached, db = sys.argv[1:]
version(flask_caching.__version__)


def use(name, **config):
    app = Flask(name)
    app.config.update(CACHE_KEY_PREFIX="flask_caching_" + name, CACHE_DEFAULT_TIMEOUT=300, **config)
    cache = flask_caching.Cache(app)
    calls = []

    @app.route("/page")
    @cache.cached(timeout=50)
    def page():
        calls.append("page")
        return str(len(calls))

    @cache.memoize(50)
    def add(a, b):
        calls.append("add")
        return a + b

    def named(what):
        def wrap(f):
            f.__name__ = f"{name} {what}"
            check(f)
        return wrap

    @named("cached view")
    def _():
        with app.test_client() as c:
            equal([c.get("/page").data for _ in range(3)], [b"1"] * 3)
        equal(calls, ["page"])

    @named("memoize and forget")
    def _():
        with app.app_context():
            del calls[:]
            equal([add(1, 2), add(1, 2), add(2, 2)], [3, 3, 4])
            equal(len(calls), 2)
            cache.delete_memoized(add, 1, 2)
            equal([add(1, 2), add(2, 2)], [3, 4])
            equal(len(calls), 3)
            cache.delete_memoized(add)
            equal(add(2, 2), 4)
            equal(len(calls), 4)

    @named("set add get delete")
    def _():
        with app.app_context():
            cache.set("k", {"a": 1})
            equal(cache.get("k"), {"a": 1})
            equal(bool(cache.add("k", 2)), False)
            equal(bool(cache.delete("k")), True)
            equal(cache.get("k"), None)

    @named("set_many get_many")
    def _():
        with app.app_context():
            cache.set_many({"m1": 1, "m2": [2]})
            equal(cache.get_many("m1", "m2", "absent"), [1, [2], None])
            cache.delete_many("m1", "m2")
            equal(cache.get_many("m1", "m2"), [None, None])

    if name == "redis":  # of memcached it would delete everything
        @named("clear")
        def _():
            with app.app_context():
                cache.set("c", 1)
                equal(bool(cache.clear()), True)
                equal(cache.get("c"), None)


use("redis", CACHE_TYPE="RedisCache", CACHE_REDIS_URL=f"redis://127.0.0.1:{redis}/{db}")
use("memcached", CACHE_TYPE="MemcachedCache", CACHE_MEMCACHED_SERVERS=[f"127.0.0.1:{memcached}"])
print("done")
