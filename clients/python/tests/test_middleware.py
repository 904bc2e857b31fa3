"""The ASGI middleware: driven directly, and in FastAPI behind uvicorn if both are installed."""

import asyncio
import importlib.util
import json
import logging
import socket
import threading
import time
import unittest
import urllib.error
import urllib.request
from contextlib import asynccontextmanager

from service import PATIENT, Redis, Service
from tollgate_client import AsyncClient, RateLimitMiddleware


def setUpModule():
    global redis, service
    logging.getLogger("tollgate_client").addHandler(logging.NullHandler())
    redis = Redis()
    unittest.addModuleCleanup(redis.end)
    service = Service(redis)
    unittest.addModuleCleanup(service.end)


async def application(scope, receive, send):
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]})
    await send({"type": "http.response.body", "body": b"hello"})


def user_of(scope):
    return {"user": dict(scope["headers"]).get(b"x-user", b"").decode() or None}


class Driven(unittest.TestCase):
    def ask(self, count=1, user="", url=None, on_error="closed", token=None, attributes=user_of, pause=0, **scope):
        async def run():
            messages = []

            async def send(message):
                messages.append(message)

            headers = [(b"x-user", (user or self.id()).encode())]
            asked = {"type": "http", "method": "GET", "path": "/pages/a", "client": ("192.0.2.1", 1), **scope}
            async with AsyncClient(url or service.url, token=token, deadline=PATIENT, on_error=on_error) as client:
                middleware = RateLimitMiddleware(application, client, attributes)
                for turn in range(count):
                    await asyncio.sleep(pause if turn else 0)
                    messages.clear()
                    await middleware({**asked, "headers": headers}, None, send)
            return messages

        return asyncio.run(run())

    def test_a_path_that_can_be_read_in_two_ways_is_400_unless_the_application_made_it(self):
        rules = redis.folder / "two-ways.toml"
        rules.write_text('[[rule]]\nname = "admin"\nmatch = { path = "/admin/*" }\naction = "block"\n')
        strict = Service(redis, rules=rules)
        self.addCleanup(strict.end)
        start, body = self.ask(url=strict.url, raw_path=b"/..;/admin")
        self.assertEqual((start["status"], json.loads(body["body"])["detail"]), (400, "the path can be read in two ways"))
        with self.assertLogs("tollgate_client", "WARNING") as logged:
            start, _ = self.ask(url=strict.url, attributes=lambda scope: {"path": "/..;/admin"})
        self.assertEqual((start["status"], len(logged.output)), (500, 1))
        self.assertIn("path: servers may read it in different ways", logged.output[0])

    def test_allowed_requests_get_the_fields_and_denied_ones_the_status(self):
        start, body = self.ask()
        self.assertEqual((start["status"], body["body"]), (200, b"hello"))
        headers = dict(start["headers"])
        self.assertEqual(headers[b"ratelimit-policy"], b'"pages";q=2;w=2592000')
        self.assertTrue(headers[b"ratelimit"].startswith(b'"pages";r=1'))
        self.assertEqual(headers[b"x-own"], b"1")
        start, body = self.ask(count=2)
        self.assertEqual(start["status"], 429)
        headers = dict(start["headers"])
        self.assertGreater(int(headers[b"retry-after"]), 29 * 86_400)
        self.assertIn(b"ratelimit", headers)
        self.assertEqual(headers[b"content-type"], b"application/problem+json")
        problem = json.loads(body["body"])
        self.assertEqual((problem["title"], problem["detail"]), ("Too Many Requests", "slow down"))

    def test_the_path_is_sent_as_it_came(self):
        # Decoded once, %25 is a percent sign, and this is no page.
        start, _ = self.ask(count=3, path="/pages%2Fa", raw_path=b"/pages%252Fa")
        self.assertNotIn(b"ratelimit", dict(start["headers"]))
        start, _ = self.ask(count=3, path="/pages%2Fa")
        self.assertNotIn(b"ratelimit", dict(start["headers"]))

    def test_an_async_function_of_the_scope(self):
        async def attributes(scope):
            return {"user": self.id(), "path": "/banned"}

        start, _ = self.ask(attributes=attributes)
        self.assertEqual(start["status"], 403)

    def test_a_client_without_an_address_lacks_the_attribute(self):
        self.assert_seldom_warned(500, "rule pages needs the attribute ip,", client=("testclient", 50000))

    def test_a_websocket_is_refused_before_it_is_accepted(self):
        self.assertEqual(self.ask(type="websocket")[0]["type"], "websocket.accept")
        self.assertEqual(self.ask(2, type="websocket"), [{"type": "websocket.close", "code": 1008}])
        start = self.ask(type="websocket", extensions={"websocket.http.response": {}})[0]
        self.assertEqual((start["type"], start["status"]), ("websocket.http.response.start", 429))

    def test_without_a_decision_closed_is_503_and_open_goes_on(self):
        gone = Service(redis)
        gone.end()
        self.assertEqual(self.ask(url=gone.url)[0]["status"], 503)
        self.assertEqual(self.ask(url=gone.url, on_error="open")[0]["status"], 200)

    def assert_seldom_warned(self, status, text, **asked):
        """That many requests are answered so, and that there is one such warning a second, without the token."""
        began = time.monotonic()
        with self.assertLogs("tollgate_client") as logs:
            start, *_ = self.ask(count=20, token="secret", **asked)
        self.assertEqual(start["status"], status)
        self.assertLessEqual(len(logs.records), 1 + int(time.monotonic() - began))
        for record in logs.records:
            self.assertEqual((record.levelname, record.exc_info), ("WARNING", None))
            self.assertRegex(record.getMessage(), text)
        self.assertNotIn("secret", "".join(logs.output))

    def test_what_the_service_refuses_to_decide_is_500(self):
        refused = "^a request is answered 500, since its rate limit can't be decided: "
        permits = "id: it is missing: rule jobs has permits, .*; let a rule with permits match an attribute that only hold sends$"
        self.assert_seldom_warned(500, refused + permits, path="/jobs")
        missing = "rule requests needs the attribute user, which this request lacks: add it by the middleware's attributes"
        self.assert_seldom_warned(500, refused + missing, path="/requests", attributes=None)
        wrong = 'ip: expected an address such as .*, got "nowhere"$'
        self.assert_seldom_warned(500, refused + wrong, attributes=lambda scope: {"ip": "nowhere"})

    def test_a_wrong_token_is_500(self):
        path = redis.folder / "tokens"
        path.write_text("another\n")
        guarded = Service(redis, "127.0.0.1:0", "--tokens", str(path))
        self.addCleanup(guarded.end)
        self.assert_seldom_warned(500, "can't be decided: the token is missing or wrong", url=guarded.url)

    def test_a_status_of_the_rule_is_for_the_visitor(self):
        with self.assertNoLogs("tollgate_client"):
            self.assertEqual(self.ask(path="/keys")[0]["status"], 401)

    def test_requests_that_pass_without_a_decision_are_a_warning(self):
        gone = Service(redis)
        gone.end()
        text = "^requests pass without a decision: the service can't be reached: "
        self.assert_seldom_warned(200, text, url=gone.url, on_error="open")
        with self.assertLogs("tollgate_client") as logs:
            self.ask(count=2, pause=1.1, url=gone.url, on_error="open")
        self.assertEqual(len(logs.records), 2)


