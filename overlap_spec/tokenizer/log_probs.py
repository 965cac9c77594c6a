"""One request's log-probs on their way out: of the prompt in parts, as they are computed; tokens named."""

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence

from overlap_spec.messages import LogProbParams, LogProbs

NO_LOG_PROB = float("nan")
PAIR = struct.Struct("<2d")  # log-prob, token id
NO_PAIR = PAIR.pack(NO_LOG_PROB, -1.0)
PART_PAIRS = 1024  # of a part of a prompt's: to name their tokens takes a millisecond or two, where all are new


class RequestLogProbs:
    """`name`: the bytes of a token. The first prompt token has no log-prob: nothing is before it, or was computed."""

    def __init__(self, asked: LogProbParams, prompt: Sequence[int], name: Callable[[int], bytes]) -> None:
        self._asked = asked
        self._name = name
        self._record_bytes = asked.width * PAIR.size
        first = asked.prompt_from
        no_others = NO_PAIR * (asked.width - 1)
        self._first = b"" if first is None else PAIR.pack(NO_LOG_PROB, prompt[first]) + no_others
        self._num_sent = 0  # tokens of the prompt

    def pieces_of_prompt(self, records: bytes) -> Iterator[bytes]:
        """What a chunk has scored, a few tokens in each piece."""
        most = max(PART_PAIRS // self._asked.width - 1, 1) * self._record_bytes
        return (records[start : start + most] for start in range(0, len(records), most))

    def part_of_prompt(self, piece: bytes) -> LogProbs:
        """The next piece with its tokens named, in the order of the prompt. The first token goes with the first one."""
        return self._part(piece if self._num_sent else self._first + piece)

    def forget_prompt(self) -> None:
        """All that chunks have scored will be computed again, and sent again."""
        self._num_sent = 0

    def first_of_prompt(self) -> LogProbs | None:
        """The first token's record, if no chunk has scored another one; None if it was sent, or not asked for."""
        return self._part(self._first) if self._first and not self._num_sent else None

    def of_output(self, records: bytes, num_tokens: int) -> LogProbs:
        """The first records of a run."""
        return self._named(records[: num_tokens * self._record_bytes])

    def _part(self, records: bytes) -> LogProbs:
        first = self._num_sent
        self._num_sent += len(records) // self._record_bytes
        return self._named(records, first)

    def _named(self, records: bytes, first: int = 0) -> LogProbs:
        ids = {int(token) for token in array("d", records)[1::2]} - {-1}
        names = {token: self._name(token) for token in ids}
        return LogProbs(records, self._asked.top, len(self._asked.token_ids), names, first)
