"""Log-probs in the worker: they are computed beside the tokens of a step, and packed for the requests that ask.

They are the log-softmax of the model's own logits, before processors, temperature and filters: a function of the tokens
before a position alone. So they are the same with speculation and without it, for output and prompt, whatever is
forbidden or drawn. The numbers of a position come from one computation: a token's own log-prob equals its entry among
the most probable tokens to the bit (`log_prob_rows`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from overlap_spec_kernels import MAX_TOP_TOKENS, TopTokens, log_prob_rows, top_tokens
from torch import Tensor

from overlap_spec.messages import MAX_LISTED_LOG_PROBS, LogProbParams, LogProbRows, SamplingParams, StepPlan
from overlap_spec.models.interfaces import LazyLogits
from overlap_spec.sampling.stages import Decided
from overlap_spec.worker.build import Parts
from overlap_spec.worker.devices import Device, Packer
from overlap_spec.worker.hooks import StepHook

NO_PAIR = (math.nan, -1.0)  # where a vocabulary has fewer tokens than were asked for


class LogProbBlock:
    """Rows of `log_prob_rows`, as bytes. Many rows are taken as quickly as a few: no object is made for one."""

    def __init__(self, data: memoryview, num_rows: int) -> None:
        self._pairs: npt.NDArray[np.float64] = np.frombuffer(data).reshape(num_rows, -1, 2)  # [R, 1 + k + M, 2]

    def records(self, first: int, count: int, asked: LogProbParams) -> bytes:
        """Rows first, first + 1, ..: the pairs that were asked for."""
        rows = self._pairs[first : first + count]
        listed = rows.shape[1] - MAX_LISTED_LOG_PROBS
        parts = [rows[:, : min(1 + asked.top, listed)], rows[:, listed : listed + len(asked.token_ids)]]
        if (missing := 1 + asked.top - listed) > 0:
            parts.insert(1, np.full((count, missing, 2), NO_PAIR))
        return np.concatenate(parts, 1).tobytes()


@dataclass(frozen=True)
class ScoredStep:
    """Which rows of a step have log-probs that were asked for. `asked`: of each of the plan's slots."""

    asked: list[LogProbParams | None]
    prompt_counts: Sequence[int]  # prompt tokens that each slot's chunk has log-probs of; empty: none has

    def pack(
        self, tokens: list[list[int]], longest: int, of_tokens: memoryview | None, of_prompts: memoryview | None
    ) -> LogProbRows | None:
        prompts = self._of_prompts(LogProbBlock(of_prompts, sum(self.prompt_counts))) if of_prompts is not None else []
        records: list[bytes] = []
        if of_tokens is not None and any(tokens):
            block = LogProbBlock(of_tokens, len(tokens) * longest)
            records = [
                b"" if asked is None else block.records(index * longest, len(run), asked)
                for index, (asked, run) in enumerate(zip(self.asked, tokens, strict=True))
            ]
        return LogProbRows(records, prompts) if records or prompts else None

    def _of_prompts(self, block: LogProbBlock) -> list[bytes]:
        first, packed = 0, []
        for asked, count in zip(self.asked, self.prompt_counts, strict=True):
            packed.append(block.records(first, count, asked) if asked is not None and count else b"")
            first += count
        return packed


SCORED_LOGITS = 1 << 24  # computed at once for prompt tokens: 64 MiB, less than a slice is drawn through
SCORED_ON_A_CPU = 1 << 22  # the same there, with all that is made of them


def most_probable(logits: Tensor) -> TopTokens:
    """As many as a request may ask for. Shapes: logits [R, V]."""
    return top_tokens(logits, min(MAX_TOP_TOKENS, logits.shape[1]))


def decided_log_probs(logits: Tensor, decided: Decided, listed: Tensor) -> Tensor:
    """Of the tokens that a step decides. Sync: never. Shapes: logits [B * R, V], listed [S, M] -> [B * D, n] f64."""
    rows, slots = None, decided.slots
    if decided.path is not None:
        width = len(logits) // len(slots)
        first = torch.arange(len(slots), device=slots.device) * width
        rows = (first[:, None] + decided.path).flatten()
    return log_prob_rows(logits, most_probable(logits), decided.tokens.flatten(), slots, listed, rows)


def prompt_log_probs(
    logits_of: Callable[[Tensor], LazyLogits],
    vocab_size: int,
    hidden: Tensor,
    tokens: Tensor,
    slots: Tensor,
    listed: Tensor,
) -> Tensor:
    """Of prompt tokens, each drawn from its row of `hidden`, a slice of them at a time. Sync: never.

    Shapes: hidden [N, H], tokens, slots [N] i64, listed [S, M] i64 -> [N, n] f64.
    """
    step = max(1, (SCORED_ON_A_CPU if hidden.is_cpu else SCORED_LOGITS) // vocab_size)
    parts = []
    for part in (slice(first, first + step) for first in range(0, len(tokens), step)):
        logits = logits_of(hidden[part]).compute()
        parts.append(log_prob_rows(logits, most_probable(logits), tokens[part], slots[part], listed))
    return torch.cat(parts)


def attach(parts: Parts) -> StepHook:
    """Any request may ask for log-probs."""
    num_slots, place = len(parts.slots.length), parts.device.torch_device
    return LogProbSteps(LogProbOutput(num_slots, parts.target.vocab_size, place), parts.device)


class LogProbOutput:
    """The log-probs of decided tokens, as `log_prob_rows` writes them."""

    name = "log_probs"

    def __init__(self, num_slots: int, vocab_size: int, place: torch.device) -> None:
        self._vocab_size = vocab_size
        self.listed = torch.full((num_slots, MAX_LISTED_LOG_PROBS), -1, dtype=torch.int64, device=place)
        self.of_slots: dict[int, LogProbParams] = {}  # what requests ask for, by slot

    def asked(self, sampling: SamplingParams) -> bool:
        return sampling.log_probs is not None

    def asking(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, log_probs=LogProbParams(token_ids=(0,), prompt_from=0))

    def write(self, logits: Tensor, decided: Decided) -> Tensor:
        return decided_log_probs(logits, decided, self.listed)

    def write_prompts(
        self, logits: Callable[[Tensor], LazyLogits], hidden: Tensor, tokens: Tensor, slots: Tensor
    ) -> Tensor:
        return prompt_log_probs(logits, self._vocab_size, hidden, tokens, slots, self.listed)

    def packer(self, slots: Sequence[int], prompt_counts: Sequence[int]) -> ScoredStep | None:
        if not self.of_slots:
            return None
        asked = [self.of_slots.get(slot) for slot in slots]
        return ScoredStep(asked, prompt_counts) if any(asked) else None


class LogProbSteps(StepHook):
    """Notes what requests ask for when they take their slots."""

    def __init__(self, output: LogProbOutput, device: Device) -> None:
        self.outputs = (output,)
        self._output = output
        self._device = device

    def changed(self, plan: StepPlan) -> None:
        """Listed tokens go to the device; stale ones of other slots are read and not packed."""
        listed: list[int] = []  # slot, column, token
        for slot, reset in plan.resets.items():
            self._output.of_slots.pop(slot, None)
            if (asked := reset.sampling.log_probs) is not None:
                self._output.of_slots[slot] = asked
                for column, token in enumerate(asked.token_ids):
                    listed += (slot, column, token)
        if listed:
            packer = Packer()
            packer.add(listed)
            slots, columns, tokens = packer.upload(self._device)[0].view(-1, 3).unbind(1)
            self._output.listed[slots, columns] = tokens
