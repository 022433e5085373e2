/*
 * internal.h - what the files of libkvd share.
 *
 * client.c opens, closes and makes errors; arena.c finds memory; conn.c talks on the socket; queue.c on the rings;
 * ops.c has the calls for one record, many.c those for prefixes, view.c views, batch.c batches, stream.c streams,
 * loop.c event loops.
 *
 * Locks, taken in this order: client.control, queue.lock, client.memory. Whoever waits holds none of them.
 */
#ifndef KVD_INTERNAL_H
#define KVD_INTERNAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kvd.h"
#include "kvd_ring.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "rings are little endian");
_Static_assert(sizeof(struct kvd_ring_submission) == 64 && sizeof(struct kvd_ring_completion) == 64 &&
                   sizeof(struct kvd_ring_header) == 48,
               "entries have no padding");

#define PUBLIC __attribute__((visibility("default")))

enum { PAGE = 4096, MAX_REGIONS = 64, CALL_TRIES = 16 };

/* Where the bytes of an operation are, as seen by the broker. */
enum place {
    PLACE_NONE,   /* it has none */
    PLACE_SLOT,   /* in its entry's slot, copied here */
    PLACE_DIRECT, /* in the arena or in registered memory of the caller */
    PLACE_BOUNCE  /* in bytes of the arena that the library took, copied here */
};

enum state { STATE_NEW, STATE_WAITING, STATE_LIVE, STATE_DONE };

/* Memory that the caller registered. */
struct region {
    unsigned char *address;
    uint64_t length;
    uint64_t offset;
    int fd;          /* the library's own */
    uint32_t number; /* of this connection; 0: the broker does not have it */
    uint32_t busy;   /* operations that use it */
};

/* Memory of the store, of which the broker has handed a file over. All but the first two is under client.memory. */
struct shown {
    const unsigned char *base; /* NULL: it could not be mapped, as os_error says */
    uint64_t length;
    int os_error;
    uint32_t number; /* of this connection; 0: no new view lies there */
    uint32_t views;  /* the mapping stays for them */
    struct shown *next;
};

/* One operation: in the stack of a call, in a batch, or, to cancel another, in the queue. */
struct op {
    struct op *next; /* in the queue's list of those that wait */
    kvd_batch *batch;/* NULL: of a call, or the queue's own */
    const unsigned char *key;
    unsigned char *bytes; /* the caller's: source of a put, destination of others */
    uint64_t length;      /* of bytes */
    uint64_t word;        /* version, delta, offset or cursor */
    uint64_t ttl_ms;
    uint32_t timeout_ms;
    uint32_t value_flags;
    uint16_t key_bytes;
    uint8_t code_op; /* KVD_OP_… */
    uint8_t flags;   /* condition */

    uint8_t place;
    uint8_t own;     /* the queue's: nobody waits for it */
    uint8_t resend;  /* the connection went before the broker took it */
    uint32_t tag;
    uint64_t generation; /* of the connection on which it was placed */
    uint32_t index;  /* of its entry in the submission ring */
    uint32_t block;  /* with arena bytes: the first page of their block */
    uint32_t memory;
    uint64_t offset;
    struct region *region;
    unsigned char *bounce;

    _Atomic int state; /* enum state; DONE is stored last */
    int outcome;
    int code;
    int os_error;
    char *text; /* malloc, or NULL */
    uint64_t got;
    uint64_t version;
    uint64_t expires_ms;
    uint32_t got_flags;
    int64_t number;
    struct kvd_view *view;
};

