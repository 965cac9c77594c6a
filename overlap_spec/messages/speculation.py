"""How one request is speculated for, and what each of its steps verified."""

import enum

import msgspec

from overlap_spec.errors import RequestError
from overlap_spec.messages.bounds import MAX_MARKER_CHARS, check_text

NO_METHOD = "NONE"  # the method that guesses nothing
MOST_STEPS = 1 << 31


class MetricsLevel(enum.StrEnum):
    """What a reply reports of its steps. The names are those of vLLM's `--per-request-spec-decode-metrics`."""

    NONE = "none"
    SUMMARY = "summary"
    DETAILED = "detailed"  # with what each step did


class Speculative(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far one request is speculated for, and what its reply reports of that. Its tokens do not depend on it.

    `method`: the engine's, or NONE; "" is the engine's. `num_steps`: guesses in a row that a step verifies, of a tree
    its levels; None: as many as the engine has. 0 is plain decoding, as NONE is.
    Raises: RequestError if a number is out of range, or NONE is to guess.
    """

    method: str = ""
    num_steps: int | None = None
    provenance: bool = False  # tell where each token came from
    metrics: MetricsLevel = MetricsLevel.NONE

    def __post_init__(self) -> None:
        check_text("speculative.method", self.method, MAX_MARKER_CHARS)
        if self.num_steps is not None and not 0 <= self.num_steps < MOST_STEPS:
            raise RequestError("speculative", f"speculative.num_steps must be at least 0, got {self.num_steps}")
        if self.is_plain and self.num_steps:
            raise RequestError("speculative", "speculative.num_steps must be 0, or left out, with the method NONE")

    @property
    def is_plain(self) -> bool:
        """Whether the method is NONE."""
        return self.method.upper() == NO_METHOD

    @property
    def is_reported(self) -> bool:
        """Whether every step of the request reports what it verified."""
        return self.provenance or self.metrics is not MetricsLevel.NONE


class Origin(enum.StrEnum):
    """Where a token came from."""

    ACCEPTED = "accepted"  # guessed, and accepted
    BONUS = "bonus"  # the target's own, after the guesses that it accepted
    PLAIN = "plain"  # the target's own: nothing was guessed


class Verified(msgspec.Struct, frozen=True, array_like=True):
    """What one step verified for one request: guesses that might have been accepted (of a tree, its levels)."""

    step_id: int
    proposed: int
    accepted: int  # also of those that the end of the request cut off

    def origin(self, index: int) -> Origin:
        """Where the step's token came from, counted from 0."""
        if self.proposed == 0:
            return Origin.PLAIN
        return Origin.ACCEPTED if index < self.accepted else Origin.BONUS
