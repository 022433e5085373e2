"""limits_.py REDIS MEMCACHED DB: limits, of both strategies that Redis can do."""

import sys

import limits
from limits import parse, storage, strategies

from check import check, equal, version

redis, memcached, db = sys.argv[1:]
version(limits.__version__)

for name, uri in (("redis", f"redis://127.0.0.1:{redis}/{db}"), ("memcached", f"memcached://127.0.0.1:{memcached}")):
    for kind in (strategies.FixedWindowRateLimiter, strategies.FixedWindowElasticExpiryRateLimiter, strategies.MovingWindowRateLimiter):
        if name == "memcached" and kind is strategies.MovingWindowRateLimiter:
            continue  # which limits itself refuses

        def hit():
            s = storage.storage_from_string(uri)
            equal(s.check(), True)
            limiter, day = kind(s), parse("3/day")
            ids = ("limits", kind.__name__)
            equal([limiter.hit(day, *ids) for _ in range(5)], [True, True, True, False, False])
            equal(limiter.test(day, *ids), False)
            equal(limiter.get_window_stats(day, *ids)[1], 0)
            limiter.clear(day, *ids)
            equal(limiter.hit(day, *ids), True)
            equal(limiter.hit(parse("10/hour"), "limits", "cost", kind.__name__, cost=4), True)
            equal(limiter.get_window_stats(parse("10/hour"), "limits", "cost", kind.__name__)[1], 6)

        hit.__name__ = f"{kind.__name__} in {name}"
        check(hit)


@check
def reset():
    s = storage.storage_from_string(f"redis://127.0.0.1:{redis}/{db}")
    limiter = strategies.FixedWindowRateLimiter(s)
    equal([limiter.hit(parse("1/day"), "limits", "reset") for _ in range(2)], [True, False])
    assert s.reset() >= 1
    equal(limiter.hit(parse("1/day"), "limits", "reset"), True)


print("done")
