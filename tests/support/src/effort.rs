//! How much a run of the tests tries.

/// How many times as much as by default: `tests/nightly.sh` sets it.
const TIMES: &str = "TOLLGATE_TEST_TIMES";

/// Set by `tests/servers.sh`: what the embedded engine answers doesn't depend on the server.
const ON_REDIS_ALONE: &str = "TOLLGATE_TEST_ON_REDIS_ALONE";

pub fn times() -> u32 {
    match std::env::var(TIMES) {
        Ok(text) => text.parse().ok().filter(|times| *times > 0).unwrap_or_else(|| panic!("{TIMES}: {text}")),
        Err(_) => 1,
    }
}

/// The cases of a property that takes seconds: so many, times the above. A third of them where the server alone is
/// another: the property was tried on Redis, and what a server does otherwise shows in most cases.
pub fn cases(count: u32) -> u32 {
    let count = if on_redis_alone() { count.div_ceil(3) } else { count };
    count * times()
}

pub fn on_redis_alone() -> bool {
    std::env::var_os(ON_REDIS_ALONE).is_some()
}
