"""Files in memory, for OpenSSL functions that read keys and certificates from files only."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

_MFD_NOEXEC_SEAL = 0x8  # linux/memfd.h; Python 3.11 has no name for it


def _memory_file() -> int:
    """Return the descriptor of a new file in memory that cannot be executed.

    With vm.memfd_noexec=2, Linux rejects executable ones. Before 6.3 it does not know the flag.
    """
    try:
        return os.memfd_create("lineclear", os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("lineclear", os.MFD_CLOEXEC)


@contextlib.contextmanager
def memory_file(data: bytes) -> Iterator[str]:
    """Yield the path of a file in memory with the content `data`."""
    descriptor = _memory_file()
    try:
        os.write(descriptor, data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
