"""celery_.py REDIS MEMCACHED DB: Celery with Redis as its broker and result backend."""

import os
import subprocess
import sys

import celery
from celery import chain, chord, group

redis, _, db = os.environ.get("CELERY_AT", " ".join(sys.argv[1:])).split()
url = f"redis://127.0.0.1:{redis}/{db}"
# The worker imports this file as the module celery_.
app = celery.Celery("celery_", broker=url, backend=url)
app.conf.update(task_default_queue="celery_queue", broker_connection_retry_on_startup=False, broker_connection_max_retries=2,
                worker_hijack_root_logger=False, redis_socket_timeout=5, broker_transport_options={"socket_timeout": 5})


@app.task(name="add")
def add(x, y):
    return x + y


@app.task(name="total")
def total(numbers):
    return sum(numbers)


@app.task(name="fail")
def fail():
    raise ValueError("on purpose")


@app.task(name="again", bind=True, max_retries=3)
def again(self):
    if self.request.retries < 2:
        raise self.retry(countdown=0)
    return self.request.retries


def main():
    from check import check, equal, raises, version

    version(celery.__version__.split()[0])
    # A worker without a broker ends by itself or is ended below.
    worker = subprocess.Popen(
        [sys.executable, "-B", "-m", "celery", "-A", "celery_", "worker", "--pool", "solo", "--loglevel", "ERROR", "--without-gossip", "--without-mingle"],
        env=dict(os.environ, CELERY_AT=" ".join(sys.argv[1:]), PYTHONPATH=os.path.dirname(os.path.abspath(__file__))),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    @check
    def a_task_and_its_result():
        equal(add.apply_async((4, 4), retry=False).get(timeout=12), 8)

    @check
    def a_task_that_fails():
        equal(raises(ValueError, fail.apply_async(retry=False).get, 10), "on purpose")

    @check
    def a_task_that_retries():
        equal(again.apply_async(retry=False).get(timeout=12), 2)

    @check
    def a_group():
        equal(group(add.s(i, i) for i in range(5)).apply_async(retry=False).get(timeout=12), [0, 2, 4, 6, 8])

    @check
    def a_chain():
        equal(chain(add.s(1, 2), add.s(3), add.s(4)).apply_async(retry=False).get(timeout=12), 10)

    @check
    def a_chord():
        equal(chord((add.s(i, i) for i in range(5)), total.s()).apply_async(retry=False).get(timeout=12), 20)

    @check
    def remote_control():
        equal([list(r.values()) for r in app.control.ping(timeout=10, limit=1)], [[{"ok": "pong"}]])

    worker.terminate()
    try:
        worker.wait(10)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()
    print("done")


if __name__ == "__main__":
    main()
