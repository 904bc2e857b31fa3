//! The tool, run as a command: its standard output, standard error and exit code.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

pub(crate) fn tollgate(arguments: &[&str]) -> Output {
    command(arguments).output().expect("the tool runs")
}

/// With a deadline that a busy machine keeps, unless the arguments have their own or the command looks at servers that
/// may be slow.
pub(crate) fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    if !arguments.first().is_some_and(|command| ["watch", "doctor"].contains(command)) {
        command.env("TOLLGATE_DEADLINE", "30s");
    }
    command.args(arguments).env_remove("TOLLGATE_URL").stdin(Stdio::null());
    command
}

pub(crate) fn with_input(arguments: &[&str], input: &[u8]) -> Output {
    let pipes = [Stdio::piped(), Stdio::piped(), Stdio::piped()];
    let [stdin, stdout, stderr] = pipes;
    let mut child = command(arguments).stdin(stdin).stdout(stdout).stderr(stderr).spawn().expect("the tool runs");
    // A tool that stops at a bad line doesn't read the rest.
    let _ = child.stdin.take().expect("piped").write_all(input);
    child.wait_with_output().expect("the tool ends")
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("UTF-8")
}

pub(crate) fn code(output: &Output) -> i32 {
    output.status.code().expect("an exit code")
}

pub(crate) fn lines(output: &Output) -> Vec<Value> {
    stdout(output).lines().map(|line| serde_json::from_str(line).expect("a JSON object per line")).collect()
}
