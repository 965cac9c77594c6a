"""What features add to how tokens are drawn: rules, stages that change logits, and outputs of what was decided.

All are captured with the step: tensor code of static shapes, which never asks the device for a value. The order of
stages is the order in which they are applied.

A **processor** changes logits before tokens are drawn from them: one path for every row of targets and drafts, chains
and trees. Order: an engine's own processors (`--logit-processor`), then what a request's parameters ask for: penalties;
logit_bias and allowed_token_ids; bad_words; min_new_tokens; the thinking budget; the masks of grammars, which are for
the target's rows alone. What forbids tokens comes last, so nothing lets a token through that a request forbids.
Temperature, filters and noise come after (`sampler.py`).

A processor is a function of a row's position and of the tokens before it, and of nothing else. Then the tokens that are
committed are plain decoding's, whatever is guessed: the target draws after each guess as if the guess were committed.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from overlap_spec_kernels import LogitRules, RowHistory, largest_columns, process_logits
from torch import Tensor

from overlap_spec.errors import ConfigError
from overlap_spec.messages import ResetSlot, Rows, SamplingParams
from overlap_spec.models.interfaces import LazyLogits
from overlap_spec.sampling.context import DrawContext, SamplingWork, TokenPool


class SlotColumns(Protocol):
    """64-bit numbers of each slot, which the engine writes with the row of a request that takes it, in one launch.

    What requests ask of logits is done in one pass over them (`process_logits`): a feature gives it tables.
    """

    @property
    def width(self) -> int: ...  # numbers of a slot

    @property
    def neutral(self) -> bytes:
        """Of a slot that asks for nothing, as the dummy slot. Shapes: width * 8 bytes."""

    def pack(self, reset: ResetSlot) -> bytes:
        """Of a new request, on the host. Shapes: width * 8 bytes."""

    def rules(self, columns: Tensor) -> Mapping[str, Tensor]:
        """What the pass reads, by the names of `LogitRules`: views of the columns, and tables of the feature's own.

        Asked once: what it returns must stay where it is. Shapes: [S, width] i64, each table [S, ..].
        """


class LogitStage(Protocol):
    """Changes logits before tokens are drawn from them."""

    @property
    def name(self) -> str: ...

    @property
    def target_only(self) -> bool:
        """Whether it is for the target's rows alone: guesses are drawn without it."""

    def asked(self, sampling: SamplingParams) -> bool:
        """Whether a request asks for it, on the host. It is also applied to others of its step, and changes nothing."""

    def apply(self, logits: Tensor, context: DrawContext) -> Tensor:
        """May change the logits it is given. Sync: never. Shapes: [B, R, N] -> [B, R, N]."""


class Decided(NamedTuple):
    """The tokens of a step, D for each slot: committed ones first, then anything."""

    tokens: Tensor  # [B, D] i64
    slots: Tensor  # [B] i64
    path: Tensor | None = None  # [B, D] i64: the row of the slot that each was drawn from; None: they are in order


class RowPacker(Protocol):
    """An output of one step, for the slots that have asked for it when the step was launched."""

    def pack(
        self, tokens: list[list[int]], longest: int, of_tokens: memoryview | None, of_prompts: memoryview | None
    ) -> Rows | None:
        """What the scheduler is told, by slot; None without anything. On the host, when the copies are there.

        `of_tokens`: `longest` rows of each slot, which committed `tokens`. `of_prompts`: rows of prompt tokens.
        """


