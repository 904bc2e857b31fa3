/**
 * A client of tollgate-serve, the rate limit service, by HTTP with JSON, and a middleware for Express. README.md says
 * what each call costs, and what happens if the service doesn't answer.
 */

import { randomUUID } from 'node:crypto';
import http from 'node:http';
import https from 'node:https';
import { isIP } from 'node:net';
import { setTimeout as sleep } from 'node:timers/promises';

/** Milliseconds that a call takes at most. The service gives Redis 15 ms; the rest is for the network and busy processes. */
const DEADLINE = 100;

/** How long a connection is kept unused. The service closes it after 10 s, and a request that is sent meanwhile fails. */
const IDLE_MS = 5000;
const IDLE_CONNECTIONS = 64;

/** Milliseconds between the attempts to release a permit. After the last one, it comes back at its ttl. */
const RELEASE_PAUSES = [50, 200];

/** The least deadline, in milliseconds, of a release that nobody waits for: one given up early would only be repeated. */
const UNREAD_DEADLINE = 500;
/**
 * Milliseconds between its attempts while the service is away. Each is lengthened randomly, up to twice, so that callers
 * that failed together don't retry together. After the last attempt, the permit comes back at its ttl.
 */
const UNREAD_PAUSES = [200, 400, 800, 1600, 2000, 2000, 2000];
/** A failure so many milliseconds after the first one isn't retried. */
const UNREAD_PATIENCE = 15_000;
/** At most so many of a client's are retried at a time. Others are tried once. */
const UNREAD_RETRIED = 256;

/**
 * @typedef {Record<string, string | number | boolean>} Attributes What rules match and count.
 *
 * @typedef {object} Options
 * @property {number} [cost] Units to take; the rule's cost if absent.
 * @property {Record<string, number>} [costs] Units to take of single limits, by the limit's name or its cost's attribute.
 * @property {string} [id] A unique id: the request is charged once, however often it is sent.
 *
 * @typedef {object} Settings
 * @property {string} [token] Sent as `Authorization: Bearer`.
 * @property {number} [deadline] Milliseconds that a call takes at most: 100 unless set.
 * @property {'closed' | 'open'} [onError] Without a decision: throw (`closed`, unless set) or allow (`open`).
 * @property {https.AgentOptions} [tls] For `https:`, such as `{ ca }`.
 *
 * @typedef {object} RateLimitSettings
 * @property {(request: any) => Record<string, any> | Promise<Record<string, any>>} [attributes]
 * @property {(message: string) => void} [warn] Such as `console.warn`.
 *
 * @typedef {number | 'never' | null} RetryAfter Microseconds until the same request would be allowed; null if it was.
 *
 * @typedef {object} Limit One limit's part of a decision.
 * @property {string} [rule]
 * @property {string} [algorithm] Such as `token-bucket` or `concurrency`; absent from a service that doesn't say.
 * @property {string} name
 * @property {string} key
 * @property {boolean} allowed
 * @property {number} limit
 * @property {number} remaining
 * @property {RetryAfter} retryAfterUs
 * @property {number} resetAfterUs
 *
 * @typedef {object} Decision What the service decided. Times are in microseconds.
 * @property {boolean} allowed
 * @property {number} status The status to answer a denied request with, such as 429.
 * @property {string} reason
 * @property {string | null} rule
 * @property {string | null} key
 * @property {number | null} cost
 * @property {number | null} limit
 * @property {number | null} remaining
 * @property {RetryAfter} retryAfterUs
 * @property {number | null} resetAfterUs
 * @property {string | null} deniedBy
 * @property {string} by What decided: `redis`, `rules`, or `policy` if it was the failure policy of the rule or this client.
 * @property {Limit[]} limits
 * @property {string} [id]
 * @property {string} [message]
 * @property {string} [error] The kind of the error, if a failure policy decided.
 * @property {Unavailable} [cause] The error, if this client's policy decided.
 * @property {Record<string, string>} headers `ratelimit`, `ratelimit-policy` and `retry-after`, or those of another style.
 * @property {Record<string, any>} raw The whole answer.
 */

