// What the scripts share: run checks in turn and say on stdout how each went, one
// line each, `ok NAME` or `fail NAME: why`, and `done` at the end.
import assert from 'node:assert/strict';
import fs from 'node:fs';
import readline from 'node:readline';

export { assert };

const stdin = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();

// restart asks whoever started the script to restart the server, and waits for it.
export async function restart() {
  console.log('restart');
  const { done } = await stdin.next();
  if (done) throw new Error('stdin ended instead of telling of the restart');
}

// version says which version of an application runs: that of the module name.
export function version(name) {
  const { version } = JSON.parse(fs.readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url)));
  console.log(`version ${version}`);
}

// check runs f, for at most 15 s.
export async function check(name, f) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error('no end after 15 s')), 15_000);
  });
  try {
    await Promise.race([f(), late]);
    console.log(`ok ${name}`);
  } catch (err) {
    console.log(`fail ${name}: ${String(err.message ?? err).replaceAll('\n', ' ')}`);
  } finally {
    clearTimeout(timer);
  }
}

// until retries f, which may throw, for 20 s.
export async function until(f) {
  const end = Date.now() + 20_000;
  for (;;) {
    try {
      return await f();
    } catch (err) {
      if (Date.now() > end) throw err;
    }
    await new Promise((done) => setTimeout(done, 20));
  }
}

export function finish() {
  console.log('done');
  process.exit(0);
}

// Every byte there is, in a key and in a value.
export const bytes = Buffer.from(Array.from({ length: 256 }, (_, i) => i));
// Not all alike, so that a reply with parts out of order is noticed.
export const large = Buffer.alloc(1 << 20);
for (let i = 0; i < large.length; i += 4) large.writeUInt32LE(i, i);
