"""Settings of the scheduler process: how values are read, and which of them go together. See `settings_fields`, too.

The number of blocks and the context length are no settings: the worker reports them when it joins.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import ClassVar

from pydantic import field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from lineclear.api_limits import MAX_REQUEST_BYTES
from lineclear.process import settings_base
from lineclear.process.device_names import split_devices
from lineclear.process.flag_aliases import flags_of_worker
from lineclear.scheduler.addresses import is_local, is_tcp, parse_address
from lineclear.scheduler.settings_fields import MAX_MESSAGE_BYTES, SchedulerFields

_MIN_MESSAGE_BYTES = 4096
# A Generate call beyond queue and batch is refused at once. These streams are for calls that do not wait in the queue.
_SPARE_STREAMS = 128
_MAX_STREAMS = 4096
_METHODS = {"ngram": "prompt_lookup", "standalone": "draft_model"}  # vLLM and SGLang, SGLang


class SchedulerSettings(SchedulerFields):
    """Settings of lineclear-scheduler.

    Words after a lone `--` are flags of the worker that it starts: -- --device cuda --dtype bfloat16.
    `lineclear-worker --help` lists those.
    """

    model_config = SettingsConfigDict(env_prefix="LINECLEAR_")
    program: ClassVar[str] = "lineclear-scheduler"

    @field_validator("metrics_listen")
    @classmethod
    def _is_a_port(cls, value: str) -> str:
        if value and not is_tcp(value):
            raise ValueError("give host:port; Prometheus cannot read from a unix socket")
        return value

    @field_validator("status_listen")
    @classmethod
    def _is_a_host(cls, value: str) -> str:
        if value and not is_tcp(value):
            raise ValueError("give host:port; a browser cannot connect to a unix socket")
        return value

    @field_validator("listen", "health_listen", "admin_listen")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        if value:
            parse_address(value)
        return value

    @field_validator("output_length_estimator")
    @classmethod
    def _is_an_estimator(cls, value: str) -> str:
        if value not in ("none", "learned") and not re.fullmatch(r"[\w.]+:\w+", value):
            raise ValueError("give none, learned, or module:factory")
        return value

    @field_validator("speculative_method", mode="before")
    @classmethod
    def _is_a_known_method(cls, value: object) -> object:
        return _METHODS.get(value.lower(), value) if isinstance(value, str) else value

    @field_validator("worker_command")
    @classmethod
    def _is_a_command(cls, value: str) -> str:
        shlex.split(value)  # raises ValueError for a quotation mark without its counterpart
        return value

    @field_validator("worker_devices")
    @classmethod
    def _are_devices(cls, value: str) -> str:
        split_devices(value)
        return value

    @field_validator("max_message_bytes")
    @classmethod
    def _is_a_size(cls, value: int) -> int:
        if 0 < value < _MIN_MESSAGE_BYTES:
            raise ValueError(f"must be 0 or at least {_MIN_MESSAGE_BYTES}")
        return value

    @property
    def worker_count(self) -> int:
        """Workers to spawn: num_workers, or as many as worker_devices has."""
        return max(self.num_workers, len(split_devices(self.worker_devices)))

    @field_validator("tenant_weights")
    @classmethod
    def _are_weights(cls, value: str) -> str:
        _weights(value)
        return value

    @property
    def weights(self) -> dict[str, float]:
        """Weights by the name of the tenant."""
        return _weights(self.tenant_weights)

    @field_validator("lora_modules")
    @classmethod
    def _are_adapters(cls, value: str) -> str:
        _adapters(value)
        return value

    @property
    def adapters_at_start(self) -> dict[str, str]:
        """Folders of the adapters to load at start, by name."""
        return _adapters(self.lora_modules)

    @property
    def max_request_bytes(self) -> int:
        """Largest accepted request in bytes: max_message_bytes, or derived from max_prompt_bytes."""
        return self.max_message_bytes or min(max(MAX_REQUEST_BYTES, 2 * self.max_prompt_bytes), MAX_MESSAGE_BYTES)

    @property
    def max_streams(self) -> int:
        """Most open calls of a connection: max_streams_per_connection, or derived from queue and batch size."""
        return self.max_streams_per_connection or min(
            self.max_queue_size + self.max_batch_size + _SPARE_STREAMS, _MAX_STREAMS
        )

    @model_validator(mode="after")
    def _is_consistent(self) -> SchedulerSettings:
        if not self.listen:
            raise ValueError("--listen is empty; give host:port or unix:/path")
        if self.demo and self.model:
            raise ValueError("--demo and --model exclude each other; omit one of them")
        self._check_security()
        if self.standby_worker and not self.spawn_worker:
            raise ValueError(
                "--standby-worker needs --spawn-worker; where another program starts workers, start two of them"
            )
        self._check_workers()
        self._check_drafts()
        if "max_prompt_bytes" in self.model_fields_set and self.max_prompt_bytes > self.max_request_bytes:
            raise ValueError(
                f"--max-prompt-bytes is {self.max_prompt_bytes}, but a request has at most {self.max_request_bytes}"
                " bytes (--max-message-bytes); raise --max-message-bytes, or leave it out"
            )
        if self.min_batch_size > self.max_batch_size:
            raise ValueError(
                f"--min-batch-size ({self.min_batch_size}) is larger than --max-batch-size ({self.max_batch_size})"
            )
        return self

    def _check_workers(self) -> None:
        devices = split_devices(self.worker_devices)
        if devices and "num_workers" in self.model_fields_set and len(devices) != self.num_workers:
            raise ValueError(
                f"--worker-devices names {len(devices)} devices and --num-workers is {self.num_workers}; give one"
                " device for each worker, or leave --num-workers out"
            )
        if self.worker_count > 1 and not self.spawn_worker:
            raise ValueError(
                "--num-workers needs --spawn-worker; where another program starts workers, start as many as you need"
            )
        if devices and not self.spawn_worker:
            raise ValueError("--worker-devices needs --spawn-worker; other workers take --device themselves")
        if self.worker_count > self.max_workers:
            raise ValueError(
                f"--num-workers ({self.worker_count}) is larger than --max-workers ({self.max_workers}); raise that"
            )

    def _check_drafts(self) -> None:
        if self.draft_model and self.speculative_method != "draft_model":
            raise ValueError("--draft-model needs --speculative-method draft_model")
        if self.speculative_method == "draft_model" and self.spawn_worker and not self.draft_model:
            raise ValueError("--speculative-method draft_model needs --draft-model DIR, or use prompt_lookup")

    def _check_security(self) -> None:
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            given, lacking = "--tls-cert-file", "--tls-key-file"
            if not self.tls_cert_file:
                given, lacking = lacking, given
            raise ValueError(f"{given} is set without {lacking}; give both")
        if self.tls_client_ca_file and not self.tls_cert_file:
            raise ValueError("--tls-client-ca-file needs --tls-cert-file and --tls-key-file")
        if self.tls_cert_file and not any(map(is_tcp, (self.listen, self.admin_listen, self.status_listen))):
            raise ValueError(
                "--tls-cert-file is set, but none of --listen, --admin-listen and --status-listen is host:port; a unix"
                " socket is not encrypted"
            )
        if self.admin_token_file and not (self.admin_listen or self.status_listen):
            raise ValueError(
                "--admin-token-file is set without --admin-listen or --status-listen; give an address for operators"
            )
        if self.channelz and not self.admin_listen:
            raise ValueError("--channelz is set without --admin-listen; give an address for operators")
        if not is_local(self.listen) and not self.insecure_allow_remote and (lack := self.lacks()):
            raise ValueError(
                f"--listen {self.listen} can be reached from other machines and there is {lack}; use 127.0.0.1 or "
                "unix:, or set --insecure-allow-remote"
            )
        is_guarded = self.tls_cert_file and self.admin_token_file
        if self.admin_listen and not is_local(self.admin_listen) and not is_guarded:
            raise ValueError(
                f"--admin-listen {self.admin_listen} can be reached from other machines; use 127.0.0.1 or unix:, or"
                " set --tls-cert-file and --admin-token-file"
            )
        is_accepted = self.admin_token_file and (self.tls_cert_file or self.insecure_allow_remote)
        if self.status_listen and not is_local(self.status_listen) and not is_accepted:
            raise ValueError(
                f"--status-listen {self.status_listen} can be reached from other machines; use 127.0.0.1 and a tunnel,"
                " or set --admin-token-file and --tls-cert-file (behind a proxy with TLS, --insecure-allow-remote)"
            )

    def lacks(self) -> str:
        """Return what `listen` lacks to be safe on a network; empty if nothing."""
        if not self.tls_cert_file:
            return "no encryption (--tls-cert-file)"
        if not self.token_file and not self.tls_client_ca_file:
            return "no authentication (--token-file, --tls-client-ca-file)"
        return ""


def load(argv: Sequence[str]) -> tuple[SchedulerSettings, tuple[str, ...]]:
    """Return the settings, and the flags after a lone `--`, which are the worker's. Raises as settings_base.load."""
    own, worker_flags = _split(argv)
    if own == ["--spawn-worker", "--version"]:  # lineclear serve --version
        own = ["--version"]
    settings = settings_base.load(
        SchedulerSettings,
        own,
        unknown_word="a model is named by --model {}",
        elsewhere=flags_of_worker(),
    )
    return settings, worker_flags


def _weights(text: str) -> dict[str, float]:
    """Return weights by name. Raises ValueError."""
    found: dict[str, float] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, weight = entry.rpartition("=")
        try:
            found[name] = float(weight)
        except ValueError:
            found[name] = 0.0
        if not name or not 0.01 <= found[name] <= 100:
            raise ValueError(f"{entry} is not name=weight with a weight from 0.01 to 100")
    return found


def _adapters(text: str) -> dict[str, str]:
    """Return folders by name. Raises ValueError."""
    found: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, path = entry.partition("=")
        if not (name and equals and path) or name in found:
            raise ValueError(f"{entry} is not name=folder with a name of its own")
        found[name] = path
    return found


def _split(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    cut = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:cut]), tuple(argv[cut + 1 :])
