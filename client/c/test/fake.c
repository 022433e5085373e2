/*
 * fake.c - a stand-in of a broker, for what a real one never does: stop at a chosen point, or lie.
 * usage: fake SOCKET FD, where FD is a memfd with a struct fake.
 */
#define _GNU_SOURCE
#include "fake.h"

#include "../kvd_ring.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { CONNS = 32, QUEUES = 8, MEMS = 66, OK = 0, NOT_FOUND = 1, CONDITION = 2, TOO_LARGE = 3, SHORT = 4, TYPE = 5, CANCELLED = 7, ARGUMENT = 12, STALE = 13, VIEW_EXPIRED = 16, PROTOCOL = 17, UNSUPPORTED = 19, VIEWS = 64, REGION = FAKE_VALUE + (1 << 20), PART = 1 << 20 };

struct queue {
    unsigned char *base;
    uint64_t bytes, sq, cq, slots;
    uint32_t depth, head, tail;
    int submit, complete;
    struct kvd_ring_submission held[KVD_RING_MAX_DEPTH];
    uint32_t nheld;
};

struct conn {
    int sock;
    struct queue queues[QUEUES];
    uint32_t nqueues, depth;
    unsigned char *mem[MEMS];
    uint64_t mem_bytes[MEMS];
    unsigned char *region;
    uint32_t region_number;
    uint64_t views[VIEWS]; /* numbers; 0: none */
};

static struct fake *fake;
static struct conn conns[CONNS];
static uint32_t rnd_state = 1;

static uint32_t rnd(void) {
    rnd_state ^= rnd_state << 13;
    rnd_state ^= rnd_state >> 17;
    rnd_state ^= rnd_state << 5;
    return rnd_state;
}

static _Atomic uint32_t *word(struct queue *q, size_t at) { return (_Atomic uint32_t *)(void *)(q->base + at); }

static void reply(int sock, uint16_t type, uint32_t serial, const void *body, size_t n, const int *fds, size_t nfds) {
    unsigned char bytes[4096] = {0};
    uint32_t length = (uint32_t)(16 + n);
    memcpy(bytes, &type, 2);
    memcpy(bytes + 4, &length, 4);
    memcpy(bytes + 8, &serial, 4);
    memcpy(bytes + 16, body, n);
    union { struct cmsghdr a; char b[CMSG_SPACE(sizeof(int) * 8)]; } control;
    memset(&control, 0, sizeof control);
    struct iovec iov = {bytes, length};
    struct msghdr h = {.msg_iov = &iov, .msg_iovlen = 1};
    if (nfds != 0) {
        h.msg_control = control.b;
        h.msg_controllen = CMSG_SPACE(sizeof(int) * nfds);
        struct cmsghdr *c = CMSG_FIRSTHDR(&h);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * nfds);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * nfds);
    }
    if (sendmsg(sock, &h, MSG_NOSIGNAL) < 0)
        perror("fake: sendmsg");
}

