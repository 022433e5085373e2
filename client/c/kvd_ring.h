/* kvd_ring.h - rings and messages between a program and its broker. Generated from internal/ring: go generate ./internal/ring. */
#ifndef KVD_RING_H
#define KVD_RING_H
#include <stdint.h>

enum {
    KVD_RING_MAGIC = 1263944770,
    KVD_RING_MAJOR = 1,
    KVD_RING_MINOR = 0,
    KVD_RING_MIN_DEPTH = 16,
    KVD_RING_MAX_DEPTH = 1024,
    KVD_RING_SLOT = 1024,
    KVD_RING_MAX_QUEUES = 8,
    KVD_RING_SQ_TAIL = 64,
    KVD_RING_SQ_HEAD = 128,
    KVD_RING_BROKER_SLEEPS = 192,
    KVD_RING_CQ_TAIL = 256,
    KVD_RING_CQ_HEAD = 320,
    KVD_RING_CLIENT_SLEEPS = 384,
    KVD_RING_BROKER_CPU = 448,
    KVD_RING_CLIENT_CPU = 512,
    KVD_RING_MAX_MESSAGE = 4096,
    KVD_RING_MAX_FILES = 8,
    KVD_RING_MAX_PARTS = 64,
    KVD_RING_CHUNKED = 1,
    KVD_RING_WITHOUT_LENGTH = 1,
    KVD_RING_MAX_PIN = 4200000,
};
struct kvd_ring_header {
    uint32_t magic;
    uint16_t major, minor;
    uint32_t depth, zero;
    uint64_t sq_offset, cq_offset, slots_offset, bytes;
};
struct kvd_ring_submission {
    uint8_t op, flags;
    uint16_t key_bytes;
    uint32_t tag, memory, batch;
    uint64_t offset, length, word, ttl_ms;
    uint32_t timeout_ms, value_flags;
    uint64_t zero;
};
struct kvd_ring_completion {
    uint32_t tag;
    uint8_t outcome, code;
    uint16_t flags;
    uint64_t length, version, expires_ms;
    uint32_t crc, region;
    uint64_t offset, valid_until;
    uint32_t value_flags, zero;
};

enum {
    KVD_OP_GET = 1,
    KVD_OP_PUT = 2,
    KVD_OP_DELETE = 3,
    KVD_OP_EXISTS = 4,
    KVD_OP_TOUCH = 5,
    KVD_OP_INCR = 6,
    KVD_OP_SCAN = 7,
    KVD_OP_DELETE_PREFIX = 8,
    KVD_OP_GET_RANGE = 9,
    KVD_OP_VIEW = 10,
    KVD_OP_VIEW_RELEASE = 11,
    KVD_OP_PIN = 12,
    KVD_OP_UNPIN = 13,
    KVD_OP_CANCEL = 14,
    KVD_OP_NOP = 15,
    KVD_OP_PUT_BEGIN = 50,
    KVD_OP_PUT_APPEND = 51,
    KVD_OP_PUT_COMMIT = 52,
    KVD_OP_PUT_ABORT = 53,
};
enum {
    KVD_MSG_HELLO = 1,
    KVD_MSG_QUEUE = 2,
    KVD_MSG_REGISTER = 3,
    KVD_MSG_DEREGISTER = 4,
    KVD_MSG_BYE = 5,
    KVD_MSG_WELCOME = 64,
    KVD_MSG_QUEUED = 65,
    KVD_MSG_DONE = 66,
    KVD_MSG_REFUSED = 67,
    KVD_MSG_REGION = 68,
    KVD_MSG_REGION_GONE = 69,
};
#endif
