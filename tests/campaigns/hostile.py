"""Measure a normal client beside hostile ones: `python -m campaigns.hostile --seconds 60`.

A server with default settings, and a canary process that reads one answer after another. For `--seconds` each, two
processes run one kind of `hostile_callers`. Prints a line of JSON for each kind: the canary's gaps between tokens,
their p99 against the calm before, and its answers, each compared with the expected one.

Exits with 1 if an answer was lost or altered, the canary stood still, callers failed or were never served, or the
server exited. With `--judge yes`, also if a gap was more than three times that of calm; that needs a quiet machine.

Hostile processes run at the lowest priority, because they share the server's processors.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from campaigns.growth import look
from campaigns.hostile_callers import KINDS, SERVED
from campaigns.hostile_target import SLOW
from campaigns.server import BOUND_SECONDS, Server
from support.small_tokenizers import byte_level, save
from support.sockets import free_ports
from support.toy import expected

from lineclear.client import Client
from lineclear.errors import LineclearError
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc
from lineclear.wire.messages import Sampling

_STEP_SECONDS = 0.01
_TOY = {
    "vocab_size": 512,
    "num_blocks": 4096,
    "block_size": 16,
    "max_model_len": 8192,
    "min_step_seconds": _STEP_SECONDS,
    "max_step_seconds": _STEP_SECONDS,
}
_LOOPS = "{% for a in range(9999) %}" * 3 + "{% endfor %}" * 3
_TEMPLATE = (
    "{% if messages[0].content == '" + SLOW + "' %}" + _LOOPS + "{% endif %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
_PROMPT, _SEED, _TOKENS = (5, 6, 7), 4711, 100
_CALLERS = 2
_NICENESS = "15"  # hostile callers elsewhere would not use the server's processors
_MAX_TIMES_CALM = 3.0
_STANDSTILL_SECONDS = 5.0  # without a token
_CALM_SHARE, _MIN_CALM_SECONDS = 0.25, 5.0  # share of the time of each kind, before it
_AFTER_SECONDS = 1.0  # for the server to release memory


def canary(target: str) -> None:
    """Read one answer after another until standard input ends, at least one. Print each as a line of JSON.

    Print `reading` when the first token of the first answer arrives. It uses the bundled client, which sends a call
    again that gRPC itself has refused.
    """
    stopped = [False]

    def wait() -> None:
        sys.stdin.read()
        stopped[0] = True

    threading.Thread(target=wait, daemon=True).start()
    with Client(target) as client:
        is_first = True
        asked = time.monotonic()
        while is_first or not stopped[0]:
            tokens: list[int] = []
            gaps: list[float] = []
            before, error = None, ""
            first = None
            try:
                with client.stream(_PROMPT, seed=_SEED, max_tokens=_TOKENS, ignore_eos=True) as stream:
                    for delta in stream:
                        now = time.monotonic()
                        if is_first:
                            is_first = False
                            print("reading", flush=True)
                        if delta.token_ids:
                            gaps += [] if before is None else [now - before]
                            first = now - asked if first is None else first
                            before = now
                            tokens += delta.token_ids
            except LineclearError as failure:
                error = failure.reason
            is_first = False
            ended = time.monotonic()
            longest = max([first or 0.0, *gaps, ended - (before or asked)])
            asked = ended  # a pause between two answers counts as well
            answer = {"tokens": tokens, "first": first, "gaps": gaps, "longest": longest, "error": error}
            print(json.dumps(answer), flush=True)


class Canary:
    """The canary process and its output, which is read at once so that the pipe never fills."""

    def __init__(self, target: str) -> None:
        command = [sys.executable, "-m", "campaigns.hostile", "--canary", target]
        self._process = subprocess.Popen(command, env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"reading\n", "the canary exited"
        self._lines: list[bytes] = []
        self._taking = threading.Thread(target=self._lines.extend, args=(self._process.stdout,), daemon=True)
        self._taking.start()

    @property
    def num_answers(self) -> int:
        """Number of answers so far."""
        return len(self._lines)

    def end(self) -> list[dict[str, Any]]:
        """Wait for the answer in progress. Return all answers."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(timeout=BOUND_SECONDS) == 0, "the canary failed"
        self._taking.join(BOUND_SECONDS)
        return list(map(json.loads, self._lines))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile in milliseconds."""
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) if ordered else 0.0


def judge(answers: Sequence[dict[str, Any]], right: Sequence[int]) -> dict[str, Any]:
    """Return the figures of the canary's answers."""
    gaps = sorted(gap for answer in answers for gap in answer["gaps"])
    firsts = sorted(answer["first"] for answer in answers if answer["first"] is not None)
    return {
        "first_ms": {"p50": quantile(firsts, 0.5), "max": quantile(firsts, 1.0)},
        "gap_ms": {"p50": quantile(gaps, 0.5), "p99": quantile(gaps, 0.99), "max": quantile(gaps, 1.0)},
        "answers": len(answers),
        "errors": sorted({answer["error"] for answer in answers if answer["error"]}),
        "lost": sum(bool(answer["error"]) or len(answer["tokens"]) < len(right) for answer in answers),
        "altered": sum(answer["tokens"] != list(right[: len(answer["tokens"])]) for answer in answers),
        "stood_still": sum(answer["longest"] > _STANDSTILL_SECONDS for answer in answers),
    }


