/*
 * kills.c - a real broker is killed again and again while it works; each verdict is compared with the store.
 * usage: kvd_test kills SOCKET NAMESPACE ROUNDS PROGRAM ARGUMENT…, where the program is a broker on that socket.
 */
#include "test.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { N = 64, LONG = 200000 };

static _Atomic int over;
static int64_t yes, unknown;

/* count adds to a number until it is told to stop, and notes which additions happened. */
static void *count(void *arg) {
    kvd_error e = {.size = sizeof e};
    while (!atomic_load(&over)) {
        int code = kvd_incr(arg, "kills:sum", 9, 1, NULL, NULL, &e);
        CHECK((code == KVD_OK) == (e.outcome == KVD_YES));
        CHECK(code == KVD_OK || code == KVD_UNAVAILABLE || code == KVD_CLOSED || code == KVD_TIMEOUT);
        yes += e.outcome == KVD_YES;
        unknown += e.outcome == KVD_UNKNOWN;
    }
    return NULL;
}

static pid_t start(char **argv, const char *path) {
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* also if a check fails */
        if (freopen("/dev/null", "w", stdout) == NULL)
            _exit(126);
        execvp(argv[0], argv);
        _exit(127);
    }
    for (int64_t end = now_ms() + 60000; !listens(path); sched_yield())
        CHECK(now_ms() < end && waitpid(pid, NULL, WNOHANG) == 0);
    return pid;
}

static void stop(pid_t pid) {
    int status;
    kill(pid, SIGKILL);
    CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static size_t key_of(char *key, int round, uint32_t i) { return (size_t)sprintf(key, "kills:%d:%u", round, i); }

static void fill_batch(kvd_batch *t, int round, unsigned char *arena) {
    kvd_error e = {.size = sizeof e};
    kvd_write absent = {.size = sizeof absent, .condition = KVD_IF_ABSENT};
    char key[32];
    GOOD(kvd_batch_reset(t, &e));
    for (uint32_t i = 0; i < N; i++) {
        if (i % 4 == 0)
            GOOD(kvd_batch_add_get_into(t, "kills:long", 10, arena + (size_t)(i / 4) * LONG, LONG, &e));
        else
            GOOD(kvd_batch_add_put(t, key, key_of(key, round, i), arena + (size_t)N / 4 * LONG, i % 4 == 1 ? LONG : 100, &absent, &e));
    }
}

/* judge_batch compares what each entry answered with what the store has. */
static void judge_batch(kvd_client *c, kvd_batch *t, int round, const unsigned char *arena, int counts[3]) {
    kvd_error e = {.size = sizeof e};
    char key[32];
    for (uint32_t i = 0; i < N; i++) {
        kvd_result r = {.size = sizeof r};
        GOOD(kvd_batch_result(t, i, &r, &e));
        CHECK((r.code == KVD_OK) == (r.outcome == KVD_YES));
        if (i % 4 == 0) {
            const unsigned char *p = arena + (size_t)(i / 4) * LONG;
            CHECK(r.outcome != KVD_UNKNOWN);
            if (r.code == KVD_OK)
                CHECK(r.length == LONG && filled(p, LONG, 1));
            else
                CHECK(all(p, LONG, 0) || all(p, LONG, 0x5a));
            continue;
        }
        int there = kvd_exists(c, key, key_of(key, round, i), NULL, &e);
        CHECK(there == KVD_OK || there == KVD_NOT_FOUND);
        if (r.outcome == KVD_YES)
            CHECK(there == KVD_OK);
        if (r.outcome == KVD_NO)
            CHECK(there == KVD_NOT_FOUND);
        counts[r.outcome]++;
        if (there == KVD_OK)
            GOOD(kvd_delete(c, key, key_of(key, round, i), &e));
    }
}

int kills(const char *path, const char *namespace_name, int rounds, char **argv) {
    struct broker b = {.namespace_name = namespace_name};
    kvd_error e = {.size = sizeof e};
    kvd_batch *t;
    pthread_t id;
    void *p;
    int counts[3] = {0};
    int64_t sum, slowest = 0;
    uint32_t seed = 1;
    snprintf(b.path, sizeof b.path, "%s", path);
    pid_t pid = start(argv, path);
    kvd_client *c = open_client(&b, 4, 64 << 20);
    GOOD(kvd_alloc(c, (uint64_t)(N / 4 + 1) * LONG, &p, &e));
    unsigned char *arena = p;
    fill(arena + (size_t)N / 4 * LONG, LONG, 1);
    GOOD(kvd_put(c, "kills:long", 10, arena + (size_t)N / 4 * LONG, LONG, NULL, &e));
    kvd_delete(c, "kills:sum", 9, &e);
    GOOD(kvd_batch_new(c, N, &t, &e));
    CHECK(pthread_create(&id, NULL, count, c) == 0);
    for (int round = 0; round < rounds; round++) {
        memset(arena, 0x5a, (size_t)N / 4 * LONG);
        fill_batch(t, round, arena);
        kvd_exists(c, "kills:long", 10, NULL, &e); /* connected, if it can be */
        if (round % 3 == 1)
            kill(pid, SIGSTOP); /* what is submitted stays in the ring, but for what a thread of the broker has begun */
        int64_t end = now_ms() + 60000;
        while (kvd_batch_submit(t, &e) != KVD_OK)
            CHECK((e.code == KVD_UNAVAILABLE || e.code == KVD_CLOSED) && now_ms() < end);
        seed = seed * 1103515245 + 12345;
        struct timespec pause = {0, (long)(seed >> 8) % 20000000};
        nanosleep(&pause, NULL);
        if (round % 3 == 2) {
            kill(pid, SIGSTOP);
            nanosleep(&pause, NULL);
        }
        int64_t began = now_ms();
        stop(pid);
        GOOD(kvd_batch_wait(t, -1, &e));
        slowest = now_ms() - began > slowest ? now_ms() - began : slowest;
        pid = start(argv, path);
        judge_batch(c, t, round, arena, counts);
    }
    atomic_store(&over, 1);
    pthread_join(id, NULL);
    GOOD(kvd_incr(c, "kills:sum", 9, 0, &sum, NULL, &e));
    if (sum < yes || sum > yes + unknown)
        fprintf(stderr, "additions: %lld yes, %lld unknown, sum %lld\n", (long long)yes, (long long)unknown, (long long)sum);
    CHECK(sum >= yes && sum <= yes + unknown);
    CHECK(kvd_generation(c) >= (uint64_t)rounds);
    printf("ok kills: %d rounds; puts: %d yes, %d no, %d unknown; additions: %lld yes, %lld unknown, sum %lld; the last verdict at most %lld ms after the kill began\n",
           rounds, counts[0], counts[1], counts[2], (long long)yes, (long long)unknown, (long long)sum, (long long)slowest);
    GOOD(kvd_delete_prefix(c, "kills:", 6, NULL, &e));
    CHECK(kvd_batch_free(t) == KVD_OK && kvd_free(c, arena) == KVD_OK && kvd_close(c) == KVD_OK);
    stop(pid);
    return 0;
}
