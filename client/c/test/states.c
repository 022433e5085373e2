/* states.c - the broker is killed, stopped or away in every state of an operation; verdicts are compared with its store. */
#include "test.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

struct late {
    kvd_client *c;
    int op;
    int code;
    kvd_error e;
};

static void *late_call(void *arg) {
    struct late *l = arg;
    unsigned char out[2000];
    uint64_t n;
    l->e.size = sizeof l->e;
    memset(out, 0x5a, sizeof out);
    switch (l->op) {
    case 0:
        l->code = kvd_get_into(l->c, "there", 5, out, sizeof out, &n, NULL, &l->e);
        if (l->code != KVD_OK)
            CHECK(all(out, sizeof out, 0x5a) || all(out, sizeof out, 0));
        break;
    case 1:
        l->code = kvd_put(l->c, "fresh", 5, "w", 1, NULL, &l->e);
        break;
    case 2:
        l->code = kvd_delete(l->c, "there", 5, &l->e);
        break;
    case 3:
        l->code = kvd_incr(l->c, "count", 5, 1, NULL, NULL, &l->e);
        break;
    case 4:
        l->code = kvd_exists(l->c, "there", 5, NULL, &l->e);
        break;
    case 5:
        l->code = kvd_touch(l->c, "there", 5, 5000, NULL, &l->e);
        break;
    case 6: {
        unsigned char keys[4096];
        uint64_t cursor = 0;
        l->code = kvd_scan_next(l->c, "t", 1, &cursor, keys, sizeof keys, &n, &l->e);
        break;
    }
    }
    return NULL;
}

static int writes(int op) { return op == 1 || op == 2 || op == 3 || op == 5; }

/* happened looks into the store of the dead broker. */
static int happened(struct broker *b, int op) {
    struct fake_record *there = fake_find(b, "there"), *count = fake_find(b, "count");
    switch (op) {
    case 1:
        return fake_find(b, "fresh") != NULL;
    case 2:
        return there == NULL;
    case 3:
        return count != NULL && count->length == 1 && count->value[0] == '2';
    case 5:
        return there != NULL && there->expires_ms != 0;
    }
    return 0;
}

static void prepare(struct broker *b, kvd_client *c) {
    kvd_error e = {.size = sizeof e};
    fake_mode(b, FAKE_HONEST);
    kvd_delete(c, "fresh", 5, &e);
    GOOD(kvd_put(c, "there", 5, "here", 4, NULL, &e));
    GOOD(kvd_put(c, "count", 5, "1", 1, NULL, &e));
}

/* killed_in kills the broker while it holds an operation in a state, and judges the verdict. */
static void killed_in(struct broker *b, enum fake_mode mode, int op) {
    kvd_error e = {.size = sizeof e};
    kvd_options o = {.size = sizeof o, .path = b->path, .dial_ms = 300, .queues = 1};
    kvd_client *c;
    struct late l = {.op = op};
    pthread_t id;
    GOOD(kvd_open(&o, &c, &e));
    prepare(b, c);
    fake_mode(b, mode);
    uint32_t taken = atomic_load(&b->fake->taken), acted = atomic_load(&b->fake->acted);
    l.c = c;
    CHECK(pthread_create(&id, NULL, late_call, &l) == 0);
    if (mode == FAKE_HOLD_TAKEN)
        until(&b->fake->taken, taken + 1);
    else if (mode == FAKE_HOLD_ACTED)
        until(&b->fake->acted, acted + 1);
    else
        usleep(10000); /* it is queued, or not yet: the verdict is the same */
    int64_t began = now_ms();
    fake_kill(b);
    pthread_join(id, NULL);
    int64_t took = now_ms() - began;
    CHECK(l.code == KVD_UNAVAILABLE && l.e.code == KVD_UNAVAILABLE && took < 10000);
    int did = happened(b, op);
    if (mode == FAKE_HOLD_QUEUED || !writes(op))
        CHECK(l.e.outcome == KVD_NO && !did);
    else
        CHECK(l.e.outcome == KVD_UNKNOWN && did == (mode == FAKE_HOLD_ACTED));
    fake_mode(b, FAKE_HONEST);
    fake_start(b);
    GOOD(kvd_put(c, "again", 5, "v", 1, NULL, &e));
    CHECK(kvd_generation(c) == 2 && b->fake->generation == 2);
    CHECK(kvd_close(c) == KVD_OK);
}

