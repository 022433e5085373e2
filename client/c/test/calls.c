/* calls.c - each call for one record, and memory, against any broker. */
#include "test.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static void test_open(struct broker *b) {
    kvd_error e = {.size = sizeof e};
    kvd_client *c = (kvd_client *)1;
    kvd_options o = {.size = sizeof o, .path = b->path, .namespace_name = b->namespace_name};
    CHECK(kvd_abi() == KVD_ABI && strlen(kvd_version()) >= 5);
    CHECK(strcmp(kvd_code_name(KVD_SYSTEM), "SYSTEM") == 0 && strcmp(kvd_code_name(22), "?") == 0 && strcmp(kvd_code_name(-1), "?") == 0);
    WANT(KVD_ARGUMENT, KVD_NO, kvd_open(NULL, &c, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_open(&o, NULL, &e));
    o.depth = 17;
    WANT(KVD_ARGUMENT, KVD_NO, kvd_open(&o, &c, &e));
    o.depth = 0;
    o.queues = 9;
    WANT(KVD_ARGUMENT, KVD_NO, kvd_open(&o, &c, &e));
    o.queues = 0;
    o.flags = 2;
    WANT(KVD_ARGUMENT, KVD_NO, kvd_open(&o, &c, &e));
    o.flags = 0;
    o.path = "/nowhere/kvd.sock";
    o.dial_ms = 50;
    WANT(KVD_UNAVAILABLE, KVD_NO, kvd_open(&o, &c, &e));
    CHECK(c == NULL && strlen(e.text) > 0);
    o.path = b->path;
    o.dial_ms = 0;
    o.depth = 16;
    o.arena_bytes = 8 << 20;
    GOOD(kvd_open(&o, &c, &e));
    CHECK(kvd_generation(c) == 1 && kvd_max_value(c) >= 1 << 20 && kvd_fd(c) >= 0);
    void *base;
    uint64_t bytes;
    GOOD(kvd_arena(c, &base, &bytes, &e));
    CHECK(base != NULL && bytes == 8 << 20);
    CHECK(kvd_close(c) == KVD_OK && kvd_close(NULL) == KVD_OK);
    o.flags = KVD_NO_ARENA;
    GOOD(kvd_open(&o, &c, &e));
    GOOD(kvd_arena(c, &base, &bytes, &e));
    CHECK(base == NULL && bytes == 0);
    WANT(KVD_FULL, KVD_NO, kvd_alloc(c, 1, &base, &e));
    GOOD(kvd_put(c, "k", 1, "v", 1, NULL, &e));
    char large[4096] = {0};
    WANT(KVD_TOO_LARGE, KVD_NO, kvd_put(c, "k", 1, large, sizeof large, NULL, &e));
    GOOD(kvd_delete(c, "k", 1, &e));
    CHECK(kvd_close(c) == KVD_OK);
}

/* A caller's shorter structs are neither read nor written behind their size. */
static void test_sizes(struct broker *b) {
    kvd_client *c = open_client(b, 1, 0);
    union { kvd_error e; unsigned char bytes[sizeof(kvd_error)]; } u;
    memset(&u, 0xaa, sizeof u);
    u.e.size = 12;
    CHECK(kvd_exists(c, "absent", 6, NULL, &u.e) == KVD_NOT_FOUND);
    CHECK(u.e.code == KVD_NOT_FOUND && u.e.outcome == KVD_NO && all(u.bytes + 12, sizeof u - 12, 0xaa));
    memset(&u, 0xaa, sizeof u);
    u.e.size = 20;
    CHECK(kvd_exists(c, "absent", 6, NULL, &u.e) == KVD_NOT_FOUND);
    CHECK(strlen(u.e.text) == 3 && all(u.bytes + 20, sizeof u - 20, 0xaa));
    CHECK(kvd_exists(c, "absent", 6, NULL, NULL) == KVD_NOT_FOUND);
    kvd_error e = {.size = sizeof e};
    union { kvd_record r; unsigned char bytes[sizeof(kvd_record)]; } r;
    memset(&r, 0xaa, sizeof r);
    r.r.size = 16;
    GOOD(kvd_put(c, "k", 1, "abc", 3, &r.r, &e));
    CHECK(r.r.length == 3 && all(r.bytes + 16, sizeof r - 16, 0xaa));
    kvd_write w = {.size = 4, .condition = 99};
    WANT(KVD_ARGUMENT, KVD_NO, kvd_put_if(c, "k", 1, "abc", 3, &w, NULL, &e));
    w.size = 8;
    WANT(KVD_ARGUMENT, KVD_NO, kvd_put_if(c, "k", 1, "abc", 3, &w, NULL, &e));
    GOOD(kvd_delete(c, "k", 1, &e));
    CHECK(kvd_close(c) == KVD_OK);
}

