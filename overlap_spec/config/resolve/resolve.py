"""Resolves `EngineConfig` to `Settings`: every automatic value is decided here, once, and printed at start.

`resolve` is pure: the same flags, files and machine give the same settings. Only page count and chunk size are
measured by the worker, which sends them in `WorkerReady`.
"""

from pathlib import Path
from typing import Any

import msgspec

from overlap_spec.config import (
    DUMMY,
    PLAIN,
    ApiKeys,
    AttentionSettings,
    AuditSettings,
    CacheSettings,
    EngineConfig,
    HttpLimits,
    IsolationSettings,
    LinkSettings,
    Machine,
    ModelFiles,
    ModelSettings,
    RecoverySettings,
    SchedulerSettings,
    ServerSettings,
    Settings,
    SpecSettings,
    SupervisorSettings,
)
from overlap_spec.config.keys import can_be_written
from overlap_spec.config.ranks import resolve_ranks, spin_of, threads_of
from overlap_spec.config.resolve.adapt import learns_from, resolve_adapt
from overlap_spec.config.resolve.attention import resolve_attention, resolve_kv_dtype, shown_kv_dtype
from overlap_spec.config.resolve.deterministic import only_chains, resolve_deterministic
from overlap_spec.config.resolve.ngram import settled_ngram_flags
from overlap_spec.config.resolve.server import otlp_target, resolve_isolation
from overlap_spec.config.resolve.speculation import keeps_width, resolve_speculation
from overlap_spec.config.resolve.states import check_states, running_with_states, with_snapshots, with_state_dtype
from overlap_spec.config.speculation import SpeculationFlags, keeps_states
from overlap_spec.errors import ConfigError

DEFAULT_RATE = 0.01
UNORDERED = (
    "the target has layers with a recurrent state, whose sums have one order with --enable-deterministic-inference only"
)


def resolve_audit(config: EngineConfig, spec: SpecSettings, files: ModelFiles, deterministic: bool) -> AuditSettings:
    """Audits are on where speculation is, unless its tokens are not plain decoding's. Raises: ConfigError.

    Those of layers with a state have states of their own, so they are on only where they are asked for.
    """
    recurs = keeps_states(files.config)
    why_not = UNORDERED if recurs and not deterministic else _why_not(spec)
    rate = config.audit_rate
    if rate is None:
        rate = DEFAULT_RATE if spec.width > 1 and not why_not and not recurs else 0.0
    elif rate > 0 and why_not:
        raise ConfigError("audit_rate", f"{why_not}: there is nothing to compare tokens with; use 0")
    if rate == 0:
        for field, given in (("audit_action", config.audit_action != "log"), ("audit_file", config.audit_file)):
            if given:
                raise ConfigError(field, "has no effect without audits; leave it out, or give --audit-rate")
    if config.audit_file is not None and not can_be_written(Path(config.audit_file)):
        raise ConfigError("audit_file", f"no file can be written at {config.audit_file!r}")
    return AuditSettings(rate, config.audit_action, config.audit_file)


def _why_not(spec: SpecSettings) -> str:
    if spec.simulated_accept_lens:
        return "acceptance is synthetic"
    if spec.accept.asked_by is not None:
        return f"{spec.accept.asked_by} commits other tokens than plain decoding"
    return ""


DEFAULT_RUNNING_WITH_SPECULATION = 48  # SGLang's
DEFAULT_COMPILED_BATCH = 32  # SGLang's
DEFAULT_RUNNING_PLAIN = {"cpu": 48, "cuda": 256}
GPU_GAP_MS = 25.0
NO_KEYS = ApiKeys()
SECRETS = frozenset({"api_key", "api_key_file", "admin_api_key"})


