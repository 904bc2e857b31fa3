//! Gathers facts about a Redis with a few dozen small commands; none changes a setting or someone else's key.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, anyhow};
use futures_util::future::join_all;
use jiff::{Timestamp, tz::TimeZone};
use tollgate::redis::aio::{ConnectionLike, MultiplexedConnection};
use tollgate::redis::{
    AsyncConnectionConfig, Client, Cmd, FromRedisValue, Pipeline, RedisError, Value, cmd, from_redis_value,
};
use tollgate::{Algorithm, ErrorKind, Limiter, Redis, Request, Rule, Script};

use super::commands;
use super::facts::{Clock, Facts, Known, Latency, Missing, Refusal, Trial, Why};
use crate::info::Fields;
use crate::output::micros;
use crate::refusal;
use crate::rule_arguments::{from_lines, own_prefix};

/// Settings that affect decisions.
const SETTINGS: [&str; 19] = [
    "maxmemory",
    "maxmemory-policy",
    "appendonly",
    "appendfsync",
    "save",
    "stop-writes-on-bgsave-error",
    "min-replicas-to-write",
    "min-replicas-max-lag",
    "replica-serve-stale-data",
    "busy-reply-threshold",
    "maxclients",
    "timeout",
    "tcp-keepalive",
    "lazyfree-lazy-expire",
    "lazyfree-lazy-user-del",
    "lazyfree-lazy-user-flush",
    "cluster-require-full-coverage",
    "hz",
    "active-expire-effort",
];
/// How often the clock is read, both before and after everything else.
const READINGS: usize = 5;
/// How often the latency is measured, and for how long at most.
const SAMPLES: usize = 50;
const SAMPLING: Duration = Duration::from_millis(500);
/// The longest that everything may take, however slow the replies.
const LONGEST_EXAMINATION: Duration = Duration::from_secs(10);
/// How many key names are tried to find one on a cluster's node.
const CANDIDATES: usize = 64;

/// One reading of the server's clock, with this machine's before and after.
#[derive(Clone, Copy)]
struct Reading {
    sent: Instant,
    answered: Instant,
    /// This machine's time of day at the midpoint, in microseconds since the epoch.
    here: i64,
    there: i64,
}

struct Asked {
    connection: MultiplexedConnection,
    deadline: Duration,
    until: Instant,
}

pub(super) async fn gather(redis: Redis, of_cluster: bool, prefix: &str, deadline: Duration) -> Result<Facts> {
    let scratch = own_prefix(prefix, "doctor");
    let client = &redis.client(deadline).await?;
    let sentinels = said_by_sentinels(&redis, deadline).await;
    let limiter = Limiter::builder(redis).deadline(deadline).prefix(&scratch)?.build();
    // Connects as decisions do, and ends here if the server doesn't reply.
    if let Err(error) = limiter.peek(&rule("token-bucket 5/10s")?, "user:1").await
        && (error.is_unreachable()
            || error.kind() == ErrorKind::Authentication
            || error.kind() == ErrorKind::Deadline
            || error.kind() == ErrorKind::Disconnected)
    {
        return Err(error.into());
    }
    let address = client.get_connection_info();
    let mut asked = Asked::connect(client, deadline)
        .await
        .map_err(|why| anyhow!("no connection to redis at {}: {why}", address.addr()))?;

    let mut general = Pipeline::new();
    general.cmd("INFO").cmd("CONFIG").arg("GET").arg(&SETTINGS[..]);
    general.cmd("ACL").arg("WHOAMI").cmd("CLUSTER").arg("INFO").cmd("CLUSTER").arg("NODES");
    let mut answers = asked.all(&general, 5).await.into_iter();
    let mut next = || answers.next().unwrap_or_else(|| Err("no answer".into()));
    let (info, config, user, cluster, nodes) = (next(), next(), next(), next(), next());
    let info = info.and_then(read::<String>).map(|text| Fields::of_info(&text));
    let config = config.and_then(read::<BTreeMap<String, String>>).map(Fields);
    let named = address.redis_settings().username().map(str::to_owned);
    let user = user.and_then(read::<String>).unwrap_or_else(|_| named.unwrap_or_else(|| "default".into()));
    let cluster = cluster.and_then(read::<String>).map(|text| Fields::of_info(&text));
    let moving = nodes.and_then(read::<String>).map(|text| slots_being_moved(&text)).unwrap_or_default();

    let clustered = of_cluster || info.as_ref().is_ok_and(|info| info.number("cluster_enabled") == Some(1));
    let keys = if clustered { asked.keys_of_this_node(&scratch).await } else { vec![candidate(1)] };
    let key = keys[0].clone();
    let across_slots = if keys.len() > 1 { Some(asked.across_slots(&scratch, &keys).await) } else { None };
    let missing = asked.missing(&name(&scratch, &key), clustered).await;
    let before = asked.readings().await;
    let mut trials = trials(&limiter, &mut asked, &key).await?;
    trials.push(together(&limiter, &key).await?);
    let latency = asked.latency(&limiter, &key).await?;
    let after = asked.readings().await;
    let clock = before.and_then(|before| Ok(compared(&before, &after?)));
    let (address, prefix) = (address.addr().to_string(), prefix.to_owned());
    Ok(Facts {
        address,
        prefix,
        deadline,
        today: Timestamp::now().to_zoned(TimeZone::UTC).date(),
        info,
        config,
        cluster,
        moving,
        of_cluster,
        across_slots,
        sentinels,
        user,
        missing,
        trials,
        clock,
        latency,
    })
}

