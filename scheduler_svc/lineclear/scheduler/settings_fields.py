"""Fields of the scheduler's settings: type, default, range and description.

Flags, environment variables, --help and docs/configuration.md derive from them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from lineclear.process import settings_base
from lineclear.process.device_names import split_devices
from lineclear.process.setting_fields import Group
from lineclear.scheduler.addresses import is_tcp, parse_address

Strategy = Literal["continuous", "fixed_size", "dynamic_timeout", "adaptive"]
SchedulingPolicy = Literal["fifo", "prefill_first", "priority", "shortest", "deadline", "fair"]
ToolCallParser = Literal["auto", "none", "hermes", "llama3_json", "mistral"]
ReasoningParser = Literal["auto", "none", "deepseek_r1", "qwen3"]
PreemptionPolicy = Literal["cheapest", "newest"]
_METHODS = {"ngram": "prompt_lookup", "standalone": "draft_model"}  # vLLM and SGLang, SGLang
SpeculativeMethod = Annotated[
    Literal["none", "prompt_lookup", "draft_model"],
    BeforeValidator(lambda value: _METHODS.get(value.lower(), value) if isinstance(value, str) else value),
]

_MIN_MESSAGE_BYTES, MAX_MESSAGE_BYTES = 4096, 2**29


def parse_weights(text: str) -> dict[str, float]:
    """Return weights by name. Raises ValueError."""
    found: dict[str, float] = {}
    for entry in _entries(text):
        name, _, weight = entry.rpartition("=")
        if name in found:
            raise ValueError(f"{name} has two weights; give one")
        try:
            found[name] = float(weight)
        except ValueError:
            found[name] = 0.0
        if not name or not 0.01 <= found[name] <= 100:
            raise ValueError(f"{entry} is not name=weight with a weight from 0.01 to 100")
    return found


def parse_adapters(text: str) -> dict[str, str]:
    """Return folders by name. Raises ValueError."""
    found: dict[str, str] = {}
    for entry in _entries(text):
        name, equals, path = entry.partition("=")
        if not (name and equals and path) or name in found:
            raise ValueError(f"{entry} is not name=folder with a name of its own")
        found[name] = path
    return found


def _entries(text: str) -> Iterable[str]:
    return filter(None, (part.strip() for part in text.split(",")))


def _checked(check: Callable[[str], object]) -> AfterValidator:
    """Return a validator: `check` raises ValueError for wrong texts, and is not called for the empty one."""

    def validate(value: str) -> str:
        if value:
            check(value)
        return value

    return AfterValidator(validate)


def _port_for(reason: str) -> AfterValidator:
    def check(value: str) -> None:
        if not is_tcp(value):
            raise ValueError(f"give host:port; {reason}")

    return _checked(check)


def _is_an_estimator(value: str) -> None:
    if value not in ("none", "learned") and not re.fullmatch(r"[\w.]+:\w+", value):
        raise ValueError("give none, learned, or module:factory")


def _is_a_collector(value: str) -> None:
    if not re.fullmatch(r"https?://[^/\s]+:\d+/?", value):
        raise ValueError("give http://host:port or https://host:port; the port of OTLP over gRPC is 4317")


def _is_a_size(value: int) -> int:
    if 0 < value < _MIN_MESSAGE_BYTES:
        raise ValueError(f"must be 0 or at least {_MIN_MESSAGE_BYTES}")
    return value


Address = Annotated[str, _checked(parse_address)]

MODEL = Group("Model")
ADDRESSES = Group("Addresses")
SECURITY = Group("Security and tenants")
CONNECTIONS = Group("Connections")
BATCHING = Group("Batching")
SPECULATION = Group("Speculative decoding")
REQUESTS = Group("Queue and requests")
FORMATS = Group("Conversations and structured output")
SUBMITTED = Group("Submitted requests")
WORKER = Group("Worker")
STOPPING = Group("Stopping")
DIAGNOSIS = Group("Diagnosis")
LOGS = Group("Configuration file and logs")


class SchedulerFields(settings_base.ProcessSettings):
    # No field may be called `port`, `service_host` or `service_port`: Kubernetes sets LINECLEAR_PORT and its like in
    # every pod beside a Service named lineclear. Variables that name no field are ignored.

    model: str = MODEL.field("")
    """Directory of the model, or a GGUF file. Weights, tokenizer and chat template are read from it. The id of a
    Hugging Face repository in the local cache will do; nothing is downloaded."""
    demo: bool = MODEL.field(False)
    """Serve the small model that comes with lineclear."""
    served_model_name: str = MODEL.field("")
    """Name reported as model_id. Empty: the worker's."""
    use_generation_config: bool = MODEL.field(True)
    """Take sampling defaults from generation_config.json. They hold for parameters that a request leaves open."""
    lora_modules: Annotated[str, _checked(parse_adapters)] = MODEL.field("")
    """LoRA adapters to load at start, as name=folder,name=folder. Requests choose one by its name."""
    lora_dir: str = MODEL.field("")
    """Folder of the adapters that LoadAdapter may load. Empty: none can be loaded at run time."""
    max_loras: int = MODEL.field(8, ge=0, le=256)
    """Most adapters that each worker holds. One more takes the place of the least recently used idle one."""
    max_lora_rank: int = MODEL.field(64, ge=1, le=1024)
    """Largest rank of an adapter."""

    listen: Address = ADDRESSES.field("127.0.0.1:50051")
    """Address of gRPC: host:port or unix:/path."""
    health_listen: Address = ADDRESSES.field("")
    """A plaintext address for health probes only. It offers grpc.health.v1 and may be on any interface."""
    metrics_listen: Annotated[str, _port_for("Prometheus cannot read from a unix socket")] = ADDRESSES.field("")
    """A host:port for Prometheus. It offers the figures of GetStats over plain HTTP and may be on any interface."""
    admin_listen: Address = ADDRESSES.field("")
    """An address for operators. It offers AdminService, and GetStats, which `listen` then no longer offers. On a
    network interface it needs TLS and tokens."""
    status_listen: Annotated[str, _port_for("a browser cannot connect to a unix socket")] = ADDRESSES.field("")
    """A host:port for the status page. It shows steps, slots, queue and KV blocks in a browser. It needs the token of
    admin_token_file if that is set, and has TLS if tls_cert_file is set. On a network interface it needs both; behind a
    proxy with TLS, insecure_allow_remote instead of the certificate."""
    gateway_listen: Annotated[str, _port_for("gateways connect by TCP")] = ADDRESSES.field("")
    """A host:port for gateways that offer the OpenAI API. It serves vllm.grpc.engine.VllmEngine and needs the package
    smg-grpc-proto. It has the tokens of token_file and TLS as `listen` does."""
    gateway: bool = ADDRESSES.field(False)
    """Start the gateway smg beside the server. It offers the OpenAI and Anthropic APIs at gateway_http, and speaks with
    gateway_listen, which is then a free port of 127.0.0.1 unless it is set."""
    gateway_http: Annotated[str, _port_for("HTTP clients connect by TCP")] = ADDRESSES.field("127.0.0.1:8000")
    """The host:port at which smg serves HTTP. It has neither TLS nor authentication."""
    reflection: bool = ADDRESSES.field(True)
    """Offer gRPC server reflection (v1 and v1alpha). listen and admin_listen describe the methods that they serve."""
    channelz: bool = ADDRESSES.field(False)
    """Offer channelz at admin_listen. It shows connections, their state and their peers."""

    insecure_allow_remote: bool = SECURITY.field(False)
    """Allow a remote `listen` without TLS or authentication. Also allows a remote `status_listen` with tokens and
    without TLS."""
    tls_cert_file: str = SECURITY.field("")
    """PEM file of the certificate chain. It turns TLS on for host:port addresses but those for health and metrics."""
    tls_key_file: str = SECURITY.field("")
    """PEM file of the certificate's key, without a password."""
    tls_client_ca_file: str = SECURITY.field("")
    """PEM file of the authorities of client certificates. Clients must present a certificate signed by one of them."""
    token_file: str = SECURITY.field("")
    """File of bearer tokens for `listen`. Each line is a name and a token, or a name and sha256: with the token's hash.
    A name may have several tokens. The name is the tenant."""
    admin_token_file: str = SECURITY.field("")
    """Bearer tokens for admin_listen and status_listen. The file has the same format."""
    tenant_weights: Annotated[str, _checked(parse_weights)] = SECURITY.field("")
    """Shares of tenants, as name=weight,name=weight. With the order fair, a tenant of weight 2 gets twice the tokens of
    one of weight 1, which is the weight of all others. From 0.01 to 100."""
    share_prefix_cache_across_tenants: bool = SECURITY.field(False)
    """Let tenants use each other's cached prefixes. The time to the first token then shows a tenant whether another has
    sent the same prompt."""
    share_stats_across_tenants: bool = SECURITY.field(False)
    """Let tenants see totals and times of all requests. They reveal the load of other tenants. Ignored with
    admin_listen."""

    max_message_bytes: Annotated[int, AfterValidator(_is_a_size)] = CONNECTIONS.field(0, ge=0, le=MAX_MESSAGE_BYTES)
    """Largest request in bytes; 0: automatic. A larger one fails alone, up to twice the limit; beyond that, gRPC ends
    the call or the whole Session. Automatic: twice max_prompt_bytes, at least 1 MiB."""
    max_sessions_per_connection: int = CONNECTIONS.field(64, ge=1, le=2**20)
    """Most Sessions on one connection. Further ones are refused."""
    max_connection_age_seconds: float = CONNECTIONS.field(3600.0, ge=0, le=7 * 86_400)
    """Clients reconnect after about this long; 0: never. The old connection takes no new calls, and its Sessions no new
    requests, so that clients authenticate again. Requests in progress continue."""
    keepalive_time_seconds: float = CONNECTIONS.field(20.0, ge=1, le=7200)
    """Ping an idle connection after this long."""
    keepalive_timeout_seconds: float = CONNECTIONS.field(10.0, ge=0.1, le=600)
    """Close a connection that does not answer a ping."""

    max_batch_size: int = BATCHING.field(64, ge=1, le=4096)
    """Most requests in one step (slots)."""
    min_batch_size: int = BATCHING.field(1, ge=1, le=4096)
    """Requests that an idle server waits for before it starts. It waits at most batch_timeout_ms."""
    target_batch_tokens: int = BATCHING.field(0, ge=0, le=2**20)
    """Most tokens in one step; 0: 256 on a CPU, 2048 on a GPU."""
    pipeline_depth: int = BATCHING.field(2, ge=1, le=4)
    """Steps in flight between scheduler and worker."""
    batching_strategy: Strategy = BATCHING.field("continuous")
    """When waiting requests join the running batch. Each worker has its own batch. fixed_size waits for exactly
    max_batch_size requests; fewer wait until their deadline, unless batch_timeout_ms is set."""
    batch_timeout_ms: float = BATCHING.field(50.0, ge=0, le=60_000)
    """Longest wait for a batch to fill. It holds for strategies that wait; for fixed_size only if it is set."""
    scheduling_policy: SchedulingPolicy = BATCHING.field("fifo")
    """Order of waiting requests. fair gives tenants equal numbers of tokens."""
    output_length_estimator: Annotated[str, _checked(_is_an_estimator)] = BATCHING.field("learned")
    """Estimator of output lengths. It serves the orders shortest, deadline and fair, and predicted waits. learned takes
    the mean of the tenant's last answers, none takes max_tokens. module:factory loads another one from the Python path.
    A request may name its own expected_tokens."""
    priority_aging_seconds: float = BATCHING.field(30.0, gt=0, le=86_400)
    """Waiting time that raises a request by one priority. It prevents starvation."""
    target_inter_token_latency_ms: float = BATCHING.field(200.0, gt=0, le=60_000)
    """Time between tokens that prompt chunks must keep. Prompts are cut into smaller chunks to keep it."""
    max_prefill_slowdown: float = BATCHING.field(2.0, ge=1, le=1000)
    """Factor by which prompts may lengthen a step. It compares with a step that only decodes. The surplus is granted
    once for each request that waits for its first token, and once for all scores and embeddings together. Where the
    predicted time of steps errs, steps are planned shorter, but half of the surplus is always left to prompts."""
    preemption_policy: PreemptionPolicy = BATCHING.field("cheapest")
    """Running request to preempt when blocks run out."""
    prefix_cache: bool = BATCHING.field(True)
    """Keep blocks of finished requests for equal prompt prefixes."""

    speculative_method: SpeculativeMethod = SPECULATION.field("none")
    """How drafts of the next tokens are made. A step verifies several drafts of a request at once, and the answer stays
    the same. prompt_lookup drafts what followed the last tokens earlier in the prompt or the answer; the last method
    drafts with a smaller model. The names ngram (vLLM, SGLang) and standalone (SGLang) are accepted too.
    Models with a recurrent state decode without drafts."""
    draft_model: str = SPECULATION.field("")
    """Directory of the model that makes drafts. The last speculative_method uses it. It has the tokenizer of the served
    model and far fewer weights. Workers that another program starts have this setting of their own."""
    num_speculative_tokens: int = SPECULATION.field(8, ge=1, le=64)
    """Most drafts that a step verifies for a request."""
    speculative_adaptive: bool = SPECULATION.field(True)
    """Verify drafts only where that gains time. Otherwise every step verifies as many drafts of each request as
    --num-speculative-tokens allows."""

    max_queue_size: int = REQUESTS.field(1024, ge=1, le=2**20)
    """Most waiting requests."""
    max_queue_tokens: int = REQUESTS.field(1_000_000, ge=1, le=2**31)
    """Most prompt tokens of all waiting requests."""
    max_queue_size_per_tenant: int = REQUESTS.field(0, ge=0, le=2**20)
    """Most requests a tenant has waiting; 0: any number."""
    max_queue_tokens_per_tenant: int = REQUESTS.field(0, ge=0, le=2**31)
    """Most prompt tokens a tenant has waiting; 0: any number."""
    reject_unmeetable_deadlines: bool = REQUESTS.field(False)
    """Reject requests that would expire in the queue. A request is rejected if a batch of requests or more waits before
    it, and a third of its predicted wait, by their expected output lengths, is longer than its time."""
    max_prompt_bytes: int = REQUESTS.field(512 * 1024, ge=1, le=2**30)
    """Largest text or conversation in bytes of UTF-8."""
    default_max_tokens: int = REQUESTS.field(512, ge=1, le=2**20)
    """Most output tokens of a request without max_tokens."""
    max_outputs: int = REQUESTS.field(128, ge=1, le=1024)
    """Most outputs of one request (n, best_of)."""
    max_held_tokens: int = REQUESTS.field(65_536, ge=1, le=2**31)
    """Most output tokens of a request with best_of or beams. They are kept until its end. A token takes about 300
    bytes, with 20 log probabilities 3 KB."""
    default_deadline_seconds: float = REQUESTS.field(600.0, gt=0, le=7 * 86_400)
    """Deadline of a call that has none, from its arrival."""
    max_deadline_seconds: float = REQUESTS.field(7 * 86_400.0, gt=0, le=366 * 86_400)
    """Longest deadline of a call, from its arrival. A later deadline is shortened to this."""
    tokenizer_threads: int = REQUESTS.field(2, ge=1, le=64)
    """Threads that tokenize large inputs. One caller uses at most all but one of them, so that others need not wait."""
    max_chat_messages: int = FORMATS.field(1024, ge=1, le=65_536)
    """Most messages of a conversation."""
    max_chat_template_seconds: float = FORMATS.field(2.0, ge=0.01, le=600)
    """Most CPU time to render one conversation. A conversation that takes longer is refused."""
    max_grammar_seconds: float = FORMATS.field(1.0, ge=0.01, le=60)
    """Most CPU time to compile one schema, expression or grammar. One that takes longer is refused."""
    max_grammar_bytes: int = FORMATS.field(256 * 1024, ge=64, le=16 * 1024 * 1024)
    """Largest schema or grammar in bytes of UTF-8."""
    tool_call_parser: ToolCallParser = FORMATS.field("auto")
    """Format in which the model writes tool calls. They are sent as calls instead of text. auto: by the chat template;
    none: calls are text."""
    reasoning_parser: ReasoningParser = FORMATS.field("auto")
    """Format in which the model writes its reasoning. It precedes an answer and is sent apart from the text. auto: by
    the chat template; none: reasoning is text."""
    max_unread_tokens: int = REQUESTS.field(4096, ge=1, le=2**20)
    """Most unread tokens of a stream. The stream fails beyond that."""
    stall_timeout_seconds: float = REQUESTS.field(60.0, gt=0, le=3600)
    """A stream whose client reads nothing for this long fails."""

    max_submitted: int = SUBMITTED.field(256, ge=0, le=2**20)
    """Most submitted requests kept, running and finished."""
    max_submitted_tokens: int = SUBMITTED.field(1_000_000, ge=1, le=2**31)
    """Most output tokens kept of all submitted requests."""
    max_submitted_bytes: int = SUBMITTED.field(256 * 1024 * 1024, ge=1, le=2**40)
    """Most bytes kept of all submitted requests. A token takes about 80 bytes, with 20 log probabilities 400."""
    max_submitted_per_tenant: int = SUBMITTED.field(0, ge=0, le=2**20)
    """Most submitted requests of one tenant; 0: any number. At the limit of max_submitted, the tenant with most
    requests loses the answer that finished first."""
    submitted_ttl_seconds: float = SUBMITTED.field(600.0, gt=0, le=7 * 86_400)
    """How long a submitted answer is kept after it finished."""

    min_recorded_calls: int = DIAGNOSIS.field(4096, ge=1, le=2**20)
    """Least number of core calls in a flight recording."""
    recording_directory: str = DIAGNOSIS.field("")
    """Where flight recordings are written. They are written on anomalies, SIGUSR2 and the admin call. Empty: a private
    directory in /tmp."""
    step_history: int = DIAGNOSIS.field(512, ge=1, le=65_536)
    """Executed steps kept for those who watch (WatchSteps). They take about 40 bytes a row, and at most 10 MB."""
    max_step_watchers: int = DIAGNOSIS.field(16, ge=0, le=1024)
    """Most callers that watch the steps at a time."""
    otlp_traces_endpoint: Annotated[str, _checked(_is_a_collector)] = DIAGNOSIS.field("")
    """URL of the collector that gets a span of each request. http://host:4317, or https:// for TLS: OTLP over gRPC. It
    needs the packages of the extra `tracing`."""
    # Below two ticks of the watchdog, the time between two ticks would be reported.
    watchdog_timeout_seconds: float = DIAGNOSIS.field(5.0, ge=0.5, le=3600)
    """An event loop or engine blocked this long is reported."""

    socket_directory: str = WORKER.field("")
    """Private directory of the sockets to the worker. It has mode 0700 and belongs to the user of both processes.
    Empty: a temporary one."""
    spawn_worker: bool = WORKER.field(False)
    """Start and supervise a worker process. Otherwise wait for a worker to connect."""
    num_workers: int = WORKER.field(1, ge=1, le=64)
    """Worker processes to start. Each has a copy of the model and its own KV cache. They divide the GPUs, NUMA nodes or
    cores of the machine. Needs spawn_worker."""
    worker_devices: Annotated[str, _checked(split_devices)] = WORKER.field("")
    """Device of each spawned worker, in order. cuda:0,cuda:1 or cpu:0-3,cpu:4-7, where the numbers are cores. Empty: an
    equal part of the machine for each. Sets num_workers if that is not set."""
    max_workers: int = WORKER.field(64, ge=1, le=1024)
    """Most workers that serve at the same time, spawned or not. Others wait. All serve the same model; a worker of
    another one waits until they have left."""
    worker_command: Annotated[str, _checked(shlex.split)] = WORKER.field("")
    """Command that starts a worker, quoted as for a shell. Empty: this Python with -m lineclear.worker.main."""
    standby_worker: bool = WORKER.field(False)
    """Keep a second worker process ready for a restart. It has imported everything, and loads the model when the worker
    ends. That saves seconds of CPU time and costs the memory of a process without a model. Needs spawn_worker."""
    step_timeout_seconds: float = WORKER.field(30.0, gt=0, le=86_400)
    """A worker is replaced after this long in one step."""
    cold_step_timeout_seconds: float = WORKER.field(300.0, gt=0, le=86_400)
    """The same for its first steps, which may compile kernels."""
    heartbeat_timeout_seconds: float = WORKER.field(5.0, gt=0, le=3600)
    """A worker is replaced after this long without a message."""
    start_timeout_seconds: float = WORKER.field(900.0, gt=0, le=86_400)
    """A spawned worker that has not joined by then is replaced."""
    stop_timeout_seconds: float = WORKER.field(10.0, gt=0, le=3600)
    """A stopping worker is killed after this long."""
    max_worker_crashes: int = WORKER.field(5, ge=0, le=1000)
    """Most exits of a worker within crash_window_seconds. Failed starts count; after one more it is not started again,
    and the server stops when no worker is left. A generated token or ten idle seconds of a joined worker reset the
    count, so a worker killed from outside is always replaced."""

    drain_timeout_seconds: float = STOPPING.field(20.0, ge=0, le=86_400)
    """Running requests may finish for this long after SIGTERM."""
    drain_linger_seconds: float = STOPPING.field(0.5, ge=0, le=600)
    """A stopping server refuses new calls at least this long. So late callers receive an error instead of a reset."""
    exit_on_stdin_close: bool = STOPPING.field(False)
    """Stop, as after SIGTERM, when standard input closes. A program that starts a server and holds the other end of the
    pipe stops it by exiting, however that happens."""

    config: str = LOGS.field("")
    """TOML file of settings. Its keys are flags with underscores."""
    log_level: Literal["debug", "info", "warning", "error"] = LOGS.field("info")
    """Least severe level logged."""
    log_format: Literal["auto", "json", "console"] = LOGS.field("auto")
    """One JSON object a line, or text. auto: text if standard error is a terminal."""
