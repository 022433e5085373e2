/*
 * queue.c - operations on the rings.
 *
 * An operation waits without a slot, is live with a slot, and is done. Whoever holds a queue's lock may submit and
 * reap for all. At most one thread of a queue sleeps on its descriptors; others wait until it is up. The submission
 * that the broker has not passed when it dies did not happen. Everything in a ring is copied before it is checked.
 */
#include "internal.h"

#include <sched.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

enum { SPIN_NS = 50000 };

void kvd__lock(struct queue *q) {
    if (pthread_mutex_trylock(&q->lock) == 0)
        return;
    atomic_fetch_add(&q->wanted, 1);
    pthread_mutex_lock(&q->lock);
    atomic_fetch_sub(&q->wanted, 1);
}

void kvd__unlock(struct queue *q) { pthread_mutex_unlock(&q->lock); }

/* kvd__pick takes a queue without a user, opens one, or shares that with the fewest. NULL: there is no connection. */
struct queue *kvd__pick(kvd_client *c) {
    for (;;) {
        uint32_t n = atomic_load(&c->nqueues), least = 0, fewest = UINT32_MAX;
        if (n == 0)
            return NULL;
        uint32_t first = n == 1 ? 0 : (uint32_t)(((uintptr_t)pthread_self() >> 12) % n);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t at = (first + i) % n, users = 0;
            if (atomic_compare_exchange_strong(&c->queues[at].users, &users, 1))
                return &c->queues[at];
            if (users < fewest) {
                fewest = users;
                least = at;
            }
        }
        if (n < c->max_queues && !atomic_load(&c->no_more_queues) && kvd__more_queues(c) == 0)
            continue;
        atomic_fetch_add(&c->queues[least].users, 1);
        return &c->queues[least];
    }
}

void kvd__unpick(struct queue *q) { atomic_fetch_sub(&q->users, 1); }

int kvd__reads(const struct op *op) {
    return op->code_op == KVD_OP_GET || op->code_op == KVD_OP_GET_RANGE || op->code_op == KVD_OP_EXISTS ||
           op->code_op == KVD_OP_SCAN || op->code_op == KVD_OP_VIEW || op->code_op == KVD_OP_VIEW_RELEASE;
}

/* kvd__done gives an operation its verdict. Its memory is the caller's again. The text is copied. */
void kvd__done(struct queue *q, struct op *op, int outcome, int code, const char *text) {
    kvd_client *c = q->client;
    if (op->block != 0 || op->region != NULL)
        kvd__unuse(c, op);
    if (op->bounce != NULL && op->batch != NULL) {
        kvd__give(c, op->bounce);
        op->bounce = NULL;
        q->bounces--;
    }
    op->code = code;
    op->outcome = outcome == KVD_UNKNOWN && kvd__reads(op) ? KVD_NO : outcome;
    if (text != NULL && *text != 0)
        op->text = strdup(text);
    kvd_batch *b = op->batch;
    atomic_store_explicit(&op->state, STATE_DONE, memory_order_release);
    if (b != NULL) {
        q->reaped++;
        atomic_fetch_sub_explicit(&b->pending, 1, memory_order_release);
    }
}

static void push_slot(struct queue *q, uint32_t slot) {
    q->live[slot] = NULL;
    q->slot_stack[q->free_slots++] = (uint16_t)slot;
}

