// node connect_redis.mjs REDIS MEMCACHED DB: express-session in Redis.
import { RedisStore } from 'connect-redis';
import { createClient } from 'redis';
import { assert, check, finish, version } from './check.mjs';
import { checkSessions } from './express_sessions.mjs';

const [port, , database] = process.argv.slice(2).map(Number);
version('connect-redis');
const client = createClient({ socket: { port }, database });
await client.connect();
const store = new RedisStore({ client, prefix: 'connect-redis:' });
await checkSessions(store);

await check('all, length and clear', async () => {
  await store.set('x', { cookie: {}, n: 1 });
  assert.ok((await store.length()) >= 1);
  assert.ok((await store.all()).some((s) => s.id === 'x' && s.n === 1));
  assert.ok((await store.ids()).includes('x'));
  await store.clear();
  assert.equal(await store.length(), 0);
});

finish();
