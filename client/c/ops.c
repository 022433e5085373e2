/* ops.c - the calls for one record, which wait for their verdict. */
#include "internal.h"

#include <stdio.h>

enum { PIECE = 4 << 20, LEAST_PIECE = 64 << 10, MOST_FOUND = 1 << 30 };

int kvd__key(const void *key, uint64_t key_bytes, uint64_t least, kvd_error *error) {
    if (key_bytes < least || key_bytes > KVD_MAX_KEY || (key == NULL && key_bytes != 0))
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "a key has 1 to 1024 bytes");
    return KVD_OK;
}

/* kvd__pin_time checks how long a pin lasts. */
int kvd__pin_time(uint64_t ms, kvd_error *error) {
    if (ms == 0 || ms > KVD_RING_MAX_PIN)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "a pin lasts from a millisecond to 70 minutes");
    return KVD_OK;
}

/* kvd__how copies and checks a kvd_write. */
int kvd__how(const kvd_write *how, kvd_write *out, kvd_error *error) {
    memset(out, 0, sizeof *out);
    if (how != NULL) {
        if (how->size < offsetof(kvd_write, version))
            return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "kvd_write has no size");
        memcpy(out, how, how->size < sizeof *out ? how->size : sizeof *out);
    }
    if (out->condition != KVD_ALWAYS && out->condition != KVD_IF_ABSENT && out->condition != KVD_IF_PRESENT &&
        out->condition != KVD_IF_VERSION)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "there is no such condition");
    return KVD_OK;
}

int kvd__op_error(struct op *op, kvd_error *error) {
    if (op->code == KVD_OK)
        return kvd__ok(error);
    return kvd__fail(error, op->outcome, op->code, op->os_error, op->text);
}

void kvd__op_free(struct op *op) {
    free(op->text);
    op->text = NULL;
}

static void record_of(const struct op *op, kvd_record *record) {
    kvd_record r = {.flags = op->got_flags, .length = op->got, .version = op->version, .expires_ms = op->expires_ms};
    kvd__out(record, &r, sizeof r);
}

/* attempt carries an operation out on one connection. It returns 0 when there is a verdict. */
static int attempt(kvd_client *c, struct op *op) {
    struct queue *q = kvd__pick(c);
    if (q == NULL)
        return -1;
    kvd__lock(q);
    int r = -1;
    if (q->base != NULL) {
        kvd__start(q, op);
        kvd__flush(q);
        (void)kvd__wait(q, op, NULL, INT64_MAX);
        r = 0;
    }
    kvd__unlock(q);
    kvd__unpick(q);
    return r;
}

/*
 * carry_out waits for the verdict of an operation, and connects for it. An operation that the broker had not taken when
 * the connection ended goes to the next one, as long as a call may dial.
 */
static int carry_out(kvd_client *c, struct op *op, kvd_error *error) {
    int64_t deadline = 0;
    for (;;) {
        if (!atomic_load_explicit(&c->connected, memory_order_acquire)) {
            if (deadline == 0)
                deadline = kvd__now() + (int64_t)c->dial_ms * 1000000;
            int code = kvd__connect(c, deadline, error);
            if (code != KVD_OK)
                return code;
        }
        if (attempt(c, op) != 0)
            continue;
        if (!op->resend)
            return kvd__op_error(op, error);
        if (deadline == 0)
            deadline = kvd__now() + (int64_t)c->dial_ms * 1000000;
        if (kvd__now() >= deadline)
            return kvd__op_error(op, error);
        kvd__op_free(op);
    }
}

/* wants_bounce tells whether bytes have to go through the arena. */
static int wants_bounce(kvd_client *c, const struct op *op) {
    if (op->bytes == NULL || kvd__inside(c, op->bytes, 1))
        return 0;
    if (op->code_op == KVD_OP_PUT ? op->length + op->key_bytes <= KVD_SMALL
                                  : op->length <= KVD_SMALL && op->code_op != KVD_OP_SCAN)
        return 0;
    return !kvd__registered(c, op->bytes, op->length);
}