def faults(found: dict[str, Any]) -> list[str]:
    """Return the names of the figures that are a failure on any machine."""
    wrong = [name for name in ("lost", "altered", "stood_still", "callers_failed") if found[name]]
    missing = ["answers"] if not found["answers"] else []
    if found["kind"] != "calm":
        missing += [] if found["times"] else ["times"]
        missing += ["served"] if found["kind"] in SERVED and not found["outcomes"].get("OK") else []
    return wrong + missing


class Campaign:
    """A server on free ports.

    `model` is a directory with at least 512 tokens: its weights are served with the tokenizer and template of the
    campaign, so that no kind is refused.
    """

    def __init__(self, folder: Path, model: str = "") -> None:
        data, health, metrics, status = self.ports = free_ports(4)
        self.target = f"127.0.0.1:{data}"
        flags = ["--health-listen", f"127.0.0.1:{health}", "--metrics-listen", f"127.0.0.1:{metrics}"]
        flags += ["--status-listen", f"127.0.0.1:{status}"]
        directory = save(folder, byte_level(), template=_TEMPLATE)
        if model:
            for file in Path(model).resolve().iterdir():
                if not (directory / file.name).exists():
                    (directory / file.name).symlink_to(file)
            self._server = Server(self.target, ["--model", str(directory), *flags, "--", "--dtype", "float32"])
        else:
            self._server = Server(self.target, ["--model", str(directory), *flags], toy=_TOY)
        self._server.wait_for("serving")
        self.right = expected(_PROMPT, Sampling(seed=_SEED), _TOKENS, _TOY["vocab_size"]) if not model else self._ask()

    def _ask(self) -> list[int]:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=_PROMPT), sampling={"seed": _SEED, "max_tokens": _TOKENS, "ignore_eos": True}
        )
        with grpc.insecure_channel(self.target) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            return [token for response in stub.Generate(request) for token in response.token_ids]

    @property
    def memory_mb(self) -> int:
        """Private memory of the scheduler."""
        return round(look(self._server.process.pid, 0).private_mib)

    def run(self, kind: str, seconds: float) -> dict[str, Any]:
        """Run a canary beside hostile callers of `kind`, or beside none (`calm`)."""
        before = self.memory_mb
        reader = Canary(self.target)
        callers = []
        for _ in range(_CALLERS if kind != "calm" else 0):
            numbers = [*map(str, self.ports), str(seconds)]
            # `nice` from the start, because imports would slow down the canary too.
            command = ["nice", "-n", _NICENESS, sys.executable, "-m", "campaigns.hostile_callers", kind, *numbers]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            callers.append(subprocess.Popen(command, env=_environment(), **pipes))
        outcomes: Counter[str] = Counter()
        done = failed = 0
        for caller in callers:
            output, _ = caller.communicate(timeout=seconds + BOUND_SECONDS)
            failed += caller.returncode != 0
            if output:
                report = json.loads(output)
                done += report["times"]
                outcomes.update(report["outcomes"])
        if not callers:
            time.sleep(seconds)
        during = self.memory_mb
        found = judge(reader.end(), self.right)
        time.sleep(_AFTER_SECONDS)
        assert self._server.process.poll() is None, "the server exited"
        run = {"kind": kind, "times": done, "outcomes": dict(outcomes), "callers_failed": failed}
        return {**run, **found, "memory_mb": [before, during, self.memory_mb]}

    def end(self) -> int:
        """Stop the server. Return its exit code."""
        return self._server.end(signal.SIGTERM)


def _environment() -> dict[str, str]:
    """Return an environment in which the campaigns can be imported."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign and print its figures; return 1 if it is not clean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds for each kind")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), help=", ".join(KINDS))
    parser.add_argument("--model", default="", help="a model directory: the torch worker instead of the toy")
    parser.add_argument("--judge", choices=("yes", "no"), default="no", help="whether slow gaps are a failure")
    parser.add_argument("--canary", default="", help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.canary:
        canary(chosen.canary)
        return 0
    is_clean = True
    with tempfile.TemporaryDirectory(prefix="lc") as folder:
        campaign = Campaign(Path(folder), chosen.model)
        for kind in chosen.kinds:
            calm = campaign.run("calm", max(_MIN_CALM_SECONDS, _CALM_SHARE * chosen.seconds))
            found = campaign.run(kind, chosen.seconds)
            found["calm_gap_ms"] = calm["gap_ms"]
            found["times_calm"] = round(found["gap_ms"]["p99"] / max(calm["gap_ms"]["p99"], 0.1), 2)
            found["faults"] = faults(calm) + faults(found)
            if chosen.judge == "yes" and found["times_calm"] > _MAX_TIMES_CALM:
                found["faults"].append("slow")
            print(json.dumps(found), flush=True)
            is_clean &= not found["faults"]
        is_clean &= campaign.end() == 0
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
