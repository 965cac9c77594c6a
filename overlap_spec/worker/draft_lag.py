"""How far each slot's draft lags behind: steps of width 1 leave the draft out, which then has rows to absorb.

A step catches up when it is wider than that, or when a slot's rows would become more than the draft keeps. The counts
are the host's, so they follow from plans alone. The scheduler knows an upper bound of them, for its prefix cache.
"""

from collections.abc import Container, Iterable, Sequence


class DraftLag:
    """Rows that drafts have not absorbed, by slot. `most`: those that a draft keeps; 0: it is never left out."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rows: dict[int, int] = {}  # of slots that have some

    def forget(self, slots: Iterable[int]) -> None:
        """These slots get new requests."""
        for slot in slots if self._rows else ():
            self._rows.pop(slot, None)

    def before(self, slots: Sequence[int], width: int) -> list[int]:
        """The rows of each slot that its draft must absorb before a step of this width; empty if there is no need."""
        if not self._rows:
            return []
        counts = [self._rows.get(slot, 0) for slot in slots]
        return counts if max(counts) >= (self._most if width == 1 else 1) else []

    def after(self, slots: Sequence[int], width: int, caught_up: bool, left_out: Container[int] = ()) -> None:
        """A step has been launched. `left_out`: slots that took no part in it, but for catching up."""
        if caught_up:
            self.forget(slots)
        if width == 1 and self._most:
            self._rows.update({slot: self._rows.get(slot, 0) + 1 for slot in slots if slot not in left_out})
