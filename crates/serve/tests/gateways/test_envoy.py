"""Envoy with examples/envoy.yaml: exact limits over several services, faults, and details of the protocol."""

import pathlib
import re
import signal
import subprocess
import textwrap
import time
import unittest

from load import Load, basic, get, wrk
from servers import EXAMPLES, Servers, found

# Long enough that a busy machine doesn't decide.
PATIENT = {"timeout: 0.020s": "timeout: 2s"}
DENY = {"failure_mode_deny: false": "failure_mode_deny: true"}


def rules(limit, on_error="closed"):
    return f"""
        [[rule]]
        name = "users"
        match = {{ domain = "shop", route = "api", user = "*" }}
        key = "user"
        limits = ["{limit}"]
        on_error = "{on_error}"
    """


class Envoy(unittest.TestCase):
    def setUp(self):
        self.servers = self.enterContext(Servers())
        self.redis, self.application = self.servers.redis(), self.servers.application()

    def services(self, text, *options):
        path = self.servers.write("rules.toml", text)
        return [self.servers.service(path, self.redis, *options, name=name) for name in ("first", "second")]

    def log(self, name):
        return (self.servers.dir / f"{name}.log").read_text()

    def test_the_example_as_it_is(self):
        service = self.servers.service(EXAMPLES / "envoy-rules.toml", self.redis, "--deadline", "1s")
        envoy = self.servers.envoy(self.application, [service], PATIENT)
        self.assertEqual(get(envoy.port, "/")[0], 401)
        # A client can't say who it is.
        status, fields, body = get(envoy.port, "/", {**basic("alice"), "x-user": "eve"})
        self.assertEqual((status, body.split()[0]), (200, "user=alice"))
        self.assertEqual(fields["ratelimit-policy"], '"users";q=600;w=60')
        self.assertEqual(fields["ratelimit"], '"users";r=99')
        answers = [get(envoy.port, "/login", {"x-forwarded-for": f"192.0.2.{turn}"}) for turn in range(11)]
        self.assertEqual([status for status, _, _ in answers], [200] * 10 + [429])
        denied = answers[-1][1]
        self.assertIn(int(denied["retry-after"]), range(80, 91))
        self.assertEqual(denied["ratelimit"], f'"login";r=0;t={denied["retry-after"]}')
        self.assertEqual(denied["x-envoy-ratelimited"], "true")
        time.sleep(0.2)
        envoy.stop()
        self.assertIn("GET /login 429 request_rate_limited rule=login reason=limits", self.log("envoy"))

    def test_two_services_admit_exactly_the_limit(self):
        services = self.services(rules("fixed-window 500/7d"), "--deadline", "1s")
        envoy = self.servers.envoy(self.application, services, PATIENT | DENY)
        load = Load(envoy.port, headers=basic("alice"), requests=1500).wait()
        self.assertEqual(load.counts(), {200: 500, 429: 1000})
        print(f"\n1,500 requests, limit 500: {load.counts()}, p50 {load.milliseconds(0.5)} ms,",
              f"p99 {load.milliseconds(0.99)} ms")
        # Both were asked.
        self.assertTrue(all("tollgate_decisions_total" in get(one.metrics, "/metrics")[2] for one in services))

    def test_wrk_gets_the_limit_through_envoy(self):
        services = self.services(rules("fixed-window 1000/7d"), "--deadline", "1s")
        envoy = self.servers.envoy(self.application, services, PATIENT | DENY)
        header = "authorization: " + basic("alice")["authorization"]
        answers, refused = wrk(f"http://127.0.0.1:{envoy.port}/", "--header", header)
        # nginx's own count, of which this question is one.
        status = get(self.application.ports[0], "/status")[2]
        passed = int(status.splitlines()[2].split()[2]) - 1
        print(f"\nwrk through Envoy, limit 1,000: {answers} answers, {refused} refused, {passed} at the application")
        self.assertEqual(passed, 1000)
        # What was on its way when wrk stopped has no answer.
        self.assertIn(answers - refused, range(1000 - 32, 1001))
        self.assertGreater(refused, 100)
        self.assertEqual(self.outcomes(services, "envoy").get("allowed"), 1000)

    def test_wrk_gets_the_limit_by_json(self):
        services = self.services(rules("fixed-window 1000/7d"), "--deadline", "1s")
        body = '{"attributes": {"domain": "shop", "route": "api", "user": "alice"}}'
        script = self.servers.write("post.lua", f"wrk.method = 'POST' wrk.body = '{body}'")
        answers, refused = wrk(f"http://127.0.0.1:{services[0].http}/v1/decide", "--script", str(script))
        outcomes = self.outcomes(services, "json")
        print(f"\nwrk by JSON, limit 1,000: {answers} answers, {refused} refused, {outcomes} by the service's count")
        self.assertIn(answers - refused, range(1000 - 32, 1001))
        self.assertEqual((outcomes["allowed"], set(outcomes)), (1000, {"allowed", "denied"}))

    def until_healthy(self, envoy, service):
        """Until Envoy's health check has found the service."""
        end = time.monotonic() + 30
        while f"127.0.0.1:{service.grpc}::health_flags::healthy" not in get(envoy.admin, "/clusters")[2]:
            self.assertLess(time.monotonic(), end, get(envoy.admin, "/clusters")[2])
            time.sleep(0.1)

    def outcomes(self, services, protocol):
        """How many requests each outcome had, by the services' metrics."""
        counts = {}
        for service in services:
            pattern = f'tollgate_serve_requests_total{{protocol="{protocol}",outcome="(.*)"}} (.*)'
            for outcome, count in re.findall(pattern, get(service.metrics, "/metrics")[2]):
                counts[outcome] = counts.get(outcome, 0) + int(count)
        return counts

    def test_certificates_that_are_rotated_under_load(self):
        authority = self.certificate("authority", "-x509", "-addext", "basicConstraints=critical,CA:TRUE")
        self.certificate("service", "-x509", "-CA", authority, "-CAkey", authority.with_suffix(".key"))
        options = ["--deadline", "1s", "--cert", self.servers.dir / "service.pem"]
        options += ["--key", self.servers.dir / "service.key"]
        services = self.services(rules("fixed-window 500/7d"), *options)
        plain = "      connect_timeout: 0.25s\n"
        tls = f"""
            transport_socket:
              name: envoy.transport_sockets.tls
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
                sni: tollgate
                common_tls_context:
                  validation_context:
                    trusted_ca: {{ filename: {authority} }}
                    match_typed_subject_alt_names: [ {{ san_type: DNS, matcher: {{ exact: tollgate }} }} ]
        """
        tls = textwrap.indent(textwrap.dedent(tls).lstrip("\n"), " " * 6)
        envoy = self.servers.envoy(self.application, services, PATIENT | DENY | {plain: plain + tls})
        before = self.serial(services[0])
        load = Load(envoy.port, headers=basic("alice"), seconds=3, pause=0.005)
        time.sleep(1)
        self.certificate("service", "-x509", "-CA", authority, "-CAkey", authority.with_suffix(".key"))
        for service in services:
            service.process.send_signal(signal.SIGHUP)
        load.wait()
        print(f"\ncertificates replaced after 1 s:\n{load.table()}")
        self.assertEqual((load.counts()[200], set(load.counts())), (500, {200, 429}))
        self.assertNotEqual(self.serial(services[0]), before)

    def certificate(self, name, *options):
        """A new key and a certificate for it, in files of this name."""
        path = pathlib.Path(self.servers.dir / f"{name}.pem")
        command = [found("openssl"), "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:tollgate", "-days", "2", *options]
        command += ["-keyout", path.with_suffix(".key"), "-out", path]
        subprocess.run([str(part) for part in command], check=True, capture_output=True)
        return path

    def serial(self, service):
        """Of the certificate that the service shows now."""
        shown = [found("openssl"), "s_client", "-connect", f"127.0.0.1:{service.grpc}", "-alpn", "h2"]
        text = subprocess.run(shown, input=b"", capture_output=True, timeout=10).stdout
        read = subprocess.run([found("openssl"), "x509", "-noout", "-serial"], input=text, capture_output=True)
        return read.stdout

    def test_while_redis_is_down(self):
        services = self.services(rules("fixed-window 20/7d"), "--deadline", "1s")
        lets_pass = self.servers.envoy(self.application, services, PATIENT, name="lets-pass")
        denies = self.servers.envoy(self.application, services, PATIENT | DENY, name="denies")
        Load(denies.port, headers=basic("alice"), requests=60, clients=1).wait()
        self.redis.stop(signal.SIGKILL)
        self.assertEqual(Load(denies.port, headers=basic("alice"), requests=100).wait().counts(), {503: 100})
        self.assertEqual(Load(lets_pass.port, headers=basic("alice"), requests=100).wait().counts(), {200: 100})
        # What was counted is lost with this Redis, which keeps nothing.
        self.redis.start()
        end = time.monotonic() + 10
        while get(denies.port, "/", basic("bob"))[0] != 200 and time.monotonic() < end:
            time.sleep(0.05)
        counts = Load(denies.port, headers=basic("alice"), requests=60, clients=1, pause=0.005).wait().counts()
        self.assertLessEqual(counts.get(200, 0), 20)
        self.assertGreaterEqual(counts.get(429, 0), 30)

    def test_a_rule_that_is_open_admits_while_redis_is_down(self):
        services = self.services(rules("fixed-window 20/7d", on_error="open"), "--deadline", "1s")
        denies = self.servers.envoy(self.application, services, PATIENT | DENY)
        self.redis.stop(signal.SIGKILL)
        self.assertEqual(Load(denies.port, headers=basic("alice"), requests=200).wait().counts(), {200: 200})

    def test_a_service_that_is_killed_and_started_again(self):
        # It is gone at once, and nothing else must fail for want of time.
        services = self.services(rules("fixed-window 800/7d"), "--deadline", "1s")
        envoy = self.servers.envoy(self.application, services, PATIENT | DENY)
        load = Load(envoy.port, headers=basic("alice"), seconds=6, pause=0.02)
        time.sleep(1)
        services[0].stop(signal.SIGKILL)
        time.sleep(2)
        services[0].start()
        load.wait()
        counts = load.counts()
        print(f"\na service killed after 1 s, started again after 3 s:\n{load.table()}")
        self.assertLessEqual(counts[200], 800)
        # What a killed service had decided is charged, and a few requests fail until Envoy asks the other one only.
        self.assertLess(counts.get(503, 0), len(load.answers) / 10)
        self.assertEqual(set(counts) - {200, 429, 503}, set())

    def test_services_that_are_restarted_in_turn(self):
        services = self.services(rules("fixed-window 800/7d"), "--deadline", "1s", "--drain", "3s")
        envoy = self.servers.envoy(self.application, services, PATIENT | DENY)
        load = Load(envoy.port, headers=basic("alice"), seconds=60, pause=0.02)
        time.sleep(1)
        for service in services:
            service.stop()
            service.start()
            self.until_healthy(envoy, service)
        load.end = time.monotonic()
        load.wait()
        print(f"\nthe services restarted in turn, each drained for 3 s:\n{load.table(2)}")
        self.assertEqual((load.counts()[200], set(load.counts())), (800, {200, 429}))

    def test_rules_that_change_under_load(self):
        services = self.services(rules("fixed-window 100000/7d"), "--deadline", "1s")
        envoy = self.servers.envoy(self.application, services, PATIENT | DENY)
        load = Load(envoy.port, headers=basic("alice"), seconds=4.5, pause=0.02)
        time.sleep(1)
        self.servers.write("rules.toml", rules("fixed-window 1/7d"))
        time.sleep(2)
        self.servers.write("rules.toml", "[[rule]]\nname = 1")
        load.wait()
        print(f"\nthe limit lowered to 1 after 1 s, a bad file after 3 s:\n{load.table()}")
        self.assertEqual(set(load.counts()), {200, 429})
        self.assertEqual({status for at, status, _ in load.answers if at < 1}, {200})
        self.assertEqual({status for at, status, _ in load.answers if at > 2.6}, {429})

    def test_units_and_limits_of_a_descriptor(self):
        # Envoy takes hits_addend from typed_per_filter_config alone, and leaves out a descriptor whose units it can't
        # read.
        routes = {
            "/four": ("units", "hits_addend: { number: 4 }"),
            "/none": ("units", "hits_addend: { number: 0 }"),
            "/back": ("units", "hits_addend: { number: 3, is_negative_hits: true }"),
            "/after": ("units", "hits_addend: { format: '%BYTES_SENT%' }, apply_on_stream_done: true"),
            "/own": ("own", "limit: { dynamic_metadata: { metadata_key: { key: own, path: [ { key: limit } ] } } }"),
            "/zero": ("own", "limit: { dynamic_metadata: { metadata_key: { key: own, path: [ { key: none } ] } } }"),
        }
        first = "                        - match: { path: /login }\n"
        added = "".join(self.route(path, *route) for path, route in routes.items())
        filters = "                  - name: envoy.filters.http.basic_auth\n"
        metadata = """
            - name: own
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config
                metadata:
                  - metadata_namespace: own
                    value:
                      limit: { requests_per_unit: 3, unit: HOUR }
                      none: { requests_per_unit: 0, unit: HOUR }
            - name: units
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.http.set_filter_state.v3.Config
                on_request_headers:
                  - object_key: envoy.ratelimit.hits_addend
                    format_string: { text_format_source: { inline_string: "%REQ(x-units)%" } }
                    skip_if_empty: true
        """
        metadata = textwrap.indent(textwrap.dedent(metadata).lstrip("\n"), " " * 18)
        domain = "                      domain: shop\n"
        text = """
            [[rule]]
            name = "units"
            match = { route = "units" }
            key = "route"
            limits = ["fixed-window 100/7d"]
            [[rule]]
            name = "own"
            match = { route = "own" }
            key = "route"
            limits = ["fixed-window 100/7d"]
            [[rule]]
            name = "users"
            match = { user = "*" }
            key = "user"
            limits = ["fixed-window 100/7d"]
        """
        services = self.services(text, "--deadline", "1s")
        texts = {first: added + first, filters: metadata + filters}
        texts[domain] = domain + domain.replace("domain: shop", "enable_x_ratelimit_headers: DRAFT_VERSION_03")
        envoy = self.servers.envoy(self.application, services, PATIENT | DENY | texts)

        def left(path, headers=None):
            status, fields, _ = get(envoy.port, path, headers)
            self.assertEqual(status, 200, path)
            return int(fields["ratelimit"].split(";")[1].removeprefix("r="))

        self.assertEqual([left("/four"), left("/four")], [96, 92])
        self.assertEqual(left("/none"), 92)
        self.assertEqual(left("/back"), 95)
        self.assertEqual(get(envoy.port, "/after")[0], 200)
        time.sleep(0.3)
        self.assertLess(left("/none"), 95)
        self.assertEqual(left("/", basic("alice") | {"x-units": "40"}), 60)
        self.assertEqual(get(envoy.port, "/", basic("alice") | {"x-units": "61"})[0], 429)
        self.assertEqual(left("/", basic("alice") | {"x-units": "60"}), 0)
        self.assertEqual([get(envoy.port, "/own")[0] for _ in range(4)], [200] * 3 + [429])
        self.assertEqual(get(envoy.port, "/zero")[0], 429)
        # Envoy's own fields beside the service's.
        fields = get(envoy.port, "/none")[1]
        self.assertEqual(fields["x-ratelimit-limit"].split(",")[0], "100")
        self.assertEqual("r=" + fields["x-ratelimit-remaining"], fields["ratelimit"].split(";")[1])

    def route(self, path, name, more):
        text = f"""
            - match: {{ path: {path} }}
              route: {{ cluster: application }}
              typed_per_filter_config:
                envoy.filters.http.basic_auth:
                  "@type": type.googleapis.com/envoy.config.route.v3.FilterConfig
                  disabled: true
                envoy.filters.http.ratelimit:
                  "@type": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimitPerRoute
                  rate_limits:
                    - {{ actions: [ generic_key: {{ descriptor_key: route, descriptor_value: {name} }} ], {more} }}
        """
        return textwrap.indent(textwrap.dedent(text).lstrip("\n"), " " * 24)


if __name__ == "__main__":
    unittest.main()
