"""Loads a model: checks the checkpoint, probes the model, builds the fused forward pass, or refuses with a reason.

All checks run at load. A checkpoint is never trusted: files are checked before they are read, the model is tried
(compatibility_probe.py), and every faster path is compared with the model's own logits before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.import_utils import is_accelerate_available

from lineclear.model_files import config_check, fingerprint, model_directory, quantization_check
from lineclear.model_files.gguf_file import LINK, GgufBroken
from lineclear.worker.cpu.fused_decoder import FusedDecoder, problem_of
from lineclear.worker.cpu.linear import Packer, free_after_packing, leave_unpacked, pack, pack_twice
from lineclear.worker.cpu.quantized_linear import can_pack, packer_of, stored_packer
from lineclear.worker.cpu.thread_tuner import probe_threads
from lineclear.worker.decoder.decoder_layers import FAMILIES, DecoderModel, describe, transpose_weights
from lineclear.worker.device.memory_budget import free_bytes
from lineclear.worker.kernels import triton_support
from lineclear.worker.kernels.native_library import prefers_bf16_gemm_for_few_rows
from lineclear.worker.tensor_parallel.shard import Agree

from .compatibility_probe import (
    NUM_TOKENS,
    TOLERANCE,
    check_against_eager,
    inspect_model,
    paged_logits,
    relative_error,
    weight_bytes,
)
from .loaded_model import LoadedModel, ModelFilesChanged, ModelRefused
from .text_backbone import NAMES, auto_class, renamed, text_config
from .verified_families import VERIFIED

if TYPE_CHECKING:
    from lineclear.worker.cuda.fused_decoder import CudaFusedDecoder
    from lineclear.worker.quantization.checkpoint import Checkpoint

log = structlog.get_logger(__name__)

_HOST = torch.device("cpu")
_MAX_PACK_TWICE_SHARE = 1 / 8
"""Weights are packed twice if they take at most this share of the free memory."""
_QUANTIZED_TOLERANCE = 0.5
"""Largest relative error of the probe's logits with quantized weights. Usual errors are below 0.1, with int4 0.3."""


Divided = Callable[[Callable[[], Any], Callable[[Any], LoadedModel]], LoadedModel]
"""Reads a whole model in host memory, and wraps the part of it that a rank holds."""


def load(
    source: str,
    device: torch.device,
    dtype: torch.dtype | None,
    max_model_len: int = 0,
    *,
    flag: str = "--model",
    divided: Divided | None = None,
) -> LoadedModel:
    """Load the model in directory `source`, or with that id in the local Hugging Face cache.

    dtype None: the checkpoint's own. `flag` is what the caller names `source` by. `divided(read, wrap)` loads the part
    of one rank. Raises ModelRefused, and ModelFilesChanged if the files change during the load.
    """
    try:
        directory = model_directory.locate(source, flag)
        model_directory.check(source, directory, flag)
    except model_directory.NotServable as error:
        raise ModelRefused(str(error)) from None
    before = _stamps(directory)
    checkpoint = _quantized(directory)
    if checkpoint is not None and divided is not None:
        raise ModelRefused("a quantized checkpoint or GGUF file cannot be divided: leave --tensor-parallel-size at 1")
    model_id = directory.resolve().name if Path(source).expanduser().exists() else source
    read = partial(_read_model, directory, checkpoint, dtype or _own_dtype(directory, device))

    def wrap(model: Any) -> LoadedModel:
        return wrap_model(model, model_id, max_model_len)

    loaded = wrap(read(device)) if divided is None else divided(read, lambda part: wrap(part.to(device)))
    loaded = _with_fingerprints(loaded, directory)
    if checkpoint is not None:
        loaded = replace(loaded, weights=checkpoint.weights)
    if _stamps(directory) != before:
        raise ModelFilesChanged("files of the model directory changed while it was loaded; it is loaded again")
    return loaded


def wrap_model(model: Any, model_id: str = "", max_model_len: int = 0) -> LoadedModel:
    """Probe a transformers model that is in memory, on its final device. Raises ModelRefused."""
    model.eval().requires_grad_(False)
    if model.config.model_type == "gpt2":
        transpose_weights(model)
    try:
        with torch.inference_mode(), probe_threads(weight_bytes(model)):
            loaded = inspect_model(model, model_id, max_model_len)
            loaded = replace(loaded, probe_logits=check_against_eager(loaded))
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise ModelRefused(
            f"{type(model).__name__} cannot compute packed tokens: {type(error).__name__}: {_first_line(error)}"
        ) from error
    if loaded.family not in VERIFIED:
        log.warning("model_family_not_verified", family=loaded.family, model_id=model_id)
    return loaded


