/* batch.c - operations that are started together, with a verdict each. */
#include "internal.h"

enum { MAX_ENTRIES = 65536 };

PUBLIC int kvd_batch_new(kvd_client *c, uint32_t capacity, kvd_batch **batch, kvd_error *error) {
    if (c == NULL || batch == NULL || capacity == 0 || capacity > MAX_ENTRIES)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "a batch has 1 to 65536 entries");
    *batch = NULL;
    if (kvd__gone(c))
        return kvd__forked(error);
    kvd_batch *b = calloc(1, sizeof *b);
    if (b == NULL)
        return kvd__fail(error, KVD_NO, KVD_SYSTEM, ENOMEM, "there is no memory for a batch");
    b->client = c;
    b->capacity = capacity;
    atomic_fetch_add(&c->batches, 1);
    *batch = b;
    return kvd__ok(error);
}

/* grow makes room for one more operation and its key. */
static int grow(kvd_batch *b, uint64_t key_bytes) {
    if (b->n == b->room) {
        uint32_t room = b->room == 0 ? 16 : b->room * 2;
        if (room > b->capacity)
            room = b->capacity;
        struct op *ops = realloc(b->ops, room * sizeof *ops);
        if (ops == NULL)
            return -1;
        b->ops = ops;
        b->room = room;
    }
    if (key_bytes > b->key_room - b->key_bytes) {
        size_t room = b->key_room == 0 ? 2048 : b->key_room * 2;
        unsigned char *keys = realloc(b->keys, room);
        if (keys == NULL)
            return -1;
        b->keys = keys;
        b->key_room = room;
    }
    return 0;
}

/* add makes an entry. Its key is found again at submit, because keys move while the batch grows. */
static struct op *add(kvd_batch *b, uint8_t code_op, const void *key, uint64_t key_bytes, kvd_error *error) {
    if (b == NULL) {
        kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "there is no batch");
        return NULL;
    }
    if (kvd__gone(b->client)) {
        kvd__forked(error);
        return NULL;
    }
    if (kvd__key(key, key_bytes, 1, error) != KVD_OK)
        return NULL;
    if (b->submitted || b->n == b->capacity) {
        kvd__fail(error, KVD_NO, KVD_BUSY, 0, b->submitted ? "the batch is submitted" : "the batch is full");
        return NULL;
    }
    if (grow(b, key_bytes) != 0) {
        kvd__fail(error, KVD_NO, KVD_SYSTEM, ENOMEM, "there is no memory for an entry");
        return NULL;
    }
    struct op *op = &b->ops[b->n++];
    memset(op, 0, sizeof *op);
    memcpy(b->keys + b->key_bytes, key, key_bytes);
    b->key_bytes += key_bytes;
    op->code_op = code_op;
    op->key_bytes = (uint16_t)key_bytes;
    op->batch = b;
    op->code = KVD_BUSY;
    op->outcome = KVD_UNKNOWN;
    return op;
}

/* added returns what a failed add has put into the caller's error, which may be NULL. */
static int added(struct op *op, kvd_error *e, kvd_error *error) {
    if (op != NULL)
        return kvd__ok(error);
    return kvd__fail(error, e->outcome, e->code, e->os_error, e->text);
}

PUBLIC int kvd_batch_add_get_into(kvd_batch *b, const void *key, uint64_t key_bytes, void *buffer, uint64_t capacity,
                                  kvd_error *error) {
    kvd_error e = {.size = sizeof e};
    if (buffer == NULL && capacity != 0)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "there is no buffer");
    struct op *op = add(b, KVD_OP_GET, key, key_bytes, &e);
    if (op != NULL) {
        op->bytes = buffer;
        op->length = capacity;
    }
    return added(op, &e, error);
}

PUBLIC int kvd_batch_add_get_range(kvd_batch *b, const void *key, uint64_t key_bytes, uint64_t offset, void *buffer,
                                   uint64_t capacity, kvd_error *error) {
    kvd_error e = {.size = sizeof e};
    if (buffer == NULL || capacity == 0)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "there is no buffer");
    struct op *op = add(b, KVD_OP_GET_RANGE, key, key_bytes, &e);
    if (op != NULL) {
        op->bytes = buffer;
        op->length = capacity;
        op->word = offset;
    }
    return added(op, &e, error);
}

