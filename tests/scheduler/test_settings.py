"""Settings of the scheduler: sources, precedence and errors."""

from __future__ import annotations

from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import pytest

from lineclear.process.flag_aliases import names_of
from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.addresses import is_local, parse_address
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.policies import PREEMPTION_POLICIES, QUEUE_ORDERS, STRATEGIES, PolicySettings, share_of
from lineclear.scheduler.engine.worker_session import WorkerTimeouts
from lineclear.scheduler.engine.worker_supervisor import SupervisorLimits
from lineclear.scheduler.settings import SchedulerSettings, load
from lineclear.scheduler.stall_watchdog import TICK_SECONDS


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("LINECLEAR_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("named_by", ["flag", "variable"])
def test_flag_beats_variable_beats_file_beats_default(
    named_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lineclear.toml"
    file.write_text('model = "file"\nmax_batch_size = 3\nscheduling_policy = "shortest"\nprefix_cache = false\n')
    if named_by == "variable":
        monkeypatch.setenv("LINECLEAR_CONFIG", str(file))
    monkeypatch.setenv("LINECLEAR_MAX_BATCH_SIZE", "5")
    monkeypatch.setenv("LINECLEAR_SCHEDULING_POLICY", "priority")
    config = ["--config", str(file)] if named_by == "flag" else []
    settings, _ = load([*config, "--scheduling-policy", "deadline"])
    assert settings.model == "file"
    assert settings.max_batch_size == 5
    assert settings.scheduling_policy == "deadline"
    assert settings.prefix_cache is False
    assert settings.max_queue_size == 1024


def test_worker_flags_follow_two_dashes() -> None:
    settings, flags = load(["--model", "m", "--spawn-worker", "--num-workers", "3", "--", "--dtype", "x", "--", "y"])
    assert settings.spawn_worker
    assert settings.worker_count == 3
    assert flags == ("--dtype", "x", "--", "y")
    assert SchedulerSettings().worker_count == 1
    assert load(["--spawn-worker", "--worker-devices", "cpu:0-3,8,cpu:4-7"])[0].worker_count == 2


def test_kubernetes_service_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "LINECLEAR_PORT": "tcp://10.0.0.1:50051",
        "LINECLEAR_PORT_50051_TCP": "tcp://10.0.0.1:50051",
        "LINECLEAR_PORT_50051_TCP_ADDR": "10.0.0.1",
        "LINECLEAR_SERVICE_HOST": "10.0.0.1",
        "LINECLEAR_SERVICE_PORT": "50051",
        "LINECLEAR_SERVICE_PORT_GRPC": "50051",
        "LINECLEAR_SCHEDULER_PORT": "tcp://10.0.0.1:50051",
        "LINECLEAR_WORKER_DTYPE": "float32",
        "LINECLEAR_PARENT_PIPE": "1:2",
    }.items():
        monkeypatch.setenv(name, value)
    assert load([])[0].model_dump() == SchedulerSettings().model_dump()


def test_no_name_equals_a_kubernetes_service_variable() -> None:
    for name in (name for setting in SchedulerSettings.model_fields for name in names_of(setting)):
        assert name not in ("port", "service_host", "service_port")
        assert not name.startswith(("port_", "service_port_"))


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        # Constants, and a secret for each process.
        (
            CoreLimits,
            {"max_preemptions", "max_queue_overtakes", "max_isolated_crashes", "cache_secret"},
        ),
        (PolicySettings, set()),
        (WorkerTimeouts, set()),
        (
            SupervisorLimits,
            {"crash_window_seconds", "min_backoff_seconds", "max_backoff_seconds", "reap_timeout_seconds"},
        ),
    ],
)
def test_group_has_a_setting_for_each_field(kind: type, others: set[str]) -> None:
    assert {field.name for field in fields(kind) if not hasattr(SchedulerSettings(), field.name)} == others


