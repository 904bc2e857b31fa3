use std::collections::HashMap;
use std::time::{Duration, UNIX_EPOCH};

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// A user's settings, owned.
#[derive(Clone, Debug, Default, PartialEq)]
struct Known {
    tier: Option<String>,
    limits: OwnLimits,
    block: Option<(Option<String>, Option<u64>)>,
}

impl Known {
    fn settings(&self) -> Settings<'_> {
        let block = self.block.as_ref().map(|(reason, until)| Block {
            reason: reason.as_deref(),
            until: until.map(|until| UNIX_EPOCH + Duration::from_micros(until)),
        });
        Settings { tier: self.tier.as_deref(), limits: self.limits, block }
    }

    fn is_usual(&self) -> bool {
        *self == Self::default()
    }
}

fn known() -> impl Strategy<Value = Known> {
    let units = || proptest::option::of(1..=1_u64 << 53);
    let limits = (units(), units(), units()).prop_map(|(per_hour, per_day, burst)| {
        let burst = burst.filter(|_| per_hour.is_some());
        OwnLimits { per_second: None, per_hour, per_day, burst }
    });
    let block =
        proptest::option::of((proptest::option::of(".{0,200}"), proptest::option::of(0..253_402_300_799_000_000_u64)));
    let limits = prop_oneof![3 => Just(OwnLimits::default()), 1 => limits];
    (proptest::option::of(".{1,64}"), limits, block).prop_map(|(tier, limits, block)| Known { tier, limits, block })
}

/// Few names, so that a user is often changed again, and all kinds of them.
fn user() -> impl Strategy<Value = String> {
    prop_oneof![3 => "[a-e]{1,2}", 1 => ".{1,300}"]
}

/// What a process returns for a user, as text.
fn shown(account: Option<Account>) -> String {
    account.map_or_else(String::new, |account| {
        let limits = account.own_limits().map(|limits| limits.to_string());
        format!("{:?} {:?} {limits:?} {:?}", account.user(), account.paid_tier(), account.last_block())
    })
}

fn expected(user: &str, known: &Known) -> String {
    let limits = known.limits.rule().ok().flatten();
    if known.tier.is_none() && known.block.is_none() && limits.is_none() {
        return String::new();
    }
    let account = Account::new(user);
    let account = known.tier.iter().fold(account, |account, tier| account.tier(tier));
    let account = limits.into_iter().fold(account, |account, limits| account.limits(limits).expect("limits"));
    let block = known.settings().block;
    shown(Some(block.iter().fold(account, |account, block| account.blocked(block.reason, block.until))))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever is inserted, changed, deleted and replaced as a whole: users are as in a map, and no others are there.
    #[test]
    fn users_are_as_in_a_map_after_any_changes(
        batches in vec((proptest::bool::weighted(0.1), vec((user(), known()), 0..60)), 1..12),
        strangers in vec(user(), 10)
    ) {
        let (users, mut map) = (Users::new(), HashMap::new());
        for (are_all, batch) in &batches {
            let mut changes = UserUpdates::new(*are_all);
            if *are_all {
                map.clear();
            }
            for (user, known) in batch {
                changes.add(user, &known.settings());
                map.insert(user.clone(), known.clone());
            }
            users.apply(changes);
            for user in batches.iter().flat_map(|(_, batch)| batch).map(|(user, _)| user).chain(&strangers) {
                let expected = map.get(user).map_or_else(String::new, |known| expected(user, known));
                prop_assert_eq!(shown(users.get(user)), expected, "{}", user);
            }
            prop_assert_eq!(users.len(), map.values().filter(|known| !known.is_usual()).count());
        }
        // The cached bytes are enough to rebuild the same users, in whatever order they come.
        let (again, mut changes) = (Users::new(), UserUpdates::new(true));
        for part in users.parts().iter().rev() {
            prop_assert!(changes.add_bytes(part.bytes()));
        }
        again.apply(changes);
        prop_assert_eq!(again.parts(), users.parts());
    }

    /// Bytes that aren't a part, as from another version or program, cause no panic and no more users than bytes.
    #[test]
    fn any_bytes_are_read_or_refused(bytes in vec(any::<u8>(), 0..300)) {
        let (users, mut changes) = (Users::new(), UserUpdates::new(true));
        if !changes.add_bytes(&bytes) {
            return Ok(());
        }
        users.apply(changes);
        prop_assert!(users.len() <= bytes.len());
    }
}

fn with_limits(per_hour: u64) -> Known {
    Known { limits: OwnLimits { per_hour: Some(per_hour), ..OwnLimits::default() }, ..Known::default() }
}

#[test]
fn equal_limits_are_one_rule() {
    let (users, mut changes) = (Users::new(), UserUpdates::new(true));
    for number in 0..1000_u64 {
        changes.add(&number.to_string(), &with_limits(number % 2 + 1).settings());
    }
    users.apply(changes);
    let account = |user: u64| users.get(&user.to_string()).expect("known");
    let are_shared = |one: u64, other: u64| {
        let [one, other] = [account(one), account(other)];
        let [one, other] = [&one, &other].map(|account| account.own_limits().expect("limits").rule());
        std::ptr::eq(one, other)
    };
    assert!(are_shared(0, 998) && are_shared(1, 999));
    assert!(!are_shared(0, 1));
    assert_eq!(users.rules.len(), 2);
}

#[test]
fn a_user_takes_few_bytes_and_a_change_one_part() {
    const USERS: usize = 300_000;
    let (users, mut changes) = (Users::new(), UserUpdates::new(true));
    for number in 0..USERS {
        let known = match number % 3 {
            0 => Known { tier: Some("enterprise".to_owned()), ..Known::default() },
            1 => Known { block: Some((Some("card testing".to_owned()), Some(1 << 50))), ..Known::default() },
            // Each has limits of its own, and no rule is made of them until they are asked for.
            _ => with_limits(number as u64),
        };
        changes.add(&format!("user-{number:08}"), &known.settings());
    }
    users.apply(changes);
    let bytes: usize = users.parts().iter().map(|part| part.records.len() + size_of_val(&*part.places) + 64).sum();
    assert!(bytes / USERS < 60, "{} bytes a user", bytes / USERS);
    assert_eq!((users.len(), users.rules.len()), (USERS, 0));
    let before = users.parts();
    let mut changes = UserUpdates::new(false);
    changes.add("user-00000007", &Settings::default());
    users.apply(changes);
    assert_eq!((users.len(), users.get("user-00000007").is_none()), (USERS - 1, true));
    let changed = before.iter().zip(users.parts()).filter(|(before, after)| !Arc::ptr_eq(before, after));
    assert_eq!(changed.count(), 1);
    // Rules are kept for some limits only.
    for number in (2..USERS).step_by(3) {
        assert!(users.get(&format!("user-{number:08}")).is_some());
    }
    assert!(users.rules.len() <= MOST_RULES, "{}", users.rules.len());
}
