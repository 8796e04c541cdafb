"""Benchmarks: the same requests through lineclear and its peers on the same cores, and the cost of each part alone.

Run from the root of the repository, as modules: `python -m bench.compare --help`. A peer's driver runs in that peer's
virtual environment, so `workloads`, `measure` and `http_load` need nothing but the standard library.
"""
