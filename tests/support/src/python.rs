//! A Python for what others do with Redis, Parquet and S3.

use std::path::PathBuf;

/// The Python that has DuckDB, pyarrow, moto, a client of Redis and schemathesis.
pub fn python() -> PathBuf {
    if let Some(python) = std::env::var_os("TOLLGATE_TEST_PYTHON") {
        return python.into();
    }
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || PathBuf::from(std::env::var_os("HOME").expect("HOME")).join(".cache");
    let python = cache.unwrap_or_else(home).join("tollgate/python/bin/python");
    assert!(
        python.exists(),
        "{}: expected a Python with DuckDB, pyarrow, moto and redis, which tests/python.sh makes",
        python.display()
    );
    python
}
