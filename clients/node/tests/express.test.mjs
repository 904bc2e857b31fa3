// The middleware in Express.

import assert from 'node:assert/strict';
import { once } from 'node:events';
import { writeFileSync } from 'node:fs';
import http from 'node:http';
import { join } from 'node:path';
import { after, before, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';

import { Client, rateLimit } from '../index.mjs';
import { PATIENT, startRedis, startService, startServiceWith, within } from './service.mjs';

const { default: express } = await import('express');

let redis;
let service;
before(async () => {
  redis = await startRedis();
  service = await startService(redis);
});
after(async () => {
  await service?.end();
  await redis?.end();
});
process.on('warning', () => {});

async function serve(t, { url = service.url, onError, token, attributes = () => ({ user: t.name }), warn, handler } = {}) {
  const client = new Client(url, { deadline: PATIENT, onError, token });
  const app = express();
  // So that Express itself answers errors, and prints none.
  app.set('env', 'test');
  app.use(rateLimit(client, { attributes, warn }));
  app.use(handler ?? ((request, response) => response.send('hello')));
  const server = http.createServer(app).listen(0, '127.0.0.1');
  await once(server, 'listening');
  t.after(() => {
    server.closeAllConnections();
    server.close();
    client.close();
  });
  const origin = `http://127.0.0.1:${server.address().port}`;
  return (path) => fetch(`${origin}${path}`, { signal: AbortSignal.timeout(PATIENT) });
}

test('a path that can be read in two ways is 400 unless the application made it', async (t) => {
  const rules = join(redis.folder, 'two-ways.toml');
  writeFileSync(rules, '[[rule]]\nname = "admin"\nmatch = { path = "/admin/*" }\naction = "block"\n');
  const strict = await startServiceWith(rules, redis);
  t.after(() => strict.end());
  const get = await serve(t, { url: strict.url });
  const refused = await get('/..;/admin');
  assert.deepEqual([refused.status, (await refused.json()).detail], [400, 'the path can be read in two ways']);
  const warnings = [];
  const attributes = () => ({ path: '/..;/admin' });
  const own = await serve(t, { url: strict.url, attributes, warn: (warning) => warnings.push(warning) });
  assert.equal((await own('/')).status, 500);
  assert.equal(warnings.length, 1);
  assert.match(warnings[0], /path: servers may read it in different ways/);
});

test('allowed requests get the fields, and denied ones the status', async (t) => {
  const get = await serve(t);
  for (const remaining of [1, 0]) {
    const allowed = await get('/pages/a');
    assert.equal(await allowed.text(), 'hello');
    assert.equal(allowed.headers.get('ratelimit-policy'), '"pages";q=2;w=2592000');
    assert.ok(allowed.headers.get('ratelimit').startsWith(`"pages";r=${remaining}`));
  }
  const denied = await get('/pages/b?query');
  assert.equal(denied.status, 429);
  assert.ok(Number(denied.headers.get('retry-after')) > 29 * 86_400);
  assert.equal(denied.headers.get('content-type'), 'application/problem+json');
  assert.equal((await denied.json()).detail, 'slow down');
});

test('the path is sent as it came', async (t) => {
  const get = await serve(t);
  // Decoded once, %25 is a percent sign, and this is no page.
  assert.equal((await get('/pages%252Fa')).headers.get('ratelimit'), null);
  assert.notEqual((await get('/pages%2Fa')).headers.get('ratelimit'), null);
});

test('an async function of the request', async (t) => {
  const get = await serve(t, { attributes: async () => ({ path: '/banned' }) });
  assert.equal((await get('/pages/a')).status, 403);
});

test('without a decision, closed is 503 and open goes on', async (t) => {
  const gone = await startService(redis);
  await gone.end();
  assert.equal((await (await serve(t, { url: gone.url }))('/pages/a')).status, 503);
  assert.equal((await (await serve(t, { url: gone.url, onError: 'open' }))('/pages/a')).status, 200);
});

/** That many requests are answered so, and that there is one such warning a second, without the token. */
async function assertSeldomWarned(t, path, status, text, settings) {
  const warnings = [];
  const get = await serve(t, { token: 'secret', ...settings, warn: (message) => warnings.push(message) });
  const began = performance.now();
  for (let turn = 0; turn < 20; turn += 1) assert.equal((await get(path)).status, status);
  const most = 1 + Math.floor((performance.now() - began) / 1000);
  assert.ok(warnings.length >= 1 && warnings.length <= most, `expected at most ${most}, got ${warnings.length}`);
  for (const warning of warnings) {
    assert.match(warning, text);
    assert.doesNotMatch(warning, /secret/);
  }
  return { get, warnings };
}

test('what the service refuses to decide is 500', async (t) => {
  const permits = new RegExp(
    "^a request is answered 500, since its rate limit can't be decided: id: it is missing: rule jobs has permits, .*; " +
      'let a rule with permits match an attribute that only hold sends$',
  );
  await assertSeldomWarned(t, '/jobs', 500, permits);
  const missing = /: rule requests needs the attribute user, which this request lacks: add it by the middleware's attributes/;
  await assertSeldomWarned(t, '/requests', 500, missing, { attributes: () => ({}) });
  const wrong = /: ip: expected an address such as .*, got "nowhere"$/;
  await assertSeldomWarned(t, '/pages/a', 500, wrong, { attributes: () => ({ ip: 'nowhere' }) });
});

test('a wrong token is 500', async (t) => {
  const tokens = join(redis.folder, 'tokens');
  writeFileSync(tokens, 'another\n');
  const guarded = await startService(redis, '127.0.0.1:0', '--tokens', tokens);
  t.after(() => guarded.end());
  await assertSeldomWarned(t, '/pages/a', 500, /: the token is missing or wrong/, { url: guarded.url });
});

test('a status of the rule is for the visitor', async (t) => {
  const get = await serve(t, { warn: (message) => assert.fail(message) });
  assert.equal((await get('/keys')).status, 401);
});

test('requests that pass without a decision are a warning', async (t) => {
  const gone = await startService(redis);
  await gone.end();
  const text = /^requests pass without a decision: the service can't be reached: /;
  const asked = await assertSeldomWarned(t, '/pages/a', 200, text, { url: gone.url, onError: 'open' });
  const { length } = asked.warnings;
  await sleep(1100);
  await asked.get('/pages/a');
  assert.equal(asked.warnings.length, length + 1);
  const warned = once(process, 'warning');
  await (await serve(t, { url: gone.url, onError: 'open' }))('/pages/a');
  const [warning] = await within(warned, 'a warning');
  assert.equal(warning.name, 'TollgateWarning');
  assert.match(warning.message, text);
});

test('an error of the service that a handler throws is 500', async (t) => {
  const client = new Client(service.url, { deadline: PATIENT });
  t.after(() => client.close());
  // Nothing is remembered for the id (404), and a rule without permits (409).
  const calls = [
    () => client.cancel({ path: '/requests', user: t.name }, 'none'),
    () => client.withHold({ path: '/requests', user: t.name }, () => {}),
  ];
  for (const handler of calls) assert.equal((await (await serve(t, { handler }))('/pages/a')).status, 500);
});

test("an error of the function is the application's", async (t) => {
  const failing = () => {
    throw Object.assign(new Error('no session'), { status: 403 });
  };
  assert.equal((await (await serve(t, { attributes: failing }))('/pages/a')).status, 403);
});