PUBLIC int kvd_batch_add_put(kvd_batch *b, const void *key, uint64_t key_bytes, const void *value, uint64_t value_bytes,
                             const kvd_write *how, kvd_error *error) {
    kvd_error e = {.size = sizeof e};
    kvd_write w;
    if (value == NULL && value_bytes != 0)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "there is no value");
    int code = kvd__how(how, &w, error);
    if (code != KVD_OK)
        return code;
    struct op *op = add(b, KVD_OP_PUT, key, key_bytes, &e);
    if (op != NULL) {
        op->bytes = value_bytes == 0 ? NULL : (unsigned char *)(uintptr_t)value;
        op->length = value_bytes;
        op->flags = (uint8_t)w.condition;
        op->word = w.version;
        op->ttl_ms = w.ttl_ms;
        op->value_flags = w.flags;
        op->timeout_ms = w.timeout_ms;
    }
    return added(op, &e, error);
}

PUBLIC int kvd_batch_add_delete(kvd_batch *b, const void *key, uint64_t key_bytes, const kvd_write *how,
                                kvd_error *error) {
    kvd_error e = {.size = sizeof e};
    kvd_write w;
    int code = kvd__how(how, &w, error);
    if (code != KVD_OK)
        return code;
    if (w.condition == KVD_IF_ABSENT)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "what is absent cannot be deleted");
    struct op *op = add(b, KVD_OP_DELETE, key, key_bytes, &e);
    if (op != NULL) {
        op->flags = w.condition == KVD_IF_VERSION ? KVD_IF_VERSION : 0; /* each delete is of what is present */
        op->word = w.version;
        op->timeout_ms = w.timeout_ms;
    }
    return added(op, &e, error);
}

static int add_plain(kvd_batch *b, uint8_t code_op, const void *key, uint64_t key_bytes, uint64_t word, uint64_t ttl_ms,
                     kvd_error *error) {
    kvd_error e = {.size = sizeof e};
    struct op *op = add(b, code_op, key, key_bytes, &e);
    if (op != NULL) {
        op->word = word;
        op->ttl_ms = ttl_ms;
    }
    return added(op, &e, error);
}

PUBLIC int kvd_batch_add_incr(kvd_batch *b, const void *key, uint64_t key_bytes, int64_t delta, kvd_error *error) {
    return add_plain(b, KVD_OP_INCR, key, key_bytes, (uint64_t)delta, 0, error);
}

PUBLIC int kvd_batch_add_touch(kvd_batch *b, const void *key, uint64_t key_bytes, uint64_t ttl_ms, kvd_error *error) {
    return add_plain(b, KVD_OP_TOUCH, key, key_bytes, 0, ttl_ms, error);
}

PUBLIC int kvd_batch_add_exists(kvd_batch *b, const void *key, uint64_t key_bytes, kvd_error *error) {
    return add_plain(b, KVD_OP_EXISTS, key, key_bytes, KVD_RING_WITHOUT_LENGTH, 0, error);
}

PUBLIC int kvd_batch_add_length(kvd_batch *b, const void *key, uint64_t key_bytes, kvd_error *error) {
    return add_plain(b, KVD_OP_EXISTS, key, key_bytes, 0, 0, error);
}

PUBLIC int kvd_batch_add_pin(kvd_batch *b, const void *key, uint64_t key_bytes, uint64_t pin_ms, kvd_error *error) {
    int code = kvd__pin_time(pin_ms, error);
    return code != KVD_OK ? code : add_plain(b, KVD_OP_PIN, key, key_bytes, 0, pin_ms, error);
}

PUBLIC int kvd_batch_add_unpin(kvd_batch *b, const void *key, uint64_t key_bytes, kvd_error *error) {
    return add_plain(b, KVD_OP_UNPIN, key, key_bytes, 0, 0, error);
}

PUBLIC int kvd_batch_submit(kvd_batch *b, kvd_error *error) {
    if (b == NULL)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "there is no batch");
    kvd_client *c = b->client;
    if (kvd__gone(c))
        return kvd__forked(error);
    if (b->submitted)
        return kvd__fail(error, KVD_NO, KVD_BUSY, 0, "the batch is submitted");
    struct queue *q = NULL;
    for (;;) {
        if (!atomic_load(&c->connected)) {
            int code = kvd__connect(c, kvd__now(), error);
            if (code != KVD_OK)
                return code;
        }
        q = kvd__pick(c);
        if (q == NULL)
            continue;
        kvd__lock(q);
        if (q->base != NULL)
            break;
        kvd__unlock(q);
        kvd__unpick(q);
    }
    const unsigned char *key = b->keys;
    b->submitted = 1;
    b->queue = q;
    atomic_store(&b->pending, b->n);
    for (uint32_t i = 0; i < b->n; i++) {
        b->ops[i].key = key;
        key += b->ops[i].key_bytes;
        kvd__start(q, &b->ops[i]);
    }
    kvd__flush(q);
    kvd__unlock(q);
    kvd__unpick(q);
    return kvd__ok(error);
}

