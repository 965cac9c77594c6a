"""What a config.json tells of the weights' format, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from overlap_spec.config.quantization import Activations, Granularity, KvCacheScheme, QuantizationScheme, Stored
from overlap_spec.errors import CheckpointError
from overlap_spec.hub.config_values import read_config
from overlap_spec.hub.quantization import quantization_scheme


def scheme(found: dict[str, Any] | None, asked: str | None = None) -> QuantizationScheme | None:
    return quantization_scheme({"quantization_config": found}, "m/config.json", asked)


def compressed(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    } | more


def group_of(weights: dict[str, Any], targets: list[str], kind: str | None = None) -> dict[str, Any]:
    return {"a": {"targets": targets, "weights": weights, "input_activations": None, "format": kind}}


def grouped(kind: str, weights: dict[str, Any], *targets: list[str]) -> dict[str, Any]:
    """Groups of one format."""
    groups = {f"group_{index}": group_of(weights, each)["a"] for index, each in enumerate(targets)}
    return compressed(kind, weights) | {"config_groups": groups}


FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "channel"}
TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
INT = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "actorder": None}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}

FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor_group"}
FLOAT4 |= {"group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
POWERS = FLOAT4 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.0*"]}
MODELOPT |= {"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 16}, "targets": ["Linear"]}}}
MODELOPT |= {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}, "producer": {"name": "modelopt"}}

READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp8, by row": (
        compressed("float-quantized", FLOAT, TOKEN),
        {"stored": Stored.FLOAT8, "granularity": Granularity.CHANNEL, "activations": Activations.DYNAMIC_TOKEN},
    ),
    "fp8, by tensor": (
        compressed("float-quantized", FLOAT | {"strategy": "tensor"}, TOKEN | {"dynamic": False, "strategy": "tensor"}),
        {"granularity": Granularity.TENSOR, "activations": Activations.STATIC_TENSOR, "scale": "weight_scale"},
    ),
    "fp8, by block": (
        compressed("float-quantized", FLOAT | {"strategy": "block", "block_structure": [128, 128]}),
        {"granularity": Granularity.BLOCK, "group_size": 128, "block_rows": 128},
    ),
    "fp8 of DeepSeek and Qwen": (
        BLOCKS,
        {"granularity": Granularity.BLOCK, "group_size": 128, "block_rows": 128, "scale": "weight_scale_inv"},
    ),
    "fp8 of old": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        {"granularity": Granularity.TENSOR, "activations": Activations.STATIC_TENSOR, "ignore": ("lm_head",)},
    ),
    "int4": (
        compressed("pack-quantized", INT),
        {"stored": Stored.PACKED, "bits": 4, "granularity": Granularity.GROUP, "group_size": 128, "symmetric": True},
    ),
    "int4 with zero points": (
        compressed("pack-quantized", INT | {"symmetric": False, "group_size": 32, "actorder": "weight"}),
        {"group_size": 32, "symmetric": False},
    ),
    "awq": (AWQ, {"stored": Stored.AWQ, "group_size": 64, "symmetric": False, "scale": "scales"}),
    "gptq": (GPTQ, {"stored": Stored.GPTQ, "zero_offset": 1, "symmetric": True}),
    "mxfp4": (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        {"stored": Stored.MXFP4, "bits": 4, "group_size": 32},
    ),
    "nvfp4": (
        compressed("nvfp4-pack-quantized", FLOAT4),
        {"stored": Stored.NVFP4_PACKED, "bits": 4, "group_size": 16, "activations": Activations.UNQUANTISED},
    ),
    "nvfp4, activations too": (
        compressed("nvfp4-pack-quantized", FLOAT4, FLOAT4 | {"dynamic": "local"}),
        {"stored": Stored.NVFP4_PACKED, "activations": Activations.FLOAT4},
    ),
    "mxfp4 of compressed-tensors": (
        compressed("mxfp4-pack-quantized", POWERS),
        {"stored": Stored.MXFP4_PACKED, "name": "compressed-tensors", "group_size": 32},
    ),
    "modelopt": (
        MODELOPT,
        {"name": "modelopt_fp4", "stored": Stored.MODELOPT_FP4, "group_size": 16, "kv_cache": KvCacheScheme()},
    ),
    "modelopt, weights alone": (
        MODELOPT | {"quant_algo": "W4A16_NVFP4", "kv_cache_scheme": None},
        {"activations": Activations.UNQUANTISED, "kv_cache": None},
    ),
    "modelopt of old": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8"},
        {"stored": Stored.MODELOPT_FP4, "kv_cache": KvCacheScheme()},
    ),
    "gptq, second version": (GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}, {"zero_offset": 0}),
    "gptq, whole rows": (GPTQ | {"group_size": -1}, {"granularity": Granularity.CHANNEL, "group_size": None}),
    "8-bit keys": (
        compressed("float-quantized", FLOAT, kv_cache_scheme=FLOAT | {"strategy": "tensor"}),
        {"kv_cache": KvCacheScheme()},
    ),
}


@pytest.mark.parametrize("case", READ)
def test_published_formats_are_read(case: str) -> None:
    config, expected = READ[case]
    found = scheme(config)
    assert found is not None
    assert {name: getattr(found, name) for name in expected} == expected


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"quant_method": "magic"}, r"config\.json: quantization_config \(magic\) is not supported"),
    "unnamed": ({"bits": 4}, r"\(unnamed\)"),
    "a list of names": ({"quant_method": ["fp8"]}, r"quantization_config \(\['fp8'\]\) is not supported"),
    "blocks that are no pair": (BLOCKS | {"weight_block_size": 128}, r"weight_block_size 128 .*expected \[128, 128\]"),
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "bitsandbytes.*use fp8, int4, nvfp4 or mxfp4 weights"),
    "marlin": ({"quant_method": "marlin"}, "the gptq checkpoint that it was made of loads"),
    "act order": (GPTQ | {"desc_act": True}, "desc_act True is not supported; expected false"),
    "gptq of 8 bits": (GPTQ | {"bits": 8}, "bits 8 is not supported; expected 4"),
    "gptq marlin": (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'.*'gptq' or 'gptq_v2'"),
    "gptq of two formats": (
        GPTQ | {"dynamic": {"+:.*down_proj": {"bits": 8}}},
        r"dynamic: \+:\.\*down_proj: bits 8 is not supported; expected 4",
    ),
    "gptq of another group": (GPTQ | {"dynamic": {".*up_proj": {"group_size": 32}}}, "group_size 32 .*; expected 128"),
    "a rule of gptq that is no object": (GPTQ | {"dynamic": {".*up_proj": 8}}, "dynamic: .*up_proj 8 .* an object"),
    "rules of gptq that are no object": (GPTQ | {"dynamic": ["-:lm_head"]}, "dynamic .* expected an object"),
    "a rule of gptq that is no pattern": (GPTQ | {"dynamic": {"-:(": {}}}, r"dynamic: '-:\(' is no regular expression"),
    "odd groups": (AWQ | {"group_size": 96}, "group_size 96 is not supported; expected 32, 64, 128 or -1"),
    "awq of gemv": (AWQ | {"version": "gemv"}, "version 'gemv'"),
    "other blocks": (BLOCKS | {"weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\].*\[128, 128\]"),
    "2:4 sparse": (
        compressed("float-quantized", FLOAT, sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_config: format 'sparse-24-bitmask'",
    ),
    "nvfp4 of integers": (compressed("nvfp4-pack-quantized", INT), "weights: type 'int' is not supported; expected 'f"),
    "nvfp4 in groups of 32": (
        compressed("nvfp4-pack-quantized", FLOAT4 | {"group_size": 32}),
        "weights: group_size 32 is not supported; expected 16",
    ),
    "mxfp4 in groups of 16": (
        compressed("mxfp4-pack-quantized", POWERS | {"group_size": 16}),
        "weights: group_size 16 is not supported; expected 32",
    ),
    "modelopt in 8 bits": (
        MODELOPT | {"quant_algo": "FP8"},
        "quant_algo 'FP8' is not supported; expected NVFP4 or W4A",
    ),
    "modelopt in groups of 32": (MODELOPT | {"group_size": 32}, "group_size 32 is not supported; expected 16"),
    "modelopt in groups of 8": (
        MODELOPT | {"config_groups": {"group_0": {"weights": {"group_size": 8}}}},
        "config_groups: group_0: weights: group_size 8 is not supported; expected 16",
    ),
    "modelopt with scales of x": (MODELOPT | {"pre_quant_scale": True}, "pre_quant_scale True is not supported"),
    "modelopt with keys of 4 bits": (MODELOPT | {"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo 'NVFP4' is not"),
    "int8": (
        compressed("int-quantized", INT | {"num_bits": 8}),
        "'float-quantized' or 'pack-quantized' or 'nvfp4-pack",
    ),
    "5 bits": (compressed("pack-quantized", INT | {"num_bits": 5}), "weights: num_bits 5"),
    "act order of groups": (compressed("pack-quantized", INT | {"actorder": "group"}), "actorder 'group'"),
    "no groups": (compressed("pack-quantized", INT) | {"config_groups": {}}, "expected a group of linears"),
    "a group of nothing": (compressed("pack-quantized", INT) | {"config_groups": {"a": {}}}, "a: targets None is not"),
    "a class of modules": (
        grouped("pack-quantized", INT, ["Linear"], ["LlamaAttention"]),
        r"config_groups: group_1: targets \['LlamaAttention'\] is not supported; expected 'Linear', names of linears",
    ),
    "a target that is no pattern": (
        grouped("pack-quantized", INT, ["re:("]),
        "targets: 're:.' is no regular expression",
    ),
    "two formats": (
        grouped("pack-quantized", INT, ["re:.*self_attn.*"])
        | {
            "config_groups": {
                **group_of(INT, ["re:.*mlp.*"]),
                "b": group_of(INT | {"group_size": 32}, ["lm_head"])["a"],
            }
        },
        "config_groups: b: found compressed-tensors int4 weights, groups of 32; .*the first group's .*, groups of 128;",
    ),
    "fp8 and nvfp4": (
        compressed("mixed-precision", INT)
        | {
            "config_groups": {
                **group_of(FLOAT, ["re:.*self_attn.*"], "float-quantized"),
                "b": group_of(FLOAT4, ["re:.*mlp.*"], "nvfp4-pack-quantized")["a"],
            }
        },
        "config_groups: b: found compressed-tensors nvfp4 weights, .*expected the first group's fp8",
    ),
    "bad pattern": (compressed("pack-quantized", INT, ignore=["re:("]), "no regular expression"),
    "no names": (BLOCKS | {"modules_to_not_convert": "lm_head"}, "a list of names"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_others_are_refused_by_name(case: str) -> None:
    config, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        scheme(config)


def test_linears_that_stay_in_16_bits() -> None:
    found = scheme(
        compressed("pack-quantized", INT, ignore=["lm_head", "re:.*down_proj", "model.layers.1.mlp.up_proj"])
    )
    assert found is not None
    kept = ("lm_head", "layers.3.mlp.down_proj", "layers.1.mlp.up_proj")
    assert not any(map(found.covers, kept))
    assert found.covers("layers.0.mlp.up_proj") and found.covers("layers.11.mlp.up_proj")
    by_part = scheme(AWQ | {"modules_to_not_convert": ["self_attn", "layers.1"]})
    assert by_part is not None
    assert not by_part.covers("layers.0.self_attn.q_proj") and not by_part.covers("layers.1.mlp.up_proj")
    assert by_part.covers("layers.11.mlp.up_proj")


def test_groups_of_one_format_name_their_linears() -> None:
    experts = r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"
    found = scheme(grouped("pack-quantized", INT, [experts], ["model.layers.1.self_attn.q_proj", "re:.*mtp.*"]))
    assert found is not None and found.stored is Stored.PACKED
    assert all(map(found.covers, ("layers.3.mlp.experts.7.up_proj", "layers.1.self_attn.q_proj", "mtp.layers.0.fc")))
    kept = ("layers.0.self_attn.q_proj", "layers.11.self_attn.q_proj", "layers.3.mlp.gate", "lm_head")
    assert not any(map(found.covers, kept))
    ignoring = scheme(grouped("pack-quantized", INT, [experts]) | {"ignore": ["re:.*layers.3.*"]})
    assert ignoring is not None and ignoring.covers("layers.2.mlp.experts.7.up_proj")
    assert not ignoring.covers("layers.3.mlp.experts.7.up_proj")
    assert scheme(grouped("pack-quantized", INT, [experts], ["Linear"])) == scheme(compressed("pack-quantized", INT))


def test_a_target_may_be_named_as_in_the_file() -> None:
    found = scheme(grouped("pack-quantized", INT, ["re:model.language_model.layers.*mlp"]))
    assert found is not None and found.covers("layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj")
    assert not found.covers("layers.0.mlp.up_proj") and not found.covers("layers.0.fc", "model.layers.0.mlp.fc")


def test_what_activations_were_calibrated_for_may_differ() -> None:
    groups = group_of(FLOAT4, ["re:.*self_attn.*"])
    groups["b"] = groups["a"] | {"targets": ["re:.*mlp.*"], "input_activations": FLOAT4 | {"dynamic": "local"}}
    found = scheme(compressed("nvfp4-pack-quantized", FLOAT4) | {"config_groups": groups})
    assert found is not None and found.stored is Stored.NVFP4_PACKED and found.covers("layers.0.mlp.up_proj")


def test_rules_of_gptq_leave_linears_out() -> None:
    """As of Qwen3.5's published checkpoints in int4; the first rule that a name begins with counts."""
    rules: dict[str, Any] = {"lm_head": {}, "model.language_model.embed_tokens": {}, "-:.*attn.*": {}}
    rules |= {"-:.*shared_expert.*": {}, "-:.*mtp.*": True, "-:model.visual": {}}
    found = scheme(GPTQ | {"dynamic": rules, "lm_head": False})
    assert found is not None
    kept = ("layers.0.linear_attn.in_proj_qkv", "layers.3.self_attn.q_proj", "layers.0.mlp.shared_expert.up_proj")
    assert not any(map(found.covers, (*kept, "mtp.layers.0.mlp.experts.7.up_proj", "visual.blocks.0.mlp.up_proj")))
    assert found.covers("layers.0.mlp.experts.7.up_proj") and found.covers("layers.0.mlp.model.visual")
    ordered = scheme(GPTQ | {"dynamic": {"+:.*layers.1.*": {"bits": 4}, "-:.*mlp": {}}})
    assert ordered is not None and ordered.covers("layers.1.mlp.up_proj") and not ordered.covers("layers.2.mlp.up_proj")


