"""kubernetes.yaml and the chart: as Helm renders it, by Kubernetes' schemas, and by what the service reads of it."""

import copy
import json
import pathlib
import re
import subprocess
import tempfile
import unittest

import certifi
import kubernetes_validate
import yaml
from cloudcoil.models.prometheus_operator.v1 import ServiceMonitor

from load import get
from servers import EXAMPLES, Servers, free_port, needed

HERE = pathlib.Path(__file__).resolve().parent
CHART = EXAMPLES / "chart"
EVERYTHING = ["--values", HERE / "everything.yaml"]
# The first that has what the manifests use, and the newest whose schema there is.
KUBERNETES = ["1.30", "1.37"]
# Values that are enough by themselves for rules of the database.
DATABASE = "rules=,env[0].name=TOLLGATE_DATABASE,env[0].value=postgres://record"
# What the chart makes only if values say so.
OPTIONAL = {"Secret", "HorizontalPodAutoscaler", "NetworkPolicy", "ServiceMonitor"}


def helm(*arguments):
    command = [needed("TOLLGATE_HELM", "helm"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def rendered(*arguments, release="tollgate"):
    """The chart's manifests by kind, of which it has one each."""
    ran = helm("template", release, CHART, "--kube-version", KUBERNETES[-1], *arguments)
    if ran.returncode:
        raise AssertionError(ran.stderr)
    return by_kind(ran.stdout)


def by_kind(text):
    documents = [document for document in yaml.safe_load_all(text) if document]
    found = {document["kind"]: document for document in documents}
    if len(found) != len(documents):
        raise AssertionError(f"a kind comes twice:\n{text}")
    return found


def container(manifests):
    return manifests["Deployment"]["spec"]["template"]["spec"]["containers"][0]


def values():
    return yaml.safe_load((CHART / "values.yaml").read_text())


class Valid(unittest.TestCase):
    def hold(self, manifests):
        for kind, document in manifests.items():
            if kind == "ServiceMonitor":
                # What the model doesn't know would be lost.
                kept = ServiceMonitor.model_validate(document).model_dump(by_alias=True, exclude_none=True, mode="json")
                self.assertEqual(kept, document)
                continue
            for version in KUBERNETES:
                kubernetes_validate.validate(document, version, strict=True)

    def test_the_manifests(self):
        self.hold(by_kind((EXAMPLES / "kubernetes.yaml").read_text()))

    def test_the_chart_as_it_is_and_with_everything(self):
        for arguments, more in ([], set()), (EVERYTHING, OPTIONAL):
            ran = helm("lint", "--strict", CHART, *arguments)
            self.assertEqual(ran.returncode, 0, ran.stdout + ran.stderr)
            manifests = rendered(*arguments)
            self.assertEqual(set(manifests), {"ConfigMap", "Deployment", "PodDisruptionBudget", "Service"} | more)
            self.hold(manifests)

    def test_each_value_by_itself(self):
        everything = yaml.safe_load((HERE / "everything.yaml").read_text())
        for name, value in everything.items():
            with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
                yaml.safe_dump({name: value}, file)
                file.flush()
                self.hold(rendered("--values", file.name))
        for off in "podDisruptionBudget.enabled=false", DATABASE, "existingRules=own,tokens.existingSecret=own":
            self.hold(rendered("--set", off))

    def test_what_this_would_find(self):
        manifests = rendered(*EVERYTHING)
        for kind, spoil in [
            ("Deployment", lambda spec: spec["template"]["spec"]["containers"][0].update(lifecicle={})),
            ("Service", lambda spec: spec["ports"][0].update(port="grpc")),
            ("ServiceMonitor", lambda spec: spec["endpoints"][0].update(intervall="1s")),
        ]:
            spoiled = copy.deepcopy(manifests[kind])
            spoil(spoiled["spec"])
            with self.assertRaises(Exception, msg=kind):
                self.hold({kind: spoiled})


class Chart(unittest.TestCase):
    def test_by_its_default_values_it_is_the_plain_manifests(self):
        plain = by_kind((EXAMPLES / "kubernetes.yaml").read_text())

        def strip(part):
            """Without the labels that tell releases apart."""
            if isinstance(part, list):
                return [strip(item) for item in part]
            if not isinstance(part, dict):
                return part
            drop = re.compile(r"helm\.sh/chart|app\.kubernetes\.io/(instance|version|managed-by)")
            return {name: strip(value) for name, value in part.items() if not drop.fullmatch(name)}

        self.assertEqual(strip(rendered()), plain)

    def test_two_releases_have_nothing_in_common(self):
        first, second = rendered(*EVERYTHING, release="first"), rendered(*EVERYTHING, release="second")
        for kind in first:
            self.assertNotEqual(first[kind]["metadata"]["name"], second[kind]["metadata"]["name"], kind)
        labels = [one["Deployment"]["spec"]["template"]["metadata"]["labels"] for one in (first, second)]
        for kind in "Service", "PodDisruptionBudget", "Deployment", "NetworkPolicy", "ServiceMonitor":
            selector = first[kind]["spec"]["podSelector" if kind == "NetworkPolicy" else "selector"]
            selector = (selector.get("matchLabels") or selector).items()
            # A Service's labels are what its monitor selects by.
            of = first["Service"]["metadata"]["labels"] if kind == "ServiceMonitor" else labels[0]
            self.assertLessEqual(selector, of.items(), kind)
            self.assertFalse(selector <= labels[1].items(), kind)

    def test_its_names(self):
        """63 characters at most, by RFC 1035, as a Service's must be."""
        for release, name, whole, expected in [
            ("tollgate", "", "", "tollgate"),
            ("shop-tollgate", "", "", "shop-tollgate"),
            ("shop", "", "", "shop-tollgate"),
            ("shop", "limits", "", "shop-limits"),
            ("my-limits", "limits", "", "my-limits"),
            ("shop", "", "limiter", "limiter"),
            ("1st", "limits", "limiter", "limiter"),
            ("a" * 53, "b" * 63, "", f"{'a' * 53}-{'b' * 9}"),
            # Cut where a dash would be the last.
            ("a" * 53, f"{'b' * 8}-c", "", f"{'a' * 53}-{'b' * 8}"),
        ]:
            overrides = f"nameOverride={name},fullnameOverride={whole}"
            manifests = rendered(*EVERYTHING, "--set", overrides, release=release)
            endings = {"ConfigMap": "-rules", "Secret": "-own-1000000"}
            for kind, document in manifests.items():
                metadata = document["metadata"]
                self.assertEqual(metadata["name"], expected + endings.get(kind, ""), overrides)
                self.assertEqual(metadata["labels"]["app.kubernetes.io/name"], name or "tollgate")
                self.assertEqual(metadata["labels"]["app.kubernetes.io/instance"], release)
            autoscaler = manifests["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
            self.assertEqual(autoscaler["name"], manifests["Deployment"]["metadata"]["name"])
        for release, override in [
            ("1st", ""),
            ("a.b", ""),
            ("shop", "nameOverride=Limits"),
            ("shop", "fullnameOverride=1st"),
            ("shop", "fullnameOverride=a.b"),
            ("shop", "fullnameOverride=limits-"),
            ("shop", f"fullnameOverride={'b' * 64}"),
        ]:
            ran = helm("template", release, CHART, "--set", override)
            self.assertNotEqual(ran.returncode, 0, (release, override))
            self.assertIn(override.partition("=")[0] or "fullnameOverride", ran.stderr)

    def test_names_within_it_agree(self):
        own = ["--set", "existingRules=own,tokens.existingSecret=own,redis.existingSecret=own"]
        for arguments in [], EVERYTHING, own:
            manifests = rendered(*arguments)
            one = container(manifests)
            there = {manifests[kind]["metadata"]["name"] for kind in ("ConfigMap", "Secret") if kind in manifests}
            spec = manifests["Deployment"]["spec"]["template"]["spec"]
            named = {
                (volume.get("configMap") or {}).get("name") or volume["secret"]["secretName"]
                for volume in spec.get("volumes", [])
            } | {
                variable["valueFrom"]["secretKeyRef"]["name"]
                for variable in one["env"]
                if "valueFrom" in variable
            }
            outside = {"tollgate", "own", "ports", "redis-ca", "redis-client"}
            self.assertEqual(named - there - outside, set(), arguments)
            # Nothing is made that nobody reads.
            self.assertEqual(there - named, set(), arguments)
            folders = [mount["mountPath"] for mount in one["volumeMounts"]]
            files = [variable.get("value", "") for variable in one["env"]] + one["args"]
            read = {str(pathlib.PurePath(file).parent) for file in files if file.startswith("/")}
            self.assertEqual(read, set(folders), arguments)

    def test_pods_restart_by_what_is_read_at_the_start_alone(self):
        def template(*arguments):
            return rendered(*EVERYTHING, *arguments)["Deployment"]["spec"]["template"]

        now = template()
        self.assertEqual(now, template("--set", "rules=[[rule]]"))
        self.assertNotEqual(now, template("--set", "secretVersion=1000001"))
        own = [f"redis.existingSecret={name},redis.url=,tokens.existingSecret={name},tokens.list=null" for name in "ab"]
        self.assertNotEqual(*[template("--set", each) for each in own])

    def test_secrets_are_in_their_secret_alone(self):
        """Not in a hash either, which guesses could be compared with."""
        now, other = rendered(*EVERYTHING), rendered(*EVERYTHING, "--set", "redis.url=rediss://b,tokens.list={third}")
        secrets = [manifests.pop("Secret") for manifests in (now, other)]
        self.assertEqual(now, other)
        contents = [secret.pop("stringData") for secret in secrets]
        self.assertEqual(*secrets)
        self.assertEqual(contents[1], {"url": "rediss://b", "tokens": "third"})
        # So a change without another version is an error, and no pod goes on by what was there before.
        self.assertIs(secrets[0]["immutable"], True)

    def test_who_reaches_its_ports(self):
        policy = rendered("--set", "networkPolicy.enabled=true")["NetworkPolicy"]["spec"]
        # Egress isn't among the types, so it stays as it is.
        self.assertEqual(policy["policyTypes"], ["Ingress"])
        # All pods of the namespace, for the metrics nobody.
        self.assertEqual([rule["from"] for rule in policy["ingress"]], [[{"podSelector": {}}]])
        manifests = rendered(*EVERYTHING)
        expected = yaml.safe_load((HERE / "everything.yaml").read_text())["networkPolicy"]
        policy = manifests["NetworkPolicy"]["spec"]
        self.assertEqual([rule["from"] for rule in policy["ingress"]], [expected["from"], expected["metricsFrom"]])
        ports = {port["name"]: port["containerPort"] for port in container(manifests)["ports"]}
        opened = [[(port["protocol"], port["port"]) for port in rule["ports"]] for rule in policy["ingress"]]
        self.assertEqual(opened, [[("TCP", ports["grpc"]), ("TCP", ports["http"])], [("TCP", ports["metrics"])]])

    def test_values_that_are_refused(self):
        for wrong in [
            "replica=3",
            "redis.adress=redis://a",
            "redis.url=unix:///redis.sock",
            "redis.url=redis.example:6379",
            "image.tag=",
            "tokens.list={two words}",
            "podDisruptionBudget.maxUnavailable=some",
            "podDisruptionBudget.maxUnavailable=101%",
            "replicas=-1",
            "env[0].value=1",
            "env[0].name=A,env[0].value=1",
            "env[0].name=A,env[0].valueFrom.secretKeyReff.name=a",
            "resources.limits.memory=64Mb",
            "resources.limits.memori=64Mi",
            "tolerations[0].efect=NoSchedule",
            "imagePullSecrets={registry}",
            "autoscaling.minReplicas=0",
            "serviceMonitor.interval=soon",
            "tlsSecret=A_Name",
            "secretVersion=0",
            "secretVersion=2026-11-30",
            "networkPolicy.from=null",
            "networkPolicy.from[0].podSelektor.matchLabels.app=envoy",
            "networkPolicy.from[0].podSelector=null",
            "networkPolicy.metricsFrom[0].ipBlock.cidr=10.0.0.1",
        ]:
            ran = helm("template", "tollgate", CHART, "--set", wrong)
            self.assertNotEqual(ran.returncode, 0, wrong)
            self.assertIn(re.match(r"\w+", wrong)[0], ran.stderr)

    def test_names_that_no_value_has(self):
        """At any depth. Names of others' own, such as labels, are free."""
        free = {"service.annotations", "serviceMonitor.labels", "podAnnotations", "nodeSelector"}

        def objects(value, path=""):
            if isinstance(value, dict) and path not in free:
                yield path
                for name, inner in value.items():
                    yield from objects(inner, f"{path}.{name}".lstrip("."))

        paths = list(objects(values()))
        self.assertIn("resources.limits", paths)
        for path in paths:
            ran = helm("template", "tollgate", CHART, "--set", f"{path}.mistyped=1".lstrip("."))
            self.assertNotEqual(ran.returncode, 0, path)
            self.assertIn("'mistyped'", ran.stderr, path)

    def test_values_that_cannot_work_together(self):
        database = DATABASE.removeprefix("rules=,")
        for wrong, message in [
            ("rules=", "rules: expected at least one [[rule]], or existingRules, or TOLLGATE_DATABASE in env"),
            ("rules=# none", "rules: expected at least one [[rule]]"),
            (database, 'rules: expected "" with a database'),
            ("options={--database=postgres://record}", 'rules: expected "" with a database'),
            (f"{DATABASE},existingRules=own", 'existingRules: expected "" with a database'),
            ("redis.existingSecret=", "redis.url: expected an address, or redis.existingSecret, got neither"),
            ("redis.url=redis://:secret@a,redis.caSecret=ca", "redis.url: expected rediss://... with redis.caSecret"),
            ("redis.url=redis-cluster://a,redis.clientSecret=one", "redis.url: expected rediss://..."),
            ("tokens.list={one},tokens.existingSecret=two", "tokens: expected list or existingSecret, got both"),
            ("options={--deadline,1s,--deadline=2s}", "options: expected each once, got --deadline twice"),
            ("options={--check}", "options: expected none that the chart sets, got --check"),
            ("options={-uredis://:secret@there}", "options: expected none that the chart sets, got -u (instead: redis)"),
            ("options={--grpc=off}", "options: expected none that the chart sets, got --grpc"),
            ("options={--drain=40s}", "options: expected none that the chart sets, got --drain"),
            ("options={--cert,/cert.pem}", "got --cert (instead: tlsSecret)"),
            ("env[0].name=TOLLGATE_URL", "env: expected none that the chart sets, got TOLLGATE_URL (instead: redis)"),
            ("env[0].name=A,env[1].name=A", "env: expected each name once, got A twice"),
            ("autoscaling.enabled=true,autoscaling.minReplicas=11", "autoscaling.maxReplicas: expected at least"),
            ("autoscaling.enabled=true,replicas=0", "replicas: expected 1 or more with autoscaling.enabled"),
            ("autoscaling.enabled=true,resources.requests.cpu=null", "resources.requests.cpu: expected"),
            ("autoscaling.enabled=true,resources=null", "resources.requests.cpu: expected"),
            ("networkPolicy.enabled=true,serviceMonitor.enabled=true", "networkPolicy.metricsFrom: expected"),
        ]:
            ran = helm("template", "tollgate", CHART, "--set", wrong)
            self.assertNotEqual(ran.returncode, 0, wrong)
            [line] = [line for line in ran.stderr.splitlines() if "Error" in line]
            self.assertIn(message, line)
            self.assertNotIn(":secret@", ran.stderr)
        for right in [
            "redis.url=valkeys-cluster://a,redis.caSecret=ca",
            "autoscaling.enabled=true,resources.requests.cpu=null,resources.limits.cpu=1",
            "serviceMonitor.enabled=true,networkPolicy.enabled=true,"
            "networkPolicy.metricsFrom[0].podSelector.matchLabels.a=b",
            "replicas=0",
            "resources=null,options=null,env=null,podAnnotations=null",
        ]:
            rendered("--set", right)

    def test_what_it_sets_is_known_to_the_checks(self):
        checks = (CHART / "templates/checks.yaml").read_text()
        for name in re.findall(r"name: (TOLLGATE_\w+)", (CHART / "templates/deployment.yaml").read_text()):
            self.assertIn(f'"{name}"', checks)

    def test_annotations_and_labels_that_take_the_place_of_its_own(self):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump({"podAnnotations": {"prometheus.io/scrape": "false", "a": "b"}}, file)
            file.flush()
            text = helm("template", "tollgate", CHART, "--values", file.name).stdout
        self.assertEqual(text.count("prometheus.io/scrape:"), 1)
        annotations = by_kind(text)["Deployment"]["spec"]["template"]["metadata"]["annotations"]
        self.assertEqual(annotations, {"prometheus.io/scrape": "false", "prometheus.io/port": "9090", "a": "b"})
        labels = ["--set", "serviceMonitor.enabled=true,serviceMonitor.labels.app\\.kubernetes\\.io/name=a"]
        text = helm("template", "tollgate", CHART, *labels, "--show-only", "templates/servicemonitor.yaml").stdout
        self.assertEqual(text.partition("spec:")[0].count("app.kubernetes.io/name:"), 1)

    def test_the_schema_knows_each_value(self):
        schema = json.loads((CHART / "values.schema.json").read_text())
        self.assertEqual(set(values()), set(schema["properties"]) - {"global"})
        for name, value in values().items():
            # These two are Kubernetes' own.
            if "additionalProperties" in schema["properties"][name] and name not in ("resources", "affinity"):
                self.assertEqual(set(value), set(schema["properties"][name]["properties"]), name)
        everything = yaml.safe_load((HERE / "everything.yaml").read_text())
        self.assertEqual(set(values()) - set(everything), {"existingRules", "fullnameOverride", "replicas"})

    def test_its_version_is_the_crates(self):
        chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
        manifest = (EXAMPLES.parents[2] / "Cargo.toml").read_text()
        version = re.search(r'^version = "(.*)"', manifest, re.MULTILINE)[1]
        self.assertEqual((chart["version"], chart["appVersion"]), (version, version))


class Service(unittest.TestCase):
    """The service reads what the pods would."""

    def test_its_variables_and_options(self):
        command = [needed("TOLLGATE_SERVE", "tollgate-serve"), "--help"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        for arguments in [], EVERYTHING:
            one = container(rendered(*arguments))
            names = [variable["name"] for variable in one["env"] if variable["name"] != "RUST_BACKTRACE"]
            for name in names + [option for option in one["args"] if option.startswith("--")]:
                self.assertRegex(text, rf"{re.escape(name)}\b")

    def test_values_that_the_chart_refuses_would_end_it(self):
        program = needed("TOLLGATE_SERVE", "tollgate-serve")
        off = ["--grpc", "off", "--http", "off", "--metrics", f"127.0.0.1:{free_port()}"]
        with Servers() as servers:
            rules = servers.write("rules.toml", rendered()["ConfigMap"]["data"]["rules.toml"])
            comment = servers.write("comment.toml", "# none\n")
            for arguments, message in [
                ([], "required arguments were not provided"),
                ([comment], "write at least one [[rule]]"),
                ([rules, "--database", "postgres://record"], "cannot be used with"),
                ([rules, "--deadline", "1s", "--deadline=2s"], "cannot be used multiple times"),
                ([rules, "--url", "redis://a", "--tls-ca", certifi.where()], "expected rediss://"),
            ]:
                command = [program, *map(str, arguments), *off]
                ran = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
                self.assertNotEqual(ran.returncode, 0, arguments)
                self.assertIn(message, ran.stderr)

    def test_its_rules_and_tokens(self):
        with Servers() as servers:
            manifests = rendered(*EVERYTHING)
            one, secret = container(manifests), manifests["Secret"]["stringData"]
            expected = yaml.safe_load((HERE / "everything.yaml").read_text())
            self.assertEqual(secret["url"], expected["redis"]["url"])
            files = {
                "/etc/tollgate/rules.toml": servers.write("rules.toml", manifests["ConfigMap"]["data"]["rules.toml"]),
                "/etc/tollgate-tokens/tokens": servers.write("tokens", secret["tokens"]),
            }
            # Its ports, on loopback; without the certificates, which aren't the chart's.
            tls = re.compile("TOLLGATE_(TLS|SERVE_(CERT|KEY)).*")
            env = {each["name"]: each["value"] for each in one["env"] if "value" in each}
            env = {name: value for name, value in env.items() if not tls.fullmatch(name)}
            ports = {name: free_port() for name in ("GRPC", "HTTP", "METRICS")}
            for name, port in ports.items():
                self.assertTrue(env[f"TOLLGATE_SERVE_{name}"].startswith("0.0.0.0:"))
                env[f"TOLLGATE_SERVE_{name}"] = f"127.0.0.1:{port}"
            env["TOLLGATE_SERVE_TOKENS"] = files[env["TOLLGATE_SERVE_TOKENS"]]
            env["TOLLGATE_URL"] = servers.redis().url
            program = needed("TOLLGATE_SERVE", "tollgate-serve")
            command = ["env", *(f"{name}={value}" for name, value in env.items()), program]
            servers.start("service", command + [files.get(part, part) for part in one["args"]], *ports.values())
            for probe in "startupProbe", "readinessProbe", "livenessProbe":
                asked = one[probe]["httpGet"]
                self.assertEqual(asked["port"], "metrics")
                self.assertEqual(get(ports["METRICS"], asked["path"])[0], 200)
            answers = []
            for token in ["none", *expected["tokens"]["list"]]:
                fields = {"authorization": f"Bearer {token}", "x-tollgate-user": "alice"}
                answers += [get(ports["HTTP"], "/v1/forward-auth", fields) for _ in range(2)]
            self.assertEqual([status for status, _, _ in answers], [401, 401, 200, 200, 429, 429])
            self.assertIn('a "text": {{ with braces }}', answers[-1][2])


if __name__ == "__main__":
    unittest.main()
