"""Between the supervisor and every actor: ready, failed, progress, heartbeats, records, shutdown."""

import msgspec

from overlap_spec.messages.base import Message
from overlap_spec.messages.facts import ActorFacts
from overlap_spec.messages.health import DraftState

Value = int | float | str


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A span of one track's time; an instant where `end` is `begin`. Seconds. `step` 0: of no step."""

    track: str
    name: str
    begin: float
    end: float
    step: int = 0
    args: dict[str, Value] = {}


class Shutdown(Message, frozen=True):
    """Stop; with `drain` finish open requests first (the supervisor bounds the time)."""

    drain: bool


class Recover(Message, frozen=True):
    """Scheduler and worker are gone, and started again: what is open goes on there, over links of this generation.

    `actor` died first, and why is `error`; `died_at`: monotonic, in seconds.
    """

    generation: int
    actor: str
    error: str
    died_at: float


class LivenessProbe(Message, frozen=True):
    """Answer with Alive, from the loop that does the actor's work. At most one is unanswered.

    `watch_s`: record what is done within so many seconds from now, and send what was recorded since the last question;
    0: this is no such question.
    """

    watch_s: float = 0.0


class Alive(Message, frozen=True):
    """The answer to a LivenessProbe. `step_s`: seconds since the plan of the oldest step in flight came; 0: none is.

    `draft`: the scheduler's judgement. `records`: for those who watch. `waits_s`: this is no answer, but tells that the
    actor, a rank of the worker, has waited for other ranks for so long.
    `generation`, of this and the next three: which of the processes of that role it is.
    """

    actor: str
    step_s: float = 0.0
    generation: int = 0
    draft: DraftState = DraftState.UNKNOWN
    records: list[Record] = []
    waits_s: float = 0.0


class ActorReady(Message, frozen=True):
    """An actor is warm."""

    actor: str
    facts: ActorFacts
    generation: int = 0


class ActorFailed(Message, frozen=True):
    """An actor is about to exit on an exception. `on_purpose`: its error explains itself, and would come again.

    `refused`: it is about the checkpoint or a flag. `lost_rank`: another rank of its model is gone.
    """

    actor: str
    error: str
    traceback: str
    generation: int = 0
    on_purpose: bool = False
    refused: bool = False
    lost_rank: bool = False


class ActorProgress(Message, frozen=True):
    """Progress of the start, for the terminal: what is being loaded, done out of total (0: unknown)."""

    actor: str
    what: str
    done: int
    total: int
    generation: int = 0


class Drained(Message, frozen=True):
    """The frontend has no open request left after Shutdown(drain=True)."""


ToSupervisor = ActorReady | ActorFailed | ActorProgress | Drained | Alive