static void test_killed(struct broker *b) {
    static const enum fake_mode modes[] = {FAKE_HOLD_QUEUED, FAKE_HOLD_TAKEN, FAKE_HOLD_ACTED};
    for (int op = 0; op <= 6; op++)
        for (int m = 0; m < 3; m++)
            killed_in(b, modes[m], op);
}

/* What the broker had not taken when it died is sent to the next one. */
static void test_resent(struct broker *b) {
    kvd_client *c = open_client(b, 1, 0);
    struct late l = {.c = c, .op = 1};
    pthread_t id;
    prepare(b, c);
    fake_kill(b);
    CHECK(pthread_create(&id, NULL, late_call, &l) == 0);
    fake_start(b);
    pthread_join(id, NULL);
    CHECK(l.code == KVD_OK && happened(b, 1) && kvd_generation(c) == 2);
    CHECK(kvd_close(c) == KVD_OK);
}

/* Batches: each entry has its own verdict, in the arena, too, and pointers stay. */
static void test_batch_killed(struct broker *b) {
    enum { N = 40 };
    for (int mode = FAKE_HOLD_QUEUED; mode <= FAKE_HOLD_ACTED; mode++) {
        kvd_client *c;
        kvd_error e = {.size = sizeof e};
        kvd_options o = {.size = sizeof o, .path = b->path, .depth = 16, .dial_ms = 100};
        kvd_batch *t;
        void *arena;
        uint64_t got;
        GOOD(kvd_open(&o, &c, &e));
        prepare(b, c);
        GOOD(kvd_alloc(c, N * 4096, &arena, &e));
        memset(arena, 0x5a, N * 4096);
        fake_mode(b, (enum fake_mode)mode);
        uint32_t taken = atomic_load(&b->fake->taken);
        GOOD(kvd_batch_new(c, N, &t, &e));
        for (uint32_t i = 0; i < N; i++) {
            char key[16];
            int k = snprintf(key, sizeof key, "b%u", i);
            if (i % 2 == 0)
                GOOD(kvd_batch_add_put(t, key, (uint64_t)k, "v", 1, NULL, &e));
            else
                GOOD(kvd_batch_add_get_into(t, "there", 5, (char *)arena + i * 4096, 4096, &e));
        }
        GOOD(kvd_batch_submit(t, &e));
        if (mode != FAKE_HOLD_QUEUED)
            until(&b->fake->taken, taken + 16);
        CHECK(kvd_free(c, arena) == KVD_BUSY && kvd_batch_free(t) == KVD_BUSY && kvd_batch_reset(t, &e) == KVD_BUSY);
        WANT(KVD_TIMEOUT, KVD_NO, kvd_batch_wait(t, 1, &e));
        fake_kill(b);
        GOOD(kvd_batch_wait(t, -1, &e));
        for (uint32_t i = 0; i < N; i++) {
            char key[16];
            kvd_result r = {.size = sizeof r};
            snprintf(key, sizeof key, "b%u", i);
            GOOD(kvd_batch_result(t, i, &r, &e));
            CHECK(r.code == KVD_UNAVAILABLE);
            int was_taken = mode != FAKE_HOLD_QUEUED && i < 16;
            if (i % 2 == 0) {
                CHECK(r.outcome == (was_taken ? KVD_UNKNOWN : KVD_NO));
                CHECK((fake_find(b, key) != NULL) == (was_taken && mode == FAKE_HOLD_ACTED));
            } else {
                unsigned char *at = (unsigned char *)arena + i * 4096;
                CHECK(r.outcome == KVD_NO && (all(at, 4096, 0) || all(at, 4096, 0x5a)));
            }
        }
        CHECK(kvd_batch_free(t) == KVD_OK);
        fake_mode(b, FAKE_HONEST);
        fake_start(b);
        GOOD(kvd_get_into(c, "there", 5, arena, 4096, &got, NULL, &e));
        CHECK(got == 4 && memcmp(arena, "here", 4) == 0);
        GOOD(kvd_delete_prefix(c, "b", 1, NULL, &e));
        CHECK(kvd_free(c, arena) == KVD_OK && kvd_close(c) == KVD_OK);
    }
}

