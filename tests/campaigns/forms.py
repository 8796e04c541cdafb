"""Measure structured output on a running model: `python -m campaigns.forms [--model DIR] [--out FILE]`.

300 schemas, each finished answer checked by jsonschema. Then the time of a token at 1 and 32 rows, of answers with a
form and of free ones with the same numbers of tokens, in turns. Prints lines of JSON. Exits with 1 if an answer is
invalid.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
from support.schemas import schemas
from support.service import DEMO_MODEL, running

from lineclear.client import Client, Generation

MAX_TOKENS = 96
_TIMED = 96
"""Schemas whose tokens are timed: as many as a worker keeps."""
_PROMPT = "Once upon a time, there was"


def ask(client: Client, rows: int, requests: Sequence[dict[str, Any]]) -> list[Generation]:
    """Return the answers to all requests, at most `rows` at once."""
    with ThreadPoolExecutor(rows) as pool:
        return list(pool.map(lambda params: client.generate(_PROMPT, temperature=1.0, **params), requests))


def with_form(chosen: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"json_schema": schema, "seed": seed, "max_tokens": MAX_TOKENS} for seed, schema in enumerate(chosen)]


def free(answers: Sequence[Generation]) -> list[dict[str, Any]]:
    """Return requests for free answers of the same lengths."""
    return [
        {"seed": seed, "max_tokens": len(answer.token_ids), "ignore_eos": True} for seed, answer in enumerate(answers)
    ]


def milliseconds_a_token(answers: Sequence[Generation]) -> float:
    """Return the mean time between two tokens of an answer."""
    gaps = sum(len(answer.token_ids) - 1 for answer in answers)
    return 1000 * sum(answer.timings.decode_time_seconds for answer in answers) / gaps


def validity(client: Client, rows: int) -> dict[str, Any]:
    """Answer each schema and check the finished answers."""
    chosen = schemas()
    answers = ask(client, rows, with_form(chosen))
    finished = invalid = 0
    for schema, answer in zip(chosen, answers, strict=True):
        if answer.finish_reason == "stop_eos":
            finished += 1
            try:
                jsonschema.validate(answer.parsed, schema, cls=jsonschema.Draft202012Validator)
            except (ValueError, jsonschema.ValidationError):
                invalid += 1
    return {"schemas": len(chosen), "finished": finished, "invalid": invalid}


def speed(client: Client, rows: int, turns: int) -> dict[str, Any]:
    """Compare answers with and without a form, in turns."""
    chosen = schemas()[:_TIMED]
    ask(client, rows, with_form(chosen))  # compiles them
    times: dict[str, list[float]] = {"form": [], "free": []}
    tokens = 0
    for _ in range(turns):
        answers = ask(client, rows, with_form(chosen))
        tokens += sum(len(answer.token_ids) for answer in answers)
        times["form"].append(milliseconds_a_token(answers))
        times["free"].append(milliseconds_a_token(ask(client, rows, free(answers))))
    ratios = [form / plain for form, plain in zip(times["form"], times["free"], strict=True)]
    return {
        "rows": rows,
        "turns": turns,
        "tokens": tokens,
        "form_ms_a_token": round(statistics.median(times["form"]), 3),
        "free_ms_a_token": round(statistics.median(times["free"]), 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign; return 1 if an answer is invalid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    found: list[dict[str, Any]] = []
    with running("--max-batch-size", "32", model=chosen.model) as service, Client(service.target) as client:
        found.append(validity(client, max(chosen.rows)))
        print(json.dumps(found[-1]), flush=True)
        for rows in chosen.rows:
            found.append(speed(client, rows, chosen.turns))
            print(json.dumps(found[-1]), flush=True)
    if chosen.out is not None:
        chosen.out.write_text("".join(json.dumps(entry) + "\n" for entry in found), "utf-8")
    return int(found[0]["invalid"] > 0 or found[0]["finished"] == 0)


if __name__ == "__main__":
    sys.exit(main())
