"""redis_lock.py REDIS MEMCACHED DB: redis-py's Lock."""

import sys
import threading

import redis
from redis.exceptions import LockNotOwnedError

from check import check, equal, raises, until, version

r = redis.Redis(host="127.0.0.1", port=int(sys.argv[1]), db=int(sys.argv[3]), socket_timeout=5)
version(redis.__version__)


@check
def exclusive():
    a = r.lock("lock:a", timeout=30)
    b = r.lock("lock:a", timeout=30)
    equal(a.acquire(blocking=False), True)
    equal([a.locked(), a.owned(), b.owned()], [True, True, False])
    equal(b.acquire(blocking=False), False)
    a.release()
    equal(b.acquire(blocking=False), True)
    b.release()


@check
def extend():
    a = r.lock("lock:e", timeout=30)
    equal(a.acquire(blocking=False), True)
    equal(a.extend(100), True)
    assert 120 < r.ttl("lock:e") <= 130
    equal(a.extend(60, replace_ttl=True), True)
    assert 50 < r.ttl("lock:e") <= 60
    equal(a.reacquire(), True)
    assert 20 < r.ttl("lock:e") <= 30
    a.release()


@check
def expired():
    a = r.lock("lock:x", timeout=0.05)
    equal(a.acquire(blocking=False), True)
    until(lambda: equal(a.locked(), False))
    with r.lock("lock:x", timeout=30):
        raises(LockNotOwnedError, a.release)


@check
def counting_under_it():
    r.set("lock:n", 0)

    def count():
        for _ in range(10):
            with r.lock("lock:c", timeout=30, sleep=0.005):
                r.set("lock:n", int(r.get("lock:n")) + 1)

    threads = [threading.Thread(target=count, daemon=True) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(12)
    equal(r.get("lock:n"), b"40")


print("done")