def test_group_has_the_values_of_the_settings() -> None:
    flags = ["--max-batch-size=3", "--batch-timeout-ms=7", "--tenant-weights=a=2", "--max-worker-crashes=9"]
    limits = load([*flags, "--speculative-method=draft_model"])[0].part(CoreLimits)
    assert (limits.max_batch_size, limits.max_isolated_kills, limits.speculative_method) == (3, 7, "draft_model")
    assert (limits.policy.batch_timeout_seconds, limits.policy.fixed_size_timeout_seconds) == (0.007, 0.007)
    assert limits.policy.share_weights == {share_of("a"): 2.0}


def test_policies_match_the_core() -> None:
    fields = SchedulerSettings.model_fields
    for name, entries in {
        "batching_strategy": STRATEGIES,
        "scheduling_policy": QUEUE_ORDERS,
        "preemption_policy": PREEMPTION_POLICIES,
    }.items():
        assert set(fields[name].annotation.__args__) == set(entries)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-batch-size", "0"], "^--max-batch-size 0 is not a whole number from 1 to 4096$"),
        (["--scheduling-policy", "best"], "^--scheduling-policy best is not one of fifo, "),
        (["--no-such-flag"], "^there is no flag --no-such-flag; --help lists them$"),
        (["--dtyp=float32"], "^there is no flag --dtyp; is it --dtype. It is a flag of the worker, .* -- --dtype$"),
        (
            ["--tensor-parallel-size", "2"],
            "no flag --tensor-parallel-size; it is a flag of the worker, .* -- --tensor-parallel-size 2$",
        ),
        (["--max-batch-sise", "3"], "there is no flag --max-batch-sise; is it --max-batch-size?"),
        (
            ["--device", "cuda", "--demo"],
            "no flag --device; it is a flag of the worker, which come after a lone `--`: -- --device cuda$",
        ),
        (["--port=8000"], "^there is no flag --port; give --listen HOST:PORT$"),
        (["--api-key", "k"], "^there is no flag --api-key; write it to a file and give --token-file FILE$"),
        (["stray"], "there is no argument stray; a model is named by --model stray"),
        (["--listen"], "^--listen has no value"),
        (["--listen", "0.0.0.0:50051"], "--insecure-allow-remote"),
        (["--listen", "example.org:50051"], "--insecure-allow-remote"),
        (["--listen", ""], "listen is empty"),
        (["--listen", "50051"], "host:port"),
        (["--listen", "127.0.0.1:99999"], "host:port"),
        (["--listen", "unix:relative"], "absolute path"),
        (["--listen", "unix:/" + "x" * 107], "107 bytes"),
        (["--listen", "::1:50051"], "IPv6"),
        (["--demo", "--model", "x"], "exclude each other"),
        (["--min-batch-size", "65"], r"^--min-batch-size \(65\) is larger than --max-batch-size \(64\)$"),
        (["--config", "/does/not/exist.toml"], "No such file"),
        (["--stall-timeout-seconds", "nan"], "--stall-timeout-seconds nan"),
        (["--max-message-bytes", "100"], "--max-message-bytes 100: must be 0 or at least 4096"),
        (
            ["--max-prompt-bytes", "3000000", "--max-message-bytes", "2000000"],
            "--max-prompt-bytes is 3000000, but a request has at most 2000000 bytes .--max-message-bytes.; raise",
        ),
        (["--drain-timeout-seconds", "-1"], "--drain-timeout-seconds -1"),
        (
            ["--watchdog-timeout-seconds", f"{2 * TICK_SECONDS - 0.01:g}"],
            "^--watchdog-timeout-seconds 0.49 is not a nu",
        ),
        (["--num-workers", "2"], "--num-workers needs --spawn-worker"),
        (["--spawn-worker", "--num-workers", "3", "--worker-devices", "cuda:0,cuda:1"], "names 2 devices"),
        (["--spawn-worker", "--worker-devices", "gpu0"], "'gpu0' is no device"),
        (["--spawn-worker", "--worker-devices", "cpu:0-1,cpu:3-2"], "'cpu:3-2' is no device"),
        (["--spawn-worker", "--num-workers", "3", "--max-workers", "2"], "larger than --max-workers"),
        (["--standby-worker"], "^--standby-worker needs --spawn-worker"),
        (["--draft-model", "d"], "^--draft-model needs --speculative-method"),
        (["--speculative-method", "standalone", "--spawn-worker"], "^--speculative-method draft_model needs --draft-"),
        (["--tls-cert-file", "c"], "^--tls-cert-file is set without --tls-key-file; give both$"),
        (["--tls-client-ca-file", "a"], "^--tls-client-ca-file needs --tls-cert-file and --tls-key-file$"),
        (
            ["--tls-cert-file=c", "--tls-key-file=k", "--listen=unix:/x"],
            "^--tls-cert-file is set, but none of --listen",
        ),
        (["--admin-token-file", "t"], "^--admin-token-file is set without --admin-listen or --status-listen"),
        (["--channelz"], "^--channelz is set without --admin-listen"),
        (["--admin-listen", "0.0.0.0:1"], "^--admin-listen 0.0.0.0:1 can be reached .* --admin-token-file$"),
        (["--status-listen", "0.0.0.0:1"], "^--status-listen 0.0.0.0:1 can be reached .* --insecure-allow-remote.$"),
    ],
)
def test_wrong_setting_is_named(flags: list[str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        load(flags)


@pytest.mark.parametrize(
    ("flags", "begins"),
    [
        (
            ["--port", "8000", "--max-batch-size", "4", "--dtype", "--host", "0.0.0.0"],
            ["there is no flag --port;", "there is no flag --dtype;", "there is no flag --host;"],
        ),
        (
            ["--scheduling-policy", "best", "--max-queue-size", "0", "--preemption-policy", "me"],
            ["--scheduling-policy best", "--max-queue-size 0", "--preemption-policy me"],
        ),
    ],
)
def test_all_mistakes_are_reported_at_once(flags: list[str], begins: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(flags)
    found = sorted(str(caught.value).splitlines())
    assert len(found) == len(begins)
    assert all(line.startswith(begin) for line, begin in zip(found, sorted(begins), strict=True))


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"lineclear-scheduler {version('lineclear')}\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("max_batch_sise = 3", r"bad\.toml: there is no setting max_batch_sise; is it max_batch_size\?$"),
        ("model = ", r"bad\.toml: Invalid value"),
        ("[section]\nx = 1", r"bad\.toml: there is no setting section$"),
        ("\xff", r"bad\.toml: 'utf-8' codec"),
    ],
)
def test_wrong_config_file_is_rejected(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigurationError, match=says):
        load(["--config", str(file)])


@pytest.mark.parametrize(
    ("address", "parsed", "local"),
    [
        ("127.0.0.1:50051", ("127.0.0.1", 50051), True),
        ("localhost:0", ("localhost", 0), True),
        ("[::1]:1", ("[::1]", 1), True),
        ("127.9.9.9:1", ("127.9.9.9", 1), True),
        ("0.0.0.0:1", ("0.0.0.0", 1), False),
        ("10.0.0.1:1", ("10.0.0.1", 1), False),
        ("unix:/run/x.sock", "/run/x.sock", True),
        ("unix:///run/x.sock", "/run/x.sock", True),
    ],
)
def test_address_is_parsed(address: str, parsed: object, local: bool) -> None:
    assert parse_address(address) == parsed
    assert is_local(address) is local


def test_fixed_size_waits_forever_without_batch_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = ["--model", "m", "--batching-strategy", "fixed_size"]
    assert load(fixed)[0].fixed_size_timeout_seconds is None
    assert load([*fixed, "--batch-timeout-ms", "50"])[0].fixed_size_timeout_seconds == 0.05
    monkeypatch.setenv("LINECLEAR_BATCH_TIMEOUT_MS", "200")
    assert load(fixed)[0].fixed_size_timeout_seconds == 0.2


def test_insecure_remote_address_can_be_allowed() -> None:
    assert load(["--listen", "0.0.0.0:1", "--insecure-allow-remote"])[0].listen == "0.0.0.0:1"
