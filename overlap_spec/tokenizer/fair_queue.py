"""What clients have sent and the service has not read yet: a bounded queue for each, served in turn.

a:  [1 2 3 ..]  [4]          one turn of a: up to TURN frames of what it has sent together
b:  [1]                      then b, then a again
"""

from collections import deque
from collections.abc import Sequence

from overlap_spec.ipc.byte_budget import ByteBudget

TURN = 32  # frames that were sent together and are read together; more of them are read in several turns


class FairQueue:
    """Frames by client number. `budget` and `most_frames` bound what a client has waiting."""

    def __init__(self, budget: ByteBudget[int], most_frames: int) -> None:
        self.budget = budget
        self.most_frames = most_frames
        self._queues: dict[int, deque[tuple[bytes, int, int]]] = {}  # the first one's turn it is; frame, more, charged
        self._taken = 0  # in this turn
        self.more_bytes = 0  # of what was sent together with the last frame that was taken

    def __bool__(self) -> bool:
        return bool(self._queues)

    def of(self, client: int) -> int:
        """Frames that wait from this client."""
        return len(self._queues.get(client, ()))

    @property
    def turn_is_over(self) -> bool:
        """Whether the next frame begins a turn."""
        return not (self.more_bytes and 0 < self._taken < TURN)

    def put(self, client: int, frame: bytes, more: int) -> bool:
        """Add a frame; `more`: bytes of the same sending that follow. Returns False if the client has too many."""
        if self.of(client) >= self.most_frames or not self.budget.take(client, len(frame)):
            return False
        self._queues.setdefault(client, deque()).append((frame, more, len(frame)))
        return True

    def put_together(self, client: int, frames: Sequence[bytes]) -> bool:
        """Add the frames of one sending. Returns False, and adds none, if they are too many."""
        if not frames:
            return True
        sizes = list(map(len, frames))
        more = sum(sizes)
        if self.of(client) + len(frames) > self.most_frames or not self.budget.take(client, more):
            return False
        queue = self._queues.setdefault(client, deque())
        for frame, size in zip(frames, sizes, strict=True):
            more -= size
            queue.append((frame, more, size))
        return True

    def put_anyway(self, client: int, frame: bytes, more: int) -> None:
        """Add a small frame that no bound may keep out."""
        self._queues.setdefault(client, deque()).append((frame, more, 0))

    def take(self) -> tuple[int, bytes]:
        """The next frame and its client; there must be one."""
        if self.turn_is_over:
            self._begin_turn()
        client, queue = next(iter(self._queues.items()))
        frame, more, charged = queue.popleft()
        self.budget.give(client, charged)
        self._taken += 1
        self.more_bytes = more if queue else 0
        if not queue:
            del self._queues[client]
            self._taken = 0
        return client, frame

    def drop(self, client: int) -> list[bytes]:
        """Forget a client. Returns what it had waiting."""
        if client == next(iter(self._queues), None):
            self._taken = self.more_bytes = 0
        dropped = self._queues.pop(client, ())
        self.budget.give(client, sum(charged for _, _, charged in dropped))
        return [frame for frame, _, _ in dropped]

    def _begin_turn(self) -> None:
        """The client that was served last goes to the end."""
        if self._taken:
            client = next(iter(self._queues))
            self._queues[client] = self._queues.pop(client)
        self._taken = 0
