"""`--enable-deterministic-inference`: refuses what cannot keep its promise, by name and before weights are read.

The promise: a request's tokens and log-probs have the bits of the request alone, by plain decoding, whatever the batch,
the window, the chunks of its prompt, and what was cached. It is kept by kernels whose sums have one order for any
number of rows: on a CPU in float32, on a GPU in 16 bits. Of layers that recur, a request's prompt decides which of its
positions chunks compute, and which windows (`Limits.drawn_apart`). docs/correctness.md has the tests.
"""

from overlap_spec.config import EngineConfig, ModelFiles, SpecSettings
from overlap_spec.errors import ConfigError

FLAG = "enable_deterministic_inference"
RECURRING = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "GraniteMoeHybrid")
# Weights of few bits with which layers that recur are tested on a GPU, as checkpoints store them.
RECURRING_IN = {"fp8": ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe"), "awq": ("Qwen3_5",), "gptq": ("Qwen3_5",)}
FAMILIES = {  # all of whose layers the kernels run, by device
    "cpu": ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Olmo2", "Gemma3", *RECURRING),
    "cuda": ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", *RECURRING),
}
TASKS = ("ForCausalLM", "ForConditionalGeneration")
DTYPES = {"cpu": ("float32",), "cuda": ("bfloat16", "float16")}
FORMATS = ("fp8", "awq", "gptq")  # of weights in few bits, for which a GPU has a kernel of one order
HEAD_UNIT, LARGEST_HEAD = 16, 256  # of the attention kernels
ONLY_CHAINS = "on a GPU, --enable-deterministic-inference is kept for rows of chains only"


def only_chains(config: EngineConfig, device: str) -> str:
    """Why guesses must be chains; empty: they need not."""
    return ONLY_CHAINS if config.enable_deterministic_inference and device == "cuda" else ""


def resolve_deterministic(config: EngineConfig, files: ModelFiles, device: str, dtype: str, spec: SpecSettings) -> bool:
    """Whether the flag is given. Raises: ConfigError naming it, or the flag that cannot go with it."""
    if not config.enable_deterministic_inference:
        return False
    of_device = _unkept_on_gpu(config) if device == "cuda" else _unkept_on_cpu(config)
    unkept = _unkept(config, device, dtype, spec) | of_device
    for field, given in unkept.items():
        if given:
            raise ConfigError(field, f"cannot go with --enable-deterministic-inference: {given}")
    _check_model(config, files, device)
    return True


def _unkept(config: EngineConfig, device: str, dtype: str, spec: SpecSettings) -> dict[str, str | None]:
    """Flags, and why each cannot keep the promise; None: it does."""
    own = spec.accept.asked_by
    known = DTYPES[device]
    return {
        "dtype": None if dtype in known else f"its kernels compute in {' and '.join(known)}, and this is {dtype}",
        "logit_processor": config.logit_processor and "nothing tells whether your function depends on other rows",
        "enable_torch_compile": "compiled code may add up in another order" if config.enable_torch_compile else None,
        "speculative_simulate_acc_len": "its tokens mean nothing" if spec.simulated_accept_lens else None,
        own or "": own and "tokens then depend on the draft's guesses",
        "tp_size": "sums over ranks are not tested for it" if config.tp_size > 1 else None,
        "feature": "nothing tells whether your package depends on other rows" if config.feature else None,
    }


def _unkept_on_cpu(config: EngineConfig) -> dict[str, str | None]:
    return {
        "kv_cache_dtype": None if config.kv_cache_dtype == "auto" else "its attention reads float32 pages",
        "quantization": config.quantization and "torch multiplies by such weights on a CPU",
    }


def _unkept_on_gpu(config: EngineConfig) -> dict[str, str | None]:
    torch_attends, asked = config.attention_backend == "torch", config.quantization
    known = asked is None or asked in FORMATS
    return {
        "quantization": None if known else f"weights in {', '.join(FORMATS)} are added up in one order, {asked} not",
        "attention_backend": "torch's attention may add up in another order" if torch_attends else None,
    }


def named(families: tuple[str, ...]) -> set[str]:
    """Their architectures."""
    return {family + task for family in families for task in TASKS}


def _check_model(config: EngineConfig, files: ModelFiles, device: str) -> None:
    values = files.config
    names = tuple(map(str, values.get("architectures") or ()))
    if not named(FAMILIES[device]).intersection(names):
        where, known = {"cpu": "", "cuda": " on a GPU"}[device], ", ".join(FAMILIES[device])
        raise ConfigError(
            FLAG, f"is{where} for models of {known}; {config.model_path} is {', '.join(names) or 'of no name'}"
        )
    stored = values.get("quantization_config")
    method = stored.get("quant_method") if isinstance(stored, dict) else stored
    if stored is not None and device == "cpu":
        why = "torch multiplies by such weights on a CPU; use a .gguf file"
        raise ConfigError(FLAG, f"{config.model_path} is quantised, and {why}")
    if device == "cuda" and named(RECURRING).intersection(names):
        _check_recurring(config, stored if isinstance(stored, dict) else {}, names)
    if stored is not None and method not in FORMATS:
        known = ", ".join(FORMATS)
        raise ConfigError(FLAG, f"{config.model_path} is quantised to {method}: on a GPU it is for {known} and 16 bits")
    heads = int(values.get("num_attention_heads") or 1)
    head_dim = int(values.get("head_dim") or int(values.get("hidden_size") or 0) // heads)
    if head_dim % HEAD_UNIT or head_dim > LARGEST_HEAD:
        raise ConfigError(FLAG, f"needs heads of a multiple of 16 up to 256, and this model's have {head_dim}")


def _check_recurring(config: EngineConfig, stored: dict[str, object], names: tuple[str, ...]) -> None:
    """Fewer than 16 bits: where the checkpoint has them, of the formats that are tested."""
    known = "16 bits, a checkpoint in fp8 by blocks and, of dense models, awq and gptq"
    method = stored.get("quant_method")
    if config.quantization is not None:
        raise ConfigError(FLAG, f"is on a GPU for {known} of {', '.join(names)}, not for --quantization")
    tested = named(RECURRING_IN.get(str(method), ())).intersection(names)
    by_tensor = method == "fp8" and not stored.get("weight_block_size")
    if method is not None and (not tested or by_tensor):
        raise ConfigError(FLAG, f"is on a GPU for {known} of {', '.join(names)}, not for this {method}")
