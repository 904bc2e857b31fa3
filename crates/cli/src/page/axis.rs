//! The axis of time: short labels, with their common part in its title.

use std::time::Duration;

use jiff::Timestamp;

use crate::output::{human, timestamp};

const SECOND_US: u64 = 1_000_000;
const DAY_US: u64 = 86_400 * SECOND_US;

/// The labels of the ends of so many equal intervals, in UTC, and the title of the axis.
pub(crate) fn times(from_us: u64, each_us: u64, count: usize) -> (Vec<String>, String) {
    let ends: Vec<_> =
        (0..=count as u64).map(|number| from_us.saturating_add(number.saturating_mul(each_us))).collect();
    let last = ends.last().copied().unwrap_or(from_us).saturating_sub(1);
    let (labels, common) = match each_us {
        _ if from_us / DAY_US == last / DAY_US => {
            (if each_us.is_multiple_of(60 * SECOND_US) { "%H:%M" } else { "%H:%M:%S" }, "%Y-%m-%d, UTC")
        }
        each if each.is_multiple_of(DAY_US) => ("%m-%d", "UTC, from %Y-%m-%d on"),
        _ => ("%m-%d %H:%M", "UTC, from %Y-%m-%d on"),
    };
    (ends.iter().map(|us| written(*us, labels)).collect(), format!("time, {}", written(from_us, common)))
}

/// The same for a run that begins at time zero.
pub(crate) fn since_start(from_us: u64, each_us: u64, count: usize) -> (Vec<String>, String) {
    let ends = (0..=count as u64).map(|number| from_us.saturating_add(number.saturating_mul(each_us)));
    let label = |us| if us == 0 { "0".to_owned() } else { human(Duration::from_micros(us)) };
    (ends.map(label).collect(), "time since the first call".to_owned())
}

fn written(us: u64, format: &str) -> String {
    let time = i64::try_from(us).ok().and_then(|us| Timestamp::from_microsecond(us).ok());
    time.map_or_else(|| timestamp(us), |time| time.strftime(format).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_as_short_as_they_can_be() {
        let from = 1_431_857_100 * SECOND_US;
        let ends = |each_s: u64, count| {
            let (labels, title) = times(from, each_s * SECOND_US, count);
            (labels[0].clone(), labels[1].clone(), title)
        };
        let owned = |a: &str, b: &str, c: &str| (a.to_owned(), b.to_owned(), c.to_owned());
        assert_eq!(ends(5, 10), owned("10:05:00", "10:05:05", "time, 2015-05-17, UTC"));
        assert_eq!(ends(60, 10), owned("10:05", "10:06", "time, 2015-05-17, UTC"));
        assert_eq!(ends(3600, 40), owned("05-17 10:05", "05-17 11:05", "time, UTC, from 2015-05-17 on"));
        assert_eq!(ends(86_400, 3), owned("05-17", "05-18", "time, UTC, from 2015-05-17 on"));
        // Times beyond any calendar still have an axis.
        assert_eq!(times(u64::MAX - 5, 1 << 50, 2).0.len(), 3);
        assert_eq!(since_start(0, 5 * SECOND_US, 2).0, ["0", "5s", "10s"]);
    }
}
