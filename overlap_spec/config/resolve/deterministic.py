"""`--enable-deterministic-inference`: refuses what cannot keep its promise, by name and before weights are read.

The promise: a request's tokens and log-probs have the bits of the request alone, by plain decoding, whatever the batch,
the window, the chunks of its prompt, and what was cached. It is kept by kernels whose sums have one order for any
number of rows: on a CPU in float32, on a GPU in 16 bits. Of layers that recur, a request's prompt decides which of its
positions chunks compute, and which windows (`Limits.drawn_apart`). docs/correctness.md has the tests.
"""

from collections.abc import Mapping
from typing import Any

from overlap_spec.config import EngineConfig, ModelFiles, SpecSettings
from overlap_spec.errors import ConfigError

FLAG = "enable_deterministic_inference"
RECURRING = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "GraniteMoeHybrid")
MIXTURES = ("Qwen3Moe", "Mixtral", "Glm4Moe", "GptOss")
LATENT = ("DeepseekV2", "DeepseekV3", "Glm4MoeLite")
DENSE = ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Olmo2", "Gemma3")
# Families of which a GPU takes few bits only as these checkpoints store them, with which they are tested.
IN_TESTED = ("Gemma4", *RECURRING, *MIXTURES, *LATENT)
TESTED_IN = {
    "fp8": ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "Qwen3Moe", "Mixtral", *LATENT),  # by blocks
    **dict.fromkeys(("awq", "gptq"), ("Qwen3_5", "Qwen3Moe", "Mixtral")),
    "mxfp4": ("GptOss",),
}
FAMILIES = {  # all of whose layers the kernels run, by device
    "cpu": (*DENSE, *RECURRING),
    "cuda": (*DENSE, *IN_TESTED),
}
TASKS = ("ForCausalLM", "ForConditionalGeneration")
DTYPES = {"cpu": ("float32",), "cuda": ("bfloat16", "float16")}
FORMATS = ("fp8", "awq", "gptq")  # of weights in few bits, for which a GPU has a kernel of one order
HEAD_UNIT, LARGEST_HEAD = 16, 256  # of the attention kernels
LARGE_HEAD = 512  # which a GPU's take too
GEMMA_HEAD = 256  # where its config does not say; the larger ones of Gemma 4 have 512
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
    if device == "cuda" and named(IN_TESTED).intersection(names):
        _check_format(config, stored if isinstance(stored, dict) else {}, names)
    elif stored is not None and method not in FORMATS:
        known = ", ".join(FORMATS)
        raise ConfigError(FLAG, f"{config.model_path} is quantised to {method}: on a GPU it is for {known} and 16 bits")
    if not named(LATENT).intersection(names):  # whose heads have a kernel of their own
        _check_heads(values, names, device)


def _check_heads(values: Mapping[str, Any], names: tuple[str, ...], device: str) -> None:
    heads, is_gemma = int(values.get("num_attention_heads") or 1), named(("Gemma3", "Gemma4")).intersection(names)
    default = GEMMA_HEAD if is_gemma else int(values.get("hidden_size") or 0) // heads
    sizes = [int(values.get("head_dim") or default)]
    if named(("Gemma4",)).intersection(names):
        sizes.append(int(values.get("global_head_dim") or LARGE_HEAD))
    for size in sizes:
        if (size % HEAD_UNIT or size > LARGEST_HEAD) and (device == "cpu" or size != LARGE_HEAD):
            also = "" if device == "cpu" else ", or of 512"
            raise ConfigError(FLAG, f"needs heads of a multiple of 16 up to 256{also}, and this model's have {size}")


def _check_format(config: EngineConfig, stored: dict[str, object], names: tuple[str, ...]) -> None:
    """Fewer than 16 bits: where the checkpoint has them, of the formats that are tested."""
    tested = [each for each, families in TESTED_IN.items() if named(families).intersection(names)]
    known = " and ".join(("16 bits", *(f"checkpoints in {each}" for each in tested))).replace("fp8", "fp8 by blocks")
    method = stored.get("quant_method")
    if config.quantization is not None:
        raise ConfigError(FLAG, f"is on a GPU for {known} of {', '.join(names)}, not for --quantization")
    by_tensor = method == "fp8" and not stored.get("weight_block_size")
    if method is not None and (method not in tested or by_tensor):
        raise ConfigError(FLAG, f"is on a GPU for {known} of {', '.join(names)}, not for this {method}")
