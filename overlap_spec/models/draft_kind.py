"""Tells what a draft checkpoint is from the tensors that it holds. Not here: loading it.

Heads of every kind are published with `architectures: ["LlamaForCausalLM"]`, so the config alone does not say, and a
head that runs under the wrong method still runs, with nothing accepted.
"""

import enum
from collections.abc import Mapping

from overlap_spec.models.checkpoint import Shape


class DraftKind(enum.Enum):
    """What a checkpoint looks like; the value is how to name it to a user."""

    EAGLE_3 = "an EAGLE-3 head"
    EAGLE_2 = "an EAGLE / EAGLE-2 head"
    MTP = "a multi-token-prediction (MTP) layer"
    LANGUAGE_MODEL = "an ordinary language model, which is a STANDALONE draft"
    UNKNOWN = "no draft model known here"


def draft_kind(shapes: Mapping[str, Shape]) -> DraftKind:
    """`shapes` by canonical name (`midlayer` as `layers.0`).

    EAGLE-3 normalises its features (`hidden_norm`) beside the embedding, EAGLE concatenates both in front of `fc`.
    """
    if any("mtp_layers." in name or name.endswith(".eh_proj.weight") for name in shapes):
        return DraftKind.MTP
    if "layers.0.hidden_norm.weight" in shapes:
        return DraftKind.EAGLE_3
    if (fc := shapes.get("fc.weight")) is not None:
        return DraftKind.EAGLE_2 if len(fc) == 2 and fc[1] == 2 * fc[0] else DraftKind.UNKNOWN
    if "layers.0.self_attn.q_proj.weight" in shapes and "layers.0.input_layernorm.weight" in shapes:
        return DraftKind.LANGUAGE_MODEL
    return DraftKind.UNKNOWN
