//! Which keys are written, and how often, as the server itself reports for short times (`CLIENT TRACKING ... BCAST`).
//!
//! For each turn of its event loop in which keys of the prefix were written, the server sends one message that names
//! them. A denied call writes nothing, so it isn't seen. A key that expires is named too, so after each piece of a
//! look, EXISTS, which isn't a use of a key, finds which keys are still there. Each message costs the server some 50
//! microseconds, and more for each name in it, so tracking is on only as long as the budget allows: always on a quiet
//! server, some milliseconds in each second on a busy one. The command that ends it is queued on the server behind a
//! blocking read (`XREAD BLOCK`), so tracking ends in time even if this process stops, and nothing piles up in the
//! server's memory.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tollgate::redis::{Client, Pipeline, ProtocolVersion, PushInfo, PushKind, Value, from_redis_value};

use super::connection::{Connection, Failure};

/// The budget: microseconds of the server per second, on average.
const BUDGET_US: f64 = 3000.0;
/// What a message costs the server: measured as the main thread's time on Redis 7.0, from 33 to 70 on an idle and on a
/// busy machine.
const MESSAGE_US: f64 = 60.0;
/// What each name in it costs in addition: from 0.3 to 0.5 for 10 to 200 names on an idle Redis 7.0.
const NAME_US: f64 = 0.5;
/// The longest piece of a look, so that a burst can't cost much before the messages are counted.
const LONGEST: Duration = Duration::from_millis(50);
const SHORTEST: Duration = Duration::from_millis(2);
/// The length of a piece before any rate is known.
const AT_FIRST: Duration = Duration::from_millis(20);
/// The most keys of a piece that are checked by EXISTS; the share of them that is gone stands for the others.
const MOST_ASKED: usize = 200;
/// The largest share of the time, which leaves room for the round trips.
const MOST: f64 = 0.9;

#[derive(Debug)]
pub(super) struct Writes {
    connection: Connection,
    pushes: UnboundedReceiver<PushInfo>,
    prefix: String,
    /// What the messages of a second cost the server recently, in microseconds.
    pace: Option<f64>,
    /// What was spent beyond the budget, in microseconds: paid off by not looking.
    debt: f64,
}

/// What was written while tracking was on.
#[derive(Debug, Default)]
pub(super) struct Window {
    pub(super) time: Duration,
    pub(super) messages: u64,
    /// How many names the messages had.
    pub(super) names: u64,
    /// How often each key was written: how many messages named it, except one for its expiry.
    pub(super) keys: HashMap<Vec<u8>, f64>,
    pub(super) pieces: u64,
    /// How many keys were checked by EXISTS.
    pub(super) asked: u64,
}

impl Writes {
    pub(super) async fn open(client: &Client, prefix: &str, deadline: Duration) -> Result<Self, Failure> {
        // Only RESP3 has push messages.
        let info = client.get_connection_info().clone();
        let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
        let client =
            Client::open(info.set_redis_settings(settings)).map_err(|error| Failure::Lost(error.to_string()))?;
        let (sender, pushes) = unbounded_channel();
        let connection = Connection::open(&client, deadline, Some(sender)).await?;
        Ok(Self { connection, pushes, prefix: format!("{prefix}:"), pace: None, debt: 0.0 })
    }

    /// Tracks for a part of this time, spread over it. `nothing` is the name of a key that doesn't exist, in a slot of
    /// this node.
    pub(super) async fn look(&mut self, within: Duration, nothing: &[u8]) -> Result<Window, Failure> {
        let (pieces, each) = plan(self.pace, within);
        let (began, budget) = (Instant::now(), BUDGET_US * within.as_secs_f64());
        let mut window = Window::default();
        self.debt = (self.debt - budget).max(0.0);
        if self.debt > 0.0 {
            return Ok(window);
        }
        let mut starts = tokio::time::interval(within.mul_f64(0.95) / pieces);
        starts.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        for _ in 0..pieces {
            starts.tick().await;
            self.piece(each, nothing, &mut window).await?;
            // An idle server ends a blocking read only when its timer runs, ten times a second.
            if window.cost_us() > 2.0 * budget || began.elapsed() + each > within {
                break;
            }
        }
        self.debt = (window.cost_us() - budget).max(0.0);
        let seconds = window.time.as_secs_f64();
        if seconds > 0.0 {
            self.pace = Some(window.cost_us() / seconds);
        }
        Ok(window)
    }

    async fn piece(&mut self, time: Duration, nothing: &[u8], window: &mut Window) -> Result<(), Failure> {
        let mut commands = Pipeline::with_capacity(5);
        commands.cmd("CLIENT").arg("TRACKING").arg("ON").arg("BCAST").arg("PREFIX").arg(&self.prefix);
        commands.cmd("TIME");
        let ms = u64::try_from(time.as_millis()).unwrap_or(1).max(1);
        commands.cmd("XREAD").arg("BLOCK").arg(ms).arg("STREAMS").arg(nothing).arg("$");
        commands.cmd("TIME").cmd("CLIENT").arg("TRACKING").arg("OFF");
        let replies = self.connection.all_after(&commands, time).await?;
        window.pieces += 1;
        let [on, began, waited, ended, _off] = <[_; 5]>::try_from(replies).map_err(|_| garbled())?;
        on?;
        waited?;
        let (began, ended) = (time_of(began?)?, time_of(ended?)?);
        window.time += Duration::from_micros(ended.saturating_sub(began));
        let mut named = HashMap::new();
        while let Ok(push) = self.pushes.try_recv() {
            if push.kind == PushKind::Invalidate {
                window.messages += 1;
                for key in push.data.iter().flat_map(names) {
                    window.names += 1;
                    *named.entry(key.clone()).or_default() += 1;
                }
            }
        }
        let named: Vec<_> = named.into_iter().collect();
        let (asked, rest) = named.split_at(named.len().min(MOST_ASKED));
        let there = self.there(asked).await?;
        window.asked += asked.len() as u64;
        window.add(asked, &there, rest);
        Ok(())
    }

