//! A thread that follows the database, with a runtime of its own. What a million users or ten thousand rules cost to
//! read, build and drop is spent there, so the service's runtime goes on deciding meanwhile.

use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::thread;

use futures_util::future::select;
use tokio::runtime::Builder;
use tokio::sync::oneshot;

/// Ends, with everything that was spawned on it, when this is dropped.
pub(crate) struct OwnThread {
    _stop: oneshot::Sender<Infallible>,
}

impl OwnThread {
    pub(crate) fn start(work: impl Future<Output = ()> + Send + 'static) -> io::Result<Self> {
        let (stop, stopped) = oneshot::channel();
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let drive = move || {
            runtime.block_on(async { drop(select(pin!(work), stopped).await) });
        };
        thread::Builder::new().name("tollgate-follow".into()).spawn(drive)?;
        Ok(Self { _stop: stop })
    }
}