static int make_queue(struct conn *c, int fds[3]) {
    if (c->nqueues == QUEUES)
        return -1;
    struct queue *q = &c->queues[c->nqueues];
    memset(q, 0, sizeof *q);
    uint64_t d = c->depth, sq = 4096, cq = (sq + d * 64 + 4095) & ~UINT64_C(4095), slots = (cq + d * 64 + 4095) & ~UINT64_C(4095);
    q->depth = c->depth;
    q->sq = sq;
    q->cq = cq;
    q->slots = slots;
    q->bytes = slots + d * 1024;
    int fd = memfd_create("ring", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0 || ftruncate(fd, (off_t)q->bytes) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        exit(3);
    q->base = mmap(NULL, q->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    struct kvd_ring_header h = {.magic = KVD_RING_MAGIC, .major = KVD_RING_MAJOR, .depth = c->depth, .sq_offset = sq, .cq_offset = cq, .slots_offset = slots, .bytes = q->bytes};
    if (atomic_load(&fake->mode) == FAKE_GARBAGE && rnd() % 4 == 0)
        ((unsigned char *)&h)[rnd() % sizeof h] ^= (unsigned char)(1u << rnd() % 8);
    memcpy(q->base, &h, sizeof h);
    q->submit = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    q->complete = eventfd(0, EFD_CLOEXEC);
    fds[0] = fd;
    fds[1] = q->submit;
    fds[2] = q->complete;
    c->nqueues++;
    return 0;
}

static void drop(struct conn *c) {
    for (uint32_t i = 0; i < c->nqueues; i++) {
        munmap(c->queues[i].base, c->queues[i].bytes);
        close(c->queues[i].submit);
        close(c->queues[i].complete);
    }
    for (int i = 0; i < MEMS; i++)
        if (c->mem[i] != NULL)
            munmap(c->mem[i], c->mem_bytes[i]);
    if (c->region != NULL)
        munmap(c->region, REGION);
    for (int i = 0; i < VIEWS; i++)
        if (c->views[i] != 0)
            atomic_fetch_sub(&fake->views, 1);
    close(c->sock);
    memset(c, 0, sizeof *c);
    c->sock = -1;
}

static void refuse(int sock, uint32_t serial, uint8_t code) {
    unsigned char body[64] = {1, code};
    const char *text = "the fake says no";
    uint32_t n = (uint32_t)strlen(text);
    memcpy(body + 4, &n, 4);
    memcpy(body + 8, text, n);
    reply(sock, KVD_MSG_REFUSED, serial, body, 8 + n, NULL, 0);
}

static void on_hello(struct conn *c, uint32_t serial, const unsigned char *b, const int *fds, int nfds) {
    unsigned char body[56] = {0};
    uint32_t magic = KVD_RING_MAGIC, depth, one = 1;
    uint64_t arena, max = FAKE_VALUE;
    uint16_t major = 1;
    memcpy(&depth, b + 8, 4);
    memcpy(&arena, b + 16, 8);
    memcpy(&fake->generation, b + 24, 8);
    atomic_fetch_add(&fake->clients, 1);
    if (atomic_load(&fake->refuse) != 0) {
        refuse(c->sock, serial, (uint8_t)atomic_load(&fake->refuse));
        return;
    }
    c->depth = depth != 0 ? depth : 64;
    if (arena != 0) {
        if (nfds != 2)
            exit(4);
        c->mem[1] = mmap(NULL, arena, PROT_READ | PROT_WRITE, MAP_SHARED, fds[1], 0);
        c->mem_bytes[1] = arena;
    }
    int send[4];
    send[0] = (int)syscall(434, getpid(), 0);
    make_queue(c, send + 1);
    memcpy(body, &magic, 4);
    memcpy(body + 4, &major, 2);
    memcpy(body + 8, &c->depth, 4);
    memcpy(body + 12, &one, arena != 0 ? 4 : 0);
    memcpy(body + 16, &max, 8);
    uint32_t max_key = 1024;
    memcpy(body + 24, &max_key, 4);
    if (atomic_load(&fake->mode) == FAKE_GARBAGE && rnd() % 4 == 0)
        body[rnd() % sizeof body] ^= (unsigned char)(1u << rnd() % 8);
    reply(c->sock, KVD_MSG_WELCOME, serial, body, sizeof body, send, 4);
    close(send[0]);
    close(send[1]);
}

static void on_message(struct conn *c) {
    unsigned char b[4096];
    union { struct cmsghdr a; char b[CMSG_SPACE(sizeof(int) * 8)]; } control;
    struct iovec iov = {b, sizeof b};
    struct msghdr h = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.b, .msg_controllen = sizeof control};
    int fds[8], nfds = 0;
    ssize_t n = recvmsg(c->sock, &h, MSG_CMSG_CLOEXEC);
    if (n < 16) {
        drop(c);
        return;
    }
    for (struct cmsghdr *m = CMSG_FIRSTHDR(&h); m != NULL; m = CMSG_NXTHDR(&h, m))
        for (size_t i = 0; i < (m->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++)
            memcpy(&fds[nfds++], CMSG_DATA(m) + i * sizeof(int), sizeof(int));
    uint16_t type;
    uint32_t serial, answer[2] = {0, 0};
    memcpy(&type, b, 2);
    memcpy(&serial, b + 8, 4);
    if (atomic_load(&fake->mode) == FAKE_MUTE)
        type = 0;
    switch (type) {
    case KVD_MSG_HELLO:
        on_hello(c, serial, b + 16, fds, nfds);
        break;
    case KVD_MSG_QUEUE: {
        int send[3];
        answer[0] = c->nqueues;
        if (atomic_load(&fake->mode) == FAKE_ONE_QUEUE || make_queue(c, send) != 0) {
            refuse(c->sock, serial, 15);
            break;
        }
        reply(c->sock, KVD_MSG_QUEUED, serial, answer, 8, send, 3);
        close(send[0]);
        break;
    }
    case KVD_MSG_REGISTER: {
        uint64_t offset, length;
        uint32_t at = 2;
        memcpy(&offset, b + 16, 8);
        memcpy(&length, b + 24, 8);
        while (at < MEMS && c->mem[at] != NULL)
            at++;
        void *p = nfds == 1 ? mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], (off_t)offset) : MAP_FAILED;
        if (p == MAP_FAILED) {
            refuse(c->sock, serial, ARGUMENT);
            break;
        }
        c->mem[at] = p;
        c->mem_bytes[at] = length;
        answer[0] = at;
        reply(c->sock, KVD_MSG_DONE, serial, answer, 8, NULL, 0);
        break;
    }
    case KVD_MSG_DEREGISTER:
        memcpy(answer, b + 16, 4);
        if (answer[0] < MEMS && c->mem[answer[0]] != NULL) {
            munmap(c->mem[answer[0]], c->mem_bytes[answer[0]]);
            c->mem[answer[0]] = NULL;
        }
        reply(c->sock, KVD_MSG_DONE, serial, answer, 8, NULL, 0);
        break;
    case KVD_MSG_BYE:
        for (int i = 0; i < nfds; i++)
            close(fds[i]);
        drop(c);
        return;
    }
    for (int i = 0; i < nfds; i++)
        close(fds[i]);
}

