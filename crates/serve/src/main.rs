//! `tollgate-serve`: the rate limit service as a process.

mod options;
mod run;
#[cfg(feature = "otlp")]
mod trace;

use clap::Parser;

use options::Options;

/// Requests allocate much and on several threads.
#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[tokio::main]
async fn main() -> std::process::ExitCode {
    let options = Options::parse();
    match run::run(options).await {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            // One line, whatever the chain of causes.
            eprintln!("tollgate-serve: {error:#}");
            std::process::ExitCode::from(2)
        }
    }
}
