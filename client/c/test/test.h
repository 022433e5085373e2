/* test.h - what the tests share. A test that finds a fault prints it and exits with 1. */
#ifndef KVD_TEST_H
#define KVD_TEST_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include "../kvd.h"
#include "fake.h"

#define CHECK(what)                                                                      \
    do {                                                                                 \
        if (!(what)) {                                                                   \
            fprintf(stderr, "%s:%d: %s: not so: %s\n", __FILE__, __LINE__, __func__, #what); \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)

/* WANT runs a call whose last argument is &e and compares its code and outcome. */
#define WANT(want_code, want_outcome, call)                                              \
    do {                                                                                 \
        int got_ = (call);                                                               \
        if (got_ != (want_code) || e.code != got_ || e.outcome != (want_outcome)) {      \
            fprintf(stderr, "%s:%d: %s: %s: code %s, outcome %d, errno %d: %s\n", __FILE__, __LINE__, __func__, #call, \
                    kvd_code_name(got_), e.outcome, e.os_error, e.text);                 \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)

#define GOOD(call) WANT(KVD_OK, KVD_YES, call)

struct broker {
    char path[108];
    const char *namespace_name;
    struct fake *fake; /* NULL: a real one */
    int fd;
    pid_t pid;
};

struct test {
    const char *name;
    void (*run)(struct broker *b);
};

extern const struct test calls_tests[], batch_tests[], state_tests[], seen_tests[], view_tests[], fuzz_tests[],
    stream_tests[];

kvd_client *open_client(struct broker *b, uint32_t queues, uint64_t arena);
int listens(const char *path);
int kills(const char *path, const char *namespace_name, int rounds, char **argv);
void fake_start(struct broker *b);
void fake_kill(struct broker *b);
void fake_mode(struct broker *b, enum fake_mode mode);
void until(_Atomic uint32_t *n, uint32_t least);
struct fake_record *fake_find(struct broker *b, const char *key);
void fill(void *p, uint64_t n, uint32_t seed);
int filled(const void *p, uint64_t n, uint32_t seed);
int all(const void *p, uint64_t n, unsigned char byte);
int count_fds(void);
int count_maps(void);
int64_t now_ms(void);
#endif
