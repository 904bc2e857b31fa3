"""Private servers on loopback for the tests with gateways: each has free ports and a log, and is stopped by its pid."""

import atexit
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"

# What answers for the application: it says by which header fields it was asked.
APPLICATION = """
events {}
http {
    keepalive_requests 1000000;
    server {
        listen 127.0.0.1:PORT;
        location / { return 200 "user=$http_x_user for=$http_x_forwarded_for\\n"; }
        location /status { stub_status; }
        location /forbidden { return 403 "by the application\\n"; }
    }
}
"""


def needed(variable, what):
    """The program that this environment variable names."""
    path = os.environ.get(variable, "")
    if not os.access(path, os.X_OK):
        sys.exit(f"{variable}: expected the path of {what}, got {path!r}")
    return str(pathlib.Path(path).resolve())


def found(name):
    path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin")
    if path is None:
        sys.exit(f"{name}: it isn't installed")
    return path


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A process that listens on ports of loopback."""

    def __init__(self, name, command, ports, log):
        self.name, self.command, self.ports, self.log = name, command, ports, log
        self.process = None
        self.start()

    def start(self):
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        end = time.monotonic() + 20
        for port in self.ports:
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    if self.process.poll() is not None or time.monotonic() > end:
                        self.stop(signal.SIGKILL)
                        tail = pathlib.Path(self.log).read_text(errors="replace")[-2000:]
                        sys.exit(f"{self.name} doesn't listen on {port}:\n{tail}")
                    time.sleep(0.02)
        return self

    def pause(self):
        """Until SIGCONT. Its threads go on for a moment after the signal was sent."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = pathlib.Path(f"/proc/{self.process.pid}/task")
        while not all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks.iterdir()):
            time.sleep(0.001)

    def stop(self, how=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(12)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Servers:
    """All servers of a test, in a directory of their own that goes with them."""

    def __enter__(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="gateways-"))
        # nginx's workers are another user if it is started as root.
        self.dir.chmod(0o755)
        self.running = []
        # A test that is interrupted skips its own end.
        atexit.register(self.__exit__)
        return self

    def __exit__(self, *_):
        atexit.unregister(self.__exit__)
        for server in reversed(self.running):
            server.stop()
        if os.environ.get("KEEP_LOGS"):
            print(f"logs: {self.dir}")
        else:
            shutil.rmtree(self.dir, ignore_errors=True)

    def write(self, name, text):
        path = self.dir / name
        # Renamed into place: a reader sees the old file or the new one.
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)
        return path

    def start(self, name, command, *ports):
        server = Server(name, [str(part) for part in command], ports, self.dir / f"{name}.log")
        self.running.append(server)
        return server

    def redis(self):
        port = free_port()
        nothing_kept = ["--save", "", "--appendonly", "no"]
        command = [found("redis-server"), "--port", port, "--bind", "127.0.0.1", "--dir", self.dir, *nothing_kept]
        server = self.start("redis", command, port)
        server.url = f"redis://127.0.0.1:{port}"
        return server

    def service(self, rules, redis, *options, name="service"):
        grpc, http, metrics = free_port(), free_port(), free_port()
        ports = ["--grpc", f"127.0.0.1:{grpc}", "--http", f"127.0.0.1:{http}", "--metrics", f"127.0.0.1:{metrics}"]
        program = needed("TOLLGATE_SERVE", "tollgate-serve")
        server = self.start(name, [program, rules, "--url", redis.url, *ports, *options], grpc, http, metrics)
        server.grpc, server.http, server.metrics = grpc, http, metrics
        return server

    def nginx(self, name, text, port):
        """nginx by this configuration, with its files in the test's directory."""
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        paths = "".join(f"{kind}_temp_path {self.dir}/{name}-{kind}; " for kind in kinds) + "access_log off;"
        text = f"daemon off; pid {self.dir}/{name}.pid; error_log stderr warn;\n" + text
        config = self.write(f"{name}.conf", text.replace("http {", f"http {{ {paths}", 1))
        server = self.start(name, [found("nginx"), "-c", config, "-p", self.dir], port)
        server.port = port
        return server

    def application(self):
        port = free_port()
        return self.nginx("application", APPLICATION.replace("PORT", str(port)), port)

    def example(self, name, texts):
        """An example's text, with these texts changed, each of which it must contain."""
        text = (EXAMPLES / name).read_text()
        for old, new in texts.items():
            if old not in text:
                sys.exit(f"{name} no longer contains {old!r}")
            text = text.replace(old, new)
        return text

    def envoy(self, application, services, texts=None, name="envoy"):
        port, admin = free_port(), free_port()
        endpoint = """              - endpoint:
                  address:
                    socket_address: {{ address: 127.0.0.1, port_value: {} }}
"""
        endpoints = "".join(endpoint.format(service.grpc) for service in services)
        text = self.example(
            "envoy.yaml",
            {
                "port_value: 10000 }": f"port_value: {port} }}",
                "port_value: 9901 }": f"port_value: {admin} }}",
                "port_value: 8000 }": f"port_value: {application.ports[0]} }}",
                endpoint.format(8081): endpoints,
                **(texts or {}),
            },
        )
        config = self.write(f"{name}.yaml", text)
        program = needed("TOLLGATE_ENVOY", "envoy")
        quiet = ["--concurrency", 1, "--disable-hot-restart", "--log-level", "warning"]
        server = self.start(name, [program, "-c", config, *quiet], port)
        server.port, server.admin = port, admin
        return server
