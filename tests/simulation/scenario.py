"""The scenario of a run: limits, workers and faults; and what is drawn while it runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from support.toy import expected, fingerprint, with_adapter
from support.toy_grammar import grammar, marker

from lineclear.scheduler.core.limits import SWITCHABLE, CoreLimits
from lineclear.scheduler.core.policies import PREEMPTION_POLICIES, QUEUE_ORDERS, STRATEGIES, PolicySettings
from lineclear.scheduler.core.sequence import Request, Scoring
from lineclear.wire.messages import Pooling, PoolingKind, Sampling

MODELS = ("", "b")


@dataclass(frozen=True, slots=True)
class Capacity:
    num_blocks: int
    block_size: int
    num_slots: int
    max_model_len: int
    max_step_tokens: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything about a run that is drawn before its first call."""

    seed: int
    liveness: bool
    """Faults stop after `ticks` actions, and then all requests must end. Otherwise faults continue to the end."""
    ticks: int
    limits: CoreLimits
    capacity: Capacity
    vocab_size: int
    weights: dict[str, float]
    """Relative frequency of each action."""
    longest_prompt: int
    shortest_answer: int
    """Least max_tokens; 1 draws from all lengths."""
    change: float
    """Share of new workers with another capacity than the first."""
    pace: int
    """Plans computed and results delivered between two actions."""
    cancel_after_preemption: float
    """Share of plans with a preemption after which a request is cancelled."""
    late: float
    """Share of engine iterations that do not plan, or plan only once."""
    bad_per_mille: int
    """Share of contexts whose logits are not finite."""
    poison_per_mille: int
    """Share of requests that crash the worker at some position of their answer."""
    step_seconds: tuple[float, float, float]
    """Per step, per token, and per cached position that a token attends to."""
    codec: bool
    """Messages cross the wire codec in the unchecked run."""
    templates: tuple[tuple[int, ...], ...]
    salts: tuple[bytes, ...]
    deadlines: float
    """Share of requests with a deadline."""
    num_ids: int
    resumed: float = 0.0
    """Share of requests with the beginning of their answer."""
    behind: float = 0.0
    """Share of prompts that are the first template and a few more tokens."""
    num_tenants: int = 1
    updates: float = 0.0
    """Share of new workers that may have another model than the last."""
    num_workers: int = 1
    """Workers that are joined at the same time, if none is lost."""
    slow: float = 0.0
    """Share of workers that compute a step only now and then."""
    estimated: float = 0.0
    """Share of requests with an expected output length, right or wrong."""
    unsent: float = 0.0
    """Share of plans that do not reach their worker, which is lost a little later."""
    scored: float = 0.0
    """Share of requests that ask for scores of their prompt; half of them for no answer."""
    drafted: float = 0.0
    """Share of requests whose rows verify drafts."""
    pooled: float = 0.0
    """Share of requests that ask for a vector."""
    switched: tuple[str, ...] = ()
    """The limits that an operator changes; empty: any."""
    adapters: tuple[bytes, ...] = ()
    """Keys of adapters, which are loaded and unloaded; requests use them or none."""
    constrained: float = 0.0
    late_per_mille: int = 0  # masks that are not ready in a step
    """Share of requests with a grammar, which the workers compile first."""
    beams: float = 0.0
    """Share of beam searches among the requests with several outputs; half of the others choose among candidates."""
    swap_blocks: int = 0
    """Host blocks of most workers."""
    swap_seconds: float = 0.0
    """To copy a block out or in."""
    has_state: bool = False
    """Whether the model has recurrent state."""
    state_snapshots: int = 0
    """Snapshots of states that a worker keeps."""


def is_bad(context: Sequence[int], per_mille: int) -> bool:
    """Return whether the logits after `context` are non-finite, for that share of contexts."""
    return per_mille > 0 and (sum(context) * 2654435761 + len(context) * 40503) % 1000 < per_mille


def poison(seed: int, per_mille: int) -> str:
    """Return the effect of the request with that seed on its worker: "crash", "memory" (out of memory) or ""."""
    if seed * 2654435761 % 1000 >= per_mille:
        return ""
    return "memory" if seed % 3 == 0 else "crash"


