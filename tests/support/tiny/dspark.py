"""Tiny DSpark drafts for tests, in memory: random, or made to know what the target's head says of a token.

A draft made with `agree=True` has layers that say next to nothing, and a Markov head of the target's width whose bias
is what the target would say without its layers: a guess is right where the target goes by the token before it.
"""

from typing import Any

import torch

from overlap_spec.models.drafts.dspark import DSparkConfig, DSparkWeights, load_weights
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.loading.parts import canonical_name
from support.reference.dspark import ReferenceDSpark
from support.reference.layers import rms_norm
from support.tiny.dflash import MASK, reference_of as backbone_of, tiny_dflash
from support.tiny.layouts import final_norm
from support.tiny.models import TinyCheckpoint, _normal, _open

QUIET = 1e-2  # of the layers' logits, in a draft that agrees


def tiny_dspark(
    seed: int,
    target: TinyCheckpoint,
    *,
    kind: str = "vanilla",
    agree: bool = True,
    rank: int | None = None,
    aux_layers: tuple[int, ...] = (0, 1),
    **changes: Any,
) -> TinyCheckpoint:
    """A draft for `target` in DeepSpec's layout, without copies of the target's. `changes` go into config.json."""
    backbone = tiny_dflash(seed, target, agree=False, block_size=15, aux_layers=aux_layers)
    random = torch.Generator().manual_seed(seed + 1)
    vocab, hidden = target.config["vocab_size"], target.config["hidden_size"]
    size = hidden if agree else rank or 8
    config = backbone.config | {
        "architectures": ["Qwen3DSparkModel"],
        "mask_token_id": MASK,
        "target_layer_ids": list(aux_layers),
        "num_anchors": 4,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "markov_rank": size,
        "markov_head_type": kind,
    }
    del config["dflash_config"]
    tensors = dict(backbone.tensors)
    names = {"gated": ("gate_proj", size, hidden + size), "rnn": ("joint_proj", 3 * size, 2 * size + hidden)}
    for name, rows, columns in (*filter(None, [names.get(kind)]), ("confidence", 1, hidden + size)):
        prefix = "confidence_head.proj" if name == "confidence" else f"markov_head.{name}"
        tensors[f"{prefix}.weight"] = _normal(random, columns**-0.5, rows, columns)
        tensors[f"{prefix}.bias"] = _normal(random, 0.5, rows)
    if agree:
        embedding = target.tensors["model.embed_tokens.weight"]
        norm = final_norm(target.config, target.tensors)
        before = rms_norm(embedding, norm, target.config["rms_norm_eps"])
        tensors["markov_head.markov_w1.weight"] = before
        tensors["markov_head.markov_w2.weight"] = target.tensors.get("lm_head.weight", embedding)
        tensors["norm.weight"] = QUIET * tensors["norm.weight"]
    else:
        tensors["markov_head.markov_w1.weight"] = _normal(random, 1.0, vocab, size)
        tensors["markov_head.markov_w2.weight"] = _normal(random, 3.0 * size**-0.5, vocab, size)
    return TinyCheckpoint(config | changes, tensors)


def load_tiny_dspark(checkpoint: TinyCheckpoint, target: LoadedTarget, num_rows: int) -> DSparkWeights:
    """Through the real loader, from memory, in the target's dtype."""
    config, like = DSparkConfig.from_hf(checkpoint.config, "memory/config.json", target), target.embedding
    return load_weights(config, _open(checkpoint, canonical_name, like.dtype, like.device), target, num_rows)


def reference_of(checkpoint: TinyCheckpoint, target: TinyCheckpoint, dtype: torch.dtype) -> ReferenceDSpark:
    """The formula with these tensors, and the embedding and head of a Llama."""
    config = checkpoint.config
    own = {key: config[key] for key in ("mask_token_id", "target_layer_ids")}
    backbone = backbone_of(TinyCheckpoint(config | {"dflash_config": own}, checkpoint.tensors), target, dtype)
    return ReferenceDSpark(backbone, config["markov_head_type"])