    /// Which of these keys exist.
    async fn there(&mut self, keys: &[(Vec<u8>, u64)]) -> Result<Vec<bool>, Failure> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let mut commands = Pipeline::with_capacity(keys.len());
        for (key, _) in keys {
            commands.cmd("EXISTS").arg(key);
        }
        let replies = self.connection.all(&commands).await?;
        replies.into_iter().map(|reply| from_redis_value(reply?).map_err(|_| garbled())).collect()
    }
}

impl Window {
    /// What the messages have cost the server, in microseconds.
    pub(super) fn cost_us(&self) -> f64 {
        MESSAGE_US * self.messages as f64 + NAME_US * self.names as f64
    }

    /// Adds keys with the number of messages that named them. Of the `asked` ones it is known whether they exist; the
    /// rest are taken to be alike.
    fn add(&mut self, asked: &[(Vec<u8>, u64)], there: &[bool], rest: &[(Vec<u8>, u64)]) {
        let (mut all, mut gone) = (0, 0);
        for ((key, count), there) in asked.iter().zip(there) {
            let ended = u64::from(!there);
            (all, gone) = (all + count, gone + ended);
            self.add_key(key, (count - ended) as f64);
        }
        let kept = 1.0 - gone as f64 / all.max(1) as f64;
        for (key, count) in rest {
            self.add_key(key, *count as f64 * kept);
        }
    }

    fn add_key(&mut self, key: &[u8], count: f64) {
        if count > 0.0 {
            *self.keys.entry(key.to_vec()).or_default() += count;
        }
    }
}

/// How many pieces to look at within this time, and how long each is.
fn plan(pace: Option<f64>, within: Duration) -> (u32, Duration) {
    let longest = within.mul_f64(MOST);
    let all = match pace {
        None => AT_FIRST.min(longest),
        Some(pace) => within.mul_f64((BUDGET_US / pace.max(1.0)).min(MOST)).max(SHORTEST).min(longest),
    };
    let pieces = u32::try_from(all.as_millis().div_ceil(LONGEST.as_millis())).unwrap_or(u32::MAX).max(1);
    (pieces, (all / pieces).max(Duration::from_millis(1)))
}

/// The keys of a message; none if it reports a flush of everything.
fn names(data: &Value) -> impl Iterator<Item = &Vec<u8>> {
    let keys = match data {
        Value::Array(keys) => keys.as_slice(),
        _ => &[],
    };
    keys.iter().filter_map(|key| match key {
        Value::BulkString(key) => Some(key),
        _ => None,
    })
}

fn time_of(reply: Value) -> Result<u64, Failure> {
    let (seconds, us): (u64, u64) = from_redis_value(reply).map_err(|_| garbled())?;
    Ok(seconds.saturating_mul(1_000_000).saturating_add(us))
}

fn garbled() -> Failure {
    Failure::Lost("a reply that can't be read".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_quiet_server_is_looked_at_nearly_all_the_time_and_a_busy_one_briefly() {
        assert_eq!(plan(None, SECOND), (1, AT_FIRST));
        assert_eq!(plan(Some(0.0), SECOND), (18, LONGEST));
        assert_eq!(plan(Some(3e3), SECOND), (18, LONGEST));
        assert_eq!(plan(Some(3e4), SECOND), (2, LONGEST));
        assert_eq!(plan(Some(6e5), SECOND), (1, Duration::from_millis(5)));
        assert_eq!(plan(Some(1e9), SECOND), (1, SHORTEST));
        assert_eq!(plan(Some(3e4), 10 * SECOND), (20, LONGEST));
    }

    #[test]
    fn a_message_of_many_names_costs_as_much_as_several() {
        let of = |messages, names| Window { messages, names, ..Window::default() }.cost_us();
        assert!(of(1, 200) > 2.0 * of(1, 1), "{} {}", of(1, 200), of(1, 1));
    }

    #[test]
    fn the_end_of_a_key_is_no_write_of_it() {
        let keys = |counts: &[(&str, u64)]| -> Vec<_> {
            counts.iter().map(|(key, count)| (key.as_bytes().to_vec(), *count)).collect()
        };
        let mut window = Window::default();
        window.add(&keys(&[("a", 3), ("b", 1), ("c", 4)]), &[true, false, false], &keys(&[("d", 4), ("a", 8)]));
        let count = |key: &str| window.keys.get(key.as_bytes()).copied();
        assert_eq!([count("a"), count("b"), count("c"), count("d")], [Some(9.0), None, Some(3.0), Some(3.0)]);
    }

    #[test]
    fn no_plan_is_longer_than_the_time_that_there_is() {
        for pace in [None, Some(0.0), Some(60.0), Some(9e3), Some(1e8)] {
            for ms in [1, 2, 10, 100, 1000, 60_000] {
                let within = Duration::from_millis(ms);
                let (pieces, each) = plan(pace, within);
                assert!(each * pieces <= within && each <= LONGEST, "{pace:?} {within:?}: {pieces} of {each:?}");
            }
        }
    }
}
