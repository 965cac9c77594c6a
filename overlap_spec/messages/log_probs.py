"""Which log-probs a request asks for, and how many that may be."""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

from overlap_spec.errors import RequestError
from overlap_spec.messages.request import FEW, MAX_LISTED_LOG_PROBS, MAX_LOG_PROBS, MAX_TOP_LOG_PROBS, MOST, shown

PAIR_BYTES = 16  # a log-prob and a token id, float64


class LogProbParams(msgspec.Struct, frozen=True, kw_only=True):
    """Which log-probs are returned: of every output token, and of the prompt's from position `prompt_from` on.

    At every position also those of the `top` most probable tokens and of `token_ids`. `prompt_from=None`: none of the
    prompt. The first prompt token that is returned has no log-prob. Raises: RequestError naming the field.
    """

    top: int = 0
    token_ids: Annotated[tuple[int, ...], FEW] = ()
    prompt_from: int | None = None

    @property
    def width(self) -> int:
        """Log-probs at a position, the token's own included."""
        return 1 + self.top + len(self.token_ids)

    @property
    def record_bytes(self) -> int:
        """Of a position's, as they are packed."""
        return self.width * PAIR_BYTES

    def __post_init__(self) -> None:
        if not 0 <= self.top <= MAX_TOP_LOG_PROBS:
            raise RequestError("log_probs.top", f"log_probs.top must be 0 to {MAX_TOP_LOG_PROBS}, got {self.top}")
        if self.prompt_from is not None and not 0 <= self.prompt_from < MOST:
            text = f"log_probs.prompt_from must be a position of the prompt, from 0 on, got {self.prompt_from}"
            raise RequestError("log_probs.prompt_from", text)
        if len(self.token_ids) > MAX_LISTED_LOG_PROBS or not all(0 <= i < MOST for i in self.token_ids):
            want = f"at most {MAX_LISTED_LOG_PROBS} token ids >= 0, got {shown(self.token_ids)}"
            raise RequestError("log_probs.token_ids", f"log_probs.token_ids must be {want}")


class LogProbCount(NamedTuple):
    """How many log-probs an answer may have. `prompt_len`, `max_new_tokens`: at the most."""

    asked: LogProbParams
    prompt_len: int
    max_new_tokens: int

    @property
    def num_tokens(self) -> int:
        start = self.asked.prompt_from
        return self.max_new_tokens + (0 if start is None else max(self.prompt_len - start, 0))

    @property
    def total(self) -> int:
        return self.num_tokens * self.asked.width


def check_log_prob_count(answers: Sequence[LogProbCount]) -> None:
    """Raises: RequestError if all answers to a request together may have more log-probs than are returned."""
    total = sum(answer.total for answer in answers)
    if total <= MAX_LOG_PROBS:
        return
    first = answers[0]
    product = f"{first.num_tokens:,} tokens x {first.asked.width} log-probs"
    if len(answers) > 1:
        alike = all(answer.total == first.total for answer in answers)
        product = f"{len(answers):,} answers x {product}" if alike else f"{len(answers):,} answers"
    text = f"log_probs: {product} = {total:,}: at most {MAX_LOG_PROBS:,} are returned; ask for fewer, or set max_tokens"
    raise RequestError("log_probs", text)
