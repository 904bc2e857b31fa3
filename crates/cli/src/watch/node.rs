//! One Redis: its numbers, its keys and their writes, in each interval.

use std::time::{Duration, Instant};

use tollgate::Redis;
use tollgate::redis::{Pipeline, from_redis_value};

use super::census::{Census, Sent};
use super::connection::{Connection, Failure};
use super::rates::Rates;
use super::reading::{Reading, ScriptCalls};
use super::snapshot::{Figures, Node as Shown, rounded};
use super::written::{Window, Writes};
use crate::info::Fields;

/// The sections of INFO that are shown.
const SECTIONS: [&str; 9] =
    ["server", "clients", "memory", "stats", "replication", "cpu", "commandstats", "latencystats", "keyspace"];
/// The age in seconds at which a look counts half.
const HALF_LIFE: f64 = 10.0;
/// How many of the busiest keys by writes are checked for reads too.
const BUSIEST: usize = 32;
/// The microseconds that a command costs the server in addition to its own count: for reading it and replying.
const OVERHEAD: f64 = 3.0;

#[derive(Debug)]
pub(super) struct Node {
    redis: Redis,
    connected: Option<Connected>,
    /// The last reading, also of a connection that is gone.
    last: Option<Reading>,
    pub(super) rates: Rates,
    pub(super) census: Census,
    /// Why writes aren't seen, or keys aren't scanned.
    pub(super) no_writes: Option<String>,
    pub(super) no_scan: Option<String>,
    pub(super) shown: Shown,
    pub(super) calls: Vec<ScriptCalls>,
    /// The time between the last two readings.
    pub(super) seconds: f64,
}

#[derive(Debug)]
struct Connected {
    general: Connection,
    /// None if the server refuses it.
    writes: Option<Writes>,
    database: i64,
}

impl Node {
    pub(super) fn new(redis: Redis) -> Self {
        let shown = Shown { address: redis.address().to_owned(), ..Shown::default() };
        Self {
            redis,
            connected: None,
            last: None,
            rates: Rates::default(),
            census: Census::default(),
            no_writes: None,
            no_scan: None,
            shown,
            calls: Vec::new(),
            seconds: 0.0,
        }
    }

    /// Looks at the server for this time; returns early if it doesn't answer.
    pub(super) async fn look(&mut self, prefix: &str, within: Duration, deadline: Duration) {
        if let Err(failure) = self.try_to_look(prefix, within, deadline).await {
            self.connected = None;
            self.calls = Vec::new();
            self.shown.figures = None;
            self.shown.error = Some(failure.why().to_owned());
        }
    }

    /// The number of all keys in the limits' database on this node.
    pub(super) fn size(&self) -> u64 {
        self.last.as_ref().map_or(0, Reading::keys)
    }

    pub(super) fn by_frequency(&self) -> bool {
        self.last.as_ref().is_some_and(Reading::evicts_by_frequency)
    }

    async fn try_to_look(&mut self, prefix: &str, within: Duration, deadline: Duration) -> Result<(), Failure> {
        let mut connected = match self.connected.take() {
            Some(connected) => connected,
            None => self.connect(prefix, deadline).await?,
        };
        let before = match &self.last {
            Some(reading) => reading.clone(),
            None => connected.read().await?,
        };
        let busiest = self.rates.busiest(BUSIEST);
        self.census.watch(&busiest);
        let beside = beside(self.census.any_key(), prefix);
        let Connected { general, writes, .. } = &mut connected;
        let seen = async {
            match writes {
                Some(writes) => writes.look(within, &beside).await.map(Some),
                None => Ok(None),
            }
        };
        let began = Instant::now();
        let (seen, sent) = tokio::join!(seen, self.census.step(general, &before, prefix, within));
        let window = self.window(seen, &mut connected)?.unwrap_or_default();
        let sent = self.sent(sent)?;
        tokio::time::sleep(within.saturating_sub(began.elapsed())).await;
        let now = connected.read().await?;
        let passed = (now.at - before.at).as_secs_f64();
        let cost = self.cost(&now, &window, sent) / passed.max(1e-3) / 1e6;
        self.rates.add(window, prefix, passed, HALF_LIFE);
        let (figures, calls) = now.since(Some(&before));
        let watch_share = Some(rounded(cost, 5));
        self.shown.figures = Some(Figures { watch_share, ..figures });
        self.shown.error = None;
        (self.calls, self.seconds) = (calls, passed);
        (self.last, self.connected) = (Some(now), Some(connected));
        Ok(())
    }