static void test_one(struct broker *b) {
    kvd_client *c = open_client(b, 1, 0);
    kvd_error e = {.size = sizeof e};
    kvd_record r = {.size = sizeof r};
    char out[64];
    uint64_t n;
    void *v;
    kvd_delete(c, "one", 3, &e);
    WANT(KVD_NOT_FOUND, KVD_NO, kvd_get_into(c, "one", 3, out, sizeof out, &n, &r, &e));
    WANT(KVD_NOT_FOUND, KVD_NO, kvd_get(c, "one", 3, &v, &n, &r, &e));
    CHECK(v == NULL && n == 0);
    WANT(KVD_NOT_FOUND, KVD_NO, kvd_exists(c, "one", 3, &r, &e));
    WANT(KVD_NOT_FOUND, KVD_NO, kvd_delete(c, "one", 3, &e));
    WANT(KVD_NOT_FOUND, KVD_NO, kvd_touch(c, "one", 3, 1000, &r, &e));
    GOOD(kvd_put(c, "one", 3, "hello", 5, &r, &e));
    uint64_t version = r.version;
    CHECK(version != 0 && r.length == 5 && r.expires_ms == 0);
    GOOD(kvd_get_into(c, "one", 3, out, sizeof out, &n, &r, &e));
    CHECK(n == 5 && memcmp(out, "hello", 5) == 0 && r.version == version && r.length == 5);
    memset(out, 0x55, sizeof out);
    WANT(KVD_SHORT_BUFFER, KVD_NO, kvd_get_into(c, "one", 3, out, 4, &n, &r, &e));
    CHECK(n == 5 && (all(out, 4, 0x55) || all(out, 4, 0)) && all(out + 4, 60, 0x55));
    WANT(KVD_SHORT_BUFFER, KVD_NO, kvd_get_into(c, "one", 3, NULL, 0, &n, &r, &e));
    CHECK(n == 5);
    GOOD(kvd_get(c, "one", 3, &v, &n, &r, &e));
    CHECK(n == 5 && memcmp(v, "hello", 5) == 0 && kvd_free(c, v) == KVD_OK);
    GOOD(kvd_exists(c, "one", 3, &r, &e));
    CHECK(r.length == 5 && r.version == version);
    GOOD(kvd_exists(c, "one", 3, NULL, &e));
    GOOD(kvd_touch(c, "one", 3, 100000, &r, &e));
    GOOD(kvd_get_into(c, "one", 3, out, sizeof out, &n, &r, &e));
    CHECK(r.expires_ms != 0);
    GOOD(kvd_touch(c, "one", 3, 0, &r, &e));
    GOOD(kvd_get_into(c, "one", 3, out, sizeof out, &n, &r, &e));
    CHECK(r.expires_ms == 0);
    GOOD(kvd_get_range(c, "one", 3, 1, out, 3, &n, &r, &e));
    CHECK(n == 3 && memcmp(out, "ell", 3) == 0);
    GOOD(kvd_get_range(c, "one", 3, 4, out, 3, &n, &r, &e));
    CHECK(n == 1 && *out == 'o');
    GOOD(kvd_get_range(c, "one", 3, 5, out, 3, &n, &r, &e));
    CHECK(n == 0);
    GOOD(kvd_put(c, "one", 3, NULL, 0, &r, &e));
    GOOD(kvd_get_into(c, "one", 3, NULL, 0, &n, &r, &e));
    CHECK(n == 0);
    GOOD(kvd_get(c, "one", 3, &v, &n, &r, &e));
    CHECK(v != NULL && n == 0 && kvd_free(c, v) == KVD_OK);
    GOOD(kvd_delete(c, "one", 3, &e));
    WANT(KVD_NOT_FOUND, KVD_NO, kvd_exists(c, "one", 3, NULL, &e));
    CHECK(kvd_close(c) == KVD_OK);
}

