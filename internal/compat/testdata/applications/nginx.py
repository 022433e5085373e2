"""nginx.py REDIS MEMCACHED DB: nginx, which answers from memcached what is there and asks a backend for the rest."""

import http.server
import os
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request

from pymemcache.client.base import Client

from check import LARGE, check, equal, until, version

memcached = int(sys.argv[2])
asked = []


class Backend(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"from the backend")

    def log_message(self, *args):
        pass


backend = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Backend)
threading.Thread(target=backend.serve_forever, daemon=True).start()
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
out = subprocess.run(["/usr/sbin/nginx", "-v"], stderr=subprocess.PIPE, text=True, check=True).stderr
version(out.strip().rpartition("/")[2])

dir = tempfile.TemporaryDirectory()
os.chmod(dir.name, 0o755)
conf = f"""
daemon off; master_process off; worker_processes 1; pid {dir.name}/pid; error_log {dir.name}/error.log;
events {{ worker_connections 64; }}
http {{
  access_log off; client_body_temp_path {dir.name}/b; proxy_temp_path {dir.name}/p; fastcgi_temp_path {dir.name}/f;
  uwsgi_temp_path {dir.name}/u; scgi_temp_path {dir.name}/s;
  upstream cache {{ server 127.0.0.1:{memcached}; keepalive 8; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      set $memcached_key "nginx:$uri?$args";
      memcached_pass cache;
      error_page 404 502 504 = @fallback;
    }}
    location /compressed/ {{
      set $memcached_key "nginx:$uri";
      memcached_gzip_flag 2;
      memcached_pass cache;
    }}
    location @fallback {{ proxy_pass http://127.0.0.1:{backend.server_address[1]}; }}
  }}
}}
"""
with open(dir.name + "/conf", "w") as f:
    f.write(conf)
nginx = subprocess.Popen(["/usr/sbin/nginx", "-e", dir.name + "/error.log", "-p", dir.name, "-c", dir.name + "/conf"])
cache = Client(("127.0.0.1", memcached), timeout=5, default_noreply=False)


def get(path):
    return urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10)


@check
def a_page_from_memcached():
    cache.set("nginx:/page?", b"<h1>cached</h1>")
    until(lambda: get("/page").close(), urllib.error.URLError)
    with get("/page") as r:
        equal(r.read(), b"<h1>cached</h1>")
    equal(asked, [])


@check
def a_page_that_is_not_there():
    with get("/absent?x=1") as r:
        equal(r.read(), b"from the backend")
    equal(asked, ["/absent?x=1"])


@check
def a_large_page():
    page = LARGE[: 1 << 19]
    cache.set("nginx:/large?", page)
    with get("/large") as r:
        equal(r.read(), page)


@check
def flags_say_compressed():
    cache.set("nginx:/compressed/a", b"as if compressed", flags=2)
    with get("/compressed/a") as r:
        equal(r.headers["Content-Encoding"], "gzip")


@check
def many_on_kept_connections():
    for i in range(50):
        cache.set(f"nginx:/many?{i}", b"%d" % i)
    for i in range(50):
        with get(f"/many?{i}") as r:
            equal(r.read(), b"%d" % i)


nginx.terminate()
nginx.wait(10)
dir.cleanup()
print("done", flush=True)
os._exit(0)
