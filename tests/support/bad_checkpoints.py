"""Checkpoints that are wrong in one way each, and what is said of them: by the loaders, and by `overlap-spec check`."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.tiny.models import TinyCheckpoint, tiny_target, write_checkpoint
from support.tiny.quantized import quantised

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
    "rope with a null": (configured(rope_scaling={"rope_type": "linear", "factor": None}), "'linear' needs 'factor'"),
    "a factor without a type": (
        configured(rope_scaling={"factor": 8.0}),
        "has a factor, and no rope_type that uses it",
    ),
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
    "speculators": (configured(transformer_layer_config={}), "speculators_model_type: found None, expected 'eagle3'"),
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
    *("a scale below zero", "a scale of a group that is NaN", "a divisor of zero", "a power of two that is NaN"),
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


def put(end: str, change: Callable[[Tensor], Tensor | None]) -> SpoilTensors:
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
    "no scales of groups": (
        "nvfp4",
        put("weight_scale", lambda scale: None),
        r"tensor layers\.0\.self_attn\.q_proj\.weight_scale is missing, expected shape \[128, 8\]",
    ),
    "no scale of the tensor": (
        "nvfp4, modelopt",
        put("weight_scale_2", lambda scale: None),
        r"tensor layers\.0\.self_attn\.q_proj\.weight_scale_2 is missing, expected shape \[\]",
    ),
    "scales of groups of 32": (
        "nvfp4",
        put("weight_scale", lambda scale: scale[:, ::2].contiguous()),
        r"safetensors: tensor model.*q_proj\.weight_scale: found shape \[128, 4\], expected \[128, 8\]",
    ),
    "scales in 16 bits": (
        "nvfp4, modelopt",
        put("weight_scale", lambda scale: scale.half()),
        "weight_scale: found type float16, expected float8_e4m3fn: the config names ModelOpt nvfp4 weights",
    ),
    "a scale below zero": (
        "nvfp4",
        put("weight_scale", lambda scale: first(-0.5)(scale.float()).to(scale.dtype)),
        r"weight_scale: found 1 scales that are negative or NaN",
    ),
    "a scale of a group that is NaN": (
        "nvfp4, modelopt",
        put("weight_scale", lambda scale: first(torch.nan)(scale.float()).to(scale.dtype)),
        r"weight_scale: found 1 scales that are negative or NaN",
    ),
    "a divisor of zero": (
        "nvfp4",
        put("weight_global_scale", first(0.0)),
        "weight_global_scale: found 1 scales like 0",
    ),
    "values of whole bytes": (
        "mxfp4",
        put("weight_packed", lambda pairs: pairs.repeat(1, 2)),
        r"weight_packed: found shape \[128, 128\], expected \[128, 64\]",
    ),
    "a power of two that is NaN": (
        "mxfp4",
        put("weight_scale", first(255)),
        "weight_scale: found 1 scales that are NaN",
    ),
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
