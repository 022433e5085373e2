/*
 * conn.c - the socket: hello, queues, registered memory, and the end of a connection.
 *
 * A connection is gone when its broker is dead, as its pidfd says, or has closed the socket, which it does last.
 * Only then are operations given up: before, the broker may still write to the arena.
 */
#include "internal.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MESSAGE = 4096, HEADER = 16, MAX_FDS = 8, REPLY_MS = 2000, SLOW_REPLY_MS = 60000 };

/* Tags of descriptors in the epoll: queues have their number. */
enum { TAG_SOCK = 100, TAG_PID = 101 };

struct message {
    unsigned char bytes[MESSAGE];
    size_t length;
    int fds[MAX_FDS];
    int nfds;
};

static void put16(struct message *m, uint16_t v) {
    memcpy(m->bytes + m->length, &v, sizeof v);
    m->length += sizeof v;
}

static void put32(struct message *m, uint32_t v) {
    memcpy(m->bytes + m->length, &v, sizeof v);
    m->length += sizeof v;
}

static void put64(struct message *m, uint64_t v) {
    memcpy(m->bytes + m->length, &v, sizeof v);
    m->length += sizeof v;
}

static uint32_t at32(const struct message *m, size_t offset) {
    uint32_t v;
    memcpy(&v, m->bytes + offset, sizeof v);
    return v;
}

static uint16_t at16(const struct message *m, size_t offset) {
    uint16_t v;
    memcpy(&v, m->bytes + offset, sizeof v);
    return v;
}

static uint64_t at64(const struct message *m, size_t offset) {
    uint64_t v;
    memcpy(&v, m->bytes + offset, sizeof v);
    return v;
}

static void begin(struct message *m, uint16_t type, uint32_t serial) {
    memset(m, 0, sizeof *m);
    put16(m, type);
    put16(m, 0);
    put32(m, 0);
    put32(m, serial);
    put32(m, 0);
}

static void drop_fds(struct message *m) {
    for (int i = 0; i < m->nfds; i++)
        kvd__close_fd(&m->fds[i]);
    m->nfds = 0;
}

static int send_message(int sock, struct message *m) {
    uint32_t length = (uint32_t)m->length;
    memcpy(m->bytes + 4, &length, sizeof length);
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * MAX_FDS)];
    } control;
    memset(&control, 0, sizeof control);
    struct iovec iov = {.iov_base = m->bytes, .iov_len = m->length};
    struct msghdr h = {.msg_iov = &iov, .msg_iovlen = 1};
    if (m->nfds != 0) {
        h.msg_control = control.bytes;
        h.msg_controllen = (socklen_t)CMSG_SPACE(sizeof(int) * (size_t)m->nfds);
        struct cmsghdr *c = CMSG_FIRSTHDR(&h);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = (socklen_t)CMSG_LEN(sizeof(int) * (size_t)m->nfds);
        memcpy(CMSG_DATA(c), m->fds, sizeof(int) * (size_t)m->nfds);
    }
    ssize_t n;
    do
        n = sendmsg(sock, &h, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    return n == (ssize_t)m->length ? 0 : -1;
}

/* receive takes one message. It returns 0; ETIMEDOUT, ECONNRESET for an end, EPROTO for nonsense, or another errno. */
static int receive(int sock, struct message *m, int64_t deadline) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * MAX_FDS)];
    } control;
    for (;;) {
        int64_t left = (deadline - kvd__now()) / 1000000;
        struct pollfd p = {.fd = sock, .events = POLLIN};
        int n = poll(&p, 1, left > 0 ? (int)(left < 60000 ? left + 1 : 60000) : 0);
        if (n < 0 && errno != EINTR)
            return errno;
        if (n > 0)
            break;
        if (kvd__now() >= deadline)
            return ETIMEDOUT;
    }
    memset(m, 0, sizeof *m);
    struct iovec iov = {.iov_base = m->bytes, .iov_len = sizeof m->bytes};
    struct msghdr h = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control};
    ssize_t n;
    do
        n = recvmsg(sock, &h, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n <= 0)
        return n == 0 ? ECONNRESET : errno == EAGAIN ? EPROTO : errno;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&h); c != NULL; c = CMSG_NXTHDR(&h, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t fds = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < fds; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
            if (m->nfds < MAX_FDS)
                m->fds[m->nfds++] = fd;
            else
                close(fd);
        }
    }
    m->length = (size_t)n;
    if ((h.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 || n < HEADER || at32(m, 4) != (uint32_t)n || at16(m, 2) != 0) {
        drop_fds(m);
        return EPROTO;
    }
    return 0;
}

