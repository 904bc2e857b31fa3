//! Other limiters, to compare with.

use std::num::NonZero;

use deadpool_redis::{Config, Pool, Runtime};
use throttled::{Quota, RedisRateLimiter};
use tollgate::redis::Client;
use tollgate::redis::aio::ConnectionManager;

/// Names redis-cell's module (`libredis_cell.so`), which `cargo build --release` of the crate `redis-cell` makes.
pub const CELL: &str = "TOLLGATE_REDIS_CELL";

/// A token bucket as commonly published: two fields of a hash, written even on denial. ARGV: capacity, units per
/// second, cost. Written for this comparison after that pattern (COMPARISON.md names two of its kind), in server time
/// as tollgate's scripts are.
pub const PUBLISHED_BUCKET: &str = "\
local capacity = tonumber(ARGV[1])
local rate = tonumber(ARGV[2])
local cost = tonumber(ARGV[3])
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
local bucket = redis.call('HMGET', KEYS[1], 'tokens', 'refilled')
local tokens = tonumber(bucket[1]) or capacity
local refilled = tonumber(bucket[2]) or now
tokens = math.min(capacity, tokens + math.max(0, now - refilled) * rate)
local allowed = 0
if tokens >= cost then
  tokens = tokens - cost
  allowed = 1
end
redis.call('HMSET', KEYS[1], 'tokens', tokens, 'refilled', now)
redis.call('EXPIRE', KEYS[1], math.ceil(capacity / rate) * 2)
return { allowed, math.floor(tokens) }
";

/// A pool of 16, set up as its documentation does.
pub fn pool(url: &str) -> Pool {
    let config = Config::from_url(url);
    config.builder().expect("a good address").max_size(16).runtime(Runtime::Tokio1).build().expect("a pool")
}

/// The crate `throttled`: GCRA in a script, over one shared connection. Its integers have 32 bits.
pub async fn throttled(client: &Client) -> RedisRateLimiter {
    RedisRateLimiter::new(ConnectionManager::new(client.clone()).await.expect("a connection"))
}

/// A million a second, for `throttled`.
pub fn throttled_quota() -> Quota {
    let million = NonZero::new(1_000_000).expect("not zero");
    Quota::per_second(million).with_burst(million)
}

/// The crate `governor`, which decides in the process: four billion a second for each key.
pub fn governor() -> governor::DefaultKeyedRateLimiter<&'static str> {
    governor::RateLimiter::keyed(governor::Quota::per_second(NonZero::<u32>::MAX))
}
