"""From what is asked to what is run: every automatic value is settled here, once, and printed at start.

Not here: what there is to ask (`config.py`). `resolve` is pure: the same request on the same machine gives the same
settings. The one exception is what only the worker can measure (page count, chunk size), which travels in WorkerReady.
"""

from typing import Any, get_args

import msgspec

from overlap_spec.config import (
    LANGUAGE_MODEL_DRAFTS,
    LANGUAGE_MODEL_SPEC,
    MTP,
    OWN_LAYER,
    PLAIN,
    TOKEN_MAPPED,
    AcceptSettings,
    Algorithm,
    CacheSettings,
    EngineConfig,
    LinkSettings,
    Machine,
    ModelFiles,
    ModelSettings,
    SchedulerSettings,
    ServerSettings,
    Settings,
    SpecSettings,
    WidthRule,
    synthetic_acceptance,
)
from overlap_spec.errors import ConfigError
from overlap_spec.width_rules import read_width_rules

DEFAULT_RUNNING_WITH_SPECULATION = 48  # SGLang's
DEFAULT_COMPILED_BATCH = 32  # SGLang's
DEFAULT_RUNNING_PLAIN = {"cpu": 48, "cuda": 256}
SPIN_S = 0.02  # longer than a decode step of a large model
SPIN_CORES = 6  # two that poll, and enough for tokenizer, server and the client's side


def resolve(config: EngineConfig, files: ModelFiles, machine: Machine) -> tuple[Settings, list[str]]:
    """Settle every automatic value. Returns the settings and notes for the log (what was adjusted, and why).

    Raises: ConfigError naming the flag.
    """
    notes: list[str] = []
    spec = _with_bench_flags(_resolve_spec(config, files, notes), config, notes)
    rules = _resolve_rules(config, spec)
    spec = _with_widths(spec, config, rules)
    spec = msgspec.structs.replace(spec, accept=_resolve_accept(config, spec))
    device = _resolve_device(config, machine)
    depth = 1 if config.disable_overlap_schedule else 2
    running = config.max_running_requests
    if running is None:
        running = DEFAULT_RUNNING_PLAIN[device] if spec.width == 1 else DEFAULT_RUNNING_WITH_SPECULATION
    graph_batch_sizes = _resolve_graphs(config, device, running, notes)
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
            max_running_requests=running,
            depth=depth,
            chunk_tokens=_resolve_chunk(config),
            seed=config.random_seed,
            width_rules=rules,
            width_padding=graph_batch_sizes if rules else (),
            synthetic_acceptance=spec.simulated_accept_len is not None,
        ),
        server=ServerSettings(host=config.host, port=config.port, api_key=config.api_key),
        link=LinkSettings(client_endpoint=_resolve_endpoint(config), api_key=config.api_key),
        skip_tokenizer_init=config.skip_tokenizer_init,
        log_level=config.log_level,
        num_threads=machine.num_cores,
        graph_batch_sizes=graph_batch_sizes,
        compile_max_batch=_resolve_compile(config, device),
        spin_s=SPIN_S if device == "cuda" and machine.num_cores >= SPIN_CORES else 0.0,
    )
    return settings, notes


def _resolve_graphs(config: EngineConfig, device: str, running: int, notes: list[str]) -> tuple[int, ...]:
    """1, 2, 4, 8, then steps of 8, 16 and 32, up to the largest batch. A batch is padded to the next size.

    `--cuda-graph-bs` names the sizes instead; those that cannot run are left out, as in SGLang.
    """
    for field in ("cuda_graph_max_bs", "cuda_graph_bs"):
        asked = getattr(config, field)
        if asked is not None and config.disable_cuda_graph:
            raise ConfigError(field, "has no effect with --disable-cuda-graph; leave one of them out")
        if asked is not None and device == "cpu":
            notes.append(f"{field} {asked} is not used: there are no CUDA graphs on a CPU")
    if device == "cpu" or config.disable_cuda_graph:
        return ()
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


