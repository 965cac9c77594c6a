"""The reports of the live audit, which `/audit` shows."""

from typing import Annotated, Any

import msgspec

from overlap_spec.messages.base import Message
from overlap_spec.messages.request import MAX_WIRE_ID_CHARS

# --- frontend -> client -----------------------------------------------------------------------------------


class AuditFigures(Message, frozen=True):
    """What the audit has counted since start; `bound`: margins up to it are the noise of batch shapes, in logits."""

    requests: int = 0
    tokens: int = 0
    near_ties: int = 0
    faults: int = 0
    control_tokens: int = 0  # of requests that were run twice, at two batch sizes
    control_differences: int = 0  # tokens at which the two runs differ
    backlog: int = 0  # requests that wait or are run
    dropped: int = 0
    skipped: int = 0
    bound: float = 0.0
    speculating: bool = True  # False once a fault has switched speculation off

    @property
    def near_ties_per_10k(self) -> float:
        """Between the served tokens and plain decoding."""
        return _per_10k(self.near_ties, self.tokens)

    @property
    def control_per_10k(self) -> float:
        """Between plain decoding and plain decoding in batches of another size."""
        return _per_10k(self.control_differences, self.control_tokens)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A served token that plain decoding does not draw. Margins are in logits; None: the token was forbidden.

    `position`: in prompt and output. `control_margin`: of the second run, at another batch size; negative if that one
    draws the served token; None without a second run. `spread`: what the margins of all runs differ by.
    """

    request_id: str
    position: int
    step_id: int  # that committed it
    served: int
    drawn: int
    margin: float | None
    control_margin: float | None
    spread: float | None = None
    bound: float
    is_fault: bool


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `/audit` shows. `recent`: the newest differences, faults first."""

    rate: float
    action: str
    why_off: str
    figures: AuditFigures
    near_ties_per_10k: float
    control_per_10k: float
    typical_noise: float | None  # half of all margins change by less than this between two batch sizes, in logits
    dropped_because: dict[str, int]
    skipped_because: dict[str, int]
    fault_file: str | None
    faults_written: int
    recent: list[Difference]

    def as_json(self) -> dict[str, Any]:
        """As a JSON object with named figures."""
        return msgspec.structs.asdict(self) | {
            "figures": msgspec.structs.asdict(self.figures),
            "recent": [msgspec.structs.asdict(difference) for difference in self.recent],
        }


class GetAudit(Message, frozen=True):
    """Ask for the `AuditReport`. `key`: the operator's, if there is one."""

    request_id: Annotated[str, msgspec.Meta(max_length=MAX_WIRE_ID_CHARS)]
    key: str = ""


class AuditReply(Message, frozen=True):
    """Answer to GetAudit."""

    request_id: str
    report: AuditReport


BOUNDLESS = 1e20  # logits: a larger margin is that of a forbidden token, or of the only one that is not


def _per_10k(count: int, of: int) -> float:
    return 1e4 * count / of if of else 0.0