def resolve(
    config: EngineConfig, files: ModelFiles, machine: Machine, keys: ApiKeys = NO_KEYS
) -> tuple[Settings, list[str]]:
    """Resolve every automatic value. Returns the settings and notes for the log (adjusted values, with reasons).

    `keys`: what `read_keys` has found. Raises: ConfigError naming the flag.
    """
    notes: list[str] = []
    device = _resolve_device(config, machine)
    spec, rules = resolve_speculation(config, files, machine, notes, only_chains(config, device))
    dtype = _resolve_dtype(config, device)
    ranks = resolve_ranks(config, device, machine, notes)
    check_states(config, files)
    running = running_with_states(config, _default_running(spec, device))
    _note_flags(config, device, notes)
    attention = resolve_attention(config, spec, device, notes)
    deterministic = resolve_deterministic(config, files, device, dtype, spec)
    attention = msgspec.structs.replace(attention, target_in_order=deterministic and device == "cuda")
    graph_batch_sizes = _resolve_graphs(config, attention, device, running, notes)
    isolation, keys = resolve_isolation(config, keys, notes)
    settings = Settings(
        model=_resolve_model(config, files, dtype, device, deterministic),
        spec=spec,
        cache=_resolve_cache(config, files, dtype, notes),
        scheduler=SchedulerSettings(
            max_running_requests=running,
            depth=1 if config.disable_overlap_schedule else 2,
            chunk_tokens=_resolve_chunk(config),
            max_gap_s=_resolve_gap(config, device),
            windows_with_prompts=_resolve_mixed(config, device, graph_batch_sizes),
            schedule_policy=config.schedule_policy,
            seed=config.random_seed,
            width_rules=rules,
            keeps_width=keeps_width(spec, config) and not rules,
            width_padding=graph_batch_sizes if rules else (),
            synthetic_acceptance=bool(spec.simulated_accept_lens),
            deterministic=deterministic,
        ),
        server=_resolve_server(config, files, keys, machine.otlp_protocol),
        supervisor=SupervisorSettings(config.watchdog_timeout),
        link=_resolve_link(config, keys, isolation),
        skip_tokenizer_init=config.skip_tokenizer_init,
        log_level=config.log_level,
        num_threads=threads_of(machine, ranks),
        threads_given=machine.num_threads is not None,
        graph_batch_sizes=graph_batch_sizes,
        compile_max_batch=_resolve_compile(config, device),
        attention=attention,
        logit_processor=config.logit_processor,
        features=config.feature or (),
        audit=resolve_audit(config, spec, files, deterministic),
        adapt=resolve_adapt(config, spec, isolation, keys, ranks, notes),
        recovery=_resolve_recovery(config),
        spin_s=spin_of(machine, device, ranks),
        proposes_forced=ranks == 1,
        ranks=ranks,
    )
    return settings, notes


def _default_running(spec: SpecSettings, device: str) -> int:
    return DEFAULT_RUNNING_PLAIN[device] if spec.width == 1 else DEFAULT_RUNNING_WITH_SPECULATION


def _resolve_model(
    config: EngineConfig, files: ModelFiles, dtype: str, device: str, deterministic: bool
) -> ModelSettings:
    name, *aliases = _resolve_names(config)
    return ModelSettings(
        name=name,
        files=with_state_dtype(config, files),
        dtype=dtype,
        device=device,
        max_len=_resolve_context(config, files),
        aliases=tuple(aliases),
        keeps_integers=_keeps_integers(config, device, files),
        deterministic=deterministic,
    )


def _resolve_recovery(config: EngineConfig) -> RecoverySettings:
    """Raises: ConfigError for a limit of what is off."""
    if not config.recover:
        if config.max_recoveries is not None:
            raise ConfigError("max_recoveries", "has no effect without --recover; leave it out")
        return RecoverySettings()
    recovery = RecoverySettings(enabled=True)
    if config.max_recoveries is None:
        return recovery
    return msgspec.structs.replace(recovery, most=config.max_recoveries)


def _resolve_server(config: EngineConfig, files: ModelFiles, keys: ApiKeys, protocol: str | None) -> ServerSettings:
    return ServerSettings(
        config.host,
        config.port,
        keys,
        files.sampling_defaults,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        cors_allow_origins=config.cors_allow_origins or (),
        allowed_hosts=config.allowed_hosts or (),
        http=http_limits(config),
        ui=not config.disable_ui,
        otlp=otlp_target(config, protocol),
    )


def http_limits(config: EngineConfig) -> HttpLimits:
    """What HTTP clients are allowed; needed before anything else is resolved."""
    return HttpLimits(
        config.http_header_timeout,
        config.http_body_timeout,
        config.max_connections,
        config.max_connections_per_address,
    )


def _resolve_link(config: EngineConfig, keys: ApiKeys, isolation: IsolationSettings) -> LinkSettings:
    return LinkSettings(
        client_endpoint=_resolve_endpoint(config, keys),
        api_key=keys.first,
        key_names=keys.names,
        admin_key=keys.admin,
        isolation=isolation,
        max_queued_requests=config.max_queued_requests,
        trusts_templates=config.trust_request_chat_template,
        request_timeout_s=config.request_timeout,
        first_token_timeout_s=config.first_token_timeout,
    )


def _resolve_names(config: EngineConfig) -> list[str]:
    """The model's name in the API, and its aliases."""
    if config.served_model_name is None:
        return [config.model_path]
    names = [name.strip() for name in config.served_model_name.split(",")]
    if not all(names):
        raise ConfigError("served_model_name", f"must be names separated by commas, got {config.served_model_name!r}")
    return names


