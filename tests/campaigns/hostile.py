"""Measure a normal client beside hostile ones: `python -m campaigns.hostile --seconds 60`.

A server with default settings, and a canary process that reads one answer after another. For `--seconds` each, two
processes run one kind of `hostile_callers`, with a calm before. Prints a line of JSON for each kind: the canary's gaps
between tokens, their p99 against that of all calms so far, and the number of its answers, each compared with the
expected one. One calm alone is too short for a p99: on two virtual cores it varies from 6 to 14 ms.

Exits with 1 if an answer was lost or altered, the canary stood still, callers failed or were never served, or the
server exited. With `--judge yes`, also if a gap was more than three times that of calm; that needs a quiet machine.

Hostile processes run at the lowest priority, because they share the server's processors.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from campaigns.growth import look
from campaigns.hostile_callers import KINDS, SERVED
from campaigns.hostile_target import SLOW
from campaigns.pauses import quantiles
from campaigns.server import BOUND_SECONDS, TESTS, Server
from fuzz.canary import TOKENS, Canary
from support.small_tokenizers import byte_level, save
from support.sockets import free_ports
from support.toy import expected

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
_CALLERS = 2
_NICENESS = "15"  # hostile callers elsewhere would not use the server's processors
_MAX_TIMES_CALM = 3.0
_STANDSTILL_SECONDS = 5.0  # without a token
_ATTEMPTS = 3  # the client sends a call again that gRPC itself has refused
_CALM_SHARE, _MIN_CALM_SECONDS = 0.25, 5.0  # share of the time of each kind, before it
_AFTER_SECONDS = 1.0  # for the server to release memory


def faults(found: dict[str, Any]) -> list[str]:
    """Return the names of the figures that are a failure on any machine."""
    wrong = [name for name in ("wrong", "stood_still", "callers_failed") if found[name]]
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
        self.calm_gaps: list[float] = []
        """Seconds between two tokens of the canary, of all calms so far."""
        self._right = expected((5, 6), Sampling(seed=1), TOKENS, _TOY["vocab_size"]) if not model else None

    @property
    def memory_mb(self) -> int:
        """Private memory of the scheduler."""
        return round(look(self._server.popen.pid, 0).private_mib)

    def run(self, kind: str, seconds: float) -> dict[str, Any]:
        """Run a canary beside hostile callers of `kind`, or beside none (`calm`)."""
        before = self.memory_mb
        reader, wrong = Canary(self.target, max_attempts=_ATTEMPTS), ""
        outcomes: Counter[str] = Counter()
        done = failed = 0
        gaps, longest = list[float](), 0.0
        with reader:
            for caller in self._start_callers(kind, seconds):
                output, _ = caller.communicate(timeout=seconds + BOUND_SECONDS)
                failed += caller.returncode != 0
                if output:
                    report = json.loads(output)
                    done += report["times"]
                    outcomes.update(report["outcomes"])
            if kind == "calm":
                time.sleep(seconds)
            during = self.memory_mb
            try:
                gaps, longest = reader.end()
            except AssertionError as error:
                wrong = str(error)
            if self._right is not None and reader.right != self._right:
                wrong = "the canary's first answer was wrong"
        if kind == "calm":
            self.calm_gaps += gaps
        time.sleep(_AFTER_SECONDS)
        assert self._server.popen.poll() is None, "the server exited"
        return {
            "kind": kind,
            "times": done,
            "outcomes": dict(outcomes),
            "callers_failed": failed,
            "wrong": wrong,
            "answers": len(reader.first_seconds),
            "first_seconds": quantiles(reader.first_seconds),
            "gap_seconds": quantiles(gaps),
            "stood_still": longest > _STANDSTILL_SECONDS,
            "memory_mb": [before, during, self.memory_mb],
        }

    def _start_callers(self, kind: str, seconds: float) -> list[subprocess.Popen[bytes]]:
        numbers = [*map(str, self.ports), str(seconds)]
        # `nice` from the start, because imports would slow down the canary too.
        command = ["nice", "-n", _NICENESS, sys.executable, "-m", "campaigns.hostile_callers", kind, *numbers]
        return [
            subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            for _ in range(_CALLERS if kind != "calm" else 0)
        ]

    def end(self) -> int:
        return self._server.stop(signal.SIGTERM)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds for each kind")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), help=", ".join(KINDS))
    parser.add_argument("--model", default="", help="a model directory: the torch worker instead of the toy")
    parser.add_argument("--judge", choices=("yes", "no"), default="no", help="whether slow gaps are a failure")
    chosen = parser.parse_args(argv)
    is_clean = True
    with tempfile.TemporaryDirectory(prefix="lc") as folder:
        campaign = Campaign(Path(folder), chosen.model)
        campaign.run("calm", chosen.seconds)
        for kind in chosen.kinds:
            calm = campaign.run("calm", max(_MIN_CALM_SECONDS, _CALM_SHARE * chosen.seconds))
            found = campaign.run(kind, chosen.seconds)
            found["calm_gap_seconds"] = in_calm = quantiles(campaign.calm_gaps)
            found["faults"] = faults(calm) + faults(found)
            if not found["faults"]:
                found["times_calm"] = round(found["gap_seconds"]["p99"] / max(in_calm["p99"], 1e-4), 2)
            if chosen.judge == "yes" and found.get("times_calm", 0) > _MAX_TIMES_CALM:
                found["faults"].append("slow")
            print(json.dumps(found), flush=True)
            is_clean &= not found["faults"]
        is_clean &= campaign.end() == 0
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
