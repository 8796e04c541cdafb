"""The scheduler process's settings: one frozen object, made once at start.

A flag beats an environment variable (LINECLEAR_ and the name), which beats the TOML file named by --config, which beats
the default. Flags, variables and docs all derive from the fields here. What is learnt later (number of blocks, context
length) is not a setting; it arrives with the worker's Hello.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import PrivateAttr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from lineclear.api_limits import MAX_REQUEST_BYTES
from lineclear.process import command_line, settings_base
from lineclear.scheduler.addresses import is_local, is_tcp, parse_address
from lineclear.scheduler.flag_aliases import FLAG_ALIASES

Strategy = Literal["continuous", "fixed_size", "dynamic_timeout", "adaptive"]
SchedulingPolicy = Literal["fifo", "prefill_first", "priority", "shortest", "deadline", "fair"]
PreemptionPolicy = Literal["cheapest", "newest"]

_MIN_MESSAGE_BYTES, _MAX_MESSAGE_BYTES = 4096, 2**29
# A further Generate is refused at once when queue and batch are full. So these are left for calls that are not waiting.
_SPARE_STREAMS = 128
_MOST_STREAMS = 4096


MODEL = settings_base.Group("Model")
ADDRESSES = settings_base.Group("Addresses")
SECURITY = settings_base.Group("Security and tenants")
CONNECTIONS = settings_base.Group("Connections")
BATCHING = settings_base.Group("Batching")
REQUESTS = settings_base.Group("Queue and requests")
SUBMITTED = settings_base.Group("Submitted requests")
WORKER = settings_base.Group("Worker")
STOPPING = settings_base.Group("Stopping")
DIAGNOSIS = settings_base.Group("Diagnosis")
LOGS = settings_base.Group("Configuration file and logs")


class ConfigurationError(Exception):
    """The process cannot start as configured; the message says what to change. Exit code 78."""


class SchedulerSettings(BaseSettings):
    """Settings of lineclear-scheduler.

    What comes after a lone `--` are flags of the worker that it starts: -- --device cuda --dtype bfloat16.
    `lineclear-worker --help` lists those.
    """

    # No field may be called `port`, `service_host` or `service_port`: Kubernetes sets LINECLEAR_PORT and its like in
    # every pod beside a Service named lineclear. Variables that name no field are ignored.
    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix="LINECLEAR_",
        cli_prog_name="lineclear-scheduler",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_exit_on_error=False,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )

    # --- the model ---
    model: str = MODEL.field(
        "",
        brief="Directory of the model: safetensors weights and tokenizer.",
        description="Directory of the model; its tokenizer and chat template are read from it.",
    )
    demo: bool = MODEL.field(
        False,
        brief="Serve the small model that comes with lineclear.",
        description="Serve the small demonstration model that comes with lineclear.",
    )
    served_model_name: str = MODEL.field("", description="Name given out as model_id. Empty: the worker's.")
    use_generation_config: bool = MODEL.field(
        True,
        brief="Take sampling defaults from generation_config.json.",
        description="Take sampling defaults a request leaves open from the model's generation_config.json.",
    )

    # --- listening ---
    listen: str = ADDRESSES.field(
        "127.0.0.1:50051",
        brief="Address of gRPC: host:port or unix:/path.",
        description="Address of the gRPC server: host:port or unix:/path.",
    )
    health_listen: str = ADDRESSES.field(
        "",
        brief="A further, plaintext address for probes alone.",
        description="A further, plaintext address with grpc.health.v1 alone, for probes. May be on any interface.",
    )
    metrics_listen: str = ADDRESSES.field(
        "",
        brief="A further host:port that Prometheus scrapes.",
        description="A further host:port where Prometheus finds, over plain HTTP, what GetStats says. May be on any"
        " interface.",
    )
    admin_listen: str = ADDRESSES.field(
        "",
        brief="A further address for operators.",
        description="A further address for operators, with AdminService, and with GetStats and reflection, which"
        " `listen` then no longer answers. On an interface of the network it needs TLS and tokens.",
    )
    insecure_allow_remote: bool = SECURITY.field(
        False,
        brief="Allow a remote listen address without TLS or tokens.",
        description="Allow `listen` on an address other machines can reach although there is no TLS, or neither tokens"
        " nor client certificates.",
    )
    reflection: bool = ADDRESSES.field(
        True,
        brief="Offer gRPC server reflection.",
        description="Offer gRPC server reflection (v1 and v1alpha): what the API is, which is public.",
    )
    channelz: bool = ADDRESSES.field(
        False,
        brief="Offer channelz at the admin address.",
        description="Offer channelz on admin_listen: connections, their state, and from where they come.",
    )
    tls_cert_file: str = SECURITY.field(
        "",
        brief="PEM file of the certificate chain; turns TLS on.",
        description="PEM file of our certificate and what links it to an authority: TLS on every host:port address.",
    )
    tls_key_file: str = SECURITY.field("", description="PEM file of the certificate's key, without a password.")
    tls_client_ca_file: str = SECURITY.field(
        "",
        brief="PEM file of authorities that sign clients' certificates.",
        description="PEM file of authorities: callers must present a certificate that one of them signed.",
    )
    token_file: str = SECURITY.field(
        "",
        brief="File of names and bearer tokens that calls must show.",
        description="File of bearer tokens that calls of `listen` must show, one a line: a name and a token, or a name"
        " and sha256: with its hash. A name may have several. The name is the tenant.",
    )
    admin_token_file: str = SECURITY.field(
        "", brief="The same for the admin address.", description="The same for admin_listen."
    )
    max_message_bytes: int = CONNECTIONS.field(
        0,
        ge=0,
        le=_MAX_MESSAGE_BYTES,
        brief="Largest request taken, in bytes; 0: automatic.",
        description="Largest request taken, in bytes. A larger one fails alone, up to twice the limit; beyond that gRPC"
        " ends the call, or the whole Session, that brought it. 0: twice max_prompt_bytes, and at least 1 MiB.",
    )
    max_streams_per_connection: int = CONNECTIONS.field(
        0,
        ge=0,
        le=2**20,
        brief="Most calls open at once on one connection; 0: automatic.",
        description="Most calls open at once on one connection. Clients let further ones wait. 0: 128 more than"
        " max_queue_size and max_batch_size together, and at most 4096, so that a client whose requests fill the server"
        " can still cancel them and ask for health and figures.",
    )
    max_session_requests: int = CONNECTIONS.field(
        1024,
        ge=1,
        le=2**20,
        brief="Most requests in progress in one Session.",
        description="Most requests in progress in one Session; further ones are refused.",
    )
    max_sessions_per_connection: int = CONNECTIONS.field(
        64,
        ge=1,
        le=2**20,
        brief="Most Sessions on one connection.",
        description="Most Sessions on one connection; further ones are refused.",
    )
    request_read_timeout_seconds: float = CONNECTIONS.field(
        20.0,
        gt=0,
        le=3600,
        brief="Longest time until a request is received completely.",
        description="A request that is not complete after this long is refused.",
    )
    max_incomplete_requests_per_connection: int = CONNECTIONS.field(
        16,
        ge=1,
        le=2**20,
        brief="Most incomplete requests read at once.",
        description="Most long requests of one connection and tenant that are read at once, and most short ones"
        " (health, Cancel, figures); further ones wait. On a Unix socket, unfinished ones yield to those that wait."
        " They bound, with max_message_bytes, the memory that a connection can take.",
    )
    max_connections: int = CONNECTIONS.field(
        4096,
        ge=1,
        le=2**20,
        brief="Most open connections, by address.",
        description="Most connections open at once on each address; further ones are closed.",
    )
    max_connection_age_seconds: float = CONNECTIONS.field(
        3600.0,
        ge=0,
        le=7 * 86_400,
        brief="Clients connect again after this long; 0: never.",
        description="A connection takes no new calls after about this long, and a Session no new requests: clients"
        " connect again and prove anew who they are. What is in progress goes on. 0: no limit.",
    )
    keepalive_time_seconds: float = CONNECTIONS.field(
        20.0,
        ge=1,
        le=7200,
        brief="Ping a silent connection after this many seconds.",
        description="Ping a silent connection after this many seconds.",
    )
    keepalive_timeout_seconds: float = CONNECTIONS.field(
        10.0,
        ge=0.1,
        le=600,
        brief="Close a connection that does not answer the ping.",
        description="Close a connection whose ping is not answered for this long.",
    )

    # --- batching ---
    max_batch_size: int = BATCHING.field(64, ge=1, le=4096, description="Most requests in one step (slots).")
    min_batch_size: int = BATCHING.field(
        1,
        ge=1,
        le=4096,
        brief="An idle server waits for this many requests.",
        description="An idle server waits for this many requests, or batch_timeout_ms, to begin.",
    )
    target_batch_tokens: int = BATCHING.field(
        0,
        ge=0,
        le=2**20,
        brief="Most tokens in one step; 0: 256 on a CPU, 2048 on a GPU.",
        description="Most tokens computed in one step. 0: 256 on a CPU, 2048 on a GPU.",
    )
    pipeline_depth: int = BATCHING.field(2, ge=1, le=4, description="Steps in flight between scheduler and worker.")
    batching_strategy: Strategy = BATCHING.field(
        "continuous",
        brief="When waiting requests may join the running ones.",
        description="When waiting requests may join the running ones. fixed_size begins when max_batch_size of them"
        " wait: fewer wait for their deadline, unless batch_timeout_ms is set.",
    )
    batch_timeout_ms: float = BATCHING.field(
        50.0,
        ge=0,
        le=60_000,
        brief="Longest wait for a batch to fill.",
        description="Longest wait for a batch to fill, where the strategy waits; of fixed_size only if it is set.",
    )
    scheduling_policy: SchedulingPolicy = BATCHING.field(
        "fifo",
        brief="Which waiting request is next.",
        description="Which waiting request is next; fair: tenants get equally many tokens.",
    )
    priority_aging_seconds: float = BATCHING.field(
        30.0,
        gt=0,
        le=86_400,
        brief="Waiting time that is worth one step of priority.",
        description="Waiting this long is worth one step of priority, so that nobody starves.",
    )
    target_inter_token_latency_ms: float = BATCHING.field(
        200.0,
        gt=0,
        le=60_000,
        brief="Prompts are cut to keep this time between tokens.",
        description="Prompts are cut so that running requests wait no longer for a token.",
    )
    max_prefill_slowdown: float = BATCHING.field(
        2.0,
        ge=1,
        le=1000,
        brief="How much a prompt may lengthen a step of running requests.",
        description="A prompt makes a step at most so many times as long as the tokens of running requests alone would."
        " The surplus counts once for each request that waits for its first token.",
    )
    preemption_policy: PreemptionPolicy = BATCHING.field(
        "cheapest",
        brief="Which running request yields blocks to others.",
        description="Which running request yields its blocks when there are too few.",
    )
    max_preemptions: int = BATCHING.field(4, ge=0, le=1000, description="A request preempted this often is left alone.")
    max_queue_overtakes: int = BATCHING.field(
        16,
        ge=0,
        le=10_000,
        brief="How often a request that does not fit is overtaken.",
        description="How often a request that does not fit yet may be overtaken.",
    )
    max_isolated_crashes: int = WORKER.field(
        1,
        ge=1,
        le=100,
        brief="Crashes with one request alone after which it fails.",
        description="Crashes of the worker while a suspect runs alone after which that request fails.",
    )
    prefix_cache: bool = BATCHING.field(
        True,
        brief="Keep blocks of finished requests for equal prefixes.",
        description="Keep blocks of finished requests for prompts that begin the same.",
    )
    share_prefix_cache_across_tenants: bool = SECURITY.field(
        False,
        brief="Let tenants use each other's cached prefixes.",
        description="Let tenants profit from each other's cached prefixes. How fast an answer begins then tells one of"
        " them what another has asked.",
    )
    share_stats_across_tenants: bool = SECURITY.field(
        False,
        brief="Let tenants see the totals and times of all requests.",
        description="Let tenants see all of GetStats where there is no admin_listen: totals and times of all requests,"
        " from which one tenant can tell how much another asks.",
    )

    # --- requests ---
    max_queue_size: int = REQUESTS.field(1024, ge=1, le=2**20, description="Most requests waiting.")
    max_queue_tokens: int = REQUESTS.field(
        1_000_000, ge=1, le=2**31, description="Most prompt tokens waiting, together."
    )
    max_queue_size_per_tenant: int = REQUESTS.field(
        0,
        ge=0,
        le=2**20,
        brief="Most requests of a tenant waiting; 0: any.",
        description="Most requests of one tenant waiting; 0: as many as max_queue_size allows.",
    )
    max_queue_tokens_per_tenant: int = REQUESTS.field(
        0,
        ge=0,
        le=2**31,
        brief="Most prompt tokens of a tenant waiting; 0: any.",
        description="Most prompt tokens of one tenant waiting; 0: as max_queue_tokens allows.",
    )
    reject_unmeetable_deadlines: bool = REQUESTS.field(
        False,
        brief="Refuse requests whose deadline would pass in the queue.",
        description="Refuse a request at the door whose deadline would pass in the queue, going by how fast the queue"
        " has moved since it was last empty. With scheduling_policy fifo or prefill_first.",
    )
    max_prompt_bytes: int = REQUESTS.field(
        512 * 1024,
        ge=1,
        le=2**30,
        brief="Largest text or conversation, in bytes.",
        description="Largest text or conversation, in bytes of UTF-8, before tokenizing.",
    )
    default_max_tokens: int = REQUESTS.field(
        512,
        ge=1,
        le=2**20,
        brief="Most output tokens where the request names none.",
        description="Most output tokens of a request that names no max_tokens.",
    )
    default_deadline_seconds: float = REQUESTS.field(
        600.0,
        gt=0,
        le=7 * 86_400,
        brief="Deadline of a call that has none.",
        description="Deadline of a call that has none, in seconds from its arrival.",
    )
    max_deadline_seconds: float = REQUESTS.field(
        7 * 86_400.0,
        gt=0,
        le=366 * 86_400,
        brief="Longest deadline of a call.",
        description="Longest deadline of a call, in seconds from its arrival. A later one is brought forward to this.",
    )
    tokenizer_threads: int = REQUESTS.field(
        2,
        ge=1,
        le=64,
        description="Threads that tokenize large inputs. One caller uses all but one of them where there are several:"
        " another caller's input does not wait for those of the first.",
    )
    max_tokenizer_queue_size: int = REQUESTS.field(
        64,
        ge=1,
        le=4096,
        brief="Most large inputs tokenized or waiting for it.",
        description="Most large inputs being or waiting to be tokenized. One more is refused, for the tenant, or"
        " connection, that has most of them waiting. Conversations that wait to be rendered: as max_queue_size.",
    )
    max_chat_messages: int = REQUESTS.field(1024, ge=1, le=65_536, description="Most messages of a conversation.")
    chat_template_processes: int = REQUESTS.field(
        2,
        ge=1,
        le=64,
        brief="Processes that render conversations.",
        description="Processes that render conversations with the model's chat template. One caller uses all but one,"
        " as of tokenizer_threads.",
    )
    max_chat_template_seconds: float = REQUESTS.field(
        2.0,
        ge=0.01,
        le=600,
        brief="Most CPU time of the chat template by conversation.",
        description="Most CPU seconds that the chat template may take for one conversation, which is refused then.",
    )
    max_unread_tokens: int = REQUESTS.field(
        4096,
        ge=1,
        le=2**20,
        brief="Most tokens that a stream may leave unread.",
        description="Most tokens a stream may leave unread before it is ended.",
    )
    max_unread_bytes: int = REQUESTS.field(
        4 * 1024 * 1024,
        ge=1024,
        le=2**40,
        brief="Most bytes of log probabilities left unread.",
        description="Most memory of log probabilities a stream may leave unread before it is ended. A token with 20 of"
        " them takes about 2.8 KB.",
    )
    stall_timeout_seconds: float = REQUESTS.field(
        60.0,
        gt=0,
        le=3600,
        brief="A stream that takes no message for this long ends.",
        description="A stream that takes no message for this long is ended.",
    )

    # --- answers left alone (Submit) ---
    max_detached: int = SUBMITTED.field(
        256,
        ge=0,
        le=2**20,
        brief="Most submitted requests kept.",
        description="Most submitted requests kept, those in progress and others.",
    )
    max_detached_tokens: int = SUBMITTED.field(
        1_000_000,
        ge=1,
        le=2**31,
        brief="Most output tokens of submitted requests kept.",
        description="Most output tokens kept, of all submitted requests together.",
    )
    max_detached_bytes: int = SUBMITTED.field(
        256 * 1024 * 1024,
        ge=1,
        le=2**40,
        brief="Most memory of kept answers, in bytes.",
        description="Most memory of kept answers together. A token takes some 80 bytes, with 20 log probabilities 400.",
    )
    max_detached_per_tenant: int = SUBMITTED.field(
        0,
        ge=0,
        le=2**20,
        brief="Most submitted requests kept by tenant; 0: any.",
        description="Most submitted requests of one tenant kept; 0: as many as max_detached allows. Where room runs "
        "out, the tenant that holds most makes it, with the answer that ended longest ago.",
    )
    detached_ttl_seconds: float = SUBMITTED.field(
        600.0,
        gt=0,
        le=7 * 86_400,
        brief="How long a submitted answer is kept after its end.",
        description="How long the answer of a submitted request is kept after its end.",
    )

    # --- the flight recorder ---
    min_recorded_calls: int = DIAGNOSIS.field(
        4096,
        ge=1,
        le=2**20,
        brief="Least number of calls in a flight recording.",
        description="Calls of the core that a flight recording goes back at least.",
    )
    recording_directory: str = DIAGNOSIS.field(
        "",
        brief="Where flight recordings are written.",
        description="Where flight recordings are written: on anomalies, SIGUSR2, an order. Empty: ours in /tmp.",
    )

    invariant_check_interval_steps: int = DIAGNOSIS.field(
        64,
        ge=0,
        le=2**20,
        brief="Check the scheduler's books every so many steps; 0: never.",
        description="Check the scheduler's books after so many steps, and when nothing runs any more. A breach ends"
        " the server with exit code 70 rather than with wrong answers. 0: never.",
    )

    # --- the worker ---
    socket_directory: str = WORKER.field(
        "",
        brief="Private directory of the sockets to the worker.",
        description="Directory of the sockets to the worker: private (mode 0700) and ours. Empty: a new one.",
    )
    spawn_worker: bool = WORKER.field(
        False,
        brief="Start and supervise a worker process.",
        description="Start and supervise a worker process; otherwise wait for one.",
    )
    worker_command: tuple[str, ...] = WORKER.field(
        (),
        brief="Command that starts a worker; one flag for each word.",
        description="Command that starts a worker. Empty: this Python with -m lineclear.worker.main.",
    )
    standby_worker: bool = WORKER.field(
        False,
        brief="Keep a second worker process ready for a restart.",
        description="Keep a second worker process that has imported everything and waits: when the worker ends it loads"
        " the model and goes on, without the seconds of CPU that imports take. Costs the memory of a process without a"
        " model. With spawn_worker.",
    )
    step_timeout_seconds: float = WORKER.field(
        30.0,
        gt=0,
        le=86_400,
        brief="A worker is replaced after this long in one step.",
        description="A worker that takes longer for one step is hung, and replaced.",
    )
    cold_step_timeout_seconds: float = WORKER.field(
        300.0,
        gt=0,
        le=86_400,
        brief="The same for the first steps of a worker.",
        description="The same for a worker's first steps, which may compile kernels.",
    )
    heartbeat_timeout_seconds: float = WORKER.field(
        5.0,
        gt=0,
        le=3600,
        brief="A worker is replaced after this long in silence.",
        description="A worker not heard of for this long is hung, and replaced.",
    )
    start_timeout_seconds: float = WORKER.field(
        900.0,
        gt=0,
        le=86_400,
        brief="A spawned worker is replaced unless it joins by then.",
        description="A spawned worker that has not joined by then is replaced.",
    )
    stop_timeout_seconds: float = WORKER.field(
        10.0,
        gt=0,
        le=3600,
        brief="A worker told to stop is killed after this long.",
        description="A worker told to stop is killed after this long.",
    )
    max_worker_crashes: int = WORKER.field(
        5,
        ge=0,
        le=1000,
        brief="Ends of workers survived without progress between them.",
        description="Ends of workers, and failed starts, survived within crash_window_seconds without progress between"
        " them; one more ends the server. A confirmed token, or ten idle seconds of a joined worker, is progress: so a"
        " worker that is killed from outside is replaced without limit.",
    )
    crash_window_seconds: float = WORKER.field(
        600.0,
        gt=0,
        le=7 * 86_400,
        brief="The time over which ends of workers are counted.",
        description="See max_worker_crashes.",
    )

    # --- leaving ---
    drain_timeout_seconds: float = STOPPING.field(
        20.0,
        ge=0,
        le=86_400,
        brief="Running requests may finish for this long.",
        description="After SIGTERM, running requests may finish for this long.",
    )

    drain_linger_seconds: float = STOPPING.field(
        0.5,
        ge=0,
        le=600,
        brief="A stopping server answers for this long at least.",
        description="A server told to leave answers for this long at least, so that late callers are told why.",
    )
    exit_on_stdin_close: bool = STOPPING.field(
        False,
        brief="Stop when standard input ends.",
        description="Leave, as after SIGTERM, when standard input ends: a program that starts a server and holds the "
        "other end of the pipe takes it along, however it ends.",
    )
    watchdog_timeout_seconds: float = DIAGNOSIS.field(
        5.0,
        gt=0,
        le=3600,
        brief="An event loop this long at one thing is reported as hung.",
        description="An event loop or engine at one thing for this long is reported as hung.",
    )

    # --- configuration file and logs ---
    config: str = LOGS.field(
        "",
        brief="TOML file with settings; keys are names with underscores.",
        description="TOML file with settings, its keys named as the fields are.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = LOGS.field(
        "info", description="Least severe level logged."
    )
    log_format: Literal["auto", "json", "console"] = LOGS.field(
        "auto",
        brief="One JSON object a line, or text for people.",
        description="One JSON object a line, or text for people; auto: text when standard error is a terminal.",
    )

    _sources: settings_base.Sources | None = PrivateAttr(None)

    def named(self, sentence: str) -> str:
        """Return the sentence with each flag replaced by the flag, variable or line of the file that set it."""
        return self._sources.named(sentence) if self._sources else sentence

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments of the constructor stand for the file, so variables beat them; pydantic puts flags first."""
        return env_settings, init_settings

    @field_validator("metrics_listen")
    @classmethod
    def _is_a_port(cls, value: str) -> str:
        if value and not is_tcp(value):
            raise ValueError("give host:port; Prometheus reads from no unix socket")
        return value

    @field_validator("listen", "health_listen", "admin_listen")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        if value:
            parse_address(value)
        return value

    @field_validator("max_message_bytes")
    @classmethod
    def _is_a_size(cls, value: int) -> int:
        if 0 < value < _MIN_MESSAGE_BYTES:
            raise ValueError(f"must be 0 or at least {_MIN_MESSAGE_BYTES}")
        return value

    @property
    def max_request_bytes(self) -> int:
        """The largest request in bytes that is taken: max_message_bytes, or what follows from max_prompt_bytes."""
        return self.max_message_bytes or min(max(MAX_REQUEST_BYTES, 2 * self.max_prompt_bytes), _MAX_MESSAGE_BYTES)

    @property
    def max_streams(self) -> int:
        """The most calls open at once on one connection: max_streams_per_connection, or what follows from the queue."""
        return self.max_streams_per_connection or min(
            self.max_queue_size + self.max_batch_size + _SPARE_STREAMS, _MOST_STREAMS
        )

    @model_validator(mode="after")
    def _is_consistent(self) -> SchedulerSettings:
        if not self.listen:
            raise ValueError("--listen is empty; give host:port or unix:/path")
        if self.demo and self.model:
            raise ValueError("--demo and --model exclude each other; leave one away")
        self._check_security()
        if self.reject_unmeetable_deadlines and self.scheduling_policy not in ("fifo", "prefill_first"):
            raise ValueError(
                "--reject-unmeetable-deadlines needs --scheduling-policy fifo or prefill_first: with"
                f" {self.scheduling_policy} a later request may be scheduled first"
            )
        if self.standby_worker and not self.spawn_worker:
            raise ValueError(
                "--standby-worker needs --spawn-worker; where another program starts workers, start two of them"
            )
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

    def _check_security(self) -> None:
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            given, lacking = "--tls-cert-file", "--tls-key-file"
            if not self.tls_cert_file:
                given, lacking = lacking, given
            raise ValueError(f"{given} is set without {lacking}; give both")
        if self.tls_client_ca_file and not self.tls_cert_file:
            raise ValueError("--tls-client-ca-file needs --tls-cert-file and --tls-key-file")
        if self.tls_cert_file and not any(map(is_tcp, (self.listen, self.admin_listen))):
            raise ValueError(
                "--tls-cert-file is set, but neither --listen nor --admin-listen is host:port; a unix socket is not"
                " encrypted"
            )
        if self.admin_token_file and not self.admin_listen:
            raise ValueError("--admin-token-file is set without --admin-listen; give an address for operators")
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

    def lacks(self) -> str:
        """What keeps `listen` from being safe on a network; empty if nothing does."""
        if not self.tls_cert_file:
            return "no encryption (--tls-cert-file)"
        if not self.token_file and not self.tls_client_ca_file:
            return "no authentication (--token-file, --tls-client-ca-file)"
        return ""


