"""A load client with a fixed number of requests, or a fixed time, which keeps each response's status and latency."""

import base64
import collections
import http.client
import re
import subprocess
import threading
import time

from servers import found


def basic(user):
    return {"authorization": "Basic " + base64.b64encode(f"{user}:example".encode()).decode()}


def get(port, path="/", headers=None, method="GET", source=None):
    """One response: status, header fields with names in lower case, body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10, source_address=source and (source, 0))
    try:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        body = response.read().decode(errors="replace")
        return response.status, {name.lower(): value for name, value in response.getheaders()}, body
    finally:
        connection.close()


def wrk(url, *options, seconds=2):
    """How many answers wrk got of 32 connections, and how many of these were no success; nothing may break off."""
    command = [found("wrk"), "--threads", "1", "--connections", "32", "--duration", f"{seconds}s", *options, url]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "Socket errors" not in text, text
    refused = re.search(r"Non-2xx or 3xx responses: (\d+)", text)
    return int(re.search(r"(\d+) requests in", text)[1]), int(refused[1]) if refused else 0


class Load:
    """Requests by several clients at once, each on a connection of its own."""

    def __init__(self, port, path="/", headers=None, clients=8, requests=None, seconds=None, pause=0.0):
        self.port, self.path, self.headers, self.pause = port, path, headers or {}, pause
        self.left, self.end = requests, seconds and time.monotonic() + seconds
        self.began, self.answers = time.monotonic(), []
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self.client, daemon=True) for _ in range(clients)]
        for thread in self.threads:
            thread.start()

    def more(self):
        if self.end is not None and time.monotonic() >= self.end:
            return False
        if self.left is None:
            return True
        with self.lock:
            self.left -= 1
            return self.left >= 0

    def client(self):
        connection, own = None, []
        while self.more():
            began = time.monotonic()
            try:
                connection = connection or http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
                connection.request("GET", self.path, headers=self.headers)
                response = connection.getresponse()
                response.read()
                status = response.status
            except (OSError, http.client.HTTPException) as error:
                status = type(error).__name__
                connection.close()
                connection = None
            ended = time.monotonic()
            own.append((ended - self.began, status, ended - began))
            if self.pause:
                time.sleep(self.pause)
        if connection is not None:
            connection.close()
        with self.lock:
            self.answers += own

    def wait(self):
        for thread in self.threads:
            thread.join()
        self.answers.sort(key=lambda answer: answer[0])
        return self

    def counts(self):
        return dict(collections.Counter(status for _, status, _ in self.answers))

    def milliseconds(self, share, status=None):
        taken = sorted(took for _, got, took in self.answers if status in (None, got))
        return round(taken[min(int(len(taken) * share), len(taken) - 1)] * 1000, 1) if taken else None

    def table(self, step=0.5):
        """Counts per status in each step of time, with the slowest answer."""
        rows = collections.defaultdict(list)
        for at, status, took in self.answers:
            rows[int(at / step)].append((status, took))
        statuses = sorted({status for _, status, _ in self.answers}, key=str)
        lines = ["  from s " + "".join(f"{status!s:>8}" for status in statuses) + "  slowest ms"]
        for row in range(max(rows, default=-1) + 1):
            counts = collections.Counter(status for status, _ in rows[row])
            slowest = max((took for _, took in rows[row]), default=0) * 1000
            cells = "".join(f"{counts[status]:>8}" for status in statuses)
            lines.append(f"{row * step:8.1f} {cells}{slowest:12.1f}")
        return "\n".join(lines)
