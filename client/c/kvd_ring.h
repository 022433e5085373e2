/* Layout of rings and messages. */
#ifndef KVD_RING_H
#define KVD_RING_H
#include <stdint.h>
enum {
    KVD_RING_MAGIC = 0x4b564442, KVD_RING_MAJOR = 1, KVD_RING_MINOR = 0,
    KVD_RING_SQ_TAIL = 64, KVD_RING_SQ_HEAD = 128, KVD_RING_BROKER_SLEEPS = 192, KVD_RING_CQ_TAIL = 256,
    KVD_RING_CQ_HEAD = 320, KVD_RING_CLIENT_SLEEPS = 384, KVD_RING_BROKER_CPU = 448, KVD_RING_CLIENT_CPU = 512,
    KVD_RING_SLOT = 1024, KVD_RING_MIN_DEPTH = 16, KVD_RING_MAX_DEPTH = 1024
};
struct kvd_ring_header {
    uint32_t magic; uint16_t major, minor; uint32_t depth, zero; uint64_t sq_offset, cq_offset, slots_offset, bytes;
};
struct kvd_ring_submission {
    uint8_t op, flags; uint16_t key_bytes; uint32_t tag, memory, batch; uint64_t offset, length, word, ttl_ms;
    uint32_t timeout_ms, value_flags; uint64_t zero;
};
struct kvd_ring_completion {
    uint32_t tag; uint8_t outcome, code; uint16_t flags; uint64_t length, version, expires_ms; uint32_t crc, region;
    uint64_t offset, valid_until; uint32_t value_flags, zero;
};
enum {
    KVD_OP_GET = 1, KVD_OP_PUT, KVD_OP_DELETE, KVD_OP_EXISTS, KVD_OP_TOUCH, KVD_OP_INCR, KVD_OP_SCAN,
    KVD_OP_DELETE_PREFIX, KVD_OP_GET_RANGE, KVD_OP_VIEW, KVD_OP_VIEW_RELEASE, KVD_OP_PIN, KVD_OP_UNPIN,
    KVD_OP_CANCEL, KVD_OP_NOP
};
enum {
    KVD_MSG_HELLO = 1, KVD_MSG_QUEUE, KVD_MSG_REGISTER, KVD_MSG_DEREGISTER, KVD_MSG_BYE,
    KVD_MSG_WELCOME = 64, KVD_MSG_QUEUED, KVD_MSG_DONE, KVD_MSG_REFUSED, KVD_MSG_REGION, KVD_MSG_REGION_GONE
};
#endif
