//! The page on the examples.

use tollgate_testing::console::Shell;
use tollgate_testing::redis_server::Server;

use super::Page;
use crate::example_service::{program, start};

#[test]
fn the_examples_answer_as_their_page_calls_them() {
    let redis = Server::start();
    let url = redis.tcp_url();
    let [service, completions, grpc, actix] =
        ["service", "completions", "grpc", "actix"].map(|name| start(name, Some(&url), &[]));
    let mut page = Page::new("examples/README.md", Shell::start())
        .replace("http://127.0.0.1:3000/completions", format!("http://{}/completions", completions.address))
        .replace("http://127.0.0.1:3000", format!("http://{}", service.address))
        .replace("http://127.0.0.1:3001", format!("http://{}", actix.address))
        .replace("http://127.0.0.1:3002", format!("http://{}", grpc.address))
        .replace("cargo run -p tollgate-examples --bin grpc --", program("grpc"))
        // All are answered, and not with a page of a framework's.
        .replace("curl -i ", "curl -sS --fail-with-body -i ")
        .endless("while sleep");
    page.run();
}
