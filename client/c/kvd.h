/*
 * kvd.h - the store for programs that are not Go.
 *
 * libkvd talks to a broker on the same machine (`kvd broker`, or the one inside `kvd dev`) through rings in shared
 * memory. The library has no threads, no callbacks, no signal handlers and nothing that runs at exit.
 *
 * Calls. A call that can fail returns an enum kvd_code, 0 when it succeeded. Its last argument is a kvd_error or NULL;
 * the error is filled in either way. Its outcome tells whether the operation happened. KVD_YES comes only with KVD_OK.
 * A read that failed is always KVD_NO; a write that failed is KVD_NO or KVD_UNKNOWN.
 *
 * Structs. Each struct begins with its size in bytes, which the caller sets before the call. A field that the given
 * size does not reach is neither read nor written. Other fields of a struct that is read are 0 unless they are set.
 *
 * Keys and values are bytes, with lengths. A key has 1 to KVD_MAX_KEY bytes; a prefix may be empty. Keys belong to
 * the caller again when the call returns. Values belong to the caller when a call that waits returns, and for a batch
 * when the entry has its verdict. Until then the caller neither writes nor frees them.
 *
 * Memory. Values in the arena (kvd_alloc) or in registered memory (kvd_register) are moved without a copy here.
 * Small values in other memory go by the ring, larger ones through free bytes of the arena. After a failure the bytes
 * of a destination are untouched or zero, never those of another value.
 *
 * Threads. All functions may be called from any thread. Two calls on one kvd_batch, kvd_stream or view must not overlap.
 * kvd_close must not overlap any other call. Calls are not async-signal-safe, and a thread must not be cancelled
 * inside of them.
 *
 * Fork. In a child of fork the handle is of no use: each call answers KVD_FORKED, and bytes of the arena stay
 * readable. The child may open a client of its own, and may kvd_close the parent's, which unmaps the child's copy.
 *
 * Death of the broker. The library sees it, gives each operation under way its exact outcome with KVD_UNAVAILABLE,
 * and the next call connects again with the same arena. Pointers stay valid.
 *
 * Times are milliseconds. Sizes and offsets are bytes. Linux only.
 */
#ifndef KVD_H
#define KVD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface, as kvd_abi returns it. It changes only when programs must be compiled again. */
#define KVD_ABI 1

#define KVD_MAX_KEY 1024        /* bytes of the longest key */
#define KVD_SMALL 1024          /* bytes, key and value together, that always go by the ring */
#define KVD_MAX_QUEUES 8        /* queues of a client */

/* Whether an operation happened. */
enum kvd_outcome {
    KVD_YES = 0,     /* it did, or the read is complete */
    KVD_NO = 1,      /* it did not, and will not */
    KVD_UNKNOWN = 2  /* it may have, once at most; read the key to find out */
};

/* Why an operation failed. */
enum kvd_code {
    KVD_OK = 0,
    KVD_NOT_FOUND = 1,     /* no such key */
    KVD_CONDITION = 2,     /* the condition of a put or delete did not hold */
    KVD_TOO_LARGE = 3,     /* longer than the store, or the arena, takes */
    KVD_SHORT_BUFFER = 4,  /* the value is longer than the buffer; its length is told */
    KVD_WRONG_TYPE = 5,    /* not a number, or a collection */
    KVD_TIMEOUT = 6,       /* the time of the operation is over */
    KVD_CANCELLED = 7,     /* kvd_batch_cancel came first */
    KVD_UNAVAILABLE = 8,   /* no broker, or the broker reaches no store */
    KVD_DENIED = 9,        /* the broker or the store does not allow it */
    KVD_FULL = 10,         /* no memory, or the quota is used up */
    KVD_CORRUPT = 11,      /* the bytes do not have their checksum */
    KVD_ARGUMENT = 12,     /* an argument is out of bounds */
    KVD_STALE = 13,        /* of a connection that is gone */
    KVD_FORKED = 14,       /* the handle belongs to the parent process */
    KVD_BUSY = 15,         /* a limit is reached, or the memory is in use; free something, and try again */
    KVD_VIEW_EXPIRED = 16, /* what was read of a view may be other bytes than the value's */
    KVD_PROTOCOL = 17,     /* the other end broke the rules, and the connection was ended */
    KVD_CLOSED = 18,       /* the broker ended the connection */
    KVD_UNSUPPORTED = 19,  /* this broker cannot do it */
    KVD_INTERNAL = 20,     /* a fault of the broker */
    KVD_SYSTEM = 21        /* a call of the system failed; os_error has its errno */
};

