/* client.c - handles, errors, and what fork leaves of them. */
#include "internal.h"

#include <poll.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

#define VERSION "0.1.0"

static const char *const names[] = {
    "OK", "NOT_FOUND", "CONDITION", "TOO_LARGE", "SHORT_BUFFER", "WRONG_TYPE", "TIMEOUT", "CANCELLED", "UNAVAILABLE",
    "DENIED", "FULL", "CORRUPT", "ARGUMENT", "STALE", "FORKED", "BUSY", "VIEW_EXPIRED", "PROTOCOL", "CLOSED",
    "UNSUPPORTED", "INTERNAL", "SYSTEM",
};

static const char *const texts[] = {
    "",
    "there is no such key",
    "the condition does not hold",
    "the value is too large",
    "the value is longer than the buffer",
    "the value is of another type",
    "the time of the operation is over",
    "the operation was cancelled",
    "the broker or the store is away",
    "it is not allowed",
    "there is no memory left, or the quota is used up",
    "the bytes do not have their checksum",
    "an argument is out of bounds",
    "it is of a connection that is gone",
    "the handle belongs to the parent process",
    "a limit is reached, or the memory is in use",
    "the view has expired",
    "the other end broke the rules",
    "the broker ended the connection",
    "this broker cannot do it",
    "the broker has a fault",
    "a call of the system failed",
};

PUBLIC uint32_t kvd_abi(void) { return KVD_ABI; }

PUBLIC const char *kvd_version(void) { return VERSION; }

PUBLIC const char *kvd_code_name(int32_t code) {
    return code >= 0 && (size_t)code < sizeof names / sizeof *names ? names[code] : "?";
}

const char *kvd__says(int code) {
    return code >= 0 && (size_t)code < sizeof texts / sizeof *texts ? texts[code] : "";
}

/* kvd__out copies a struct that begins with its size, as far as the caller's reaches. */
void kvd__out(void *to, const void *from, size_t size) {
    uint32_t theirs;
    if (to == NULL)
        return;
    memcpy(&theirs, to, sizeof theirs);
    if (theirs > size)
        theirs = (uint32_t)size;
    if (theirs > sizeof theirs)
        memcpy((char *)to + sizeof theirs, (const char *)from + sizeof theirs, theirs - sizeof theirs);
}

int kvd__fail(kvd_error *error, int outcome, int code, int os_error, const char *text) {
    if (error == NULL)
        return code;
    kvd_error e = {.outcome = outcome, .code = code, .os_error = os_error};
    snprintf(e.text, sizeof e.text, "%s", text == NULL || *text == 0 ? kvd__says(code) : text);
    kvd__out(error, &e, sizeof e);
    /* Of a longer text the caller's struct may have held a part without its end. */
    if (error->size > offsetof(kvd_error, text) && error->size < sizeof e)
        ((char *)error)[error->size - 1] = 0;
    return code;
}

int kvd__ok(kvd_error *error) {
    if (error != NULL) {
        int32_t head[3] = {KVD_YES, KVD_OK, 0};
        if (error->size > offsetof(kvd_error, text)) {
            memcpy(&error->outcome, head, sizeof head);
            error->text[0] = 0;
        } else {
            kvd_error e = {.outcome = KVD_YES};
            kvd__out(error, &e, sizeof e);
        }
    }
    return KVD_OK;
}

int kvd__forked(kvd_error *error) { return kvd__fail(error, KVD_NO, KVD_FORKED, 0, NULL); }

int64_t kvd__now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* The number is forgotten first: a fork between the two leaves the child no descriptor that is somebody else's. */
void kvd__close_fd(int *fd) {
    int f = *fd;
    *fd = -1;
    if (f >= 0)
        close(f);
}