/* refused turns REFUSED into the caller's error. */
static int refused(const struct message *m, kvd_error *error) {
    char text[240];
    uint32_t n = m->length >= HEADER + 8 ? at32(m, HEADER + 4) : 0;
    int code = m->length >= HEADER + 8 ? m->bytes[HEADER + 1] : KVD_PROTOCOL;
    if (n > m->length - HEADER - 8 || m->length < HEADER + 8)
        n = 0;
    if (n > sizeof text - 1)
        n = sizeof text - 1;
    memcpy(text, m->bytes + HEADER + 8, n);
    text[n] = 0;
    for (uint32_t i = 0; i < n; i++)
        if ((unsigned char)text[i] < 32 || text[i] == 127)
            text[i] = '?';
    if (code == KVD_OK || code > KVD_SYSTEM)
        code = KVD_PROTOCOL;
    return kvd__fail(error, KVD_NO, code, 0, text);
}

/* told takes what the broker says of memory that views lie in. Nonsense is as if it had not been said. */
static void told(kvd_client *c, struct message *m) {
    uint16_t type = at16(m, 0);
    if (type == KVD_MSG_REGION && m->length == HEADER + 24 && m->nfds == 1)
        kvd__shown(c, at32(m, HEADER), at64(m, HEADER + 8), at64(m, HEADER + 16), m->fds[0]);
    else if (type == KVD_MSG_REGION_GONE && m->length == HEADER + 8)
        kvd__hidden(c, at32(m, HEADER));
    drop_fds(m);
}

/* kvd__hear takes what the broker has said without being asked. Control is held. */
void kvd__hear(kvd_client *c) {
    struct message m;
    while (atomic_load(&c->connected) && receive(c->sock, &m, 0) == 0)
        if (at32(&m, 8) == 0)
            told(c, &m);
        else
            drop_fds(&m); /* late */
}

/* ask sends a request and takes its reply; *m has it, and its descriptors, only when ask returns 0. Control is held. */
static int ask(kvd_client *c, int sock, struct message *m, uint16_t want, size_t least, int64_t deadline, kvd_error *error) {
    uint32_t serial = at32(m, 8);
    int failed = send_message(sock, m) == 0 ? 0 : errno;
    while (failed == 0) {
        failed = receive(sock, m, deadline);
        if (failed != 0)
            break;
        uint16_t type = at16(m, 0);
        int asked = at32(m, 8) != 0;
        if ((asked && at32(m, 8) != serial) || (!asked && (type == KVD_MSG_REGION || type == KVD_MSG_REGION_GONE))) {
            if (asked)
                drop_fds(m); /* late */
            else
                told(c, m);
            if (kvd__now() >= deadline)
                failed = ETIMEDOUT;
            continue;
        }
        if (at32(m, 8) == serial && type == want && m->length >= least)
            return KVD_OK;
        drop_fds(m);
        if (at32(m, 8) == serial && type == KVD_MSG_REFUSED)
            return refused(m, error);
        failed = EPROTO;
    }
    if (failed == EPROTO)
        return kvd__fail(error, KVD_NO, KVD_PROTOCOL, 0, "the broker's reply makes no sense");
    if (failed == ETIMEDOUT)
        return kvd__fail(error, KVD_NO, KVD_UNAVAILABLE, 0, "the broker does not answer");
    return kvd__fail(error, KVD_NO, KVD_UNAVAILABLE, failed, "the broker went away");
}

static uint32_t next_serial(kvd_client *c) {
    if (++c->serial == 0)
        c->serial = 1;
    return c->serial;
}

