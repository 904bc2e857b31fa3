//! The same scripts in this process: Lua 5.1 over a small keyspace with expiry and a settable clock.
//!
//! For the tool when no Redis is named, for simulation, and for tests. State lives and dies with the process.

mod keyspace;
mod packing;
#[cfg(test)]
pub(crate) mod raw;
mod sorted;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mlua::{BString, BorrowedBytes, Function, Lua, MultiValue, Table, Value};

use super::{Swept, Which};
use crate::batch::{Batch, Position, Records, ScriptCall};
use crate::call::{Ask, Reply};
use crate::error::{Error, Kind};
use crate::lock::Lock;
use crate::script::Script;
use crate::wall_clock;
use keyspace::{Keyspace, Outcome};

/// The engine that runs in this process. Clones share their state.
#[derive(Clone)]
pub struct Embedded {
    shared: Arc<Lock<Interpreter>>,
    clock: Clock,
}

/// The embedded engine's clock. Clones share it.
///
/// ```
/// use std::time::{Duration, UNIX_EPOCH};
/// use tollgate::{Clock, Embedded};
///
/// let clock = Clock::new(UNIX_EPOCH);
/// let engine = Embedded::with_clock(clock.clone());
/// clock.advance(Duration::from_secs(60));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Clock {
    /// Microseconds since the epoch; the system's time if none.
    manual: Option<Arc<AtomicU64>>,
}

/// Scripts may neither make global variables nor read unknown ones, as on Redis: a name that one script leaves behind
/// would be visible to others.
const LOCK_GLOBALS: &str = r#"setmetatable(_G, {
    __newindex = function(_, name) error("Script attempted to create global variable '" .. tostring(name) .. "'", 2) end,
    __index = function(_, name) error("Script attempted to access nonexistent global variable '" .. tostring(name) .. "'", 2) end,
})"#;

struct Interpreter {
    lua: Lua,
    redis: Table,
    keyspace: Arc<Lock<Keyspace>>,
    /// Each script as a function of KEYS, ARGV and redis, by its name.
    compiled: HashMap<&'static str, Function>,
    clock: Clock,
}

impl Embedded {
    /// An engine without any state, on the system's time.
    #[must_use]
    pub fn new() -> Self {
        Self::with_clock(Clock::default())
    }

    /// An engine without any state, with this clock.
    #[must_use]
    pub fn with_clock(clock: Clock) -> Self {
        let interpreter = Interpreter::new(clock.clone()).expect("a new interpreter takes a few functions");
        Self { shared: Arc::new(Lock::new(interpreter)), clock }
    }

    /// The same on the system's time, keeping at most this many keys.
    pub(crate) fn of_at_most(keys: usize) -> Self {
        let engine = Self::new();
        engine.keyspace(|keyspace| keyspace.keep_at_most(keys));
        engine
    }

    pub(crate) fn ask(&self, ask: &Ask<'_>) -> Result<Reply, Error> {
        self.records(ask.alone().call())?.only()
    }

    pub(crate) fn acquire_all<'r>(&self, asks: impl Iterator<Item = Ask<'r>>) -> Vec<Result<Reply, Error>> {
        let mut asks = asks.map(|ask| (ask.hashes(), ask)).peekable();
        let mut replies = Vec::with_capacity(asks.size_hint().0);
        while asks.peek().is_some() {
            let mut batch = Batch::default();
            let mut groups = Vec::new();
            while let Some((hashes, ask)) = asks.next_if(|(hashes, ask)| batch.has_room(ask, hashes)) {
                groups.push(Some(batch.add(&ask, &hashes)));
            }
            let positions = batch.mark_sent(groups.into_iter());
            let records: Vec<_> = batch.calls().map(|(_, call)| self.records(call)).collect();
            let reply = |position: Position| {
                let answer = records[position.group.call as usize].as_ref();
                answer.map_err(Error::clone)?.reply(position)
            };
            replies.extend(positions.into_iter().flatten().map(reply));
        }
        replies
    }

    pub(crate) fn records(&self, call: ScriptCall<'_>) -> Result<Records, Error> {
        match self.shared.lock().run(call)? {
            Value::String(records) => call.read(&records.as_bytes(), None),
            Value::Table(table) => {
                let integers = table.sequence_values::<f64>().map(|item| item.map(|number| number as i64));
                call.read_state(&integers.collect::<mlua::Result<Vec<_>>>().unwrap_or_default())
            }
            other => Err(Error::new(
                Kind::Garbled,
                format!("the script's reply can't be used: expected a string or a table, got {}", other.type_name()),
            )),
        }
    }

    /// Every key and its state, in order.
    #[cfg(test)]
    pub(crate) fn states(&self) -> Vec<(Vec<u8>, String)> {
        self.keyspace(|keyspace| {
            let states = keyspace.keys().into_iter().map(|key| {
                let shown = keyspace.shown(&key);
                (key, shown)
            });
            states.collect()
        })
    }

    /// The time by a clock that was set.
    pub(crate) fn given_time(&self) -> Option<SystemTime> {
        let manual = self.clock.manual.as_ref()?;
        Some(UNIX_EPOCH + Duration::from_micros(manual.load(Ordering::Relaxed)))
    }

    pub(crate) fn size(&self) -> u64 {
        self.keyspace(|keyspace| keyspace.len())
    }

    /// In one step, since scanning a map in memory takes little time.
    pub(crate) fn sweep(&self, which: &Which<'_>) -> Swept {
        self.keyspace(|keyspace| {
            let before = keyspace.len();
            keyspace.remove_where(|key| (which.exactly)(which, key));
            Swept { next: 0, looked_at: before, removed: before - keyspace.len() }
        })
    }

    fn keyspace<T>(&self, look: impl FnOnce(&mut Keyspace) -> T) -> T {
        let interpreter = self.shared.lock();
        look(&mut interpreter.keyspace.lock())
    }
}