def build_fused(
    loaded: LoadedModel, packer: Packer | None = None, *, keep_weights: bool = False, agree: Agree = bool
) -> LoadedModel | None:
    """Return the model with a fused forward pass, or with the reason why it has none; None if logits differ too much.

    `packer` None: the fastest one whose weights fit into memory. Unless `keep_weights`, each matrix of the transformers
    model is freed as soon as it is packed, and that model cannot be used afterwards. All ranks do the same.
    Quantized matrices are packed as stored, but not in float32: their kernels round activations to 8 bits.
    """
    if loaded.device.type == "cuda" and not loaded.weights:
        if agree(triton_support.is_usable()):
            return build_cuda(loaded, agree)
        return replace(loaded, modules_reason="Triton or a C compiler for it is missing")
    is_exact = bool(loaded.weights) and loaded.dtype is torch.float32
    described = "float32 asks for exact products of quantized matrices" if is_exact else _described_for_cpu(loaded)
    if isinstance(described, str):
        return replace(loaded, modules_reason=described)
    if loaded.weights and not can_pack(described.weights):  # all matrices of a product, or none
        return _by_modules(loaded, "no kernel multiplies its quantized matrices")
    packer = stored_packer(packer or pack) if loaded.weights else packer or _fastest(loaded, agree)
    packer = packer if keep_weights else free_after_packing(packer)
    fused, error = _with_decoder(loaded, partial(FusedDecoder, described, packer=packer), loaded.probe_logits)
    if not agree(error <= TOLERANCE[loaded.dtype]):
        log.warning("fused_forward_not_used", family=loaded.family, relative_error=error)
        return None
    return fused


def build_cuda(loaded: LoadedModel, agree: Agree = bool) -> LoadedModel:
    """Return the model with the fused forward pass of CUDA, which shares the weights of its modules.

    Unchanged if it cannot have one, its logits differ too much, or a kernel cannot run here, of any rank.
    """
    described = _described(loaded)
    if isinstance(described, str):
        return replace(loaded, modules_reason=described)
    if described.experts is not None:
        return _by_modules(loaded, "experts are fused on CPUs only")
    # Before the first collective, for which the others would wait: a rank alone may lack memory.
    problem = "" if loaded.device.type != "cuda" else _problem(lambda: _take_own_memory(loaded))
    fused = [loaded]

    def build() -> None:
        from lineclear.worker.cuda.fused_decoder import CudaFusedDecoder  # imports triton

        described = _described(loaded)  # of the weights in their new places
        assert not isinstance(described, str)
        found, error = _with_decoder(loaded, partial(CudaFusedDecoder, described), loaded.probe_logits)
        if not error <= TOLERANCE[loaded.dtype]:
            raise ValueError(f"the relative error of its logits is {error:.2g}")
        fused.append(found)

    if agree(not problem):
        problem = _problem(build)
        if agree(not problem):
            return fused[-1]
    return _by_modules(loaded, problem or "another rank cannot use it")


def _by_modules(loaded: LoadedModel, problem: str) -> LoadedModel:
    """Return the model without a fused pass. `problem`: an unexpected property of this model."""
    log.warning("fused_forward_not_used", family=loaded.family, problem=problem)
    return replace(loaded, modules_reason=problem)


def _problem(action: Callable[[], object]) -> str:
    """Return why `action()` fails; empty if it does not."""
    try:
        action()
    except Exception as failure:  # errors of Triton have no common class
        return f"{type(failure).__name__}: {_first_line(failure)[:200]}"
    return ""


def _take_own_memory(loaded: LoadedModel) -> None:
    """Give each weight memory of its own: what is fused leaves holes in the one piece that transformers reads into.

    All weights leave the piece before it is freed, because torch's allocator would put a copy into the holes of the
    others. They wait on the device, or on the host if that has no room. From then on fusing needs free memory for one
    product at a time. Raises MemoryError if neither has room for a second copy.
    """
    needed = loaded.weight_bytes + loaded.weight_bytes // 8  # allocations are rounded up
    free = {place: free_bytes(place) for place in (loaded.device, _HOST)}
    place = next((place for place, num_bytes in free.items() if num_bytes >= needed), None)
    if place is None:
        raise MemoryError(f"it needs {needed} bytes while it is built; free on {free}")
    parameters = list(loaded.model.parameters())
    copies = [parameter.data.to(place, copy=True) for parameter in parameters]
    for parameter in parameters:
        parameter.data = copies.pop(0)
    torch.cuda.empty_cache()
    for parameter in parameters if place is _HOST else ():
        parameter.data = parameter.data.to(loaded.device, copy=True)


