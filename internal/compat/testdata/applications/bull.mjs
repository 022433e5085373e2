// node bull.mjs REDIS MEMCACHED DB: Bull.
import Queue from 'bull';
import { assert, check, finish, version } from './check.mjs';

const [port, , db] = process.argv.slice(2).map(Number);
version('bull');
const options = { redis: { host: '127.0.0.1', port, db }, prefix: 'bull', settings: { drainDelay: 1 } };
const queue = new Queue('work', options);
queue.on('error', () => {}); // the checks tell

await check('a job and its result', async () => {
  await queue.empty();
  queue.process(2, async (job) => {
    if (job.data.fail) throw new Error('on purpose');
    await job.progress(50);
    return job.data.x * 2;
  });
  const job = await queue.add({ x: 21 });
  assert.equal(await job.finished(), 42);
});

await check('a job that fails', async () => {
  const job = await queue.add({ fail: true }, { attempts: 2, backoff: 10 });
  await assert.rejects(job.finished(), /on purpose/);
  assert.equal((await queue.getJob(job.id)).attemptsMade, 2);
});

await check('delayed and prioritized jobs', async () => {
  const jobs = await Promise.all([queue.add({ x: 1 }, { delay: 50 }), queue.add({ x: 2 }, { priority: 2 }), queue.add({ x: 3 }, { priority: 1 })]);
  assert.deepEqual(await Promise.all(jobs.map((j) => j.finished())), [2, 4, 6]);
});

await check('bulk and counts', async () => {
  const jobs = await queue.addBulk(Array.from({ length: 20 }, (_, i) => ({ data: { x: i } })));
  assert.deepEqual(await Promise.all(jobs.map((j) => j.finished())), jobs.map((_, i) => 2 * i));
  const counts = await queue.getJobCounts();
  assert.equal(counts.waiting, 0);
  assert.equal(counts.failed, 1);
});

await check('pause and resume', async () => {
  await queue.pause();
  const job = await queue.add({ x: 5 });
  assert.equal(await queue.isPaused(), true);
  await queue.resume();
  assert.equal(await job.finished(), 10);
});

await check('obliterate', async () => {
  await queue.obliterate({ force: true });
  assert.equal((await queue.getJobCounts()).completed, 0);
});

finish();
