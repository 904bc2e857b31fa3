//! `tollgate --version`: the release, the commit, and what is built in.

use std::sync::LazyLock;

/// Empty where it isn't known: neither in a clone nor from a published package.
const COMMIT: &str = env!("TOLLGATE_COMMIT");

/// Each feature of this crate, and whether it is built in.
const FEATURES: [(&str, bool); 3] =
    [("tls", cfg!(feature = "tls")), ("postgres", cfg!(feature = "postgres")), ("archive", cfg!(feature = "archive"))];

/// What follows the tool's name.
pub(crate) fn text() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        let commit = if COMMIT.is_empty() { String::new() } else { format!(" ({COMMIT})") };
        let features = FEATURES.map(|(name, is_in)| format!("{}{name}", if is_in { '+' } else { '-' }));
        format!("{}{commit}\nfeatures: {}", env!("CARGO_PKG_VERSION"), features.join(" "))
    });
    &TEXT
}