/* kvd__run carries an operation out and waits for its verdict, with bytes of the arena if it wants them. */
int kvd__run(kvd_client *c, struct op *op, kvd_error *error) {
    if (kvd__gone(c))
        return kvd__forked(error);
    if (!wants_bounce(c, op))
        return carry_out(c, op, error);
    op->bounce = kvd__call_bounce(c, op->length);
    if (op->bounce == NULL && op->length > c->arena.bytes)
        return kvd__fail(error, KVD_NO, KVD_TOO_LARGE, 0, "the value does not fit into the arena");
    if (op->bounce == NULL)
        return kvd__fail(error, KVD_NO, KVD_BUSY, 0, "the arena is full");
    if (kvd__gives(op))
        memcpy(op->bounce, op->bytes, op->length);
    int code = carry_out(c, op, error);
    kvd__call_unbounce(c, op->bounce);
    op->bounce = NULL;
    return code;
}

static struct op make(uint8_t code_op, const void *key, uint64_t key_bytes) {
    struct op op = {.code_op = code_op, .key = key, .key_bytes = (uint16_t)key_bytes};
    return op;
}

static int run_get(kvd_client *c, uint8_t code_op, const void *key, uint64_t key_bytes, uint64_t offset, void *buffer,
                   uint64_t capacity, kvd_record *r, kvd_error *error) {
    struct op op = make(code_op, key, key_bytes);
    op.bytes = buffer;
    op.length = buffer == NULL ? 0 : capacity;
    op.word = offset;
    int code = kvd__run(c, &op, error);
    r->flags = op.got_flags;
    r->length = op.got;
    r->version = op.version;
    r->expires_ms = op.expires_ms;
    kvd__op_free(&op);
    return code;
}

/* pieces reads one version of a value in ranges. The destination is cleared if that fails. */
static int pieces(kvd_client *c, const void *key, uint64_t key_bytes, unsigned char *buffer, uint64_t capacity,
                  kvd_record *r, kvd_error *error) {
    for (int tries = 0; tries < CALL_TRIES; tries++) {
        kvd_record first = {.size = sizeof first};
        int code = kvd_exists(c, key, key_bytes, &first, error);
        *r = first;
        if (code != KVD_OK)
            return code;
        if (first.length > capacity)
            return kvd__fail(error, KVD_NO, KVD_SHORT_BUFFER, 0, NULL);
        uint64_t done = 0, step = PIECE, n = 0;
        while (done < first.length) {
            kvd_record part = {.size = sizeof part};
            n = first.length - done < step ? first.length - done : step;
            code = run_get(c, KVD_OP_GET_RANGE, key, key_bytes, done, buffer + done, n, &part, error);
            if ((code == KVD_BUSY || code == KVD_TOO_LARGE) && step > LEAST_PIECE) {
                step /= 2;
                continue;
            }
            if (code != KVD_OK || part.version != first.version || part.length != n)
                break;
            done += n;
        }
        if (done == first.length)
            return kvd__ok(error);
        memset(buffer, 0, done + n); /* the last piece may be of another version */
        if (code != KVD_OK)
            return code;
    }
    return kvd__fail(error, KVD_NO, KVD_BUSY, 0, "the value was replaced again and again while it was read");
}

static int get_into(kvd_client *c, const void *key, uint64_t key_bytes, void *buffer, uint64_t capacity, kvd_record *r,
                    kvd_error *error) {
    int code = run_get(c, KVD_OP_GET, key, key_bytes, 0, buffer, capacity, r, error);
    if ((code == KVD_BUSY || code == KVD_TOO_LARGE) && capacity > KVD_SMALL && c->arena.bytes != 0 &&
        !kvd__inside(c, buffer, 1))
        code = pieces(c, key, key_bytes, buffer, capacity, r, error);
    return code;
}

PUBLIC int kvd_get_into(kvd_client *c, const void *key, uint64_t key_bytes, void *buffer, uint64_t capacity,
                        uint64_t *length, kvd_record *record, kvd_error *error) {
    kvd_record r = {0};
    if (c == NULL || length == NULL || (buffer == NULL && capacity != 0))
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "kvd_get_into wants a client, a buffer and a length");
    *length = 0;
    int code = kvd__key(key, key_bytes, 1, error);
    if (code != KVD_OK)
        return code;
    code = get_into(c, key, key_bytes, buffer, capacity, &r, error);
    *length = code == KVD_OK || code == KVD_SHORT_BUFFER ? r.length : 0;
    kvd__out(record, &r, sizeof r);
    return code;
}

