//! A replay as a page.

use std::path::PathBuf;

use super::summary::{Counts, Order, Summary};
use crate::escape::shown;
use crate::output::{file_names, grouped, percent};
use crate::page::{Bars, Ink, Page, Plot, Section, Series, Table, times};

/// The page for records from these files, under the rule or set named `ruled`.
pub(super) fn page(summary: &Summary, ruled: &str, files: &[PathBuf], order: Order) -> Page {
    let (allowed, denied) = (summary.allowed(), summary.denied());
    let records = allowed + denied;
    let mut page = Page { title: format!("Replay of {} under {ruled}", file_names(files)), ..Page::default() };
    let keys: Vec<_> = summary.keys().filter(|(_, of_key)| of_key.denied > 0).collect();
    let [some, all, denied_keys, of] = [denied, records, keys.len() as u64, summary.decided_keys() as u64].map(grouped);
    page.says = match (records, denied) {
        (0, _) => "There were no requests to decide.".to_owned(),
        (_, 0) => format!("All {all} requests were allowed."),
        _ => {
            let share = percent(denied as f64 / records as f64);
            format!("{some} of {all} requests were denied ({share}), of {denied_keys} of {of} keys.")
        }
    };
    page.fact("Requests", all);
    page.fact("Allowed", grouped(allowed));
    page.fact("Denied", some);
    page.fact("Keys", of);
    page.fact("Keys that were denied", denied_keys);
    let [unreadable, out_of_order] = summary.unread();
    page.fact("Lines that could not be read", grouped(unreadable));
    let played = match order {
        _ if out_of_order == 0 => "",
        Order::Sorted => ", played sorted by time",
        Order::AsItStands => ", played as they stand, with a clock that steps back",
    };
    page.fact("Records out of order", format!("{}{played}", grouped(out_of_order)));
    if let permits @ 1.. = summary.permits_not_held() {
        let why = "so denials by concurrency mean little";
        page.fact("Permits not held as long as in reality", format!("{}, {why}", grouped(permits)));
    }
    page.sections.extend(summary.over_time().map(|counted| counted.section("Over time", "requests", times, None)));
    let [rules, shadows] = summary.by_rule();
    page.sections.extend(by_rule("By rule", "The decisions of each rule that applied.", &rules));
    page.sections.extend(by_rule(
        "Shadow rules",
        "These had no effect; shown is what they would have decided.",
        &shadows,
    ));
    page.sections.extend(busiest(summary));
    page.sections.extend(summary.waits().section());
    page
}

/// The decisions of each rule, if there were any.
fn by_rule(title: &str, says: &str, rules: &[Counts]) -> Option<Section> {
    if rules.is_empty() {
        return None;
    }
    let rows = rules.iter().map(|counts| {
        let name = counts.rule.clone().unwrap_or_else(|| "no rule applied".to_owned());
        (name, counts.allowed, counts.denied)
    });
    let says = format!("{says} Those that denied most come first; the hatched part of a bar was denied.");
    Some(bars(title, says, "rule", rows))
}

/// The keys that were denied most.
pub(crate) fn busiest(summary: &Summary) -> Option<Section> {
    let busiest = summary.busiest();
    if busiest.is_empty() {
        return None;
    }
    let denied = summary.keys().filter(|(_, of_key)| of_key.denied > 0).count();
    let says = match denied {
        0 => "No key was denied. These made the most requests.".to_owned(),
        _ if denied < busiest.len() => format!(
            "{} first; the others made the most requests. The hatched part of a bar was denied.",
            if denied == 1 {
                "The one key that was denied comes".to_owned()
            } else {
                format!("The {denied} keys that were denied come")
            }
        ),
        _ if denied == busiest.len() => {
            "These are all the keys that were denied. The hatched part of a bar was denied.".to_owned()
        }
        _ => {
            let of_these: u64 = busiest.iter().map(|(_, of_key)| of_key.denied).sum();
            let [of_these, all] = [of_these, summary.denied()].map(grouped);
            let count = busiest.len();
            format!(
                "The {count} keys that were denied most, with {of_these} of {all} denials. The hatched part of a bar was denied."
            )
        }
    };
    let rows = busiest.into_iter().map(|(key, of_key)| (shown(key), of_key.allowed, of_key.denied));
    Some(bars("Busiest keys", says, "key", rows))
}

/// Bars with the allowed and denied counts of each name.
pub(crate) fn bars(title: &str, says: String, what: &str, rows: impl Iterator<Item = (String, u64, u64)>) -> Section {
    let mut table = Table::new([what, "allowed", "denied", "denied, %"]);
    let mut plot = Bars::default();
    let (mut allowed, mut denied) = (Vec::new(), Vec::new());
    for (name, yes, no) in rows {
        let share = percent(no as f64 / (yes + no).max(1) as f64);
        plot.notes.push(format!("{} of {} denied", grouped(no), grouped(yes + no)));
        table.row([name.clone(), grouped(yes), grouped(no), share]);
        plot.names.push(name);
        allowed.push(yes);
        denied.push(no);
    }
    plot.series = vec![
        Series { name: "allowed".into(), ink: Ink::Allowed, counts: allowed },
        Series { name: "denied".into(), ink: Ink::Denied, counts: denied },
    ];
    Section { title: title.to_owned(), says, plot: Some(Plot::Bars(plot)), table }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tollgate::RetryAfter;

    use super::*;

    /// Neither records nor keys add to a page beyond a bound.
    #[test]
    fn a_page_of_a_million_records_is_as_small_as_one_of_a_few() {
        let mut summary = Summary::default();
        for at in 0..1_000_000_u64 {
            let key = format!("user:{}", at * at % 50_021).into_bytes();
            summary.touched(&key);
            let wait = RetryAfter::After(Duration::from_micros(at % 90_001 * 700));
            summary.decided(&key, at * 86_400, at % 3 > 0, Some(wait));
        }
        let page = page(&summary, "token-bucket 1/1s", &["access.log".into()], Order::Sorted);
        assert!(page.says.starts_with("333,334 of 1,000,000 requests were denied (33.33 %)"), "{}", page.says);
        assert_eq!(page.sections.len(), 3);
        let rows: usize = page.sections.iter().map(|section| section.table.rows.len()).sum();
        assert!(rows < 100, "{rows}");
    }
}
