// What Keyv's README does with any store.
import { assert, check, until } from './check.mjs';

export async function checkKeyv(keyv) {
  await check('set get delete', async () => {
    assert.equal(await keyv.set('foo', { a: [1, 2, 'é'] }), true);
    assert.deepEqual(await keyv.get('foo'), { a: [1, 2, 'é'] });
    assert.equal(await keyv.has('foo'), true);
    assert.equal(await keyv.delete('foo'), true);
    assert.equal(await keyv.get('foo'), undefined);
    assert.equal(await keyv.has('foo'), false);
  });
  await check('expiry', async () => {
    await keyv.set('e', 'never', 100);
    await until(async () => assert.equal(await keyv.get('e'), undefined));
    await keyv.set('e', 'later', 100_000);
    assert.equal(await keyv.get('e'), 'later');
  });
  await check('several', async () => {
    await keyv.set('m1', 'one', 100_000);
    await keyv.set('m2', 'two');
    assert.deepEqual(await keyv.get(['m1', 'absent', 'm2']), ['one', undefined, 'two']);
    assert.equal(await keyv.delete(['m1', 'm2']), true);
  });
}
