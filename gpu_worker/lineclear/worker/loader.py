"""From a checkpoint to a model whose attention is ours, or to a refusal that says why.

Every decision about *whether* a model can be served is made here, at load: what the attention of each layer is, what
the model's limits are, and that its logits over paged attention equal its own. Nothing here knows plans or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from .attention import AttentionBackend, Chunk, IntArray, LayerSpec, make_batch, on_device
from .attention.reference import ReferenceAttention
from .checkpoint import CheckpointBroken, check_weights
from .decoder import Decoder, can_build
from .families import VERIFIED
from .int8 import pack_int8
from .linear import Packer, pack, plain, releasing
from .logits import Logits, of

log = structlog.get_logger(__name__)

_PAGED = "lineclear"
_PROBE = "lineclear_probe"
_PROBE_TOKENS = 11
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.float16: 0.05, torch.bfloat16: 0.25}
"""Largest relative error of the probe's logits. Wide in bfloat16, where a near tie may send a token to another expert;
a model that loses a mask, a bias or a state is wrong by the size of the logits themselves."""

_INT8_TOLERANCE = 0.5
"""Relative error of the probe's logits with 8-bit weights. Usually below 0.1; beyond this the answers are another's."""

_HANDLED_ARGUMENTS = frozenset({"scaling", "dropout", "sliding_window", "softcap", "s_aux", "is_causal"})
_HARMLESS_ARGUMENTS = frozenset({"position_ids", "cache_position", "position_embeddings", "logits_to_keep"})


class ModelRefused(Exception):
    """This model cannot be served correctly; `str()` is a sentence that says why."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model on its device, and what the rest of the worker must know of it."""

    model: Any
    layers: tuple[LayerSpec, ...]
    attention_modules: tuple[nn.Module, ...]
    model_id: str
    family: str
    vocab_size: int
    """The width of the logits."""
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    selects_rows: bool
    """The model computes logits only where `logits_to_keep` says."""
    weights: str = ""
    """Number format of the matrices; empty: `dtype`."""
    decoder: Decoder | None = None
    """Computes the logits instead of `model`, where there is one."""
    probed: Tensor | None = None
    """The logits of the probe's tokens that `model` itself computed over pages."""

    def attach(self, backend: AttentionBackend) -> None:
        """Let every attention layer of the model write to and read from `backend`."""
        for index, module in enumerate(self.attention_modules):
            _attach(module, backend, index)
        if self.decoder is not None:
            self.decoder.attach(backend)

    def logits(self, tokens: Tensor, reads: IntArray, positions: IntArray, rows: IntArray) -> Logits:
        """Of the packed tokens at `rows`. The packed tokens are those of `tokens`, on the device, at `reads`.

        The backend must have begun the step.
        """
        if self.decoder is not None:
            return self.decoder.logits(tokens, reads, positions, rows)
        input_ids, kept = tokens.index_select(0, on_device(reads, self.device)), on_device(rows, self.device)
        logits = _forward(self.model, input_ids, on_device(positions, self.device), logits_to_keep=kept)
        return of(logits if self.selects_rows else logits.index_select(0, kept))


