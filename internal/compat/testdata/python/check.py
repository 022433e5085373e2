"""What the scripts share: run checks in turn and say on stdout how each went, one
line each, `ok NAME` or `fail NAME: why`, and `done` at the end."""

import signal
import sys
import time

# Every byte there is, for a key and a value.
BYTES = bytes(range(256))
# Not all alike, so that a reply with parts out of order is noticed.
LARGE = b"".join(i.to_bytes(4, "little") for i in range(1 << 18))


def version(text):
    """Says which version of the application runs."""
    print("version", text, flush=True)


def late(*_):
    raise TimeoutError("no end after a minute")


def check(f):
    """Runs f at once, for at most a minute: a busy machine takes a while."""
    name = f.__name__.replace("_", " ")
    signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    try:
        f()
        print("ok", name, flush=True)
    except Exception as err:  # whatever it is, the check failed
        why = f"{type(err).__name__} {err} in line {err.__traceback__.tb_next.tb_lineno}"
        print(f"fail {name}: " + why.replace("\n", " "), flush=True)
    finally:
        signal.alarm(0)


def equal(got, want):
    assert got == want, f"got {got!r:.200}, want {want!r:.200}"


def raises(kind, f, *args):
    """Returns the text of the error that f(*args) must raise."""
    try:
        got = f(*args)
    except kind as err:
        return str(err)
    raise AssertionError(f"{kind.__name__} was not raised, got {got!r:.200}")


def restart():
    """Asks whoever started the script to restart the server, and waits for it."""
    print("restart", flush=True)
    if not sys.stdin.readline():
        raise EOFError("stdin ended instead of telling of the restart")


def until(f, kind=AssertionError):
    """Retries f, which may raise kind, for 20 s."""
    end = time.monotonic() + 20
    while True:
        try:
            return f()
        except kind:
            if time.monotonic() > end:
                raise
        time.sleep(0.02)
