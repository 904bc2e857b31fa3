// The middleware in Express.

import assert from 'node:assert/strict';
import { once } from 'node:events';
import http from 'node:http';
import { after, before, test } from 'node:test';

import { Client, rateLimit } from '../index.mjs';
import { PATIENT, startRedis, startService } from './service.mjs';

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

async function serve(t, { url = service.url, onError, attributes = () => ({ user: t.name }) } = {}) {
  const client = new Client(url, { deadline: PATIENT, onError });
  const app = express();
  app.use(rateLimit(client, { attributes }));
  app.use((request, response) => response.send('hello'));
  app.use((error, request, response, next) => response.status(500).send(error.name));
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

test('wrong input is an error of the application', async (t) => {
  const answer = await (await serve(t, { attributes: () => ({ ip: 'nowhere' }) }))('/pages/a');
  assert.deepEqual([answer.status, await answer.text()], [500, 'RequestError']);
});
