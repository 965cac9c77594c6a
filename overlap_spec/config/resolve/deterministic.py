"""`--enable-deterministic-inference`: refuses what cannot keep its promise, by name and before weights are read.

The promise: a request's tokens and log-probs have the bits of the request alone, by plain decoding, whatever the batch,
the window, the chunks of its prompt, and what was cached. It is kept on a CPU, in float32, by kernels whose sums have
one order for any number of rows; docs/correctness.md has the tests.
"""

from overlap_spec.config import EngineConfig, ModelFiles, SpecSettings
from overlap_spec.errors import ConfigError

FLAG = "enable_deterministic_inference"
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Olmo2", "Gemma3")  # all of whose layers the kernels run
HEAD_UNIT, LARGEST_HEAD = 16, 256  # of the attention kernel


def resolve_deterministic(config: EngineConfig, files: ModelFiles, device: str, dtype: str, spec: SpecSettings) -> bool:
    """Whether the flag is given. Raises: ConfigError naming it, or the flag that cannot go with it."""
    if not config.enable_deterministic_inference:
        return False
    if device != "cpu":
        raise ConfigError(
            FLAG,
            "keeps its promise on a CPU only: on a GPU the number of rows still chooses the order of some sums;"
            " leave it out, or use --device cpu",
        )
    for field, given in _unkept(config, dtype, spec).items():
        if given:
            raise ConfigError(field, f"cannot go with --enable-deterministic-inference: {given}")
    _check_model(config, files)
    return True


def _unkept(config: EngineConfig, dtype: str, spec: SpecSettings) -> dict[str, str | None]:
    """Flags, and why each cannot keep the promise; None: it does."""
    own = spec.accept.asked_by
    return {
        "dtype": None if dtype == "float32" else f"its kernels compute in float32, and this is {dtype}",
        "logit_processor": config.logit_processor and "nothing tells whether your function depends on other rows",
        "enable_torch_compile": "compiled code may add up in another order" if config.enable_torch_compile else None,
        "speculative_simulate_acc_len": "its tokens mean nothing" if spec.simulated_accept_lens else None,
        own or "": own and "tokens then depend on the draft's guesses",
        "kv_cache_dtype": None if config.kv_cache_dtype == "auto" else "its attention reads float32 pages",
        "tp_size": "sums over ranks are not tested for it" if config.tp_size > 1 else None,
        "quantization": config.quantization and "torch multiplies by such weights on a CPU",
        "feature": "nothing tells whether your package depends on other rows" if config.feature else None,
    }


def _check_model(config: EngineConfig, files: ModelFiles) -> None:
    values = files.config
    names = tuple(map(str, values.get("architectures") or ()))
    if not {f"{family}ForCausalLM" for family in FAMILIES}.intersection(names):
        known = ", ".join(FAMILIES)
        raise ConfigError(FLAG, f"is for models of {known}; {config.model_path} is {', '.join(names) or 'of no name'}")
    if values.get("quantization_config") is not None:
        raise ConfigError(
            FLAG, f"{config.model_path} is quantised, and torch multiplies by such weights on a CPU; use a .gguf file"
        )
    heads = int(values.get("num_attention_heads") or 1)
    head_dim = int(values.get("head_dim") or int(values.get("hidden_size") or 0) // heads)
    if head_dim % HEAD_UNIT or head_dim > LARGEST_HEAD:
        raise ConfigError(FLAG, f"needs heads of a multiple of 16 up to 256, and this model's have {head_dim}")
