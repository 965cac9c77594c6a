"""How far each slot's draft lags behind: steps of width 1 leave the draft out, which then has rows to absorb.

A step catches up when it is wider than that, or when a slot's rows would become more than the draft keeps. The counts
are the host's, so they follow from plans alone. The scheduler knows an upper bound of them, for its prefix cache.

As a rule, narrow steps have the slots of the one before. So they are counted once for all slots, and by slot only when
the batch changes: the worker's thread looks at no slot while it does not.
"""

from collections.abc import Collection, Iterable, Sequence


class DraftLag:
    """Rows that drafts have not absorbed, by slot. `most`: those that a draft keeps; 0: it is never left out."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rows: dict[int, int] = {}  # of slots that have some, but for `_num_steps`
        self._batch: Sequence[int] = ()  # slots of the narrow steps that are counted together
        self._num_steps = 0  # of these, not in `_rows` yet
        self._room = 0  # how many of them there may be before a slot's rows are too many

    def forget(self, slots: Iterable[int]) -> None:
        """These slots get new requests."""
        for slot in slots:
            self._settle()
            self._rows.pop(slot, None)

    def before(self, slots: Sequence[int], width: int) -> list[int]:
        """The rows of each slot that its draft must absorb before a step of this width; empty if there is no need."""
        if width == 1 and self._num_steps < self._room and slots == self._batch:
            return []
        self._settle()
        if not self._rows:
            return []
        counts = [self._rows.get(slot, 0) for slot in slots]
        return counts if max(counts) >= (self._most if width == 1 else 1) else []

    def after(self, slots: Sequence[int], width: int, caught_up: bool, left_out: Collection[int] = ()) -> None:
        """Count a step that was launched. `left_out`: slots that took no part in it, but for catching up."""
        if width == 1 and self._room and not (caught_up or left_out) and slots == self._batch:
            self._num_steps += 1
            return
        if width > 1 and not caught_up:
            return  # `before` has counted by slot
        if caught_up:
            self.forget(slots)
        self._settle()
        if width == 1 and self._most:
            self._rows.update({slot: self._rows.get(slot, 0) + 1 for slot in slots if slot not in left_out})
            self._batch, self._room = slots, self._most - max([self._rows.get(slot, 0) for slot in slots])

    def _settle(self) -> None:
        """Count by slot from now on."""
        if self._num_steps:
            self._rows.update({slot: self._rows.get(slot, 0) + self._num_steps for slot in self._batch})
        self._batch, self._num_steps, self._room = (), 0, 0