static struct fake_record *find(const unsigned char *key, uint32_t n, int make) {
    struct fake_record *spare = NULL;
    for (int i = 0; i < FAKE_RECORDS; i++) {
        struct fake_record *r = &fake->records[i];
        if (r->used && r->key_bytes == n && memcmp(r->key, key, n) == 0)
            return r;
        if (!r->used && spare == NULL)
            spare = r;
    }
    if (make && spare != NULL && n <= FAKE_KEY) {
        spare->key_bytes = n;
        memcpy(spare->key, key, n);
        return spare;
    }
    return NULL;
}

static void complete(struct conn *c, struct queue *q, const struct kvd_ring_completion *e) {
    (void)c;
    memcpy(q->base + q->cq + (q->tail & (q->depth - 1)) * 64ull, e, sizeof *e);
    q->tail++;
    atomic_store(word(q, KVD_RING_CQ_TAIL), q->tail);
    if (atomic_load(word(q, KVD_RING_CLIENT_SLEEPS)) != 0 && atomic_exchange(word(q, KVD_RING_CLIENT_SLEEPS), 0) != 0) {
        uint64_t one = 1;
        if (write(q->complete, &one, 8) != 8)
            exit(5);
    }
}

static unsigned char *memory(struct conn *c, const struct kvd_ring_submission *s, uint64_t n) {
    if (s->memory >= MEMS || c->mem[s->memory] == NULL || s->offset > c->mem_bytes[s->memory] || n > c->mem_bytes[s->memory] - s->offset)
        exit(6); /* the library named memory that it does not have */
    return c->mem[s->memory] + s->offset;
}

static void told(struct kvd_ring_completion *e, const struct fake_record *r) {
    e->version = r->version;
    e->expires_ms = r->expires_ms;
    e->value_flags = r->flags;
}

static uint64_t soon(uint64_t ttl) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return ttl == 0 ? 0 : (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000 + ttl;
}

