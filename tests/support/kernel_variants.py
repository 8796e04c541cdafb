"""Fixtures that run a test with each kernel library that this machine supports, and without kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lineclear.worker.kernels import native_library as kernels
from lineclear.worker.kernels.native_library import library_name
from lineclear.worker.model.loaded_model import LoadedModel

LIBRARIES = kernels.candidates()
needs_kernels = pytest.mark.skipif(not LIBRARIES, reason="no C++ compiler built any kernels here")


def modules_reason(built: LoadedModel | None) -> str:
    """Return why transformers' modules compute a model that should have got a fused forward pass."""
    assert built is not None
    assert built.decoder is None
    return built.modules_reason


def _choosing(request: pytest.FixtureRequest) -> Iterator[str]:
    kernels.choose(request.param)
    assert library_name() == ("" if request.param == kernels.NONE else request.param)
    yield request.param
    kernels.choose(kernels.AUTO)


each_library = pytest.fixture(_choosing, name="each_library", params=LIBRARIES)
"""Each library, by name. Skips the test on a machine without a library."""
each_way = pytest.fixture(_choosing, name="each_way", params=[*LIBRARIES, kernels.NONE])
"""Each library, by name, and NONE."""
best_and_none = pytest.fixture(_choosing, name="best_and_none", params=[*LIBRARIES[:1], kernels.NONE])
"""The best library and NONE, for slow tests."""
