//! Prints the public items of a crate, one a line: `tollgate-public-api FILE`, which rustdoc has written as JSON. Exits
//! with 3 if the file has another format than is known here.

use std::process::ExitCode;

/// Traits that types have by themselves, and that no service asks for.
const UNUSED: [&str; 4] = ["::Freeze for ", "::StructuralPartialEq for ", "::UnsafeUnpin for ", "UnwindSafe for "];

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (Some(file), None) = (arguments.next(), arguments.next()) else {
        eprintln!("tollgate-public-api: expected one file");
        return ExitCode::from(2);
    };
    // What every type has by itself, such as Send and Sync, is listed: a lost one breaks users too. What every type
    // gets from implementations for all types isn't.
    let read = public_api::Builder::from_rustdoc_json(&file).omit_blanket_impls(true).build();
    match read {
        Ok(api) => {
            let items = api.items().map(|item| item.to_string());
            for item in items.filter(|item| !UNUSED.iter().any(|name| item.contains(name))) {
                println!("{item}");
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("tollgate-public-api: {file}: {error}");
            ExitCode::from(3)
        }
    }
}
