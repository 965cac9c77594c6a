"""Features' hooks at the frontend: who is called at which point, in which order, and with what."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace
from support.frontend_harness import Harness, serving
from support.small_tokenizers import smollm2

from overlap_spec.errors import RequestError
from overlap_spec.frontend.hooks import Hooks, Preparing, RequestHook
from overlap_spec.frontend.open_requests import Follower, Gains, OpenRequest, Run
from overlap_spec.frontend.output import Piece
from overlap_spec.messages import (
    Admit,
    Cancel,
    EngineLimits,
    ErrorCode,
    Finish,
    FinishKind,
    GetAudit,
    GetStats,
    LogProbParams,
    Message,
    Rejected,
    SamplingParams,
    Started,
    Stats,
    StatsReply,
    TextDeltas,
    TextPrompt,
    ToFrontend,
)

LENGTH = Finish(FinishKind.LENGTH)
IDS = smollm2().encode(" the sky is blue and so", False)


@dataclass
class Following(Follower):
    """Notes what happens to its request."""

    name: str
    seen: list[tuple[object, ...]]

    def started(self) -> None:
        self.seen.append((self.name, "started"))

    def arrived(self) -> None:
        self.seen.append((self.name, "arrived"))

    def gained(self, gains: Gains, run: Run, piece: Piece, reply: TextDeltas) -> None:
        self.seen.append((self.name, run.tokens, piece.token_ids, piece.text, reply.request_ids[-1]))

    def closed(self, finish: Finish | None) -> None:
        self.seen.append((self.name, "closed", finish))


@dataclass
class Noting(RequestHook):
    """Follows requests of these names, and notes all that it is told."""

    name: str
    follows: tuple[str, ...] = ()
    seen: list[tuple[object, ...]] = field(default_factory=list)
    answers: bool = False

    async def prepare(self, sampling: SamplingParams, preparing: Preparing) -> SamplingParams:
        if sampling.top_k == 13:
            raise RequestError("top_k", "top_k: not 13")
        return replace(sampling, stop_token_ids=(*sampling.stop_token_ids, len(preparing.ids)))

    def admitted(self, request: OpenRequest, admit: Admit) -> Follower | None:
        return Following(self.name, self.seen) if request.name in self.follows else None

    def message(self, message: ToFrontend) -> bool:
        self.seen.append((self.name, type(message).__name__))
        return False

    def query(self, client: int, message: Message) -> bool:
        self.seen.append((self.name, type(message).__name__))
        return self.answers


def run(scenario: Callable[[Harness, Noting, Noting], Awaitable[None]]) -> None:
    async def main() -> None:
        async with serving() as harness:
            first = Noting("first", ("a", "b"))
            second = Noting("second", ("b",), first.seen)
            harness.service.attach(Hooks([first, RequestHook(), second]))
            await scenario(harness, first, second)

    asyncio.run(main())


def test_a_hook_is_called_where_it_does_something_and_nowhere_else() -> None:
    class Asked(RequestHook):
        def query(self, client: int, message: Message) -> bool:
            return True

    hooks, asked = Hooks([RequestHook(), Asked()]), Hooks([])
    points = {name: len(found) for name, found in vars(hooks).items() if name != "all"}
    assert points == {name: int(name == "query") for name in points} and len(points) == 8
    assert len(hooks.all) == 2 and not asked.all


def test_followers_see_every_row_in_the_order_of_their_features() -> None:
    async def scenario(harness: Harness, first: Noting, second: Noting) -> None:
        for name in "bc":
            harness.generate("Hi", name, stop=("blue",))
        uids = [(await harness.admitted()).uid for _ in range(2)]
        first.seen.clear()
        harness.inbox.send(Started(uids))
        harness.commit((uids[0], IDS[:2], None), (uids[1], IDS[:2], None))
        await harness.settle()
        harness.commit((uids[0], IDS[2:], None))
        await harness.settle()
        both = "first", "second"
        rows = [(name, *row) for row in ((IDS[:2], IDS[:2], " the sky"), (IDS[2:], IDS[2:4], " is ")) for name in both]
        told = [row for row in first.seen if row[1] not in ("Started", "arrived")]
        assert told == [
            *((name, "started") for name in both),
            *((*row, "b") for row in rows),
            *((name, "closed", Finish(FinishKind.STOP, "blue")) for name in both),
        ]
        arrivals = [index for index, row in enumerate(first.seen) if row[1] == "arrived"]
        made = [index for index, row in enumerate(first.seen) if row[-1] == "b"]
        assert [each < row for each, row in zip(arrivals, made, strict=True)] == [True] * 4

    run(scenario)


def test_a_request_that_ends_from_outside_is_closed_once_and_has_no_finish() -> None:
    async def scenario(harness: Harness, first: Noting, second: Noting) -> None:
        harness.generate("Hi", "a")
        uid = (await harness.admitted()).uid
        request = harness.service._requests.by_uid(uid)
        assert request is not None
        first.seen.clear()
        harness.say(Cancel("a"))
        harness.commit((uid, IDS[:2], LENGTH))
        await harness.settle()
        harness.service._lifecycle.close(request)
        assert first.seen == [("first", "closed", None)]

    run(scenario)


def test_what_is_prepared_goes_to_the_scheduler_and_an_error_to_the_client() -> None:
    async def scenario(harness: Harness, first: Noting, second: Noting) -> None:
        harness.generate([5, 6, 7], "a", stop_token_ids=(9,))
        assert (await harness.admitted()).sampling.stop_token_ids == (9, 3, 3)
        harness.generate([5, 6, 7], "b", top_k=13)
        refused = await harness.heard(Rejected)
        assert (refused.request_id, refused.code, refused.field) == ("b", ErrorCode.BAD_REQUEST, "top_k")
        assert [request.name for request in harness.service._requests] == ["a"] and harness.nothing_more()

    run(scenario)


def test_a_feature_with_fields_is_asked_about_requests_that_set_one() -> None:
    """`prepare` sees what the feature before it has made of a request."""

    class OfGrammars(Noting):
        fields = ("grammar", "log_probs")

        def takes_long(self, asked: SamplingParams) -> bool:
            return True

        async def prepare(self, sampling: SamplingParams, preparing: Preparing) -> SamplingParams:
            self.seen.append((self.name, sampling.log_probs))
            return sampling

    class Scoring(RequestHook):
        async def prepare(self, sampling: SamplingParams, preparing: Preparing) -> SamplingParams:
            return replace(sampling, log_probs=LogProbParams(top=2))

    async def found(*hooks: RequestHook) -> bool:
        request, limits = OpenRequest(1, 1, "a", "owner"), EngineLimits(100, 100, 4, 100)
        request.asked = asked = SamplingParams()
        await Hooks(hooks).prepared(asked, Preparing(request, TextPrompt(""), [5], limits))
        return Hooks(hooks).take_long(asked)

    plain, scored = OfGrammars("plain"), OfGrammars("scored")
    assert not asyncio.run(found(plain)) and not plain.seen
    asyncio.run(found(Scoring(), scored))
    assert scored.seen == [("scored", LogProbParams(top=2))]
    assert Hooks([scored]).take_long(SamplingParams(log_probs=LogProbParams()))


@pytest.mark.parametrize("answers", [False, True])
def test_a_query_goes_from_hook_to_hook_until_it_is_answered(answers: bool) -> None:
    async def scenario(harness: Harness, first: Noting, second: Noting) -> None:
        first.answers = answers
        harness.inbox.send(Stats(num_running=3))
        await harness.settle()
        first.seen.clear()
        harness.say(GetStats("s"))
        await harness.settle()
        assert first.seen == [("first", "GetStats"), ("second", "GetStats")][: 1 if answers else 2]
        if not answers:
            assert (await harness.heard(StatsReply)).stats.num_running == 3

    run(scenario)


def test_a_query_that_no_part_answers_is_refused() -> None:
    async def scenario(harness: Harness, first: Noting, second: Noting) -> None:
        harness.say(GetAudit("q"))
        refused = await harness.heard(Rejected)
        assert (refused.request_id, refused.code) == ("q", ErrorCode.BAD_REQUEST) and "GetAudit" in refused.message

    run(scenario)


def test_every_hook_is_told_of_a_message() -> None:
    async def scenario(harness: Harness, first: Noting, second: Noting) -> None:
        harness.inbox.send(Stats())
        await harness.settle()
        assert first.seen == [("first", "Stats"), ("second", "Stats")]

    run(scenario)
