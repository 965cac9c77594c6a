"""Resolves the flags that name kernels: of attention, and of experts, of which each device has one."""

from overlap_spec.config import AttentionSettings, EngineConfig, SpecSettings
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
    if mode is not None and spec.topk > 1:
        raise ConfigError(
            "speculative_attention_mode", "trees have a kernel of their own; leave it out, or guess chains"
        )
    if mode is not None and device == "cpu":
        notes.append(f"speculative_attention_mode {mode} is not used: a CPU attends in one way")
    return mode == "prefill" and device != "cpu"
