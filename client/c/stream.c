/* stream.c - puts of values that come piece by piece, and are never here as a whole. */
#include "internal.h"

enum { PIECE = 4 << 20, LEAST_PIECE = 64 << 10 };

struct kvd_stream {
    kvd_client *client;
    uint64_t generation; /* the connection whose number it is */
    uint64_t number;
    uint64_t left;       /* bytes that are to come */
    uint64_t length;
    uint32_t timeout_ms;
    uint32_t flags;
    int over;            /* no more may come */
    int code;            /* why, if not for a commit */
    int asked;           /* the broker was asked to commit */
};

/* once carries an operation out on the stream's connection, and on no later one. */
static int once(kvd_stream *s, struct op *op, kvd_error *error) {
    kvd_client *c = s->client;
    int r = -1;
    op->word = s->number;
    op->timeout_ms = s->timeout_ms;
    struct queue *q = kvd__pick(c);
    if (q != NULL) {
        kvd__lock(q);
        if (q->base != NULL && q->generation == s->generation) {
            kvd__start(q, op);
            kvd__flush(q);
            (void)kvd__wait(q, op, NULL, INT64_MAX);
            r = 0;
        }
        kvd__unlock(q);
        kvd__unpick(q);
    }
    if (r != 0)
        return kvd__fail(error, KVD_NO, KVD_STALE, 0, "the stream's connection is gone, and nothing was stored");
    return kvd__op_error(op, error);
}

/* failed ends a stream for the program; without a commit nothing is stored, whatever became of the operation. */
static int failed(kvd_stream *s, int code, kvd_error *error) {
    s->over = 1;
    s->code = code;
    if (error != NULL && error->size >= offsetof(kvd_error, code))
        error->outcome = KVD_NO;
    return code;
}

/* usable tells whether a call on a stream may go on. */
static int usable(kvd_stream *s, kvd_error *error) {
    if (s == NULL)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "there is no stream");
    if (kvd__gone(s->client))
        return kvd__forked(error);
    if (s->over)
        return kvd__fail(error, KVD_NO, s->code != KVD_OK ? s->code : KVD_ARGUMENT, 0,
                         s->code != KVD_OK ? "the stream has failed before" : "the stream was committed");
    return KVD_OK;
}

PUBLIC int kvd_put_new(kvd_client *c, const void *key, uint64_t key_bytes, uint64_t length, const kvd_write *how,
                       kvd_stream **stream, kvd_error *error) {
    kvd_write w;
    if (c == NULL || stream == NULL)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "kvd_put_new wants a client and a stream");
    *stream = NULL;
    int code = kvd__key(key, key_bytes, 1, error);
    if (code != KVD_OK || (code = kvd__how(how, &w, error)) != KVD_OK)
        return code;
    if (w.condition != KVD_ALWAYS)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "a stream has no condition");
    kvd_stream *s = calloc(1, sizeof *s);
    if (s == NULL)
        return kvd__fail(error, KVD_NO, KVD_SYSTEM, ENOMEM, "there is no memory for a stream");
    struct op op = {.code_op = KVD_OP_PUT_BEGIN, .key = key, .key_bytes = (uint16_t)key_bytes, .length = length,
                    .ttl_ms = w.ttl_ms, .value_flags = w.flags, .timeout_ms = w.timeout_ms};
    code = kvd__run(c, &op, error);
    kvd__op_free(&op);
    if (code != KVD_OK) {
        failed(s, code, error);
        free(s);
        return code;
    }
    s->client = c;
    s->generation = op.generation;
    s->number = op.version;
    s->length = s->left = length;
    s->timeout_ms = w.timeout_ms;
    s->flags = w.flags;
    atomic_fetch_add(&c->batches, 1); /* kvd_close waits for it as for those */
    *stream = s;
    return KVD_OK;
}

/* append sends bytes that the broker can have at once: of the slot, of the arena, of registered memory or a bounce. */
static int append(kvd_stream *s, unsigned char *bytes, uint64_t n, kvd_error *error) {
    kvd_client *c = s->client;
    struct op op = {.code_op = KVD_OP_PUT_APPEND, .bytes = bytes, .length = n};
    int far = n > KVD_SMALL && !kvd__inside(c, bytes, 1) && !kvd__registered(c, bytes, n);
    if (far) {
        op.bounce = kvd__call_bounce(c, n);
        if (op.bounce == NULL)
            return kvd__fail(error, KVD_NO, KVD_BUSY, 0, "the arena is full");
        memcpy(op.bounce, bytes, n);
    }
    int code = once(s, &op, error);
    if (far)
        kvd__call_unbounce(c, op.bounce);
    kvd__op_free(&op);
    return code;
}

PUBLIC int kvd_put_write(kvd_stream *s, const void *bytes, uint64_t n, kvd_error *error) {
    int code = usable(s, error);
    if (code != KVD_OK)
        return code;
    if (n > s->left || (bytes == NULL && n != 0))
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "there are more bytes than the value has, or there are none");
    uint64_t most = PIECE;
    for (uint64_t done = 0; done < n;) {
        uint64_t some = n - done < most ? n - done : most;
        code = append(s, (unsigned char *)(uintptr_t)bytes + done, some, error);
        if (code == KVD_BUSY && some > LEAST_PIECE) { /* as in an arena that is small, or nearly full */
            most = some / 2;
            continue;
        }
        if (code != KVD_OK)
            return failed(s, code, error);
        done += some;
        s->left -= some;
    }
    return kvd__ok(error);
}

PUBLIC int kvd_put_commit(kvd_stream *s, kvd_record *record, kvd_error *error) {
    int code = usable(s, error);
    if (code != KVD_OK)
        return code;
    if (s->left != 0)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "bytes of the value are missing");
    struct op op = {.code_op = KVD_OP_PUT_COMMIT};
    code = once(s, &op, error);
    s->over = s->asked = 1;
    s->code = code;
    kvd_record r = {.flags = s->flags, .length = s->length, .version = op.version};
    if (code == KVD_OK)
        kvd__out(record, &r, sizeof r);
    kvd__op_free(&op);
    return code;
}

PUBLIC int kvd_put_free(kvd_stream *s) {
    if (s == NULL)
        return KVD_OK;
    kvd_client *c = s->client;
    if (!kvd__gone(c)) {
        if (!s->asked) { /* the broker may have it still */
            struct op op = {.code_op = KVD_OP_PUT_ABORT};
            (void)once(s, &op, NULL);
            kvd__op_free(&op);
        }
        atomic_fetch_sub(&c->batches, 1);
    }
    free(s);
    return KVD_OK;
}
