"""The page's programs, as they are printed but for the service's address, under the rules that it prints."""

import re
import unittest
from contextlib import redirect_stdout
from io import StringIO

from service import CLIENTS, PATIENT, Redis, Service
from tollgate_client import Client, RequestError


def printed_in(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (CLIENTS / page).read_text(), re.DOTALL)


def programs() -> list[str]:
    return printed_in("python/README.md", "python")


class Readme(unittest.TestCase):
    def setUp(self) -> None:
        self.redis = Redis()
        self.addCleanup(self.redis.end)
        self.service = self.start("python/README.md")

    def start(self, page: str) -> Service:
        """The service under the rules of this page."""
        (rules,) = printed_in(page, "toml")
        path = self.redis.folder / "rules.toml"
        path.write_text(rules)
        service = Service(self.redis, rules=path)
        self.addCleanup(service.end)
        return service

    def run_program(self, text: str) -> tuple[str, dict]:
        self.assertIn("http://127.0.0.1:8080", text)
        # A slow machine must not miss the deadline.
        text = text.replace("http://127.0.0.1:8080", self.service.url).replace("deadline=0.1", "deadline=20")
        names: dict = {}
        with redirect_stdout(StringIO()) as printed:
            exec(compile(text, "README.md", "exec"), names)
        return printed.getvalue(), names

    def test_the_client(self) -> None:
        printed, names = self.run_program(programs()[0])
        self.assertEqual(printed, "working\n")
        call = {"user": "42", "model": "large"}
        tokens = names["client"].peek(call, costs={"tokens": 0}).limits[1]
        # The bucket is refilled meanwhile.
        self.assertGreaterEqual(tokens.remaining, tokens.limit - 120, "120 were settled")
        names["client"].close()

    def test_fastapi(self) -> None:
        _, names = self.run_program(programs()[1])
        self.assertEqual(type(names["app"]).__name__, "FastAPI")
        self.assertEqual(len(programs()), 2)

    def test_permits_behind_a_middleware(self) -> None:
        with Client(self.start("README.md").url, deadline=PATIENT) as client:
            asked = client.decide({"user": "42", "ip": "192.0.2.1", "method": "GET", "path": "/reports"})
            self.assertEqual(asked.rule, "users")
            with client.hold({"user": "42", "job": "report"}) as permit:
                self.assertEqual(permit.decision.rule, "reports")
            with self.assertRaisesRegex(RequestError, "^hold: rule users has no concurrency limit"):
                with client.hold({"user": "42", "path": "/reports"}):
                    self.fail("nothing is held")
