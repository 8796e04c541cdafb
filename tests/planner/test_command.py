"""`lineclear simulate`: table, JSON, plot, arrivals files and errors."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.time_limits import PATIENCE_SECONDS

from lineclear.planner import command
from lineclear.planner.arrivals import Arrival, BadArrivals, parse_length, read, scaled
from lineclear.planner.settings import worker_counts

STEPS = {
    "base_seconds": 0.005,
    "seconds_per_token": 0.0001,
    "seconds_per_kv_token": 1e-8,
    "worker": {"num_blocks": 512, "num_slots": 16},
}


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(STEPS))
    return path


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command.main([*map(str, arguments)])
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def test_command_is_a_process_of_its_own() -> None:
    """Its help shows traffic and scheduling, but no certificates."""

    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "lineclear.cli", "simulate", *arguments]
        return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)

    assert start("--rate", "5").returncode == 78
    text = start("--help").stdout
    assert "--model-of-steps" in text
    assert "--scheduling-policy" in text
    assert "--tls-cert-file" not in text


def test_each_load_and_number_of_workers_has_a_row_and_a_curve(steps: Path, tmp_path: Path) -> None:
    out, svg = tmp_path / "out.json", tmp_path / "out.svg"
    flags = ("--rate", "5,20,inf", "--workers", "1..4", "--num-requests", "30", "--max-batch-size", "4")
    done = run("--model-of-steps", steps, *flags, "--out", out, "--svg-file", svg)
    assert done.returncode == 0, done.stderr
    _, *rows = done.stdout.splitlines()
    assert [row.split()[:3] for row in rows] == [[str(w), r, "30"] for r in ("5", "20", "inf") for w in (1, 2, 4)]
    found = json.loads(out.read_text())
    assert found["settings"]["max_batch_size"] == 4
    assert [entry["finished"] for entry in found["runs"]] == [30] * 9
    by_workers = [entry["time_to_first_token"]["p99"] for entry in found["runs"][-3:]]
    assert by_workers == sorted(by_workers, reverse=True)
    picture = ElementTree.parse(svg).getroot()
    lines = [element for element in picture.iter() if element.tag.endswith("polyline")]
    assert len(lines) == 3 * 2 * 2, "three numbers of workers, two quantiles, two panels"
    assert all(len(line.attrib["points"].split()) == 2 for line in lines)


def test_arrivals_of_a_file_run_at_its_own_rate_and_at_others(steps: Path, tmp_path: Path) -> None:
    path = tmp_path / "arrivals.csv"
    path.write_text("arrival,prompt_tokens,output_tokens,tenant,priority\n0,10,5,a,1\n1.0,20,5,b,\n2.0,30,5,,\n")
    done = run("--model-of-steps", steps, "--arrivals", path, "--scheduling-policy", "fair")
    assert done.stdout.splitlines()[-1].split()[:3] == ["1", "1", "3"]
    done = run("--model-of-steps", steps, "--arrivals", path, "--rate", "10,20")
    assert [line.split()[1] for line in done.stdout.splitlines()[1:]] == ["10", "20"]


def test_losses_are_named_with_the_settings_of_a_file(steps: Path, tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text("max_queue_size = 10\n")
    flags = ("--model-of-steps", steps, "--rate", "inf", "--num-requests", "50", "--config", config)
    assert run(*flags).stdout.splitlines()[-1] == "lost with QUEUE_FULL: 40"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--rate", "5"], "--model-of-steps is missing"),
        (["--model-of-steps", "STEPS"], "--rate is missing"),
        (["--model-of-steps", "STEPS", "--rate", "x"], "numbers above 0"),
        (["--model-of-steps", "nothing.json", "--rate", "1"], "nothing.json"),
        (["--model-of-steps", "STEPS", "--arrivals", "nothing.csv"], "nothing.csv"),
        (["--model-of-steps", "STEPS", "--rate", "1", "--workers", "65"], "from 1 to 64"),
        (["--model-of-steps", "STEPS", "--rate", "1", "--prompt-tokens", "normal:3"], "is no length"),
        (["fit", "nothing.jsonl"], "nothing.jsonl"),
    ],
)
def test_wrong_arguments_are_named(steps: Path, arguments: list[str], problem: str) -> None:
    done = run(*(str(steps) if argument == "STEPS" else argument for argument in arguments))
    assert done.returncode == 78
    assert problem in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == "", "a header in front of an error"


def test_target_names_the_number_of_workers(steps: Path) -> None:
    flags = ("--rate", "5,inf", "--workers", "1..4", "--num-requests", "30", "--max-batch-size", "4")
    given = ("--model-of-steps", steps, *flags, "--no-step-spread", "--target-ttft-p99-ms")
    rows = run(*given, "0.001").stdout.splitlines()
    assert rows[-1].count("needs more than 4 workers") == rows[-2].count("needs more than 4 workers") == 1
    first = {(row.split()[1], int(row.split()[0])): float(row.split()[7]) for row in rows[1:-2]}
    target = (first["inf", 2] + first["inf", 4]) / 2
    done = run(*given, str(target))
    assert done.returncode == 0, done.stderr
    at_five = min(workers for (rate, workers), p99 in first.items() if rate == "5" and p99 <= target)
    said = [line.rpartition(" requests/s ")[2] for line in done.stdout.splitlines()[-2:]]
    assert said == [f"needs {at_five} worker{'s' * (at_five > 1)}", "needs 4 workers"]


def records(path: Path, seconds: tuple[float, ...]) -> Path:
    """Write step records of equal work whose times are `seconds` in turn."""
    rows = [{"start": 9, "num_tokens": 1}]
    lines = [
        {"epoch": 1, "step": n, "time_seconds": n, "seconds": seconds[n % len(seconds)], "rows": rows}
        for n in range(200)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.parametrize(("seconds", "code"), [((0.01, 0.011), 0), ((0.006, 0.014), 0), ((0.001, 0.019), 78)])
def test_poor_fit_is_said_loudly_or_refused(seconds: tuple[float, ...], code: int, tmp_path: Path) -> None:
    path = records(tmp_path / "steps.jsonl", seconds)
    done = run("--model-of-steps", path, "--rate", "5", "--num-requests", "10")
    assert done.returncode == code, done.stderr
    assert ("differ from the fit by" in done.stderr) == (seconds != (0.01, 0.011))
    assert ("TTFT" in done.stdout) == (code == 0)
    fitted = run("fit", path, "--out", tmp_path / "fit.json")
    assert fitted.returncode == 0
    assert run("--model-of-steps", tmp_path / "fit.json", "--rate", "5", "--num-requests", "10").returncode == 0


def test_json_lines_and_csv_are_the_same(tmp_path: Path) -> None:
    table, lines = tmp_path / "a.csv", tmp_path / "a.jsonl"
    table.write_text("arrival,prompt_tokens,output_tokens,group,prefix_tokens\n2,8,4,g,3\n1,5,6,,\n")
    lines.write_text(
        '{"arrival": 2, "prompt_tokens": 8, "output_tokens": 4, "group": "g", "prefix_tokens": 3}\n'
        '{"arrival": 1, "prompt_tokens": 5, "output_tokens": 6}\n'
    )
    expected = [Arrival(1.0, 5, 6), Arrival(2.0, 8, 4, group="g", prefix_tokens=3)]
    assert read(table) == read(lines) == expected
    assert [arrival.at for arrival in scaled(expected, 10.0)] == [pytest.approx(0.1), pytest.approx(0.2)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("arrival,prompt_tokens\n1,2\n", "line 2: KeyError: 'output_tokens'"),
        ("arrival,prompt_tokens,output_tokens\n1,0,2\n", "line 2: ValueError: arrival is at least 0"),
        ("arrival,prompt_tokens,output_tokens,prefix_tokens\n1,5,2,9\n", "prefix_tokens is 9 of 5"),
        ("arrival,prompt_tokens,output_tokens,priority\n1,5,2,300\n", "priority is 300"),
        ("", "no requests"),
    ],
)
def test_bad_arrivals_are_named_by_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(BadArrivals, match=problem):
        read(path)


@pytest.mark.parametrize("text", ["", "0", "x", "uniform:5", "uniform:9:3", "exponential:0", "lognormal:1:-1", "1.5"])
def test_bad_lengths_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is no length"):
        parse_length(text)


def test_worker_counts() -> None:
    assert worker_counts("1..64") == [1, 2, 4, 8, 16, 32, 64]
    assert worker_counts("3..10") == [3, 6, 10]
    assert worker_counts("2,5") == [2, 5]