def _resolve_compile(config: EngineConfig, device: str) -> int:
    """As in SGLang, compiling is a part of capturing."""
    if not config.enable_torch_compile:
        if config.torch_compile_max_bs is not None:
            raise ConfigError("torch_compile_max_bs", "has no effect without --enable-torch-compile; leave it out")
        return 0
    if device == "cpu":
        raise ConfigError("enable_torch_compile", "compiles what CUDA graphs capture, and there are none on a CPU")
    if config.disable_cuda_graph:
        raise ConfigError("enable_torch_compile", "compiles what is captured: it cannot go with --disable-cuda-graph")
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
    address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not (address and port.isdecimal() and int(port) < 1 << 16):  # ZeroMQ would take 99999 for another port
        raise ConfigError(
            "zmq_endpoint", f"must look like tcp://127.0.0.1:5555 (port 0: any free one), got {endpoint!r}"
        )
    if address.strip("[]") not in ("127.0.0.1", "localhost", "::1") and config.api_key is None:
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
    asked = (method, config.speculative_draft_model_path, config.speculative_token_map, *numbers)
    if all(flag is None for flag in asked):
        if files.preset_spec is None:
            return SpecSettings(PLAIN, None, 0, 0, 1)
        preset, num_steps, topk, width = files.preset_spec
        return SpecSettings(preset, files.preset_draft, num_steps, topk, width)
    if method is None:
        known = ", ".join(get_args(Algorithm))
        raise ConfigError(
            "speculative_algorithm", f"missing: another --speculative flag was given; name one of {known}"
        )
    if method == PLAIN:
        _refuse_with_none(config)
        return SpecSettings(PLAIN, None, 0, 0, 1)
    has_preset = files.preset_spec is not None and files.preset_spec[0] == method
    draft = config.speculative_draft_model_path or (files.preset_draft if has_preset else None)
    if draft is None and method in OWN_LAYER and _has_mtp_layer(files):
        method, draft = MTP, files.weights
    if draft is None:
        raise ConfigError("speculative_draft_model_path", f"{method} needs a draft model: give its directory or hub id")
    num_steps, width = _resolve_numbers(config, files, notes)
    return SpecSettings(method, draft, num_steps, 1, width, token_map=_resolve_token_map(config, method))


def _has_mtp_layer(files: ModelFiles) -> bool:
    """Whether the target's checkpoint brings what drafts for it; its config says so.

    Raises: ConfigError if it brings a layer for each guess.
    """
    num_layers = files.config.get("num_nextn_predict_layers") or 0
    if num_layers > 1:
        raise ConfigError(
            "speculative_algorithm",
            f"the target brings {num_layers} MTP layers, one for each guess (--enable-multi-layer-eagle), which is not"
            " supported yet; name a draft head with --speculative-draft-model-path",
        )
    return num_layers == 1


def _resolve_token_map(config: EngineConfig, method: str) -> str | None:
    path = config.speculative_token_map
    if path is not None and method not in TOKEN_MAPPED:
        raise ConfigError(
            "speculative_token_map",
            f"{method} heads have a vocabulary of their own, with a map in the checkpoint (d2t); leave it out, or use"
            f" {' or '.join(TOKEN_MAPPED)}",
        )
    return path


def _resolve_accept(config: EngineConfig, spec: SpecSettings) -> AcceptSettings:
    """Matching, unless something else is asked for."""
    single, acc = config.speculative_accept_threshold_single, config.speculative_accept_threshold_acc
    accept = AcceptSettings(config.speculative_use_rejection_sampling, single or 1.0, acc or 1.0)
    if accept == AcceptSettings():
        return accept
    threshold = f"speculative_accept_threshold_{'single' if accept.threshold_single < 1 else 'acc'}"
    if accept.rejection and accept.thresholds:
        raise ConfigError(threshold, "must be 1.0 with --speculative-use-rejection-sampling, which has no thresholds")
    field = threshold if accept.thresholds else "speculative_use_rejection_sampling"
    if spec.width == 1:
        raise ConfigError(field, "has no effect without speculation; leave it out")
    if config.enable_torch_compile:
        raise ConfigError("enable_torch_compile", f"compiles a sampler that --{field.replace('_', '-')} does not use")
    return accept