typedef struct kvd_client kvd_client; /* a connection to a broker, and an arena */
struct kvd_view;                      /* a value that is looked at in place */
typedef struct kvd_batch kvd_batch;   /* operations that are started together */
typedef struct kvd_stream kvd_stream; /* a put of a value that comes piece by piece */

/* Filled in by each call that is given one. */
typedef struct kvd_error {
    uint32_t size;     /* set by the caller: sizeof(kvd_error) */
    int32_t outcome;   /* enum kvd_outcome */
    int32_t code;      /* enum kvd_code, which the call also returns */
    int32_t os_error;  /* errno with KVD_SYSTEM, else 0 */
    char text[240];    /* UTF-8 for people, ends with 0; empty on success */
} kvd_error;

/* How to connect. All fields but size and namespace_name may be 0. Strings are copied. */
typedef struct kvd_options {
    uint32_t size;             /* sizeof(kvd_options) */
    uint32_t flags;            /* 0, or KVD_NO_ARENA */
    const char *path;          /* the broker's socket; NULL: the variable KVD_BROKER, else /run/kvd/broker.sock */
    const char *namespace_name;/* the namespace; NULL: the broker's default for this socket */
    const void *secret;        /* the socket's secret, if it wants one */
    uint64_t secret_bytes;
    const char *program;       /* shown in the broker's list of clients; NULL: the name of the process */
    uint64_t arena_bytes;      /* size of the arena; 0: 64 MiB. Its pages are taken when they are first used. */
    uint32_t queues;           /* most queues that threads share, 1 to KVD_MAX_QUEUES; 0: KVD_MAX_QUEUES */
    uint32_t depth;            /* operations under way in a queue, a power of two of 16 to 1024; 0: the broker's */
    uint32_t timeout_ms;       /* of each operation; 0: the broker's */
    uint32_t dial_ms;          /* how long a call tries to reach a broker that is away; 0: 2000 */
} kvd_options;

/* kvd_options.flags: have no arena. Values above KVD_SMALL then need registered memory. */
#define KVD_NO_ARENA 1u

/* What is known of a record, filled in by calls that are given one. */
typedef struct kvd_record {
    uint32_t size;        /* sizeof(kvd_record) */
    uint32_t flags;       /* the number that its writer gave */
    uint64_t length;      /* bytes of the whole value */
    uint64_t version;     /* changes with each write; for kvd_cas and KVD_IF_VERSION */
    uint64_t expires_ms;  /* Unix time in milliseconds; 0: never */
} kvd_record;

/* Conditions of kvd_write. */
enum kvd_condition {
    KVD_ALWAYS = 0,
    KVD_IF_ABSENT = 1,  /* only if there is no such key */
    KVD_IF_PRESENT = 2, /* only if there is one */
    KVD_IF_VERSION = 4  /* only if its version is that of kvd_write */
};

/* How to write. All fields but size may be 0. */
typedef struct kvd_write {
    uint32_t size;        /* sizeof(kvd_write) */
    uint32_t condition;   /* enum kvd_condition */
    uint64_t version;     /* with KVD_IF_VERSION */
    uint64_t ttl_ms;      /* how long the record lives; 0: for ever. Deletes ignore it. */
    uint32_t flags;       /* a number kept with the value. Deletes ignore it. */
    uint32_t timeout_ms;  /* of this operation; 0: that of kvd_options */
} kvd_write;

/* The verdict on an entry of a batch. */
typedef struct kvd_result {
    uint32_t size;        /* sizeof(kvd_result) */
    int32_t outcome;      /* enum kvd_outcome */
    int32_t code;         /* enum kvd_code; KVD_BUSY while there is no verdict yet */
    uint32_t flags;       /* of the record */
    uint64_t length;      /* bytes of the whole value, with KVD_SHORT_BUFFER, too; for a range, the bytes read */
    uint64_t version;     /* of the record */
    uint64_t expires_ms;  /* of the record; 0: never */
    int64_t number;       /* the new number of an incr */
} kvd_result;

/* ---- The library ---- */

/* kvd_abi returns KVD_ABI of the library that runs. It cannot fail. */
uint32_t kvd_abi(void);

/* kvd_version returns the release of the library, as "0.1.0". The string is static. */
const char *kvd_version(void);

