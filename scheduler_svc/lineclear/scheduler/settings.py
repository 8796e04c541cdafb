"""Settings of the scheduler process: how values are read, and which of them go together. See `settings_fields`, too.

The number of blocks and the context length are no settings: the worker reports them when it joins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import ClassVar

from pydantic import model_validator
from pydantic_settings import SettingsConfigDict

from lineclear.api_limits import MAX_REQUEST_BYTES
from lineclear.process import settings_base
from lineclear.process.command_line import Hints
from lineclear.process.device_names import split_devices
from lineclear.process.flag_aliases import flags_of_worker
from lineclear.scheduler.addresses import is_local, is_tcp
from lineclear.scheduler.core.policies import PolicySettings, share_of
from lineclear.scheduler.settings_fields import MAX_MESSAGE_BYTES, SchedulerFields, parse_adapters, parse_weights

# A Generate call beyond queue and batch is refused at once. These streams are for calls that do not wait in the queue.
_SPARE_STREAMS = 128
_MAX_STREAMS = 4096


class SchedulerSettings(SchedulerFields):
    """Settings of lineclear-scheduler.

    Words after a lone `--` are flags of the worker that it starts: -- --device cuda --dtype bfloat16.
    `lineclear-worker --help` lists those.
    """

    model_config = SettingsConfigDict(env_prefix="LINECLEAR_")
    program: ClassVar[str] = "lineclear-scheduler"

    @property
    def worker_count(self) -> int:
        """Workers to spawn: num_workers, or as many as worker_devices has."""
        return max(self.num_workers, len(split_devices(self.worker_devices)))

    @property
    def policy(self) -> PolicySettings:
        """The numbers of the scheduling policies."""
        return self.part(PolicySettings)

    @property
    def batch_timeout_seconds(self) -> float:
        return self.batch_timeout_ms / 1000

    @property
    def fixed_size_timeout_seconds(self) -> float | None:
        """The timeout of fixed_size only if it is set: its default would turn fixed_size into another strategy."""
        return self.batch_timeout_seconds if "batch_timeout_ms" in self.model_fields_set else None

    @property
    def target_inter_token_latency_seconds(self) -> float:
        return self.target_inter_token_latency_ms / 1000

    @property
    def share_weights(self) -> dict[str, float]:
        """Weights by the hashed name of the tenant."""
        return {share_of(name): weight for name, weight in self.weights.items()}

    @property
    def adaptive_drafts(self) -> bool:
        """speculative_adaptive, by the core's name."""
        return self.speculative_adaptive

    @property
    def max_isolated_kills(self) -> int:
        """Kills of a request that runs alone. It does so after two crashes, which count in max_worker_crashes too."""
        return max(1, self.max_worker_crashes - 2)

    @property
    def weights(self) -> dict[str, float]:
        return parse_weights(self.tenant_weights)

    @property
    def adapters_at_start(self) -> dict[str, str]:
        """Folders of the adapters to load at start, by name."""
        return parse_adapters(self.lora_modules)

    @property
    def max_request_bytes(self) -> int:
        """Largest accepted request in bytes: max_message_bytes, or derived from max_prompt_bytes."""
        return self.max_message_bytes or min(max(MAX_REQUEST_BYTES, 2 * self.max_prompt_bytes), MAX_MESSAGE_BYTES)

    @property
    def max_streams(self) -> int:
        """Most open calls of a connection. A client whose requests fill the server can still cancel them."""
        return min(self.max_queue_size + self.max_batch_size + _SPARE_STREAMS, _MAX_STREAMS)

    @model_validator(mode="after")
    def _is_consistent(self) -> SchedulerSettings:
        for is_wrong, sentence in chain(*(of(self) for of in (_of_requests, _of_workers, _of_security, _of_addresses))):
            if is_wrong:
                raise ValueError(sentence)
        return self

    def lacks(self) -> str:
        """Return what `listen` lacks to be safe on a network; empty if nothing."""
        if not self.tls_cert_file:
            return "no encryption (--tls-cert-file)"
        if not self.token_file and not self.tls_client_ca_file:
            return "no authentication (--token-file, --tls-client-ca-file)"
        return ""


def _of_requests(settings: SchedulerSettings) -> Iterable[tuple[object, str]]:
    """Yield whether settings contradict each other, and the sentence for it."""
    yield not settings.listen, "--listen is empty; give host:port or unix:/path"
    yield settings.demo and settings.model, "--demo and --model exclude each other; omit one of them"
    yield (
        "max_prompt_bytes" in settings.model_fields_set and settings.max_prompt_bytes > settings.max_request_bytes,
        f"--max-prompt-bytes is {settings.max_prompt_bytes}, but a request has at most {settings.max_request_bytes}"
        " bytes (--max-message-bytes); raise --max-message-bytes, or leave it out",
    )
    yield (
        settings.min_batch_size > settings.max_batch_size,
        f"--min-batch-size ({settings.min_batch_size}) is larger than --max-batch-size ({settings.max_batch_size})",
    )
    drafts = settings.speculative_method == "draft_model"
    yield settings.draft_model and not drafts, "--draft-model needs --speculative-method draft_model"
    yield (
        drafts and settings.spawn_worker and not settings.draft_model,
        "--speculative-method draft_model needs --draft-model DIR, or use prompt_lookup",
    )


