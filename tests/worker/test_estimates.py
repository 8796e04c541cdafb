"""Estimated decode steps of Llama 8 B on an H200, by counted launches: the table in docs/performance.md.

The counts are of a small Llama with two and with three layers, whose operations are those of the large one. All else is
arithmetic with figures that others measured.
"""

from __future__ import annotations

import pytest
from support.families import tiny_model
from support.launches import Launches, counted, fused_on_cuda, without_kernels
from support.sources import REPOSITORY

from lineclear.wire.messages import Sampling
from lineclear.worker.model.loader import wrap_model

COPY_RATE, MATMUL_RATE = 4.3e12, 780e12
"""Bytes read and written, and floating-point operations in bfloat16, a second."""
LAUNCH_SECONDS, KERNEL_SECONDS = (4.5e-6, 9e-6), 1.75e-6
"""Assumed: of the host for a launch alone and with the Python around it, and of the device for each kernel beside its
reads."""
PARAMETERS, EMBEDDINGS = 8_030_261_248, 128_256 * 4096
NUM_LAYERS, CONTEXT, POSITION_BYTES = 32, 1024, 32 * 2 * 8 * 128 * 2
BATCHES = (1, 32, 256)
CHANGES = {"vocab_size": 256, "max_position_embeddings": 1024}  # as a large vocabulary, a multiple of 128


@pytest.fixture(name="launches")
def make_launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return without_kernels(monkeypatch)


def count(
    launches: Launches, num_layers: int, batch_size: int, *, graphs: bool, prompt_len: int = 3, is_fused: bool = True
) -> int:
    loaded = wrap_model(tiny_model("llama", num_hidden_layers=num_layers, **CHANGES))
    loaded = fused_on_cuda(loaded) if is_fused else loaded
    counts, _ = counted(loaded, batch_size, launches, Sampling(), graphs=graphs, prompt_len=prompt_len)
    return sum(counts.values()) - counts["replay"]


def floor(batch: int) -> float:
    """Return the seconds to copy all weights, keys and values."""
    return (2 * PARAMETERS + batch * CONTEXT * POSITION_BYTES) / COPY_RATE


def per_layer_and_rest(launches: Launches, *, is_fused: bool) -> tuple[int, int]:
    """Return the launches of an eager step. A context of more than one split needs one more kernel a layer."""
    two, three = (count(launches, n, 1, graphs=False, prompt_len=600, is_fused=is_fused) for n in (2, 3))
    return three - two, two - 2 * (three - two)


def device_seconds(batch: int, kernels: int) -> float:
    products = 2 * (PARAMETERS - EMBEDDINGS) * batch / MATMUL_RATE
    beyond = max(0.0, products - 2 * PARAMETERS / COPY_RATE)
    return floor(batch) + beyond + kernels * KERNEL_SECONDS


def estimates(eager: int, outside: int) -> str:
    """Return the table for so many launches of an eager step, and operations outside of a graph."""
    lines = [
        "| sequences | floor ms | graph: ms | of the floor | eager: ms | of the floor |",
        "|---|---|---|---|---|---|",
    ]
    for batch in BATCHES:
        device = device_seconds(batch, eager - outside)
        steps = [max(eager * seconds, device) for seconds in LAUNCH_SECONDS]
        ms, ratios = (" to ".join(f"{step / x:.{n}f}" for step in steps) for x, n in ((1e-3, 1), (floor(batch), 2)))
        graph = f"{device * 1e3:.1f} | {device / floor(batch):.2f}"
        lines.append(f"| {batch} | {floor(batch) * 1e3:.1f} | {graph} | {ms} | {ratios} |")
    return "\n".join(lines)


def test_launches_do_not_depend_on_the_batch(launches: Launches) -> None:
    assert len({count(launches, 2, batch, graphs=False) for batch in BATCHES}) == 1


def test_page_has_the_estimates_of_these_counts(launches: Launches) -> None:
    (per_layer, rest), modules = (per_layer_and_rest(launches, is_fused=x) for x in (True, False))
    outside = count(launches, 2, 1, graphs=True, prompt_len=600)
    page = " ".join((REPOSITORY / "docs/performance.md").read_text(encoding="utf-8").split())
    eager = rest + NUM_LAYERS * per_layer
    by_modules = NUM_LAYERS * modules[0] + modules[1]
    slower = [f"{device_seconds(batch, by_modules - outside) / floor(batch):.2f}" for batch in BATCHES]
    kernels, allowed = eager - outside, int(floor(1) * 0.25 / KERNEL_SECONDS)
    parts = (
        f"{per_layer} launches a layer and {rest} beside the layers, so {eager:,}",
        f"{outside} operations remain outside of the graph, and {kernels:,} kernels in it",
        f"A step of one sequence within 1.25 of its floor may have {allowed} kernels, {allowed // NUM_LAYERS} a layer",
        estimates(eager, outside),
        f"transformers' modules, of other families: {modules[0]} launches a layer, {by_modules:,} in all, so a graph"
        f" takes {', '.join(slower)} of the floor",
    )
    missing = [part for part in parts if " ".join(part.split()) not in page]
    assert not missing, "docs/performance.md needs:\n" + "\n".join(missing)