static uint8_t do_put(struct conn *c, const struct kvd_ring_submission *s, const unsigned char *key, struct kvd_ring_completion *e) {
    struct fake_record *r = find(key, s->key_bytes, 0);
    if ((s->flags == 1 && r != NULL) || (s->flags == 2 && r == NULL) || (s->flags == 4 && r != NULL && r->version != s->word))
        return CONDITION;
    if (s->flags == 4 && r == NULL)
        return NOT_FOUND;
    if (s->length > FAKE_VALUE)
        return TOO_LARGE;
    r = find(key, s->key_bytes, 1);
    if (r == NULL)
        return 10;
    if (s->memory == 0 && s->key_bytes + s->length > 1024)
        exit(7);
    memcpy(r->value, s->memory == 0 ? key + s->key_bytes : memory(c, s, s->length), s->length);
    r->length = s->length;
    r->version = atomic_fetch_add(&fake->version, 1) + 1;
    r->expires_ms = soon(s->ttl_ms);
    r->flags = s->value_flags;
    r->used = 1;
    told(e, r);
    return OK;
}

static uint8_t do_get(struct conn *c, const struct kvd_ring_submission *s, unsigned char *key, struct kvd_ring_completion *e) {
    struct fake_record *r = find(key, s->key_bytes, 0);
    if (r == NULL)
        return NOT_FOUND;
    told(e, r);
    uint64_t from = 0, n = r->length;
    if (s->op == KVD_OP_GET_RANGE) {
        from = s->word < r->length ? s->word : r->length;
        n = r->length - from < s->length ? r->length - from : s->length;
    }
    e->length = n;
    if (s->op == KVD_OP_EXISTS) {
        if (s->word == KVD_RING_WITHOUT_LENGTH)
            e->length = 0;
        return OK;
    }
    if (n > s->length || (s->memory == 0 && n > 1024))
        return SHORT;
    memcpy(s->memory == 0 ? key : memory(c, s, n), r->value + from, n);
    return OK;
}

static uint8_t do_incr(const struct kvd_ring_submission *s, unsigned char *slot, struct kvd_ring_completion *e) {
    struct fake_record *r = find(slot, s->key_bytes, 0);
    char text[32] = "0", *end;
    if (r != NULL && r->length < sizeof text)
        memcpy(text, r->value, r->length), text[r->length] = 0;
    long long v = strtoll(text, &end, 10);
    if ((r != NULL && r->length >= sizeof text) || *end != 0 || end == text)
        return TYPE;
    r = find(slot, s->key_bytes, 1);
    if (r == NULL)
        return 10;
    r->length = (uint64_t)snprintf(text, sizeof text, "%lld", v + (long long)s->word);
    memcpy(r->value, text, r->length);
    r->version = atomic_fetch_add(&fake->version, 1) + 1;
    r->used = 1;
    told(e, r);
    memcpy(slot, text, r->length);
    e->length = r->length;
    return OK;
}

static uint8_t do_scan(struct conn *c, const struct kvd_ring_submission *s, const unsigned char *prefix, struct kvd_ring_completion *e) {
    unsigned char *out = s->op == KVD_OP_SCAN ? memory(c, s, s->length) : NULL;
    uint64_t n = 0, i = s->op == KVD_OP_SCAN ? s->word : 0, deleted = 0;
    for (; i < FAKE_RECORDS; i++) {
        struct fake_record *r = &fake->records[i];
        if (!r->used || r->key_bytes < s->key_bytes || memcmp(r->key, prefix, s->key_bytes) != 0)
            continue;
        if (s->op == KVD_OP_DELETE_PREFIX) {
            r->used = 0;
            deleted++;
            continue;
        }
        if (n >= 64 || n + 2 + r->key_bytes > s->length)
            break;
        out[n] = (unsigned char)r->key_bytes;
        out[n + 1] = (unsigned char)(r->key_bytes >> 8);
        memcpy(out + n + 2, r->key, r->key_bytes);
        n += 2 + r->key_bytes;
    }
    e->length = n;
    e->version = s->op == KVD_OP_SCAN ? (i == FAKE_RECORDS ? 0 : i) : deleted;
    return OK;
}

