"""The quality report on the tiny demonstration model: every format is there, and none is far from float32."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.kernel_variants import needs_kernels

from bench.quality import VARIANTS, Quality, corpus, measure, page

TINY = Path(__file__).parents[2] / "demo" / "model-tiny"


@needs_kernels
def test_every_format_predicts_training_text() -> None:
    from transformers import AutoTokenizer

    windows = corpus(AutoTokenizer.from_pretrained(TINY, local_files_only=True), 1)
    found = list(measure(str(TINY), {"corpus": windows}))
    assert [quality.variant for quality in found] == [variant.name for variant in VARIANTS]
    exact = found[0]
    assert exact.same_as_float32 == 1
    assert exact.tokens == len(windows[0]) - 1
    for quality in found[1:]:
        assert quality.same_as_float32 > 0.9, quality
        assert quality.perplexity == pytest.approx(exact.perplexity, rel=0.03), quality
    assert found[2].same_as_float32 < 1, "8-bit weights that change no token at all are not 8-bit weights"


def test_page_has_a_row_per_text_and_format() -> None:
    results = [Quality("a text", "float32", 7, 2.5, 1.0, 0.5), Quality("a text", "bfloat16", 7, 2.5, 0.5, 1.0)]
    text = page(results, "Title")
    assert "| a text | 7 | float32 | 2.500 | 100.00% | - |" in text
    assert "| a text | 7 | bfloat16 | 2.500 | 50.00% | 100.00% |" in text
