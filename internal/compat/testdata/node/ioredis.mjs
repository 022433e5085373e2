// node ioredis.mjs PORT
import Redis from 'ioredis';
import { assert, bytes, check, finish, large, restart, until } from './check.mjs';

const port = Number(process.argv[2]);
const r = new Redis({ host: '127.0.0.1', port, retryStrategy: () => 50 });
r.on('error', () => {}); // of lost connections, which it mends itself
await r.flushdb();

await check('set get del', async () => {
  assert.equal(await r.set('k', 'v'), 'OK');
  assert.equal(await r.get('k'), 'v');
  assert.equal(await r.set('k', 'w', 'NX'), null);
  assert.equal(await r.set('k', 'w', 'XX', 'GET'), 'v');
  assert.equal(await r.exists('k', 'absent'), 1);
  assert.equal(await r.type('k'), 'string');
  assert.equal(await r.del('k', 'absent'), 1);
  assert.equal(await r.get('k'), null);
});

await check('expiry', async () => {
  await r.set('e', 'v', 'EX', 100);
  const ttl = await r.ttl('e');
  assert.ok(ttl > 98 && ttl <= 100, `ttl ${ttl}`);
  assert.equal(await r.persist('e'), 1);
  assert.equal(await r.ttl('e'), -1);
  assert.equal(await r.pexpire('e', 40), 1);
  await until(async () => assert.equal(await r.get('e'), null));
  assert.equal(await r.ttl('e'), -2);
});

await check('incr', async () => {
  assert.equal(await r.incr('n'), 1);
  assert.equal(await r.incrby('n', 41), 42);
  assert.equal(await r.decr('n'), 41);
  assert.equal(await r.incrbyfloat('n', 0.5), '41.5');
  await Promise.all(Array.from({ length: 200 }, () => r.incr('many')));
  assert.equal(await r.get('many'), '200');
});

await check('mset mget', async () => {
  await r.mset({ m1: 'a', m2: 'b' });
  assert.deepEqual(await r.mget('m1', 'absent', 'm2'), ['a', null, 'b']);
});

await check('strings', async () => {
  assert.equal(await r.append('s', 'hello'), 5);
  assert.equal(await r.setrange('s', 5, ' you'), 9);
  assert.equal(await r.getrange('s', 0, -5), 'hello');
  assert.equal(await r.strlen('s'), 9);
  assert.equal(await r.getset('s', 'x'), 'hello you');
  assert.equal(await r.getdel('s'), 'x');
});

await check('pipeline', async () => {
  const p = r.pipeline();
  for (let i = 0; i < 1000; i++) p.set(`p${i}`, `v${i}`);
  for (let i = 0; i < 1000; i++) p.get(`p${i}`);
  const out = await p.exec();
  assert.equal(out.length, 2000);
  out.forEach(([err, v], i) => {
    assert.equal(err, null);
    assert.equal(v, i < 1000 ? 'OK' : `v${i - 1000}`);
  });
});

await check('automatic pipelining', async () => {
  const a = new Redis({ host: '127.0.0.1', port, enableAutoPipelining: true });
  await Promise.all(Array.from({ length: 200 }, (_, i) => a.set(`a${i}`, i)));
  const got = await Promise.all(Array.from({ length: 200 }, (_, i) => a.get(`a${i}`)));
  got.forEach((v, i) => assert.equal(v, String(i)));
  await a.quit();
});

await check('transaction on one key', async () => {
  const out = await r.multi().set('t', '1').incr('t').expire('t', 100).get('t').exec();
  assert.deepEqual(out, [[null, 'OK'], [null, 2], [null, 1], [null, '2']]);
  await r.multi({ pipeline: false });
  await r.set('t', 'queued');
  await r.discard();
  assert.equal(await r.get('t'), '2');
});

await check('watch', async () => {
  const other = r.duplicate();
  await r.watch('t');
  await other.set('t', 'theirs');
  assert.equal(await r.multi().set('t', 'mine').exec(), null);
  assert.equal(await r.get('t'), 'theirs');
  await other.quit();
});

await check('scan', async () => {
  const seen = new Set();
  for await (const keys of r.scanStream({ match: 'p*', count: 100 })) keys.forEach((k) => seen.add(k));
  assert.equal(seen.size, 1000);
});

await check('large value', async () => {
  await r.set('large', large);
  assert.ok((await r.getBuffer('large')).equals(large));
});

await check('binary key and value', async () => {
  await r.set(bytes, bytes);
  assert.ok((await r.getBuffer(bytes)).equals(bytes));
  const [, keys] = await r.scanBuffer(0, 'COUNT', 10000);
  assert.ok(keys.some((k) => k.equals(bytes)));
});

await check('errors', async () => {
  await r.set('word', 'abc');
  await assert.rejects(r.incr('word'), { name: 'ReplyError', message: 'ERR value is not an integer or out of range' });
  await assert.rejects(r.call('get'), { message: "ERR wrong number of arguments for 'get' command" });
});

await check('select', async () => {
  const other = new Redis({ host: '127.0.0.1', port, db: 1 });
  await other.flushdb();
  await r.set('where', 'zero');
  assert.equal(await other.get('where'), null);
  await other.set('where', 'one');
  assert.equal(await r.get('where'), 'zero');
  await other.quit();
});

await check('publish/subscribe', async () => {
  const sub = r.duplicate();
  const heard = [];
  sub.on('message', (channel, message) => heard.push(`${channel} ${message}`));
  sub.on('pmessage', (pattern, channel, message) => heard.push(`${pattern} ${channel} ${message}`));
  assert.equal(await sub.subscribe('ch', 'other'), 2);
  assert.equal(await sub.psubscribe('c*'), 3);
  assert.equal(await r.publish('ch', 'hello'), 2);
  await until(async () => assert.deepEqual(heard, ['ch hello', 'c* ch hello']));
  await assert.rejects(sub.get('k'), /subscriber mode/);
  assert.equal(await sub.unsubscribe('ch', 'other'), 1);
  await sub.quit();
});

await check('reconnect', async () => {
  await restart();
  await until(() => r.set('again', 'yes'));
  assert.equal(await r.get('again'), 'yes');
});

finish();