/* hand_over makes a region for views, and tells of it. */
static void hand_over(struct conn *c, uint32_t lie) {
    struct { uint32_t region, zero; uint64_t length, offset; } body = {++c->region_number, 0, REGION, 0};
    int fd = memfd_create("kvd-region", MFD_CLOEXEC | MFD_ALLOW_SEALING), other = -1;
    if (fd < 0 || ftruncate(fd, REGION) != 0 || (lie != LIE_UNSEALED && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) != 0))
        exit(9);
    if (c->region != NULL)
        munmap(c->region, REGION);
    c->region = mmap(NULL, REGION, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (lie == LIE_SHORT)
        body.length += 4096;
    if (lie == LIE_UNALIGNED)
        body.offset = 100, body.length -= 4096;
    if (lie == LIE_FILE)
        other = open("/dev/zero", O_RDONLY | O_CLOEXEC);
    if (lie != LIE_UNTOLD)
        reply(c->sock, KVD_MSG_REGION, 0, &body, sizeof body, other >= 0 ? &other : &fd, lie != LIE_NO_FILE);
    close(fd);
    if (other >= 0)
        close(other);
}

static uint8_t do_view(struct conn *c, const struct kvd_ring_submission *s, unsigned char *slot, struct kvd_ring_completion *e) {
    struct fake_record *r = find(slot, s->key_bytes, 0);
    uint32_t lie = atomic_load(&fake->lie);
    uint64_t parts[64][2] = {{0}}, from = 4096 + 7;
    int at = -1;
    if (r == NULL || r->length == 0)
        return r == NULL ? NOT_FOUND : UNSUPPORTED;
    for (int i = VIEWS - 1; i >= 0; i--) {
        if (c->views[i] == s->word)
            exit(10); /* the number is taken */
        at = c->views[i] == 0 ? i : at;
    }
    if (at < 0)
        return 15;
    if (c->region == NULL || lie != LIE_NONE)
        hand_over(c, lie);
    memcpy(c->region + from, r->value, r->length);
    told(e, r);
    e->length = r->length;
    e->region = c->region_number + (lie == LIE_REGION);
    e->offset = from;
    if (r->length > PART || lie >= LIE_PARTS) {
        e->flags = KVD_RING_CHUNKED;
        for (uint64_t i = 0, left = r->length; left != 0; i++) {
            parts[i][0] = from + i * PART;
            parts[i][1] = left < PART ? left : PART;
            left -= parts[i][1];
        }
    }
    if (lie == LIE_OFFSET)
        e->offset = REGION + 1;
    else if (lie == LIE_LENGTH)
        e->offset = REGION - r->length + 1;
    else if (lie == LIE_WRAPS)
        e->offset = UINT64_MAX - r->length / 2;
    else if (lie == LIE_EMPTY)
        e->length = 0;
    else if (lie == LIE_FLAGS)
        e->flags = 2;
    else if (lie == LIE_PARTS)
        parts[0][1] = r->length + 1;
    else if (lie == LIE_NO_PART)
        parts[0][1] = 0;
    else if (lie == LIE_MANY)
        for (int i = 0; i < 64; i++)
            parts[i][1] = 1;
    if (e->flags == KVD_RING_CHUNKED)
        memcpy(slot, parts, sizeof parts);
    if (lie != LIE_NONE) { /* the next one comes with an honest region */
        munmap(c->region, REGION);
        c->region = NULL;
    }
    c->views[at] = s->word;
    atomic_fetch_add(&fake->views, 1);
    return OK;
}

static uint8_t do_release(struct conn *c, const struct kvd_ring_submission *s) {
    for (int i = 0; i < VIEWS; i++)
        if (c->views[i] == s->word && s->word != 0) {
            c->views[i] = 0;
            atomic_fetch_sub(&fake->views, 1);
            return atomic_load(&fake->expires) ? VIEW_EXPIRED : OK;
        }
    return VIEW_EXPIRED;
}

/* forget takes the region back; the next view is in another. */
static void forget(struct conn *c) {
    uint32_t body[2] = {c->region_number, 0};
    reply(c->sock, KVD_MSG_REGION_GONE, 0, body, sizeof body, NULL, 0);
    munmap(c->region, REGION);
    c->region = NULL;
}

