"""Tiny random MTP layers in all layouts, and targets with them (see tests/support/tiny/models.py). None is trained.

A layer made with `agree=True` hands on the embedding of its row's token, a little disturbed: it knows the target's
embedding and head but not its layers, so it is right about every second time.
"""

import torch
from torch import Tensor

from overlap_spec.models.drafts.mtp import LayerConfig, MtpLayersWeights, MtpWeights, load_mtp, load_mtp_layers
from overlap_spec.models.drafts.mtp_layouts import canonical_names, layout_of, layout_of_layers
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.registry import ARCHITECTURES, architecture_of
from overlap_spec.models.targets.llama import LlamaConfig, family_of
from support.tiny.layouts import (
    final_norm,
    gated_attention,
    gated_mixture,
    gated_queries,
    grouped_experts,
    latent_attention,
    narrow_attention,
)
from support.tiny.models import TinyCheckpoint, _around_one, _layer, _normal, _open, head_config

PREFIX = "model.mtp_layers.0"


def tiny_mtp(seed: int, target: TinyCheckpoint, *, agree: bool = True) -> TinyCheckpoint:
    """The layer alone, with the config of a checkpoint that holds the target too."""
    random = torch.Generator().manual_seed(seed)
    config = head_config(target) | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    hidden, strength = config["hidden_size"], 0.1 if agree else 1.0
    tensors = _layer(config, PREFIX, hidden, random, strength) | _biases(config, [PREFIX], random)
    tensors |= {
        f"{PREFIX}.{name}.weight": _around_one(random, hidden) for name in ("token_layernorm", "hidden_layernorm")
    }
    tensors[f"{PREFIX}.input_proj.weight"] = _normal(random, strength * (2 * hidden) ** -0.5, hidden, 2 * hidden)
    if agree:
        tensors[f"{PREFIX}.input_proj.weight"][:, hidden:] += torch.eye(hidden, dtype=torch.float64)
    own = final_norm(target.config, target.tensors) if agree else _around_one(random, hidden)
    return TinyCheckpoint(config, tensors | {f"{PREFIX}.final_layernorm.weight": own})


def tiny_nextn(seed: int, target: TinyCheckpoint, *, agree: bool = True) -> TinyCheckpoint:
    """A target whose layers have experts and the layer after its last one, which has them too, with copies of what it
    shares. Every norm around 1 with a deviation of 0.3.
    """
    random = torch.Generator().manual_seed(seed)
    config, hidden = target.config | {"num_nextn_predict_layers": 1}, target.config["hidden_size"]
    prefix, strength = f"model.layers.{config['num_hidden_layers']}", 0.05 if agree else 0.5
    tensors = _own_attention(config, prefix, random, strength)
    tensors |= grouped_experts(config, f"{prefix}.mlp", random, strength)
    for norm in ("input_layernorm", "post_attention_layernorm", "enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}.{norm}.weight"] = 1 + _normal(random, 0.3, hidden)
    fc = _normal(random, (0.1 if agree else 1.0) * (2 * hidden) ** -0.5, hidden, 2 * hidden)
    if agree:
        fc[:, :hidden] += torch.eye(hidden, dtype=torch.float64)
        tensors[f"{prefix}.shared_head.norm.weight"] = final_norm(target.config, target.tensors)
    tensors |= {f"{prefix}.eh_proj.weight": fc, f"{prefix}.embed_tokens.weight": torch.zeros(1)}
    tensors[f"{prefix}.shared_head.head.weight"] = torch.zeros(1)
    return TinyCheckpoint(config, target.tensors | tensors)