/** The root of this package's errors. */
export class TollgateError extends Error {
  /** @param {string} message @param {ErrorOptions} [options] */
  constructor(message, options) {
    super(message, options);
    this.name = new.target.name;
  }
}

/**
 * The service refused the request as it is: wrong input (400), a wrong token (401), or another 4xx. Express answers a
 * visitor with an error's `status`, but this one is the service's, to the application: so it has another name. `reason`
 * tells it from others of its kind: `ambiguous-path` of a path that can be read in two ways.
 */
export class RequestError extends TollgateError {
  /** @param {string} message @param {number} serviceStatus @param {string} [kind] @param {string} [reason] */
  constructor(message, serviceStatus, kind, reason) {
    super(message);
    this.serviceStatus = serviceStatus;
    this.kind = kind;
    this.reason = reason;
  }
}

/** Nothing is remembered for the id: it expired, was cancelled or released, or never existed (404). */
export class UnknownId extends RequestError {}

/**
 * There is no decision: the service is unreachable, too slow, or answered with a failure (5xx). `kind` is the service's,
 * or of this client: `unreachable`, `deadline`, `disconnected`, `garbled`, `unavailable`. `charged` says whether units
 * were taken all the same; null: unknown.
 */
export class Unavailable extends TollgateError {
  /** @param {string} message @param {string} kind @param {boolean | null} [charged] @param {unknown} [cause] */
  constructor(message, kind, charged = null, cause) {
    super(message, { cause });
    this.kind = kind;
    this.charged = charged;
  }
}

/** `hold` got no permit. `decision` says why, and for how long. */
export class Denied extends TollgateError {
  /** @param {Decision} decision */
  constructor(decision) {
    super(decision.message ?? `denied by rule ${decision.rule}`);
    this.decision = decision;
  }
}

/** Connections are kept, one for each call at a time. */
export class Client {
  /** @type {typeof http | typeof https} */
  #transport = http;
  /** @type {http.RequestOptions} */
  #target;
  #prefix = '';
  /** @type {http.Agent} */
  #agent;
  #deadline;
  #onError;
  #retried = 0;

  /** @param {string} url `http://HOST:PORT`, `https://HOST` or `unix:PATH` @param {Settings} [settings] */
  constructor(url, { token, deadline = DEADLINE, onError = 'closed', tls } = {}) {
    if (onError !== 'closed' && onError !== 'open') {
      throw new TypeError(`onError: expected 'closed' or 'open', got ${onError}`);
    }
    if (!(deadline > 0)) throw new TypeError(`deadline: expected milliseconds, more than 0, got ${deadline}`);
    this.#deadline = deadline;
    this.#onError = onError;
    const kept = { keepAlive: true, maxFreeSockets: IDLE_CONNECTIONS, timeout: IDLE_MS };
    const path = /^unix:(\/\/(?=\/))?(.+)$/.exec(url)?.[2];
    if (path !== undefined) {
      this.#target = { socketPath: path };
      this.#agent = new http.Agent(kept);
    } else {
      const parsed = new URL(url);
      if (parsed.protocol !== 'http:' && parsed.protocol !== 'https:') {
        throw new TypeError(`url: expected http://HOST:PORT, https://HOST or unix:PATH, got ${url}`);
      }
      const isTls = parsed.protocol === 'https:';
      this.#transport = isTls ? https : http;
      // The brackets of an IPv6 address are of the URL alone.
      this.#target = { host: parsed.hostname.replace(/^\[|\]$/g, ''), port: parsed.port || (isTls ? 443 : 80) };
      this.#prefix = parsed.pathname.replace(/\/$/, '');
      this.#agent = isTls ? new https.Agent({ ...tls, ...kept }) : new http.Agent(kept);
    }
    this.#target.headers = { 'content-type': 'application/json' };
    if (token !== undefined) {
      http.validateHeaderValue('authorization', token);
      this.#target.headers.authorization = `Bearer ${token}`;
    }
  }

  /** Closes the connections. */
  close() {
    this.#agent.destroy();
  }

