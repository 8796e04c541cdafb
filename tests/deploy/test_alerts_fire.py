"""Each alert of deploy/monitoring fires by a real fault: a real Prometheus scrapes real servers with toy workers.

A minute of a rule is a second here. `make alerts` runs it, in about five minutes.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from deploy.test_monitoring import ALERTS, DASHBOARD, QUERIES
from support.prometheus import program, rule_file
from support.sockets import free_ports
from support.time_limits import PATIENCE_SECONDS
from support.toy_service import ToyService, toy_service
from support.waiting import eventually
from support.worker_kills import signal_worker

from lineclear.client import Client
from lineclear.errors import LineclearError

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(300)]
SCRAPED = 12
SLOW_STEPS = {"min_step_seconds": 0.02, "max_step_seconds": 0.02}
AUTHORITY = trustme.CA()


class Prometheus:
    """A Prometheus that scrapes free ports every second."""

    def __init__(self, folder: Path) -> None:
        own, *self.ports = free_ports(1 + SCRAPED)
        self.url = f"http://127.0.0.1:{own}"
        rules = rule_file(folder)
        rules.write_text(re.sub(r"\b(\d+)m\b", r"\1s", re.sub(r"\b1h\b", "60m", rules.read_text())))
        scraped = [f"127.0.0.1:{port}" for port in self.ports]
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [{"job_name": "lineclear", "static_configs": [{"targets": scraped}]}],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        words = [f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
        words += [f"--web.listen-address=127.0.0.1:{own}", "--log.level=error"]
        self.process = subprocess.Popen([program("prometheus"), *words])

    def get(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
            return json.load(answer)["data"]

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.get("status/runtimeinfo"))
        return False

    def state(self, alert: str, address: str) -> str:
        """Return "pending", "firing" or "" for an alert about a server, or about none."""
        for found in self.get("alerts")["alerts"]:
            if found["labels"]["alertname"] == alert and found["labels"].get("instance", address) == address:
                return str(found["state"])
        return ""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    found = Prometheus(tmp_path_factory.mktemp("prometheus"))
    try:
        eventually(found.is_ready, what="Prometheus")
        yield found
    finally:
        found.process.kill()
        found.process.wait()


class Scraped:
    """A server at one of the scraped ports, with a client."""

    def __init__(self, prometheus: Prometheus, folder: Path) -> None:
        self.prometheus, self.folder = prometheus, folder
        self.address = f"127.0.0.1:{prometheus.ports.pop()}"

    @contextlib.contextmanager
    def serving(self, *flags: str, **toy: Any) -> Iterator[tuple[ToyService, Client]]:
        with (
            toy_service(self.folder, "--metrics-listen", self.address, *flags, **toy) as service,
            Client(service.target, max_attempts=1) as client,
        ):
            yield service, client

    def fires(self, *alerts: str, cause: Callable[[], object] = lambda: None) -> None:
        """Wait until all alerts have fired, and go on with the cause meanwhile."""
        left = set(alerts)

        def have_fired() -> bool:
            cause()
            left.difference_update([a for a in left if self.prometheus.state(a, self.address) == "firing"])
            return not left

        eventually(have_fired, 2 * PATIENCE_SECONDS, what=f"{left} of {self.prometheus.get('alerts')}")
        print("fired:", *alerts)


@pytest.fixture
def scraped(prometheus: Prometheus, tmp_path: Path) -> Scraped:
    return Scraped(prometheus, tmp_path)


def kill_worker(client: Client) -> None:
    signal_worker(lambda: client.stats().worker.pid)


def submitter(client: Client, seconds: float = 0.0, **params: Any) -> Callable[[], None]:
    """Return a cause that submits requests; those that are refused count too."""

    def submit() -> None:
        with contextlib.suppress(LineclearError):
            client.submit(**{"prompt": "Hello", "ignore_eos": True, **params})
        time.sleep(seconds)

    return submit


def test_killed_worker_that_loads_for_long(scraped: Scraped) -> None:
    with scraped.serving(load_seconds=6.0) as (_, client):
        kill_worker(client)
        scraped.fires("LineclearWorkerAway")


def test_worker_that_never_joins_again(scraped: Scraped) -> None:
    """Of two workers one is killed whenever it starts, until it is given up."""
    with scraped.serving("--num-workers", "2", load_seconds=1.0) as (_, client):
        eventually(lambda: client.stats().gauges.num_workers_joined == 2, what="two workers")
        kept = client.stats().worker.pid

        def kill_others() -> None:
            for worker in client.stats().workers:
                if worker.pid not in (0, kept):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker.pid, signal.SIGKILL)

        scraped.fires("LineclearWorkersMissing", cause=kill_others)


def test_worker_that_is_killed_again_and_again(scraped: Scraped) -> None:
    with scraped.serving() as (_, client):
        for joins in (1, 2, 3):
            eventually(lambda joins=joins: client.stats().worker.joins == joins, what="a worker")  # type: ignore[misc]
            time.sleep(2.0)
            kill_worker(client)
        scraped.fires("LineclearWorkerRestarts")


def test_server_that_starts_again_and_again(scraped: Scraped) -> None:
    with scraped.serving() as (service, _):
        for _ in range(3):
            time.sleep(4.0)
            service.kill()
            service.start()
        scraped.fires("LineclearServerRestarts")


def test_drain_that_does_not_end_and_then_no_server(scraped: Scraped) -> None:
    with scraped.serving("--drain-timeout-seconds", "60", min_step_seconds=0.2, max_step_seconds=0.2) as (
        service,
        client,
    ):
        client.submit("Hello", max_tokens=400, ignore_eos=True)
        os.kill(service.pid, signal.SIGTERM)
        scraped.fires("LineclearDrainStuck")
    scraped.fires("LineclearAbsent")


def test_flood(scraped: Scraped) -> None:
    """One slot and four requests a second: they wait, late ones are rejected. All queries of the dashboard answer."""
    flags = ("--max-batch-size", "1", "--max-queue-size", "80", "--max-submitted", "1000")
    with scraped.serving(*flags, **SLOW_STEPS) as (_, client):
        flood = submitter(client, 0.2, max_tokens=40)
        scraped.fires("LineclearQueueGrowing", "LineclearSlowFirstToken", cause=flood)
        scraped.fires("LineclearQueueFull", cause=flood)
        empty = []
        for query in QUERIES:
            plain = query.replace("$__rate_interval", "10s").replace("$instance", scraped.address)
            if not scraped.prometheus.get("query", query=plain)["result"]:
                empty.append(query)
        by_title = {panel["title"]: panel["targets"][0]["expr"] for panel in DASHBOARD["panels"]}
        assert empty == [by_title["Certificate"]]


def test_full_kv_cache(scraped: Scraped) -> None:
    with scraped.serving("--max-submitted", "1000", num_blocks=256, **SLOW_STEPS) as (_, client):
        scraped.fires("LineclearKvCacheFull", "LineclearPreemptions", cause=submitter(client, 0.02, max_tokens=120))


def test_deadlines_shorter_than_answers(scraped: Scraped) -> None:
    with scraped.serving(**SLOW_STEPS) as (_, client):
        late = submitter(client, 0.2, max_tokens=200, timeout_seconds=0.3)
        scraped.fires("LineclearDeadlinesMissed", cause=late)


def test_requests_that_crash_the_worker(scraped: Scraped) -> None:
    with scraped.serving("--max-worker-crashes", "1000", poison_token=7) as (_, client):
        scraped.fires("LineclearErrors", cause=submitter(client, 0.2, prompt=[7, 8], max_tokens=4))


def test_certificate_near_its_end(scraped: Scraped) -> None:
    ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=10)
    leaf = AUTHORITY.issue_cert("localhost", not_after=ends)
    chain, key = scraped.folder / "chain.pem", scraped.folder / "key.pem"
    chain.write_bytes(b"".join(part.bytes() for part in leaf.cert_chain_pems))
    leaf.private_key_pem.write_to_path(key)
    key.chmod(0o400)
    flags = ("--metrics-listen", scraped.address, "--tls-cert-file", str(chain), "--tls-key-file", str(key))
    service = ToyService(scraped.folder, *flags, target=f"localhost:{free_ports(1)[0]}")
    try:
        service.start(wait=False)
        scraped.fires("LineclearCertificateExpires")
    finally:
        service.kill()


def test_all_alerts_are_tried() -> None:
    source = Path(__file__).read_text()
    assert [alert["alert"] for alert in ALERTS if f'"{alert["alert"]}"' not in source] == []
