/* batches.c - batches and event loops, against any broker. */
#include "test.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

static kvd_result result(kvd_batch *b, uint32_t i) {
    kvd_error e = {.size = sizeof e};
    kvd_result r = {.size = sizeof r};
    GOOD(kvd_batch_result(b, i, &r, &e));
    return r;
}

static void test_mixed(struct broker *b) {
    kvd_client *c = open_client(b, 1, 0);
    kvd_error e = {.size = sizeof e};
    kvd_batch *t;
    char a[64], small[2], range[8];
    unsigned char large[5000], back[5000];
    kvd_write absent = {.size = sizeof absent, .condition = KVD_IF_ABSENT};
    fill(large, sizeof large, 4);
    kvd_delete(c, "no", 2, &e);
    kvd_delete(c, "number", 6, &e);
    GOOD(kvd_put(c, "yes", 3, "hello", 5, NULL, &e));
    GOOD(kvd_put(c, "doomed", 6, "x", 1, NULL, &e));
    GOOD(kvd_put(c, "large", 5, large, sizeof large, NULL, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_batch_new(c, 0, &t, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_batch_new(c, 65537, &t, &e));
    GOOD(kvd_batch_new(c, 11, &t, &e));
    GOOD(kvd_batch_add_get_into(t, "yes", 3, a, sizeof a, &e));
    GOOD(kvd_batch_add_get_into(t, "no", 2, a, sizeof a, &e));
    GOOD(kvd_batch_add_get_into(t, "yes", 3, small, sizeof small, &e));
    GOOD(kvd_batch_add_put(t, "new", 3, "value", 5, NULL, &e));
    GOOD(kvd_batch_add_put(t, "yes", 3, "value", 5, &absent, &e));
    GOOD(kvd_batch_add_delete(t, "doomed", 6, NULL, &e));
    GOOD(kvd_batch_add_incr(t, "number", 6, 41, &e));
    GOOD(kvd_batch_add_touch(t, "no", 2, 1000, &e));
    GOOD(kvd_batch_add_exists(t, "yes", 3, &e));
    GOOD(kvd_batch_add_get_into(t, "large", 5, back, sizeof back, &e));
    GOOD(kvd_batch_add_get_range(t, "yes", 3, 2, range, 8, &e));
    WANT(KVD_BUSY, KVD_NO, kvd_batch_add_exists(t, "yes", 3, &e));
    CHECK(result(t, 0).code == KVD_BUSY && kvd_batch_pending(t) == 0);
    GOOD(kvd_batch_submit(t, &e));
    WANT(KVD_BUSY, KVD_NO, kvd_batch_submit(t, &e));
    GOOD(kvd_batch_wait(t, -1, &e));
    CHECK(kvd_batch_pending(t) == 0);
    CHECK(result(t, 0).code == KVD_OK && result(t, 0).length == 5 && memcmp(a, "hello", 5) == 0);
    CHECK(result(t, 1).code == KVD_NOT_FOUND && result(t, 1).outcome == KVD_NO);
    CHECK(result(t, 2).code == KVD_SHORT_BUFFER && result(t, 2).length == 5);
    CHECK(result(t, 3).code == KVD_OK && result(t, 3).version != 0);
    CHECK(result(t, 4).code == KVD_CONDITION && result(t, 4).outcome == KVD_NO);
    CHECK(result(t, 5).code == KVD_OK);
    CHECK(result(t, 6).code == KVD_OK && result(t, 6).number == 41);
    CHECK(result(t, 7).code == KVD_NOT_FOUND);
    CHECK(result(t, 8).code == KVD_OK);
    CHECK(result(t, 9).code == KVD_OK && result(t, 9).length == sizeof large && filled(back, sizeof back, 4));
    CHECK(result(t, 10).code == KVD_OK && result(t, 10).length == 3 && memcmp(range, "llo", 3) == 0);
    WANT(KVD_NOT_FOUND, KVD_NO, kvd_batch_error(t, 1, &e));
    GOOD(kvd_batch_error(t, 0, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_batch_result(t, 11, NULL, &e));
    CHECK(kvd_close(c) == KVD_BUSY);
    GOOD(kvd_batch_reset(t, &e));
    for (int i = 0; i < 4; i++)
        GOOD(kvd_batch_add_delete(t, &"yes\0new\0number\0large"[(int[]){0, 4, 8, 15}[i]], (uint64_t[]){3, 3, 6, 5}[i], NULL, &e));
    GOOD(kvd_batch_submit(t, &e));
    GOOD(kvd_batch_wait(t, 60000, &e));
    for (uint32_t i = 0; i < 4; i++)
        CHECK(result(t, i).code == KVD_OK);
    CHECK(kvd_batch_free(t) == KVD_OK && kvd_close(c) == KVD_OK);
}

/* What there is, how long it is, and that it stays, in one batch. */
static void test_pinned(struct broker *b) {
    kvd_client *c = open_client(b, 1, 0);
    kvd_error e = {.size = sizeof e};
    kvd_batch *t;
    kvd_delete(c, "no", 2, &e);
    GOOD(kvd_put(c, "pinned", 6, "hello", 5, NULL, &e));
    GOOD(kvd_batch_new(c, 8, &t, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_batch_add_pin(t, "pinned", 6, 0, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_batch_add_pin(t, "pinned", 6, KVD_MAX_PIN_MS + 1, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_batch_add_pin(NULL, "pinned", 6, 1, &e));
    GOOD(kvd_batch_add_exists(t, "pinned", 6, &e));
    GOOD(kvd_batch_add_length(t, "pinned", 6, &e));
    GOOD(kvd_batch_add_pin(t, "pinned", 6, 5000, &e));
    GOOD(kvd_batch_add_exists(t, "no", 2, &e));
    GOOD(kvd_batch_add_length(t, "no", 2, &e));
    GOOD(kvd_batch_add_pin(t, "no", 2, 5000, &e));
    GOOD(kvd_batch_add_unpin(t, "no", 2, &e));
    GOOD(kvd_batch_submit(t, &e));
    GOOD(kvd_batch_wait(t, -1, &e));
    CHECK(result(t, 0).code == KVD_OK && result(t, 0).length == 0 && result(t, 0).version != 0);
    CHECK(result(t, 1).code == KVD_OK && result(t, 1).length == 5 && result(t, 1).version == result(t, 0).version);
    CHECK(result(t, 2).code == KVD_OK && result(t, 2).version == result(t, 0).version);
    for (uint32_t i = 3; i < 7; i++)
        CHECK(result(t, i).code == KVD_NOT_FOUND && result(t, i).outcome == KVD_NO);
    CHECK(b->fake == NULL || fake_find(b, "pinned")->pinned_ms == 5000);
    GOOD(kvd_batch_reset(t, &e));
    GOOD(kvd_batch_add_unpin(t, "pinned", 6, &e));
    GOOD(kvd_batch_submit(t, &e));
    GOOD(kvd_batch_wait(t, -1, &e));
    CHECK(result(t, 0).code == KVD_OK);
    CHECK(b->fake == NULL || fake_find(b, "pinned")->pinned_ms == 0);
    GOOD(kvd_delete(c, "pinned", 6, &e));
    CHECK(kvd_batch_free(t) == KVD_OK && kvd_close(c) == KVD_OK);
}

/* More entries than slots, and more bytes than the arena has at once. */
static void test_many(struct broker *b) {
    enum { N = 2000, LONG = 60000 };
    kvd_client *c = open_client(b, 1, 1 << 20);
    kvd_error e = {.size = sizeof e};
    kvd_batch *t;
    unsigned char *in = malloc(LONG), *out = malloc((size_t)N * 64), *wide = malloc((size_t)64 * LONG);
    fill(in, LONG, 5);
    GOOD(kvd_put(c, "small", 5, in, 50, NULL, &e));
    GOOD(kvd_put(c, "wide", 4, in, LONG, NULL, &e));
    GOOD(kvd_batch_new(c, N, &t, &e));
    for (uint32_t i = 0; i < N; i++)
        GOOD(kvd_batch_add_get_into(t, "small", 5, out + (size_t)i * 64, 64, &e));
    GOOD(kvd_batch_submit(t, &e));
    GOOD(kvd_batch_wait(t, -1, &e));
    for (uint32_t i = 0; i < N; i++)
        CHECK(result(t, i).code == KVD_OK && filled(out + (size_t)i * 64, 50, 5));
    GOOD(kvd_batch_reset(t, &e));
    for (uint32_t i = 0; i < 64; i++)
        GOOD(kvd_batch_add_get_into(t, "wide", 4, wide + (size_t)i * LONG, LONG, &e));
    GOOD(kvd_batch_submit(t, &e));
    GOOD(kvd_batch_wait(t, -1, &e));
    for (uint32_t i = 0; i < 64; i++)
        CHECK(result(t, i).code == KVD_OK && filled(wide + (size_t)i * LONG, LONG, 5));
    GOOD(kvd_batch_reset(t, &e));
    GOOD(kvd_batch_add_put(t, "wide", 4, wide, 2 << 20, NULL, &e));
    GOOD(kvd_batch_submit(t, &e));
    GOOD(kvd_batch_wait(t, -1, &e));
    CHECK(result(t, 0).code == KVD_TOO_LARGE && result(t, 0).outcome == KVD_NO);
    /* All of the arena came back. */
    void *v;
    GOOD(kvd_alloc(c, 1 << 20, &v, &e));
    CHECK(kvd_free(c, v) == KVD_OK && kvd_batch_free(t) == KVD_OK);
    GOOD(kvd_delete(c, "wide", 4, &e));
    GOOD(kvd_delete(c, "small", 5, &e));
    CHECK(kvd_close(c) == KVD_OK);
    free(in);
    free(out);
    free(wide);
}

static void test_prefix(struct broker *b) {
    enum { N = 3000, THERE = 20 };
    kvd_client *c = open_client(b, 1, 0);
    kvd_error e = {.size = sizeof e};
    static char keys[N][16];
    static const void *at[N];
    static uint64_t bytes[N];
    uint64_t leading;
    for (uint32_t i = 0; i < N; i++) {
        bytes[i] = (uint64_t)snprintf(keys[i], sizeof keys[i], "p%u", i % THERE);
        at[i] = keys[i];
        if (i < THERE)
            GOOD(kvd_put(c, keys[i], bytes[i], "v", 1, NULL, &e));
    }
    GOOD(kvd_exists_prefix(c, at, bytes, N, &leading, &e));
    CHECK(leading == N);
    GOOD(kvd_exists_prefix(c, at, bytes, 0, &leading, &e));
    CHECK(leading == 0);
    keys[1500][0] = 'q';
    GOOD(kvd_exists_prefix(c, at, bytes, N, &leading, &e));
    CHECK(leading == 1500);
    keys[7][0] = 'q';
    GOOD(kvd_exists_prefix(c, at, bytes, N, &leading, &e));
    CHECK(leading == 7);
    bytes[3] = 0;
    WANT(KVD_ARGUMENT, KVD_NO, kvd_exists_prefix(c, at, bytes, N, &leading, &e));
    GOOD(kvd_delete_prefix(c, "p", 1, NULL, &e));
    CHECK(kvd_close(c) == KVD_OK);
}

/* An event loop: arm, poll, reap. */
static void test_loop(struct broker *b) {
    enum { BATCHES = 8, EACH = 20 };
    kvd_client *c = open_client(b, 2, 0);
    kvd_error e = {.size = sizeof e};
    kvd_batch *t[BATCHES];
    static char out[BATCHES][EACH][16];
    uint64_t reaped = 0, n;
    GOOD(kvd_put(c, "loop", 4, "value", 5, NULL, &e));
    for (int round = 0; round < 20; round++) {
        reaped = 0;
        for (int i = 0; i < BATCHES; i++) {
            GOOD(kvd_batch_new(c, EACH, &t[i], &e));
            for (int k = 0; k < EACH; k++)
                GOOD(kvd_batch_add_get_into(t[i], "loop", 4, out[i][k], 16, &e));
            GOOD(kvd_batch_submit(t[i], &e));
        }
        while (reaped < BATCHES * EACH) {
            struct pollfd p = {.fd = kvd_fd(c), .events = POLLIN};
            int armed = kvd_arm(c);
            CHECK(armed == 0 || armed == 1);
            if (armed == 0)
                CHECK(poll(&p, 1, 20000) == 1);
            int64_t some = kvd_reap(c);
            CHECK(some >= 0);
            reaped += (uint64_t)some;
        }
        CHECK(reaped == BATCHES * EACH);
        for (int i = 0; i < BATCHES; i++)
            CHECK(kvd_batch_pending(t[i]) == 0 && kvd_batch_free(t[i]) == KVD_OK);
    }
    WANT(KVD_TIMEOUT, KVD_NO, kvd_wait(c, 0, &n, &e));
    GOOD(kvd_batch_new(c, 1, &t[0], &e));
    GOOD(kvd_batch_add_exists(t[0], "loop", 4, &e));
    GOOD(kvd_batch_submit(t[0], &e));
    GOOD(kvd_wait(c, -1, &n, &e));
    CHECK(n == 1 && kvd_batch_pending(t[0]) == 0 && kvd_batch_free(t[0]) == KVD_OK);
    GOOD(kvd_delete(c, "loop", 4, &e));
    CHECK(kvd_close(c) == KVD_OK);
}

static void *caller(void *arg) {
    kvd_error e = {.size = sizeof e};
    char out[16];
    uint64_t n;
    for (int i = 0; i < 1000; i++)
        GOOD(kvd_get_into(arg, "loop", 4, out, 16, &n, NULL, &e));
    return NULL;
}

/* Threads that call through the queue of a batch take its completions; the loop hears of them. */
static void test_together(struct broker *b) {
    kvd_client *c = open_client(b, 1, 0);
    kvd_error e = {.size = sizeof e};
    pthread_t id[3];
    char out[32][16];
    uint64_t n;
    GOOD(kvd_put(c, "loop", 4, "value", 5, NULL, &e));
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&id[i], NULL, caller, c) == 0);
    for (int round = 0; round < 300; round++) {
        kvd_batch *t;
        GOOD(kvd_batch_new(c, 32, &t, &e));
        for (int k = 0; k < 32; k++)
            GOOD(kvd_batch_add_get_into(t, "loop", 4, out[k], 16, &e));
        GOOD(kvd_batch_submit(t, &e));
        if (round % 2 == 0)
            GOOD(kvd_batch_wait(t, 60000, &e));
        while (kvd_batch_pending(t) != 0)
            GOOD(kvd_wait(c, 20000, &n, &e));
        CHECK(kvd_batch_free(t) == KVD_OK);
    }
    for (int i = 0; i < 3; i++)
        pthread_join(id[i], NULL);
    GOOD(kvd_delete(c, "loop", 4, &e));
    CHECK(kvd_close(c) == KVD_OK);
}

static _Atomic int alarms;

static void on_alarm(int s) {
    (void)s;
    alarms++;
}

/* Signals end kvd_wait alone. */
static void test_signals(struct broker *b) {
    kvd_client *c = open_client(b, 1, 0);
    kvd_error e = {.size = sizeof e};
    struct sigaction a = {.sa_handler = on_alarm};
    struct itimerval often = {{0, 500}, {0, 500}}, off = {{0, 0}, {0, 0}};
    char out[16];
    uint64_t n;
    GOOD(kvd_put(c, "sig", 3, "value", 5, NULL, &e));
    sigaction(SIGALRM, &a, NULL); /* for good: one may come late */
    setitimer(ITIMER_REAL, &often, NULL);
    while (alarms < 50)
        GOOD(kvd_get_into(c, "sig", 3, out, 16, &n, NULL, &e));
    WANT(KVD_SYSTEM, KVD_NO, kvd_wait(c, -1, &n, &e));
    CHECK(e.os_error == EINTR);
    setitimer(ITIMER_REAL, &off, NULL);
    GOOD(kvd_delete(c, "sig", 3, &e));
    CHECK(kvd_close(c) == KVD_OK);
}

const struct test batch_tests[] = {
    {"mixed", test_mixed},   {"pinned", test_pinned},     {"many", test_many},       {"prefix", test_prefix},
    {"loop", test_loop},     {"together", test_together}, {"signals", test_signals}, {NULL, NULL},
};
