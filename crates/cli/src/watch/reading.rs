//! One reading of a node's INFO, and what the difference of two says.

use std::time::Instant;

use super::snapshot::{Figures, rounded};
use crate::info::Fields;

/// The commands that call a script.
const CALLS: [&str; 4] = ["evalsha", "eval", "evalsha_ro", "eval_ro"];

#[derive(Clone, Debug)]
pub(super) struct Reading {
    pub(super) at: Instant,
    pub(super) info: Fields,
    /// The database that the limits are in.
    pub(super) database: i64,
}

/// Calls of scripts between two readings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ScriptCalls {
    pub(super) command: &'static str,
    pub(super) calls: u64,
    pub(super) us: u64,
}

impl Reading {
    /// The microseconds that a call of this command takes on average; none if it was never called.
    pub(super) fn us_per_call(&self, command: &str) -> Option<f64> {
        stat(&self.info, command, "usec_per_call").and_then(|number| number.parse().ok())
    }

    pub(super) fn evicts_by_frequency(&self) -> bool {
        self.info.text("maxmemory_policy").is_some_and(|policy| policy.ends_with("lfu"))
    }

    pub(super) fn keys(&self) -> u64 {
        let of_database = self.info.text(&format!("db{}", self.database));
        let keys = of_database.and_then(|line| line.strip_prefix("keys=")?.split(',').next()?.parse().ok());
        keys.unwrap_or(0)
    }

    /// The numbers now, and rates since the reading before, if that was of the same process.
    pub(super) fn since(&self, before: Option<&Self>) -> (Figures, Vec<ScriptCalls>) {
        let same = |before: &&Self| {
            before.info.text("run_id") == self.info.text("run_id")
                // CONFIG RESETSTAT sets counts back to 0.
                && before.count("total_commands_processed") <= self.count("total_commands_processed")
        };
        let restarted = before.is_some_and(|before| before.info.text("run_id") != self.info.text("run_id"));
        let before = before.filter(same);
        let seconds = before.map_or(0.0, |before| (self.at - before.at).as_secs_f64());
        let per_second = |name: &str| {
            let before = before.filter(|_| seconds > 0.0)?;
            let (from, to) = (before.info.number(name)?, self.info.number(name)?);
            Some(rounded(to.saturating_sub(from) as f64 / seconds, 1))
        };
        let calls = before.map(|before| self.script_calls(before)).unwrap_or_default();
        let (count, us) = calls.iter().fold((0, 0), |(count, us), calls| (count + calls.calls, us + calls.us));
        let text = |name: &str| self.info.text(name).unwrap_or_default().to_owned();
        let figures = Figures {
            version: self.version(),
            role: text("role"),
            uptime_seconds: self.count("uptime_in_seconds"),
            restarted,
            used_memory: self.count("used_memory"),
            maxmemory: self.count("maxmemory"),
            maxmemory_policy: text("maxmemory_policy"),
            keys: self.keys(),
            clients: self.count("connected_clients"),
            evicted: self.count("evicted_keys"),
            evicted_per_second: per_second("evicted_keys"),
            expired_per_second: per_second("expired_keys"),
            commands_per_second: per_second("total_commands_processed"),
            errors_per_second: per_second("total_error_replies"),
            cpu_share: before.and_then(|before| self.cpu_share(before, seconds)),
            script_calls_per_second: (seconds > 0.0).then(|| rounded(count as f64 / seconds, 1)),
            script_us_per_call: (count > 0).then(|| rounded(us as f64 / count as f64, 2)),
            evalsha_p50_us: self.percentile("p50"),
            evalsha_p99_us: self.percentile("p99"),
            watch_share: None,
        };
        (figures, calls)
    }

    fn count(&self, name: &str) -> u64 {
        self.info.number(name).unwrap_or(0)
    }

    /// Besides its own version, Valkey reports the version of Redis that it is compatible with.
    fn version(&self) -> String {
        match (self.info.text("valkey_version"), self.info.text("redis_version")) {
            (Some(version), _) => format!("Valkey {version}"),
            (None, Some(version)) => format!("Redis {version}"),
            (None, None) => String::new(),
        }
    }

    fn script_calls(&self, before: &Self) -> Vec<ScriptCalls> {
        let number = |reading: &Self, command, name| {
            stat(&reading.info, command, name).and_then(|number| number.parse::<u64>().ok()).unwrap_or(0)
        };
        let difference = |command, name| number(self, command, name).saturating_sub(number(before, command, name));
        let of =
            |command| ScriptCalls { command, calls: difference(command, "calls"), us: difference(command, "usec") };
        CALLS.into_iter().map(of).filter(|calls| calls.calls > 0).collect()
    }

