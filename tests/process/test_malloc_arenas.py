"""The number of malloc's arenas, counted in a process with many threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

_COUNT = """
import ctypes, sys, threading
from lineclear.scheduler import main

assert main.main(sys.argv[1:]), "the arguments are wrong"

library, barrier = ctypes.CDLL(None), threading.Barrier(16)

def allocate():
    library.malloc(5000)
    barrier.wait()

threads = [threading.Thread(target=allocate) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
text, size = ctypes.c_char_p(), ctypes.c_size_t()
library.open_memstream.restype = ctypes.c_void_p
stream = ctypes.c_void_p(library.open_memstream(ctypes.byref(text), ctypes.byref(size)))
library.malloc_info(0, stream)
library.fclose(stream)
print(text.value.count(b"<heap "))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="arenas are glibc's")
def test_scheduler_has_two_arenas() -> None:
    done = subprocess.run([sys.executable, "-c", _COUNT, "--no-such-flag"], capture_output=True, text=True, timeout=60)
    assert done.stdout.split()[-1:] == ["2"], done
