use std::borrow::Cow;
use std::time::Duration;

use super::super::Redis;
use super::*;
use crate::call::{Costs, Mode, Terms};
use crate::error::ErrorKind;
use crate::operation::Operation;
use crate::script::Script;

fn ask<'a>(numbers: &'a Arc<[u8]>, key: &str, id: Option<&str>) -> Ask<'a> {
    let mode = Mode::Call(Operation::Acquire);
    Ask {
        script: Script::all().next().unwrap(),
        numbers: Cow::Borrowed(numbers),
        keys: [key].into_iter().chain(id).map(|key| key.as_bytes().into()).collect(),
        holder: None,
        costs: Costs::all(1),
        terms: Terms { id_ttl_ms: id.map(|_| 1000), ..Terms::of(mode) },
        now_us: None,
        most_keys: 80,
        partition: 0,
        across_partitions: false,
    }
}

/// The batch ends between two checks for an answer, without any of its callers having been sent.
#[tokio::test(start_paused = true)]
async fn whoever_registers_as_its_batch_ends_unsent_does_not_wait() {
    let redis = Redis::open("redis://127.0.0.1:1/").unwrap();
    let per_runtime = redis.per_runtime().unwrap();
    let numbers: Arc<[u8]> = Arc::from([1]);
    let waker = futures_util::task::noop_waker();
    let until = Deadline::after(Duration::from_secs(9));
    let alone = per_runtime.queue.enter(&ask(&numbers, "a", None), until, &waker);
    assert!(matches!(alone, Entered::Alone(0)));
    let asks = [(ask(&numbers, "b", None), Deadline::after(Duration::from_millis(5)))];
    let (mut waiting, begin) = per_runtime.queue.enter_all(asks.into_iter());
    let waiting = waiting.pop().unwrap();
    assert!(waiting.shared.answer(waiting.index).is_none());
    tokio::time::advance(Duration::from_millis(5)).await;
    let (batches, _) = per_runtime.queue.next(begin.dispatch.unwrap()).unwrap();
    assert_eq!(batches[0].batch.calls().count(), 0);
    drop(batches);
    assert!(!waiting.register(&waker));
}

/// Of each hundred, one waits: they are sent together, as if the others had never asked.
#[tokio::test(start_paused = true)]
async fn whoever_gives_up_leaves_room_for_those_who_wait() {
    let redis = Redis::open("redis://127.0.0.1:1/").unwrap();
    let queue = &redis.per_runtime().unwrap().queue;
    let (waker, until) = (futures_util::task::noop_waker(), Deadline::after(Duration::from_secs(9)));
    let numbers: Arc<[u8]> = Arc::from([1]);
    for has_id in [false, true] {
        let enter = |number: usize| {
            let (key, id) = (number.to_string(), format!("id {number}"));
            queue.enter(&ask(&numbers, &key, has_id.then_some(&id)), until, &waker)
        };
        let Entered::Alone(alone) = enter(0) else { panic!("others are under way") };
        let (mut patient, mut dispatch) = (Vec::new(), None);
        let waiting: Vec<_> = (1..=3000).map(enter).collect();
        for (number, entered) in waiting.into_iter().enumerate() {
            let Entered::Queued(waiting, begin) = entered else { panic!("another is under way") };
            dispatch = dispatch.or(begin.dispatch);
            if number % 100 == 0 {
                patient.push(waiting);
            }
        }
        let (batches, more) = queue.next(dispatch.unwrap()).unwrap();
        let keys: usize = batches.iter().flat_map(|batch| batch.batch.calls()).map(|(_, call)| call.key_count()).sum();
        assert_eq!((keys, more), (if has_id { 60 } else { 30 }, None), "{has_id}");
        drop(batches);
        drop(patient);
        assert!(queue.leave(alone, false).is_none() && queue.leave(dispatch.unwrap(), false).is_none());
    }
}

/// The caller with the earlier deadline begins to wait later.
#[tokio::test(start_paused = true)]
async fn whoever_waits_later_with_less_time_is_woken_in_time() {
    let redis = Redis::open("redis://127.0.0.1:1/").unwrap();
    let queue = &redis.per_runtime().unwrap().queue;
    let (numbers, waker): (Arc<[u8]>, _) = (Arc::from([1]), futures_util::task::noop_waker());
    let until = |ms| Deadline::after(Duration::from_millis(ms));
    let Entered::Alone(_) = queue.enter(&ask(&numbers, "a", None), until(9000), &waker) else {
        panic!("nobody else asks");
    };
    let asks = [50, 100].map(|ms| (ask(&numbers, "b", None), until(ms)));
    let (mut waiting, _) = queue.enter_all(asks.into_iter());
    let [patient, hasty] = [waiting.pop(), waiting.pop()].map(|waiting| tokio::spawn(waiting.unwrap()));
    let began = Instant::now();
    assert!(hasty.await.unwrap().unwrap_err().kind() == ErrorKind::Deadline);
    assert!(began.elapsed() < Duration::from_millis(60), "{:?}", began.elapsed());
    assert!(patient.await.unwrap().unwrap_err().kind() == ErrorKind::Deadline);
}
