"""Disabled core dumps: the memory of both processes holds prompts, answers, tokens and private keys."""

from __future__ import annotations

import resource


def disable() -> None:
    """Disable core dumps of this process and its children. They cannot enable them again.

    The kernel ignores a limit of 0 if core_pattern names a program. It takes exactly 1 byte for "no dump" there
    (fs/coredump.c), and no core file is that small.
    """
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    limit = 0 if hard == 0 else 1
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))
