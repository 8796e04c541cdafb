"""Problems of a model directory or file that file names and config.json show, without loading anything.

Each function returns the end of a sentence that starts with the given path. It names the files found and what to give
instead.
"""

from __future__ import annotations

from pathlib import Path

from . import config_check, safetensors_check
from .gguf_file import LINK, MAGIC

_WANTED = "lineclear serves Hugging Face directories: config.json, tokenizer.json and *.safetensors; and GGUF files"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LFS = b"version https://git-lfs"


def is_gguf(path: Path) -> bool:
    """Return whether a file is a GGUF file, by its name or its first bytes."""
    return path.is_file() and (path.suffix.lower() == ".gguf" or _begins(path, MAGIC))


def gguf_in(directory: Path) -> Path | None:
    """Return the only GGUF file of a directory that has no other weights, else None."""
    names = [path for path in directory.iterdir() if path.suffix.lower() in (".gguf", ".safetensors")]
    return names[0] if len(names) == 1 and names[0].name != LINK and is_gguf(names[0]) else None


def of_file(path: Path) -> str:
    """Return why a file is not a model."""
    if path.suffix == ".safetensors":
        return f"is a file of weights; give its directory, {path.parent}"
    return f"is a file; give a directory. {_WANTED}"


def of_directory(directory: Path, *, is_loaded_here: bool) -> str | None:
    """Return why a directory cannot be served, or None.

    Only if it `is_loaded_here`, by the installed transformers, do missing weights and its type count.
    """
    try:
        names = sorted(path.name for path in directory.iterdir())
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    has_weights = any(name.endswith(".safetensors") for name in names)
    is_model = "config.json" in names
    if "adapter_config.json" in names and not is_model:
        return _instead_of_adapter(directory)
    if LINK in names and is_model and not has_weights:
        return None  # made of a file that was checked
    gguf = [name for name in names if name.lower().endswith(".gguf")]
    if gguf and not has_weights:
        return f"holds {len(gguf)} GGUF files ({_some(gguf)}); give one of them, as --model {directory / gguf[0]}"
    if "model_index.json" in names and not is_model:
        return f"is a diffusers pipeline, which makes images. {_WANTED}"
    if {"snapshots", "refs"} <= set(names):
        return f"is a folder of the Hugging Face cache; give a directory within {directory / 'snapshots'}"
    if is_model and (reason := _of_config(directory / "config.json", is_loaded_here)):
        return reason
    pickles = sorted({path.name for pattern in _PICKLES for path in directory.glob(pattern)} - {"training_args.bin"})
    if pickles and not has_weights:
        return (
            f"has its weights as {_some(pickles)}, which is pickle and may run code; lineclear loads safetensors alone."
            " Download the safetensors files of the model, or convert it: AutoModelForCausalLM.from_pretrained(DIR)"
            ".save_pretrained(OUT)"
        )
    return _of_weights(directory, names, has_weights) if is_loaded_here else None


def of_tokenizer(directory: Path) -> str | None:
    """Return why the directory has no tokenizer that the scheduler reads, or None."""
    if (directory / "tokenizer.json").exists():
        return None
    other = next((name for name in ("tokenizer.model", "vocab.json") if (directory / name).is_file()), None)
    if other is None:
        return "has no tokenizer.json, which makes tokens of text; copy that of the original model into it"
    # Later releases need a protobuf that is too new for many packages of gRPC.
    return (
        f"has its tokenizer as {other}, and lineclear reads tokenizer.json. Make it: pip install"
        " 'sentencepiece<0.2.3' && python -c \"from transformers import AutoTokenizer;"
        f" AutoTokenizer.from_pretrained('{directory}').save_pretrained('{directory}')\""
    )


def _of_weights(directory: Path, names: list[str], has_weights: bool) -> str | None:
    if "config.json" in names and has_weights:
        pointer = next((p for p in sorted(directory.glob("*.safetensors")) if _begins(p, _LFS)), None)
        if pointer is not None:
            return f"was cloned without its weights ({pointer.name} is a pointer of Git LFS); run: git lfs pull"
        try:
            safetensors_check.check_weights(directory)
        except safetensors_check.CheckpointBroken as error:
            return f"cannot be loaded: {error}"
        return None
    lacking = " and ".join(
        name for name, there in (("config.json", "config.json" in names), ("*.safetensors", has_weights)) if not there
    )
    if not names:
        return f"is empty. {_WANTED}"
    if checkpoints := [name for name in names if (directory / name / "config.json").is_file()]:
        return f"lacks {lacking}; give a directory within it, as {directory / checkpoints[-1]}"
    if any(name.startswith("tokenizer") for name in names) and "config.json" not in names:
        return f"holds a tokenizer and no model: it lacks {lacking}. {_WANTED}"
    return f"lacks {lacking}. {_WANTED}"


def _of_config(path: Path, is_loaded_here: bool) -> str | None:
    try:
        return config_check.problem(config_check.read(path), with_transformers=is_loaded_here)
    except config_check.ConfigUnreadable as error:
        return str(error)


def _instead_of_adapter(directory: Path) -> str:
    try:
        base = config_check.read(directory / "adapter_config.json").get("base_model_name_or_path")
    except config_check.ConfigUnreadable as error:
        return str(error)
    of, model = (f" for {base}", base) if isinstance(base, str) and base else ("", "BASE")
    return (
        f"is a LoRA adapter{of}, not a model. Serve it beside its base model: --model {model} --lora-modules"
        f" NAME={directory}; or merge both (peft: merge_and_unload, then save_pretrained) and give the result"
    )


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _begins(path: Path, magic: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError:
        return False
