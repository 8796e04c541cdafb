"""Turns, repeats and failures, with contenders that answer at once; tables and curves that a reader can check."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import compare, report, static_waves
from bench.contenders import CONTENDERS, PEERS, Contender, Task, custom
from bench.measure import Result, Run
from bench.workloads import Job, Workload, make

WORK = make("w1", 2)


def result(name: str, makespan: float, *, disturbed: bool = False, concurrency: int = 0) -> Result:
    run = Run(WORK)
    run.times = {"r0000": [makespan / 2, makespan]}
    found = run.end(name, "model", {"concurrency": concurrency}, makespan_seconds=makespan, load_seconds=1.0)
    return replace(found, disturbed=disturbed)


def scripted(name: str, journal: Path, lines: list[str | None]) -> Contender:
    """A contender whose n-th run notes its name and leaves lines[n]; None fails."""
    todo = list(lines)

    def command(task: Task) -> list[str]:
        line = todo.pop(0)
        script = f"import pathlib\nopen({str(journal)!r}, 'a').write({name + ' '!r})\n"
        script += "raise SystemExit(3)" if line is None else f"pathlib.Path({str(task.out)!r}).write_text({line!r})"
        return [sys.executable, "-S", "-c", script]

    return Contender(name, "", command)


def lines(name: str, *makespans: float, disturbed: tuple[int, ...] = ()) -> list[str | None]:
    return [result(name, m, disturbed=i in disturbed).to_json() for i, m in enumerate(makespans)]


def test_contenders_alternate_and_disturbed_runs_repeat(tmp_path: Path) -> None:
    journal, out = tmp_path / "journal", tmp_path / "out.jsonl"
    contenders = [
        scripted("a", journal, lines("a", 1, 1, 1)),
        scripted("b", journal, lines("b", 9, 2, 2, disturbed=(0,))),
    ]
    found = compare.compare(contenders, WORK, home=tmp_path, model=tmp_path, out=out, runs=2)
    assert journal.read_text().split() == ["a", "b", "a", "b", "b"]
    assert [r.contender for r in found] == ["a", "b", "a", "b", "b"]
    assert report.read(out) == found


def test_failed_contender_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = tmp_path / "journal"
    contenders = [scripted("a", journal, [None]), scripted("b", journal, lines("b", 1, 1))]
    found = compare.compare(contenders, WORK, home=tmp_path, model=tmp_path, out=tmp_path / "out.jsonl", runs=2)
    assert [r.contender for r in found] == ["b", "b"]
    assert "exit code 3" in capsys.readouterr().err


def test_no_run_begins_after_the_time_limit(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    contenders = [scripted(name, journal, lines(name, 1, 1)) for name in "ab"]
    assert compare.compare(contenders, WORK, home=tmp_path, model=tmp_path, out=tmp_path / "o", runs=2, seconds=0) == []
    assert not journal.exists()


def test_disturbed_runs_count_only_without_others() -> None:
    runs = [result("a", 1), result("b", 8, disturbed=True), result("b", 2), result("c", 5, disturbed=True)]
    a, b, c = report.lines(runs)
    assert (b.num_runs, b.num_disturbed, b.middle(lambda r: r.makespan_seconds)) == (2, 1, 2)
    assert (a.trusted, b.trusted, c.trusted) == (True, True, False)
    table = report.table(runs).splitlines()
    assert table[3].startswith("| b | by arrival | 2 (1) | 2.00 | 2.00 |")
    assert table[4].startswith("| c | by arrival | 1 (1) | 5.00 \\* | 5.00 |")
    assert "not to be quoted" in table[-1]


def test_curve_has_a_line_per_contender() -> None:
    runs = [result(name, m, concurrency=n) for name, m in (("a", 1), ("b", 2)) for n in (1, 8, 64)]
    svg = report.curve(runs)
    assert svg.count("<polyline") == 2
    assert svg.count("<svg") == svg.count("</svg>") == 1
    assert report.curve([result("a", 1)]) == ""


def test_page_names_workload_and_machine() -> None:
    page = report.page([result("a", 1)], "w1 on a model")
    assert page.startswith("# w1 on a model")
    assert "prompt_tokens" in page
    assert "cores" in page


def test_docs_list_all_result_pages() -> None:
    text = report.DOCS.read_text()
    assert report.with_index(text, sorted(report.RESULTS.glob("*.md"))) == text, "run python -m bench.report --docs"


def test_index_replaces_the_text_between_the_markers(tmp_path: Path) -> None:
    (tmp_path / "2026-11-22-a.md").write_text("# A\n\n| x |\n")
    text = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    once = report.with_index(text, [tmp_path / "2026-11-22-a.md"])
    table = "| date | results |\n|---|---|\n| 2026-11-22 | [A](../bench/results/2026-11-22-a.md) |"
    assert once == f"before\n{report.BEGIN}\n\n{table}\n\n{report.END}\nafter\n"
    assert report.with_index(once, [tmp_path / "2026-11-22-a.md"]) == once


def test_contenders_have_drivers(tmp_path: Path) -> None:
    task = Task(tmp_path, tmp_path / "model", tmp_path / "w.json", "w1", 4, tmp_path / "out")
    for name, contender in CONTENDERS.items():
        command = contender.command(task)
        driver = command[command.index("-m") + 1]
        assert (compare.REPOSITORY / (driver.replace(".", "/") + ".py")).exists(), name
        assert command[command.index("--concurrency") + 1] == "4"
        assert contender.peer in ("", *PEERS)


@pytest.mark.parametrize("quantize", ["f16", "q8_0", "q4_0", "q4_k_m"])
def test_both_readers_of_a_file_get_the_same(tmp_path: Path, quantize: str) -> None:
    task = Task(tmp_path, tmp_path / "model", tmp_path / "w.json", "w1", 0, tmp_path / "out")
    ours, theirs = (CONTENDERS[f"{name}-{quantize}"].command(task) for name in ("lineclear", "llama"))
    assert ours[ours.index("--gguf") + 1] == theirs[theirs.index("--quantize") + 1] == quantize
    assert ours.index("--gguf") < ours.index("--"), "an option of the driver, not of the scheduler"
    for option in ("--home", "--model"):
        assert ours[ours.index(option) + 1] == theirs[theirs.index(option) + 1]


def test_every_peer_has_an_environment() -> None:
    script = (compare.REPOSITORY / "bench" / "environments.sh").read_text()
    assert [peer for peer in PEERS if f"make_{peer}() {{" not in script] == []


def test_custom_flags_make_a_contender(tmp_path: Path) -> None:
    task = Task(tmp_path, tmp_path / "model", tmp_path / "w.json", "w1", 0, tmp_path / "out")
    command = custom("deep=--pipeline-depth 1 -- --threads 2").command(task)
    assert command[command.index("--name") + 1] == "deep"
    assert command[command.index("--") :] == ["--", "--pipeline-depth", "1", "--", "--threads", "2"]
    with pytest.raises(ValueError, match="NAME=FLAGS"):
        custom("--pipeline-depth 1")


def test_preloaded_libraries(tmp_path: Path) -> None:
    malloc = tmp_path / "malloc.so"
    ours = compare.environment_of(CONTENDERS["lineclear"], tmp_path, malloc)
    assert ours["LD_PRELOAD"] == str(malloc)
    assert "LD_PRELOAD" not in compare.environment_of(CONTENDERS["lineclear"], tmp_path, None)
    iomp = tmp_path / "vllm" / "lib" / "libiomp5.so"
    iomp.parent.mkdir(parents=True)
    iomp.touch()
    theirs = compare.environment_of(CONTENDERS["vllm"], tmp_path, malloc)
    assert theirs["LD_PRELOAD"] == f"{malloc}:{iomp}"
    json.dumps(theirs)


# --- static batches: equal settings, ratios to continuous batching, equal answers ---


def answered(name: str, *answers: tuple[int, ...]) -> Result:
    run = Run(WORK)
    for job, ids in zip(WORK.jobs, answers, strict=True):
        for token_id in ids:
            run.answer(job.id, [token_id])
    return run.end(name, "model", {}, makespan_seconds=1.0)


def test_contenders_have_equal_slots_threads_and_types(tmp_path: Path) -> None:
    task = Task(tmp_path, tmp_path / "model", tmp_path / "w.json", "w1", 0, tmp_path / "out")
    chosen = static_waves.contenders(8, threads=2)
    for contender in chosen:
        command = contender.command(task)
        assert command[command.index("--dtype") + 1] == "float32"
        assert command[command.index("--threads") + 1] == "2"
        slots = command.index("--waves" if "waves" in contender.name else "--max-batch-size")
        assert command[slots + 1] == "8"


def test_ratios_are_to_the_first_contender() -> None:
    results = [result("a", 2.0), result("b", 3.0), result("a", 4.0), result("b", 8.0)]
    assert static_waves.ratios(results) == ["b: 1.83 times the makespan (turns: 1.50, 2.00)"]


def test_answers_are_compared_by_token() -> None:
    ours = answered("a", (5, 6), (7,))
    assert static_waves.answers_are_equal([ours, answered("b", (5, 6), (7,))])
    for others in (((5, 6), (8,)), ((5,), (7,)), ((7,), (5, 6))):
        assert not static_waves.answers_are_equal([ours, answered("b", *others)])


def test_useful_share_counts_to_the_longest_of_each_batch() -> None:
    jobs = tuple(Job(str(n), (1,), tokens) for n, tokens in enumerate((2, 4, 1, 3)))
    assert static_waves.useful_share(Workload("w1", 0, 10, 0.0, jobs), 2) == 10 / (2 * 4 + 2 * 3)


def test_full_batches_only(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        static_waves.main(["--model", str(tmp_path), "--count", "9"])