static void watch(kvd_client *c, int fd, uint32_t events, uint32_t tag) {
    struct epoll_event ev = {.events = events, .data.u32 = tag};
    epoll_ctl(c->epoll_fd, EPOLL_CTL_ADD, fd, &ev);
}

/*
 * bed makes the descriptor on which a queue's sleeper waits: one call that registers nothing and reads nothing. Each
 * write to the eventfd is an edge, whatever is in it already.
 */
static int bed(kvd_client *c, int complete) {
    struct epoll_event edge = {.events = EPOLLIN | EPOLLET, .data.u32 = 0};
    struct epoll_event dead = {.events = EPOLLIN, .data.u32 = TAG_PID};
    struct epoll_event gone = {.events = EPOLLRDHUP, .data.u32 = TAG_SOCK};
    int fd = epoll_create1(EPOLL_CLOEXEC);
    if (fd >= 0 && (epoll_ctl(fd, EPOLL_CTL_ADD, complete, &edge) != 0 ||
                    epoll_ctl(fd, EPOLL_CTL_ADD, c->broker_pidfd, &dead) != 0 ||
                    epoll_ctl(fd, EPOLL_CTL_ADD, c->sock, &gone) != 0))
        kvd__close_fd(&fd);
    return fd;
}

/* unwatch is for the sake of children, whose copies would keep a closed descriptor in the epoll. */
static void unwatch(kvd_client *c, int *fd) {
    if (*fd >= 0)
        epoll_ctl(c->epoll_fd, EPOLL_CTL_DEL, *fd, NULL);
    kvd__close_fd(fd);
}

/* install gives a queue its ring and eventfds, which it owns then. */
static int install(kvd_client *c, uint32_t i, int ring, int submit, int complete) {
    struct queue *q = &c->queues[i];
    int flags = fcntl(complete, F_GETFL);
    kvd__lock(q);
    int code = flags < 0 || fcntl(complete, F_SETFL, flags | O_NONBLOCK) != 0 ? -1 : 0;
    if (code == 0 && (q->sleep_fd = bed(c, complete)) < 0)
        code = -1;
    if (code == 0)
        code = kvd__queue_map(q, ring, c->depth);
    if (code == 0) {
        q->submit_fd = submit;
        q->complete_fd = complete;
        q->generation = atomic_load(&c->generation);
        watch(c, complete, EPOLLIN, i);
    } else {
        kvd__close_fd(&q->sleep_fd);
    }
    kvd__unlock(q);
    close(ring);
    if (code != 0) {
        close(submit);
        close(complete);
    }
    return code;
}

static int open_socket(const char *path, int64_t deadline) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    size_t n = strlen(path);
    memcpy(a.sun_path, path, n + 1);
    socklen_t length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n + 1);
    if (*path == '@') { /* as the broker writes abstract names */
        a.sun_path[0] = 0;
        length--;
    }
    int sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (sock < 0)
        return -1;
    int64_t left = deadline - kvd__now();
    if (left < 1000000)
        left = 1000000;
    struct timeval t = {.tv_sec = left / 1000000000, .tv_usec = left % 1000000000 / 1000};
    setsockopt(sock, SOL_SOCKET, SO_SNDTIMEO, &t, sizeof t);
    int r;
    do
        r = connect(sock, (struct sockaddr *)&a, length);
    while (r != 0 && errno == EINTR);
    if (r != 0 && errno != EISCONN) {
        int e = errno;
        close(sock);
        errno = e;
        return -1;
    }
    return sock;
}

static void hello(kvd_client *c, struct message *m, int self) {
    size_t n = strlen(c->namespace_name), p = strlen(c->program);
    begin(m, KVD_MSG_HELLO, next_serial(c));
    put32(m, KVD_RING_MAGIC);
    put16(m, KVD_RING_MAJOR);
    put16(m, KVD_RING_MINOR);
    put32(m, c->want_depth);
    put32(m, 0);
    put64(m, c->arena.bytes);
    put64(m, atomic_load(&c->generation) + 1);
    put16(m, (uint16_t)n);
    put16(m, (uint16_t)c->secret_bytes);
    put16(m, (uint16_t)p);
    put16(m, 0);
    memcpy(m->bytes + m->length, c->namespace_name, n);
    m->length += n;
    if (c->secret_bytes != 0)
        memcpy(m->bytes + m->length, c->secret, c->secret_bytes);
    m->length += c->secret_bytes;
    memcpy(m->bytes + m->length, c->program, p);
    m->length += p;
    m->fds[m->nfds++] = self;
    if (c->arena.bytes != 0)
        m->fds[m->nfds++] = c->arena.fd;
}

