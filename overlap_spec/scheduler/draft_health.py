"""Watches whether a draft is any good: one that is loaded wrongly runs, costs its time, and is never right.

A draft that works has its first guess accepted in every second or third step, whatever the text. One that does not is
right by chance alone. N-grams are not watched: on text without repetitions they are rightly never right.
"""

import logging
import math

ENOUGH_DRAFTS = 512  # verify steps with guesses, by which a draft is judged
DEAD_RATE = 0.01  # of their first guesses: if fewer are accepted, the draft is dead
WARN_S = 60.0  # between warnings

log = logging.getLogger(__name__)


class DraftHealth:
    """Judges a draft by every `ENOUGH_DRAFTS` verify steps, and warns if it is dead."""

    def __init__(self) -> None:
        self.is_dead = False
        self._judged = (0, 0)  # verify steps with guesses and accepted first guesses, when it was judged last
        self._warned_at = -math.inf

    def check(self, drafts: int, first_accepted: int, now: float) -> None:
        """Take in the counts since start: verify steps with guesses, and those whose first guess was accepted."""
        num_new, num_right = drafts - self._judged[0], first_accepted - self._judged[1]
        if num_new < ENOUGH_DRAFTS:
            return
        self._judged = drafts, first_accepted
        self.is_dead = num_right < DEAD_RATE * num_new
        if self.is_dead and now - self._warned_at >= WARN_S:
            self._warned_at = now
            log.warning(
                "The draft is hardly ever right: of its last %d first guesses %d were accepted. Speculation only costs"
                " time; is the draft made for this target, and loaded as it was trained?",
                *(num_new, num_right),
            )
