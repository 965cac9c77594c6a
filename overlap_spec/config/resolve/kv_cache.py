"""Resolves the format of KV pages: the flag's, else the checkpoint's, else the model's dtype."""

from typing import Any

from overlap_spec.config import EngineConfig, ModelFiles, Settings
from overlap_spec.errors import ConfigError

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
