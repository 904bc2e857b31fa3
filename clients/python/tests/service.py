"""The real service on a Redis of its own, and listeners that fail as networks do."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

PATIENT = 20.0
"""Seconds that a wait takes at most which isn't about time: this machine may be busy."""

CLIENTS = Path(__file__).resolve().parents[2]
SERVE = os.environ.get("TOLLGATE_SERVE") or exit("TOLLGATE_SERVE: expected the path of tollgate-serve")


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait(PATIENT)
    if process.stdout:
        process.stdout.close()


def line_of(process: subprocess.Popen, about: str) -> str:
    """The next line that it prints. A process that prints none in time is killed."""
    late = threading.Timer(PATIENT, process.kill)
    late.start()
    line = process.stdout.readline()
    late.cancel()
    assert line, f"expected {about} within {PATIENT} s, got none; its status is {process.poll()}"
    return line


class Redis:
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        path = self.folder / "redis.sock"
        arguments = ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--dir", self.folder]
        self.process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
        self.url = f"unix://{path}"
        until = time.monotonic() + PATIENT
        while not path.exists():
            assert self.process.poll() is None, f"redis-server ended with status {self.process.returncode}"
            assert time.monotonic() < until, f"redis-server made no socket within {PATIENT} s"
            time.sleep(0.01)

    def end(self) -> None:
        end(self.process)
        shutil.rmtree(self.folder)


class Service:
    def __init__(
        self, redis: Redis, http: str = "127.0.0.1:0", *options: str, rules: Path = CLIENTS / "rules.toml"
    ) -> None:
        arguments = [SERVE, rules, "--url", redis.url, "--http", http, "--grpc", "off"]
        # Tests must not fail because this machine is busy.
        arguments += ["--metrics", "off", "--deadline", "5s", *options]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        line = line_of(self.process, "the address of tollgate-serve")
        assert line.startswith("http "), f"expected the address of tollgate-serve, got {line!r}"
        self.address = line.removeprefix("http ").strip()
        self.url = self.address if http.startswith("unix:") else f"http://{self.address}"

    def end(self) -> None:
        end(self.process)


class Listener:
    """Accepts connections, and hands each with its number to a function, in a thread."""

    def __init__(self, serve, port: int = 0) -> None:
        self.accepted = 0
        self._serve = serve
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
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
        connection.settimeout(2 * PATIENT)
        try:
            self._serve(connection, number)
        except OSError:
            pass

    def end(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            connection.close()


def message_from(connection: socket.socket) -> bytes:
    """One request or answer, or nothing if the other side has closed."""
    data = b""
    while True:
        head, ended, body = data.partition(b"\r\n\r\n")
        if ended and len(body) >= int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]):
            return data
        more = connection.recv(65536)
        if not more:
            return b""
        data += more


def op_of(request: bytes) -> str:
    return request.split()[1].decode().removeprefix("/v1/")


def failure(status: int, **body) -> bytes:
    """An answer that is no decision."""
    content = json.dumps(body).encode()
    return b"HTTP/1.1 %d Failure\r\nContent-Length: %d\r\n\r\n%s" % (status, len(content), content)


def answer_of(service: Service, request: bytes) -> bytes:
    """What the service answers to these bytes."""
    host, _, port = service.address.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENT) as connection:
        connection.sendall(request)
        return message_from(connection)
