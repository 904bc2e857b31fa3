//! The help of every command: short where it is scanned, and complete where it is read.

use clap::{Arg, Command, CommandFactory};

use crate::Tollgate;

/// The longest first sentence, in characters.
const LONGEST: usize = 80;

/// Each command with its path, such as `rules check`.
fn commands() -> Vec<(String, Command)> {
    fn collect(path: &str, command: &Command, into: &mut Vec<(String, Command)>) {
        for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
            let path = format!("{path} {}", sub.get_name()).trim_start().to_owned();
            into.push((path.clone(), sub.clone()));
            collect(&path, sub, into);
        }
    }
    let mut tool = Tollgate::command();
    tool.build();
    let mut all = Vec::new();
    collect("", &tool, &mut all);
    all
}

fn options(command: &Command) -> impl Iterator<Item = &Arg> {
    command.get_arguments().filter(|arg| !["help", "version"].contains(&arg.get_id().as_str()))
}

#[test]
fn first_sentences_fit_a_line() {
    let mut long = Vec::new();
    for (path, command) in commands() {
        let about = command.get_about().expect(&path).to_string();
        if about.chars().count() > LONGEST {
            long.push(format!("{path}: {about}"));
        }
        for option in options(&command) {
            let help = option.get_help().unwrap_or_else(|| panic!("{path} {}", option.get_id())).to_string();
            if help.chars().count() > LONGEST {
                long.push(format!("{path} {}: {help}", option.get_id()));
            }
        }
    }
    assert!(long.is_empty(), "{}", long.join("\n"));
}

#[test]
fn help_is_no_wider_than_its_page_and_ends_within_two_screens() {
    for (path, mut command) in commands() {
        let short = command.render_help().to_string();
        let long = command.render_long_help().to_string();
        for text in [&short, &long] {
            let wide: Vec<_> = text.lines().filter(|line| line.chars().count() > 100).collect();
            assert!(wide.is_empty(), "{path}: {wide:?}");
        }
        assert!(short.lines().count() <= 60, "{path} -h has {} lines", short.lines().count());
    }
}

#[test]
fn each_command_that_runs_tells_its_exit_codes() {
    let mut silent = Vec::new();
    for (path, mut command) in commands() {
        if command.has_subcommands() {
            continue;
        }
        let long = command.render_long_help().to_string();
        let words = long.split_whitespace().collect::<Vec<_>>().join(" ");
        if !words.contains("Exit code: 0") {
            silent.push(path);
        }
    }
    assert!(silent.is_empty(), "{silent:?}");
}

#[test]
fn where_there_are_many_options_they_stand_in_groups() {
    for (path, command) in commands() {
        let loose = options(&command).filter(|option| !option.is_positional() && option.get_help_heading().is_none());
        let loose: Vec<_> = loose.map(|option| option.get_id().as_str().to_owned()).collect();
        let all = options(&command).count();
        assert!(all <= 10 || loose.len() <= 9, "{path}: {loose:?}");
    }
}

#[test]
fn no_name_of_an_option_means_two_things() {
    use std::collections::BTreeMap;
    let mut of_name: BTreeMap<String, BTreeMap<String, Vec<String>>> = BTreeMap::new();
    for (path, command) in commands() {
        for option in options(&command) {
            let Some(short) = option.get_short() else { continue };
            let long = option.get_long().expect("a long name").to_owned();
            of_name.entry(short.to_string()).or_default().entry(long).or_default().push(path.clone());
        }
    }
    let several: Vec<_> = of_name.iter().filter(|(_, longs)| longs.len() > 1).collect();
    assert!(several.is_empty(), "{several:?}");
}
