"""DSpark: a DFlash block whose guesses know the guess before them (2026, github.com/deepseek-ai/DeepSpec).

DFlash's layers run on a block that has no row to spare, and a Markov head is behind them.

    root, mask, mask, ..  --DFlash's layers, norm--> h1, h2, h3, ..
                      gi  =  drawn from  head hi + bias(hi, the guess before)       g0 is the root

The row at L + i guesses the token at L + i + 1: a block of R rows has R guesses. The layers run once for all of them,
and so does the head; one after the other are only the products of the bias.

The Markov head is what the token before a guess adds to the guess's logits.

    vanilla   e = w1[token before]              bias = w2 e
    gated     g = sigmoid(gate_proj [h; e])     bias = w2 (g * e)
    rnn       [g; c; o] = joint_proj [s; e; h], s' = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c), bias = w2 tanh(o)

h is the row's output after the final norm, s the state, zero before a block's first guess. The rank r is small: w1 is
only gathered from, and w2 is read once for each guess.

A checkpoint has what DFlash's has (`dflash.py`), and

    markov_head.markov_w1.weight [V, r]    by the token before a guess
    markov_head.markov_w2.weight [V, r]    makes a bias of it
    markov_head.gate_proj.weight [r, H + r], .bias [r]             of type gated
    markov_head.joint_proj.weight [3 r, 2 r + H], .bias [3 r]      of type rnn
    confidence_head.proj.weight [1, H (+ r)], .bias [1]            checked, and not used: see docs/flags.md

DeepSpec's layout names mask token, target layers and the Markov head's numbers in config.json itself, and has copies of
the target's embedding and head, which are frozen in its training: the target's own are read. SpecForge's layout has all
of that in `dflash_config`, and no copies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from overlap_spec_kernels import largest_columns
from torch import Tensor

from overlap_spec.config.speculation import DraftKind
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.models.drafts.dflash import (
    OWN,
    DFlashConfig,
    DFlashHead,
    DFlashWeights,
    load_weights as load_backbone,
)
from overlap_spec.models.interfaces import BlockShape, DraftProfile, LazyLogits, LoadedTarget, RowBatch, TargetOutput
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice
from overlap_spec.models.layers.linear import AnyLinear, make_linear
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.parts import canonical_name
from overlap_spec.models.loading.quantized import take_matrix
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.models.work import ForwardWork, count_bytes


class MarkovHead(Protocol):
    """A Markov head, loaded."""

    @property
    def bias(self) -> AnyLinear:
        """w2 [Vd, r]."""

    @property
    def work(self) -> ForwardWork:
        """What one guess reads and computes."""

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What `bias` is to multiply for the guess after `previous`, and the state after it. Sync: never.

        Shapes: previous [B] i64, hidden [B, H], state [B, r], None before the first guess -> [B, r], the new state.
        """


@dataclass(frozen=True)
class VanillaMarkov:
    """`vanilla` of the module's docstring."""

    tokens: Tensor  # w1 [V, r]
    bias: AnyLinear

    @property
    def work(self) -> ForwardWork:
        return self.bias.work

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.tokens[previous], None


@dataclass(frozen=True)
class GatedMarkov:
    """`gated` of the module's docstring."""

    tokens: Tensor  # w1 [V, r]
    bias: AnyLinear
    gate: AnyLinear  # [r, H + r]

    @property
    def work(self) -> ForwardWork:
        return self.bias.work + self.gate.work

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        embedded = self.tokens[previous]
        return self.gate(torch.cat((hidden, embedded), 1)).sigmoid() * embedded, None


@dataclass(frozen=True)
class RNNMarkov:
    """`rnn` of the module's docstring."""

    tokens: Tensor  # w1 [V, r]
    bias: AnyLinear
    joint: AnyLinear  # [3 r, 2 r + H]

    @property
    def work(self) -> ForwardWork:
        return self.bias.work + self.joint.work

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        embedded = self.tokens[previous]
        state = torch.zeros_like(embedded) if state is None else state
        gate, candidate, output = self.joint(torch.cat((state, embedded, hidden), 1)).chunk(3, 1)
        kept = gate.sigmoid()
        return output.tanh(), kept * state + (1 - kept) * candidate.tanh()


