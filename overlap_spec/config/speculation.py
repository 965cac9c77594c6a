"""The flags of speculation, one field each. `EngineConfig` is these and the rest."""

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from overlap_spec.config.methods import METHOD_FACTS, OWN_METHOD

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
        Annotated[int, Meta(ge=1, description="ranks that share the draft's layers: 1, as each rank has all of it")]
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
    speculative_adaptive: Annotated[
        bool, Meta(description="narrow steps where drafting would lose; on where the three numbers are not given")
    ] = False
    speculative_adaptive_config: Annotated[
        Text | None, Meta(description="JSON file with rules for that, by batch size; default: from measured costs")
    ] = None
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
