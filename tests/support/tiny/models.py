"""Tiny random checkpoints for tests: in memory, loaded, or written as Hugging Face directories.

A tiny target mostly maps its current token to the next one, disturbed by what came before (`context` says how much), so
greedy text is neither constant nor noise. A tiny head made by `tiny_eagle3(..., agree=True)` knows the target's
embedding and head but not its layers: it is right about every second time, and accept_len takes every value from 0 to
K. With `agree=False` it is random.

    target = load_tiny_target(tiny_target(seed=1))             # LoadedTarget, float64
    draft = load_tiny_draft(tiny_eagle3(seed=2, target=...), target)   # LoadedDraft
    write_checkpoint(directory, tiny_target(seed=1)); write_tokenizer(directory)
"""

import functools
import json
import pickle
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from overlap_spec.hub.quantization import quantization_scheme
from overlap_spec.models.drafts.eagle import canonical_name
from overlap_spec.models.drafts.eagle3 import Eagle3Config, Eagle3Weights, load_eagle3
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.layers.embedding import rank_of
from overlap_spec.models.layers.parallel import WHOLE, Rank
from overlap_spec.models.loading import parts
from overlap_spec.models.loading.checkpoint import Checkpoint, Shape
from overlap_spec.models.registry import ARCHITECTURES, architecture_of
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.divided import divided
from overlap_spec.models.targets.llama import FAMILIES, family_of
from support.tiny.layouts import around_one as _around_one, final_norm, in_own_layout, normal as _normal

VOCAB, EOS = 128, 2
CPU = torch.device("cpu")


@dataclass(frozen=True)
class TinyCheckpoint:
    """A checkpoint in memory: `config` as in config.json, `tensors` under Hugging Face names, float64."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


class MemorySource:
    """`TensorSource` over a dict."""

    origin = "memory"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def shapes(self) -> Mapping[str, Shape]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def file_of(self, name: str) -> str:
        return self.origin

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def tiny_config(*, layers: int = 2, hidden: int = 32, vocab: int = VOCAB, **changes: Any) -> dict[str, Any]:
    """A Llama config.json. `head_dim * num_key_value_heads >= hidden_size`, which `tiny_eagle3` builds on."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 2,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": EOS,
    }
    return config | changes


def tiny_target(
    seed: int, *, context: float = 0.15, spread: float = 3.0, kv_scale: float | None = None, **config: Any
) -> TinyCheckpoint:
    """A random target; `context` scales what its layers add to the residual, `spread` is the logits' deviation.

    `kv_scale`: of stored keys, and twice as much of values; None: the checkpoint has no such tensors. Tests of a file
    ask for few targets, many times: each is drawn once, and what is given away is a copy.
    """
    drawn = _drawn(pickle.dumps((seed, context, spread, kv_scale, config)))
    return TinyCheckpoint(deepcopy(drawn.config), {name: tensor.clone() for name, tensor in drawn.tensors.items()})


@functools.lru_cache(64)
def _drawn(given: bytes) -> TinyCheckpoint:
    """Of pickled arguments of `tiny_target`."""
    seed, context, spread, kv_scale, config = pickle.loads(given)
    settings = tiny_config(**config)
    random = torch.Generator().manual_seed(seed)
    hidden, vocab = settings["hidden_size"], settings["vocab_size"]
    tensors = {"model.embed_tokens.weight": _normal(random, 1.0, vocab, hidden)}
    for index in range(settings["num_hidden_layers"]):
        tensors |= _layer(settings, f"model.layers.{index}", hidden, random, context)
        if kv_scale is not None:
            for factor, part in enumerate("kv", start=1):
                tensors[f"model.layers.{index}.self_attn.{part}_scale"] = torch.tensor(factor * kv_scale)
    tensors["model.norm.weight"] = _around_one(random, hidden)
    if not settings["tie_word_embeddings"]:
        tensors["lm_head.weight"] = _normal(random, spread * hidden**-0.5, vocab, hidden)
    return TinyCheckpoint(settings, in_own_layout(settings, tensors, random, context))


def head_config(target: TinyCheckpoint) -> dict[str, Any]:
    """What a draft head's config takes from its target's: the heads of other families have Llama's layers."""
    name = target.config["architectures"][0]
    if name in FAMILIES and not ARCHITECTURES[name].is_mixture:
        return dict(target.config)
    llama = tiny_config()
    of_llama = (
        "architectures",
        "model_type",
        *(("rope_theta",) if isinstance(target.config["rope_theta"], list) else ()),
    )
    return {key: target.config[key] for key in llama} | {key: llama[key] for key in of_llama}


def tiny_eagle3(
    seed: int,
    target: TinyCheckpoint,
    *,
    draft_vocab: int | None = 112,
    agree: bool = True,
    aux_layers: tuple[int, ...] = (0, 1),
    **changes: Any,
) -> TinyCheckpoint:
    """A head for `target` in the common layout (`midlayer`, d2t and t2d, no embedding).

    `draft_vocab=None` shares the target's head. `changes` go into config.json.
    """
    random = torch.Generator().manual_seed(seed)
    hidden = target.config["hidden_size"]
    config = head_config(target) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "draft_vocab_size": draft_vocab,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(aux_layers)},
    }
    config |= changes
    tensors = _layer(config, "midlayer", 2 * hidden, random, 0.2 if agree else 1.0)
    tensors["midlayer.hidden_norm.weight"] = _around_one(random, hidden)
    features = hidden * len(aux_layers)
    tensors["fc.weight"] = _normal(random, 0.1 * features**-0.5 if agree else features**-0.5, hidden, features)
    tensors["norm.weight"] = final_norm(target.config, target.tensors).clone() if agree else _around_one(random, hidden)
    for index in range(1, config["num_hidden_layers"]):
        tensors |= _further_layer(config, index, random, 0.2 if agree else 1.0)
    if draft_vocab is not None:
        tensors |= _draft_vocabulary(target, draft_vocab, random, agree)
    if agree:
        _pass_embedding_through(config, tensors)
    return TinyCheckpoint(config, tensors)


