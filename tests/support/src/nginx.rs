//! An nginx of a test's own, in front of a service: in a temporary directory, on a port of loopback, stopped when the
//! test ends.

use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::redis_server::free_port;

pub struct Nginx {
    process: Child,
    pub address: SocketAddr,
    _directory: TempDir,
}

impl Nginx {
    /// Passes all requests on to the service at this address, and adds the client's address to `X-Forwarded-For` as
    /// its manual says.
    pub fn before(service: SocketAddr) -> Self {
        for _ in 0..5 {
            let directory = tempfile::tempdir().expect("a temporary directory");
            let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
            let path = directory.path().display().to_string();
            let configuration = format!(
                "daemon off; master_process off; pid {path}/pid; error_log stderr;\n\
                 events {{}}\n\
                 http {{\n\
                 access_log off; large_client_header_buffers 4 64k;\n\
                 client_body_temp_path {path}/body; proxy_temp_path {path}/proxy; fastcgi_temp_path {path}/fastcgi;\n\
                 uwsgi_temp_path {path}/uwsgi; scgi_temp_path {path}/scgi;\n\
                 server {{ listen {address}; location / {{\n\
                 proxy_pass http://{service}; proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;\n\
                 }} }} }}\n"
            );
            let file = directory.path().join("nginx.conf");
            std::fs::write(&file, configuration).expect("a file");
            let spawned = Command::new(program())
                .arg("-p")
                .arg(directory.path())
                .arg("-c")
                .arg(&file)
                .stderr(Stdio::inherit())
                .spawn();
            let process = spawned.expect("nginx, which tests/run.sh installs");
            let mut nginx = Self { process, address, _directory: directory };
            if nginx.comes_up() {
                return nginx;
            }
        }
        panic!("nginx ends as soon as it is started");
    }

    fn comes_up(&mut self) -> bool {
        let began = Instant::now();
        while began.elapsed() < super::polling::PATIENCE {
            if std::net::TcpStream::connect(self.address).is_ok() {
                return true;
            }
            // Another program may have taken the port since.
            if self.process.try_wait().expect("its state").is_some() {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("nginx doesn't listen on {}", self.address);
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Debian installs it where only root's PATH leads.
fn program() -> &'static str {
    let elsewhere = "/usr/sbin/nginx";
    if std::path::Path::new(elsewhere).exists() { elsewhere } else { "nginx" }
}
