// The real service on a Redis of its own, and listeners that fail as networks do.

import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdtempSync, rmSync } from 'node:fs';
import { connect, createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';

export const CLIENTS = fileURLToPath(new URL('../../', import.meta.url));
const SERVE = process.env.TOLLGATE_SERVE;
if (!SERVE) throw new Error('TOLLGATE_SERVE: expected the path of tollgate-serve');

/** Milliseconds that a wait takes at most which isn't about time: this machine may be busy. */
export const PATIENT = 20_000;

/** What this promise gives, or an error that says what it was waited for. */
export async function within(promise, about) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`expected ${about} within ${PATIENT} ms`)), PATIENT);
  });
  try {
    return await Promise.race([promise, late]);
  } finally {
    clearTimeout(timer);
  }
}

/** The next line that this process prints. One that prints none in time is killed: tests would wait for it. */
export async function lineOf(child, about) {
  const ended = once(child, 'exit').then((status) => {
    throw new Error(`expected ${about}, and it ended with ${status}`);
  });
  const lines = createInterface(child.stdout);
  try {
    return (await within(Promise.race([once(lines, 'line'), ended]), about))[0];
  } catch (error) {
    child.kill('SIGKILL');
    throw error;
  }
}

export async function end(child) {
  if (child.exitCode === null && child.signalCode === null) {
    child.kill('SIGKILL');
    await within(once(child, 'exit'), `the end of process ${child.pid}`);
  }
}

export async function startRedis() {
  const folder = mkdtempSync(join(tmpdir(), 'tollgate-'));
  const path = join(folder, 'redis.sock');
  const options = ['--port', '0', '--unixsocket', path, '--save', '', '--dir', folder];
  const child = spawn('redis-server', options, { stdio: 'ignore' });
  for (const until = Date.now() + PATIENT; !existsSync(path); await sleep(10)) {
    if (child.exitCode !== null) throw new Error(`redis-server ended with status ${child.exitCode}`);
    if (Date.now() > until) {
      child.kill('SIGKILL');
      throw new Error(`redis-server made no socket within ${PATIENT} ms`);
    }
  }
  return {
    folder,
    url: `unix://${path}`,
    end: async () => {
      await end(child);
      rmSync(folder, { recursive: true });
    },
  };
}

export function startService(redis, http = '127.0.0.1:0', ...options) {
  return startServiceWith(join(CLIENTS, 'rules.toml'), redis, http, ...options);
}

export async function startServiceWith(rules, redis, http = '127.0.0.1:0', ...options) {
  // Tests must not fail because this machine is busy.
  const own = ['--url', redis.url, '--http', http, '--grpc', 'off', '--metrics', 'off', '--deadline', '5s'];
  const child = spawn(SERVE, [rules, ...own, ...options], { stdio: ['ignore', 'pipe', 'ignore'] });
  const address = /^http (.+)$/.exec(await lineOf(child, 'the address of tollgate-serve'))[1];
  return { address, url: http.startsWith('unix:') ? address : `http://${address}`, end: () => end(child) };
}

/** Accepts connections, and hands each with its number to a function. */
export async function listen(serve, port = 0) {
  const sockets = new Set();
  const listener = createServer((socket) => {
    sockets.add(socket);
    socket.on('error', () => {});
    found.accepted += 1;
    serve(socket, found.accepted);
  });
  listener.listen(port, '127.0.0.1');
  await once(listener, 'listening');
  const found = {
    accepted: 0,
    port: listener.address().port,
    url: `http://127.0.0.1:${listener.address().port}`,
    end: () => {
      listener.close();
      for (const socket of sockets) socket.destroy();
    },
  };
  return found;
}

/** Calls this function for each whole message that comes. */
export function messages(socket, each) {
  let data = Buffer.alloc(0);
  socket.on('data', (more) => {
    data = Buffer.concat([data, more]);
    const head = data.indexOf('\r\n\r\n');
    const length = head < 0 ? 0 : Number(/content-length: *(\d+)/i.exec(data.subarray(0, head).toString())[1]);
    if (head < 0 || data.length < head + 4 + length) return;
    const message = data;
    data = Buffer.alloc(0);
    each(message);
  });
}

export function opOf(request) {
  return /^POST \/v1\/(\w+) /.exec(request)[1];
}

/** An answer that is no decision. */
export function failure(status, body) {
  const content = JSON.stringify(body);
  return `HTTP/1.1 ${status} Failure\r\nContent-Length: ${Buffer.byteLength(content)}\r\n\r\n${content}`;
}

/** What the service answers to these bytes. */
export function answerOf(service, bytes) {
  return new Promise((resolve, reject) => {
    const [host, port] = service.address.split(':');
    const socket = connect(Number(port), host, () => socket.write(bytes));
    socket.setTimeout(PATIENT, () => reject(new Error(`expected an answer of tollgate-serve within ${PATIENT} ms`)));
    socket.on('error', reject);
    socket.on('close', () => reject(new Error('expected an answer of tollgate-serve, and it closed the connection')));
    messages(socket, (message) => {
      resolve(message);
      socket.destroy();
    });
  });
}
