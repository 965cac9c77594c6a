"""Tiny checkpoints of architectures that are not Llama with switches, made from one that is Llama's.

The models stay much alike: what norms behind linears add to the residual is as much as the linears did.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
IN_MEMORY = {
    "block_sparse_moe": "mlp",
    "attention_sink_bias": "sinks",
    "moe.gate.": "mlp.gate.",
    "moe.router_bias": "mlp.gate.e_score_correction_bias",
    "moe.down_proj.weight": "mlp.experts.down_proj",
    "share_expert.": "mlp.shared_experts.",
}  # of published names, those of transformers 5
OF_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
QWEN3_5 = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
ADDED_TO_ONE = ("Gemma3ForCausalLM", "Step3p5ForCausalLM", "Qwen3NextForCausalLM", *QWEN3_5)  # how they store norms
BEHIND = ("post_attention_layernorm", "post_feedforward_layernorm")


def normal(random: torch.Generator, scale: float, *shape: int) -> Tensor:
    return torch.randn(shape, generator=random, dtype=torch.float64) * scale


def around_one(random: torch.Generator, size: int) -> Tensor:
    return 1 + normal(random, 0.1, size)


def in_own_layout(config: Mapping[str, Any], tensors: Tensors, random: torch.Generator, context: float) -> Tensors:
    """The tensors as the config's architecture has them; `context` scales what layers add to the residual."""
    change = LAYOUTS.get(config["architectures"][0])
    return tensors if change is None else change(config, tensors, random, context)


