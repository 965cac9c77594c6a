"""Tiny random assistants of Gemma 4 targets. None is trained.

One made with `agree=True` hands on the embedding of its token, a little disturbed: it is right about every second time.
"""

from typing import Any

import torch
from torch import Tensor

from overlap_spec.models.drafts.assistant import AssistantWeights, load_assistant
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.sources import DraftSource
from support.tiny.layouts import gemma4_attention, normal
from support.tiny.models import TinyCheckpoint, _open

OF_HIDDEN = 10.0  # of the disturbance: so that guesses depend on the hidden state
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]


def tiny_assistant(
    seed: int, target: TinyCheckpoint, *, agree: bool = True, centroids: int = 0, **changes: Any
) -> TinyCheckpoint:
    """As published: sizes of the text in an object of their own. `centroids`: of the vocabulary; 0: none."""
    random = torch.Generator().manual_seed(seed)
    wide, vocab = target.config["hidden_size"], target.config["vocab_size"]
    own = {"num_hidden_layers": 3, "num_kv_shared_layers": 3, "layer_types": KINDS, "num_attention_heads": 4}
    own |= {"intermediate_size": 40, "enable_moe_block": False, "hidden_size_per_layer_input": 0, "hidden_size": wide}
    kept = {key: value for key, value in target.config.items() if key != "architectures"}
    text = kept | own | {"vocab_size_per_layer_input": 0, "use_double_wide_mlp": False} | changes
    hidden, strength = text["hidden_size"], 0.1 if agree else 0.5
    tensors = {}
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    for index in range(len(text["layer_types"])):
        name, inner = f"model.layers.{index}", text["intermediate_size"]
        tensors |= gemma4_attention(text | {"num_hidden_layers": 0}, f"{name}.self_attn", random, index)
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        tensors |= {f"{name}.mlp.{part}_proj.weight": normal(random, s[1] ** -0.5, *s) for part, s in shapes.items()}
        for norm in norms:
            scale = strength * hidden**0.5 if norm.startswith("post") else 1.0
            tensors[f"{name}.{norm}.weight"] = scale * (1 + normal(random, 0.3, hidden))
        tensors[f"{name}.layer_scalar"] = 1 + normal(random, 0.1, 1)
    entry = normal(random, (strength if agree else 1.0) * (2 * wide) ** -0.5, hidden, 2 * wide)
    if agree:
        entry[:, wide:] *= OF_HIDDEN
        entry[:, :wide] += torch.eye(hidden, wide, dtype=torch.float64)
    head = target.tensors.get("lm_head.weight", target.tensors["model.embed_tokens.weight"])
    tensors |= {
        "model.embed_tokens.weight": head.clone() if agree else normal(random, 1.0, vocab, hidden),
        "model.norm.weight": target.tensors["model.norm.weight"] if agree else 1 + normal(random, 0.3, hidden),
        "pre_projection.weight": entry,
        "post_projection.weight": normal(random, hidden**-0.5, wide, hidden),
    }
    if centroids:
        tensors["masked_embedding.centroids.weight"] = normal(random, hidden**-0.5, centroids, hidden)
        tensors["masked_embedding.token_ordering"] = torch.randperm(vocab, generator=random)
    config = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": wide,
        "use_ordered_embeddings": bool(centroids),
        "num_centroids": centroids or 2048,
        "centroid_intermediate_top_k": 3,
        "tie_word_embeddings": True,
        "text_config": text,
    }
    return TinyCheckpoint(config, tensors)


class MemoryDraft(DraftSource):
    """A draft in memory."""

    checkpoint: TinyCheckpoint

    @classmethod
    def of(cls, checkpoint: TinyCheckpoint, target: LoadedTarget) -> "MemoryDraft":
        like = target.embedding
        made = cls("memory", like.dtype, like.device)
        object.__setattr__(made, "checkpoint", checkpoint)
        return made

    def config(self) -> dict[str, Any]:
        from overlap_spec.hub.config_values import of_text

        return of_text(self.checkpoint.config)

    def refuse_unless(self, wanted: Any) -> None:
        """Files are checked elsewhere."""

    def weights(self, canonical: Any, made_up_ids: Tensor | None = None) -> Weights:
        return _open(self.checkpoint, canonical, self.dtype, self.device)


def load_tiny_assistant(checkpoint: TinyCheckpoint, target: LoadedTarget) -> AssistantWeights:
    """Through the real loader, from memory."""
    return load_assistant(MemoryDraft.of(checkpoint, target), target)
