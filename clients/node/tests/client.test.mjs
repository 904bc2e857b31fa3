// The client against the real service. Each test has a user of its own.

import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { after, before, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';

import { Client, Denied, RequestError, Unavailable, UnknownId } from '../index.mjs';
import { CLIENTS, PATIENT, answerOf, end, failure, lineOf, listen, messages } from './service.mjs';
import { opOf, startRedis, startService, within } from './service.mjs';

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
// What is expected in the tests of failures.
process.on('warning', () => {});

function open(t, url = service.url, settings = {}) {
  const client = new Client(url, { deadline: PATIENT, ...settings });
  t.after(() => client.close());
  return client;
}

async function listening(t, serve, port) {
  const listener = await listen(serve, port);
  t.after(() => listener.end());
  return listener;
}

function warningsOf(t) {
  const found = [];
  const note = (warning) => found.push(warning.message);
  process.on('warning', note);
  t.after(() => process.off('warning', note));
  return found;
}

const of = (t, path, more) => ({ path, user: t.name, ...more });

async function heldAgain(client, attributes) {
  for (const until = Date.now() + PATIENT; ; await sleep(50)) {
    try {
      return await client.withHold(attributes, (permit) => permit);
    } catch (error) {
      if (!(error instanceof Denied) || Date.now() > until) throw error;
    }
  }
}

function assertHas(found, expected, about) {
  if (expected === null || typeof expected !== 'object') {
    assert.equal(found, expected, about);
    return;
  }
  if (Array.isArray(expected)) assert.equal(found.length, expected.length, about);
  for (const [name, value] of Object.entries(expected)) {
    assert.ok(name in found, `${about}: ${name}`);
    assertHas(found[name], value, `${about}: ${name}`);
  }
}

test('the shared vectors', async (t) => {
  const own = await startRedis();
  t.after(() => own.end());
  const fresh = await startService(own);
  t.after(() => fresh.end());
  const client = open(t, fresh.url);
  for (const { about, op, request, status, answer } of JSON.parse(readFileSync(join(CLIENTS, 'vectors.json')))) {
    const { attributes, cost, costs, id, id_ttl_ms: idTtlMs } = request;
    const byId = ['cancel', 'renew', 'release'].includes(op);
    let found;
    try {
      const decision = await client[op](attributes, byId ? id : { cost, costs, id, idTtlMs });
      found = { status: decision.status, raw: decision.raw };
    } catch (error) {
      assert.ok(error instanceof RequestError, `${about}: ${error}`);
      assert.equal(error instanceof UnknownId, error.serviceStatus === 404);
      found = { status: error.serviceStatus, raw: { error: error.message, kind: error.kind, charged: false } };
    }
    assert.equal(found.status, status, about);
    assertHas(found.raw, answer, about);
  }
});

test('fifty callers at once are allowed exactly the limit', async (t) => {
  const client = open(t);
  const caller = async () => [await client.decide(of(t, '/requests')), await client.decide(of(t, '/requests'))];
  const decisions = (await Promise.all(Array.from({ length: 50 }, caller))).flat();
  assert.equal(decisions.length, 100);
  assert.equal(decisions.filter((decision) => decision.allowed).length, 10);
});

test('a decision has names of JavaScript', async (t) => {
  const client = open(t);
  const attributes = of(t, '/logins', { method: 'POST' });
  await client.decide(attributes);
  await client.decide(attributes);
  const denied = await client.decide(attributes);
  assert.deepEqual([denied.allowed, denied.status, denied.message], [false, 429, 'too many attempts']);
  assert.ok(denied.retryAfterUs > 29 * 86_400e6);
  assert.equal(denied.limits[0].retryAfterUs, denied.retryAfterUs);
  assert.ok([undefined, 'sliding-log'].includes(denied.limits[0].algorithm));
  assert.deepEqual(Object.keys(denied.headers).sort(), ['ratelimit', 'ratelimit-policy', 'retry-after']);
});

test('settle, cancel and refund give back what they say', async (t) => {
  const client = open(t);
  const attributes = of(t, '/requests');
  assert.equal((await client.decide(attributes, { cost: 8, id: 'a' })).remaining, 2);
  assert.equal((await client.settle(attributes, { cost: 3, id: 'a' })).remaining, 7);
  assert.equal((await client.decide(attributes, { cost: 5, id: 'b' })).remaining, 2);
  assert.equal((await client.cancel(attributes, 'b')).remaining, 7);
  assert.equal((await client.refund(attributes, { cost: 1 })).remaining, 8);
  await assert.rejects(client.cancel(attributes, 'b'), UnknownId);
});

test('one of many holds an exclusive permit', async (t) => {
  const client = open(t);
  let [inside, most, held] = [0, 0, 0];
  const work = async () => {
    for (let turn = 0; turn < 5; turn += 1) {
      try {
        await client.withHold(of(t, '/exclusive'), async () => {
          inside += 1;
          held += 1;
          most = Math.max(most, inside);
          await sleep(10);
          inside -= 1;
        });
      } catch (error) {
        assert.ok(error instanceof Denied, String(error));
        assert.equal(error.decision.status, 429);
      }
    }
  };
  await Promise.all(Array.from({ length: 20 }, work));
  assert.equal(most, 1);
  assert.ok(held > 0);
  await client.withHold(of(t, '/exclusive'), () => {});
});

test('a permit is released on an exception, and at the end of its block', async (t) => {
  const client = open(t);
  const attributes = of(t, '/jobs');
  const failing = client.withHold(
    attributes,
    async () => {
      await assert.rejects(client.hold(attributes), Denied);
      throw new RangeError('work');
    },
    { cost: 2 },
  );
  await assert.rejects(failing, RangeError);
  const permit = await client.hold(attributes, { cost: 2 });
  await assert.rejects(client.hold(attributes), Denied);
  await permit[Symbol.asyncDispose]();
  assert.equal(await client.withHold(attributes, () => 'done'), 'done');
});

test('a permit is renewed, and that of a killed holder comes back', async (t) => {
  const client = open(t);
  const each = async (path) => {
    const attributes = of(t, path);
    const script = fileURLToPath(new URL('holder.mjs', import.meta.url));
    const stdio = ['ignore', 'pipe', 'inherit'];
    const holder = spawn(process.execPath, [script, service.url, JSON.stringify(attributes)], { stdio });
    try {
      assert.equal(await lineOf(holder, 'the line of a holder'), 'held');
      await sleep(2500); // the ttl is 2 s
      await assert.rejects(client.hold(attributes), Denied);
    } finally {
      await end(holder);
    }
    await heldAgain(client, attributes);
  };
  await Promise.all([each('/exclusive'), each('/mixed')]);
});

test('a lost permit is reported', async (t) => {
  const client = open(t);
  const permit = await client.hold(of(t, '/exclusive'));
  await client.release(of(t, '/exclusive'), permit.id);
  for (const until = Date.now() + PATIENT; !permit.lost; await sleep(20)) assert.ok(Date.now() < until);
  assert.ok(permit.signal.aborted);
  await permit.release();
});

test('hold of a rule without permits', async (t) => {
  const client = open(t);
  assert.equal(await client.withHold(of(t, '/free'), (permit) => permit.decision.by), 'rules', 'who is exempt needs none');
  await assert.rejects(client.withHold(of(t, '/requests'), () => assert.fail('nothing is held')), {
    ...{ name: 'RequestError', serviceStatus: 409, kind: 'input' },
    message: /^hold: rule requests has no concurrency limit: /,
  });
  const { remaining } = await client.decide(of(t, '/requests'), { cost: 0 });
  assert.equal(remaining, 10, 'what was taken is given back');
});

test('hold where no rule applies', async (t) => {
  const warnings = warningsOf(t);
  const client = open(t);
  await assert.rejects(client.withHold(of(t, '/nowhere'), () => assert.fail('nothing is held')), {
    ...{ name: 'RequestError', message: 'hold: no rule with permits applies to these attributes' },
  });
  const reason = await client.withHold(of(t, '/tried'), (permit) => permit.decision.reason);
  assert.equal(reason, 'no-rule', 'a rule on trial stops nothing');
  assert.deepEqual(warnings, []);
});

test('hold goes on where permits may be held', async (t) => {
  const changes = {
    'an older service': (body) => delete body.limits[0].algorithm,
    'a failure policy': (body) => Object.assign(body, { by: 'policy' }),
    'a failure policy without limits': (body) => Object.assign(body, { by: 'policy', reason: 'no-rule', limits: [] }),
  };
  for (const [about, change] of Object.entries(changes)) {
    const ops = [];
    const listener = await listening(t, (socket) => {
      messages(socket, async (request) => {
        ops.push(opOf(request));
        const answer = await answerOf(service, request);
        if (opOf(request) !== 'decide') {
          socket.write(answer);
          return;
        }
        const body = JSON.parse(answer.subarray(answer.indexOf('\r\n\r\n')));
        change(body);
        socket.write(failure(200, body));
      });
    });
    const warned = once(process, 'warning');
    assert.equal(await open(t, listener.url).withHold(of(t, '/requests'), () => 'done'), 'done', about);
    const [warning] = await within(warned, 'a warning');
    assert.match(warning.message, /^a permit wasn't released: RequestError: release: expected a concurrency limit/, about);
    assert.deepEqual(ops, ['decide', 'release'], about);
  }
});

test("what hold can't give back is a warning", async (t) => {
  const listener = await listening(t, (socket) => {
    messages(socket, async (request) => {
      const isCancel = opOf(request) === 'cancel';
      socket.write(isCancel ? failure(401, { error: 'expected a token' }) : await answerOf(service, request));
    });
  });
  const warnings = warningsOf(t);
  await assert.rejects(open(t, listener.url, { token: 'secret' }).hold(of(t, '/requests')), /^RequestError: hold: rule/);
  await sleep(1);
  const expected = "what hold took of a rule without permits wasn't given back: RequestError: expected a token";
  assert.deepEqual(warnings, [expected]);
});

test('while the service is away, closed throws and open allows', async (t) => {
  const gone = await startService(redis);
  await gone.end();
  const unreachable = { name: 'Unavailable', kind: 'unreachable', charged: false };
  await assert.rejects(open(t, gone.url).decide(of(t, '/requests')), unreachable);
  await assert.rejects(open(t, gone.url).hold(of(t, '/jobs')), unreachable);
  const client = open(t, gone.url, { onError: 'open' });
  const { allowed, by, error, cause } = await client.decide(of(t, '/requests'));
  assert.deepEqual([allowed, by, error], [true, 'policy', 'unreachable']);
  assert.ok(cause instanceof Unavailable);
  assert.ok((await client.settle(of(t, '/requests'), { cost: 1, id: 'x' })).allowed);
  assert.equal(await client.withHold(of(t, '/jobs'), (permit) => permit.decision.by), 'policy');
  await assert.rejects(client.renew(of(t, '/jobs'), 'x'), Unavailable);
});

test('while Redis is away, the service fails and the client decides', async (t) => {
  const own = await startRedis();
  const up = await startService(own);
  t.after(() => up.end());
  await own.end();
  await assert.rejects(open(t, up.url).decide(of(t, '/requests')), Unavailable);
  assert.equal((await open(t, up.url, { onError: 'open' }).decide(of(t, '/requests'))).by, 'policy');
});

test('a service that swallows bytes is given up at the deadline', async (t) => {
  const listener = await listening(t, () => {});
  let began = performance.now();
  const closed = open(t, listener.url, { deadline: 300 }).decide(of(t, '/requests'), { id: 'x' });
  await assert.rejects(closed, { kind: 'deadline', charged: null });
  const taken = performance.now() - began;
  assert.ok(taken >= 290 && taken < 5000, String(taken));
  const allowed = await open(t, listener.url, { deadline: 300, onError: 'open' }).decide(of(t, '/requests'));
  assert.equal(allowed.error, 'deadline');
  assert.equal(listener.accepted, 2, "a slow call isn't repeated");
});

test('an answer in drops is given up at the deadline', async (t) => {
  const listener = await listening(t, async (socket) => {
    await once(socket, 'data');
    socket.write('HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n');
    while (!socket.destroyed) {
      socket.write(' ');
      await sleep(50);
    }
  });
  const began = performance.now();
  await assert.rejects(open(t, listener.url, { deadline: 500 }).decide(of(t, '/requests')), { kind: 'deadline' });
  assert.ok(performance.now() - began < 10_000);
});

test('a late answer is never that of another call', async (t) => {
  const listener = await listening(t, (socket, number) => {
    messages(socket, async (request) => {
      const answer = await answerOf(service, request);
      if (number === 1) await sleep(1500);
      socket.write(answer);
    });
  });
  const client = open(t, listener.url, { deadline: 1000 });
  await assert.rejects(client.decide(of(t, '/requests')), { kind: 'deadline' });
  for (let user = 0; user < 20; user += 1) {
    try {
      const { key } = await client.decide({ path: '/requests', user: `late ${user}` });
      assert.equal(key, `user:late ${user}`);
    } catch (error) {
      assert.equal(error.kind, 'deadline', String(error)); // this machine was busy
    }
    await sleep(50);
  }
});

test('a broken connection repeats only what is charged once', async (t) => {
  const listener = await listening(t, (socket) => messages(socket, () => socket.destroy()));
  const client = open(t, listener.url);
  await assert.rejects(client.decide(of(t, '/requests')), { kind: 'disconnected', charged: null });
  assert.equal(listener.accepted, 1);
  await assert.rejects(client.decide(of(t, '/requests'), { id: 'x' }), { kind: 'disconnected' });
  assert.equal(listener.accepted, 3);
  await assert.rejects(client.peek(of(t, '/requests')), { kind: 'disconnected' });
  assert.equal(listener.accepted, 5);
});

test("an answer isn't asked for again", async (t) => {
  let kind;
  let requests = 0;
  const listener = await listening(t, (socket) => {
    messages(socket, () => {
      requests += 1;
      socket.write(failure(503, { error: 'no connection to redis', kind, charged: false }));
    });
  });
  const client = open(t, listener.url);
  // The service's own connection failed, to Redis: its kinds have the names of the client's.
  for (kind of ['unreachable', 'disconnected']) {
    for (const op of ['decide', 'peek', 'refund', 'settle', 'cancel', 'renew', 'release']) {
      const before = requests;
      const byId = ['cancel', 'renew', 'release'].includes(op);
      const failure = { name: 'Unavailable', kind, charged: false };
      await assert.rejects(client[op](of(t, '/requests'), byId ? 'x' : { id: 'x' }), failure, op);
      assert.equal(requests - before, 1, `${op}: ${kind}`);
    }
  }
});

test('what a broken attempt took stays unknown if the second is refused', async (t) => {
  const breaking = () => {
    const broken = listening(t, (socket) => {
      messages(socket, async () => (await broken).end());
    });
    return broken;
  };
  const decided = open(t, (await breaking()).url).decide(of(t, '/requests'), { id: 'x' });
  await assert.rejects(decided, { kind: 'unreachable', charged: null });

  const listener = await breaking();
  const permit = await open(t, listener.url, { onError: 'open' }).hold(of(t, '/jobs'));
  assert.equal(permit.decision.cause.charged, null);
  // The service is there again.
  const ops = [];
  const again = (socket) => {
    messages(socket, async (request) => {
      ops.push(opOf(request));
      socket.write(await answerOf(service, request));
    });
  };
  await listening(t, again, listener.port);
  await permit.release();
  assert.deepEqual(ops, ['release']);
});

test('what a broken attempt took stays unknown if the second fails', async (t) => {
  const attributes = of(t, '/jobs');
  let released;
  const isReleased = new Promise((resolve) => {
    released = resolve;
  });
  const listener = await listening(t, (socket, number) => {
    messages(socket, async (request) => {
      if (number === 1) {
        // The service gave a permit, and its answer is lost.
        await answerOf(service, request);
        socket.destroy();
      } else if (opOf(request) === 'decide') {
        socket.write(failure(503, { error: 'overloaded', kind: 'overloaded', charged: false }));
      } else {
        socket.write(await answerOf(service, request));
        released();
      }
    });
  });
  const held = open(t, listener.url).hold(attributes, { cost: 2 });
  await assert.rejects(held, { kind: 'overloaded', charged: null });
  await within(isReleased, 'a release');
  assert.ok((await open(t).peek(attributes, { cost: 2 })).allowed);
});

test('an error of a release that nobody waits for is a warning', async (t) => {
  const listener = await listening(t, (socket) => {
    messages(socket, (request) => {
      const isDecide = opOf(request) === 'decide';
      socket.write(isDecide ? failure(503, { error: 'overloaded' }) : failure(401, { error: 'expected a token' }));
    });
  });
  const unhandled = [];
  const note = (error) => unhandled.push(error);
  process.on('unhandledRejection', note);
  t.after(() => process.off('unhandledRejection', note));
  const warned = once(process, 'warning');
  await assert.rejects(open(t, listener.url, { token: 'secret' }).hold(of(t, '/jobs')), Unavailable);
  const [warning] = await within(warned, 'a warning');
  const expected = "a permit wasn't released: RequestError: expected a token";
  assert.deepEqual([warning.name, warning.message], ['TollgateWarning', expected]);
  // Node looks for rejections that nobody handles after the microtasks of a turn.
  await sleep(1);
  assert.deepEqual(unhandled, []);
});

test('what a broken attempt took is released if the second is refused', async (t) => {
  for (const onError of ['closed', 'open']) {
    const attributes = of(t, '/jobs', { onError });
    let released;
    const isReleased = new Promise((resolve) => {
      released = resolve;
    });
    const listener = await listening(t, (socket, number) => {
      messages(socket, async (request) => {
        if (number === 1) {
          // The service gave a permit, and its answer is lost.
          await answerOf(service, request);
          socket.destroy();
        } else if (opOf(request) === 'decide') {
          socket.write(failure(401, { error: 'expected a token' }));
        } else {
          socket.write(await answerOf(service, request));
          released();
        }
      });
    });
    const held = open(t, listener.url, { onError }).hold(attributes, { cost: 2 });
    await assert.rejects(held, /^RequestError: expected a token$/);
    await within(isReleased, 'a release');
    assert.ok((await open(t).peek(attributes, { cost: 2 })).allowed);
  }
});

test("what the service refuses at once isn't released", async (t) => {
  const ops = [];
  const listener = await listening(t, (socket) => {
    messages(socket, (request) => {
      ops.push(opOf(request));
      socket.write(failure(401, { error: 'expected a token' }));
    });
  });
  await assert.rejects(open(t, listener.url).hold(of(t, '/jobs')), RequestError);
  await sleep(200);
  assert.deepEqual(ops, ['decide']);
});

test('a release that nobody waits for outlasts an outage', async (t) => {
  const warnings = warningsOf(t);
  const attributes = of(t, '/jobs');
  let releases = 0;
  let taken;
  let released;
  const isReleased = new Promise((resolve) => {
    released = resolve;
  });
  const listener = await listening(t, (socket) => {
    messages(socket, async (request) => {
      let answer = failure(503, { error: 'overloaded' });
      if (opOf(request) === 'decide') {
        // The service gave a permit, and nobody knows.
        await answerOf(service, request);
      } else {
        releases += 1;
        if (releases === 1) {
          const began = performance.now();
          socket.on('close', () => {
            taken = performance.now() - began;
          });
          return;
        }
        if (releases === 4) {
          answer = await answerOf(service, request);
          released();
        }
      }
      socket.write(answer);
    });
  });
  await assert.rejects(open(t, listener.url, { deadline: 150 }).hold(attributes, { cost: 2 }), Unavailable);
  await within(isReleased, 'a release');
  assert.ok((await open(t).peek(attributes, { cost: 2 })).allowed);
  assert.ok(taken > 300, `a short deadline is that of the caller alone, and it was ${taken} ms`);
  assert.deepEqual(warnings, []);
});

test('a release that nobody waits for is given up after some attempts, or some time', async (t) => {
  let releases = 0;
  const listener = await listening(t, (socket) => {
    messages(socket, (request) => {
      if (opOf(request) === 'release') releases += 1;
      socket.write(failure(503, { error: 'overloaded' }));
    });
  });
  const client = open(t, listener.url);
  const { setTimeout: wait } = globalThis;
  const now = performance.now.bind(performance);
  let pauses;
  let skipped;
  let passed = 0;
  const skip = (run, pause, ...rest) => {
    // Other timers are those of deadlines.
    if (pause >= PATIENT / 2) return wait(run, pause, ...rest);
    pauses.push(pause);
    passed += skipped;
    return wait(run, 1, ...rest);
  };
  const hold = async (each) => {
    [releases, pauses, skipped] = [0, [], each];
    const warned = once(process, 'warning');
    [globalThis.setTimeout, performance.now] = [skip, () => now() + passed];
    try {
      await assert.rejects(client.hold(of(t, '/jobs')), Unavailable);
      // `within` has a timer of its own.
      const [warning] = await warned;
      assert.equal(warning.message, "a permit wasn't released: Unavailable: overloaded");
    } finally {
      globalThis.setTimeout = wait;
      delete performance.now;
    }
  };
  await hold(0);
  const first = pauses;
  assert.equal(releases, 8);
  for (const [at, least] of [200, 400, 800, 1600, 2000, 2000, 2000].entries()) {
    assert.ok(first[at] >= least && first[at] <= 2 * least, String(first));
  }
  await hold(8000);
  assert.equal(releases, 3);
  assert.notDeepEqual(pauses, first.slice(0, 2), 'callers that failed together come back at several times');
});

test('at most 256 releases are retried at a time', async (t) => {
  let releases = 0;
  let others = 0;
  let all;
  const isAll = new Promise((resolve) => {
    all = resolve;
  });
  const listener = await listening(t, (socket) => {
    messages(socket, (request) => {
      if (opOf(request) === 'release') releases += 1;
      socket.write(failure(503, { error: 'overloaded' }));
    });
  });
  const note = () => {
    others += 1;
    if (others === 4) all();
  };
  process.on('warning', note);
  t.after(() => process.off('warning', note));
  const client = open(t, listener.url);
  // Those that are retried wait for longer than this process runs. Other timers are those of deadlines.
  const { setTimeout: wait } = globalThis;
  globalThis.setTimeout = (run, pause, ...rest) => wait(run, pause < PATIENT / 2 ? 600_000 : pause, ...rest);
  t.after(() => {
    globalThis.setTimeout = wait;
  });
  const held = Array.from({ length: 260 }, () => assert.rejects(client.hold(of(t, '/jobs')), Unavailable));
  await Promise.all(held);
  await isAll;
  await sleep(100);
  assert.deepEqual([releases, others], [260, 4]);
});

test('an unknown id is no news to a release whose error nobody gets', async (t) => {
  const warnings = warningsOf(t);
  let isFailing = true;
  let asked;
  const isAsked = new Promise((resolve) => {
    asked = resolve;
  });
  const listener = await listening(t, (socket) => {
    messages(socket, async (request) => {
      if (opOf(request) === 'decide') {
        socket.write(isFailing ? failure(503, { error: 'overloaded' }) : await answerOf(service, request));
      } else {
        socket.write(failure(404, { error: 'no rule applies to these attributes', kind: 'unknown-id' }));
        asked();
      }
    });
  });
  const client = open(t, listener.url);
  await assert.rejects(client.hold(of(t, '/jobs')), Unavailable);
  await within(isAsked, 'a release');
  isFailing = false;
  const failing = client.withHold(of(t, '/jobs'), () => {
    throw new RangeError('work');
  });
  await assert.rejects(failing, RangeError);
  assert.equal(await client.withHold(of(t, '/jobs'), () => 'done'), 'done');
  await sleep(200);
  assert.deepEqual(warnings, []);
});

test("a failure policy's answer releases nothing", async (t) => {
  const warnings = warningsOf(t);
  const ops = [];
  let isFailing = true;
  let failures = 1;
  let released;
  const isReleased = new Promise((resolve) => {
    released = resolve;
  });
  const listener = await listening(t, (socket) => {
    messages(socket, async (request) => {
      ops.push(opOf(request));
      if (opOf(request) === 'decide') {
        socket.write(isFailing ? failure(503, { error: 'overloaded' }) : await answerOf(service, request));
      } else if (failures > 0) {
        failures -= 1;
        socket.write(failure(200, { allowed: true, by: 'policy', reason: 'policy', rule: 'jobs', limits: [] }));
      } else {
        socket.write(await answerOf(service, request));
        released();
      }
    });
  });
  const client = open(t, listener.url);
  await assert.rejects(client.hold(of(t, '/jobs')), Unavailable);
  await within(isReleased, 'a release');
  assert.deepEqual(ops.splice(0), ['decide', 'release', 'release']);
  assert.deepEqual(warnings, []);
  isFailing = false;
  failures = 3;
  assert.equal(await client.withHold(of(t, '/jobs'), () => 'done'), 'done');
  await sleep(1);
  assert.deepEqual(ops, ['decide', 'release', 'release', 'release']);
  const expected = "a permit wasn't released: Unavailable: the failure policy of rule jobs answered, not Redis";
  assert.deepEqual(warnings, [expected]);
});

test('a repeated call is charged once', async (t) => {
  const listener = await listening(t, (socket, number) => {
    messages(socket, async (request) => {
      const answer = await answerOf(service, request);
      if (number === 1) socket.destroy();
      else socket.write(answer);
    });
  });
  assert.equal((await open(t, listener.url).decide(of(t, '/requests'), { id: 'x' })).remaining, 9);
});

test('a connection is kept, and replaced if it was closed while unused', async (t) => {
  const kept = await listening(t, (socket) => {
    messages(socket, async (request) => socket.write(await answerOf(service, request)));
  });
  const client = open(t, kept.url);
  for (let turn = 0; turn < 5; turn += 1) await client.decide(of(t, '/requests'));
  assert.equal(kept.accepted, 1);
  const closed = await listening(t, (socket) => {
    messages(socket, async (request) => socket.end(await answerOf(service, request)));
  });
  const other = open(t, closed.url);
  for (const remaining of [4, 3, 2]) {
    assert.equal((await other.decide(of(t, '/requests'))).remaining, remaining);
    await sleep(100);
  }
  assert.equal(closed.accepted, 3);
});

test('garbage is no decision', async (t) => {
  for (const answer of ['what?\r\n\r\n', 'HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}', 'HTTP/1.1 502 Bad\r\n\r\n']) {
    const listener = await listening(t, (socket) => messages(socket, () => socket.end(answer)));
    await assert.rejects(open(t, listener.url).decide(of(t, '/requests')), Unavailable, answer);
  }
});

test("wrong input is thrown with the service's message", async (t) => {
  for (const onError of ['closed', 'open']) {
    const wrong = open(t, service.url, { onError }).decide(of(t, '/requests'), { costs: { x: 1 } });
    await assert.rejects(wrong, { name: 'RequestError', message: /^costs: expected limits of rule requests/, serviceStatus: 409 });
  }
});

test('a token', async (t) => {
  const tokens = join(redis.folder, 'tokens');
  writeFileSync(tokens, 'secret\n');
  const guarded = await startService(redis, '127.0.0.1:0', '--tokens', tokens);
  t.after(() => guarded.end());
  assert.ok((await open(t, guarded.url, { token: 'secret' }).decide(of(t, '/requests'))).allowed);
  for (const token of [undefined, 'wrong']) {
    const refused = open(t, guarded.url, { token, onError: 'open' }).decide(of(t, '/requests'));
    await assert.rejects(refused, { name: 'RequestError', serviceStatus: 401, message: /token/ });
  }
  assert.throws(() => open(t, guarded.url, { token: 'two\r\nlines' }));
});

test('a Unix socket, and a restart', async (t) => {
  const path = `unix:${redis.folder}/serve.sock`;
  const first = await startService(redis, path);
  const client = open(t, path);
  assert.equal((await client.decide(of(t, '/requests'))).remaining, 9);
  await first.end();
  const second = await startService(redis, path);
  t.after(() => second.end());
  assert.equal((await client.decide(of(t, '/requests'))).remaining, 8);
});

test('wrong settings', (t) => {
  assert.throws(() => open(t, '127.0.0.1:8080'), TypeError);
  assert.throws(() => open(t, 'ftp://x'), TypeError);
  assert.throws(() => open(t, service.url, { onError: 'local' }), TypeError);
  assert.throws(() => open(t, service.url, { deadline: 0 }), TypeError);
});
