"""Replace the model repeatedly under streams, and look for answers that mix two models.

python -m campaigns.rolling --updates 100

Each update gives the toy worker another model. Then it kills the worker, or stops or kills the server, and another
server takes the address. Half of the readers restart an answer (`on_model_change="restart"`), the others get the error.
Each answer, and each part of one, is compared with the expected one of the model that Started named. Prints a line of
JSON; exits with 1 unless each answer is of one model or ended with MODEL_CHANGED.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaigns.server import TOY, Reader, Server, finish, report
from support.small_tokenizers import byte_level, save
from support.toy import expected, fingerprint
from support.toy_service import VOCABULARY, text_of

from lineclear.client import Client, RetryPolicy
from lineclear.errors import LineclearError, ModelChanged
from lineclear.wire.messages import Sampling

_MAX_TOKENS_BETWEEN = 200
_DRAIN_SECONDS = 0.2  # short, so that stopping a server cuts answers off
# One answer may live through many updates. Pauses are short, so that clients resume while the new server starts.
_RETRY = RetryPolicy(first_pause_seconds=0.02, max_pause_seconds=0.5, max_resumes=10_000)


@dataclass
class Tally:
    """Counts of answers. Many threads write it under `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    answers: int = 0
    tokens: int = 0
    whole: int = 0
    changed: int = 0
    """Answers that ended with MODEL_CHANGED."""
    restarts: int = 0
    resumes: int = 0
    mixed: int = 0
    """Answers of two models, or with another wrong token or text."""
    lost: Counter[str] = field(default_factory=Counter)
    """Answers that ended in another way, by error."""
    models: set[str] = field(default_factory=set)
    """Models of complete answers."""


@dataclass
class Part:
    """The part of an answer that one model made."""

    model: str
    tokens: list[int] = field(default_factory=list)
    text: str = ""


class RollingReader(Reader):
    """Request answers, and compare each part with the answer of its model."""

    def __init__(self, target: str, tally: Tally, rng: random.Random, restarts: bool) -> None:
        super().__init__()
        self._tally, self._rng, self._restarts = tally, rng, restarts
        policy: Any = "restart" if restarts else "error"
        self._client = Client(target, retry=_RETRY, on_model_change=policy)

    def run(self) -> None:
        with self._client:
            super().run()

    def ask(self) -> None:
        try:
            self._ask(self._client)
        except Exception as error:  # a reader that crashed must not look like one that waits
            with self._tally.lock:
                self._tally.lost[f"{type(error).__name__}: {error}"] += 1

    def _ask(self, client: Client) -> None:
        prompt = tuple(self._rng.randrange(VOCABULARY) for _ in range(self._rng.randrange(1, 40)))
        seed, max_tokens = self._rng.randrange(2**32), self._rng.randrange(20, 300)
        parts: list[Part] = []
        outcome, gaps = "whole", 0
        stream = client.stream(list(prompt), seed=seed, max_tokens=max_tokens, ignore_eos=True)
        try:
            with stream:
                for delta in stream:
                    if delta.started is not None:
                        assert delta.restarted == bool(parts), "a restart that is not marked"
                        parts.append(Part(delta.started.model_fingerprint))
                    gaps += bool(delta.token_ids) and delta.first_index != len(parts[-1].tokens)
                    parts[-1].tokens += delta.token_ids
                    parts[-1].text += delta.text
                    if delta.token_ids:
                        self.progress(len(delta.token_ids))
        except ModelChanged as error:
            outcome = "changed"
            gaps += bool(parts) and (error.token_ids, error.text) != (tuple(parts[-1].tokens), parts[-1].text)
        except LineclearError as error:
            outcome = error.reason
        asked = prompt, Sampling(seed=seed), max_tokens, VOCABULARY
        right = {part.model: expected(*asked, _model_of(part)) for part in parts}
        bad = gaps + sum(not is_prefix(part, right[part.model]) for part in parts)
        if outcome == "whole":
            last = parts[-1]
            whole = right[last.model]
            bad += (last.tokens, last.text) != (whole, text_of(whole))
            bad += (stream.result.token_ids, stream.result.text) != (tuple(whole), text_of(whole))
        self._count(outcome, parts, bad, stream.resumes, stream.restarts)

    def _count(self, outcome: str, parts: Sequence[Part], bad: int, resumes: int, restarts: int) -> None:
        tally = self._tally
        with tally.lock:
            tally.answers += 1
            tally.tokens += sum(len(part.tokens) for part in parts)
            tally.resumes += resumes
            tally.restarts += restarts
            tally.mixed += bad > 0
            if outcome == "whole":
                tally.whole += 1
                tally.models.add(parts[-1].model)
            elif outcome == "changed" and not self._restarts:
                tally.changed += 1
            else:
                tally.lost[outcome] += 1


def _model_of(part: Part) -> str:
    return part.model.removeprefix(fingerprint(""))


def is_prefix(part: Part, right: Sequence[int]) -> bool:
    return part.tokens == right[: len(part.tokens)] and text_of(right).startswith(part.text)


class Campaign:
    """A server with a changing model, its readers, and the figures."""

    def __init__(self, folder: Path, streams: int, seed: int) -> None:
        self.target = f"unix:{folder}/api.sock"
        self.tally = Tally()
        self.updates: Counter[str] = Counter()
        self.seconds: list[float] = []
        """Seconds from the start of an update until each reader has a new token."""
        self._rng = random.Random(seed)
        self._model = folder / "name"
        self._model.write_text("m0")
        self._directory = save(folder / "model", byte_level())
        rngs = [random.Random(seed << 16 | number) for number in range(streams)]
        self._readers = [RollingReader(self.target, self.tally, rng, n % 2 == 0) for n, rng in enumerate(rngs)]

    def run(self, updates: int) -> None:
        """Update the model `updates` times, then wait until all answers are complete."""
        server = self._start()
        server.wait_for("worker_joined")
        for reader in self._readers:
            reader.start()
        for number in range(1, updates + 1):
            server.wait_for_tokens(self._readers, self._rng.randrange(_MAX_TOKENS_BETWEEN))
            kind = ("worker killed", "server stopped", "worker killed", "server killed")[number % 4]
            self.updates[kind] += 1
            started_at = time.monotonic()
            self._model.write_text(f"m{number}")
            if kind == "worker killed":
                os.kill(server.worker_pids()[-1], signal.SIGKILL)
            else:
                server.stop(signal.SIGTERM if kind == "server stopped" else signal.SIGKILL)
                server = self._start()
            joined_at = server.wait_for("worker_joined", after=started_at).read_at
            server.wait_until(
                lambda at=joined_at: all(reader.last_at > at for reader in self._readers), "a token for every reader"
            )
            self.seconds.append(time.monotonic() - started_at)
        finish(self._readers)
        code = server.stop(signal.SIGTERM)
        assert code == 0, f"the server exited with {code}"

    def _start(self) -> Server:
        flags = ["--model", str(self._directory), "--drain-timeout-seconds", str(_DRAIN_SECONDS)]
        flags += ["--drain-linger-seconds", "0"]
        return Server(self.target, flags, toy=TOY | {"model_file": str(self._model)})

    def figures(self) -> dict[str, Any]:
        tally = self.tally
        names = ("answers", "tokens", "whole", "changed", "restarts", "resumes", "mixed")
        ordered = sorted(self.seconds)
        return {
            "updates": dict(self.updates),
            **{name: getattr(tally, name) for name in names},
            "lost": dict(tally.lost),
            "models": len(tally.models),
            "missing": self.missing(),
            "update_seconds": {"p50": round(ordered[len(ordered) // 2], 2), "max": round(ordered[-1], 2)},
        }

    @property
    def is_clean(self) -> bool:
        """Whether each answer is of one model, or ended with MODEL_CHANGED where that was requested."""
        return not (self.tally.mixed or self.tally.lost or self.missing())

    def missing(self) -> list[str]:
        """Name the events that this campaign needs and that never happened; without them it proves nothing."""
        tally = self.tally
        counts = {name: getattr(tally, name) for name in ("whole", "changed", "restarts")}
        counts |= {"updates": len(self.seconds), "models": max(0, len(tally.models) - 1)}
        return [name for name, times in counts.items() if not times]


def campaign(folder: Path, *, updates: int, streams: int, seed: int) -> Campaign:
    """Run a campaign. `is_clean` is its verdict."""
    chosen = Campaign(folder, streams, seed)
    chosen.run(updates)
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    return report(vars(parser.parse_args(argv)), campaign)


if __name__ == "__main__":
    sys.exit(main())
