"""Grammars that wait are compiled shortest first."""

from __future__ import annotations

import threading

import pytest

from lineclear.worker.structured_output.grammar_compiler import GrammarCompiler

_BOUND_SECONDS = 60.0


def compiled_in_order(monkeypatch: pytest.MonkeyPatch, grammars: list[str]) -> list[str]:
    """Return `grammars` in the order of compiling. They arrive while both threads are busy; one thread goes on."""
    order: list[str] = []
    begun, release, ended = threading.Semaphore(0), threading.Event(), threading.Event()
    last = threading.Event()

    def compile_one(self: GrammarCompiler, grammar: str) -> None:
        if grammar in ("busy", "held"):
            begun.release()
            assert (release if grammar == "busy" else ended).wait(_BOUND_SECONDS)
        else:
            order.append(grammar)
            if len(order) == len(grammars):
                last.set()

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_one)
    compiler = GrammarCompiler(None, 97, ())
    for grammar in ("busy", "held"):
        compiler.prepare(grammar, lambda: None)
        assert begun.acquire(timeout=_BOUND_SECONDS)
    for grammar in grammars:
        compiler.prepare(grammar, lambda: None)
    release.set()
    assert last.wait(_BOUND_SECONDS)
    ended.set()
    return order


def test_short_grammar_overtakes_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    long = [f"{number}" * 100 for number in range(8)]
    assert compiled_in_order(monkeypatch, [*long, "short"]) == ["short", *long]