def test_a_star_stands_for_any_letters() -> None:
    found = scheme(MODELOPT)
    assert found is not None
    assert not any(map(found.covers, ("lm_head", "layers.0.mlp.up_proj", "layers.0.self_attn.q_proj")))
    assert found.covers("layers.1.mlp.up_proj") and found.covers("layers.10.mlp.up_proj")


@pytest.mark.parametrize("kept", [[], ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]])
def test_of_mxfp4_only_experts_are_stored_so(kept: list[str]) -> None:
    found = scheme({"quant_method": "mxfp4", "modules_to_not_convert": kept})
    assert found is not None and found.covers("layers.0.mlp.experts.gate_up_proj")
    others = ("layers.0.self_attn.q_proj", "layers.0.mlp.router", "lm_head", "layers.0.mlp.shared_experts.up_proj")
    assert not any(map(found.covers, others))


def test_the_flag() -> None:
    plain = scheme(None, "fp8")
    assert plain is not None and plain.stored is Stored.PLAIN and plain.granularity is Granularity.CHANNEL
    assert scheme(None) is None and scheme(None, "unquant") is None and scheme(GPTQ, "unquant") is None
    for config, name in ((MODELOPT, "modelopt_fp4"), ({"quant_method": "mxfp4"}, "mxfp4")):
        assert scheme(config, name) == scheme(config) is not None
    stored = scheme(compressed("float-quantized", FLOAT), "fp8")
    assert stored is not None and stored.stored is Stored.FLOAT8
    for config, asked, message in (
        (GPTQ, "fp8", "--quantization fp8: the checkpoint is stored as gptq"),
        (None, "awq", "--quantization awq: the checkpoint has 16-bit weights"),
        (MODELOPT, "mxfp4", "--quantization mxfp4: the checkpoint is stored as modelopt_fp4"),
    ):
        with pytest.raises(CheckpointError, match=message):
            scheme(config, asked)


