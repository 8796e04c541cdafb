"""Check Kubernetes and compose files: schema, restrictions, and consistent sockets, users, ports and timeouts."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.kustomize import build
from support.sources import REPOSITORY
from support.time_limits import PATIENCE_SECONDS

from lineclear.scheduler.addresses import parse_address
from lineclear.scheduler.grpc_api.health_service import LIVE, READY, WORKER
from lineclear.scheduler.security.token_file import read_tokens
from lineclear.scheduler.settings import load
from lineclear.scheduler.stall_watchdog import TICK_SECONDS
from lineclear.worker import settings as worker_settings

DEPLOY = REPOSITORY / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
OURS, SECOND = ("lineclear-worker", "lineclear-scheduler"), "lineclear-second-worker"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


class Manifest:
    """The documents that `kubectl apply -k` builds from a folder, and their pod."""

    def __init__(self, name: str) -> None:
        self.documents = build(KUBERNETES / name)
        self.template = self.documents[0]["spec"]["template"]
        self.pod = self.template["spec"]
        self.containers = {c["name"]: c for c in (*self.pod["initContainers"], *self.pod["containers"])}
        self.worker, self.scheduler = (self.containers[name] for name in OURS)

    def mounts(self, name: str) -> dict[str, dict[str, Any]]:
        return {m["name"]: m for m in self.containers[name]["volumeMounts"]}


NAMES = sorted({path.name for path in KUBERNETES.iterdir()} - {"base", "variants", "inference-pool"})
MANIFESTS = {name: Manifest(name) for name in NAMES}
SIDECAR, SERVICE = MANIFESTS["sidecar-gpu"], MANIFESTS["service-gpu"]
SEVERAL_GPUS, DOWNLOAD = MANIFESTS["service-several-gpus"], MANIFESTS["service-gpu-download"]


@pytest.fixture(params=MANIFESTS.values(), ids=MANIFESTS)
def manifest(request: pytest.FixtureRequest) -> Manifest:
    found: Manifest = request.param
    return found


def unfolded(words: list[str]) -> list[str]:
    """Replace the variables of compose by their defaults."""
    return [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word) for word in words]


def flags(container: dict[str, Any]) -> dict[str, str]:
    pairs = (flag.removeprefix("--").partition("=") for flag in container.get("args") or container["command"])
    return {name: value for name, _, value in pairs}


def drain_seconds(container: dict[str, Any]) -> float:
    settings, _ = load(unfolded(container.get("args") or container["command"]))
    return settings.drain_timeout_seconds


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)s", text)
    assert match is not None
    return float(match[1])


def test_second_worker_stops_after_the_scheduler() -> None:
    pod = MANIFESTS["service-cpu-two-workers"].pod
    assert [container["name"] for container in pod["initContainers"]] == [OURS[0], SECOND]
    first, second = ({**container, "name": ""} for container in pod["initContainers"])
    assert first == second


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("name", MANIFESTS)
def test_kustomize_builds_the_same_manifests(name: str) -> None:
    command = ["kubectl", "kustomize", KUBERNETES / name]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS)

    def by_kind(documents: Iterable[dict[str, Any]]) -> dict[str, Any]:
        return {document["kind"]: document for document in documents}

    assert by_kind(yaml.safe_load_all(done.stdout)) == by_kind(MANIFESTS[name].documents)


def test_only_the_worker_of_a_gpu_variant_has_the_gpu(manifest: Manifest) -> None:
    limits = {name: container["resources"]["limits"] for name, container in manifest.containers.items()}
    is_gpu = manifest in (SIDECAR, SERVICE, SEVERAL_GPUS, DOWNLOAD)
    assert {name for name, limit in limits.items() if "nvidia.com/gpu" in limit} == ({OURS[0]} if is_gpu else set())
    assert all("memory" in limit for limit in limits.values())
    assert worker_settings.load(manifest.worker["args"]).device == ("cuda" if is_gpu else "cpu")


def test_worker_has_a_gpu_for_each_rank() -> None:
    for manifest in (SIDECAR, SERVICE, SEVERAL_GPUS):
        size = worker_settings.load(manifest.worker["args"]).tensor_parallel_size
        assert manifest.worker["resources"]["limits"]["nvidia.com/gpu"] == str(size)
        assert size == (2 if manifest is SEVERAL_GPUS else 1)
    assert SEVERAL_GPUS.mounts(OURS[0])["lineclear-worker-shm"]["mountPath"] == "/dev/shm"


# 1.30 is the oldest version with the sleep hook and native sidecars enabled by default.
@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_manifest_is_valid_kubernetes(manifest: Manifest, version: str) -> None:
    for document in manifest.documents:
        kubernetes_validate.validate(document, version, strict=True)


def test_stop_order_is_app_scheduler_worker() -> None:
    """Sidecars stop in reverse order, after the containers; schemas do not check the word `Always`."""
    for manifest in MANIFESTS.values():
        sidecars = manifest.pod["initContainers"][manifest is DOWNLOAD :]
        assert {c.get("restartPolicy") for c in sidecars} == {"Always"}
    assert list(SIDECAR.containers) == [*OURS, "app"]
    assert [c["name"] for c in SIDECAR.pod["containers"]] == ["app"]
    assert list(SERVICE.containers) == list(OURS)
    assert [c["name"] for c in SERVICE.pod["containers"]] == ["lineclear-scheduler"]


def test_containers_are_restricted_and_tell_why_they_exited(manifest: Manifest) -> None:
    for name, container in manifest.containers.items():
        assert name == "app" or container["terminationMessagePolicy"] == "FallbackToLogsOnError"
        security = container["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["runAsUser"] > 0
    assert manifest.pod["securityContext"]["runAsNonRoot"] is True
    assert manifest.pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert manifest.pod["automountServiceAccountToken"] is False
    assert manifest.pod["enableServiceLinks"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & set(manifest.pod)


def test_only_scheduler_and_worker_share_the_sockets(manifest: Manifest) -> None:
    mounts = {name: manifest.mounts(name).get("lineclear-sockets") for name in manifest.containers}
    users = {
        (manifest.containers[name]["securityContext"]["runAsUser"], mount["mountPath"])
        for name, mount in mounts.items()
        if mount is not None
    }
    assert {name for name, mount in mounts.items() if mount} - {SECOND} == set(OURS)
    assert users == {(10001, "/run/lineclear")}
    # A folder inside the volume, because the kubelet makes an emptyDir writable for all users.
    directories = {flags(manifest.scheduler)["socket-directory"], flags(manifest.worker)["socket-directory"]}
    assert directories == {"/run/lineclear/sockets"}
    volume = next(v for v in manifest.pod["volumes"] if v["name"] == "lineclear-sockets")
    assert volume["emptyDir"]["medium"] == "Memory"


def test_volumes_are_used_and_bounded(manifest: Manifest) -> None:
    used = {mount for name in manifest.containers for mount in manifest.mounts(name)}
    assert used == {v["name"] for v in manifest.pod["volumes"]}
    assert all("sizeLimit" in v["emptyDir"] for v in manifest.pod["volumes"] if "emptyDir" in v)
    for name in OURS:
        models = manifest.mounts(name)["models"]
        assert models["readOnly"] is True
        assert flags(manifest.containers[name])["model"].startswith(models["mountPath"] + "/")


def test_model_is_downloaded_before_the_worker_starts() -> None:
    """Into a volume of the pod, by the worker's image."""
    first = DOWNLOAD.pod["initContainers"][0]
    assert "restartPolicy" not in first
    assert first["image"] == DOWNLOAD.worker["image"]
    assert first["securityContext"] == DOWNLOAD.worker["securityContext"]
    assert f"--local-dir={flags(DOWNLOAD.worker)['model']}" in first["command"]
    assert "readOnly" not in DOWNLOAD.mounts(first["name"])["models"]
    assert "emptyDir" in DOWNLOAD.pod["volumes"][0]


