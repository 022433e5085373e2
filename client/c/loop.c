/* loop.c - descriptors for programs that wait for many things. */
#include "internal.h"

#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

PUBLIC int kvd_fd(kvd_client *c) { return c == NULL || kvd__gone(c) ? -1 : c->epoll_fd; }

PUBLIC int kvd_arm(kvd_client *c) {
    int ready = 0;
    if (c == NULL)
        return -KVD_ARGUMENT;
    if (kvd__gone(c))
        return -KVD_FORKED;
    atomic_store(&c->armed, 1);
    for (uint32_t i = 0; i < KVD_MAX_QUEUES; i++) {
        struct queue *q = &c->queues[i];
        kvd__lock(q);
        if (q->reaped != q->told)
            ready = 1;
        if (q->base != NULL) {
            atomic_store(kvd__word(q, KVD_RING_CLIENT_SLEEPS), 1);
            if (q->broken || atomic_load(kvd__word(q, KVD_RING_CQ_TAIL)) != q->cq_head)
                ready = 1;
        }
        kvd__unlock(q);
    }
    return ready;
}

/* drain empties the descriptors that are readable, and returns whether the connection may have ended. */
static int drain(kvd_client *c) {
    struct epoll_event ev[KVD_MAX_QUEUES + 4];
    uint64_t count;
    int over = 0, n = epoll_wait(c->epoll_fd, ev, KVD_MAX_QUEUES + 4, 0);
    for (int i = 0; i < n; i++) {
        if (ev[i].data.u32 == UINT32_MAX) {
            (void)!read(c->notify_fd, &count, sizeof count);
        } else if (ev[i].data.u32 < KVD_MAX_QUEUES) {
            struct queue *q = &c->queues[ev[i].data.u32];
            kvd__lock(q);
            if (q->complete_fd >= 0)
                (void)!read(q->complete_fd, &count, sizeof count);
            if (q->sleepers != 0) /* it was the sleeper's, too */
                kvd__wake(q->complete_fd);
            kvd__unlock(q);
        } else {
            over = 1;
        }
    }
    return over;
}

PUBLIC int64_t kvd_reap(kvd_client *c) {
    int64_t total = 0;
    if (c == NULL)
        return -KVD_ARGUMENT;
    if (kvd__gone(c))
        return -KVD_FORKED;
    atomic_store(&c->armed, 0);
    uint64_t generation = atomic_load(&c->generation);
    int over = drain(c);
    for (uint32_t i = 0; i < KVD_MAX_QUEUES; i++) {
        struct queue *q = &c->queues[i];
        kvd__lock(q);
        int broken = kvd__reap(q) < 0;
        uint64_t of = q->generation;
        kvd__unlock(q);
        if (broken)
            kvd__lost(c, of, KVD_PROTOCOL);
    }
    if (over)
        kvd__ended(c, generation);
    for (uint32_t i = 0; i < KVD_MAX_QUEUES; i++) {
        struct queue *q = &c->queues[i];
        kvd__lock(q);
        total += (int64_t)(q->reaped - q->told);
        q->told = q->reaped;
        kvd__unlock(q);
    }
    return total;
}

PUBLIC int kvd_wait(kvd_client *c, int64_t timeout_ms, uint64_t *reaped, kvd_error *error) {
    if (reaped != NULL)
        *reaped = 0;
    if (c == NULL)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "kvd_wait wants a client");
    if (kvd__gone(c))
        return kvd__forked(error);
    int64_t deadline = INT64_MAX;
    if (timeout_ms >= 0 && timeout_ms < INT64_MAX / 4000000)
        deadline = kvd__now() + timeout_ms * 1000000;
    for (;;) {
        int64_t n = kvd_arm(c) == 0 ? 0 : kvd_reap(c);
        if (n > 0) {
            if (reaped != NULL)
                *reaped = (uint64_t)n;
            return kvd__ok(error);
        }
        int64_t left = deadline == INT64_MAX ? 60000 : (deadline - kvd__now() + 999999) / 1000000;
        if (left <= 0)
            return kvd__fail(error, KVD_NO, KVD_TIMEOUT, 0, "nothing came");
        struct pollfd p = {.fd = c->epoll_fd, .events = POLLIN};
        int ready = poll(&p, 1, left < 60000 ? (int)left : 60000);
        if (ready < 0)
            return kvd__fail(error, KVD_NO, KVD_SYSTEM, errno, errno == EINTR ? "a signal came" : "poll failed");
        if (ready > 0 && (n = kvd_reap(c)) > 0) {
            if (reaped != NULL)
                *reaped = (uint64_t)n;
            return kvd__ok(error);
        }
    }
}