def load(argv: Sequence[str]) -> tuple[SchedulerSettings, tuple[str, ...]]:
    """The settings from flags, environment and file, and the flags after `--` that are the worker's.

    Raises ConfigurationError with one line for each thing that is wrong; SystemExit(0) after --help and --version.
    """
    ours, worker_flags = _split(argv)
    command_line.print_version("lineclear-scheduler", [word for word in ours if word != "--spawn-worker"])
    settings_base.answer_help(SchedulerSettings, ours)
    file, entries = _file(ours)
    found = settings_base.Sources(SchedulerSettings, ours, os.environ, file, entries)
    try:
        settings = SchedulerSettings(**{**entries, "_cli_parse_args": ours})
        settings._sources = found
        return settings, worker_flags
    except ValidationError as error:
        raise ConfigurationError("\n".join(map(found.problem, error.errors()))) from None
    except SettingsError as error:
        raise ConfigurationError(found.unreadable(str(error)) or _about_flags(str(error))) from None


def _split(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    cut = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:cut]), tuple(argv[cut + 1 :])


def _about_flags(said: str) -> str:
    return command_line.unknown_flag_errors(
        said,
        command_line.flag_names(SchedulerSettings.model_fields),
        elsewhere=FLAG_ALIASES,
        otherwise="--help lists them, and the worker's come after a lone `--`: -- {}",
        stray="a model is named by --model {}",
    )


def _file(ours: Sequence[str]) -> tuple[str, dict[str, Any]]:
    try:
        file = _config_file(ours)
    except SettingsError as error:
        raise ConfigurationError(f"--config has no value; give a TOML file ({error})") from None
    return file, _read(file) if file else {}


def _config_file(ours: Sequence[str]) -> str:
    # A pass of its own, because the file's values must be there when the rest is resolved.
    class OnlyConfig(BaseSettings):
        model_config = SettingsConfigDict(
            env_prefix="LINECLEAR_", extra="ignore", cli_ignore_unknown_args=True, cli_exit_on_error=False
        )
        config: str = ""

    arguments: dict[str, Any] = {"_cli_parse_args": [f for f in ours if f not in ("-h", "--help")]}
    return OnlyConfig(**arguments).config


def _read(path: str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(f"config file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"config file {path}: {error}") from None
