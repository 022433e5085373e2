"""A broker that does as a test says: a program of its own, with a map for the store.

    python3 fakebroker.py SOCKET

It speaks the ring of client/c/kvd_ring.h, and keys tell it to misbehave:

    hold:…     is answered only after somebody has put the key "release"
    stuck:…    likewise, and is not cancelled either
    lost:…     a write happens, and is answered with "unknown"
    CODE/…     is answered with that code, a number
    die:…      the broker exits, with the entry taken
    over:…     a view of it does not hold

Some say what it has seen: "held" is how many entries are held, "views" the views, "moves" the memory and offset of the last GETs and
PUTs, as lines of "op memory offset". "pins" has lines of "key milliseconds".
"""

import collections
import ctypes
import fcntl
import mmap
import os
import select
import socket
import struct
import sys
import time

MAGIC, DEPTH, SLOT, PAGE = 0x4B564442, 64, 1024, 4096
SQ_TAIL, SQ_HEAD, BROKER_SLEEPS, CQ_TAIL, CLIENT_SLEEPS, BROKER_CPU = (n // 4 for n in (64, 128, 192, 256, 384, 448))
GET, PUT, DELETE, EXISTS, TOUCH, INCR, SCAN, DELETE_PREFIX, GET_RANGE = range(1, 10)
VIEW, VIEW_RELEASE, PIN, UNPIN, CANCEL = range(10, 15)
WITHOUT_LENGTH = 1
REGION, PART = 16 << 20, 2 << 20
SUBMISSION = struct.Struct("<BBHIIIQQQQIIQ")
COMPLETION = struct.Struct("<IBBHQQQIIQQII")
MAX_VALUE = 64 << 20

OK, NOT_FOUND, CONDITION, TOO_LARGE, SHORT, WRONG, TIMEOUT, CANCELLED = range(8)
VIEW_EXPIRED, UNSUPPORTED = 16, 19

libc = ctypes.CDLL(None, use_errno=True)


ONE = struct.pack("=Q", 1)


def eventfd(flags):
    """Makes an eventfd, as os.eventfd does from Python 3.10 on."""
    fd = libc.eventfd(0, flags | os.O_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "eventfd")
    return fd


class Failure(Exception):
    """An answer that is not OK: outcome, code, length."""

    def __init__(self, code, outcome=1, length=0):
        super().__init__(code)
        self.code, self.outcome, self.length = code, outcome, length


Entry = collections.namedtuple("Entry", "op flags key tag memory offset length word ttl value_flags value")


class Store:
    """A map of key to value, version, flags and time of expiry in ms."""

    def __init__(self):
        self.records, self.pins = {}, {}
        self.version = 0

    def find(self, key):
        r = self.records.get(key)
        if r is not None and r[3] and r[3] <= time.time() * 1000:
            del self.records[key]
            r = None
        return r

    def put(self, key, value, flags, expires):
        self.version += 1
        self.records[key] = (value, self.version, flags, expires)
        return self.records[key]


class Queue:
    """A ring, as seen by the broker."""

    def __init__(self):
        size = PAGE + 2 * DEPTH * 64 + DEPTH * SLOT
        self.fd = os.memfd_create("ring", os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        self.seal()
        self.map = mmap.mmap(self.fd, size)
        self.words = memoryview(self.map).cast("I")
        self.sq, self.cq, self.slots = PAGE, PAGE + DEPTH * 64, PAGE + 2 * DEPTH * 64
        struct.pack_into("<IHHIIQQQQ", self.map, 0, MAGIC, 1, 0, DEPTH, 0, self.sq, self.cq, self.slots, size)
        self.words[BROKER_CPU] = 0xFFFFFFFE
        self.submit, self.complete = eventfd(os.O_NONBLOCK), eventfd(0)
        self.head = self.tail = 0

    def seal(self):
        if libc.fcntl(self.fd, 1033, 2 | 4 | 1) != 0:
            raise OSError(ctypes.get_errno(), "sealing")

    def take(self):
        """Gives the entries that are queued."""
        out = []
        while self.head != self.words[SQ_TAIL]:
            at = self.sq + (self.head % DEPTH) * 64
            op, flags, keys, tag, memory, _, offset, length, word, ttl, _, vflags, _ = SUBMISSION.unpack_from(self.map, at)
            slot = self.slots + (tag % DEPTH) * SLOT
            key = self.map[slot : slot + keys]
            value = self.map[slot + keys : slot + keys + length] if op == PUT and memory == 0 else b""
            out.append(Entry(op, flags, key, tag, memory, offset, length, word, ttl, vflags, value))
            self.head = (self.head + 1) & 0xFFFFFFFF
            self.words[SQ_HEAD] = self.head
        return out

    def answer(self, tag, outcome, code, length=0, version=0, expires=0, flags=0, slot=b"", view=(0, 0, 0)):
        """`view` is of a view: whether it has several parts, its region, and its offset there."""
        at = self.slots + (tag % DEPTH) * SLOT
        self.map[at : at + len(slot)] = slot
        at = self.cq + (self.tail % DEPTH) * 64
        COMPLETION.pack_into(self.map, at, tag, outcome, code, view[0], length, version, expires, 0, view[1], view[2],
                             0, flags, 0)  # fmt: skip
        self.tail = (self.tail + 1) & 0xFFFFFFFF
        self.words[CQ_TAIL] = self.tail
        if self.words[CLIENT_SLEEPS]:
            self.words[CLIENT_SLEEPS] = 0
        os.write(self.complete, ONE)  # always: there are no fences here


class Connection:
    """A client: its socket, queues and memory."""

    def __init__(self, broker, sock):
        self.broker, self.sock = broker, sock
        self.queues, self.memory, self.held = [], {}, []
        self.next, self.region, self.views = 2, None, {}

    def send(self, kind, serial, body=b"", fds=()):
        packet = struct.pack("<HHIII", kind, 0, 16 + len(body), serial, 0) + body
        socket.send_fds(self.sock, [packet], list(fds))

    def receive(self):
        """Handles a message; False: the client is gone."""
        packet, fds, _, _ = socket.recv_fds(self.sock, 4096, 8)
        if not packet:
            return False
        kind, _, _, serial, _ = struct.unpack_from("<HHIII", packet)
        body = packet[16:]
        if kind == 1:
            arena = struct.unpack_from("<Q", body, 16)[0]
            if arena:
                self.memory[1] = memoryview(mmap.mmap(fds[1], arena))
            q = self.add_queue()
            welcome = struct.pack("<IHHIIQIIQQHHI", MAGIC, 1, 0, DEPTH, 1 if arena else 0, MAX_VALUE, 1024, 1024,
                                  1 << 30, 0, 4, 0, 0) + b"fake"  # fmt: skip
            self.send(64, serial, welcome, [self.broker.pidfd, q.fd, q.submit, q.complete])
        elif kind == 2:
            q = self.add_queue()
            self.send(65, serial, struct.pack("<II", len(self.queues) - 1, 0), [q.fd, q.submit, q.complete])
        elif kind == 3:
            offset, length = struct.unpack_from("<QQ", body)
            self.memory[self.next] = memoryview(mmap.mmap(fds[0], length, offset=offset))
            self.send(66, serial, struct.pack("<II", self.next, 0))
            self.next += 1
        elif kind == 4:
            number = struct.unpack_from("<I", body)[0]
            del self.memory[number]
            self.send(66, serial, struct.pack("<II", number, 0))
        for fd in fds:
            os.close(fd)
        return kind != 5

    def add_queue(self):
        q = Queue()
        self.queues.append(q)
        self.broker.poll.register(q.submit, select.POLLIN)
        return q

    def close(self):
        for q in self.queues:
            self.broker.poll.unregister(q.submit)
            os.close(q.submit)
        self.sock.close()

    def look(self):
        """Carries out what is queued."""
        for q in self.queues:
            q.words[BROKER_SLEEPS] = 1
            try:
                os.read(q.submit, 8)
            except BlockingIOError:
                pass
            for e in q.take():
                self.act(q, e)

    def act(self, q, e):
        if e.op == CANCEL:
            for held in [h for h in self.held if h[0] is q and h[1].tag == e.word]:
                if held[1].key.startswith(b"stuck:"):
                    continue
                self.held.remove(held)
                q.answer(held[1].tag, 1, CANCELLED)
            q.answer(e.tag, 0, OK)
            return
        if e.key.startswith(b"die:"):
            os._exit(0)
        if e.key == b"held":
            n = sum(len(c.held) for c in self.broker.connections.values())
            self.broker.store.put(e.key, b"%d" % n, 0, 0)
        elif e.key == b"views":
            n = sum(len(c.views) for c in self.broker.connections.values())
            self.broker.store.put(e.key, b"%d" % n, 0, 0)
        elif e.key == b"moves":
            self.broker.store.put(e.key, b"\n".join(self.broker.moves), 0, 0)
        elif e.key == b"pins":
            pins = [b"%s %d" % pin for pin in sorted(self.broker.store.pins.items())]
            self.broker.store.put(e.key, b"\n".join(pins), 0, 0)
        elif e.op in (GET, PUT):
            self.broker.moves.append(b"%d %d %d" % (e.op, e.memory, e.offset))
        if e.key.startswith((b"hold:", b"stuck:")):
            self.held.append((q, e))
            return
        self.carry_out(q, e)
        if e.key == b"release":
            for c in self.broker.connections.values():
                held, c.held = c.held, []
                for h in held:
                    c.carry_out(*h)

    def carry_out(self, q, e):
        try:
            head, slash, _ = e.key.partition(b"/")
            if slash and head.isdigit():
                raise Failure(int(head))
            value, record = self.do(e)
            if e.key.startswith(b"lost:") and e.op not in (GET, GET_RANGE, EXISTS):
                raise Failure(TIMEOUT, 2)
            slot, view = b"", (0, 0, 0)
            if e.op == VIEW:
                slot, view = self.show(e, value)
            if e.op in (GET, GET_RANGE, SCAN):
                if e.memory:
                    self.memory[e.memory][e.offset : e.offset + len(value)] = value
                else:
                    slot = value
            elif e.op == INCR:
                slot = value
            length = len(record[0]) if e.op == EXISTS and e.word != WITHOUT_LENGTH else len(value)
            q.answer(e.tag, 0, OK, length, record[1], record[3], record[2], slot, view)
        except Failure as f:
            text = b"" if f.code == SHORT else b"as the test wants it"
            q.answer(e.tag, f.outcome, f.code, f.length or len(text), slot=text)

    def show(self, e, value):
        """Gives what the slot and the completion say of a view."""
        if self.region is None:
            fd = os.memfd_create("kvd-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, REGION)
            self.region = mmap.mmap(fd, REGION)
            fcntl.fcntl(fd, 1033, 2)  # F_ADD_SEALS, F_SEAL_SHRINK
            self.send(68, 0, struct.pack("<IIQQ", 1, 0, REGION, 0), [fd])
            os.close(fd)
        self.region[64 : 64 + len(value)] = value
        self.views[e.word] = e.key
        parts = [(64 + i, min(PART, len(value) - i)) for i in range(0, len(value), PART)]
        slot = b"".join(struct.pack("<QQ", *p) for p in parts)
        return (slot, (1, 1, 64)) if len(parts) > 1 else (b"", (0, 1, 64))

    def do(self, e):
        """Gives the bytes of the answer, and value, version, flags and expiry of the record."""
        store, r = self.broker.store, self.broker.store.find(e.key)
        expires = int(time.time() * 1000) + e.ttl if e.ttl else 0
        if e.op == PUT or e.op == DELETE:
            if e.flags & 1 and r or e.flags & 2 and not r or e.flags & 4 and r and r[1] != e.word:
                raise Failure(CONDITION)
            if e.op == DELETE or e.flags & 4:
                if not r:
                    raise Failure(NOT_FOUND)
            if e.op == DELETE:
                return b"", store.records.pop(e.key)
            value = bytes(self.memory[e.memory][e.offset : e.offset + e.length]) if e.memory else e.value
            return b"", store.put(e.key, value, e.value_flags, expires)
        if e.op == INCR:
            delta = e.word - (1 << 64) if e.word >> 63 else e.word
            try:
                value = b"%d" % (int(r[0] if r else b"0") + delta)
            except ValueError:
                raise Failure(WRONG) from None
            return value, store.put(e.key, value, 0, r[3] if r else 0)
        if e.op == SCAN:
            found = sorted(k for k in store.records if k.startswith(e.key))
            out = b""
            for i, k in enumerate(found[e.word :], e.word):
                entry = struct.pack("<H", len(k)) + k
                if len(out) + len(entry) > min(e.length, 4096):
                    return out, (None, i, 0, 0)
                out += entry
            return out, (None, 0, 0, 0)
        if e.op == VIEW_RELEASE:
            key = self.views.pop(e.word, b"over:")
            if key.startswith(b"over:"):
                raise Failure(VIEW_EXPIRED)
            return b"", (None, 0, 0, 0)
        if e.op == DELETE_PREFIX:
            raise Failure(UNSUPPORTED)
        if not r:
            raise Failure(NOT_FOUND)
        if e.op == EXISTS:
            return b"", r
        if e.op == PIN:
            store.pins[e.key] = e.ttl
            return b"", r
        if e.op == UNPIN:
            store.pins.pop(e.key, None)
            return b"", r
        if e.op == TOUCH:
            store.records[e.key] = r[:3] + (expires,)
            return b"", store.records[e.key]
        if e.op == GET_RANGE:
            return r[0][e.word : e.word + e.length], r
        if e.op == VIEW:
            if len(r[0]) < 8192:
                raise Failure(UNSUPPORTED)
            return r[0], r
        if e.op != GET:
            raise Failure(UNSUPPORTED)
        capacity = e.length if e.memory else min(e.length, SLOT)
        if len(r[0]) > capacity:
            raise Failure(SHORT, length=len(r[0]))
        return r[0], r


class Broker:
    """The connections, which share a store."""

    def __init__(self, path):
        self.pidfd = os.pidfd_open(os.getpid())
        self.store, self.connections = Store(), {}
        self.moves = collections.deque(maxlen=32)
        self.poll = select.poll()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(path)
        self.listener.listen()
        self.poll.register(self.listener, select.POLLIN)

    def run(self):
        while True:
            for fd, _ in self.poll.poll(5):  # ms; a bell may be missed, as Python has no fences
                if fd == self.listener.fileno():
                    sock, _ = self.listener.accept()
                    self.connections[sock.fileno()] = Connection(self, sock)
                    self.poll.register(sock, select.POLLIN)
                elif fd in self.connections:
                    self.serve(fd)
            for c in list(self.connections.values()):
                c.look()

    def serve(self, fd):
        c = self.connections[fd]
        try:
            alive = c.receive()
        except OSError:
            alive = False
        if not alive:
            del self.connections[fd]
            self.poll.unregister(fd)
            c.close()


if __name__ == "__main__":
    Broker(sys.argv[1]).run()
