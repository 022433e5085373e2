/* fuzz.c - a broker that answers with nonsense, or lies: the library does not crash, hang, or write where it may not. */
#include "test.h"

#include <unistd.h>

enum { EDGE = 64, MOST = 3000, EACH = 24, LIES = 250, SHORT = 128 };

static uint32_t state;

static uint32_t rnd(void) {
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
}

/* judge checks a buffer around which nothing may be written, and in which nothing may be after a failure. */
static void judge(const unsigned char *p, uint64_t capacity, int code, uint64_t length) {
    CHECK(all(p, EDGE, 0x5a) && all(p + EDGE + capacity, EDGE, 0x5a));
    if (code == KVD_OK)
        CHECK(length <= capacity && all(p + EDGE + length, capacity - length, 0x5a));
    for (uint64_t i = 0; code != KVD_OK && i < capacity; i++)
        CHECK(p[EDGE + i] == 0x5a || p[EDGE + i] == 0);
}

/* look reads all that a view shows, and returns a code that *e has, too. */
static int look(kvd_client *c, kvd_error *e) {
    struct kvd_view *v;
    const kvd_part *parts;
    uint64_t n, sum = 0;
    int code = kvd_view(c, "k", 1, rnd(), &v, NULL, e);
    if (code != KVD_OK) {
        CHECK(v == NULL);
        return code;
    }
    if (kvd_view_parts(v, &parts, &n, e) == KVD_OK)
        for (uint64_t i = 0; i < n; i++)
            for (uint64_t k = 0; k < parts[i].length; k++)
                sum += ((const unsigned char *)parts[i].address)[k];
    CHECK(sum < UINT64_C(1) << 60);
    return kvd_view_release(v, e);
}

/* calls makes one call, and returns its code. */
static int calls(kvd_client *c) {
    static unsigned char p[MOST + 2 * EDGE];
    kvd_error e = {.size = sizeof e};
    uint64_t n = rnd() % MOST, got = 0;
    void *v;
    memset(p, 0x5a, sizeof p);
    int code = KVD_OK;
    switch (rnd() % 9) {
    case 0:
    case 1:
        code = kvd_get_into(c, "k", 1, p + EDGE, n, &got, NULL, &e);
        /* Bytes of a buffer in the arena are the broker's meanwhile; these are not. */
        judge(p, n, code, got);
        break;
    case 2:
        code = kvd_put(c, "k", 1, p, n, NULL, &e);
        break;
    case 3:
        code = kvd_incr(c, "k", 1, 1, NULL, NULL, &e);
        break;
    case 4:
        code = kvd_get(c, "k", 1, &v, &got, NULL, &e);
        if (code == KVD_OK)
            CHECK(kvd_free(c, v) == KVD_OK);
        else
            CHECK(v == NULL && got == 0);
        break;
    case 5: {
        static unsigned char keys[4096];
        uint64_t cursor = 0;
        code = kvd_scan_next(c, "k", 1, &cursor, keys, sizeof keys, &got, &e);
        break;
    }
    case 6:
        code = kvd_delete(c, "k", 1, &e);
        break;
    case 7:
        n = n == 0 ? 1 : n;
        code = kvd_get_range(c, "k", 1, rnd(), p + EDGE, n, &got, NULL, &e);
        judge(p, n, code, got);
        break;
    case 8:
        code = look(c, &e);
        break;
    }
    CHECK(code == e.code && code >= 0 && code <= KVD_SYSTEM && (code == KVD_OK) == (e.outcome == KVD_YES));
    CHECK(memchr(e.text, 0, sizeof e.text) != NULL);
    return code;
}

static void batches(kvd_client *c) {
    static unsigned char p[EACH][MOST + 2 * EDGE];
    uint64_t room[EACH];
    kvd_error e = {.size = sizeof e};
    kvd_batch *t;
    GOOD(kvd_batch_new(c, EACH, &t, &e));
    memset(p, 0x5a, sizeof p);
    for (int i = 0; i < EACH; i++) {
        room[i] = rnd() % MOST;
        GOOD(kvd_batch_add_get_into(t, "k", 1, p[i] + EDGE, room[i], &e));
    }
    if (kvd_batch_submit(t, &e) == KVD_OK) {
        if (rnd() % 2)
            kvd_batch_cancel(t, &e);
        GOOD(kvd_batch_wait(t, -1, &e));
        for (uint32_t i = 0; i < EACH; i++) {
            kvd_result r = {.size = sizeof r};
            GOOD(kvd_batch_result(t, i, &r, &e));
            CHECK(r.code >= 0 && r.code <= KVD_SYSTEM && (r.code == KVD_OK) == (r.outcome == KVD_YES));
            judge(p[i], room[i], r.code, r.length);
        }
    }
    CHECK(kvd_batch_free(t) == KVD_OK);
}