/* locate decides where the bytes are. It returns 0; KVD_BUSY to wait for bytes of the arena; -1 with a verdict. */
static int locate(struct queue *q, struct op *op) {
    kvd_client *c = q->client;
    op->memory = 0;
    op->offset = 0;
    if (op->bytes == NULL && op->bounce == NULL) {
        op->place = PLACE_NONE;
        return 0;
    }
    int put = kvd__gives(op);
    if (op->code_op != KVD_OP_SCAN && op->bounce == NULL &&
        !(kvd__inside(c, op->bytes, 1) && op->length > KVD_SMALL / 2) &&
        (put ? op->key_bytes + op->length <= KVD_SMALL : op->length <= KVD_SMALL)) {
        op->place = PLACE_SLOT;
        return 0;
    }
    int found = kvd__use(c, op);
    if (found > 0) {
        op->place = op->bounce != NULL ? PLACE_BOUNCE : PLACE_DIRECT;
        return 0;
    }
    if (found < 0) {
        kvd__done(q, op, KVD_NO, KVD_ARGUMENT, "the bytes are not inside one block of the arena");
        return -1;
    }
    if (op->batch != NULL && op->bounce == NULL && op->length <= c->arena.bytes) {
        op->bounce = kvd__take(c, op->length, 1);
        if (op->bounce == NULL && q->bounces != 0)
            return KVD_BUSY;
        if (op->bounce == NULL) {
            kvd__done(q, op, KVD_NO, KVD_BUSY, "the arena is full");
            return -1;
        }
        q->bounces++;
        op->place = PLACE_BOUNCE;
        if (put)
            memcpy(op->bounce, op->bytes, op->length);
        if (kvd__use(c, op) > 0)
            return 0;
    }
    if (op->length > c->arena.bytes)
        kvd__done(q, op, KVD_NO, KVD_TOO_LARGE, "the value does not fit into the arena");
    else
        kvd__done(q, op, KVD_NO, KVD_BUSY, "the broker does not have the memory any more");
    return -1;
}

/* place writes an operation's entry. It returns 1; 0: there is no room yet; -1: the operation has its verdict. */
static int place(struct queue *q, struct op *op) {
    if (q->free_slots == 0 || q->sq_tail - atomic_load(kvd__word(q, KVD_RING_SQ_HEAD)) >= q->depth)
        return 0;
    int at = locate(q, op);
    if (at != 0)
        return at < 0 ? -1 : 0;
    uint32_t slot = q->slot_stack[--q->free_slots];
    unsigned char *bytes = q->slots + (size_t)slot * KVD_RING_SLOT;
    op->tag = slot | q->turns[slot]++ * q->depth;
    op->index = q->sq_tail;
    op->generation = q->generation;
    if (op->key_bytes != 0)
        memcpy(bytes, op->key, op->key_bytes);
    int put = kvd__gives(op);
    if (put && op->place == PLACE_SLOT && op->length != 0)
        memcpy(bytes + op->key_bytes, op->bytes, op->length);
    struct kvd_ring_submission s = {
        .op = op->code_op, .flags = op->flags, .key_bytes = op->key_bytes, .tag = op->tag, .memory = op->memory,
        .offset = op->offset, .length = op->length, .word = op->word, .ttl_ms = op->ttl_ms,
        .timeout_ms = op->timeout_ms != 0 ? op->timeout_ms : q->client->timeout_ms, .value_flags = op->value_flags,
    };
    q->entries[q->sq_tail & (q->depth - 1)] = s;
    q->live[slot] = op;
    q->sq_tail++;
    atomic_store(&op->state, STATE_LIVE);
    return 1;
}

/* ring_bell shows new entries to the broker, and wakes it if it sleeps. */
static void ring_bell(struct queue *q) {
    if (q->rung == q->sq_tail)
        return;
    q->rung = q->sq_tail;
    atomic_store(kvd__word(q, KVD_RING_SQ_TAIL), q->sq_tail);
    _Atomic uint32_t *sleeps = kvd__word(q, KVD_RING_BROKER_SLEEPS);
    if (atomic_load(sleeps) != 0 && atomic_exchange(sleeps, 0) != 0)
        kvd__wake(q->submit_fd);
}

/* kvd__flush places as many of the waiting operations as there is room for. */
void kvd__flush(struct queue *q) {
    while (q->first != NULL && q->base != NULL && !q->broken) {
        struct op *op = q->first, *last = q->last;
        q->first = op->next; /* with a verdict the operation is the caller's again */
        if (q->first == NULL)
            q->last = NULL;
        if (place(q, op) != 0)
            continue;
        q->first = op;
        q->last = last;
        break;
    }
    if (q->base != NULL)
        ring_bell(q);
}

