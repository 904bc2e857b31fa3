"""compose.yaml: by the schema of compose files, and its commands and health checks on loopback."""

import os
import re
import signal
import subprocess
import sys
import time
import unittest

import yaml

from load import basic, get
from servers import EXAMPLES, Servers, found, free_port, needed

ROOT = EXAMPLES.parents[2]
FILE = EXAMPLES / "compose.yaml"


def services():
    return yaml.safe_load(FILE.read_text())["services"]


class Compose(unittest.TestCase):
    def test_it_fits_the_schema(self):
        for file in FILE, ROOT / "examples/compose.yaml":
            command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "compose-spec", str(file)]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            self.assertEqual(ran.returncode, 0, ran.stdout + ran.stderr)

    def test_what_it_names_is_there(self):
        file, one = yaml.safe_load(FILE.read_text()), services()
        context = (EXAMPLES / one["tollgate"]["build"]["context"]).resolve()
        self.assertEqual(context, ROOT)
        self.assertTrue((context / one["tollgate"]["build"]["dockerfile"]).is_file())
        for name, service in one.items():
            self.assertEqual(service["restart"], "unless-stopped", name)
            for wanted, how in service.get("depends_on", {}).items():
                healthy = how["condition"] == "service_healthy"
                self.assertEqual(healthy, "healthcheck" in one[wanted], f"{name} waits for {wanted}")
            for volume in service.get("volumes", []):
                source = volume.split(":")[0]
                there = source in file["volumes"] or (source.startswith(".") and (EXAMPLES / source).exists())
                self.assertTrue(there, volume)
            # Open on this machine alone.
            self.assertTrue(all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name)

    def test_its_processes(self):
        one = services()
        with Servers() as servers:
            # Redis, by its command.
            redis = free_port()
            command = one["redis"]["command"].split()
            self.assertEqual(command[0], "redis-server")
            here = {"/etc/redis.conf": ROOT / "examples/redis.conf", "0.0.0.0": "127.0.0.1", "/data": servers.dir}
            self.assertLessEqual(here.keys(), set(command))
            command = [here.get(part, part) for part in command[1:]]
            redis_server = servers.start("redis", [found("redis-server"), *command, "--port", redis], redis)
            check = one["redis"]["healthcheck"]["test"]
            self.assertEqual(check[:2], ["CMD", "redis-cli"])
            check = [found("redis-cli"), "-p", str(redis), *check[2:]]

            def redis_is_healthy():
                return subprocess.run(check, capture_output=True, timeout=5, check=False).returncode == 0

            self.assertTrue(redis_is_healthy())

            # The service, by its command and environment.
            ports = {name: free_port() for name in ("GRPC", "HTTP", "METRICS")}
            env = dict(one["tollgate"]["environment"])
            self.assertEqual(env["TOLLGATE_URL"], "redis://redis:6379")
            env["TOLLGATE_URL"] = f"redis://127.0.0.1:{redis}"
            for name, port in (("GRPC", 8081), ("HTTP", 8080), ("METRICS", 9090)):
                self.assertEqual(env[f"TOLLGATE_SERVE_{name}"], f"0.0.0.0:{port}")
                env[f"TOLLGATE_SERVE_{name}"] = f"127.0.0.1:{ports[name]}"
            # Patient, as Envoy below: a busy machine doesn't decide.
            here = {"/etc/tollgate/envoy-rules.toml": EXAMPLES / "envoy-rules.toml", "10ms": "1s"}
            options = [here.get(part, part) for part in one["tollgate"]["command"]]
            program = needed("TOLLGATE_SERVE", "tollgate-serve")
            command = ["env", *(f"{name}={value}" for name, value in env.items()), program, *options]
            service = servers.start("tollgate", command, *ports.values())
            self.assertTrue(self.healthy(one["tollgate"], 9090, ports["METRICS"]))

            # Envoy, by its command, with the names of the network on loopback.
            application, envoy, admin = servers.application(), free_port(), free_port()
            config = servers.example(
                "envoy.yaml", {"port_value: 9901": f"port_value: {admin}", "timeout: 0.020s": "timeout: 2s"}
            )
            servers.write("example.yaml", config)
            [command] = one["envoy"]["command"]
            program = f"{needed('TOLLGATE_ENVOY', 'envoy')} --concurrency 1 --disable-hot-restart --log-level warning"
            for old, new in {
                "/0.0.0.0, port_value: 10000/": f"/127.0.0.1, port_value: {envoy}/",
                "/application, port_value: 8000/": f"/localhost, port_value: {application.port}/",
                "/tollgate, port_value: 8081/": f"/localhost, port_value: {ports['GRPC']}/",
                "/etc/tollgate/envoy.yaml": str(servers.dir / "example.yaml"),
                "/tmp/envoy.yaml": str(servers.dir / "envoy.yaml"),
                "exec envoy": f"exec {program}",
            }.items():
                self.assertIn(old, command)
                command = command.replace(old, new)
            self.assertEqual(one["envoy"]["entrypoint"], ["sh", "-c"])
            servers.start("envoy", ["sh", "-c", command], envoy)
            self.assertTrue(self.healthy(one["envoy"], 9901, admin))
            self.assertEqual(get(envoy, "/")[0], 401)
            status, fields, body = get(envoy, "/", basic("alice"))
            self.assertEqual((status, body.split()[0]), (200, "user=alice"))
            self.assertEqual(fields["ratelimit"], '"users";r=99')
            answers = [get(envoy, "/login")[0] for _ in range(11)]
            self.assertEqual(answers, [200] * 10 + [429])

            # Redis away: its check and the service's say so, and Envoy's doesn't.
            redis_server.stop(signal.SIGKILL)
            self.assertFalse(redis_is_healthy())
            self.assertFalse(self.healthy(one["tollgate"], 9090, ports["METRICS"]))
            self.assertTrue(self.healthy(one["envoy"], 9901, admin))
            redis_server.start()
            end = time.monotonic() + 10
            while not self.healthy(one["tollgate"], 9090, ports["METRICS"]) and time.monotonic() < end:
                time.sleep(0.1)
            self.assertTrue(self.healthy(one["tollgate"], 9090, ports["METRICS"]))
            service.stop()
            self.assertFalse(self.healthy(one["tollgate"], 9090, ports["METRICS"]))

    def healthy(self, service, port, at):
        """What a service's health check says, with its port at another one. Compose reads $$ as $."""
        kind, *command = [part.replace("$$", "$") for part in service["healthcheck"]["test"]]
        self.assertEqual((kind, command[:2]), ("CMD", ["bash", "-c"]))
        self.assertIn(f"/127.0.0.1/{port} ", command[2])
        self.assertNotIn("$", re.sub(r"\$status", "", command[2]))
        command[2] = command[2].replace(f"/{port} ", f"/{at} ")
        ran = subprocess.run(command, capture_output=True, timeout=5, env={"PATH": os.environ["PATH"]}, check=False)
        return ran.returncode == 0

    def test_envoy_accepts_what_it_is_given(self):
        """With the names as they are: nothing is looked up."""
        [command] = services()["envoy"]["command"]
        with Servers() as servers:
            made = servers.dir / "envoy.yaml"
            command = command.replace("/etc/tollgate", str(EXAMPLES)).replace("/tmp/envoy.yaml", str(made))
            command = command.replace("exec envoy", f"exec {needed('TOLLGATE_ENVOY', 'envoy')} --mode validate")
            ran = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
            self.assertEqual(ran.returncode, 0, ran.stdout + ran.stderr)
            text = made.read_text()
            for address in "0.0.0.0, port_value: 10000", "application, port_value: 8000", "tollgate, port_value: 8081":
                self.assertEqual(text.count(address), 1, address)
            # The administration stays out of reach.
            self.assertEqual(re.findall(r"address: (127\S+), port_value: (\d+)", text), [("127.0.0.1", "9901")])


if __name__ == "__main__":
    unittest.main()
