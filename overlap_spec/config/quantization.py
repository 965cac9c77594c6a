"""`QuantizationScheme`: how the weights of a checkpoint are stored in fewer bits.

It is read from config.json (`hub/quantization.py`), before any weight. Activations stay in the model's own type in
every scheme and for every number of rows, also where a checkpoint was calibrated for quantised ones: the engine
computes `x @ dequantised(W).T`, for one row as for a window.
"""

import enum
import re

from msgspec import Struct

FP8 = "fp8"  # the one value of --quantization that changes how weights are loaded


class Stored(enum.Enum):
    """The tensors that hold the weight of a linear. The value is the format's name in messages."""

    FLOAT8 = "fp8 (e4m3) weights"
    AWQ = "AWQ int4 weights"
    GPTQ = "GPTQ int4 weights"
    PACKED = "compressed-tensors int4 weights"
    MXFP4 = "mxfp4 weights"
    MXFP4_PACKED = "compressed-tensors mxfp4 weights"
    NVFP4_PACKED = "compressed-tensors nvfp4 weights"
    MODELOPT_FP4 = "ModelOpt nvfp4 weights"
    PLAIN = "16-bit weights, quantised to fp8 (e4m3) while loading"


class Granularity(enum.Enum):
    """The weights that share a scale."""

    TENSOR = "tensor"
    CHANNEL = "row"  # of the weight, which is a channel of the result
    GROUP = "group"  # of columns of a row
    BLOCK = "block"  # of columns of several rows


class Activations(enum.Enum):
    """What a checkpoint was calibrated for. The engine does not quantise activations."""

    UNQUANTISED = "16 bits"
    DYNAMIC_TOKEN = "8 bits, scaled by token"
    STATIC_TENSOR = "8 bits, scaled by tensor"
    FLOAT4 = "4 bits, scaled by group"


class KvCacheScheme(Struct, frozen=True):
    """8-bit keys and values that a checkpoint has scales for (`self_attn.k_scale`, `v_scale`)."""

    bits: int = 8
    is_float: bool = True
    is_dynamic: bool = False


class QuantizationScheme(Struct, frozen=True, kw_only=True):
    """One format of the linears of a checkpoint."""

    name: str  # `quant_method` in config.json; a value of --quantization
    stored: Stored
    bits: int
    granularity: Granularity
    group_size: int | None = None  # columns that share a scale; None: whole rows
    block_rows: int = 1  # rows that share a scale, unless all do
    symmetric: bool = True  # no zero points
    activations: Activations = Activations.UNQUANTISED
    scale: str = "weight_scale"  # the end of the name of a weight's scale
    zero_offset: int = 0  # added to stored zero points (GPTQ's first version stores one less)
    targets: tuple[str, ...] = ()  # linears in this format: names, or patterns after `re:`; (): all but those ignored
    ignore: tuple[str, ...] = ()  # linears in 16 bits, likewise
    by_part: bool = False  # an ignored name may be any part of a linear's name
    kv_cache: KvCacheScheme | None = None

    def covers(self, *names: str) -> bool:
        """Whether a linear is quantised, by its names: the canonical one (`layers.0.mlp.down_proj`), those in files."""
        return (not self.targets or self._names(self.targets, names)) and not self._names(self.ignore, names)

    def _names(self, patterns: tuple[str, ...], names: tuple[str, ...]) -> bool:
        return any(_matches(pattern, name, self.by_part) for pattern in patterns for name in names)

    def __str__(self) -> str:
        shared = {
            Granularity.TENSOR: "a scale for each tensor",
            Granularity.CHANNEL: "a scale for each row",
            Granularity.GROUP: f"groups of {self.group_size}",
            Granularity.BLOCK: f"a scale for each {self.block_rows} x {self.group_size} block",
        }[self.granularity]
        return f"{self.stored.value}, {shared}{'' if self.symmetric else ', zero points'}; 16-bit activations"


def _matches(pattern: str, name: str, by_part: bool) -> bool:
    """The names of checkpoints begin with `model.`, canonical ones do not."""
    names = (name, f"model.{name}")
    if pattern.startswith("re:"):
        return any(re.match(pattern.removeprefix("re:"), each) for each in names)
    return pattern in names or (by_part and f".{pattern}." in f".model.{name}.")
