// node ioredis_multi.mjs REDIS MEMCACHED DB: ioredis with MULTI over several keys, scripts as commands, and Pub/Sub.
import Redis from 'ioredis';
import { assert, check, finish, version } from './check.mjs';

const [port, , db] = process.argv.slice(2).map(Number);
version('ioredis');
const r = new Redis({ port, db, keyPrefix: 'ioredis:' });
await r.del('a', 'b', 'n');

await check('MULTI over several keys', async () => {
  assert.deepEqual(await r.multi().set('a', 1).incr('a').set('b', 2).mget('a', 'b').exec(), [[null, 'OK'], [null, 2], [null, 'OK'], [null, ['2', '2']]]);
});

await check('MULTI with a failing command', async () => {
  const got = await r.multi().set('a', 'x').incr('a').set('b', 'y').exec();
  assert.equal(got[1][0].message, 'ERR value is not an integer or out of range');
  assert.deepEqual(await r.mget('a', 'b'), ['x', 'y']);
});

await check('WATCH of several keys', async () => {
  const other = r.duplicate();
  await r.watch('a', 'b');
  await other.set('b', 'theirs');
  assert.equal(await r.multi().set('a', 'mine').exec(), null);
  assert.equal(await r.get('a'), 'x');
  await other.quit();
});

await check('defineCommand', async () => {
  r.defineCommand('limit', {
    numberOfKeys: 1,
    lua: `local n = redis.call('INCR', KEYS[1]) if n == 1 then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end return n`,
  });
  assert.deepEqual([await r.limit('n', 100_000), await r.limit('n', 100_000)], [1, 2]);
  assert.ok((await r.pttl('n')) > 90_000);
});

await check('Pub/Sub', async () => {
  const sub = new Redis({ port, db });
  await sub.subscribe('ioredis-news');
  const heard = new Promise((done) => sub.once('message', (channel, message) => done([channel, message])));
  assert.equal(await r.publish('ioredis-news', 'hello'), 1);
  assert.deepEqual(await heard, ['ioredis-news', 'hello']);
  await sub.quit();
});

finish();
