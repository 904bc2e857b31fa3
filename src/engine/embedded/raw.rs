//! Scripts by their text, over a keyspace that the caller keeps: for simulated servers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mlua::{Function, Lua, Table, Value};

use super::keyspace::Keyspace;
use super::{Clock, Interpreter, ServerError, run};
use crate::lock::Lock;

/// What a server keeps.
#[derive(Clone, Debug, Default)]
pub(crate) struct Store(Keyspace);

/// An interpreter that several servers share.
pub(crate) struct Runner {
    lua: Lua,
    redis: Table,
    keyspace: Arc<Lock<Keyspace>>,
    /// The error that refuses every command that writes.
    refusal: Arc<Lock<Option<String>>>,
    /// Whether the server serves these keys, this many of which are missing. Checked for keys that a script doesn't
    /// declare.
    serves: Arc<Lock<Option<Serves>>>,
    /// Whether the last script wrote anything, even what was there before.
    wrote: Arc<AtomicBool>,
    /// By digest.
    compiled: BTreeMap<String, Compiled>,
}

pub(crate) type Serves = Box<dyn Fn(&[Vec<u8>], usize) -> bool + Send>;

struct Compiled {
    function: Function,
    /// Whether its first line declares what it needs. A server that refuses writes refuses such a script before it
    /// runs.
    declares: bool,
}

/// A script's reply, as a server sends it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Answer {
    Nil,
    Integer(i64),
    Bytes(Vec<u8>),
    Status(String),
    Array(Vec<Answer>),
    Error(String),
}

const NON_LOCAL: &str = "ERR Script attempted to access a non local key in a cluster node";

const READS: [&[u8]; 10] =
    [b"TIME", b"GET", b"GETRANGE", b"MGET", b"STRLEN", b"EXISTS", b"PTTL", b"ZRANGE", b"ZCOUNT", b"ZSCORE"];

impl Store {
    pub(crate) fn set_time(&mut self, now_us: u64) {
        self.0.set_time(now_us);
    }

    pub(crate) fn has(&mut self, key: &[u8]) -> bool {
        self.0.has(key)
    }

    /// A key's whole state, as text.
    pub(crate) fn shown(&mut self, key: &[u8]) -> String {
        self.0.shown(key)
    }

    /// All keys, in order.
    pub(crate) fn keys(&self) -> Vec<Vec<u8>> {
        self.0.keys()
    }

    /// Makes these keys in the other store equal to those here.
    pub(crate) fn copy_to(&self, other: &mut Self, keys: &[Vec<u8>]) {
        keys.iter().for_each(|key| self.0.copy_to(&mut other.0, key));
    }

    /// Moves the matching keys, and returns them in order.
    pub(crate) fn move_to(&mut self, other: &mut Self, matches: impl Fn(&[u8]) -> bool) -> Vec<Vec<u8>> {
        self.0.move_to(&mut other.0, matches)
    }
}

impl Runner {
    pub(crate) fn new() -> Self {
        let Interpreter { lua, keyspace, .. } = Interpreter::new(Clock::default()).expect("an interpreter");
        let refusal: Arc<Lock<Option<String>>> = Arc::default();
        let redis = lua.create_table().expect("a table");
        let serves: Arc<Lock<Option<Serves>>> = Arc::default();
        let wrote: Arc<AtomicBool> = Arc::default();
        let called = |lua: &Lua, throws: bool| {
            let (store, refusal, serves) = (Arc::clone(&keyspace), Arc::clone(&refusal), Arc::clone(&serves));
            let wrote = Arc::clone(&wrote);
            lua.create_function(move |lua, words: mlua::MultiValue| {
                let reads = matches!(words.front(), Some(Value::String(name)) if READS.contains(&&*name.as_bytes()));
                let refused = refusal.lock().clone().filter(|_| !reads);
                let keys = keys_of(&words);
                let missing = keys.iter().filter(|key| !store.lock().has(key)).count();
                let away = serves.lock().as_ref().is_some_and(|serves| !keys.is_empty() && !serves(&keys, missing));
                let refused = if away { Some(NON_LOCAL.to_owned()) } else { refused };
                match refused.map_or_else(|| run(lua, &store, &words), |why| Ok(Err(ServerError(why))))? {
                    Ok(value) => {
                        wrote.fetch_or(!reads, Ordering::Relaxed);
                        Ok(value)
                    }
                    Err(error) if throws => Err(mlua::Error::external(error)),
                    Err(ServerError(message)) => lua.create_table_from([("err", message)]).map(Value::Table),
                }
            })
        };
        let install = || -> mlua::Result<()> {
            redis.set("call", called(&lua, true)?)?;
            redis.set("pcall", called(&lua, false)?)?;
            let reply = |lua: &Lua, message: mlua::LuaString| lua.create_table_from([("err", message)]);
            redis.set("error_reply", lua.create_function(reply)?)
        };
        install().expect("a table takes a few functions");
        Self { lua, redis, keyspace, refusal, serves, wrote, compiled: BTreeMap::new() }
    }

