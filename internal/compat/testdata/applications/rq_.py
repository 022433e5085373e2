"""rq_.py REDIS MEMCACHED DB: RQ, with a worker in this process."""

import operator
import sys

import redis
import rq

from check import check, equal, version

r = redis.Redis(host="127.0.0.1", port=int(sys.argv[1]), db=int(sys.argv[3]), socket_timeout=5)
version(rq.version.VERSION)


def work(q):
    rq.SimpleWorker([q], connection=r).work(burst=True, logging_level="CRITICAL")


@check
def a_job():
    q = rq.Queue("plain", connection=r)
    q.empty()
    job = q.enqueue(pow, 2, 10)
    equal(len(q), 1)
    work(q)
    job.refresh()
    equal(job.get_status(), "finished")
    equal(job.result, 1024)
    assert job.id in q.finished_job_registry


@check
def a_job_that_fails():
    q = rq.Queue("failing", connection=r)
    q.empty()
    job = q.enqueue(operator.truediv, 1, 0)
    work(q)
    equal(job.get_status(), "failed")
    assert "division by zero" in job.exc_info
    assert job.id in q.failed_job_registry
    q.failed_job_registry.requeue(job)
    equal(len(q), 1)


@check
def jobs_that_depend():
    q = rq.Queue("depending", connection=r)
    q.empty()
    first = q.enqueue(pow, 2, 3)
    second = q.enqueue(pow, 2, 4, depends_on=first)
    equal(second.get_status(), "deferred")
    work(q)
    equal([first.result, second.result], [8, 16])


@check
def meta_and_deletion():
    q = rq.Queue("deleting", connection=r)
    job = q.enqueue(pow, 1, 1, meta={"who": "me"}, job_timeout=100, result_ttl=500)
    equal(rq.job.Job.fetch(job.id, connection=r).meta, {"who": "me"})
    job.delete()
    equal(rq.job.Job.exists(job.id, connection=r), False)
    equal(q.job_ids, [])


print("done")
