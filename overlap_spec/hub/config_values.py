"""Reads a model's JSON files. The values of config.json are checked by name, before anything is allocated by them.

One table has what each key may hold, whichever family reads it. A key that a config leaves out, or has as null, passes:
its reader knows the default, or refuses it. The limits are far above every model there is; a value beyond them is a
slip, and would take gigabytes before the first tensor's shape shows it.

generation_config.json tells the ids that end a turn, and how the model's makers would sample; hf_quant_config.json
the format of weights, where config.json does not.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from overlap_spec.config import SamplingDefaults
from overlap_spec.errors import CheckpointError
from overlap_spec.hub.quantization import quantization_scheme
from overlap_spec.messages import MAX_STOP_IDS


@dataclass(frozen=True)
class Rule:
    """What a value may be, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


def check_values(config: Mapping[str, Any], origin: str) -> None:
    """Check every value that a rule is about, those of rotary positions and of drafts in their own objects too.

    Raises: CheckpointError naming `origin`, the key, what was found and what would be right.
    """
    for key, value in chain(config.items(), *map(Mapping.items, _objects(config))):
        rule = RULES.get(key)
        if rule is not None and value is not None and not rule.holds(value):
            raise CheckpointError(f"{origin}: {key} must be {rule.words}, found {_shown(value)}")
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if config.get("head_dim") is None and heads and hidden and hidden // heads % 2:
        raise CheckpointError(
            f"{origin}: head_dim, which is hidden_size {hidden} / num_attention_heads {heads}, must be even,"
            f" found {hidden // heads}"
        )


def check_eos(ids: tuple[Any, ...], vocab_size: int, origin: str) -> None:
    """Check the ids that end an answer.

    Raises: CheckpointError naming `origin` and the id, or how many there are: every request's stop ids are kept in a
    row of `MAX_STOP_IDS`.
    """
    if len(ids) > MAX_STOP_IDS:
        raise CheckpointError(f"{origin}: eos_token_id must be at most {MAX_STOP_IDS} token ids, found {len(ids)}")
    wrong = [token for token in ids if not _is_int(token) or not 0 <= token < vocab_size]
    if wrong:
        raise CheckpointError(
            f"{origin}: eos_token_id must be token ids from 0 to {vocab_size - 1}, found {_shown(wrong[0])}"
        )


