"""django_redis_.py REDIS MEMCACHED DB: django-redis as the cache, for sessions too."""

import sys

import django
import django_redis
from django.conf import settings

from check import check, equal, raises, version

redis, _, db = sys.argv[1:]
settings.configure(
    SESSION_ENGINE="django.contrib.sessions.backends.cache", SECRET_KEY="secret",
    CACHES={"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": f"redis://127.0.0.1:{redis}/{db}", "KEY_PREFIX": "django_redis",
                        "OPTIONS": {"CLIENT_CLASS": "django_redis.client.DefaultClient"}}},
)
django.setup()
from django.contrib.sessions.backends.cache import SessionStore
from django.core.cache import cache

version(django_redis.__version__)


@check
def set_get_delete():
    equal(cache.set("k", {"a": [1, 2]}, 300), True)
    equal(cache.get("k"), {"a": [1, 2]})
    equal(cache.get("absent", 7), 7)
    equal(cache.delete("k"), True)
    equal(cache.get("k"), None)


@check
def set_many_get_many():
    cache.set_many({"m1": 1, "m2": "two"}, 300)
    equal(cache.get_many(["m1", "m2", "absent"]), {"m1": 1, "m2": "two"})
    equal(cache.delete_many(["m1", "m2"]), 2)


@check
def timeouts():
    cache.set("t", 1, timeout=100)
    assert 98 <= cache.ttl("t") <= 100, cache.ttl("t")
    equal(cache.persist("t"), True)
    equal(cache.ttl("t"), None)
    equal(cache.expire("t", timeout=50), True)
    equal(cache.touch("t", 200), True)
    assert cache.ttl("t") > 150
    cache.set("now", 1, timeout=0)
    equal(cache.get("now"), None)
    cache.set("past", 1, timeout=-1)
    equal(cache.get("past"), None)


@check
def nx_and_add():
    cache.delete("nx")
    equal(cache.set("nx", 1, nx=True), True)
    equal(cache.set("nx", 2, nx=True), False)
    equal(cache.add("nx", 3), False)
    equal(cache.get("nx"), 1)


@check
def incr():
    cache.set("n", 1)
    equal(cache.incr("n"), 2)
    equal(cache.incr("n", 10), 12)
    equal(cache.decr("n", 2), 10)
    raises(ValueError, cache.incr, "absent")


@check
def incr_version():
    cache.set("v", "one")
    equal(cache.incr_version("v"), 2)
    equal(cache.get("v", version=2), "one")


@check
def keys_and_patterns():
    for i in range(5):
        cache.set(f"foo_{i}", i)
    equal(sorted(cache.keys("foo_*")), [f"foo_{i}" for i in range(5)])
    equal(len(list(cache.iter_keys("foo_*"))), 5)
    equal(cache.delete_pattern("foo_*"), 5)


@check
def lock():
    with cache.lock("somekey", timeout=30):
        equal(cache.lock("somekey", timeout=30, blocking_timeout=0.01).acquire(), False)
    with cache.lock("somekey", timeout=30, blocking_timeout=5):
        pass


@check
def sessions():
    s = SessionStore()
    s["user"] = 42
    s.save()
    again = SessionStore(session_key=s.session_key)
    equal(again["user"], 42)
    again.flush()
    equal(SessionStore(session_key=s.session_key).get("user"), None)


@check
def clear():
    cache.set("c", 1)
    cache.clear()
    equal(cache.get("c"), None)


print("done")