    /// The time that the main thread has used, in seconds.
    fn cpu(&self) -> Option<f64> {
        let seconds = |name: &str| self.info.text(name)?.parse::<f64>().ok();
        let main = |name: &str| seconds(&format!("{name}_main_thread")).or_else(|| seconds(name));
        Some(main("used_cpu_user")? + main("used_cpu_sys")?)
    }

    fn cpu_share(&self, before: &Self, seconds: f64) -> Option<f64> {
        let used = self.cpu()? - before.cpu()?;
        (seconds > 0.0).then(|| rounded((used / seconds).max(0.0), 4))
    }

    fn percentile(&self, name: &str) -> Option<f64> {
        let line = self.info.text("latency_percentiles_usec_evalsha")?;
        line.split(',').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
    }
}

/// One number of a command's line in `INFO commandstats`.
fn stat<'a>(info: &'a Fields, command: &str, name: &str) -> Option<&'a str> {
    let line = info.text(&format!("cmdstat_{command}"))?;
    line.split(',').find_map(|pair| pair.split_once('=').filter(|(found, _)| *found == name)).map(|(_, number)| number)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn reading(at: Instant, text: &str) -> Reading {
        Reading { at, info: Fields::of_info(text), database: 2 }
    }

    const BEFORE: &str = "redis_version:7.0.15\nrun_id:a\ntotal_commands_processed:100\nevicted_keys:5\n\
        used_cpu_user_main_thread:1.5\nused_cpu_sys_main_thread:0.5\n\
        cmdstat_evalsha:calls=100,usec=1000,usec_per_call=10.00,rejected_calls=0,failed_calls=0\n\
        db0:keys=7,expires=7,avg_ttl=1\ndb2:keys=70,expires=7,avg_ttl=1\n";

    #[test]
    fn rates_are_differences_by_the_time_between() {
        let began = Instant::now();
        let before = reading(began, BEFORE);
        let after = BEFORE
            .replace("processed:100", "processed:500")
            .replace("evicted_keys:5", "evicted_keys:6")
            .replace("main_thread:1.5", "main_thread:1.6")
            .replace("calls=100,usec=1000", "calls=300,usec=4000")
            + "cmdstat_evalsha_ro:calls=10,usec=50,usec_per_call=5.00,rejected_calls=0,failed_calls=0\n\
               latency_percentiles_usec_evalsha:p50=11.007,p99=30.079,p99.9=66.047\n";
        let after = reading(began + Duration::from_secs(2), &after);
        let (figures, calls) = after.since(Some(&before));
        assert_eq!((figures.commands_per_second, figures.evicted_per_second), (Some(200.0), Some(0.5)));
        assert_eq!((figures.cpu_share, figures.keys), (Some(0.05), 70));
        assert_eq!(figures.script_calls_per_second, Some(105.0));
        assert_eq!(figures.script_us_per_call, Some(14.52));
        assert_eq!((figures.evalsha_p50_us, figures.evalsha_p99_us), (Some(11.007), Some(30.079)));
        let evalsha = ScriptCalls { command: "evalsha", calls: 200, us: 3000 };
        assert_eq!(calls, [evalsha, ScriptCalls { command: "evalsha_ro", calls: 10, us: 50 }]);
    }

    #[test]
    fn there_are_no_rates_at_first_nor_after_a_restart_nor_after_a_reset_of_counts() {
        let began = Instant::now();
        let later = reading(began + Duration::from_secs(1), BEFORE);
        let (at_first, _) = later.since(None);
        assert_eq!((at_first.commands_per_second, at_first.restarted), (None, false));
        let (restarted, calls) = later.since(Some(&reading(began, &BEFORE.replace("run_id:a", "run_id:b"))));
        assert_eq!((restarted.commands_per_second, restarted.restarted, calls.len()), (None, true, 0));
        let (reset, _) = later.since(Some(&reading(began, &BEFORE.replace("processed:100", "processed:900"))));
        assert_eq!((reset.commands_per_second, reset.restarted), (None, false));
    }

    #[test]
    fn numbers_that_are_no_numbers_are_missing_ones() {
        let text = "redis_version:\nmaxmemory_policy:\ncmdstat_evalsha:calls=x,usec\ndb2:keys=-1\nused_memory:1e3\n";
        let (figures, _) = reading(Instant::now(), text).since(Some(&reading(Instant::now(), text)));
        assert_eq!((figures.keys, figures.used_memory, figures.cpu_share), (0, 0, None));
    }
}
