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

/// The cases of a property that takes seconds: so many, times the above.
pub fn cases(count: u32) -> u32 {
    count * times()
}

pub fn on_redis_alone() -> bool {
    std::env::var_os(ON_REDIS_ALONE).is_some()
}