def _of_workers(settings: SchedulerSettings) -> Iterable[tuple[object, str]]:
    devices, is_external = split_devices(settings.worker_devices), not settings.spawn_worker
    yield (
        settings.standby_worker and is_external,
        "--standby-worker needs --spawn-worker; where another program starts workers, start two of them",
    )
    yield (
        devices and "num_workers" in settings.model_fields_set and len(devices) != settings.num_workers,
        f"--worker-devices names {len(devices)} devices and --num-workers is {settings.num_workers}; give one device"
        " for each worker, or leave --num-workers out",
    )
    yield (
        settings.worker_count > 1 and is_external,
        "--num-workers needs --spawn-worker; where another program starts workers, start as many as you need",
    )
    yield (
        devices and is_external,
        "--worker-devices needs --spawn-worker; other workers take --device themselves",
    )
    yield (
        settings.worker_count > settings.max_workers,
        f"--num-workers ({settings.worker_count}) is larger than --max-workers ({settings.max_workers}); raise that",
    )


def _of_security(settings: SchedulerSettings) -> Iterable[tuple[object, str]]:
    tls, key, tokens = settings.tls_cert_file, settings.tls_key_file, settings.admin_token_file
    given, lacking = ("--tls-cert-file", "--tls-key-file") if tls else ("--tls-key-file", "--tls-cert-file")
    yield bool(tls) != bool(key), f"{given} is set without {lacking}; give both"
    yield settings.tls_client_ca_file and not tls, "--tls-client-ca-file needs --tls-cert-file and --tls-key-file"
    yield (
        tls and not any(map(is_tcp, (settings.listen, settings.admin_listen, settings.status_listen))),
        "--tls-cert-file is set, but none of --listen, --admin-listen and --status-listen is host:port; a unix"
        " socket is not encrypted",
    )
    yield (
        tokens and not (settings.admin_listen or settings.status_listen),
        "--admin-token-file is set without --admin-listen or --status-listen; give an address for operators",
    )
    yield (
        settings.channelz and not settings.admin_listen,
        "--channelz is set without --admin-listen; give an address for operators",
    )


def _of_addresses(settings: SchedulerSettings) -> Iterable[tuple[object, str]]:
    tls, tokens = settings.tls_cert_file, settings.admin_token_file
    is_open = "can be reached from other machines"
    yield (
        not is_local(settings.listen) and not settings.insecure_allow_remote and settings.lacks(),
        f"--listen {settings.listen} {is_open} and there is {settings.lacks()}; use 127.0.0.1 or unix:, or set"
        " --insecure-allow-remote",
    )
    yield (
        settings.gateway_listen
        and not is_local(settings.gateway_listen)
        and not settings.insecure_allow_remote
        and settings.lacks(),
        f"--gateway-listen {settings.gateway_listen} {is_open} and there is {settings.lacks()}; use 127.0.0.1, or set"
        " --insecure-allow-remote",
    )
    yield (
        settings.gateway and (tls or settings.token_file),
        "--gateway starts smg without certificates and tokens; start smg yourself before --gateway-listen",
    )
    yield (
        settings.gateway and not is_local(settings.gateway_http) and not settings.insecure_allow_remote,
        f"--gateway-http {settings.gateway_http} {is_open} and has no authentication; use 127.0.0.1, or set"
        " --insecure-allow-remote",
    )
    yield (
        settings.admin_listen and not is_local(settings.admin_listen) and not (tls and tokens),
        f"--admin-listen {settings.admin_listen} {is_open}; use 127.0.0.1 or unix:, or set --tls-cert-file and"
        " --admin-token-file",
    )
    yield (
        settings.status_listen
        and not is_local(settings.status_listen)
        and not (tokens and (tls or settings.insecure_allow_remote)),
        f"--status-listen {settings.status_listen} {is_open}; use 127.0.0.1 and a tunnel, or set --admin-token-file and"
        " --tls-cert-file (behind a proxy with TLS, --insecure-allow-remote)",
    )


def load(argv: Sequence[str]) -> tuple[SchedulerSettings, tuple[str, ...]]:
    """Return the settings, and the flags after a lone `--`, which are the worker's. Raises as settings_base.load."""
    own, worker_flags = _split(argv)
    if own == ["--spawn-worker", "--version"]:  # lineclear serve --version
        own = ["--version"]
    hints = Hints(unknown_word="a model is named by --model {}", elsewhere=flags_of_worker())
    return settings_base.load(SchedulerSettings, own, hints), worker_flags


def _split(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    cut = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:cut]), tuple(argv[cut + 1 :])