def _fastest(loaded: LoadedModel, agree: Agree) -> Packer:
    if loaded.device.type != "cpu" or loaded.dtype is not torch.bfloat16 or not prefers_bf16_gemm_for_few_rows():
        return pack
    if not agree(loaded.weight_bytes <= _MAX_PACK_TWICE_SHARE * free_bytes(loaded.device)):
        log.info("weights_packed_once", weight_mib=loaded.weight_bytes >> 20)
        return pack
    return pack_twice


def to_quantized(loaded: LoadedModel, form: str = "int8", *, keep_weights: bool = False) -> LoadedModel:
    """Return the model with a fused forward pass over weights in a form of `FORMS`, int8 or int4.

    Raises ModelRefused if it cannot have one.
    """
    if loaded.weights:
        raise ModelRefused(f"its weights are quantized already ({loaded.weights}): leave --quantization at none")
    described = _described_for_cpu(loaded)
    exact = None if isinstance(described, str) else build_fused(loaded, leave_unpacked, keep_weights=True)
    if isinstance(described, str) or exact is None:
        raise ModelRefused(
            f"{form} weights need a model of a fused family (docs/supported.md) on a CPU with native kernels;"
            f" this is {loaded.family} in {str(loaded.dtype).removeprefix('torch.')} on {loaded.device.type}:"
            " leave --quantization at none"
        )
    with torch.inference_mode(), probe_threads(loaded.weight_bytes):
        expected = paged_logits(exact)
    del exact  # it holds what packing frees
    packer = packer_of(form, described.output_layer)
    packer = packer if keep_weights else free_after_packing(packer)
    quantised, error = _with_decoder(loaded, partial(FusedDecoder, described, packer=packer), expected)
    if not error <= _QUANTIZED_TOLERANCE:
        raise ModelRefused(
            f"{form} weights change its logits too much (relative error {error:.2g}): leave --quantization at none"
        )
    log.info("weights_quantised", form=form, relative_error=round(error, 4))
    return replace(quantised, weights=form)


def _described(loaded: LoadedModel) -> DecoderModel | str:
    """Return the description for the fused forward passes, or why they cannot compute this model."""
    if loaded.family not in FAMILIES:
        return f"no fused pass is written for {loaded.family}"
    shapes = {(spec.num_heads, spec.num_kv_heads, spec.head_dim) for spec in loaded.layers}
    described = None if len(shapes) != 1 or _scales_queries(loaded) else describe(loaded.model, *shapes.pop())
    return described or f"no fused pass is written for this variant of {loaded.family}"


def _described_for_cpu(loaded: LoadedModel) -> DecoderModel | str:
    described = _described(loaded)
    return described if isinstance(described, str) else problem_of(described) or described


def _scales_queries(loaded: LoadedModel) -> bool:
    """Return whether queries of late positions are scaled, as in Ministral 3 behind its original context."""
    rope = getattr(loaded.model.config, "rope_parameters", None) or {}
    return bool(rope.get("llama_4_scaling_beta")) and loaded.max_model_len > rope["original_max_position_embeddings"]


def _with_decoder(
    loaded: LoadedModel, build: Callable[[int], FusedDecoder | CudaFusedDecoder], expected: Tensor | None
) -> tuple[LoadedModel, float]:
    """Return the model with a decoder, and the relative error of its probe logits to `expected`.

    `build` takes the number of positions.
    """
    assert expected is not None
    num_positions = max(loaded.max_model_len, NUM_TOKENS)  # the largest position ever computed
    with torch.inference_mode():
        decoder = build(num_positions)
        layers = tuple(replace(spec, scaling=spec.scaling * decoder.query_scale) for spec in loaded.layers)
        fused = replace(loaded, decoder=decoder, layers=layers)
        with probe_threads(loaded.weight_bytes):
            return fused, relative_error(paged_logits(fused), expected)


def import_model_class(source: str) -> None:
    """Import the modules of the model's class and compile transformers' renaming patterns, ahead of `load`.

    Reads config.json.
    """
    config = _read_config(model_directory.locate(source))
    config = text_config(config) or config
    auto_class(config)._model_mapping[type(config)]
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping  # missing in some releases

    get_checkpoint_conversion_mapping(config.model_type)  # type: ignore[no-untyped-call]


# --- the checkpoint ------------------------------------------------------------------------------------------------


