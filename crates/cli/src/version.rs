//! `tollgate --version`: the release, the commit, and what is built in. What isn't says so.

use std::sync::LazyLock;

/// Empty if unknown: the build was neither from a clone nor from a published package.
const COMMIT: &str = env!("TOLLGATE_COMMIT");

/// Each feature of this crate, and whether it is built in.
const FEATURES: [(&str, bool); 7] = [
    ("tls", cfg!(feature = "tls")),
    ("postgres", cfg!(feature = "postgres")),
    ("archive", cfg!(feature = "archive")),
    ("watch", cfg!(feature = "watch")),
    ("reports", cfg!(feature = "reports")),
    ("compression", cfg!(feature = "compression")),
    ("man", cfg!(feature = "man")),
];

/// What follows the tool's name.
pub(crate) fn text() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        let commit = if COMMIT.is_empty() { String::new() } else { format!(" ({COMMIT})") };
        let features = FEATURES.map(|(name, is_in)| format!("{}{name}", if is_in { '+' } else { '-' }));
        format!("{}{commit}\nfeatures: {}", env!("CARGO_PKG_VERSION"), features.join(" "))
    });
    &TEXT
}

/// The error of a command, an option or an input that needs a feature which this build lacks.
pub(crate) fn lacking(what: &str, feature: &str) -> String {
    let how = format!("cargo install --locked --path crates/cli --features {feature}");
    format!("{what}: this tollgate is built without the feature {feature}, which provides it: {how}")
}
