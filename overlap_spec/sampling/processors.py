"""Changes logits before tokens are drawn from them: one path for every row of targets and drafts, chains and trees.

Order: an engine's own processors (`--logit-processor`), then what a request's parameters ask for: penalties; logit_bias
and allowed_token_ids; bad_words; min_new_tokens; the thinking budget; the masks of grammars, which are for the target's
rows alone. What forbids tokens comes last, so nothing lets a token through that a request forbids. Temperature, filters
and noise come after (`sampler.py`).

A processor is a function of a row's position and of the tokens before it, and of nothing else. Then the tokens that are
committed are plain decoding's, whatever is guessed: the target draws after each guess as if the guess were committed.
"""

import importlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from overlap_spec.errors import ConfigError
from overlap_spec.sampling.bad_words import forbid_words
from overlap_spec.sampling.context import DrawContext
from overlap_spec.sampling.masks import TokenMasks
from overlap_spec.sampling.penalties import penalize
from overlap_spec.sampling.slot_lists import SlotLists
from overlap_spec.sampling.thinking import ThinkingBudgets
from overlap_spec.sampling.token_pool import TokenPool
from overlap_spec.sampling.types import SamplingWork

FIELD = "logit_processor"


class LogitProcessor(Protocol):
    """A function: tensor code of static shapes, which never asks the device for a value (it is captured)."""

    def __call__(self, logits: Tensor, context: DrawContext, /) -> Tensor:
        """New logits; at least one column of each row must stay finite. Shapes: [B, R, N] -> [B, R, N]."""
        ...


@dataclass(frozen=True)
class LogitProcessors:
    """What an engine applies, and what it needs to know for that."""

    vocab_size: int  # of the target
    pool: TokenPool
    lists: SlotLists
    own: tuple[LogitProcessor, ...] = ()  # for every request
    masks: TokenMasks | None = None  # of grammars; None: no grammar can be followed
    budgets: ThinkingBudgets | None = None  # of the slots; None: no slots that have any

    def active(self, work: SamplingWork) -> bool:
        """Whether `apply` changes logits."""
        return work.processed or bool(self.own)

    def apply(self, logits: Tensor, context: DrawContext) -> Tensor:
        """Sync: never. Shapes: [B, R, N] -> [B, R, N]."""
        for processor in self.own:
            logits = processor(logits, context)
        if not context.sampling.work.processed:
            return logits
        logits = penalize(logits, context)  # a copy, which is changed from here on
        if context.sampling.work.worded:
            forbid_words(logits, context)
        logits = keep_going(logits, context)
        if self.budgets is not None:
            logits = self.budgets.end_reasoning(logits, context)
        if context.of_target and self.masks is not None:
            self.masks.apply(logits, context.sampling.slots)
        return logits


def keep_going(logits: Tensor, context: DrawContext) -> Tensor:
    """Forbid each slot's stop ids before min_new_tokens are out, in place. Shapes: [B, R, N] -> [B, R, N]."""
    sampling = context.sampling
    early = context.positions < sampling.stop_from[:, None]  # [B, R]
    return context.forbid_(logits, torch.where(early[:, :, None], sampling.stop_ids[:, None], -1))


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
