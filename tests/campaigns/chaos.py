"""Kill processes under load and check that clients see a pause and nothing else: `python -m campaigns.chaos --help`.

    python -m campaigns.chaos --of worker --kills 3000                    the toy worker over the real wire
    python -m campaigns.chaos --of worker --kills 500 --num-workers 2 --streams 32    random ones of two workers
    python -m campaigns.chaos --of scheduler --kills 300                  with the client library resuming answers
    python -m campaigns.chaos --kills 100 --model ../demo/model           the torch worker: constraints, beams ...
    python -m campaigns.chaos --kills 100 --model ../demo/model --tensor-parallel-size 2      and ranks of it
    python -m campaigns.chaos --kills 50 --model HYBRID     one with a recurrent state: `support.hybrid_model` makes it

Three tenants use Generate, Session, and Submit with Attach, with every sampling parameter, stop strings and log
probabilities. All fields are compared (`questions`). Most kills are SIGKILL; some workers get SIGTERM or SIGSTOP. A
kill comes after a random number of tokens, so that it hits prefills, decodes and recoveries alike.

With several workers, a random one dies, sometimes while another one is still starting. `killed_stream_pause_seconds`,
`living_stream_pause_seconds` and `control_stream_pause_seconds` are the longest gaps between two tokens around a death,
of streams on the dead worker, on a living one, and at moments without a death (see `campaigns.pauses`);
`killed_alone_...` has the streams whose worker was the only one, since the other was still starting;
`continued_elsewhere` counts the deaths after which every stream went on before a new worker had joined.

With `--model`, requests combine features at random (`mix`), and steps verify drafts by prompt lookup, or as
`--server-flags "--speculative-method draft_model --draft-model ../demo/model-tiny"` says. `features` counts
complete answers by feature, `recovered` those that lost a worker, `bad_features` those that were wrong, and
`pauses` has the longest gap around a kill by feature. `repeated` counts requests that a killed scheduler lost and
that the client does not resume (best_of, beams, Score, Embed): the campaign sends them again.

With `--deterministic` among `--worker-flags`, log probabilities, scores and vectors are compared bit for bit.

Prints a line of JSON. Exits with 1 unless each token index of each answer arrived once and is right, no answer failed,
and no process is left.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaigns.answers import CheckingReader, Tally
from campaigns.mix import FEATURES, mixed_questions, prepare
from campaigns.pauses import Death, Pauses, by_feature, quantiles
from campaigns.questions import ROUTES, AskMixed, toy_questions
from campaigns.server import TENANTS, TOY, Reader, Server, finish, is_orphan, ranks_of, report, write_tokens
from support.small_tokenizers import byte_level, save

from lineclear.client import Client

_MAX_TOKENS_BETWEEN = 400
_TOKENS_BETWEEN_SIGNALS = 64
_ORPHAN_SECONDS = 2.0
_SHARE_OF_WHOLE_WORKERS = 0.8  # of the deaths; the others may come while a worker is still starting
_DEATHS = {"kill": 0.9, "term": 0.095, "stop": 0.005}
"""Share of each way to end a worker. A stopped worker is detected after heartbeat_timeout_seconds."""
_DEATHS_WITH_STANDBY = {"kill": 0.8, "both": 0.1, "term": 0.095, "stop": 0.005}
"""With a standby, which may be killed together with the worker."""
_DEATHS_OF_MIX = {"kill": 0.85, "term": 0.11, "stop": 0.04}
_DEATHS_OF_RANKS = {"rank": 0.6, "kill": 0.25, "term": 0.11, "stop": 0.04}
"""With tensor parallelism, where one of the other ranks of a worker may be killed."""
_DRAFTS = ("--speculative-method", "prompt_lookup", "--no-speculative-adaptive")
_BLOCKS_PER_STREAM = 12  # of 16 tokens: fewer than a request with several outputs needs, so that some are preempted
_IN_FLOAT32 = "--dtype float32 --threads 1"
_TOLERANCE = 1e-3  # of log probabilities in float32, where another batch may round differently


@dataclass
class Campaign:
    """A server, its readers, and the figures."""

    target: str
    make_server: Callable[[], Server]
    ask: AskMixed
    num_streams: int
    rng: random.Random
    tokens: dict[str, str]
    tolerance: float = 0.0
    deaths: dict[str, float] = field(default_factory=lambda: dict(_DEATHS))
    tally: Tally = field(default_factory=Tally)
    detected: list[float] = field(default_factory=list)
    recovered: list[float] = field(default_factory=list)
    how: Counter[str] = field(default_factory=Counter)
    orphans: int = 0
    promoted: int | None = None
    """Number of promoted standbys; None without `--standby`."""
    of: str = ""
    """The process that is killed."""
    num_workers: int = 1
    dead: list[Death] = field(default_factory=list)
    continued_elsewhere: int = 0
    """Deaths after which every stream went on before a new worker had joined."""
    mix: bool = False
    max_seconds: float = math.inf
    """No kill begins after so long."""
    least_answers: int = 0
    """The campaign ends after so many."""
    needs_preemptions: bool = False
    recovers: frozenset[str] = frozenset()
    """The kills go on until answers with each of these features have lost a worker."""
    has_drafts: bool = True
    """False: the model has a recurrent state, and so no drafts."""

    def run(self, server: Server, of: str, kills: int) -> None:
        """Kill `kills` times, then wait until all answers are complete."""
        self.of = of
        self._wait_for_workers(server)
        self.has_drafts = self.mix and not server.logged("worker_has_recurrent_state")
        with ExitStack() as stack:
            readers = [self._reader(stack, number, of) for number in range(self.num_streams)]
            for reader in readers:
                reader.start()
            end = time.monotonic() + self.max_seconds
            done = 0
            while (done < kills or not self.tally.recovered.keys() >= self.recovers) and time.monotonic() < end:
                done += 1
                server.wait_for_tokens(readers, self.rng.randrange(_MAX_TOKENS_BETWEEN))
                server = self._kill_worker(server, readers) if of == "worker" else self._kill_server(server, readers)
            while self.tally.answers < self.least_answers:
                server.wait_for_tokens(readers, _MAX_TOKENS_BETWEEN)
            finish(readers)
        pids = self._children(server)
        code = server.stop(signal.SIGTERM)
        assert code == 0, f"the server exited with {code}"
        self._count_orphans(pids)

    def _reader(self, stack: ExitStack, number: int, of: str) -> CheckingReader:
        clients = {route: self._client(stack, number, route) for route in ROUTES}
        return CheckingReader(clients, self.ask, self.tally, tolerance=self.tolerance, may_forget=of == "scheduler")

    def _client(self, stack: ExitStack, number: int, route: str) -> Client:
        """Return the client of a tenant and route. Readers share it, so that a session has several requests."""
        known: dict[tuple[int, str], Client] = self.__dict__.setdefault("_clients", {})
        key = number % len(TENANTS), route
        if key not in known:
            token = self.tokens[TENANTS[key[0]]]
            known[key] = stack.enter_context(Client(self.target, token=token, sessions=route == "session"))
        return known[key]

    # --- kills -----------------------------------------------------------------------------------------------------

    def _kill_worker(self, server: Server, readers: Sequence[Reader]) -> Server:
        (how,) = self.rng.choices(list(self.deaths), list(self.deaths.values()))
        self.how[how] += 1
        joined = server.joined_pids()
        pid = self.rng.choice(joined)
        started_at = time.monotonic()
        if how == "term":
            self._terminate(server, readers, pid, started_at)
        else:
            killed = self.rng.choice(ranks_of(pid)) if how == "rank" else pid
            os.kill(killed, signal.SIGSTOP if how == "stop" else signal.SIGKILL)
            if how == "both" and (standby := server.standby_pid()) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(standby, signal.SIGKILL)
        lost = server.wait_for("worker_lost", after=started_at).read_at
        if how in ("kill", "rank"):
            self.detected.append(lost - started_at)
        self.dead.append(Death(started_at, lost, how in ("kill", "rank"), was_only=len(joined) == 1))
        if self.num_workers == 1:
            lost = server.wait_for("worker_joined", after=started_at).read_at
        self._wait_for_recovery(server, readers, lost, started_at)
        if self.num_workers > 1:
            self.continued_elsewhere += not server.logged("worker_joined", started_at)
            if self.rng.random() < _SHARE_OF_WHOLE_WORKERS:
                self._wait_for_workers(server)
            server.wait_until(lambda: bool(server.joined_pids()), "a worker to kill")
        return server

    def _wait_for_workers(self, server: Server) -> None:
        server.wait_until(lambda: len(server.joined_pids()) >= self.num_workers, f"{self.num_workers} workers")

    def _terminate(self, server: Server, readers: Sequence[Reader], pid: int, started_at: float) -> None:
        """Send SIGTERM until the worker is lost. A worker may continue after the first one while it has work."""
        while not server.logged("worker_lost", started_at):
            with contextlib.suppress(ProcessLookupError):  # it has exited, and the scheduler has not noticed yet
                os.kill(pid, signal.SIGTERM)
            server.wait_for_tokens(
                readers, _TOKENS_BETWEEN_SIGNALS, lambda: bool(server.logged("worker_lost", started_at))
            )

    def _kill_server(self, server: Server, readers: Sequence[Reader]) -> Server:
        pids = self._children(server)
        started_at = time.monotonic()
        self.how["kill"] += 1
        server.stop(signal.SIGKILL)
        self._count_orphans(pids)
        replacement = self.make_server()
        self._wait_for_recovery(replacement, readers, replacement.wait_for("worker_joined").read_at, started_at)
        return replacement

    def _wait_for_recovery(
        self, server: Server, readers: Sequence[Reader], joined_at: float, started_at: float
    ) -> None:
        """Wait until each reader has a token from the new worker, which ends the recovery."""
        server.wait_until(lambda: all(reader.last_at > joined_at for reader in readers), "a token for every stream")
        self.recovered.append(max(reader.last_at for reader in readers) - started_at)

    def _children(self, server: Server) -> list[int]:
        """Count the promotions of this server. Return the pids of all its workers, their ranks, and standbys."""
        if self.promoted is not None:
            self.promoted += sum(bool(event.get("standby")) for event in server.logged("worker_started"))
        ranks = [rank for pid in server.joined_pids() for rank in ranks_of(pid)]
        return [*server.worker_pids(), *ranks, *server.standby_pids()]

    def _count_orphans(self, pids: Sequence[int]) -> None:
        end = time.monotonic() + _ORPHAN_SECONDS
        while any(map(is_orphan, pids)) and time.monotonic() < end:
            time.sleep(0.01)
        self.orphans += sum(map(is_orphan, pids))

    # --- figures ----------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        tally = self.tally
        names = ("answers", "tokens", "lost", "duplicated", "altered", "resumes", "forgotten", "repeated")
        counters = ("wrong", "failed", "routes", "ends")
        found = {
            **{name: getattr(tally, name) for name in names},
            **{name: dict(getattr(tally, name)) for name in counters},
            "missing": self.missing(),
            "deaths": dict(self.how),
            "promoted": self.promoted or 0,
            "orphans": self.orphans,
            "detection_seconds": quantiles(self.detected),
            "recovery_seconds": quantiles(self.recovered),
        }
        if self.num_workers > 1:
            found |= {"continued_elsewhere": self.continued_elsewhere}
            found |= Pauses.of(tally.timelines, self.dead).figures()
        if self.mix:
            found |= {name: dict(getattr(tally, name)) for name in ("features", "recovered", "bad_features")}
            found |= {name: getattr(tally, name) for name in ("bad", "accepted_tokens", "preemptions")}
            gaps = by_feature(tally.timelines, self.dead)
            found["pauses"] = {name: quantiles(values) for name, values in gaps.items()}
        return found

    def missing(self) -> list[str]:
        """Name the events that this campaign needs and that never happened; without them it proves nothing."""
        did = {
            **{route: self.tally.routes[route] for route in ROUTES},
            "deaths": self.how.total(),
            "recoveries": len(self.recovered),
            "resumes": self.tally.resumes if self.of == "scheduler" else 1,
            "promotions": 1 if self.promoted is None else self.promoted,
            "continued elsewhere": self.continued_elsewhere if self.num_workers > 1 else 1,
            **({name: self.tally.features[name] for name in FEATURES} if self.mix else {}),
            "accepted drafts": self.tally.accepted_tokens if self.mix and self.has_drafts else 1,
            "preemptions": self.tally.preemptions if self.needs_preemptions else 1,
        }
        return [name for name, times in did.items() if not times]

    @property
    def is_clean(self) -> bool:
        """Whether clients noticed nothing but a pause."""
        return self.tally.is_clean and not self.orphans and not self.missing()


# --- the command -----------------------------------------------------------------------------------------------------


def campaign(
    folder: Path,
    *,
    of: str,
    kills: int,
    streams: int,
    seed: int,
    model: str = "",
    standby: bool = False,
    num_workers: int = 1,
    tensor_parallel_size: int = 1,
    server_flags: str = "",
    worker_flags: str = _IN_FLOAT32,
    answers: int = 0,
    num_questions: int = 0,
    max_seconds: float = math.inf,
    recovers: Iterable[str] = (),
    deaths: dict[str, float] | None = None,
) -> Campaign:
    """Run a campaign, of mixed requests if there is a `model`. `is_clean` is its verdict."""
    target = f"unix:{folder}/api.sock"
    path, tokens = write_tokens(folder)
    flags = ["--token-file", str(path)]
    more = [*(["--standby-worker"] if standby else []), *server_flags.split()]
    more += ["--num-workers", str(num_workers)] if num_workers > 1 else []
    served, adapters = prepare(folder, Path(model)) if model else (Path(), [])
    of_worker = ["--", *worker_flags.split()]
    if tensor_parallel_size > 1:  # the expected answers too: a drawn token may hang on the order in which ranks add up
        of_worker += ["--tensor-parallel-size", str(tensor_parallel_size)]
    is_exact = "--deterministic" in of_worker

    def make_server() -> Server:
        if model:
            per_stream = _BLOCKS_PER_STREAM // 2 if is_exact else _BLOCKS_PER_STREAM
            num_blocks = ["--num-blocks", str(per_stream * streams // num_workers)]
            drafts = () if "--speculative-method" in more else _DRAFTS
            mixed = [*flags, *more, "--model", str(served), *adapters, *drafts, *of_worker, *num_blocks]
            return Server(target, mixed)
        return Server(target, [*flags, *more, "--model", str(save(folder, byte_level()))], toy=TOY)

    ask: AskMixed = toy_questions(seed, ROUTES)
    server = make_server()  # it starts while another one gives the expected answers
    if model:
        plain = [*flags, "--model", str(served), *adapters, "--pipeline-depth", "1", "--no-prefix-cache", *of_worker]
        other = f"unix:{folder}/plain.sock"
        ask = mixed_questions(other, Server(other, plain), num_questions or 4 * streams, seed, tokens[TENANTS[0]])
    default = _DEATHS_WITH_STANDBY if standby else _DEATHS_OF_MIX if model else _DEATHS
    default = _DEATHS_OF_RANKS if tensor_parallel_size > 1 else default
    rng = random.Random(seed)
    chosen = Campaign(
        *(target, make_server, ask, streams, rng, tokens),
        tolerance=_TOLERANCE if model and not is_exact else 0.0,
        deaths=dict(deaths or default),
    )
    chosen.promoted = 0 if standby else None
    chosen.num_workers, chosen.mix, chosen.max_seconds = num_workers, bool(model), max_seconds
    chosen.least_answers, chosen.needs_preemptions = answers, is_exact
    chosen.recovers = frozenset(recovers)
    chosen.run(server, of, kills)
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=("worker", "scheduler"), default="worker")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="", help="a model directory: the torch worker, and requests of all features")
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks of each worker of --model")
    parser.add_argument("--server-flags", default="", help="more flags of the server of --model")
    parser.add_argument("--worker-flags", default=_IN_FLOAT32, help="flags of its workers; --deterministic: bitwise")
    parser.add_argument("--answers", type=int, default=0, help="go on until so many answers are complete")
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="kill no process after so long")
    parser.add_argument("--standby", action="store_true", help="run a standby worker")
    return report(vars(parser.parse_args(argv)), campaign)


if __name__ == "__main__":
    sys.exit(main())
