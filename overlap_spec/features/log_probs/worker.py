"""Log-probs in the worker: they are computed beside the tokens of a step, and packed for the requests that ask."""

from collections.abc import Callable, Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from overlap_spec.features.log_probs.records import ScoredStep
from overlap_spec.features.log_probs.rows import decided_log_probs, prompt_log_probs
from overlap_spec.messages import MAX_LISTED_LOG_PROBS, LogProbParams, SamplingParams, StepPlan
from overlap_spec.models.interfaces import LazyLogits
from overlap_spec.sampling.stages import Decided
from overlap_spec.worker.build import Parts
from overlap_spec.worker.chunks import Packer
from overlap_spec.worker.devices import Device
from overlap_spec.worker.hooks import StepHook


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
