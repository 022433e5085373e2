"""django_sessions.py REDIS MEMCACHED DB: Django's sessions in its cache, which is memcached."""

import sys

import django
from django.conf import settings

from check import check, equal, version

settings.configure(
    SESSION_ENGINE="django.contrib.sessions.backends.cache", SECRET_KEY="secret", ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"],
    MIDDLEWARE=["django.contrib.sessions.middleware.SessionMiddleware"],
    CACHES={"default": {"BACKEND": "django.core.cache.backends.memcached.PyMemcacheCache", "LOCATION": f"127.0.0.1:{sys.argv[2]}"}},
)
django.setup()
from django.http import HttpResponse
from django.test import Client
from django.urls import path


def count(request):
    request.session["n"] = request.session.get("n", 0) + 1
    return HttpResponse(str(request.session["n"]))


def leave(request):
    request.session.flush()
    return HttpResponse("bye")


urlpatterns = [path("count", count), path("leave", leave)]
version(django.__version__)


@check
def a_session_for_each_browser():
    a, b = Client(), Client()
    equal([a.get("/count").content for _ in range(3)], [b"1", b"2", b"3"])
    equal(b.get("/count").content, b"1")
    equal(a.get("/count").content, b"4")


@check
def flush():
    a = Client()
    equal([a.get("/count").content for _ in range(2)], [b"1", b"2"])
    old = a.cookies["sessionid"].value
    a.get("/leave")
    equal(a.get("/count").content, b"1")
    assert a.cookies["sessionid"].value != old


@check
def an_unknown_session_is_empty():
    a = Client()
    a.cookies["sessionid"] = "x" * 32
    equal(a.get("/count").content, b"1")


print("done")
