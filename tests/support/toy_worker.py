"""A worker process around the toy runner: `python -m support.toy_worker DIRECTORY [OPTIONS AS JSON]`.

Real sockets, threads, signals and exit codes; no torch, so it is up in a quarter of a second.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from lineclear.process.parent_death import die_with_parent
from lineclear.process.standby import Standby


@dataclass(frozen=True)
class ToyOptions:
    num_blocks: int = 512
    block_size: int = 4
    num_slots: int = 64
    max_model_len: int = 512
    vocab_size: int = 97
    seed: int = 0
    min_step_seconds: float = 0.0
    max_step_seconds: float = 0.0
    import_seconds: float = 0.0
    """Import time of a standby."""
    load_seconds: float = 0.0
    """Time between the start of the process and its first Hello."""
    fault: str = ""
    """What goes wrong in step `fault_step`: "exception", "assertion", "memory", "launch": memory before the step runs,
    "hang", "exit", "tokens": a result that cannot be, or "none": nothing, but for the file of `fault_once`. "adapter":
    the device fails while an adapter is loaded."""
    fault_step: int = 0
    fault_once: str = ""
    """A file that the first fault creates; while it exists no further fault happens, in later processes too."""
    poison_token: int = -1
    """The process exits at a step with a row of a sequence whose prompt starts with this token."""
    max_rows: int = 0
    """A step with more rows runs out of memory; 0 disables this."""
    heartbeat_seconds: float = 0.1
    standby_seconds: float = 600.0
    """Time after which a rejected worker sends Hello again."""
    drain_timeout_seconds: float = 60.0
    """Time for which it runs plans after SIGTERM."""
    model: str = ""
    """Another model gives other tokens and has another fingerprint."""
    model_file: str = ""
    """A file with the model's name, read when the process starts; replaces the option `model`."""
    num_state_snapshots: int | None = None
    """Of recurrent states; None: the model has no such state."""
    text_fingerprint: str = ""
    """The fingerprint of tokenizer files in its Hello, or empty."""

    def arguments(self, directory: Path) -> list[str]:
        """Return the command line of a worker with these options."""
        return [sys.executable, "-m", "support.toy_worker", str(directory), json.dumps(asdict(self))]


def main() -> int:
    """Run until SIGTERM."""
    supervised = die_with_parent()
    standby = Standby.claim()
    # Slow imports only here: this process already exits with its scheduler.
    sys.modules["rich"] = None  # type: ignore[assignment]  # structlog imports it for colours, if it can
    from support.faulty_runner import FaultyRunner
    from support.toy_runner import ToyRecorder

    from lineclear.process.logging_setup import configure
    from lineclear.worker.loop.step_loop import LoopLimits, run

    options = ToyOptions(**json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))
    configure("worker", form="json")
    if standby is not None:
        time.sleep(options.import_seconds)
        standby.wait_until_promoted()
    time.sleep(options.load_seconds)
    limits = LoopLimits(
        heartbeat_seconds=options.heartbeat_seconds,
        standby_seconds=options.standby_seconds,
        drain_timeout_seconds=options.drain_timeout_seconds,
    )
    directory = Path(sys.argv[1])
    return run(FaultyRunner(options), directory, supervised=supervised, limits=limits, make_recorder=ToyRecorder)


if __name__ == "__main__":
    sys.exit(main())
