//! Programs whose clock is wrong, or the test's own.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::redis_server::Server;

/// How many seconds the clock is ahead, for the library below.
pub const AHEAD: &str = "TOLLGATE_TEST_CLOCK_AHEAD";

/// A library that sets a program's clock ahead, or back, if it is in its `LD_PRELOAD`.
pub fn clock(directory: &Path) -> PathBuf {
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
    compiled(directory, &text)
}

fn compiled(directory: &Path, text: &str) -> PathBuf {
    let (source, library) = (directory.join("clock.c"), directory.join("clock.so"));
    std::fs::write(&source, text).expect("written");
    let made = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).arg("-ldl").status();
    assert!(made.expect("a C compiler").success());
    library
}

/// A redis-server whose clock stands still between the moments that the test sets. The one that paces it runs.
pub struct Timed {
    pub server: Server,
    now: File,
    _directory: TempDir,
}

impl Timed {
    /// At this time, in microseconds since the epoch, with further options.
    pub fn start(now: u64, options: &[&str]) -> Self {
        const FILE: &str = "TOLLGATE_TEST_CLOCK";
        let directory = tempfile::tempdir().expect("a directory");
        let text = format!(
            "#define _GNU_SOURCE
            #include <dlfcn.h>
            #include <fcntl.h>
            #include <stdlib.h>
            #include <sys/mman.h>
            #include <sys/time.h>
            #include <time.h>
            static volatile long long *now;
            __attribute__((constructor)) static void open_clock(void) {{
                now = mmap(0, sizeof *now, PROT_READ, MAP_SHARED, open(getenv(\"{FILE}\"), O_RDONLY), 0);
                if (now == MAP_FAILED) abort();
            }}
            int gettimeofday(struct timeval *time, void *zone) {{
                long long us = *now;
                time->tv_sec = us / 1000000;
                time->tv_usec = us % 1000000;
                return 0;
            }}
            int clock_gettime(clockid_t clock, struct timespec *time) {{
                if (clock != CLOCK_REALTIME) {{
                    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, \"clock_gettime\");
                    return real(clock, time);
                }}
                long long us = *now;
                time->tv_sec = us / 1000000;
                time->tv_nsec = us % 1000000 * 1000;
                return 0;
            }}
            time_t time(time_t *at) {{
                time_t seconds = *now / 1000000;
                if (at) *at = seconds;
                return seconds;
            }}"
        );
        let library = compiled(directory.path(), &text);
        let path = directory.path().join("now");
        std::fs::write(&path, now.to_ne_bytes()).expect("written");
        let environment = [("LD_PRELOAD", library.as_os_str()), (FILE, path.as_os_str())];
        let server = Server::with_environment(options, &environment);
        let now = File::options().write(true).open(&path).expect("the same file");
        Self { server, now, _directory: directory }
    }

    pub fn set(&self, now: u64) {
        self.now.write_all_at(&now.to_ne_bytes(), 0).expect("written");
    }
}
