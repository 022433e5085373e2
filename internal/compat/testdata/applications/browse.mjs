// What the scripts about express share: a server and browsers for it.
import http from 'node:http';

// listen serves an application of express, and returns its URL.
export async function listen(app) {
  const server = http.createServer(app);
  await new Promise((done) => server.listen(0, '127.0.0.1', done));
  return `http://127.0.0.1:${server.address().port}`;
}

// browser returns a function that asks for a path, and keeps the cookie that it gets.
export function browser(url) {
  let cookie = '';
  return async (path) => {
    const r = await fetch(url + path, { headers: { cookie } });
    const set = r.headers.get('set-cookie');
    if (set) cookie = set.split(';')[0];
    return { status: r.status, text: await r.text(), headers: r.headers };
  };
}
