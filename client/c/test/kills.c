/*
 * kills.c - a real broker is killed again and again while it works, and while it commits streams; each verdict is
 * compared with the store.
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

/* streaming is what a thread has put piece by piece. */
static struct {
    kvd_client *client;
    _Atomic uint32_t commits; /* begun */
    _Atomic int committing;
    uint32_t stored;         /* the last value that is certainly there, and those that may have come since */
    uint32_t perhaps[64], n;
    int64_t yes, no, unknown, lost; /* commits by verdict, and streams that came to none */
} streaming;

/* Short values are stored by the commit alone, long ones are nearly there by then. */
static uint64_t streamed_length(uint32_t seq) { return seq % 3 == 0 ? 3000000 + seq % 1000 : 600000 + seq % 1000; }

/* connection_lost tells whether a call may answer that because its broker was killed. */
static int connection_lost(int code) { return code == KVD_UNAVAILABLE || code == KVD_CLOSED || code == KVD_STALE; }

/* stored compares what the store has with the verdicts so far, once there is a broker. */
static void stored(unsigned char *got, uint64_t most) {
    kvd_error e = {.size = sizeof e};
    uint64_t length;
    int code, any;
    int64_t end = now_ms() + 60000;
    while ((code = kvd_get_into(streaming.client, "kills:stream", 12, got, most, &length, NULL, &e)) != KVD_OK) {
        CHECK(connection_lost(code) && e.outcome == KVD_NO && now_ms() < end);
        sched_yield();
    }
    any = length == streamed_length(streaming.stored) && filled(got, length, streaming.stored);
    for (uint32_t i = 0; !any && i < streaming.n; i++)
        any = length == streamed_length(streaming.perhaps[i]) && filled(got, length, streaming.perhaps[i]);
    CHECK(any); /* it is whole, too */
}

/* stream_one puts a value, and reports whether its commit was asked for. */
static int stream_one(uint32_t seq, const unsigned char *value) {
    kvd_error e = {.size = sizeof e};
    kvd_stream *s;
    uint64_t n = streamed_length(seq);
    int code = kvd_put_new(streaming.client, "kills:stream", 12, n, NULL, &s, &e);
    CHECK((code == KVD_OK) == (e.outcome == KVD_YES) && (code == KVD_OK) == (s != NULL));
    CHECK(code == KVD_OK || (connection_lost(code) && e.outcome == KVD_NO));
    for (uint64_t at = 0; code == KVD_OK && at < n; at += 500000) {
        code = kvd_put_write(s, value + at, n - at < 500000 ? n - at : 500000, &e);
        CHECK(code == KVD_OK || (connection_lost(code) && e.outcome == KVD_NO));
    }
    if (code != KVD_OK) {
        CHECK(kvd_put_free(s) == KVD_OK);
        return 0;
    }
    atomic_store(&streaming.committing, 1);
    atomic_fetch_add(&streaming.commits, 1);
    code = kvd_put_commit(s, NULL, &e);
    atomic_store(&streaming.committing, 0);
    CHECK((code == KVD_OK) == (e.outcome == KVD_YES) && (code == KVD_OK || connection_lost(code)));
    CHECK(kvd_put_commit(s, NULL, NULL) != KVD_OK && kvd_put_free(s) == KVD_OK);
    streaming.yes += e.outcome == KVD_YES;
    streaming.no += e.outcome == KVD_NO;
    streaming.unknown += e.outcome == KVD_UNKNOWN;
    if (e.outcome == KVD_YES) {
        streaming.stored = seq;
        streaming.n = 0;
    } else if (e.outcome == KVD_UNKNOWN) {
        CHECK(streaming.n < sizeof streaming.perhaps / sizeof streaming.perhaps[0]);
        streaming.perhaps[streaming.n++] = seq;
    }
    return 1;
}

/* stream puts values until it is told to stop, and compares each verdict with the store. */
static void *stream(void *arg) {
    uint64_t most = streamed_length(0) + 1000;
    unsigned char *value = malloc(most), *got = malloc(most);
    (void)arg;
    for (uint32_t seq = 1; !atomic_load(&over); seq++) {
        fill(value, streamed_length(seq), seq);
        if (stream_one(seq, value))
            stored(got, most);
        else
            streaming.lost++;
    }
    free(value);
    free(got);
    return NULL;
}

/* in_commit returns when a commit is under way that began after the call. */
static void in_commit(void) {
    uint32_t commits = atomic_load(&streaming.commits);
    for (int64_t end = now_ms() + 60000; atomic_load(&streaming.commits) == commits || !atomic_load(&streaming.committing);)
        CHECK(now_ms() < end);
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
    pthread_t id, streams;
    void *p;
    int counts[3] = {0};
    int fds = count_fds(), maps = count_maps();
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
    streaming.client = c;
    unsigned char *first = malloc(streamed_length(0));
    fill(first, streamed_length(0), 0);
    GOOD(kvd_put(c, "kills:stream", 12, first, streamed_length(0), NULL, &e));
    free(first);
    CHECK(pthread_create(&id, NULL, count, c) == 0 && pthread_create(&streams, NULL, stream, NULL) == 0);
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
        if (round % 3 == 0) {
            in_commit();
            pause.tv_nsec /= 40;
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
    pthread_join(streams, NULL);
    CHECK(streaming.unknown > 0 && streaming.yes > 0);
    GOOD(kvd_incr(c, "kills:sum", 9, 0, &sum, NULL, &e));
    if (sum < yes || sum > yes + unknown)
        fprintf(stderr, "additions: %lld yes, %lld unknown, sum %lld\n", (long long)yes, (long long)unknown, (long long)sum);
    CHECK(sum >= yes && sum <= yes + unknown);
    CHECK(kvd_generation(c) >= (uint64_t)rounds);
    printf("ok kills: %d rounds; puts: %d yes, %d no, %d unknown; additions: %lld yes, %lld unknown, sum %lld; the last verdict at most %lld ms after the kill began\n",
           rounds, counts[0], counts[1], counts[2], (long long)yes, (long long)unknown, (long long)sum, (long long)slowest);
    printf("ok kills of streams: commits: %lld yes, %lld no, %lld unknown; %lld streams were lost before\n",
           (long long)streaming.yes, (long long)streaming.no, (long long)streaming.unknown, (long long)streaming.lost);
    GOOD(kvd_delete_prefix(c, "kills:", 6, NULL, &e));
    CHECK(kvd_batch_free(t) == KVD_OK && kvd_free(c, arena) == KVD_OK && kvd_close(c) == KVD_OK);
    stop(pid);
    CHECK(count_fds() == fds && count_maps() == maps);
    return 0;
}
