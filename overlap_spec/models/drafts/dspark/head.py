"""The DSpark draft: DFlash's layers on a block that has no row to spare, and a Markov head behind them.

    root, mask, mask, ..  --DFlash's layers, norm--> h1, h2, h3, ..
                      gi  =  drawn from  head hi + bias(hi, the guess before)       g0 is the root

The row at L + i guesses the token at L + i + 1: a block of R rows has R guesses. The layers run once for all of them,
and so does the head; one after the other are only the products of the bias.
"""

from dataclasses import dataclass, replace

from overlap_spec_kernels import largest_columns
from torch import Tensor

from overlap_spec.models.drafts.dflash.head import DFlashHead, DFlashWeights
from overlap_spec.models.drafts.dspark.markov import MarkovHead
from overlap_spec.models.interfaces import BlockShape, DraftProfile, LazyLogits, RowBatch, TargetOutput
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice
from overlap_spec.models.layers.linear import AnyLinear
from overlap_spec.models.work import count_bytes

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

    def guess_logits(self, values: Tensor) -> "MarkovLogits":
        """Of a block's first K guesses. Shapes: values [K, B, H], before the final norm."""
        hidden = self._backbone.norm(values.flatten(0, 1))
        base = self._backbone.normed_logits(hidden).compute()
        return MarkovLogits(self._markov, hidden.view_as(values), base.view(*values.shape[:2], -1))


class MarkovLogits:
    """`GuessLogits`, asked for one guess after the other."""

    def __init__(self, markov: MarkovHead, hidden: Tensor, base: Tensor) -> None:
        """Shapes: hidden [K, B, H], base [K, B, Vd] f32."""
        self._markov = markov
        self._hidden = hidden
        self._base = base
        self._state: Tensor | None = None

    def together(self) -> None:
        """No guess can be drawn before the one before it is known."""

    def following(self, index: int, previous: Tensor) -> LazyLogits:
        """Shapes: previous [B] i64 -> logits [B, Vd]."""
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
