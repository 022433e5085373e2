"""Turns of gets and puts by the package kvd through a broker, and by redis-py through a redis-server.

usage: bench.py BROKER-SOCKET NAMESPACE REDIS-SOCKET

Each line "kvd|redis|count prepare|get|put BYTES ENTRIES SECONDS" is a turn. It answers with the median of a call, in
microseconds; "count" answers with the microseconds of a thousand rounds of another thread that counts meanwhile, which
is alone if BYTES is 0. The test of Go that runs it takes the turns, its own included, and prints the table.
"""

import statistics
import sys
import threading
import time

import redis

import kvd

MOST, ROOM = 64, 20 << 20


class Bench:
    """The three sides of a comparison, which take turns."""

    def __init__(self, broker: str, namespace: str, server: str) -> None:
        self.client = kvd.Client(broker, namespace=namespace)
        self.redis = redis.Redis(unix_socket_path=server)
        self.arena = memoryview(self.client.alloc(ROOM))
        self.heap = bytes(ROOM)
        self.keys = [f"bench:{i}" for i in range(MOST)]

    def prepare(self, size: int, entries: int) -> None:
        """Puts what will be got, at both."""
        for key in self.keys[:entries]:
            self.client.put(key, self.heap[:size])
            self.redis.set(key, self.heap[:size])

    def call(self, who: str, what: str, size: int, entries: int):  # type: ignore[no-untyped-def]
        """Gives the call that a turn repeats. A value from 1 MiB on is in the arena; a shorter one is made anew."""
        client, server, keys = self.client, self.redis, self.keys[:entries]
        key, place, value = keys[0], self.arena[:size], self.heap[:size]
        if who == "redis":
            if what == "put":
                return lambda: server.set(key, value)
            return (lambda: server.get(key)) if entries == 1 else (lambda: server.mget(keys))
        if what == "put":
            return lambda: client.put(key, place if size >= 1 << 20 else value)
        if entries > 1:
            return lambda: client.get_many(keys)
        return (lambda: client.get_into(key, place)) if size >= 1 << 20 else (lambda: client.get(key))

    def counted(self, size: int, seconds: float) -> float:
        """Gives the seconds of 1,000 rounds of a thread that counts, beside gets of so many bytes."""
        stop, counts = threading.Event(), [0]

        def count() -> None:
            while not stop.is_set():
                counts[0] += 1

        work = self.call("kvd", "get", size, 1) if size > 0 else (lambda: time.sleep(0.003))
        thread = threading.Thread(target=count)
        thread.start()
        try:
            before, began = counts[0], time.perf_counter()
            while time.perf_counter() < began + seconds or counts[0] < before + 1000:
                work()
            return (time.perf_counter() - began) / (counts[0] - before) * 1000
        finally:
            stop.set()
            thread.join()

    def turn(self, who: str, what: str, size: int, entries: int, seconds: float) -> float:
        """Gives seconds of one call, by the median of calls that take so long in all."""
        if what == "prepare":
            self.prepare(size, entries)
            return 0
        if who == "count":
            return self.counted(size, seconds)
        call, took = self.call(who, what, size, entries), []
        end = time.perf_counter() + seconds
        while len(took) < 3 or time.perf_counter() < end:
            began = time.perf_counter()
            call()
            took.append(time.perf_counter() - began)
        return statistics.median(took)


def main() -> None:
    bench = Bench(*sys.argv[1:4])
    for line in sys.stdin:
        who, what, size, entries, seconds = line.split()
        print(bench.turn(who, what, int(size), int(entries), float(seconds)) * 1e6, flush=True)


main()
