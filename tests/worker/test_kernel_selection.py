"""Kernel libraries: the best one is selected, a named one, or none."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs
from support.families import WIDE, tiny_model
from support.kernel_variants import LIBRARIES, needs_kernels
from worker.settings_runner import runner_with

from lineclear.process.settings_base import ConfigurationError
from lineclear.worker.kernels import native_library as kernels
from lineclear.worker.kernels.native_library import library_name, selected_library


def test_kernels_were_built() -> None:
    """With a compiler, an installation without kernels would silently be slow."""
    assert LIBRARIES or not (shutil.which("c++") or shutil.which("g++"))


@pytest.fixture(name="folder")
def make_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the libraries are looked for, until the test ends. Empty."""
    monkeypatch.setattr(kernels, "_FOLDER", tmp_path)
    monkeypatch.setattr(kernels, "_library", kernels._library.__wrapped__)  # without its cache
    return tmp_path


def test_no_library_without_a_build(folder: Path) -> None:
    assert kernels.candidates() == []
    assert selected_library() is None
    assert library_name() == ""


@needs_kernels
def test_best_loadable_library_is_selected(folder: Path) -> None:
    """A file that is no library, as after a build that was cut off, is passed over."""
    for name in LIBRARIES:
        shutil.copy(Path(kernels.__file__).parent / f"lineclear_{name}.so", folder)
    (folder / f"lineclear_{LIBRARIES[0]}.so").write_bytes(b"not a library")
    assert kernels.candidates() == LIBRARIES
    assert library_name() == ([*LIBRARIES, ""][1])
    with pytest.raises(ValueError, match=f"no kernels '{LIBRARIES[0]}' here"):
        kernels.choose(LIBRARIES[0])


@needs_kernels
def test_library_with_another_abi_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.load(LIBRARIES[0]) is not None
    monkeypatch.setattr(kernels.ctypes, "CDLL", lambda path: Mock(lineclear_abi=lambda: 0))
    with capture_logs() as logs:
        assert kernels.load(LIBRARIES[0]) is None
    assert [(line["event"], line["log_level"], line["library"]) for line in logs] == [
        ("kernels_not_loaded", "warning", LIBRARIES[0])
    ]
    assert "ABI 0" in logs[0]["reason"]


def test_candidates_match_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(kernels, "_path", lambda name: Path(__file__))  # all of them were built
    avx512 = [f"x86_64_avx512{extension}" for extension in ("bf16", "vnni", "")]
    has: set[str] = set()
    monkeypatch.setattr(kernels, "_x86_flags", lambda: has)
    assert kernels.candidates() == []
    has |= {"fma"}
    assert kernels.candidates() == ["x86_64_fma"]
    has |= {"avx2", "f16c"}
    assert kernels.candidates() == ["x86_64_avx2", "x86_64_fma"]
    has |= {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
    assert kernels.candidates() == [*avx512[2:], "x86_64_avx2", "x86_64_fma"]
    has |= {"avx512_bf16"}
    assert kernels.candidates() == [*avx512[2:], "x86_64_avx2", "x86_64_fma"], "bf16 alone is not enough"
    has |= {"avx512_vnni"}
    assert kernels.candidates() == [*avx512, "x86_64_avx2", "x86_64_fma"]


def test_cpu_kernels_setting_selects_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_chosen", kernels.AUTO)  # and is so again at the end
    tiny_model("llama", **WIDE).save_pretrained(tmp_path)
    for name in ("auto", *LIBRARIES):
        runner = runner_with(tmp_path, cpu_kernels=name)
        best = LIBRARIES[0] if LIBRARIES else ""
        assert library_name() == (best if name == "auto" else name)
        assert runner.hello(1).attention_backend == ("native" if LIBRARIES else "torch_paged")
    runner = runner_with(tmp_path, cpu_kernels="none")
    assert library_name() == ""
    assert not kernels.prefers_bf16_gemm()
    assert runner.hello(1).attention_backend == "torch_paged"
    with pytest.raises(ConfigurationError, match="--cpu-kernels: there are no kernels 'fast' here; there are auto, no"):
        runner_with(tmp_path, cpu_kernels="fast")
