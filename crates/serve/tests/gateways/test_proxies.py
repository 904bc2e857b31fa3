"""nginx, and if they are there Caddy and HAProxy, with their examples: answers, and fields that clients forge."""

import os
import shutil
import signal
import time
import unittest

from load import Load, basic, get
from servers import EXAMPLES, Servers, free_port, needed

RULES = """
    paths = "decoded"
    [[rule]]
    name = "logins"
    priority = 20
    match = { path = "/login", method = "POST" }
    key = "ip"
    limits = ["fixed-window 2/7d"]
    [[rule]]
    name = "admin"
    priority = 20
    match = { path = "/admin/*" }
    action = "block"
    [[rule]]
    name = "users"
    priority = 10
    match = { user = "*" }
    key = "user"
    limits = ["fixed-window 3/7d"]
    [[rule]]
    name = "addresses"
    key = "ip"
    limits = ["fixed-window 40/7d"]
"""

# What would count as another client, path or method, if a proxy handed it on.
FORGED = {
    "X-Tollgate-User": "eve",
    "X-Tollgate-Ip": "192.0.2.1",
    "X-Tollgate-Path": "/free",
    "X-Forwarded-For": "192.0.2.1",
    "X-Real-IP": "192.0.2.1",
    "X-Forwarded-Uri": "/free",
    "X-Original-URI": "/free",
    "X-Forwarded-Method": "GET",
    "X-Original-Method": "GET",
}


# A slow machine must not fail a request. A service that is stopped does.
PATIENT = {
    "nginx.conf": {
        "proxy_connect_timeout 100ms": "proxy_connect_timeout 3s",
        "proxy_read_timeout 250ms": "proxy_read_timeout 3s",
    },
    "Caddyfile": {"dial_timeout 100ms": "dial_timeout 3s", "response_header_timeout 250ms": "response_header_timeout 3s"},
    "haproxy.lua": {"local TIMEOUT = 60": "local TIMEOUT = 1000"},
}


class Proxy:
    """What each proxy does alike."""

    def setUp(self):
        self.servers = self.enterContext(Servers())
        self.redis, self.application = self.servers.redis(), self.servers.application()
        path = self.servers.write("rules.toml", RULES)
        self.service = self.servers.service(path, self.redis, "--deadline", "2s")
        self.proxy = self.start()

    def example(self, name, texts):
        ports = {
            "127.0.0.1:8080": f"127.0.0.1:{self.service.http}",
            "127.0.0.1:8000": f"127.0.0.1:{self.application.port}",
        }
        return self.servers.example(name, ports | PATIENT.get(name, {}) | texts)

    def test_a_client_learns_of_its_limit(self):
        status, fields, body = get(self.proxy.port, "/")
        self.assertEqual((status, body), (200, "user= for=127.0.0.1\n"))
        self.assertEqual(fields["ratelimit-policy"], '"addresses";q=40;w=604800')
        self.assertTrue(fields["ratelimit"].startswith('"addresses";r=39;t='))
        self.assertEqual(Load(self.proxy.port, requests=100).wait().counts(), {200: 39, 429: 61})
        status, fields, _ = get(self.proxy.port, "/")
        self.assertEqual(status, 429)
        self.assertTrue(fields["ratelimit"].startswith('"addresses";r=0;t='))
        self.assertGreater(int(fields["retry-after"]), 0)

    def test_fields_that_a_client_forges(self):
        for name, value in [*FORGED.items(), (None, None)]:
            forged = {name: value} if name else FORGED
            self.assertEqual(get(self.proxy.port, "/admin/x", forged)[0], 403, forged)
            fields = get(self.proxy.port, "/", forged)[1]
            self.assertTrue(fields["ratelimit"].startswith('"addresses";'), (forged, fields))
        # Each of them counted as the one address.
        self.assertIn(f";r={40 - len(FORGED) - 1};", fields["ratelimit"])
        answers = [get(self.proxy.port, path, FORGED, "POST")[0] for path in ("/login", "/%6Cogin?a", "//login")]
        self.assertEqual(answers, [200, 200, 429])

    def test_an_answer_of_the_application_passes(self):
        self.assertEqual(get(self.proxy.port, "/forbidden")[::2], (403, "by the application\n"))

    def test_without_a_decision(self):
        self.redis.stop(signal.SIGKILL)
        self.assertEqual(get(self.proxy.port, "/")[0], 503)
        self.redis.start()
        end = time.monotonic() + 10
        while get(self.proxy.port, "/")[0] != 200 and time.monotonic() < end:
            time.sleep(0.05)
        self.assertEqual(get(self.proxy.port, "/")[0], 200)
        self.service.stop(signal.SIGKILL)
        self.assertIn(get(self.proxy.port, "/")[0], (502, 503))
        self.service.start()
        self.assertEqual(get(self.proxy.port, "/")[0], 200)
        self.service.pause()
        began = time.monotonic()
        self.assertIn(get(self.proxy.port, "/")[0], (502, 503, 504))
        self.assertLess(time.monotonic() - began, 9)
        self.service.process.send_signal(signal.SIGCONT)