/// The slots that this node is giving away or taking over, in the answer to CLUSTER NODES: `[127->-ID]`, `[127-<-ID]`.
fn slots_being_moved(nodes: &str) -> Vec<u16> {
    let own = nodes.lines().filter(|line| line.contains("myself"));
    let moving = own.flat_map(str::split_whitespace).filter_map(|word| word.strip_prefix('[')?.split('-').next());
    moving.filter_map(|slot| slot.parse().ok()).collect()
}

async fn said_by_sentinels(redis: &Redis, deadline: Duration) -> Option<Vec<Known<Fields>>> {
    let (name, clients) = redis.sentinels()?;
    let said = clients.iter().map(async |client| {
        let said = async {
            let mut asked = Asked::connect(client, deadline).await?;
            Ok::<_, String>(Fields::of_pairs(asked.ask(cmd("SENTINEL").arg("MASTER").arg(name)).await?))
        };
        said.await.map_err(|why| format!("{}: {why}", client.get_connection_info().addr()))
    });
    Some(join_all(said).await)
}

impl Asked {
    async fn connect(client: &Client, deadline: Duration) -> Result<Self, String> {
        let patient = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
        let connecting = client.get_multiplexed_async_connection_with_config(&patient);
        let connection = tokio::time::timeout(deadline, connecting).await.map_err(|_| late(deadline))?;
        let connection = match connection {
            Ok(mut connection) => {
                // That a server has too many clients may show only now.
                let ping = tokio::time::timeout(deadline, connection.req_packed_command(&cmd("PING"))).await;
                ping.map_err(|_| late(deadline))?.map(|_| connection)
            }
            Err(error) => Err(error),
        };
        let connection = match connection {
            Ok(connection) => connection,
            Err(error) => return Err(refusal::explained(client, &error, told).await),
        };
        Ok(Self { connection, deadline, until: Instant::now() + LONGEST_EXAMINATION })
    }

    /// The reply to each command; a refused one doesn't stop the others.
    async fn all(&mut self, pipeline: &Pipeline, count: usize) -> Vec<Result<Value, String>> {
        let answers = self.raw(pipeline, count).await;
        answers.into_iter().map(|answer| answer.map_err(|refused| refused.1)).collect()
    }

    async fn raw(&mut self, pipeline: &Pipeline, count: usize) -> Vec<Result<Value, (Option<Why>, String)>> {
        let within = self.deadline.min(self.until.saturating_duration_since(Instant::now()));
        let answers = tokio::time::timeout(within, self.connection.req_packed_commands(pipeline, 0, count)).await;
        let refused = |error: RedisError| (commands::why(&error), told(&error));
        match answers {
            Ok(Ok(values)) => values.into_iter().map(|value| value.extract_error().map_err(refused)).collect(),
            Ok(Err(error)) => vec![Err(refused(error)); count],
            Err(_) => vec![Err((None, late(self.deadline))); count],
        }
    }

    async fn ask<T: FromRedisValue>(&mut self, command: &Cmd) -> Result<T, String> {
        let mut pipeline = Pipeline::with_capacity(1);
        pipeline.add_command(command.clone());
        let answer = self.all(&pipeline, 1).await.pop();
        answer.unwrap_or_else(|| Err("no answer".into())).and_then(read)
    }

    /// Commands that can't be run on a key of this prefix.
    async fn missing(&mut self, key: &str, clustered: bool) -> Vec<Missing> {
        let mut all = commands::all();
        all.extend(clustered.then_some(commands::ASKING));
        let mut pipeline = Pipeline::with_capacity(all.len());
        for command in &all {
            pipeline.add_command(commands::attempt(command, key));
        }
        let answers = self.raw(&pipeline, all.len()).await;
        let missing = |(command, answer): (&'static str, Result<_, (Option<Why>, String)>)| {
            Some(Missing { command, why: answer.err()?.0? })
        };
        all.into_iter().zip(answers).filter_map(missing).collect()
    }

