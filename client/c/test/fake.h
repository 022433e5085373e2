/* fake.h - what tests and their stand-in of a broker share, in a memfd. */
#ifndef KVD_FAKE_H
#define KVD_FAKE_H
#include <stdatomic.h>
#include <stdint.h>

enum fake_mode {
    FAKE_HONEST,
    FAKE_HOLD_QUEUED, /* passes no entry */
    FAKE_HOLD_TAKEN,  /* passes entries, does nothing */
    FAKE_HOLD_ACTED,  /* passes entries and acts, answers nothing */
    FAKE_GARBAGE,     /* answers with nonsense */
    FAKE_LIES,        /* answers what may be, and nonsense once in 256 times */
    FAKE_MUTE,        /* takes connections, says nothing */
    FAKE_CLOSE,       /* closes each connection when it has work */
    FAKE_ONE_QUEUE    /* refuses a second queue */
};

enum { FAKE_RECORDS = 64, FAKE_KEY = 256, FAKE_VALUE = 4 << 20 };

struct fake_record {
    uint32_t used, key_bytes, flags;
    uint64_t length, version, expires_ms;
    unsigned char key[FAKE_KEY];
    unsigned char value[FAKE_VALUE];
};

struct fake {
    _Atomic uint32_t mode;
    _Atomic uint32_t seed;
    _Atomic uint32_t taken;    /* entries passed */
    _Atomic uint32_t acted;
    _Atomic uint32_t clients;  /* connections so far */
    _Atomic uint32_t cancelled;
    _Atomic uint32_t refuse;   /* a code with which HELLO is refused */
    _Atomic uint32_t code;     /* with which each operation is answered, and nothing done */
    _Atomic uint32_t outcome;
    _Atomic uint64_t version;
    uint64_t generation;       /* of the last HELLO */
    struct fake_record records[FAKE_RECORDS];
};
#endif