def final_norm(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    """What the final norm multiplies by. Shapes: -> [H]."""
    weight = tensors["model.norm.weight"]
    return 1 + weight if config["architectures"][0] in ADDED_TO_ONE else weight


def is_added_to_one(config: Mapping[str, Any], name: str) -> bool:
    """Whether a norm is stored as what is added to one; that of heads of Gated DeltaNet never is."""
    return config["architectures"][0] in ADDED_TO_ONE and not name.endswith("linear_attn.norm.weight")


def _gemma3(config: Mapping[str, Any], tensors: Tensors, random: torch.Generator, context: float) -> Tensors:
    """Norms are stored as what is added to one."""
    found = {name.replace(BEHIND[0], "pre_feedforward_layernorm"): tensor for name, tensor in tensors.items()}
    hidden, dim = config["hidden_size"], config["head_dim"]
    for name in _layers(config):
        found |= {f"{name}.{norm}.weight": context * hidden**0.5 * around_one(random, hidden) for norm in BEHIND}
        found |= {f"{name}.self_attn.{norm}.weight": around_one(random, dim) for norm in ("q_norm", "k_norm")}
    return {name: tensor - 1 if name.endswith("norm.weight") else tensor for name, tensor in found.items()}


def _gemma4(config: Mapping[str, Any], tensors: Tensors, random: torch.Generator, context: float) -> Tensors:
    """Heads by kind of layer; the last layers may have queries alone; rows by layer; experts beside the MLP."""
    found = {name: tensor for name, tensor in tensors.items() if ".self_attn." not in name and ".mlp." not in name}
    found = {name.replace(BEHIND[0], "pre_feedforward_layernorm"): tensor for name, tensor in found.items()}
    hidden, size, vocab = (config[key] for key in ("hidden_size", "hidden_size_per_layer_input", "vocab_size"))
    behind = (*BEHIND, *(("post_per_layer_input_norm",) if size else ()))
    first_wide = config["num_hidden_layers"]
    if config.get("use_double_wide_mlp"):
        first_wide -= config["num_kv_shared_layers"]
    for index, name in enumerate(_layers(config)):
        found |= {f"{name}.{norm}.weight": context * hidden**0.5 * around_one(random, hidden) for norm in behind}
        found |= gemma4_attention(config, f"{name}.self_attn", random, index)
        inner = config["intermediate_size"] * (2 if index >= first_wide else 1)
        shapes = {f"mlp.{part}_proj": (inner, hidden) for part in ("gate", "up")} | {"mlp.down_proj": (hidden, inner)}
        if size:
            shapes |= {"per_layer_input_gate": (size, hidden), "per_layer_projection": (hidden, size)}
        found |= {f"{name}.{part}.weight": normal(random, s[1] ** -0.5, *s) for part, s in shapes.items()}
        found[f"{name}.layer_scalar"] = 1 + normal(random, 0.1, 1)
        if config.get("enable_moe_block"):
            found |= _gemma4_experts(config, name, random)
    if size:
        columns = size * config["num_hidden_layers"]
        found["model.embed_tokens_per_layer.weight"] = normal(random, size**-0.5, vocab, columns)
        found["model.per_layer_model_projection.weight"] = normal(random, 1.0, columns, hidden)
        found["model.per_layer_projection_norm.weight"] = around_one(random, size)
    return found


def gemma4_attention(config: Mapping[str, Any], name: str, random: torch.Generator, index: int) -> Tensors:
    """Of one layer, without keys and values where it attends to those of another."""
    full = config["layer_types"][index] == "full_attention"
    dim = config["global_head_dim"] if full else config["head_dim"]
    same = full and config.get("attention_k_eq_v")
    heads = config["num_global_key_value_heads"] if same else config["num_key_value_heads"]
    rows, hidden = {"q": config["num_attention_heads"] * dim}, config["hidden_size"]
    if index < config["num_hidden_layers"] - config["num_kv_shared_layers"]:
        rows |= {part: heads * dim for part in ("k" if same else "kv")}
    found = {f"{name}.{part}_proj.weight": normal(random, hidden**-0.5, size, hidden) for part, size in rows.items()}
    found[f"{name}.o_proj.weight"] = normal(random, rows["q"] ** -0.5, hidden, rows["q"])
    return found | {f"{name}.{part}_norm.weight": around_one(random, dim) for part in rows if part != "v"}


def _gemma4_experts(config: Mapping[str, Any], name: str, random: torch.Generator) -> Tensors:
    count, inner, hidden = (config[key] for key in ("num_experts", "moe_intermediate_size", "hidden_size"))
    norms = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
    return {
        f"{name}.router.proj.weight": normal(random, 2.0, count, hidden),
        f"{name}.router.scale": around_one(random, hidden),
        f"{name}.router.per_expert_scale": 1 + normal(random, 0.3, count),
        f"{name}.experts.gate_up_proj": normal(random, hidden**-0.5, count, 2 * inner, hidden),
        f"{name}.experts.down_proj": normal(random, inner**-0.5, count, hidden, inner),
        **{f"{name}.{norm}.weight": around_one(random, hidden) for norm in norms},
    }


def _olmo2(config: Mapping[str, Any], tensors: Tensors, random: torch.Generator, context: float) -> Tensors:
    found = {name: tensor for name, tensor in tensors.items() if "input_layernorm" not in name}
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads = {"q_norm": config["num_attention_heads"], "k_norm": config["num_key_value_heads"]}
    for name in _layers(config):
        found |= {f"{name}.{norm}.weight": context * around_one(random, hidden) for norm in BEHIND}
        found |= {f"{name}.self_attn.{norm}.weight": around_one(random, n * dim) for norm, n in heads.items()}
    return found


def _phi3(config: Mapping[str, Any], tensors: Tensors, random: torch.Generator, context: float) -> Tensors:
    found = dict(tensors)
    for name in _layers(config):
        for whole, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
            group = whole.partition(".")[0]
            stacked = [found.pop(f"{name}.{group}.{part}_proj.weight") for part in parts]
            found[f"{name}.{whole}_proj.weight"] = torch.cat(stacked)
    return found


def _qwen3_moe(config: Mapping[str, Any], tensors: Tensors, random: torch.Generator, context: float) -> Tensors:
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    sparse = [name for i, name in enumerate(_layers(config)) if (i + 1) % step == 0 and i not in dense]
    found = _without_mlps(tensors, sparse)
    for name in sparse:
        sizes = config["num_experts"], config["moe_intermediate_size"], config["hidden_size"]
        found |= _experts(f"{name}.mlp", ("gate_proj", "up_proj", "down_proj"), sizes, random, context)
    return found


def _qwen3_next(config: Mapping[str, Any], tensors: Tensors, random: torch.Generator, context: float) -> Tensors:
    """Gated DeltaNet in all layers but every few, gated heads in those; norms are stored as what is added to one."""
    dense = config.get("mlp_only_layers", ()) if config.get("num_experts") else range(config["num_hidden_layers"])
    sparse = [name for i, name in enumerate(_layers(config)) if i not in dense]
    found = _without_mlps(tensors, sparse)
    for index, name in enumerate(_layers(config)):
        prefix = f"{name}.self_attn."
        if (index + 1) % config["full_attention_interval"]:
            found = {key: tensor for key, tensor in found.items() if not key.startswith(prefix)}
            found |= gated_delta(config, f"{name}.linear_attn", random, context)
            continue
        found |= gated_queries(config, prefix, random, context)
    for name in sparse:
        found |= gated_mixture(config, f"{name}.mlp", random, context)
    added = [name for name in found if name.endswith("norm.weight") and is_added_to_one(config, name)]
    return found | {name: found[name] - 1 for name in added}


def _granite_hybrid(config: Mapping[str, Any], tensors: Tensors, random: torch.Generator, context: float) -> Tensors:
    """Mamba-2 in the layers that the config names; beside experts an MLP of all rows; layers add what they did."""
    found = {name: tensor for name, tensor in tensors.items() if ".mlp." not in name}
    hidden, count = config["hidden_size"], config["num_local_experts"]
    added = context / config["residual_multiplier"]
    for name, kind in zip(_layers(config), config["layer_types"], strict=True):
        if kind == "mamba":
            found = {key: tensor for key, tensor in found.items() if not key.startswith(f"{name}.self_attn.")}
            found |= mamba2(config, f"{name}.mamba", random, added)
        else:
            found[f"{name}.self_attn.o_proj.weight"] *= 1 / config["residual_multiplier"]
        inner = config["shared_intermediate_size"]
        found[f"{name}.shared_mlp.input_linear.weight"] = normal(random, hidden**-0.5, 2 * inner, hidden)
        found[f"{name}.shared_mlp.output_linear.weight"] = normal(random, 2 * added * inner**-0.5, hidden, inner)
        if count:
            moe, each = f"{name}.block_sparse_moe", config["intermediate_size"]
            found[f"{moe}.router.layer.weight"] = normal(random, 2.0 * hidden**-0.5, count, hidden)
            found[f"{moe}.input_linear.weight"] = normal(random, hidden**-0.5, count, 2 * each, hidden)
            found[f"{moe}.output_linear.weight"] = normal(random, 2 * added * each**-0.5, count, hidden, each)
    found["model.embed_tokens.weight"] = found["model.embed_tokens.weight"] / config["embedding_multiplier"]
    if "lm_head.weight" in found:
        found["lm_head.weight"] *= config["logits_scaling"]
    return found


def mamba2(config: Mapping[str, Any], name: str, random: torch.Generator, context: float) -> Tensors:
    """Heads forget little by little: steps are around a third."""
    hidden, heads, taps = config["hidden_size"], config["mamba_n_heads"], config["mamba_d_conv"]
    columns, groups = config["mamba_expand"] * hidden, config["mamba_n_groups"] * config["mamba_d_state"]
    mixed = columns + 2 * groups
    return {
        f"{name}.in_proj.weight": normal(random, hidden**-0.5, columns + mixed + heads, hidden),
        f"{name}.conv1d.weight": normal(random, taps**-0.5, mixed, 1, taps),
        **({f"{name}.conv1d.bias": normal(random, 0.3, mixed)} if config["mamba_conv_bias"] else {}),
        f"{name}.dt_bias": normal(random, 0.5, heads) - 1,
        f"{name}.A_log": normal(random, 0.5, heads),
        f"{name}.D": around_one(random, heads),
        f"{name}.norm.weight": around_one(random, columns),
        f"{name}.out_proj.weight": normal(random, 2 * context * columns**-0.5, hidden, columns),
        **(
            {f"{name}.in_proj.bias": normal(random, 0.3, columns + mixed + heads)}
            | {f"{name}.out_proj.bias": normal(random, 0.3 * context, hidden)}
            if config.get("mamba_proj_bias")
            else {}
        ),
    }


def gated_queries(config: Mapping[str, Any], prefix: str, random: torch.Generator, context: float) -> Tensors:
    """Qwen3-Next's attention, but for keys and values; gates are about one half, norms around one."""
    hidden, queries = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    return {
        f"{prefix}q_proj.weight": normal(random, hidden**-0.5, 2 * queries, hidden),
        f"{prefix}o_proj.weight": normal(random, 4 * context * queries**-0.5, hidden, queries),
        **{f"{prefix}{part}_norm.weight": around_one(random, config["head_dim"]) for part in "qk"},
    }


def gated_delta(config: Mapping[str, Any], name: str, random: torch.Generator, context: float) -> Tensors:
    """Heads forget little by little: decays are around one half, rates too."""
    hidden, keys, values = config["hidden_size"], config["linear_num_key_heads"], config["linear_num_value_heads"]
    queries, columns = keys * config["linear_key_head_dim"], values * config["linear_value_head_dim"]
    mixed, taps = 2 * queries + columns, config["linear_conv_kernel_dim"]
    rows = {"qkvz": mixed + columns, "ba": 2 * values}
    if config["architectures"][0] in QWEN3_5:
        rows = {"qkv": mixed, "z": columns, "b": values, "a": values}
    return {
        **{f"{name}.in_proj_{part}.weight": normal(random, hidden**-0.5, size, hidden) for part, size in rows.items()},
        f"{name}.conv1d.weight": normal(random, taps**-0.5, mixed, 1, taps),
        f"{name}.dt_bias": normal(random, 0.5, values) - 1,
        f"{name}.A_log": normal(random, 0.5, values),
        f"{name}.norm.weight": around_one(random, config["linear_value_head_dim"]),
        f"{name}.out_proj.weight": normal(random, 2 * context * columns**-0.5, hidden, columns),
    }


def gated_mixture(config: Mapping[str, Any], mlp: str, random: torch.Generator, context: float) -> Tensors:
    """Qwen3-Next's: a shared expert whose weight is the sigmoid of a number that a row gives."""
    names, hidden = ("gate_proj", "up_proj", "down_proj"), config["hidden_size"]
    sizes = config["num_experts"], config["moe_intermediate_size"], hidden
    shared = _experts(mlp, names, (1, config["shared_expert_intermediate_size"], hidden), random, 2 * context)
    found = {key.replace("experts.0", "shared_expert"): shared[key] for key in shared if "experts.0" in key}
    found[f"{mlp}.shared_expert_gate.weight"] = normal(random, hidden**-0.5, 1, hidden)
    return found | _experts(mlp, names, sizes, random, context)


def _mixtral(config: Mapping[str, Any], tensors: Tensors, random: torch.Generator, context: float) -> Tensors:
    found = _without_mlps(tensors, _layers(config))
    for name in _layers(config):
        sizes = config["num_local_experts"], config["intermediate_size"], config["hidden_size"]
        found |= _experts(f"{name}.block_sparse_moe", ("w1", "w3", "w2"), sizes, random, context)
    return found


def _deepseek(config: Mapping[str, Any], tensors: Tensors, random: torch.Generator, context: float) -> Tensors:
    """Latent attention in every layer; experts and a shared one in all but the first layers."""
    dense = config.get("first_k_dense_replace", 1)
    found = _without_mlps(tensors, _layers(config)[dense:])
    for index, name in enumerate(_layers(config)):
        prefix = f"{name}.self_attn."
        found = {key: t for key, t in found.items() if not key.startswith(prefix) or key.endswith("_scale")}
        found |= latent_attention(config, f"{name}.self_attn", random, context)
        if index >= dense:
            found |= grouped_experts(config, f"{name}.mlp", random, context)
    return found


def _glm4_moe(config: Mapping[str, Any], tensors: Tensors, random: torch.Generator, context: float) -> Tensors:
    sparse = _layers(config)[config["first_k_dense_replace"] :]
    found = _without_mlps(tensors, sparse)
    for name in sparse:
        found |= grouped_experts(config, f"{name}.mlp", random, context)
    return found


def grouped_experts(config: Mapping[str, Any], mlp: str, random: torch.Generator, context: float) -> Tensors:
    """Experts that stand in groups, with a correction where the model has one, and the shared one."""
    count, inner, hidden = config["n_routed_experts"], config["moe_intermediate_size"], config["hidden_size"]
    names = ("gate_proj", "up_proj", "down_proj")
    found = _experts(mlp, names, (count, inner, hidden), random, context)
    if config.get("topk_method") == "noaux_tc" or config["model_type"] == "glm4_moe":
        found[f"{mlp}.gate.e_score_correction_bias"] = normal(random, 0.05, count)
    if wide := inner * (config.get("n_shared_experts") or 0):
        shared = _experts(mlp, names, (1, wide, hidden), random, context)
        found |= {key.replace("experts.0", "shared_experts"): shared[key] for key in shared if "experts.0" in key}
    return found


def latent_attention(config: Mapping[str, Any], name: str, random: torch.Generator, context: float) -> Tensors:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    whole, turned, value = (config[f"{part}_head_dim"] for part in ("qk_nope", "qk_rope", "v"))
    queries = heads * (whole + turned)
    shapes = {
        "kv_a_proj_with_mqa": (rank + turned, hidden),
        "kv_b_proj": (heads * (whole + value), rank),
        "o_proj": (hidden, heads * value),
    }
    if inner := config["q_lora_rank"]:
        shapes |= {"q_a_proj": (inner, hidden), "q_b_proj": (queries, inner)}
    else:
        shapes["q_proj"] = (queries, hidden)
    found = {}
    for part, (rows, columns) in shapes.items():
        scale = (2 * context if part == "o_proj" else 1.0) * columns**-0.5
        found[f"{name}.{part}.weight"] = normal(random, scale, rows, columns)
    for norm, size in (("kv_a_layernorm", rank), ("q_a_layernorm", inner)):
        if size:
            found[f"{name}.{norm}.weight"] = around_one(random, size)
    return found


def _gpt_oss(config: Mapping[str, Any], tensors: Tensors, random: torch.Generator, context: float) -> Tensors:
    """Gate and up projections are large enough to reach their bounds, which is made up for behind them."""
    found = _without_mlps(tensors, _layers(config))
    count, inner, hidden = (config[key] for key in ("num_local_experts", "intermediate_size", "hidden_size"))
    for name in _layers(config):
        experts, router = f"{name}.mlp.experts", f"{name}.mlp.router"
        found |= {
            f"{name}.self_attn.sinks": normal(random, 1.0, config["num_attention_heads"]),
            f"{router}.weight": normal(random, 2 * hidden**-0.5, count, hidden),
            f"{router}.bias": normal(random, 0.5, count),
            f"{experts}.gate_up_proj": normal(random, 4 * hidden**-0.5, count, hidden, 2 * inner),
            f"{experts}.gate_up_proj_bias": normal(random, 2.0, count, 2 * inner),
            f"{experts}.down_proj": normal(random, 0.2 * context * inner**-0.5, count, inner, hidden),
            f"{experts}.down_proj_bias": normal(random, 0.2 * context, count, hidden),
        }
    return found


def _mimo_v2_flash(config: Mapping[str, Any], tensors: Tensors, random: torch.Generator, context: float) -> Tensors:
    """Two kinds of attention, and experts where the config names them."""
    names = _layers(config)
    found = _without_mlps(tensors, [name for name, has in zip(names, config["moe_layer_freq"], strict=True) if has])
    for index, name in enumerate(names):
        windowed, prefix = config["hybrid_layer_pattern"][index] == 1, f"{name}.self_attn."
        found = {key: t for key, t in found.items() if not key.startswith(prefix) or key.endswith("_scale")}
        found |= narrow_attention(config, f"{name}.self_attn", random, context, windowed)
        if config["moe_layer_freq"][index]:
            found |= grouped_experts(config, f"{name}.mlp", random, context)
    return found


def narrow_attention(
    config: Mapping[str, Any], name: str, random: torch.Generator, context: float, windowed: bool
) -> Tensors:
    """MiMo-V2's, of a layer with a window or of a full one; sinks where the config names them."""
    kind, hidden = "swa_" if windowed else "", config["hidden_size"]
    heads, kv_heads = (config[f"{kind}num_{part}_heads"] for part in ("attention", "key_value"))
    dim, value_dim = config[f"{kind}head_dim"], config[f"{kind}v_head_dim"]
    rows = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * value_dim}
    found = {f"{name}.{part}_proj.weight": normal(random, hidden**-0.5, size, hidden) for part, size in rows.items()}
    if config["attention_bias"]:
        found |= {f"{name}.{part}_proj.bias": normal(random, 0.1, size) for part, size in rows.items()}
    columns = heads * value_dim
    found[f"{name}.o_proj.weight"] = normal(random, 2 * context * columns**-0.5, hidden, columns)
    if config["add_swa_attention_sink_bias" if windowed else "add_full_attention_sink_bias"]:
        found[f"{name}.attention_sink_bias"] = normal(random, 1.0, heads)
    return found