PUBLIC int kvd_get_range(kvd_client *c, const void *key, uint64_t key_bytes, uint64_t offset, void *buffer,
                         uint64_t capacity, uint64_t *length, kvd_record *record, kvd_error *error) {
    kvd_record r = {0};
    if (c == NULL || length == NULL || buffer == NULL || capacity == 0)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "kvd_get_range wants a client, a buffer and a length");
    *length = 0;
    int code = kvd__key(key, key_bytes, 1, error);
    if (code != KVD_OK)
        return code;
    code = run_get(c, KVD_OP_GET_RANGE, key, key_bytes, offset, buffer, capacity, &r, error);
    *length = code == KVD_OK ? r.length : 0;
    r.length = 0;
    kvd__out(record, &r, sizeof r);
    return code;
}

/* get_large reads a value of about length bytes into the arena, or into memory of malloc. */
static int get_large(kvd_client *c, const void *key, uint64_t key_bytes, uint64_t length, void **value, kvd_record *r,
                     kvd_error *error) {
    /* The limit may have been higher when the value was written, but no word of a broker takes all memory. */
    if (length > MOST_FOUND && length > kvd_max_value(c))
        return kvd__fail(error, KVD_NO, KVD_TOO_LARGE, 0, "the value is longer than the broker's longest");
    unsigned char *p = kvd__take(c, length, 0);
    if (p == NULL)
        p = malloc(length);
    if (p == NULL)
        return kvd__fail(error, KVD_NO, KVD_SYSTEM, ENOMEM, "there is no memory for the value");
    int code = get_into(c, key, key_bytes, p, length, r, error);
    if (code == KVD_OK)
        *value = p;
    else
        kvd_free(c, p);
    return code;
}

PUBLIC int kvd_get(kvd_client *c, const void *key, uint64_t key_bytes, void **value, uint64_t *length,
                   kvd_record *record, kvd_error *error) {
    unsigned char small[KVD_SMALL];
    kvd_record r = {0};
    if (c == NULL || value == NULL || length == NULL)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "kvd_get wants a client, a value and a length");
    *value = NULL;
    *length = 0;
    int code = kvd__key(key, key_bytes, 1, error);
    if (code != KVD_OK)
        return code;
    code = run_get(c, KVD_OP_GET, key, key_bytes, 0, small, sizeof small, &r, error);
    if (code == KVD_OK) {
        *value = malloc(r.length != 0 ? r.length : 1);
        if (*value == NULL)
            return kvd__fail(error, KVD_NO, KVD_SYSTEM, ENOMEM, "there is no memory for the value");
        memcpy(*value, small, r.length);
    }
    for (int tries = 0; code == KVD_SHORT_BUFFER && tries < CALL_TRIES; tries++)
        code = get_large(c, key, key_bytes, r.length, value, &r, error);
    if (code == KVD_OK)
        *length = r.length;
    kvd__out(record, &r, sizeof r);
    return code;
}

static int put(kvd_client *c, const void *key, uint64_t key_bytes, const void *value, uint64_t value_bytes,
               const kvd_write *how, kvd_record *record, kvd_error *error) {
    if (c == NULL || (value == NULL && value_bytes != 0))
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "a put wants a client and a value");
    kvd_write w;
    int code = kvd__key(key, key_bytes, 1, error);
    if (code != KVD_OK || (code = kvd__how(how, &w, error)) != KVD_OK)
        return code;
    struct op op = make(KVD_OP_PUT, key, key_bytes);
    op.bytes = value_bytes == 0 ? NULL : (unsigned char *)(uintptr_t)value;
    op.length = value_bytes;
    op.flags = (uint8_t)w.condition;
    op.word = w.version;
    op.ttl_ms = w.ttl_ms;
    op.value_flags = w.flags;
    op.timeout_ms = w.timeout_ms;
    code = kvd__run(c, &op, error);
    op.got = value_bytes;
    op.got_flags = w.flags;
    record_of(&op, record);
    kvd__op_free(&op);
    return code;
}

