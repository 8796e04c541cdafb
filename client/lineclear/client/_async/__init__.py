"""The client for asyncio, and the source of `_sync`: after a change run `client/unasync.py`."""
