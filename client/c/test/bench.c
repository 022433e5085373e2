/*
 * bench.c - turns of gets and puts through a broker, and of hiredis through a redis-server.
 * usage: bench BROKER-SOCKET NAMESPACE REDIS-SOCKET
 * Each line "kvd|redis prepare|get|put BYTES ENTRIES SECONDS" is a turn; it answers with the median of a call in
 * microseconds. The test of Go that runs it takes the turns, its own included, and prints the table.
 */
#define _GNU_SOURCE
#include "../kvd.h"

#include <hiredis/hiredis.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST = 64 };

static kvd_client *client;
static redisContext *redis;
static kvd_batch *batch;
static char *arena, *heap;
static int size, entries;
static char keys[MOST][16];
static uint64_t key_bytes[MOST];

static void die(const char *what, const char *why) {
    fprintf(stderr, "bench: %s: %s\n", what, why);
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void good(int code, const char *what, const kvd_error *e) {
    if (code != KVD_OK)
        die(what, e->text);
}

static void kvd_get_one(void) {
    kvd_error e = {.size = sizeof e};
    uint64_t n;
    good(kvd_get_into(client, keys[0], key_bytes[0], arena, (uint64_t)size, &n, NULL, &e), "get", &e);
    if (n != (uint64_t)size)
        die("get", "length");
}

static void kvd_put_one(void) {
    kvd_error e = {.size = sizeof e};
    good(kvd_put(client, keys[0], key_bytes[0], arena, (uint64_t)size, NULL, &e), "put", &e);
}

static void kvd_get_many(void) {
    kvd_error e = {.size = sizeof e};
    kvd_result r = {.size = sizeof r};
    good(kvd_batch_reset(batch, &e), "reset", &e);
    for (int i = 0; i < entries; i++)
        good(kvd_batch_add_get_into(batch, keys[i], key_bytes[i], heap + i * 128, 128, &e), "add", &e);
    good(kvd_batch_submit(batch, &e), "submit", &e);
    good(kvd_batch_wait(batch, -1, &e), "wait", &e);
    for (uint32_t i = 0; i < (uint32_t)entries; i++)
        if (kvd_batch_result(batch, i, &r, &e) != KVD_OK || r.code != KVD_OK || r.length != (uint64_t)size)
            die("batch", "verdict");
}

static void take(redisReply *r, int type, size_t length) {
    if (r == NULL || r->type != type || (type == REDIS_REPLY_STRING && r->len != length))
        die("redis", r != NULL && r->type == REDIS_REPLY_ERROR ? r->str : redis->errstr);
    freeReplyObject(r);
}

static void redis_get_one(void) {
    redisReply *r = redisCommand(redis, "GET %b", keys[0], (size_t)key_bytes[0]);
    take(r, REDIS_REPLY_STRING, (size_t)size);
}

static void redis_put_one(void) {
    take(redisCommand(redis, "SET %b %b", keys[0], (size_t)key_bytes[0], heap, (size_t)size), REDIS_REPLY_STATUS, 0);
}

static void redis_get_many(void) {
    for (int i = 0; i < entries; i++)
        redisAppendCommand(redis, "GET %b", keys[i], (size_t)key_bytes[i]);
    for (int i = 0; i < entries; i++) {
        void *r;
        if (redisGetReply(redis, &r) != REDIS_OK)
            die("redis", redis->errstr);
        take(r, REDIS_REPLY_STRING, (size_t)size);
    }
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* turn returns seconds of one call, by the median of calls that take so long in all. */
static double turn(void (*f)(void), double seconds) {
    static double took[1 << 16];
    int n = 0;
    for (double end = now() + seconds; n < 3 || (now() < end && n < 1 << 16); n++) {
        double began = now();
        f();
        took[n] = now() - began;
    }
    qsort(took, (size_t)n, sizeof *took, by_value);
    return took[n / 2];
}

/* prepare puts what will be got, at both. */
static void prepare(void) {
    kvd_error e = {.size = sizeof e};
    for (int i = 0; i < entries; i++) {
        good(kvd_put(client, keys[i], key_bytes[i], arena, (uint64_t)size, NULL, &e), "put", &e);
        take(redisCommand(redis, "SET %b %b", keys[i], (size_t)key_bytes[i], heap, (size_t)size), REDIS_REPLY_STATUS, 0);
    }
}

int main(int argc, char **argv) {
    kvd_error e = {.size = sizeof e};
    char who[8], what[8];
    double seconds;
    if (argc != 4)
        return 2;
    const uint64_t room = 20 << 20;
    kvd_options o = {.size = sizeof o, .path = argv[1], .namespace_name = argv[2], .queues = 1};
    good(kvd_open(&o, &client, &e), "open", &e);
    void *p;
    good(kvd_alloc(client, room, &p, &e), "alloc", &e);
    arena = p;
    heap = malloc(room);
    memset(arena, 'x', room);
    memset(heap, 'x', room);
    good(kvd_batch_new(client, MOST, &batch, &e), "batch", &e);
    redis = redisConnectUnix(argv[3]);
    if (redis == NULL || redis->err != 0)
        die("redis", redis != NULL ? redis->errstr : "no memory");
    for (int i = 0; i < MOST; i++)
        key_bytes[i] = (uint64_t)snprintf(keys[i], sizeof keys[i], "bench:%d", i);
    while (scanf("%7s %7s %d %d %lf", who, what, &size, &entries, &seconds) == 5) {
        int ours = strcmp(who, "kvd") == 0, put = strcmp(what, "put") == 0;
        if (size < 0 || (uint64_t)size > room || entries < 1 || entries > MOST)
            return 2;
        double took = 0;
        if (strcmp(what, "prepare") == 0)
            prepare();
        else if (entries > 1)
            took = turn(ours ? kvd_get_many : redis_get_many, seconds);
        else if (put)
            took = turn(ours ? kvd_put_one : redis_put_one, seconds);
        else
            took = turn(ours ? kvd_get_one : redis_get_one, seconds);
        printf("%.3f\n", took * 1e6);
        fflush(stdout);
    }
    kvd_batch_free(batch);
    kvd_free(client, arena);
    kvd_close(client);
    redisFree(redis);
    free(heap);
    return 0;
}