impl Default for Embedded {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Embedded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Embedded").finish_non_exhaustive()
    }
}

impl Clock {
    /// A clock that stands at this time until it is advanced.
    #[must_use]
    pub fn new(time: SystemTime) -> Self {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { manual: Some(Arc::new(AtomicU64::new(micros(since)))) }
    }

    /// Advances a clock that was set. Does nothing on the system's time.
    pub fn advance(&self, by: Duration) {
        if let Some(manual) = &self.manual {
            manual.fetch_add(micros(by), Ordering::Relaxed);
        }
    }

    fn now_us(&self) -> u64 {
        match &self.manual {
            Some(manual) => manual.load(Ordering::Relaxed),
            None => micros(wall_clock::now().duration_since(UNIX_EPOCH).unwrap_or_default()),
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl Interpreter {
    fn new(clock: Clock) -> mlua::Result<Self> {
        let lua = Lua::new();
        let keyspace = Arc::new(Lock::new(Keyspace::default()));
        let redis = lua.create_table()?;
        let store = Arc::clone(&keyspace);
        redis.set(
            "call",
            lua.create_function(move |lua, words| run(lua, &store, &words)?.map_err(mlua::Error::external))?,
        )?;
        let store = Arc::clone(&keyspace);
        redis.set(
            "pcall",
            lua.create_function(move |lua, words| match run(lua, &store, &words)? {
                Ok(value) => Ok(value),
                Err(ServerError(message)) => lua.create_table_from([("err", message)]).map(Value::Table),
            })?,
        )?;
        redis.set(
            "error_reply",
            lua.create_function(|lua, message: mlua::LuaString| lua.create_table_from([("err", message)]))?,
        )?;
        packing::install(&lua)?;
        lua.load(LOCK_GLOBALS).exec()?;
        Ok(Self { lua, redis, keyspace, compiled: HashMap::new(), clock })
    }

    fn run(&mut self, call: ScriptCall<'_>) -> Result<Value, Error> {
        self.keyspace.lock().set_time(self.clock.now_us());
        match self.call(call) {
            Ok(Value::Table(table)) => match table.raw_get::<String>("err") {
                Ok(message) => Err(from_message(&message)),
                Err(_) => Ok(Value::Table(table)),
            },
            Ok(other) => Ok(other),
            Err(error) => Err(from_lua(&error)),
        }
    }

    fn call(&mut self, call: ScriptCall<'_>) -> mlua::Result<Value> {
        let function = self.function(call.script())?;
        let (names, arguments) = (self.lua.create_table()?, self.lua.create_table()?);
        for key in call.keys() {
            names.raw_push(self.lua.create_string(key)?)?;
        }
        let mut failed = Ok(());
        call.each_argument(|argument| {
            if failed.is_ok() {
                failed = self.lua.create_string(argument).and_then(|text| arguments.raw_push(text));
            }
        });
        failed?;
        function.call((names, arguments, &self.redis))
    }

    /// A script's file is the body of a function.
    fn function(&mut self, script: &'static Script) -> mlua::Result<Function> {
        if let Some(function) = self.compiled.get(script.name()) {
            return Ok(function.clone());
        }
        let text = format!("return function(KEYS, ARGV, redis) {} end", script.text());
        let function: Function = self.lua.load(text).set_name(script.name()).eval()?;
        self.compiled.insert(script.name(), function.clone());
        Ok(function)
    }
}

/// Runs a script's command, and answers as Redis does.
fn run(lua: &Lua, keyspace: &Lock<Keyspace>, words: &MultiValue) -> mlua::Result<Result<Value, ServerError>> {
    let words = words.iter().map(Word::read).collect::<mlua::Result<Vec<_>>>()?;
    let words: Vec<_> = words.iter().map(Word::bytes).collect();
    let outcome = keyspace.lock().run(&words);
    let string = |bytes: Vec<u8>| lua.create_string(bytes).map(Value::String);
    let value = match outcome {
        Outcome::Nothing => Value::Boolean(false),
        Outcome::Integer(integer) => Value::Number(integer as f64),
        Outcome::Bytes(bytes) => string(bytes)?,
        Outcome::Values(values) => {
            let values = values.into_iter().map(|value| value.map_or(Ok(Value::Boolean(false)), string));
            Value::Table(lua.create_sequence_from(values.collect::<mlua::Result<Vec<_>>>()?)?)
        }
        Outcome::Array(items) => Value::Table(lua.create_sequence_from(items.into_iter().map(BString::from))?),
        Outcome::Time(parts) => Value::Table(lua.create_sequence_from(parts)?),
        Outcome::Done => Value::Table(lua.create_table_from([("ok", "OK")])?),
        Outcome::Error(message) => return Ok(Err(ServerError(message))),
    };
    Ok(Ok(value))
}

/// The text of an error: a command's answer, raised in Lua as Redis does, or the traceback of a script that failed.
#[derive(Debug)]
struct ServerError(String);

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ServerError {}

/// A word of a command: a string in Lua's memory, or a number as text.
enum Word {
    Text(BorrowedBytes),
    Number(String),
}

impl Word {
    fn read(value: &Value) -> mlua::Result<Self> {
        match value {
            Value::String(text) => Ok(Self::Text(text.as_bytes())),
            Value::Integer(number) => Ok(Self::Number(number.to_string())),
            Value::Number(number) if number.fract() == 0.0 => Ok(Self::Number((*number as i64).to_string())),
            _ => Err(mlua::Error::runtime("ERR Lua redis lib command arguments must be strings or whole numbers")),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::Text(bytes) => bytes,
            Self::Number(text) => text.as_bytes(),
        }
    }
}

fn from_lua(error: &mlua::Error) -> Error {
    match error {
        mlua::Error::CallbackError { cause, .. } => from_lua(cause),
        mlua::Error::ExternalError(external) => from_message(&external.to_string()),
        other => {
            let text = other.to_string();
            let (said, traceback) = text.split_once('\n').unwrap_or((&text, ""));
            let error = Error::new(Kind::Refused, said);
            if traceback.is_empty() { error } else { error.caused_by(ServerError(traceback.to_owned())) }
        }
    }
}

fn from_message(message: &str) -> Error {
    let kind = match message.split(' ').next() {
        Some("BADSTATE" | "WRONGTYPE") => Kind::Unreadable,
        Some("BADID") => return Error::unknown_id(message),
        Some("STALE") => return Error::stale_from_message(message),
        Some("BADARG") => Kind::Input,
        _ => Kind::Refused,
    };
    Error::new(kind, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_array_is_a_sequence_of_strings() {
        let interpreter = Interpreter::new(Clock::default()).unwrap();
        let text = r"local redis = ...
            redis.call('ZADD', 'key', 2, 'b', 1, 'a\0\255', 3, '3')
            local some = redis.call('ZRANGE', 'key', '-inf', '(3', 'BYSCORE', 'WITHSCORES')
            local none = redis.call('ZRANGE', 'key', 4, 5, 'BYSCORE')
            return #some == 4 and some[1] == 'a\0\255' and some[2] == '1' and some[3] == 'b' and some[4] == '2'
              and type(none) == 'table' and #none == 0";
        assert!(interpreter.lua.load(text).call::<bool>(&interpreter.redis).unwrap());
    }

    #[test]
    fn a_script_has_no_globals_of_its_own() {
        let lua = Interpreter::new(Clock::default()).unwrap().lua;
        for text in ["left_behind = 1", "return left_behind"] {
            let refused = lua.load(text).exec().unwrap_err().to_string();
            assert!(refused.contains("global variable 'left_behind'"), "{refused}");
        }
        assert_eq!(lua.load("return #struct.pack('<I7', 1)").eval::<u8>().unwrap(), 7);
    }

    #[test]
    fn where_a_script_broke_off_is_the_source() {
        let lua = Lua::new();
        let broken = from_lua(&lua.load("local none; return none.field").set_name("a").eval::<Value>().unwrap_err());
        let source = std::error::Error::source(&broken).map(ToString::to_string).unwrap_or_default();
        assert!(broken.to_string().ends_with("attempt to index local 'none' (a nil value)"), "{broken}");
        assert!(source.starts_with("stack traceback:") && !source.contains("attempt"), "{source}");
    }
}