/* welcome checks what WELCOME says. */
static int welcome(kvd_client *c, struct message *m, kvd_error *error) {
    const size_t b = HEADER;
    uint32_t depth = at32(m, b + 8), arena = at32(m, b + 12);
    if (at32(m, b) != KVD_RING_MAGIC || at16(m, b + 4) != KVD_RING_MAJOR || m->nfds != 4)
        return kvd__fail(error, KVD_NO, KVD_PROTOCOL, 0, "the broker speaks another version");
    if (depth < KVD_RING_MIN_DEPTH || depth > KVD_RING_MAX_DEPTH || (depth & (depth - 1)) != 0 ||
        (arena != 0) != (c->arena.bytes != 0))
        return kvd__fail(error, KVD_NO, KVD_PROTOCOL, 0, "the broker's welcome makes no sense");
    c->depth = depth;
    c->max_value = at64(m, b + 16);
    pthread_mutex_lock(&c->memory);
    c->arena_number = arena;
    pthread_mutex_unlock(&c->memory);
    return KVD_OK;
}

static int register_on(kvd_client *c, int sock, struct region *r, kvd_error *error) {
    struct message m;
    begin(&m, KVD_MSG_REGISTER, next_serial(c));
    put64(&m, r->offset);
    put64(&m, r->length);
    m.fds[m.nfds++] = r->fd;
    int code = ask(c, sock, &m, KVD_MSG_DONE, HEADER + 8, kvd__now() + (int64_t)SLOW_REPLY_MS * 1000000, error);
    if (code != KVD_OK)
        return code;
    uint32_t number = at32(&m, HEADER);
    drop_fds(&m);
    if (number == 0 || number == c->arena_number)
        return kvd__fail(error, KVD_NO, KVD_PROTOCOL, 0, "the broker's number of the memory makes no sense");
    pthread_mutex_lock(&c->memory);
    r->number = number;
    pthread_mutex_unlock(&c->memory);
    return KVD_OK;
}

/* dial connects once. Control is held, and there is no connection. */
static int dial(kvd_client *c, int64_t deadline, kvd_error *error) {
    struct message m;
    int sock = open_socket(c->path, deadline);
    if (sock < 0)
        return kvd__fail(error, KVD_NO, errno == EACCES ? KVD_DENIED : KVD_UNAVAILABLE, errno,
                         "no broker listens there");
    int self = kvd__pidfd();
    if (self < 0) {
        int e = errno;
        close(sock);
        return kvd__fail(error, KVD_NO, KVD_SYSTEM, e, "pidfd_open failed");
    }
    hello(c, &m, self);
    int code = ask(c, sock, &m, KVD_MSG_WELCOME, HEADER + 56, deadline, error);
    close(self);
    if (code == KVD_OK && (code = welcome(c, &m, error)) != KVD_OK)
        drop_fds(&m);
    if (code != KVD_OK) {
        close(sock);
        return code;
    }
    atomic_fetch_add(&c->generation, 1);
    /* First these: whoever finds a ring in the queue may poll them. */
    c->broker_pidfd = m.fds[0];
    c->sock = sock;
    if (install(c, 0, m.fds[1], m.fds[2], m.fds[3]) != 0) {
        kvd__close_fd(&c->broker_pidfd);
        kvd__close_fd(&c->sock);
        return kvd__fail(error, KVD_NO, KVD_PROTOCOL, 0, "the broker's ring makes no sense");
    }
    watch(c, c->broker_pidfd, EPOLLIN, TAG_PID);
    watch(c, c->sock, EPOLLRDHUP, TAG_SOCK);
    atomic_store(&c->nqueues, 1);
    atomic_store(&c->no_more_queues, 0);
    for (uint32_t i = 0; i < MAX_REGIONS; i++)
        if (c->regions[i] != NULL)
            (void)register_on(c, sock, c->regions[i], NULL);
    atomic_store(&c->connected, 1);
    return KVD_OK;
}

