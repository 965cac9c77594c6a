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


def plan_of(step_id: int, parts: Iterable[SlotPart], width: int, **fields: Any) -> StepPlan:
    """The plan of a step with these parts, of which either all or none are chunks."""
    parts = list(parts)
    chunks = [ChunkWork(part.slot, part.start, part.tokens, part.next_token, part.rows_out) for part in parts]
    prefills = any(part.tokens for part in parts)
    assert not prefills or all(part.tokens for part in parts), "a step is of chunks or of windows"
    return StepPlan(
        step_id,
        width,
        [] if prefills else [part.slot for part in parts],
        {part.slot: list(part.new_pages) for part in parts if part.new_pages},
        chunks if prefills else [],
        {part.slot: part.reset for part in parts if part.reset is not None},
        **fields,
    )


def windows(step_id: int, slots: Iterable[int], width: int, **fields: Any) -> StepPlan:
    """A decode step without news of its slots."""
    return StepPlan(step_id, width, list(slots), **fields)


def parts_of(plan: StepPlan) -> list[SlotPart]:
    """What each slot of a plan does, in the order of the result's rows."""
    pages, resets = plan.new_pages, plan.resets
    if plan.chunks:
        return [
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
    return [SlotPart(slot, pages.get(slot, []), reset=resets.get(slot)) for slot in plan.slots]


def is_audit(plan: StepPlan) -> bool:
    """Whether it is a step of audits."""
    return find(plan.extensions, Replayed) is not None
