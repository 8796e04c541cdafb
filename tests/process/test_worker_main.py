"""The worker's entry: bound to its scheduler before it imports anything slow, and gone the moment it is done."""

from __future__ import annotations

import subprocess
import sys

from support.patience import PATIENCE_SECONDS
from support.world import ENVIRONMENT


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def test_it_holds_on_to_its_scheduler_before_it_imports_what_takes_long() -> None:
    done = run("""
import sys
from lineclear import lifeline
def hold():
    slow = {"zmq", "structlog", "pydantic", "pydantic_settings", "torch", "transformers", "numpy", "google", "asyncio"}
    print(sorted(slow & set(sys.modules)), "lineclear.worker.main" in sys.modules)
    raise SystemExit(9)
lifeline.hold = hold
from lineclear.worker.main import main
main([])
""")
    assert (done.returncode, done.stdout) == (9, "[] True\n"), done.stderr


def test_nothing_that_waits_at_the_interpreters_end_keeps_it() -> None:
    """A library's exit handler that takes an hour, and a thread that never ends."""
    done = run("""
import atexit, threading, time
from lineclear.worker import main
def serve(argv=None):
    atexit.register(time.sleep, 3600)
    threading.Thread(target=time.sleep, args=(3600,)).start()
    print("said")
    return 7
main.main = serve
main.run()
""")
    assert (done.returncode, done.stdout) == (7, "said\n"), done.stderr
