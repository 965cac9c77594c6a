"""The engine's state, as `/health` and the HTTP server's authentication are told it, and the draft's."""

import enum

import msgspec


class EngineState(enum.StrEnum):
    """What the engine is doing."""

    STARTING = "starting"
    READY = "ready"
    UNRESPONSIVE = "unresponsive"  # an actor gives no heartbeat; requests wait
    RECOVERING = "recovering"  # actors are started again; requests wait
    DRAINING = "draining"
    FAILED = "failed"


class DraftState(enum.StrEnum):
    """Whether a draft's guesses are any good, from the best to the worst."""

    UNKNOWN = "unknown"  # there is none, or it has made too few guesses; n-grams are not judged
    HEALTHY = "healthy"
    COLLAPSED = "collapsed"  # right much less often than usual
    DEAD = "dead"  # hardly ever right


class DraftFigures(msgspec.Struct, frozen=True):
    """The draft for one class of requests: accept lengths, bonus included, of the last thousand steps and as usual."""

    state: DraftState
    accept_length: float
    usual_accept_length: float


class EngineHealth(msgspec.Struct, frozen=True):
    """The state, for how many seconds it has been so, and the actor that is the cause.

    `last_sign_s`: by actor, seconds since its last heartbeat. `draft`: a bad one costs time, and no token is wrong,
    so it does not change the state.
    """

    state: EngineState
    reason: str = ""
    actor: str = ""
    since_s: float = 0.0
    last_sign_s: dict[str, float] = {}
    draft: DraftState = DraftState.UNKNOWN

    @property
    def is_well(self) -> bool:
        """Whether a load balancer should send requests here."""
        return self.state is EngineState.READY

    @property
    def takes_requests(self) -> bool:
        """Whether a request that comes all the same is taken: it may have to wait."""
        return self.state in (EngineState.READY, EngineState.UNRESPONSIVE, EngineState.RECOVERING)


READY = EngineHealth(EngineState.READY)
