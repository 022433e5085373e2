"""An example: a small transformer whose KV cache lives in a kvd store, so that processes share prefixes of prompts.

It starts three processes after each other. The first computes a prompt and stores its KV cache, block by block. The
others compute another prompt that begins alike: one without the store, one with it. It prints how long each took to its
first token. The weights are random, and all processes have the same. Needs numpy, and a store: `kvd dev`.
"""

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import time

import numpy

BLOCK = 64  # tokens
LAYERS, WIDTH, HEADS, VOCABULARY = 4, 256, 8, 1000
SHAPE = (LAYERS, 2, BLOCK, WIDTH)  # of a block's keys and values
BYTES = LAYERS * 2 * BLOCK * WIDTH * 4
MODEL = f"example:{LAYERS}x{WIDTH}x{HEADS}:float32:{BLOCK}"


class Model:
    """A transformer with random weights."""

    def __init__(self, seed=1):
        random = numpy.random.default_rng(seed)

        def matrix(*shape):
            return (random.standard_normal(shape) / shape[-2] ** 0.5).astype(numpy.float32)
        self.embedding = matrix(VOCABULARY, WIDTH) * VOCABULARY ** 0.5
        self.layers = [(matrix(WIDTH, 3 * WIDTH), matrix(WIDTH, WIDTH),
                        matrix(WIDTH, 4 * WIDTH), matrix(4 * WIDTH, WIDTH)) for _ in range(LAYERS)]

    def block(self, tokens, past):
        """Computes a block behind its past, which is blocks of shape SHAPE.

        It returns the block's keys and values, and the logits behind its last token."""
        x = self.embedding[tokens]
        n = len(tokens)
        made = numpy.zeros(SHAPE, numpy.float32)
        mask = numpy.triu(numpy.full((n, n), -numpy.inf, numpy.float32), 1)
        for i, (qkv, out, up, down) in enumerate(self.layers):
            q, k, v = numpy.split(normal(x) @ qkv, 3, axis=1)
            made[i, 0, :n], made[i, 1, :n] = k, v
            keys = numpy.concatenate([b[i, 0] for b in past] + [k])
            values = numpy.concatenate([b[i, 1] for b in past] + [v])
            q, keys, values = (a.reshape(len(a), HEADS, -1).transpose(1, 0, 2) for a in (q, keys, values))
            scores = q @ keys.transpose(0, 2, 1) / (WIDTH / HEADS) ** 0.5
            scores[:, :, -n:] += mask
            weights = numpy.exp(scores - scores.max(axis=2, keepdims=True))
            weights /= weights.sum(axis=2, keepdims=True)
            x = x + (weights @ values).transpose(1, 0, 2).reshape(n, WIDTH) @ out
            x = x + numpy.maximum(normal(x) @ up, 0) @ down
        return made, normal(x[-1:]) @ self.embedding.T


def normal(x):
    """Scales rows to a length that the next layer expects."""
    return x / (numpy.sqrt((x * x).mean(axis=1, keepdims=True)) + 1e-6)


class Broker:
    """The store by way of the broker: values land in shared memory of this process."""

    def __init__(self, path):
        import kvd
        self.client = kvd.Client(path or None)

    def load(self, keys):
        """Returns blocks from the first on, up to the first that is not there."""
        n = self.client.exists_prefix(keys)
        if n == 0:
            return []
        blocks = self.client.alloc((n,) + SHAPE, "float32")
        results = self.client.get_many(keys[:n], [bytes_of(block) for block in blocks])
        return list(blocks[:leading(bool(r) and r.length == BYTES for r in results)])

    def save(self, items):
        """Stores blocks, and returns how many are certain to be stored."""
        return sum(bool(r) for r in self.client.put_many([(key, bytes_of(block)) for key, block in items]))


class Gateway:
    """The store by way of a gateway, in RESP."""

    def __init__(self, address):
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=10)
        self.replies = self.socket.makefile("rb")

    def send(self, *parts):
        self.socket.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts))

    def line(self):
        line = self.replies.readline()
        if not line.endswith(b"\r\n"):
            raise EOFError("the gateway hung up")
        return line[:-2]

    def load(self, keys):
        """Returns blocks from the first on, up to the first that is not there."""
        blocks = []
        for key in keys:
            self.send(b"GET", key)
            line = self.line()
            if line[:1] != b"$" or line == b"$-1":
                break
            value = self.replies.read(int(line[1:]))
            if self.replies.read(2) != b"\r\n":
                raise EOFError("the gateway hung up")
            if len(value) != BYTES:
                break
            blocks.append(numpy.frombuffer(value, numpy.float32).reshape(SHAPE))
        return blocks

    def save(self, items):
        """Stores blocks, and returns how many are certain to be stored."""
        stored = 0
        for key, block in items:
            self.send(b"SET", key, block.tobytes())
            stored += self.line() == b"+OK"
        return stored