def tiny_qwen3_next(seed: int, target: TinyCheckpoint, *, agree: bool = True) -> TinyCheckpoint:
    """A Qwen3-Next or 3.5 with its layer, which attends. Norms are what is added to one, with a deviation of 0.3."""
    random = torch.Generator().manual_seed(seed)
    config, hidden, strength = target.config, target.config["hidden_size"], 0.05 if agree else 0.5
    layer = _layer(config, "mtp.layers.0", hidden, random, strength)
    tensors = {name: tensor for name, tensor in layer.items() if ".self_attn." in name}
    tensors |= gated_queries(config, "mtp.layers.0.self_attn.", random, strength)
    if config.get("num_experts"):
        tensors |= gated_mixture(config, "mtp.layers.0.mlp", random, strength)
    else:
        tensors |= {name: tensor for name, tensor in layer.items() if ".mlp." in name}
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    norms += tuple(f"layers.0.{part}_layernorm" for part in ("input", "post_attention"))
    norms += tuple(f"layers.0.self_attn.{part}_norm" for part in "qk")
    for norm in norms:
        size = config["head_dim"] if "self_attn" in norm else hidden
        tensors[f"mtp.{norm}.weight"] = _normal(random, 0.3, size)
    fc = _normal(random, (0.1 if agree else 1.0) * (2 * hidden) ** -0.5, hidden, 2 * hidden)
    if agree:
        fc[:, :hidden] += torch.eye(hidden, dtype=torch.float64)
        tensors["mtp.norm.weight"] = target.tensors["model.norm.weight"]
    counted = {} if "mlp_only_layers" in config else {"mtp_num_hidden_layers": 1}  # Qwen3-Next's does not count it
    return TinyCheckpoint(config | counted, target.tensors | tensors | {"mtp.fc.weight": fc})


def _own_attention(config: dict, prefix: str, random: torch.Generator, strength: float) -> dict[str, Tensor]:
    if "kv_lora_rank" in config:
        return latent_attention(config, f"{prefix}.self_attn", random, strength)
    layer = _layer(config, prefix, config["hidden_size"], random, strength)
    found = {name: tensor for name, tensor in layer.items() if ".self_attn." in name}
    norms = [name for name in found if name.endswith("norm.weight")]
    return found | {name: 1 + _normal(random, 0.3, config["head_dim"]) for name in norms}


def with_mtp(seed: int, target: TinyCheckpoint) -> TinyCheckpoint:
    """A MiMo checkpoint: the target, biases on its queries, keys and values, and the layer."""
    layer = tiny_mtp(seed, target)
    names = [f"model.layers.{index}" for index in range(target.config["num_hidden_layers"])]
    biases = _biases(target.config, names, torch.Generator().manual_seed(seed + 1))
    return TinyCheckpoint(layer.config, target.tensors | biases | layer.tensors)


def in_deepseek_layout(mimo: TinyCheckpoint) -> TinyCheckpoint:
    """The same layer after the target's last one, reading the embedding first, with copies of what it shares."""
    new = f"model.layers.{mimo.config['num_hidden_layers']}"
    names = {
        "token_layernorm": "enorm",
        "hidden_layernorm": "hnorm",
        "input_proj": "eh_proj",
        "final_layernorm": "shared_head.norm",
    }
    tensors = {f"{new}.embed_tokens.weight": torch.zeros(1), f"{new}.shared_head.head.weight": torch.zeros(1)}
    for name, tensor in mimo.tensors.items():
        part = name.removeprefix(f"{PREFIX}.")
        stem, _, kind = part.rpartition(".")
        moved = torch.cat(tensor.chunk(2, 1)[::-1], 1) if stem == "input_proj" else tensor
        tensors[name if part == name else f"{new}.{names.get(stem, stem)}.{kind}"] = moved
    return TinyCheckpoint(mimo.config | {"architectures": ["Qwen2ForCausalLM"]}, tensors)


def tiny_mimo_v2(seed: int, target: TinyCheckpoint, num_layers: int, *, agree: bool = True) -> TinyCheckpoint:
    """Layers for each of `num_layers` guesses, alone, with the config of a checkpoint that holds the target too.

    Layer i knows of the target what `tiny_mtp` does, which is more than it would learn of a token so far ahead. Of a
    MiMo-V2 its attention is that of layers with a window.
    """
    is_own = target.config["architectures"] == ["MiMoV2FlashForCausalLM"]
    names = {
        "token_layernorm": "enorm",
        "hidden_layernorm": "hnorm",
        "input_proj": "eh_proj",
        "post_attention_layernorm": "pre_mlp_layernorm",
    }
    tensors, config = {}, dict(target.config) if is_own else head_config(target)
    for index in range(num_layers):
        if is_own:
            random, name = torch.Generator().manual_seed(seed + 100 * index), f"model.mtp.layers.{index}.self_attn"
            tensors |= narrow_attention(config, name, random, 0.1 if agree else 1.0, windowed=True)
        for name, tensor in tiny_mtp(seed + 100 * index, target, agree=agree).tensors.items():
            stem, _, kind = name.removeprefix(f"{PREFIX}.").rpartition(".")
            if is_own and stem.startswith("self_attn."):
                continue
            if kind == "bias" and not family_of(config).attention_bias(config).qkv:
                continue
            moved = torch.cat(tensor.chunk(2, 1)[::-1], 1) if stem == "input_proj" else tensor
            tensors[f"model.mtp.layers.{index}.{names.get(stem, stem)}.{kind}"] = moved
    return TinyCheckpoint(config | {"num_nextn_predict_layers": num_layers}, tensors)


