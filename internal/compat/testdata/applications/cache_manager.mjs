// node cache_manager.mjs REDIS MEMCACHED DB: cache-manager with Keyv's store in Redis.
import { createKeyv } from '@keyv/redis';
import { createCache } from 'cache-manager';
import { assert, check, finish, version } from './check.mjs';

const [port, , db] = process.argv.slice(2).map(Number);
version('cache-manager');
const cache = createCache({ stores: [createKeyv(`redis://127.0.0.1:${port}/${db}`, { namespace: 'cache-manager' })], ttl: 600_000 });

await check('set get del', async () => {
  await cache.set('foo', { a: 1 });
  assert.deepEqual(await cache.get('foo'), { a: 1 });
  await cache.del('foo');
  assert.equal(await cache.get('foo'), undefined);
});

await check('mset mget mdel', async () => {
  await cache.mset([{ key: 'm1', value: 1 }, { key: 'm2', value: 'two', ttl: 100_000 }]);
  assert.deepEqual(await cache.mget(['m1', 'absent', 'm2']), [1, undefined, 'two']);
  await cache.mdel(['m1', 'm2']);
  assert.deepEqual(await cache.mget(['m1', 'm2']), [undefined, undefined]);
});

await check('ttl', async () => {
  await cache.set('t', 1, 100_000);
  const at = await cache.ttl('t');
  assert.ok(at > Date.now() + 90_000 && at <= Date.now() + 100_000, `${at}`);
});

await check('wrap', async () => {
  await cache.del('w');
  let calls = 0;
  const made = () => cache.wrap('w', async () => ++calls);
  assert.deepEqual([await made(), await made()], [1, 1]);
  await cache.del('shared');
  assert.deepEqual(await Promise.all(Array.from({ length: 8 }, () => cache.wrap('shared', async () => ++calls))), Array(8).fill(2));
});

await check('clear', async () => {
  await cache.set('c', 1);
  await cache.clear();
  assert.equal(await cache.get('c'), undefined);
});

finish();
