"""The model `lineclear` of lm-evaluation-harness gives the results of the harness's own `hf`, on the demo model.

Each of the harness's three kinds of request has a task here, of a few lines: a choice, a perplexity with a text longer
than the context, and an answer up to a stop sequence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lineclear.client import LocalServer

lm_eval = pytest.importorskip("lm_eval", reason="no lm-evaluation-harness: pip install '.[all,lm-eval]'")

pytestmark = pytest.mark.exhaustive

MODEL = Path(__file__).parents[2] / "demo" / "model"
TOLERANCE = 1e-4
"""Largest difference of metrics, and of the log-probability of a short text, in float32.

That of the long text, -22,125, differs by 1.1e-4: `hf` adds each window in float32, in steps of 4.9e-4 there. A float64
model is nearer to the server than to `hf` in each of the seven texts.
"""
MAX_LENGTH = 1022
"""What the server takes of a context of 1,024: `hf` must cut long texts at the same places."""
CAPITALS = ["France", "Italy", "Japan", "Peru", "Norway", "Egypt"]
CHOICES = ["Paris", "Rome", "Tokyo", "Lima", "Oslo", "Cairo"]
TASKS = {
    "capitals": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{label}}",
        "doc_to_choice": CHOICES,
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the tasks and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    prompts = [f"The capital of {country} is" for country in CAPITALS]
    story = "Once upon a time in a land far away, a king had three daughters. "
    docs = [
        {"prompt": prompt, "label": label, "answer": f" {CHOICES[label]}", "text": f"{prompt} {CHOICES[label]}."}
        for label, prompt in enumerate(prompts)
    ]
    docs.append(docs[0] | {"prompt": "", "text": story * 150})  # without a context, and of several windows
    (folder / "data.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, task in TASKS.items():
        common = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}},
            "test_split": "test",
            "target_delimiter": " ",
        }
        (folder / f"{name}.yaml").write_text(json.dumps(common | task))
    return folder


@pytest.fixture(scope="module")
def results(tasks: Path) -> Iterator[tuple[Any, Any]]:
    """What the harness returns for both models."""
    from lm_eval.tasks import TaskManager

    import lineclear.client.lm_eval  # noqa: F401  # registers the model

    def run(model: str, arguments: dict[str, Any]) -> Any:
        return lm_eval.simple_evaluate(
            model, arguments, tasks=list(TASKS), task_manager=TaskManager(include_path=str(tasks)), bootstrap_iters=0
        )

    with pytest.MonkeyPatch.context() as patch, LocalServer("--demo", "--", "--dtype", "float32") as server:
        patch.setenv("HF_DATASETS_CACHE", str(tasks / "cache"))
        hf = {"pretrained": str(MODEL), "dtype": "float32", "device": "cpu", "max_length": MAX_LENGTH}
        yield run("lineclear", {"target": server.target}), run("hf", hf)


@pytest.mark.parametrize("task", TASKS)
def test_metrics_equal_those_of_hf(task: str, results: tuple[Any, Any]) -> None:
    ours, theirs = (found["results"][task] for found in results)
    metrics = {f"{entry['metric']},none" for entry in TASKS[task]["metric_list"]}
    assert metrics <= theirs.keys()
    for name in metrics:
        assert ours[name] == pytest.approx(theirs[name], rel=TOLERANCE)


@pytest.mark.parametrize("task", TASKS)
def test_each_response_equals_that_of_hf(task: str, results: tuple[Any, Any]) -> None:
    ours, theirs = ([sample["filtered_resps"] for sample in found["samples"][task]] for found in results)
    assert len(ours) == len(theirs) == 7
    if task == "answers":
        assert ours == theirs
        assert len(set(map(str, ours))) > 4
        return
    pairs = list(zip(flat(ours), flat(theirs), strict=True))
    print(task, "largest difference", max(abs(one - other) for one, other in pairs), "of", len(pairs))
    for one, other in pairs:
        assert one == pytest.approx(other, rel=TOLERANCE / 10, abs=TOLERANCE)


def flat(responses: Any) -> list[Any]:
    """Return the values in nested lists: log-probabilities, and whether a text is greedy."""
    if not isinstance(responses, list | tuple):
        return [responses]
    return [value for entry in responses for value in flat(entry)]
