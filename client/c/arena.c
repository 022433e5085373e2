/*
 * arena.c - the memory through which values go.
 *
 * The arena is a memfd of the client, sealed against shrinking, which outlives brokers. What is free is kept beside
 * it: the broker can write to the arena, so nothing in there is believed. Blocks are runs of pages. Free ones are in
 * lists by the logarithm of their length, and join their free neighbours.
 */
#include "internal.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

static int log2_of(uint32_t n) { return 31 - __builtin_clz(n); }

static void list_add(struct arena *a, uint32_t at, uint32_t run) {
    struct page *p = &a->pages[at];
    uint32_t *list = &a->lists[log2_of(run)];
    p->used = 0;
    p->run = run;
    a->pages[at + run - 1].run = run;
    a->pages[at + run - 1].used = 0;
    a->pages[at + run - 1].head = at;
    p->head = at;
    p->prev = 0;
    p->next = *list;
    if (*list != 0)
        a->pages[*list - 1].prev = at + 1;
    *list = at + 1;
}

static void list_remove(struct arena *a, uint32_t at) {
    struct page *p = &a->pages[at];
    if (p->prev != 0)
        a->pages[p->prev - 1].next = p->next;
    else
        a->lists[log2_of(p->run)] = p->next;
    if (p->next != 0)
        a->pages[p->next - 1].prev = p->prev;
}

