"""Both clients against the real service. Each test has a user of its own."""

import asyncio
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import unittest
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import tollgate_client
from service import CLIENTS, PATIENT, Listener, Redis, Service, answer_of, end, failure, line_of, message_from, op_of
from tollgate_client import AsyncClient, Client, Denied, RequestError, Unavailable, UnknownId

SOURCE = Path(__file__).resolve().parents[1] / "src"


def setUpModule():
    global redis, service
    logging.getLogger("tollgate_client").addHandler(logging.NullHandler())
    redis = Redis()
    unittest.addModuleCleanup(redis.end)
    service = Service(redis)
    unittest.addModuleCleanup(service.end)


class InLoop:
    """An AsyncClient in an event loop of its own thread, called as a Client is."""

    def __init__(self, *arguments, **named):
        self.client = AsyncClient(*arguments, **named)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, coroutine):
        call = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        # A release is tried three times.
        done, _ = wait([call], 4 * PATIENT)
        assert done, f"expected an end of {coroutine} within {4 * PATIENT} s"
        return call.result()

    def __getattr__(self, name):
        return lambda *arguments, **named: self.run(getattr(self.client, name)(*arguments, **named))

    @contextmanager
    def hold(self, *arguments, **named):
        held = self.client.hold(*arguments, **named)
        permit = self.run(held.__aenter__())
        try:
            yield permit
        except BaseException as error:
            self.run(held.__aexit__(type(error), error, error.__traceback__))
            raise
        self.run(held.__aexit__(None, None, None))

    def close(self):
        self.run(self.client.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(PATIENT)
        assert not self.thread.is_alive(), f"the event loop didn't stop within {PATIENT} s"
        self.loop.close()


class Calls:
    def open(self, url=None, deadline=PATIENT, **named):
        client = self.kind(url or service.url, deadline=deadline, **named)
        self.addCleanup(client.close)
        return client

    def listen(self, serve):
        listener = Listener(serve)
        self.addCleanup(listener.end)
        return listener

    def attributes(self, path, **more):
        return {"path": path, "user": self.id(), **more}

    def assert_denied_soon(self, client, attributes):
        with self.assertRaises(Denied):
            with client.hold(attributes):
                pass

    @contextmanager
    def assert_a_warning(self, text):
        """That the client's logger says so, in time and once, and neither asyncio nor the end of a thread says anything."""
        ended = []
        self.addCleanup(setattr, threading, "excepthook", threading.excepthook)
        threading.excepthook = ended.append
        with self.assertNoLogs("asyncio"), self.assertLogs("tollgate_client") as logs:
            yield
            until = time.monotonic() + PATIENT
            while not (logs.records or ended):
                self.assertLess(time.monotonic(), until, f"expected a warning within {PATIENT} s: {text}")
                time.sleep(0.01)
            # asyncio reports an error that wasn't read once its task is collected.
            gc.collect()
        self.assertEqual(ended, [])
        self.assertEqual([(record.levelname, record.getMessage()) for record in logs.records], [("WARNING", text)])
        self.assertNotIn("secret", "".join(logs.output))

    def test_the_shared_vectors(self):
        own = Redis()
        self.addCleanup(own.end)
        fresh = Service(own)
        self.addCleanup(fresh.end)
        client = self.open(fresh.url)
        vectors = json.loads((CLIENTS / "vectors.json").read_text())
        for vector in vectors:
            with self.subTest(vector["about"]):
                try:
                    answer = getattr(client, vector["op"])(**vector["request"])
                    status, raw = answer.status, answer.raw
                except RequestError as error:
                    self.assertEqual(isinstance(error, UnknownId), error.status == 404)
                    status, raw = error.status, {"error": str(error), "kind": error.kind, "charged": False}
                self.assertEqual(status, vector["status"], raw)
                self.assert_has(raw, vector["answer"])

    def assert_has(self, found, expected):
        if isinstance(expected, dict):
            for name, value in expected.items():
                self.assertIn(name, found)
                self.assert_has(found[name], value)
        elif isinstance(expected, list):
            self.assertEqual(len(found), len(expected))
            for one, other in zip(found, expected):
                self.assert_has(one, other)
        else:
            self.assertEqual(found, expected)

    def test_fifty_callers_at_once_are_allowed_exactly_the_limit(self):
        client, attributes = self.open(), self.attributes("/requests")
        with ThreadPoolExecutor(50) as pool:
            decisions = list(pool.map(lambda _: client.decide(attributes), range(100)))
        self.assertEqual(sum(decision.allowed for decision in decisions), 10)
        self.assertEqual(client.decide(attributes, cost=0).remaining, 0)

    def test_a_decision_is_typed(self):
        client, attributes = self.open(), self.attributes("/logins", method="POST")
        client.decide(attributes)
        client.decide(attributes)
        denied = client.decide(attributes)
        self.assertFalse(denied.allowed)
        self.assertEqual((denied.status, denied.message, denied.limit), (429, "too many attempts", 2))
        self.assertGreater(denied.retry_after_us, 29 * 86_400_000_000)
        self.assertEqual(denied.limits[0].name, "sliding-log 2/30d")
        self.assertIn(denied.limits[0].algorithm, (None, "sliding-log"))
        self.assertEqual(set(denied.headers), {"retry-after", "ratelimit", "ratelimit-policy"})

    def test_settle_cancel_and_refund_give_back_what_they_say(self):
        client, attributes = self.open(), self.attributes("/requests")
        self.assertEqual(client.decide(attributes, 8, id=self.id()).remaining, 2)
        self.assertEqual(client.settle(attributes, 3, id=self.id()).remaining, 7)
        self.assertEqual(client.decide(attributes, 5, id=self.id() + "2").remaining, 2)
        self.assertEqual(client.cancel(attributes, self.id() + "2").remaining, 7)
        self.assertEqual(client.refund(attributes, 1).remaining, 8)
        with self.assertRaises(UnknownId):
            client.cancel(attributes, self.id() + "2")

    def test_one_of_many_holds_an_exclusive_permit(self):
        client, attributes = self.open(), self.attributes("/exclusive")
        inside, most, held = 0, 0, 0
        lock = threading.Lock()

        def work(_):
            nonlocal inside, most, held
            try:
                with client.hold(attributes):
                    with lock:
                        inside, held = inside + 1, held + 1
                        most = max(most, inside)
                    time.sleep(0.01)
                    with lock:
                        inside -= 1
            except Denied as denied:
                self.assertEqual(denied.decision.status, 429)

        with ThreadPoolExecutor(20) as pool:
            list(pool.map(work, range(100)))
        self.assertEqual(most, 1)
        self.assertGreater(held, 0)
        with client.hold(attributes):
            pass

    def test_a_permit_is_released_on_an_exception(self):
        client, attributes = self.open(), self.attributes("/jobs")
        with self.assertRaisesRegex(KeyError, "work"):
            with client.hold(attributes, cost=2):
                self.assert_denied_soon(client, attributes)
                raise KeyError("work")
        with client.hold(attributes, cost=2) as permit:
            self.assertFalse(permit.lost)

    def test_a_permit_is_renewed_and_a_killed_holders_comes_back(self):
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.renewed_and_killed, [self.attributes("/exclusive"), self.attributes("/mixed")]))

    def renewed_and_killed(self, attributes):
        client = self.open()
        code = (
            "import sys, time\nfrom tollgate_client import Client\n"
            f"with Client({service.url!r}, deadline={PATIENT}).hold({attributes!r}):\n"
            "    print('held', flush=True)\n    time.sleep(600)\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
        holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, text=True)
        try:
            self.assertEqual(line_of(holder, "the line of a holder"), "held\n")
            time.sleep(2.5)  # the ttl is 2 s
            self.assert_denied_soon(client, attributes)
        finally:
            end(holder)
        until = time.monotonic() + PATIENT
        while True:
            try:
                with client.hold(attributes):
                    break
            except Denied:
                self.assertLess(time.monotonic(), until, "the permit didn't come back")
                time.sleep(0.05)

    def test_a_lost_permit_is_reported(self):
        client, attributes = self.open(), self.attributes("/exclusive")
        with client.hold(attributes) as permit:
            client.release(attributes, permit.id)
            until = time.monotonic() + PATIENT
            while not permit.lost:
                self.assertLess(time.monotonic(), until, "the loss wasn't reported")
                time.sleep(0.02)

    def test_hold_of_a_rule_without_permits(self):
        client = self.open()
        with client.hold(self.attributes("/free")) as permit:
            self.assertEqual(permit.decision.by, "rules", "who is exempt needs none")
        attributes = self.attributes("/requests")
        with self.assertRaisesRegex(RequestError, "^hold: rule requests has no concurrency limit: ") as raised:
            with client.hold(attributes):
                self.fail("nothing is held")
        self.assertEqual((raised.exception.status, raised.exception.kind), (409, "input"))
        self.assertEqual(client.decide(attributes, cost=0).remaining, 10, "what was taken is given back")

    def test_hold_where_no_rule_applies(self):
        client = self.open()
        with self.assertNoLogs("tollgate_client"):
            with self.assertRaisesRegex(RequestError, "^hold: no rule with permits applies to these attributes$"):
                with client.hold(self.attributes("/nowhere")):
                    self.fail("nothing is held")
            with client.hold(self.attributes("/tried")) as permit:
                self.assertEqual(permit.decision.reason, "no-rule", "a rule on trial stops nothing")

    def test_hold_goes_on_where_permits_may_be_held(self):
        def of_an_older_service(body):
            del body["limits"][0]["algorithm"]

        def of_a_failure_policy(body):
            body["by"] = "policy"

        def of_a_failure_policy_without_limits(body):
            body.update(by="policy", reason="no-rule", limits=[])

        for change in (of_an_older_service, of_a_failure_policy, of_a_failure_policy_without_limits):

            def changed(connection, _, change=change):
                while request := message_from(connection):
                    ops.append(op_of(request))
                    answer = answer_of(service, request)
                    if ops[-1] == "decide":
                        body = json.loads(answer.partition(b"\r\n\r\n")[2])
                        change(body)
                        answer = failure(200, **body)
                    connection.sendall(answer)

            with self.subTest(change.__name__):
                ops = []
                with self.assertLogs("tollgate_client") as logs:
                    with self.open(self.listen(changed).url).hold(self.attributes("/requests")):
                        pass
                self.assertIn("a permit wasn't released: release: expected a concurrency limit", logs.output[0])
                self.assertEqual((ops, len(logs.output)), (["decide", "release"], 1))

    def test_what_hold_cannot_give_back_is_a_warning(self):
        def guarded(connection, _):
            while request := message_from(connection):
                is_cancel = op_of(request) == "cancel"
                connection.sendall(failure(401, error="expected a token") if is_cancel else answer_of(service, request))

        client = self.open(self.listen(guarded).url, token="secret")
        with self.assert_a_warning("what hold took of a rule without permits wasn't given back: expected a token"):
            with self.assertRaisesRegex(RequestError, "^hold: rule requests"), client.hold(self.attributes("/requests")):
                self.fail("nothing is held")

    def test_while_the_service_is_away_closed_raises_and_open_allows(self):
        gone = Service(redis)
        gone.end()
        with self.assertRaises(Unavailable) as raised:
            self.open(gone.url).decide(self.attributes("/requests"))
        self.assertEqual((raised.exception.kind, raised.exception.charged), ("unreachable", False))
        with self.assertRaises(Unavailable):
            with self.open(gone.url).hold(self.attributes("/jobs")):
                self.fail("nothing is held")
        client = self.open(gone.url, on_error="open")
        decision = client.decide(self.attributes("/requests"))
        self.assertEqual((decision.allowed, decision.by, decision.error), (True, "policy", "unreachable"))
        self.assertIsInstance(decision.cause, Unavailable)
        self.assertTrue(client.settle(self.attributes("/requests"), 1, id="x").allowed)
        with client.hold(self.attributes("/jobs")) as permit:
            self.assertEqual(permit.decision.by, "policy")
        with self.assertRaises(Unavailable):
            client.renew(self.attributes("/jobs"), "x")

    def test_while_redis_is_away_the_service_fails_and_the_client_decides(self):
        own = Redis()
        up = Service(own)
        self.addCleanup(up.end)
        own.end()
        with self.assertRaises(Unavailable) as raised:
            self.open(up.url).decide(self.attributes("/requests"))
        self.assertTrue(str(raised.exception))
        self.assertEqual(self.open(up.url, on_error="open").decide(self.attributes("/requests")).by, "policy")

    def test_a_service_that_swallows_bytes_is_given_up_at_the_deadline(self):
        listener = self.listen(lambda connection, number: time.sleep(60))
        for on_error in ("closed", "open"):
            began = time.monotonic()
            client = self.open(listener.url, deadline=0.3, on_error=on_error)
            try:
                self.assertEqual(client.decide(self.attributes("/requests"), id="x").error, "deadline")
                self.assertEqual(on_error, "open")
            except Unavailable as failure:
                self.assertEqual((failure.kind, failure.charged, on_error), ("deadline", None, "closed"))
            taken = time.monotonic() - began
            self.assertGreaterEqual(taken, 0.29)
            self.assertLess(taken, 5)
        self.assertEqual(listener.accepted, 2, "a slow call isn't repeated")

    def test_an_answer_in_drops_is_given_up_at_the_deadline(self):
        def drip(connection, _):
            message_from(connection)
            for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b" " * 1000:
                connection.sendall(bytes([byte]))
                time.sleep(0.05)

        began = time.monotonic()
        with self.assertRaises(Unavailable):
            self.open(self.listen(drip).url, deadline=0.5).decide(self.attributes("/requests"))
        self.assertLess(time.monotonic() - began, 10)

    def test_a_late_answer_is_never_that_of_another_call(self):
        def late(connection, number):
            while request := message_from(connection):
                answer = answer_of(service, request)
                time.sleep(1.5 if number == 1 else 0)
                connection.sendall(answer)

        client = self.open(self.listen(late).url, deadline=1)
        with self.assertRaises(Unavailable):
            client.decide(self.attributes("/requests"))
        for user in range(20):
            attributes = {"path": "/requests", "user": f"{self.id()} {user}"}
            try:
                self.assertEqual(client.decide(attributes).key, f"user:{self.id()} {user}")
            except Unavailable as failure:
                self.assertEqual(failure.kind, "deadline")  # this machine was busy
            time.sleep(0.05)

    def test_a_broken_connection_repeats_only_what_is_charged_once(self):
        def broken(connection, number):
            message_from(connection)
            connection.close()

        listener = self.listen(broken)
        client = self.open(listener.url)
        with self.assertRaises(Unavailable) as raised:
            client.decide(self.attributes("/requests"))
        self.assertEqual((raised.exception.kind, raised.exception.charged), ("disconnected", None))
        self.assertEqual(listener.accepted, 1)
        with self.assertRaises(Unavailable):
            client.decide(self.attributes("/requests"), id="x")
        self.assertEqual(listener.accepted, 3)
        with self.assertRaises(Unavailable):
            client.peek(self.attributes("/requests"))
        self.assertEqual(listener.accepted, 5)

    def test_an_answer_is_not_asked_for_again(self):
        kind, requests = "", 0

        def failing(connection, _):
            nonlocal requests
            while message_from(connection):
                requests += 1
                connection.sendall(failure(503, error="no connection to redis", kind=kind, charged=False))

        client, attributes = self.open(self.listen(failing).url), self.attributes("/requests")
        # The service's own connection failed, to Redis: its kinds have the names of the client's.
        for kind in ("unreachable", "disconnected"):
            for op in ("decide", "peek", "refund", "settle", "cancel", "renew", "release"):
                with self.subTest(kind=kind, op=op):
                    before = requests
                    with self.assertRaises(Unavailable) as raised:
                        getattr(client, op)(attributes, id="x")
                    self.assertEqual((raised.exception.kind, raised.exception.charged), (kind, False))
                    self.assertEqual(requests - before, 1)

    def test_a_repeated_call_is_charged_once(self):
        def broken_first(connection, number):
            while request := message_from(connection):
                answer = answer_of(service, request)
                if number == 1:
                    connection.close()
                    return
                connection.sendall(answer)

        client = self.open(self.listen(broken_first).url)
        self.assertEqual(client.decide(self.attributes("/requests"), id=self.id()).remaining, 9)

    def test_what_a_broken_attempt_took_stays_unknown_if_the_second_is_refused(self):
        def broken(connection, _):
            message_from(connection)
            listener.end()

        listener = Listener(broken)
        with self.assertRaises(Unavailable) as raised:
            self.open(listener.url).decide(self.attributes("/requests"), id="x")
        self.assertEqual((raised.exception.kind, raised.exception.charged), ("unreachable", None))

        released = []

        def answering(connection, _):
            while request := message_from(connection):
                released.append(op_of(request))
                connection.sendall(answer_of(service, request))

        listener = Listener(broken)
        with self.open(listener.url, on_error="open").hold(self.attributes("/jobs")) as permit:
            self.assertIsNone(permit.decision.cause.charged)
            # The service is there again.
            again = Listener(answering, listener.port)
            self.addCleanup(again.end)
        self.assertEqual(released, ["release"])

    def test_what_a_broken_attempt_took_stays_unknown_if_the_second_fails(self):
        is_released = threading.Event()

        def failing(connection, number):
            while request := message_from(connection):
                if number == 1:
                    # The service gave a permit, and its answer is lost.
                    answer_of(service, request)
                    connection.close()
                    return
                if op_of(request) == "decide":
                    connection.sendall(failure(503, error="overloaded", kind="overloaded", charged=False))
                else:
                    connection.sendall(answer_of(service, request))
                    is_released.set()

        attributes = self.attributes("/jobs")
        with self.assertRaises(Unavailable) as raised:
            with self.open(self.listen(failing).url).hold(attributes, cost=2):
                self.fail("nothing is held")
        self.assertEqual((raised.exception.kind, raised.exception.charged), ("overloaded", None))
        self.assertTrue(is_released.wait(PATIENT), "the permits weren't released")
        self.assertTrue(self.open().peek(attributes, cost=2).allowed)

    def test_an_error_of_a_release_that_nobody_waits_for_is_a_warning(self):
        def guarded(connection, _):
            while request := message_from(connection):
                if op_of(request) == "decide":
                    connection.sendall(failure(503, error="overloaded"))
                else:
                    connection.sendall(failure(401, error="expected a token"))

        client = self.open(self.listen(guarded).url, token="secret")
        with self.assert_a_warning("a permit wasn't released: expected a token"):
            with self.assertRaises(Unavailable), client.hold(self.attributes("/jobs")):
                self.fail("nothing is held")

    def test_what_a_broken_attempt_took_is_released_if_the_second_is_refused(self):
        for on_error in ("closed", "open"):
            is_released = threading.Event()

            def refusing(connection, number, is_released=is_released):
                while request := message_from(connection):
                    if number == 1:
                        # The service gave a permit, and its answer is lost.
                        answer_of(service, request)
                        connection.close()
                        return
                    if op_of(request) == "decide":
                        connection.sendall(failure(401, error="expected a token"))
                    else:
                        connection.sendall(answer_of(service, request))
                        is_released.set()

            attributes = self.attributes("/jobs", on_error=on_error)
            with self.subTest(on_error):
                client = self.open(self.listen(refusing).url, on_error=on_error)
                with self.assertRaisesRegex(RequestError, "^expected a token$"), client.hold(attributes, cost=2):
                    self.fail("nothing is held")
                self.assertTrue(is_released.wait(PATIENT), "the permits weren't released")
                self.assertTrue(self.open().peek(attributes, cost=2).allowed)

    def test_what_the_service_refuses_at_once_is_not_released(self):
        ops = []

        def refusing(connection, _):
            while request := message_from(connection):
                ops.append(op_of(request))
                connection.sendall(failure(401, error="expected a token"))

        client = self.open(self.listen(refusing).url)
        with self.assertRaises(RequestError), client.hold(self.attributes("/jobs")):
            self.fail("nothing is held")
        time.sleep(0.2)
        self.assertEqual(ops, ["decide"])

    def test_a_release_that_nobody_waits_for_outlasts_an_outage(self):
        taken, releases, is_released = [], 0, threading.Event()

        def away(connection, _):
            nonlocal releases
            while request := message_from(connection):
                answer = failure(503, error="overloaded")
                if op_of(request) == "decide":
                    # The service gave a permit, and nobody knows.
                    answer_of(service, request)
                else:
                    releases += 1
                    if releases == 1:
                        began = time.monotonic()
                        connection.recv(1)
                        taken.append(time.monotonic() - began)
                        return
                    if releases == 4:
                        answer = answer_of(service, request)
                        is_released.set()
                connection.sendall(answer)

        attributes = self.attributes("/jobs")
        with self.assertNoLogs("tollgate_client"):
            client = self.open(self.listen(away).url, deadline=0.15)
            with self.assertRaises(Unavailable), client.hold(attributes, cost=2):
                self.fail("nothing is held")
            self.assertTrue(is_released.wait(PATIENT), "the permits weren't released")
        self.assertTrue(self.open().peek(attributes, cost=2).allowed)
        self.assertGreater(taken[0], 0.3, "a short deadline is that of the caller alone")

    def test_a_release_that_nobody_waits_for_is_given_up_after_some_attempts_or_some_time(self):
        releases = 0

        def failing(connection, _):
            nonlocal releases
            while request := message_from(connection):
                releases += op_of(request) == "release"
                connection.sendall(failure(503, error="overloaded"))

        client = self.open(self.listen(failing).url)
        for attempts, changed in ((4, {"_UNREAD_PAUSES": (0.01,) * 3}), (1, {"_UNREAD_PATIENCE": -1})):
            releases = 0
            with self.subTest(changed), mock.patch.multiple(tollgate_client, **changed):
                with self.assert_a_warning("a permit wasn't released: overloaded"):
                    with self.assertRaises(Unavailable), client.hold(self.attributes("/jobs")):
                        self.fail("nothing is held")
                self.assertEqual(releases, attempts)

    def test_an_unknown_id_is_no_news_to_a_release_whose_error_nobody_gets(self):
        is_asked = threading.Event()

        def forgetful(connection, _):
            while request := message_from(connection):
                if op_of(request) == "decide":
                    connection.sendall(failure(503, error="overloaded") if is_failing else answer_of(service, request))
                else:
                    connection.sendall(failure(404, error="no rule applies to these attributes", kind="unknown-id"))
                    is_asked.set()

        client = self.open(self.listen(forgetful).url)
        with self.assertNoLogs("tollgate_client"):
            is_failing = True
            with self.assertRaises(Unavailable), client.hold(self.attributes("/jobs")):
                self.fail("nothing is held")
            self.assertTrue(is_asked.wait(PATIENT), "the permits weren't released")
            time.sleep(0.2)
            is_failing = False
            with self.assertRaisesRegex(KeyError, "work"), client.hold(self.attributes("/jobs")):
                raise KeyError("work")
            with client.hold(self.attributes("/jobs")):
                pass

    def test_a_failure_policys_answer_releases_nothing(self):
        ops, is_failing, failures = [], True, 0

        def without_redis(connection, _):
            nonlocal failures
            while request := message_from(connection):
                ops.append(op_of(request))
                if ops[-1] == "decide":
                    connection.sendall(failure(503, error="overloaded") if is_failing else answer_of(service, request))
                elif failures > 0:
                    failures -= 1
                    connection.sendall(failure(200, allowed=True, by="policy", reason="policy", rule="jobs", limits=[]))
                else:
                    connection.sendall(answer_of(service, request))

        client = self.open(self.listen(without_redis).url)
        text = "a permit wasn't released: the failure policy of rule jobs answered, not Redis"
        with mock.patch.multiple(tollgate_client, _UNREAD_PAUSES=(0.01,) * 3):
            failures = 4
            with self.assert_a_warning(text):
                with self.assertRaises(Unavailable), client.hold(self.attributes("/jobs")):
                    self.fail("nothing is held")
        self.assertEqual(ops, ["decide"] + ["release"] * 4)
        is_failing, failures = False, 3
        ops.clear()
        with self.assert_a_warning(text), client.hold(self.attributes("/jobs")):
            pass
        self.assertEqual(ops, ["decide"] + ["release"] * 3)
        failures = 2
        attributes = self.attributes("/jobs", again=True)
        with self.assertNoLogs("tollgate_client"), client.hold(attributes):
            pass

    def test_a_connection_closed_while_unused_is_replaced(self):
        def one_each(connection, _):
            connection.sendall(answer_of(service, message_from(connection)))
            connection.close()

        listener = self.listen(one_each)
        client = self.open(listener.url)
        for remaining in (9, 8, 7):
            self.assertEqual(client.decide(self.attributes("/requests")).remaining, remaining)
            time.sleep(0.1)
        self.assertEqual(listener.accepted, 3)

    def test_a_connection_is_kept(self):
        def proxy(connection, _):
            while request := message_from(connection):
                connection.sendall(answer_of(service, request))

        listener = self.listen(proxy)
        client = self.open(listener.url)
        for _ in range(5):
            client.decide(self.attributes("/requests"))
        self.assertEqual(listener.accepted, 1)

    def test_garbage_is_no_decision(self):
        for answer in (b"what?\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", b"HTTP/1.1 502 Bad\r\n\r\n"):
            def garbage(connection, _, answer=answer):
                message_from(connection)
                connection.sendall(answer)
                connection.close()

            with self.subTest(answer), self.assertRaises(Unavailable):
                self.open(self.listen(garbage).url).decide(self.attributes("/requests"))

    def test_what_follows_an_answer_is_never_that_to_another_call(self):
        decision = failure(200, allowed=True, by="redis", reason="allowed", rule="first", limits=[])
        answers = {
            "two answers": decision + decision,
            "no content, and some": b"HTTP/1.1 204 No Content\r\n\r\n" + decision,
            "not modified": b"HTTP/1.1 304 Not Modified\r\n\r\n" + decision,
            "no answer of the service": failure(502, detail="bad gateway"),
        }
        for about, answer in answers.items():
            for is_late in (False, True):

                def followed(connection, number, answer=answer, is_late=is_late):
                    while request := message_from(connection):
                        if number > 1:
                            connection.sendall(answer_of(service, request))
                        elif is_late:
                            head = answer.index(b"\r\n\r\n") + 4
                            end = head + (len(decision) - decision.index(b"{") if answer.startswith(decision) else 0)
                            connection.sendall(answer[:end])
                            time.sleep(0.1)
                            connection.sendall(answer[end:])
                        else:
                            connection.sendall(answer)

                with self.subTest(about, is_late=is_late):
                    listener = self.listen(followed)
                    client = self.open(listener.url, deadline=1)
                    try:
                        self.assertEqual(client.decide(self.attributes("/requests", of=about)).rule, "first")
                    except Unavailable as failed:
                        self.assertNotEqual(about, "two answers", failed)
                    time.sleep(0.2)
                    self.assertEqual(client.decide(self.attributes("/requests")).rule, "requests")
                    self.assertEqual(listener.accepted, 2)

    def test_what_comes_before_an_answer_is_skipped(self):
        def early(connection, _):
            while request := message_from(connection):
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" + b"HTTP/1.1 103 Early Hints\r\nLink: </>\r\n\r\n" * 2)
                connection.sendall(answer_of(service, request))

        listener = self.listen(early)
        client = self.open(listener.url)
        for remaining in (9, 8):
            self.assertEqual(client.decide(self.attributes("/requests")).remaining, remaining)
        self.assertEqual(listener.accepted, 1)

    def test_an_answer_in_chunks(self):
        def chunked(connection, _):
            while request := message_from(connection):
                body = answer_of(service, request).partition(b"\r\n\r\n")[2]
                head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
                chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:7], body[7:]))
                connection.sendall(head + chunks + b"0\r\n\r\n")

        listener = self.listen(chunked)
        client = self.open(listener.url)
        self.assertEqual(client.decide(self.attributes("/requests")).remaining, 9)
        self.assertEqual(client.decide(self.attributes("/requests")).remaining, 8)
        self.assertEqual(listener.accepted, 1)

    def test_wrong_input_is_raised_with_the_services_message(self):
        for on_error in ("closed", "open"):
            with self.assertRaisesRegex(RequestError, r"^costs: expected limits of rule requests") as raised:
                self.open(on_error=on_error).decide(self.attributes("/requests"), costs={"x": 1})
            self.assertEqual((raised.exception.status, raised.exception.kind), (409, "input"))

    def test_a_token(self):
        path = redis.folder / f"{self.id()}.tokens"
        path.write_text("secret\n")
        guarded = Service(redis, "127.0.0.1:0", "--tokens", str(path))
        self.addCleanup(guarded.end)
        self.assertTrue(self.open(guarded.url, token="secret").decide(self.attributes("/requests")).allowed)
        for token in (None, "wrong"):
            with self.assertRaisesRegex(RequestError, "token") as raised:
                self.open(guarded.url, token=token, on_error="open").decide(self.attributes("/requests"))
            self.assertEqual(raised.exception.status, 401)
        with self.assertRaisesRegex(ValueError, "token"):
            self.open(token="two\r\nlines")

    def test_a_unix_socket_and_a_restart(self):
        path = f"unix:{redis.folder}/{type(self).__name__}.sock"
        first = Service(redis, path)
        client = self.open(path)
        self.assertEqual(client.decide(self.attributes("/requests")).remaining, 9)
        first.end()
        second = Service(redis, path)
        self.addCleanup(second.end)
        self.assertEqual(client.decide(self.attributes("/requests")).remaining, 8)

    def test_wrong_settings(self):
        for named in ({"url": "127.0.0.1:8080"}, {"url": "ftp://x"}, {"on_error": "local"}, {"deadline": 0}):
            with self.subTest(named), self.assertRaises(ValueError):
                self.open(**named)


