"""Determines the kind of a draft checkpoint from its tensors.

Heads of every kind are published with `architectures: ["LlamaForCausalLM"]`, so the config does not tell the kind. A
head under the wrong method still runs, but almost no guess is accepted.
"""

import enum
from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]  # shapes of tensors by name; a leading `model.` is ignored


class DraftKind(enum.Enum):
    """The kind of a checkpoint; the value is its name in messages."""

    EAGLE_3 = "an EAGLE-3 head"
    EAGLE_2 = "an EAGLE / EAGLE-2 head"
    MTP = "a multi-token-prediction (MTP) layer"
    LANGUAGE_MODEL = "an ordinary language model, which is a STANDALONE draft"
    UNKNOWN = "no draft model known here"


def draft_kind(shapes: Shapes) -> DraftKind:
    """EAGLE-3 normalises its features (`hidden_norm`) beside the embedding, EAGLE concatenates both for `fc`."""
    known = _canonical(shapes)
    if any("mtp_layers." in name or name.endswith(".eh_proj.weight") for name in known):
        return DraftKind.MTP
    if "layers.0.hidden_norm.weight" in known:
        return DraftKind.EAGLE_3
    if (fc := known.get("fc.weight")) is not None:
        return DraftKind.EAGLE_2 if len(fc) == 2 and fc[1] == 2 * fc[0] else DraftKind.UNKNOWN
    if any(f"layers.0.{part}.{end}" in known for part in _ATTENTION for end in _WEIGHTS) and any(
        f"layers.0.{part}.weight" in known for part in _NORMS
    ):
        return DraftKind.LANGUAGE_MODEL
    return DraftKind.UNKNOWN


_WEIGHTS = ("weight", "qweight", "weight_packed")  # in 4 bits a weight has a name of its format
_ATTENTION = ("self_attn.q_proj", "self_attn.qkv_proj")
_NORMS = ("input_layernorm", "post_feedforward_layernorm")  # norms that the first layer of an EAGLE head lacks


def can_only_draft(shapes: Shapes) -> bool:
    """Whether it cannot be a target: it has the linear that joins features and embedding, or no embedding at all."""
    known, kind = _canonical(shapes), draft_kind(shapes)
    joins_features = kind is DraftKind.EAGLE_3 or "fc.weight" in known or "d2t" in known
    return joins_features or (kind is DraftKind.MTP and "embed_tokens.weight" not in known)


def _canonical(shapes: Shapes) -> Shapes:
    """Shapes under one name for each part, independent of the layout: `midlayer` becomes `layers.0`."""
    return {name.removeprefix("model.").replace("midlayer.", "layers.0.", 1): shape for name, shape in shapes.items()}
