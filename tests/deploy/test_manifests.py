"""Kubernetes and compose: valid, powerless, and of one mind about sockets, users, ports and seconds."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.sources import REPOSITORY

from lineclear.scheduler.rpc.server import WORKER
from lineclear.scheduler.settings import load, parse_address

DEPLOY = REPOSITORY / "deploy"
VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
DOCUMENTS = list(yaml.safe_load_all((DEPLOY / "kubernetes/sidecar.yaml").read_text()))
POD = DOCUMENTS[0]["spec"]["template"]["spec"]
CONTAINERS = {c["name"]: c for c in (*POD["initContainers"], *POD["containers"])}
SIDECARS = ("lineclear-worker", "lineclear-scheduler")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


def flags(container: dict[str, Any]) -> dict[str, str]:
    pairs = (flag.removeprefix("--").partition("=") for flag in container.get("args") or container["command"])
    return {name: value for name, _, value in pairs}


def drain_seconds(container: dict[str, Any]) -> float:
    settings, _ = load(container.get("args") or container["command"])
    return settings.drain_timeout_seconds


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)s", text)
    assert match is not None
    return float(match[1])


# --- kubernetes ----------------------------------------------------------------------------------------------------


# The oldest with the sleep hook and native sidecars switched on, and the newest that is known.
@pytest.mark.parametrize("version", ["1.30", "1.32", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d["kind"])
def test_kubernetes_takes_it(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_a_field_that_does_not_exist_would_be_found() -> None:
    probe = {"grpc": {"port": 1}, "periodSecs": 5}
    bad = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
    bad["spec"] = {"containers": [{"name": "x", "livenessProbe": probe}]}  # type: ignore[assignment]
    with pytest.raises(kubernetes_validate.ValidationError, match="periodSecs"):
        kubernetes_validate.validate(bad, kubernetes_validate.latest_version(), strict=True)


def test_the_scheduler_stops_before_the_worker_and_after_the_app() -> None:
    """Sidecars stop in reverse order, after the containers; schemas do not check the word `Always`."""
    assert [c["name"] for c in POD["initContainers"]] == list(SIDECARS)
    assert {c.get("restartPolicy") for c in POD["initContainers"]} == {"Always"}
    assert list(CONTAINERS) == [*SIDECARS, "app"]


@pytest.mark.parametrize("name", CONTAINERS)
def test_no_container_can_do_more_than_it_must(name: str) -> None:
    security = CONTAINERS[name]["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["runAsUser"] > 0
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_the_pod_is_given_nothing_it_does_not_need() -> None:
    assert POD["automountServiceAccountToken"] is False
    assert POD["enableServiceLinks"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & set(POD)


def _mounts(name: str) -> dict[str, dict[str, Any]]:
    return {m["name"]: m for m in CONTAINERS[name]["volumeMounts"]}


def test_only_the_two_share_the_sockets() -> None:
    assert {name for name in CONTAINERS if "lineclear-sockets" in _mounts(name)} == set(SIDECARS)
    users = {
        (CONTAINERS[n]["securityContext"]["runAsUser"], _mounts(n)["lineclear-sockets"]["mountPath"]) for n in SIDECARS
    }
    assert users == {(10001, "/run/lineclear")}
    assert CONTAINERS["app"]["securityContext"]["runAsUser"] != 10001
    directories = {
        flags(CONTAINERS["lineclear-scheduler"])["socket-directory"],
        flags(CONTAINERS["lineclear-worker"])["directory"],
    }
    # A folder in the volume, not the volume: the kubelet makes that one for everybody to write.
    assert directories == {"/run/lineclear/sockets"}
    volume = next(v for v in POD["volumes"] if v["name"] == "lineclear-sockets")
    assert volume["emptyDir"]["medium"] == "Memory"


def test_every_volume_is_used_and_bounded() -> None:
    used = {mount for name in CONTAINERS for mount in _mounts(name)}
    assert used == {v["name"] for v in POD["volumes"]}
    assert all("sizeLimit" in v["emptyDir"] for v in POD["volumes"] if "emptyDir" in v)
    for name in SIDECARS:
        assert _mounts(name)["models"]["readOnly"] is True
        assert flags(CONTAINERS[name])["model"].startswith(_mounts(name)["models"]["mountPath"] + "/")


def test_the_worker_alone_has_the_gpu() -> None:
    assert {n for n, c in CONTAINERS.items() if "nvidia.com/gpu" in c["resources"]["limits"]} == {"lineclear-worker"}
    assert all("memory" in c["resources"]["limits"] for c in CONTAINERS.values())


def test_probes_ask_the_health_port() -> None:
    scheduler = CONTAINERS["lineclear-scheduler"]
    address = parse_address(flags(scheduler)["health-listen"])
    # The kubelet connects to the pod's address, so loopback would not do.
    assert address == ("0.0.0.0", 50052)
    probes = {kind: scheduler[kind]["grpc"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {probe["port"] for probe in probes.values()} == {50052}
    assert {p["name"]: p["containerPort"] for p in scheduler["ports"]} == {"health": 50052, "metrics": 50053}
    assert [probe["service"] for probe in probes.values()] == ["readiness", "liveness", "readiness"]
    worker = CONTAINERS["lineclear-worker"]
    assert worker["livenessProbe"]["grpc"] == {"port": 50052, "service": WORKER}
    # The scheduler starts after it, so there is nobody to ask at first; and nothing may wait for it to pass.
    assert worker["livenessProbe"]["initialDelaySeconds"] >= 30
    assert "startupProbe" not in worker


def test_the_app_reaches_the_model_and_nobody_else_does() -> None:
    listen = flags(CONTAINERS["lineclear-scheduler"])["listen"]
    assert listen.startswith("127.0.0.1:")
    assert CONTAINERS["app"]["env"] == [{"name": "LLM_TARGET", "value": listen}]


def test_there_is_time_to_load() -> None:
    settings, _ = load(CONTAINERS["lineclear-scheduler"]["args"])
    probe = CONTAINERS["lineclear-scheduler"]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= settings.start_timeout_seconds


def test_there_is_time_to_leave() -> None:
    sleeps = [c["lifecycle"]["preStop"]["sleep"]["seconds"] for c in CONTAINERS.values() if "lifecycle" in c]
    grace = POD["terminationGracePeriodSeconds"]
    assert grace >= sum(sleeps) + drain_seconds(CONTAINERS["lineclear-scheduler"]) + 10


def test_labels_agree() -> None:
    labels = DOCUMENTS[0]["spec"]["template"]["metadata"]["labels"]
    service, budget, policy = DOCUMENTS[1:]
    assert DOCUMENTS[0]["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == labels
    assert budget["spec"]["selector"]["matchLabels"] == labels
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    everybody, monitoring = policy["spec"]["ingress"]
    assert "from" not in everybody
    assert [p["port"] for p in everybody["ports"]] == [p["name"] for p in CONTAINERS["app"]["ports"]]
    assert monitoring["ports"] == [{"port": "metrics"}]
    assert monitoring["from"]


def test_prometheus_may_fetch_figures() -> None:
    for container in (CONTAINERS["lineclear-scheduler"], SERVICES["scheduler"]):
        assert parse_address(flags(container)["metrics-listen"]) == ("0.0.0.0", 50053)
    assert "127.0.0.1:50053:50053" in SERVICES["scheduler"]["ports"]


# --- compose -------------------------------------------------------------------------------------------------------


def test_compose_runs_both_processes() -> None:
    assert set(SERVICES) == {"scheduler", "worker"}
    for name, service in SERVICES.items():
        context = (DEPLOY / service["build"]["context"]).resolve()
        assert context == REPOSITORY
        assert (context / service["build"]["dockerfile"]).name == f"{name}.Dockerfile"
        assert (context / service["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_no_service_can_do_more_than_it_must(service: dict[str, Any]) -> None:
    assert service["user"] == "10001:10001"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["pids_limit"] > 0
    assert [v for v in service["volumes"] if ":/models/" in v and not v.endswith(":ro")] == []


def test_compose_shares_the_sockets_and_nothing_else() -> None:
    volumes = [[v for v in s["volumes"] if not v.startswith("${MODEL")] for s in SERVICES.values()]
    assert volumes == [["sockets:/run/lineclear"]] * 2
    assert "sockets" in COMPOSE["volumes"]
    directories = {flags(SERVICES["scheduler"])["socket-directory"], flags(SERVICES["worker"])["directory"]}
    assert directories == {"/run/lineclear/sockets"}


def test_compose_publishes_on_loopback_only() -> None:
    assert SERVICES["worker"]["network_mode"] == "none"
    assert "ports" not in SERVICES["worker"]
    assert all(port.startswith("127.0.0.1:") for port in SERVICES["scheduler"]["ports"])


def test_compose_stops_the_scheduler_first_and_waits_for_its_drain() -> None:
    assert SERVICES["scheduler"]["depends_on"] == ["worker"]
    assert "depends_on" not in SERVICES["worker"]
    assert seconds(SERVICES["scheduler"]["stop_grace_period"]) >= drain_seconds(SERVICES["scheduler"]) + 5


def test_the_gpu_is_added_to_the_same_worker() -> None:
    overlay = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())["services"]
    assert set(overlay) == {"worker"}
    # A list replaces the one below it, so it must say everything again.
    assert overlay["worker"]["command"][:-1] == SERVICES["worker"]["command"]


# --- both ----------------------------------------------------------------------------------------------------------


def test_images_carry_the_version_of_the_project() -> None:
    images = {c["image"] for n, c in CONTAINERS.items() if n in SIDECARS} | {s["image"] for s in SERVICES.values()}
    assert images == {f"lineclear-scheduler:{VERSION}", f"lineclear-worker:{VERSION}"}
