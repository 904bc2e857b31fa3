//! Whether counts are kept: memory, eviction, persistence.

use indicatif::{HumanBytes, HumanCount};

use super::super::facts::{Facts, Finding, Level};

/// Above this percentage, memory is nearly full.
const FULL: u64 = 80;

pub(super) fn eviction(facts: &Facts) -> Option<Finding> {
    let policy = facts.setting("maxmemory-policy")?;
    let bounded = facts.number("maxmemory").unwrap_or(0) > 0;
    let finding = if policy == "noeviction" {
        Finding::new("eviction", Level::Ok, "maxmemory-policy noeviction: no limit is ever evicted")
    } else if bounded {
        let now = fullness(facts).map(|percent| format!(" ({percent}% now)")).unwrap_or_default();
        let all = if policy.starts_with("volatile") { ", those that expire, as all keys of limits do," } else { "" };
        let found = format!(
            "maxmemory-policy {policy} evicts keys{all} once {} are full{now}: each evicted limit may admit up to one \
             capacity more",
            HumanBytes(facts.number("maxmemory").unwrap_or(0))
        );
        Finding::new("eviction", Level::Warning, found).set("maxmemory-policy", "noeviction")
    } else {
        let found = format!(
            "maxmemory-policy {policy} evicts nothing while maxmemory is 0; once it is set, keys of limits too"
        );
        Finding::new("eviction", Level::Note, found).set("maxmemory-policy", "noeviction")
    };
    Some(finding.number("maxmemory_policy", policy))
}

pub(super) fn memory(facts: &Facts) -> Option<Finding> {
    facts.info.as_ref().ok()?;
    let (used, machine) = (used(facts), facts.count("total_system_memory"));
    let most = facts.number("maxmemory").unwrap_or(0);
    let noeviction = facts.setting("maxmemory-policy").is_none_or(|policy| policy == "noeviction");
    let larger = largest_key(facts).map(|bytes| most.saturating_sub(used) / bytes.max(1));
    let room = larger.map(|keys| format!(", room for about {} more keys", HumanCount(keys))).unwrap_or_default();
    // Twice the current use and, if there is no maxmemory, at least half the machine's memory, which leaves room for
    // the copy that a save makes.
    let more = || format!("{}mb", (used.saturating_mul(2).max(if most == 0 { machine / 2 } else { 0 }) >> 20) + 1);
    let finding = if most == 0 {
        let of = if machine > 0 { format!(" of the machine's {}", HumanBytes(machine)) } else { String::new() };
        let found = format!(
            "{}{of}; maxmemory 0 sets no bound, so the kernel may kill Redis when memory runs out",
            HumanBytes(used)
        );
        Finding::new("memory", Level::Note, found).set("maxmemory", &more())
    } else {
        let percent = percent(used, most);
        let found = format!("{} of maxmemory {}, {percent}% full", HumanBytes(used), HumanBytes(most));
        let (level, found) = match (used >= most, noeviction) {
            (true, true) => (Level::Unfit, format!("{found}: refuses every decision (OOM)")),
            _ if percent >= FULL && noeviction => {
                (Level::Warning, format!("{found}: refuses every decision when full"))
            }
            _ if percent >= FULL => (Level::Warning, format!("{found}: evicts when full")),
            _ => (Level::Ok, found + &room),
        };
        let finding = Finding::new("memory", level, found);
        if level == Level::Ok { finding } else { finding.set("maxmemory", &more()) }
    };
    let finding = match most > machine && machine > 0 {
        true => {
            let found = format!("{}; maxmemory is above the machine's {}", finding.found, HumanBytes(machine));
            Finding { level: finding.level.max(Level::Warning), found, ..finding }
        }
        false => finding,
    };
    Some(finding.number("used", used).number("maxmemory", most).number("machine", machine))
}

pub(super) fn evicted(facts: &Facts) -> Option<Finding> {
    let evicted = facts.info.as_ref().ok()?.number("evicted_keys")?;
    let evicts = facts.setting("maxmemory-policy").is_some_and(|policy| policy != "noeviction");
    let (level, found) = match (evicted, evicts) {
        (0, _) => (Level::Ok, "no key was evicted so far".to_owned()),
        (_, true) => (
            Level::Warning,
            format!("{} keys were evicted so far, perhaps keys of limits among them", HumanCount(evicted)),
        ),
        (_, false) => (Level::Note, format!("{} keys were evicted, under an earlier policy", HumanCount(evicted))),
    };
    let finding = Finding::new("evicted", level, found).number("evicted_keys", evicted);
    Some(if level == Level::Warning { finding.set("maxmemory-policy", "noeviction") } else { finding })
}

/// Size of a sample key of each algorithm, including its name.
pub(super) fn key_size(facts: &Facts) -> Option<Finding> {
    let sizes: Vec<_> =
        facts.trials.iter().filter_map(|trial| Some((trial.script, *trial.bytes.as_ref()?.as_ref().ok()?))).collect();
    let (least, most) = (sizes.iter().map(|(_, bytes)| *bytes).min()?, largest_key(facts)?);
    let list: Vec<_> = sizes.iter().map(|(script, bytes)| format!("{script} {bytes}")).collect();
    let found = format!("a key takes {least} to {most} bytes after two requests: {}", list.join(", "));
    let finding = Finding::new("key size", Level::Ok, found);
    Some(sizes.into_iter().fold(finding, |finding, (script, bytes)| finding.number(script, bytes)))
}