PUBLIC int kvd_put(kvd_client *c, const void *key, uint64_t key_bytes, const void *value, uint64_t value_bytes,
                   kvd_record *record, kvd_error *error) {
    return put(c, key, key_bytes, value, value_bytes, NULL, record, error);
}

PUBLIC int kvd_put_if(kvd_client *c, const void *key, uint64_t key_bytes, const void *value, uint64_t value_bytes,
                      const kvd_write *how, kvd_record *record, kvd_error *error) {
    return put(c, key, key_bytes, value, value_bytes, how, record, error);
}

PUBLIC int kvd_cas(kvd_client *c, const void *key, uint64_t key_bytes, uint64_t version, const void *value,
                   uint64_t value_bytes, kvd_record *record, kvd_error *error) {
    kvd_write how = {.size = sizeof how, .condition = KVD_IF_VERSION, .version = version};
    return put(c, key, key_bytes, value, value_bytes, &how, record, error);
}

PUBLIC int kvd_delete_if(kvd_client *c, const void *key, uint64_t key_bytes, const kvd_write *how, kvd_error *error) {
    kvd_write w;
    if (c == NULL)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "a delete wants a client");
    int code = kvd__key(key, key_bytes, 1, error);
    if (code != KVD_OK || (code = kvd__how(how, &w, error)) != KVD_OK)
        return code;
    if (w.condition == KVD_IF_ABSENT)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "what is absent cannot be deleted");
    struct op op = make(KVD_OP_DELETE, key, key_bytes);
    op.flags = w.condition == KVD_IF_VERSION ? KVD_IF_VERSION : 0; /* each delete is of what is present */
    op.word = w.version;
    op.timeout_ms = w.timeout_ms;
    code = kvd__run(c, &op, error);
    kvd__op_free(&op);
    return code;
}

PUBLIC int kvd_delete(kvd_client *c, const void *key, uint64_t key_bytes, kvd_error *error) {
    return kvd_delete_if(c, key, key_bytes, NULL, error);
}

/* plain carries out an operation that moves no value. */
static int plain(kvd_client *c, uint8_t code_op, const void *key, uint64_t key_bytes, uint64_t word, uint64_t ttl_ms,
                 int64_t *number, kvd_record *record, kvd_error *error) {
    if (c == NULL)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "the call wants a client");
    int code = kvd__key(key, key_bytes, 1, error);
    if (code != KVD_OK)
        return code;
    struct op op = make(code_op, key, key_bytes);
    op.word = word;
    op.ttl_ms = ttl_ms;
    code = kvd__run(c, &op, error);
    if (code == KVD_OK && number != NULL)
        *number = op.number;
    record_of(&op, record);
    kvd__op_free(&op);
    return code;
}

PUBLIC int kvd_incr(kvd_client *c, const void *key, uint64_t key_bytes, int64_t delta, int64_t *number,
                    kvd_record *record, kvd_error *error) {
    return plain(c, KVD_OP_INCR, key, key_bytes, (uint64_t)delta, 0, number, record, error);
}

PUBLIC int kvd_touch(kvd_client *c, const void *key, uint64_t key_bytes, uint64_t ttl_ms, kvd_record *record,
                     kvd_error *error) {
    return plain(c, KVD_OP_TOUCH, key, key_bytes, 0, ttl_ms, NULL, record, error);
}

PUBLIC int kvd_exists(kvd_client *c, const void *key, uint64_t key_bytes, kvd_record *record, kvd_error *error) {
    uint64_t word = record == NULL ? KVD_RING_WITHOUT_LENGTH : 0;
    return plain(c, KVD_OP_EXISTS, key, key_bytes, word, 0, NULL, record, error);
}

PUBLIC int kvd_pin(kvd_client *c, const void *key, uint64_t key_bytes, uint64_t pin_ms, kvd_error *error) {
    int code = kvd__pin_time(pin_ms, error);
    return code != KVD_OK ? code : plain(c, KVD_OP_PIN, key, key_bytes, 0, pin_ms, NULL, NULL, error);
}

PUBLIC int kvd_unpin(kvd_client *c, const void *key, uint64_t key_bytes, kvd_error *error) {
    return plain(c, KVD_OP_UNPIN, key, key_bytes, 0, 0, NULL, NULL, error);
}