/* kvd__start puts an operation behind those that wait; kvd__flush places it. */
void kvd__start(struct queue *q, struct op *op) {
    op->next = NULL;
    op->place = PLACE_NONE;
    op->block = 0;
    op->region = NULL;
    op->resend = 0;
    atomic_store_explicit(&op->state, STATE_WAITING, memory_order_relaxed);
    if (q->last != NULL)
        q->last->next = op;
    else
        q->first = op;
    q->last = op;
}

/* kvd__cancel ends an operation that waits, or asks the broker to end it. Without room nothing is done. */
void kvd__cancel(struct queue *q, struct op *op) {
    int state = atomic_load(&op->state);
    if (state == STATE_WAITING) {
        struct op **at = &q->first, *before = NULL;
        while (*at != NULL && *at != op) {
            before = *at;
            at = &(*at)->next;
        }
        if (*at == NULL)
            return;
        *at = op->next;
        if (q->last == op)
            q->last = before;
        kvd__done(q, op, KVD_NO, KVD_CANCELLED, NULL);
    } else if (state == STATE_LIVE && q->base != NULL && q->free_slots != 0) {
        struct op *cancel = &q->cancels[q->slot_stack[q->free_slots - 1]];
        memset(cancel, 0, sizeof *cancel);
        cancel->code_op = KVD_OP_CANCEL;
        cancel->word = op->tag;
        cancel->own = 1;
        (void)place(q, cancel);
    }
}

/* number reads the decimal text of a counter. */
static int number(const char *text, uint64_t n, int64_t *out) {
    char copy[24], *end;
    if (n == 0 || n >= sizeof copy || text[0] == ' ' || text[0] == '+')
        return -1;
    memcpy(copy, text, n);
    copy[n] = 0;
    errno = 0;
    long long v = strtoll(copy, &end, 10);
    if (end != copy + n || errno != 0)
        return -1;
    *out = v;
    return 0;
}

/* success checks a completion without an error and moves its bytes. -1: it is against the rules. */
static int success(struct op *op, const struct kvd_ring_completion *e, const unsigned char *slot) {
    switch (op->code_op) {
    case KVD_OP_GET:
    case KVD_OP_GET_RANGE:
    case KVD_OP_SCAN:
        if (e->length > op->length || (op->place == PLACE_SLOT && e->length > KVD_RING_SLOT) ||
            (op->place == PLACE_NONE && e->length != 0))
            return -1;
        if (op->place == PLACE_SLOT)
            memcpy(op->bytes, slot, e->length);
        else if (op->place == PLACE_BOUNCE && op->bytes != NULL)
            memcpy(op->bytes, op->bounce, e->length);
        break;
    case KVD_OP_INCR: {
        char text[24];
        if (e->length >= sizeof text)
            return -1;
        kvd__copy_in(text, slot, e->length);
        if (number(text, e->length, &op->number) != 0)
            return -1;
        break;
    }
    case KVD_OP_VIEW:
        if (kvd__view_found(op->view, e, slot) != 0)
            return -1;
        break;
    default:
        break;
    }
    op->got = e->length;
    return 0;
}

/* failure checks one with an error, and copies its text. */
static int failure(struct op *op, const struct kvd_ring_completion *e, const unsigned char *slot, char *text,
                   size_t room) {
    size_t n = 0;
    if (e->code == KVD_SHORT_BUFFER) {
        if ((op->code_op != KVD_OP_GET && op->code_op != KVD_OP_SCAN) || e->length <= op->length)
            return -1;
        op->got = e->length;
    } else {
        if (e->length > KVD_RING_SLOT)
            return -1;
        n = e->length < room - 1 ? (size_t)e->length : room - 1;
        kvd__copy_in(text, slot, n);
    }
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)text[i] < 32 || text[i] == 127)
            text[i] = '?';
    while (n == room - 1 && n > 0 && ((unsigned char)text[n - 1] & 0x80) != 0)
        n--; /* a character that the cut may have divided */
    text[n] = 0;
    return 0;
}

