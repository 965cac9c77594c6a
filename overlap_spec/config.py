"""What a user asks for (`EngineConfig`, one field per flag) and what is run (`Settings`, by owner).

Not here: argparse (`cli.py`), files and hubs (`hub.py`). `resolve` is pure: the same request on the same
machine gives the same settings. Every automatic value is settled in it, once, and printed at start; the
one exception is what only the worker can measure (page count, chunk size), which travels in WorkerReady.
"""

import os
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from overlap_spec.errors import ConfigError

Dtype = Literal["auto", "float64", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Algorithm = Literal["NONE", "EAGLE3"]
LogLevel = Literal["debug", "info", "warning", "error"]

DEFAULT_MODEL = "smollm2"
SMOLLM2_SPEC = ("EAGLE3", 3, 1, 4)  # what that alias runs with: method, steps, topk, draft tokens
MAX_STEPS = 8
DEFAULT_RUNNING_WITH_SPECULATION = 48  # SGLang's
DEFAULT_RUNNING_PLAIN = {"cpu": 48, "cuda": 256}
MIB = 1 << 20


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One field per flag; `--page-size` is `page_size`. None means automatic. Names and defaults are SGLang's."""

    model_path: Annotated[
        str, Meta(description="alias (smollm2), Hugging Face directory, .gguf file or hub id of the target model")
    ] = DEFAULT_MODEL
    tokenizer_path: Annotated[str | None, Meta(description="directory with tokenizer.json; default: the model's")] = (
        None
    )
    served_model_name: Annotated[str | None, Meta(description="model name in the API; default: the model path")] = None
    dtype: Annotated[Dtype, Meta(description="auto: float32 on a CPU, bfloat16 on CUDA")] = "auto"
    device: Annotated[Device, Meta(description="auto: cuda where there is one")] = "auto"
    context_length: Annotated[int, Meta(ge=16, description="tokens; default: the model's context")] | None = None
    skip_tokenizer_init: Annotated[bool, Meta(description="serve token ids only")] = False
    random_seed: (
        Annotated[int, Meta(ge=0, le=2**63 - 1, description="seeds the requests that give none; default: drawn")] | None
    ) = None

    host: Annotated[str, Meta(description="address of the HTTP server")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the HTTP server; 0: any free one")] = 30000
    api_key: Annotated[str | None, Meta(description="required as bearer token, and on a public ZMQ endpoint")] = None
    zmq_endpoint: Annotated[
        str | None, Meta(description="public address of the ZMQ client link; default: ipc in a private directory")
    ] = None
    log_level: Annotated[LogLevel, Meta(description="log level of every process")] = "info"

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
    page_size: Annotated[int, Meta(ge=1, le=256, description="tokens in a KV page")] = 16
    disable_radix_cache: Annotated[bool, Meta(description="no prefix cache")] = False
    disable_overlap_schedule: Annotated[bool, Meta(description="one step in flight instead of two")] = False

    speculative_algorithm: Annotated[Algorithm | None, Meta(description="drafting method")] = None
    speculative_draft_model_path: Annotated[str | None, Meta(description="directory or hub id of the draft head")] = (
        None
    )
    speculative_num_steps: Annotated[int, Meta(ge=1, le=MAX_STEPS, description="draft depth")] | None = None
    speculative_eagle_topk: Annotated[int, Meta(ge=1, description="branching; 1 is a chain")] | None = None
    speculative_num_draft_tokens: (
        Annotated[int, Meta(ge=2, description="window width, root included; steps + 1 for a chain")] | None
    ) = None


class Machine(Struct, frozen=True):
    """What `resolve` needs to know of the machine. `num_cores` is what this process may use."""

    num_cores: int
    has_cuda: bool


class ModelFiles(Struct, frozen=True, kw_only=True):
    """Local files of one target, and what its config says; made by `hub.resolve_model` without torch.

    `weights`: a directory (config.json beside .safetensors or .bin) or a .gguf file. `config`: the
    Hugging Face config as a dict (from GGUF metadata for a .gguf). `tokenizer_dir` is None only with
    `skip_tokenizer_init`.
    """

    weights: str
    config: dict[str, Any]
    tokenizer_dir: str | None
    eos_token_ids: tuple[int, ...]
    context_length: int
    vocab_size: int
    preset_draft: str | None = None  # directory of the head that ships for this alias
    preset_spec: tuple[str, int, int, int] | None = None  # method, steps, topk, draft tokens of the alias


class ModelSettings(Struct, frozen=True):
    """Owner: worker (weights), tokenizer (tokenizer_dir, eos), server (names)."""

    name: str
    files: ModelFiles
    dtype: str
    device: str
    max_len: int  # tokens in a sequence, prompt and output


class SpecSettings(Struct, frozen=True):
    """Owner: worker. `width` W = num_draft_tokens: rows of the verify window, root included; 1 is plain decoding."""

    method: str
    draft_path: str | None
    num_steps: int
    topk: int
    width: int


class CacheSettings(Struct, frozen=True):
    """Owner: worker (sizes), scheduler (prefix cache)."""

    page_size: int
    max_total_tokens: int | None
    mem_fraction: float
    prefix_cache: bool


class SchedulerSettings(Struct, frozen=True):
    """Owner: scheduler. `depth`: steps in flight. `chunk_tokens` None: the worker measures it; -1: unbounded."""

    max_running_requests: int
    depth: int
    chunk_tokens: int | None
    seed: int | None


class ServerSettings(Struct, frozen=True):
    """Owner: the HTTP process."""

    host: str
    port: int
    api_key: str | None


class LinkSettings(Struct, frozen=True):
    """Owner: tokenizer. `client_endpoint` None: an ipc address in the run's private directory."""

    client_endpoint: str | None
    api_key: str | None
    max_open_requests: int = 2048
    max_queued_bytes: int = 4 * MIB  # per client that does not read
    client_timeout_s: float = 10.0


class Settings(Struct, frozen=True):
    """What is run. Each process is handed all of it and gives each component its section only."""

    model: ModelSettings
    spec: SpecSettings
    cache: CacheSettings
    scheduler: SchedulerSettings
    server: ServerSettings
    link: LinkSettings
    skip_tokenizer_init: bool
    log_level: str
    num_threads: int  # compute threads of the worker; every other process has one


def resolve(config: EngineConfig, files: ModelFiles, machine: Machine) -> tuple[Settings, list[str]]:
    """Settle every automatic value. Returns the settings and notes for the log (what was adjusted, and why).

    Raises: ConfigError naming the flag.
    """
    notes: list[str] = []
    spec = _resolve_spec(config, files, notes)
    device = _resolve_device(config, machine)
    depth = 1 if config.disable_overlap_schedule else 2
    running = config.max_running_requests
    if running is None:
        running = DEFAULT_RUNNING_PLAIN[device] if spec.width == 1 else DEFAULT_RUNNING_WITH_SPECULATION
    settings = Settings(
        model=ModelSettings(
            name=config.served_model_name or config.model_path,
            files=files,
            dtype=_resolve_dtype(config, device),
            device=device,
            max_len=_resolve_context(config, files),
        ),
        spec=spec,
        cache=_resolve_cache(config),
        scheduler=SchedulerSettings(
            max_running_requests=running, depth=depth, chunk_tokens=_resolve_chunk(config), seed=config.random_seed
        ),
        server=ServerSettings(host=config.host, port=config.port, api_key=config.api_key),
        link=LinkSettings(client_endpoint=_resolve_endpoint(config), api_key=config.api_key),
        skip_tokenizer_init=config.skip_tokenizer_init,
        log_level=config.log_level,
        num_threads=machine.num_cores,
    )
    return settings, notes


def _resolve_device(config: EngineConfig, machine: Machine) -> str:
    if config.device == "cuda" and not machine.has_cuda:
        raise ConfigError("device", "cuda was asked for, but no CUDA driver with a device was found; use cpu or auto")
    if config.device == "auto":
        return "cuda" if machine.has_cuda else "cpu"
    return config.device


def _resolve_dtype(config: EngineConfig, device: str) -> str:
    if config.dtype == "float64" and device != "cpu":
        raise ConfigError("dtype", "float64 is for tests on a CPU; use float32, bfloat16 or float16 on cuda")
    if config.dtype == "auto":
        return "float32" if device == "cpu" else "bfloat16"
    return config.dtype


def _resolve_context(config: EngineConfig, files: ModelFiles) -> int:
    asked = config.context_length
    if asked is not None and asked > files.context_length:
        raise ConfigError("context_length", f"{asked} exceeds the model's context of {files.context_length} tokens")
    return asked or files.context_length


def _resolve_chunk(config: EngineConfig) -> int | None:
    chunk = config.chunked_prefill_size
    if chunk is not None and chunk != -1 and chunk < config.page_size:
        raise ConfigError(
            "chunked_prefill_size", f"must be -1 (unbounded) or at least the page size {config.page_size}, got {chunk}"
        )
    return chunk


def _resolve_cache(config: EngineConfig) -> CacheSettings:
    total = config.max_total_tokens
    if total is not None and total < config.page_size:
        raise ConfigError("max_total_tokens", f"must hold at least one page of {config.page_size} tokens, got {total}")
    return CacheSettings(
        page_size=config.page_size,
        max_total_tokens=total,
        mem_fraction=config.mem_fraction_static or 0.88,
        prefix_cache=not config.disable_radix_cache,
    )


def _resolve_endpoint(config: EngineConfig) -> str | None:
    endpoint = config.zmq_endpoint
    if endpoint is None or endpoint.startswith("ipc://"):
        return endpoint
    if not endpoint.startswith("tcp://"):
        raise ConfigError("zmq_endpoint", f"must start with ipc:// or tcp://, got {endpoint!r}")
    address = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if address not in ("127.0.0.1", "localhost", "::1") and config.api_key is None:
        raise ConfigError("zmq_endpoint", f"{endpoint} is reachable from other machines: it needs --api-key")
    return endpoint


def _resolve_spec(config: EngineConfig, files: ModelFiles, notes: list[str]) -> SpecSettings:
    """Explicit speculative flags replace an alias's preset as a set; without any, the preset holds."""
    numbers = (
        config.speculative_num_steps,
        config.speculative_eagle_topk,
        config.speculative_num_draft_tokens,
    )
    method = config.speculative_algorithm
    asked = (method, config.speculative_draft_model_path, *numbers)
    if all(flag is None for flag in asked):
        if files.preset_spec is None:
            return SpecSettings("NONE", None, 0, 0, 1)
        preset, num_steps, topk, width = files.preset_spec
        return SpecSettings(preset, files.preset_draft, num_steps, topk, width)
    if method is None:
        raise ConfigError("speculative_algorithm", "missing: another --speculative flag was given; name NONE or EAGLE3")
    if method == "NONE":
        _refuse_with_none(config)
        return SpecSettings("NONE", None, 0, 0, 1)
    draft = config.speculative_draft_model_path or files.preset_draft
    if draft is None:
        raise ConfigError("speculative_draft_model_path", f"{method} needs a draft head: give its directory or hub id")
    num_steps, width = _resolve_numbers(config, files, notes)
    return SpecSettings(method, draft, num_steps, 1, width)


def _refuse_with_none(config: EngineConfig) -> None:
    for field in config.__struct_fields__:
        if field.startswith("speculative_") and field != "speculative_algorithm" and getattr(config, field) is not None:
            raise ConfigError(field, "has no effect with --speculative-algorithm NONE; leave it out")


def _resolve_numbers(config: EngineConfig, files: ModelFiles, notes: list[str]) -> tuple[int, int]:
    """Returns (num_steps, width); all three numbers or none, as in SGLang."""
    steps, topk, tokens = (
        config.speculative_num_steps,
        config.speculative_eagle_topk,
        config.speculative_num_draft_tokens,
    )
    if steps is None and topk is None and tokens is None:
        if files.preset_spec is not None:
            _, steps, _, width = files.preset_spec
            return steps, width
        is_llama = "LlamaForCausalLM" in files.config.get("architectures", ())
        steps = 5 if is_llama else 3
        notes.append(
            f"speculative numbers set to ({steps}, 1, {steps + 1}): the default for "
            f"{'Llama' if is_llama else 'this architecture'}, as a chain (trees are not supported yet)"
        )
        return steps, steps + 1
    if steps is None or topk is None or tokens is None:
        missing = [
            name
            for name, value in (
                ("speculative_num_steps", steps),
                ("speculative_eagle_topk", topk),
                ("speculative_num_draft_tokens", tokens),
            )
            if value is None
        ]
        raise ConfigError(
            missing[0],
            "give --speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens"
            " together, or none of them",
        )
    if topk > 1:
        raise ConfigError("speculative_eagle_topk", f"trees are not supported yet, got {topk}; use 1 (a chain)")
    if tokens != steps + 1:
        notes.append(f"speculative_num_draft_tokens set from {tokens} to {steps + 1}: a chain (topk 1) has steps + 1")
    return steps, steps + 1


def settled_flags(config: EngineConfig, settings: Settings) -> dict[str, Any]:
    """Every flag with the value that is in force: what was asked for, automatic values settled."""
    spec = settings.spec
    speculating = spec.width > 1
    return msgspec.structs.asdict(config) | {
        "served_model_name": settings.model.name,
        "dtype": settings.model.dtype,
        "device": settings.model.device,
        "context_length": settings.model.max_len,
        "mem_fraction_static": settings.cache.mem_fraction,
        "max_running_requests": settings.scheduler.max_running_requests,
        "speculative_algorithm": spec.method,
        "speculative_draft_model_path": spec.draft_path,
        "speculative_num_steps": spec.num_steps if speculating else None,
        "speculative_eagle_topk": spec.topk if speculating else None,
        "speculative_num_draft_tokens": spec.width if speculating else None,
    }


def without_speculation(config: EngineConfig) -> EngineConfig:
    """The same engine, decoding plainly: what speculation is compared with."""
    fields = {name: None for name in config.__struct_fields__ if name.startswith("speculative_")}
    return msgspec.structs.replace(config, **fields | {"speculative_algorithm": "NONE"})


def child_environment(settings: Settings, role: str) -> dict[str, str]:
    """The environment of a child process. Threads wait passively: on few cores a spinning thread costs 50x."""
    threads = settings.num_threads if role == "worker" else 1
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def asks_for_spec_v2() -> bool:
    """True if SGLANG_ENABLE_SPEC_V2 is set: overlap is always on here, and the log says so."""
    return "SGLANG_ENABLE_SPEC_V2" in os.environ


def cache_directory() -> str:
    """Where downloaded default weights live."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get("OVERLAP_SPEC_CACHE") or os.path.join(base, "overlap-spec")


def encode_settings(settings: Settings) -> bytes:
    """Settings as msgpack, for a child process."""
    return msgspec.msgpack.encode(settings)


def decode_settings(payload: bytes) -> Settings:
    """Inverse of `encode_settings`."""
    return msgspec.msgpack.decode(payload, type=Settings)