static void sleep_until(int64_t when) {
    struct timespec t = {.tv_sec = when / 1000000000, .tv_nsec = when % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) {
    }
}

/* kvd__connect sees to a connection, and tries until the deadline, 10 ms to 1 s apart. A refusal ends it. */
int kvd__connect(kvd_client *c, int64_t deadline, kvd_error *error) {
    int code;
    pthread_mutex_lock(&c->control);
    for (;;) {
        if (atomic_load(&c->connected)) {
            code = KVD_OK;
            break;
        }
        int64_t now = kvd__now(), next = c->next_dial;
        if (now < next) {
            if (next > deadline) {
                code = kvd__fail(error, KVD_NO, KVD_UNAVAILABLE, 0, "there is no connection to the broker");
                break;
            }
            pthread_mutex_unlock(&c->control);
            sleep_until(next);
            pthread_mutex_lock(&c->control);
            continue;
        }
        int64_t until = now + (int64_t)REPLY_MS * 1000000;
        code = dial(c, deadline > now && deadline < until ? deadline : until, error);
        if (code == KVD_OK) {
            c->backoff_ms = 0;
            break;
        }
        c->backoff_ms = c->backoff_ms == 0 ? 10 : c->backoff_ms * 2 > 1000 ? 1000 : c->backoff_ms * 2;
        now = kvd__now();
        c->next_dial = now + c->backoff_ms * 1000000;
        if (code != KVD_UNAVAILABLE || c->next_dial > deadline)
            break;
    }
    pthread_mutex_unlock(&c->control);
    return code;
}

/* kvd__more_queues opens one more queue. It returns 0 if there is one. */
int kvd__more_queues(kvd_client *c) {
    struct message m;
    int code = -1;
    if (pthread_mutex_trylock(&c->control) != 0)
        return -1; /* somebody else asks, or the connection ends */
    uint32_t n = atomic_load(&c->nqueues);
    if (atomic_load(&c->connected) && n < c->max_queues && !atomic_load(&c->no_more_queues)) {
        begin(&m, KVD_MSG_QUEUE, next_serial(c));
        code = ask(c, c->sock, &m, KVD_MSG_QUEUED, HEADER + 8, kvd__now() + (int64_t)REPLY_MS * 1000000, NULL);
        if (code == KVD_OK && m.nfds == 3 && at32(&m, HEADER) == n)
            code = install(c, n, m.fds[0], m.fds[1], m.fds[2]);
        else if (code == KVD_OK) {
            drop_fds(&m);
            code = -1;
        }
        if (code == 0)
            atomic_store(&c->nqueues, n + 1);
        else
            atomic_store(&c->no_more_queues, 1);
    }
    pthread_mutex_unlock(&c->control);
    return code;
}

/* ended tells how the connection ended: 2: the broker is dead; 1: it closed the socket; 0: it goes on. */
static int ended(kvd_client *c, int timeout_ms) {
    struct pollfd p[2] = {{.fd = c->broker_pidfd, .events = POLLIN}, {.fd = c->sock, .events = POLLRDHUP}};
    int n;
    do
        n = poll(p, 2, timeout_ms);
    while (n < 0 && errno == EINTR);
    if (p[0].revents != 0)
        return 2;
    return p[1].revents != 0 ? 1 : 0;
}

/* kvd__ended looks whether the connection of that generation is gone, and ends it then. */
int kvd__ended(kvd_client *c, uint64_t generation) {
    pthread_mutex_lock(&c->control);
    int how = atomic_load(&c->connected) && atomic_load(&c->generation) == generation ? ended(c, 0) : 0;
    pthread_mutex_unlock(&c->control);
    if (how == 0)
        return 0;
    kvd__lost(c, generation, how == 2 ? KVD_UNAVAILABLE : KVD_CLOSED);
    return 1;
}

/*
 * kvd__lost ends the connection of that generation and gives each operation its verdict. After a broken rule it tells
 * the broker, and waits for the broker's end of the connection, two seconds at most.
 */
