"""Reads the quantisation of a checkpoint from its config.json, and refuses by name what cannot be computed.

A format is one line of `FORMATS` and a function. What its tensors hold is in `models/quantization/`.

    compressed-tensors   float-quantized (fp8), pack-quantized (int4), nvfp4-pack-quantized, mxfp4-pack-quantized
    fp8                  a scale for each tensor, or for each 128 x 128 block (DeepSeek, Qwen)
    awq, gptq            int4 in groups
    mxfp4                4-bit floats in groups of 32: experts alone (gpt-oss)
    modelopt             4-bit floats in groups of 16 (nvfp4), by config.json or hf_quant_config.json
    --quantization fp8   16-bit weights, quantised while loading
"""

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from overlap_spec.config.quantization import (
    FP8,
    Activations,
    Granularity,
    KvCacheScheme,
    QuantizationScheme,
    Stored,
)
from overlap_spec.errors import CheckpointError

GROUPS = (32, 64, 128)
PATTERN = "re:"  # before a regular expression among names
LINEARS = "Linear"  # among names, all linears
TARGET = re.compile(rf"{LINEARS}$|lm_head$|{PATTERN}|[^.]+\.")  # other names are classes of modules
ALL_BUT_EXPERTS = rf"{PATTERN}(?!.*\.experts\b)"
UNQUANTISED = "unquant"  # the value of --speculative-draft-model-quantization that reads a draft in 16 bits
WHILE_LOADING = QuantizationScheme(name=FP8, stored=Stored.PLAIN, bits=8, granularity=Granularity.CHANNEL)
USABLE = (
    "fp8, int4, nvfp4 or mxfp4 weights (compressed-tensors, fp8, awq, gptq, mxfp4 or modelopt), or 16-bit ones with"
    " --quantization fp8"
)
FLOAT4_GROUP = 16  # columns of nvfp4 that share a scale
FLOAT4_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")


