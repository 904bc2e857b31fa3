"""The page's programs, as they are printed but for the service's address."""

import re
import unittest
from contextlib import redirect_stdout
from io import StringIO

from service import CLIENTS, Redis, Service


def programs() -> list[str]:
    page = (CLIENTS / "python/README.md").read_text()
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


class Readme(unittest.TestCase):
    def setUp(self) -> None:
        self.redis = Redis()
        self.addCleanup(self.redis.end)
        self.service = Service(self.redis)
        self.addCleanup(self.service.end)

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
        call = {"user": "42", "path": "/model"}
        left = names["client"].peek(call, costs={"tokens": 0}).limits[1].remaining
        self.assertEqual(left, 880, "120 were settled")
        names["client"].close()

    def test_fastapi(self) -> None:
        _, names = self.run_program(programs()[1])
        self.assertEqual(type(names["app"]).__name__, "FastAPI")
        self.assertEqual(len(programs()), 2)
