"""django_cache.py REDIS MEMCACHED DB: Django's cache in memcached, by both of its clients."""

import sys

import django
from django.conf import settings

from check import check, equal, version

memcached = f"127.0.0.1:{sys.argv[2]}"
settings.configure(CACHES={
    "default": {"BACKEND": "django.core.cache.backends.memcached.PyMemcacheCache", "LOCATION": memcached, "KEY_PREFIX": "django_cache"},
    "pylibmc": {"BACKEND": "django.core.cache.backends.memcached.PyLibMCCache", "LOCATION": memcached, "KEY_PREFIX": "django_cache2",
                "OPTIONS": {"behaviors": {"connect_timeout": 2000, "receive_timeout": 2_000_000, "send_timeout": 2_000_000}}},
})
django.setup()
from django.core.cache import caches

version(django.__version__)


def use(name):
    def named(what):
        def wrap(f):
            f.__name__ = f"{name} {what}"
            check(f)
        return wrap

    c = caches[name]

    @named("set get delete")
    def _():
        c.set("k", {"a": [1, 2, "é"]}, 300)
        equal(c.get("k"), {"a": [1, 2, "é"]})
        equal(c.get("absent", "default"), "default")
        equal(c.delete("k"), True)
        equal(c.delete("k"), False)
        equal(c.get("k"), None)

    @named("add and get_or_set")
    def _():
        c.delete("a")
        equal(c.add("a", 1), True)
        equal(c.add("a", 2), False)
        equal(c.get_or_set("a", 3), 1)
        c.delete("a")
        equal(c.get_or_set("a", lambda: 3, 300), 3)

    @named("set_many get_many")
    def _():
        equal(c.set_many({"m1": 1, "m2": "two"}), [])
        equal(c.get_many(["m1", "m2", "absent"]), {"m1": 1, "m2": "two"})
        c.delete_many(["m1", "m2"])
        equal(c.get_many(["m1", "m2"]), {})

    @named("incr")
    def _():
        c.set("n", 1)
        equal(c.incr("n"), 2)
        equal(c.incr("n", 10), 12)
        equal(c.decr("n", 2), 10)

    @named("timeouts")
    def _():
        c.set("now", 1, 0)
        equal(c.get("now"), None)
        c.set("past", 1, -1)
        equal(c.get("past"), None)
        c.set("never", 1, None)
        equal(c.get("never"), 1)
        equal(c.touch("never", 300), True)
        equal(c.touch("absent", 300), False)

    @named("versions")
    def _():
        c.set("v", "one", version=1)
        c.set("v", "two", version=2)
        equal([c.get("v", version=1), c.get("v", version=2)], ["one", "two"])


use("default")
use("pylibmc")
print("done")