class Nginx(Proxy, unittest.TestCase):
    def start(self, texts=None, name="nginx"):
        port = free_port()
        texts = {"127.0.0.1:10080": f"127.0.0.1:{port}"} | (texts or {})
        return self.servers.nginx(name, self.example("nginx.conf", texts), port)

    def test_a_user_and_open(self):
        # alice's password is "example".
        users = self.servers.write("users", "alice:{SHA}w0mcJylzCn+AfvuGdqkty2+KP48=\n")
        ask = "            auth_request /tollgate;"
        texts = {
            ask: f"            auth_basic shop; auth_basic_user_file {users};\n{ask}",
            "#proxy_set_header X-Tollgate-User": "proxy_set_header X-Tollgate-User",
            "#proxy_intercept_errors": "proxy_intercept_errors",
            "#error_page": "error_page",
        }
        port = self.start(texts, "nginx-users").port
        wrong = {"authorization": "Basic YWxpY2U6d3Jvbmc="}
        self.assertEqual([get(port, "/", wrong)[0] for _ in range(5)], [401] * 5)
        answers = [get(port, "/", FORGED | basic("alice"))[0] for _ in range(4)]
        self.assertEqual(answers, [200, 200, 200, 429])
        self.redis.stop(signal.SIGKILL)
        self.assertEqual(get(port, "/", basic("alice"))[0], 200)
        self.service.stop(signal.SIGKILL)
        self.assertEqual(get(port, "/", basic("alice"))[0], 200)


@unittest.skipUnless(os.environ.get("TOLLGATE_CADDY"), "TOLLGATE_CADDY names no Caddy")
class Caddy(Proxy, unittest.TestCase):
    def start(self):
        port = free_port()
        config = self.servers.write("Caddyfile", self.example("Caddyfile", {"127.0.0.1:10081": f"127.0.0.1:{port}"}))
        os.environ["XDG_DATA_HOME"] = os.environ["XDG_CONFIG_HOME"] = str(self.servers.dir)
        command = [needed("TOLLGATE_CADDY", "caddy"), "run", "--config", config, "--adapter", "caddyfile"]
        server = self.servers.start("caddy", command, port)
        server.port = port
        return server


HAPROXY = shutil.which(os.environ.get("TOLLGATE_HAPROXY", "haproxy"))


@unittest.skipUnless(HAPROXY, "no haproxy, and TOLLGATE_HAPROXY names none")
class Haproxy(Proxy, unittest.TestCase):
    def start(self):
        port = free_port()
        service = {"127.0.0.1:8080": f"127.0.0.1:{self.service.http}"}
        lua = self.servers.example("haproxy.lua", service | PATIENT["haproxy.lua"])
        texts = {
            "127.0.0.1:10082": f"127.0.0.1:{port}",
            "127.0.0.1:8000": f"127.0.0.1:{self.application.port}",
            "lua-load haproxy.lua": f"nbthread 1\n    lua-load {self.servers.write('haproxy.lua', lua)}",
        }
        config = self.servers.write("haproxy.cfg", self.servers.example("haproxy.cfg", texts))
        server = self.servers.start("haproxy", [HAPROXY, "-db", "-f", config], port)
        server.port = port
        return server


class Examples(unittest.TestCase):
    def test_the_rules_of_the_example(self):
        with Servers() as servers:
            service = servers.service(EXAMPLES / "proxy-rules.toml", servers.redis(), "--deadline", "1s")
            fields = {"X-Forwarded-Uri": "/login", "X-Forwarded-Method": "POST", "X-Forwarded-For": "192.0.2.1"}
            answers = [get(service.http, "/v1/forward-auth", fields)[0] for _ in range(11)]
            self.assertEqual(answers, [200] * 10 + [429])


if __name__ == "__main__":
    unittest.main()
