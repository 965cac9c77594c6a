"""Whether guesses are looked up after a step, or the step rests.

What a lookup costs is known, what it gains is not known before. So lookups are paid for out of a credit, in steps that
rest, all slots of the batch together:

    a step that rests            earns INCOME, whatever comes of it
    a step that does not         costs what it takes longer than one that rests
    each committed guess         earns a step, over the number of slots

While there is credit, guesses are looked up after every step. Without credit, steps rest until INCOME has paid for one
lookup: its matches are known a few steps later. A match that is expected to pay keeps the lookups going, and has them
go on where it earns. So decoding without lookups is faster by about INCOME at most, and by MOST_CREDIT steps for every
change from text with matches to text without.
"""

from overlap_spec.messages import MOST_RESTING, StepResult

INCOME = 1 / 128
MOST_CREDIT = 4.0
MOST_DEBT = 0.75 * MOST_RESTING * INCOME
CLEAR_GAIN = 1.25  # tokens per second, over steps that rest, that lookups must promise to go on without credit


class LookupCredit:
    """The credit of this module's docstring; unlimited where it is not known what a step that rests takes."""

    def __init__(self) -> None:
        self._credit = MOST_CREDIT
        self._granted = True
        self._resting_s = 0.0  # of a step like the one that was asked for
        self._share = 1.0  # of its slots that want guesses

    def grant(self, batch_size: int, num_plain: int, promised: float, resting_s: float) -> bool:
        """Decide on lookups after the next step.

        `promised`: tokens per second and slot, with lookups. `resting_s`: of a step without, 0 if that is not known.
        """
        self._resting_s = resting_s
        if not resting_s:
            return True
        self._share = 1 - num_plain / batch_size
        self._granted = self._credit > 0 or promised * self._resting_s > CLEAR_GAIN
        return self._granted

    def spend(self, seconds: float) -> bool:
        """Plan the step, which takes so long with lookups. Returns what was granted."""
        if self._resting_s and self._granted:
            self._credit = max(self._credit - (seconds / self._resting_s - 1), -MOST_DEBT)
        elif self._resting_s:
            self._credit += INCOME
        return self._granted

    def earn(self, result: StepResult) -> None:
        """Take in what a step has committed."""
        runs = result.tokens
        gain = self._share * (sum(map(len, runs)) / len(runs) - 1)
        self._credit = min(self._credit + gain, MOST_CREDIT)
