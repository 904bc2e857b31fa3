//! The help of every command: short where it is scanned, and complete where it is read.

use std::collections::{BTreeMap, BTreeSet};

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
fn the_grammar_of_rules_fits_a_narrow_terminal() {
    let wide: Vec<_> = crate::rule_arguments::GRAMMAR.lines().filter(|line| line.chars().count() > LONGEST).collect();
    assert!(wide.is_empty(), "{wide:?}");
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
    let mut of_short = BTreeMap::<_, BTreeSet<_>>::new();
    let mut of_long = BTreeMap::<_, BTreeSet<_>>::new();
    for (_, command) in commands() {
        for option in options(&command) {
            let Some(long) = option.get_long() else { continue };
            if let Some(short) = option.get_short() {
                of_short.entry(short).or_default().insert(long.to_owned());
            }
            let values = option.get_value_names().unwrap_or_default().iter().map(ToString::to_string);
            of_long.entry(long.to_owned()).or_default().insert(values.collect::<Vec<_>>().join(" "));
        }
    }
    let several: Vec<_> = of_short.iter().filter(|(_, longs)| longs.len() > 1).collect();
    assert!(several.is_empty(), "{several:?}");
    // A rule is named where nothing else of it is used.
    let several: Vec<_> = of_long.iter().filter(|(long, values)| values.len() > 1 && *long != "rule").collect();
    assert!(several.is_empty(), "{several:?}");
}

#[test]
fn no_two_names_of_options_mean_the_same() {
    let mut longs = BTreeMap::<_, BTreeSet<_>>::new();
    for (_, command) in commands() {
        for option in options(&command).filter(|option| !option.is_positional()) {
            let help = option.get_help().expect("a sentence").to_string();
            longs.entry(help).or_default().insert(option.get_long().expect("a long name").to_owned());
        }
    }
    let several: Vec<_> = longs.iter().filter(|(_, longs)| longs.len() > 1).collect();
    assert!(several.is_empty(), "{several:?}");
}