/* One stream at a time is enough for the tests; its number is always 1, as of a broker that begins anew. */
static struct {
    struct kvd_ring_submission begin;
    unsigned char key[FAKE_KEY], *value;
    uint64_t at;
} stream;

static uint8_t do_stream(struct conn *c, const struct kvd_ring_submission *s, unsigned char *slot, struct kvd_ring_completion *e) {
    if (s->op == KVD_OP_PUT_BEGIN) {
        if (s->length > FAKE_VALUE)
            return TOO_LARGE;
        if (stream.value != NULL || s->key_bytes > FAKE_KEY)
            exit(9);
        stream.value = malloc(s->length + 1);
        stream.begin = *s;
        stream.at = 0;
        memcpy(stream.key, slot, s->key_bytes);
        e->version = 1;
        return OK;
    }
    if (stream.value == NULL || s->word != 1)
        return STALE;
    if (s->op == KVD_OP_PUT_APPEND) {
        if (s->length > stream.begin.length - stream.at || (s->memory == 0 && s->length > 1024))
            exit(10); /* the library counts what is left */
        memcpy(stream.value + stream.at, s->memory == 0 ? slot : memory(c, s, s->length), s->length);
        stream.at += s->length;
        return OK;
    }
    struct fake_record *r = s->op == KVD_OP_PUT_COMMIT ? find(stream.key, stream.begin.key_bytes, 1) : NULL;
    if (r != NULL) {
        memcpy(r->value, stream.value, stream.at);
        r->length = stream.at;
        r->version = atomic_fetch_add(&fake->version, 1) + 1;
        r->expires_ms = soon(stream.begin.ttl_ms);
        r->flags = stream.begin.value_flags;
        r->used = 1;
        told(e, r);
    }
    free(stream.value);
    stream.value = NULL;
    return OK;
}

static uint8_t act(struct conn *c, const struct kvd_ring_submission *s, unsigned char *slot, struct kvd_ring_completion *e) {
    struct fake_record *r;
    switch (s->op) {
    case KVD_OP_GET:
    case KVD_OP_GET_RANGE:
    case KVD_OP_EXISTS:
        return do_get(c, s, slot, e);
    case KVD_OP_PUT:
        return do_put(c, s, slot, e);
    case KVD_OP_DELETE:
    case KVD_OP_TOUCH:
    case KVD_OP_PIN:
    case KVD_OP_UNPIN:
        r = find(slot, s->key_bytes, 0);
        if (r == NULL)
            return NOT_FOUND;
        if (s->flags == 4 && s->word != r->version)
            return CONDITION;
        if (s->op == KVD_OP_DELETE)
            r->used = 0;
        else if (s->op != KVD_OP_TOUCH)
            r->pinned_ms = s->ttl_ms;
        else
            r->expires_ms = soon(s->ttl_ms);
        told(e, r);
        return OK;
    case KVD_OP_INCR:
        return do_incr(s, slot, e);
    case KVD_OP_SCAN:
    case KVD_OP_DELETE_PREFIX:
        return do_scan(c, s, slot, e);
    case KVD_OP_VIEW:
        return do_view(c, s, slot, e);
    case KVD_OP_VIEW_RELEASE:
        return do_release(c, s);
    case KVD_OP_PUT_BEGIN:
    case KVD_OP_PUT_APPEND:
    case KVD_OP_PUT_COMMIT:
    case KVD_OP_PUT_ABORT:
        return do_stream(c, s, slot, e);
    case KVD_OP_NOP:
        return OK;
    }
    return UNSUPPORTED;
}

