"""The client for asyncio, and the source of `_sync`."""
