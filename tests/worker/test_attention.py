"""Every attention backend equals the reference, and reads only cells that its sequence wrote."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from support.attention_pools import fill_pools
from support.kernel_variants import needs_kernels
from torch import Tensor

from lineclear.wire.messages import BlockCopy
from lineclear.worker.attention.base import AttentionBackend, Batch, Chunk, LayerSpec, block_bytes, pack_chunks
from lineclear.worker.attention.reference import ReferenceAttention, attention
from lineclear.worker.attention.registry import BACKENDS, choose
from lineclear.worker.kernels.native_library import ELEMENTS, NONE

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
CASES = [
    *(pytest.param("native", dtype, "cpu", marks=needs_kernels) for dtype in ELEMENTS),
    *(
        pytest.param(name, dtype, device, marks=ON_GPU if device == "cuda" else [])
        for name in sorted(set(BACKENDS) - {"native", "reference", "flash"})
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for device in ("cpu", "cuda")
        if (name, device) != ("triton_paged", "cpu")
    ),
]
"""Every backend but the reference, with dtype and device."""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 8e-3}
CPU = torch.device("cpu")


@dataclass
class Story:
    """Sequences that grow step by step, a random shape each, over one pool."""

    seed: int
    dtype: torch.dtype
    device: torch.device
    native: bool = False
    """Only shapes that the native backend takes."""
    kv_dtype: torch.dtype | None = None
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        torch.manual_seed(self.seed)
        self.block_size = rng.choice([16, 32, 48] if self.native else [1, 4, 16, 32])
        self.layers = [self._layer() for _ in range(3)]
        lengths = [rng.randint(1, 90) for _ in range(rng.randint(1, 9))]
        self.tables = []
        free = list(range(sum(-(-n // self.block_size) for n in lengths) + 5))
        rng.shuffle(free)
        self.num_blocks = len(free)
        for n in lengths:
            count = -(-n // self.block_size)
            self.tables.append(np.array(free[:count], np.int64))
            del free[:count]
        self.lengths, self.done = lengths, [0] * len(lengths)

    def _layer(self) -> LayerSpec:
        rng = self.rng
        kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 4, 7, 12] if self.native else [1, 2, 4, 7])
        head_dim = rng.choice([16, 64, 80, 256] if self.native else [4, 8, 24, 64])
        window = rng.choice([0, 0, 1, 7, 16, 40])
        return LayerSpec(
            num_heads=kv_heads * group,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scaling=rng.choice([0.5, 1.0, 1.5]) * head_dim**-0.5,
            window=window,
            softcap=rng.choice([0.0, 0.0, 2.5]),
            sinks=torch.randn(kv_heads * group).to(self.device, self.dtype) if rng.random() < 0.3 else None,
            chunk=0 if window else rng.choice([0, 1, 7, 16, 40]),
            value_dim=0 if self.native or rng.random() < 0.6 else head_dim * 3 // 4,
        )

    def backend(self, backend_class: type[AttentionBackend], fill: float) -> AttentionBackend:
        backend = backend_class(self.layers, self.num_blocks, self.block_size, self.dtype, self.device, self.kv_dtype)
        fill_pools(backend, fill)
        return backend

    def steps(self) -> list[tuple[Batch, int]]:
        """Batches that compute every sequence to its end, and their sizes."""
        batches = []
        while any(done < n for done, n in zip(self.done, self.lengths, strict=True)):
            batches.append(self._step())
        return [batch for batch in batches if batch[1]]

    def _step(self) -> tuple[Batch, int]:
        counts = {}
        for i, (done, n) in enumerate(zip(self.done, self.lengths, strict=True)):
            if done < n and self.rng.random() < 0.8:
                counts[i] = 1 if self.rng.random() < 0.6 else self.rng.randint(1, n - done)
        chunks, first = [], 0
        for i in sorted(counts, key=lambda i: (counts[i] > 1, self.done[i])):
            used = -(-(self.done[i] + counts[i]) // self.block_size)
            chunks.append(Chunk(first, counts[i], self.done[i], self.tables[i][:used]))
            first += counts[i]
            self.done[i] += counts[i]
        return pack_chunks(chunks, self.block_size), first

    def qkv(self, layer: LayerSpec, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Laid out as transformers lays them out: [heads, tokens, dim], transposed."""
        heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        made = [torch.randn(h, num_tokens, layer.head_dim).to(self.device, self.dtype).transpose(0, 1) for h in heads]
        return made[0], made[1], made[1][..., : layer.value_dim] if layer.value_dim else made[2]


@pytest.mark.parametrize(("name", "dtype", "device"), CASES)
@pytest.mark.parametrize("seed", range(7))
def test_backends_equal_the_reference(name: str, seed: int, dtype: torch.dtype, device: str) -> None:
    compare(name, Story(seed, dtype, torch.device(device), native=name == "native"))


