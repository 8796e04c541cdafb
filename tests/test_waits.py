"""Each wait of a server thread has a timeout, or is listed below with its bound."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("protos", "common", "scheduler_svc", "gpu_worker", "tools", "embedded")
WITHOUT_ARGUMENTS = frozenset({"join", "wait", "get", "acquire", "result", "communicate", "recv", "recv_multipart"})
"""Methods that wait for ever if called without arguments."""

BOUNDED = {
    "common/lineclear/process/logging_setup.py:LineWriter._run:self._lines.get()": (
        "a daemon thread's queue; close joins with a timeout"
    ),
    "common/lineclear/process/standby.py:Standby.run_in_background:thread.join()": (
        "the supervisor kills a late standby"
    ),
    "scheduler_svc/lineclear/scheduler/shutdown.py:ExitGuard._run:self._is_exiting.wait()": "a daemon thread",
    "scheduler_svc/lineclear/scheduler/shutdown.py:ShutdownController.run_unless_forced:task.result()": (
        "the task is done"
    ),
    "scheduler_svc/lineclear/scheduler/flight_recorder/recording_files.py:RecordingFiles._run:self._jobs.get()": (
        "a daemon thread's queue; close joins with a timeout"
    ),
    "scheduler_svc/lineclear/scheduler/engine/worker_process.py:WorkerProcess.reap:self._process.wait()": (
        "called once pidfd reports the exit"
    ),
    "embedded/lineclear/embedded/answers.py:Answer.__iter__:woken.wait()": (
        "a caller's thread; the request's deadline, and the end of the batcher, which fails every request"
    ),
    (
        "embedded/lineclear/embedded/step_loop.py:StepLoop._call:"
        "asyncio.run_coroutine_threadsafe(_as_coroutine(found), self._loop).result()"
    ): "a daemon thread; the caller's step function bounds its time",
    "gpu_worker/lineclear/worker/model/quantized_model.py:_made_in_order:made.popleft().result()": (
        "the work of loading one matrix"
    ),
    "gpu_worker/lineclear/worker/loop/result_collector.py:ResultCollector._run:self._items.get()": (
        "a daemon thread's queue; close joins with a timeout"
    ),
    "gpu_worker/lineclear/worker/loop/result_collector.py:ResultCollector._finish:launched.inflight.result()": (
        "the device; the scheduler replaces a worker whose step takes too long, and a stop waits until it is overdue"
    ),
    "gpu_worker/lineclear/worker/runner/self_test.py:_generate:runner.launch(plan).result()": (
        "the device, before the worker joins; start_timeout_seconds"
    ),
    "gpu_worker/lineclear/worker/runner/memory_profile.py:run_largest_steps:runner.launch(plan).result()": (
        "the device, before the worker joins; start_timeout_seconds"
    ),
    "gpu_worker/lineclear/worker/structured_output/mask_threads.py:MaskThreads.wait:self._changed.wait()": (
        "the device's step before; the scheduler replaces a worker whose step takes too long"
    ),
    "gpu_worker/lineclear/worker/runner/model_runner.py:ModelRunner._compute:pending.result()": (
        "MaskThreads.wait, which is bounded"
    ),
    "gpu_worker/lineclear/worker/runner/rank_runner.py:_LeadingConstraints.start:pending.result()": (
        "MaskThreads.wait, which is bounded"
    ),
    "gpu_worker/lineclear/worker/runner/rank_runner.py:_FollowingDraws.compare:self.steps.popleft().result()": (
        "the step is over"
    ),
    "gpu_worker/lineclear/worker/runner/rank_runner.py:_LeadingStep.result:self._step.result()": (
        "the scheduler's step timeout, as for a worker of one process"
    ),
    "gpu_worker/lineclear/worker/tensor_parallel/ranks.py:Ranks._watch:self._processes[rank - 1].wait()": (
        "called once pidfd reports the exit"
    ),
    "gpu_worker/lineclear/worker/structured_output/grammar_constraints.py:_Constraint.advance:self._matcher.result()": (
        "the scheduler compiles a grammar within max_grammar_seconds before a worker gets it"
    ),
    (
        "gpu_worker/lineclear/worker/structured_output/grammar_compiler.py:"
        "GrammarCompiler.matcher.on_compiled:compiled.result()"
    ): "the future is done",
    "gpu_worker/lineclear/worker/runner/launched_step.py:LaunchedStep._finish:self._timer.wait()": (
        "as ResultCollector._finish"
    ),
}
CONTEXT = ("_by_token", "_flow", "_is_valid", "_has_request", "_trace")
"""Context variables, whose get() does not wait."""


def waits(source: Path) -> Iterator[str]:
    """Yield each call that may wait for ever, as file:function:call. Awaited calls are left out: they can be
    cancelled.
    """
    tree = ast.parse(source.read_text())
    awaited = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Await)}
    awaited |= {id(call) for node in ast.walk(tree) if _makes_task(node) for call in ast.walk(node)}
    yield from _below(tree, str(source.relative_to(ROOT)) + ":", "", awaited)


def _below(node: ast.AST, file: str, scope: str, awaited: set[int]) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{scope}.{child.name}" if scope else child.name
        if isinstance(child, ast.Call) and id(child) not in awaited and _may_wait(child):
            yield f"{file}{scope}:{ast.unparse(child)}"
        yield from _below(child, file, inner, awaited)


def _may_wait(call: ast.Call) -> bool:
    function = call.func
    if not isinstance(function, ast.Attribute) or function.attr not in WITHOUT_ARGUMENTS:
        return False
    owner = function.value
    is_context = isinstance(owner, ast.Name) and owner.id in CONTEXT
    return not call.args and not call.keywords and not is_context


def _makes_task(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("ensure_future", "wait_for")
    )


def found() -> set[str]:
    sources = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {wait for source in sources if "_pb2" not in source.name for wait in waits(source)}


def test_every_wait_is_bounded() -> None:
    waiting = found()
    assert waiting - BOUNDED.keys() == set(), "give it a timeout, or add it to BOUNDED with what bounds it"
    assert BOUNDED.keys() - waiting == set(), "these wait no more: remove them"


def test_unbounded_wait_is_found() -> None:
    tree = ast.parse("class A:\n    def f(self):\n        self._thread.join()\n        self._thread.join(1.0)\n")
    assert list(_below(tree, "limits.py:", "", set())) == ["limits.py:A.f:self._thread.join()"]