/* A queue is a ring of the connection there is; without one, base is NULL. All but users and wanted is under lock. */
struct queue {
    kvd_client *client;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* an operation has been done, or the sleeper is up */
    _Atomic uint32_t users; /* threads that call through it */
    _Atomic uint32_t wanted;/* threads that want lock */
    uint32_t sleepers;      /* threads in poll with the queue's descriptors: at most 1 */
    uint32_t waiters;       /* threads that wait for changed */
    uint64_t generation;
    unsigned char *base;
    uint64_t bytes;
    struct kvd_ring_submission *entries;
    const struct kvd_ring_completion *completions;
    unsigned char *slots;
    uint32_t depth;
    uint32_t sq_tail;
    uint32_t cq_head;
    uint32_t rung; /* entries up to here have been shown to the broker */
    int submit_fd;
    int complete_fd;
    int sleep_fd; /* an epoll of complete_fd, by its edges, and of what ends the connection */
    int broken; /* a completion was against the rules */
    uint32_t bounces;
    uint32_t free_slots;
    uint16_t slot_stack[KVD_RING_MAX_DEPTH];
    uint32_t turns[KVD_RING_MAX_DEPTH]; /* how often a slot has been used: upper bits of its tag */
    struct op *live[KVD_RING_MAX_DEPTH];
    struct op *first, *last; /* operations without a slot */
    struct op *cancels;      /* depth of them, for CANCEL */
    uint64_t reaped;         /* entries of batches that got their verdict */
    uint64_t told;           /* those that kvd_reap has returned */
};

/* Of a page of the arena: run is the length of the block that begins, or ends, here. */
struct page {
    uint32_t run;
    uint32_t head; /* of used blocks: the first page */
    uint32_t busy; /* at the first page: operations that use the block */
    uint32_t next, prev; /* of free blocks: neighbours in their list, plus 1 */
    uint8_t used;
    uint8_t bounce;
};

struct arena {
    unsigned char *base;
    uint64_t bytes;
    int fd;
    uint32_t npages;
    struct page *pages;
    uint32_t lists[32]; /* free blocks by the logarithm of their pages: the first one, plus 1 */
};

struct kvd_client {
    unsigned char *mark; /* a page that fork clears; NULL: pid decides */
    long pid;
    _Atomic int orphan;  /* in a child: descriptors are closed */

    pthread_mutex_t control; /* connecting, ending, requests on the socket */
    _Atomic uint64_t generation;
    _Atomic int connected;
    int sock, broker_pidfd, epoll_fd, notify_fd;
    uint32_t serial;
    uint32_t depth;
    uint64_t max_value;
    uint32_t arena_number;
    int64_t next_dial;  /* ns */
    int64_t backoff_ms;
    char *path, *namespace_name, *program;
    void *secret;
    uint64_t secret_bytes;
    uint32_t want_depth, timeout_ms, dial_ms, max_queues;

    struct queue queues[KVD_MAX_QUEUES];
    _Atomic uint32_t nqueues;
    _Atomic int no_more_queues; /* the broker refused one */
    _Atomic int armed;
    _Atomic uint32_t batches;
    _Atomic uint32_t views;
    _Atomic uint64_t last_view; /* number of one */

    pthread_mutex_t memory;
    pthread_cond_t freed;     /* a call has given a bounce back */
    uint32_t call_bounces;    /* bounces of calls, which end by themselves */
    struct arena arena;
    struct region *regions[MAX_REGIONS];
    _Atomic uint32_t nregions;
    struct shown *shown;
};

struct kvd_view {
    kvd_client *client;
    uint64_t number;
    uint64_t generation;
    struct shown *shown;
    uint32_t region;
    uint32_t n; /* of parts */
    int over;
    kvd_error verdict;
    uint64_t offsets[KVD_RING_MAX_PARTS]; /* of parts, in the region */
    kvd_part parts[KVD_RING_MAX_PARTS];
};

struct kvd_batch {
    kvd_client *client;
    struct queue *queue;
    struct op *ops;
    unsigned char *keys;
    size_t key_bytes, key_room;
    uint32_t capacity, n, room;
    int submitted;
    _Atomic uint32_t pending;
};