  /**
   * Takes what the request costs, or denies it and takes nothing. One round trip. With an `id` it is charged once, however
   * often it is sent, and can be settled or cancelled.
   * @param {Attributes} attributes
   * @param {Options & { idTtlMs?: number }} [options]
   */
  decide(attributes, options) {
    return this.#ask('decide', request(attributes, options));
  }

  /** What `decide` would answer; takes nothing. @param {Attributes} attributes @param {Options} [options] */
  peek(attributes, options) {
    return this.#ask('peek', request(attributes, options));
  }

  /**
   * Gives the cost back. With an `id` of its own it is given back once, however often it is sent.
   * @param {Attributes} attributes
   * @param {Options} [options]
   */
  refund(attributes, options) {
    return this.#ask('refund', request(attributes, options));
  }

  /**
   * Replaces what `decide` took under this id by this cost, once. The attributes are those of that call.
   * @param {Attributes} attributes
   * @param {Options & { id: string }} options
   */
  settle(attributes, options) {
    return this.#ask('settle', request(attributes, options));
  }

  /** Gives back what `decide` took under this id. @param {Attributes} attributes @param {string} id */
  cancel(attributes, id) {
    return this.#ask('cancel', request(attributes, { id }));
  }

  /**
   * Extends the permits that are held under this id to a whole ttl from now. `hold` does it by itself.
   * @param {Attributes} attributes
   * @param {string} id
   */
  renew(attributes, id) {
    return this.#ask('renew', request(attributes, { id }));
  }

  /**
   * Gives back the permits that are held under this id. `hold` does it by itself.
   * @param {Attributes} attributes
   * @param {string} id
   */
  release(attributes, id) {
    return this.#ask('release', request(attributes, { id }));
  }

  /**
   * Takes permits, and renews them until `release`, or to the end of the block with `await using`. Throws `Denied` if
   * there are none, and `RequestError` if the rule that applies has no permits, or no rule applies.
   * @param {Attributes} attributes
   * @param {Pick<Options, 'cost' | 'costs'>} [options]
   * @returns {Promise<Permit>}
   */
  async hold(attributes, { cost, costs } = {}) {
    const asked = request(attributes, { cost, costs, id: randomUUID() });
    const byId = { attributes: asked.attributes, id: asked.id };
    const began = performance.now();
    /** @type {Decision} */
    let decision;
    try {
      decision = await this.#send('decide', asked);
    } catch (error) {
      const goesOn = error instanceof Unavailable && this.#onError === 'open';
      // The service may have given a permit all the same.
      if (!goesOn && mayHaveTaken(error)) void this.#releaseUnread(byId);
      if (!(error instanceof Unavailable)) throw error;
      decision = this.#byPolicy('decide', asked, error);
    }
    if (!decision.allowed) throw new Denied(decision);
    const why = whyWithoutPermits(decision);
    if (why !== undefined) {
      if (decision.limits.length > 0) await this.#send('cancel', byId).catch(warnOfCancel);
      throw new RequestError(why, 409, 'input');
    }
    // A rule that allows without limits has no permits.
    const isHeld = decision.by !== 'rules' && decision.cause?.charged !== false;
    return new Permit(/** @type {string} */ (asked.id), decision, began, {
      renew: () => this.#send('renew', byId),
      release: async () => {
        if (isHeld) await this.#release(byId);
      },
    });
  }

  /**
   * Calls this function while permits are held, and gives them back, also if it throws.
   * @template T
   * @param {Attributes} attributes
   * @param {(permit: Permit) => T | Promise<T>} work
   * @param {Pick<Options, 'cost' | 'costs'>} [options]
   * @returns {Promise<T>}
   */
  async withHold(attributes, work, options) {
    const permit = await this.hold(attributes, options);
    try {
      return await work(permit);
    } finally {
      await permit.release();
    }
  }

  /** @param {Asked} byId */
  async #release(byId) {
    for (let attempt = 0; ; attempt += 1) {
      try {
        expectRelease(await this.#send('release', byId));
        return;
      } catch (error) {
        if (!(error instanceof Unavailable) || attempt === RELEASE_PAUSES.length) {
          // The work is done.
          warnOfRelease(error);
          return;
        }
        await sleep(RELEASE_PAUSES[attempt]);
      }
    }
  }

