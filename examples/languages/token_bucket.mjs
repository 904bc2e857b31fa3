// Decides by tollgate's script token_bucket, for the rule `api`, which is `token-bucket 100/1m burst 20`.
//
//     node token_bucket.mjs USER COST...
//
// Needs `npm install ioredis`, and token_bucket.lua in the working directory. REDIS_URL names the Redis.

import { readFileSync } from "node:fs";
import { Redis } from "ioredis";

const RULE = [20, 1, 600_000, 1, 0]; // capacity, rate, period, tick, max_debt: 1 unit per 600000 us, up to 20 at once
const DEADLINE_MS = 500; // to connect, and for each answer
const ALLOWED_WITHOUT_REDIS = false;
// Redis decides nothing now. Any other answer is one to a mistake: a right that is missing, a wrong argument.
const AWAY =
  /^(LOADING|BUSY|MASTERDOWN|READONLY|OOM|MISCONF|NOREPLICAS|CLUSTERDOWN|TRYAGAIN) |^ERR max number of clients /;

const URL_FORM = /^rediss?:\/\/(([^/?#@%\s]|%[\da-f]{2})*@)?(\[[\da-f:]+\]|[\w.-]+)(:0*[1-9]\d{0,4})?(\/\d*)?$/i;
const url = process.env.REDIS_URL ?? "";
if (!URL_FORM.test(url) || !URL.canParse(url)) { // ioredis would take localhost, or print the password
  console.error("REDIS_URL: expected redis://[user:password@]host:port[/db]");
  process.exit(1);
}
const redis = new Redis(url, {
  connectTimeout: DEADLINE_MS,
  commandTimeout: DEADLINE_MS,
  // A call without an answer may have been charged. By default it would be sent again on the next connection, and one
  // that waits for a connection would be sent after its caller has given up.
  autoResendUnfulfilledCommands: false,
  maxRetriesPerRequest: 0,
  enableOfflineQueue: false,
  enableReadyCheck: false, // it asks INFO, which the smallest user may not
  lazyConnect: true,
  reconnectOnError: (error) => error.message.startsWith("READONLY "), // the primary has become a replica
});
const isMistake = (error) => error.name === "ReplyError" && !AWAY.test(error.message);
// Why a connection was refused, if that is a mistake, until another is ready: a wrong password, no such database.
// ioredis is ready after AUTH or SELECT has failed, too.
let refused, latest;
redis.on("connect", () => { latest = undefined; });
redis.on("ready", () => {
  refused = latest;
  if (refused) redis.status = "reconnecting"; // its connection is closed: a "ready" one would never connect again
});
redis.on("error", (error) => { // at each attempt to connect
  refused = latest = isMistake(error) ? error : undefined;
  if (error.command?.name === "select") redis.disconnect(true); // it would go on in database 0
  console.error(`Redis doesn't decide: ${error.message}`);
});
// A connection's first call sends EVAL, the others EVALSHA; after NOSCRIPT, EVAL.
redis.defineCommand("tokenBucket", { numberOfKeys: 1, lua: readFileSync("token_bucket.lua", "utf8") });

// Whether it is allowed, how many units remain, and the microseconds to wait: 0 for none, -1 for ever.
async function decide(user, cost) {
  // Other bytes of the user than letters, digits and -_.@:/+=,~| are escaped: see lua/sharing.md.
  const key = `tollgate:{${user}}:api/token-bucket-1m`;
  let reply;
  try {
    if (refused) throw refused;
    reply = await redis.tokenBucket(key, ...RULE, cost, "acquire", -1);
  } catch (error) {
    const mistake = error.name === "ReplyError" ? isMistake(error) && error : refused;
    if (mistake) throw new Error(mistake.message); // not the error itself, which has the script's text
    console.error(`Redis doesn't decide: ${error.message}`);
    return { allowed: ALLOWED_WITHOUT_REDIS };
  }
  if (!(reply?.length >= 5 && reply.every(Number.isInteger))) throw new Error(`unexpected reply: ${reply}`);
  const [allowed, , remaining, retryAfterUs] = reply;
  return { allowed: allowed === 1, remaining, retryAfterUs };
}

await redis.connect().catch(() => {});
const [user, ...costs] = process.argv.slice(2);
for (const cost of costs) {
  const { allowed, remaining, retryAfterUs } = await decide(user, Number(cost));
  const verdict = allowed ? "allowed" : "denied";
  if (remaining === undefined) console.log(`${verdict} without Redis`);
  else if (retryAfterUs < 0) console.log(`${verdict}: ${remaining} remaining, never`);
  // For Retry-After in whole seconds, round up.
  else console.log(`${verdict}: ${remaining} remaining, retry after ${(retryAfterUs / 1e6).toFixed(6)} s`);
}
redis.disconnect();
