//! The tokio runtime that a call is made on, timers that go with a future from one runtime to another, and a runtime of
//! the library's own for what others leave behind.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::process;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use futures_util::future::{BoxFuture, poll_fn};
use tokio::runtime::{Builder, Handle};
use tokio::time::{Instant, Sleep};

use crate::error::{Error, Kind};

/// The longest timer: an instant beyond it might not be representable.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(365 * 86_400);

/// The runtime of this call.
///
/// # Errors
///
/// There is none.
pub(crate) fn current() -> Result<Handle, Error> {
    Handle::try_current().map_err(|error| misused("there is none here").caused_by(error))
}

/// The same, if it can wait.
pub(crate) fn with_timers() -> Result<Handle, Error> {
    let runtime = current()?;
    timer(&runtime, Instant::now()).map(|_| runtime)
}

pub(crate) fn misused(why: &str) -> Error {
    Error::new(Kind::Input, format!("runtime: call this within a tokio runtime with enable_all: {why}"))
}

fn timer(runtime: &Handle, at: Instant) -> Result<Sleep, Error> {
    let _entered = runtime.enter();
    // There is no other way to ask whether a runtime has timers.
    catch_unwind(|| tokio::time::sleep_until(at)).map_err(|_| misused("this one has no timers"))
}

/// Wakes a task. A waker that panics leaves no other task unwoken.
pub(crate) fn wake(waker: Waker) {
    // The panic hook has reported the panic.
    let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
}

/// Sleeps by the timers of the runtime that polls it: the one that it was begun on may be blocked by then, or have
/// ended.
///
/// # Errors
///
/// There is no runtime to sleep by.
pub(crate) async fn sleep_until(at: Instant) -> Result<(), Error> {
    let (mut sleep, mut armed) = (pin!(None), None);
    poll_fn(|context| poll_timer(at, &mut armed, sleep.as_mut(), context)).await
}

/// Like [`sleep_until`]; polled outside a runtime, it sleeps by the timers of `home` until that has ended.
///
/// # Errors
///
/// There is no runtime to sleep by.
pub(crate) async fn sleep_by(home: &Handle, at: Instant) -> Result<(), Error> {
    let (mut sleep, mut armed) = (pin!(Some(timer(home, at)?)), Some(home.clone()));
    poll_fn(|context| poll_timer(at, &mut armed, sleep.as_mut(), context)).await
}

/// The same as [`sleep_until`] for this long.
pub(crate) async fn sleep(time: Duration) -> Result<(), Error> {
    sleep_until(Instant::now() + time).await
}

/// The future's output, if it is ready by then, by the timers of the runtime that polls it. None if it is late, or if
/// there is no runtime to wait by.
pub(crate) async fn timeout_at<F: Future>(at: Instant, future: F) -> Option<F::Output> {
    let (mut future, mut sleep, mut armed) = (pin!(future), pin!(None), None);
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => poll_timer(at, &mut armed, sleep.as_mut(), context).map(|_| None),
    })
    .await
}

/// The same as [`sleep_until`], for a future that is polled by hand.
#[derive(Debug)]
pub(crate) struct Timer {
    at: Instant,
    armed: Option<Handle>,
    sleep: Pin<Box<Option<Sleep>>>,
}

impl Timer {
    pub(crate) fn until(at: Instant) -> Self {
        Self { at, armed: None, sleep: Box::pin(None) }
    }

    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Error>> {
        poll_timer(self.at, &mut self.armed, self.sleep.as_mut(), context)
    }
}

/// Arms the timer on the runtime that polls, unless it is armed there.
fn poll_timer(
    at: Instant,
    armed: &mut Option<Handle>,
    mut sleep: Pin<&mut Option<Sleep>>,
    context: &mut Context<'_>,
) -> Poll<Result<(), Error>> {
    let here = current();
    let is_here = armed.as_ref().zip(here.as_ref().ok()).is_some_and(|(armed, here)| armed.id() == here.id());
    if !is_here {
        match here.and_then(|here| Ok((timer(&here, at)?, here))) {
            Ok((timer, here)) => {
                sleep.set(Some(timer));
                *armed = Some(here);
            }
            Err(error) if armed.as_ref().is_none_or(has_ended) => return Poll::Ready(Err(error)),
            Err(_) => {}
        }
    }
    match sleep.as_mut().as_pin_mut() {
        Some(sleep) => sleep.poll(context).map(Ok),
        None => Poll::Ready(Ok(())),
    }
}

/// Whether this runtime runs nothing any more.
fn has_ended(runtime: &Handle) -> bool {
    let task = runtime.spawn(std::future::pending::<()>());
    let ended = task.is_finished();
    task.abort();
    ended
}

/// A runtime of the library's own, with a thread that drives it until the process ends. It is started for the first
/// work that no runtime of the caller's is left to do; anew in a forked process, which has no thread but the one that
/// forked. None if no thread can be started.
pub(crate) fn own() -> Option<Handle> {
    static OWN: Mutex<Option<(u32, Option<Handle>)>> = Mutex::new(None);
    let start = || {
        let runtime = Builder::new_current_thread().enable_all().build().ok()?;
        let handle = runtime.handle().clone();
        let drive = move || runtime.block_on(std::future::pending::<()>());
        thread::Builder::new().name("tollgate".into()).spawn(drive).ok()?;
        Some(handle)
    };
    let mut own = OWN.lock().unwrap_or_else(PoisonError::into_inner);
    match &*own {
        Some((of, handle)) if *of == process::id() => handle.clone(),
        _ => own.insert((process::id(), start())).1.clone(),
    }
}

/// Runs this on a runtime; if that ends first, again on the library's own.
pub(crate) fn spawn_lasting<D>(runtime: &Handle, work: impl Fn() -> D + Send + 'static)
where
    D: Future<Output = ()> + Send + 'static,
{
    let work: Work = Box::new(move || Box::pin(work()));
    Lasting { work: Some(work), is_last: false }.start(runtime);
}

type Work = Box<dyn Fn() -> BoxFuture<'static, ()> + Send>;

struct Lasting {
    /// None once it is done.
    work: Option<Work>,
    is_last: bool,
}

impl Lasting {
    fn start(mut self, runtime: &Handle) {
        runtime.spawn(async move {
            let working = self.work.as_ref().map(|work| work());
            if let Some(working) = working {
                working.await;
            }
            drop(self.work.take());
        });
    }
}

impl Drop for Lasting {
    fn drop(&mut self) {
        if let (Some(work), false) = (self.work.take(), self.is_last)
            && let Some(runtime) = own()
        {
            Self { work: Some(work), is_last: true }.start(&runtime);
        }
    }
}
