"""Decides where one request's output ends, and what its text and ids are.

The scheduler's finish is provisional, this one is final. A run is walked token by token; for each token the order is
stop token, stop string or pattern, length, and everything is cut at the same token:

    ends by       text                            ids, completion_tokens
    stop token    without that token's text       with it
    stop string   up to the stop string           up to the token that completed it, or that showed a pattern's
                                                  condition on what follows to hold
    length        all, held-back text included    max_new_tokens of them
"""

import msgspec

from overlap_spec.frontend.detokenize import Detokenizer
from overlap_spec.frontend.stop_strings import Stops, StopStrings
from overlap_spec.messages import Finish, FinishKind, SamplingParams


class Piece(msgspec.Struct, frozen=True):
    """What one run adds to an output."""

    text: str
    token_ids: list[int]
    finish: Finish | None


class Output:
    """One request's output so far. `num_tokens` is its completion_tokens."""

    def __init__(self, sampling: SamplingParams, max_tokens: int, detokenizer: Detokenizer, stops: Stops) -> None:
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._min_tokens = sampling.min_new_tokens
        self._keep_stop = sampling.no_stop_trim
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, sampling.no_stop_trim) if stops else None
        self.takes_long = stops.takes_long

    def push(self, tokens: list[int], finish: Finish | None) -> Piece:
        """Add a run. `finish` is the scheduler's, for the last token of the run."""
        room = self._max_tokens - self.num_tokens
        if len(tokens) > room:
            tokens, finish = tokens[:room], None
        if len(tokens) == room and finish is None:
            finish = Finish(FinishKind.LENGTH)
        if self._stops is not None:
            return self._push_searching(tokens, finish, self._stops)
        self.num_tokens += len(tokens)
        if finish is None:
            return Piece(self._detokenizer.push(tokens), tokens, None)
        return Piece(self._detokenizer.push(self._shown(tokens, finish)) + self._detokenizer.flush(), tokens, finish)

    def end(self) -> str:
        """The text still held back, for a request that is ended from outside."""
        held = self._stops.rest() if self._stops is not None else ""
        return held + self._detokenizer.flush()

    def _push_searching(self, tokens: list[int], finish: Finish | None, stops: StopStrings) -> Piece:
        texts: list[str] = []
        for index, token in enumerate(tokens, start=1):
            self.num_tokens += 1
            ends = finish if index == len(tokens) else None
            if ends is not None and ends.kind is FinishKind.STOP:
                return self._stopped(token, texts, tokens, ends, stops)
            text = self._detokenizer.push((token,))
            if ends is not None:
                text += self._detokenizer.flush()
            found = self._search(text, texts, stops)
            if found is not None:
                return Piece("".join(texts), tokens[:index], Finish(FinishKind.STOP, found))
        if finish is not None:
            text, found = stops.flush()
            texts.append(text)
            finish = finish if found is None else Finish(FinishKind.STOP, found)
        return Piece("".join(texts), tokens, finish)

    def _stopped(self, token: int, texts: list[str], tokens: list[int], finish: Finish, stops: StopStrings) -> Piece:
        """The last token is a stop token. A pattern may match by that, before it."""
        text, found = stops.flush()
        texts.append(text)
        if found is not None:
            return Piece("".join(texts), tokens, Finish(FinishKind.STOP, found))
        texts.append(self._detokenizer.push(self._shown([token], finish)) + self._detokenizer.flush())
        return Piece("".join(texts), tokens, finish)

    def _search(self, text: str, texts: list[str], stops: StopStrings) -> str | None:
        """A stop string counts if the token that completes it may be the last one."""
        if self.num_tokens < self._min_tokens:
            texts.append(text)
            stops.skip(text)
            return None
        final, found = stops.feed(text)
        texts.append(final)
        return found

    def _shown(self, tokens: list[int], finish: Finish) -> list[int]:
        """The tokens of a last run whose text is shown."""
        trims = finish.kind is FinishKind.STOP and not self._keep_stop
        return tokens[:-1] if trims else tokens