/* kvd_code_name returns the name of a code, as "NOT_FOUND", or "?" for a number that is none. It is static. */
const char *kvd_code_name(int32_t code);

/* ---- Connections ---- */

/*
 * kvd_open connects to a broker and makes *client. It answers KVD_UNAVAILABLE if none answers within dial_ms,
 * KVD_DENIED if the broker refuses this program, KVD_ARGUMENT for options that are out of bounds.
 */
int kvd_open(const kvd_options *options, kvd_client **client, kvd_error *error);

/*
 * kvd_close ends the connection and unmaps the arena: its pointers, and what kvd_get gave, are invalid then.
 * It answers KVD_BUSY, and does nothing, while a batch, stream or view of the client has not been freed. NULL is allowed.
 */
int kvd_close(kvd_client *client);

/* kvd_generation returns how many connections the client has had: 1 after kvd_open, one more after each new one. */
uint64_t kvd_generation(kvd_client *client);

/* kvd_max_value returns the bytes of the longest value that the broker takes, or 0 in a forked child. */
uint64_t kvd_max_value(kvd_client *client);

/* ---- Memory ---- */

/*
 * kvd_alloc takes bytes of the arena, aligned to a page and rounded up to whole ones; *address is where. The bytes
 * are not cleared. They are the caller's until kvd_free. KVD_FULL: the arena has no such run; KVD_ARGUMENT: 0 bytes.
 */
int kvd_alloc(kvd_client *client, uint64_t bytes, void **address, kvd_error *error);

/*
 * kvd_free gives back what kvd_alloc or kvd_get gave. It answers KVD_BUSY, and does nothing, while an operation uses
 * the bytes, and KVD_ARGUMENT for an address in the arena that neither gave. NULL is allowed.
 */
int kvd_free(kvd_client *client, void *address);

/* kvd_arena tells where the arena lies, as for registering it with a device; 0 bytes if there is none. */
int kvd_arena(kvd_client *client, void **address, uint64_t *bytes, kvd_error *error);

/*
 * kvd_register lets the broker move values straight to and from [address, address + length), where the caller has
 * mapped the file fd, shared, from offset on. Offset and address are multiples of the page size. The fd is copied:
 * the caller may close its own. The mapping stays until kvd_deregister. Later connections register it again.
 * Values must lie inside one registered range to profit. The file should be a memfd sealed against shrinking.
 */
int kvd_register(kvd_client *client, int fd, uint64_t offset, uint64_t length, void *address, kvd_error *error);

/*
 * kvd_deregister ends what kvd_register(address) began. When it has returned, the broker touches nothing there.
 * KVD_BUSY: operations use it. KVD_ARGUMENT: no range begins at the address.
 */
int kvd_deregister(kvd_client *client, void *address, kvd_error *error);

/* ---- One record. These calls wait for the verdict. The record may be NULL. ---- */

/*
 * kvd_get reads a value of any length into memory of the library: *value is for kvd_free, and its length is in
 * *length. Both are NULL and 0 unless the call succeeds. An empty value has an address, too.
 */
int kvd_get(kvd_client *client, const void *key, uint64_t key_bytes, void **value, uint64_t *length,
            kvd_record *record, kvd_error *error);

/*
 * kvd_get_into reads a value into the caller's buffer; *length is the value's. KVD_SHORT_BUFFER: the value is longer
 * than capacity; *length tells it. Bytes of the buffer behind the value are untouched or zero.
 */
int kvd_get_into(kvd_client *client, const void *key, uint64_t key_bytes, void *buffer, uint64_t capacity,
                 uint64_t *length, kvd_record *record, kvd_error *error);

/*
 * kvd_get_range reads at most capacity bytes of a value from offset on; *length is how many, 0 at or behind its end.
 * Ranges read by two calls are of one value only if record->version is the same. record->length is not filled in.
 */
int kvd_get_range(kvd_client *client, const void *key, uint64_t key_bytes, uint64_t offset, void *buffer,
                  uint64_t capacity, uint64_t *length, kvd_record *record, kvd_error *error);

/* kvd_put writes a record for ever, whatever was there. */
int kvd_put(kvd_client *client, const void *key, uint64_t key_bytes, const void *value, uint64_t value_bytes,
            kvd_record *record, kvd_error *error);

