"""The backlog of one client: frames that it has not read yet, and how many bytes of them belong to each request."""

from collections import Counter, deque
from collections.abc import Sequence


class Backlog:
    """A frame's bytes are shared evenly by the requests that it tells about."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._frames: deque[tuple[bytes, Sequence[str]]] = deque()
        self._by_request: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._frames)

    @property
    def first(self) -> bytes:
        """The frame that is to be sent next."""
        return self._frames[0][0]

    def add(self, frame: bytes, request_ids: Sequence[str]) -> None:
        """Append a frame."""
        self._frames.append((frame, request_ids))
        self._count(frame, request_ids, 1)

    def pop(self) -> int:
        """Forget the first frame, which was sent. Returns its bytes."""
        frame, request_ids = self._frames.popleft()
        self._count(frame, request_ids, -1)
        return len(frame)

    def clear(self) -> None:
        """Forget everything."""
        self.num_bytes = 0
        self._frames.clear()
        self._by_request.clear()

    def of(self, request_id: str) -> int:
        """Bytes of this request."""
        return self._by_request[request_id]

    def largest(self, request_ids: Sequence[str]) -> str:
        """Which of these requests has the most bytes."""
        return max(request_ids, key=self.of)

    def _count(self, frame: bytes, request_ids: Sequence[str], sign: int) -> None:
        self.num_bytes += sign * len(frame)
        share = sign * (len(frame) // max(1, len(request_ids)))
        for request_id in request_ids:
            self._by_request[request_id] += share
            if not self._by_request[request_id]:
                del self._by_request[request_id]
