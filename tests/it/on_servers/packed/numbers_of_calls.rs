//! Which calls are decided as a number of them: plain acquires, of which as many are allowed as fit one after the
//! other.

use super::*;

/// Only plain acquires are decided as a number of calls, and an inspection is answered in full.
#[test]
fn a_number_of_calls_of_anything_else_is_refused_and_so_is_an_inspection_without_long_records() {
    let (_server, mut redis) = server();
    // The operation, options and their values.
    let value = &1_000_000_u64.to_le_bytes()[..7];
    let two = [value, value].concat();
    let options: [(u8, &[u8]); 7] = [(1, &[]), (2, &[]), (4, &[]), (8, value), (16, value), (32, value), (64, &two)];
    let acquires = options.map(|(options, values)| (128, options, values));
    let others = [130, 131, 133, 134, 135, 140].map(|operation| (operation, 0, &[][..]));
    for form in Form::all() {
        cmd("FLUSHALL").exec(&mut redis).expect("flushed");
        form.text(&SAMPLE, "a", 2, "acquire", NOW).exec(&mut redis).expect("decided");
        let (plain, before) = (form.pack(&form.own(&SAMPLE, NOW), 1), dumps(&mut redis, &KEYS));
        let (numbers, now) = (&plain[..plain.len() - 9], NOW.to_string().into_bytes());
        let mut call = |operation: u8, options: u8, values: &[u8], calls: u32| {
            let shape = [numbers, &[operation, options], &1_u64.to_le_bytes()[..7], values].concat();
            let keys = if options % 64 < 32 { ["a"].as_slice() } else { &["a", "b"] };
            let call = form.evalsha(keys).arg(&shape).arg(&now).arg(several(&[("a", 1, calls)])).exec(&mut redis);
            call.map_err(|error| {
                let said = format!("{} {operation} {options}: {error}", form.algorithm);
                assert_eq!(error.code(), Some("BADARG"), "{said}");
                assert_eq!(dumps(&mut redis, &KEYS), before, "{said}");
                said
            })
        };
        for (operation, options, values) in acquires.iter().chain(&others).copied() {
            for calls in [0, 2] {
                let said = call(operation, options, values, calls).expect_err("a number of calls");
                assert!(said.contains("expected a number of 1"), "{said}");
            }
        }
        for options in [0, 4] {
            let said = call(132, options, &[], 1).expect_err("short records");
            assert!(said.contains("expected an operation of these limits"), "{said}");
        }
        call(132, 128, &[], 1).expect("a state");
        call(128, 128, &[], 2).expect("decisions");
        for (operation, options, values) in acquires.iter().chain(&others).copied() {
            call(operation, options, values, 1).expect("a decision");
        }
    }
}

/// Whose answer wouldn't say that one was allowed, or of which each is to be counted.
#[test]
fn a_number_of_calls_is_refused_where_a_limit_has_options_of_its_own() {
    let (_server, mut redis) = server();
    let block = &900_000_000_u64.to_le_bytes()[..7];
    for form in Form::all() {
        cmd("FLUSHALL").exec(&mut redis).expect("flushed");
        let plain = form.pack(&form.own(&SAMPLE, NOW), 1);
        let (numbers, acquire) = plain.split_at(plain.len() - 9);
        for (bits, is_refused) in [(1, false), (2, false), (4, true), (8, true)] {
            let shape = [numbers, &[64, bits], block, acquire].concat();
            let calls = several(&[("a", 1, 2)]);
            let answer = form.evalsha(&["a"]).arg(&shape).arg(NOW).arg(&calls).exec(&mut redis);
            assert_eq!(answer.is_err(), is_refused, "{} {bits}: {answer:?}", form.algorithm);
        }
    }
}

/// By one holder they are one call.
#[test]
fn a_number_of_calls_is_refused_of_permits() {
    let (_server, mut redis) = server();
    let permits = tollgate::Algorithm::all().find(|algorithm| algorithm.holds()).expect("permits");
    let ttl = &1_000_000_u64.to_le_bytes()[..7];
    let shape = [&[6, 5, 0], ttl, &[128, 0], &1_u64.to_le_bytes()[..7]].concat();
    for (number, is_refused) in [(1, false), (3, true)] {
        let mut call = cmd("EVAL");
        call.arg(tollgate::Script::for_algorithms([permits]).text()).arg(1).arg("permits").arg(&shape).arg(-1);
        let answer = call.arg(several(&[("permits", 1, number)])).arg("holder").exec(&mut redis);
        assert_eq!(answer.is_err(), is_refused, "{number}: {answer:?}");
    }
}
