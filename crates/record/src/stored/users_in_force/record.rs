//! One user as bytes: the name, what is set, and nothing for what isn't. A user with a tier takes some 20 bytes, where
//! a struct of options takes 150.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::stored::input::OwnLimits;

/// A user's own settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Settings<'a> {
    pub(crate) tier: Option<&'a str>,
    /// By the hour and the day.
    pub(crate) limits: OwnLimits,
    pub(crate) block: Option<Block<'a>>,
}

/// Why a user is blocked, and until when.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Block<'a> {
    pub(crate) reason: Option<&'a str>,
    /// To the microsecond, as PostgreSQL has it.
    pub(crate) until: Option<SystemTime>,
}

impl Settings<'_> {
    fn is_empty(&self) -> bool {
        *self == Settings::default()
    }
}

/// The byte after the name: a bit for each field that follows.
const TIER: u8 = 1;
const PER_HOUR: u8 = 2;
const PER_DAY: u8 = 4;
const BURST: u8 = 8;
const BLOCKED: u8 = 16;
const REASON: u8 = 32;
const UNTIL: u8 = 64;

/// Appends a user. One without settings was deleted, or has none of its own.
pub(crate) fn write(bytes: &mut Vec<u8>, user: &str, settings: &Settings<'_>) {
    let OwnLimits { per_hour, per_day, burst, .. } = settings.limits;
    let block = settings.block.unwrap_or_default();
    let until = block.until.map(|until| until.duration_since(UNIX_EPOCH).unwrap_or_default());
    let until = until.map(|until| u64::try_from(until.as_micros()).unwrap_or(u64::MAX));
    write_text(bytes, user);
    let there = [
        (TIER, settings.tier.is_some()),
        (PER_HOUR, per_hour.is_some()),
        (PER_DAY, per_day.is_some()),
        (BURST, burst.is_some()),
        (BLOCKED, settings.block.is_some()),
        (REASON, block.reason.is_some()),
        (UNTIL, until.is_some()),
    ];
    bytes.push(there.iter().filter(|(_, is_there)| *is_there).map(|(flag, _)| flag).sum());
    settings.tier.into_iter().for_each(|tier| write_text(bytes, tier));
    [per_hour, per_day, burst].into_iter().flatten().for_each(|units| write_number(bytes, units));
    block.reason.into_iter().for_each(|reason| write_text(bytes, reason));
    until.into_iter().for_each(|until| write_number(bytes, until));
}

/// The users in these bytes, each with its bytes, until the end or the first that can't be read.
pub(crate) struct UserRecords<'a>(pub(crate) &'a [u8]);

/// A user whose settings haven't been read yet.
#[derive(Clone, Copy)]
pub(crate) struct UserRecord<'a> {
    pub(crate) user: &'a str,
    pub(crate) bytes: &'a [u8],
    pub(crate) settings: Settings<'a>,
}

impl UserRecord<'_> {
    pub(crate) fn is_gone(&self) -> bool {
        self.settings.is_empty()
    }
}

impl<'a> Iterator for UserRecords<'a> {
    type Item = UserRecord<'a>;

    fn next(&mut self) -> Option<UserRecord<'a>> {
        let (record, rest) = read(self.0)?;
        self.0 = rest;
        Some(record)
    }
}

/// The first user in these bytes, and what follows.
pub(crate) fn read(bytes: &[u8]) -> Option<(UserRecord<'_>, &[u8])> {
    let mut rest = bytes;
    let user = read_text(&mut rest)?;
    let (&flags, after) = rest.split_first()?;
    rest = after;
    let has = |flag: u8| flags & flag != 0;
    let tier = if has(TIER) { Some(read_text(&mut rest)?) } else { None };
    let mut number = |flag: u8| if has(flag) { read_number(&mut rest).map(Some) } else { Some(None) };
    let limits =
        OwnLimits { per_second: None, per_hour: number(PER_HOUR)?, per_day: number(PER_DAY)?, burst: number(BURST)? };
    let reason = if has(REASON) { Some(read_text(&mut rest)?) } else { None };
    let until = if has(UNTIL) { Some(read_number(&mut rest)?) } else { None };
    let until = match until {
        Some(until) => Some(UNIX_EPOCH.checked_add(Duration::from_micros(until))?),
        None => None,
    };
    let block = has(BLOCKED).then_some(Block { reason, until });
    let bytes = &bytes[..bytes.len() - rest.len()];
    Some((UserRecord { user, bytes, settings: Settings { tier, limits, block } }, rest))
}

/// The name of the first user in these bytes.
pub(crate) fn name(bytes: &[u8]) -> Option<&str> {
    let mut rest = bytes;
    read_text(&mut rest)
}

fn write_text(bytes: &mut Vec<u8>, text: &str) {
    write_number(bytes, text.len() as u64);
    bytes.extend_from_slice(text.as_bytes());
}

fn read_text<'a>(rest: &mut &'a [u8]) -> Option<&'a str> {
    let length = usize::try_from(read_number(rest)?).ok()?;
    let (text, after) = rest.split_at_checked(length)?;
    *rest = after;
    std::str::from_utf8(text).ok()
}

/// Seven bits to a byte, the lowest first; the highest bit says that another byte follows.
fn write_number(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    bytes.push(number.to_le_bytes()[0]);
}

fn read_number(rest: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, after) = rest.split_first()?;
        *rest = after;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}
