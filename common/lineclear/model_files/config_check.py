"""Problems that config.json of a model shows: its form, the kind of model, quantization, code of its own.

The worker would find most of them too, after it has imported torch. Which types transformers knows is read from the
text of its tables, without importing it. Sentences are as in `directory_check`.
"""

from __future__ import annotations

import difflib
import json
import re
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from . import quantization_check

CONFIG = "config.json"
_ENCODERS = frozenset(
    {
        *("albert", "bert", "camembert", "convbert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm"),
        *("eurobert", "funnel", "longformer", "luke", "megatron-bert", "mobilebert", "modernbert", "mpnet"),
        *("nomic_bert", "nystromformer", "rembert", "roberta", "roformer", "squeezebert", "xlm-roberta"),
        *("xlm-roberta-xl", "xmod"),
    }
)
_ENCODER_HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
_MEDIA = ("vision", "image", "audio", "video", "speech")
TEXT_TYPES = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}
"""Types of transformers for images and text, and those that compute the same for text: there the three positions of a
token (M-RoPE) are equal."""
UNSUPPORTED = {
    "bloom": "ALiBi, positions in the attention mask",
    "falcon": "an attention of its own",
    "gptj": "an attention of its own",
    "mpt": "ALiBi, positions in the attention mask",
}
"""Types of transformers that the worker's probe refuses, and the feature that paged attention lacks."""
_LAYER_TYPES = frozenset(
    {
        *("full_attention", "sliding_attention", "chunked_attention", "attention"),
        *("linear_attention", "mamba", "conv", "hybrid", "mlp", "moe"),
    }
)


class ConfigUnreadable(ValueError):
    """config.json is no JSON object; the message continues the sentence."""


def read(path: Path) -> dict[str, Any]:
    """Return the content of config.json. Raises ConfigUnreadable."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigUnreadable(f"has a {path.name} that cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        what = "is nested too deeply" if isinstance(error, RecursionError) else f"is not JSON ({error})"
        raise ConfigUnreadable(f"has a {path.name} that {what}; copy or download it again") from None
    if not isinstance(found, dict):
        raise ConfigUnreadable(f"has a {path.name} that is not a JSON object; copy or download it again")
    return found


def problem(config: dict[str, Any], *, with_transformers: bool) -> str | None:
    """Return why a model of this configuration cannot be served, or None.

    `with_transformers`: judge the model type by the installed transformers, too, which loads the model here.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        return f"has no model_type in {CONFIG}, which names the architecture; give the {CONFIG} of the original model"
    return (
        quantization_check.problem(quantization_check.of_config(config))
        or _of_architecture(config, kind)
        or _of_layers(config)
        or (_of_type(config, kind) if with_transformers else None)
    )


def _of_architecture(config: dict[str, Any], kind: str) -> str | None:
    names = _architectures(config)
    makes_text = (
        any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names) or config.get("is_decoder") is True
    )
    shown = ", ".join(names) or kind
    if makes_text:
        return None
    if config.get("is_encoder_decoder") is True:
        return f"is an encoder-decoder model ({shown}), which is not supported; {_WANTED}"
    if kind in _ENCODERS or (names and all(name.endswith(_ENCODER_HEADS) for name in names)):
        return f"is an encoder ({shown}), which makes no text; {_WANTED}"
    return None


_WANTED = "give a decoder-only model that generates text (...ForCausalLM in config.json)"


def _of_layers(config: dict[str, Any]) -> str | None:
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    types = config.get("layer_types")
    names = {name for name in types if isinstance(name, str)} - _LAYER_TYPES if isinstance(types, list) else set()
    if names:
        return f"has layers of type {', '.join(sorted(names))}, which are not supported; docs/supported.md has what is"
    if config.get("use_bidirectional_attention") is True:
        return "attends to later tokens, too (use_bidirectional_attention), and a decoder cannot"
    return None


def _of_type(config: dict[str, Any], kind: str) -> str | None:
    """Judge the model type by the tables of the installed transformers."""
    if feature := UNSUPPORTED.get(kind):
        return f"is of the type {kind}, which has {feature}: it is not supported"
    known = installed_types()
    text = config.get("text_config")
    text_kind = str(text.get("model_type")) if isinstance(text, dict) else kind
    if known is None or {kind, text_kind} & known.causal or kind in known.image_text:
        return None
    shown = ", ".join(_architectures(config)) or kind
    if kind not in known.all:
        if "auto_map" in config:
            return (
                f"needs code of its own (auto_map in {CONFIG}) for its type {kind}; code from a checkpoint is never"
                " run. Give a model whose type is part of transformers"
            )
        near = difflib.get_close_matches(kind, known.causal, n=1, cutoff=0.8)
        hint = (
            f"is it {near[0]}? If the model is newer, install a newer transformers" if near else "install a newer one"
        )
        return f"has the model_type {kind}, which transformers {known.version} does not know; {hint}"
    if kind in known.sequence_to_sequence:
        return f"is an encoder-decoder model ({shown}), which is not supported; {_WANTED}"
    if any(isinstance(config.get(f"{medium}_config"), dict) for medium in _MEDIA) or kind in known.media:
        return f"is a model for images, audio or video ({shown}), which is not supported; {_WANTED}"
    return f"is of the type {kind} ({shown}), of which transformers {known.version} makes no text; {_WANTED}"


def _architectures(config: dict[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


class InstalledTypes(NamedTuple):
    version: str
    all: frozenset[str]
    causal: frozenset[str]
    """Those that AutoModelForCausalLM loads."""
    image_text: frozenset[str]
    """Those that AutoModelForImageTextToText loads."""
    sequence_to_sequence: frozenset[str]
    media: frozenset[str]
    """Those with a class for images, audio or video."""


@cache
def installed_types() -> InstalledTypes | None:
    """Return the model types of the installed transformers; None without it, or if its tables have another form."""
    try:
        package = metadata.distribution("transformers")
        folder = Path(str(package.locate_file("transformers/models/auto")))
        texts = [(folder / f"{name}.py").read_text("utf-8") for name in ("modeling_auto", "configuration_auto")]
        texts += [path.read_text("utf-8") for path in folder.glob("auto_mappings.py")]  # since transformers 5
    except (metadata.PackageNotFoundError, OSError, UnicodeDecodeError):
        return None
    tables = dict(re.findall(r"^(\w+)_MAPPING_NAMES = OrderedDict\((.*?)^\)", texts[0], re.MULTILINE | re.DOTALL))
    causal = _keys(tables.get("MODEL_FOR_CAUSAL_LM", ""))
    if "llama" not in causal:
        return None
    return InstalledTypes(
        package.version,
        _keys("".join(texts)),
        causal,
        _keys(tables.get("MODEL_FOR_IMAGE_TEXT_TO_TEXT", "")),
        _keys("".join(text for name, text in tables.items() if "SEQ_TO_SEQ" in name or "SEQ_2_SEQ" in name)),
        _keys("".join(text for name, text in tables.items() if any(medium.upper() in name for medium in _MEDIA))),
    )


def _keys(text: str) -> frozenset[str]:
    """Return the keys of the pairs and dictionaries in a table."""
    return frozenset(re.findall(r'^ +\(?"([^"]+)"[,:]', text, re.MULTILINE))
