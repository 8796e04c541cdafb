"""Run a toy worker with the flags of lineclear-worker, for tests of the whole scheduler.

Further options of the toy are JSON in TOY_OPTIONS.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from support import toy_worker

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("--model", "--socket-directory", "--log-level", "--log-format"):
        parser.add_argument(name, required=True)
    for name in ("--max-batch-size", "--target-batch-tokens"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--drain-timeout-seconds", type=float, required=True)
    parser.add_argument("--machine-share")
    parser.add_argument("--device")
    flags = parser.parse_args()
    shared = {"num_slots": flags.max_batch_size, "drain_timeout_seconds": flags.drain_timeout_seconds}
    options = {**shared, **json.loads(os.environ.get("TOY_OPTIONS", "{}"))}
    sys.argv = [sys.argv[0], flags.socket_directory, json.dumps(options)]
    sys.exit(toy_worker.main())
