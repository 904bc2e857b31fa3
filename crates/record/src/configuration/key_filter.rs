//! The ids of all keys, by which look-ups of ids that no key has are limited without holding up those of keys that
//! exist.
//!
//! They are read once, in slices, and then follow the changes. They only decide which look-ups are limited: an id that
//! is missing here is looked up all the same: an id that is missing here is looked up all the same, but within a limit.

use std::collections::hash_map::DefaultHasher;
use std::hash::{BuildHasher, BuildHasherDefault};
use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::sleep;
use tokio_postgres::types::ToSql;

use crate::chance::jittered;
use crate::postgres::{Postgres, PostgresError, begin_reading, in_time};
use crate::stored::key_text::KeyId;

/// Beyond this, ids aren't kept: they take 12 bytes each.
const MOST_IDS: usize = 5_000_000;
/// Ids read at once.
const SLICE: i64 = 20_000;
const SLICE_WITHIN: Duration = Duration::from_secs(10);
/// The wait before the ids are read again after a failure.
const PAUSE: Duration = Duration::from_secs(1);
/// A change moves the ids of one part.
const PARTS: usize = 4096;

/// The next ids, one after the other in one text.
const NEXT: &str = "
    SELECT coalesce(string_agg(key_id, '') FILTER (WHERE octet_length(key_id) = 12), ''), max(key_id)
    FROM (SELECT key_id FROM tollgate.api_keys WHERE key_id > $1 ORDER BY key_id LIMIT $2) AS slice";

pub(crate) struct KeyFilter {
    state: RwLock<State>,
    outdated: Notify,
}

#[derive(Default)]
struct State {
    /// `None` until they are read, and if there are too many.
    ids: Option<Ids>,
    /// Changes since reading began, while they are being read.
    meanwhile: Option<Vec<(KeyId, bool)>>,
}

/// Sorted, in parts by hash.
struct Ids {
    parts: Vec<Vec<KeyId>>,
}

/// Without ids yet, and outdated, so that they are read first.
impl Default for KeyFilter {
    fn default() -> Self {
        let known = Self { state: RwLock::default(), outdated: Notify::new() };
        known.reload();
        known
    }
}

impl KeyFilter {
    /// Whether a key may have this id; also `true` if that isn't known.
    pub(crate) fn may_have(&self, id: KeyId) -> bool {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        state.ids.as_ref().is_none_or(|ids| ids.has(id))
    }

    pub(crate) fn len(&self) -> Option<usize> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        state.ids.as_ref().map(|ids| ids.parts.iter().map(Vec::len).sum())
    }

    /// Takes a change: whether a key has this id now.
    pub(crate) fn change(&self, id: KeyId, exists: bool) {
        let mut state = self.locked();
        if let Some(ids) = &mut state.ids {
            ids.set(id, exists);
        }
        if let Some(meanwhile) = &mut state.meanwhile {
            meanwhile.push((id, exists));
        }
    }

    /// Requests that all ids are read again, since not all changes were. The present ones are used meanwhile.
    pub(crate) fn reload(&self) {
        self.outdated.notify_one();
    }

    /// Drops all ids, since the database is another one.
    pub(crate) fn forget(&self) {
        let before = self.locked().ids.take();
        drop(before);
        self.reload();
    }

    async fn read(&self, postgres: &Postgres) -> Result<(), PostgresError> {
        self.locked().meanwhile = Some(Vec::new());
        let slices = slices(postgres).await?;
        let ids = match slices {
            // With a million ids this takes a while.
            Some(slices) => tokio::task::spawn_blocking(move || Ids::of(&slices)).await.ok(),
            None => None,
        };
        let mut state = self.locked();
        let changes = state.meanwhile.take().unwrap_or_default();
        let before = std::mem::replace(&mut state.ids, ids);
        if let Some(ids) = &mut state.ids {
            changes.into_iter().for_each(|(id, exists)| ids.set(id, exists));
        }
        drop(state);
        drop(before);
        Ok(())
    }

    fn locked(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads the ids whenever they are outdated, as a task of its own: no decision and no other change waits for it.
pub(crate) async fn keep_ids(known: Arc<KeyFilter>, postgres: Postgres) {
    loop {
        known.outdated.notified().await;
        while known.read(&postgres).await.is_err() {
            sleep(jittered(PAUSE, 50)).await;
        }
    }
}

/// All ids, as of one moment; `None` if there are too many.
async fn slices(postgres: &Postgres) -> Result<Option<Vec<String>>, PostgresError> {
    let mut connection = postgres.connection().await?;
    let transaction = in_time(SLICE_WITHIN, begin_reading(&mut connection)).await?;
    let (mut slices, mut last, mut count) = (Vec::new(), String::new(), 0);
    loop {
        let row = in_time(SLICE_WITHIN, transaction.query_one(NEXT, &[&last as &(dyn ToSql + Sync), &SLICE])).await?;
        let (slice, Some(end)): (String, _) = (row.get(0), row.get(1)) else { break };
        count += slice.len() / KeyId::LENGTH;
        if count > MOST_IDS {
            return Ok(None);
        }
        slices.push(slice);
        last = end;
    }
    in_time(SLICE_WITHIN, transaction.commit()).await?;
    Ok(Some(slices))
}

impl Ids {
    fn of(slices: &[String]) -> Self {
        let mut parts = vec![Vec::new(); PARTS];
        let ids = slices.iter().flat_map(|slice| slice.as_bytes().chunks_exact(KeyId::LENGTH)).filter_map(KeyId::of);
        ids.for_each(|id| parts[part_of(id)].push(id));
        for part in &mut parts {
            part.sort_unstable();
            part.shrink_to_fit();
        }
        Self { parts }
    }

    fn has(&self, id: KeyId) -> bool {
        self.parts[part_of(id)].binary_search(&id).is_ok()
    }

    fn set(&mut self, id: KeyId, exists: bool) {
        let part = &mut self.parts[part_of(id)];
        match (part.binary_search(&id), exists) {
            (Err(at), true) => {
                // So that no part takes twice the memory it needs.
                part.reserve_exact(1);
                part.insert(at, id);
            }
            (Ok(at), false) => drop(part.remove(at)),
            _ => {}
        }
    }
}

fn part_of(id: KeyId) -> usize {
    let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(id);
    usize::try_from(hash % PARTS as u64).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn id(number: u64) -> KeyId {
        KeyId::read(&format!("{number:012}")).expect("an id")
    }

    #[test]
    fn ids_are_those_that_were_read_and_followed() {
        let known = KeyFilter::default();
        assert!(known.may_have(id(1)) && known.len().is_none(), "nothing is known yet");
        let slices: Vec<String> =
            (0..10).map(|slice| (0..500).map(|at| format!("{:012}", slice * 500 + at)).collect()).collect();
        known.locked().ids = Some(Ids::of(&slices));
        let mut expected: HashSet<u64> = (0..5000).collect();
        let mut number = 1_u64;
        for step in 0..20_000 {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (one, exists) = ((number >> 33) % 8000, step % 3 > 0);
            known.change(id(one), exists);
            if exists {
                expected.insert(one)
            } else {
                expected.remove(&one)
            };
        }
        for number in 0..8000 {
            assert_eq!(known.may_have(id(number)), expected.contains(&number), "{number}");
        }
        assert_eq!(known.len(), Some(expected.len()));
        known.forget();
        assert!(known.may_have(id(9000)) && known.len().is_none());
    }
}