def tiny_step(seed: int, target: TinyCheckpoint, num_layers: int, *, agree: bool = True) -> TinyCheckpoint:
    """The same in Step-3.5's layout: after the target's last layer, each with a head of its own.

    Of a Step-3.5 its attention is that of layers with a window, and norms are stored as what is added to one.
    """
    is_own = target.config["architectures"] == ["Step3p5ForCausalLM"]
    v2, num_target_layers = tiny_mimo_v2(seed, target, num_layers, agree=agree), target.config["num_hidden_layers"]
    random = torch.Generator().manual_seed(seed + 7)
    head = target.tensors.get("lm_head.weight", target.tensors["model.embed_tokens.weight"])
    tensors = {}
    for name, tensor in v2.tensors.items():
        index, _, part = name.removeprefix("model.mtp.layers.").partition(".")
        part = part.replace("final_layernorm", "transformer.shared_head.norm")
        part = part.replace("pre_mlp_layernorm", "post_attention_layernorm")
        if is_own and part.startswith("self_attn."):
            continue
        tensors[f"model.layers.{num_target_layers + int(index)}.{part}"] = tensor
    for index in range(num_layers if is_own else 0):
        prefix = f"model.layers.{num_target_layers + index}.self_attn."
        tensors |= gated_attention(target.config, prefix, random, 0.1 if agree else 1.0, windowed=True)
    if is_own:
        tensors = {name: tensor - 1 if name.endswith("norm.weight") else tensor for name, tensor in tensors.items()}
    for index in range(num_layers):
        own = head + _normal(random, 0.05 * head.std().item(), *head.shape)
        tensors[f"model.layers.{num_target_layers + index}.transformer.shared_head.output.weight"] = own
    config = target.config | {"num_nextn_predict_layers": num_layers} if is_own else v2.config
    return TinyCheckpoint(config, tensors)


def with_layers(layers: TinyCheckpoint, target: TinyCheckpoint) -> TinyCheckpoint:
    """A checkpoint of both."""
    return TinyCheckpoint(layers.config, target.tensors | layers.tensors)


def load_tiny_layers(checkpoint: TinyCheckpoint, target: LoadedTarget, num_layers: int) -> MtpLayersWeights:
    """Through the real loader, from memory, in the target's dtype."""
    config, like = _config_of(checkpoint), target.embedding
    source = _open(checkpoint, canonical_names(config.num_layers), like.dtype, like.device)
    layout = layout_of_layers(checkpoint.tensors)
    return load_mtp_layers(config, layout, source, target, num_layers)


def load_tiny_mtp(checkpoint: TinyCheckpoint, target: LoadedTarget, target_ids: Tensor | None = None) -> MtpWeights:
    """Through the real loader, from memory, in the target's dtype."""
    config, like = _config_of(checkpoint), target.embedding
    source = _open(checkpoint, canonical_names(config.num_layers), like.dtype, like.device)
    return load_mtp(config, layout_of(checkpoint.config), source, target, target_ids)


def _config_of(checkpoint: TinyCheckpoint) -> LayerConfig:
    """As a loader reads it; heads of other names have Llama's layers."""
    settings, origin = checkpoint.config, "memory/config.json"
    if not any(name in ARCHITECTURES for name in settings["architectures"]):
        return LlamaConfig.from_hf(settings, origin)
    config = architecture_of(settings, origin).read_config(settings, origin)
    assert isinstance(config, LayerConfig)
    return config


def _biases(config: dict, layers: list[str], random: torch.Generator) -> dict[str, Tensor]:
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    return {
        f"{layer}.self_attn.{part}_proj.bias": _normal(random, 0.1, count * config["head_dim"])
        for layer in layers
        for part, count in heads.items()
    }