@dataclass(frozen=True)
class Section:
    """A part of config.json and where it is, for messages. All methods raise CheckpointError naming file and key."""

    values: Mapping[str, Any]
    origin: str

    def refuse(self, key: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.origin}: {key} {self.values.get(key)!r} is not supported; expected {expected}")

    def expect(self, key: str, *supported: Any) -> None:
        """`supported`: values that the key may have. A key that is null or missing passes."""
        value = self.values.get(key)
        if value is not None and value not in supported:
            raise self.refuse(key, " or ".join(map(repr, supported)))

    def of(self, key: str) -> "Section":
        """An object within it; an empty one if it is missing."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.refuse(key, "an object")
        return Section(value or {}, f"{self.origin}: {key}")

    def names(self, *keys: str) -> tuple[str, ...]:
        """The names of linears in the first of these keys that is there; their patterns must compile."""
        key = next((key for key in keys if self.values.get(key)), keys[0])
        found = self.values.get(key) or ()
        if not isinstance(found, list | tuple) or not all(isinstance(name, str) for name in found):
            raise self.refuse(key, "a list of names")
        for name in found:
            self.expect_pattern(key, name, name.removeprefix(PATTERN) if name.startswith(PATTERN) else "")
        return tuple(found)

    def expect_pattern(self, key: str, name: str, pattern: str) -> None:
        """`name`: what the key has, of which `pattern` is to compile."""
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckpointError(f"{self.origin}: {key}: {name!r} is no regular expression ({error})") from None

    def group_size(self, key: str = "group_size") -> int | None:
        """Columns that share a scale; None for -1, which means whole rows."""
        size = self.values.get(key)
        if size == -1:
            return None
        if isinstance(size, bool) or size not in GROUPS:
            raise self.refuse(key, f"{', '.join(map(str, GROUPS))} or -1")
        return int(size)


def quantization_scheme(
    config: Mapping[str, Any], origin: str, asked: str | None = None, flag: str = "--quantization"
) -> QuantizationScheme | None:
    """The scheme of a checkpoint by its config.json; None if its weights are 16 bits or wider.

    `asked`: what `flag` asks for. Raises: CheckpointError naming file and key, or the flag.
    """
    found = Section(config, origin).of("quantization_config")
    if asked == UNQUANTISED or not found.values:
        return _asked_for(asked, flag, origin)
    method = str(found.values.get("quant_method") or "unnamed")
    found = Section(found.values, f"{found.origin} ({method})")
    if method not in FORMATS:
        why = REFUSED.get(method, "it is not known")
        raise CheckpointError(f"{found.origin} is not supported: {why}; use {USABLE}")
    scheme = FORMATS[method](found)
    if asked not in (None, scheme.name) and not (asked == FP8 and scheme.stored is Stored.FLOAT8):
        raise CheckpointError(f"{origin}: {flag} {asked}: the checkpoint is stored as {scheme.name}; leave it out")
    return scheme


def _asked_for(asked: str | None, flag: str, origin: str) -> QuantizationScheme | None:
    if asked in (None, UNQUANTISED):
        return None
    if asked != FP8:
        raise CheckpointError(f"{origin}: {flag} {asked}: the checkpoint has 16-bit weights; use fp8, or leave it out")
    return WHILE_LOADING


def _fp8(config: Section) -> QuantizationScheme:
    """`weight_scale_inv` of blocks is multiplied by, like any scale."""
    config.expect("fmt", "e4m3", "float8_e4m3fn")
    config.expect("activation_scheme", "dynamic", "static")
    is_static = config.values.get("activation_scheme") == "static"
    block = config.values.get("weight_block_size")
    if block not in (None, [128, 128]):
        raise config.refuse("weight_block_size", "[128, 128]")
    return QuantizationScheme(
        name=FP8,
        stored=Stored.FLOAT8,
        bits=8,
        granularity=Granularity.TENSOR if block is None else Granularity.BLOCK,
        group_size=None if block is None else 128,
        block_rows=1 if block is None else 128,
        activations=Activations.STATIC_TENSOR if is_static else Activations.DYNAMIC_TOKEN,
        scale="weight_scale" if block is None else "weight_scale_inv",
        ignore=config.names("modules_to_not_convert", "ignored_layers"),
        by_part=True,
        kv_cache=_kv_cache(config),
    )


def _awq(config: Section) -> QuantizationScheme:
    values = dict(config.values)
    for new, old in (("bits", "w_bit"), ("group_size", "q_group_size")):
        values.setdefault(new, values.get(old))
    config = Section(values, config.origin)
    _expect_bits(config, 4)
    config.expect("version", "gemm", "GEMM")
    config.expect("zero_point", True)
    return QuantizationScheme(
        name="awq",
        stored=Stored.AWQ,
        bits=4,
        granularity=_granularity(config.group_size()),
        group_size=config.group_size(),
        symmetric=False,
        scale="scales",
        ignore=config.names("modules_to_not_convert"),
        by_part=True,
    )


def _gptq(config: Section) -> QuantizationScheme:
    _expect_bits(config, 4)
    if config.values.get("desc_act"):
        raise config.refuse("desc_act", "false (weights that were quantised in the order of their columns)")
    config.expect("checkpoint_format", "gptq", "gptq_v2")
    return QuantizationScheme(
        name="gptq",
        stored=Stored.GPTQ,
        bits=4,
        granularity=_granularity(config.group_size()),
        group_size=config.group_size(),
        symmetric=bool(config.values.get("sym", True)),
        scale="scales",
        zero_offset=0 if config.values.get("checkpoint_format") == "gptq_v2" else 1,
        ignore=(*config.names("modules_to_not_convert"), *_left_out(config)),
        by_part=True,
    )


def _left_out(config: Section) -> tuple[str, ...]:
    """The linears in 16 bits by GPTQModel's `dynamic`: of its rules the first that a name begins with counts.

    A rule after `-:` leaves linears out, another one may give them a format of their own: it must be that of all.
    """
    rules, left_out, others = config.of("dynamic"), [], ""
    for rule in rules.values:
        pattern = rule[2:] if rule.startswith(("-:", "+:")) else rule
        config.expect_pattern("dynamic", rule, pattern)
        if rule.startswith("-:"):
            left_out.append(f"{PATTERN}{others}(?:{pattern})")
            continue
        own = rules.of(rule)
        for key in own.values:
            own.expect(key, config.values.get(key))
        others += f"(?!{pattern})"
    return tuple(left_out)


def _mxfp4(config: Section) -> QuantizationScheme:
    """Of gpt-oss: only experts are stored so, also where the config does not name the others."""
    return QuantizationScheme(
        name="mxfp4",
        stored=Stored.MXFP4,
        bits=4,
        granularity=Granularity.GROUP,
        group_size=32,
        scale="scales",
        ignore=(*config.names("modules_to_not_convert"), ALL_BUT_EXPERTS),
        by_part=True,
    )


def _modelopt(config: Section) -> QuantizationScheme:
    """As Model Optimizer writes it since 0.29 (NVIDIA/Model-Optimizer at a2fbac7b, where it converts the config).

    Before that it wrote hf_quant_config.json alone, whose keys are a part of these.
    """
    if config.values.get("quant_algo") not in FLOAT4_ALGORITHMS:
        raise config.refuse("quant_algo", " or ".join(FLOAT4_ALGORITHMS))
    config.expect("group_size", FLOAT4_GROUP)
    config.expect("has_zero_point", False)
    config.expect("pre_quant_scale", False)
    groups = config.of("config_groups")
    for name in groups.values:
        groups.of(name).of("weights").expect("group_size", FLOAT4_GROUP)
    config.expect("kv_cache_quant_algo", "FP8")
    has_keys = config.values.get("kv_cache_quant_algo") is not None
    return QuantizationScheme(
        name="modelopt_fp4",
        stored=Stored.MODELOPT_FP4,
        bits=4,
        granularity=Granularity.GROUP,
        group_size=FLOAT4_GROUP,
        activations=Activations.FLOAT4 if config.values["quant_algo"] == "NVFP4" else Activations.UNQUANTISED,
        ignore=tuple(_as_pattern(name) for name in config.names("ignore", "exclude_modules")),
        by_part=True,
        kv_cache=KvCacheScheme() if has_keys else _kv_cache(config),
    )


def _as_pattern(name: str) -> str:
    """A name in which a star is any letters."""
    return f"{PATTERN}{fnmatch.translate(name)}" if "*" in name else name


def _compressed_tensors(config: Section) -> QuantizationScheme:
    config.expect("quantization_status", "compressed")
    sparsity = config.of("sparsity_config")
    sparsity.expect("format", "dense")
    groups = config.of("config_groups")
    found = [_of_group(config, groups.of(name)) for name in groups.values]
    if not found:
        raise config.refuse("config_groups", "a group of linears")
    first = found[0]
    for name, other in zip(groups.values, found, strict=True):
        if replace(other, targets=first.targets, activations=first.activations) != first:
            raise CheckpointError(f"{groups.origin}: {name}: found {other}, expected the first group's {first}")
    targets = [target for each in found for target in each.targets]
    return replace(first, targets=() if LINEARS in targets else tuple(targets))


def _of_group(config: Section, group: Section) -> QuantizationScheme:
    """The format of some linears. A target is a class of modules, of which one is known, a name or a pattern."""
    targets = group.names("targets")
    if not targets or not all(TARGET.match(each) for each in targets):
        raise group.refuse("targets", f"{LINEARS!r}, names of linears, or patterns after {PATTERN!r}")
    of_format = group if group.values.get("format") else config
    reader = COMPRESSED.get(str(of_format.values.get("format")))
    if reader is None:
        raise of_format.refuse("format", " or ".join(map(repr, COMPRESSED)))
    return replace(reader(config, group), targets=targets)


def _float_quantized(config: Section, group: Section) -> QuantizationScheme:
    weights, inputs = group.of("weights"), group.of("input_activations")
    _expect(weights, {"num_bits": (8,), "type": ("float",), "symmetric": (True,), "dynamic": (False,)})
    weights.expect("strategy", "tensor", "channel", "block")
    strategy = weights.values.get("strategy") or "tensor"
    block = weights.values.get("block_structure")
    if strategy == "block" and block not in ([128, 128], "128x128"):
        raise weights.refuse("block_structure", "[128, 128]")
    return QuantizationScheme(
        name="compressed-tensors",
        stored=Stored.FLOAT8,
        bits=8,
        granularity={"tensor": Granularity.TENSOR, "channel": Granularity.CHANNEL}.get(strategy, Granularity.BLOCK),
        group_size=128 if strategy == "block" else None,
        block_rows=128 if strategy == "block" else 1,
        activations=_activations(inputs),
        ignore=config.names("ignore"),
        kv_cache=_kv_cache(config),
    )


def _pack_quantized(config: Section, group: Section) -> QuantizationScheme:
    weights = group.of("weights")
    _expect(weights, {"num_bits": (4,), "type": ("int",), "strategy": ("group", "channel"), "dynamic": (False,)})
    if group.values.get("input_activations"):
        raise group.refuse("input_activations", "null: int4 weights are for 16-bit activations")
    if weights.values.get("actorder") in ("group", "dynamic", True):
        raise weights.refuse("actorder", "null or 'weight', whose groups are columns side by side")
    size = None if weights.values.get("strategy") == "channel" else weights.group_size()
    return QuantizationScheme(
        name="compressed-tensors",
        stored=Stored.PACKED,
        bits=4,
        granularity=_granularity(size),
        group_size=size,
        symmetric=weights.values.get("symmetric") is not False,
        ignore=config.names("ignore"),
        kv_cache=_kv_cache(config),
    )


def _float4_packed(config: Section, group: Section) -> QuantizationScheme:
    weights, inputs = group.of("weights"), group.of("input_activations")
    _expect(weights, {"num_bits": (4,), "type": ("float",), "strategy": ("tensor_group",), "group_size": (16,)})
    _expect(weights, {"symmetric": (True,), "dynamic": (False,)})
    _expect(inputs, {"num_bits": (4,), "type": ("float",)})
    return _float4(config, Stored.NVFP4_PACKED, FLOAT4_GROUP, inputs)


def _mxfp4_packed(config: Section, group: Section) -> QuantizationScheme:
    weights, inputs = group.of("weights"), group.of("input_activations")
    _expect(weights, {"num_bits": (4,), "type": ("float",), "strategy": ("group",), "group_size": (32,)})
    _expect(weights, {"symmetric": (True,), "dynamic": (False,)})
    _expect(inputs, {"num_bits": (4, 8), "type": ("float",)})
    return _float4(config, Stored.MXFP4_PACKED, 32, inputs)


def _float4(config: Section, stored: Stored, group: int, inputs: Section) -> QuantizationScheme:
    return QuantizationScheme(
        name="compressed-tensors",
        stored=stored,
        bits=4,
        granularity=Granularity.GROUP,
        group_size=group,
        activations=Activations.FLOAT4 if inputs.values else Activations.UNQUANTISED,
        ignore=config.names("ignore"),
        kv_cache=_kv_cache(config),
    )


def _activations(inputs: Section) -> Activations:
    if not inputs.values:
        return Activations.UNQUANTISED
    _expect(inputs, {"num_bits": (8,), "type": ("float",)})
    return Activations.DYNAMIC_TOKEN if inputs.values.get("dynamic") else Activations.STATIC_TENSOR


def _kv_cache(config: Section) -> KvCacheScheme | None:
    found = config.of("kv_cache_scheme")
    if not found.values:
        return None
    _expect(found, {"num_bits": (8,), "type": ("float",), "strategy": ("tensor",), "symmetric": (True,)})
    return KvCacheScheme(is_dynamic=bool(found.values.get("dynamic")))


def _expect(section: Section, supported: Mapping[str, tuple[Any, ...]]) -> None:
    for key, values in supported.items():
        section.expect(key, *values)


def _expect_bits(config: Section, bits: int) -> None:
    if config.values.get("bits") != bits:
        raise config.refuse("bits", str(bits))


def _granularity(group_size: int | None) -> Granularity:
    return Granularity.CHANNEL if group_size is None else Granularity.GROUP


FORMATS: dict[Any, Callable[[Section], QuantizationScheme]] = {
    "compressed-tensors": _compressed_tensors,
    FP8: _fp8,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
}
COMPRESSED: dict[str, Callable[[Section, Section], QuantizationScheme]] = {
    "float-quantized": _float_quantized,
    "pack-quantized": _pack_quantized,
    "nvfp4-pack-quantized": _float4_packed,
    "mxfp4-pack-quantized": _mxfp4_packed,
}
REFUSED = {  # `quant_method` -> why not
    "bitsandbytes": "its weights are quantised again at every load, in a form of its own",
    "marlin": "its weights are stored in one kernel's own order; the gptq checkpoint that it was made of loads",
    "gptq_marlin_24": "its weights are 2:4 sparse",
    "nvfp4": "its layout is not read; the same model as compressed-tensors or modelopt loads",
    "fbgemm_fp8": "its layout is not read; the same model as compressed-tensors or fp8 loads",
    "torchao": "its tensors are Python objects, which are not loaded",
    "quark": "its layout is not read",
    "hqq": "its layout is not read",
    "aqlm": "its weights are entries of codebooks",
}