    async fn connect(&mut self, prefix: &str, deadline: Duration) -> Result<Connected, Failure> {
        // With Sentinels, that of the current primary.
        let client = self.redis.client(deadline).await.map_err(|error| Failure::Lost(error.to_string()))?;
        let database = client.get_connection_info().redis_settings().db();
        let general = Connection::open(&client, deadline, None).await?;
        let writes = Writes::open(&client, prefix, deadline).await?;
        (self.no_writes, self.no_scan) = (None, None);
        Ok(Connected { general, writes: Some(writes), database })
    }

    /// What was seen of writes; a refusal is remembered until there is a new connection.
    fn window(
        &mut self,
        seen: Result<Option<Window>, Failure>,
        connected: &mut Connected,
    ) -> Result<Option<Window>, Failure> {
        match seen {
            Ok(window) => Ok(window),
            // Another key is tried the next time.
            Err(failure) if failure.is_of_slot() => Ok(None),
            Err(Failure::Refused(why)) => {
                self.no_writes = Some(why);
                connected.writes = None;
                Ok(None)
            }
            Err(lost) => Err(lost),
        }
    }

    /// What was sent to count keys; a refusal is remembered until a key can be checked, or there is a new connection: a
    /// look without a key in its budget proves nothing.
    fn sent(&mut self, sent: Result<Sent, Failure>) -> Result<Sent, Failure> {
        match sent {
            Err(Failure::Refused(why)) => {
                self.no_scan = Some(why);
                Ok(Sent::default())
            }
            Ok(sent) => {
                if sent.objects > 0 {
                    self.no_scan = None;
                }
                Ok(sent)
            }
            lost => lost,
        }
    }

    /// The microseconds that the server has spent on this, as far as its own counts tell.
    fn cost(&self, now: &Reading, window: &Window, sent: Sent) -> f64 {
        let object = if now.evicts_by_frequency() { "object|freq" } else { "object|idletime" };
        let of = |command: &str, count: u64| now.us_per_call(command).unwrap_or(0.0) * count as f64;
        let small = of("scan", sent.scans) + of(object, sent.objects);
        let pieces = of("client|tracking", 2 * window.pieces) + of("time", 2 * window.pieces);
        let looks = pieces + of("xread", window.pieces) + of("exists", window.asked);
        of("info", 1) + OVERHEAD * (small + looks) + window.cost_us()
    }
}

impl Connected {
    async fn read(&mut self) -> Result<Reading, Failure> {
        let mut info = Pipeline::with_capacity(1);
        info.cmd("INFO").arg(&SECTIONS);
        let reply = self.general.all(&info).await?.pop();
        let reply = reply.unwrap_or_else(|| Err(Failure::Lost("no answer".to_owned())));
        let reply = reply.map_err(|failure| Failure::Lost(failure.why().to_owned()))?;
        let at = Instant::now();
        let garbled = |_| Failure::Lost("a reply to INFO that can't be read".to_owned());
        let text: String = from_redis_value(reply).map_err(garbled)?;
        Ok(Reading { at, info: Fields::of_info(&text), database: self.database })
    }
}

/// The name of a key that doesn't exist, in the slot of this one and so on this node.
fn beside(key: Option<&Vec<u8>>, prefix: &str) -> Vec<u8> {
    let tagged = key.and_then(|key| key.split_inclusive(|byte| *byte == b'}').next());
    [tagged.unwrap_or(format!("{prefix}:{{watch}}").as_bytes()), b":watch"].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_look_at_keys_is_shown_until_one_is_answered() {
        let mut node = Node::new(Redis::open("redis://127.0.0.1:1").expect("an address"));
        let refused = || Err(Failure::Refused("NOPERM".to_owned()));
        let (none, scans) = (Sent::default(), Sent { scans: 1, objects: 0 });
        node.sent(refused()).expect("a refusal ends no look");
        for sent in [none, scans] {
            node.sent(Ok(sent)).expect("sent");
            assert_eq!(node.no_scan.as_deref(), Some("NOPERM"), "{sent:?}");
        }
        node.sent(Ok(Sent { scans: 1, objects: 1 })).expect("sent");
        assert_eq!(node.no_scan, None);
    }

    #[test]
    fn what_is_waited_for_has_the_tag_of_a_key_of_the_node_and_is_none_of_a_limit() {
        let key = b"t:{user:1}:org:api/token-bucket-1s".to_vec();
        assert_eq!(beside(Some(&key), "t"), b"t:{user:1}:watch");
        assert_eq!(beside(None, "t"), b"t:{watch}:watch");
    }
}
