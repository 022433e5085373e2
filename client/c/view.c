/*
 * view.c - values where they are.
 *
 * The broker hands over the files of regions that views lie in, each once, before the first of these. A region stays
 * mapped for its views, whatever becomes of the connection. The broker alone knows whether a view held.
 */
#include "internal.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

enum { MAX_SHOWN = 64, TMPFS = 0x01021994 };

/* safe tells whether a file has bytes that cannot go away under a mapping. */
static int safe(int fd, uint64_t length, uint64_t offset) {
    struct stat st;
    struct statfs fs;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) ||
        fstatfs(fd, &fs) != 0 || (unsigned long)fs.f_type != TMPFS)
        return 0;
    uint64_t size = (uint64_t)st.st_size;
    return st.st_size > 0 && length != 0 && offset % PAGE == 0 && offset <= size && length <= size - offset;
}

static void drop(struct shown *s) {
    if (s != NULL && s->base != NULL)
        munmap((void *)(uintptr_t)s->base, s->length);
    free(s);
}

/* kvd__shown maps memory of the store. A file that is not as it should be has no bytes: each view in it is a lie. */
void kvd__shown(kvd_client *c, uint32_t number, uint64_t length, uint64_t offset, int fd) {
    uint32_t n = 0;
    if (number == 0)
        return;
    struct shown *s = calloc(1, sizeof *s);
    if (s == NULL)
        return;
    if (safe(fd, length, offset)) {
        void *base = mmap(NULL, length, PROT_READ, MAP_SHARED, fd, (off_t)offset);
        if (base != MAP_FAILED)
            s->base = base;
        else
            s->os_error = errno;
        s->length = length;
    }
    s->number = number;
    pthread_mutex_lock(&c->memory);
    for (struct shown *o = c->shown; o != NULL; o = o->next)
        n += o->number == number ? MAX_SHOWN : 1;
    if (n < MAX_SHOWN) {
        s->next = c->shown;
        c->shown = s;
        s = NULL;
    }
    pthread_mutex_unlock(&c->memory);
    drop(s);
}

/* tidy unmaps what nobody looks at any more. Memory is locked. */
static void tidy(kvd_client *c) {
    for (struct shown **at = &c->shown; *at != NULL;) {
        struct shown *s = *at;
        if (s->number != 0 || s->views != 0) {
            at = &s->next;
            continue;
        }
        *at = s->next;
        drop(s);
    }
}

/* kvd__hidden: no new view will lie in that memory. */
void kvd__hidden(kvd_client *c, uint32_t number) {
    pthread_mutex_lock(&c->memory);
    for (struct shown *s = c->shown; s != NULL; s = s->next)
        if (s->number == number)
            s->number = 0;
    tidy(c);
    pthread_mutex_unlock(&c->memory);
}

/* kvd__hide is that for all, when the connection has ended. */
void kvd__hide(kvd_client *c) {
    pthread_mutex_lock(&c->memory);
    for (struct shown *s = c->shown; s != NULL; s = s->next)
        s->number = 0;
    tidy(c);
    pthread_mutex_unlock(&c->memory);
}

/* kvd__view_free unmaps all, when the client goes. Nobody else uses it; in a child its locks are of no use. */
void kvd__view_free(kvd_client *c) {
    for (struct shown *s = c->shown; s != NULL; s = s->next)
        s->number = s->views = 0;
    tidy(c);
}

/* kvd__view_found copies what a completion says of a view. -1: it is against the rules. */
int kvd__view_found(struct kvd_view *v, const struct kvd_ring_completion *e, const unsigned char *slot) {
    uint64_t parts[KVD_RING_MAX_PARTS][2] = {{e->offset, e->length}}, left = e->length;
    if (e->length == 0 || (e->flags & ~KVD_RING_CHUNKED) != 0)
        return -1;
    if ((e->flags & KVD_RING_CHUNKED) != 0)
        kvd__copy_in(parts, slot, sizeof parts);
    for (v->n = 0; left != 0; v->n++) {
        uint64_t n = v->n < KVD_RING_MAX_PARTS ? parts[v->n][1] : 0;
        if (n == 0 || n > left)
            return -1;
        v->offsets[v->n] = parts[v->n][0];
        v->parts[v->n].length = n;
        left -= n;
    }
    v->region = e->region;
    return 0;
}

/* locate finds a view's region among those that are there. A program that slept has perhaps lost it by now. */
static int locate(kvd_client *c, struct kvd_view *v, int *os_error) {
    int code = KVD_VIEW_EXPIRED;
    pthread_mutex_lock(&c->memory);
    struct shown *s = c->shown;
    while (s != NULL && (s->number == 0 || s->number != v->region))
        s = s->next;
    if (s != NULL) {
        code = s->base != NULL ? KVD_OK : KVD_SYSTEM;
        *os_error = s->os_error;
        for (uint32_t i = 0; i < v->n; i++) {
            if (v->offsets[i] > s->length || v->parts[i].length > s->length - v->offsets[i])
                code = KVD_PROTOCOL;
            if (code == KVD_OK)
                v->parts[i].address = s->base + v->offsets[i];
        }
    }
    if (code == KVD_OK) {
        s->views++;
        v->shown = s;
    }
    pthread_mutex_unlock(&c->memory);
    return code;
}