    /// Keys whose slots are on this node, as many as can be found; at least one key.
    async fn keys_of_this_node(&mut self, scratch: &str) -> Vec<String> {
        let mut pipeline = Pipeline::with_capacity(CANDIDATES);
        for number in 1..=CANDIDATES {
            pipeline.add_command(commands::attempt("GET", &name(scratch, &candidate(number))));
        }
        let answers = self.all(&pipeline, CANDIDATES).await;
        // Keys whose slot is moving are left out too.
        let codes = ["MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN"];
        let elsewhere = |error: &String| codes.iter().any(|code| error.starts_with(code));
        let here = (1..).zip(answers).filter(|(_, answer)| !answer.as_ref().is_err_and(elsewhere));
        let here: Vec<_> = here.map(|(number, _)| candidate(number)).collect();
        if here.is_empty() { vec![candidate(1)] } else { here }
    }

    /// Reads these keys, which are in different slots, as a batch of decisions would: one that can't be read, such as
    /// one whose slot has just begun to move, doesn't fail the others.
    async fn across_slots(&mut self, scratch: &str, keys: &[String]) -> Known<()> {
        const TEXT: &str = "#!lua flags=allow-cross-slot-keys
local read, error = 0, nil
for _, key in ipairs(ARGV) do
  local reply = redis.pcall('GET', key)
  if type(reply) == 'table' and reply.err then error = reply else read = read + 1 end
end
return read > 0 and read or error";
        let mut read = cmd("EVAL");
        read.arg(TEXT).arg(0).arg(keys.iter().map(|key| name(scratch, key)).collect::<Vec<_>>());
        self.ask::<i64>(&read).await.map(drop)
    }

    async fn readings(&mut self) -> Known<Vec<Reading>> {
        let mut readings = Vec::with_capacity(READINGS);
        for _ in 0..READINGS {
            let (sent, at) = (Instant::now(), SystemTime::now());
            let (seconds, us): (i64, i64) = self.ask(&cmd("TIME")).await?;
            let answered = Instant::now();
            let half = micros(answered - sent) / 2;
            let here = micros(at.duration_since(UNIX_EPOCH).unwrap_or_default()) + half;
            let here = i64::try_from(here).unwrap_or(i64::MAX);
            readings.push(Reading {
                sent,
                answered,
                here,
                there: seconds.saturating_mul(1_000_000).saturating_add(us),
            });
        }
        Ok(readings)
    }

    /// The latency of the deciding script if this user may peek, which changes nothing, or else of PING.
    async fn latency(&mut self, limiter: &Limiter, key: &str) -> Result<Known<Latency>> {
        let rule = rule("token-bucket 5/10s")?;
        let peeks = limiter.peek(&rule, key).await.is_ok();
        let mut samples = Vec::with_capacity(SAMPLES);
        let began = Instant::now();
        while samples.len() < SAMPLES && (samples.len() < 3 || began.elapsed() < SAMPLING) {
            let asked = Instant::now();
            let answer = match peeks {
                true => limiter.peek(&rule, key).await.map(drop).map_err(|error| error.to_string()),
                false => self.ask::<Value>(&cmd("PING")).await.map(drop),
            };
            if let Err(why) = answer {
                return Ok(Err(why));
            }
            samples.push(asked.elapsed());
        }
        samples.sort_unstable();
        Ok(Ok(Latency { of: if peeks { "a peek" } else { "PING" }, samples }))
    }
}

/// Ids as long as the generated ones of holders.
const HOLDERS: [&str; 2] = ["held-0000000000000000000000000000000000", "held-1111111111111111111111111111111111"];