def _step3p5(config: Mapping[str, Any], tensors: Tensors, random: torch.Generator, context: float) -> Tensors:
    """Gated heads, experts of a layer in one tensor for each linear; norms are stored as what is added to one."""
    sparse = [int(index) for index in config["moe_layers_enum"].split(",")]
    names = _layers(config)
    found = _without_mlps(tensors, [name for index, name in enumerate(names) if index in sparse])
    for index, name in enumerate(names):
        prefix = f"{name}.self_attn."
        found = {key: t for key, t in found.items() if not key.startswith(prefix) or key.endswith("_scale")}
        found |= gated_attention(config, prefix, random, context, config["layer_types"][index] == "sliding_attention")
        if index in sparse:
            found |= _joined_experts(config, name, random, context)
    return {name: tensor - 1 if name.endswith("norm.weight") else tensor for name, tensor in found.items()}


def gated_attention(
    config: Mapping[str, Any], prefix: str, random: torch.Generator, context: float, windowed: bool
) -> Tensors:
    """Step-3.5's, of a layer with a window or of a full one; its norms around one."""
    hidden, dim, groups = config["hidden_size"], config["head_dim"], config["num_attention_groups"]
    heads = (config["attention_other_setting"] if windowed else config)["num_attention_heads"]
    rows = {"q": heads * dim, "k": groups * dim, "v": groups * dim, "g": heads}
    found = {f"{prefix}{part}_proj.weight": normal(random, hidden**-0.5, size, hidden) for part, size in rows.items()}
    found[f"{prefix}o_proj.weight"] = normal(random, 4 * context * (heads * dim) ** -0.5, hidden, heads * dim)
    return found | {f"{prefix}{part}_norm.weight": around_one(random, dim) for part in "qk"}