/* complete takes one completion. -1: it is against the rules, and nothing was done. */
static int complete(struct queue *q, const struct kvd_ring_completion *e) {
    uint32_t slot = e->tag & (q->depth - 1);
    struct op *op = q->live[slot];
    char text[240] = "";
    if (op == NULL || op->tag != e->tag || e->outcome > KVD_UNKNOWN || e->code > KVD_SYSTEM ||
        (e->code == KVD_OK) != (e->outcome == KVD_YES))
        return -1;
    const unsigned char *bytes = q->slots + (size_t)slot * KVD_RING_SLOT;
    if (!op->own) {
        op->got = 0;
        if ((e->code == KVD_OK ? success(op, e, bytes) : failure(op, e, bytes, text, sizeof text)) != 0)
            return -1;
        op->version = e->version;
        op->expires_ms = e->expires_ms;
        op->got_flags = e->value_flags;
    }
    push_slot(q, slot);
    if (!op->own)
        kvd__done(q, op, e->outcome, e->code, text);
    return 0;
}

/*
 * kvd__reap takes what has been completed, and places what waited. It returns how many operations ended; -1: the
 * broker broke a rule, and the caller ends the connection by kvd__lost without the lock.
 */
int kvd__reap(struct queue *q) {
    if (q->base == NULL)
        return 0;
    if (q->broken)
        return -1;
    uint32_t tail = atomic_load_explicit(kvd__word(q, KVD_RING_CQ_TAIL), memory_order_acquire);
    uint32_t n = tail - q->cq_head;
    if (n > q->depth || (uint32_t)(q->sq_tail - atomic_load(kvd__word(q, KVD_RING_SQ_HEAD))) > q->depth)
        q->broken = 1;
    uint64_t before = q->reaped;
    for (uint32_t i = 0; i < n && !q->broken; i++) {
        struct kvd_ring_completion e;
        kvd__copy_in(&e, &q->completions[q->cq_head & (q->depth - 1)], sizeof e);
        if (complete(q, &e) != 0)
            q->broken = 1;
        else
            q->cq_head++;
    }
    if (n != 0)
        atomic_store_explicit(kvd__word(q, KVD_RING_CQ_HEAD), q->cq_head, memory_order_release);
    if (q->first != NULL)
        kvd__flush(q);
    if (n != 0) {
        if (q->sleepers != 0)
            kvd__wake(q->complete_fd);
        if (q->waiters != 0)
            pthread_cond_broadcast(&q->changed);
        if (q->reaped != before && atomic_load_explicit(&q->client->armed, memory_order_relaxed) &&
            atomic_exchange(&q->client->armed, 0))
            kvd__wake(q->client->notify_fd);
    }
    return q->broken ? -1 : (int)n;
}

/*
 * kvd__end gives every operation of a queue its verdict, when the connection has ended. If over, the broker touches
 * nothing any more; else bytes that it has stay in use for ever.
 */
void kvd__end(struct queue *q, int code, int over) {
    if (q->base == NULL)
        return;
    (void)kvd__reap(q);
    uint32_t head = atomic_load(kvd__word(q, KVD_RING_SQ_HEAD));
    if ((uint32_t)(q->sq_tail - head) > q->depth)
        head = q->sq_tail;
    for (uint32_t slot = 0; slot < q->depth; slot++) {
        struct op *op = q->live[slot];
        if (op == NULL)
            continue;
        push_slot(q, slot);
        if (op->own)
            continue;
        int taken = (int32_t)(head - op->index) > 0;
        if (!over && taken) {
            op->block = 0; /* its page stays busy */
            op->region = NULL;
        } else if (taken && kvd__reads(op) && op->place == PLACE_DIRECT) {
            memset(op->bytes, 0, op->length);
        }
        if (!over && taken && op->bounce != NULL && op->batch != NULL)
            op->bounce = NULL;
        op->resend = !taken && code != KVD_PROTOCOL;
        kvd__done(q, op, taken ? KVD_UNKNOWN : KVD_NO, code,
                  taken ? "the connection ended while the broker had the operation"
                        : "the connection ended before the broker had the operation");
    }
    while (q->first != NULL) {
        struct op *op = q->first;
        q->first = op->next;
        op->resend = code != KVD_PROTOCOL;
        kvd__done(q, op, KVD_NO, code, "the connection ended before the broker had the operation");
    }
    q->last = NULL;
}

