"""Run the scheduler, and write once a second how many bytes its allocators have in use: `python -m
campaigns.memory_probe FLAGS`, with the file's path in MEMORY_FILE.

Resident memory also counts what glibc and Python keep for later. A leak is memory in use: malloc's allocated bytes,
those of all arenas and of its own mappings, and the allocated blocks of Python's small objects.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
import time
from pathlib import Path

from lineclear.scheduler.main import main as run_scheduler

_SECONDS = 1.0
_PYTHON_BYTES = re.compile(r"# bytes in allocated blocks += +([\d,]+)")


class _Mallinfo2(ctypes.Structure):
    # The fifth is the size of malloc's own mappings, the eighth the allocated bytes of the arenas.
    _fields_ = [(f"field_{index}", ctypes.c_size_t) for index in range(10)]


def bytes_in_use() -> int:
    """Return the bytes that this process has allocated and not freed, of glibc and of Python's small objects."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Mallinfo2
    found = library.mallinfo2()
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    library.open_memstream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(library.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    ctypes.pythonapi._PyObject_DebugMallocStats(stream)
    library.fclose(stream)
    python = _PYTHON_BYTES.search((text.value or b"").decode())
    library.free(text)
    assert python is not None
    return int(found.field_7 + found.field_4) + int(python[1].replace(",", ""))


def _write(path: Path) -> None:
    new = path.with_suffix(".new")
    while True:
        new.write_text(str(bytes_in_use()))
        new.rename(path)
        time.sleep(_SECONDS)


def main(arguments: list[str]) -> int:
    threading.Thread(target=_write, args=[Path(os.environ["MEMORY_FILE"])], daemon=True, name="memory probe").start()
    return run_scheduler(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
