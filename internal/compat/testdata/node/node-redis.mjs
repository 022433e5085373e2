// node node-redis.mjs PORT, with RESP2 and then with RESP3.
import { createClient, RESP_TYPES } from 'redis';
import { assert, bytes, check, finish, large, restart, until } from './check.mjs';

const url = `redis://127.0.0.1:${process.argv[2]}`;

for (const RESP of [2, 3]) {
  const options = { url, RESP, socket: { reconnectStrategy: () => 50 } };
  const c = createClient(options);
  c.on('error', () => {}); // of lost connections, which it mends itself
  await c.connect();
  await c.flushDb();
  const on = (name, f) => check(`RESP${RESP} ${name}`, f);
  const raw = c.withTypeMapping({ [RESP_TYPES.BLOB_STRING]: Buffer });

  await on('set get del', async () => {
    assert.equal(await c.set('k', 'v'), 'OK');
    assert.equal(await c.get('k'), 'v');
    assert.equal(await c.set('k', 'w', { condition: 'NX' }), null);
    assert.equal(await c.set('k', 'w', { condition: 'XX', GET: true }), 'v');
    assert.equal(await c.exists(['k', 'absent']), 1);
    assert.equal(await c.del(['k', 'absent']), 1);
    assert.equal(await c.get('k'), null);
  });

  await on('expiry', async () => {
    await c.set('e', 'v', { expiration: { type: 'EX', value: 100 } });
    const ttl = await c.ttl('e');
    assert.ok(ttl > 98 && ttl <= 100, `ttl ${ttl}`);
    assert.equal(await c.getEx('e', { type: 'PX', value: 40 }), 'v');
    await until(async () => assert.equal(await c.get('e'), null));
    assert.equal(await c.pTTL('e'), -2);
  });

  await on('incr', async () => {
    assert.equal(await c.incr('n'), 1);
    assert.equal(await c.incrBy('n', 41), 42);
    assert.equal(await c.decrBy('n', 2), 40);
    assert.equal(await c.incrByFloat('n', 0.5), '40.5');
  });

  await on('mset mget', async () => {
    await c.mSet({ m1: 'a', m2: 'b' });
    assert.deepEqual(await c.mGet(['m1', 'absent', 'm2']), ['a', null, 'b']);
  });

  // What one tick sends goes out together.
  await on('pipeline', async () => {
    const all = [];
    for (let i = 0; i < 1000; i++) all.push(c.set(`p${i}`, `v${i}`));
    for (let i = 0; i < 1000; i++) all.push(c.get(`p${i}`));
    (await Promise.all(all)).forEach((v, i) => assert.equal(v, i < 1000 ? 'OK' : `v${i - 1000}`));
  });

  await on('transaction on one key', async () => {
    assert.deepEqual(await c.multi().set('t', '1').incr('t').get('t').exec(), ['OK', 2, '2']);
  });

  await on('watch', async () => {
    const other = await c.duplicate().connect();
    await c.watch('t');
    await other.set('t', 'theirs');
    await assert.rejects(c.multi().set('t', 'mine').exec(), { name: 'Error', message: /watched keys/ });
    assert.equal(await c.get('t'), 'theirs');
    await other.close();
  });

  await on('scan', async () => {
    const seen = new Set();
    for await (const keys of c.scanIterator({ MATCH: 'p*', COUNT: 100 })) keys.forEach((k) => seen.add(k));
    assert.equal(seen.size, 1000);
  });

  await on('large value', async () => {
    await c.set('large', large);
    assert.ok((await raw.get('large')).equals(large));
  });

  await on('binary key and value', async () => {
    await c.set(bytes, bytes);
    assert.ok((await raw.get(bytes)).equals(bytes));
  });

  await on('errors', async () => {
    await c.set('word', 'abc');
    await assert.rejects(c.incr('word'), { message: 'ERR value is not an integer or out of range' });
    await assert.rejects(c.sendCommand(['GET']), { message: "ERR wrong number of arguments for 'get' command" });
  });

  await on('select', async () => {
    const other = await createClient({ ...options, database: 1 }).connect();
    await other.flushDb();
    await c.set('where', 'zero');
    assert.equal(await other.get('where'), null);
    await other.close();
  });

  await on('reconnect', async () => {
    await restart();
    await until(() => c.set('again', 'yes'));
    assert.equal(await c.get('again'), 'yes');
  });
  c.destroy();
}

finish();