def _note_flags(config: EngineConfig, device: str, notes: list[str]) -> None:
    """Note features of one's own, and flags that have no effect here."""
    notes.extend(f"{package} attaches: a feature of your own" for package in config.feature or ())
    if config.trust_remote_code:
        notes.append("trust_remote_code is accepted: no remote code is ever needed or run")
    if config.mem_fraction_static is not None and device == "cpu":
        notes.append(
            f"mem_fraction_static {config.mem_fraction_static:g} is not used: it is a share of a GPU's memory;"
            " on a CPU the KV pool is 1 GiB, or what --max-total-tokens says"
        )


def _resolve_graphs(
    config: EngineConfig, attention: AttentionSettings, device: str, running: int, notes: list[str]
) -> tuple[int, ...]:
    """Batch sizes of CUDA graphs: 1, 2, 4, 8, then in steps of 8, 16 and 32 up to the largest batch.

    A batch is padded to the next size. `--cuda-graph-bs` gives the sizes instead; sizes above the largest batch are
    left out, as in SGLang.
    """
    for field in ("cuda_graph_max_bs", "cuda_graph_bs"):
        asked = getattr(config, field)
        if asked is not None and config.disable_cuda_graph:
            raise ConfigError(field, "has no effect with --disable-cuda-graph; leave one of them out")
        if asked is not None and device == "cpu":
            notes.append(f"{field} {asked} is not used: there are no CUDA graphs on a CPU")
    if device == "cpu" or config.disable_cuda_graph:
        return ()
    if attention.target_torch or attention.draft_torch:
        return _without_graphs(config, notes)
    if config.cuda_graph_bs is not None:
        if config.cuda_graph_max_bs not in (None, max(config.cuda_graph_bs, default=None)):
            raise ConfigError("cuda_graph_max_bs", "is not the largest of --cuda-graph-bs; leave one of them out")
        sizes = tuple(sorted({size for size in config.cuda_graph_bs if size <= running}))
        if not sizes:
            raise ConfigError("cuda_graph_bs", f"names no batch of at most {running} requests, which is what can run")
        return sizes
    largest = min(config.cuda_graph_max_bs or running, running)
    sizes = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 4097, 32))
    return (*(size for size in sizes if size < largest), largest)


def _without_graphs(config: EngineConfig, notes: list[str]) -> tuple[int, ...]:
    """No CUDA graphs: the torch references of attention read lengths on the host, which a capture forbids."""
    for field in ("cuda_graph_max_bs", "cuda_graph_bs", "enable_torch_compile"):
        if getattr(config, field):
            raise ConfigError(
                field, "torch attention cannot be captured: leave this out, or use --attention-backend auto"
            )
    notes.append("there are no CUDA graphs: torch attention cannot be captured")
    return ()


def _resolve_compile(config: EngineConfig, device: str) -> int:
    """Largest batch whose sampler is compiled. As in SGLang, without CUDA graphs nothing is compiled."""
    if not config.enable_torch_compile:
        if config.torch_compile_max_bs is not None:
            raise ConfigError("torch_compile_max_bs", "has no effect without --enable-torch-compile; leave it out")
        return 0
    if device == "cpu":
        raise ConfigError(
            "enable_torch_compile", "compiles what CUDA graphs capture, and there are none on a CPU; leave it out"
        )
    if config.disable_cuda_graph:
        raise ConfigError("enable_torch_compile", "compiles what is captured: it cannot go with --disable-cuda-graph")
    if config.tp_size > 1:
        raise ConfigError(
            "enable_torch_compile", "has not been tried with several ranks; leave it out, or use --tp-size 1"
        )
    return config.torch_compile_max_bs or DEFAULT_COMPILED_BATCH


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


def _keeps_integers(config: EngineConfig, device: str, files: ModelFiles) -> bool:
    """Unless the flag names a type, which the weights then become."""
    is_gguf = files.weights.endswith(".gguf") and files.load_format != DUMMY
    return is_gguf and device == "cpu" and config.dtype == "auto"


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


def _resolve_gap(config: EngineConfig, device: str) -> float | None:
    milliseconds = config.max_gap_ms or (GPU_GAP_MS if device == "cuda" else None)
    return None if milliseconds is None else milliseconds / 1000


def _resolve_mixed(config: EngineConfig, device: str, graph_batch_sizes: tuple[int, ...]) -> bool:
    """Launched operation by operation, mixed steps take longer than two apart."""
    if config.enable_mixed_chunk is None:
        return device == "cuda" and bool(graph_batch_sizes)
    return config.enable_mixed_chunk