/* kvd_put_if writes a record as how says; NULL is kvd_put. KVD_CONDITION: it did not hold, and nothing was written. */
int kvd_put_if(kvd_client *client, const void *key, uint64_t key_bytes, const void *value, uint64_t value_bytes,
               const kvd_write *how, kvd_record *record, kvd_error *error);

/* kvd_cas writes a record for ever if its version is that one. KVD_CONDITION: it is another; KVD_NOT_FOUND: none. */
int kvd_cas(kvd_client *client, const void *key, uint64_t key_bytes, uint64_t version, const void *value,
            uint64_t value_bytes, kvd_record *record, kvd_error *error);

/* kvd_delete deletes a record. KVD_NOT_FOUND, with KVD_NO: there was none. */
int kvd_delete(kvd_client *client, const void *key, uint64_t key_bytes, kvd_error *error);

/* kvd_delete_if deletes a record as how says; NULL is kvd_delete. KVD_IF_ABSENT is KVD_ARGUMENT. */
int kvd_delete_if(kvd_client *client, const void *key, uint64_t key_bytes, const kvd_write *how, kvd_error *error);

/*
 * kvd_incr adds delta to a decimal number and gives the new one in *number, which may be NULL. A record that is
 * absent counts as 0. KVD_WRONG_TYPE: the value is not a number of 64 bits, or would not be.
 */
int kvd_incr(kvd_client *client, const void *key, uint64_t key_bytes, int64_t delta, int64_t *number,
             kvd_record *record, kvd_error *error);

/* kvd_touch lets a record live for ttl_ms from now on; 0: for ever. */
int kvd_touch(kvd_client *client, const void *key, uint64_t key_bytes, uint64_t ttl_ms, kvd_record *record,
              kvd_error *error);

/*
 * kvd_exists tells whether a record is there: KVD_OK or KVD_NOT_FOUND. It moves no value, and is no use of the record.
 * A kvd_record asks for the value's length, too, which costs more; a collection is KVD_WRONG_TYPE then.
 */
int kvd_exists(kvd_client *client, const void *key, uint64_t key_bytes, kvd_record *record, kvd_error *error);

/* The longest time of a pin: 70 minutes. */
#define KVD_MAX_PIN_MS 4200000u

/*
 * kvd_pin has eviction pass over a record for pin_ms from now on, 1 to KVD_MAX_PIN_MS. Of several pins the latest end
 * counts. KVD_NOT_FOUND: there is no such record. KVD_UNSUPPORTED: this broker knows no pins, or the namespace is a
 * cache that allows none (kvctl namespace set --max-pinned). KVD_BUSY: the socket's limit of pins is reached.
 * A pin is a hint: it may be lost, which costs a miss. Where nothing is evicted it only looks for the record.
 */
int kvd_pin(kvd_client *client, const void *key, uint64_t key_bytes, uint64_t pin_ms, kvd_error *error);

/* kvd_unpin ends the pins of a record, of whoever began them. KVD_NOT_FOUND: there is no such record. */
int kvd_unpin(kvd_client *client, const void *key, uint64_t key_bytes, kvd_error *error);

/* ---- Views. They show a value where it is, without a copy. ---- */

/* Some bytes of a value. */
typedef struct kvd_part {
    const void *address;
    uint64_t length;
} kvd_part;

/*
 * kvd_view looks at a value for hold_ms, 10000 at most; 0: 1000. The view is the caller's until kvd_view_release.
 * Look at the bytes, end the view, and believe what was made of them only if that succeeds. Another value that is
 * written for the key meanwhile changes nothing. Other views, and memory, wait for yours: look briefly.
 *
 * KVD_UNSUPPORTED: the broker allows no views, or the value is short, or in memory of another machine: get it.
 * KVD_BUSY: there are as many views as the broker allows. KVD_TOO_LARGE: the value has more than 64 parts.
 */
int kvd_view(kvd_client *client, const void *key, uint64_t key_bytes, uint32_t hold_ms, struct kvd_view **view,
             kvd_record *record, kvd_error *error);

/*
 * kvd_view_parts tells where the bytes lie, in order: in one part, or in parts of 2 MiB and a shorter one. They are
 * for reading alone: a write ends the program. They and the array are the view's. KVD_STALE: the connection that the
 * view was made by is gone; so what is there is not to be believed, but may be read.
 */
int kvd_view_parts(const struct kvd_view *view, const kvd_part **parts, uint64_t *n, kvd_error *error);

