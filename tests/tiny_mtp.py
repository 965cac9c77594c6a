"""Tiny random MTP layers in both layouts, and targets with one (see tests/tiny_models.py). None is trained.

A layer made with `agree=True` hands on the embedding of its row's token, a little disturbed: it knows the target's
embedding and head but not its layers, so it is right about every second time.
"""

import torch
from tiny_models import TinyCheckpoint, _around_one, _layer, _normal, _open
from torch import Tensor

from overlap_spec.models import mtp_loader
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.llama_config import LlamaConfig
from overlap_spec.models.mtp import MtpWeights
from overlap_spec.models.mtp_layouts import canonical_names, layout_of

PREFIX = "model.mtp_layers.0"


def tiny_mtp(seed: int, target: TinyCheckpoint, *, agree: bool = True) -> TinyCheckpoint:
    """The layer alone, with the config of a checkpoint that holds the target too."""
    random = torch.Generator().manual_seed(seed)
    config = target.config | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    hidden, strength = config["hidden_size"], 0.1 if agree else 1.0
    tensors = _layer(config, PREFIX, hidden, random, strength) | _biases(config, [PREFIX], random)
    tensors |= {
        f"{PREFIX}.{name}.weight": _around_one(random, hidden) for name in ("token_layernorm", "hidden_layernorm")
    }
    tensors[f"{PREFIX}.input_proj.weight"] = _normal(random, strength * (2 * hidden) ** -0.5, hidden, 2 * hidden)
    if agree:
        tensors[f"{PREFIX}.input_proj.weight"][:, hidden:] += torch.eye(hidden, dtype=torch.float64)
    own = target.tensors["model.norm.weight"] if agree else _around_one(random, hidden)
    return TinyCheckpoint(config, tensors | {f"{PREFIX}.final_layernorm.weight": own})


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


def load_tiny_mtp(checkpoint: TinyCheckpoint, target: LoadedTarget, target_ids: Tensor | None = None) -> MtpWeights:
    """Through the real loader, from memory, in the target's dtype."""
    config, like = LlamaConfig.from_hf(checkpoint.config, "memory/config.json"), target.embedding
    source = _open(checkpoint, canonical_names(config.num_layers), like.dtype, like.device)
    return mtp_loader.load_mtp(config, layout_of(checkpoint.config), source, target, target_ids)


def _biases(config: dict, layers: list[str], random: torch.Generator) -> dict[str, Tensor]:
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    return {
        f"{layer}.self_attn.{part}_proj.bias": _normal(random, 0.1, count * config["head_dim"])
        for layer in layers
        for part, count in heads.items()
    }
