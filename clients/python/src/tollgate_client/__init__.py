"""A client of tollgate-serve, the rate limit service, by HTTP with JSON.

`Client` is for threads, `AsyncClient` for asyncio, and `RateLimitMiddleware` for ASGI applications such as FastAPI's and
Starlette's. README.md says what each call costs, and what happens if the service doesn't answer.
"""

from __future__ import annotations

import asyncio
import http
import http.client
import inspect
import io
import ipaddress
import json
import logging
import os
import random
import select
import socket
import ssl
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator, Mapping, MutableMapping
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Optional, TypeVar, Union
from urllib.parse import quote, urlsplit

__all__ = [
    "AsyncClient",
    "Client",
    "Decision",
    "Denied",
    "Limit",
    "Permit",
    "RateLimitMiddleware",
    "RequestError",
    "TollgateError",
    "Unavailable",
    "UnknownId",
]

DEADLINE = 0.1
"""Seconds that a call takes at most. The service gives Redis 15 ms; the rest is for the network and busy processes."""

_IDLE_SECONDS = 5.0
"""How long a connection is kept unused. The service closes it after 10 s, and a request that is sent meanwhile fails."""

_IDLE_CONNECTIONS = 64
_RELEASE_PAUSES = (0.05, 0.2, None)
"""Seconds between the attempts to release a permit. After the last one, it comes back at its ttl."""

_UNREAD_DEADLINE = 0.5
"""The least deadline of a release that nobody waits for: one given up early would only be repeated."""

_UNREAD_PAUSES = (0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0)
"""Seconds between its attempts while the service is away. Each is lengthened randomly, up to twice, so that callers that
failed together don't retry together. After the last attempt, the permit comes back at its ttl."""

_UNREAD_PATIENCE = 15.0
"""A failure so many seconds after the first one isn't retried."""

_UNREAD_RETRIED = 256
"""At most so many of a client's are retried at a time, since each is a thread or a task. Others are tried once."""

_log = logging.getLogger("tollgate_client")

Attributes = Mapping[str, Union[str, int, float, bool]]
RetryAfter = Union[int, Literal["never"], None]


# Errors


class TollgateError(Exception):
    """The root of this package's errors."""