/* client.c */
int kvd__fail(kvd_error *error, int outcome, int code, int os_error, const char *text);
int kvd__ok(kvd_error *error);
int kvd__gone(kvd_client *c);
int kvd__forked(kvd_error *error);
int64_t kvd__now(void);
void kvd__close_fd(int *fd);
void kvd__out(void *to, const void *from, size_t size);
const char *kvd__says(int code);
void kvd__arena_unmap(kvd_client *c);

/* arena.c */
int kvd__arena_make(struct arena *a, uint64_t bytes);
void kvd__arena_free(struct arena *a);
unsigned char *kvd__take(kvd_client *c, uint64_t bytes, int bounce);
int kvd__give(kvd_client *c, void *address);
int kvd__use(kvd_client *c, struct op *op);
void kvd__unuse(kvd_client *c, struct op *op);
int kvd__inside(kvd_client *c, const void *address, uint64_t length);
int kvd__registered(kvd_client *c, const void *address, uint64_t length);
unsigned char *kvd__call_bounce(kvd_client *c, uint64_t bytes);
void kvd__call_unbounce(kvd_client *c, unsigned char *p);

/* conn.c */
int kvd__connect(kvd_client *c, int64_t deadline, kvd_error *error);
void kvd__lost(kvd_client *c, uint64_t generation, int code);
int kvd__more_queues(kvd_client *c);
int kvd__ended(kvd_client *c, uint64_t generation);
void kvd__bye(kvd_client *c);
int kvd__region_register(kvd_client *c, struct region *r, kvd_error *error);
int kvd__region_deregister(kvd_client *c, uint32_t number, kvd_error *error);
int kvd__wake(int fd);
void kvd__hear(kvd_client *c);

/* pidfd.c */
int kvd__pidfd(void);

/* ring.c */
int kvd__queue_map(struct queue *q, int fd, uint32_t depth);
void kvd__queue_unmap(struct queue *q);

/* queue.c */
void kvd__lock(struct queue *q);
void kvd__unlock(struct queue *q);
struct queue *kvd__pick(kvd_client *c);
void kvd__unpick(struct queue *q);
void kvd__start(struct queue *q, struct op *op);
void kvd__flush(struct queue *q);
int kvd__reap(struct queue *q);
int kvd__wait(struct queue *q, struct op *op, kvd_batch *b, int64_t deadline);
void kvd__end(struct queue *q, int code, int dead);
void kvd__done(struct queue *q, struct op *op, int outcome, int code, const char *text);
void kvd__cancel(struct queue *q, struct op *op);
int kvd__reads(const struct op *op);

/* view.c */
void kvd__shown(kvd_client *c, uint32_t number, uint64_t length, uint64_t offset, int fd);
void kvd__hidden(kvd_client *c, uint32_t number);
void kvd__hide(kvd_client *c);
void kvd__view_free(kvd_client *c);
int kvd__view_found(struct kvd_view *v, const struct kvd_ring_completion *e, const unsigned char *slot);

/* ops.c */
int kvd__run(kvd_client *c, struct op *op, kvd_error *error);
int kvd__key(const void *key, uint64_t key_bytes, uint64_t least, kvd_error *error);
int kvd__pin_time(uint64_t ms, kvd_error *error);
int kvd__how(const kvd_write *how, kvd_write *out, kvd_error *error);
int kvd__op_error(struct op *op, kvd_error *error);
void kvd__op_free(struct op *op);

/*
 * kvd__copy_in copies bytes that the broker may change meanwhile. The barrier keeps the compiler from reading them once
 * more where the copy is used.
 */
static inline void kvd__copy_in(void *to, const void *from, size_t size) {
    memcpy(to, from, size);
    __asm__ volatile("" ::: "memory");
}

/* kvd__gives tells whether the bytes of an operation go to the broker. */
static inline int kvd__gives(const struct op *op) {
    return op->code_op == KVD_OP_PUT || op->code_op == KVD_OP_PUT_APPEND;
}

static inline _Atomic uint32_t *kvd__word(struct queue *q, size_t offset) {
    return (_Atomic uint32_t *)(void *)(q->base + offset);
}

#endif