static void test_pins(struct broker *b) {
    kvd_client *c = open_client(b, 1, 0);
    kvd_error e = {.size = sizeof e};
    kvd_delete(c, "pinned", 6, &e);
    WANT(KVD_NOT_FOUND, KVD_NO, kvd_pin(c, "pinned", 6, 1000, &e));
    WANT(KVD_NOT_FOUND, KVD_NO, kvd_unpin(c, "pinned", 6, &e));
    GOOD(kvd_put(c, "pinned", 6, "v", 1, NULL, &e));
    GOOD(kvd_pin(c, "pinned", 6, KVD_MAX_PIN_MS, &e));
    CHECK(b->fake == NULL || fake_find(b, "pinned")->pinned_ms == KVD_MAX_PIN_MS);
    GOOD(kvd_unpin(c, "pinned", 6, NULL));
    CHECK(b->fake == NULL || fake_find(b, "pinned")->pinned_ms == 0);
    WANT(KVD_ARGUMENT, KVD_NO, kvd_pin(c, "pinned", 6, 0, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_pin(c, "pinned", 6, KVD_MAX_PIN_MS + 1, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_pin(c, "pinned", 6, UINT64_MAX, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_pin(c, "", 0, 1000, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_pin(NULL, "pinned", 6, 1000, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_unpin(NULL, "pinned", 6, &e));
    if (b->fake != NULL) { /* a broker that knows no pins */
        atomic_store(&b->fake->outcome, KVD_NO);
        atomic_store(&b->fake->code, KVD_UNSUPPORTED);
        WANT(KVD_UNSUPPORTED, KVD_NO, kvd_pin(c, "pinned", 6, 1000, &e));
        CHECK(e.text[0] != 0);
        atomic_store(&b->fake->code, 0);
    }
    GOOD(kvd_delete(c, "pinned", 6, &e));
    CHECK(kvd_close(c) == KVD_OK);
}

static void test_conditions(struct broker *b) {
    kvd_client *c = open_client(b, 1, 0);
    kvd_error e = {.size = sizeof e};
    kvd_record r = {.size = sizeof r};
    kvd_write w = {.size = sizeof w, .condition = KVD_IF_PRESENT, .flags = 7, .ttl_ms = 60000};
    char out[8];
    uint64_t n;
    kvd_delete(c, "cond", 4, &e);
    WANT(KVD_CONDITION, KVD_NO, kvd_put_if(c, "cond", 4, "a", 1, &w, &r, &e));
    w.condition = KVD_IF_ABSENT;
    GOOD(kvd_put_if(c, "cond", 4, "a", 1, &w, &r, &e));
    WANT(KVD_CONDITION, KVD_NO, kvd_put_if(c, "cond", 4, "b", 1, &w, NULL, &e));
    GOOD(kvd_get_into(c, "cond", 4, out, sizeof out, &n, &r, &e));
    CHECK(n == 1 && *out == 'a' && r.flags == 7 && r.expires_ms != 0);
    uint64_t version = r.version;
    WANT(KVD_CONDITION, KVD_NO, kvd_cas(c, "cond", 4, version + 1000, "c", 1, NULL, &e));
    GOOD(kvd_cas(c, "cond", 4, version, "c", 1, &r, &e));
    CHECK(r.version != version);
    WANT(KVD_CONDITION, KVD_NO, kvd_cas(c, "cond", 4, version, "d", 1, NULL, &e));
    w = (kvd_write){.size = sizeof w, .condition = KVD_IF_VERSION, .version = version};
    WANT(KVD_CONDITION, KVD_NO, kvd_delete_if(c, "cond", 4, &w, &e));
    w.version = r.version;
    GOOD(kvd_delete_if(c, "cond", 4, &w, &e));
    WANT(KVD_NOT_FOUND, KVD_NO, kvd_delete_if(c, "cond", 4, &w, &e));
    WANT(KVD_NOT_FOUND, KVD_NO, kvd_cas(c, "cond", 4, version, "e", 1, NULL, &e));
    w.condition = KVD_IF_PRESENT;
    WANT(KVD_NOT_FOUND, KVD_NO, kvd_delete_if(c, "cond", 4, &w, &e));
    GOOD(kvd_put(c, "cond", 4, "f", 1, NULL, &e));
    GOOD(kvd_delete_if(c, "cond", 4, &w, &e));
    w.condition = KVD_IF_ABSENT;
    WANT(KVD_ARGUMENT, KVD_NO, kvd_delete_if(c, "cond", 4, &w, &e));
    CHECK(kvd_close(c) == KVD_OK);
}

static void test_numbers(struct broker *b) {
    kvd_client *c = open_client(b, 1, 0);
    kvd_error e = {.size = sizeof e};
    int64_t v;
    kvd_delete(c, "n", 1, &e);
    GOOD(kvd_incr(c, "n", 1, 5, &v, NULL, &e));
    CHECK(v == 5);
    GOOD(kvd_incr(c, "n", 1, -7, &v, NULL, &e));
    CHECK(v == -2);
    GOOD(kvd_incr(c, "n", 1, 1, NULL, NULL, &e));
    GOOD(kvd_put(c, "n", 1, "x", 1, NULL, &e));
    WANT(KVD_WRONG_TYPE, KVD_NO, kvd_incr(c, "n", 1, 1, &v, NULL, &e));
    GOOD(kvd_delete(c, "n", 1, &e));
    CHECK(kvd_close(c) == KVD_OK);
}

static void test_keys(struct broker *b) {
    kvd_client *c = open_client(b, 1, 0);
    kvd_error e = {.size = sizeof e};
    char key[1025], out[8];
    uint64_t n;
    memset(key, 'k', sizeof key);
    WANT(KVD_ARGUMENT, KVD_NO, kvd_put(c, key, 0, "v", 1, NULL, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_put(c, key, 1025, "v", 1, NULL, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_put(c, NULL, 3, "v", 1, NULL, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_put(c, "k", 1, NULL, 1, NULL, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_get_into(c, "k", 1, NULL, 1, &n, NULL, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_get_range(c, "k", 1, 0, out, 0, &n, NULL, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_get_into(NULL, "k", 1, out, 1, &n, NULL, &e));
    uint64_t longest = b->fake != NULL ? FAKE_KEY : KVD_MAX_KEY;
    GOOD(kvd_put(c, key, longest, "v", 1, NULL, &e)); /* key and value are more than a slot: through the arena */
    GOOD(kvd_get_into(c, key, longest, out, sizeof out, &n, NULL, &e));
    CHECK(n == 1 && *out == 'v');
    GOOD(kvd_delete(c, key, longest, &e));
    CHECK(kvd_close(c) == KVD_OK);
}

/* Values of all lengths come and go by slot, arena, bounce and registered memory. */
static void test_lengths(struct broker *b) {
    static const uint64_t lengths[] = {0, 1, 100, 1019, 1020, 1021, 1023, 1024, 1025, 4095, 4096, 4097, 100000, 1 << 20, (3 << 20) + 5};
    kvd_client *c = open_client(b, 1, 32 << 20);
    kvd_error e = {.size = sizeof e};
    kvd_record r = {.size = sizeof r};
    const uint64_t room = 4 << 20;
    int fd = memfd_create("mine", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(ftruncate(fd, (off_t)room) == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    unsigned char *mine = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), *heap = malloc(room), *where[3];
    void *arena;
    GOOD(kvd_alloc(c, room, &arena, &e));
    GOOD(kvd_register(c, fd, 0, room, mine, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_register(c, fd, 0, room, mine, &e));
    where[0] = arena;
    where[1] = heap;
    where[2] = mine;
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (uint32_t from = 0; from < 3; from++)
            for (uint32_t to = 0; to < 3; to++) {
                uint64_t n, got;
                n = lengths[i];
                fill(where[from], n, from * 3 + to + (uint32_t)i);
                GOOD(kvd_put(c, "len", 3, where[from], n, NULL, &e));
                memset(where[to], 0x77, n + 8);
                GOOD(kvd_get_into(c, "len", 3, where[to], n, &got, &r, &e));
                CHECK(got == n && r.length == n && filled(where[to], n, from * 3 + to + (uint32_t)i) && all(where[to] + n, 8, 0x77));
                if (n == 0)
                    continue;
                memset(where[to], 0x77, n + 8);
                WANT(KVD_SHORT_BUFFER, KVD_NO, kvd_get_into(c, "len", 3, where[to], n - 1, &got, &r, &e));
                CHECK(got == n && (all(where[to], n - 1, 0x77) || all(where[to], n - 1, 0)) && all(where[to] + n - 1, 9, 0x77));
                memset(where[to], 0x77, n + 8);
                WANT(KVD_NOT_FOUND, KVD_NO, kvd_get_into(c, "absent", 6, where[to], n, &got, &r, &e));
                CHECK((all(where[to], n, 0x77) || all(where[to], n, 0)) && got == 0);
                void *v;
                GOOD(kvd_get(c, "len", 3, &v, &got, &r, &e));
                CHECK(got == n && filled(v, n, from * 3 + to + (uint32_t)i) && kvd_free(c, v) == KVD_OK);
                uint64_t third = n / 3, some = n - third;
                memset(where[to], 0x77, n + 8);
                GOOD(kvd_get_range(c, "len", 3, third, where[to], n, &got, &r, &e));
                fill(heap, 0, 0);
                CHECK(got == some && all(where[to] + n, 8, 0x77));
            }
    GOOD(kvd_deregister(c, mine, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_deregister(c, mine, &e));
    CHECK(kvd_free(c, arena) == KVD_OK);
    GOOD(kvd_delete(c, "len", 3, &e));
    CHECK(kvd_close(c) == KVD_OK);
    close(fd);
    munmap(mine, room);
    free(heap);
}

/* A value longer than the arena comes in pieces; one that does not fit is not put. */
static void test_pieces(struct broker *b) {
    kvd_client *large = open_client(b, 1, 16 << 20), *small = open_client(b, 1, 1 << 20);
    kvd_error e = {.size = sizeof e};
    const uint64_t n = (3 << 20) + 77;
    unsigned char *p = malloc(n + 1);
    uint64_t got;
    void *v;
    fill(p, n, 3);
    GOOD(kvd_put(large, "pieces", 6, p, n, NULL, &e));
    WANT(KVD_TOO_LARGE, KVD_NO, kvd_put(small, "pieces", 6, p, n, NULL, &e));
    memset(p, 0, n + 1);
    GOOD(kvd_get_into(small, "pieces", 6, p, n + 1, &got, NULL, &e));
    CHECK(got == n && filled(p, n, 3) && p[n] == 0);
    WANT(KVD_SHORT_BUFFER, KVD_NO, kvd_get_into(small, "pieces", 6, p, n - 1, &got, NULL, &e));
    CHECK(got == n);
    GOOD(kvd_get(small, "pieces", 6, &v, &got, NULL, &e));
    CHECK(got == n && filled(v, n, 3) && kvd_free(small, v) == KVD_OK);
    WANT(KVD_NOT_FOUND, KVD_NO, kvd_get_into(small, "no pieces", 9, p, n, &got, NULL, &e));
    GOOD(kvd_delete(large, "pieces", 6, &e));
    CHECK(kvd_close(large) == KVD_OK && kvd_close(small) == KVD_OK);
    free(p);
}

/* The arena's blocks do not overlap, come back whole, and join. */
static void test_arena(struct broker *b) {
    enum { BLOCKS = 300, ROUNDS = 20000 };
    const uint64_t bytes = 8 << 20;
    kvd_client *c = open_client(b, 1, bytes);
    kvd_error e = {.size = sizeof e};
    unsigned char *p[BLOCKS] = {0};
    uint64_t n[BLOCKS];
    uint32_t seed = 1;
    void *v;
    WANT(KVD_ARGUMENT, KVD_NO, kvd_alloc(c, 0, &v, &e));
    WANT(KVD_FULL, KVD_NO, kvd_alloc(c, bytes + 1, &v, &e));
    WANT(KVD_FULL, KVD_NO, kvd_alloc(c, UINT64_MAX, &v, &e));
    for (int round = 0; round < ROUNDS; round++) {
        seed = seed * 1103515245 + 12345;
        uint32_t i = (seed >> 16) % BLOCKS;
        if (p[i] != NULL) {
            CHECK(p[i][0] == (unsigned char)i && p[i][n[i] - 1] == (unsigned char)i);
            CHECK(kvd_free(c, p[i]) == KVD_OK);
            p[i] = NULL;
            continue;
        }
        n[i] = 2 + (seed >> 8) % (1u << (8 + seed % 10));
        if (kvd_alloc(c, n[i], &v, &e) != KVD_OK) {
            CHECK(e.code == KVD_FULL);
            continue;
        }
        p[i] = v;
        CHECK((uintptr_t)v % 4096 == 0);
        p[i][0] = p[i][n[i] - 1] = (unsigned char)i;
    }
    for (int i = 0; i < BLOCKS; i++) {
        if (p[i] == NULL)
            continue;
        CHECK(kvd_free(c, p[i] + 1) == KVD_ARGUMENT);
        CHECK(kvd_free(c, p[i]) == KVD_OK);
        CHECK(kvd_free(c, p[i]) == KVD_ARGUMENT);
    }
    GOOD(kvd_alloc(c, bytes, &v, &e));
    CHECK(kvd_free(c, v) == KVD_OK);
    /* Only whole blocks may be used. */
    uint64_t got;
    GOOD(kvd_alloc(c, 4096, &v, &e));
    WANT(KVD_ARGUMENT, KVD_NO, kvd_get_into(c, "k", 1, v, 8192, &got, NULL, &e));
    CHECK(kvd_free(c, v) == KVD_OK);
    WANT(KVD_ARGUMENT, KVD_NO, kvd_get_into(c, "k", 1, v, 4096, &got, NULL, &e));
    CHECK(kvd_close(c) == KVD_OK);
}

static void test_scan(struct broker *b) {
    enum { KEYS = 40 };
    kvd_client *c = open_client(b, 1, 0);
    kvd_error e = {.size = sizeof e};
    unsigned char out[4096];
    uint64_t cursor = 0, used, deleted;
    int seen[KEYS] = {0}, calls = 0;
    GOOD(kvd_delete_prefix(c, "scan:", 5, NULL, &e));
    GOOD(kvd_put(c, "other", 5, "v", 1, NULL, &e));
    for (int i = 0; i < KEYS; i++) {
        char key[16];
        int n = snprintf(key, sizeof key, "scan:%d", i);
        GOOD(kvd_put(c, key, (uint64_t)n, "v", 1, NULL, &e));
    }
    do {
        GOOD(kvd_scan_next(c, "scan:", 5, &cursor, out, sizeof out, &used, &e));
        for (uint64_t at = 0; at < used;) {
            uint64_t n = out[at] | (uint64_t)out[at + 1] << 8;
            char key[64] = {0};
            CHECK(n < sizeof key && memcmp(out + at + 2, "scan:", 5) == 0);
            memcpy(key, out + at + 2, n);
            seen[atoi(key + 5)]++;
            at += 2 + n;
        }
        CHECK(++calls < 100000);
    } while (cursor != 0);
    for (int i = 0; i < KEYS; i++)
        CHECK(seen[i] >= 1);
    WANT(KVD_ARGUMENT, KVD_NO, kvd_scan_next(c, "scan:", 5, &cursor, out, 100, &used, &e));
    GOOD(kvd_delete_prefix(c, "scan:", 5, &deleted, &e));
    CHECK(deleted == KEYS);
    GOOD(kvd_delete_prefix(c, "scan:", 5, &deleted, &e));
    CHECK(deleted == 0);
    GOOD(kvd_exists(c, "other", 5, NULL, &e));
    GOOD(kvd_delete(c, "other", 5, &e));
    CHECK(kvd_close(c) == KVD_OK);
}

struct thread {
    kvd_client *c;
    int number;
};

static void *threads_run(void *arg) {
    struct thread *t = arg;
    kvd_error e = {.size = sizeof e};
    for (uint32_t i = 0; i < 300; i++) {
        unsigned char in[6000], out[6000];
        char key[16];
        int k = snprintf(key, sizeof key, "t%d", t->number);
        uint64_t n = i % 3 == 0 ? 5000 : 100, got;
        fill(in, n, i);
        GOOD(kvd_put(t->c, key, (uint64_t)k, in, n, NULL, &e));
        GOOD(kvd_get_into(t->c, key, (uint64_t)k, out, sizeof out, &got, NULL, &e));
        CHECK(got == n && memcmp(in, out, n) == 0);
        GOOD(kvd_incr(t->c, "sum", 3, 1, NULL, NULL, &e));
    }
    return NULL;
}

/* More threads than queues; each sees its own values, and nothing is lost. */
static void test_threads(struct broker *b) {
    enum { THREADS = 12 };
    kvd_error e = {.size = sizeof e};
    for (uint32_t queues = 1; queues <= 8; queues += 7) {
        kvd_client *c = open_client(b, queues, 0);
        pthread_t id[THREADS];
        struct thread t[THREADS];
        int64_t v;
        kvd_delete(c, "sum", 3, &e);
        for (int i = 0; i < THREADS; i++) {
            t[i] = (struct thread){c, i};
            CHECK(pthread_create(&id[i], NULL, threads_run, &t[i]) == 0);
        }
        for (int i = 0; i < THREADS; i++)
            pthread_join(id[i], NULL);
        GOOD(kvd_incr(c, "sum", 3, 0, &v, NULL, &e));
        CHECK(v == THREADS * 300);
        void *whole, *base;
        uint64_t bytes;
        GOOD(kvd_arena(c, &base, &bytes, &e));
        GOOD(kvd_alloc(c, bytes, &whole, &e)); /* all that went through the arena came back */
        CHECK(whole == base && kvd_free(c, whole) == KVD_OK && kvd_close(c) == KVD_OK);
    }
}

/* A child answers FORKED to everything, reads the arena, and opens its own; the parent goes on. */
static void test_fork(struct broker *b) {
    kvd_client *c = open_client(b, 2, 0);
    kvd_error e = {.size = sizeof e};
    kvd_batch *batch;
    void *p, *v;
    int status;
    char out[8];
    uint64_t n;
    GOOD(kvd_alloc(c, 4096, &p, &e));
    fill(p, 4096, 9);
    GOOD(kvd_batch_new(c, 4, &batch, &e));
    int fds = count_fds();
    pid_t pid = fork();
    if (pid == 0) {
        WANT(KVD_FORKED, KVD_NO, kvd_put(c, "f", 1, "v", 1, NULL, &e));
        CHECK(count_fds() < fds);
        WANT(KVD_FORKED, KVD_NO, kvd_get_into(c, "f", 1, out, 8, &n, NULL, &e));
        WANT(KVD_FORKED, KVD_NO, kvd_get(c, "f", 1, &v, &n, NULL, &e));
        WANT(KVD_FORKED, KVD_NO, kvd_get_range(c, "f", 1, 0, out, 8, &n, NULL, &e));
        WANT(KVD_FORKED, KVD_NO, kvd_delete(c, "f", 1, &e));
        WANT(KVD_FORKED, KVD_NO, kvd_incr(c, "f", 1, 1, NULL, NULL, &e));
        WANT(KVD_FORKED, KVD_NO, kvd_touch(c, "f", 1, 1, NULL, &e));
        WANT(KVD_FORKED, KVD_NO, kvd_exists(c, "f", 1, NULL, &e));
        WANT(KVD_FORKED, KVD_NO, kvd_alloc(c, 1, &v, &e));
        WANT(KVD_FORKED, KVD_NO, kvd_delete_prefix(c, "f", 1, NULL, &e));
        WANT(KVD_FORKED, KVD_NO, kvd_batch_add_exists(batch, "f", 1, &e));
        WANT(KVD_FORKED, KVD_NO, kvd_batch_submit(batch, &e));
        WANT(KVD_FORKED, KVD_NO, kvd_batch_wait(batch, -1, &e));
        WANT(KVD_FORKED, KVD_NO, kvd_wait(c, 0, NULL, &e));
        CHECK(kvd_fd(c) == -1 && kvd_arm(c) == -KVD_FORKED && kvd_reap(c) == -KVD_FORKED && kvd_free(c, p) == KVD_FORKED);
        CHECK(filled(p, 4096, 9));
        kvd_client *mine = open_client(b, 1, 0);
        GOOD(kvd_put(mine, "f", 1, "child", 5, NULL, &e));
        CHECK(kvd_close(mine) == KVD_OK && kvd_batch_free(batch) == KVD_OK && kvd_close(c) == KVD_OK);
        _exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    GOOD(kvd_get_into(c, "f", 1, out, 8, &n, NULL, &e));
    CHECK(n == 5 && memcmp(out, "child", 5) == 0 && filled(p, 4096, 9));
    GOOD(kvd_delete(c, "f", 1, &e));
    CHECK(kvd_batch_free(batch) == KVD_OK && kvd_close(c) == KVD_OK);
}

const struct test calls_tests[] = {
    {"open", test_open},             {"sizes", test_sizes},     {"one", test_one},       {"pins", test_pins},
    {"conditions", test_conditions}, {"numbers", test_numbers}, {"keys", test_keys},     {"lengths", test_lengths},
    {"pieces", test_pieces},         {"arena", test_arena},     {"scan", test_scan},     {"threads", test_threads},
    {"fork", test_fork},             {NULL, NULL},
};