/* A broker that stands still gives no verdict; when it goes on it does, and when it is killed the library does. */
static void test_stopped(struct broker *b) {
    for (int killed = 0; killed < 2; killed++) {
        kvd_client *c = open_client(b, 1, 0);
        kvd_error e = {.size = sizeof e};
        kvd_batch *t;
        prepare(b, c);
        kill(b->pid, SIGSTOP);
        int status;
        CHECK(waitpid(b->pid, &status, WUNTRACED) == b->pid && WIFSTOPPED(status));
        GOOD(kvd_batch_new(c, 1, &t, &e));
        GOOD(kvd_batch_add_put(t, "fresh", 5, "v", 1, NULL, &e));
        GOOD(kvd_batch_submit(t, &e));
        WANT(KVD_TIMEOUT, KVD_NO, kvd_batch_wait(t, 30, &e));
        WANT(KVD_TIMEOUT, KVD_NO, kvd_wait(c, 10, NULL, &e));
        if (killed)
            fake_kill(b);
        else
            kill(b->pid, SIGCONT);
        GOOD(kvd_batch_wait(t, -1, &e));
        if (killed) {
            WANT(KVD_UNAVAILABLE, KVD_NO, kvd_batch_error(t, 0, &e));
            CHECK(fake_find(b, "fresh") == NULL);
            fake_start(b);
        } else {
            GOOD(kvd_batch_error(t, 0, &e));
            CHECK(fake_find(b, "fresh") != NULL);
        }
        CHECK(kvd_batch_free(t) == KVD_OK && kvd_close(c) == KVD_OK);
    }
}

/* An event loop hears of the death, too. */
static void test_loop_killed(struct broker *b) {
    kvd_client *c = open_client(b, 1, 0);
    kvd_error e = {.size = sizeof e};
    kvd_batch *t;
    uint64_t n;
    fake_mode(b, FAKE_HOLD_TAKEN);
    uint32_t taken = atomic_load(&b->fake->taken);
    GOOD(kvd_batch_new(c, 2, &t, &e));
    GOOD(kvd_batch_add_put(t, "fresh", 5, "v", 1, NULL, &e));
    GOOD(kvd_batch_add_exists(t, "fresh", 5, &e));
    GOOD(kvd_batch_submit(t, &e));
    until(&b->fake->taken, taken + 2);
    fake_kill(b);
    GOOD(kvd_wait(c, -1, &n, &e));
    CHECK(n == 2 && kvd_batch_pending(t) == 0);
    WANT(KVD_UNAVAILABLE, KVD_UNKNOWN, kvd_batch_error(t, 0, &e));
    WANT(KVD_UNAVAILABLE, KVD_NO, kvd_batch_error(t, 1, &e));
    GOOD(kvd_batch_reset(t, &e));
    GOOD(kvd_batch_add_exists(t, "fresh", 5, &e));
    WANT(KVD_UNAVAILABLE, KVD_NO, kvd_batch_submit(t, &e));
    fake_mode(b, FAKE_HONEST);
    fake_start(b);
    int64_t end = now_ms() + 20000;
    while (kvd_batch_submit(t, &e) == KVD_UNAVAILABLE)
        CHECK(now_ms() < end);
    GOOD(kvd_batch_wait(t, -1, &e));
    CHECK(kvd_batch_free(t) == KVD_OK && kvd_close(c) == KVD_OK);
}

/* A broker that closes the socket is no dead one: what it had is unknown, and the library connects again. */
static void test_closed(struct broker *b) {
    kvd_client *c = open_client(b, 1, 0);
    kvd_error e = {.size = sizeof e};
    fake_mode(b, FAKE_CLOSE);
    WANT(KVD_CLOSED, KVD_UNKNOWN, kvd_put(c, "k", 1, "v", 1, NULL, &e));
    WANT(KVD_CLOSED, KVD_NO, kvd_exists(c, "k", 1, NULL, &e));
    fake_mode(b, FAKE_HONEST);
    GOOD(kvd_put(c, "k", 1, "v", 1, NULL, &e));
    CHECK(kvd_generation(c) == 3 && kvd_close(c) == KVD_OK);
}

static void test_refused(struct broker *b) {
    kvd_client *c;
    kvd_error e = {.size = sizeof e};
    kvd_options o = {.size = sizeof o, .path = b->path, .dial_ms = 100};
    atomic_store(&b->fake->refuse, KVD_DENIED);
    WANT(KVD_DENIED, KVD_NO, kvd_open(&o, &c, &e));
    CHECK(strcmp(e.text, "the fake says no") == 0);
    atomic_store(&b->fake->refuse, 99);
    WANT(KVD_PROTOCOL, KVD_NO, kvd_open(&o, &c, &e));
    atomic_store(&b->fake->refuse, 0);
    fake_mode(b, FAKE_MUTE);
    WANT(KVD_UNAVAILABLE, KVD_NO, kvd_open(&o, &c, &e));
    fake_mode(b, FAKE_ONE_QUEUE);
    c = open_client(b, 8, 0);
    fake_mode(b, FAKE_HONEST);
    GOOD(kvd_put(c, "k", 1, "v", 1, NULL, &e));
    CHECK(kvd_close(c) == KVD_OK);
}