def bytes_of(block):
    """Returns a block as a row of bytes, without a copy."""
    return block.reshape(-1).view("uint8")


def leading(good):
    """Counts what is true from the first on."""
    n = 0
    for ok in good:
        if not ok:
            break
        n += 1
    return n


def keys_of(tokens):
    """Returns a key for each whole block of a prompt. It depends on all tokens up to the block's end."""
    keys, digest = [], hashlib.sha256(MODEL.encode()).digest()
    for at in range(0, len(tokens) - BLOCK + 1, BLOCK):
        digest = hashlib.sha256(digest + numpy.asarray(tokens[at:at + BLOCK], ">u4").tobytes()).digest()
        keys.append(b"kvcache:" + digest)
    return keys


def first_token(model, tokens, store):
    """Computes the token behind a prompt, with what the store has. The last token is always computed."""
    began = time.monotonic()
    keys = keys_of(tokens[:-1]) if store else []
    try:
        past = store.load(keys) if store else []
    except Exception as err:  # whatever it is, the cache is only a cache
        print(f"the store failed, so all is computed: {err}", file=sys.stderr)
        past, store = [], None
    found, logits = len(past), None
    for at in range(found * BLOCK, len(tokens), BLOCK):
        made, logits = model.block(tokens[at:at + BLOCK], past)
        past.append(made)
    result = {"token": int(logits.argmax()), "prompt": len(tokens), "found": found * BLOCK,
              "seconds": time.monotonic() - began, "stored": 0}
    if store:  # behind the first token
        fresh = list(zip(keys, past))[found:]
        result["stored"] = store.save(fresh) * BLOCK if fresh else 0
    return result


def prompt(prefix, suffix, seed):
    """Returns a prompt: a prefix that all have, and a suffix of its own."""
    shared = numpy.random.default_rng(1000).integers(0, VOCABULARY, prefix)
    own = numpy.random.default_rng(seed).integers(0, VOCABULARY, suffix)
    return [int(t) for t in numpy.concatenate([shared, own])]


def connect(options):
    """Returns the store: through the broker if there is one, else through a gateway."""
    if options.gateway is None:
        path = options.broker or os.environ.get("KVD_BROKER", "/run/kvd/broker.sock")
        try:
            return Broker(path)
        except Exception as err:
            if options.broker:
                raise
            print(f"no broker, so it goes through a gateway: {err}", file=sys.stderr)
    return Gateway(options.gateway or "127.0.0.1:6379")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--broker", help="the broker's socket")
    parser.add_argument("--gateway", help="host:port of a gateway, to use instead of a broker")
    parser.add_argument("--prefix", type=int, default=512, help="tokens that the prompts share")
    parser.add_argument("--suffix", type=int, default=32, help="tokens that each prompt has to itself")
    parser.add_argument("--process", nargs=2, metavar=("SEED", "STORE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        seed, with_store = options.process
        model = Model()
        model.block([0] * BLOCK, [])  # so that no process pays for the first use of numpy's libraries
        store = connect(options) if with_store == "with" else None
        print(json.dumps(first_token(model, prompt(options.prefix, options.suffix, int(seed)), store)))
        return
    results = []
    print("process  store    prompt  from the store  stored  first token")
    for number, (seed, with_store) in enumerate(((2, "with"), (3, "without"), (3, "with")), 1):
        out = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--process", str(seed), with_store],
                             stdout=subprocess.PIPE, check=True)
        r = json.loads(out.stdout)
        results.append(r)
        print(f"{number:7}  {with_store:7}  {r['prompt']:6}  {r['found']:14}  {r['stored']:6}  "
              f"{r['seconds'] * 1000:8.0f} ms", flush=True)
    if results[1]["token"] != results[2]["token"]:
        sys.exit("the token differs with the store")
    print(f"the same token; {results[1]['seconds'] / results[2]['seconds']:.1f} times as fast with the store")


if __name__ == "__main__":
    main()