/* settle gives a view its addresses. What the broker has said of regions is heard first. */
static int settle(kvd_client *c, struct kvd_view *v, kvd_error *error) {
    int os_error = 0, code = KVD_STALE;
    pthread_mutex_lock(&c->control);
    if (atomic_load(&c->connected) && atomic_load(&c->generation) == v->generation) {
        kvd__hear(c);
        code = locate(c, v, &os_error);
    }
    pthread_mutex_unlock(&c->control);
    if (code == KVD_OK)
        return kvd__ok(error);
    if (code == KVD_STALE)
        return kvd__fail(error, KVD_NO, KVD_UNAVAILABLE, 0, "the connection ended behind the view");
    if (code == KVD_VIEW_EXPIRED)
        return kvd__fail(error, KVD_NO, KVD_VIEW_EXPIRED, 0, "the memory that the value lies in is gone");
    if (code == KVD_SYSTEM)
        return kvd__fail(error, KVD_NO, KVD_SYSTEM, os_error, "the memory that the value lies in cannot be mapped");
    kvd__lost(c, v->generation, KVD_PROTOCOL);
    return kvd__fail(error, KVD_NO, KVD_PROTOCOL, 0, "the broker's view makes no sense");
}

/* release asks the broker for its verdict, which counts only by the view's own connection. */
static int release(kvd_client *c, struct kvd_view *v, kvd_error *error) {
    const char *stale = "the connection that the view was made by is gone";
    if (!atomic_load(&c->connected) || atomic_load(&c->generation) != v->generation)
        return kvd__fail(error, KVD_NO, KVD_STALE, 0, stale);
    struct op op = {.code_op = KVD_OP_VIEW_RELEASE, .word = v->number};
    int code = kvd__run(c, &op, error);
    kvd__op_free(&op);
    if (op.generation != v->generation || atomic_load(&c->generation) != v->generation)
        return kvd__fail(error, KVD_NO, KVD_STALE, 0, stale);
    return code;
}

PUBLIC int kvd_view(kvd_client *c, const void *key, uint64_t key_bytes, uint32_t hold_ms, struct kvd_view **view,
                    kvd_record *record, kvd_error *error) {
    if (c == NULL || view == NULL)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "kvd_view wants a client and a view");
    *view = NULL;
    int code = kvd__key(key, key_bytes, 1, error);
    if (code != KVD_OK)
        return code;
    if (kvd__gone(c))
        return kvd__forked(error);
    struct kvd_view *v = calloc(1, sizeof *v);
    if (v == NULL)
        return kvd__fail(error, KVD_NO, KVD_SYSTEM, ENOMEM, "there is no memory for a view");
    v->client = c;
    v->number = atomic_fetch_add(&c->last_view, 1) + 1;
    struct op op = {.code_op = KVD_OP_VIEW, .key = key, .key_bytes = (uint16_t)key_bytes, .word = v->number,
                    .ttl_ms = hold_ms, .view = v};
    code = kvd__run(c, &op, error);
    v->generation = op.generation;
    kvd_record r = {.flags = op.got_flags, .length = op.got, .version = op.version, .expires_ms = op.expires_ms};
    kvd__op_free(&op);
    if (code == KVD_OK && (code = settle(c, v, error)) != KVD_OK)
        (void)release(c, v, NULL);
    if (code != KVD_OK) {
        free(v);
        return code;
    }
    kvd__out(record, &r, sizeof r);
    atomic_fetch_add(&c->views, 1);
    *view = v;
    return KVD_OK;
}

PUBLIC int kvd_view_parts(const struct kvd_view *v, const kvd_part **parts, uint64_t *n, kvd_error *error) {
    if (v == NULL || parts == NULL || n == NULL)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "kvd_view_parts wants a view, and where its parts go");
    *parts = NULL;
    *n = 0;
    if (kvd__gone(v->client))
        return kvd__forked(error);
    if (!atomic_load(&v->client->connected) || atomic_load(&v->client->generation) != v->generation)
        return kvd__fail(error, KVD_NO, KVD_STALE, 0, NULL);
    *parts = v->parts;
    *n = v->n;
    return kvd__ok(error);
}

PUBLIC int kvd_view_end(struct kvd_view *v, kvd_error *error) {
    if (v == NULL)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "kvd_view_end wants a view");
    if (kvd__gone(v->client))
        return kvd__forked(error);
    kvd_error *e = &v->verdict;
    if (!v->over) {
        e->size = sizeof *e;
        (void)release(v->client, v, e);
        v->over = 1;
    }
    return e->code == KVD_OK ? kvd__ok(error) : kvd__fail(error, e->outcome, e->code, e->os_error, e->text);
}

PUBLIC int kvd_view_release(struct kvd_view *v, kvd_error *error) {
    if (v == NULL)
        return kvd__ok(error);
    kvd_client *c = v->client;
    if (kvd__gone(c)) {
        free(v); /* the child's copy */
        return kvd__forked(error);
    }
    int code = kvd_view_end(v, error);
    pthread_mutex_lock(&c->memory);
    v->shown->views--;
    tidy(c);
    pthread_mutex_unlock(&c->memory);
    free(v);
    atomic_fetch_sub(&c->views, 1);
    return code;
}