def load_tiny_target(
    checkpoint: TinyCheckpoint,
    dtype: torch.dtype = torch.float64,
    device: torch.device = CPU,
    rank: Rank = WHOLE,
) -> DecoderWeights:
    """Through the real loader, from memory. Linears in fewer bits stay so: the references of their kernels multiply."""
    architecture = architecture_of(checkpoint.config, "memory/config.json")
    config = architecture.read_config(checkpoint.config, "memory/config.json")
    weights = _open(checkpoint, parts.canonical_name, dtype, device)
    scheme = quantization_scheme(checkpoint.config, "memory/config.json")
    if rank.ranks > 1:
        config, weights.division = divided(config, "memory/config.json", rank, scheme)
    weights.forms.always_keeps = True
    loaded = architecture.load(config, weights.in_format(scheme))
    assert isinstance(loaded, DecoderWeights)
    return loaded


def load_tiny_draft(checkpoint: TinyCheckpoint, target: LoadedTarget) -> Eagle3Weights:
    """Through the real loader, from memory, in the target's dtype."""
    config = Eagle3Config.from_hf(checkpoint.config, target.num_layers, "memory/config.json")
    like = target.embedding
    source = _open(checkpoint, canonical_name, like.dtype, like.device)
    return load_eagle3(config, source, target, rank_of(like))


def write_checkpoint(directory: Path, checkpoint: TinyCheckpoint, *, binary: bool = False) -> Path:
    """Write config.json and model.safetensors (or pytorch_model.bin)."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(checkpoint.config, indent=1))
    tensors = {name: tensor.contiguous().clone() for name, tensor in checkpoint.tensors.items()}
    if binary:
        torch.save(tensors, directory / "pytorch_model.bin")
    else:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _open(checkpoint: TinyCheckpoint, canonical: Any, dtype: torch.dtype, device: torch.device) -> Checkpoint:
    return Checkpoint(MemorySource(checkpoint.tensors), canonical, dtype, device, lambda done, total: None)


def _layer(
    config: Mapping[str, Any], name: str, inputs: int, random: torch.Generator, strength: float
) -> dict[str, Tensor]:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {
        "self_attn.q_proj": (queries, inputs),
        "self_attn.k_proj": (keys, inputs),
        "self_attn.v_proj": (keys, inputs),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    into_residual = {"self_attn.o_proj", "mlp.down_proj"}
    family = family_of(config)
    bias = family.attention_bias(config)
    mlp = family.mlp_bias and config.get("mlp_bias", False)
    biased = {part for part in shapes if (mlp if "mlp" in part else bias.output if "o_proj" in part else bias.qkv)}
    tensors = {}
    for part, (rows, columns) in shapes.items():
        scale = (strength * 2 if part in into_residual else 1.0) * columns**-0.5
        tensors[f"{name}.{part}.weight"] = _normal(random, scale, rows, columns)
        if part in biased:
            tensors[f"{name}.{part}.bias"] = _normal(random, 0.1, rows)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{name}.{norm}.weight"] = _around_one(random, hidden)
    for norm in ("q_norm", "k_norm") if family.head_norms(config) else ():
        tensors[f"{name}.self_attn.{norm}.weight"] = _around_one(random, dim)
    return tensors


def _further_layer(
    config: Mapping[str, Any], index: int, random: torch.Generator, strength: float
) -> dict[str, Tensor]:
    layer = _layer(config, f"layers.{index}", config["hidden_size"], random, strength)
    return {name.replace("input_layernorm", "hidden_norm"): tensor for name, tensor in layer.items()}


def _draft_vocabulary(target: TinyCheckpoint, size: int, random: torch.Generator, agree: bool) -> dict[str, Tensor]:
    """Head rows, and the offsets and mask of the tokens that they stand for."""
    vocab, hidden = target.config["vocab_size"], target.config["hidden_size"]
    ids = torch.randperm(vocab, generator=random)[:size].sort().values
    head = target.tensors.get("lm_head.weight", target.tensors["model.embed_tokens.weight"])
    known = torch.zeros(vocab, dtype=torch.bool)
    known[ids] = True
    return {
        "lm_head.weight": head[ids] if agree else _normal(random, 3.0 * hidden**-0.5, size, hidden),
        "d2t": ids - torch.arange(size),
        "t2d": known,
    }


def _pass_embedding_through(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Make attention find the row's own token (equal embeddings score highest) and add its embedding."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    group = heads // kv_heads
    identity = torch.eye(kv_heads * dim, 2 * hidden, dtype=torch.float64)  # reads the embedding half
    identity[hidden:] = 0
    by_head = identity.view(kv_heads, 1, dim, 2 * hidden).expand(kv_heads, group, dim, 2 * hidden)
    back = identity[:, :hidden].view(kv_heads, 1, dim, hidden).expand(kv_heads, group, dim, hidden) / group
    wanted = {
        "q_proj": 2.5 * by_head.reshape(heads * dim, 2 * hidden),
        "k_proj": 2.5 * identity,
        "v_proj": identity,
        "o_proj": back.reshape(heads * dim, hidden).T,
    }
    for part, weight in wanted.items():
        name = f"midlayer.self_attn.{part}.weight"
        tensors[name] = weight + 0.1 * tensors[name]
