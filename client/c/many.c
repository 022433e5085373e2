/* many.c - calls for many records at once, and registered memory. */
#include "internal.h"

#include <fcntl.h>

enum { ASK = 1024, LEAST_SCAN = 4096, MOST_SCAN = 1 << 20 };

PUBLIC int kvd_exists_prefix(kvd_client *c, const void *const *keys, const uint64_t *key_bytes, uint64_t n,
                             uint64_t *leading, kvd_error *error) {
    if (c == NULL || leading == NULL || (n != 0 && (keys == NULL || key_bytes == NULL)))
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "kvd_exists_prefix wants a client, keys and a count");
    *leading = 0;
    if (kvd__gone(c))
        return kvd__forked(error);
    if (n == 0)
        return kvd__ok(error);
    kvd_batch *b;
    int code = kvd_batch_new(c, n < ASK ? (uint32_t)n : ASK, &b, error);
    if (code != KVD_OK)
        return code;
    for (uint64_t at = 0; at < n && code == KVD_OK && *leading == at; ) {
        uint32_t some = n - at < ASK ? (uint32_t)(n - at) : ASK;
        code = kvd_batch_reset(b, error);
        for (uint32_t i = 0; i < some && code == KVD_OK; i++)
            code = kvd_batch_add_exists(b, keys[at + i], key_bytes[at + i], error);
        if (code == KVD_OK && !atomic_load(&c->connected))
            code = kvd__connect(c, kvd__now() + (int64_t)c->dial_ms * 1000000, error);
        if (code == KVD_OK && (code = kvd_batch_submit(b, error)) == KVD_OK)
            code = kvd_batch_wait(b, -1, error);
        for (uint32_t i = 0; i < some && code == KVD_OK; i++) {
            code = kvd_batch_error(b, i, error);
            if (code == KVD_OK)
                ++*leading;
        }
        at += some;
    }
    kvd_batch_free(b);
    return code == KVD_OK || code == KVD_NOT_FOUND ? kvd__ok(error) : code;
}

/* sound tells whether the entries of a scan are whole keys. */
static int sound(const unsigned char *entries, uint64_t n) {
    while (n != 0) {
        if (n < 2)
            return 0;
        uint64_t key = entries[0] | (uint64_t)entries[1] << 8;
        if (key == 0 || key > KVD_MAX_KEY || key > n - 2)
            return 0;
        entries += 2 + key;
        n -= 2 + key;
    }
    return 1;
}

PUBLIC int kvd_scan_next(kvd_client *c, const void *prefix, uint64_t prefix_bytes, uint64_t *cursor, void *keys,
                         uint64_t capacity, uint64_t *used, kvd_error *error) {
    if (c == NULL || cursor == NULL || keys == NULL || used == NULL || capacity < LEAST_SCAN || capacity > MOST_SCAN)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "a scan wants 4096 bytes to 1 MiB for keys");
    *used = 0;
    int code = kvd__key(prefix, prefix_bytes, 0, error);
    if (code != KVD_OK)
        return code;
    struct op op = {.code_op = KVD_OP_SCAN, .key = prefix, .key_bytes = (uint16_t)prefix_bytes, .bytes = keys,
                    .length = capacity, .word = *cursor};
    code = kvd__run(c, &op, error);
    kvd__op_free(&op);
    if (code != KVD_OK)
        return code;
    if (!sound(keys, op.got)) {
        memset(keys, 0, op.got);
        return kvd__fail(error, KVD_NO, KVD_PROTOCOL, 0, "the broker's list of keys makes no sense");
    }
    *used = op.got;
    *cursor = op.version;
    return KVD_OK;
}

PUBLIC int kvd_delete_prefix(kvd_client *c, const void *prefix, uint64_t prefix_bytes, uint64_t *deleted,
                             kvd_error *error) {
    if (c == NULL)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "kvd_delete_prefix wants a client");
    if (deleted != NULL)
        *deleted = 0;
    int code = kvd__key(prefix, prefix_bytes, 0, error);
    if (code != KVD_OK)
        return code;
    struct op op = {.code_op = KVD_OP_DELETE_PREFIX, .key = prefix, .key_bytes = (uint16_t)prefix_bytes};
    code = kvd__run(c, &op, error);
    kvd__op_free(&op);
    if (deleted != NULL)
        *deleted = op.version;
    return code;
}