FLAG = "--speculative-dspark-block-size"


@dataclass(frozen=True)
class DSparkWeights:
    """A loaded draft (`LoadedDraft`)."""

    backbone: DFlashWeights
    markov: MarkovHead

    @property
    def profile(self) -> DraftProfile:
        """A draft step is a block, and the Markov head, which each guess reads."""
        profile, rows, markov = self.backbone.profile, self.backbone.num_rows, self.markov.work
        return replace(
            profile,
            num_bytes=profile.num_bytes + count_bytes(self.markov),
            work=profile.work + replace(markov, weight_bytes=rows * markov.weight_bytes),
            block=BlockShape(rows, FLAG),
        )

    def attach(
        self, cache: KVCache, num_positions: int, attention: AttentionChoice = DEFAULT_ATTENTION
    ) -> "DSparkHead":
        """Join weights and cache. A block may reach its rows past the last position."""
        return DSparkHead(self.backbone.attach(cache, num_positions, attention), self.markov)


class DSparkHead:
    """A draft with its cache."""

    first_guess = 0

    def __init__(self, backbone: DFlashHead, markov: MarkovHead) -> None:
        self.num_rows = backbone.num_rows
        self.target_ids = backbone.target_ids
        self._backbone = backbone
        self._markov = markov

    def absorb(self, output: TargetOutput, rows: RowBatch) -> None:
        """Write the context of target rows. Shapes: output of T rows. Sync: never on CUDA."""
        self._backbone.absorb(output, rows)

    def run_block(self, roots: Tensor, rows: RowBatch) -> Tensor:
        """Shapes: roots [B] i64 -> [B, R, H], before the final norm. Sync: never."""
        return self._backbone.run_block(roots, rows)

    def guess_logits(self, values: Tensor, roots: Tensor) -> "MarkovLogits":
        """Of a block's first K guesses. Shapes: values [K, B, H], before the final norm; roots [B] i64."""
        hidden = self._backbone.norm(values.flatten(0, 1))
        base = self._backbone.normed_logits(hidden).compute()
        return MarkovLogits(self._markov, hidden.view_as(values), base.view(*values.shape[:2], -1), roots)


class MarkovLogits:
    """`GuessLogits`, asked for one guess after the other."""

    def __init__(self, markov: MarkovHead, hidden: Tensor, base: Tensor, roots: Tensor) -> None:
        """Shapes: hidden [K, B, H], base [K, B, Vd] f32, roots [B] i64."""
        self._markov = markov
        self._hidden = hidden
        self._base = base
        self._roots = roots
        self._state: Tensor | None = None

    def together(self) -> None:
        """No guess can be drawn before the one before it is known."""

    def following(self, guesses: Sequence[Tensor]) -> LazyLogits:
        """Shapes: guesses [B] i64 each -> logits [B, Vd]."""
        index, previous = len(guesses), guesses[-1] if guesses else self._roots
        latent, self._state = self._markov.step(previous, self._hidden[index], self._state)
        return BiasedLogits(self._base[index], self._markov.bias, latent)


@dataclass(frozen=True, slots=True)
class BiasedLogits:
    """`LazyLogits` with a bias of low rank."""

    base: Tensor  # [B, Vd] f32
    bias: AnyLinear  # [Vd, r]
    latent: Tensor  # [B, r]

    def compute(self) -> Tensor:
        """Shapes: -> [B, Vd], float32 or wider."""
        return self.base + self.bias.logits(self.latent)

    def argmax(self, ids: Tensor | None = None) -> Tensor:
        """The column of each row's largest logit, mapped through `ids` if given. Shapes: ids [Vd] i64 -> [B] i64."""
        return largest_columns(self.compute(), ids)


ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")
TYPES = ("vanilla", "gated", "rnn")
SPECULATORS = "speculators_model_type"
BLOCK_SIZE = 7  # where a config names none
FIELD = "speculative_dspark_block_size"