  /** For nobody who waits: again for some seconds while the service is away. @param {Asked} byId */
  async #releaseUnread(byId) {
    const pauses = this.#unreadPauses();
    try {
      for (;;) {
        try {
          expectRelease(await this.#send('release', byId, Math.max(this.#deadline, UNREAD_DEADLINE)));
          return;
        } catch (error) {
          const pause = error instanceof Unavailable ? pauses.next().value : undefined;
          if (pause === undefined) {
            warnOfRelease(error);
            return;
          }
          // A process that has nothing else to do ends.
          await new Promise((resolve) => setTimeout(resolve, pause).unref());
        }
      }
    } finally {
      pauses.return(undefined);
    }
  }

  /**
   * Milliseconds until each further attempt, begun at the first failure.
   * @returns {Generator<number, undefined, void>}
   */
  *#unreadPauses() {
    if (this.#retried >= UNREAD_RETRIED) return undefined;
    this.#retried += 1;
    try {
      const until = performance.now() + UNREAD_PATIENCE;
      for (const pause of UNREAD_PAUSES) {
        if (performance.now() > until) break;
        yield pause * (1 + Math.random());
      }
      return undefined;
    } finally {
      this.#retried -= 1;
    }
  }

  /** @param {string} op @param {Asked} asked @returns {Promise<Decision>} */
  async #ask(op, asked) {
    try {
      return await this.#send(op, asked);
    } catch (error) {
      if (!(error instanceof Unavailable)) throw error;
      return this.#byPolicy(op, asked, error);
    }
  }

  /** @param {string} op @param {Asked} asked @param {Unavailable} failure @returns {Decision} */
  #byPolicy(op, asked, failure) {
    // A renewal that fails is no permission to go on: the permit may be another's by now.
    if (this.#onError === 'closed' || op === 'renew') throw failure;
    return {
      ...{ allowed: true, status: 200, reason: 'policy', rule: null, key: null, cost: null, limit: null },
      ...{ remaining: null, retryAfterUs: null, resetAfterUs: null, deniedBy: null, by: 'policy', limits: [] },
      ...{ id: asked.id, error: failure.kind, cause: failure, headers: {}, raw: {} },
    };
  }

  /** @param {string} op @param {Asked} asked @param {number} [deadline] @returns {Promise<Decision>} */
  async #send(op, asked, deadline = this.#deadline) {
    const body = JSON.stringify(asked);
    const time = { deadline, ends: performance.now() + deadline };
    let answered;
    try {
      answered = await this.#exchange(op, body, time);
    } catch (earlier) {
      if (!(earlier instanceof Unavailable) || !mayRepeat(op, asked, earlier)) throw earlier;
      try {
        return answer(await this.#exchange(op, body, time));
      } catch (error) {
        // That the second attempt took nothing doesn't tell what the first one took.
        if (error instanceof Unavailable && earlier.charged === null && error.charged === false) error.charged = null;
        if (error instanceof RequestError) error.cause = earlier;
        throw error;
      }
    }
    return answer(answered);
  }

  /**
   * @param {string} op
   * @param {string} body
   * @param {{ deadline: number, ends: number }} time
   * @returns {Promise<Answer>}
   */
  async #exchange(op, body, time) {
    for (;;) {
      const [sent, outcome] = this.#post(op, body, time);
      try {
        return await outcome;
      } catch (error) {
        if (error instanceof Unavailable) throw error;
        const { code, message, syscall } = /** @type {NodeJS.ErrnoException} */ (error);
        // The service never had the whole request: it had closed this connection, which wasn't used for a while.
        if (sent.reusedSocket && !sent.writableFinished) continue;
        if (syscall === 'connect' || syscall === 'getaddrinfo') {
          throw new Unavailable(`the service can't be reached: ${message || code}`, 'unreachable', false, error);
        }
        const kind = code?.startsWith('HPE_') ? 'garbled' : 'disconnected';
        throw new Unavailable(`the connection broke: ${message}`, kind, sent.writableFinished ? null : false, error);
      }
    }
  }

  /**
   * @param {string} op
   * @param {string} body
   * @param {{ deadline: number, ends: number }} time
   * @returns {[http.ClientRequest, Promise<Answer>]}
   */
  #post(op, body, { deadline, ends }) {
    const sent = this.#transport.request({
      ...this.#target,
      method: 'POST',
      path: `${this.#prefix}/v1/${op}`,
      agent: this.#agent,
      headers: { ...this.#target.headers, 'content-length': Buffer.byteLength(body) },
    });
    const outcome = new Promise((resolve, reject) => {
      const timer = setTimeout(() => {
        const charged = sent.writableFinished ? null : false;
        reject(new Unavailable(`no answer within ${deadline} ms`, 'deadline', charged));
        // With its connection, so that a late answer isn't read as that to another call.
        sent.destroy();
      }, Math.max(0, ends - performance.now()));
      sent.on('error', reject);
      sent.on('close', () => clearTimeout(timer));
      sent.on('response', (response) => {
        /** @type {Buffer[]} */
        const chunks = [];
        response.on('error', reject);
        response.on('data', (chunk) => chunks.push(chunk));
        response.on('end', () => {
          clearTimeout(timer);
          const { statusCode = 0, headers } = response;
          resolve({ status: statusCode, headers, content: Buffer.concat(chunks).toString() });
        });
      });
      sent.end(body);
    });
    return [sent, outcome];
  }
}

