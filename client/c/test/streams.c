/* streams.c - puts of values that come piece by piece, against any broker. */
#include "test.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

/* streamed puts n bytes in pieces of some, from memory of the caller's or of the arena. */
static void streamed(kvd_client *c, uint64_t n, uint64_t some, int arena) {
    kvd_error e = {.size = sizeof e};
    kvd_write how = {.size = sizeof how, .flags = 9};
    kvd_record r = {.size = sizeof r}, was = {.size = sizeof was};
    kvd_stream *s;
    unsigned char *value = malloc(n + 1);
    void *p = NULL, *got;
    uint64_t length;
    fill(value, n, 5);
    if (arena)
        GOOD(kvd_alloc(c, some, &p, &e));
    GOOD(kvd_put(c, "s", 1, "old", 3, NULL, &e));
    GOOD(kvd_put_new(c, "s", 1, n, &how, &s, &e));
    for (uint64_t at = 0; at < n; at += some) {
        uint64_t now = n - at < some ? n - at : some;
        if (arena)
            memcpy(p, value + at, now);
        GOOD(kvd_put_write(s, arena ? p : value + at, now, &e));
    }
    WANT(KVD_ARGUMENT, KVD_NO, kvd_put_write(s, value, 1, &e));
    GOOD(kvd_exists(c, "s", 1, &was, &e));
    CHECK(kvd_close(c) == KVD_BUSY);
    GOOD(kvd_put_commit(s, &r, &e));
    CHECK(r.length == n && r.flags == 9 && r.version != was.version);
    WANT(KVD_ARGUMENT, KVD_NO, kvd_put_commit(s, &r, &e));
    CHECK(kvd_put_free(s) == KVD_OK && kvd_put_free(NULL) == KVD_OK);
    GOOD(kvd_get(c, "s", 1, &got, &length, &was, &e));
    CHECK(length == n && memcmp(got, value, n) == 0 && was.version == r.version);
    CHECK(was.flags == 9 || n > 1 << 20); /* what is longer than the arena is read in pieces, which tell none */
    CHECK(kvd_free(c, got) == KVD_OK && kvd_free(c, p) == KVD_OK);
    free(value);
}