/* slot_of finds the region that begins at the address. Control or memory is held. */
static int slot_of(kvd_client *c, const void *address) {
    for (int i = 0; i < MAX_REGIONS; i++)
        if (c->regions[i] != NULL && c->regions[i]->address == address)
            return i;
    return -1;
}

/* enter puts a region into the table. It returns 0, or a code. */
static int enter(kvd_client *c, struct region *r) {
    int code = KVD_BUSY;
    pthread_mutex_lock(&c->control);
    pthread_mutex_lock(&c->memory);
    for (int i = 0; i < MAX_REGIONS; i++) {
        struct region *o = c->regions[i];
        if (o != NULL && r->address < o->address + o->length && o->address < r->address + r->length) {
            code = KVD_ARGUMENT;
            break;
        }
        if (o == NULL && code == KVD_BUSY)
            code = -i;
    }
    if (code <= 0) {
        c->regions[-code] = r;
        atomic_fetch_add(&c->nregions, 1);
        code = KVD_OK;
    }
    pthread_mutex_unlock(&c->memory);
    pthread_mutex_unlock(&c->control);
    return code;
}

/* leave takes one out, and frees it. It returns KVD_BUSY if operations use it. */
static int leave(kvd_client *c, const void *address, uint32_t *number, int force) {
    int code = KVD_ARGUMENT;
    struct region *r = NULL;
    pthread_mutex_lock(&c->control);
    pthread_mutex_lock(&c->memory);
    int i = slot_of(c, address);
    if (i >= 0 && c->regions[i]->busy != 0 && !force) {
        code = KVD_BUSY;
    } else if (i >= 0) {
        r = c->regions[i];
        c->regions[i] = NULL;
        atomic_fetch_sub(&c->nregions, 1);
        *number = r->number;
        code = KVD_OK;
    }
    pthread_mutex_unlock(&c->memory);
    pthread_mutex_unlock(&c->control);
    if (r != NULL) {
        kvd__close_fd(&r->fd);
        free(r);
    }
    return code;
}

PUBLIC int kvd_register(kvd_client *c, int fd, uint64_t offset, uint64_t length, void *address, kvd_error *error) {
    uint32_t number;
    if (c == NULL || fd < 0 || length == 0 || address == NULL || offset % PAGE != 0 || (uintptr_t)address % PAGE != 0 ||
        length > UINTPTR_MAX - (uintptr_t)address || offset > INT64_MAX - length)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "kvd_register wants pages of a file, and where they are");
    if (kvd__gone(c))
        return kvd__forked(error);
    struct region *r = calloc(1, sizeof *r);
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (r == NULL || own < 0) {
        int e = own < 0 ? errno : ENOMEM;
        kvd__close_fd(&own);
        free(r);
        return kvd__fail(error, KVD_NO, KVD_SYSTEM, e, "the descriptor cannot be copied");
    }
    *r = (struct region){.address = address, .length = length, .offset = offset, .fd = own};
    int code = enter(c, r);
    if (code != KVD_OK) {
        kvd__close_fd(&r->fd);
        free(r);
        return kvd__fail(error, KVD_NO, code, 0,
                         code == KVD_BUSY ? "64 ranges are registered" : "the range overlaps another");
    }
    if (!atomic_load(&c->connected)) /* connecting registers it, but may not say why it could not */
        code = kvd__connect(c, kvd__now() + (int64_t)c->dial_ms * 1000000, error);
    if (code == KVD_OK)
        code = kvd__region_register(c, r, error);
    if (code != KVD_OK) {
        (void)leave(c, address, &number, 1);
        return code;
    }
    return kvd__ok(error);
}

PUBLIC int kvd_deregister(kvd_client *c, void *address, kvd_error *error) {
    uint32_t number = 0;
    if (c == NULL)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "kvd_deregister wants a client");
    if (kvd__gone(c))
        return kvd__forked(error);
    int code = leave(c, address, &number, 0);
    if (code != KVD_OK)
        return kvd__fail(error, KVD_NO, code, 0,
                         code == KVD_BUSY ? "operations use the range" : "no range begins there");
    code = kvd__region_deregister(c, number, error);
    return code == KVD_OK || code == KVD_UNAVAILABLE ? kvd__ok(error) : code;
}
