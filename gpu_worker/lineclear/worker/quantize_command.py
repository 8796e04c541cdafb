"""`lineclear quantize`: writes a quantized copy of a model directory."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from lineclear.exit_codes import ExitCode
from lineclear.extras import missing_package
from lineclear.model_files import config_check, model_directory, quantization_check
from lineclear.model_files.gguf_file import LINK
from lineclear.model_files.model_directory import NotServable

_GROUP_SIZE = 64  # that of `--quantization int4`


def main(words: Sequence[str]) -> int:
    """Run the command line `words`. Returns the exit code."""
    options = _parser().parse_args(list(words))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the unfinished directory is removed
    try:
        source, target = _checked(options.model, options.out)
        from transformers.utils.logging import set_verbosity_error

        from .model.loaded_model import ModelRefused
        from .model.quantized_directory import write

        set_verbosity_error()  # type: ignore[no-untyped-call]
        try:
            size = write(source, target, options.bits, options.group_size)
        except ModelRefused as error:
            raise NotServable(f"MODEL {options.model}: {error}") from None
    except NotServable as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(f"{error.filename or options.out}: {error.strerror}")
    except ModuleNotFoundError as error:
        return _failed(missing_package(error, "worker"), ExitCode.CONFIGURATION)
    except KeyboardInterrupt:
        return _failed("interrupted", ExitCode.INTERRUPTED)
    print(f"{target}: {size / 1e6:,.2f} MB of weights with {options.bits} bits")
    return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lineclear quantize",
        description="Write a copy of a model with 4- or 8-bit matrices, in compressed-tensors' format pack-quantized."
        " It answers as the model with --quantization int4 or int8 in bfloat16, and needs less memory to load.",
    )
    parser.add_argument("model", metavar="MODEL", help="directory with safetensors, or owner/name in the local cache")
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to make")
    parser.add_argument(
        "--bits", type=int, choices=(4, 8), required=True, help="of all matrices; the output layer has 8"
    )
    parser.add_argument(
        "--group-size",
        type=int,
        choices=(32, 64, 128),
        default=_GROUP_SIZE,
        help="inputs with a scale of their own, with 4 bits (default: %(default)s, as --quantization int4)",
    )
    return parser


def _checked(model: str, out: Path) -> tuple[Path, Path]:
    """Return both directories. Raises NotServable without a plain model, or if the target exists."""
    target = out.expanduser().absolute()
    if target.exists() or target.is_symlink():
        raise NotServable(f"OUT {out} exists; give another directory, or remove it")
    if not target.parent.is_dir():
        raise NotServable(f"OUT {out}: there is no directory {target.parent}")
    source = model_directory.locate(model, "MODEL")
    if (source / LINK).exists():
        raise NotServable(f"MODEL {model} is a GGUF file; give the directory with safetensors that it was made of")
    model_directory.check(model, source, "MODEL")
    if quantization_check.of_config(config_check.read(source / config_check.CONFIG)) is not None:
        raise NotServable(f"MODEL {model} is quantized already; give the checkpoint that it was made from")
    return source, target


def _failed(reason: str, code: ExitCode = ExitCode.USAGE) -> int:
    print(f"lineclear quantize: {reason}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
