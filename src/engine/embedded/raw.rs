//! Scripts by their text, over a keyspace that the caller keeps: for simulated servers.

use std::collections::BTreeMap;
use std::sync::Arc;

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
    /// By digest.
    compiled: BTreeMap<String, Function>,
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
        let called = |lua: &Lua, throws: bool| {
            let (store, refusal) = (Arc::clone(&keyspace), Arc::clone(&refusal));
            lua.create_function(move |lua, words: mlua::MultiValue| {
                let reads = matches!(words.front(), Some(Value::String(name)) if READS.contains(&&*name.as_bytes()));
                let refused = refusal.lock().clone().filter(|_| !reads);
                match refused.map_or_else(|| run(lua, &store, &words), |why| Ok(Err(ServerError(why))))? {
                    Ok(value) => Ok(value),
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
        Self { lua, redis, keyspace, refusal, compiled: BTreeMap::new() }
    }

    /// The digest by which this text is called from here on, or what is wrong with it.
    pub(crate) fn load(&mut self, text: &[u8]) -> Result<String, String> {
        let digest = sha1_smol::Sha1::from(text).digest().to_string();
        if !self.compiled.contains_key(&digest) {
            let text = format!("return function(KEYS, ARGV, redis) {} end", String::from_utf8_lossy(text));
            let function = self.lua.load(text).eval();
            let function = function.map_err(|error| format!("ERR Error compiling script: {}", first_line(&error)))?;
            self.compiled.insert(digest.clone(), function);
        }
        Ok(digest)
    }

    /// Runs the script of this digest; `refusal`, if set, refuses each of its writes.
    pub(crate) fn run(
        &mut self,
        digest: &str,
        store: &mut Store,
        (keys, arguments): (&[Vec<u8>], &[Vec<u8>]),
        refusal: Option<&str>,
    ) -> Answer {
        *self.refusal.lock() = refusal.map(str::to_owned);
        let swap = |store: &mut Store| {
            std::mem::swap(&mut *self.keyspace.lock(), &mut store.0);
        };
        swap(store);
        let answer = self.call(digest, keys, arguments);
        swap(store);
        answer.unwrap_or_else(|error| Answer::Error(thrown(&error, digest)))
    }

    fn call(&self, digest: &str, keys: &[Vec<u8>], arguments: &[Vec<u8>]) -> mlua::Result<Answer> {
        let Some(function) = self.compiled.get(digest) else {
            return Ok(Answer::Error("NOSCRIPT No matching script. Please use EVAL.".into()));
        };
        let table = |words: &[Vec<u8>]| {
            let words = words.iter().map(|word| self.lua.create_string(word)).collect::<mlua::Result<Vec<_>>>()?;
            self.lua.create_sequence_from(words)
        };
        converted(function.call((table(keys)?, table(arguments)?, &self.redis))?)
    }
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