static void answer(struct conn *c, struct queue *q, const struct kvd_ring_submission *s, int quiet) {
    unsigned char *slot = q->base + q->slots + (s->tag & (q->depth - 1)) * 1024ull;
    struct kvd_ring_completion e = {.tag = s->tag};
    if (s->op == KVD_OP_CANCEL) {
        atomic_fetch_add(&fake->cancelled, 1);
        for (uint32_t i = 0; i < q->nheld; i++)
            if (q->held[i].tag == (uint32_t)s->word) {
                struct kvd_ring_completion n = {.tag = (uint32_t)s->word, .outcome = 1, .code = CANCELLED};
                q->held[i] = q->held[--q->nheld];
                complete(c, q, &n);
                break;
            }
        complete(c, q, &e);
        return;
    }
    uint32_t code = atomic_load(&fake->code);
    e.code = code != 0 ? (uint8_t)code : act(c, s, slot, &e);
    atomic_fetch_add(&fake->acted, 1);
    if (code == SHORT)
        e.length = s->length + 7;
    if (e.code != OK) {
        e.outcome = code != 0 ? (uint8_t)atomic_load(&fake->outcome) : 1;
        if (e.code != SHORT)
            e.length = (uint64_t)snprintf((char *)slot, 1024, "fake: code %u", e.code);
    }
    if (s->op == KVD_OP_VIEW_RELEASE && atomic_load(&fake->expires) == 2 && c->region != NULL)
        forget(c);
    if (!quiet)
        complete(c, q, &e);
}

/* garbage writes a completion, and sometimes more, that is wrong in some way. */
static void garbage(struct conn *c, struct queue *q, const struct kvd_ring_submission *s) {
    struct kvd_ring_completion e = {.tag = s->tag, .version = rnd(), .length = rnd() % 64};
    unsigned char *slot = q->base + q->slots + (s->tag & (q->depth - 1)) * 1024ull;
    memset(slot, 0xee, rnd() % 1025);
    if (s->op == KVD_OP_VIEW) {
        if (c->region_number < 60 && rnd() % 4 == 0)
            hand_over(c, rnd() % LIE_KINDS);
        e.region = rnd() % 4;
        e.offset = rnd() % REGION;
        e.flags = rnd() % 4 == 0 ? KVD_RING_CHUNKED : 0;
    }
    e.code = (uint8_t)(rnd() % 3 == 0 ? rnd() % 30 : 0);
    e.outcome = (uint8_t)(e.code != 0 ? rnd() % 4 : rnd() % 8 == 0);
    switch (rnd() % 8) {
    case 0:
        e.tag = rnd();
        break;
    case 1:
        e.length = (uint64_t)rnd() << (rnd() % 33);
        break;
    case 2:
        ((unsigned char *)&e)[rnd() % sizeof e] ^= (unsigned char)(1u << rnd() % 8);
        break;
    case 3:
        atomic_store(word(q, KVD_RING_SQ_HEAD), rnd());
        break;
    case 4:
        atomic_store(word(q, KVD_RING_CQ_TAIL), rnd());
        break;
    case 5:
        complete(c, q, &e); /* twice */
        break;
    }
    complete(c, q, &e);
}

/* lie writes a completion that keeps the rules, and is not true. */
static void lie(struct conn *c, struct queue *q, const struct kvd_ring_submission *s) {
    unsigned char *slot = q->base + q->slots + (s->tag & (q->depth - 1)) * 1024ull;
    struct kvd_ring_completion e = {.tag = s->tag, .version = rnd(), .expires_ms = rnd(), .crc = rnd(), .region = rnd(), .offset = rnd(), .valid_until = rnd(), .value_flags = rnd(), .flags = (uint16_t)rnd()};
    uint64_t most = s->memory == 0 && s->length > 1024 ? 1024 : s->length;
    int reads = s->op == KVD_OP_GET || s->op == KVD_OP_GET_RANGE || s->op == KVD_OP_SCAN;
    memset(slot, (int)(rnd() & 255), rnd() % 256);
    if (rnd() % 2 == 0) {
        e.outcome = (uint8_t)(1 + rnd() % 2);
        e.code = (uint8_t)(1 + rnd() % 21);
        e.length = rnd() % 1025;
        if (e.code == SHORT && (s->op == KVD_OP_GET || s->op == KVD_OP_SCAN))
            e.length = s->length + 1 + rnd() % 64;
        else if (e.code == SHORT || e.code == PROTOCOL)
            e.code = NOT_FOUND;
    } else if (s->op == KVD_OP_INCR) {
        e.length = (uint64_t)snprintf((char *)slot, 1024, "%d", (int)rnd());
    } else {
        e.length = reads ? rnd() % (most + 1) : rnd();
    }
    complete(c, q, &e);
}

