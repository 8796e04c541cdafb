"""No core files: the memory of both processes holds prompts, answers, tokens and private keys."""

from __future__ import annotations

import resource


def disable() -> None:
    """Set the limit for core files of this process and its children to 0. They cannot raise it again."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