@dataclass(frozen=True)
class DSparkConfig:
    """A draft's numbers. `confidence_inputs`: columns of the confidence head; 0: there is none."""

    backbone: DFlashConfig
    markov_type: str
    markov_rank: int
    confidence_inputs: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], origin: str, target: LoadedTarget) -> "DSparkConfig":
        """Read a draft's config.json. Raises: CheckpointError naming `origin`, the key, found and expected."""
        _refuse_other_layouts(config, origin)
        own = {**config, **(config.get(OWN) or {})}
        rank, kind = own.get("markov_rank"), str(own.get("markov_head_type", TYPES[0])).lower()
        if type(rank) is not int or rank < 1:
            raise CheckpointError(f"{origin}: markov_rank: found {rank!r}, expected at least 1")
        if kind not in TYPES:
            raise CheckpointError(f"{origin}: markov_head_type: found {kind!r}, expected one of {', '.join(TYPES)}")
        backbone = DFlashConfig.from_hf({"block_size": BLOCK_SIZE} | dict(config), origin, target)
        inputs = target.hidden_size + (rank if own.get("confidence_head_with_markov") else 0)
        return cls(backbone, kind, rank, inputs if own.get("enable_confidence_head") else 0)


def _refuse_other_layouts(config: Mapping[str, Any], origin: str) -> None:
    if SPECULATORS in config:
        raise CheckpointError(
            f"{origin}: {SPECULATORS}: found {config[SPECULATORS]!r}, expected DeepSpec's or SpecForge's layout: in"
            " that of speculators the row of each guess is another"
        )
    found = config.get("architectures") or ARCHITECTURES[:1]
    if found[0] not in ARCHITECTURES:
        raise CheckpointError(f"{origin}: architectures: found {found[0]!r}, expected {' or '.join(ARCHITECTURES)}")


def load_dspark(source: DraftSource, target: LoadedTarget, num_rows: int) -> DSparkWeights:
    """Load a draft that guesses blocks of `num_rows`.

    Raises: CheckpointError naming file, tensor, found and expected; ConfigError if its blocks are smaller.
    """
    wanted = source.target_ids(target)
    source.refuse_unless(DraftKind.DSPARK)
    config = DSparkConfig.from_hf(source.config(), source.origin, target)
    if num_rows > (most := config.backbone.block_size):
        raise ConfigError(
            FIELD, f"{source.origin}: the draft was trained on blocks of {most}, got {num_rows}; use less"
        )
    return load_weights(config, source.weights(canonical_name), target, num_rows, wanted)


def load_weights(
    config: DSparkConfig, checkpoint: Weights, target: LoadedTarget, num_rows: int, wanted: Tensor | None = None
) -> DSparkWeights:
    """Take every weight. With `wanted` [N] i64 it guesses among these tokens alone (FR-Spec).

    Raises: CheckpointError naming file, tensor, found and expected.
    """
    markov = _load_markov(config, checkpoint, target, wanted)
    if config.confidence_inputs:
        _take_linear(checkpoint, "confidence_head.proj", (1, config.confidence_inputs))
    return DSparkWeights(load_backbone(config.backbone, checkpoint, target, num_rows, wanted), markov)


def _load_markov(config: DSparkConfig, checkpoint: Weights, target: LoadedTarget, wanted: Tensor | None) -> MarkovHead:
    rank, hidden, size = config.markov_rank, target.hidden_size, (target.vocab_size, config.markov_rank)
    tokens = checkpoint.take("markov_head.markov_w1.weight", size)
    bias = make_linear(take_matrix(checkpoint, "markov_head.markov_w2", size))
    bias = bias if wanted is None else bias.rows(wanted.to(bias.device))
    if config.markov_type == "gated":
        return GatedMarkov(tokens, bias, _take_linear(checkpoint, "markov_head.gate_proj", (rank, hidden + rank)))
    if config.markov_type == "rnn":
        joint = _take_linear(checkpoint, "markov_head.joint_proj", (3 * rank, 2 * rank + hidden))
        return RNNMarkov(tokens, bias, joint)
    return VanillaMarkov(tokens, bias)


def _take_linear(checkpoint: Weights, name: str, shape: tuple[int, int]) -> AnyLinear:
    return make_linear(take_matrix(checkpoint, name, shape), checkpoint.take(f"{name}.bias", shape[:1]))