static void test_stream(struct broker *b) {
    kvd_client *c = open_client(b, 1, 1 << 20);
    kvd_error e = {.size = sizeof e};
    kvd_write how = {.size = sizeof how, .condition = KVD_IF_ABSENT};
    kvd_stream *s;
    uint64_t most = b->fake != NULL ? 3 << 20 : 20 << 20;
    streamed(c, 0, 1, 0);
    streamed(c, 3000, 700, 0);
    streamed(c, most + 5, 100000, 0);
    streamed(c, most, most, 0); /* longer than the arena: halved until it fits */
    streamed(c, most, 200000, 1);
    WANT(KVD_ARGUMENT, KVD_NO, kvd_put_new(c, "s", 1, 1, &how, &s, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_put_new(c, "", 0, 1, NULL, &s, &e));
    WANT(KVD_TOO_LARGE, KVD_NO, kvd_put_new(c, "s", 1, kvd_max_value(c) + 1, NULL, &s, &e));
    CHECK(s == NULL);
    GOOD(kvd_delete(c, "s", 1, &e));
    for (int i = 0; i < 20; i++) { /* more than a broker allows at a time */
        GOOD(kvd_put_new(c, "s", 1, 5, NULL, &s, &e));
        GOOD(kvd_put_write(s, "abc", 3, &e));
        WANT(KVD_ARGUMENT, KVD_NO, kvd_put_commit(s, NULL, &e));
        CHECK(kvd_put_free(s) == KVD_OK);
    }
    WANT(KVD_NOT_FOUND, KVD_NO, kvd_exists(c, "s", 1, NULL, &e));
    CHECK(kvd_close(c) == KVD_OK);
}

/* A stream does not outlive its connection: its number may be another's of the next one. */
static void test_stream_lost(struct broker *b) {
    kvd_client *c = open_client(b, 1, 1 << 20);
    kvd_error e = {.size = sizeof e};
    kvd_stream *s, *t;
    if (b->fake == NULL) { /* which nobody may kill */
        CHECK(kvd_close(c) == KVD_OK);
        return;
    }
    GOOD(kvd_put_new(c, "s", 1, 5, NULL, &s, &e));
    fake_kill(b);
    fake_start(b);
    kvd_exists(c, "other", 5, NULL, &e); /* connects again */
    GOOD(kvd_put(c, "other", 5, "v", 1, NULL, &e));
    GOOD(kvd_put_new(c, "t", 1, 5, NULL, &t, &e));
    WANT(KVD_STALE, KVD_NO, kvd_put_write(s, "abcde", 5, &e));
    WANT(KVD_STALE, KVD_NO, kvd_put_commit(s, NULL, &e));
    GOOD(kvd_put_write(t, "fghij", 5, &e));
    CHECK(kvd_put_free(s) == KVD_OK);
    GOOD(kvd_put_commit(t, NULL, &e));
    CHECK(kvd_put_free(t) == KVD_OK && fake_find(b, "s") == NULL && fake_find(b, "t")->length == 5);
    CHECK(kvd_close(c) == KVD_OK);
}

struct committing {
    kvd_stream *s;
    int code;
    kvd_error e;
};

static void *commit(void *arg) {
    struct committing *l = arg;
    l->e.size = sizeof l->e;
    l->code = kvd_put_commit(l->s, NULL, &l->e);
    return NULL;
}

/* killed_in kills the broker while it holds a commit in a state, and compares the verdict with its store. */
static void killed_in(struct broker *b, enum fake_mode mode) {
    kvd_options o = {.size = sizeof o, .path = b->path, .dial_ms = 300, .queues = 1, .arena_bytes = 1 << 20};
    kvd_error e = {.size = sizeof e};
    kvd_client *c;
    struct committing l = {.code = -1};
    pthread_t id;
    static unsigned char value[5000];
    fill(value, sizeof value, 3);
    GOOD(kvd_open(&o, &c, &e));
    GOOD(kvd_put(c, "s", 1, "old", 3, NULL, &e));
    GOOD(kvd_put_new(c, "s", 1, sizeof value, NULL, &l.s, &e));
    GOOD(kvd_put_write(l.s, value, sizeof value, &e));
    uint32_t taken = atomic_load(&b->fake->taken), acted = atomic_load(&b->fake->acted);
    fake_mode(b, mode);
    CHECK(pthread_create(&id, NULL, commit, &l) == 0);
    if (mode == FAKE_HOLD_TAKEN)
        until(&b->fake->taken, taken + 1);
    else if (mode == FAKE_HOLD_ACTED)
        until(&b->fake->acted, acted + 1);
    int64_t began = now_ms(); /* otherwise it is queued, or not yet: the verdict is the same */
    fake_kill(b);
    pthread_join(id, NULL);
    CHECK(now_ms() - began < 10000 && l.code != KVD_OK && l.code == l.e.code);
    struct fake_record *r = fake_find(b, "s");
    CHECK(r != NULL);
    int did = r->length == sizeof value && memcmp(r->value, value, sizeof value) == 0;
    CHECK(did || (r->length == 3 && memcmp(r->value, "old", 3) == 0));
    if (mode == FAKE_HOLD_QUEUED)
        CHECK(l.e.outcome == KVD_NO && !did);
    else
        CHECK(l.code == KVD_UNAVAILABLE && l.e.outcome == KVD_UNKNOWN && did == (mode == FAKE_HOLD_ACTED));
    fake_mode(b, FAKE_HONEST);
    fake_start(b);
    WANT(l.code, KVD_NO, kvd_put_commit(l.s, NULL, &e)); /* it is not asked for twice */
    CHECK(kvd_put_free(l.s) == KVD_OK);
    GOOD(kvd_put(c, "again", 5, "v", 1, NULL, &e));
    CHECK(kvd_generation(c) == 2 && fake_find(b, "s")->length == (did ? sizeof value : 3));
    CHECK(kvd_close(c) == KVD_OK);
}

static void test_stream_killed(struct broker *b) {
    static const enum fake_mode modes[] = {FAKE_HOLD_QUEUED, FAKE_HOLD_TAKEN, FAKE_HOLD_ACTED};
    for (int m = 0; b->fake != NULL && m < 3; m++) /* nobody may kill another */
        killed_in(b, modes[m]);
}

/* A child can do nothing with a stream but free it, and that ends nothing: the parent goes on. */
static void test_stream_forked(struct broker *b) {
    kvd_client *c = open_client(b, 1, 1 << 20);
    kvd_error e = {.size = sizeof e};
    kvd_stream *s, *t;
    kvd_record r = {.size = sizeof r};
    char got[10];
    uint64_t n;
    int status;
    GOOD(kvd_put_new(c, "s", 1, 10, NULL, &s, &e));
    GOOD(kvd_put_write(s, "01234", 5, &e));
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        WANT(KVD_FORKED, KVD_NO, kvd_put_write(s, "abcde", 5, &e));
        WANT(KVD_FORKED, KVD_NO, kvd_put_commit(s, NULL, &e));
        WANT(KVD_FORKED, KVD_NO, kvd_put_new(c, "s", 1, 10, NULL, &t, &e));
        CHECK(t == NULL && kvd_put_free(s) == KVD_OK && kvd_close(c) == KVD_OK && count_maps() == 0);
        _exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    GOOD(kvd_put_write(s, "56789", 5, &e));
    GOOD(kvd_put_commit(s, &r, &e));
    CHECK(r.length == 10 && kvd_put_free(s) == KVD_OK);
    GOOD(kvd_get_into(c, "s", 1, got, sizeof got, &n, NULL, &e));
    CHECK(n == 10 && memcmp(got, "0123456789", 10) == 0);
    GOOD(kvd_delete(c, "s", 1, &e));
    CHECK(kvd_close(c) == KVD_OK);
}

const struct test stream_tests[] = {{"stream", test_stream},
                                    {"stream-lost", test_stream_lost},
                                    {"stream-killed", test_stream_killed},
                                    {"stream-forked", test_stream_forked},
                                    {NULL, NULL}};
