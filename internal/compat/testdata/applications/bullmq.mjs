// node bullmq.mjs REDIS MEMCACHED DB: BullMQ.
import { FlowProducer, Queue, QueueEvents, Worker } from 'bullmq';
import { assert, check, finish, version } from './check.mjs';

const [port, , db] = process.argv.slice(2).map(Number);
version('bullmq');
const connection = { host: '127.0.0.1', port, db, maxRetriesPerRequest: null };
const options = { connection, prefix: 'bullmq' };
const queue = new Queue('work', options);
// By default it hears what comes after its first XREAD, which may be after the first job is done.
const events = new QueueEvents('work', { ...options, lastEventId: '0' });
const worker = new Worker('work', async (job) => {
  if (job.data.fail) throw new Error('on purpose');
  await job.updateProgress(50);
  return job.data.x * 2;
}, options);
for (const x of [queue, events, worker]) x.on('error', () => {}); // the checks tell

await check('a job and its result', async () => {
  await events.waitUntilReady();
  const job = await queue.add('double', { x: 21 });
  assert.equal(await job.waitUntilFinished(events), 42);
});

await check('a job that fails', async () => {
  const job = await queue.add('fail', { fail: true }, { attempts: 2, backoff: 10 });
  await assert.rejects(job.waitUntilFinished(events), /on purpose/);
});

await check('delayed, bulk and counts', async () => {
  const late = await queue.add('late', { x: 1 }, { delay: 50 });
  const jobs = await queue.addBulk(Array.from({ length: 10 }, (_, i) => ({ name: 'b', data: { x: i } })));
  assert.equal(await late.waitUntilFinished(events), 2);
  assert.deepEqual(await Promise.all(jobs.map((j) => j.waitUntilFinished(events))), jobs.map((_, i) => 2 * i));
  assert.equal((await queue.getJobCounts()).failed, 1);
});

await check('a flow', async () => {
  const flow = await new FlowProducer(options).add({ name: 'parent', queueName: 'work', data: { x: 4 }, children: [{ name: 'child', queueName: 'work', data: { x: 3 } }] });
  assert.equal(await flow.job.waitUntilFinished(events), 8);
  assert.deepEqual(Object.values(await flow.job.getChildrenValues()), [6]);
});

finish();