pub(super) fn persistence(facts: &Facts) -> Option<Finding> {
    facts.info.as_ref().ok()?;
    let changes = facts.count("rdb_changes_since_last_save");
    let finding = if facts.setting("appendonly") == Some("yes") {
        match facts.setting("appendfsync") {
            Some("always") => {
                let found = "AOF, appendfsync always: a crash forgets nothing, and every decision waits for the disk";
                Finding::new("persistence", Level::Note, found).set("appendfsync", "everysec")
            }
            Some("no") => {
                let found = "AOF, appendfsync no: a crash of the machine forgets what the system hadn't written, \
                             about 30s; each key may then admit up to one capacity more";
                Finding::new("persistence", Level::Note, found).set("appendfsync", "everysec")
            }
            _ => {
                let found = "AOF: a crash of the machine forgets the last second or two; each key may then admit up \
                             to one capacity more";
                Finding::new("persistence", Level::Ok, found)
            }
        }
    } else if facts.setting("save").is_some_and(|save| save != "\"\"" && !save.is_empty()) {
        let found = format!(
            "RDB only (save {}): a crash forgets what came after the last save, {} changes now; each key may then \
             admit up to one capacity more",
            facts.setting("save").unwrap_or_default(),
            HumanCount(changes)
        );
        Finding::new("persistence", Level::Note, found).set("appendonly", "yes")
    } else if facts.setting("save").is_none() {
        let found = "no AOF, and save points aren't known: a restart may forget every limit; each key may then admit \
                     up to one capacity more";
        Finding::new("persistence", Level::Note, found)
    } else {
        let found = "none: a restart forgets every limit; each key may then admit up to one capacity more";
        Finding::new("persistence", Level::Note, found).set("appendonly", "yes")
    };
    Some(finding.number("rdb_changes_since_last_save", changes))
}

/// Whether a failed save stops decisions, or would.
pub(super) fn saves(facts: &Facts) -> Option<Finding> {
    facts.info.as_ref().ok()?;
    let appends = facts.setting("appendonly") == Some("yes");
    let saves = facts.setting("save").map(|save| !save.is_empty() && save != "\"\"");
    let stops = facts.setting("stop-writes-on-bgsave-error").map(|stops| stops == "yes");
    let (saved, written) =
        (facts.info("rdb_last_bgsave_status") != Some("err"), facts.info("aof_last_write_status") != Some("err"));
    let rewritten = facts.info("aof_last_bgrewrite_status") != Some("err");
    let refuses =
        facts.trials.iter().any(|trial| trial.took.as_ref().is_err_and(|refusal| refusal.message.contains("MISCONF")));
    let dont_stop = |finding: Finding| finding.set("stop-writes-on-bgsave-error", "no");
    let room = "make room on the server's disk, and make its directory writable (CONFIG GET dir); then BGSAVE";
    let finding = if appends && !written {
        Finding::new("saves", Level::Unfit, "the AOF can't be written: every decision is refused (MISCONF)")
            .advise(room)
    } else if refuses || (!saved && saves == Some(true) && stops == Some(true)) {
        dont_stop(
            Finding::new("saves", Level::Unfit, "the last save failed: every decision is refused (MISCONF)")
                .advise(room),
        )
    } else if !saved {
        Finding::new(
            "saves",
            Level::Warning,
            "the last save failed: a restart forgets what came after the last good one",
        )
        .advise(room)
    } else if !rewritten {
        Finding::new("saves", Level::Warning, "the last rewrite of the AOF failed: it grows until the disk is full")
            .advise(room)
    } else if saves == Some(true) && stops == Some(true) {
        let found = "the last save succeeded; if one fails, every decision is refused (MISCONF) until one succeeds";
        dont_stop(Finding::new("saves", Level::Note, found))
    } else if appends || saves == Some(true) {
        Finding::new("saves", Level::Ok, "the last save succeeded")
    } else if saves.is_none() {
        Finding::new("saves", Level::Ok, "no save has failed")
    } else {
        return None;
    };
    let status = facts.info("rdb_last_bgsave_status").unwrap_or_default();
    Some(
        finding
            .number("rdb_last_bgsave_status", status)
            .number("rdb_last_save_time", facts.count("rdb_last_save_time")),
    )
}

/// Memory as Redis compares it with maxmemory.
fn used(facts: &Facts) -> u64 {
    facts.count("used_memory").saturating_sub(facts.count("mem_not_counted_for_evict"))
}

fn fullness(facts: &Facts) -> Option<u64> {
    facts.info.as_ref().ok()?;
    Some(percent(used(facts), facts.number("maxmemory").filter(|most| *most > 0)?))
}

fn percent(part: u64, whole: u64) -> u64 {
    part.saturating_mul(100) / whole.max(1)
}

fn largest_key(facts: &Facts) -> Option<u64> {
    facts.trials.iter().filter_map(|trial| trial.bytes.as_ref()?.as_ref().ok().copied()).max()
}
