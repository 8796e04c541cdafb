"""No core files: the memory of both processes holds prompts, answers, tokens and private keys."""

from __future__ import annotations

import resource


def disable() -> None:
    """Keep this process and its children from leaving a core file. They cannot undo it.

    A limit of 0 is ignored where core_pattern names a program. Linux takes exactly 1 byte for "no dump" there as well
    (fs/coredump.c), and no core file is that small.
    """
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    limit = 0 if hard == 0 else 1
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))