static void serve(struct conn *c, struct queue *q) {
    uint32_t mode = atomic_load(&fake->mode), tail = atomic_load(word(q, KVD_RING_SQ_TAIL));
    if (mode == FAKE_HONEST || mode == FAKE_ONE_QUEUE)
        for (; q->nheld > 0;) {
            struct kvd_ring_submission s = q->held[--q->nheld];
            answer(c, q, &s, 0);
        }
    if (mode == FAKE_HOLD_QUEUED)
        return;
    if (tail - q->head > q->depth)
        exit(8);
    while (q->head != tail) {
        struct kvd_ring_submission s;
        memcpy(&s, q->base + q->sq + (q->head & (q->depth - 1)) * 64ull, sizeof s);
        q->head++;
        atomic_store(word(q, KVD_RING_SQ_HEAD), q->head);
        atomic_fetch_add(&fake->taken, 1);
        if (mode == FAKE_CLOSE) {
            drop(c);
            return;
        }
        if (mode == FAKE_GARBAGE || (mode == FAKE_LIES && rnd() % 256 == 0))
            garbage(c, q, &s);
        else if (mode == FAKE_LIES)
            lie(c, q, &s);
        else if (mode == FAKE_HOLD_TAKEN && s.op != KVD_OP_CANCEL)
            q->held[q->nheld++] = s;
        else
            answer(c, q, &s, mode == FAKE_HOLD_ACTED);
    }
}

static void accept_one(int listener) {
    int s = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    for (int i = 0; i < CONNS && s >= 0; i++)
        if (conns[i].sock < 0) {
            conns[i].sock = s;
            return;
        }
    close(s);
}

int main(int argc, char **argv) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    if (argc != 3)
        return 2;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGPIPE, SIG_IGN);
    fake = mmap(NULL, sizeof *fake, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(argv[2]), 0);
    snprintf(a.sun_path, sizeof a.sun_path, "%s", argv[1]);
    unlink(argv[1]);
    int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fake == MAP_FAILED || bind(listener, (struct sockaddr *)&a, sizeof a) != 0 || listen(listener, 64) != 0)
        return 2;
    for (int i = 0; i < CONNS; i++)
        conns[i].sock = -1;
    for (;;) {
        struct pollfd p[1 + CONNS * (1 + QUEUES)];
        struct conn *of[1 + CONNS * (1 + QUEUES)];
        nfds_t n = 0;
        rnd_state ^= atomic_exchange(&fake->seed, 0);
        if (rnd_state == 0)
            rnd_state = 1;
        p[n] = (struct pollfd){.fd = listener, .events = POLLIN};
        of[n++] = NULL;
        for (int i = 0; i < CONNS; i++) {
            if (conns[i].sock < 0)
                continue;
            for (uint32_t k = 0; k < conns[i].nqueues && conns[i].sock >= 0; k++) {
                struct queue *q = &conns[i].queues[k];
                atomic_store(word(q, KVD_RING_BROKER_SLEEPS), 1);
                serve(&conns[i], q);
            }
            if (conns[i].sock < 0)
                continue;
            p[n] = (struct pollfd){.fd = conns[i].sock, .events = POLLIN};
            of[n++] = &conns[i];
            for (uint32_t k = 0; k < conns[i].nqueues; k++) {
                p[n] = (struct pollfd){.fd = conns[i].queues[k].submit, .events = POLLIN};
                of[n++] = NULL;
            }
        }
        /* A change of the mode is seen within 2 ms. */
        poll(p, n, 2);
        if (p[0].revents != 0)
            accept_one(listener);
        for (nfds_t i = 1; i < n; i++) {
            uint64_t count;
            if (p[i].revents == 0)
                continue;
            if (of[i] != NULL)
                on_message(of[i]);
            else if (read(p[i].fd, &count, 8) < 0)
                continue;
        }
    }
}
