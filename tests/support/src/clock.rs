//! Programs whose clock is wrong.

use std::path::{Path, PathBuf};
use std::process::Command;

/// How many seconds the clock is ahead, for the library below.
pub const AHEAD: &str = "TOLLGATE_TEST_CLOCK_AHEAD";

/// A library that sets a program's clock ahead, or back, if it is in its `LD_PRELOAD`.
pub fn clock(directory: &Path) -> PathBuf {
    let (source, library) = (directory.join("clock.c"), directory.join("clock.so"));
    let text = format!(
        "#define _GNU_SOURCE
        #include <dlfcn.h>
        #include <stdlib.h>
        #include <time.h>
        int clock_gettime(clockid_t clock, struct timespec *time) {{
            int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, \"clock_gettime\");
            const char *ahead = getenv(\"{AHEAD}\");
            int failed = real(clock, time);
            if (clock == CLOCK_REALTIME && ahead) time->tv_sec += atol(ahead);
            return failed;
        }}"
    );
    std::fs::write(&source, text).expect("written");
    let made = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).arg("-ldl").status();
    assert!(made.expect("a C compiler").success());
    library
}
