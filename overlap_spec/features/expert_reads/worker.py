"""Copies what the target has counted out of the device, and tells the scheduler.

Layers are counted on the device, within the step (`ExpertReads`). The sums of all steps are copied behind every
EVERY-th decode step, and are read when they have come. A dense target has nothing to count: nothing is attached.
"""

from collections.abc import Sequence

from overlap_spec.features.expert_reads import ExpertLayers, ExpertsRead
from overlap_spec.messages import Extension, Phase
from overlap_spec.models.layers.experts import ExpertReads
from overlap_spec.models.targets.decoder import DecoderTarget
from overlap_spec.runtime.tracing import Recorder
from overlap_spec.worker.build import Parts
from overlap_spec.worker.devices import Device
from overlap_spec.worker.hooks import StepHook
from overlap_spec.worker.step import StepHandle

EVERY = 8  # decode steps from one copy to the next: a copy holds up the device for some microseconds


def attach(parts: Parts) -> StepHook | None:
    """Begin to count, if the target has mixtures."""
    target = parts.target
    reads = target.count_experts() if isinstance(target, DecoderTarget) else None
    return None if reads is None else ReadExperts(reads, parts.device)


class ReadExperts(StepHook):
    """The counts of one device."""

    def __init__(self, reads: ExpertReads, device: Device) -> None:
        self._reads = reads
        self._mirror = device.mirror(reads.sums.view(1, 1, 2))
        self._num_steps = 0
        self._is_copied = False

    def ready(self) -> Sequence[Extension]:
        return (ExpertLayers(self._reads.num_experts),)

    def serves(self, trace: Recorder) -> None:
        """The steps of the start had rows of padding alone."""
        self._reads.sums.zero_()

    def launched(self, handle: StepHandle) -> None:
        if handle.plan.phase is not Phase.DECODE:
            return
        self._num_steps += 1
        if self._num_steps % EVERY == 0:
            self._mirror.refresh()
            self._is_copied = True

    def replies(self) -> Sequence[Extension]:
        if not self._is_copied or not self._mirror.ready():
            return ()
        self._is_copied = False
        ((experts, layers),) = self._mirror.rows([0])[0]
        return (ExpertsRead(experts, layers),)
