/*
 * main.c - runs tests against a stand-in of a broker, or against a real one.
 * usage: kvd_test fake PROGRAM [TEST…], kvd_test real SOCKET NAMESPACE [TEST…], or see kills.c
 */
#include "test.h"

#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const char *fake_program;

int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

kvd_client *open_client(struct broker *b, uint32_t queues, uint64_t arena) {
    kvd_client *c;
    kvd_error e = {.size = sizeof e};
    kvd_options o = {.size = sizeof o, .path = b->path, .namespace_name = b->namespace_name, .queues = queues, .arena_bytes = arena, .program = "kvd_test"};
    GOOD(kvd_open(&o, &c, &e));
    return c;
}

int listens(const char *path) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    snprintf(a.sun_path, sizeof a.sun_path, "%s", path);
    int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    int ok = connect(s, (struct sockaddr *)&a, sizeof a) == 0;
    close(s);
    return ok;
}

void fake_start(struct broker *b) {
    char fd[16];
    snprintf(fd, sizeof fd, "%d", b->fd);
    unlink(b->path);
    b->pid = fork();
    CHECK(b->pid >= 0);
    if (b->pid == 0) {
        execl(fake_program, fake_program, b->path, fd, (char *)NULL);
        _exit(127);
    }
    for (int64_t end = now_ms() + 20000; !listens(b->path); sched_yield())
        CHECK(now_ms() < end);
}

void fake_kill(struct broker *b) {
    int status;
    kill(b->pid, SIGKILL);
    CHECK(waitpid(b->pid, &status, 0) == b->pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL); /* it did not stop by itself: the library kept the rules */
}

void fake_mode(struct broker *b, enum fake_mode mode) { atomic_store(&b->fake->mode, mode); }

void until(_Atomic uint32_t *n, uint32_t least) {
    for (int64_t end = now_ms() + 20000; atomic_load(n) < least; sched_yield())
        CHECK(now_ms() < end);
}

struct fake_record *fake_find(struct broker *b, const char *key) {
    for (int i = 0; i < FAKE_RECORDS; i++) {
        struct fake_record *r = &b->fake->records[i];
        if (r->used && r->key_bytes == strlen(key) && memcmp(r->key, key, r->key_bytes) == 0)
            return r;
    }
    return NULL;
}

void fill(void *p, uint64_t n, uint32_t seed) {
    unsigned char *b = p;
    for (uint64_t i = 0; i < n; i++)
        b[i] = (unsigned char)((i * 2654435761u + seed * 40503u) >> 11);
}

int filled(const void *p, uint64_t n, uint32_t seed) {
    const unsigned char *b = p;
    for (uint64_t i = 0; i < n; i++)
        if (b[i] != (unsigned char)((i * 2654435761u + seed * 40503u) >> 11))
            return 0;
    return 1;
}

int all(const void *p, uint64_t n, unsigned char byte) {
    const unsigned char *b = p;
    for (uint64_t i = 0; i < n; i++)
        if (b[i] != byte)
            return 0;
    return 1;
}

int count_fds(void) {
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    while (readdir(d) != NULL)
        n++;
    closedir(d);
    return n;
}

/* Mappings of files of the library, by name: others come and go with the C library and the sanitizers. */
int count_maps(void) {
    int n = 0;
    char line[512];
    FILE *f = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, f) != NULL)
        n += strstr(line, "memfd:kvd-arena") != NULL || strstr(line, "memfd:ring") != NULL || strstr(line, "memfd:kvd-ring") != NULL ||
             strstr(line, "memfd:kvd-region") != NULL;
    fclose(f);
    return n;
}

static int wanted(const char *name, int argc, char **argv, int from) {
    int any = argc <= from;
    for (int i = from; i < argc; i++)
        any |= strncmp(name, argv[i], strlen(argv[i])) == 0;
    return any;
}

static int run(const struct test *tests, struct broker *b, int argc, char **argv, int from) {
    int n = 0;
    for (; tests->name != NULL; tests++) {
        if (!wanted(tests->name, argc, argv, from))
            continue;
        if (b->fake != NULL) {
            memset(b->fake, 0, offsetof(struct fake, records));
            for (int i = 0; i < FAKE_RECORDS; i++)
                b->fake->records[i].used = 0;
            fake_start(b);
        }
        int fds = count_fds(), maps = count_maps();
        int64_t began = now_ms();
        tests->run(b);
        CHECK(count_fds() == fds);
        CHECK(count_maps() == maps);
        if (b->fake != NULL)
            fake_kill(b);
        printf("ok %s (%d ms)\n", tests->name, (int)(now_ms() - began));
        fflush(stdout);
        n++;
    }
    return n;
}

int main(int argc, char **argv) {
    struct broker b = {0};
    int n = 0, from = 4;
    if (argc < 3)
        return 2;
    if (strcmp(argv[1], "kills") == 0)
        return argc < 6 ? 2 : kills(argv[2], argv[3], atoi(argv[4]), argv + 5);
    if (strcmp(argv[1], "fake") == 0) {
        from = 3;
        fake_program = argv[2];
        snprintf(b.path, sizeof b.path, "/tmp/kvd-test-%d.sock", (int)getpid());
        b.fd = memfd_create("kvd-fake", 0);
        CHECK(ftruncate(b.fd, sizeof(struct fake)) == 0);
        b.fake = mmap(NULL, sizeof(struct fake), PROT_READ | PROT_WRITE, MAP_SHARED, b.fd, 0);
        CHECK(b.fake != MAP_FAILED);
    } else {
        CHECK(argc >= 4);
        snprintf(b.path, sizeof b.path, "%s", argv[2]);
        b.namespace_name = argv[3];
    }
    n += run(calls_tests, &b, argc, argv, from);
    n += run(batch_tests, &b, argc, argv, from);
    n += run(seen_tests, &b, argc, argv, from);
    n += run(stream_tests, &b, argc, argv, from);
    if (b.fake != NULL) {
        n += run(state_tests, &b, argc, argv, from);
        n += run(view_tests, &b, argc, argv, from);
        n += run(fuzz_tests, &b, argc, argv, from);
        munmap(b.fake, sizeof *b.fake);
        unlink(b.path);
    }
    if (n == 0) {
        fprintf(stderr, "no test has such a name\n");
        return 2;
    }
    return 0;
}