/*
 * kvd_view_end ends a view, whatever it answers, and tells whether its bytes were the value until now.
 * KVD_VIEW_EXPIRED: they may have been others; so what was read is to be thrown away. KVD_STALE: likewise, since the
 * connection is gone; other codes, too. The bytes may be anything from now on, and stay where they are until
 * kvd_view_release. Later calls answer the same.
 */
int kvd_view_end(struct kvd_view *view, kvd_error *error);

/* kvd_view_release is kvd_view_end, and then the view and its parts are gone. NULL is allowed. */
int kvd_view_release(struct kvd_view *view, kvd_error *error);

/* ---- Streams: one long value, piece by piece ---- */

/*
 * kvd_put_new begins a put of length bytes, and makes *stream. Nobody sees any of it before kvd_put_commit, and an
 * older value stays until then. how may be NULL; its condition is KVD_ALWAYS, and its timeout_ms is that of each call.
 * A value that is refused for its length or key is refused here. KVD_BUSY: this client or its socket has as many
 * streams as the broker allows. A stream has a minute for each 64 MiB of its value begun, if the broker has no other
 * time; then it ends with KVD_TIMEOUT.
 */
int kvd_put_new(kvd_client *client, const void *key, uint64_t key_bytes, uint64_t length, const kvd_write *how,
                kvd_stream **stream, kvd_error *error);

/*
 * kvd_put_write gives the next bytes, which are the caller's again when it returns. KVD_ARGUMENT: the value has fewer
 * left, and none were taken. After any other failure the stream has failed: nothing is stored, and kvd_put_free is
 * all that is left to call. KVD_UNAVAILABLE, KVD_STALE: the connection, or memory of the store's, was lost meanwhile.
 * The caller may begin anew.
 */
int kvd_put_write(kvd_stream *stream, const void *bytes, uint64_t n, kvd_error *error);

/* kvd_put_commit stores the value. KVD_ARGUMENT: bytes are missing, and the stream goes on. */
int kvd_put_commit(kvd_stream *stream, kvd_record *record, kvd_error *error);

/* kvd_put_free frees a stream. Without a commit nothing is stored, and the store has its memory again. */
int kvd_put_free(kvd_stream *stream);

/* ---- Many records ---- */

/*
 * kvd_exists_prefix asks for n keys at once; *leading is how many there are from the first on without a gap. It is no
 * use of the records.
 * keys[i] has key_bytes[i] bytes. After an error *leading counts those in front of the key that failed.
 */
int kvd_exists_prefix(kvd_client *client, const void *const *keys, const uint64_t *key_bytes, uint64_t n,
                      uint64_t *leading, kvd_error *error);

/*
 * kvd_scan_next lists keys that begin with a prefix, in no order. Set *cursor to 0 at first, and call again until it is
 * 0 again. Each call writes entries to keys: a length of two bytes, little endian, then the key; *used is their
 * bytes, perhaps 0. A key that is written meanwhile may be listed twice or not. capacity: 4096 to 1 MiB.
 */
int kvd_scan_next(kvd_client *client, const void *prefix, uint64_t prefix_bytes, uint64_t *cursor, void *keys,
                  uint64_t capacity, uint64_t *used, kvd_error *error);

/*
 * kvd_delete_prefix deletes the records whose keys begin with a prefix, and tells in *deleted, which may be NULL, how
 * many. An empty prefix is all of the namespace. After an error *deleted counts those that are known to be deleted.
 */
int kvd_delete_prefix(kvd_client *client, const void *prefix, uint64_t prefix_bytes, uint64_t *deleted,
                      kvd_error *error);

/* ---- Batches: a verdict per entry ---- */

/*
 * kvd_batch_new makes an empty batch for at most capacity entries, 1 to 65536. Entries have numbers from 0 on, in the
 * order in which they are added. Entries of a batch are not ordered: two of one key may happen either way round.
 */
int kvd_batch_new(kvd_client *client, uint32_t capacity, kvd_batch **batch, kvd_error *error);

/* Entries mean what the calls of their names do. KVD_BUSY: the batch is full, or is submitted. */
int kvd_batch_add_get_into(kvd_batch *batch, const void *key, uint64_t key_bytes, void *buffer, uint64_t capacity,
                           kvd_error *error);
int kvd_batch_add_get_range(kvd_batch *batch, const void *key, uint64_t key_bytes, uint64_t offset, void *buffer,
                            uint64_t capacity, kvd_error *error);
