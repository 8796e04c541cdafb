"""What passes between scheduler and worker, as frozen values. `codec` turns them into bytes; nothing here knows how.

Words: a *slot* is a dense integer naming a row of the worker's tables; a *position* is an index into the tokens of a
sequence (prompt, then output); a *block* is `block_size` positions of keys and values in the worker's pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property
from typing import NamedTuple

from lineclear.wire.sampling import Sampling as Sampling

PROTOCOL = 9
"""Version of the plan protocol; both ends must have the same."""


class PoolingKind(IntEnum):
    """Which hidden states make up the vector of a sequence."""

    LAST = 1
    """That of the last token."""
    MEAN = 2
    """The mean of all."""


class Pooling(NamedTuple):
    """The vector of a sequence: of its hidden states behind the last norm, as float32."""

    kind: PoolingKind
    dimensions: int = 0
    """Keep the leading ones; 0: all."""
    normalize: bool = True
    """Scale the vector, after truncation, to an L2 norm of 1."""


@dataclass(frozen=True, slots=True)
class SlotInit:
    """The sequence that takes a slot, sent once.

    `tokens` are the prompt and the confirmed output. The worker keeps them, appends the tokens it samples, and reads
    the input of later rows from them. `blocks` are cached prefix blocks; rows append further ones.
    `adapter` is the index of a loaded adapter; 0: none.
    """

    slot: int
    tokens: tuple[int, ...]
    prompt_len: int
    blocks: tuple[int, ...]
    sampling: Sampling
    adapter: int = 0
    num_top_scores: int = 0
    """How many of the most likely tokens each position of a SCORE row reports."""
    pooling: Pooling | None = None


class RowOutput(IntEnum):
    """Kinds of values of a row in the result of a step."""

    NONE = 0
    SAMPLE = 1
    """The tokens that follow the last position."""
    SCORE = 2
    """For each of its positions, the log-probability of the token behind it, which is known."""
    POOL = 3
    """The vector of the sequence, with the row that has the last token; empty before. The worker adds up the rows."""


class BlockCopy(NamedTuple):
    """Copy the first `num_positions` positions of block `source` to block `target`, before the step writes anything.

    The targets are the first new blocks of a sequence that takes a slot, whose row starts behind the copied positions.
    All cells of a target are replaced: no later read may see their former values.

    Numbers from `Hello.num_blocks` on are host blocks. Only whole blocks are copied from and to them: from the blocks
    of a sequence that leaves its slot, and later to those of the same sequence. A plan that reads a host block does not
    write it.
    """

    source: int
    target: int
    num_positions: int


class StateCopy(NamedTuple):
    """Replace recurrent state `target` by state `source`, before the step computes anything.

    States below `Hello.num_slots` are those of the slots, and the `num_state_snapshots` behind are snapshots. A source
    is a snapshot, or a slot that the plan does not initialise. A target is a snapshot, or a slot that it does.
    """

    source: int
    target: int


class Row(NamedTuple):
    """Compute positions [start, start + num_tokens) of the sequence in `slot`, and return `output`.

    `new_blocks` continue the sequence's block table. The worker may verify up to `num_drafts` drafts in a row of one
    position that samples: it computes them at the following positions, samples at each position, and returns the drafts
    that equal the samples before them, and the sample behind those. Positions of other drafts are computed again.

    With recurrent state, a row continues from the state of its slot, and leaves the state behind its last position. So
    the positions of a slot are computed in order, once, and there are no drafts.
    """

    slot: int
    start: int
    num_tokens: int
    output: RowOutput
    new_blocks: tuple[int, ...] = ()
    num_drafts: int = 0

    @property
    def is_reported(self) -> bool:
        """It has scores or a vector."""
        return self.output > RowOutput.SAMPLE

    @property
    def sample(self) -> bool:
        """Whether tokens are sampled behind its last position."""
        return self.output == RowOutput.SAMPLE


class Decodes(NamedTuple):
    """Rows of one position each that all sample, as columns: `slots[i]` computes position `starts[i]`."""

    slots: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    new_blocks: tuple[tuple[int, int], ...] = ()
    """(slot, block) of each of them whose block table grows."""

    def rows(self) -> Iterator[Row]:
        """One by one."""
        blocks = dict(self.new_blocks)
        for slot, start in zip(self.slots, self.starts, strict=True):
            yield Row(slot, start, 1, RowOutput.SAMPLE, (blocks[slot],) if slot in blocks else ())


NO_DECODES = Decodes()


@dataclass(frozen=True)
class StepPlan:
    """One packed forward pass. Plans of an epoch are numbered 1, 2, 3 ... and run strictly in that order.

    Its rows are the `decodes`, which make up nearly all of nearly every step, and the `chunks` after them.
    """

    epoch: int
    step: int
    chunks: tuple[Row, ...] = ()
    inits: tuple[SlotInit, ...] = ()
    zero_blocks: tuple[int, ...] = ()
    """To be filled with zeros first: they held values that were not finite."""
    decodes: Decodes = NO_DECODES
    copy_blocks: tuple[BlockCopy, ...] = ()
    """They run first: all of them read, then all of them write. So a source may be a target too, or be zeroed or
    written by the step."""
    copy_states: tuple[StateCopy, ...] = ()
    """Like `copy_blocks`. The state of a slot in `inits` that is no target becomes zero."""

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """All rows as objects. Slow: for tests and the flight recorder."""
        return (*self.decodes.rows(), *self.chunks)

    @property
    def num_rows(self) -> int:
        return len(self.decodes.slots) + len(self.chunks)

    @property
    def num_tokens(self) -> int:
        """Positions of all rows, with those of as many drafts as allowed."""
        return len(self.decodes.slots) + sum(row.num_tokens + row.num_drafts for row in self.chunks)

    @property
    def num_samples(self) -> int:
        return len(self.decodes.slots) + sum(row.sample for row in self.chunks)


class Scores(NamedTuple):
    """Natural logarithms for the positions of one SCORE row."""

    logprobs: tuple[float, ...]
    """Of the token behind each position."""
    top_ids: tuple[int, ...] = ()
    """The most likely tokens, the same number at each position, most likely first."""
    top_logprobs: tuple[float, ...] = ()

    @property
    def num_top(self) -> int:
        """How many of the most likely tokens each position has."""
        return len(self.top_ids) // len(self.logprobs) if self.logprobs else 0

    def behind(self, count: int) -> Scores:
        """Return the scores without those of the first `count` positions."""
        return self.part(count, len(self.logprobs))

    def part(self, start: int, end: int) -> Scores:
        """Return the scores of the positions [start, end)."""
        top = slice(start * self.num_top, end * self.num_top)
        return Scores(self.logprobs[start:end], self.top_ids[top], self.top_logprobs[top])


class Logprobs(NamedTuple):
    """Natural logarithms for one sampled token.

    `top` is (token id, logprob): the most likely, most likely first, then `Sampling.logprob_ids`.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a plan. Its rows with an output are counted in the plan's order: decodes, then chunks."""

    epoch: int
    step: int
    tokens: tuple[int, ...]
    """Of the sampling rows, one row after the other."""
    logprobs: tuple[Logprobs | None, ...] = ()
    """Empty when no row of the plan asked, else one entry for each token."""
    bad_rows: frozenset[int] = frozenset()
    """Indices, among the rows with an output, of those whose values were not finite; their output means nothing."""
    step_seconds: float = 0.0
    counts: tuple[int, ...] = ()
    """Number of tokens of each sampling row; empty when each has one."""
    scores: tuple[Scores, ...] = ()
    """Of the SCORE rows."""
    vectors: tuple[bytes, ...] = ()
    """Of the POOL rows: little-endian float32; empty unless the row has the last token of its sequence."""
    stuck_rows: frozenset[int] = frozenset()
    """Indices, as in `bad_rows`, of sampling rows whose parameters allow no token; their token means nothing."""
    deferred_rows: frozenset[int] = frozenset()
    """Indices, as in `bad_rows`, of sampling rows whose mask was not ready; their token means nothing.

    Later rows of the slot mean nothing either, up to a row that starts at the same position: it is computed again.
    With recurrent state only rows of one position are deferred, and they leave the state as it was."""
    num_drafted: tuple[int, ...] = ()
    """Number of drafts that each sampling row verified; empty when none did."""
    draft_seconds: float = 0.0
    """Of `step_seconds`, those to make the drafts."""

    @property
    def num_outputs(self) -> int:
        return len(self.counts or self.tokens) + len(self.scores) + len(self.vectors)


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker joins. `epoch` is a random number, new at each join; `instance` is random, one for each process.

    `pid` does not identify a process: in separate containers it is often the same. `model_fingerprint` identifies the
    weights, configuration and number formats. `text_fingerprint` is a digest of the files that the scheduler reads too
    (lineclear.model_files.fingerprint); if empty, it is not compared. `draft_model` is the id of the draft model.
    `num_swap_blocks` host blocks follow those of the pool; it takes `swap_seconds` to copy a block to or from them.
    With `has_recurrent_state`, each slot has a state beside its blocks. A cached prefix can be used where one of the
    `num_state_snapshots` keeps the state behind it; without any there is no prefix cache.
    """

    epoch: int
    num_blocks: int
    block_size: int
    num_slots: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_step_tokens: int
    model_id: str = ""
    family: str = ""
    dtype: str = ""
    device: str = ""
    attention_backend: str = ""
    pid: int = 0
    torch_version: str = ""
    transformers_version: str = ""
    instance: int = 0
    model_fingerprint: str = ""
    text_fingerprint: str = ""
    draft_model: str = ""
    num_swap_blocks: int = 0
    swap_seconds: float = 0.0
    load_seconds: float = 0.0
    """From the start of the process until it was ready."""
    weight_bytes: int = 0
    """Of one rank, like the next three."""
    kv_cache_bytes: int = 0
    step_memory_bytes: int = 0
    """That the largest step takes, as measured before the pools were made; 0: not measured."""
    swap_memory_bytes: int = 0
    has_recurrent_state: bool = False
    num_state_snapshots: int = 0
    forward_pass: str = ""
    """What computes the layers: "fused" or "modules", with "CUDA graphs" where decode steps are captured."""
    forward_pass_reason: str = ""
    """Why transformers' modules do."""
    protocol: int = PROTOCOL

    def step_tokens(self, target: int) -> int:
        """Return the most tokens of a step: the smaller of `target` and `max_step_tokens`. 0: no target."""
        return min(target or self.max_step_tokens, self.max_step_tokens)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The worker is alive; `step` is the plan it works on, 0 when idle."""

    epoch: int
    step: int
    busy_seconds: float = 0.0
    prepared: tuple[int, ...] = ()
    """Numbers of the PrepareGrammar messages that are done since the heartbeat before."""


class StepErrorKind(Enum):
    OUT_OF_MEMORY = 1
    EXCEPTION = 2
    PROTOCOL = 3


@dataclass(frozen=True, slots=True)
class StepError:
    """The step gave no result. `summary` is a type and a place, never content."""

    epoch: int
    step: int
    kind: StepErrorKind
    summary: str = ""


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Scheduler to worker: `epoch` is unknown. The worker resets its state and sends a Hello with a new epoch."""

    epoch: int