/* nearby tells whether the broker runs on this processor, where spinning would hold it up. */
static int nearby(struct queue *q, uint32_t *cpu) {
    int here = sched_getcpu();
    if (here < 0)
        return 1;
    if ((uint32_t)here != *cpu) {
        *cpu = (uint32_t)here;
        atomic_store_explicit(kvd__word(q, KVD_RING_CLIENT_CPU), *cpu, memory_order_relaxed);
    }
    return atomic_load_explicit(kvd__word(q, KVD_RING_BROKER_CPU), memory_order_relaxed) == *cpu;
}

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* spin looks for a completion for a while, if that does not hold up the broker. It returns 1 when there is one. */
static int spin(struct queue *q) {
    uint32_t cpu = UINT32_MAX;
    int64_t end = 0;
    for (int i = 0;; i++) {
        if (atomic_load_explicit(kvd__word(q, KVD_RING_CQ_TAIL), memory_order_acquire) != q->cq_head)
            return 1;
        if (i % 64 == 0) {
            if (nearby(q, &cpu) || atomic_load_explicit(&q->wanted, memory_order_relaxed) != 0)
                return 0;
            int64_t now = kvd__now();
            if (end == 0)
                end = now + SPIN_NS;
            else if (now >= end)
                return 0;
        }
        relax();
    }
}

/* doze sleeps on the queue's descriptors, without its lock, and looks whether the connection has ended. */
static void doze(struct queue *q, int64_t deadline) {
    kvd_client *c = q->client;
    uint64_t generation = q->generation;
    struct epoll_event ev[2];
    atomic_store(kvd__word(q, KVD_RING_CLIENT_SLEEPS), 1);
    if (atomic_load(kvd__word(q, KVD_RING_CQ_TAIL)) != q->cq_head)
        return;
    int timeout = -1, fd = q->sleep_fd;
    if (deadline != INT64_MAX) {
        int64_t left = (deadline - kvd__now() + 999999) / 1000000;
        if (left <= 0)
            return;
        timeout = left < 60000 ? (int)left : 60000;
    }
    q->sleepers = 1;
    kvd__unlock(q);
    int n = epoll_wait(fd, ev, 2, timeout);
    kvd__lock(q);
    q->sleepers = 0;
    if (q->waiters != 0)
        pthread_cond_broadcast(&q->changed);
    if ((n > 0 && ev[0].data.u32 != 0) || (n > 1 && ev[1].data.u32 != 0)) {
        kvd__unlock(q);
        kvd__ended(c, generation);
        kvd__lock(q);
    }
}

static int is_done(struct op *op, kvd_batch *b) {
    return op != NULL ? atomic_load_explicit(&op->state, memory_order_acquire) == STATE_DONE
                      : atomic_load_explicit(&b->pending, memory_order_acquire) == 0;
}

/*
 * kvd__wait waits, with the lock, for an operation or for a whole batch, and reaps for all meanwhile. It returns 1 when
 * the deadline passes first; INT64_MAX is none.
 */
int kvd__wait(struct queue *q, struct op *op, kvd_batch *b, int64_t deadline) {
    int late = 0;
    for (;;) {
        if (kvd__reap(q) < 0) {
            uint64_t generation = q->generation;
            kvd__unlock(q);
            kvd__lost(q->client, generation, KVD_PROTOCOL);
            kvd__lock(q);
            continue;
        }
        if (is_done(op, b) || q->base == NULL)
            break;
        if (deadline != INT64_MAX && kvd__now() >= deadline) {
            late = 1;
            break;
        }
        if (q->sleepers != 0) {
            q->waiters++;
            if (deadline == INT64_MAX) {
                pthread_cond_wait(&q->changed, &q->lock);
            } else {
                struct timespec t = {.tv_sec = deadline / 1000000000, .tv_nsec = deadline % 1000000000};
                pthread_cond_timedwait(&q->changed, &q->lock, &t);
            }
            q->waiters--;
        } else if (!spin(q)) {
            doze(q, deadline);
        }
    }
    if (q->waiters != 0)
        pthread_cond_broadcast(&q->changed); /* one of them sleeps in our place */
    return late;
}
