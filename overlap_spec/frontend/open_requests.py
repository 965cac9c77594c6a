"""The requests that are open at the frontend, by uid and by client, what steps add to them, and their followers.

A follower is a feature's view of one request, from its admission to its end. Most requests have none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from overlap_spec.errors import RequestError
from overlap_spec.frontend.output import Detokenizer, Output, Piece
from overlap_spec.frontend.stop_strings import Stops
from overlap_spec.messages import (
    ANY_TERMS,
    Finish,
    PackedRows,
    SamplingParams,
    Terms,
    TextDeltas,
    TokenDeltas,
    Usage,
    Verified,
    id_of_user,
)


class Part(msgspec.Struct, frozen=True, gc=False):
    """One step's part of a run. `verify_steps`: of the request after it."""

    step_id: int
    num_tokens: int
    verify_steps: int


class Run(msgspec.Struct, gc=False):
    """The tokens that steps added to one request; the finish is the last step's. It knows where each step ended."""

    tokens: list[int]
    finish: Finish | None
    parts: list[Part]

    def verify_steps(self, num_served: int) -> int:
        """Up to the step that committed the last of so many tokens; up to the last step, if all are served."""
        left = num_served
        if left < len(self.tokens):
            for part in self.parts:
                left -= part.num_tokens
                if left <= 0:
                    return part.verify_steps
        return self.parts[-1].verify_steps

    def by_step(self, served: list[int]) -> Iterator[tuple[int, list[int]]]:
        """The served tokens of each step, with its id."""
        start = 0
        for part in self.parts:
            if tokens := served[start : start + part.num_tokens]:
                yield part.step_id, tokens
            start += part.num_tokens


class Gains(msgspec.Struct):
    """What one or several steps added, by uid. `packed`: what else is known of tokens, for a feature to read."""

    step_id: int  # the last one's
    runs: dict[int, Run]
    verified: dict[int, Verified]
    packed: dict[int, bytes]
    cached_tokens: dict[int, int]

    def of(self, uid: int) -> "Gains":
        own = Gains(self.step_id, {uid: self.runs[uid]}, {}, {}, {})
        if uid in self.cached_tokens:
            own.cached_tokens[uid] = self.cached_tokens[uid]
        if uid in self.verified:
            own.verified[uid] = self.verified[uid]
        if uid in self.packed:
            own.packed[uid] = self.packed[uid]
        return own

    @property
    def is_plain(self) -> bool:
        """Whether tokens are all that steps have added, so that it can be joined to others and cut."""
        return not self.verified and not self.packed

    def join(self, later: "Gains") -> None:
        """Both are plain, and of one request."""
        for uid, added in later.runs.items():
            run = self.runs[uid]
            run.tokens += added.tokens
            run.parts += added.parts
            run.finish = added.finish
        self.cached_tokens |= later.cached_tokens
        self.step_id = later.step_id

    def cut(self, num_tokens: int) -> "Gains":
        """Take the first steps away, until they have so many tokens; some are left. It is plain, and of one request."""
        ((uid, run),) = self.runs.items()
        taken = num_parts = 0
        while taken < num_tokens and num_parts + 1 < len(run.parts):
            taken += run.parts[num_parts].num_tokens
            num_parts += 1
        first = Run(run.tokens[:taken], None, run.parts[:num_parts])
        self.runs[uid] = Run(run.tokens[taken:], run.finish, run.parts[num_parts:])
        cached, self.cached_tokens = self.cached_tokens, {}
        return Gains(first.parts[-1].step_id, {uid: first}, {}, {}, cached)


def joined(steps: Sequence[TokenDeltas]) -> Iterator[Gains]:
    """All steps that wait, in order, joined where they can be: what a request reports on its own stays apart."""
    gains = _of_one(steps[0])
    for step in steps[1:]:
        if (gains.verified or step.verified) and _reports_again(gains, step):
            yield gains
            gains = _of_one(step)
        else:
            _join(gains, step)
    yield gains


def _of_one(step: TokenDeltas) -> Gains:
    rows = zip(step.uids, step.tokens, step.finishes, step.verify_steps, strict=True)
    runs = {uid: Run(tokens, finish, [Part(step.step_id, len(tokens), count)]) for uid, tokens, finish, count in rows}
    of_uids = dict(step.verified), _packed(step), dict(step.cached_tokens)
    return Gains(step.step_id, runs, *of_uids)


def _reports_again(gains: Gains, step: TokenDeltas) -> bool:
    """Whether a request with a report of its own for each step has a row in both."""
    return any(uid in gains.runs and (uid in gains.verified or uid in step.verified) for uid in step.uids)


def _join(gains: Gains, step: TokenDeltas) -> None:
    gains.step_id = step.step_id
    runs = gains.runs
    for uid, tokens, finish, verify_steps in zip(step.uids, step.tokens, step.finishes, step.verify_steps, strict=True):
        part = Part(step.step_id, len(tokens), verify_steps)
        run = runs.get(uid)
        if run is None:
            runs[uid] = Run(tokens, finish, [part])
        else:
            run.tokens += tokens
            run.finish = finish
            run.parts.append(part)
    gains.verified |= step.verified
    gains.cached_tokens |= step.cached_tokens
    for uid, records in _packed(step).items():
        gains.packed[uid] = gains.packed.get(uid, b"") + records