def _with_bench_flags(spec: SpecSettings, config: EngineConfig, notes: list[str]) -> SpecSettings:
    """Where the draft's weights come from, and whether acceptance is made up. Explicit numbers are not needed here."""
    mean = config.speculative_simulate_acc_len
    if spec.width == 1:
        for field in ("speculative_draft_load_format", "speculative_simulate_acc_len"):
            if getattr(config, field) is not None:
                raise ConfigError(field, "has no effect without speculation; leave it out")
        return spec
    if mean is not None:
        if mean > spec.width:
            raise ConfigError(
                "speculative_simulate_acc_len", f"a step commits at most {spec.width} tokens (the window), got {mean}"
            )
        notes.append(synthetic_acceptance(mean))
    inherited = "auto" if config.load_format == "gguf" else config.load_format  # a draft is never a .gguf file
    return msgspec.structs.replace(
        spec, draft_load_format=config.speculative_draft_load_format or inherited, simulated_accept_len=mean
    )


def _resolve_rules(config: EngineConfig, spec: SpecSettings) -> tuple[WidthRule, ...]:
    """The one file that is read here: it is part of what is asked, as the flag that names it."""
    if spec.width == 1 and config.speculative_adaptive:
        raise ConfigError("speculative_adaptive", "has no effect without speculation; leave it out")
    path = config.speculative_adaptive_config
    if path is None:
        return ()
    if not config.speculative_adaptive:
        raise ConfigError("speculative_adaptive_config", "has no effect without --speculative-adaptive")
    return read_width_rules(path, config.speculative_num_steps)


def _with_widths(spec: SpecSettings, config: EngineConfig, rules: tuple[WidthRule, ...]) -> SpecSettings:
    """Explicit numbers are kept, unless the flag says that they are where to begin."""
    if rules:
        *fewer, num_steps = sorted({steps for rule in rules for steps in rule.candidate_steps})
        narrower = tuple(steps + 1 for steps in fewer)
        return msgspec.structs.replace(spec, num_steps=num_steps, width=num_steps + 1, narrower=narrower)
    fixed = config.speculative_num_steps is not None and not config.speculative_adaptive
    if fixed or spec.width == 1:
        return spec
    return msgspec.structs.replace(spec, narrower=tuple(w for w in range(1, spec.width) if w <= 3 or w % 2 == 0))


def _refuse_with_none(config: EngineConfig) -> None:
    for field in config.__struct_fields__:
        is_given = getattr(config, field) not in (None, False)
        if field.startswith("speculative_") and field != "speculative_algorithm" and is_given:
            raise ConfigError(field, "has no effect with --speculative-algorithm NONE; leave it out")


def _resolve_numbers(config: EngineConfig, files: ModelFiles, notes: list[str]) -> tuple[int, int]:
    """Returns (num_steps, width); all three numbers or none, as in SGLang."""
    steps, topk, tokens = (
        config.speculative_num_steps,
        config.speculative_eagle_topk,
        config.speculative_num_draft_tokens,
    )
    if steps is None and topk is None and tokens is None:
        if config.speculative_algorithm in LANGUAGE_MODEL_DRAFTS:
            steps, _, width = LANGUAGE_MODEL_SPEC
            notes.append(f"speculative numbers set to {LANGUAGE_MODEL_SPEC}: the default of a language model as draft")
            return steps, width
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
        "speculative_draft_load_format": spec.draft_load_format if speculating else None,
        "speculative_num_steps": spec.num_steps if speculating else None,
        "speculative_eagle_topk": spec.topk if speculating else None,
        "speculative_num_draft_tokens": spec.width if speculating else None,
        "speculative_adaptive": bool(spec.narrower),
        "verification": str(spec.accept) if speculating else None,
        "speculative_accept_threshold_single": spec.accept.threshold_single if speculating else None,
        "speculative_accept_threshold_acc": spec.accept.threshold_acc if speculating else None,
    }


def without_speculation(config: EngineConfig) -> EngineConfig:
    """The same engine, decoding plainly: what speculation is compared with."""
    defaults = EngineConfig()
    fields = {name: getattr(defaults, name) for name in config.__struct_fields__ if name.startswith("speculative_")}
    return msgspec.structs.replace(config, **fields | {"speculative_algorithm": PLAIN})