class RequestError(TollgateError):
    """The service refused the request as it is: wrong input (400), a wrong token (401), or another 4xx.

    `reason` tells it from others of its kind: `ambiguous-path` of a path that can be read in two ways.
    """

    def __init__(self, message: str, status: int, kind: Optional[str], reason: Optional[str] = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.reason = reason
        # None if it answers a second attempt, and the first one may have been charged.
        self._charged: Optional[bool] = False


class UnknownId(RequestError):
    """Nothing is remembered for the id: it expired, was cancelled or released, or never existed (404)."""


class Unavailable(TollgateError):
    """There is no decision: the service is unreachable, too slow, or answered with a failure (5xx).

    `kind` is the service's, or of this client: `unreachable`, `deadline`, `disconnected`, `garbled`, `unavailable`.
    `charged` says whether units were taken all the same; None: unknown.
    """

    def __init__(self, message: str, kind: str, charged: Optional[bool] = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.charged = charged


class Denied(TollgateError):
    """`hold` got no permit. `decision` says why, and for how long."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision.message or f"denied by rule {decision.rule}")
        self.decision = decision


# Decisions


@dataclass(frozen=True)
class Limit:
    """One limit's part of a decision. Times are in microseconds."""

    name: str
    key: str
    allowed: bool
    limit: int
    remaining: int
    retry_after_us: RetryAfter
    reset_after_us: int
    rule: Optional[str] = None
    algorithm: Optional[str] = None
    """Such as `token-bucket` or `concurrency`; None from a service that doesn't say."""


@dataclass(frozen=True)
class Decision:
    """What the service decided. Times are in microseconds; `raw` is the whole answer."""

    allowed: bool
    status: int
    """The status to answer a denied request with, such as 429."""
    reason: str
    rule: Optional[str] = None
    key: Optional[str] = None
    cost: Optional[int] = None
    limit: Optional[int] = None
    remaining: Optional[int] = None
    retry_after_us: RetryAfter = None
    """The wait until the same request would be allowed: `"never"` if waiting doesn't help, None if it was allowed."""
    reset_after_us: Optional[int] = None
    denied_by: Optional[str] = None
    by: str = "policy"
    """What decided: `redis`, `rules`, or `policy` if it was the failure policy of the rule or of this client."""
    limits: tuple[Limit, ...] = ()
    id: Optional[str] = None
    message: Optional[str] = None
    error: Optional[str] = None
    """The kind of the error, if a failure policy decided."""
    cause: Optional[Unavailable] = field(default=None, compare=False)
    """The error, if this client's policy decided."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """The fields `RateLimit`, `RateLimit-Policy` and `Retry-After`, or those of another style, in lower case."""
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


def _is_for_clients(name: str) -> bool:
    return name == "retry-after" or name.startswith(("ratelimit", "x-ratelimit-"))


def _decision(status: int, headers: Mapping[str, str], body: Mapping[str, Any]) -> Decision:
    limits = tuple(Limit(**{name: value for name, value in limit.items() if name in _LIMIT}) for limit in body["limits"])
    known = {name: body[name] for name in _DECISION if name in body}
    fields = {name.lower(): value for name, value in headers.items() if _is_for_clients(name.lower())}
    return Decision(**{**known, "status": status, "limits": limits, "headers": fields, "raw": body})


_LIMIT = frozenset(Limit.__dataclass_fields__)
_DECISION = frozenset(Decision.__dataclass_fields__) - {"status", "limits", "cause", "headers", "raw"}


def _body(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    return body if isinstance(body, dict) else {}


def _is_of_service(body: Mapping[str, Any]) -> bool:
    """Whether it is a decision or an error of the service. After anything else, what comes next may be anything too."""
    return isinstance(body.get("allowed"), bool) or isinstance(body.get("error"), str)


def _answer(status: int, headers: Mapping[str, str], content: bytes, body: Mapping[str, Any]) -> Decision:
    """The decision in an answer. A denial may have any status, so the body tells whether it is a decision."""
    if isinstance(body.get("allowed"), bool):
        try:
            return _decision(status, headers, body)
        except (KeyError, TypeError, AttributeError) as error:
            raise Unavailable(f"the answer is no decision: {error!r}", "garbled") from error
    message = str(body.get("error") or content.decode(errors="replace").strip()[:200] or f"status {status}")
    kind, charged = body.get("kind"), body.get("charged")
    if 400 <= status < 500 and status not in (408, 429):
        raise (UnknownId if kind == "unknown-id" else RequestError)(message, status, kind, body.get("reason"))
    if status < 500 and status not in (408, 429):
        raise Unavailable(f"the answer is no decision: {message}", "garbled")
    raise Unavailable(message, kind or "unavailable", charged)


# What both clients share

R = TypeVar("R")


class _Calls(Generic[R]):
    """The calls. A client for threads or tasks adds the way to the service and back, and what waits meanwhile."""

    def __init__(
        self,
        url: str,
        *,
        token: Optional[str] = None,
        deadline: float = DEADLINE,
        on_error: Literal["closed", "open"] = "closed",
        ssl_context: Optional[ssl.SSLContext] = None,
    ) -> None:
        """`url` is `http://HOST:PORT`, `https://HOST` or `unix:PATH`, and `deadline` is in seconds."""
        if on_error not in ("closed", "open"):
            raise ValueError(f'on_error: expected "closed" or "open", got {on_error!r}')
        if not deadline > 0:
            raise ValueError(f"deadline: expected seconds, more than 0, got {deadline!r}")
        if token is not None and not (token.isascii() and token.isprintable()):
            raise ValueError("token: expected printable ASCII characters")
        parts = urlsplit(url)
        is_unix = parts.scheme == "unix" and bool(parts.path)
        if not is_unix and not (parts.scheme in ("http", "https") and parts.hostname):
            raise ValueError(f"url: expected http://HOST:PORT, https://HOST or unix:PATH, got {url!r}")
        self._socket = parts.path if is_unix else None
        self._host = parts.hostname or "localhost"
        self._ssl = (ssl_context or ssl.create_default_context()) if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._deadline = deadline
        self._on_error = on_error
        prefix = "" if is_unix else parts.path.rstrip("/")
        authorization = "" if token is None else f"Authorization: Bearer {token}\r\n"
        self._head = (
            f"POST {prefix}/v1/%s HTTP/1.1\r\nHost: {'localhost' if is_unix else parts.netloc.rpartition('@')[2]}\r\n"
            f"{authorization}Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        self._retries = threading.BoundedSemaphore(_UNREAD_RETRIED)
        self._begin()

    def _begin(self) -> None:
        """Makes what a client has beside its settings."""
        raise NotImplementedError

    def decide(
        self,
        attributes: Attributes,
        cost: Optional[int] = None,
        costs: Optional[Mapping[str, int]] = None,
        id: Optional[str] = None,
        *,
        id_ttl_ms: Optional[int] = None,
    ) -> R:
        """Takes what the request costs, or denies it and takes nothing. One round trip.

        With an `id` it is charged once, however often it is sent, and can be settled or cancelled.
        """
        return self._ask("decide", _request(attributes, cost, costs, id, id_ttl_ms))

    def peek(
        self,
        attributes: Attributes,
        cost: Optional[int] = None,
        costs: Optional[Mapping[str, int]] = None,
        id: Optional[str] = None,
    ) -> R:
        """What `decide` would answer; takes nothing."""
        return self._ask("peek", _request(attributes, cost, costs, id))

    def refund(
        self,
        attributes: Attributes,
        cost: Optional[int] = None,
        costs: Optional[Mapping[str, int]] = None,
        id: Optional[str] = None,
    ) -> R:
        """Gives the cost back. With an `id` of its own it is given back once, however often it is sent."""
        return self._ask("refund", _request(attributes, cost, costs, id))

    def settle(
        self,
        attributes: Attributes,
        cost: Optional[int] = None,
        costs: Optional[Mapping[str, int]] = None,
        *,
        id: str,
    ) -> R:
        """Replaces what `decide` took under this id by this cost, once. The attributes are those of that call."""
        return self._ask("settle", _request(attributes, cost, costs, id))

    def cancel(self, attributes: Attributes, id: str) -> R:
        """Gives back what `decide` took under this id."""
        return self._ask("cancel", _request(attributes, id=id))

    def renew(self, attributes: Attributes, id: str) -> R:
        """Extends the permits that are held under this id to a whole ttl from now. `hold` does it by itself."""
        return self._ask("renew", _request(attributes, id=id))

    def release(self, attributes: Attributes, id: str) -> R:
        """Gives back the permits that are held under this id. `hold` does it by itself."""
        return self._ask("release", _request(attributes, id=id))

    def _ask(self, op: str, request: dict[str, Any]) -> R:
        raise NotImplementedError

    def _encode(self, op: str, request: dict[str, Any]) -> bytes:
        body = json.dumps(request, allow_nan=False).encode()
        return (self._head % (op, len(body))).encode("latin-1") + body

    def _is_left_held(self, error: TollgateError) -> bool:
        """Whether a `hold` that fails with this may have been given a permit all the same, and ends."""
        return _may_have_taken(error) and (self._on_error == "closed" or not isinstance(error, Unavailable))

    def _unread_deadline(self) -> float:
        return max(self._deadline, _UNREAD_DEADLINE)

    def _unread_pauses(self) -> Generator[float, None, None]:
        """Seconds until each further attempt of a release that nobody waits for, begun at its first failure."""
        retries = self._retries
        if not retries.acquire(blocking=False):
            return
        try:
            until = time.monotonic() + _UNREAD_PATIENCE
            for pause in _UNREAD_PAUSES:
                if time.monotonic() > until:
                    return
                yield pause * random.uniform(1, 2)
        finally:
            retries.release()

    def _by_policy(self, op: str, request: dict[str, Any], failure: Unavailable) -> Decision:
        # A renewal that fails is no permission to go on: the permit may be another's by now.
        if self._on_error == "closed" or op == "renew":
            raise failure
        return Decision(True, 200, "policy", id=request.get("id"), error=failure.kind, cause=failure)


_Answer = tuple[int, Mapping[str, str], bytes, Mapping[str, Any]]
"""Its status, header fields, content, and the JSON object in that."""


def _request(
    attributes: Attributes,
    cost: Optional[int] = None,
    costs: Optional[Mapping[str, int]] = None,
    id: Optional[str] = None,
    id_ttl_ms: Optional[int] = None,
) -> dict[str, Any]:
    given = {"cost": cost, "costs": costs and dict(costs), "id": id, "id_ttl_ms": id_ttl_ms}
    return {"attributes": dict(attributes), **{name: value for name, value in given.items() if value is not None}}


def _requests_of_hold(
    attributes: Attributes, cost: Optional[int], costs: Optional[Mapping[str, int]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The request for permits under an id of its own, and the one that renews or releases them."""
    request = _request(attributes, cost, costs, uuid.uuid4().hex)
    return request, {"attributes": request["attributes"], "id": request["id"]}


def _may_repeat(op: str, request: dict[str, Any], failure: Unavailable) -> bool:
    """Whether sending it again can't charge twice, and may help. A slow service isn't asked more for being slow.

    The failure is of the connection to the service: an answer, whose kinds have the same names, is never asked for again.
    """
    return failure.kind in ("unreachable", "disconnected") and (op == "peek" or "id" in request)


def _too_slow(deadline: float) -> str:
    return f"no answer within {deadline * 1000:g} ms"


def _note_earlier(error: TollgateError, earlier: Unavailable) -> None:
    """Of a call that was sent twice: that the second attempt took nothing doesn't tell what the first one took."""
    if earlier.charged is not None:
        return
    if isinstance(error, RequestError):
        error._charged = None
    elif isinstance(error, Unavailable) and error.charged is False:
        error.charged = None


def _may_have_taken(error: TollgateError) -> bool:
    """Whether a call that failed with this may have taken units all the same."""
    if isinstance(error, RequestError):
        return error._charged is not False
    return not (isinstance(error, Unavailable) and error.charged is False)


def _expect_release(decision: Decision) -> None:
    """Raises where a failure policy answered a release: Redis was away, and nothing is known to be released."""
    if decision.by == "policy":
        why = f"the failure policy of rule {decision.rule} answered, not Redis"
        raise Unavailable(why, decision.error or "unavailable")


def _warn_of_release(error: TollgateError) -> None:
    """Of a release whose error no caller gets. An id that nothing is remembered for has no permits to give back."""
    if not isinstance(error, UnknownId):
        _log.warning("a permit wasn't released: %s", error)


def _is_readable(fd: int) -> bool:
    """Whether an unused connection has something to read: its end, or bytes that belong to no request."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))
    return bool(select.select([fd], [], [], 0)[0])


def _why_without_permits(decision: Decision) -> Optional[str]:
    """Why a decision that allows gave no permits, though `hold` asked for them; None if it may have, or needn't."""
    # A failure policy knows no limits.
    if decision.by == "policy":
        return None
    if decision.reason == "no-rule":
        # A shadow rule is being tried, and must not stop anything.
        return None if decision.raw.get("shadows") else "hold: no rule with permits applies to these attributes"
    algorithms = {limit.algorithm for limit in decision.limits}
    # Who is exempt, by a rule or a list that allows, has no limits, and needs no permit. A service that names no algorithm
    # refuses the release.
    if not algorithms or None in algorithms or "concurrency" in algorithms:
        return None
    return (
        f"hold: rule {decision.rule} has no concurrency limit: give it one, or let a rule that has one match these "
        "attributes first"
    )


def _warn_of_cancel(error: TollgateError) -> None:
    _log.warning("what hold took of a rule without permits wasn't given back: %s", error)


class Permit:
    """What `hold` holds."""

    def __init__(self, by_id: dict[str, Any], decision: Decision, asked: float) -> None:
        self.id: str = by_id["id"]
        self.decision = decision
        self.lost = False
        """Whether the permit has expired, or may have, so that others may hold it. Long work looks at it."""
        self._by_id = by_id
        # A rule that allows without limits has no permits.
        self._is_held = decision.by != "rules" and (decision.cause is None or decision.cause.charged is not False)
        # Other limits of the rule may begin anew earlier or later than the permit expires. A renewal answers for the
        # permits alone; until then the earliest time is right for the first renewal, and the latest for a loss.
        times = [limit.reset_after_us / 1e6 for limit in decision.limits if limit.reset_after_us]
        self._pause = min(times, default=0.0) / 3
        self._ttl = max(times, default=0.0)
        self._renewed = asked

    def _next(self, asked: float, answer: Union[Decision, TollgateError]) -> Optional[float]:
        """Seconds until the next renewal, after one that was answered so, or None if there is nothing to renew."""
        if isinstance(answer, Decision):
            self._renewed = asked
            self._ttl = min((limit.reset_after_us / 1e6 for limit in answer.limits), default=self._ttl)
            self._pause = self._ttl / 3
            return self._pause
        if isinstance(answer, RequestError):
            # Any other refusal says that the rule has no permits, which the release reports.
            self.lost = self.lost or isinstance(answer, UnknownId)
            return None
        if time.monotonic() - self._renewed >= self._ttl:
            self.lost = True
        return max(self._pause / 3, 0.01)


# For threads


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class _Reader(io.RawIOBase):
    """Reads a socket, each time for no longer than what is left of the deadline, and no more once the answer is whole."""

    is_whole = False

    def __init__(self, connection: socket.socket, deadline: _Deadline) -> None:
        self._connection = connection
        self._left = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self.is_whole:
            return 0
        self._connection.settimeout(self._left.left())
        return self._connection.recv_into(buffer)


class _Buffered(io.BufferedReader):
    """http.client takes it for a socket, and for the file of that socket, which it closes before what is left is known."""

    def makefile(self, _mode: str) -> io.BufferedReader:
        return self

    def close(self) -> None:
        pass


class Client(_Calls[Decision]):
    """For threads, which may share it. Connections are kept, one for each call at a time."""

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[socket.socket, float]] = []
        self._process = os.getpid()

    def close(self) -> None:
        """Closes the connections that are kept."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def hold(
        self, attributes: Attributes, cost: Optional[int] = None, costs: Optional[Mapping[str, int]] = None
    ) -> Iterator[Permit]:
        """Takes permits, renews them in a thread while the block runs, and gives them back. `Denied` if there are none.

        `RequestError` if the rule that applies has no permits, or no rule applies; the block doesn't run.
        """
        request, by_id = _requests_of_hold(attributes, cost, costs)
        asked = time.monotonic()
        try:
            decision = self._send("decide", request)
        except TollgateError as error:
            if self._is_left_held(error):
                threading.Thread(target=self._release_unread, args=(by_id,), daemon=True).start()
            if not isinstance(error, Unavailable):
                raise
            decision = self._by_policy("decide", request, error)
        if not decision.allowed:
            raise Denied(decision)
        why = _why_without_permits(decision)
        if why is not None:
            if decision.limits:
                self._cancel(by_id)
            raise RequestError(why, 409, "input")
        permit = Permit(by_id, decision, asked)
        ended = threading.Event()
        if permit._pause:
            threading.Thread(target=self._keep, args=(permit, ended), daemon=True).start()
        try:
            yield permit
        finally:
            ended.set()
            self._give_back(permit)

    def _cancel(self, by_id: dict[str, Any]) -> None:
        try:
            self._send("cancel", by_id)
        except TollgateError as error:
            _warn_of_cancel(error)

    def _give_back(self, permit: Permit) -> None:
        if permit._is_held:
            try:
                self._release(permit._by_id)
            except TollgateError as error:
                # The work is done.
                _warn_of_release(error)

    def _release(self, by_id: dict[str, Any]) -> None:
        for pause in _RELEASE_PAUSES:
            try:
                _expect_release(self._send("release", by_id))
                return
            except Unavailable:
                if pause is None:
                    raise
                time.sleep(pause)

    def _release_unread(self, by_id: dict[str, Any]) -> None:
        """For nobody who waits: again for some seconds while the service is away."""
        with closing(self._unread_pauses()) as pauses:
            while True:
                try:
                    _expect_release(self._send("release", by_id, self._unread_deadline()))
                    return
                except TollgateError as error:
                    pause = next(pauses, None) if isinstance(error, Unavailable) else None
                    if pause is None:
                        _warn_of_release(error)
                        return
                time.sleep(pause)

    def _keep(self, permit: Permit, ended: threading.Event) -> None:
        pause: Optional[float] = permit._pause
        while pause is not None and not ended.wait(pause):
            asked = time.monotonic()
            answer: Union[Decision, TollgateError]
            try:
                answer = self._send("renew", permit._by_id)
            except TollgateError as error:
                answer = error
            # What was released meanwhile isn't lost.
            if not ended.is_set():
                pause = permit._next(asked, answer)

    def _ask(self, op: str, request: dict[str, Any]) -> Decision:
        try:
            return self._send(op, request)
        except Unavailable as failure:
            return self._by_policy(op, request, failure)

    def _send(self, op: str, request: dict[str, Any], seconds: Optional[float] = None) -> Decision:
        data, deadline = self._encode(op, request), _Deadline(seconds or self._deadline)
        try:
            answer = self._exchange(data, deadline)
        except Unavailable as earlier:
            if not _may_repeat(op, request, earlier):
                raise
            try:
                return _answer(*self._exchange(data, deadline))
            except TollgateError as error:
                _note_earlier(error, earlier)
                raise
        return _answer(*answer)

    def _exchange(self, data: bytes, deadline: _Deadline) -> _Answer:
        while True:
            connection = self._kept()
            is_kept = connection is not None
            if connection is None:
                connection = self._connect(deadline)
            is_sent = False
            try:
                connection.settimeout(deadline.left())
                connection.sendall(data)
                is_sent = True
                reader = _Reader(connection, deadline)
                buffered = _Buffered(reader)
                response = http.client.HTTPResponse(buffered, method="POST")  # type: ignore[arg-type]
                response.begin()
                while response.status < 200:
                    # It has skipped 100 alone, and begins again only without these.
                    response.headers = None  # type: ignore[assignment]
                    response.begin()
                content = response.read()
                reader.is_whole = True
                is_followed = bool(buffered.peek())
            except TimeoutError as error:
                connection.close()
                raise Unavailable(_too_slow(deadline.seconds), "deadline", None if is_sent else False) from error
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                # The service never had the whole request: it had closed this connection, which wasn't used for a while.
                if is_kept and not is_sent:
                    continue
                kind = "disconnected" if isinstance(error, (OSError, http.client.IncompleteRead)) else "garbled"
                raise Unavailable(f"the connection broke: {error!r}", kind, None if is_sent else False) from error
            except BaseException:
                connection.close()
                raise
            body = _body(content)
            if response.will_close or is_followed or not _is_of_service(body):
                connection.close()
            else:
                self._keep_connection(connection)
            return response.status, dict(response.getheaders()), content, body

    def _connect(self, deadline: _Deadline) -> socket.socket:
        try:
            if self._socket is not None:
                connection = socket.socket(socket.AF_UNIX)
                try:
                    connection.settimeout(deadline.left())
                    connection.connect(self._socket)
                except BaseException:
                    connection.close()
                    raise
                return connection
            connection = socket.create_connection((self._host, self._port), deadline.left())
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._ssl is not None:
                    connection.settimeout(deadline.left())
                    connection = self._ssl.wrap_socket(connection, server_hostname=self._host)
            except BaseException:
                connection.close()
                raise
            return connection
        except TimeoutError as error:
            raise Unavailable(_too_slow(deadline.seconds), "deadline", False) from error
        except OSError as error:
            raise Unavailable(f"the service can't be reached: {error}", "unreachable", False) from error

    def _kept(self) -> Optional[socket.socket]:
        """A connection that was kept and is still open, the one used last."""
        if self._process != os.getpid():
            # After a fork, these connections are the parent's: two processes would read each other's answers.
            inherited, self._lock, self._idle, self._process = self._idle, threading.Lock(), [], os.getpid()
            for connection, _ in inherited:
                connection.close()
            # So are the threads that retry.
            self._retries = threading.BoundedSemaphore(_UNREAD_RETRIED)
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection, since = self._idle.pop()
            if time.monotonic() - since < _IDLE_SECONDS and not _is_readable(connection.fileno()):
                return connection
            connection.close()

    def _keep_connection(self, connection: socket.socket) -> None:
        with self._lock:
            if len(self._idle) < _IDLE_CONNECTIONS:
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()


# For asyncio

_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class AsyncClient(_Calls[Awaitable[Decision]]):
    """For the tasks of one event loop. Connections are kept, one for each call at a time."""

    def _begin(self) -> None:
        self._idle: list[tuple[_Stream, float]] = []
        self._background: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()

    async def close(self) -> None:
        """Waits for releases that are under way, and closes the connections that are kept.

        A release that nobody waits for, and that waits for the service to be back, is tried once more, at once. If this
        is cancelled, the releases go on, and the connections stay open.
        """
        self._closing.set()
        try:
            await asyncio.shield(asyncio.gather(*self._background, return_exceptions=True))
        finally:
            self._closing.clear()
        idle, self._idle = self._idle, []
        for (_, writer), _since in idle:
            writer.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @asynccontextmanager
    async def hold(
        self, attributes: Attributes, cost: Optional[int] = None, costs: Optional[Mapping[str, int]] = None
    ) -> AsyncIterator[Permit]:
        """Takes permits, renews them in a task while the block runs, and gives them back. `Denied` if there are none.

        `RequestError` if the rule that applies has no permits, or no rule applies; the block doesn't run.
        """
        request, by_id = _requests_of_hold(attributes, cost, costs)
        asked = time.monotonic()
        asking = asyncio.create_task(self._send("decide", request))
        try:
            # Not `shield`: from Python 3.14 it reports an error that comes after a cancellation, which is no news here.
            await asyncio.wait({asking})
            decision = asking.result()
        except asyncio.CancelledError:
            self._in_background(self._release_after(asking, by_id))
            raise
        except TollgateError as error:
            if self._is_left_held(error):
                self._in_background(self._release_unread(by_id))
            if not isinstance(error, Unavailable):
                raise
            decision = self._by_policy("decide", request, error)
        if not decision.allowed:
            raise Denied(decision)
        why = _why_without_permits(decision)
        if why is not None:
            if decision.limits:
                # In the background, so that a task that is cancelled meanwhile gives it back all the same.
                await asyncio.wait({self._in_background(self._cancel(by_id))})
            raise RequestError(why, 409, "input")
        permit = Permit(by_id, decision, asked)
        keeper = asyncio.create_task(self._keep(permit)) if permit._pause else None
        try:
            yield permit
        finally:
            if keeper is not None:
                keeper.cancel()
            await self._give_back(permit)

    def _in_background(self, release: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(release)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _cancel(self, by_id: dict[str, Any]) -> None:
        try:
            await self._send("cancel", by_id)
        except TollgateError as error:
            _warn_of_cancel(error)

    async def _give_back(self, permit: Permit) -> None:
        if permit._is_held:
            release = self._in_background(self._release(permit._by_id))
            try:
                # A task that is cancelled meanwhile releases all the same.
                await asyncio.wait({release})
            except asyncio.CancelledError:
                self._in_background(self._go_on_with(release, permit._by_id))
                raise
            try:
                release.result()
            except TollgateError as error:
                # The work is done.
                _warn_of_release(error)

    async def _release_after(self, asking: asyncio.Task[Decision], by_id: dict[str, Any]) -> None:
        # If the service took the release first, nothing would be released, and the permit given after that would be kept.
        (outcome,) = await asyncio.gather(asking, return_exceptions=True)
        if not isinstance(outcome, TollgateError) or _may_have_taken(outcome):
            await self._release_unread(by_id)

    async def _go_on_with(self, release: asyncio.Task[None], by_id: dict[str, Any]) -> None:
        """Waits for a release in the place of a caller who has gone."""
        try:
            await release
        except Unavailable:
            await self._release_unread(by_id)
        except TollgateError as error:
            _warn_of_release(error)

    async def _release(self, by_id: dict[str, Any]) -> None:
        for pause in _RELEASE_PAUSES:
            try:
                _expect_release(await self._send("release", by_id))
                return
            except Unavailable:
                if pause is None:
                    raise
                await asyncio.sleep(pause)

    async def _release_unread(self, by_id: dict[str, Any]) -> None:
        """For nobody who waits: again for some seconds while the service is away."""
        with closing(self._unread_pauses()) as pauses:
            while True:
                is_last = self._closing.is_set()
                try:
                    _expect_release(await self._send("release", by_id, self._unread_deadline()))
                    return
                except TollgateError as error:
                    pause = next(pauses, None) if isinstance(error, Unavailable) and not is_last else None
                    if pause is None:
                        _warn_of_release(error)
                        return
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), pause)

    async def _keep(self, permit: Permit) -> None:
        pause: Optional[float] = permit._pause
        while pause is not None:
            await asyncio.sleep(pause)
            asked = time.monotonic()
            answer: Union[Decision, TollgateError]
            try:
                answer = await self._send("renew", permit._by_id)
            except TollgateError as error:
                answer = error
            pause = permit._next(asked, answer)

    async def _ask(self, op: str, request: dict[str, Any]) -> Decision:
        try:
            return await self._send(op, request)
        except Unavailable as failure:
            return self._by_policy(op, request, failure)

    async def _send(self, op: str, request: dict[str, Any], seconds: Optional[float] = None) -> Decision:
        deadline = seconds or self._deadline
        state = {"sent": False}
        attempts = asyncio.create_task(self._attempts(op, request, self._encode(op, request), state))
        # If nobody waits for it any more, its failure is no news.
        attempts.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            # Not `wait_for`: before Python 3.12 it drops a cancellation that comes together with the answer.
            await asyncio.wait({attempts}, timeout=deadline)
            if attempts.done():
                return attempts.result()
        finally:
            attempts.cancel()
        raise Unavailable(_too_slow(deadline), "deadline", None if state["sent"] else False)

    async def _attempts(self, op: str, request: dict[str, Any], data: bytes, state: dict[str, bool]) -> Decision:
        try:
            answer = await self._exchange(data, state)
        except Unavailable as earlier:
            if not _may_repeat(op, request, earlier):
                raise
            try:
                return _answer(*await self._exchange(data, state))
            except TollgateError as error:
                _note_earlier(error, earlier)
                raise
        return _answer(*answer)

    async def _exchange(self, data: bytes, state: dict[str, bool]) -> _Answer:
        while True:
            stream = self._kept()
            is_kept = stream is not None
            if stream is None:
                stream = await self._connect()
            reader, writer = stream
            writer.write(data)
            if is_kept and writer.transport.is_closing():
                # The service never had the whole request: it had closed this connection, which wasn't used for a while.
                writer.close()
                continue
            state["sent"] = True
            is_open = False
            try:
                status, headers, content, is_open = await _read(reader)
                body = _body(content)
                is_open = is_open and _is_of_service(body)
            except (OSError, EOFError) as error:
                raise Unavailable(f"the connection broke: {error!r}", "disconnected") from error
            except (ValueError, asyncio.LimitOverrunError, http.client.HTTPException) as error:
                raise Unavailable(f"the answer can't be read: {error!r}", "garbled") from error
            finally:
                # Also after a cancellation: the answer to come must not be read as that to another call.
                if not is_open:
                    writer.close()
            if is_open and len(self._idle) < _IDLE_CONNECTIONS:
                self._idle.append((stream, time.monotonic()))
            else:
                writer.close()
            return status, headers, content, body

    async def _connect(self) -> _Stream:
        try:
            if self._socket is not None:
                return await asyncio.open_unix_connection(self._socket)
            return await asyncio.open_connection(self._host, self._port, ssl=self._ssl)
        except OSError as error:
            raise Unavailable(f"the service can't be reached: {error}", "unreachable", False) from error

    def _kept(self) -> Optional[_Stream]:
        """A connection that was kept and is still open, the one used last."""
        while self._idle:
            stream, since = self._idle.pop()
            reader, writer = stream
            is_open = not writer.transport.is_closing() and _is_drained(reader)
            if is_open and time.monotonic() - since < _IDLE_SECONDS:
                # The end of the connection may not have reached the event loop yet.
                if not _is_readable(writer.get_extra_info("socket").fileno()):
                    return stream
            writer.close()
        return None


def _is_drained(reader: asyncio.StreamReader) -> bool:
    """Whether the event loop has read nothing, not even the end, after the last answer."""
    reading = reader.read(1)
    try:
        reading.send(None)
    except (StopIteration, OSError):
        return False
    # It would wait.
    reading.close()
    return True


async def _read(reader: asyncio.StreamReader) -> tuple[int, Mapping[str, str], bytes, bool]:
    """An answer: its status, header fields and body, and whether the connection can be used again."""
    status = 100
    while status < 200:
        line, _, fields = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
        version, code = line.split(None, 2)[:2]
        status = int(code)
        headers = http.client.parse_headers(io.BytesIO(fields))
    is_open = version == b"HTTP/1.1" and "close" not in headers.get("connection", "").lower()
    if "chunked" in headers.get("transfer-encoding", "").lower():
        content = b""
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            content += (await reader.readexactly(size + 2))[:-2]
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass
    elif (length := headers.get("content-length")) is not None:
        content = await reader.readexactly(int(length))
    else:
        content, is_open = await reader.read(), False
    return status, dict(headers.items()), content, is_open


# ASGI

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
More = Callable[[Scope], Any]


class RateLimitMiddleware:
    """Decides on each request of an ASGI application before the application sees it.

    The attributes are `ip`, `method` and `path`, and what `attributes` makes of the scope (it may be async), such as a
    `user`; None there removes one. A denial is answered with the decision's status. Without a decision, a client that is
    `closed` answers 503, and a path that can be read in two ways gets 400. What else the service refuses to decide is
    answered 500: the visitor can't mend it. That, and what an `open` client lets pass without a decision, is a warning of
    the logger, at most once a second.
    """

    def __init__(self, app: AsgiApp, client: AsyncClient, attributes: Optional[More] = None) -> None:
        self._app = app
        self._client = client
        self._attributes = attributes
        self._warned = float("-inf")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        attributes = _attributes_of(scope)
        path = attributes["path"]
        if self._attributes is not None:
            more = self._attributes(scope)
            attributes.update(await more if inspect.isawaitable(more) else more)
        try:
            decision = await self._client.decide({name: at for name, at in attributes.items() if at is not None})
        except Unavailable:
            _log.exception("no decision, so the request is refused")
            await _refuse(scope, send, 503, "rate limits can't be checked now", {})
            return
        except RequestError as error:
            if error.reason == "ambiguous-path" and attributes["path"] == path:
                await _refuse(scope, send, 400, "the path can be read in two ways", {})
            else:
                await self._refuse_unfit(scope, send, _with_advice(error))
            return
        # A rule's own status is meant for the visitor.
        if decision.reason == "missing" and decision.status == 400:
            missing = decision.raw.get("missing")
            await self._refuse_unfit(
                scope,
                send,
                f"rule {decision.rule} needs the attribute {missing}, which this request lacks: add it by the middleware's "
                "attributes, or let the rule match only requests that have it",
            )
            return
        if decision.cause is not None:
            self._warn("requests pass without a decision: %s", decision.cause)
        if not decision.allowed:
            await _refuse(scope, send, decision.status, decision.message, decision.headers)
            return
        fields = _fields(decision.headers)

        async def with_fields(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.accept"):
                message = {**message, "headers": [*message.get("headers", ()), *fields]}
            await send(message)

        await self._app(scope, receive, with_fields)

    async def _refuse_unfit(self, scope: Scope, send: Send, why: str) -> None:
        self._warn("a request is answered 500, since its rate limit can't be decided: %s", why)
        await _refuse(scope, send, 500, None, {})

    def _warn(self, message: str, about: object) -> None:
        """At most once a second, so that a failure that every request meets doesn't fill the log."""
        now = time.monotonic()
        if now - self._warned >= 1:
            self._warned = now
            _log.warning(message, about)


def _with_advice(error: RequestError) -> str:
    if str(error).startswith("id: it is missing"):
        return f"{error}; let a rule with permits match an attribute that only hold sends"
    return str(error)


def _attributes_of(scope: Scope) -> dict[str, Any]:
    # The path as it was sent: the service decodes it itself, and must not decode it twice.
    sent = scope.get("raw_path")
    path = sent.decode("latin-1") if sent else quote(scope["path"])
    attributes = {"method": scope.get("method", "GET"), "path": path}
    try:
        attributes["ip"] = str(ipaddress.ip_address(scope["client"][0].partition("%")[0]))
    except (KeyError, TypeError, ValueError):
        # A Unix socket, or a test's client, has none.
        pass
    return attributes


def _fields(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


async def _refuse(scope: Scope, send: Send, status: int, detail: Optional[str], headers: Mapping[str, str]) -> None:
    event = "http"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 1008})
            return
        event = "websocket.http"
    known = status in http.HTTPStatus._value2member_map_
    problem = {"type": "about:blank", "title": http.HTTPStatus(status).phrase if known else "Denied", "status": status}
    if detail is not None:
        problem["detail"] = detail
    body = json.dumps(problem).encode()
    own = {"content-type": "application/problem+json", "content-length": str(len(body)), "cache-control": "no-store"}
    await send({"type": f"{event}.response.start", "status": status, "headers": _fields({**own, **headers})})
    await send({"type": f"{event}.response.body", "body": body})