def test_a_scheme_describes_itself() -> None:
    assert str(scheme(BLOCKS)) == "fp8 (e4m3) weights, a scale for each 128 x 128 block; 16-bit activations"
    assert str(scheme(AWQ)) == "AWQ int4 weights, groups of 64, zero points; 16-bit activations"


@pytest.mark.parametrize("given", [{}, {"symmetric": True}, {"symmetric": False}])
def test_groups_of_4_bits_are_symmetric_unless_the_config_denies_it(given: dict[str, bool]) -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "dynamic": False, **given}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    scheme = quantization_scheme({"quantization_config": config}, "m")
    assert scheme is not None and scheme.symmetric == given.get("symmetric", True)


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A checkpoint of Model Optimizer's before it wrote into config.json."""
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    return tmp_path


def test_the_format_in_a_file_of_its_own(beside: Path) -> None:
    found = quantization_scheme(read_config(beside / "config.json"), "m")
    assert found is not None and found.stored is Stored.MODELOPT_FP4 and not found.covers("lm_head")


def test_config_json_goes_before_it(beside: Path) -> None:
    (beside / "config.json").write_text(json.dumps({"quantization_config": GPTQ}))
    assert read_config(beside / "config.json") == {"quantization_config": GPTQ}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"quantization": {"quant_algo": "FP8"}}, r"hf_quant_config\.json: .*quant_algo 'FP8' is not supported"),
        ({"quantization": []}, r"hf_quant_config\.json: quantization must be an object"),
    ],
)
def test_what_is_wrong_in_it_is_named(beside: Path, content: dict[str, Any], message: str) -> None:
    (beside / "hf_quant_config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        read_config(beside / "config.json")


def test_no_algorithm_means_16_bits(beside: Path) -> None:
    (beside / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": null}}')
    assert read_config(beside / "config.json") == {"hidden_size": 64}
