/* views.c - values in place: what is seen, how it ends, and a broker that lies about it. */
#include "test.h"

#include <sys/wait.h>
#include <unistd.h>

/* seen compares what a view shows, in parts of so many bytes; 0: as the broker likes. */
static void seen(struct kvd_view *v, const unsigned char *value, uint64_t length, uint64_t most) {
    kvd_error e = {.size = sizeof e};
    const kvd_part *parts;
    uint64_t n, done = 0;
    GOOD(kvd_view_parts(v, &parts, &n, &e));
    CHECK(most == 0 || n == (length + most - 1) / most);
    for (uint64_t i = 0; i < n; i++) {
        CHECK(parts[i].length <= length - done && memcmp(parts[i].address, value + done, parts[i].length) == 0);
        done += parts[i].length;
    }
    CHECK(done == length);
}

static struct kvd_view *look(kvd_client *c, const char *key) {
    struct kvd_view *v;
    kvd_error e = {.size = sizeof e};
    GOOD(kvd_view(c, key, strlen(key), 5000, &v, NULL, &e));
    return v;
}

static unsigned char *make(kvd_client *c, const char *key, uint64_t length) {
    kvd_error e = {.size = sizeof e};
    unsigned char *p = malloc(length);
    fill(p, length, (uint32_t)length);
    GOOD(kvd_put(c, key, strlen(key), p, length, NULL, &e));
    return p;
}

/* A view shows the value that there was, and lapses. */
static void test_seen(struct broker *b) {
    static const uint64_t lengths[] = {10000, 1 << 20, (3 << 20) + 5};
    kvd_client *c = open_client(b, 0, 0);
    kvd_error e = {.size = sizeof e};
    struct kvd_view *v;
    for (int i = 0; i < 3; i++) {
        unsigned char *value = make(c, "seen", lengths[i]);
        v = look(c, "seen");
        if (b->fake == NULL) {
            GOOD(kvd_put(c, "seen", 4, "else", 4, NULL, &e));
            GOOD(kvd_delete(c, "seen", 4, &e));
        }
        seen(v, value, lengths[i], 0);
        GOOD(kvd_view_release(v, &e));
        free(value);
    }
    free(make(c, "seen", 10000));
    if (b->fake != NULL)
        atomic_store(&b->fake->expires, 1);
    int64_t end = now_ms() + 20000;
    do {
        GOOD(kvd_view(c, "seen", 4, 1, &v, NULL, &e));
        GOOD(kvd_exists(c, "seen", 4, NULL, &e));
        CHECK(now_ms() < end);
    } while (kvd_view_release(v, &e) == KVD_OK);
    CHECK(e.code == KVD_VIEW_EXPIRED && e.outcome == KVD_NO);
    GOOD(kvd_delete(c, "seen", 4, &e));
    CHECK(kvd_close(c) == KVD_OK);
}

