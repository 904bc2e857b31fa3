use std::time::Duration;
use tollgate::{Decision, RetryAfter};

fn as_redis_cell(decision: &Decision) -> [i64; 5] {
    let number = |units: u64| i64::try_from(units).unwrap_or(i64::MAX);
    let seconds = |time: Duration| number(time.as_secs() + u64::from(time.subsec_nanos() > 0));
    let retry_after = match decision.retry_after {
        RetryAfter::After(wait) => seconds(wait),
        RetryAfter::Now | RetryAfter::Never => -1,
    };
    let limited = i64::from(!decision.allowed);
    [limited, number(decision.capacity), number(decision.remaining), retry_after, seconds(decision.reset_after)]
}
