// The page's programs, as they are printed but for addresses, under the rules that it prints.

import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { join } from 'node:path';
import { test } from 'node:test';

import { CLIENTS, end, startRedis, startServiceWith, within } from './service.mjs';

test("the page's programs run", async (t) => {
  const page = readFileSync(join(CLIENTS, 'node/README.md'), 'utf8');
  const programs = [...page.matchAll(/```js\n(.*?)```/gs)].map((match) => match[1]);
  assert.equal(programs.length, 2);
  let reports = 0;
  const other = createServer((_, response) => {
    reports += 1;
    response.end();
  }).listen(0, '127.0.0.1');
  t.after(() => other.close());
  await once(other, 'listening');
  const redis = await startRedis();
  t.after(() => redis.end());
  const rules = join(redis.folder, 'rules.toml');
  writeFileSync(rules, /```toml\n(.*?)```/s.exec(page)[1]);
  const service = await startServiceWith(rules, redis);
  t.after(() => service.end());
  for (const [at, program] of programs.entries()) {
    const text = program
      .replace("'tollgate-client'", "'../index.mjs'")
      .replace('http://127.0.0.1:8080', service.url)
      .replace('http://127.0.0.1:9000', `http://127.0.0.1:${other.address().port}`)
      // A slow machine must not miss the deadline.
      .replace('deadline: 100', 'deadline: 20_000');
    const file = join(CLIENTS, 'node/tests', `readme-${at}.mjs`);
    writeFileSync(file, text);
    const child = spawn(process.execPath, [file], { stdio: ['ignore', 'inherit', 'inherit'] });
    try {
      assert.deepEqual(await within(once(child, 'exit'), 'the end of a program of the page'), [0, null], program);
    } finally {
      await end(child);
    }
  }
  assert.equal(reports, 1);
});