def _objects(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Objects with values of their own; Gemma 3 has one for each kind of layer within `rope_parameters`."""
    found = [value for key in (*ROTATIONS, *OF_DRAFTS) if isinstance(value := config.get(key), Mapping)]
    return [*found, *(inner for each in found for inner in each.values() if isinstance(inner, Mapping))]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _integers(least: int, most: int) -> Rule:
    return Rule(f"an integer from {least} to {most}", lambda value: _is_int(value) and least <= value <= most)


def _numbers(words: str, holds: Callable[[float], bool]) -> Rule:
    return Rule(words, lambda value: _is_number(value) and holds(value))


def _listed(rule: Rule) -> Rule:
    return Rule(
        f"a list of which each is {rule.words}", lambda found: isinstance(found, list) and all(map(rule.holds, found))
    )


ROTATIONS, OF_DRAFTS = ("rope_parameters", "rope_scaling"), ("eagle_config", "dflash_config")
SIZE, HEADS, LAYERS, TOKENS, POSITIONS, EXPERTS = 2**20, 2**12, 2**12, 2**24, 2**24, 2**14
BOOLEAN = Rule("true or false", lambda value: isinstance(value, bool))
OBJECT = Rule("null or an object", lambda value: isinstance(value, Mapping))
WORD = Rule("a name", lambda value: isinstance(value, str))
NAMES = Rule("a list of names", lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value))
INTEGERS = Rule("a list of integers", lambda value: isinstance(value, list) and all(map(_is_int, value)))
POSITIVE = _numbers("a positive, finite number", lambda value: value > 0)
BASE = _numbers("a finite number above 1", lambda value: value > 1)
PART = _numbers("a number above 0, up to 1", lambda value: 0 < value <= 1)
WEIGHT = _numbers("a finite number from 0", lambda value: value >= 0)
LIMIT = Rule("null or a finite number from 0", lambda value: value is None or (_is_number(value) and value >= 0))

BOOLEANS = (
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "bias", "use_sliding_window", "truncate", "use_qk_norm"),
    *("attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp", "norm_topk_prob", "rope_interleave"),
    *("add_swa_attention_sink_bias", "add_full_attention_sink_bias", "mamba_conv_bias", "mamba_proj_bias"),
    *("norm_output", "norm_before_residual", "norm_before_fc", "embed_requires_grad", "use_aux_hidden_state"),
    *("use_ordered_embeddings", "enable_confidence_head", "confidence_head_with_markov", "is_causal"),
)
RULES = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "target_hidden_size"), _integers(1, SIZE)),
    **dict.fromkeys(("num_hidden_layers", "full_attention_interval"), _integers(1, LAYERS)),
    **dict.fromkeys(("max_window_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers"), _integers(0, LAYERS)),
    **dict.fromkeys(("num_kv_shared_layers", "n_shared_experts", "first_k_dense_replace"), _integers(0, LAYERS)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "swa_num_attention_heads"), _integers(1, HEADS)),
    **dict.fromkeys(("swa_num_key_value_heads", "num_global_key_value_heads"), _integers(1, HEADS)),
    **dict.fromkeys(("v_head_dim", "swa_v_head_dim"), _integers(1, HEADS)),
    **dict.fromkeys(
        ("head_dim", "global_head_dim"),
        Rule("an even integer from 2 to 4096", lambda value: _is_int(value) and 2 <= value <= 4096 and value % 2 == 0),
    ),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), _integers(1, HEADS)),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), _integers(1, HEADS)),
    **dict.fromkeys(("linear_conv_kernel_dim", "mamba_d_conv"), _integers(1, HEADS)),
    **dict.fromkeys(("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_expand"), _integers(1, HEADS)),
    # Their readers know which of these may be 0.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), _integers(0, EXPERTS)),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "n_group", "topk_group"), _integers(0, EXPERTS)),
    **dict.fromkeys(("moe_intermediate_size", "share_expert_dim", "shared_intermediate_size"), _integers(0, SIZE)),
    **dict.fromkeys(("shared_expert_intermediate_size", "hidden_size_per_layer_input"), _integers(0, SIZE)),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "markov_rank"), _integers(0, SIZE)),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), _integers(1, HEADS)),
    **dict.fromkeys(("vocab_size_per_layer_input", "num_centroids"), _integers(0, TOKENS)),
    **dict.fromkeys(("vocab_size", "draft_vocab_size"), _integers(1, TOKENS)),
    # Angles are products in float32, which tells so many positions apart.
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), _integers(1, POSITIONS)),
    "query_pre_attn_scalar": _integers(1, SIZE),
    **dict.fromkeys(
        ("rms_norm_eps", "layernorm_epsilon"), _numbers("a positive number up to 1", lambda value: 0 < value <= 1)
    ),
    **dict.fromkeys(("rope_local_base_freq", "swa_rope_theta"), BASE),
    "rope_theta": Rule(
        f"{BASE.words}, or a list of such",
        lambda value: value != [] and all(map(BASE.holds, value if isinstance(value, list) else [value])),
    ),
    "num_attention_groups": _integers(1, HEADS),
    **dict.fromkeys(("attention_value_scale", "moe_router_scaling_factor", "routed_scaling_factor"), POSITIVE),
    **dict.fromkeys((f"{part}_multiplier" for part in ("embedding", "attention", "residual")), POSITIVE),
    **dict.fromkeys(("logits_scaling", "final_logit_softcapping", "input_embedding_scale"), POSITIVE),
    "partial_rotary_factor": PART,
    "partial_rotary_factors": _listed(PART),
    **dict.fromkeys(("swiglu_limits", "swiglu_limits_shared"), _listed(LIMIT)),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), POSITIVE),
    "attention_factor": POSITIVE,
    **dict.fromkeys(("mscale", "mscale_all_dim"), WEIGHT),
    **dict.fromkeys(BOOLEANS, BOOLEAN),
    "use_bidirectional_attention": Rule(
        "true, false, 'all' or 'vision'", lambda value: isinstance(value, bool) or value in ("all", "vision")
    ),
    **dict.fromkeys((*ROTATIONS, *OF_DRAFTS, "per_layer_config", "attention_other_setting"), OBJECT),
    **dict.fromkeys(("eagle_aux_hidden_state_layer_ids", "target_layer_ids"), INTEGERS),
    **dict.fromkeys(("architectures", "layer_types", "yarn_only_types"), NAMES),
    **dict.fromkeys(("rope_type", "type"), WORD),
}


def read_json(path: Path) -> dict[str, Any]:
    """Raises: CheckpointError naming the file."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable JSON file ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def read_config(path: Path) -> dict[str, Any]:
    """config.json, with the format of weights that Model Optimizer once wrote into a file of its own beside it.

    Raises: CheckpointError naming the file.
    """
    config, beside = of_head(of_text(read_json(path)), str(path)), path.parent / QUANTIZATION
    if config.get("quantization_config") or not beside.is_file():
        return config
    found = read_json(beside).get("quantization")
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{beside}: quantization must be an object, found {_shown(found)}")
    if found.get("quant_algo") is None:
        return config
    merged = config | {"quantization_config": {"quant_method": "modelopt", **found}}
    quantization_scheme(merged, str(beside))
    return merged


def of_text(config: dict[str, Any]) -> dict[str, Any]:
    """Of a model of several kinds of input: what is about its text, beside what is about the whole model.

    A text model that was saved alone is named as the whole one, whose text it is.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        names = config.get("architectures")
        if isinstance(names, list):
            return config | {"architectures": [TEXT_ALONE.get(str(name), name) for name in names]}
        return config
    whole = {key: value for key, value in config.items() if not key.endswith("_config") or key == FORMAT}
    kept = {key: value for key, value in text.items() if key != "architectures"}
    return {**whole, **kept, **{key: whole[key] for key in OF_WHOLE if whole.get(key) is not None}}


def of_head(config: dict[str, Any], origin: str) -> dict[str, Any]:
    """Of a head in the layout of speculators, what SpecForge's is; any other config as it is.

    Its layers' numbers are one level down. A layer of the target is named there by what goes into it: 2 is the residual
    after the second one. Raises: CheckpointError naming what such a head has that is not computed here.
    """
    kind, layers = str(config.get(SPECULATORS)), config.get("transformer_layer_config")
    if kind not in READ or not isinstance(layers, Mapping):
        return config
    for key, expected in READ[kind].items():
        if (found := config.get(key, expected)) != expected:
            raise CheckpointError(f"{origin}: {key}: found {_shown(found)}, expected {_shown(expected)}")
    family = SPECULATED.get(name := str(layers.get("model_type", "llama")))
    if family is None:
        raise CheckpointError(f"{origin}: model_type: found {_shown(name)}, expected {' or '.join(SPECULATED)}")
    kept = {key: config[key] for key in (*OF_HEAD, FORMAT) if config.get(key) is not None}
    plain = {**layers, **kept, "tie_word_embeddings": False}
    if kind == "dflash":
        return plain | _of_block(config, layers, origin)
    ids = _read_layers(config, EAGLE_LAYERS, origin)
    eagle = {"eagle_config": {EAGLE_LAYERS: ids}} if ids else {}
    return plain | eagle | {"architectures": [f"{family}Eagle3"] if kind == "eagle3" else ["PEagleDraftModel", family]}


def _of_block(config: Mapping[str, Any], layers: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Of a DFlash draft, what its own keys become. A vocabulary of its own is refused."""
    if (size := config.get("draft_vocab_size")) not in (None, whole := layers.get("vocab_size")):
        raise CheckpointError(f"{origin}: draft_vocab_size: found {_shown(size)}, expected {_shown(whole)}, all tokens")
    own = {"target_layer_ids": _read_layers(config, "aux_hidden_state_layer_ids", origin)}
    own |= {key: config[key] for key in ("mask_token_id", "block_size") if key in config}
    return {"architectures": ["DFlashDraftModel"], "dflash_config": own}


def _read_layers(config: Mapping[str, Any], key: str, origin: str) -> list[int]:
    """The target's layers whose outputs are read."""
    ids = config.get(key) or []
    if not isinstance(ids, list) or not all(map(_is_int, ids)):
        raise CheckpointError(f"{origin}: {key}: found {_shown(ids)}, expected layers")
    return [each - 1 for each in ids]


SPECULATORS, EAGLE_LAYERS = "speculators_model_type", "eagle_aux_hidden_state_layer_ids"
READ: dict[str, dict[str, Any]] = {  # the kinds of its heads that are read, and what of them is computed here
    "eagle3": {},
    "peagle": {"norm_before_fc": False},
    "dflash": {"sample_from_anchor": False, "projector_type": "dflash"},
}
SPECULATED = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # whose layers its heads have
OF_HEAD = (
    *("draft_vocab_size", "target_hidden_size", "norm_before_residual", "mask_token_id"),
    *("norm_before_fc", "embed_requires_grad"),
)
FORMAT = "quantization_config"
# As transformers names them, whose tensors are those of the whole model without the others.
TEXT_ALONE = {f"Qwen3_5{kind}ForCausalLM": f"Qwen3_5{kind}ForConditionalGeneration" for kind in ("", "Moe")}
OF_WHOLE = (FORMAT, "eos_token_id", "tie_word_embeddings")  # the part about the text tells less of these
NAME, QUANTIZATION = "generation_config.json", "hf_quant_config.json"


def eos_token_ids(directory: Path, model: dict[str, Any]) -> tuple[int, ...]:
    """All ids that end a turn, unchecked: generation_config.json often lists more than config.json."""
    found: list[Any] = []
    for config in (_generation_config(directory), model):
        ids = config.get("eos_token_id")
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    return tuple({repr(token): token for token in found}.values())  # what is no id may not be hashable


def sampling_defaults(directory: Path) -> SamplingDefaults:
    """Values that the file itself has; `do_sample` has no effect, as in SGLang and vLLM.

    Raises: CheckpointError naming the file and the value.
    """
    config = _generation_config(directory)
    given = {name: config[name] for name in SamplingDefaults.__struct_fields__ if config.get(name) is not None}
    if given.get("top_k") == 0:
        given["top_k"] = -1  # both mean all tokens
    for name, value in given.items():
        if not _is_valid(name, value):
            raise CheckpointError(
                f"{directory / NAME}: {name} {value!r} is out of range; --sampling-defaults openai does without it"
            )
    return msgspec.convert(given, SamplingDefaults)


def _is_valid(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    match name:
        case "temperature":
            return value >= 0
        case "top_k":
            return isinstance(value, int) and (value == -1 or value >= 1)
        case "top_p":
            return 0 < value <= 1
        case "min_p":
            return 0 <= value <= 1
        case "repetition_penalty":
            return 0 < value <= 2
        case _:
            return isinstance(value, int) and value >= 1


def _generation_config(directory: Path) -> dict[str, Any]:
    path = directory / NAME
    return read_json(path) if path.is_file() else {}