def _read_config(directory: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # its checks of values raise errors of other types
        raise ModelRefused(f"transformers cannot read config.json: {_first_line(error)}") from error
    return config


def _own_dtype(directory: Path, device: torch.device) -> str | torch.dtype:
    """Return the dtype of the checkpoint, or bfloat16 for float16 on a CPU, which has no products of float16."""
    if device.type != "cpu" or getattr(_read_config(directory), "dtype", None) is not torch.float16:
        return "auto"
    log.info("float16_read_as_bfloat16", hint="3 bits less of each weight; --dtype float32 keeps them, slower")
    return torch.bfloat16


def _stamps(directory: Path) -> tuple[object, ...]:
    try:
        return fingerprint.stamps(directory)
    except OSError as error:
        raise ModelFilesChanged(f"the model directory cannot be read: {error.strerror}") from None


def _with_fingerprints(loaded: LoadedModel, directory: Path) -> LoadedModel:
    try:
        weights, text = fingerprint.weights_fingerprint(directory), fingerprint.text_fingerprint(directory)
    except OSError as error:
        raise ModelFilesChanged(f"the model directory cannot be read: {error.strerror}") from None
    return replace(loaded, weights_fingerprint=weights, text_fingerprint=text, directory=directory)


def _quantized(directory: Path) -> Checkpoint | None:
    """Map a checkpoint of quantized matrices, or a GGUF file; None for another one. Raises ModelRefused."""
    if (directory / LINK).exists():
        from lineclear.worker.quantization.gguf import open_gguf

        try:
            return open_gguf(directory)
        except (GgufBroken, OSError) as error:
            raise ModelRefused(f"{(directory / LINK).resolve()} {_first_line(error)}") from error
    quantization = quantization_check.of_config(config_check.read(directory / config_check.CONFIG))
    if quantization is None:
        return None
    from lineclear.worker.quantization.checkpoint import open_checkpoint  # other models do without it

    try:
        return open_checkpoint(directory, quantization)
    except (OSError, SafetensorError) as error:
        raise ModelRefused(f"the checkpoint cannot be read: {_first_line(error)}") from error


def _read_model(
    directory: Path, checkpoint: Checkpoint | None, dtype: str | torch.dtype, device: torch.device = _HOST
) -> Any:
    """Return the whole model with eager attention, on `device`. Raises ModelRefused."""
    config, is_direct = _read_config(directory), checkpoint is None and _can_read_directly(device)
    text = text_config(config)
    if text is not None or auto_class(config) is not AutoModelForCausalLM:
        log.info("served_for_text_only", type=config.model_type, text_type=config.get_text_config().model_type)
    try:
        if checkpoint is None:
            model, report = _from_pretrained(
                directory, text or config, text is not None, dtype, device if is_direct else None
            )
        else:
            from .quantized_model import quantized_model

            checkpoint = checkpoint if text is None else renamed(checkpoint)
            model, report = quantized_model(text or config, checkpoint, dtype, device)
            model.generation_config = _generation_config(directory, model)
    except ModelRefused:
        raise
    except Exception as error:  # of any class, for a model that no one has tried
        raise ModelRefused(f"transformers cannot load this checkpoint: {_first_line(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would initialise them with random numbers
        raise ModelRefused(
            f"the checkpoint lacks weights that its config.json asks for: {len(missing)}, as {missing[0]}"
        )
    return model if is_direct or checkpoint is not None else model.to(device)


def _generation_config(directory: Path, model: Any) -> Any:
    """Return the generation configuration of the directory, else the one in the model's configuration."""
    if (directory / GENERATION_CONFIG_NAME).is_file():
        return GenerationConfig.from_pretrained(directory, local_files_only=True)
    return model.generation_config


def _can_read_directly(device: torch.device) -> bool:
    """Return whether transformers may read weights to `device` one by one, converting and merging them there."""
    if device.type != "cuda":
        return False
    if not is_accelerate_available():
        log.warning(
            "weights_read_through_host_memory", hint="pip install accelerate: weights are then read to the GPU at once"
        )
        return False
    return True


def _from_pretrained(
    directory: Path, config: Any, is_renamed: bool, dtype: str | torch.dtype, device_map: torch.device | None
) -> tuple[Any, dict[str, Any]]:
    """Return the model with eager attention, and transformers' report of missing weights.

    `is_renamed`: the checkpoint has more than this model, under other names (text_backbone.py).
    Several threads read from mapped files. `device_map` None: weights in the checkpoint's format stay in the mapping.
    """
    loaded: Any = auto_class(config).from_pretrained(
        directory,
        config=config,
        key_mapping=NAMES if is_renamed else None,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        attn_implementation="eager",
        output_loading_info=True,
        device_map=device_map,
    )
    return loaded[0], loaded[1]


def _first_line(error: BaseException) -> str:
    """Return the first line of a message, with the next one if it ends in a colon."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and lines[1:] else lines[0]