def test_inference_pool_reaches_the_gateway_port() -> None:
    manifest = Manifest("inference-pool")
    settings, _ = load(manifest.scheduler["args"])
    pool, picker = manifest.documents[4:]
    assert pool["spec"]["selector"]["matchLabels"] == manifest.template["metadata"]["labels"]
    assert pool["spec"]["targetPorts"] == [{"number": parse_address(settings.gateway_listen)[1]}]
    config = yaml.safe_load(picker["data"]["config.yaml"])
    assert config["parser"]["pluginRef"] in {plugin["type"] for plugin in config["plugins"]}


def test_probes_ask_the_health_port(manifest: Manifest) -> None:
    scheduler, worker = manifest.scheduler, manifest.worker
    address = parse_address(flags(scheduler)["health-listen"])
    # The kubelet connects to the pod's address, not to loopback.
    assert address == ("0.0.0.0", 50052)
    probes = {kind: scheduler[kind]["grpc"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {probe["port"] for probe in probes.values()} == {50052}
    ports = {p["name"]: p["containerPort"] for p in scheduler["ports"]}
    assert ports | {"health": 50052, "metrics": 50053} == ports
    assert [probe["service"] for probe in probes.values()] == ["readiness", "liveness", "readiness"]
    assert "readiness" in READY
    assert "liveness" in LIVE
    assert worker["livenessProbe"]["grpc"] == {"port": 50052, "service": WORKER}
    # The scheduler's image is pulled after the worker's start; a startup probe of the worker would block the scheduler.
    assert worker["livenessProbe"]["initialDelaySeconds"] >= 180
    # A scheduler that crashes answers again within 10 s, also on a busy node; that must not restart the worker.
    assert worker["livenessProbe"]["periodSeconds"] * (worker["livenessProbe"]["failureThreshold"] - 1) >= 15
    assert "startupProbe" not in worker


def seconds_until_replaced(probe: dict[str, Any], pod: dict[str, Any], detection_seconds: float) -> float:
    """Return the most seconds from the hang of a process to its SIGKILL."""
    grace = probe.get("terminationGracePeriodSeconds", pod["terminationGracePeriodSeconds"])
    probing = probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"]
    return float(detection_seconds + probing + grace)


def test_hung_worker_is_restarted_within_35_seconds(manifest: Manifest) -> None:
    """And a hung scheduler within 50."""
    settings, _ = load(manifest.scheduler["args"])
    for container, timeout, limit in (
        (manifest.worker, settings.heartbeat_timeout_seconds, 35),
        (manifest.scheduler, settings.watchdog_timeout_seconds, 50),
    ):
        probe = container["livenessProbe"]
        assert seconds_until_replaced(probe, manifest.pod, timeout + TICK_SECONDS) <= limit


def test_only_the_app_reaches_the_server() -> None:
    listen = flags(SIDECAR.scheduler)["listen"]
    assert listen.startswith("127.0.0.1:")
    assert SIDECAR.containers["app"]["env"] == [{"name": "LLM_TARGET", "value": listen}]
    assert SIDECAR.containers["app"]["securityContext"]["runAsUser"] != 10001
    assert "grpc" not in {p["name"] for p in SIDECAR.scheduler["ports"]}


def test_service_for_other_pods_has_tls_and_tokens() -> None:
    settings, _ = load(SERVICE.scheduler["args"])
    assert not settings.insecure_allow_remote
    assert settings.lacks() == ""
    port = next(p["containerPort"] for p in SERVICE.scheduler["ports"] if p["name"] == "grpc")
    assert parse_address(settings.listen) == ("0.0.0.0", port)
    service = SERVICE.documents[1]["spec"]
    assert service["clusterIP"] == "None"
    # A headless Service does not translate ports; clients connect to the pod's port.
    assert [(p["port"], p["targetPort"]) for p in service["ports"]] == [(port, "grpc")]
    secrets = {v["name"]: v["secret"] for v in SERVICE.pod["volumes"] if "secret" in v}
    files = (settings.tls_cert_file, settings.tls_key_file, settings.token_file)
    paths = {SERVICE.mounts("lineclear-scheduler")[name]["mountPath"] for name in secrets}
    assert {str(Path(file).parent) for file in files} == paths
    # The scheduler rejects a token file that all users can read; the process is in the file's group.
    assert {secret["defaultMode"] for secret in secrets.values()} == {0o440}
    assert SERVICE.pod["securityContext"]["fsGroup"] == SERVICE.scheduler["securityContext"]["runAsGroup"]
    assert not set(secrets) & set(SERVICE.mounts("lineclear-worker"))


def test_process_can_read_its_secrets(tmp_path: Path) -> None:
    """Secret files are owned by root and the pod's fsGroup, and readable for the group only."""
    secrets = [volume["secret"] for volume in SERVICE.pod["volumes"] if "secret" in volume]
    advised = re.findall(r"`defaultMode: (\d+)`", (REPOSITORY / "docs/security.md").read_text())
    assert {secret["defaultMode"] for secret in secrets} == {int(mode, 8) for mode in advised}
    assert f"fsGroup: {SERVICE.pod['securityContext']['fsGroup']}`" in (REPOSITORY / "docs/security.md").read_text()
    for secret in secrets:
        assert secret["defaultMode"] & 0o040
        tokens = tmp_path / secret["secretName"]
        tokens.write_text("web " + "a" * 32)
        tokens.chmod(secret["defaultMode"])
        assert read_tokens(tokens).name_of("a" * 32) == "web"


def test_new_replica_waits_for_the_gpu() -> None:
    strategy = SERVICE.documents[0]["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    assert SERVICE.documents[0]["spec"]["replicas"] > 1, "a rollout stops one replica at a time"


def test_grace_period_covers_start_and_drain(manifest: Manifest) -> None:
    settings, _ = load(manifest.scheduler["args"])
    probe = manifest.scheduler["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= settings.start_timeout_seconds
    grace = manifest.pod["terminationGracePeriodSeconds"]
    (hook,) = [c["lifecycle"]["preStop"] for c in manifest.containers.values() if "lifecycle" in c]
    assert grace >= hook["sleep"]["seconds"] + settings.drain_timeout_seconds + 10
    assert grace >= worker_settings.load(manifest.worker["args"]).drain_timeout_seconds > settings.drain_timeout_seconds


def test_labels_agree(manifest: Manifest) -> None:
    labels = manifest.template["metadata"]["labels"]
    deployment, service, budget, policy = manifest.documents
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == labels
    assert budget["spec"]["selector"]["matchLabels"] == labels
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    ports = {p["name"] for c in manifest.containers.values() for p in c.get("ports", ())}
    assert {p["port"] for rule in policy["spec"]["ingress"] for p in rule["ports"]} == ports - {"health"}


def test_network_policies_admit_clients() -> None:
    all_pods, monitoring = SIDECAR.documents[3]["spec"]["ingress"]
    assert "from" not in all_pods
    assert all_pods["ports"] == [{"port": "http"}]
    clients, scrapers = SERVICE.documents[3]["spec"]["ingress"]
    assert clients["from"] == [{"podSelector": {"matchLabels": {"lineclear-client": "true"}}}]
    assert clients["ports"] == [{"port": "grpc"}]
    assert monitoring == scrapers
    assert monitoring["ports"] == [{"port": "metrics"}]
    assert monitoring["from"]


def test_prometheus_can_scrape() -> None:
    for container in (SIDECAR.scheduler, SERVICE.scheduler, SERVICES["scheduler"]):
        assert parse_address(flags(container)["metrics-listen"]) == ("0.0.0.0", 50053)
    assert "127.0.0.1:50053:50053" in SERVICES["scheduler"]["ports"]


def test_compose_runs_both_processes() -> None:
    """The worker has no network, and the scheduler publishes on loopback only."""
    assert set(SERVICES) == {"scheduler", "worker"}
    for name, service in SERVICES.items():
        context = (DEPLOY / service["build"]["context"]).resolve()
        assert context == REPOSITORY
        assert (context / service["build"]["dockerfile"]).name == f"{name}.Dockerfile"
        assert (context / service["build"]["dockerfile"]).is_file()
    assert "sockets" in COMPOSE["volumes"]
    assert SERVICES["worker"]["network_mode"] == "none"
    assert "ports" not in SERVICES["worker"]
    assert all(port.startswith("127.0.0.1:") for port in SERVICES["scheduler"]["ports"])


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_compose_services_are_restricted(service: dict[str, Any]) -> None:
    """A limit on restarts would count over a container's whole life: a worker could stay down after rare crashes."""
    assert service["user"] == "10001:10001"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["pids_limit"] > 0
    assert service["mem_limit"]
    assert service["restart"] == "unless-stopped"
    assert [v for v in service["volumes"] if ":/models/" in v and not v.endswith(":ro")] == []
    assert [v for v in service["volumes"] if not v.startswith("${MODEL")] == ["sockets:/run/lineclear"]
    assert flags(service)["socket-directory"] == "/run/lineclear/sockets"


def test_compose_waits_for_the_scheduler_drain() -> None:
    assert SERVICES["scheduler"]["depends_on"] == ["worker"]
    assert "depends_on" not in SERVICES["worker"]
    assert seconds(SERVICES["scheduler"]["stop_grace_period"]) >= drain_seconds(SERVICES["scheduler"]) + 5
    worker_drain = worker_settings.load(unfolded(SERVICES["worker"]["command"])).drain_timeout_seconds
    assert worker_drain > drain_seconds(SERVICES["scheduler"])
    assert seconds(SERVICES["worker"]["stop_grace_period"]) >= worker_drain + 5


def test_compose_with_two_workers() -> None:
    overlay = yaml.safe_load((DEPLOY / "compose.workers.yaml").read_text())["services"]
    assert overlay["second-worker"]["extends"] == {"file": "compose.yaml", "service": "worker"}
    assert overlay["scheduler"]["depends_on"] == ["worker", "second-worker"]  # both stop after the scheduler
    cores = {name: service["cpuset"] for name, service in overlay.items() if "cpuset" in service}
    assert cores.keys() == {"worker", "second-worker"}
    assert len(set(cores.values())) == 2


def test_gpu_overlay_extends_the_worker() -> None:
    """All processes have one batch size. A list in an overlay replaces the whole list."""
    overlay = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())["services"]
    assert set(overlay) == {"worker"}
    assert overlay["worker"]["command"][:-1] == SERVICES["worker"]["command"]
    sizes = {flags(service)["max-batch-size"] for service in (*SERVICES.values(), overlay["worker"])}
    assert sizes == {"${MAX_BATCH_SIZE:-64}"}


def test_image_tags_match_the_project_version() -> None:
    images = {c["image"] for m in MANIFESTS.values() for c in (m.worker, m.scheduler)}
    images |= {s["image"] for s in SERVICES.values()}
    assert images == {f"lineclear-scheduler:{VERSION}", f"lineclear-worker:{VERSION}"}
