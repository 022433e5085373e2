"""flask_session_.py REDIS MEMCACHED DB: Flask-Session in both."""

import sys

import flask_session
import pylibmc
import redis
from flask import Flask, session

from check import check, equal, version

version(flask_session.__version__)

for name, config in {
    "redis": {"SESSION_REDIS": redis.Redis(host="127.0.0.1", port=int(sys.argv[1]), db=int(sys.argv[3]))},
    "memcached": {"SESSION_MEMCACHED": pylibmc.Client([f"127.0.0.1:{sys.argv[2]}"])},
}.items():
    def sessions():
        app = Flask(name)
        app.config.update(SESSION_TYPE=name, SESSION_KEY_PREFIX="flask_session:", **config)
        flask_session.Session(app)

        @app.route("/count")
        def count():
            session["n"] = session.get("n", 0) + 1
            return str(session["n"])

        @app.route("/leave")
        def leave():
            session.clear()
            return "bye"

        a, b = app.test_client(), app.test_client()
        equal([a.get("/count").data for _ in range(3)], [b"1", b"2", b"3"])
        equal(b.get("/count").data, b"1")
        a.get("/leave")
        equal(a.get("/count").data, b"1")

    sessions.__name__ = f"sessions in {name}"
    check(sessions)
print("done")
