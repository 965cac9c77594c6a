"""Where features attach to the frontend.

    Generate --> prepare --> admission --> admitted      each request; `admitted` may return a follower of the request
    step, message, recovered                             what comes around the ring, and links to a new scheduler
    query                                                what a client asks beside requests

A feature's `frontend.py` has a function `attach(parts)`, which returns its `RequestHook`, or None where the settings
leave the feature out. The hooks of a point are called in the order in which the features were attached.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, TypeVar

from overlap_spec.client.link import ClientLink
from overlap_spec.config import Settings
from overlap_spec.errors import RequestError
from overlap_spec.frontend.codec import Codec
from overlap_spec.frontend.lifecycle import Lifecycle, Outbox
from overlap_spec.frontend.open_requests import Follower, OpenRequest
from overlap_spec.frontend.request_checks import RequestChecks
from overlap_spec.frontend.rows import RowTurns
from overlap_spec.messages import Admit, EngineLimits, Message, Prompt, Recover, SamplingParams, ToFrontend, TokenDeltas

T = TypeVar("T")
DEFAULTS = SamplingParams()


class RunApart(Protocol):
    """Work that would hold up others, done in a thread: clients take turns, by the characters that it is on."""

    def __call__(self, owner: str, num_chars: int, work: Callable[[], T], /) -> Awaitable[T]:
        """Do it. Cancellation: what has not begun is not done."""


@dataclass(frozen=True)
class Parts:
    """What a feature may use of the frontend. `generation`: how often the engine was started again before."""

    settings: Settings
    generation: int
    codec: Codec
    checks: RequestChecks
    scheduler: Outbox
    clients: ClientLink
    lifecycle: Lifecycle
    turns: RowTurns
    run_apart: RunApart


@dataclass(frozen=True, slots=True)
class Preparing:
    """A request whose prompt has been read and is not admitted yet."""

    request: OpenRequest
    prompt: Prompt
    ids: Sequence[int]
    limits: EngineLimits


class RequestHook:
    """A feature's part of the frontend. Every method does nothing; a feature overrides those that it needs.

    `fields`: of `SamplingParams`. `takes_long`, `prepare` and `admitted` are called for requests that set one of them;
    for all requests, if it names none. `terms`: in the same way, of `Terms`, for `admitted`.
    """

    fields: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()

    def takes_long(self, asked: SamplingParams) -> bool:
        """Whether `prepare` of such a request takes long, so that it is answered beside others."""
        return False

    async def prepare(self, sampling: SamplingParams, preparing: Preparing) -> SamplingParams:
        """What goes on to the scheduler in place of `sampling`, which is settled.

        Raises: RequestError naming the field. Cancellation: the request is gone.
        """
        return sampling

    def admission(self, request: OpenRequest, admit: Admit) -> Admit:
        """What goes to the scheduler in place of `admit`, of any request."""
        return admit

    def admitted(self, request: OpenRequest, admit: Admit) -> Follower | None:
        """What follows a request that is admitted next; None if the feature has no part in it."""
        return None

    def message(self, message: ToFrontend) -> bool:
        """A message has come around the ring: any but tokens. Returns whether it is the feature's own."""
        return False

    def step(self, message: TokenDeltas) -> None:
        """A step's tokens have come. Its rows are made next."""

    def recovered(self, message: Recover) -> None:
        """The links lead to a new scheduler, which knows of nothing."""

    def query(self, client: int, message: Message) -> bool:
        """A client asks something beside requests. Returns whether it was answered. Raises: RequestError."""
        return False

    def close(self) -> None:
        """The frontend ends."""


class Absent(RequestHook):
    """Refuses the fields of features that are not there, unless they have their defaults.

    `of_feature`: by field, the feature's name.
    """

    def __init__(self, of_feature: Mapping[str, str]) -> None:
        self._of_feature = of_feature

    async def prepare(self, sampling: SamplingParams, preparing: Preparing) -> SamplingParams:
        """Raises: RequestError naming the field."""
        for field, feature in self._of_feature.items():
            if getattr(sampling, field) != getattr(DEFAULTS, field):
                text = f"{field} is of the feature {feature!r}, which is not part of this installation"
                raise RequestError(field, text)
        return sampling


class Hooks:
    """The hooks that are attached, by point."""

    def __init__(self, hooks: Iterable[RequestHook] = ()) -> None:
        self.all = tuple(hooks)
        self.admission = [hook.admission for hook in _overriding(self.all, RequestHook.admission)]
        self.message = [hook.message for hook in _overriding(self.all, RequestHook.message)]
        self.step = [hook.step for hook in _overriding(self.all, RequestHook.step)]
        self.recovered = [hook.recovered for hook in _overriding(self.all, RequestHook.recovered)]
        self.query = [hook.query for hook in _overriding(self.all, RequestHook.query)]
        # Of requests, with the fields of the feature:
        self._takes_long = [(hook.fields, hook.takes_long) for hook in _overriding(self.all, RequestHook.takes_long)]
        self._prepare = [(hook.fields, hook.prepare) for hook in _overriding(self.all, RequestHook.prepare)]
        self._admitted = [(hook, hook.admitted) for hook in _overriding(self.all, RequestHook.admitted)]

    def take_long(self, asked: SamplingParams) -> bool:
        """Whether some feature takes long to prepare such a request."""
        return any(takes_long(asked) for fields, takes_long in self._takes_long if _sets(asked, fields))

    async def prepared(self, sampling: SamplingParams, preparing: Preparing) -> SamplingParams:
        """What all features make of a request's sampling, one after another. Raises, cancellation: as `prepare`."""
        for fields, prepare in self._prepare:
            if _sets(sampling, fields):
                sampling = await prepare(sampling, preparing)
        return sampling

    def followers(self, request: OpenRequest, admit: Admit) -> tuple[Follower, ...]:
        """What follows a request that is admitted."""
        asked, terms = admit.sampling, request.terms
        calls = [call for hook, call in self._admitted if _sets(asked, hook.fields) and _sets(terms, hook.terms)]
        found = [call(request, admit) for call in calls]
        return tuple(follower for follower in found if follower is not None)

    def close(self) -> None:
        """End what the features hold, the last one first."""
        for hook in reversed(self.all):
            hook.close()


def _overriding(hooks: Iterable[RequestHook], point: Callable[..., Any]) -> list[RequestHook]:
    """Those that override a method of their base, in their order. The others cost nothing where it is called."""
    return [hook for hook in hooks if getattr(type(hook), point.__name__) is not point]


def _sets(asked: object, fields: tuple[str, ...]) -> bool:
    """Whether a request concerns a feature with these fields."""
    return not fields or any(getattr(asked, field) for field in fields)


def attached(modules: Iterable[ModuleType], parts: Parts, absent: Mapping[str, str]) -> Hooks:
    """The hooks of these modules of features, as far as the settings want them.

    `absent`: fields of features that are not there, with the features' names.
    """
    found: list[RequestHook | None] = [Absent(absent) if absent else None, *(each.attach(parts) for each in modules)]
    return Hooks(hook for hook in found if hook is not None)
