// node redlock.mjs REDIS MEMCACHED DB: Redlock.
import Redis from 'ioredis';
import Redlock from 'redlock';
import { assert, check, finish, version } from './check.mjs';

const [port, , db] = process.argv.slice(2).map(Number);
version('redlock');
const client = new Redis({ port, db });
const redlock = new Redlock([client], { retryCount: 0 });
const patient = new Redlock([client], { retryCount: 500, retryDelay: 10, retryJitter: 10 });

await check('exclusive', async () => {
  const lock = await redlock.lock('redlock:a', 60_000);
  await assert.rejects(redlock.lock('redlock:a', 60_000), { name: 'LockError' });
  await lock.unlock();
  const again = await redlock.lock('redlock:a', 60_000);
  await again.unlock();
  assert.equal(await client.exists('redlock:a'), 0);
});

await check('several resources', async () => {
  const lock = await redlock.lock(['redlock:m1', 'redlock:m2'], 60_000);
  await assert.rejects(redlock.lock('redlock:m2', 60_000), { name: 'LockError' });
  await lock.unlock();
  await (await redlock.lock('redlock:m2', 60_000)).unlock();
});

await check('extend', async () => {
  let lock = await redlock.lock('redlock:e', 1_000);
  lock = await lock.extend(60_000);
  assert.ok((await client.pttl('redlock:e')) > 50_000);
  await lock.unlock();
  await assert.rejects(lock.unlock(), { name: 'LockError' });
});

await check('counting under it', async () => {
  await client.set('redlock:n', 0);
  await Promise.all(Array.from({ length: 20 }, async () => {
    const lock = await patient.lock('redlock:c', 60_000);
    await client.set('redlock:n', Number(await client.get('redlock:n')) + 1);
    await lock.unlock();
  }));
  assert.equal(await client.get('redlock:n'), '20');
});

finish();
