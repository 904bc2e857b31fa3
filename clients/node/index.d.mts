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
export function rateLimit(client: Client, { attributes, warn: report }?: RateLimitSettings): (request: any, response: any, next: (error?: unknown) => void) => Promise<void>;
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
    constructor(message: string, options?: ErrorOptions);
}
/**
 * The service refused the request as it is: wrong input (400), a wrong token (401), or another 4xx. Express answers a
 * visitor with an error's `status`, but this one is the service's, to the application: so it has another name. `reason`
 * tells it from others of its kind: `ambiguous-path` of a path that can be read in two ways.
 */
export class RequestError extends TollgateError {
    /** @param {string} message @param {number} serviceStatus @param {string} [kind] @param {string} [reason] */
    constructor(message: string, serviceStatus: number, kind?: string, reason?: string);
    serviceStatus: number;
    kind: string | undefined;
    reason: string | undefined;
}
/** Nothing is remembered for the id: it expired, was cancelled or released, or never existed (404). */
export class UnknownId extends RequestError {
}
/**
 * There is no decision: the service is unreachable, too slow, or answered with a failure (5xx). `kind` is the service's,
 * or of this client: `unreachable`, `deadline`, `disconnected`, `garbled`, `unavailable`. `charged` says whether units
 * were taken all the same; null: unknown.
 */
export class Unavailable extends TollgateError {
    /** @param {string} message @param {string} kind @param {boolean | null} [charged] @param {unknown} [cause] */
    constructor(message: string, kind: string, charged?: boolean | null, cause?: unknown);
    kind: string;
    charged: boolean | null;
}
/** `hold` got no permit. `decision` says why, and for how long. */
export class Denied extends TollgateError {
    /** @param {Decision} decision */
    constructor(decision: Decision);
    decision: Decision;
}
/** Connections are kept, one for each call at a time. */
export class Client {
    /** @param {string} url `http://HOST:PORT`, `https://HOST` or `unix:PATH` @param {Settings} [settings] */
    constructor(url: string, { token, deadline, onError, tls }?: Settings);
    /** Closes the connections. */
    close(): void;
    /**
     * Takes what the request costs, or denies it and takes nothing. One round trip. With an `id` it is charged once, however
     * often it is sent, and can be settled or cancelled.
     * @param {Attributes} attributes
     * @param {Options & { idTtlMs?: number }} [options]
     */
    decide(attributes: Attributes, options?: Options & {
        idTtlMs?: number;
    }): Promise<Decision>;
    /** What `decide` would answer; takes nothing. @param {Attributes} attributes @param {Options} [options] */
    peek(attributes: Attributes, options?: Options): Promise<Decision>;
    /**
     * Gives the cost back. With an `id` of its own it is given back once, however often it is sent.
     * @param {Attributes} attributes
     * @param {Options} [options]
     */
    refund(attributes: Attributes, options?: Options): Promise<Decision>;
    /**
     * Replaces what `decide` took under this id by this cost, once. The attributes are those of that call.
     * @param {Attributes} attributes
     * @param {Options & { id: string }} options
     */
    settle(attributes: Attributes, options: Options & {
        id: string;
    }): Promise<Decision>;
    /** Gives back what `decide` took under this id. @param {Attributes} attributes @param {string} id */
    cancel(attributes: Attributes, id: string): Promise<Decision>;
    /**
     * Extends the permits that are held under this id to a whole ttl from now. `hold` does it by itself.
     * @param {Attributes} attributes
     * @param {string} id
     */
    renew(attributes: Attributes, id: string): Promise<Decision>;
    /**
     * Gives back the permits that are held under this id. `hold` does it by itself.
     * @param {Attributes} attributes
     * @param {string} id
     */
    release(attributes: Attributes, id: string): Promise<Decision>;
    /**
     * Takes permits, and renews them until `release`, or to the end of the block with `await using`. Throws `Denied` if
     * there are none, and `RequestError` if the rule that applies has no permits, or no rule applies.
     * @param {Attributes} attributes
     * @param {Pick<Options, 'cost' | 'costs'>} [options]
     * @returns {Promise<Permit>}
     */
    hold(attributes: Attributes, { cost, costs }?: Pick<Options, "cost" | "costs">): Promise<Permit>;
    /**
     * Calls this function while permits are held, and gives them back, also if it throws.
     * @template T
     * @param {Attributes} attributes
     * @param {(permit: Permit) => T | Promise<T>} work
     * @param {Pick<Options, 'cost' | 'costs'>} [options]
     * @returns {Promise<T>}
     */
    withHold<T>(attributes: Attributes, work: (permit: Permit) => T | Promise<T>, options?: Pick<Options, "cost" | "costs">): Promise<T>;
    #private;
}
/** What `hold` holds. */
export class Permit {
    /**
     * @param {string} id
     * @param {Decision} decision
     * @param {number} asked
     * @param {{ renew: () => Promise<Decision>, release: () => Promise<void> }} calls
     */
    constructor(id: string, decision: Decision, asked: number, calls: {
        renew: () => Promise<Decision>;
        release: () => Promise<void>;
    });
    id: string;
    decision: Decision;
    /** Aborted once the permit has expired, or may have, so that others may hold it. @returns {globalThis.AbortSignal} */
    get signal(): globalThis.AbortSignal;
    /** Whether the permit has expired, or may have, so that others may hold it. */
    get lost(): boolean;
    /** Gives the permit back. If that fails, it comes back at its ttl, and a warning is emitted. */
    release(): Promise<void>;
    /** At the end of a block with `await using`. */
    [Symbol.asyncDispose](): Promise<void>;
    #private;
}
export type Answer = {
    status: number;
    headers: http.IncomingHttpHeaders;
    content: string;
};
export type Asked = Options & {
    attributes: Attributes;
    id_ttl_ms?: number;
};
/**
 * What rules match and count.
 */