static void test_views(struct broker *b) {
    enum { MORE = 5 };
    kvd_client *c = open_client(b, 0, 0);
    kvd_error e = {.size = sizeof e};
    struct kvd_view *v, *more[MORE];
    kvd_record r = {.size = sizeof r}, put = {.size = sizeof put};
    kvd_write how = {.size = sizeof how, .flags = 9};
    const kvd_part *parts;
    uint64_t n;
    unsigned char *small = make(c, "small", 10000), *large = make(c, "large", (3 << 20) + 5);
    GOOD(kvd_put_if(c, "small", 5, small, 10000, &how, &put, &e));
    GOOD(kvd_view(c, "small", 5, 0, &v, &r, &e));
    CHECK(r.length == 10000 && r.version == put.version && r.flags == 9);
    seen(v, small, 10000, 1 << 20);
    int maps = count_maps();
    for (int i = 0; i < MORE; i++)
        more[i] = look(c, "small");
    CHECK(count_maps() == maps && atomic_load(&b->fake->views) == MORE + 1); /* a region comes once */
    CHECK(kvd_close(c) == KVD_BUSY);
    for (int i = 0; i < MORE; i++)
        GOOD(kvd_view_release(more[i], &e));
    GOOD(kvd_view_release(v, &e));
    v = look(c, "large");
    seen(v, large, (3 << 20) + 5, 1 << 20);
    atomic_store(&b->fake->expires, 1);
    WANT(KVD_VIEW_EXPIRED, KVD_NO, kvd_view_end(v, &e));
    atomic_store(&b->fake->expires, 0);
    WANT(KVD_VIEW_EXPIRED, KVD_NO, kvd_view_end(v, &e));
    seen(v, large, (3 << 20) + 5, 1 << 20);
    CHECK(atomic_load(&b->fake->views) == 0 && kvd_close(c) == KVD_BUSY);
    WANT(KVD_VIEW_EXPIRED, KVD_NO, kvd_view_release(v, &e));
    v = look(c, "large");
    GOOD(kvd_view_end(v, &e));
    GOOD(kvd_view_release(v, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_view_end(NULL, &e));
    GOOD(kvd_put(c, "none", 4, "", 0, NULL, &e));
    WANT(KVD_NOT_FOUND, KVD_NO, kvd_view(c, "absent", 6, 0, &v, NULL, &e));
    CHECK(v == NULL);
    WANT(KVD_UNSUPPORTED, KVD_NO, kvd_view(c, "none", 4, 0, &v, NULL, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_view(c, "", 0, 0, &v, NULL, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_view(c, "small", 5, 0, NULL, NULL, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_view(NULL, "small", 5, 0, &v, NULL, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_view_parts(NULL, &parts, &n, &e));
    GOOD(kvd_view_release(NULL, &e));
    CHECK(atomic_load(&b->fake->views) == 0 && kvd_close(c) == KVD_OK);
    free(small);
    free(large);
}

/* Memory that the broker takes back is unmapped when the last view in it is over. */
static void test_taken_back(struct broker *b) {
    kvd_client *c = open_client(b, 1, 0);
    kvd_error e = {.size = sizeof e};
    unsigned char *value = make(c, "k", 10000);
    int maps = count_maps();
    struct kvd_view *v = look(c, "k"), *w = look(c, "k");
    CHECK(count_maps() == maps + 1);
    atomic_store(&b->fake->expires, 2);
    WANT(KVD_VIEW_EXPIRED, KVD_NO, kvd_view_release(v, &e));
    atomic_store(&b->fake->expires, 0);
    v = look(c, "k"); /* in another region */
    seen(v, value, 10000, 1 << 20);
    seen(w, value, 10000, 1 << 20);
    CHECK(count_maps() == maps + 2);
    GOOD(kvd_view_release(w, &e));
    CHECK(count_maps() == maps + 1);
    GOOD(kvd_view_release(v, &e));
    CHECK(kvd_close(c) == KVD_OK);
    free(value);
}

/* When the broker dies views are stale. Their bytes may be looked at still. */
static void test_view_killed(struct broker *b) {
    for (int again = 0; again < 2; again++) {
        kvd_client *c = open_client(b, 1, 0);
        kvd_error e = {.size = sizeof e};
        const kvd_part *parts, *none;
        uint64_t n;
        unsigned char *value = make(c, "k", 10000);
        struct kvd_view *v = look(c, "k"), *w;
        GOOD(kvd_view_parts(v, &parts, &n, &e));
        fake_kill(b);
        fake_start(b);
        while (again && kvd_exists(c, "k", 1, NULL, &e) != KVD_OK)
            CHECK(e.code == KVD_UNAVAILABLE);
        CHECK(memcmp(parts[0].address, value, 10000) == 0);
        if (again) {
            WANT(KVD_STALE, KVD_NO, kvd_view_parts(v, &none, &n, &e));
            CHECK(none == NULL && n == 0);
            w = look(c, "k");
            seen(w, value, 10000, 1 << 20);
            GOOD(kvd_view_release(w, &e));
        }
        WANT(KVD_STALE, KVD_NO, kvd_view_release(v, &e));
        CHECK(kvd_close(c) == KVD_OK);
        free(value);
    }
    kvd_client *c = open_client(b, 1, 0);
    kvd_error e = {.size = sizeof e};
    struct kvd_view *v;
    fake_mode(b, FAKE_CLOSE);
    WANT(KVD_CLOSED, KVD_NO, kvd_view(c, "k", 1, 0, &v, NULL, &e));
    fake_mode(b, FAKE_HONEST);
    CHECK(kvd_close(c) == KVD_OK);
}

static void test_view_forked(struct broker *b) {
    kvd_client *c = open_client(b, 1, 0);
    kvd_error e = {.size = sizeof e};
    const kvd_part *parts;
    uint64_t n;
    int status;
    unsigned char *value = make(c, "k", 10000);
    struct kvd_view *v = look(c, "k"), *w;
    pid_t pid = fork();
    if (pid == 0) {
        WANT(KVD_FORKED, KVD_NO, kvd_view_parts(v, &parts, &n, &e));
        WANT(KVD_FORKED, KVD_NO, kvd_view(c, "k", 1, 0, &w, NULL, &e));
        WANT(KVD_FORKED, KVD_NO, kvd_view_end(v, &e));
        WANT(KVD_FORKED, KVD_NO, kvd_view_release(v, &e));
        CHECK(kvd_close(c) == KVD_OK && count_maps() == 0);
        free(value);
        _exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    seen(v, value, 10000, 1 << 20);
    GOOD(kvd_view_release(v, &e));
    CHECK(kvd_close(c) == KVD_OK);
    free(value);
}

/* No lie has the library read where it may not, nor keep anything. */
static void test_view_lies(struct broker *b) {
    kvd_client *c = open_client(b, 1, 0);
    kvd_error e = {.size = sizeof e};
    struct kvd_view *v, *held;
    unsigned char *value = make(c, "k", 10000);
    int maps = count_maps();
    for (uint32_t lie = LIE_NONE + 1; lie < LIE_KINDS; lie++) {
        atomic_store(&b->fake->lie, LIE_NONE);
        held = look(c, "k"); /* of the same connection */
        uint64_t generation = kvd_generation(c);
        atomic_store(&b->fake->lie, lie);
        if (lie == LIE_REGION || lie == LIE_UNTOLD || lie == LIE_NO_FILE) {
            WANT(KVD_VIEW_EXPIRED, KVD_NO, kvd_view(c, "k", 1, 0, &v, NULL, &e));
            CHECK(v == NULL && kvd_generation(c) == generation && atomic_load(&b->fake->views) == 1);
            seen(held, value, 10000, 1 << 20);
            GOOD(kvd_view_release(held, &e));
            continue;
        }
        WANT(KVD_PROTOCOL, KVD_NO, kvd_view(c, "k", 1, 0, &v, NULL, &e));
        CHECK(v == NULL);
        WANT(KVD_STALE, KVD_NO, kvd_view_release(held, &e));
        CHECK(count_maps() == maps - 1); /* the ring is gone, too */
        GOOD(kvd_exists(c, "k", 1, NULL, &e));
        CHECK(kvd_generation(c) == generation + 1);
    }
    atomic_store(&b->fake->lie, LIE_NONE);
    v = look(c, "k");
    seen(v, value, 10000, 1 << 20);
    GOOD(kvd_view_release(v, &e));
    CHECK(kvd_close(c) == KVD_OK);
    free(value);
}

const struct test seen_tests[] = {{"seen", test_seen}, {NULL, NULL}};

const struct test view_tests[] = {
    {"views", test_views},
    {"taken-back", test_taken_back},
    {"view-killed", test_view_killed},
    {"view-forked", test_view_forked},
    {"view-lies", test_view_lies},
    {NULL, NULL},
};
