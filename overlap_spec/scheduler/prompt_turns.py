"""The order in which unfinished prompts share a prefill step.

Those that the step can finish go first, the shortest before the others; the rest follow by age. Every other step begins
with the oldest prompt. So a short prompt waits for a few chunks of a long one, and a long one has at least half of the
steps from the time on at which it is the oldest, whatever else arrives.
"""

from overlap_spec.scheduler.chunk_sizes import ChunkRoom
from overlap_spec.scheduler.requests import Request

MOST_PASSED = 1  # steps in a row that begin with another prompt than the oldest


class PromptTurns:
    """Puts the unfinished prompts in order for each prefill step."""

    def __init__(self) -> None:
        self._num_passed = 0

    def order(self, prompts: list[Request], room: ChunkRoom) -> list[Request]:
        """The first of them takes what it can of the step, and leaves the rest to the next. `prompts`: oldest first."""
        if len(prompts) == 1:
            return list(prompts)
        short, long = _parted(prompts, room)
        oldest = prompts[0]
        ordered = short + long
        if ordered[0] is oldest:
            self._num_passed = 0
        elif self._num_passed < MOST_PASSED:
            self._num_passed += 1
        else:
            self._num_passed = 0
            ordered.remove(oldest)
            ordered.insert(0, oldest)
        return ordered


def _parted(prompts: list[Request], room: ChunkRoom) -> tuple[list[Request], list[Request]]:
    """Prompts that the whole step holds, shortest first; and the others."""
    short: list[Request] = []
    long: list[Request] = []
    for request in prompts:
        left = request.target - request.planned_len
        fits = room.fitting(request.planned_len, left, request.before_out, request.out_bytes) == left
        (short if fits else long).append(request)
    short.sort(key=lambda request: request.target - request.planned_len)  # of equals the older one stays first
    return short, long
