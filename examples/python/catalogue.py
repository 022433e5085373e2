"""An example: a service that answers for products over HTTP, with a kvd store as the cache before its source of truth.

It reaches the store through a gateway, with redis-py. ../catalogue is the same service in Go, with the client library and a near
cache. Needs Debian's python3-redis.
"""

import argparse
import http.server
import json
import logging
import signal
import threading
import time
import urllib.parse

import redis

# How long a request waits for the cache, for a store that did not answer to be asked again, and for a product to be forgotten.
CACHE_SECONDS = 0.1
PAUSE_SECONDS = 1
KEEP_SECONDS = 600
MAX_BODY = 64 << 10
MAX_ID = 100  # bytes

log = logging.getLogger("catalogue")


class Table:
    """Stands for a database: what a file has, that answers slowly. Changes are gone with the process."""

    def __init__(self, file, delay):
        with open(file, encoding="utf-8") as f:
            self.products = {p["id"]: p for p in json.load(f)}
        self.delay = delay
        self.sessions = threading.BoundedSemaphore(64)  # as a pool of connections has

    def read(self, id):
        with self.sessions:
            time.sleep(self.delay)
            return self.products.get(id)

    def write(self, product):
        with self.sessions:
            time.sleep(self.delay)
            self.products[product["id"]] = product


class Catalogue:
    """Reads products through the cache."""

    def __init__(self, source, store):
        self.source, self.store = source, store
        self.silent_until = 0.0
        self.counts = {"cache": 0, "source": 0, "failures": 0}
        self.lock = threading.Lock()  # of the counts and silent_until

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def ask(self, fn):
        """Gives what fn says of the store, or None if that is away, or was within PAUSE_SECONDS."""
        with self.lock:
            if time.monotonic() < self.silent_until:
                return None
        try:
            return fn(self.store)
        except redis.ResponseError as e:  # it answers: it is full, or the key has another type
            self.count("failures")
            log.warning("the cache is of no use: %s", e)
        except redis.RedisError as e:
            self.count("failures")
            with self.lock:
                self.silent_until = time.monotonic() + PAUSE_SECONDS
            log.warning("the store does not answer: products come from their source for %d s: %s", PAUSE_SECONDS, e)
        return None

    def product(self, id):
        """Gives a product and where it came from; None if there is none."""
        if not 0 < len(id.encode()) <= MAX_ID:
            return None, ""
        key = "product:" + id
        value = self.ask(lambda s: s.get(key))
        if value is not None:
            try:
                p = json.loads(value)
                if p["id"] == id:
                    self.count("cache")
                    return p, "cache"
            except (ValueError, TypeError, KeyError):
                log.warning("the store has no product at %r", key)  # it goes when it expires
        self.count("source")
        p = self.source.read(id)
        if p is not None:  # only if absent: a change since it was read has put what it is now
            self.ask(lambda s: s.set(key, json.dumps(p), nx=True, ex=KEEP_SECONDS))
        return p, "source"

    def change(self, p):
        """Writes to the source, which decides, and then to the cache."""
        self.source.write(p)
        self.ask(lambda s: s.set("product:" + p["id"], json.dumps(p), ex=KEEP_SECONDS))

    def metrics(self):
        with self.lock:
            return (
                "# TYPE catalogue_lookups_total counter\n"
                f'catalogue_lookups_total{{from="cache"}} {self.counts["cache"]}\n'
                f'catalogue_lookups_total{{from="source"}} {self.counts["source"]}\n'
                "# TYPE catalogue_cache_failures_total counter\n"
                f'catalogue_cache_failures_total {self.counts["failures"]}\n'
            )


def valid(p):
    return (
        isinstance(p, dict) and set(p) <= {"id", "name", "price_cents"} and isinstance(p.get("name"), str) and p["name"] != ""
        and type(p.get("price_cents", 0)) is int and p.get("price_cents", 0) >= 0
    )


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 10  # seconds, for a client that says nothing
    catalogue = None

    def answer(self, code, text, kind="text/plain", **headers):
        b = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(b)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(b)

    def id(self):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path, errors="replace")
        return path[len("/products/"):] if path.startswith("/products/") else None

    def do_GET(self):
        if self.path == "/metrics":
            return self.answer(200, self.catalogue.metrics())
        id = self.id()
        p, source = self.catalogue.product(id) if id else (None, "")
        if p is None:
            return self.answer(404, "no such product\n")
        return self.answer(200, json.dumps(p) + "\n", "application/json", X_From=source)

    def do_PUT(self):
        self.close_connection = True  # a body that is refused is not read
        id, n = self.id(), self.headers.get("Content-Length", "")
        if not id or len(id.encode()) > MAX_ID:
            return self.answer(404, "no such product\n")
        if not n.isdecimal() or len(n) > 9 or int(n) > MAX_BODY:
            return self.answer(413, f"want a body of at most {MAX_BODY} bytes, with its Content-Length\n")
        try:
            p = json.loads(self.rfile.read(int(n)))
        except (ValueError, RecursionError) as e:
            return self.answer(400, f"the body: {e}\n")
        if not valid(p):
            return self.answer(400, "want a name and price_cents >= 0\n")
        p = {"id": id, "name": p["name"], "price_cents": p.get("price_cents", 0)}
        self.catalogue.change(p)
        return self.answer(200, json.dumps(p) + "\n", "application/json")

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        log.debug("connection of %s", client_address, exc_info=True)  # clients may leave


def main():
    f = argparse.ArgumentParser(description="a product catalogue with a kvd store as its cache, by way of a gateway")
    f.add_argument("--port", type=int, default=8081, help="port of the service")
    f.add_argument("--gateway", default="redis://127.0.0.1:6379/0", help="a gateway, and the number of its database")
    f.add_argument("--products", default="examples/products.json", help="file of products, in the place of a database")
    f.add_argument("--source-delay", type=float, default=0.02, help="seconds that the source of truth takes to answer")
    o = f.parse_args()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    # No second try: the source knows, too.
    store = redis.Redis.from_url(
        o.gateway, socket_timeout=CACHE_SECONDS, socket_connect_timeout=CACHE_SECONDS, max_connections=64, retry_on_timeout=False)
    Handler.catalogue = Catalogue(Table(o.products, o.source_delay), store)
    server = Server(("127.0.0.1", o.port), Handler)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    print(f"ready http=127.0.0.1:{server.server_port}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    server.server_close()


if __name__ == "__main__":
    main()
