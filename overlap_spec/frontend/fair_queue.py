"""What clients have sent and the service has not read yet: a bounded queue for each, served in turn.

a:  [1 2 3 ..]  [4]          one turn of a: up to TURN frames of what it has sent together
b:  [1]                      then b, then a again
c:  [1 2]  held              its first frame is looked at before it is read, and others do not wait for that
"""

from collections import deque
from collections.abc import Sequence

from overlap_spec.frontend.raw_messages import Payload
from overlap_spec.ipc.byte_budget import ByteBudget

Frames = deque[tuple[Payload, int, int]]  # with the bytes that follow, and those that are charged
TURN = 32  # frames that were sent together and are read together; more of them are read in several turns


class FairQueue:
    """Frames by client number. `budget` and `most_frames` bound what a client has waiting."""

    def __init__(self, budget: ByteBudget[int], most_frames: int) -> None:
        self.budget = budget
        self.most_frames = most_frames
        self._queues: dict[int, Frames] = {}  # the first one's turn it is
        self._held: dict[int, Frames] = {}
        self._taken = 0  # in this turn
        self.more_bytes = 0  # of what was sent together with the last frame that was taken

    def __bool__(self) -> bool:
        """Whether there is a frame to be taken: of a client that is not held."""
        return bool(self._queues)

    def of(self, client: int) -> int:
        """Frames that wait from this client."""
        return len(self._queues.get(client, ())) + len(self._held.get(client, ()))

    @property
    def turn_is_over(self) -> bool:
        """Whether the next frame begins a turn."""
        return not (self.more_bytes and 0 < self._taken < TURN)

    def put(self, client: int, frame: Payload, more: int) -> bool:
        """Add a frame; `more`: bytes of the same sending that follow. Returns False if the client has too many."""
        if self.of(client) >= self.most_frames or not self.budget.take(client, len(frame)):
            return False
        self._queue(client).append((frame, more, len(frame)))
        return True

    def put_together(self, client: int, frames: Sequence[Payload]) -> bool:
        """Add the frames of one sending. Returns False, and adds none, if they are too many."""
        if not frames:
            return True
        sizes = list(map(len, frames))
        more = sum(sizes)
        if self.of(client) + len(frames) > self.most_frames or not self.budget.take(client, more):
            return False
        queue = self._queue(client)
        for frame, size in zip(frames, sizes, strict=True):
            more -= size
            queue.append((frame, more, size))
        return True

    def put_anyway(self, client: int, frame: Payload, more: int) -> None:
        """Add a small frame that no bound may keep out."""
        self._queue(client).append((frame, more, 0))

    @property
    def first(self) -> tuple[int, Payload]:
        """The client and frame that `take` returns next; there must be one."""
        if self.turn_is_over:
            self._begin_turn()
        client, queue = next(iter(self._queues.items()))
        return client, queue[0][0]

    def take(self) -> tuple[int, Payload]:
        """The next frame and its client; there must be one."""
        client, _ = self.first
        queue = self._queues[client]
        frame, more, charged = queue.popleft()
        self.budget.give(client, charged)
        self._taken += 1
        self.more_bytes = more if queue else 0
        if not queue:
            del self._queues[client]
            self._taken = 0
        return client, frame

    def hold(self, client: int) -> None:
        """Take nothing from a client that has frames waiting until `release`; others have their turns."""
        self._end_turn_of(client)
        self._held[client] = self._queues.pop(client)

    def release(self, client: int) -> None:
        """Its next turn comes after those of all others. Nothing happens if it was dropped."""
        if client in self._held:
            self._queues[client] = self._held.pop(client)

    def drop(self, client: int) -> list[Payload]:
        """Forget a client. Returns what it had waiting."""
        self._end_turn_of(client)
        dropped = [*self._queues.pop(client, ()), *self._held.pop(client, ())]
        self.budget.give(client, sum(charged for _, _, charged in dropped))
        return [frame for frame, _, _ in dropped]

    def _queue(self, client: int) -> Frames:
        return self._held[client] if client in self._held else self._queues.setdefault(client, deque())

    def _end_turn_of(self, client: int) -> None:
        """If it is that client's."""
        if client == next(iter(self._queues), None):
            self._taken = self.more_bytes = 0

    def _begin_turn(self) -> None:
        """The client that was served last goes to the end."""
        if self._taken:
            client = next(iter(self._queues))
            self._queues[client] = self._queues.pop(client)
        self._taken = 0
