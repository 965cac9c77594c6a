"""The drafting methods as flags and checkpoints know them, a record each. How they run: `speculative/methods.py`.

The kind of a draft checkpoint is told from its tensors. Heads of every kind are published with
`architectures: ["LlamaForCausalLM"]`, so the config does not tell the kind. A head under the wrong method still runs,
but almost no guess is accepted.
"""

import enum
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

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


# Layers that these architectures are published with, whose config.json does not count them.
UNCOUNTED_LAYERS = {"MiMoV2FlashForCausalLM": 3}


def num_own_layers(config: Mapping[str, Any]) -> int:
    """MTP layers in the checkpoint of a config.json, by its keys."""
    if (found := config.get("num_nextn_predict_layers")) is not None:
        return int(found)
    return next((UNCOUNTED_LAYERS[name] for name in config.get("architectures") or () if name in UNCOUNTED_LAYERS), 0)


PLAIN = "NONE"
NGRAM = "NGRAM"  # has flags of its own
MTP = "NEXTN"  # the method that drafts with a layer of the target's own checkpoint
OWN_METHOD = "MODULE:METHOD"  # the form of a name of a method outside this package
SMOLLM2_SPEC = ("EAGLE3", 3, 1, 4)  # the alias's method, steps, topk, draft tokens


class MethodFacts(Struct, frozen=True, kw_only=True):
    """A method's requirements on flags and draft."""

    draft_kinds: tuple[DraftKind, ...] = ()  # kinds of draft that it accepts, the usual one first; empty: no draft
    takes_token_map: bool = False  # its head has the whole vocabulary, so a token map can select rows of it
    uses_own_layer: bool = False  # without a draft, it drafts with an MTP layer of the target's checkpoint
    compares_tokenizers: bool = False  # its draft is a language model, whose token ids must be the target's
    numbers: tuple[int, int, int] | None = None  # default steps, topk, draft tokens; None: they follow the target


METHOD_FACTS = {
    PLAIN: MethodFacts(),
    "EAGLE": MethodFacts(draft_kinds=(DraftKind.EAGLE_2, DraftKind.MTP), takes_token_map=True, uses_own_layer=True),
    "EAGLE3": MethodFacts(draft_kinds=(DraftKind.EAGLE_3,)),
    MTP: MethodFacts(draft_kinds=(DraftKind.MTP,), takes_token_map=True, uses_own_layer=True),
    "STANDALONE": MethodFacts(
        draft_kinds=(DraftKind.LANGUAGE_MODEL,),
        takes_token_map=True,
        compares_tokenizers=True,
        numbers=(3, 1, 4),  # SGLang's
    ),
    NGRAM: MethodFacts(),
}
OF_OWN_METHODS = MethodFacts()


def facts_of(method: str) -> MethodFacts:
    """The record of that name; one without requirements for a method outside this package."""
    return METHOD_FACTS.get(method, OF_OWN_METHODS)


def methods_where(asked: str) -> list[str]:
    """The names of the methods whose field `asked` is true."""
    return [name for name, facts in METHOD_FACTS.items() if getattr(facts, asked)]


def is_own_method(method: str) -> bool:
    """Whether the name is `MODULE:METHOD`: a `Method` of a module outside this package."""
    return ":" in method