@unittest.skipUnless(
    importlib.util.find_spec("fastapi") and importlib.util.find_spec("uvicorn"), "NOT RUN: fastapi or uvicorn is missing"
)
class Served(unittest.TestCase):
    def test_fastapi(self):
        import fastapi
        import uvicorn

        client = AsyncClient(service.url, deadline=PATIENT)

        @asynccontextmanager
        async def lifespan(app):
            yield
            await client.close()

        app = fastapi.FastAPI(lifespan=lifespan)
        app.add_middleware(RateLimitMiddleware, client=client, attributes=lambda scope: {"user": self.id()})

        @app.get("/pages/{name}")
        async def page(name: str):
            return {"name": name}

        listener = socket.create_server(("127.0.0.1", 0))
        url = "http://127.0.0.1:%d/pages/a" % listener.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=10))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            for remaining in (1, 0):
                with urllib.request.urlopen(url, timeout=PATIENT) as response:
                    self.assertEqual(json.load(response), {"name": "a"})
                    self.assertIn(f'"pages";r={remaining}', response.headers["RateLimit"])
            with self.assertRaises(urllib.error.HTTPError) as denied:
                urllib.request.urlopen(url, timeout=PATIENT)
            with denied.exception as response:
                self.assertEqual(response.status, 429)
                self.assertEqual(json.load(response)["detail"], "slow down")
                self.assertIsNotNone(response.headers["Retry-After"])
        finally:
            server.should_exit = True
            thread.join(PATIENT)
            listener.close()
        self.assertFalse(thread.is_alive(), f"uvicorn didn't end within {PATIENT} s")


if __name__ == "__main__":
    unittest.main()
