"""The real service on a Redis of its own, and listeners that fail as networks do."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

CLIENTS = Path(__file__).resolve().parents[2]
SERVE = os.environ.get("TOLLGATE_SERVE") or exit("TOLLGATE_SERVE: expected the path of tollgate-serve")


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    if process.stdout:
        process.stdout.close()


class Redis:
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        path = self.folder / "redis.sock"
        arguments = ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--dir", self.folder]
        self.process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
        self.url = f"unix://{path}"
        until = time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < until and self.process.poll() is None, "redis-server didn't start"
            time.sleep(0.01)

    def end(self) -> None:
        end(self.process)
        shutil.rmtree(self.folder)


class Service:
    def __init__(self, redis: Redis, http: str = "127.0.0.1:0", *options: str) -> None:
        arguments = [SERVE, CLIENTS / "rules.toml", "--url", redis.url, "--http", http, "--grpc", "off"]
        # Tests must not fail because this machine is busy.
        arguments += ["--metrics", "off", "--deadline", "5s", *options]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        line = self.process.stdout.readline()
        assert line.startswith("http "), f"tollgate-serve didn't start: {line!r}"
        self.address = line.removeprefix("http ").strip()
        self.url = self.address if http.startswith("unix:") else f"http://{self.address}"

    def end(self) -> None:
        end(self.process)


class Listener:
    """Accepts connections, and hands each with its number to a function, in a thread."""

    def __init__(self, serve) -> None:
        self.accepted = 0
        self._serve = serve
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = "http://127.0.0.1:%d" % self._listener.getsockname()[1]
        self._connections = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            self.accepted += 1
            threading.Thread(target=self._run, args=(connection, self.accepted), daemon=True).start()

    def _run(self, connection: socket.socket, number: int) -> None:
        try:
            self._serve(connection, number)
        except OSError:
            pass

    def end(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            connection.close()


def request_from(connection: socket.socket) -> bytes:
    """One request, or nothing if the client has closed."""
    data = b""
    while True:
        head, ended, body = data.partition(b"\r\n\r\n")
        if ended and len(body) >= int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]):
            return data
        more = connection.recv(65536)
        if not more:
            return b""
        data += more


def answer_of(service: Service, request: bytes) -> bytes:
    """What the service answers to these bytes."""
    host, _, port = service.address.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        connection.sendall(request)
        data = b""
        while True:
            head, ended, body = data.partition(b"\r\n\r\n")
            if ended and len(body) >= int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]):
                return data
            data += connection.recv(65536)


def kill(process: subprocess.Popen) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