static void close_all(kvd_client *c) {
    kvd__close_fd(&c->sock);
    kvd__close_fd(&c->broker_pidfd);
    kvd__close_fd(&c->epoll_fd);
    kvd__close_fd(&c->notify_fd);
    kvd__close_fd(&c->arena.fd);
    for (int i = 0; i < KVD_MAX_QUEUES; i++) {
        kvd__close_fd(&c->queues[i].submit_fd);
        kvd__close_fd(&c->queues[i].complete_fd);
        kvd__close_fd(&c->queues[i].sleep_fd);
    }
    for (int i = 0; i < MAX_REGIONS; i++)
        if (c->regions[i] != NULL)
            kvd__close_fd(&c->regions[i]->fd);
}

/* kvd__gone tells whether this is a child of the process that opened the client, whose locks are of no use then. */
int kvd__gone(kvd_client *c) {
    if (c->mark != NULL ? *(volatile unsigned char *)c->mark == 1 : c->pid == (long)getpid())
        return 0;
    if (atomic_exchange(&c->orphan, 1) == 0)
        close_all(c);
    return 1;
}

static void release(kvd_client *c, int child) {
    close_all(c);
    kvd__arena_free(&c->arena);
    kvd__view_free(c);
    if (c->mark != NULL)
        munmap(c->mark, PAGE);
    for (int i = 0; i < KVD_MAX_QUEUES; i++) {
        free(c->queues[i].cancels);
        if (child)
            continue;
        pthread_mutex_destroy(&c->queues[i].lock);
        pthread_cond_destroy(&c->queues[i].changed);
    }
    if (!child) {
        pthread_mutex_destroy(&c->control);
        pthread_mutex_destroy(&c->memory);
        pthread_cond_destroy(&c->freed);
    }
    for (int i = 0; i < MAX_REGIONS; i++)
        free(c->regions[i]);
    if (c->secret != NULL)
        explicit_bzero(c->secret, c->secret_bytes);
    free(c->secret);
    free(c->path);
    free(c->namespace_name);
    free(c->program);
    free(c);
}

static int check(const kvd_options *given, kvd_options *o) {
    memset(o, 0, sizeof *o);
    if (given == NULL || given->size < offsetof(kvd_options, path))
        return -1;
    memcpy(o, given, given->size < sizeof *o ? given->size : sizeof *o);
    if ((o->flags & ~KVD_NO_ARENA) != 0 || o->queues > KVD_MAX_QUEUES || (o->secret == NULL) != (o->secret_bytes == 0))
        return -1;
    if (o->depth != 0 && (o->depth < KVD_RING_MIN_DEPTH || o->depth > KVD_RING_MAX_DEPTH ||
                          (o->depth & (o->depth - 1)) != 0))
        return -1;
    if (o->secret_bytes > 1024 || o->arena_bytes > UINT64_C(1) << 40 || (o->arena_bytes != 0 && o->arena_bytes < PAGE))
        return -1;
    if (o->namespace_name != NULL && strlen(o->namespace_name) > 1024)
        return -1;
    if (o->program != NULL && strlen(o->program) > 255)
        return -1;
    if (o->path == NULL && (o->path = secure_getenv("KVD_BROKER")) == NULL)
        o->path = "/run/kvd/broker.sock";
    if (*o->path == 0 || strlen(o->path) > 107)
        return -1;
    if (o->arena_bytes == 0 && (o->flags & KVD_NO_ARENA) == 0)
        o->arena_bytes = 64 << 20;
    if ((o->flags & KVD_NO_ARENA) != 0)
        o->arena_bytes = 0;
    return 0;
}

static int copy_options(kvd_client *c, const kvd_options *o) {
    c->path = strdup(o->path);
    c->namespace_name = strdup(o->namespace_name != NULL ? o->namespace_name : "");
    c->program = strdup(o->program != NULL ? o->program : program_invocation_short_name);
    if (c->path == NULL || c->namespace_name == NULL || c->program == NULL)
        return -1;
    if (strlen(c->program) > 255)
        c->program[255] = 0;
    if (o->secret_bytes != 0) {
        c->secret = malloc(o->secret_bytes);
        if (c->secret == NULL)
            return -1;
        memcpy(c->secret, o->secret, o->secret_bytes);
        c->secret_bytes = o->secret_bytes;
    }
    c->want_depth = o->depth;
    c->timeout_ms = o->timeout_ms;
    c->dial_ms = o->dial_ms != 0 ? o->dial_ms : 2000;
    c->max_queues = o->queues != 0 ? o->queues : KVD_MAX_QUEUES;
    return 0;
}