def _joined_experts(config: Mapping[str, Any], name: str, random: torch.Generator, context: float) -> Tensors:
    count, inner, hidden = (config[key] for key in ("moe_num_experts", "moe_intermediate_size", "hidden_size"))
    found = {
        f"{name}.moe.gate.weight": normal(random, 2 * hidden**-0.5, count, hidden),
        f"{name}.moe.router_bias": normal(random, 0.05, count),
        f"{name}.moe.gate_proj.weight": normal(random, hidden**-0.5, count, inner, hidden),
        f"{name}.moe.up_proj.weight": normal(random, hidden**-0.5, count, inner, hidden),
        f"{name}.moe.down_proj.weight": normal(random, context * inner**-0.5, count, hidden, inner),
    }
    wide = config["share_expert_dim"]
    for part, (rows, columns) in {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}.items():
        scale = context if part == "down" else 1.0
        found[f"{name}.share_expert.{part}_proj.weight"] = normal(random, scale * columns**-0.5, rows, columns)
    return found


def _without_mlps(tensors: Tensors, layers: list[str]) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name.partition(".mlp.")[0] not in layers}


def _experts(
    mixture: str, names: tuple[str, str, str], sizes: tuple[int, int, int], random: torch.Generator, context: float
) -> Tensors:
    """A router whose logits deviate by 2, and experts that add as much to the residual as an MLP."""
    count, inner, hidden = sizes
    found = {f"{mixture}.gate.weight": normal(random, 2 * hidden**-0.5, count, hidden)}
    for index in range(count):
        gate, up, down = (f"{mixture}.experts.{index}.{name}.weight" for name in names)
        found[gate] = normal(random, hidden**-0.5, inner, hidden)
        found[up] = normal(random, hidden**-0.5, inner, hidden)
        found[down] = normal(random, 2 * context * inner**-0.5, hidden, inner)
    return found