CANNOT_JOIN = "this process is being killed, or taken for dead; it cannot join again"
"""Reason of the Goodbye to a process that the scheduler has dropped."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The sender shuts down and expects no further messages."""

    epoch: int
    reason: str = ""

    @property
    def is_final(self) -> bool:
        """Whether the process may never join this scheduler again."""
        return self.reason == CANNOT_JOIN


@dataclass(frozen=True, slots=True)
class Stopping:
    """Worker to scheduler: this worker drains. It runs plans until a Goodbye or the end of its drain timeout."""

    epoch: int


class LogLevel(Enum):
    DEBUG = 1
    INFO = 2
    WARNING = 3
    ERROR = 4


@dataclass(frozen=True, slots=True)
class SetLogLevel:
    """Scheduler to worker: the least severe level to log, also after the epoch ends."""

    epoch: int
    level: LogLevel


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Scheduler to worker: hold the adapter in directory `path` as `index`, from 1, for plans behind this message.

    It takes the place of another adapter with that index. `key` is the digest of its files
    (lineclear.model_files.adapter_files). The worker answers with AdapterLoaded.
    """

    epoch: int
    index: int
    key: bytes
    path: str


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Scheduler to worker: drop an adapter, which no later plan uses."""

    epoch: int
    index: int


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """Worker to scheduler: the answer to a LoadAdapter. `problem` says why it cannot be used; empty: it can."""

    epoch: int
    index: int
    key: bytes
    problem: str = ""


@dataclass(frozen=True, slots=True)
class PrepareGrammar:
    """Scheduler to worker: compile `grammar` ahead of the plans that use it. A heartbeat returns `number`."""

    epoch: int
    number: int
    grammar: str


@dataclass(frozen=True, slots=True)
class Profile:
    """Scheduler to worker: record what the next steps do. 0 steps end a recording. The worker answers with Profiled."""

    epoch: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class Profiled:
    """Worker to scheduler: a Chrome trace of `num_steps` steps, compressed by gzip, or the problem."""

    epoch: int
    num_steps: int = 0
    trace: bytes = b""
    problem: str = ""


ControlMessage = Rejoin | Goodbye | SetLogLevel | LoadAdapter | UnloadAdapter | PrepareGrammar | Profile
"""Scheduler to worker, beside the plans. A worker ignores a Heartbeat, which probes connections."""

EpochMessage = StepResult | Heartbeat | StepError | Stopping | Goodbye | AdapterLoaded | Profiled
"""Worker to scheduler, after its Hello."""

Message = StepPlan | ControlMessage | Hello | EpochMessage