/* Each code of the broker arrives, with its text; a read is never unknown. */
static void test_codes(struct broker *b) {
    kvd_client *c = open_client(b, 1, 0);
    kvd_error e = {.size = sizeof e};
    unsigned char out[100], text[32];
    uint64_t n;
    for (uint32_t outcome = KVD_NO; outcome <= KVD_UNKNOWN; outcome++)
        for (uint32_t code = KVD_NOT_FOUND; code <= KVD_SYSTEM; code++) {
            atomic_store(&b->fake->outcome, outcome);
            atomic_store(&b->fake->code, code);
            memset(out, 0x5a, sizeof out);
            WANT((int)code, KVD_NO, kvd_get_into(c, "k", 1, out, sizeof out, &n, NULL, &e));
            CHECK(all(out, sizeof out, 0x5a) && n == (code == KVD_SHORT_BUFFER ? 107 : 0));
            if (code == KVD_SHORT_BUFFER)
                continue;
            snprintf((char *)text, sizeof text, "fake: code %u", code);
            CHECK(strcmp(e.text, (char *)text) == 0);
            WANT((int)code, (int)outcome, kvd_put(c, "k", 1, "v", 1, NULL, &e));
            WANT((int)code, (int)outcome, kvd_delete(c, "k", 1, &e));
            WANT((int)code, (int)outcome, kvd_delete_prefix(c, "k", 1, NULL, &e));
        }
    atomic_store(&b->fake->code, 22);
    WANT(KVD_PROTOCOL, KVD_UNKNOWN, kvd_put(c, "k", 1, "v", 1, NULL, &e));
    atomic_store(&b->fake->code, 0);
    GOOD(kvd_put(c, "k", 1, "v", 1, NULL, &e));
    CHECK(kvd_generation(c) == 2 && kvd_close(c) == KVD_OK);
}

/* Cancelled entries are given up by the library, or by the broker; either way each has a verdict. */
static void test_cancel(struct broker *b) {
    enum { N = 30 };
    kvd_client *c;
    kvd_error e = {.size = sizeof e};
    kvd_options o = {.size = sizeof o, .path = b->path, .depth = 32};
    kvd_batch *t;
    uint32_t n = 0;
    GOOD(kvd_open(&o, &c, &e));
    fake_mode(b, FAKE_HOLD_TAKEN);
    GOOD(kvd_batch_new(c, N + 100, &t, &e));
    uint32_t taken = atomic_load(&b->fake->taken);
    for (int i = 0; i < N; i++)
        GOOD(kvd_batch_add_exists(t, "k", 1, &e));
    GOOD(kvd_batch_submit(t, &e));
    until(&b->fake->taken, taken + N);
    while (kvd_batch_pending(t) != 0) {
        GOOD(kvd_batch_cancel(t, &e));
        GOOD(kvd_wait(c, 20000, NULL, &e));
        n++;
    }
    for (uint32_t i = 0; i < N; i++)
        WANT(KVD_CANCELLED, KVD_NO, kvd_batch_error(t, i, &e));
    CHECK(atomic_load(&b->fake->cancelled) >= N);
    /* More than there are slots: the rest never reaches the broker. */
    GOOD(kvd_batch_reset(t, &e));
    for (int i = 0; i < N + 100; i++)
        GOOD(kvd_batch_add_exists(t, "k", 1, &e));
    taken = atomic_load(&b->fake->taken);
    GOOD(kvd_batch_submit(t, &e));
    until(&b->fake->taken, taken + 32);
    GOOD(kvd_batch_cancel(t, &e));
    CHECK(kvd_batch_pending(t) == 32);
    fake_mode(b, FAKE_HONEST);
    GOOD(kvd_batch_wait(t, -1, &e));
    CHECK(kvd_batch_free(t) == KVD_OK && kvd_close(c) == KVD_OK);
}

const struct test state_tests[] = {
    {"killed", test_killed},           {"resent", test_resent}, {"batch-killed", test_batch_killed}, {"stopped", test_stopped},
    {"loop-killed", test_loop_killed}, {"closed", test_closed}, {"refused", test_refused},           {"cancel", test_cancel},
    {"codes", test_codes},
    {NULL, NULL},
};
