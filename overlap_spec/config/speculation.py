"""Speculation as flags and checkpoints know it: the drafting methods, a record each, and the flags, one field each.

How methods run is in `speculative/methods.py`. `EngineConfig` is these flags and the rest.

The kind of a draft checkpoint is told from its tensors. Heads of every kind are published with
`architectures: ["LlamaForCausalLM"]`, so the config does not tell the kind. A head under the wrong method still runs,
but almost no guess is accepted.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Shapes = Mapping[str, tuple[int, ...]]  # shapes of tensors by name; a leading `model.` is ignored


class DraftKind(enum.Enum):
    """The kind of a checkpoint; the value is its name in messages."""

    EAGLE_3 = "an EAGLE-3 head"
    EAGLE_2 = "an EAGLE / EAGLE-2 head"
    MTP = "a multi-token-prediction (MTP) layer"
    ASSISTANT = "an assistant that reads its target's keys and values (Gemma 4)"
    DFLASH = "a DFlash draft"
    DSPARK = "a DSpark draft"
    LANGUAGE_MODEL = "an ordinary language model, which is a STANDALONE draft"
    UNKNOWN = "no draft model known here"


def draft_kind(shapes: Shapes) -> DraftKind:
    """EAGLE-3 normalises its features (`hidden_norm`) beside the embedding, EAGLE concatenates both for `fc`.

    DFlash normalises once, for all layers, what `fc` gives; so does DSpark, which has a Markov head too.
    """
    known = _canonical(shapes)
    if any("mtp_layers." in name or name.endswith((".eh_proj.weight", "mtp.fc.weight")) for name in known):
        return DraftKind.MTP
    if {"pre_projection.weight", "post_projection.weight"} <= known.keys():
        return DraftKind.ASSISTANT
    if "layers.0.hidden_norm.weight" in known:
        return DraftKind.EAGLE_3
    if "hidden_norm.weight" in known and "fc.weight" in known:
        return DraftKind.DSPARK if "markov_head.markov_w1.weight" in known else DraftKind.DFLASH
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
    if kind is DraftKind.ASSISTANT:
        return True
    joins_features = kind is DraftKind.EAGLE_3 or "fc.weight" in known or "d2t" in known
    return joins_features or (kind is DraftKind.MTP and "embed_tokens.weight" not in known)


def _canonical(shapes: Shapes) -> Shapes:
    """Shapes under one name for each part, independent of the layout: `midlayer` becomes `layers.0`."""
    short = ((name.removeprefix("model.").removeprefix("language_model."), shape) for name, shape in shapes.items())
    return {name.replace("midlayer.", "layers.0.", 1): shape for name, shape in short}


# Layers that these architectures are published with, whose config.json does not count them.
UNCOUNTED_LAYERS = {"MiMoV2FlashForCausalLM": 3, "Qwen3NextForCausalLM": 1}


def num_own_layers(config: Mapping[str, Any]) -> int:
    """MTP layers in the checkpoint of a config.json, by its keys."""
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        if (found := config.get(key)) is not None:
            return int(found)
    return next((UNCOUNTED_LAYERS[name] for name in config.get("architectures") or () if name in UNCOUNTED_LAYERS), 0)


ONLY_CHAINS = "the target has layers with a recurrent state, which verify chains"
STATE_KEYS = ("linear_num_value_heads", "mamba_n_heads")  # of configs with such layers
ATTEND = frozenset(("attention", "full_attention"))  # what `layer_types` calls others


def keeps_states(config: Mapping[str, Any]) -> bool:
    """Whether some layers of the model of this config.json have a state for each request in the place of K and V."""
    kinds = config.get("layer_types")
    all_attend = isinstance(kinds, list) and bool(kinds) and ATTEND.issuperset(map(str, kinds))
    return any(key in config for key in STATE_KEYS) and not all_attend


ASSISTANTS = frozenset(("Gemma4AssistantForCausalLM",))  # drafts of NEXTN that guess chains alone
PLAIN = "NONE"
NGRAM = "NGRAM"  # has flags of its own
MTP = "NEXTN"  # the method that drafts with a layer of the target's own checkpoint
OWN_METHOD = "MODULE:METHOD"  # the form of a name of a method outside this package
SMOLLM2_SPEC = ("EAGLE3", 3, 1, 4)  # the alias's method, steps, topk, draft tokens


class BlockFlag(Struct, frozen=True):
    """The flag that gives the rows of a block: all guesses come of one forward."""

    field: str
    first_guess: int  # the first of its rows that guesses: 1 where the root's does not
    makes_trees: bool = False  # a guess is drawn as if those before it were not known: any of them can come before it

    def window(self, rows: int) -> int:
        """The columns of a window for blocks of so many rows."""
        return rows + 1 - self.first_guess


class MethodFacts(Struct, frozen=True, kw_only=True):
    """A method's requirements on flags and draft."""

    draft_kinds: tuple[DraftKind, ...] = ()  # kinds of draft that it accepts, the usual one first; empty: no draft
    takes_token_map: bool = False  # its head has the whole vocabulary, so a token map can select rows of it
    uses_own_layer: bool = False  # without a draft, it drafts with an MTP layer of the target's checkpoint
    is_trained: bool = False  # `train-draft` makes such drafts, of the usual kind
    is_divided: bool = False  # among ranks, as the target's layers are; else each rank has all of its draft
    block: BlockFlag | None = None  # None: it guesses one after the other
    compares_tokenizers: bool = False  # its draft is a language model, whose token ids must be the target's
    numbers: tuple[int, int, int] | None = None  # default steps, topk, draft tokens; None: they follow the target


