//! A test in a process of its own: with other environment variables, or since it changes what all of a process shares.

use std::ffi::OsStr;
use std::process::Command;

const ALONE: &str = "TOLLGATE_TEST_ALONE";

/// In the process that the test was started in: what it printed in its own. In that: none.
pub fn alone(test: &str, variables: &[(&str, &OsStr)]) -> Option<String> {
    if std::env::var_os(ALONE).is_some() {
        return None;
    }
    let mut again = Command::new(std::env::current_exe().expect("this program"));
    again.args(["--exact", test, "--nocapture"]).env(ALONE, "yes").envs(variables.iter().copied());
    let output = again.output().expect("its end");
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    Some(text)
}