class Pauses(unittest.TestCase):
    def test_of_releases_that_nobody_waits_for_grow_and_differ(self):
        with Client("http://127.0.0.1:8080") as client:
            first, second = list(client._unread_pauses()), list(client._unread_pauses())
        self.assertEqual(len(first), 7)
        for pause, least in zip(first, (0.2, 0.4, 0.8, 1.6, 2, 2, 2)):
            self.assertTrue(least <= pause <= 2 * least, first)
        self.assertNotEqual(first, second)

    def test_at_most_256_releases_are_retried_at_a_time(self):
        with Client("http://127.0.0.1:8080") as client:
            begun = [client._unread_pauses() for _ in range(257)]
            self.assertEqual(sum(next(pauses, None) is not None for pauses in begun), 256)
            begun[0].close()
            self.assertIsNotNone(next(client._unread_pauses(), None))


class Threads(Calls, unittest.TestCase):
    kind = Client

    @unittest.skipUnless(hasattr(os, "fork"), "needs fork")
    def test_a_forked_process_has_connections_of_its_own(self):
        client = self.open()
        client.decide(self.attributes("/requests"))
        child = os.fork()
        if child == 0:
            status = 1
            # Only this thread has come along: a lock that another held would be waited for without end.
            signal.alarm(int(3 * PATIENT))
            try:
                allowed = [client.decide({"path": "/requests", "user": f"child {n}"}).key for n in range(50)]
                status = int(allowed != [f"user:child {n}" for n in range(50)])
            finally:
                os._exit(status)
        for n in range(50):
            self.assertEqual(client.decide({"path": "/requests", "user": f"parent {n}"}).key, f"user:parent {n}")
        self.assertEqual(os.waitpid(child, 0)[1], 0, f"it failed, or wasn't done within {3 * PATIENT} s")


