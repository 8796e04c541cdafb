"""deploy/monitoring: alerts by their examples, and that queries and manifests name what exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.kustomize import build
from support.npm import install
from support.prometheus import MAKE_RULES, MONITORING, program, rule_file
from support.sources import REPOSITORY
from support.time_limits import PATIENCE_SECONDS

METRIC = re.compile(r"\b(?:lineclear_|vllm:)\w+")


def read(name: str) -> Any:
    return yaml.safe_load((MONITORING / name).read_text())


ALERTS = read("prometheus-rule.yaml")["spec"]["groups"][0]["rules"]
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
AUTOSCALER, SCALED = read("horizontal-pod-autoscaler.yaml"), read("scaled-object.yaml")


def known_metrics() -> set[str]:
    """Return the names of all series of docs/metrics.md, which a test compares with the live page."""
    rows = re.findall(
        r"^\| `([a-z0-9_]+)[^`]*` \| (\w+) \|", (REPOSITORY / "docs/metrics.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 50
    parts = ("_bucket", "_sum", "_count")
    return {name + part for name, kind in rows for part in (parts if kind == "histogram" else ("",))}


def promtool(*words: str | Path) -> None:
    done = subprocess.run(
        [program("promtool"), *words], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_pass_their_examples(tmp_path: Path) -> None:
    promtool("check", "rules", rule_file(tmp_path))
    shutil.copy(MONITORING / "alert-tests.yaml", tmp_path)
    promtool("test", "rules", tmp_path / "alert-tests.yaml")


def test_each_alert_has_an_example_a_calm_moment_and_advice() -> None:
    names = [alert["alert"] for alert in ALERTS]
    examples = read("alert-tests.yaml")["tests"]
    assert [example["name"] for example in examples] == names
    for example in examples:
        assert [len(test["exp_samples"]) for test in example["promql_expr_test"]] == [1, 0], example["name"]
    page = (REPOSITORY / "docs/observability.md").read_text()
    assert re.findall(r"^\| `(Lineclear\w+)` \|", page, re.MULTILINE) == names
    assert MAKE_RULES in page
    assert MAKE_RULES in (MONITORING / "prometheus-rule.yaml").read_text()


def test_queries_name_metrics_that_exist() -> None:
    scaling = [SCALED["spec"]["triggers"][0]["metadata"]["query"], str(AUTOSCALER["spec"]["metrics"])]
    variables = [str(entry.get("query")) for entry in DASHBOARD["templating"]["list"]]
    expressions = [*(alert["expr"] for alert in ALERTS), *QUERIES, *scaling, *variables]
    found = {name for expression in expressions for name in METRIC.findall(expression)}
    assert len(found) > 30
    assert found - known_metrics() == set()


def test_queries_of_the_dashboard_are_promql(tmp_path: Path) -> None:
    plain = [query.replace("$__rate_interval", "5m").replace("$instance", ".*") for query in QUERIES]
    assert not [query for query in plain if "$" in query]
    rules = [{"record": f"panel:query{number}", "expr": query} for number, query in enumerate(plain)]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", path)


def test_panels_have_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        apart = [
            one[a] + one[size] <= other[a] or other[a] + other[size] <= one[a] for a, size in (("x", "w"), ("y", "h"))
        ]
        assert any(apart), (one, other)
    assert max(panel["gridPos"]["x"] + panel["gridPos"]["w"] for panel in panels) <= 24


def test_manifests_name_the_service(tmp_path: Path) -> None:
    deployment = build(REPOSITORY / "deploy/kubernetes/service-cpu")[0]
    pod = deployment["spec"]["template"]
    monitor = read("pod-monitor.yaml")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    ports = {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} == {"metrics"} <= ports
    for scaler in (AUTOSCALER, SCALED):
        assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert AUTOSCALER["spec"]["behavior"] == SCALED["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    for version in ("1.30", kubernetes_validate.latest_version()):
        kubernetes_validate.validate(AUTOSCALER, version, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_component_adds_to_a_variant(tmp_path: Path) -> None:
    deploy, variant = tmp_path / "deploy", tmp_path / "deploy/kubernetes/monitored"
    shutil.copytree(REPOSITORY / "deploy", deploy)
    variant.mkdir()
    variant.joinpath("kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        "resources: [../base/service]\ncomponents: [../variants/cpu, ../../monitoring]\n"
    )
    done = subprocess.run(
        ["kubectl", "kustomize", variant], capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS
    )
    found = {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}
    assert found.keys() >= {"Deployment", "PodMonitor", "PrometheusRule", "ConfigMap"}
    assert json.loads(found["ConfigMap"]["data"]["dashboard.json"]) == DASHBOARD
    assert found["ConfigMap"]["metadata"]["labels"] == {"grafana_dashboard": "1"}


VALIDATE = """
import fs from "fs"; import * as yaml from "js-yaml";
import {PodMonitor} from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PodMonitor";
import {PrometheusRule} from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PrometheusRule";
import {ScaledObject} from "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject";
const kinds = {PodMonitor, PrometheusRule, ScaledObject};
for (const file of process.argv.slice(2)) {
  const document = yaml.load(fs.readFileSync(file, "utf8"));
  new kinds[document.kind](document).validate();
}
"""


@pytest.mark.exhaustive
def test_custom_resources_are_valid(tmp_path: Path) -> None:
    """By the schemas of the Prometheus operator's and KEDA's definitions, as npm packages have them."""
    packages = ("@kubernetes-models/prometheus-operator@6.0.0", "@kubernetes-models/keda@2.0.0", "js-yaml@5")
    script = install("kubernetes-models", *packages) / "validate.mjs"
    script.write_text(VALIDATE)
    names = ("pod-monitor.yaml", "prometheus-rule.yaml", "scaled-object.yaml")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((MONITORING / names[0]).read_text().replace("interval: 15s", "interval: [15]"))
    for files, code in ([MONITORING / name for name in names], 0), ([wrong], 1):
        done = subprocess.run(["node", script, *files], capture_output=True, timeout=PATIENCE_SECONDS, check=False)
        assert done.returncode == code, done.stderr
