//! Prints how two sets of rules differ.

use std::io::{self, Write};

use tollgate::rules::RuleChanges;

use crate::escape::shown;
use crate::output::counted;

/// `added    free, paid`, a line for each kind of change.
pub(super) fn print(changes: &RuleChanges, count: usize) -> io::Result<()> {
    let mut out = anstream::stdout();
    for (what, names) in [("added", &changes.added), ("changed", &changes.changed), ("removed", &changes.removed)] {
        if !names.is_empty() {
            writeln!(out, "{what:<10}{}", shown(names.join(", ").as_bytes()))?;
        }
    }
    if changes.reordered {
        writeln!(out, "{:<10}other rules", "reordered")?;
    }
    if changes.settings {
        writeln!(out, "{:<10}settings that all rules share", "changed")?;
    }
    let rules = counted(count as u64, "rule");
    if changes.is_empty() { writeln!(out, "{rules}, unchanged") } else { writeln!(out, "{rules}") }
}
