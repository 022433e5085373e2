// node ioredis-users.mjs PORT
import Redis from 'ioredis';
import { assert, check, finish } from './check.mjs';

const port = Number(process.argv[2]);
const admin = new Redis({ host: '127.0.0.1', port });
const as = (username, password, more) => {
  const r = new Redis({ host: '127.0.0.1', port, username, password, maxRetriesPerRequest: 1, retryStrategy: () => null, ...more });
  r.on('error', () => {}); // commands tell
  return r;
};
await admin.flushdb();
await admin.acl('SETUSER', 'shop', 'reset', 'on', '>apples', '~shop:*', '%R~prices:*', '+@read', '+@write', '+@connection', '+@transaction', '-@dangerous');
await admin.acl('LOG', 'RESET');
const shop = as('shop', 'apples');

await check('whoami', async () => {
  assert.equal(await admin.acl('WHOAMI'), 'default');
  assert.equal(await shop.acl('WHOAMI').catch((e) => e.message.split(' ')[0]), 'NOPERM'); // acl is none of its categories
  assert.ok((await admin.acl('USERS')).includes('shop'));
});

await check('keys', async () => {
  assert.equal(await shop.set('shop:k', 'v'), 'OK');
  assert.equal(await shop.get('shop:k'), 'v');
  assert.equal(await shop.get('prices:k'), null);
  await assert.rejects(shop.set('prices:k', 'v'), /^ReplyError: NOPERM .*key/);
  await assert.rejects(shop.mget('shop:k', 'other'), /^ReplyError: NOPERM .*key/);
});

await check('commands', async () => {
  await assert.rejects(shop.flushall(), /^ReplyError: NOPERM .*flushall/);
  await assert.rejects(shop.keys('*'), /^ReplyError: NOPERM .*keys/);
});

await check('pipeline', async () => {
  const out = await shop.pipeline().set('shop:p', '1').set('other', '2').incr('shop:p').exec();
  assert.deepEqual([out[0][1], out[1][0]?.message.split(' ')[0], out[2][1]], ['OK', 'NOPERM', 2]);
});

await check('transaction', async () => {
  assert.deepEqual(await shop.multi().set('shop:t', 'a').get('shop:t').exec(), [[null, 'OK'], [null, 'a']]);
  await assert.rejects(shop.multi().set('shop:t', 'b').set('other', 'c').exec(), /EXECABORT/);
  assert.equal(await shop.get('shop:t'), 'a');
});

await check('getuser', async () => {
  const list = await admin.acl('GETUSER', 'shop');
  const user = Object.fromEntries(list.flatMap((_, i) => (i % 2 ? [] : [[list[i], list[i + 1]]])));
  assert.ok(user.flags.includes('on'));
  assert.equal(user.passwords.length, 1);
  assert.ok(!JSON.stringify(user).includes('apples'));
  assert.equal(user.keys, '~shop:* %R~prices:*');
});

await check('log', async () => {
  const entries = await admin.acl('LOG');
  const reasons = entries.map((e) => e[e.indexOf('reason') + 1]);
  assert.ok(reasons.includes('key') && reasons.includes('command'), reasons.join());
});

await check('wrong password', async () => {
  const r = as('shop', 'pears');
  await assert.rejects(r.get('shop:k'));
  const why = await new Promise((resolve) => {
    const s = as('shop', 'pears', { lazyConnect: true });
    s.on('error', (e) => resolve(e.message));
    s.connect().catch((e) => resolve(e.message));
  });
  assert.match(why, /WRONGPASS/);
  r.disconnect();
});

await check('a user that changes', async () => {
  await admin.acl('SETUSER', 'shop', 'resetkeys', '~new:*');
  await assert.rejects(shop.get('shop:k'), /NOPERM/);
  assert.equal(await shop.get('new:k'), null);
  assert.equal(await admin.acl('DELUSER', 'shop'), 1);
  await assert.rejects(shop.get('new:k'));
});

shop.disconnect();
await admin.flushdb();
admin.disconnect();
finish();
