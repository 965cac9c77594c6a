"""Plans from what each slot does, and back: tests think of slots, messages are columns."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from overlap_spec.messages import ChunkWork, Replayed, ResetSlot, StepPlan, find


@dataclass(frozen=True)
class SlotPart:
    """One slot's part of a step: a chunk of its prompt, or its window where `tokens` are empty."""

    slot: int
    new_pages: Sequence[int] = ()
    start: int = 0
    tokens: bytes = b""
    next_token: int = -1
    reset: ResetSlot | None = None
    rows_out: tuple[int, int] = (0, 0)

    @property
    def chunk(self) -> tuple[int, int, bytes, int, tuple[int, int]]:
        """The fields of a `ChunkWork`."""
        return self.slot, self.start, self.tokens, self.next_token, self.rows_out


def plan_of(step_id: int, parts: Iterable[SlotPart], width: int, **fields: Any) -> StepPlan:
    """The plan of a step with these parts."""
    parts = list(parts)
    return StepPlan(
        step_id,
        width,
        [part.slot for part in parts if not part.tokens],
        {part.slot: list(part.new_pages) for part in parts if part.new_pages},
        [ChunkWork(*part.chunk) for part in parts if part.tokens],
        {part.slot: part.reset for part in parts if part.reset is not None},
        **fields,
    )


def windows(step_id: int, slots: Iterable[int], width: int, **fields: Any) -> StepPlan:
    """A decode step without news of its slots."""
    return StepPlan(step_id, width, list(slots), **fields)


def parts_of(plan: StepPlan) -> list[SlotPart]:
    """What each slot of a plan does, in the order of the results' rows."""
    pages, resets = plan.new_pages, plan.resets
    windows = [SlotPart(slot, pages.get(slot, []), reset=resets.get(slot)) for slot in plan.slots]
    return windows + [
        SlotPart(
            chunk.slot,
            pages.get(chunk.slot, []),
            chunk.start,
            chunk.tokens,
            chunk.next_token,
            resets.get(chunk.slot),
            rows_out=chunk.rows_out,
        )
        for chunk in plan.chunks
    ]


def is_audit(plan: StepPlan) -> bool:
    """Whether it is a step of audits."""
    return find(plan.extensions, Replayed) is not None