class Tasks(Calls, unittest.TestCase):
    kind = InLoop

    async def assert_cancelled(self, task):
        await asyncio.wait({task}, timeout=PATIENT)
        self.assertTrue(task.cancelled(), f"it was cancelled, and goes on: {task}")

    async def assert_released(self, client, attributes):
        until = time.monotonic() + PATIENT
        while not (await client.peek(attributes, cost=2)).allowed:
            self.assertLess(time.monotonic(), until, "the permits didn't come back")
            await asyncio.sleep(0.01)

    def test_a_cancelled_task_releases_and_leaves_no_answer_behind(self):
        async def run():
            attributes = self.attributes("/exclusive")
            async with AsyncClient(service.url, deadline=PATIENT) as client:
                is_held = asyncio.Event()

                async def work():
                    async with client.hold(attributes):
                        is_held.set()
                        await asyncio.sleep(600)

                task = asyncio.create_task(work())
                await asyncio.wait_for(is_held.wait(), PATIENT)
                task.cancel()
                await self.assert_cancelled(task)
                async with client.hold(attributes):
                    pass
                for turn in range(50):
                    call = asyncio.create_task(client.decide(self.attributes("/requests", turn=turn)))
                    await asyncio.sleep(0)
                    if turn % 2:
                        call.cancel()
                    user = f"{self.id()} {turn}"
                    decision = await client.decide({"path": "/requests", "user": user})
                    self.assertEqual(decision.key, f"user:{user}")
                    await asyncio.gather(call, return_exceptions=True)

        asyncio.run(run())

    def test_a_task_that_is_cancelled_while_its_answer_comes_ends_and_releases(self):
        read = tollgate_client._read
        self.addCleanup(setattr, tollgate_client, "_read", read)

        async def run(turns):
            attributes = self.attributes("/jobs", turns=turns)
            async with AsyncClient(service.url, deadline=PATIENT) as client:

                async def work():
                    async with client.hold(attributes, cost=2):
                        await asyncio.sleep(600)

                def cancel_after(turns):
                    if turns:
                        asyncio.get_running_loop().call_soon(cancel_after, turns - 1)
                    else:
                        task.cancel()

                async def read_and_cancel(reader):
                    tollgate_client._read = read
                    answer = await read(reader)
                    cancel_after(turns)
                    return answer

                tollgate_client._read = read_and_cancel
                task = asyncio.create_task(work())
                await self.assert_cancelled(task)
                await self.assert_released(client, attributes)

        # Turns of the event loop, which passes the answer on to the task in some of them.
        for turns in range(8):
            with self.subTest(turns):
                asyncio.run(run(turns))

    def test_a_release_after_a_cancelled_call_comes_after_its_answer(self):
        is_asked, go_on, answered = threading.Event(), threading.Event(), []

        def slow(connection, _):
            while request := message_from(connection):
                op = request.split()[1].decode()
                if op == "/v1/decide":
                    is_asked.set()
                    go_on.wait(PATIENT)
                answer = answer_of(service, request)
                answered.append(op)
                connection.sendall(answer)

        async def run():
            async with AsyncClient(self.listen(slow).url, deadline=PATIENT) as client:
                task = asyncio.create_task(client.hold(self.attributes("/jobs")).__aenter__())
                self.assertTrue(await asyncio.to_thread(is_asked.wait, PATIENT))
                task.cancel()
                await self.assert_cancelled(task)
                await asyncio.sleep(0.3)  # in which a release would come too early
                self.assertEqual(answered, [])
                go_on.set()
            self.assertEqual(answered, ["/v1/decide", "/v1/release"])

        asyncio.run(run())

    def test_an_error_of_a_release_after_a_cancellation_is_a_warning(self):
        def cancelled_during(cancelled_op):
            is_asked, go_on = threading.Event(), threading.Event()

            def guarded(connection, _):
                while request := message_from(connection):
                    op = op_of(request)
                    if op == cancelled_op:
                        is_asked.set()
                        go_on.wait(PATIENT)
                    is_release = op == "release"
                    connection.sendall(failure(401, error="expected a token") if is_release else answer_of(service, request))

            async def run():
                async with AsyncClient(self.listen(guarded).url, token="secret", deadline=PATIENT) as client:

                    async def work():
                        async with client.hold(self.attributes("/jobs")):
                            pass

                    task = asyncio.create_task(work())
                    self.assertTrue(await asyncio.to_thread(is_asked.wait, PATIENT))
                    task.cancel()
                    await self.assert_cancelled(task)
                    go_on.set()

            asyncio.run(run())

        for op in ("decide", "release"):
            with self.subTest(op), self.assert_a_warning("a permit wasn't released: expected a token"):
                cancelled_during(op)

    def test_a_release_that_is_left_by_a_cancelled_task_outlasts_an_outage(self):
        is_asked, go_on, releases = threading.Event(), threading.Event(), 0

        def away(connection, _):
            nonlocal releases
            while request := message_from(connection):
                is_release = op_of(request) == "release"
                releases += is_release
                if is_release and releases < 4:
                    is_asked.set()
                    go_on.wait(PATIENT)
                    connection.sendall(failure(503, error="overloaded"))
                else:
                    connection.sendall(answer_of(service, request))

        async def run():
            attributes = self.attributes("/jobs")
            async with AsyncClient(self.listen(away).url, deadline=PATIENT) as client:

                async def work():
                    async with client.hold(attributes, cost=2):
                        pass

                task = asyncio.create_task(work())
                self.assertTrue(await asyncio.to_thread(is_asked.wait, PATIENT))
                task.cancel()
                await self.assert_cancelled(task)
                go_on.set()
                await self.assert_released(client, attributes)

        with self.assertNoLogs("tollgate_client"):
            asyncio.run(run())

    def test_close_does_not_wait_for_the_service_to_be_back(self):
        releases = 0
        is_paused = threading.Event()

        def away(connection, _):
            nonlocal releases
            while request := message_from(connection):
                releases += op_of(request) == "release"
                connection.sendall(failure(503, error="overloaded"))
                if releases:
                    is_paused.set()

        async def run():
            async with AsyncClient(self.listen(away).url, deadline=PATIENT) as client:
                with self.assertRaises(Unavailable):
                    await client.hold(self.attributes("/jobs")).__aenter__()
                self.assertTrue(await asyncio.to_thread(is_paused.wait, PATIENT))
                await asyncio.sleep(0.1)

        began = time.monotonic()
        with mock.patch.object(tollgate_client, "_UNREAD_PAUSES", (2 * PATIENT,)):
            with self.assert_a_warning("a permit wasn't released: overloaded"):
                asyncio.run(run())
        self.assertEqual(releases, 2)
        self.assertLess(time.monotonic() - began, PATIENT)

    def test_a_cancelled_call_that_took_nothing_is_not_released(self):
        gone = Service(redis)
        gone.end()

        async def run():
            async with AsyncClient(gone.url, deadline=PATIENT) as client:
                task = asyncio.create_task(client.hold(self.attributes("/jobs")).__aenter__())
                await asyncio.sleep(0)
                task.cancel()
                await self.assert_cancelled(task)

        with self.assertNoLogs("tollgate_client"):
            asyncio.run(run())

    def test_a_cancelled_hold_of_a_rule_without_permits_is_no_news(self):
        async def run():
            async with AsyncClient(service.url, deadline=PATIENT) as client:
                task = asyncio.create_task(client.hold(self.attributes("/free")).__aenter__())
                # It has begun by then, so that it asks, and a release follows.
                await asyncio.sleep(0)
                task.cancel()
                await self.assert_cancelled(task)

        with self.assertNoLogs():
            asyncio.run(run())

    def test_a_task_that_is_cancelled_while_hold_gives_back_gives_back(self):
        is_asked, go_on = threading.Event(), threading.Event()

        def slow(connection, _):
            while request := message_from(connection):
                if op_of(request) == "cancel":
                    is_asked.set()
                    go_on.wait(PATIENT)
                connection.sendall(answer_of(service, request))

        async def run():
            attributes = self.attributes("/requests")
            async with AsyncClient(self.listen(slow).url, deadline=PATIENT) as client:
                task = asyncio.create_task(client.hold(attributes).__aenter__())
                self.assertTrue(await asyncio.to_thread(is_asked.wait, PATIENT))
                task.cancel()
                await self.assert_cancelled(task)
                go_on.set()
            async with AsyncClient(service.url, deadline=PATIENT) as client:
                self.assertEqual((await client.decide(attributes, cost=0)).remaining, 10)

        with self.assertNoLogs():
            asyncio.run(run())

    def test_a_cancelled_close_leaves_releases_under_way(self):
        is_asked, go_on = threading.Event(), threading.Event()

        def broken_once(connection, _):
            while request := message_from(connection):
                if b"/v1/release" in request and not is_asked.is_set():
                    is_asked.set()
                    go_on.wait(PATIENT)
                    connection.close()
                    return
                connection.sendall(answer_of(service, request))

        async def run():
            attributes = self.attributes("/jobs")
            async with AsyncClient(self.listen(broken_once).url, deadline=PATIENT) as client:

                async def work():
                    async with client.hold(attributes, cost=2):
                        pass

                task = asyncio.create_task(work())
                self.assertTrue(await asyncio.to_thread(is_asked.wait, PATIENT))
                task.cancel()
                await self.assert_cancelled(task)
                closing = asyncio.create_task(client.close())
                await asyncio.sleep(0)
                closing.cancel()
                await self.assert_cancelled(closing)
                go_on.set()
                await self.assert_released(client, attributes)

        asyncio.run(run())


if __name__ == "__main__":
    unittest.main()