int kvd_batch_add_put(kvd_batch *batch, const void *key, uint64_t key_bytes, const void *value, uint64_t value_bytes,
                      const kvd_write *how, kvd_error *error);
int kvd_batch_add_delete(kvd_batch *batch, const void *key, uint64_t key_bytes, const kvd_write *how,
                         kvd_error *error);
int kvd_batch_add_incr(kvd_batch *batch, const void *key, uint64_t key_bytes, int64_t delta, kvd_error *error);
int kvd_batch_add_touch(kvd_batch *batch, const void *key, uint64_t key_bytes, uint64_t ttl_ms, kvd_error *error);
int kvd_batch_add_pin(kvd_batch *batch, const void *key, uint64_t key_bytes, uint64_t pin_ms, kvd_error *error);
int kvd_batch_add_unpin(kvd_batch *batch, const void *key, uint64_t key_bytes, kvd_error *error);

/* kvd_batch_add_exists is kvd_exists without a kvd_record: the result has no length. kvd_batch_add_length has it. */
int kvd_batch_add_exists(kvd_batch *batch, const void *key, uint64_t key_bytes, kvd_error *error);
int kvd_batch_add_length(kvd_batch *batch, const void *key, uint64_t key_bytes, kvd_error *error);

/*
 * kvd_batch_submit starts all entries and does not wait for them. It returns an error only if none was started and
 * all may be submitted again; whatever happens later is a verdict. It may dial a broker that is away, once.
 */
int kvd_batch_submit(kvd_batch *batch, kvd_error *error);

/* kvd_batch_pending returns how many entries of a submitted batch have no verdict yet. It looks at memory only. */
uint32_t kvd_batch_pending(const kvd_batch *batch);

/*
 * kvd_batch_wait waits until each entry has its verdict, at most timeout_ms; -1: without end. KVD_TIMEOUT, with
 * KVD_NO: some have none yet, and go on. It returns KVD_OK whatever the verdicts are.
 */
int kvd_batch_wait(kvd_batch *batch, int64_t timeout_ms, kvd_error *error);

/* kvd_batch_result tells the verdict on entry number index. KVD_ARGUMENT: there is no such entry. */
int kvd_batch_result(const kvd_batch *batch, uint32_t index, kvd_result *result, kvd_error *error);

/* kvd_batch_error tells the verdict on entry number index with its text, as the call of one record would have. */
int kvd_batch_error(const kvd_batch *batch, uint32_t index, kvd_error *error);

/* kvd_batch_cancel asks to end entries that have no verdict. Each still gets one, and its buffer is busy until then. */
int kvd_batch_cancel(kvd_batch *batch, kvd_error *error);

/* kvd_batch_reset empties a batch, to be filled again. KVD_BUSY: entries have no verdict yet. */
int kvd_batch_reset(kvd_batch *batch, kvd_error *error);

/* kvd_batch_free frees a batch. KVD_BUSY: entries have no verdict yet, and nothing is done. NULL is allowed. */
int kvd_batch_free(kvd_batch *batch);

/* ---- Event loops ---- */

/*
 * kvd_fd returns a descriptor that is readable when there may be something to reap; -1 in a forked child. It stays
 * the same for the life of the client, which owns it. Only poll, select or epoll it.
 */
int kvd_fd(kvd_client *client);

/*
 * kvd_arm is called before the loop waits for kvd_fd. It returns 1 if there is something to reap already, 0 if the
 * descriptor will tell, and a negative kvd_code in a forked child.
 */
int kvd_arm(kvd_client *client);

/*
 * kvd_reap takes what has been completed, starts entries of batches that found no room, and never waits. It returns
 * how many entries of batches got their verdict, or a negative kvd_code. Look at kvd_batch_pending then.
 */
int64_t kvd_reap(kvd_client *client);

/*
 * kvd_wait is kvd_arm, a wait for kvd_fd of at most timeout_ms (-1: without end), and kvd_reap in one; *reaped, which
 * may be NULL, is what kvd_reap returns. KVD_TIMEOUT: nothing came. It is the only call that a signal ends: then it
 * answers KVD_SYSTEM with os_error EINTR. Others go on waiting.
 */
int kvd_wait(kvd_client *client, int64_t timeout_ms, uint64_t *reaped, kvd_error *error);

#ifdef __cplusplus
}
#endif

#endif