int kvd__arena_make(struct arena *a, uint64_t bytes) {
    uint64_t n = bytes / PAGE;
    int fd = memfd_create("kvd-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return errno;
    if (ftruncate(fd, (off_t)(n * PAGE)) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
        int e = errno;
        close(fd);
        return e;
    }
    void *base = mmap(NULL, n * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    struct page *pages = calloc(n, sizeof *pages);
    if (base == MAP_FAILED || pages == NULL) {
        int e = base == MAP_FAILED ? errno : ENOMEM;
        if (base != MAP_FAILED)
            munmap(base, n * PAGE);
        free(pages);
        close(fd);
        return e;
    }
    memset(a, 0, sizeof *a);
    a->base = base;
    a->bytes = n * PAGE;
    a->fd = fd;
    a->npages = (uint32_t)n;
    a->pages = pages;
    list_add(a, 0, a->npages);
    return 0;
}

void kvd__arena_free(struct arena *a) {
    if (a->base != NULL)
        munmap(a->base, a->bytes);
    kvd__close_fd(&a->fd);
    free(a->pages);
    a->base = NULL;
    a->pages = NULL;
    a->bytes = 0;
}

/* find returns the smallest free block of a list that has n pages, plus 1. Long lists are not read to their end. */
static uint32_t find(struct arena *a, uint32_t list, uint32_t n) {
    uint32_t best = 0, looked = 0;
    for (uint32_t at = a->lists[list]; at != 0 && looked < 64; at = a->pages[at - 1].next, looked++) {
        uint32_t run = a->pages[at - 1].run;
        if (run >= n && (best == 0 || run < a->pages[best - 1].run))
            best = at;
    }
    return best;
}

static unsigned char *take(struct arena *a, uint64_t bytes, int bounce) {
    uint64_t pages = bytes / PAGE + (bytes % PAGE != 0);
    if (pages == 0 || pages > a->npages)
        return NULL;
    uint32_t n = (uint32_t)pages, found = 0;
    for (uint32_t list = (uint32_t)log2_of(n); list < 32 && found == 0; list++)
        found = find(a, list, n);
    if (found == 0)
        return NULL;
    uint32_t at = found - 1, run = a->pages[at].run;
    list_remove(a, at);
    if (run > n)
        list_add(a, at + n, run - n);
    for (uint32_t i = at; i < at + n; i++) {
        a->pages[i].used = 1;
        a->pages[i].head = at;
    }
    a->pages[at].run = n;
    a->pages[at].busy = 0;
    a->pages[at].bounce = (uint8_t)bounce;
    return a->base + (uint64_t)at * PAGE;
}

static void give(struct arena *a, uint32_t at) {
    uint32_t run = a->pages[at].run;
    if (at + run < a->npages && !a->pages[at + run].used) {
        uint32_t more = a->pages[at + run].run;
        list_remove(a, at + run);
        run += more;
    }
    if (at > 0 && !a->pages[at - 1].used) {
        uint32_t before = a->pages[at - 1].run;
        list_remove(a, at - before);
        a->pages[at].used = 0;
        at -= before;
        run += before;
    }
    /* Pages inside a free block are looked at by nobody; its ends are what neighbours read. */
    list_add(a, at, run);
}

unsigned char *kvd__take(kvd_client *c, uint64_t bytes, int bounce) {
    pthread_mutex_lock(&c->memory);
    unsigned char *p = c->arena.base == NULL ? NULL : take(&c->arena, bytes, bounce);
    pthread_mutex_unlock(&c->memory);
    return p;
}

/* block returns the first page of the used block that has [address, address + length), plus 1; 0: there is none. */
static uint32_t block(struct arena *a, const void *address, uint64_t length) {
    uintptr_t at = (uintptr_t)address - (uintptr_t)a->base;
    if (a->base == NULL || at >= a->bytes || length > a->bytes - at || !a->pages[at / PAGE].used)
        return 0;
    uint32_t head = a->pages[at / PAGE].head;
    uint64_t end = ((uint64_t)head + a->pages[head].run) * PAGE;
    return length <= end - at ? head + 1 : 0;
}

int kvd__give(kvd_client *c, void *address) {
    int code = KVD_OK;
    pthread_mutex_lock(&c->memory);
    uint32_t found = block(&c->arena, address, 1);
    if (found == 0 || (unsigned char *)address != c->arena.base + (uint64_t)(found - 1) * PAGE)
        code = KVD_ARGUMENT;
    else if (c->arena.pages[found - 1].busy != 0)
        code = KVD_BUSY;
    else
        give(&c->arena, found - 1);
    pthread_mutex_unlock(&c->memory);
    return code;
}

int kvd__inside(kvd_client *c, const void *address, uint64_t length) {
    uintptr_t at = (uintptr_t)address - (uintptr_t)c->arena.base;
    return c->arena.base != NULL && at < c->arena.bytes && length <= c->arena.bytes - at;
}

static struct region *region_of(kvd_client *c, const void *address, uint64_t length) {
    for (uint32_t i = 0; i < MAX_REGIONS; i++) {
        struct region *r = c->regions[i];
        if (r == NULL || r->number == 0)
            continue;
        uintptr_t at = (uintptr_t)address - (uintptr_t)r->address;
        if (at < r->length && length <= r->length - at)
            return r;
    }
    return NULL;
}

int kvd__registered(kvd_client *c, const void *address, uint64_t length) {
    if (atomic_load(&c->nregions) == 0)
        return 0;
    pthread_mutex_lock(&c->memory);
    int found = region_of(c, address, length) != NULL;
    pthread_mutex_unlock(&c->memory);
    return found;
}

/*
 * kvd__use finds the broker's name of an operation's bytes and marks them as used. It returns 1; 0: they are in
 * memory that the broker does not have; -1: in the arena, but not inside a block that is in use.
 */
int kvd__use(kvd_client *c, struct op *op) {
    int found = 0;
    const unsigned char *p = op->bounce != NULL ? op->bounce : op->bytes;
    pthread_mutex_lock(&c->memory);
    uint32_t at = block(&c->arena, p, op->length);
    if (at != 0 && c->arena_number != 0) {
        c->arena.pages[at - 1].busy++;
        op->block = at;
        op->memory = c->arena_number;
        op->offset = (uint64_t)(p - c->arena.base);
        found = 1;
    } else if (kvd__inside(c, p, 1)) {
        found = -1;
    } else if (atomic_load(&c->nregions) != 0) {
        struct region *r = region_of(c, p, op->length);
        if (r != NULL) {
            r->busy++;
            op->region = r;
            op->memory = r->number;
            op->offset = (uint64_t)(p - r->address);
            found = 1;
        }
    }
    pthread_mutex_unlock(&c->memory);
    return found;
}

void kvd__unuse(kvd_client *c, struct op *op) {
    pthread_mutex_lock(&c->memory);
    if (op->block != 0)
        c->arena.pages[op->block - 1].busy--;
    if (op->region != NULL)
        op->region->busy--;
    op->block = 0;
    op->region = NULL;
    pthread_mutex_unlock(&c->memory);
}

/* kvd__call_bounce takes bytes for a call, and waits while others of the kind have them. NULL: there are too few. */
unsigned char *kvd__call_bounce(kvd_client *c, uint64_t bytes) {
    unsigned char *p = NULL;
    pthread_mutex_lock(&c->memory);
    while (c->arena.base != NULL && (p = take(&c->arena, bytes, 1)) == NULL && c->call_bounces != 0)
        pthread_cond_wait(&c->freed, &c->memory);
    if (p != NULL)
        c->call_bounces++;
    pthread_mutex_unlock(&c->memory);
    return p;
}

/* kvd__call_unbounce gives them back, unless the broker may still write there: then they stay taken. */
void kvd__call_unbounce(kvd_client *c, unsigned char *p) {
    pthread_mutex_lock(&c->memory);
    uint32_t at = block(&c->arena, p, 1);
    if (at != 0 && c->arena.pages[at - 1].busy == 0)
        give(&c->arena, at - 1);
    c->call_bounces--;
    pthread_cond_broadcast(&c->freed);
    pthread_mutex_unlock(&c->memory);
}

PUBLIC int kvd_alloc(kvd_client *c, uint64_t bytes, void **address, kvd_error *error) {
    if (c == NULL || address == NULL || bytes == 0)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "kvd_alloc wants a client, bytes and an address");
    if (kvd__gone(c))
        return kvd__forked(error);
    *address = kvd__take(c, bytes, 0);
    if (*address == NULL)
        return kvd__fail(error, KVD_NO, KVD_FULL, 0, "the arena has no free run of that length");
    return kvd__ok(error);
}

/* Outside the arena are values that kvd_get put into memory of malloc. */
PUBLIC int kvd_free(kvd_client *c, void *address) {
    if (address == NULL)
        return KVD_OK;
    if (c == NULL)
        return KVD_ARGUMENT;
    if (kvd__gone(c))
        return KVD_FORKED;
    if (kvd__inside(c, address, 1))
        return kvd__give(c, address);
    free(address);
    return KVD_OK;
}

PUBLIC int kvd_arena(kvd_client *c, void **address, uint64_t *bytes, kvd_error *error) {
    if (c == NULL || address == NULL || bytes == NULL)
        return kvd__fail(error, KVD_NO, KVD_ARGUMENT, 0, "kvd_arena wants a client, an address and bytes");
    if (kvd__gone(c))
        return kvd__forked(error);
    *address = c->arena.base;
    *bytes = c->arena.bytes;
    return kvd__ok(error);
}