METHOD_FACTS = {
    PLAIN: MethodFacts(),
    "EAGLE": MethodFacts(draft_kinds=(DraftKind.EAGLE_2, DraftKind.MTP), takes_token_map=True, uses_own_layer=True),
    "EAGLE3": MethodFacts(draft_kinds=(DraftKind.EAGLE_3,), is_trained=True, is_divided=True),
    MTP: MethodFacts(draft_kinds=(DraftKind.MTP, DraftKind.ASSISTANT), takes_token_map=True, uses_own_layer=True),
    "STANDALONE": MethodFacts(
        draft_kinds=(DraftKind.LANGUAGE_MODEL,),
        takes_token_map=True,
        compares_tokenizers=True,
        numbers=(3, 1, 4),  # SGLang's
    ),
    "DFLASH": MethodFacts(
        draft_kinds=(DraftKind.DFLASH,),
        is_trained=True,
        takes_token_map=True,
        block=BlockFlag("speculative_dflash_block_size", first_guess=1, makes_trees=True),
        numbers=(7, 1, 8),  # half a published block
    ),
    "DSPARK": MethodFacts(
        draft_kinds=(DraftKind.DSPARK,),
        is_trained=True,
        takes_token_map=True,
        block=BlockFlag("speculative_dspark_block_size", first_guess=0),
        numbers=(7, 1, 8),  # a published block
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


BLOCK_FLAGS = {name: facts.block for name, facts in METHOD_FACTS.items() if facts.block is not None}


def is_own_method(method: str) -> bool:
    """Whether the name is `MODULE:METHOD`: a `Method` of a module outside this package."""
    return ":" in method


MethodName = Annotated[
    str,
    Meta(
        pattern=rf"^({'|'.join(METHOD_FACTS)}|[\w.]+:\w+)$",
        extra={"choices": (*METHOD_FACTS, OWN_METHOD)},
    ),
]
DraftLoadFormat = Literal["auto", "safetensors", "pt", "dummy"]
DraftQuantization = Literal["unquant", "fp8"]
MatchType = Literal["BFS", "PROB"]
AttentionMode = Literal["prefill", "decode"]
Text = Annotated[str, Meta(min_length=1)]  # an empty shell variable is no key and no path

MAX_STEPS = 8
MAX_BLOCK = 16  # columns of a chain's window
MAX_COPIED = 32  # guesses of n-grams beside a chain
MAX_MATCH, MAX_BRANCH = 32, 62  # most tokens of an n-gram match, and after it


class SpeculationFlags(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One field per `--speculative-..` flag. None means automatic. Names and defaults are SGLang's."""

    speculative_algorithm: Annotated[
        MethodName | None, Meta(description=f"drafting method; {OWN_METHOD}: a `Method` of your own")
    ] = None
    speculative_draft_model_path: Annotated[Text | None, Meta(description="directory or hub id of the draft head")] = (
        None
    )
    speculative_draft_model_revision: Annotated[
        Text | None, Meta(description="branch, tag or commit of the draft on the hub; default: main")
    ] = None
    speculative_draft_load_format: Annotated[
        DraftLoadFormat | None, Meta(description="format of the draft's weights; default: as --load-format")
    ] = None
    speculative_draft_model_quantization: Annotated[
        DraftQuantization | None,
        Meta(description="unquant: 16-bit weights; fp8: rounded to 8 bits while loading; default: as its config names"),
    ] = None
    speculative_attention_mode: Annotated[
        AttentionMode | None,
        Meta(description="kernel of chains' windows: decode's, or prefill's for comparison; default: decode"),
    ] = None
    speculative_draft_attention_backend: Annotated[
        Text | None, Meta(description="as --attention-backend, of the draft; default: the target's")
    ] = None
    speculative_moe_runner_backend: Annotated[
        Text | None, Meta(description="as --moe-runner-backend, of the draft; default: the target's")
    ] = None
    speculative_moe_a2a_backend: Annotated[
        Text | None, Meta(description="as --moe-a2a-backend, of the draft; default: the target's")
    ] = None
    speculative_draft_tp_size: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="ranks that share the draft's layers: 1, or default: all where a method's can be divided",
            ),
        ]
        | None
    ) = None
    speculative_draft_window_size: (
        Annotated[int, Meta(ge=1, description="keys that a row of the draft sees at most; default: all")] | None
    ) = None
    enable_multi_layer_eagle: Annotated[
        bool, Meta(description="draft with the several MTP layers of a checkpoint, one for each guess")
    ] = False
    speculative_token_map: Annotated[
        Text | None, Meta(description="file, or repo/file on the hub, of the token ids that a draft may guess")
    ] = None
    speculative_simulate_acc_len: (
        Annotated[
            tuple[Annotated[float, Meta(ge=1)], ...],
            Meta(
                min_length=1,
                max_length=2,
                description="bench only: synthetic acceptance of X committed tokens a step; of two, requests with seeds"
                " from 65536 to 131071 take the second",
            ),
        ]
        | None
    ) = None
    speculative_accept_threshold_single: (
        Annotated[
            float, Meta(gt=0, le=1, description="a guess is accepted if the target's p is at least X; below 1: lossy")
        ]
        | None
    ) = None
    speculative_accept_threshold_acc: (
        Annotated[float, Meta(gt=0, le=1, description="a guess is accepted with probability p / X; below 1: lossy")]
        | None
    ) = None
    speculative_use_rejection_sampling: Annotated[
        bool, Meta(description="draw guesses and accept by min(1, p / q): the same distribution, not the same tokens")
    ] = False
    speculative_num_steps: Annotated[int, Meta(ge=1, le=MAX_STEPS, description="draft depth")] | None = None
    speculative_eagle_topk: Annotated[int, Meta(ge=1, description="branching; 1 is a chain")] | None = None
    speculative_num_draft_tokens: (
        Annotated[int, Meta(ge=2, description="window width, root included; steps + 1 for a chain")] | None
    ) = None
    speculative_dflash_block_size: (
        Annotated[
            int,
            Meta(ge=2, le=MAX_BLOCK, description="DFLASH: rows of a block and of a chain, root included; default: 8"),
        ]
        | None
    ) = None
    speculative_dspark_block_size: (
        Annotated[
            int,
            Meta(
                ge=2,
                le=MAX_BLOCK - 1,
                description="DSPARK: rows of a block, each a guess; the window is one wider; default: 7",
            ),
        ]
        | None
    ) = None
    speculative_adaptive: Annotated[
        bool, Meta(description="narrow steps where drafting would lose; on where the three numbers are not given")
    ] = False
    speculative_adaptive_config: Annotated[
        Text | None, Meta(description="JSON file with rules for that, by batch size; default: from measured costs")
    ] = None
    speculative_fuse_ngram: (
        Annotated[
            int,
            Meta(ge=1, le=MAX_COPIED, description="guesses of n-grams, a branch beside a draft's chain; default: none"),
        ]
        | None
    ) = None
    speculative_ngram_min_match_window_size: (
        Annotated[int, Meta(ge=1, le=MAX_MATCH, description="NGRAM: tokens of the shortest match; default: 1")] | None
    ) = None
    speculative_ngram_max_match_window_size: (
        Annotated[int, Meta(ge=1, le=MAX_MATCH, description="NGRAM: tokens of a match that count; default: 12")] | None
    ) = None
    speculative_ngram_min_bfs_breadth: (
        Annotated[int, Meta(ge=1, description="NGRAM: children of a node after the longest match; default: 1")] | None
    ) = None
    speculative_ngram_max_bfs_breadth: (
        Annotated[
            int, Meta(ge=1, description="NGRAM: children of a node after the shortest match; 1: chains; default: 10")
        ]
        | None
    ) = None
    speculative_ngram_match_type: Annotated[
        MatchType | None, Meta(description="NGRAM: best guesses by recency or by frequency; default: BFS")
    ] = None
    speculative_ngram_branch_length: (
        Annotated[int, Meta(ge=1, le=MAX_BRANCH, description="NGRAM: tokens after a match, at most; default: 18")]
        | None
    ) = None
    speculative_ngram_capacity: (
        Annotated[int, Meta(ge=256, description="NGRAM: tokens kept of all requests; default: 10000000")] | None
    ) = None
    speculative_ngram_external_corpus_path: Annotated[
        Text | None, Meta(description="NGRAM: JSONL file, each line a string, that is known from the start")
    ] = None
    speculative_ngram_external_corpus_max_tokens: (
        Annotated[int, Meta(ge=1, description="NGRAM: tokens of that file that are read; default: 10000000")] | None
    ) = None
    speculative_ngram_external_sam_budget: (
        Annotated[int, Meta(ge=0, description="NGRAM: refused, as a corpus is a part of the shared cache")] | None
    ) = None


def synthetic_acceptance(means: Sequence[float]) -> str:
    """The label of synthetic acceptance in every output."""
    said = " or ".join(f"{mean:g}" for mean in means)
    return f"synthetic acceptance: {said} committed tokens a step on average, whatever the guesses"