    /// The digest by which this text is called from now on, or what is wrong with it.
    pub(crate) fn load(&mut self, text: &[u8]) -> Result<String, String> {
        let digest = sha1_smol::Sha1::from(text).digest().to_string();
        if !self.compiled.contains_key(&digest) {
            let text = String::from_utf8_lossy(text);
            let declares = text.starts_with("#!");
            // Redis leaves that line out, too.
            let body = if declares { text.split_once('\n').map_or("", |(_, body)| body) } else { &text };
            let text = format!("return function(KEYS, ARGV, redis) {body} end");
            let function = self.lua.load(text).eval();
            let function = function.map_err(|error| format!("ERR Error compiling script: {}", first_line(&error)))?;
            self.compiled.insert(digest.clone(), Compiled { function, declares });
        }
        Ok(digest)
    }

    /// Runs the script of this digest; `refusal`, if set, refuses each of its writes, and `serves` each command for
    /// keys that the server doesn't have.
    pub(crate) fn run(
        &mut self,
        digest: &str,
        store: &mut Store,
        (keys, arguments): (&[Vec<u8>], &[Vec<u8>]),
        refusal: Option<&str>,
        serves: Option<Serves>,
    ) -> Answer {
        self.wrote.store(false, Ordering::Relaxed);
        if let Some(refusal) = refusal.filter(|_| self.compiled.get(digest).is_some_and(|script| script.declares)) {
            return Answer::Error(refusal.to_owned());
        }
        *self.serves.lock() = serves;
        *self.refusal.lock() = refusal.map(str::to_owned);
        let swap = |store: &mut Store| {
            std::mem::swap(&mut *self.keyspace.lock(), &mut store.0);
        };
        swap(store);
        let answer = self.call(digest, keys, arguments);
        swap(store);
        answer.unwrap_or_else(|error| Answer::Error(thrown(&error, digest)))
    }

    /// Whether the script that was run last wrote anything, even what was there before.
    pub(crate) fn wrote(&self) -> bool {
        self.wrote.load(Ordering::Relaxed)
    }

    fn call(&self, digest: &str, keys: &[Vec<u8>], arguments: &[Vec<u8>]) -> mlua::Result<Answer> {
        let Some(Compiled { function, .. }) = self.compiled.get(digest) else {
            return Ok(Answer::Error("NOSCRIPT No matching script. Please use EVAL.".into()));
        };
        let table = |words: &[Vec<u8>]| {
            let words = words.iter().map(|word| self.lua.create_string(word)).collect::<mlua::Result<Vec<_>>>()?;
            self.lua.create_sequence_from(words)
        };
        converted(function.call((table(keys)?, table(arguments)?, &self.redis))?)
    }
}

/// The keys that a command is about.
fn keys_of(words: &mlua::MultiValue) -> Vec<Vec<u8>> {
    let bytes = |word: &Value| match word {
        Value::String(text) => Some(text.as_bytes().to_vec()),
        _ => None,
    };
    let several = words.front().and_then(bytes).is_some_and(|name| name == b"MGET" || name == b"DEL");
    words.iter().skip(1).take(if several { usize::MAX } else { 1 }).filter_map(bytes).collect()
}

/// Converts a reply as Redis does: numbers are truncated to integers, and an array ends at its first nil.
fn converted(value: Value) -> mlua::Result<Answer> {
    Ok(match value {
        Value::Boolean(true) => Answer::Integer(1),
        Value::Integer(integer) => Answer::Integer(integer),
        Value::Number(number) => Answer::Integer(number as i64),
        Value::String(text) => Answer::Bytes(text.as_bytes().to_vec()),
        Value::Table(table) => {
            if let Ok(message) = table.raw_get::<String>("err") {
                return Ok(Answer::Error(message));
            }
            if let Ok(status) = table.raw_get::<String>("ok") {
                return Ok(Answer::Status(status));
            }
            Answer::Array(table.sequence_values::<Value>().map(|item| converted(item?)).collect::<mlua::Result<_>>()?)
        }
        _ => Answer::Nil,
    })
}

/// A script's error reply: what the command said, then which script it was.
fn thrown(error: &mlua::Error, digest: &str) -> String {
    match error {
        mlua::Error::CallbackError { cause, .. } => thrown(cause, digest),
        mlua::Error::ExternalError(external) => format!("{external} script: {digest}, on @user_script:1."),
        other => format!("ERR {} script: {digest}, on @user_script:1.", first_line(other)),
    }
}

fn first_line(error: &mlua::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}