PUBLIC uint32_t kvd_batch_pending(const kvd_batch *b) {
    return b == NULL ? 0 : atomic_load_explicit(&((kvd_batch *)(uintptr_t)b)->pending, memory_order_acquire);
}

PUBLIC int kvd_batch_wait(kvd_batch *b, int64_t timeout_ms, kvd_error *error) {
    if (b == NULL)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "there is no batch");
    if (kvd__gone(b->client))
        return kvd__forked(error);
    if (kvd_batch_pending(b) == 0)
        return kvd__ok(error);
    int64_t deadline = INT64_MAX;
    if (timeout_ms >= 0 && timeout_ms < INT64_MAX / 4000000)
        deadline = kvd__now() + timeout_ms * 1000000;
    kvd__lock(b->queue);
    int late = kvd__wait(b->queue, NULL, b, deadline);
    kvd__unlock(b->queue);
    if (late)
        return kvd__fail(error, KVD_NO, KVD_TIMEOUT, 0, "some entries have no verdict yet");
    return kvd__ok(error);
}

static struct op *entry(const kvd_batch *b, uint32_t index, int *open) {
    if (b == NULL || index >= b->n)
        return NULL;
    struct op *op = &b->ops[index];
    *open = !b->submitted || atomic_load_explicit(&op->state, memory_order_acquire) != STATE_DONE;
    return op;
}

PUBLIC int kvd_batch_result(const kvd_batch *b, uint32_t index, kvd_result *result, kvd_error *error) {
    int open = 0;
    struct op *op = entry(b, index, &open);
    if (op == NULL)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "there is no such entry");
    kvd_result r = {.outcome = KVD_UNKNOWN, .code = KVD_BUSY};
    if (!open) {
        r.outcome = op->outcome;
        r.code = op->code;
        r.flags = op->got_flags;
        r.length = op->code_op == KVD_OP_PUT && op->code == KVD_OK ? op->length : op->got;
        r.version = op->version;
        r.expires_ms = op->expires_ms;
        r.number = op->number;
    }
    kvd__out(result, &r, sizeof r);
    return kvd__ok(error);
}

PUBLIC int kvd_batch_error(const kvd_batch *b, uint32_t index, kvd_error *error) {
    int open = 0;
    struct op *op = entry(b, index, &open);
    if (op == NULL)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "there is no such entry");
    if (open)
        return kvd__fail(error, KVD_UNKNOWN, KVD_BUSY, 0, "the entry has no verdict yet");
    return kvd__op_error(op, error);
}

PUBLIC int kvd_batch_cancel(kvd_batch *b, kvd_error *error) {
    if (b == NULL)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "there is no batch");
    if (kvd__gone(b->client))
        return kvd__forked(error);
    if (!b->submitted)
        return kvd__ok(error);
    kvd__lock(b->queue);
    for (uint32_t i = b->n; i-- > 0;) /* the last first: those wait for a slot, so none takes one meanwhile */
        kvd__cancel(b->queue, &b->ops[i]);
    kvd__flush(b->queue);
    kvd__unlock(b->queue);
    return kvd__ok(error);
}

static void empty(kvd_batch *b) {
    for (uint32_t i = 0; i < b->n; i++)
        kvd__op_free(&b->ops[i]);
    b->n = 0;
    b->key_bytes = 0;
    b->submitted = 0;
    b->queue = NULL;
}

PUBLIC int kvd_batch_reset(kvd_batch *b, kvd_error *error) {
    if (b == NULL)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "there is no batch");
    if (kvd__gone(b->client))
        return kvd__forked(error);
    if (kvd_batch_pending(b) != 0)
        return kvd__fail(error, KVD_NO, KVD_BUSY, 0, "some entries have no verdict yet");
    empty(b);
    return kvd__ok(error);
}

PUBLIC int kvd_batch_free(kvd_batch *b) {
    if (b == NULL)
        return KVD_OK;
    if (!kvd__gone(b->client)) {
        if (kvd_batch_pending(b) != 0)
            return KVD_BUSY;
        atomic_fetch_sub(&b->client->batches, 1);
    }
    empty(b);
    free(b->ops);
    free(b->keys);
    free(b);
    return KVD_OK;
}
