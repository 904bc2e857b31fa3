//! Which server it is: whether the scripts run on it, whether tollgate is tested with it, and whether it is still
//! supported.

use jiff::civil::{Date, date};

use super::super::facts::{Facts, Finding, Level};
use crate::info::Fields;

struct Product {
    name: &'static str,
    /// The INFO field with its version.
    field: &'static str,
    /// The first release that the scripts run on; `None` if tollgate isn't tested with this product.
    oldest: Option<(u32, u32)>,
}

/// Redis comes last: the others also report the version of Redis that they are compatible with.
const PRODUCTS: [Product; 6] = [
    Product { name: "Valkey", field: "valkey_version", oldest: Some((7, 2)) },
    Product { name: "Redict", field: "redict_version", oldest: Some((7, 3)) },
    Product { name: "Dragonfly", field: "dragonfly_version", oldest: None },
    Product { name: "Garnet", field: "garnet_version", oldest: None },
    Product { name: "Kvrocks", field: "kvrocks_version", oldest: None },
    Product { name: "Redis", field: "redis_version", oldest: Some((7, 0)) },
];

/// The last day on which a project fixes vulnerabilities in a release line, where known; looked up in November 2026.
///
/// Sources: for Redis, "Version management" on redis.io; 7.0 isn't listed there, and 8.0 has been left out of security
/// releases since February 2026 (SECURITY.md of redis/redis, endoflife.date). For Valkey, "Releases" on valkey.io:
/// three years from a minor's release, five for the last minor of a major.
const ENDS: [(&str, (u32, u32), Date); 10] = [
    ("Redis", (7, 0), date(2024, 7, 29)),
    ("Redis", (7, 2), date(2029, 12, 1)),
    ("Redis", (7, 4), date(2029, 12, 1)),
    ("Redis", (8, 0), date(2026, 2, 11)),
    ("Redis", (8, 2), date(2030, 9, 1)),
    ("Valkey", (7, 2), date(2029, 4, 16)),
    ("Valkey", (8, 0), date(2027, 9, 15)),
    ("Valkey", (8, 1), date(2030, 3, 31)),
    ("Valkey", (9, 0), date(2028, 10, 21)),
    ("Valkey", (9, 1), date(2029, 5, 19)),
];

pub(super) fn version(facts: &Facts) -> Option<Finding> {
    let info = facts.info.as_ref().ok()?;
    let (product, version) = PRODUCTS.iter().find_map(|product| Some((product, info.text(product.field)?)))?;
    // Dragonfly's version begins with `df-v`.
    let version = version.trim_start_matches(|character: char| !character.is_ascii_digit());
    let mut parts = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let line = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    let ends = ENDS.iter().find(|(name, of, _)| (*name, *of) == (product.name, line)).map(|(.., ends)| *ends);
    let found = format!("{} {version}", product.name);
    let finding = if is_sentinel(info) {
        Finding::new(
            "version",
            Level::Unfit,
            "a Sentinel, which keeps no keys: give the address of the Redis that it watches",
        )
        .advise("SENTINEL GET-MASTER-ADDR-BY-NAME <name> returns its address")
    } else if product.oldest.is_some_and(|oldest| line < oldest) {
        let found = format!("{found}: expected Redis 7.0 or newer, or Valkey 7.2 or newer");
        Finding::new("version", Level::Unfit, found).advise("upgrade the server")
    } else if product.oldest.is_none() {
        let found = format!("{found}, which tollgate isn't tested with");
        Finding::new("version", Level::Note, found)
            .advise("see below whether every script decides, and try your rules on it")
    } else if let Some(ends) = ends.filter(|ends| *ends < facts.today) {
        let (major, minor) = line;
        let found = format!("{found}; end of life after {ends}: {major}.{minor} gets no more security fixes");
        Finding::new("version", Level::Note, found)
            .advise("upgrade to a release that is supported, such as Redis 8.2 or Valkey 8.1, unless your distribution fixes this one")
    } else {
        let until = ends.map(|ends| format!(", which gets security fixes until {ends}")).unwrap_or_default();
        Finding::new("version", Level::Ok, found + &until)
    };
    let finding = match ends {
        Some(ends) => finding.number("end_of_life", ends.to_string()),
        None => finding,
    };
    let finding = finding.number("product", product.name).number("version", version);
    Some(finding.number("uptime_s", facts.count("uptime_in_seconds")))
}

/// Valkey uses another name for the mode.
fn is_sentinel(info: &Fields) -> bool {
    info.text("redis_mode").or(info.text("server_mode")) == Some("sentinel")
}