static kvd_client *make(void) {
    kvd_client *c = calloc(1, sizeof *c);
    if (c == NULL)
        return NULL;
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    c->sock = c->broker_pidfd = c->epoll_fd = c->notify_fd = c->arena.fd = -1;
    pthread_mutex_init(&c->control, NULL);
    pthread_mutex_init(&c->memory, NULL);
    pthread_cond_init(&c->freed, NULL);
    for (int i = 0; i < KVD_MAX_QUEUES; i++) {
        struct queue *q = &c->queues[i];
        q->client = c;
        q->submit_fd = q->complete_fd = q->sleep_fd = -1;
        pthread_mutex_init(&q->lock, NULL);
        pthread_cond_init(&q->changed, &attr);
    }
    pthread_condattr_destroy(&attr);
    c->pid = (long)getpid();
    return c;
}

/* marked makes the page that fork clears. Kernels and emulators without it leave the comparison of process ids. */
static void marked(kvd_client *c) {
    unsigned char *p = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return;
    if (madvise(p, PAGE, MADV_WIPEONFORK) != 0) {
        munmap(p, PAGE);
        return;
    }
    *p = 1;
    c->mark = p;
}

PUBLIC int kvd_open(const kvd_options *options, kvd_client **client, kvd_error *error) {
    kvd_options o;
    int64_t began = kvd__now();
    if (client == NULL || check(options, &o) != 0)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "an option of kvd_open is out of bounds");
    *client = NULL;
    kvd_client *c = make();
    if (c == NULL || copy_options(c, &o) != 0) {
        if (c != NULL)
            release(c, 0);
        return kvd__fail(error, KVD_NO, KVD_SYSTEM, ENOMEM, "there is no memory for a client");
    }
    marked(c);
    int failed = o.arena_bytes != 0 ? kvd__arena_make(&c->arena, o.arena_bytes) : 0;
    if (failed == 0) {
        c->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
        c->notify_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        struct epoll_event ev = {.events = EPOLLIN, .data.u32 = UINT32_MAX};
        if (c->epoll_fd < 0 || c->notify_fd < 0 || epoll_ctl(c->epoll_fd, EPOLL_CTL_ADD, c->notify_fd, &ev) != 0)
            failed = errno;
    }
    if (failed != 0) {
        release(c, 0);
        return kvd__fail(error, KVD_NO, KVD_SYSTEM, failed, "the arena or a descriptor cannot be made");
    }
    int code = kvd__connect(c, began + (int64_t)c->dial_ms * 1000000, error);
    if (code != KVD_OK) {
        release(c, 0);
        return code;
    }
    *client = c;
    return kvd__ok(error);
}

PUBLIC int kvd_close(kvd_client *c) {
    if (c == NULL)
        return KVD_OK;
    if (kvd__gone(c)) {
        release(c, 1);
        return KVD_OK;
    }
    if (atomic_load(&c->batches) != 0 || atomic_load(&c->views) != 0)
        return KVD_BUSY;
    kvd__bye(c);
    release(c, 0);
    return KVD_OK;
}

PUBLIC uint64_t kvd_generation(kvd_client *c) { return c == NULL ? 0 : atomic_load(&c->generation); }

PUBLIC uint64_t kvd_max_value(kvd_client *c) {
    if (c == NULL || kvd__gone(c))
        return 0;
    pthread_mutex_lock(&c->control);
    uint64_t n = c->max_value;
    pthread_mutex_unlock(&c->control);
    return n;
}