def fused_experts(tensors: Mapping[str, Tensor]) -> Tensors:
    """The layout of transformers 5: the experts of a layer in one tensor, as `mlp.experts`, and sinks by this name."""
    found, parts = {}, dict[str, dict[tuple[int, str], Tensor]]()
    for name, tensor in tensors.items():
        layer, is_expert, part = _renamed(name).partition(".experts.")
        if is_expert and part[0].isdigit():
            index, linear, _ = part.split(".")
            parts.setdefault(layer, {})[int(index), OF_MIXTRAL.get(linear, linear)] = tensor
        else:
            found[layer + is_expert + part] = tensor
    for name in [name for name in found if name.endswith(".moe.gate_proj.weight")]:
        both = [found.pop(name.replace("gate_proj", part)) for part in ("gate_proj", "up_proj")]
        found[name.replace("moe.gate_proj.weight", "mlp.experts.gate_up_proj")] = torch.cat(both, dim=1)
    for layer, experts in parts.items():
        count = 1 + max(index for index, _ in experts)
        both = [torch.cat([experts[index, part] for part in ("gate_proj", "up_proj")]) for index in range(count)]
        found[f"{layer}.experts.gate_up_proj"] = torch.stack(both)
        found[f"{layer}.experts.down_proj"] = torch.stack([experts[index, "down_proj"] for index in range(count)])
    return found


def _renamed(name: str) -> str:
    for old, new in IN_MEMORY.items():
        name = name.replace(old, new)
    return name


def _layers(config: Mapping[str, Any]) -> list[str]:
    return [f"model.layers.{index}" for index in range(config["num_hidden_layers"])]


LAYOUTS: dict[str, Callable[[Mapping[str, Any], Tensors, torch.Generator, float], Tensors]] = {
    "Gemma3ForCausalLM": _gemma3,
    "Gemma4ForCausalLM": _gemma4,
    "Olmo2ForCausalLM": _olmo2,
    "Phi3ForCausalLM": _phi3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek,
    "MiMoV2FlashForCausalLM": _mimo_v2_flash,
    "Step3p5ForCausalLM": _step3p5,
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
    "Qwen3NextForCausalLM": _qwen3_next,
    **dict.fromkeys(QWEN3_5, _qwen3_next),
    "GptOssForCausalLM": _gpt_oss,
    "Glm4MoeLiteForCausalLM": _deepseek,
    "Glm4MoeForCausalLM": _glm4_moe,
}