static void test_garbage(struct broker *b) {
    const char *given = getenv("KVD_FUZZ"), *seed = getenv("KVD_SEED");
    long rounds = given != NULL ? atol(given) : 2000, worked = 0;
    state = seed != NULL ? (uint32_t)atol(seed) : 1;
    atomic_store(&b->fake->seed, state * 2 + 1);
    fake_mode(b, FAKE_GARBAGE);
    kvd_client *c = NULL;
    for (long i = 0; i < rounds; i++) {
        kvd_error e = {.size = sizeof e};
        if (c == NULL) {
            kvd_options o = {.size = sizeof o, .path = b->path, .dial_ms = 200, .arena_bytes = 1 << 20, .depth = 32};
            if (kvd_open(&o, &c, &e) != KVD_OK) {
                CHECK(c == NULL && (e.code == KVD_PROTOCOL || e.code == KVD_UNAVAILABLE));
                continue;
            }
        }
        worked++;
        if (rnd() % 4 == 0)
            batches(c);
        else
            calls(c);
        if (rnd() % 64 == 0) {
            CHECK(kvd_close(c) == KVD_OK);
            c = NULL;
        }
    }
    CHECK(kvd_close(c) == KVD_OK && worked > rounds / 4);
    fake_mode(b, FAKE_HONEST);
}

/* flood fills the ring with operations of all kinds. It returns KVD_PROTOCOL if the broker broke a rule. */
static int flood(kvd_client *c) {
    static unsigned char p[LIES][SHORT + 2 * EDGE];
    uint64_t room[LIES];
    kvd_error e = {.size = sizeof e};
    kvd_batch *t;
    int broken = KVD_OK;
    memset(p, 0x5a, sizeof p);
    GOOD(kvd_batch_new(c, LIES, &t, &e));
    for (int i = 0; i < LIES; i++) {
        room[i] = rnd() % SHORT;
        switch (rnd() % 8) {
        case 0:
            GOOD(kvd_batch_add_put(t, "k", 1, p[i] + EDGE, room[i], NULL, &e));
            break;
        case 1:
            GOOD(kvd_batch_add_incr(t, "k", 1, 1, &e));
            break;
        case 2:
            GOOD(kvd_batch_add_exists(t, "k", 1, &e));
            break;
        case 3:
            GOOD(kvd_batch_add_delete(t, "k", 1, NULL, &e));
            break;
        case 4:
            room[i]++;
            GOOD(kvd_batch_add_get_range(t, "k", 1, rnd(), p[i] + EDGE, room[i], &e));
            continue;
        default:
            GOOD(kvd_batch_add_get_into(t, "k", 1, p[i] + EDGE, room[i], &e));
            continue;
        }
        room[i] = UINT64_MAX; /* nothing is to be written there */
    }
    if (kvd_batch_submit(t, &e) == KVD_OK) {
        if (rnd() % 16 == 0)
            kvd_batch_cancel(t, &e);
        GOOD(kvd_batch_wait(t, -1, &e));
        for (uint32_t i = 0; i < LIES; i++) {
            kvd_result r = {.size = sizeof r};
            GOOD(kvd_batch_result(t, i, &r, &e));
            CHECK(r.code >= 0 && r.code <= KVD_SYSTEM && (r.code == KVD_OK) == (r.outcome == KVD_YES));
            if (r.code == KVD_PROTOCOL)
                broken = KVD_PROTOCOL;
            if (room[i] == UINT64_MAX)
                CHECK(all(p[i], sizeof p[i], 0x5a));
            else
                judge(p[i], room[i], r.code, r.length);
        }
    }
    CHECK(kvd_batch_free(t) == KVD_OK);
    return broken;
}

static void test_lies(struct broker *b) {
    const char *given = getenv("KVD_LIES"), *seed = getenv("KVD_SEED");
    uint32_t lies = given != NULL ? (uint32_t)atof(given) : 20000, broken = 0;
    state = seed != NULL ? (uint32_t)atol(seed) : 1;
    atomic_store(&b->fake->seed, state * 2 + 1);
    fake_mode(b, FAKE_LIES);
    kvd_client *c = NULL;
    while (atomic_load(&b->fake->taken) < lies) {
        if (c == NULL) {
            kvd_error e = {.size = sizeof e};
            kvd_options o = {.size = sizeof o, .path = b->path, .arena_bytes = 1 << 20};
            GOOD(kvd_open(&o, &c, &e));
        }
        if ((rnd() % 4 == 0 ? calls(c) : flood(c)) == KVD_PROTOCOL) {
            /* A new client does not wait before it dials, as this one would. */
            CHECK(kvd_close(c) == KVD_OK);
            c = NULL;
            broken++;
        }
    }
    CHECK(kvd_close(c) == KVD_OK && broken > 0);
    printf("%u lies, %u connections were ended for them\n", atomic_load(&b->fake->taken), broken);
    fake_mode(b, FAKE_HONEST);
}

const struct test fuzz_tests[] = {{"garbage", test_garbage}, {"lies", test_lies}, {NULL, NULL}};
