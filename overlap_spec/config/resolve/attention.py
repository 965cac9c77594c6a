"""Resolves the flags that name kernels, of attention and of experts, of which each device has one, and the format of KV
pages: the flag's, else the checkpoint's, else the model's dtype.
"""

from typing import Any

from overlap_spec.config import AttentionSettings, EngineConfig, ModelFiles, Settings, SpecSettings
from overlap_spec.errors import ConfigError

BACKENDS = ("auto", "triton", "torch")
RUNNERS = {"moe_runner_backend": "auto", "speculative_moe_runner_backend": None}  # and what they are by default
SENDERS = {"moe_a2a_backend": "none", "speculative_moe_a2a_backend": None}
OF_DRAFTS = (
    *("speculative_draft_attention_backend", "speculative_draft_window_size"),
    *("speculative_moe_runner_backend", "speculative_moe_a2a_backend"),
)


def resolve_attention(config: EngineConfig, spec: SpecSettings, device: str, notes: list[str]) -> AttentionSettings:
    """Resolve backends, the kernel of verify windows and the draft's sliding window.

    Raises: ConfigError naming the flag.
    """
    for field in (*OF_DRAFTS, "speculative_attention_mode"):
        if getattr(config, field) is not None and spec.width == 1:
            raise ConfigError(field, "has no effect without speculation; leave it out")
        if field in OF_DRAFTS and getattr(config, field) is not None and spec.draft_path is None:
            raise ConfigError(field, f"{spec.method} runs no draft model; leave it out")
    _check_experts(config, device)
    own, drafts = config.attention_backend, config.speculative_draft_attention_backend
    target_torch = _is_torch("attention_backend", own, device)
    return AttentionSettings(
        target_torch=target_torch,
        draft_torch=target_torch
        if drafts is None
        else _is_torch("speculative_draft_attention_backend", drafts, device),
        prefill_kernel=_is_prefill(config, spec, device, notes),
        draft_window=config.speculative_draft_window_size,
    )


def _check_experts(config: EngineConfig, device: str) -> None:
    for field, default in RUNNERS.items():
        name = getattr(config, field)
        if name not in (default, "auto", "triton"):
            raise ConfigError(
                field,
                f"must be auto or triton, got {name!r}; no other library is needed: auto runs our Triton kernels on a"
                " GPU and torch on a CPU",
            )
        if name == "triton" and device == "cpu":
            raise ConfigError(field, "triton kernels run on a GPU, and this engine runs on a CPU; use auto")
    for field, default in SENDERS.items():
        if (name := getattr(config, field)) not in (default, "none"):
            raise ConfigError(field, f"must be none, got {name!r}: one GPU has all experts; use none")


def _is_torch(field: str, name: str, device: str) -> bool:
    if name not in BACKENDS:
        raise ConfigError(
            field,
            f"must be auto, triton or torch, got {name!r}; no other library is needed: auto runs our Triton kernels on"
            " a GPU and torch on a CPU",
        )
    if name == "triton" and device == "cpu":
        raise ConfigError(field, "triton kernels run on a GPU, and this engine runs on a CPU; use auto or torch")
    return name == "torch" and device != "cpu"  # a CPU always runs torch


def _is_prefill(config: EngineConfig, spec: SpecSettings, device: str, notes: list[str]) -> bool:
    mode = config.speculative_attention_mode
    if mode is not None and spec.has_trees:
        raise ConfigError(
            "speculative_attention_mode", "trees have a kernel of their own; leave it out, or guess chains"
        )
    if mode is not None and device == "cpu":
        notes.append(f"speculative_attention_mode {mode} is not used: a CPU attends in one way")
    return mode == "prefill" and device != "cpu"


EIGHT_BITS = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}  # by flag: torch's names
ALIASES = {"bf16": "bfloat16"}


def resolve_kv_dtype(config: EngineConfig, files: ModelFiles, dtype: str, notes: list[str]) -> str | None:
    """Torch's name of the format; None is the model's dtype. Raises: ConfigError naming the flag."""
    asked = ALIASES.get(config.kv_cache_dtype, config.kv_cache_dtype)
    if asked == "auto":
        return _stored(files.config, dtype, notes)
    if asked in EIGHT_BITS:
        return EIGHT_BITS[asked]
    if asked != dtype:
        raise ConfigError(
            "kv_cache_dtype", f"{asked} beside --dtype {dtype}: KV pages have the model's type (auto) or 8 bits"
        )
    return None


def shown_kv_dtype(settings: Settings) -> str:
    """The format as its flag names it."""
    names = {dtype: flag for flag, dtype in EIGHT_BITS.items()}
    kv_dtype = settings.cache.kv_dtype
    return settings.model.dtype if kv_dtype is None else names[kv_dtype]


def _stored(config: dict[str, Any], dtype: str, notes: list[str]) -> str | None:
    """What the checkpoint was calibrated for, as its `quantization_config` states."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return None
    scheme = quantization.get("kv_cache_scheme")  # compressed-tensors, ModelOpt
    algorithm = quantization.get("kv_cache_quant_algo")  # ModelOpt before that
    if scheme is None and algorithm is None:
        return None
    is_fp8 = str(algorithm).upper() == "FP8"
    if isinstance(scheme, dict):
        is_fp8 = (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    if is_fp8:
        return EIGHT_BITS["fp8_e4m3"]
    found = f"kv_cache_scheme {scheme}" if scheme is not None else f"kv_cache_quant_algo {algorithm}"
    notes.append(
        f"the checkpoint's {found} is not read: KV pages have --dtype {dtype}; --kv-cache-dtype fp8_e4m3 has 8 bits"
    )
    return None