def load(source: str, device: torch.device, dtype: torch.dtype | None, max_model_len: int = 0) -> LoadedModel:
    """The model in directory `source`, or under that id in the local hub cache. dtype None: the checkpoint's own.

    Raises ModelRefused.
    """
    directory = _locate(source)
    config = _read_config(directory)
    _check_weights(directory)
    try:
        model, report = _from_pretrained(directory, config, "auto" if dtype is None else dtype)
    except (ValueError, OSError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelRefused(f"transformers cannot load this checkpoint: {_first_line(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would go on with random numbers in their place
        raise ModelRefused(
            f"the checkpoint lacks weights that its config.json asks for: {len(missing)}, as {missing[0]}"
        )
    model_id = directory.resolve().name if Path(source).is_dir() else source
    return adopt(model.to(device), model_id, max_model_len)


def adopt(model: Any, model_id: str = "", max_model_len: int = 0) -> LoadedModel:
    """Prepare a transformers model that is already in memory, with its weights where they are to stay.

    Raises ModelRefused.
    """
    model.eval().requires_grad_(False)
    config = model.config.get_text_config()
    _check_config(config)
    try:
        with torch.inference_mode():
            loaded = _probe(model, config, model_id, max_model_len)
            loaded = replace(loaded, probed=_check_against_eager(loaded))
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise ModelRefused(
            f"{type(model).__name__} cannot compute packed tokens: {type(error).__name__}: {_first_line(error)}"
        ) from error
    if loaded.family not in VERIFIED:
        log.warning("model_family_not_verified", family=loaded.family, model_id=model_id)
    return loaded


def fuse(loaded: LoadedModel, packer: Packer = pack, *, keep_weights: bool = False) -> LoadedModel | None:
    """The same model with a forward pass of few operations; itself, where there is none for it.

    None: that pass computes something else, which is not to be used. Unless `keep_weights`, the transformers model
    gives each matrix away as soon as it is packed, so that none is held twice, and cannot be used any more.
    """
    shapes = {(x.num_heads, x.num_kv_heads, x.head_dim) for x in loaded.layers}
    if len(shapes) != 1 or not can_build(loaded.model, loaded.family, shape := shapes.pop()):
        return loaded
    with torch.inference_mode():
        ids, positions = _probe_input(loaded.model.config.get_text_config(), loaded.device)
        wanted = loaded.probed
        assert wanted is not None
        decoder = Decoder(loaded.model, *shape, _positions(loaded), packer if keep_weights else releasing(packer))
        fused = replace(loaded, decoder=decoder)
        error = _relative_error(_paged_logits(fused, ids, positions), wanted)
    if not error <= _TOLERANCE[loaded.dtype]:
        log.warning("fused_forward_not_used", family=loaded.family, relative_error=error)
        return None
    return fused


def _positions(loaded: LoadedModel) -> int:
    """How many positions are ever asked of it, the probe's included."""
    return max(loaded.max_model_len, _PROBE_TOKENS)


def to_int8(loaded: LoadedModel, *, keep_weights: bool = False) -> LoadedModel:
    """As `fuse`, the matrices quantised to 8 bits. Raises ModelRefused where that cannot be done."""
    exact = fuse(loaded, plain, keep_weights=True)
    if exact is None or exact.decoder is None:
        raise ModelRefused(
            "8-bit weights are for models built like Llama, on a CPU that kernels were built for;"
            f" {loaded.family} in {str(loaded.dtype).removeprefix('torch.')} on {loaded.device.type} is not one here:"
            " leave weights at auto"
        )
    with torch.inference_mode():
        ids, positions = _probe_input(loaded.model.config.get_text_config(), loaded.device)
        wanted = _paged_logits(exact, ids, positions)
        spec = loaded.layers[0]
        shape = spec.num_heads, spec.num_kv_heads, spec.head_dim
        decoder = Decoder(loaded.model, *shape, _positions(loaded), pack_int8 if keep_weights else releasing(pack_int8))
        quantised = replace(loaded, decoder=decoder, weights="int8")
        error = _relative_error(_paged_logits(quantised, ids, positions), wanted)
    if not error <= _INT8_TOLERANCE:
        raise ModelRefused(
            f"8-bit weights change its logits too much (relative error {error:.2g}): leave weights at auto"
        )
    log.info("weights_quantised", relative_error=round(error, 4))
    return quantised


def _from_pretrained(directory: Path, config: Any, dtype: str | torch.dtype) -> tuple[Any, dict[str, Any]]:
    """The model, in eager attention, and transformers' report of what it did not find."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        attn_implementation="eager",
        output_loading_info=True,
    )
    return loaded[0], loaded[1]


# --- the checkpoint ------------------------------------------------------------------------------------------------


def _locate(source: str) -> Path:
    path = Path(source)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise ModelRefused(
            f"{source!r} is neither a directory nor a repository in the local Hugging Face cache;"
            f" nothing is downloaded at start: run `hf download` first"
        ) from error


def _read_config(directory: Path) -> Any:
    if not (directory / "config.json").is_file():
        raise ModelRefused("the directory has no config.json, so there is nothing that says which model it is")
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ModelRefused(_why_no_config(directory, error)) from error
    if getattr(config, "quantization_config", None) is not None:
        raise ModelRefused("the weights are quantised, which is not supported; take the bfloat16 or float16 checkpoint")
    return config


def _why_no_config(directory: Path, error: Exception) -> str:
    if '"auto_map"' in (directory / "config.json").read_text(encoding="utf-8", errors="replace"):
        return (
            "the model is defined by code of its own (auto_map in config.json) and transformers has no class for it;"
            " code that comes with a checkpoint is never run"
        )
    return f"transformers cannot read config.json: {_first_line(error)}"


def _check_weights(directory: Path) -> None:
    try:
        check_weights(directory)
    except CheckpointBroken as error:
        raise ModelRefused(str(error)) from None


# --- what the model is ---------------------------------------------------------------------------------------------


def _check_config(config: Any) -> None:
    """Refuse what the configuration says and no probe of a few tokens could see."""
    kinds = set(getattr(config, "layer_types", None) or ())
    strange = kinds - {"full_attention", "sliding_attention", "attention"}
    if strange or getattr(config, "attention_chunk_size", None):
        names = ", ".join(sorted(strange)) or "chunked_attention"
        raise ModelRefused(f"layers of type {names} are not supported, only full and sliding-window attention")
    if getattr(config, "use_bidirectional_attention", False):
        raise ModelRefused("the model attends to later tokens too, and a decoder cannot")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused("encoder-decoder models are not supported")


@dataclass(slots=True)
class _Call:
    """One attention call as the probe saw it."""

    module: nn.Module
    spec: LayerSpec


def _probe(model: Any, config: Any, model_id: str, max_model_len: int) -> LoadedModel:
    """Run a few tokens and write down how each layer calls its attention."""
    calls: list[_Call] = []
    ids, positions = _probe_input(config, next(model.parameters()).device)
    _set_implementation(model, _PROBE, _recorder(calls))
    kept = _forward(model, ids, positions, logits_to_keep=torch.tensor([1, 3], device=ids.device))
    if len({id(call.module) for call in calls}) != len(calls):
        raise ModelRefused("layers share one attention module, so their keys and values cannot be told apart")
    expected = int(config.num_hidden_layers)
    if len(calls) != expected:
        raise ModelRefused(
            f"only {len(calls)} of the model's {expected} layers call the attention interface;"
            f" the others would not see the KV cache"
        )
    _check_windows(config, calls)
    vocab_size = int(kept.shape[-1])
    if model.get_input_embeddings().weight.shape[0] < vocab_size:
        raise ModelRefused("the model can sample tokens that it has no embedding for")
    return LoadedModel(
        model=model,
        layers=tuple(call.spec for call in calls),
        attention_modules=tuple(call.module for call in calls),
        model_id=model_id,
        family=str(config.model_type),
        vocab_size=vocab_size,
        max_model_len=_max_model_len(config, max_model_len),
        eos_token_ids=_eos_token_ids(model, vocab_size),
        dtype=model.dtype,
        device=ids.device,
        selects_rows=kept.shape[0] == 2,
    )


def _probe_input(config: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    positions = torch.arange(_PROBE_TOKENS, device=device)
    return (positions * 7 + 3) % int(config.vocab_size), positions


def _recorder(calls: list[_Call]) -> Callable[..., tuple[Tensor, None]]:
    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
    ) -> tuple[Tensor, None]:
        calls.append(_Call(module, _layer_spec(module, query, key, value, attention_mask, arguments)))
        return torch.zeros_like(query.transpose(1, 2)), None

    return record


def _layer_spec(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    arguments: Mapping[str, Any],
) -> LayerSpec:
    """Honour every argument of the call or refuse the model."""
    known = _HANDLED_ARGUMENTS | _HARMLESS_ARGUMENTS
    unknown = sorted(name for name, x in arguments.items() if isinstance(x, Tensor) and name not in known)
    if mask is not None or unknown:
        what = "a mask of its own" if mask is not None else ", ".join(unknown)
        raise ModelRefused(f"the model's attention needs {what}, which paged attention does not carry")
    if arguments.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelRefused("an attention layer is not causal")
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        raise ModelRefused(
            f"heads of unequal size (query {query.shape[-1]}, key {key.shape[-1]}, value {value.shape[-1]}), as in"
            f" multi-head latent attention, are not supported"
        )
    scaling = arguments.get("scaling")
    head_dim = int(query.shape[-1])
    return LayerSpec(
        num_heads=int(query.shape[1]),
        num_kv_heads=int(key.shape[1]),
        head_dim=head_dim,
        scaling=head_dim**-0.5 if scaling is None else float(scaling),
        window=int(arguments.get("sliding_window") or 0),
        softcap=float(arguments.get("softcap") or 0.0),
        sinks=arguments.get("s_aux"),
    )


def _check_windows(config: Any, calls: list[_Call]) -> None:
    """A window that only a mask would have carried is lost, and a short probe cannot notice."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        # Without layer types the window, where there is one, holds for all layers.
        declared = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        kinds = ["sliding_attention" if declared else "full_attention"] * len(calls)
    for kind, call in zip(kinds, calls, strict=True):
        if kind == "sliding_attention" and not call.spec.window:
            raise ModelRefused("a layer with a sliding window does not pass it to its attention, so it would be lost")


def _max_model_len(config: Any, wanted: int) -> int:
    limit = int(getattr(config, "max_position_embeddings", None) or 0)
    changing = _rope_limit(config)
    if changing and (not limit or changing < limit):
        # Its frequencies change for the whole sequence once it is longer, and cached keys would be of the old ones.
        log.warning("context_capped", reason="rope depends on the length", max_model_len=changing)
        limit = changing
    if not limit and not wanted:
        raise ModelRefused("the configuration states no context length; set max_model_len")
    if limit and wanted > limit:
        raise ModelRefused(f"max_model_len {wanted} is more than the {limit} positions the model can tell apart")
    return wanted or limit


def _rope_limit(config: Any) -> int:
    """Up to which length a RoPE that depends on the length is constant; 0 when it does not depend.

    The "dynamic" one changes only beyond max_position_embeddings, which is the limit anyway.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    groups = [parameters] if "rope_type" in parameters else [x for x in parameters.values() if isinstance(x, dict)]
    limits = [int(x["original_max_position_embeddings"]) for x in groups if x.get("rope_type") == "longrope"]
    return min(limits, default=0)


def _eos_token_ids(model: Any, vocab_size: int) -> tuple[int, ...]:
    """As `generate` has them: the generation configuration's, else the configuration's."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(), "eos_token_id", None)
    listed = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    return tuple(sorted({int(i) for i in listed if 0 <= int(i) < vocab_size}))


# --- the model's own word against ours -----------------------------------------------------------------------------


def _check_against_eager(loaded: LoadedModel) -> Tensor:
    """The logits of a few tokens in two chunks over pages. They must be those of transformers' own eager attention.

    Catches what no list can: positions that were in the mask (ALiBi), state outside the attention (Mamba, token shift),
    a scale or bias that the call did not mention.
    """
    ids, positions = _probe_input(loaded.model.config.get_text_config(), loaded.device)
    loaded.model.set_attn_implementation("eager")
    wanted = _forward(loaded.model, ids, positions).float()
    _set_implementation(loaded.model, _PAGED, _paged_attention)
    found = _paged_logits(loaded, ids, positions)
    error = _relative_error(found, wanted)
    if not error <= _TOLERANCE[loaded.dtype]:
        raise ModelRefused(
            f"its logits over paged attention are not its own (relative error {error:.2g}): the model keeps"
            f" state or positions outside the attention interface"
        )
    return found


def _paged_logits(loaded: LoadedModel, ids: Tensor, positions: Tensor) -> Tensor:
    """[tokens, vocabulary] of the probe's tokens, in two chunks over pages that lie backwards."""
    block_size, half = 4, 6
    blocks = torch.arange(-(-_PROBE_TOKENS // block_size)).flip(0).numpy()
    backend = ReferenceAttention(loaded.layers, len(blocks), block_size, loaded.dtype, loaded.device)
    loaded.attach(backend)
    pieces = []
    for start, end in ((0, half), (half, _PROBE_TOKENS)):
        backend.begin(make_batch([Chunk(0, end - start, start, blocks[: -(-end // block_size)])], block_size))
        rows = np.arange(end - start)
        logits = loaded.logits(ids, start + rows, positions[start:end].cpu().numpy(), rows).values
        pieces.append(logits.to(torch.float32, copy=True))  # they are the decoder's until the next call
    return torch.cat(pieces)


def _relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


def _forward(model: Any, ids: Tensor, positions: Tensor, **arguments: Any) -> Tensor:
    """[rows, vocabulary] logits of one packed row of tokens."""
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **arguments).logits
    assert isinstance(logits, Tensor)
    return logits[0]


def _set_implementation(model: Any, name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    AttentionInterface.register(name, function)
    model.set_attn_implementation(name)
    if model.config.get_text_config()._attn_implementation != name:
        raise ModelRefused(f"{type(model).__name__} has an attention of its own that cannot be replaced")


def _attach(module: nn.Module, backend: AttentionBackend, index: int) -> None:
    module.lineclear_attention = (backend, index)  # type: ignore[assignment]  # a plain attribute, not a parameter


def _paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, heads, tokens, dim] in, [1, tokens, heads, dim] out."""
    backend, index = module.lineclear_attention  # type: ignore[misc]
    output = backend.attend(index, *(x[0].transpose(0, 1) for x in (query, key, value)))
    return output[None], None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