def draw_capacity(rng: random.Random) -> Capacity:
    block_size = rng.choice((1, 2, 3, 4, 4, 8, 16))
    positions = rng.choice((rng.randint(4, 40), rng.randint(20, 80), rng.randint(40, 120), rng.randint(100, 600)))
    return Capacity(
        num_blocks=max(1, min(64, positions // block_size)),
        block_size=block_size,
        num_slots=rng.choice((rng.randint(1, 8), 8)),
        max_model_len=rng.choice((16, 64, 200)),
        max_step_tokens=rng.choice((rng.randint(1, 16), 64, 4096)),
    )


def draw_limits(rng: random.Random) -> CoreLimits:
    return CoreLimits(
        max_batch_size=rng.choice((rng.randint(1, 8), 8)),
        target_batch_tokens=rng.choice((rng.randint(1, 4), rng.randint(4, 16), rng.randint(16, 64), 64)),
        pipeline_depth=rng.randint(1, 3),
        max_queue_size=rng.choice((rng.randint(1, 4), rng.randint(4, 40), 1000, 1000)),
        max_queue_tokens=rng.choice((rng.randint(1, 100), 400, 1_000_000, 1_000_000)),
        max_preemptions=rng.randint(0, 4),
        max_queue_overtakes=rng.choice((0, 1, 3, 16)),
        max_isolated_crashes=rng.choice((1, 1, 2)),
        max_isolated_kills=rng.choice((1, 3, 3)),
        prefix_cache=rng.random() < 0.7,
        adaptive_drafts=True,
        cache_secret=b"secret" if rng.random() < 0.5 else b"",
        batching_strategy=rng.choice(tuple(STRATEGIES)),
        scheduling_policy=rng.choice(tuple(QUEUE_ORDERS)),
        preemption_policy=rng.choice(tuple(PREEMPTION_POLICIES)),
        policy=PolicySettings(
            min_batch_size=rng.choice((1, 1, 2, 4)),
            batch_timeout_seconds=rng.choice((0.0, 0.05, 0.1, rng.random())),
            priority_aging_seconds=rng.choice((0.01, 1.0, 30.0)),
            target_inter_token_latency_seconds=rng.choice((0.0, 0.005, 0.05, 0.2)),
            max_prefill_slowdown=rng.choice((1.0, 2.0, 2.0, 50.0)),
        ),
    )


def draw_switch(rng: random.Random, limits: CoreLimits, names: Sequence[str] = ()) -> CoreLimits:
    """Return limits of which some differ, as an operator may change them; with `names` those of them."""
    other = draw_limits(rng)
    if names:
        return replace(limits, **{name: getattr(other, name) for name in names})
    if rng.random() < 0.3:
        return replace(limits, scheduling_policy="fair" if limits.scheduling_policy != "fair" else "fifo")
    names = rng.sample(sorted(SWITCHABLE), rng.choice((1, 1, 2, 4, len(SWITCHABLE))))
    return replace(limits, **{name: getattr(other, name) for name in names})


def draw_request(
    rng: random.Random, scenario: Scenario, number: int, now: float, recent: Sequence[tuple[int, ...]]
) -> Request:
    """Return a request with `number` as its seed. Some prompts continue one of the `recent` conversations."""
    capacity, vocab_size = scenario.capacity, scenario.vocab_size
    max_len = min(capacity.max_model_len, capacity.num_blocks * capacity.block_size + 1)
    lengths = (
        1,
        rng.randint(1, 6),
        rng.randint(1, 6),
        rng.randint(1, 24),
        rng.randint(1, max(1, max_len // 2)),
        max_len,
    )
    length = min(rng.choice(lengths), scenario.longest_prompt)
    prompt: list[int] = []
    if recent and rng.random() < 0.2:
        prompt += recent[rng.randrange(len(recent))]
    elif scenario.templates and rng.random() < 0.6:
        template = rng.choice(scenario.templates)
        prompt += template[: rng.randint(1, len(template))]
    if scenario.behind and rng.random() < scenario.behind:
        prompt = list(scenario.templates[0])
        length = len(prompt) + rng.randint(1, 8)
    prompt = prompt[:length]
    prompt += [rng.randrange(vocab_size) for _ in range(length - len(prompt))]
    max_tokens = 1 if rng.random() < 0.15 else rng.choice((rng.randint(1, 8), rng.randint(4, 40)))
    if scenario.shortest_answer > 1:
        max_tokens = rng.randint(scenario.shortest_answer, 40)
    if rng.random() < 0.9:
        max_tokens = max(1, min(max_tokens, max_len - length))
    eos = frozenset({0}) if rng.random() < 0.4 else frozenset()
    stop = frozenset({rng.randrange(vocab_size)}) - eos if rng.random() < 0.2 else frozenset()
    deadline = None
    if rng.random() < scenario.deadlines:
        deadline = now + rng.choice((-0.1, 0.0, rng.random() * 0.1, rng.random() * 3))
    request = Request(
        request_id=f"r{rng.randrange(scenario.num_ids) if scenario.num_ids < 1000 else number}",
        prompt=tuple(prompt),
        sampling=Sampling(
            seed=number,
            stop_ids=tuple(sorted(eos | stop)),
            min_tokens=rng.choice((0, 0, 0, rng.randint(1, 8))) if len(eos | stop) < vocab_size else 0,
            logprobs=rng.choice((-1, -1, -1, 0, 2)),
        ),
        max_tokens=max_tokens,
        eos_ids=eos,
        stop_ids=stop,
        priority=rng.choice((128, 128, 0, 3, 255)),
        deadline=deadline,
        cache_salt=rng.choice(scenario.salts),
    )
    if scenario.num_tenants > 1:
        # The first tenant sends about half of all requests.
        tenant = max(0, rng.randrange(2 * scenario.num_tenants) - scenario.num_tenants)
        request = replace(request, tenant=f"t{tenant}")
    if scenario.adapters:
        request = replace(request, adapter=rng.choice((b"", *scenario.adapters)))
    if scenario.constrained and rng.random() < scenario.constrained:
        request = _constrained(rng, request, vocab_size)
    model = rng.choice(MODELS) if scenario.updates else MODELS[0]
    if scenario.updates and rng.random() < 0.3:
        request = replace(request, model_fingerprint=fingerprint(model))
    if scenario.resumed and rng.random() < scenario.resumed:
        if scenario.updates:
            request = replace(request, model_fingerprint=fingerprint(model))
        whole = expected(request.prompt, request.sampling, max_tokens, vocab_size, with_adapter(model, request.adapter))
        request = replace(request, output=tuple(whole[: rng.randrange(len(whole))] if whole else ()))
    if scenario.estimated and rng.random() < scenario.estimated:
        request = replace(request, expected_tokens=rng.choice((1, rng.randint(1, request.max_tokens))))
    if scenario.estimated:
        request = replace(request, wants_position=rng.random() < 0.5)
    if scenario.drafted and not request.sampling.grammar and rng.random() < scenario.drafted:
        request = replace(request, max_drafts=rng.choice((1, 2, 4, 12)))
    if scenario.scored and len(prompt) > 1 and rng.random() < scenario.scored:
        return _with_scores(rng, request)
    if scenario.pooled and rng.random() < scenario.pooled:
        return _pooled(rng, request)
    return request


def _constrained(rng: random.Random, request: Request, vocab_size: int) -> Request:
    """Ask for an answer in a form, from the first token on or behind a marker."""
    stuck_at = rng.choice((-1, -1, -1, -1, rng.choice((0, 1, 4))))
    text = grammar(rng.randrange(4), rng.choice((1, 4, 12, 60)), stuck_at)
    if rng.random() < 0.05:
        text = grammar(0, 1, is_broken=True)
    start = marker([rng.randrange(vocab_size) for _ in range(rng.choice((1, 2)))]) if rng.random() < 0.2 else ""
    stop_ids = tuple(sorted({0, *request.sampling.stop_ids}))
    sampling = replace(request.sampling, grammar=text, grammar_start=start, stop_ids=stop_ids)
    return replace(request, sampling=sampling, eos_ids=frozenset({0}), stop_ids=request.stop_ids - {0})


def draw_siblings(
    rng: random.Random, scenario: Scenario, first: Request, numbers: Sequence[int], model: str
) -> list[Request]:
    """Return the requests of the outputs of a request, the first of them with a place in the queue.

    Each has a seed of its own, its number. An output that another server began may go on.
    """
    found = []
    for number in numbers:
        request = replace(
            first,
            request_id=f"s{number}",
            sampling=replace(first.sampling, seed=number),
            is_sibling=bool(found),
            wants_position=first.wants_position and not found,
            scoring=None if found else first.scoring,
            output=(),
        )
        if first.output:
            whole = expected(
                request.prompt,
                request.sampling,
                request.max_tokens,
                scenario.vocab_size,
                with_adapter(model, request.adapter),
            )
            request = replace(request, output=tuple(whole[: rng.randrange(len(whole))] if whole else ()))
        found.append(request)
    return found


def _with_scores(rng: random.Random, request: Request) -> Request:
    """Ask for scores of the prompt, of a part or all of it."""
    last = len(request.prompt) - 1
    scoring = Scoring(rng.choice((0, rng.randrange(last), last - 1)), rng.choice((0, 0, 2)))
    if rng.random() < 0.5:
        return replace(request, scoring=scoring)
    return replace(request, scoring=scoring, max_tokens=0, output=(), expected_tokens=0)


def _pooled(rng: random.Random, request: Request) -> Request:
    pooling = Pooling(rng.choice(tuple(PoolingKind)), rng.choice((0, 8)), rng.random() < 0.5)
    return replace(request, pooling=pooling, max_tokens=0, output=(), expected_tokens=0)


FAULTS = (
    *("cancel", "finish", "crash", "replace", "step_error", "bad_token"),
    *("malformed", "stale", "clear_cache", "drain"),
)


def draw_mixed(rng: random.Random, seed: int) -> Scenario:
    """Draw the scenario of a seed without its variants."""
    vocab_size = rng.choice((3, 17, 97, 97))
    weights = {"submit": rng.choice((0.5, 1.0, 2.0)), "burst": rng.choice((0.0, 0.1, 0.4)), "idle": 0.3}
    weights["launch"] = rng.choice((2.0, 5.0))
    weights["deliver"] = rng.choice((2.0, 5.0))
    for fault in FAULTS:
        if rng.random() < 0.3:
            weights[fault] = rng.choice((0.05, 0.2, 0.8)) * (0.15 if fault in ("drain", "replace", "oom") else 1.0)
    return Scenario(
        seed=seed,
        liveness=seed % 2 == 1,
        ticks=rng.choice((30, 60, 90, 120)),
        limits=draw_limits(rng),
        capacity=draw_capacity(rng),
        vocab_size=vocab_size,
        weights=weights,
        longest_prompt=200,
        shortest_answer=1,
        change=0.3,
        pace=rng.choice((0, 1, 2)),
        cancel_after_preemption=0.0,
        late=rng.choice((0.0, 0.0, 0.3)),
        bad_per_mille=rng.choice((0, 0, 0, 10, 50)),
        poison_per_mille=rng.choice((0, 0, 0, 0, 50)),
        step_seconds=(rng.choice((0.0, 0.01)), rng.choice((0.0, 0.0005, 0.01)), rng.choice((0.0, 1e-5))),
        codec=rng.random() < 0.25,
        templates=tuple(
            tuple(rng.randrange(vocab_size) for _ in range(rng.choice((4, 20, 60)))) for _ in range(rng.randrange(3))
        ),
        salts=(b"", b"a", b"b")[: rng.randint(1, 3)],
        deadlines=rng.choice((0.0, 0.0, 0.2, 0.7)),
        num_ids=rng.choice((6, 1000, 1000, 1000)),
    )
