"""Equations between the counters of tokens, rows and steps."""

from __future__ import annotations

from typing import Any


def check_counters(c: Any) -> None:
    """Check the equations between tokens, rows and steps of `Counters`: those of a page, of GetStats or of the core."""
    assert c.prompt_tokens <= c.prefix_cache_queries, "a request started without a look-up"
    assert c.prefix_cache_hits <= c.prefix_cache_queries, "more tokens found than looked up"
    assert c.steps <= c.rows <= c.step_tokens, "a step without a row, or a row without a position"
    sampled = c.rows + c.spec_decode_num_accepted_tokens
    assert c.generation_tokens + c.wasted_samples <= sampled, "more samples than rows and accepted drafts"
    assert c.recomputed_tokens <= c.step_tokens, "more positions computed again than computed"
    assert c.spec_decode_num_accepted_tokens <= c.spec_decode_num_draft_tokens, "more drafts accepted than made"
    assert c.spec_decode_num_drafts <= min(c.spec_decode_num_draft_tokens, c.rows), "a row without drafts"
