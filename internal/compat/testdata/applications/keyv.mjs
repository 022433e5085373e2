// node keyv.mjs REDIS MEMCACHED DB: Keyv in Redis.
import KeyvRedis from '@keyv/redis';
import Keyv from 'keyv';
import { assert, check, finish, version } from './check.mjs';
import { checkKeyv } from './keyv_any.mjs';

const [port, , db] = process.argv.slice(2).map(Number);
version('keyv');
const keyv = new Keyv(new KeyvRedis(`redis://127.0.0.1:${port}/${db}`), { namespace: 'keyv' });
let error;
keyv.on('error', (err) => (error = err));
await checkKeyv(keyv);

await check('iterator', async () => {
  for (let i = 0; i < 30; i++) await keyv.set(`i${i}`, i);
  const seen = new Map();
  for await (const [k, v] of keyv.iterator()) seen.set(k, v);
  for (let i = 0; i < 30; i++) assert.equal(seen.get(`i${i}`), i);
});

await check('namespaces and clear', async () => {
  const other = new Keyv(new KeyvRedis(`redis://127.0.0.1:${port}/${db}`), { namespace: 'keyv-other' });
  await keyv.set('shared', 'mine');
  await other.set('shared', 'theirs');
  await keyv.clear();
  assert.equal(await keyv.get('shared'), undefined);
  assert.equal(await other.get('shared'), 'theirs');
});

await check('no error event', () => assert.equal(error, undefined));

finish();
