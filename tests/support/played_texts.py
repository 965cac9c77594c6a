"""Texts that are played by hand, for widths of n-grams: what is found at each token, and how many guesses are right."""

import random
from dataclasses import dataclass

LONGEST = 8000  # tokens of a text


@dataclass(frozen=True)
class Stretch:
    """A part of a text. Each guess is right at this rate."""

    share: float
    strength: int
    levels: int
    rate: float
    longest: int  # tokens


TEXTS = {
    "nothing is found": (Stretch(1, 0, 0, 0.0, 9),),
    "what is found is wrong": (Stretch(1, 2, 11, 0.1, 3),),
    "chat": (Stretch(0.45, 0, 0, 0.0, 5), Stretch(0.45, 2, 6, 0.25, 5), Stretch(0.1, 6, 11, 0.8, 5)),
    "copy": (Stretch(0.12, 0, 0, 0.0, 4), Stretch(0.13, 1, 9, 0.3, 2), Stretch(0.75, 12, 11, 0.85, 40)),
}


class Text:
    """One slot's text: the same, however it is decoded."""

    def __init__(self, kind: str, seed: int, copies_from: int = LONGEST) -> None:
        """`copies_from`: the token from which on it is a copy."""
        rng = random.Random(seed)
        self.stretches: list[Stretch] = []  # of each token
        self.position = 0
        while len(self.stretches) < LONGEST:
            parts = TEXTS["copy" if len(self.stretches) >= copies_from else kind]
            (stretch,) = rng.choices(parts, [each.share for each in parts])
            self.stretches += [stretch] * rng.randint(1, stretch.longest)
        self._right = [rng.random() < stretch.rate for stretch in self.stretches]

    def window(self) -> tuple[Stretch, int]:
        """What is found at the position, and how many guesses are right."""
        stretch = self.stretches[self.position]
        following = self._right[self.position + 1 : self.position + 1 + stretch.levels]
        return stretch, following.index(False) if False in following else len(following)
