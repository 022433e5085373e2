// node express_rate_limit.mjs REDIS MEMCACHED DB: express-rate-limit with its store in Redis, for both of Node's clients.
import express from 'express';
import { rateLimit } from 'express-rate-limit';
import Redis from 'ioredis';
import { RedisStore } from 'rate-limit-redis';
import { createClient } from 'redis';
import { browser, listen } from './browse.mjs';
import { assert, check, finish, version } from './check.mjs';

const [port, , db] = process.argv.slice(2).map(Number);
version('rate-limit-redis');
process.on('unhandledRejection', () => {}); // of scripts that are loaded before anybody asks

const node = createClient({ socket: { port }, database: db });
await node.connect();
const io = new Redis({ port, db });

for (const [name, sendCommand] of [
  ['node-redis', (...args) => node.sendCommand(args)],
  ['ioredis', (command, ...args) => io.call(command, ...args)],
]) {
  await check(`limit with ${name}`, async () => {
    const store = new RedisStore({ sendCommand, prefix: `rl:${name}:` });
    const app = express();
    app.use(rateLimit({ windowMs: 3_600_000, limit: 3, standardHeaders: 'draft-6', legacyHeaders: false, store, validate: false }));
    app.get('/', (req, res) => res.send('hello'));
    app.use((err, req, res, next) => res.status(500).send(err.message));
    const a = browser(await listen(app));
    const got = [];
    for (let i = 0; i < 5; i++) got.push(await a('/'));
    assert.deepEqual(got.map((r) => r.status), [200, 200, 200, 429, 429]);
    assert.deepEqual(got.map((r) => r.headers.get('ratelimit-remaining')), ['2', '1', '0', '0', '0']);
  });
  await check(`store with ${name}`, async () => {
    const store = new RedisStore({ sendCommand, prefix: `rl2:${name}:` });
    store.init({ windowMs: 3_600_000 });
    assert.equal((await store.increment('k')).totalHits, 1);
    assert.equal((await store.increment('k')).totalHits, 2);
    await store.decrement('k');
    const got = await store.get('k');
    assert.equal(got.totalHits, 1);
    assert.ok(got.resetTime > new Date());
    await store.resetKey('k');
    assert.equal((await store.increment('k')).totalHits, 1);
  });
}

finish();
