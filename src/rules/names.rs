//! Names of attributes.

use std::borrow::Cow;

use smallvec::SmallVec;

pub(super) const IP: &str = "ip";
pub(super) const PATH: &str = "path";
pub(super) const METHOD: &str = "method";
pub(super) const USER: &str = "user";
pub(super) const API_KEY: &str = "api_key";
pub(super) const TIER: &str = "tier";
/// For a key that isn't based on an attribute.
pub(super) const GLOBAL: &str = "global";

/// The name of an attribute. Names known to tollgate take no memory of their own in each rule, so that checking many
/// rules stays within the processor's caches.
pub(super) type Name = Cow<'static, str>;

/// The attributes of a key.
pub(super) type Names = SmallVec<[Name; 1]>;

pub(super) fn name(text: &str) -> Name {
    let known = [USER, API_KEY, TIER, IP, PATH, METHOD].into_iter().find(|known| *known == text);
    known.map_or_else(|| Cow::Owned(text.to_owned()), Cow::Borrowed)
}
