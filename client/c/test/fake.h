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

/* What the broker says of a view that is not so. */
enum fake_lie {
    LIE_NONE,
    LIE_OFFSET,    /* a part begins behind the region */
    LIE_LENGTH,    /* it ends there */
    LIE_WRAPS,     /* its end is a small number again */
    LIE_REGION,    /* the region has no such number */
    LIE_UNTOLD,    /* nothing was said of the region */
    LIE_SHORT,     /* its file is shorter */
    LIE_UNSEALED,  /* and may become so */
    LIE_UNALIGNED, /* it begins inside a page */
    LIE_FILE,      /* it is a file of something else */
    LIE_NO_FILE,   /* there is none */
    LIE_EMPTY,     /* the value has no bytes */
    LIE_FLAGS,     /* flags that nobody knows */
    LIE_PARTS,     /* parts are longer than the value */
    LIE_NO_PART,   /* a part has no bytes */
    LIE_MANY,      /* parts are more than there are */
    LIE_KINDS
};

enum { FAKE_RECORDS = 64, FAKE_KEY = 256, FAKE_VALUE = 4 << 20 };

struct fake_record {
    uint32_t used, key_bytes, flags;
    uint64_t length, version, expires_ms, pinned_ms;
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
    _Atomic uint32_t lie;      /* enum fake_lie, for views */
    _Atomic uint32_t expires;  /* views do not hold */
    _Atomic uint32_t views;    /* that are not released */
    _Atomic uint64_t version;
    uint64_t generation;       /* of the last HELLO */
    struct fake_record records[FAKE_RECORDS];
};
#endif
