"""`EngineConfig`: the user's flags, one field each. `resolve` turns it into the `Settings` that the engine runs.

Flags of what was taken away are refused by name, and otherwise set so that it is left out.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta
from msgspec.structs import replace

from overlap_spec.config.speculation import SpeculationFlags, Text
from overlap_spec.errors import ConfigError

Dtype = Literal["auto", "float64", "float32", "bfloat16", "float16"]
KVCacheDtype = Literal["auto", "bfloat16", "bf16", "fp8_e4m3", "fp8_e5m2"]
Quantization = Literal["fp8", "awq", "gptq", "compressed-tensors", "mxfp4", "modelopt_fp4"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "safetensors", "pt", "gguf", "dummy"]
AuditAction = Literal["log", "disable", "stop"]
SchedulePolicy = Literal["fcfs", "lpm"]
StateDtype = Literal["float32", "bfloat16"]
SnapshotStrategy = Literal["auto", "extra_buffer"]
ToolCallParser = Literal[
    "auto",
    "none",
    "hermes",
    "qwen25",
    "qwen",
    "llama3_json",
    "llama3",
    "pythonic",
    "llama4_pythonic",
    "mistral",
    "deepseekv3",
    "deepseek_v3",
    "deepseekv31",
    "deepseek_v31",
    "kimi_k2",
    "glm45",
    "glm",
    "glm47",
    "gpt-oss",
    "openai",
    "qwen3_coder",
    "qwen3_xml",
    "mimo",
    "step3p5",
    "gemma4",
]
ReasoningParser = Literal[
    "auto",
    "none",
    "deepseek-r1",
    "deepseek_r1",
    "step3p5",
    "deepseek-v3",
    "deepseek_v3",
    "kimi_k2",
    "glm45",
    "gemma4",
    "gpt-oss",
    "openai_gptoss",
    "qwen3",
    "qwen3-thinking",
    "mimo",
]
SamplingDefaultsFrom = Literal["model", "openai"]
LogLevel = Literal["debug", "info", "warning", "error"]

DEFAULT_MODEL = "smollm2"
DUMMY: Literal["dummy"] = "dummy"  # the load format of random weights


class EngineConfig(SpeculationFlags, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One field per flag; `--page-size` is `page_size`. None means automatic. Names and defaults are SGLang's."""

    model_path: Annotated[
        Text, Meta(description="alias (smollm2), Hugging Face directory, .gguf file or hub id of the target model")
    ] = DEFAULT_MODEL
    tokenizer_path: Annotated[
        Text | None, Meta(description="directory with tokenizer.json; default: the model's, or the one in a .gguf file")
    ] = None
    load_format: Annotated[
        LoadFormat,
        Meta(description="format of the weights; auto: what is there; dummy: random, from config.json alone"),
    ] = "auto"
    revision: Annotated[
        Text | None, Meta(description="branch, tag or commit of the model on the hub; default: main")
    ] = None
    trust_remote_code: Annotated[bool, Meta(description="accepted: no remote code is ever needed or run")] = False
    served_model_name: Annotated[
        Text | None, Meta(description="model name in the API, and aliases; default: the model path")
    ] = None
    dtype: Annotated[
        Dtype,
        Meta(description="auto: bfloat16 on CUDA; float32 on a CPU, where a .gguf file's weights keep their bits"),
    ] = "auto"
    quantization: Annotated[
        Quantization | None,
        Meta(description="fp8: round 16-bit weights to 8 bits while loading; others: what the checkpoint is stored in"),
    ] = None
    enable_deterministic_inference: Annotated[
        bool,
        Meta(
            description="a request's tokens and log-probs are those of the request alone, to the last bit, whatever"
            " runs beside it: on a CPU in float32, on a GPU in 16 bits; what cannot keep that is refused"
        ),
    ] = False
    device: Annotated[Device, Meta(description="auto: cuda where there is one")] = "auto"
    tp_size: Annotated[int, Meta(ge=1, description="ranks that share each layer, each a GPU's: 1, 2, 4 or 8")] = 1
    attention_backend: Annotated[
        Text, Meta(description="auto, triton (our kernels) or torch (no kernels, and no CUDA graphs)")
    ] = "auto"
    moe_runner_backend: Annotated[
        Text, Meta(description="what multiplies by the experts of a mixture: auto, or triton on a GPU")
    ] = "auto"
    moe_a2a_backend: Annotated[
        Text, Meta(description="what sends rows between GPUs with other experts: none, as one GPU has all of them")
    ] = "none"
    context_length: Annotated[int, Meta(ge=16, description="tokens; default: the model's context")] | None = None
    feature: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[A-Za-z_][\w.]*$", extra={"choices": ("PACKAGE",)})], ...] | None,
        Meta(description="packages of your own that attach to the engine's processes as its features do"),
    ] = None
    logit_processor: (
        Annotated[
            str,
            Meta(
                pattern=r"^[\w.]+:\w+$",
                description="MODULE:NAME of a function of your own that changes every request's logits",
                extra={"choices": ("MODULE:NAME",)},
            ),
        ]
        | None
    ) = None
    skip_tokenizer_init: Annotated[bool, Meta(description="serve token ids only")] = False
    random_seed: (
        Annotated[int, Meta(ge=0, le=2**63 - 1, description="seeds the requests that give none; default: drawn")] | None
    ) = None

    host: Annotated[str, Meta(description="address of the HTTP server")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the HTTP server; 0: any free one")] = 30000
    api_key: Annotated[
        Text | None,
        Meta(
            description="required as bearer token, and on a public ZMQ endpoint; or OVERLAP_SPEC_API_KEY. On Linux the"
            " list of processes shows it only until the program runs"
        ),
    ] = None
    api_key_file: Annotated[
        Text | None, Meta(description="file of further API keys, KEY or NAME:KEY in each line, and adapt behind it")
    ] = None
    admin_api_key: Annotated[
        Text | None,
        Meta(
            description="key without which no client aborts all requests or empties the cache; or"
            " OVERLAP_SPEC_ADMIN_API_KEY"
        ),
    ] = None
    isolate_clients: Annotated[
        bool | None,
        Meta(description="clients whose API keys differ in name share no cached prefix; default: if there are two"),
    ] = None
    shared_prefix: Annotated[
        Text | None,
        Meta(description="file with a text that isolated clients share where a prompt begins with it: a system prompt"),
    ] = None
    sampling_defaults: Annotated[
        SamplingDefaultsFrom,
        Meta(description="origin of what a request leaves out: the model's generation_config.json, or OpenAI's values"),
    ] = "model"
    chat_template: Annotated[
        Text | None, Meta(description="file with a chat template, or the template itself; default: the model's")
    ] = None
    trust_request_chat_template: Annotated[
        bool, Meta(description="run chat templates that requests bring along, in a sandbox")
    ] = False
    cors_allow_origins: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)$", extra={"choices": ("ORIGIN",)})], ...]
        | None,
        Meta(description="web pages of these origins may call the HTTP server; *: all; default: none"),
    ] = None
    allowed_hosts: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^(\*|[\w.-]{1,253})$", extra={"choices": ("NAME",)})], ...] | None,
        Meta(
            description="names by which clients may call the server, beside addresses, localhost and the machine's; *:"
            " all; without it any name is taken, except on a loopback address without an API key"
        ),
    ] = None
    otlp_traces_endpoint: Annotated[
        Text | None,
        Meta(
            description="OTLP collector that spans of requests are sent to: http://HOST:4318, or HOST:4317 for gRPC;"
            " needs the extra otlp"
        ),
    ] = None
    enable_trace: Annotated[
        bool, Meta(description="send spans of requests, to localhost:4317 if no endpoint is given")
    ] = False
    disable_ui: Annotated[bool, Meta(description="no page at /ui to chat with the engine and to watch it")] = False
    zmq_endpoint: Annotated[
        Text | None, Meta(description="public address of the ZMQ client link; default: ipc in a private directory")
    ] = None
    http_header_timeout: Annotated[
        float, Meta(gt=0, description="seconds for a request's head, also from the beginning of a connection")
    ] = 20.0
    http_body_timeout: Annotated[
        float, Meta(gt=0, description="seconds for which a request's body may stay away, or come too slowly")
    ] = 60.0
    max_connections: Annotated[
        int, Meta(ge=1, description="HTTP connections; never more than the limit of open files allows")
    ] = 8192
    max_connections_per_address: Annotated[int, Meta(ge=1, description="HTTP connections of one address")] = 4096
    tool_call_parser: Annotated[
        ToolCallParser, Meta(description="format of the model's tool calls; auto: as its chat template shows")
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser, Meta(description="format of the model's reasoning; auto: as its chat template shows")
    ] = "auto"
    watchdog_timeout: Annotated[
        float,
        Meta(
            ge=0,
            description="seconds without a heartbeat, or with one step in flight, after which a process of the"
            " engine is killed as hung; a phase of the start may take ten times as long; 0: never",
        ),
    ] = 60.0
    drain_timeout: Annotated[
        float, Meta(ge=0, description="seconds that open requests have to finish after SIGINT, SIGTERM or SIGHUP")
    ] = 30.0
    log_level: Annotated[LogLevel, Meta(description="log level of every process")] = "info"
    log_level_http: Annotated[
        LogLevel | None, Meta(description="log level of answers, each a line at info; default: that of --log-level")
    ] = None

    recover: Annotated[
        bool | None,
        Meta(description="start scheduler and worker again when one dies, and let requests go on; default: serve does"),
    ] = None
    max_recoveries: (
        Annotated[int, Meta(ge=1, description="most automatic restarts in 10 minutes; default 3")] | None
    ) = None

    audit_rate: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=1,
                description="share of finished requests that plain decoding runs again; default 0.01 with speculation",
            ),
        ]
        | None
    ) = None
    audit_action: Annotated[
        AuditAction, Meta(description="on a fault: log it; disable speculation from then on; stop the engine")
    ] = "log"
    audit_file: Annotated[
        Text | None, Meta(description="JSONL file of faults; default: a new one in the cache directory")
    ] = None

    adapt_draft: Annotated[
        bool,
        Meta(
            description="an EAGLE-3 head learns from what it serves, in idle time; of several clients, from those"
            " marked in --api-key-file"
        ),
    ] = False
    adapt_share: Annotated[
        float, Meta(gt=0, le=0.5, description="share of the time that all of learning may take beside requests")
    ] = 0.05
    adapt_save: Annotated[
        Text | None,
        Meta(description="directory for the head that has learnt, which can remember what it has read; default: none"),
    ] = None

    mem_fraction_static: (
        Annotated[float, Meta(gt=0, lt=1, description="share of GPU memory for weights and KV pages")] | None
    ) = None
    max_total_tokens: Annotated[int, Meta(ge=16, description="tokens in the KV pool; default: from memory")] | None = (
        None
    )
    max_running_requests: (
        Annotated[int, Meta(ge=1, le=4096, description="slots; default 48 with speculation")] | None
    ) = None
    chunked_prefill_size: Annotated[
        int | None, Meta(description="prompt tokens in a prefill step; -1: unbounded; default: from the machine")
    ] = None
    max_gap_ms: (
        Annotated[
            float,
            Meta(
                gt=0,
                description="most ms that a prompt chunk keeps decoding requests waiting; default 25 on a GPU, and on a"
                " CPU half a second",
            ),
        ]
        | None
    ) = None
    enable_mixed_chunk: Annotated[
        bool | None,
        Meta(
            description="a prompt chunk and the decode step beside it run the target's layers together; default: on a"
            " GPU. With CUDA graphs, in the sizes that are captured: none of a model below about 3 GFLOP a token"
        ),
    ] = None
    schedule_policy: Annotated[
        SchedulePolicy,
        Meta(
            description="which of a client's waiting requests gets a slot: the first come, or the longest cached"
            " prefix; clients take turns"
        ),
    ] = "fcfs"
    max_queued_requests: Annotated[
        int, Meta(ge=0, le=1 << 20, description="requests that may wait beyond those that run; others get 503")
    ] = 2048
    request_timeout: (
        Annotated[float, Meta(gt=0, le=10_000_000, description="seconds that a request may take; default: any")] | None
    ) = None
    first_token_timeout: (
        Annotated[float, Meta(gt=0, le=10_000_000, description="seconds until a request's first token; default: any")]
        | None
    ) = None
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        Meta(
            description="format of KV pages, the draft's too; auto: that of the checkpoint's scheme or of --dtype; fp8:"
            " 8 bits, with the checkpoint's scales or 1"
        ),
    ] = "auto"
    page_size: Annotated[int, Meta(ge=1, le=256, description="tokens in a KV page")] = 16
    disable_radix_cache: Annotated[bool, Meta(description="no prefix cache")] = False
    disable_overlap_schedule: Annotated[bool, Meta(description="one step in flight instead of two")] = False
    mamba_ssm_dtype: (
        Annotated[StateDtype, Meta(description="type of recurrent states; default: config.json's, or float32")] | None
    ) = None
    max_mamba_cache_size: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="recurrent states: those of slots, and of snapshots for the prefix cache; default: by"
                " bytes",
            ),
        ]
        | None
    ) = None
    mamba_full_memory_ratio: (
        Annotated[
            float,
            Meta(
                gt=0,
                description="bytes of recurrent states and snapshots over those of KV pages; default 0.9; on a CPU"
                " snapshots take as much of another GiB",
            ),
        ]
        | None
    ) = None
    mamba_track_interval: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="tokens between two snapshots of a prompt, at least, where chunks end; default 256. Answers"
                " have none: the next turn computes them as a part of its prompt",
            ),
        ]
        | None
    ) = None
    mamba_radix_cache_strategy: Annotated[
        SnapshotStrategy,
        Meta(description="snapshots beside steps in flight and speculation, also where prompts branch; auto: the same"),
    ] = "auto"

    disable_cuda_graph: Annotated[bool, Meta(description="launch every operation of a decode step by itself")] = False
    cuda_graph_max_bs: (
        Annotated[int, Meta(ge=1, description="largest batch that runs as a CUDA graph; default: all that can run")]
        | None
    ) = None
    cuda_graph_bs: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=4096)], ...] | None,
        Meta(description="batch sizes that are captured as CUDA graphs; default: chosen up to the largest"),
    ] = None

    enable_torch_compile: Annotated[
        bool, Meta(description="compile what is no kernel of ours, the sampler without filters, before the capture")
    ] = False
    torch_compile_max_bs: (
        Annotated[int, Meta(ge=1, description="largest batch that is compiled; default with torch.compile: 32")] | None
    ) = None


def refuse_values(config: EngineConfig, values: Mapping[str, Sequence[Any]], owner: str) -> None:
    """Raises: ConfigError naming a flag that is given one of its `values`, which `owner`, not there, would serve."""
    for flag, refused in values.items():
        if (value := getattr(config, flag)) in refused:
            raise ConfigError(flag, f"{value} is of the {owner}, which is not part of this installation")


def without_flags(config: EngineConfig, absent: Mapping[str, Mapping[str, Any]], kind: str) -> EngineConfig:
    """The same without what is not there. `absent`: by name, its flags, each with the value that leaves it out.

    Raises: ConfigError naming a flag of something absent that is given. `kind`: a noun for the message.
    """
    defaults, off = EngineConfig(), dict[str, Any]()
    for name, flags in absent.items():
        for flag, value in flags.items():
            if getattr(config, flag) not in (getattr(defaults, flag), value):
                raise ConfigError(flag, f"is of the {kind} {name!r}, which is not part of this installation")
            off[flag] = value
    return replace(config, **off) if off else config
