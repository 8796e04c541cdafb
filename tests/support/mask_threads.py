"""Mask threads without threads: every mask is ready at once, or late by a rule that a seed determines."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from lineclear.worker.structured_output.mask_threads import Bits, Mask, MaskThreads


class PromptThreads(MaskThreads):
    """Computes masks in `start`."""

    def start(self, masks: Sequence[Mask], take_tokens: Callable[[], None]) -> None:
        take_tokens()
        for mask in masks:
            mask.bits = mask.compute()

    def wait(self, masks: Sequence[Mask], *, is_alone: bool) -> None:
        """Return: all masks are ready."""


class LateThreads(PromptThreads):
    """Holds masks back for up to `MAX_TRIES` steps, a share of `per_mille` of them in each step."""

    MAX_TRIES = 3

    def __init__(self, per_mille: int) -> None:
        super().__init__()
        self.per_mille = per_mille
        self._held: dict[Mask, tuple[Bits, int]] = {}

    def start(self, masks: Sequence[Mask], take_tokens: Callable[[], None]) -> None:
        super().start(masks, take_tokens)
        for mask in masks if self.per_mille else ():
            assert mask.bits is not None
            self._held[mask], mask.bits = (mask.bits, 0), None
            mask.is_slow = True  # so is the next one of its slot

    def wait(self, masks: Sequence[Mask], *, is_alone: bool) -> None:
        for mask in masks:
            if mask not in self._held:
                continue
            bits, tries = self._held.pop(mask)
            if tries < self.MAX_TRIES and zlib.crc32(bits.tobytes(), tries) % 1000 < self.per_mille:
                self._held[mask] = bits, tries + 1
            else:
                mask.bits = bits
