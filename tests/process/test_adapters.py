"""Adapters over real processes and sockets, with toy workers whose tokens depend on the adapter."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.adapter_folders import key_of, toy_model, write_adapter
from support.engine_harness import eventually, kill
from support.time_limits import PATIENCE_SECONDS
from support.toy import expected_scores, expected_vector
from support.toy_service import VOCABULARY, ToyService, answer

from lineclear import errors
from lineclear.client import AdminClient, Client
from lineclear.wire.messages import Pooling, PoolingKind

PROMPT = list(range(1, 20))


class Served:
    """A server with an admin address, its clients, and the folder of adapters."""

    def __init__(self, service: ToyService, folder: Path, client: Client, operator: Client) -> None:
        self.service, self.folder, self.client, self.log = service, folder, client, folder.parent / "log"
        self.operator, self.admin = operator, AdminClient(operator)

    def tokens(self, adapter: str | None, max_tokens: int = 8, **more: Any) -> list[int]:
        params = {"max_tokens": max_tokens, "ignore_eos": True, "seed": 0} | more
        generation = self.client.generate(PROMPT, adapter=adapter, **params)
        return list(generation.token_ids)

    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in self.operator.stats().workers if worker.state == "joined"]


@contextlib.contextmanager
def served(path: Path, *flags: str, **toy: Any) -> Iterator[Served]:
    """Run a server; adapters lie in path/adapters."""
    admin_target = f"unix:{path}/admin.sock"
    (path / "adapters").mkdir(exist_ok=True)
    service = ToyService(path, "--admin-listen", admin_target, *flags, **toy)
    service.start()
    try:
        with Client(service.target) as client, Client(admin_target) as operator:
            yield Served(service, path / "adapters", client, operator)
    finally:
        service.stop()


@pytest.fixture(scope="module")
def only_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("served")
    flags = ["--lora-dir", str(path / "adapters"), "--max-loras", "2", "--max-lora-rank", "4", "--max-batch-size", "2"]
    flags += ["--served-model-name", "toy", "--metrics-listen", "127.0.0.1:0", "--log-level", "info"]
    with served(path, *flags, log=path / "log", min_step_seconds=0.005, max_step_seconds=0.005) as server:
        yield server


@pytest.fixture
def s(only_server: Served) -> Iterator[Served]:
    """The server with two places that several tests share, with an empty folder and without adapters."""
    yield only_server
    for adapter in only_server.admin.adapters():
        only_server.admin.unload_adapter(adapter.name)
    shutil.rmtree(only_server.folder)
    only_server.folder.mkdir()


def right(directory: Path | None, max_tokens: int = 8, **sampling: Any) -> list[int]:
    return answer(PROMPT, max_tokens, model=toy_model(directory), **sampling)


def test_device_that_fails_while_an_adapter_is_loaded(tmp_path: Path) -> None:
    """An earlier step may have failed it. The next worker loads the adapter, and the operator notices nothing."""
    once = tmp_path / "once"
    with served(tmp_path, "--lora-dir", str(tmp_path / "adapters"), fault="adapter", fault_once=str(once)) as server:
        before = server.operator.stats().worker.pid
        directory = write_adapter(server.folder / "a", 1)
        server.admin.load_adapter("a", "a")
        assert server.tokens("a") == right(directory)
        assert server.operator.stats().worker.pid != before
        assert once.exists()


def test_adapters_are_loaded_used_listed_and_unloaded(s: Served) -> None:
    first, second = (write_adapter(s.folder / name, n) for n, name in enumerate("ab"))
    assert s.admin.adapters() == ()
    loaded = s.admin.load_adapter("first", "a")
    assert (loaded.name, loaded.digest, loaded.rank) == ("first", key_of(first).hex(), 2)
    s.admin.load_adapter("second", str(second))
    assert [adapter.name for adapter in s.admin.adapters()] == ["first", "second"]
    assert next((a.name, a.digest) for a in s.client.model().adapters) == ("first", key_of(first).hex())
    assert s.tokens(None) == right(None)
    assert s.tokens("first") == right(first)
    assert s.tokens("second") == right(second)
    assert len({tuple(right(path)) for path in (None, first, second)}) == 3
    submitted = s.client.submit(PROMPT, adapter="second", max_tokens=8, ignore_eos=True, seed=0)
    assert list(submitted.result().token_ids) == right(second)
    batch = list(s.client.generate_batch([PROMPT] * 4, adapter="first", max_tokens=8, ignore_eos=True, seed=0))
    assert [list(generation.token_ids) for generation in batch] == [right(first)] * 4
    assert s.admin.unload_adapter("first") == 0
    with pytest.raises(errors.AdapterNotFound, match="no adapter of this name is loaded; 1 are"):
        s.tokens("first")
    with pytest.raises(errors.AdapterNotFound):
        s.admin.unload_adapter("first")
    assert s.tokens("second") == right(second)


def test_scores_and_vectors_are_those_of_the_adapter(s: Served) -> None:
    """With none and two adapters; the prefix cache separates them."""
    paths: list[Path | None] = [None, *(write_adapter(s.folder / name, n) for n, name in enumerate("ab"))]
    for path in paths[1:]:
        assert path is not None
        s.admin.load_adapter(path.name, path.name)
    fingerprints = set()
    for path in paths * 2:
        name, model = (None, "") if path is None else (path.name, toy_model(path))
        scores = s.client.score(PROMPT, [[7, 8]], adapter=name)
        wanted = expected_scores([*PROMPT, 7, 8], len(PROMPT) - 1, 0, VOCABULARY, model)
        assert [x.logprob for x in scores.scores[0].logprobs] == [x.logprobs[0] for x in wanted]
        vectors = s.client.embed([PROMPT], adapter=name, normalize=False, dimensions=2)
        pooling = Pooling(PoolingKind.LAST, 2, normalize=False)
        assert str(vectors.vectors[0]) == str(struct.unpack("<2f", expected_vector(PROMPT, pooling, model)))
        fingerprint = s.client.generate(PROMPT, adapter=name, max_tokens=1).started.model_fingerprint
        assert scores.model_fingerprint == vectors.model_fingerprint == fingerprint
        fingerprints.add(fingerprint)
    assert len(fingerprints) == 3
    for call in (
        lambda: s.client.score(PROMPT, [[7]], adapter="none"),
        lambda: s.client.embed(["x"], adapter="b c"),
    ):
        with pytest.raises(errors.AdapterNotFound):
            call()


def test_streams_of_killed_workers_continue_with_their_adapter(tmp_path: Path) -> None:
    """Without a folder, nothing is loaded at run time."""
    paths = [None, *(write_adapter(tmp_path / "elsewhere" / name, n) for n, name in enumerate("ab"))]
    modules = ",".join(f"{path.name}={path}" for path in paths if path is not None)
    slow = {"min_step_seconds": 0.005, "max_step_seconds": 0.005}
    with (
        served(tmp_path, "--num-workers", "2", "--lora-modules", modules, **slow) as s,
        ThreadPoolExecutor(9) as pool,
    ):
        names = [None if path is None else path.name for path in paths]
        found = [pool.submit(s.tokens, names[number % 3], 150, seed=number) for number in range(9)]
        killed: set[int] = set()
        for _ in range(3):
            eventually(lambda: len(set(s.worker_pids()) - killed) == 2, what="both workers")
            killed.add(kill(s.worker_pids()[0]))
        for number, tokens in enumerate(found):
            assert tokens.result() == right(paths[number % 3], 150, seed=number)
        with pytest.raises(errors.Unsupported, match="--lora-dir"):
            s.admin.load_adapter("x", "a")


def test_worker_that_joins_later_has_the_adapters(s: Served) -> None:
    path = write_adapter(s.folder / "a", 1)
    s.admin.load_adapter("french", "a")
    assert s.tokens("french") == right(path)
    kill(s.worker_pids()[0])
    assert s.tokens("french") == right(path)


def test_adapter_that_a_new_worker_cannot_load_is_forgotten(s: Served) -> None:
    path = write_adapter(s.folder / "a", 1)
    s.admin.load_adapter("a", "a")
    path.rename(s.folder / "gone")
    kill(s.worker_pids()[0])
    eventually(lambda: not s.admin.adapters(), what="the loss of the adapter")
    with pytest.raises(errors.AdapterNotFound):
        s.tokens("a")
    assert s.tokens(None) == right(None)


def test_unloading_lets_running_requests_end(s: Served) -> None:
    paths = {name: write_adapter(s.folder / name, number) for number, name in enumerate("abc")}
    params: dict[str, Any] = {"max_tokens": 250, "ignore_eos": True, "seed": 0}
    for name in "ab":
        s.admin.load_adapter(name, name)
    with (
        s.client.stream(PROMPT, adapter="a", **params) as first,
        s.client.stream(PROMPT, adapter="b", **params) as second,
    ):
        next(first), next(second)
        with pytest.raises(errors.AdapterLimitReached, match="2 adapters are loaded and in use"):
            s.admin.load_adapter("c", "c")
        assert s.admin.unload_adapter("a") == 1
        with pytest.raises(errors.AdapterNotFound):
            s.tokens("a")
        for name, stream in (("a", first), ("b", second)):
            list(stream)
            assert list(stream.token_ids) == right(paths[name], 250)
    eventually(lambda: _loads(s, "c"), what="the place of the adapter")
    assert s.tokens("c") == right(paths["c"])


@pytest.mark.parametrize("are_files_left", [True, False])
def test_worker_that_joins_later_has_unloaded_adapters_in_use(s: Served, are_files_left: bool) -> None:
    paths = {name: write_adapter(s.folder / name, number) for number, name in enumerate("ab")}
    wanted = {name: right(path, 250) for name, path in paths.items()}
    params: dict[str, Any] = {"max_tokens": 250, "ignore_eos": True, "seed": 0}
    for name in "ab":
        s.admin.load_adapter(name, name)
    with (
        s.client.stream(PROMPT, adapter="a", **params) as first,
        s.client.stream(PROMPT, adapter="b", **params) as second,
    ):
        next(first), next(second)
        assert s.admin.unload_adapter("a") == 1
        if not are_files_left:
            shutil.rmtree(paths["a"])
        kill(s.worker_pids()[0])
        with contextlib.nullcontext() if are_files_left else pytest.raises(errors.AdapterNotFound, match="cannot load"):
            list(first)
            assert list(first.token_ids) == wanted["a"]
        list(second)
        assert list(second.token_ids) == wanted["b"]
        assert second.result.timings.recoveries == 1, "no worker crashed"
    write_adapter(s.folder / "c", 2)
    eventually(lambda: _loads(s, "c"), what="the place of the adapter")


def _loads(s: Served, name: str) -> bool:
    with contextlib.suppress(errors.AdapterLimitReached):
        s.admin.load_adapter(name, name)
        return True
    return False


def test_least_recently_used_idle_adapter_is_evicted(s: Served) -> None:
    for number, name in enumerate("abc"):
        write_adapter(s.folder / name, number)
    s.admin.load_adapter("a", "a")
    s.admin.load_adapter("b", "b")
    s.tokens("a")
    s.admin.load_adapter("c", "c")
    assert [adapter.name for adapter in s.admin.adapters()] == ["a", "c"]
    assert s.tokens("c") == right(s.folder / "c")


def test_same_content_under_two_names_takes_one_place(s: Served) -> None:
    path = write_adapter(s.folder / "a", 1)
    write_adapter(s.folder / "b", 2)
    for name, directory in (("a", "a"), ("again", "a"), ("b", "b")):
        s.admin.load_adapter(name, directory)
    assert [adapter.name for adapter in s.admin.adapters()] == ["a", "again", "b"]
    s.admin.unload_adapter("a")
    assert s.tokens("again") == right(path)


def test_answer_is_not_resumed_with_another_adapter(s: Served) -> None:
    write_adapter(s.folder / "a", 1)
    write_adapter(s.folder / "b", 2)
    s.admin.load_adapter("x", "a")
    fingerprint = s.client.generate(PROMPT, adapter="x", max_tokens=2, seed=0).started.model_fingerprint
    plain = s.client.generate(PROMPT, max_tokens=2, seed=0).started.model_fingerprint
    assert fingerprint != plain == s.client.model().model_fingerprint
    assert s.tokens("x", model_fingerprint=fingerprint) == right(s.folder / "a")
    s.admin.unload_adapter("x")
    s.admin.load_adapter("x", "b")
    with pytest.raises(errors.ModelChanged):
        s.tokens("x", model_fingerprint=fingerprint)


@pytest.mark.parametrize("path", ["../outside", "/etc", ".", "", "link", "files", "a/../../outside", "a\0b"])
def test_path_out_of_the_folder_is_refused(s: Served, path: str) -> None:
    outside = s.folder.parent / "outside"
    shutil.rmtree(outside, ignore_errors=True)
    write_adapter(outside, 1)
    (s.folder / "link").symlink_to(outside)
    (s.folder / "files").mkdir()
    for file in outside.iterdir():
        (s.folder / "files" / file.name).symlink_to(file)
    with pytest.raises((errors.AdapterRefused, errors.InvalidRequest)) as caught:
        s.admin.load_adapter("x", path)
    assert str(s.folder.parent) not in str(caught.value)
    assert s.admin.adapters() == ()


def test_refusals_have_reasons(s: Served) -> None:
    write_adapter(s.folder / "large", 1, rank=8)
    write_adapter(s.folder / "dora", 2, use_dora=True)
    write_adapter(s.folder / "a", 3)
    write_adapter(s.folder / "b", 4)
    weights = write_adapter(s.folder / "cut", 5) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    for path, reason in (
        ("large", "rank is 8, the limit is 4"),
        ("dora", "DoRA"),
        ("none", "no such directory"),
        ("cut", "is cut short by 1 bytes"),
    ):
        with pytest.raises(errors.AdapterRefused, match=reason):
            s.admin.load_adapter("x", path)
    with pytest.raises(errors.InvalidRequest, match="name"):
        s.admin.load_adapter("a b", "a")
    s.admin.load_adapter("x", "a")
    with pytest.raises(errors.AdapterRefused, match="another adapter of this name"):
        s.admin.load_adapter("x", "b")


def test_adapter_of_another_model_is_loaded_with_a_warning(s: Served) -> None:
    """Its shapes may fit, and its answers would be wrong without an error."""
    write_adapter(s.folder / "own", 1)
    write_adapter(s.folder / "other", 2, base_model_name_or_path="org/base-7b")
    assert s.admin.load_adapter("own", "own").warning == ""
    assert s.admin.load_adapter("other", "other").warning.startswith("it was made for org/base-7b, and another")
    assert [bool(adapter.warning) for adapter in s.admin.adapters()] == [True, False]
    eventually(lambda: "adapter_of_another_model" in s.log.read_text())


def adapters_in_use(log: Path) -> tuple[str, str, str]:
    """Return the limit and the adapters of running and of waiting requests, as the metrics have them."""
    lines = (json.loads(line) for line in log.read_text().splitlines() if "metrics_listening" in line)
    address = next(lines)["address"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_SECONDS) as page:
        families = text_string_to_metric_families(page.read().decode())
    found = {sample.name: sample.labels for family in families for sample in family.samples}
    labels = found["lineclear_lora_requests_info"]
    assert labels == found["vllm:lora_requests_info"]
    return labels["max_lora"], labels["running_lora_adapters"], labels["waiting_lora_adapters"]


def test_metrics_name_the_adapters_in_use(s: Served) -> None:
    for number, name in enumerate("ab"):
        write_adapter(s.folder / name, number)
        s.admin.load_adapter(name, name)
    assert s.operator.stats().gauges.num_lora_adapters == 2
    assert adapters_in_use(s.log) == ("2", "", "")
    with s.client.stream(PROMPT, adapter="a", n=2, max_tokens=250, ignore_eos=True, seed=0) as stream:
        next(stream)
        waiting = s.client.submit(PROMPT, adapter="b", max_tokens=8, ignore_eos=True, seed=0)
        assert adapters_in_use(s.log) == ("2", "a", "b")
    assert list(waiting.result().token_ids) == right(s.folder / "b")
    s.admin.unload_adapter("a")
    assert s.operator.stats().gauges.num_lora_adapters == 1


def test_adapters_change_places_under_load(s: Served) -> None:
    """Four adapters for two places: a request gets the tokens of its adapter, or a clear status."""
    paths = [write_adapter(s.folder / name, number) for number, name in enumerate("abcd")]
    outcomes: list[str] = []

    def use(number: int) -> None:
        for step in range(8):
            path = paths[(number + step * 3) % 4]
            try:
                s.admin.load_adapter(path.name, path.name)
                assert s.tokens(path.name, seed=number) == right(path, seed=number)
                outcomes.append("served")
            except (errors.AdapterLimitReached, errors.AdapterNotFound) as error:
                outcomes.append(error.reason)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))
    assert len(outcomes) == 32
    assert outcomes.count("served") > 4
    assert len(s.admin.adapters()) <= 2
    assert s.tokens(None) == right(None)
