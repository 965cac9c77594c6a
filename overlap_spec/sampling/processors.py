"""Changes logits before tokens are drawn from them: one path for every row of targets and drafts, chains and trees.

Order: an engine's own processors (`--logit-processor`), then what a request's parameters ask for: penalties; logit_bias
and allowed_token_ids; bad_words; min_new_tokens; the thinking budget; the masks of grammars, which are for the target's
rows alone. What forbids tokens comes last, so nothing lets a token through that a request forbids. Temperature, filters
and noise come after (`sampler.py`).

A processor is a function of a row's position and of the tokens before it, and of nothing else. Then the tokens that are
committed are plain decoding's, whatever is guessed: the target draws after each guess as if the guess were committed.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from overlap_spec_kernels import LogitRules, RowHistory, process_logits
from torch import Tensor

from overlap_spec.errors import ConfigError
from overlap_spec.sampling.context import DrawContext, SamplingWork, TokenPool
from overlap_spec.sampling.stages import LogitStage

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
