"""docs/migrating.md: every name of the later sections exists, here and in transformers."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from transformers.generation import configuration_utils, continuous_batching
from transformers.generation.continuous_batching import continuous_api, requests

from lineclear import client, embedded, errors
from lineclear.cli.app import app
from lineclear.client import message_classes, results
from lineclear.client.batch_window import WindowParams
from lineclear.client.requests import Params
from lineclear.embedded.options import Options
from lineclear.process.setting_fields import flag_of
from lineclear.scheduler.core.policies import QUEUE_ORDERS, STRATEGIES
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.worker.settings import WorkerSettings

PAGE = (Path(__file__).parents[1] / "docs/migrating.md").read_text(encoding="utf-8")
TRANSFORMERS = "transformers' continuous batching"
SECTIONS = (
    "llama.cpp server", TRANSFORMERS, "batcher (Go)", "A batch processor with strategies (Zig)",
    "Continuous batching from scratch (article)", "TokenBatcher (Python)",
)  # fmt: skip
FLAGS = {
    f"--{no}{flag_of(name)[2:]}"
    for settings in (SchedulerSettings, WorkerSettings)
    for name in settings.model_fields
    for no in ("", "no-")
}
VALUES = {"--batching-strategy": STRATEGIES, "--scheduling-policy": QUEUE_ORDERS, "--pipeline-depth": "1234"}
COMMANDS = {f"lineclear {command.name or command.callback.__name__}" for command in app.registered_commands}
OTHERS = {"with", "with LocalServer(...)", "make demo", "stop_eos", "answer.finish_reason", "generate"}


def rows(section: str) -> list[tuple[str, str]]:
    """The cells of the table of a section, without its head."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [(there, here) for there, here in lines[1:]]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def named(path: str) -> Any:
    """The class, or member of a class, of the client, its results, the errors or the embedded batchers."""
    kind, _, member = path.partition(".")
    for module in (client, results, message_classes, embedded, errors):
        if hasattr(module, kind):
            found = getattr(module, kind)
            is_field = member in getattr(found, "__dataclass_fields__", {})
            return found if not member or is_field else getattr(found, member)
    raise AttributeError(path)


def check_word(word: str) -> None:
    """Raise unless the word is a flag, parameter, command, class or member."""
    if word.lstrip("- ").split()[0] != word.split()[0] or word.startswith("--"):
        flag, *value = word.removeprefix("-- ").split()
        assert flag in FLAGS, word
        assert not value or flag not in VALUES or value[0] in VALUES[flag], word
    elif word.endswith("=") and word != "stop_timeout_seconds=":
        assert word[:-1] in Params.__annotations__ or word == "progress=", word
    elif match := re.fullmatch(r"([\w.]+)\((.*)\)", word):
        found = named(match[1])
        parameters = {*inspect.signature(found).parameters, *Options.__annotations__, *WindowParams.__annotations__}
        given = [given.partition("=")[0].strip() for given in match[2].split(",") if given.strip() not in ("...", "")]
        assert not [name for name in given if name.isidentifier() and name not in parameters], word
    elif word == "stop_timeout_seconds=":
        assert word[:-1] in inspect.signature(client.LocalServer).parameters
    elif word not in COMMANDS and word not in OTHERS:
        named(word)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_word_exists_here(section: str) -> None:
    found = rows(section)
    assert len(found) >= 7
    for _, here in found:
        for word in words(here):
            if not word.startswith("lineclear.embedded"):
                check_word(word)


WORDS = {
    TRANSFORMERS: """generate_batch generation_config record_timestamps progress_bar add_request eos_token_id get_result
        request_id_iter register_result_handler cancel_request start stop join is_running persistent_manager block_size
        num_blocks max_batch_tokens max_memory_percent max_blocks_per_request allow_block_sharing fifo prefill_first
        return_logprobs max_queue_size use_async_batching use_cuda_graph max_cached_graphs decode_compile_config""",
    "batcher (Go)": """New Start Request{ID, Tokens, MaxNewTokens} Slot StepBatch{Slots} TotalTokens CompletionResult
        WithPollInterval evict refill padding""",
    "A batch processor with strategies (Zig)": """FixedSize DynamicTimeout Adaptive Continuous id prompt config priority
        callback latency_ms queue_time_ms max_batch_size timeout_ms max_queue_size num_workers totals averages
        throughput submit submitAsync poll QueueFull ProcessorStopped stop""",
    "Continuous batching from scratch (article)": """static padded waves ragged packed positions block-diagonal picture
        admissions barrier causal cuda mps cpu tokens""",
    "TokenBatcher (Python)": """inference_fn process_fn token_estimator cost_estimator default_token_estimate
        default_cost estimated_tokens estimated_cost target_batch_tokens target_batch_cost min_batch_size max_batch_size
        max_queue_size batch_timeout_s prefetch_batches submit asyncio.Future""",
}
"""What the users of each system know. A word without a row is a gap in the page."""


@pytest.mark.parametrize("section", WORDS)
def test_every_word_of_a_system_has_a_row(section: str) -> None:
    there = " ".join(cell for cell, _ in rows(section))
    assert [word for word in WORDS[section].split() if not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", there)] == []


WRONG = ("--no-such-flag", "temprature=", "Client.sumbit", "Batcher(stepfn)", "Batcher(max=8)", "--batching-strategy x")


@pytest.mark.parametrize("word", WRONG)
def test_wrong_word_is_found(word: str) -> None:
    with pytest.raises((AssertionError, AttributeError)):
        check_word(word)


def test_every_word_of_transformers_exists_there() -> None:
    modules = (continuous_api, requests, configuration_utils, continuous_batching.scheduler)
    source = "".join(inspect.getsource(module) for module in modules)
    for there, _ in rows(TRANSFORMERS):
        for word in words(there):
            name = word.partition("(")[0]
            assert re.search(rf"\b{name}\b", source), name
