"""flask_limiter_.py REDIS MEMCACHED DB: Flask-Limiter with both of its strategies for Redis, and memcached."""

import sys

import flask_limiter
from flask import Flask
from flask_limiter.util import get_remote_address

from check import check, equal, version

redis, memcached, db = sys.argv[1:]
version(flask_limiter.__version__)

for strategy, storage in (
    ("fixed-window", f"redis://127.0.0.1:{redis}/{db}"),
    ("moving-window", f"redis://127.0.0.1:{redis}/{db}"),
    ("fixed-window", f"memcached://127.0.0.1:{memcached}"),
):
    def limited():
        app = Flask("limited")
        limiter = flask_limiter.Limiter(get_remote_address, app=app, storage_uri=storage, strategy=strategy,
                                        key_prefix="flask_limiter_" + strategy, headers_enabled=True)

        @app.route("/slow")
        @limiter.limit("3 per day")
        def slow():
            return "ok"

        @app.route("/exempt")
        @limiter.exempt
        def exempt():
            return "ok"

        with app.test_client() as c:
            equal([c.get("/slow").status_code for _ in range(5)], [200, 200, 200, 429, 429])
            equal(c.get("/slow").headers["X-RateLimit-Remaining"], "0")
            equal([c.get("/exempt").status_code for _ in range(5)], [200] * 5)

    limited.__name__ = f"{strategy} in {storage.partition(':')[0]}"
    check(limited)
print("done")