/// Calls each algorithm's script on its own key, as a limiter does, and removes the key.
async fn trials(limiter: &Limiter, asked: &mut Asked, key: &str) -> Result<Vec<Trial>> {
    let rules = Algorithm::all().map(|algorithm| {
        let text = match algorithm {
            Algorithm::CalendarWindow => "fixed-window 5/day".to_owned(),
            _ if algorithm.holds() => format!("{algorithm} 5 ttl 10s"),
            _ => format!("{algorithm} 5/10s"),
        };
        Ok((algorithm, rule(&text)?))
    });
    let rules = rules.collect::<Result<Vec<_>>>()?;
    let tried = join_all(rules.iter().map(|(algorithm, rule)| async move {
        let took = async {
            for holder in HOLDERS {
                // Only permits are held by an id.
                let request = Request::new(key);
                limiter.acquire(rule, if algorithm.holds() { request.id(holder) } else { request }).await?;
            }
            Ok(())
        };
        let took = took.await.map_err(refusal);
        let looked = async {
            limiter.peek(rule, key).await?;
            limiter.inspect(rule, key).await
        };
        let states = looked.await.map_err(refusal);
        let name = states.as_ref().ok().and_then(|states| Some(states.first()?.key.clone()));
        (algorithm.script().name(), took, states.map(drop), name)
    }));
    let tried = tried.await;
    let mut usage = Pipeline::with_capacity(tried.len());
    for (.., name) in &tried {
        usage.cmd("MEMORY").arg("USAGE").arg(name.as_deref().unwrap_or(key));
    }
    let usage = asked.all(&usage, tried.len()).await;
    let removed = join_all(rules.iter().map(|(_, rule)| limiter.reset(rule, key))).await;
    let mut trials = Vec::with_capacity(rules.len());
    for (((script, took, looked, name), usage), removed) in tried.into_iter().zip(usage).zip(removed) {
        let bytes = name.filter(|_| took.is_ok()).map(|_| usage.and_then(read::<u64>));
        let left = removed.err().filter(|_| took.is_ok()).map(|error| error.to_string());
        trials.push(Trial { script, took, looked, bytes, left });
    }
    Ok(trials)
}

/// Two limits at once, remembered by an id.
async fn together(limiter: &Limiter, key: &str) -> Result<Trial> {
    let rule = rule("token-bucket 5/20s, fixed-window 5/20s")?;
    let request = Request::new(key).id("doctor").id_ttl(Duration::from_secs(10));
    let took = async {
        limiter.acquire(&rule, request).await?;
        limiter.acquire(&rule, request).await
    };
    let took = took.await.map(drop).map_err(refusal);
    let looked = limiter.peek(&rule, key).await.map(drop).map_err(refusal);
    let removed = limiter.reset(&rule, request).await;
    let left = removed.err().filter(|_| took.is_ok()).map(|error| error.to_string());
    let script = Script::for_algorithms([Algorithm::TokenBucket, Algorithm::FixedWindow]).name();
    Ok(Trial { script, took, looked, bytes: None, left })
}

/// Compares the fastest readings, which are the most exact.
fn compared(before: &[Reading], after: &[Reading]) -> Clock {
    let quickest = |readings: &[Reading]| readings.iter().copied().min_by_key(Reading::round_trip);
    let (Some(first), Some(last)) = (quickest(before), quickest(after)) else {
        return Clock { offset: 0, uncertainty: u64::MAX, step: 0, step_uncertainty: u64::MAX };
    };
    let best = if last.round_trip() < first.round_trip() { last } else { first };
    let middle = |reading: &Reading| reading.sent + reading.round_trip() / 2;
    let passed_here = i64::try_from(micros(middle(&last) - middle(&first))).unwrap_or(i64::MAX);
    Clock {
        offset: best.there.saturating_sub(best.here),
        uncertainty: micros(best.round_trip()).div_ceil(2),
        step: last.there.saturating_sub(first.there).saturating_sub(passed_here),
        step_uncertainty: (micros(first.round_trip()) + micros(last.round_trip())).div_ceil(2),
    }
}

impl Reading {
    fn round_trip(&self) -> Duration {
        self.answered - self.sent
    }
}

fn rule(text: &str) -> Result<Rule> {
    from_lines(&[text.to_owned()], "cli")
}

fn name(scratch: &str, key: &str) -> String {
    format!("{scratch}:{{{key}}}:cli")
}

fn candidate(number: usize) -> String {
    format!("user:{number}")
}

fn refusal(error: tollgate::Error) -> Refusal {
    let message = error.to_string();
    // The position in the script is of no use here, and differs between scripts.
    let message = message.split(" script: ").next().unwrap_or_default().trim_end_matches('.').to_owned();
    Refusal { permission: error.kind() == ErrorKind::Permission, message }
}

fn read<T: FromRedisValue>(value: Value) -> Result<T, String> {
    from_redis_value(value).map_err(|_| "an answer that can't be read".into())
}

/// The server's error on one line.
fn told(error: &RedisError) -> String {
    let text = match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => format!("{code} {detail}"),
        _ => error.to_string(),
    };
    text.replace(char::is_control, " ").trim_end_matches('.').to_owned()
}

fn late(deadline: Duration) -> String {
    format!("no answer within {deadline:?}")
}
