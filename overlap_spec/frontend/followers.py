"""A follower is a feature's view of one request, from its admission to its end. Most requests have none."""

from overlap_spec.frontend.output import Piece
from overlap_spec.frontend.steps import Gains, Run
from overlap_spec.messages import Finish, TextDeltas


class Follower:
    """A feature's view of one request. Every method does nothing; a feature overrides those that it needs."""

    __slots__ = ()

    def started(self) -> None:
        """The scheduler has given the request a slot; after a recovery it does so again."""

    def arrived(self) -> None:
        """Tokens have come; they become text next."""

    def gained(self, gains: Gains, run: Run, piece: Piece, reply: TextDeltas) -> None:
        """A row has been made of a run: `piece` is what is served of it, and the row is the last one of `reply`."""

    def closed(self, finish: Finish | None) -> None:
        """The request is gone. `finish`: of its last row; None if it was ended from outside, or has failed."""