class RowOutput(Protocol):
    """64-bit numbers for each token that is decided, which leave the device with the tokens in one copy."""

    @property
    def name(self) -> str: ...

    def asked(self, sampling: SamplingParams) -> bool:
        """Whether a request asks for it, on the host."""

    def asking(self, sampling: SamplingParams) -> SamplingParams:
        """The same request, asking for it, of its prompt too, if one can: startup times and sizes steps with it."""

    def write(self, logits: Tensor, decided: Decided) -> Tensor:
        """Of the tokens of a step. Captured at the end of `decide`. Shapes: logits [B * R, V] -> [B * D, n]."""

    def write_prompts(
        self, logits: Callable[[Tensor], LazyLogits], hidden: Tensor, tokens: Tensor, slots: Tensor
    ) -> Tensor:
        """Of prompt tokens, each after its row of `hidden`. Sync: never. Shapes: [N, H], [N] i64 -> [N, n]."""

    def packer(self, slots: Sequence[int], prompt_counts: Sequence[int]) -> RowPacker | None:
        """What packs it in a step of these slots; None where no request asks for it.

        `prompt_counts`: prompt tokens of each slot that have rows; empty where none has.
        """


class KeptLogits:
    """`LazyLogits` that are computed once and kept: tokens are drawn from them, and outputs written."""

    def __init__(self, inner: LazyLogits) -> None:
        self._inner = inner
        self._logits: Tensor | None = None

    def compute(self) -> Tensor:
        """Shapes: -> [R, V]."""
        if self._logits is None:
            self._logits = self._inner.compute()
        return self._logits

    def argmax(self, ids: Tensor | None = None) -> Tensor:
        """Shapes: ids [V] i64 -> [R] i64."""
        return largest_columns(self.compute(), ids)


FIELD = "logit_processor"


class LogitProcessor(Protocol):
    """A function: tensor code of static shapes, which never asks the device for a value (it is captured)."""

    def __call__(self, logits: Tensor, context: DrawContext, /) -> Tensor:
        """New logits; at least one column of each row must stay finite. Shapes: [B, R, N] -> [B, R, N]."""


@dataclass(frozen=True)
class LogitProcessors:
    """What an engine applies, and what it needs to know for that."""

    vocab_size: int  # of the target
    pool: TokenPool
    rules: Mapping[str, Tensor]  # tables of `LogitRules` by name, a row for each slot
    own: tuple[LogitProcessor, ...] = ()  # for every request
    stages: tuple[LogitStage, ...] = ()  # of features, in order; all are for the target's rows alone

    def active(self, work: SamplingWork) -> bool:
        """Whether `apply` changes logits."""
        return work.processed or work.of_target or bool(self.own)

    def apply(self, logits: Tensor, context: DrawContext) -> Tensor:
        """May change the logits it is given. Sync: never. Shapes: [B, R, N] -> [B, R, N]."""
        for processor in self.own:
            logits = processor(logits, context)
        work = context.sampling.work
        if work.processed:
            logits = follow_parameters(logits, context, self.rules)
        for stage in self.stages if work.of_target and context.of_target else ():
            logits = stage.apply(logits, context)
        return logits


def follow_parameters(logits: Tensor, context: DrawContext, tables: Mapping[str, Tensor]) -> Tensor:
    """New logits, as the requests' parameters ask: all of them in one pass. Sync: never.

    Nothing is counted from step to step: each step counts the tokens of the token pool, which is whole after a prefix
    hit and after a preemption. Shapes: [B, R, N] -> [B, R, N].
    """
    history, asked = context.history, context.sampling
    rules = LogitRules(
        slots=asked.slots,
        output_from=asked.output_from,
        stop_from=asked.stop_from,
        stop_ids=asked.stop_ids,
        **tables,
    )
    store = asked.processors.pool.rows_of(history.page_table)
    before = RowHistory(store, history.roots, context.positions, context.guesses, history.counts)
    return process_logits(logits, rules, before, context.token_ids)


def load_processor(name: str) -> LogitProcessor:
    """Import MODULE:NAME. Raises: ConfigError saying what is wrong with it."""
    place, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise ConfigError(FIELD, f"{name}: {error}; install it, or put its directory on PYTHONPATH") from None
    found: LogitProcessor | None = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(FIELD, f"{name}: {place} has no function of that name")
    return found
