"""The adapters that requests may name, loaded and unloaded while the server runs. On one event loop."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import structlog

from lineclear.errors import AdapterLimitReached, AdapterNotFound, AdapterRefused, InvalidRequest, Unsupported
from lineclear.model_files import adapter_files, fingerprint, model_directory
from lineclear.model_files.adapter_files import AdapterFiles, AdapterFilesRefused
from lineclear.scheduler.requests.engine_api import EngineApi
from lineclear.scheduler.settings import SchedulerSettings

log = structlog.get_logger()

_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")


@dataclass(slots=True)
class LoadedAdapter:
    """An adapter that requests may name."""

    name: str
    path: str
    files: AdapterFiles
    last_used: float
    warning: str = ""
    """Why its answers may be wrong: it was made for another model."""
    num_requests: int = 0
    """Requests in progress."""

    def fingerprint(self, model_fingerprint: str) -> str:
        return fingerprint.combined((model_fingerprint, self.files.key.hex()))


class AdapterUse(NamedTuple):
    """The names of adapters with requests that run, and with requests that wait, sorted, and the limit of adapters."""

    max_loras: int
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


class Adapters:
    """The loaded adapters by name, at most `max_loras` of different content."""

    def __init__(
        self, settings: SchedulerSettings, engine: EngineApi, clock: Callable[[], float], model: Path | None
    ) -> None:
        """`model` is the directory of the served model."""
        self._settings, self._engine, self._clock, self._model = settings, engine, clock, model
        self._loaded: dict[str, LoadedAdapter] = {}
        self._lock = asyncio.Lock()

    def all(self) -> list[LoadedAdapter]:
        return [self._loaded[name] for name in sorted(self._loaded)]

    def acquire(self, name: str) -> LoadedAdapter:
        """Return the adapter for a new request. Raises AdapterNotFound. Call `release` when the request has ended."""
        adapter = self._loaded.get(name)
        if adapter is None:
            raise AdapterNotFound(f"no adapter of this name is loaded; {len(self._loaded)} are, which GetModel lists")
        adapter.num_requests += 1
        return adapter

    def release(self, adapter: LoadedAdapter) -> None:
        """Count the end of a request."""
        adapter.num_requests -= 1
        adapter.last_used = self._clock()

    async def load(self, name: str, path: str) -> LoadedAdapter:
        """Load the adapter in a folder below --lora-dir on every joined worker.

        Raises AdapterRefused, AdapterLimitReached, InvalidRequest, or Unsupported without --lora-dir.
        """
        return await self._load(name, self._below_folder(path))

    async def load_at_start(self) -> None:
        """Load the adapters of --lora-modules, wherever they are. Raises AdapterRefused or AdapterLimitReached."""
        for name, path in self._settings.adapters_at_start.items():
            try:
                await self._load(name, Path(path))
            except AdapterRefused as error:
                raise AdapterRefused(f"--lora-modules {name}: {error}") from None

    async def unload(self, name: str) -> int:
        """Unload an adapter; return how many requests still use it. They run to their end. Raises AdapterNotFound."""
        async with self._lock:
            adapter = self._loaded.pop(name, None)
            if adapter is None:
                raise AdapterNotFound("no adapter of this name is loaded")
            log.info("adapter_unloaded", adapter=name, num_requests=adapter.num_requests)
            return await self._unload(adapter)

    def failed(self, key: bytes, problem: str) -> None:
        """Forget an adapter that a worker cannot load."""
        for adapter in [adapter for adapter in self._loaded.values() if adapter.files.key == key]:
            log.error("adapter_lost", adapter=adapter.name, problem=problem)
            del self._loaded[adapter.name]

    async def _load(self, name: str, directory: Path) -> LoadedAdapter:
        if not _NAME.fullmatch(name):
            raise InvalidRequest.at("name", "must be 1 to 64 characters of [A-Za-z0-9._:-]")
        directory, files, warning = await asyncio.to_thread(self._read, directory)
        async with self._lock:
            before = self._loaded.get(name)
            if before is not None and before.files.key != files.key:
                raise AdapterRefused("another adapter of this name is loaded; unload it first")
            await self._make_room(files.key)
            await asyncio.shield(asyncio.wrap_future(self._engine.load_adapter(files.key, str(directory))))
            adapter = before or LoadedAdapter(name, str(directory), files, self._clock(), warning)
            self._loaded[name] = adapter
            log.info("adapter_registered", adapter=name, key=files.key.hex()[:16], rank=files.rank)
            if warning:
                log.warning("adapter_of_another_model", adapter=name, problem=warning)
            return adapter

    def _read(self, directory: Path) -> tuple[Path, AdapterFiles, str]:
        """Return the directory, the files, and the warning of `LoadedAdapter`."""
        settings = self._settings
        try:
            directory = directory.resolve()  # the worker may have another working directory
            files = adapter_files.read(directory, settings.max_lora_rank)
        except AdapterFilesRefused as error:
            raise AdapterRefused(f"the adapter cannot be loaded: {error}") from None
        except OSError as error:
            raise AdapterRefused(f"the adapter's files cannot be read: {error.strerror}") from None
        if self._model is None:
            return directory, files, ""
        served = model_directory.names_of(self._model, settings.model, settings.served_model_name)
        return directory, files, adapter_files.other_base(files, served)

    def _below_folder(self, path: str) -> Path:
        """Return the directory that `path` names. Raises AdapterRefused if it or its files lie elsewhere."""
        if not self._settings.lora_dir:
            raise Unsupported("adapters are loaded at run time only with the setting --lora-dir")
        if not path or "\0" in path:
            raise InvalidRequest.at("path", "must name a folder")
        folder = Path(self._settings.lora_dir).resolve()
        directory = (folder / path).resolve()
        places = (directory, *((directory / name).resolve() for name in (adapter_files.CONFIG, adapter_files.WEIGHTS)))
        if directory == folder or not all(place.is_relative_to(folder) for place in places):
            raise AdapterRefused("the path leads out of the folder --lora-dir")
        return directory

    async def _make_room(self, key: bytes) -> None:
        """Unload the least recently used idle adapter if `key` would be one too many. Raises AdapterLimitReached."""
        limit = self._settings.max_loras
        by_key: dict[bytes, list[LoadedAdapter]] = {}
        for adapter in self._loaded.values():
            by_key.setdefault(adapter.files.key, []).append(adapter)
        if key in by_key or len(by_key) < limit:
            return
        idle = [group for group in by_key.values() if not any(adapter.num_requests for adapter in group)]
        if not idle:
            raise AdapterLimitReached(
                f"{len(by_key)} adapters are loaded and in use, and the limit is {limit}; unload one, or raise"
                " --max-loras",
                metadata={"loaded": str(len(by_key)), "limit": str(limit)},
            )
        for adapter in min(idle, key=lambda group: max(adapter.last_used for adapter in group)):
            del self._loaded[adapter.name]
            log.warning("adapter_evicted", adapter=adapter.name, limit=limit)
            await self._unload(adapter)

    async def _unload(self, adapter: LoadedAdapter) -> int:
        if any(other.files.key == adapter.files.key for other in self._loaded.values()):
            return adapter.num_requests  # it has another name, too
        return await asyncio.shield(asyncio.wrap_future(self._engine.unload_adapter(adapter.files.key)))