def _packed(step: TokenDeltas) -> dict[int, bytes]:
    rows = [each for each in step.extensions if isinstance(each, PackedRows)]
    return {uid: records for each in rows for uid, records in zip(step.extended, each.tokens, strict=False) if records}


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


F = TypeVar("F", bound=Follower)
UIDS_OF_A_FRONTEND = 10**12  # more than one has requests: a worker that stays knows some of the one before


@dataclass(slots=True)
class OpenRequest:
    """One request, from Generate to its last row. `output` is None until the prompt is encoded and admitted."""

    uid: int
    client: int
    request_id: str
    owner: str  # whose turn it takes
    terms: Terms = ANY_TERMS
    asked: SamplingParams | None = None  # as it came: while it is kept, requests that share it are given this object
    is_waiting: bool = True  # until its first token
    usage: Usage = Usage(0, 0, 0, 0)
    output: Output | None = None
    followers: tuple[Follower, ...] = ()  # those of features, of an admitted request
    arriving: tuple[Follower, ...] = ()  # those of them that note when tokens come
    opening: str = ""  # what the answer's text opens with, until it has been put before it

    @property
    def name(self) -> str:
        """The id that its user gave it."""
        return id_of_user(self.terms.key, self.request_id)

    def follow(self, followers: tuple[Follower, ...]) -> None:
        self.followers = followers
        self.arriving = tuple(each for each in followers if type(each).arrived is not Follower.arrived)

    def follower(self, kind: type[F]) -> F | None:
        """A feature's own one; None if it does not follow the request."""
        return next((follower for follower in self.followers if isinstance(follower, kind)), None)

    def ended(self, finish: Finish | None) -> None:
        """It is closed; a second call does nothing."""
        followers, self.followers, self.arriving = self.followers, (), ()
        for follower in followers:
            follower.closed(finish)

    def has_slot(self) -> None:
        """The scheduler has given it one."""
        for follower in self.followers:
            follower.started()

    def count(self, cached_tokens: int | None, verify_steps: int) -> None:
        """Note what a row counts beside its tokens. The cached ones come with the first."""
        assert self.output is not None
        before = self.usage
        cached = before.cached_tokens if cached_tokens is None else cached_tokens
        self.usage = Usage(before.prompt_tokens, cached, self.output.num_tokens, verify_steps)

    def add_row(self, reply: TextDeltas, text: str, token_ids: list[int], finish: Finish | None) -> None:
        """Tell a client what the request has gained. What the answer opens with is before its first text.

        A row of the prompt, which has no tokens and is not the last, has no text either.
        """
        if self.opening and (token_ids or finish is not None):
            text, self.opening = self.opening + text, ""
        reply.request_ids.append(self.request_id)
        reply.texts.append(text)
        reply.token_ids.append(token_ids)
        reply.finishes.append(finish)
        reply.usages.append(self.usage)

    def open_output(self, sampling: SamplingParams, prompt_len: int, detokenizer: Detokenizer, stops: Stops) -> None:
        """The request is admitted; `sampling` is settled, so its length is known."""
        assert sampling.max_new_tokens is not None
        self.usage = Usage(prompt_len, 0, 0, 0)
        self.output = Output(sampling, sampling.max_new_tokens, detokenizer, stops)


class OpenRequests:
    """Every open request once; `len` is what bounds the ring. A uid is never used twice, nor by another frontend."""

    def __init__(self) -> None:
        self._by_uid: dict[int, OpenRequest] = {}
        self._by_client: dict[int, dict[str, OpenRequest]] = {}
        self._next_uid = 1

    def __len__(self) -> int:
        return len(self._by_uid)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(list(self._by_uid.values()))

    def __contains__(self, request: OpenRequest) -> bool:
        return request.uid in self._by_uid

    def number_from(self, uid: int) -> None:
        """Give the next request this uid, and the following ones those behind it."""
        self._next_uid = max(1, uid)

    def open(self, client: int, request_id: str, owner: str, terms: Terms = ANY_TERMS) -> OpenRequest:
        """Raises: RequestError if the client has an open request of that id."""
        mine = self._by_client.setdefault(client, {})
        if request_id in mine:
            raise RequestError("request_id", f"request_id {request_id!r} is already in use by an open request")
        request = OpenRequest(self._next_uid, client, request_id, owner, terms)
        self._next_uid += 1
        self._by_uid[request.uid] = mine[request_id] = request
        return request

    def close(self, request: OpenRequest) -> None:
        """Forget a request; a second call does nothing."""
        if self._by_uid.pop(request.uid, None) is None:
            return
        mine = self._by_client[request.client]
        del mine[request.request_id]
        if not mine:
            del self._by_client[request.client]

    def by_uid(self, uid: int) -> OpenRequest | None:
        return self._by_uid.get(uid)

    def of_client(self, client: int) -> list[OpenRequest]:
        return list(self._by_client.get(client, {}).values())

    def find(self, client: int, request_id: str) -> list[OpenRequest]:
        """The client's request of that id: one or none."""
        request = self._by_client.get(client, {}).get(request_id)
        return [] if request is None else [request]

    def find_everywhere(self, name: str, of_key: str | None) -> list[OpenRequest]:
        """Every client's requests that users call so; all if it is empty. `of_key`: of this key alone."""
        mine = [request for request in self if of_key is None or request.terms.key == of_key]
        return [request for request in mine if not name or request.name == name]
