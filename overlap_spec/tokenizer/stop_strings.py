"""Finds the first stop string in a text that arrives in pieces.

The first is the one that ends first (of those the longest), so the answer does not depend on where the
pieces are cut. Text that may still become a stop string is held back:

    stop "END"   pieces  "to be"   " E"    "N"      "Dless"
                 out     "to be"   " "     ""       ""  matched "END"
"""


class StopStrings:
    """The stop strings of one request. After a match it must not be fed again."""

    def __init__(self, stops: tuple[str, ...], keep_match: bool) -> None:
        self._stops = stops
        self._keep_match = keep_match
        self._held = ""

    def feed(self, piece: str) -> tuple[str, str | None]:
        """Returns the text that is final, and the stop string found, if any; text from the match on is dropped."""
        text = self._held + piece
        found = self._first_match(text)
        if found is not None:
            start, stop = found
            return text[: start + len(stop) if self._keep_match else start], stop
        keep = len(text) - self._open_suffix(text)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """The text held back, when the request ends for another reason."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def _open_suffix(self, text: str) -> int:
        """Length of the longest suffix that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