void kvd__lost(kvd_client *c, uint64_t generation, int code) {
    pthread_mutex_lock(&c->control);
    if (!atomic_load(&c->connected) || atomic_load(&c->generation) != generation) {
        pthread_mutex_unlock(&c->control);
        return;
    }
    atomic_store(&c->connected, 0);
    int how = ended(c, 0);
    if (how == 0) {
        shutdown(c->sock, SHUT_WR);
        how = ended(c, REPLY_MS);
    }
    /* A broker that died closed the socket a moment before its pidfd tells. */
    if (how == 1) {
        struct pollfd p = {.fd = c->broker_pidfd, .events = POLLIN};
        if (poll(&p, 1, code == KVD_CLOSED ? 50 : 0) > 0) /* 0 for kvd_close, to which it is all the same */
            how = 2;
    }
    if (how == 2 && code == KVD_CLOSED)
        code = KVD_UNAVAILABLE;
    uint32_t n = atomic_load(&c->nqueues);
    pthread_mutex_lock(&c->memory);
    c->arena_number = 0;
    for (uint32_t i = 0; i < MAX_REGIONS; i++)
        if (c->regions[i] != NULL)
            c->regions[i]->number = 0;
    pthread_mutex_unlock(&c->memory);
    kvd__hide(c);
    for (uint32_t i = 0; i < n; i++) {
        struct queue *q = &c->queues[i];
        kvd__lock(q);
        while (q->sleepers != 0) {
            kvd__wake(q->complete_fd);
            q->waiters++;
            pthread_cond_wait(&q->changed, &q->lock);
            q->waiters--;
        }
        kvd__end(q, code, how != 0);
        kvd__close_fd(&q->sleep_fd);
        unwatch(c, &q->complete_fd);
        kvd__close_fd(&q->submit_fd);
        kvd__queue_unmap(q);
        pthread_cond_broadcast(&q->changed);
        kvd__unlock(q);
    }
    unwatch(c, &c->sock);
    unwatch(c, &c->broker_pidfd);
    atomic_store(&c->nqueues, 0);
    c->next_dial = 0;
    c->backoff_ms = 0;
    if (atomic_exchange(&c->armed, 0))
        kvd__wake(c->notify_fd);
    pthread_mutex_unlock(&c->control);
}

void kvd__bye(kvd_client *c) {
    struct message m;
    uint64_t generation = atomic_load(&c->generation);
    pthread_mutex_lock(&c->control);
    if (atomic_load(&c->connected)) {
        begin(&m, KVD_MSG_BYE, next_serial(c));
        (void)send_message(c->sock, &m);
    }
    pthread_mutex_unlock(&c->control);
    kvd__lost(c, generation, KVD_OK);
}

int kvd__region_register(kvd_client *c, struct region *r, kvd_error *error) {
    int code;
    pthread_mutex_lock(&c->control);
    if (r->number != 0) /* connecting did it */
        code = KVD_OK;
    else if (atomic_load(&c->connected))
        code = register_on(c, c->sock, r, error);
    else
        code = kvd__fail(error, KVD_NO, KVD_UNAVAILABLE, 0, "there is no connection to the broker");
    pthread_mutex_unlock(&c->control);
    return code;
}

int kvd__region_deregister(kvd_client *c, uint32_t number, kvd_error *error) {
    struct message m;
    int code = KVD_OK;
    pthread_mutex_lock(&c->control);
    if (atomic_load(&c->connected) && number != 0) {
        begin(&m, KVD_MSG_DEREGISTER, next_serial(c));
        put32(&m, number);
        put32(&m, 0);
        code = ask(c, c->sock, &m, KVD_MSG_DONE, HEADER + 8, kvd__now() + (int64_t)SLOW_REPLY_MS * 1000000, error);
        if (code == KVD_OK)
            drop_fds(&m);
    }
    pthread_mutex_unlock(&c->control);
    return code;
}

int kvd__wake(int fd) {
    uint64_t one = 1;
    ssize_t n;
    do
        n = write(fd, &one, sizeof one);
    while (n < 0 && errno == EINTR);
    return n == sizeof one ? 0 : -1;
}
