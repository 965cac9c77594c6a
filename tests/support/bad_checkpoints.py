"""Checkpoints that are wrong in one way each, and what is said of them: by the loaders, and by `overlap-spec check`."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.tiny.families import TINY_FAMILIES
from support.tiny.layouts import fused_experts
from support.tiny.models import TinyCheckpoint, tiny_target, write_checkpoint
from support.tiny.quantized import MXFP4, in_mxfp4, quantised

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
FIRST_Q = "model.layers.0.self_attn.q_proj"
QUANTISED_SIZES: dict[str, Any] = {"hidden": 128, "intermediate_size": 256, "head_dim": 32}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "ignored_layers": ["fc"]}
Spoil = Callable[[TinyCheckpoint], TinyCheckpoint]


def without(name: str) -> Spoil:
    return lambda c: TinyCheckpoint(c.config, {key: value for key, value in c.tensors.items() if key != name})


def with_tensors(**tensors: Tensor) -> Spoil:
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return lambda c: TinyCheckpoint(c.config, c.tensors | named)


def configured(**changes: Any) -> Spoil:
    return lambda c: TinyCheckpoint(c.config | changes, c.tensors)


def mistral(**changes: Any) -> Spoil:
    return configured(architectures=["MistralForCausalLM"], **changes)


def qwen3(**changes: Any) -> Spoil:
    return configured(architectures=["Qwen3ForCausalLM"], **changes)


def mixture(spoil: Spoil, family: str = "qwen3 moe", fused: bool = False) -> Spoil:
    """A mixture in the place of the given target, spoilt."""

    def spoilt(given: TinyCheckpoint) -> TinyCheckpoint:
        found = tiny_target(6, **TINY_FAMILIES[family])
        return spoil(TinyCheckpoint(found.config, fused_experts(found.tensors)) if fused else found)

    return spoilt


def latent(spoil: Spoil) -> Spoil:
    """A DeepSeek-V3 in the place of the given target, spoilt."""
    return mixture(spoil, "deepseek v3")


def _fused_in_8_bits() -> TinyCheckpoint:
    """All but the experts, which the config does not leave out."""
    stored, _ = quantised(tiny_target(6, **TINY_FAMILIES["qwen3 moe"]), "fp8 by row", kept=("experts",))
    named = stored.config["quantization_config"] | {"ignore": ["lm_head"]}
    return TinyCheckpoint(stored.config | {"quantization_config": named}, fused_experts(stored.tensors))


def random_gpt_oss() -> TinyCheckpoint:
    """Of sizes that blocks of 32 fill."""
    return tiny_target(6, **TINY_FAMILIES["gpt oss"] | {"hidden": 64, "intermediate_size": 96})


def mxfp4(spoil: Spoil) -> Spoil:
    """A gpt-oss as it is published, in the place of the given target, spoilt."""
    return lambda given: spoil(in_mxfp4(random_gpt_oss())[0])


EXPERTS = "model.layers.1.mlp.experts"
MIXTURE_ERRORS: dict[str, tuple[Spoil, str]] = {
    "a router of fewer experts": (
        mixture(with_tensors(model__layers__1__mlp__gate__weight=torch.zeros(6, 32))),
        r"model\.safetensors: tensor model\.layers\.1\.mlp\.gate\.weight: found shape \[6, 32\], expected \[8, 32\]",
    ),
    "no router": (
        mixture(without("model.layers.1.mlp.gate.weight")),
        r"layers\.1\.mlp\.gate\.weight is missing, expected shape \[8, 32\]",
    ),
    "an expert is missing": (
        mixture(without(f"{EXPERTS}.7.up_proj.weight")),
        r"tensor layers\.1\.mlp\.experts\.7\.up_proj\.weight is missing, expected shape \[24, 32\]",
    ),
    "an expert of another size": (
        mixture(with_tensors(**{f"{EXPERTS}.3.down_proj.weight": torch.zeros(32, 25)})),
        r"experts\.3\.down_proj\.weight: found shape \[32, 25\], expected \[32, 24\]",
    ),
    "an expert too many": (
        mixture(with_tensors(**{f"{EXPERTS}.8.down_proj.weight": torch.zeros(32, 24)})),
        r"model\.safetensors: unexpected tensor model\.layers\.1\.mlp\.experts\.8\.down_proj\.weight",
    ),
    "fewer experts than the router has": (
        mixture(with_tensors(**{f"{EXPERTS}.down_proj": torch.zeros(7, 32, 24)}), fused=True),
        r"tensor model\.layers\.1\.mlp\.experts\.down_proj: found shape \[7, 32, 24\], expected \[8, 32, 24\]",
    ),
    "half of the experts' linears": (
        mixture(without(f"{EXPERTS}.gate_up_proj"), fused=True),
        r"layers\.1\.mlp\.experts\.gate_up_proj is missing, expected shape \[8, 48, 32\]",
    ),
    "a mixtral without an expert": (
        mixture(without("model.layers.0.block_sparse_moe.experts.3.w3.weight"), "mixtral"),
        r"tensor layers\.0\.block_sparse_moe\.experts\.3\.w3\.weight is missing, expected shape \[64, 32\]",
    ),
    "more of a row's experts than there are": (
        mixture(configured(num_experts_per_tok=9)),
        r"config\.json: num_experts_per_tok: found 9, expected at most num_experts 8",
    ),
    "more of a mixtral's experts": (
        mixture(configured(num_experts_per_tok=5), "mixtral"),
        r"config\.json: num_experts_per_tok: found 5, expected at most num_local_experts 4",
    ),
    "no number of experts": (
        mixture(configured(num_experts=None)),
        "num_local_experts must be a positive integer, it is missing",
    ),
    "an unknown scoring": (
        mixture(configured(scoring_func="sigmoid")),
        "scoring_func 'sigmoid' is not supported; expected 'softmax'",
    ),
    "a dense layer that is not there": (
        mixture(configured(mlp_only_layers=[2])),
        r"mlp_only_layers: found \[2\], expected indices of 2 layers",
    ),
    "dense layers that are no list": (mixture(configured(mlp_only_layers="0")), "mlp_only_layers: found '0', expected"),
    "no step": (mixture(configured(decoder_sparse_step=0)), "decoder_sparse_step must be a positive integer, found 0"),
    "an unknown function of scores": (
        latent(configured(scoring_func="tanh")),
        r"config\.json: scoring_func 'tanh' is not supported; expected 'sigmoid'",
    ),
    "groups that do not divide": (
        latent(configured(n_group=3)),
        r"config\.json: n_group: found 3 groups of n_routed_experts 8, expected groups of equal size, of 2 or more",
    ),
    "groups of one expert": (
        latent(configured(n_group=8)),
        r"n_group: found 8 groups of n_routed_experts 8, expected groups of equal size, of 2 or more",
    ),
    "more groups than there are": (
        latent(configured(topk_group=5)),
        r"topk_group: found 5 of 4 groups of 2 experts, expected as many as a row's 3 experts need, and no more than",
    ),
    "too few groups for a row": (
        latent(configured(topk_group=1)),
        r"topk_group: found 1 of 4 groups of 2 experts, expected as many as a row's 3 experts need",
    ),
    "no correction": (
        latent(without("model.layers.1.mlp.gate.e_score_correction_bias")),
        r"tensor layers\.1\.mlp\.gate\.e_score_correction_bias is missing, expected shape \[8\]",
    ),
    "a correction of other experts": (
        latent(with_tensors(model__layers__1__mlp__gate__e_score_correction_bias=torch.zeros(7))),
        r"e_score_correction_bias: found shape \[7\], expected \[8\]",
    ),
    "no shared expert": (
        latent(without("model.layers.1.mlp.shared_experts.up_proj.weight")),
        r"tensor layers\.1\.mlp\.shared_experts\.up_proj\.weight is missing, expected shape \[24, 32\]",
    ),
    "another way to choose experts": (
        latent(configured(topk_method="greedy")),
        r"topk_method 'greedy' is not supported; expected 'noaux_tc'",
    ),
    "no rank of latents": (
        latent(configured(kv_lora_rank=0)),
        "kv_lora_rank must be a positive integer, found 0",
    ),
    "latents of another rank": (
        latent(configured(kv_lora_rank=25)),
        r"self_attn\.kv_a_proj_with_mqa\.weight: found shape \[40, 32\], expected \[41, 32\]",
    ),
    "an odd part of a head that is rotated": (
        latent(configured(qk_rope_head_dim=15)),
        r"config\.json: qk_rope_head_dim: found 15, expected an even number",
    ),
    "latents of fewer heads": (
        latent(configured(num_key_value_heads=2)),
        "num_key_value_heads 2 is not supported; expected 4",
    ),
    "biases beside latents": (
        latent(configured(attention_bias=True)),
        "attention_bias True is not supported; expected False",
    ),
    "dense layers that are no number": (
        latent(configured(first_k_dense_replace=-1)),
        "first_k_dense_replace must be a positive integer, found -1",
    ),
    "weights that add up to 1 in DeepSeek-V2": (
        mixture(configured(norm_topk_prob=True), "deepseek v2 lite"),
        "norm_topk_prob True is not supported; expected False",
    ),
    "kinds of fewer layers": (
        mixture(configured(mlp_layer_types=["dense"]), "glm 4.7 flash"),
        r"config\.json: mlp_layer_types must be 2 times 'dense' or 'sparse'",
    ),
    "an indexer": (
        latent(configured(index_topk=2048, architectures=["DeepseekV32ForCausalLM"])),
        r"DeepseekV32ForCausalLM has sparse attention by an indexer \(index_topk 2048\), which is not supported yet;"
        " the nearest one is DeepseekV3ForCausalLM",
    ),
    "a gpt-oss router of fewer experts": (
        mixture(with_tensors(model__layers__0__mlp__router__weight=torch.zeros(5, 32)), "gpt oss"),
        r"tensor model\.layers\.0\.mlp\.router\.weight: found shape \[5, 32\], expected \[6, 32\]",
    ),
    "a gpt-oss router without biases": (
        mixture(without("model.layers.0.mlp.router.bias"), "gpt oss"),
        r"tensor layers\.0\.mlp\.router\.bias is missing, expected shape \[6\]",
    ),
    "more of gpt-oss's experts": (
        mixture(configured(num_experts_per_tok=7), "gpt oss"),
        r"config\.json: num_experts_per_tok: found 7, expected at most num_local_experts 6",
    ),
    "other numbers of gpt-oss's experts": (
        mixture(configured(num_local_experts=8), "gpt oss"),
        r"tensor model\.layers\.0\.mlp\.router\.weight: found shape \[6, 32\], expected \[8, 32\]",
    ),
    "experts of a gpt-oss without biases": (
        mixture(without(f"{EXPERTS}.down_proj_bias"), "gpt oss"),
        r"tensor layers\.1\.mlp\.experts\.down_proj_bias is missing, expected shape \[6, 32\]",
    ),
    "experts of a gpt-oss that lie as linears do": (
        mixture(with_tensors(**{f"{EXPERTS}.gate_up_proj": torch.zeros(6, 72, 32)}), "gpt oss"),
        r"experts\.gate_up_proj: found shape \[6, 72, 32\], expected \[6, 32, 72\]",
    ),
    "no sinks": (
        mixture(without("model.layers.1.self_attn.sinks"), "gpt oss"),
        r"tensor layers\.1\.self_attn\.sinks is missing, expected shape \[4\]",
    ),
    "another bound": (
        mixture(configured(swiglu_limit=5.0), "gpt oss"),
        r"config\.json: swiglu_limit 5\.0 is not supported; expected 7\.0",
    ),
    "mxfp4 without scales": (
        mxfp4(without(f"{EXPERTS}.down_proj_scales")),
        r"tensor layers\.1\.mlp\.experts\.down_proj_scales is missing, expected shape \[6, 64, 3\]",
    ),
    "scales of other blocks": (
        mxfp4(with_tensors(**{f"{EXPERTS}.down_proj_scales": torch.zeros(6, 64, 6, dtype=torch.uint8)})),
        r"experts\.down_proj_scales: found shape \[6, 64, 6\], expected \[6, 64, 3\]",
    ),
    "blocks of bytes with signs": (
        mxfp4(with_tensors(**{f"{EXPERTS}.down_proj_blocks": torch.zeros(6, 64, 3, 16, dtype=torch.int8)})),
        r"experts\.down_proj_blocks: found type int8, expected uint8: the config names mxfp4 weights",
    ),
    "experts in 16 bits where mxfp4 is named": (
        mxfp4(lambda c: TinyCheckpoint(c.config, random_gpt_oss().tensors)),
        r"tensor layers\.0\.mlp\.experts\.gate_up_proj_blocks is missing, expected shape \[6, 192, 2, 16\]",
    ),
    "mxfp4 where no format is named": (
        mxfp4(configured(quantization_config=None)),
        r"tensor layers\.0\.mlp\.experts\.gate_up_proj is missing, expected shape \[6, 64, 192\]",
    ),
    "columns that are no blocks": (
        lambda c: configured(quantization_config=MXFP4)(tiny_target(6, **TINY_FAMILIES["gpt oss"] | {"hidden": 40})),
        r"mlp\.experts\.gate_up_proj has 40 columns, which are no groups of 32",
    ),
    "scales that are NaN": (
        mxfp4(with_tensors(**{f"{EXPERTS}.down_proj_scales": torch.full((6, 64, 3), 255, dtype=torch.uint8)})),
        r"tensor layers\.1\.mlp\.experts\.down_proj_scales: found 1152 scales that are NaN, expected finite ones",
    ),
    "gpt-oss in 8 bits": (
        mixture(configured(quantization_config=FP8), "gpt oss"),
        r"self_attn\.q_proj\.weight: found type float64, expected float8_e4m3fn",
    ),
    "experts of a gpt-oss in 8 bits": (
        mixture(
            configured(quantization_config=FP8 | {"ignored_layers": ["self_attn", "lm_head", "router"]}), "gpt oss"
        ),
        r"experts\.gate_up_proj: experts in one tensor are not supported as fp8 \(e4m3\) weights; expected mxfp4,",
    ),
    "experts in one tensor in few bits": (
        lambda c: _fused_in_8_bits(),
        r"layers\.1\.mlp\.experts: experts in one tensor are not supported as fp8 \(e4m3\) weights",
    ),
}


TARGET_ERRORS: dict[str, tuple[Spoil, str]] = {
    "missing tensor": (without(Q_PROJ), r"layers\.1\.self_attn\.q_proj\.weight is missing, expected shape \[64, 32\]"),
    "wrong shape": (
        with_tensors(**{Q_PROJ: torch.zeros(64, 33)}),
        r"model\.safetensors: tensor model\.layers\.1\.self_attn\.q_proj\.weight: found shape \[64, 33\], "
        r"expected \[64, 32\]",
    ),
    "unexpected tensor": (
        with_tensors(model__layers__0__self_attn__q_proj__bias=torch.zeros(64)),
        r"model\.safetensors: unexpected tensor model\.layers\.0\.self_attn\.q_proj\.bias",
    ),
    "another type": (
        with_tensors(**{Q_PROJ: torch.zeros(64, 32, dtype=torch.int8)}),
        r"model\.safetensors: tensor model\.layers\.1\.self_attn\.q_proj\.weight: found type int8, expected one of "
        r"bfloat16, float16, float32, float64",
    ),
    "tied, and a head of its own": (
        configured(tie_word_embeddings=True),
        r"lm_head\.weight: found other values than those of embed_tokens\.weight, .* tie_word_embeddings is true",
    ),
    "not tied, and no head": (
        without("lm_head.weight"),
        r"lm_head\.weight is missing, expected shape \[128, 32\], because tie_word_embeddings is false",
    ),
    "a scale of keys alone": (
        with_tensors(model__layers__0__self_attn__k_scale=torch.tensor(1.0)),
        r"k_scale has no counterpart: expected layers\.0\.self_attn\.v_scale",
    ),
    "scales of another shape": (
        with_tensors(model__layers__0__self_attn__kv_scale=torch.ones(3)),
        r"kv_scale: found shape \[3\], expected \[\]",
    ),
    "a scale that is zero": (
        with_tensors(model__layers__0__self_attn__kv_scale=torch.tensor(0.0)),
        "kv_scale: found 0, expected a positive finite number",
    ),
    "same weight twice": (with_tensors(norm__weight=torch.zeros(32)), r"tensors \S+ and \S+ mean the same weight"),
    "a draft head": (with_tensors(fc__weight=torch.zeros(32, 64)), "--speculative-draft-model-path"),
    "unknown architecture": (configured(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel is not supported"),
    "no architecture": (configured(architectures=None), "architecture missing is not supported"),
    "unknown rope": (configured(rope_scaling={"rope_type": "longrope"}), "rope type 'longrope' is not supported"),
    "rope without factor": (configured(rope_scaling={"rope_type": "linear"}), "'linear' needs 'factor'"),
    "partial rope": (configured(partial_rotary_factor=0.5), "part of a head"),
    "sliding window": (configured(sliding_window=4096), "sliding_window 4096 is not supported"),
    "bad window": (mistral(sliding_window="all"), "sliding_window must be null or a positive integer, found 'all'"),
    "windows of some layers": (
        mistral(sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
        "layer_types that differ are not supported",
    ),
    "layer types": (
        qwen3(use_sliding_window=True, sliding_window=8, layer_types=["chunked_attention"] * 2),
        "layer_types must be 2 times 'sliding_attention' or 'full_attention'",
    ),
    "norms of heads": (qwen3(), r"layers\.0\.self_attn\.q_norm\.weight is missing, expected shape \[16\]"),
    "biases": (
        configured(architectures=["Qwen2ForCausalLM"]),
        r"layers\.0\.self_attn\.q_proj\.bias is missing, expected shape \[64\]",
    ),
    "activation": (configured(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    "quantized": (configured(quantization_config={"quant_method": "gptq"}), "gptq"),
    "no hidden size": (configured(hidden_size=None), "hidden_size must be a positive integer, it is missing"),
    "bad number": (
        configured(num_hidden_layers="two"),
        "num_hidden_layers must be an integer from 1 to 4096, found 'two'",
    ),
    "odd heads": (configured(num_key_value_heads=3), "num_attention_heads 4 is not a multiple"),
    **MIXTURE_ERRORS,
}


HEAD_ERRORS: dict[str, tuple[Spoil, str]] = {
    "narrow fc": (
        with_tensors(fc__weight=torch.zeros(32, 96)),
        r"model\.safetensors: tensor fc\.weight: found shape \[32, 96\], expected \[32, 64\]: 2 aux layers x "
        r"the target's hidden size 32",
    ),
    "long d2t": (
        with_tensors(d2t=torch.zeros(113, dtype=torch.int64)),
        r"model\.safetensors: tensor d2t: found shape \[113\], expected \[112\]",
    ),
    "d2t of another type": (with_tensors(d2t=torch.zeros(112)), "tensor d2t: found type float32, expected int64 or"),
    "d2t too large": (
        with_tensors(d2t=torch.full((112,), 17)),
        r"tensor d2t: found target ids 17 to 128, expected 0 to 127",
    ),
    "d2t negative": (with_tensors(d2t=torch.full((112,), -1)), r"tensor d2t: found target ids -1 to 110"),
    "no d2t": (without("d2t"), r"tensor d2t is missing: the head guesses 112 tokens of the target's 128"),
    "head rows": (configured(draft_vocab_size=100), r"lm_head\.weight: found shape \[112, 32\], expected \[100, 32\]"),
    "other target": (configured(target_hidden_size=64), "target of hidden size 64 .*, but the target's is 32"),
    "layer ids": (
        configured(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2]}),
        r"distinct layers of the target, 0 to 1, found \[0, 2\]",
    ),
    "no default layers": (configured(eagle_config=None), "a target of 2 layers has no default aux layers"),
    "count of layers": (configured(num_aux_hidden_states=3), "num_aux_hidden_states is 3, but 2 aux layers are named"),
    "bad draft vocab": (
        configured(draft_vocab_size="all"),
        "draft_vocab_size must be an integer from 1 to 16777216, found 'all'",
    ),
    "speculators": (configured(transformer_layer_config={}), "'speculators' layout"),
    "unknown rope": (configured(rope_scaling={"type": "dynamic", "factor": 2}), "rope type 'dynamic'"),
    "16 bits where 8 are named": (
        configured(quantization_config=FP8),
        r"midlayer\.self_attn\.q_proj\.weight: found type float64, expected float8_e4m3fn: the config names fp8",
    ),
    "8 bits where none are named": (
        with_tensors(midlayer__mlp__up_proj__weight=torch.zeros(64, 32).to(torch.float8_e4m3fn)),
        r"midlayer\.mlp\.up_proj\.weight: found type float8_e4m3fn, expected one of .*names no format of weights",
    ),
    "missing norm": (without("norm.weight"), r"tensor norm\.weight is missing, expected shape \[32\]"),
    "unexpected": (with_tensors(fc2__weight=torch.zeros(2, 2)), r"unexpected tensor fc2\.weight"),
}


# What headers do not show: only a start tells it.
IN_VALUES = {
    *("tied, and a head of its own", "d2t too large", "d2t negative", "zero scale", "infinite scale", "NaN"),
    *("act-order", "zero point of 16", "another shape within", "a scale that is zero", "scales that are NaN"),
}
TRUNCATED = (4, 300, -1)  # bytes that are kept of a file: not even a header, half of it, all but the last byte


def write_shards(directory: Path, checkpoint: TinyCheckpoint, name: str, save: Callable[..., Any]) -> None:
    write_checkpoint(directory, checkpoint)
    (directory / "model.safetensors").unlink()
    stem, suffix = os.path.splitext(name)
    names = sorted(checkpoint.tensors)
    shards = {f"{stem}-0000{i + 1}-of-00002{suffix}": names[i::2] for i in range(2)}
    for shard, members in shards.items():
        save({member: checkpoint.tensors[member].contiguous() for member in members}, directory / shard)
    weight_map = {member: shard for shard, members in shards.items() for member in members}
    (directory / f"{name}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def rewrite_index(directory: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    index = next(directory.glob("*.index.json"))
    index.write_text(json.dumps({"weight_map": change(json.loads(index.read_text())["weight_map"])}))


STALE_INDEXES: dict[str, tuple[Callable[[dict[str, str]], dict[str, str]], str]] = {
    "a shard that the index leaves out": (
        lambda places: {name: shard for name, shard in places.items() if "00001-of" in shard},
        r"index\.json: weight_map names 1 shards of 2; number 2 is missing",
    ),
    "a tensor in no shard": (
        lambda places: places | {"more.weight": next(iter(places.values()))},
        r"index\.json: tensor more\.weight: found in none of its files, expected in model-00001-of-00002",
    ),
    "a tensor in another shard": (
        lambda places: places | {Q_PROJ: "model-00002-of-00002.safetensors"},
        r"index\.json: tensor \S+q_proj\.weight: found in model-00001-of-00002\.safetensors, expected in model-00002",
    ),
}


ONE_OF_THREE, UNNAMED = "one part of three", "a format that the config does not name"


SpoilTensors = Callable[[dict[str, Tensor]], object]


def put(end: str, change: Callable[[Tensor], Tensor]) -> SpoilTensors:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[f"{FIRST_Q}.{end}"] = change(tensors[f"{FIRST_Q}.{end}"])

    return spoil


def first(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed.view(-1)[0] = value
        return changed

    return change


FORMAT_ERRORS: dict[str, tuple[str, SpoilTensors, str]] = {
    "no scale": (
        "fp8 by row",
        lambda tensors: tensors.pop(f"{FIRST_Q}.weight_scale"),
        r"q_proj\.weight_scale is missing, expected shape \[128, 1\]",
    ),
    "scale of another shape": (
        "fp8 by row",
        put("weight_scale", lambda scale: scale[:7]),
        r"q_proj\.weight_scale: found shape \[7, 1\], expected \[128, 1\]",
    ),
    "zero scale": ("fp8 by row", put("weight_scale", first(0)), "found 1 scales like 0, expected positive, finite"),
    "infinite scale": ("int4", put("weight_scale", first(float("inf"))), "found 1 scales like inf"),
    "NaN": ("fp8 by row", put("weight", lambda weight: (weight.float() * float("nan")).to(weight.dtype)), "found NaN"),
    "16 bits where 8 are named": (
        "fp8 by row",
        put("weight", lambda weight: weight.bfloat16()),
        r"q_proj\.weight: found type bfloat16, expected float8_e4m3fn: the config names fp8",
    ),
    "16 bits where 4 are named": (
        "awq",
        lambda tensors: tensors.update({f"{FIRST_Q}.weight": torch.zeros(128, 128), f"{FIRST_Q}.qweight": None}),
        r"q_proj\.qweight is missing, expected shape \[128, 16\]",
    ),
    "words of another shape": (
        "gptq",
        put("qweight", lambda words: words[:3]),
        r"q_proj\.qweight: found shape \[3, 128\], expected \[16, 128\]",
    ),
    "act-order": ("gptq", put("g_idx", lambda index: index.flip(0)), "found columns in another order"),
    "zero point of 16": ("gptq", put("qzeros", lambda zeros: zeros * 0 - 1), "found a zero point of 16"),
    "another shape within": ("int4", put("weight_shape", lambda shape: shape + 1), r"found \[129, 129\]"),
    ONE_OF_THREE: ("fp8 by row", lambda tensors: None, "q_proj stays in 16 bits and .*k_proj does not"),
    UNNAMED: (
        "fp8 by row",
        lambda tensors: None,
        "found type float8_e4m3fn, expected one of .*names no format of weights",
    ),
}


def badly_quantised(case: str) -> TinyCheckpoint:
    """A target in a format of few bits, with the fault of that case."""
    kind, spoil, _ = FORMAT_ERRORS[case]
    stored, _ = quantised(tiny_target(3, **QUANTISED_SIZES), kind)
    config, tensors = dict(stored.config), dict(stored.tensors)
    spoil(tensors)
    if case == ONE_OF_THREE:
        config["quantization_config"] = config["quantization_config"] | {"ignore": ["re:.*q_proj"]}
    elif case == UNNAMED:
        del config["quantization_config"]
    return TinyCheckpoint(config, {name: tensor for name, tensor in tensors.items() if tensor is not None})