/** What `hold` holds. */
export class Permit {
  #lost = new AbortController();
  #calls;
  /** @type {Promise<void> | undefined} */
  #released;
  /** @type {NodeJS.Timeout | undefined} */
  #timer;
  #renewed;
  #ttl;
  #pause;

  /**
   * @param {string} id
   * @param {Decision} decision
   * @param {number} asked
   * @param {{ renew: () => Promise<Decision>, release: () => Promise<void> }} calls
   */
  constructor(id, decision, asked, calls) {
    this.id = id;
    this.decision = decision;
    this.#calls = calls;
    this.#renewed = asked;
    // Other limits of the rule may begin anew earlier or later than the permit expires. A renewal answers for the permits
    // alone; until then the earliest time is right for the first renewal, and the latest for a loss.
    const times = decision.limits.map((limit) => limit.resetAfterUs / 1000).filter((time) => time > 0);
    this.#pause = times.length > 0 ? Math.min(...times) / 3 : 0;
    this.#ttl = Math.max(0, ...times);
    if (this.#pause > 0) this.#wait(this.#pause);
  }

  /** Aborted once the permit has expired, or may have, so that others may hold it. @returns {globalThis.AbortSignal} */
  get signal() {
    return this.#lost.signal;
  }

  /** Whether the permit has expired, or may have, so that others may hold it. */
  get lost() {
    return this.#lost.signal.aborted;
  }

  /** Gives the permit back. If that fails, it comes back at its ttl, and a warning is emitted. */
  release() {
    clearTimeout(this.#timer);
    this.#released ??= this.#calls.release();
    return this.#released;
  }

  /** At the end of a block with `await using`. */
  [Symbol.asyncDispose]() {
    return this.release();
  }

  /** @param {number} pause */
  #wait(pause) {
    // A timer of more than 24.8 days would fire at once.
    this.#timer = setTimeout(() => void this.#renew(), Math.min(pause, 2 ** 31 - 1));
    this.#timer.unref();
  }

  async #renew() {
    const asked = performance.now();
    try {
      const { limits } = await this.#calls.renew();
      this.#renewed = asked;
      this.#ttl = Math.min(...limits.map((limit) => limit.resetAfterUs / 1000));
      this.#pause = this.#ttl / 3;
      if (!this.#released) this.#wait(this.#pause);
    } catch (error) {
      if (this.#released) return;
      if (error instanceof Unavailable) {
        if (performance.now() - this.#renewed >= this.#ttl) this.#lost.abort();
        this.#wait(Math.max(this.#pause / 3, 10));
      } else if (error instanceof UnknownId) {
        this.#lost.abort();
      }
      // Otherwise the rule has no permits, which the release reports.
    }
  }
}

/**
 * Decides on each request to an Express application before its handlers see it. The attributes are `ip` (Express's, which
 * knows trusted proxies), `method` and `path`, and what `attributes` makes of the request (it may be async), such as a
 * `user`; undefined there removes one. A denial is answered with the decision's status. Without a decision, a client that
 * is `closed` answers 503, and a path that can be read in two ways gets 400. What else the service refuses to decide is
 * answered 500: the visitor can't mend it. `warn` is told of that, and of what an `open` client lets pass without a
 * decision, at most once a second; it emits a process warning unless set.
 * @param {Client} client
 * @param {RateLimitSettings} [settings]
 * @returns {(request: any, response: any, next: (error?: unknown) => void) => Promise<void>}
 */
export function rateLimit(client, { attributes, warn: report = warn } = {}) {
  let warned = -Infinity;
  // A failure that every request meets must not fill the log.
  const warnSeldom = (/** @type {string} */ message) => {
    const now = performance.now();
    if (now - warned < 1000) return;
    warned = now;
    report(message);
  };
  /** @param {http.ServerResponse} response @param {string} why */
  const refuseUnfit = (response, why) => {
    warnSeldom(`a request is answered 500, since its rate limit can't be decided: ${why}`);
    refuse(response, 500, undefined, {});
  };
  return async (request, response, next) => {
    let decision;
    // The path as it was sent: the service decodes it itself, and must not decode it twice.
    const { method, originalUrl: path = request.url } = request;
    let more;
    try {
      const address = String(request.ip ?? request.socket.remoteAddress ?? '').split('%')[0];
      const ip = isIP(address) ? address : undefined;
      // JSON leaves out what is undefined.
      more = await attributes?.(request);
      decision = await client.decide(/** @type {any} */ ({ ip, method, path, ...more }));
    } catch (error) {
      const isVisitors = (more?.path ?? path) === path;
      if (error instanceof RequestError && error.reason === 'ambiguous-path' && isVisitors) {
        refuse(response, 400, 'the path can be read in two ways', {});
      } else if (error instanceof RequestError) {
        refuseUnfit(response, withAdvice(error));
      } else if (error instanceof Unavailable) {
        warn(error);
        refuse(response, 503, "rate limits can't be checked now", {});
      } else {
        next(error);
      }
      return;
    }
    // A rule's own status is meant for the visitor.
    if (decision.reason === 'missing' && decision.status === 400) {
      const needs = `rule ${decision.rule} needs the attribute ${decision.raw.missing}, which this request lacks`;
      const advice = "add it by the middleware's attributes, or let the rule match only requests that have it";
      refuseUnfit(response, `${needs}: ${advice}`);
      return;
    }
    if (decision.cause) warnSeldom(`requests pass without a decision: ${decision.cause.message}`);
    if (!decision.allowed) {
      refuse(response, decision.status, decision.message, decision.headers);
      return;
    }
    for (const [name, value] of Object.entries(decision.headers)) response.setHeader(name, value);
    next();
  };
}

/** @param {http.ServerResponse} response @param {number} status @param {string | undefined} detail @param {Record<string, string>} headers */
function refuse(response, status, detail, headers) {
  const problem = { type: 'about:blank', title: http.STATUS_CODES[status] ?? 'Denied', status, detail };
  const own = { 'content-type': 'application/problem+json', 'cache-control': 'no-store' };
  response.writeHead(status, { ...own, ...headers }).end(JSON.stringify(problem));
}

/** @param {RequestError} error */
function withAdvice({ message }) {
  if (!message.startsWith('id: it is missing')) return message;
  return `${message}; let a rule with permits match an attribute that only hold sends`;
}

/**
 * Why a decision that allows gave no permits, though `hold` asked for them; undefined if it may have, or needn't.
 * @param {Decision} decision
 */
function whyWithoutPermits({ by, reason, rule, limits, raw }) {
  // A failure policy knows no limits.
  if (by === 'policy') return undefined;
  if (reason === 'no-rule') {
    // A shadow rule is being tried, and must not stop anything.
    return raw.shadows?.length > 0 ? undefined : 'hold: no rule with permits applies to these attributes';
  }
  // Who is exempt, by a rule or a list that allows, has no limits, and needs no permit. A service that names no algorithm
  // refuses the release.
  const mayHold = limits.length === 0 || limits.some(({ algorithm }) => !algorithm || algorithm === 'concurrency');
  if (mayHold) return undefined;
  const advice = 'give it one, or let a rule that has one match these attributes first';
  return `hold: rule ${rule} has no concurrency limit: ${advice}`;
}

/** @typedef {{ status: number, headers: http.IncomingHttpHeaders, content: string }} Answer */
/** @typedef {Options & { attributes: Attributes, id_ttl_ms?: number }} Asked */

/** @param {Attributes} attributes @param {Options & { idTtlMs?: number }} [options] @returns {Asked} */
function request(attributes, { cost, costs, id, idTtlMs } = {}) {
  return { attributes: { ...attributes }, cost, costs, id, id_ttl_ms: idTtlMs };
}

/**
 * Whether sending it again can't charge twice, and may help. A slow service isn't asked more for being slow. The failure
 * is of the connection to the service: an answer, whose kinds have the same names, is never asked for again.
 * @param {string} op @param {Asked} asked @param {Unavailable} failure
 */
function mayRepeat(op, asked, failure) {
  return ['unreachable', 'disconnected'].includes(failure.kind) && (op === 'peek' || asked.id !== undefined);
}

/** Whether a call that failed with this may have taken units all the same. @param {unknown} error */
function mayHaveTaken(error) {
  // An answer to the second attempt doesn't tell what the first one took.
  const failure = error instanceof RequestError ? error.cause : error;
  return failure instanceof Unavailable && failure.charged !== false;
}

/**
 * The decision in an answer. A denial may have any status, so the body tells whether it is a decision.
 * @param {Answer} answer
 * @returns {Decision}
 */
function answer({ status, headers, content }) {
  /** @type {any} */
  let body;
  try {
    body = JSON.parse(content);
  } catch {
    // Of a proxy, for example.
  }
  if (typeof body?.allowed === 'boolean' && Array.isArray(body.limits)) {
    const isForClients = (/** @type {string} */ name) => /^(retry-after$|ratelimit|x-ratelimit-)/.test(name);
    return {
      ...camelCased(body),
      limits: body.limits.map(camelCased),
      status,
      headers: Object.fromEntries(Object.entries(headers).filter(([name]) => isForClients(name))),
      raw: body,
    };
  }
  const message = String(body?.error ?? (content.trim().slice(0, 200) || `status ${status}`));
  const isRefused = status >= 400 && status < 500 && status !== 408 && status !== 429;
  const Refused = body?.kind === 'unknown-id' ? UnknownId : RequestError;
  if (isRefused) throw new Refused(message, status, body?.kind, body?.reason);
  if (status < 400) throw new Unavailable(`the answer is no decision: ${message}`, 'garbled');
  throw new Unavailable(message, body?.kind ?? 'unavailable', body?.charged ?? null);
}

/** @param {Record<string, any>} body @returns {any} */
function camelCased(body) {
  const camel = (/** @type {string} */ name) => name.replace(/_(.)/g, (_, letter) => letter.toUpperCase());
  return Object.fromEntries(Object.entries(body).map(([name, value]) => [camel(name), value]));
}

/** @param {unknown} error */
function warn(error) {
  process.emitWarning(error instanceof Error ? `${error.name}: ${error.message}` : String(error), 'TollgateWarning');
}

/**
 * Of a release whose error no caller gets. An id that nothing is remembered for has no permits to give back.
 * @param {unknown} error
 */
function warnOfRelease(error) {
  if (!(error instanceof UnknownId)) warn(`a permit wasn't released: ${error}`);
}

/**
 * Throws where a failure policy answered a release: Redis was away, and nothing is known to be released.
 * @param {Decision} decision
 */
function expectRelease({ by, rule, error }) {
  if (by !== 'policy') return;
  throw new Unavailable(`the failure policy of rule ${rule} answered, not Redis`, error ?? 'unavailable');
}

/** @param {unknown} error */
function warnOfCancel(error) {
  warn(`what hold took of a rule without permits wasn't given back: ${error}`);
}
