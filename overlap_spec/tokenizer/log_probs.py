"""One request's log-probs on their way out: prompt records collected, output records cut, tokens named."""

import struct
from array import array
from collections.abc import Callable, Sequence

from overlap_spec.messages import LogProbParams, LogProbs

NO_LOG_PROB = float("nan")
PAIR = struct.Struct("<2d")  # log-prob, token id
NO_PAIR = PAIR.pack(NO_LOG_PROB, -1.0)


class RequestLogProbs:
    """`name`: the bytes of a token. The first prompt token has no log-prob: nothing is before it, or was computed."""

    def __init__(self, asked: LogProbParams, prompt: Sequence[int], name: Callable[[int], bytes]) -> None:
        self._asked = asked
        self._name = name
        self._num_others = asked.top + len(asked.token_ids)
        first = asked.prompt_from
        self._first = [] if first is None else [PAIR.pack(NO_LOG_PROB, prompt[first]) + NO_PAIR * self._num_others]
        self._prompt = list(self._first)

    def add_prompt(self, records: bytes) -> None:
        """Keep what a chunk has scored."""
        self._prompt.append(records)

    def forget_prompt(self) -> None:
        """Drop what chunks have scored: all of them will be computed again."""
        self._prompt = list(self._first)

    def take_prompt(self) -> LogProbs | None:
        """All prompt records, once; None if there are none, or none left."""
        records = b"".join(self._prompt)
        self._prompt = []
        return self._named(records) if records else None

    def of_output(self, records: bytes, num_tokens: int) -> LogProbs:
        """The first records of a run."""
        return self._named(records[: num_tokens * (1 + self._num_others) * PAIR.size])

    def _named(self, records: bytes) -> LogProbs:
        ids = {int(token) for token in array("d", records)[1::2]} - {-1}
        names = {token: self._name(token) for token in ids}
        return LogProbs(records, self._asked.top, len(self._asked.token_ids), names)
