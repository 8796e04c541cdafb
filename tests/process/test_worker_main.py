"""The worker's entry: bound to its scheduler before it imports anything slow, and gone the moment it is done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.engine_harness import ENVIRONMENT
from support.time_limits import PATIENCE_SECONDS

_MODEL = str(Path(__file__).parents[2] / "demo" / "model-tiny")


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, _MODEL],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def test_death_pipe_is_armed_before_slow_imports() -> None:
    done = run("""
import sys
from lineclear.process import parent_death
def die_with_parent():
    slow = {"zmq", "structlog", "pydantic", "pydantic_settings", "torch", "transformers", "numpy", "google", "asyncio"}
    print(sorted(slow & set(sys.modules)), "lineclear.worker.main" in sys.modules)
    raise SystemExit(9)
parent_death.die_with_parent = die_with_parent
from lineclear.worker.main import main
main([])
""")
    assert (done.returncode, done.stdout) == (9, "[] True\n"), done.stderr


def test_exit_waits_for_no_thread() -> None:
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


def test_imported_objects_are_not_garbage_collected() -> None:
    """Modules that make many objects which stay, as torch and transformers do: not one collection, and none later that
    would look at these objects; while a model is loaded there are collections again."""
    done = run("""
import gc, sys, types
from lineclear.process import settings_base
from lineclear.worker import app
collections, counts, kept = [], [], []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
def make_runner(found, ranks):
    print(counts, gc.isenabled(), gc.get_freeze_count() > 300_000)
    raise settings_base.ConfigurationError("enough")
class Imported(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        before = len(collections)
        kept.extend([] for _ in range(100_000))
        counts.append(len(collections) - before)
        return make_runner if name == "make_runner" else type(name, (Exception,), {})
for name in ("runner.self_test", "model.loaded_model", "runner.runner_factory"):
    sys.modules[f"lineclear.worker.{name}"] = Imported(name)
sys.exit(app.serve(["--model", sys.argv[1], "--socket-directory", "absent"], False))
""")
    assert (done.returncode, done.stdout) == (78, "[0, 0, 0, 0] True True\n"), done.stderr


@pytest.mark.parametrize("form", ["json", "console"])
def test_settings_are_logged_once_and_changed_ones_on_the_console(form: str) -> None:
    done = run(f"""
import sys, types
from lineclear.process import settings_base
from lineclear.worker import app
def make_runner(found, ranks):
    raise settings_base.ConfigurationError("enough")
for name in ("runner.self_test", "model.loaded_model", "runner.runner_factory"):
    sys.modules[f"lineclear.worker.{{name}}"] = types.SimpleNamespace(
        make_runner=make_runner, SelfTestFailed=KeyError, ModelRefused=KeyError, ModelFilesChanged=KeyError
    )
flags = ["--model", sys.argv[1], "--socket-directory", "nowhere", "--log-format", {form!r}]
sys.exit(app.serve(flags, False))
""")
    assert done.returncode == 78, done.stderr
    assert "nowhere" in done.stderr
    assert ("max_batch_size" in done.stderr) == (form == "json")


def test_a_standby_imports_the_class_of_its_model_and_nothing_of_ranks() -> None:
    done = run("""
import sys
from lineclear.worker import app
from lineclear.worker.settings import WorkerSettings
name = "transformers.models.llama.modeling_llama"
before = name in sys.modules
app._prepare(WorkerSettings(model=sys.argv[1], socket_directory="unused"))
parts = {f"lineclear.worker.{part}" for part in ("tensor_parallel.ranks", "runner.rank_runner", "model.division")}
print(before, name in sys.modules, parts & {*sys.modules})
""")
    assert (done.returncode, done.stdout) == (0, "False True set()\n"), done.stderr