@pytest.mark.usefixtures("each_library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(5))
def test_int8_backends_equal_the_reference(seed: int, dtype: torch.dtype) -> None:
    compare("native", Story(seed, dtype, CPU, native=True, kv_dtype=torch.int8))


def compare(name: str, story: Story) -> None:
    dtype = story.dtype
    # What earlier owners left is NaN for the one and harmless for the other: reading any of it shows.
    tested, oracle = story.backend(BACKENDS[name], float("nan")), story.backend(ReferenceAttention, 0.0)
    for batch, num_tokens in story.steps():
        tested.start_step(batch)
        oracle.start_step(batch)
        for i, layer in enumerate(story.layers):
            q, k, v = story.qkv(layer, num_tokens)
            found, wanted = tested.attend(i, q, k, v), oracle.attend(i, q, k, v)
            assert found.shape == (num_tokens, layer.num_heads, layer.value_dim or layer.head_dim)
            error = (found.float() - wanted.float()).abs().max().item()
            assert error <= TOLERANCE[dtype], (layer, batch.chunks)


def test_reference_equals_a_hand_computation() -> None:
    """Two equal keys share the weight; a window or chunk of one leaves the last; a sink takes a share."""
    q, keys = torch.zeros(1, 1, 2), torch.zeros(2, 1, 2)
    values = torch.tensor([[[2.0, 0.0]], [[0.0, 4.0]]])

    def attend(**changes: Any) -> list[float]:
        layer = LayerSpec(1, 1, 2, 1.0, **changes)
        return attention(layer, q, keys, values, 1).flatten().tolist()

    assert attend() == [1.0, 2.0]
    assert attend(window=1) == attend(chunk=1) == [0.0, 4.0]
    assert attend(chunk=2) == [1.0, 2.0]
    assert attend(sinks=torch.zeros(1)) == pytest.approx([2 / 3, 4 / 3])


def test_fresh_blocks_are_started_and_not_filled() -> None:
    blocks = np.array([7, 3, 9], np.int64)

    def fresh(count: int, start: int) -> list[int]:
        used = -(-(start + count) // 4)
        return pack_chunks([Chunk(0, count, start, blocks[:used])], 4).fresh_blocks.tolist()

    assert fresh(1, 0) == [7]  # begins block 7
    assert fresh(1, 1) == []  # continues a block
    assert fresh(8, 0) == []  # fills 7 and 3
    assert fresh(6, 0) == [3]  # fills 7, starts 3
    assert fresh(3, 6) == [9]  # fills 3, starts 9
    assert fresh(1, 8) == [9]


def test_cells_are_block_and_offset() -> None:
    batch = pack_chunks([Chunk(0, 1, 5, np.array([7, 3])), Chunk(1, 3, 2, np.array([1, 0]))], 4)
    assert batch.cells.tolist() == [3 * 4 + 1, 1 * 4 + 2, 1 * 4 + 3, 0]
    assert batch.num_single == 1


COPIED = [
    pytest.param("native", None, marks=needs_kernels),
    pytest.param("native", torch.int8, marks=needs_kernels),
    ("reference", None),
    ("reference", torch.int8),
    ("torch_paged", None),
]


@pytest.mark.parametrize(("name", "kv_dtype"), COPIED)
def test_zeroed_blocks_are_read_as_zeros_in_every_layer(name: str, kv_dtype: torch.dtype | None) -> None:
    layers = [LayerSpec(4, 2, 16, 0.25), LayerSpec(2, 2, 32, 0.2)]
    tested, zeros = (BACKENDS[name](layers, 5, 16, torch.float32, CPU, kv_dtype) for _ in range(2))
    fill_pools(tested, float("nan"))
    fill_pools(zeros, 0.0)
    tested.zero([1, 4])
    qkv = [_qkv(spec, 1) for spec in layers]
    for blocks, is_zeroed in (([1, 4, 3], True), ([0, 2, 3], False)):
        chunks = [Chunk(0, 1, 32, np.array(blocks))]
        for found, wanted in zip(_attend(tested, qkv, chunks), _attend(zeros, qkv, chunks), strict=True):
            assert torch.equal(found, wanted) if is_zeroed else found.isnan().all()


@pytest.mark.parametrize(("name", "kv_dtype"), COPIED)
@pytest.mark.parametrize("num_copied", [1, 15])
def test_copied_positions_are_read_like_the_source(name: str, kv_dtype: torch.dtype | None, num_copied: int) -> None:
    """Two sequences copy positions, one of them from the block that the other copy replaces. Other cells are NaN."""
    torch.manual_seed(num_copied)
    layers = [LayerSpec(4, 2, 16, 0.25), LayerSpec(2, 2, 32, 0.2)]
    backend = BACKENDS[name](layers, 8, 16, torch.float32, CPU, kv_dtype)
    fill_pools(backend, float("nan"))
    first, second = num_copied, max(1, num_copied - 3)
    # Sequence A has blocks 0 and 1, B has blocks 2 and 3. C copies from 1 to 3, D from 3 to 5, as both have ended.
    stored = [_qkv(spec, 64) for spec in layers]
    _attend(backend, stored, [Chunk(0, 32, 0, np.array([0, 1])), Chunk(32, 32, 0, np.array([2, 3]))])
    backend.copy([BlockCopy(1, 3, first), BlockCopy(3, 5, second)])
    rest = [_qkv(spec, 2) for spec in layers]
    chunks = [Chunk(0, 1, 16 + first, np.array([0, 3])), Chunk(1, 1, 16 + second, np.array([2, 5]))]
    found = _attend(backend, rest, chunks)

    expected = BACKENDS[name](layers, 8, 16, torch.float32, CPU, kv_dtype)
    fill_pools(expected, float("nan"))
    kept = [*range(16 + first), *range(32, 48 + second)]
    cut = [tuple(x[kept] for x in qkv) for qkv in stored]
    both = [Chunk(0, 16 + first, 0, np.array([0, 1])), Chunk(16 + first, 16 + second, 0, np.array([2, 3]))]
    _attend(expected, cut, both)
    chunks = [Chunk(0, 1, 16 + first, np.array([0, 1])), Chunk(1, 1, 16 + second, np.array([2, 3]))]
    for output, wanted in zip(found, _attend(expected, rest, chunks), strict=True):
        assert output.isfinite().all()
        assert torch.equal(output, wanted)


def _qkv(spec: LayerSpec, num_tokens: int) -> tuple[Tensor, ...]:
    heads = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
    return tuple(torch.randn(num_tokens, count, spec.head_dim) for count in heads)


def _attend(backend: AttentionBackend, qkv: list[tuple[Tensor, ...]], chunks: list[Chunk]) -> list[Tensor]:
    backend.start_step(pack_chunks(chunks, 16))
    return [backend.attend(layer, *tensors) for layer, tensors in enumerate(qkv)]


@pytest.mark.parametrize(("name", "reason"), [("auto", "need the native attention"), ("torch_paged", "own number fo")])
def test_unsupported_int8_pools_are_refused(name: str, reason: str) -> None:
    layers = [LayerSpec(2, 2, 24, 1.0)]

    def made() -> AttentionBackend:
        return BACKENDS[choose(name, layers, 16, torch.float32, CPU, torch.int8)](
            layers, 4, 16, torch.float32, CPU, torch.int8
        )

    with pytest.raises(ValueError, match=reason):
        made()


def test_block_bytes() -> None:
    layers = [LayerSpec(8, 2, 64, 1.0), LayerSpec(8, 4, 32, 1.0)]
    assert block_bytes(layers, 16, torch.bfloat16) == 16 * 2 * 2 * (2 * 64 + 4 * 32)
    assert block_bytes(layers, 16, torch.int8) == 16 * 2 * (2 * (64 + 4) + 4 * (32 + 4))
    deepseek_v3 = LayerSpec(128, 1, 576, 192**-0.5, value_dim=512)
    assert block_bytes([deepseek_v3] * 61, 16, torch.bfloat16) == 16 * 70_272  # as docs/supported.md says


def test_chunks_begin_at_multiples_of_their_length() -> None:
    layer = LayerSpec(2, 2, 16, 1.0, chunk=4)
    assert [layer.first_visible(position) for position in (0, 3, 4, 7, 8, 9)] == [0, 0, 4, 4, 8, 8]


def test_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown attention backend 'fast'.*reference.*torch_paged"):
        choose("fast", [LayerSpec(2, 2, 16, 1.0)], 16, torch.float32, CPU)


def test_auto_chooses_native_within_its_limits(best_and_none: str) -> None:
    layer = LayerSpec(2, 2, 16, 1.0)
    best = "torch_paged" if best_and_none == NONE else "native"
    assert choose("auto", [layer], 16, torch.float32, CPU) == best
    assert choose("auto", [layer], 8, torch.float32, CPU) == "torch_paged"
    assert choose("auto", [layer], 16, torch.float16, CPU) == "torch_paged"
    assert choose("auto", [layer, LayerSpec(2, 2, 24, 1.0)], 16, torch.float32, CPU) == "torch_paged"
    assert choose("auto", [LayerSpec(4, 1, 32, 1.0, value_dim=16)], 16, torch.float32, CPU) == "torch_paged"


@pytest.mark.parametrize("layers", [[LayerSpec(2, 2, 24, 1.0)], [LayerSpec(2, 2, 1024, 1.0)]])
def test_native_outside_its_limits_says_why(layers: list[LayerSpec]) -> None:
    with pytest.raises(ValueError, match="head must be a multiple of 16 wide, at most 512"):
        BACKENDS["native"](layers, 4, 16, torch.float32, CPU)


def test_triton_on_a_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="triton_paged attention backend runs on CUDA devices only"):
        choose("triton_paged", [LayerSpec(8, 2, 64, 0.1)], 16, torch.float32, CPU)
