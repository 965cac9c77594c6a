"""N-grams as a method, and the owners of their log.

A request finds what requests of its owner have said, and writes in its bands.
"""

from collections.abc import Sequence

from overlap_spec_kernels import ALL_BANDS, BANDS, NgramLog

from overlap_spec.config import NGRAM, SpecSettings
from overlap_spec.features.ngram.messages import DividedLog
from overlap_spec.features.ngram.proposer import NgramDraft, NgramProposer
from overlap_spec.messages import Extension, Owner, StepPlan
from overlap_spec.models.interfaces import LoadedTarget, Progress
from overlap_spec.speculative.drafts import LoadedProposer
from overlap_spec.speculative.methods import Method
from overlap_spec.speculative.verification import REJECTION, VERIFICATIONS
from overlap_spec.worker.build import Parts
from overlap_spec.worker.devices import Device, Packer
from overlap_spec.worker.hooks import StepHook

UNOWNED = Owner(0, ALL_BANDS)


def _load(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> LoadedProposer:
    return NgramDraft.of(spec.ngram, spec.width - 1, target.embedding.device)


METHODS = (
    Method(
        NGRAM,
        key_lookahead=0,
        load=_load,
        verifications=tuple(each for each in VERIFICATIONS if each is not REJECTION),  # no guess is drawn at random
    ),
)


def attach(parts: Parts) -> StepHook | None:
    """Divide the log, if the method has it."""
    proposer = parts.method.proposer
    return OwnedSlots(proposer.memory.log, parts.device) if isinstance(proposer, NgramProposer) else None


class OwnedSlots(StepHook):
    """Notes whose request takes a slot; without salts nothing is launched."""

    def __init__(self, log: NgramLog, device: Device) -> None:
        self._log = log
        self._device = device
        self._owners: dict[int, Owner] = {}  # by slot, of those that have one

    def changed(self, plan: StepPlan) -> None:
        """A slot keeps its owner until the next request takes it. Audits guess nothing: theirs are not in the log."""
        num_slots = len(self._log.owner)
        resets = {slot: reset.owner for slot, reset in plan.resets.items() if slot < num_slots}
        changed = {slot: owner for slot, owner in resets.items() if owner != self._owners.get(slot)}
        if not changed:
            return
        for slot, owner in changed.items():
            self._owners.pop(slot, None)
            if owner is not None:
                self._owners[slot] = owner
        owners = [owner or UNOWNED for owner in changed.values()]
        is_divided = any(owner.bands != ALL_BANDS for owner in self._owners.values())
        packer = Packer()
        packer.add(changed)
        packer.add([owner.number for owner in owners])
        packer.add([owner.bands for owner in owners])
        packer.add([BANDS if is_divided else 1])
        slots, numbers, bands, stride = packer.upload(self._device)
        self._log.owner.index_copy_(0, slots, numbers)
        self._log.bands.index_copy_(0, slots, bands)
        self._log.stride.copy_(stride)

    def ready(self) -> Sequence[Extension]:
        """The scheduler may let in requests with salts."""
        return (DividedLog(),)