def _resolve_cache(config: EngineConfig, files: ModelFiles, dtype: str, notes: list[str]) -> CacheSettings:
    total = config.max_total_tokens
    if total is not None and total < config.page_size:
        raise ConfigError("max_total_tokens", f"must hold at least one page of {config.page_size} tokens, got {total}")
    cache = CacheSettings(
        page_size=config.page_size,
        max_total_tokens=total,
        mem_fraction=config.mem_fraction_static or 0.88,
        prefix_cache=not config.disable_radix_cache,
        kv_dtype=resolve_kv_dtype(config, files, dtype, notes),
    )
    return with_snapshots(config, cache)


def _resolve_endpoint(config: EngineConfig, keys: ApiKeys) -> str | None:
    endpoint = config.zmq_endpoint
    if endpoint is None or endpoint.startswith("ipc://"):
        return endpoint
    if not endpoint.startswith("tcp://"):
        raise ConfigError("zmq_endpoint", f"must start with ipc:// or tcp://, got {endpoint!r}")
    address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not (address and port.isdecimal() and int(port) < 1 << 16):  # ZeroMQ would take 99999 for another port
        raise ConfigError(
            "zmq_endpoint", f"must look like tcp://127.0.0.1:5555 (port 0: any free one), got {endpoint!r}"
        )
    if address.strip("[]") not in ("127.0.0.1", "localhost", "::1") and keys.first is None:
        raise ConfigError("zmq_endpoint", f"{endpoint} is reachable from other machines: it needs --api-key")
    return endpoint


def settled_flags(config: EngineConfig, settings: Settings) -> dict[str, Any]:
    """Every flag with its resolved value, except keys."""
    spec, attention = settings.spec, settings.attention
    speculating, on_cpu = spec.width > 1, settings.model.device == "cpu"
    drafts = speculating and spec.draft_path is not None
    places_rows = on_cpu or attention.target_torch or attention.prefill_kernel or attention.target_in_order
    shown = {name: value for name, value in msgspec.structs.asdict(config).items() if name not in SECRETS}
    return shown | {
        "served_model_name": settings.model.name,
        "dtype": settings.model.dtype,
        "device": settings.model.device,
        "context_length": settings.model.max_len,
        "mem_fraction_static": settings.cache.mem_fraction,
        "kv_cache_dtype": shown_kv_dtype(settings),
        "audit_rate": settings.audit.rate,
        "adapt_learns_from": learns_from(settings.adapt),
        "recover": settings.recovery.enabled,
        "max_recoveries": settings.recovery.most if settings.recovery.enabled else None,
        "max_running_requests": settings.scheduler.max_running_requests,
        "speculative_algorithm": spec.method,
        "speculative_draft_model_path": spec.draft_path,
        "speculative_draft_load_format": spec.draft_load_format if speculating else None,
        "speculative_draft_model_quantization": spec.draft_quantization if drafts else None,
        "speculative_num_steps": spec.num_steps if speculating else None,
        "speculative_eagle_topk": spec.topk if speculating else None,
        "speculative_num_draft_tokens": spec.width if speculating else None,
        "speculative_numbers_from": spec.numbers_from if speculating else None,
        "speculative_adaptive": bool(spec.narrower) and not settings.scheduler.keeps_width,
        "attention_backend": _backend(on_cpu or attention.target_torch),
        "speculative_draft_attention_backend": _backend(on_cpu or attention.draft_torch) if drafts else None,
        "moe_runner_backend": _backend(on_cpu),
        "speculative_moe_runner_backend": _backend(on_cpu) if drafts else None,
        "speculative_moe_a2a_backend": config.moe_a2a_backend if drafts else None,
        "speculative_attention_mode": None if spec.has_trees else "prefill" if places_rows else "decode",
        "verification": str(spec.accept) if speculating else None,
        "speculative_accept_threshold_single": spec.accept.threshold_single if speculating else None,
        "speculative_accept_threshold_acc": spec.accept.threshold_acc if speculating else None,
        "ngram_force_greedy_verify": spec.accept.ngram_force_greedy_verify,
        "speculative_fuse_ngram": spec.num_copied or None,
        **settled_ngram_flags(spec),
    }


def _backend(is_torch: bool) -> str:
    return "torch" if is_torch else "triton"


def without_speculation(config: EngineConfig) -> EngineConfig:
    """The same engine with plain decoding, for comparisons."""
    defaults = EngineConfig()
    fields = {name: getattr(defaults, name) for name in SpeculationFlags.__struct_fields__}
    return msgspec.structs.replace(config, **fields | {"speculative_algorithm": PLAIN})