export type Attributes = Record<string, string | number | boolean>;
export type Options = {
    /**
     * Units to take; the rule's cost if absent.
     */
    cost?: number | undefined;
    /**
     * Units to take of single limits, by the limit's name or its cost's attribute.
     */
    costs?: Record<string, number> | undefined;
    /**
     * A unique id: the request is charged once, however often it is sent.
     */
    id?: string | undefined;
};
export type Settings = {
    /**
     * Sent as `Authorization: Bearer`.
     */
    token?: string | undefined;
    /**
     * Milliseconds that a call takes at most: 100 unless set.
     */
    deadline?: number | undefined;
    /**
     * Without a decision: throw (`closed`, unless set) or allow (`open`).
     */
    onError?: "closed" | "open" | undefined;
    /**
     * For `https:`, such as `{ ca }`.
     */
    tls?: https.AgentOptions | undefined;
};
export type RateLimitSettings = {
    attributes?: ((request: any) => Record<string, any> | Promise<Record<string, any>>) | undefined;
    /**
     * Such as `console.warn`.
     */
    warn?: ((message: string) => void) | undefined;
};
/**
 * Microseconds until the same request would be allowed; null if it was.
 */
export type RetryAfter = number | "never" | null;
/**
 * One limit's part of a decision.
 */
export type Limit = {
    rule?: string | undefined;
    /**
     * Such as `token-bucket` or `concurrency`; absent from a service that doesn't say.
     */
    algorithm?: string | undefined;
    name: string;
    key: string;
    allowed: boolean;
    limit: number;
    remaining: number;
    retryAfterUs: RetryAfter;
    resetAfterUs: number;
};
/**
 * What the service decided. Times are in microseconds.
 */
export type Decision = {
    allowed: boolean;
    /**
     * The status to answer a denied request with, such as 429.
     */
    status: number;
    reason: string;
    rule: string | null;
    key: string | null;
    cost: number | null;
    limit: number | null;
    remaining: number | null;
    retryAfterUs: RetryAfter;
    resetAfterUs: number | null;
    deniedBy: string | null;
    /**
     * What decided: `redis`, `rules`, or `policy` if it was the failure policy of the rule or this client.
     */
    by: string;
    limits: Limit[];
    id?: string | undefined;
    message?: string | undefined;
    /**
     * The kind of the error, if a failure policy decided.
     */
    error?: string | undefined;
    /**
     * The error, if this client's policy decided.
     */
    cause?: Unavailable | undefined;
    /**
     * `ratelimit`, `ratelimit-policy` and `retry-after`, or those of another style.
     */
    headers: Record<string, string>;
    /**
     * The whole answer.
     */
    raw: Record<string, any>;
};
import http from 'node:http';
import https from 'node:https';
