// What the scripts about express-session share.
import express from 'express';
import session from 'express-session';
import { browser, listen } from './browse.mjs';
import { assert, check } from './check.mjs';

export async function checkSessions(store) {
  const app = express();
  app.use(session({ store, secret: 'keyboard cat', resave: false, saveUninitialized: false, cookie: { maxAge: 600_000 } }));
  app.get('/count', (req, res) => {
    req.session.n = (req.session.n ?? 0) + 1;
    res.send(String(req.session.n));
  });
  app.get('/look', (req, res) => res.send(String(req.session.n)));
  app.get('/regenerate', (req, res, next) => req.session.regenerate((err) => (err ? next(err) : res.send('new'))));
  app.get('/leave', (req, res, next) => req.session.destroy((err) => (err ? next(err) : res.send('bye'))));
  app.use((err, req, res, next) => res.status(500).send(err.message));
  const url = await listen(app);

  await check('a session for each browser', async () => {
    const [a, b] = [browser(url), browser(url)];
    for (const want of ['1', '2', '3']) assert.equal((await a('/count')).text, want);
    assert.equal((await b('/count')).text, '1');
    assert.equal((await a('/look')).text, '3'); // a touch, no change
    assert.equal((await a('/count')).text, '4');
  });
  await check('destroy', async () => {
    const a = browser(url);
    assert.equal((await a('/count')).text, '1');
    assert.equal((await a('/leave')).text, 'bye');
    assert.equal((await a('/count')).text, '1');
  });
  await check('regenerate', async () => {
    const a = browser(url);
    assert.equal((await a('/count')).text, '1');
    assert.equal((await a('/regenerate')).text, 'new');
    assert.equal((await a('/count')).text, '1');
  });
}
