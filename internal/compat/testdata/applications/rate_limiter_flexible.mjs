// node rate_limiter_flexible.mjs REDIS MEMCACHED DB: rate-limiter-flexible in Redis.
import Redis from 'ioredis';
import { BurstyRateLimiter, RateLimiterRedis } from 'rate-limiter-flexible';
import { assert, check, finish, version } from './check.mjs';

const [port, , db] = process.argv.slice(2).map(Number);
version('rate-limiter-flexible');
const storeClient = new Redis({ port, db, enableOfflineQueue: false });
await new Promise((done) => storeClient.once('ready', done));

// refused returns what a promise that must be refused was refused with.
async function refused(p) {
  const got = await p.then(() => null, (err) => err);
  assert.ok(got !== null, 'not refused');
  if (got instanceof Error) throw got;
  return got;
}

await check('consume until there is nothing left', async () => {
  const r = new RateLimiterRedis({ storeClient, points: 5, duration: 3600, keyPrefix: 'rlf1' });
  assert.equal((await r.consume('me', 2)).remainingPoints, 3);
  assert.equal((await r.consume('me', 3)).remainingPoints, 0);
  const no = await refused(r.consume('me'));
  assert.equal(no.consumedPoints, 6);
  assert.ok(no.msBeforeNext > 3_590_000, `${no.msBeforeNext}`);
});

await check('block, get, penalty, reward, delete', async () => {
  const r = new RateLimiterRedis({ storeClient, points: 5, duration: 3600, blockDuration: 600, keyPrefix: 'rlf2' });
  assert.equal(await r.get('me'), null);
  assert.equal((await r.penalty('me', 3)).consumedPoints, 3);
  assert.equal((await r.reward('me', 2)).consumedPoints, 1);
  assert.equal((await r.get('me')).remainingPoints, 4);
  await r.block('me', 100);
  assert.ok((await refused(r.consume('me'))).msBeforeNext > 90_000);
  assert.equal(await r.delete('me'), true);
  assert.equal((await r.consume('me')).consumedPoints, 1);
});

await check('of many at once, none too many', async () => {
  const r = new RateLimiterRedis({ storeClient, points: 20, duration: 3600, keyPrefix: 'rlf3' });
  const got = await Promise.allSettled(Array.from({ length: 50 }, () => r.consume('me')));
  const error = got.find((x) => x.reason instanceof Error);
  if (error) throw error.reason;
  assert.equal(got.filter((x) => x.status === 'fulfilled').length, 20);
});

await check('without a window that begins anew', async () => {
  const r = new RateLimiterRedis({ storeClient, points: 2, duration: 0, keyPrefix: 'rlf4' });
  assert.equal((await r.consume('me')).msBeforeNext, -1);
  assert.equal((await r.consume('me')).remainingPoints, 0);
  await refused(r.consume('me'));
});

await check('bursts', async () => {
  const b = new BurstyRateLimiter(
    new RateLimiterRedis({ storeClient, points: 1, duration: 3600, keyPrefix: 'rlf5' }),
    new RateLimiterRedis({ storeClient, points: 2, duration: 3600, keyPrefix: 'rlf6' }),
  );
  for (let i = 0; i < 3; i++) await b.consume('me');
  await refused(b.consume('me'));
});

finish();
