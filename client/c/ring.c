/* ring.c - the mapping of a ring, whose header is checked and copied once. */
#include "internal.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

/* A ring of the greatest depth has little more than 1 MiB. */
#define MAX_RING_BYTES (UINT64_C(4) << 20)

static int inside(uint64_t offset, uint64_t bytes, uint64_t from, uint64_t to) {
    return offset % PAGE == 0 && offset >= from && offset <= to && bytes <= to - offset;
}

/* kvd__queue_map maps the ring in fd for a queue that has none. It returns -1 if the ring is not as it should be. */
int kvd__queue_map(struct queue *q, int fd, uint32_t depth) {
    struct stat st;
    struct kvd_ring_header h;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || fstat(fd, &st) != 0)
        return -1;
    uint64_t n = depth, size = (uint64_t)st.st_size;
    if (st.st_size < 2 * PAGE || size > MAX_RING_BYTES)
        return -1;
    unsigned char *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return -1;
    kvd__copy_in(&h, base, sizeof h);
    /* Without the broker's ring a child cannot disturb its parent. */
    if (madvise(base, size, MADV_DONTFORK) != 0 || h.magic != KVD_RING_MAGIC || h.major != KVD_RING_MAJOR ||
        h.depth != depth || h.bytes > size || !inside(h.sq_offset, n * 64, PAGE, h.bytes) ||
        !inside(h.cq_offset, n * 64, h.sq_offset + n * 64, h.bytes) ||
        !inside(h.slots_offset, n * KVD_RING_SLOT, h.cq_offset + n * 64, h.bytes)) {
        munmap(base, size);
        return -1;
    }
    struct op *cancels = realloc(q->cancels, n * sizeof *cancels);
    if (cancels == NULL) {
        munmap(base, size);
        return -1;
    }
    q->cancels = cancels;
    q->base = base;
    q->bytes = size;
    q->depth = depth;
    q->entries = (void *)(base + h.sq_offset);
    q->completions = (const void *)(base + h.cq_offset);
    q->slots = base + h.slots_offset;
    q->sq_tail = q->cq_head = q->rung = 0;
    q->broken = 0;
    q->bounces = 0;
    q->free_slots = depth;
    for (uint32_t i = 0; i < depth; i++) {
        q->slot_stack[i] = (uint16_t)(depth - 1 - i);
        q->live[i] = NULL;
    }
    return 0;
}

void kvd__queue_unmap(struct queue *q) {
    if (q->base != NULL)
        munmap(q->base, q->bytes);
    q->base = NULL;
    q->entries = NULL;
    q->completions = NULL;
    q->slots = NULL;
}
