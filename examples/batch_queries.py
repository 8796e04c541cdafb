"""Batches database look-ups of many asyncio tasks into few queries."""

import asyncio
import sqlite3

from lineclear.embedded import ItemBatcher

database = sqlite3.connect(":memory:", check_same_thread=False)
database.execute("CREATE TABLE city (id INTEGER PRIMARY KEY, name TEXT)")
database.executemany("INSERT INTO city VALUES (?, ?)", [(n, f"city {n}") for n in range(1000)])


def look_up(ids: list[int]) -> list[str | Exception]:
    """Return the name of each id with one query."""
    marks = ",".join("?" * len(ids))
    found = dict(database.execute(f"SELECT id, name FROM city WHERE id IN ({marks})", ids).fetchall())
    return [found.get(n, KeyError(n)) for n in ids]


async def main() -> None:
    """Ask for 200 names at once and for one that does not exist."""
    async with ItemBatcher(look_up, max_batch_size=50) as batcher:
        names = await asyncio.gather(*(batcher.submit(n) for n in range(200)))
        missing = await asyncio.gather(batcher.submit(5000), return_exceptions=True)
        print(names[0], names[-1], repr(missing[0]), f"{batcher.stats().steps} queries", sep=", ")


asyncio.run(main())
