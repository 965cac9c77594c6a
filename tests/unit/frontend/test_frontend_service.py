"""The service over memory links: what each message leads to, with the test as scheduler and clients."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from support.frontend_harness import LIMITS, Harness, serving
from support.installed import needs_feature
from support.small_tokenizers import EOS, smollm2

from overlap_spec.client.link import Malformed, pack_ids, unpack_ids
from overlap_spec.frontend import service as service_module
from overlap_spec.frontend.codec import IdsOnly
from overlap_spec.messages import (
    AbortReason,
    Cancel,
    ChatPrompt,
    Continued,
    Detokenize,
    Detokenized,
    Drained,
    ErrorCode,
    Finish,
    FinishKind,
    Flush,
    FlushCache,
    FlushDone,
    Flushed,
    Generate,
    GetStats,
    Ping,
    Pong,
    Refused,
    Rejected,
    SamplingParams,
    Shutdown,
    Stats,
    StatsReply,
    Terms,
    TextDeltas,
    TextPrompt,
    Tokenize,
    Tokenized,
    TokenPrompt,
    Usage,
)

Story = Callable[[Harness], Awaitable[None]]


def told(story: Story, **options: object) -> None:
    """Run a story with a service of its own."""

    async def run() -> None:
        async with serving(**options) as harness:
            await story(harness)

    asyncio.run(run())


def ids(text: str) -> list[int]:
    return smollm2().encode(text, add_special_tokens=False)


def test_a_request_from_prompt_to_last_row() -> None:
    async def story(h: Harness) -> None:
        h.generate("Hello world", max_new_tokens=9, stop_token_ids=(7,))
        admit = await h.admitted()
        assert unpack_ids(admit.prompt) == ids("Hello world")
        assert admit.stop_ids == (EOS, 7)
        assert admit.sampling.seed is not None
        h.commit((admit.uid, ids(" The"), None))
        row = await h.heard(TextDeltas)
        assert row == TextDeltas(["a"], [" The"], [ids(" The")], [None], [Usage(2, 2, 1, 1)])
        h.commit((admit.uid, [*ids(" end"), EOS], Finish(FinishKind.STOP, EOS)))
        row = await h.heard(TextDeltas)
        assert (row.texts, row.finishes) == ([" end"], [Finish(FinishKind.STOP, EOS)])
        assert row.usages == [Usage(2, 2, 3, 1)]
        assert h.nothing_more()

    told(story)


def test_one_step_is_one_message_for_each_client() -> None:
    async def story(h: Harness) -> None:
        for client, name in ((1, "a"), (2, "a"), (1, "b")):
            h.generate(request_id=name, client=client)
        uids = [(await h.admitted()).uid for _ in range(3)]
        h.commit(*((uid, ids(" x"), None) for uid in uids))
        assert (await h.heard(TextDeltas, client=1)).request_ids == ["a", "b"]
        assert (await h.heard(TextDeltas, client=2)).request_ids == ["a"]
        assert h.nothing_more()

    told(story)


def test_a_stop_string_ends_the_request_here_and_aborts_it_there() -> None:
    async def story(h: Harness) -> None:
        h.generate(stop=(" stop",))
        uid = (await h.admitted()).uid
        h.commit((uid, ids(" go stop more"), None))
        row = await h.heard(TextDeltas)
        assert row.texts == [" go"]
        assert row.token_ids == [ids(" go stop")]
        assert row.finishes == [Finish(FinishKind.STOP, " stop")]
        assert row.usages[0].completion_tokens == 2
        abort = await h.aborted()
        assert (abort.uid, abort.reason) == (uid, AbortReason.STOP_STRING)
        h.commit((uid, ids(" late"), None))  # it was in flight
        await h.settle()
        assert h.nothing_more()

    told(story)


def test_a_request_that_the_scheduler_has_finished_is_not_aborted() -> None:
    async def story(h: Harness) -> None:
        h.generate(stop=(" stop",))
        uid = (await h.admitted()).uid
        h.commit((uid, [*ids(" go stop"), EOS], Finish(FinishKind.STOP, EOS)))
        assert (await h.heard(TextDeltas)).finishes == [Finish(FinishKind.STOP, " stop")]
        assert h.nothing_more()

    told(story)


CHAT = ChatPrompt([{"role": "user", "content": "Hi"}])
BAD = [
    (TextPrompt(""), {}, "prompt"),
    (TokenPrompt(b""), {}, "prompt"),
    (TokenPrompt(b"\1\2\3"), {}, "prompt"),
    (TokenPrompt(pack_ids([1, 49152])), {}, "prompt"),
    (TokenPrompt(pack_ids([-1])), {}, "prompt"),
    (TokenPrompt(pack_ids([1] * 1000)), {}, "prompt"),
    (TextPrompt("x " * 1500), {}, "prompt"),
    (TextPrompt("x" * 90_000), {}, "prompt"),
    (TextPrompt("Hi"), {"max_new_tokens": 1000}, "max_new_tokens"),
    pytest.param(
        TextPrompt("Hi"), {"allowed_token_ids": (49152,)}, "allowed_token_ids", marks=needs_feature("penalties")
    ),
    (ChatPrompt([]), {}, "messages"),
    (ChatPrompt([{"role": "user", "content": [{"type": "image_url"}]}]), {}, "messages"),
]


@pytest.mark.parametrize(("prompt", "sampling", "field"), BAD)
def test_a_bad_request_is_rejected_with_its_field_and_leaves_nothing(
    prompt: TextPrompt | ChatPrompt | TokenPrompt, sampling: dict[str, object], field: str
) -> None:
    async def story(h: Harness) -> None:
        h.say(Generate("a", prompt, SamplingParams(**sampling)))
        answer = await h.heard(Rejected)
        assert (answer.request_id, answer.code, answer.field) == ("a", ErrorCode.BAD_REQUEST, field)
        h.generate(request_id="a")  # the id is free, the service alive
        await h.admitted()
        assert h.nothing_more()

    told(story)


def test_a_second_request_of_the_same_id_is_rejected_while_the_first_is_open() -> None:
    async def story(h: Harness) -> None:
        h.generate(request_id="a")
        h.generate(request_id="a")
        h.generate(request_id="a", client=2)
        assert (await h.heard(Rejected)).field == "request_id"
        assert [(await h.admitted()).uid, (await h.admitted()).uid] == [1, 2]

    told(story)


def test_too_many_open_requests_are_an_overload() -> None:
    async def story(h: Harness) -> None:
        for name in "uvabc":  # four can run
            h.generate(request_id=name)
        answer = await h.heard(Rejected)
        assert (answer.request_id, answer.code) == ("c", ErrorCode.OVERLOADED)
        assert answer.message.startswith("0 requests are waiting, and --max-queued-requests is 0")
        h.say(Cancel("a"))
        assert (await h.heard(TextDeltas)).finishes[0] is not None
        h.generate(request_id="c")
        await h.settle()
        assert [type(message).__name__ for message in h.scheduler.drain()] == [*["Admit"] * 4, "Abort", "Admit"]

    told(story, max_queued=0)


def test_before_the_engine_is_warm_requests_are_refused_and_pings_say_so() -> None:
    async def story(h: Harness) -> None:
        h.generate()
        assert (await h.heard(Rejected)).code is ErrorCode.STARTING
        h.say(Ping(1.5), client=4)
        assert await h.heard(Pong, client=4) == Pong(1.5, ready=False, session=4)
        h.inbox.send(LIMITS)
        await h.settle()
        h.say(Ping(2.5), client=4)
        assert await h.heard(Pong, client=4) == Pong(2.5, ready=True, session=4)

    told(story, warm=False)


def test_cancel_closes_the_stream_at_once_with_what_was_held_back() -> None:
    async def story(h: Harness) -> None:
        h.generate(stop=("xyz",))
        uid = (await h.admitted()).uid
        h.commit((uid, ids("ax"), None))
        await h.heard(TextDeltas)
        h.say(Cancel("a"), client=2)  # not its own
        h.say(Cancel("a"))
        row = await h.heard(TextDeltas)
        assert row.finishes[0] is not None and row.finishes[0].kind is FinishKind.ABORT
        assert row.texts == ["x"] and row.usages[0].completion_tokens == len(ids("ax"))
        assert (await h.aborted()).reason is AbortReason.REQUESTED
        assert h.nothing_more()

    told(story)


def test_cancel_for_everyone_finds_the_request_of_another_client() -> None:
    async def story(h: Harness) -> None:
        for client, name in ((1, "a"), (2, "a"), (2, "b")):
            h.generate(request_id=name, client=client)
            await h.admitted()
        h.say(Cancel("a", everyone=True), client=3)
        assert (await h.heard(TextDeltas, client=1)).request_ids == ["a"]
        assert (await h.heard(TextDeltas, client=2)).request_ids == ["a"]
        h.say(Cancel("", everyone=True), client=3)
        assert (await h.heard(TextDeltas, client=2)).request_ids == ["b"]
        assert len(h.scheduler.drain()) == 3

    told(story)


def test_a_client_that_is_gone_takes_its_requests_with_it() -> None:
    async def story(h: Harness) -> None:
        for client, name in ((1, "a"), (1, "b"), (2, "a")):
            h.generate(request_id=name, client=client)
        uids = [(await h.admitted()).uid for _ in range(3)]
        h.leave(client=1)
        aborts = [await h.aborted(), await h.aborted()]
        assert [(abort.uid, abort.reason) for abort in aborts] == [(uid, AbortReason.CLIENT_GONE) for uid in uids[:2]]
        h.commit(*((uid, ids(" x"), None) for uid in uids))
        assert (await h.heard(TextDeltas, client=2)).request_ids == ["a"]
        assert h.nothing_more()

    told(story)


def test_a_long_prompt_is_read_in_a_thread_and_does_not_hold_up_others() -> None:
    async def story(h: Harness) -> None:
        h.generate("word " * 800, request_id="long")
        h.generate("short", request_id="short")
        first, second = await h.admitted(), await h.admitted()
        assert (len(first.prompt), len(second.prompt)) == (4 * 1, 4 * len(ids("word " * 800)))
        assert first.uid > second.uid  # the long one came first

    told(story)


@pytest.mark.parametrize("length", [800, 8000])
def test_a_long_prompt_that_is_cancelled_while_it_is_read_gets_one_last_row(length: int) -> None:
    """Whether it would have been admitted or rejected."""

    async def story(h: Harness) -> None:
        h.generate("word " * length)
        h.say(Cancel("a"))
        row = await h.heard(TextDeltas)
        assert row.finishes[0] is not None and row.finishes[0].kind is FinishKind.ABORT
        await asyncio.sleep(0.1)
        assert h.nothing_more()

    told(story)


def test_what_the_scheduler_refuses_is_rejected() -> None:
    async def story(h: Harness) -> None:
        h.generate()
        uid = (await h.admitted()).uid
        h.inbox.send(Refused(uid, ErrorCode.BAD_REQUEST, "it is full", "grammar"))
        assert await h.heard(Rejected) == Rejected("a", ErrorCode.BAD_REQUEST, "it is full", "grammar")
        h.inbox.send(Refused(uid, ErrorCode.OVERLOADED, "again"))
        await h.settle()
        assert h.nothing_more()

    told(story)


def test_questions_are_answered() -> None:
    async def story(h: Harness) -> None:
        h.say(Tokenize("t", TextPrompt("Hello world")))
        assert unpack_ids((await h.heard(Tokenized)).ids) == ids("Hello world")
        h.say(Tokenize("t", CHAT))
        assert unpack_ids((await h.heard(Tokenized)).ids) == ids(smollm2().render(CHAT))
        h.say(Tokenize("t", TextPrompt("word " * 5000)))
        assert len((await h.heard(Tokenized)).ids) == 4 * len(ids("word " * 5000))
        h.say(Detokenize("many", pack_ids(ids("word " * 5000))))
        h.say(Detokenize("few", pack_ids(ids("word"))))
        first, second = await h.heard(Detokenized), await h.heard(Detokenized)
        assert (first.request_id, first.text) == ("few", "word"), "it does not wait for what is done in a thread"
        assert (second.request_id, second.text) == ("many", "word " * 5000)
        h.say(Detokenize("d", pack_ids(ids("Hello 🦙"))))
        assert await h.heard(Detokenized) == Detokenized("d", "Hello 🦙")
        for unknown in (-4, LIMITS.vocab_size):
            h.say(Detokenize("d", pack_ids([unknown])))
            assert (await h.heard(Rejected)).field == "tokens"
        h.inbox.send(Stats(num_running=3))
        await h.settle()
        h.say(GetStats("s"))
        assert await h.heard(StatsReply) == StatsReply("s", Stats(num_running=3))

    told(story)


def test_flushes_are_answered_in_the_order_in_which_they_were_asked() -> None:
    async def story(h: Harness) -> None:
        h.say(Flush("f"), client=1)
        h.say(Flush("g"), client=2)
        await h.to_scheduler(FlushCache)
        await h.to_scheduler(FlushCache)
        h.inbox.send(Flushed(True))
        h.inbox.send(Flushed(False))
        assert await h.heard(FlushDone, client=1) == FlushDone("f", True)
        assert await h.heard(FlushDone, client=2) == FlushDone("g", False)

    told(story)


def test_something_malformed_is_rejected_if_its_id_can_be_read() -> None:
    async def story(h: Harness) -> None:
        h.say(Malformed("", "", "no message at all"))
        h.say(Malformed("a", "top_p", "top_p must be in (0, 1]"))
        assert await h.heard(Rejected) == Rejected("a", ErrorCode.BAD_REQUEST, "top_p must be in (0, 1]", "top_p")
        assert h.nothing_more()

    told(story)


def test_drain_finishes_open_requests_then_reports_once_and_serves_on() -> None:
    async def story(h: Harness) -> None:
        h.generate()
        uid = (await h.admitted()).uid
        h.inbox.send(Shutdown(drain=True))
        await h.settle()
        h.generate(request_id="late")
        assert (await h.heard(Rejected)).code is ErrorCode.SHUTTING_DOWN
        h.generate(request_id="next", terms=Terms(has_begun=True))
        of_its_group = (await h.admitted()).uid
        assert h.supervisor == []
        h.commit((uid, ids(" x"), Finish(FinishKind.LENGTH)), (of_its_group, ids(" x"), Finish(FinishKind.LENGTH)))
        await h.heard(TextDeltas)
        assert h.supervisor == [Drained()]
        h.say(GetStats("s"))
        await h.heard(StatsReply)

    told(story)


def test_drain_of_an_idle_service_is_reported_at_once() -> None:
    async def story(h: Harness) -> None:
        h.inbox.send(Shutdown(drain=True))
        await h.settle()
        assert h.supervisor == [Drained()]

    told(story)


def test_a_drain_at_another_frontend_waits_for_requests_that_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "RETURN_S", 0.3)

    async def story() -> None:
        async with serving(warm=False) as h:
            h.service.expect_returns()
            h.inbox.send(Shutdown(drain=True))
            h.inbox.send(LIMITS)
            await h.settle()
            h.inbox.send(LIMITS)  # of another scheduler: the service does not wait for clients a second time
            h.generate(request_id="new")
            assert (await h.heard(Rejected)).code is ErrorCode.SHUTTING_DOWN
            h.say(again("waited"))
            h.say(again("ran", ids(" x")))
            for wanted in (None, pack_ids(ids(" x"))):
                admit = await h.admitted()
                assert (None if admit.resumed is None else admit.resumed.output) == wanted
                h.commit((admit.uid, ids(" y"), Finish(FinishKind.LENGTH)))
                assert (await h.heard(TextDeltas)).texts == [" y"]
            assert h.supervisor == [], "others may still come"
            await asyncio.sleep(2 * 0.3)
            assert h.supervisor == [Drained()]

    asyncio.run(story())


def again(request_id: str, output: Sequence[int] = ()) -> Generate:
    """A request that was open at a frontend that is gone."""
    continued = Continued(pack_ids(output), len(output) * len(" x"), 0, 0)
    return Generate(request_id, TextPrompt("Hi"), SamplingParams(seed=1), continued=continued)


def test_shutdown_tells_whoever_still_waits_and_ends_the_service() -> None:
    async def run() -> None:
        async with serving() as h:
            h.generate()
            await h.admitted()
        assert (await h.heard(Rejected)).code is ErrorCode.SHUTTING_DOWN
        assert (await h.aborted()).reason is AbortReason.SHUTDOWN

    asyncio.run(run())


def test_without_a_tokenizer_ids_are_served_and_text_is_refused() -> None:
    async def story(h: Harness) -> None:
        h.generate([5, 6, 7])
        admit = await h.admitted()
        h.commit((admit.uid, [8, EOS], Finish(FinishKind.STOP, EOS)))
        row = await h.heard(TextDeltas)
        assert (row.texts, row.token_ids) == ([""], [[8, EOS]])
        for message, field in (
            (Generate("a", TextPrompt("Hi"), SamplingParams()), "prompt"),
            (Generate("a", CHAT, SamplingParams()), "messages"),
            (Generate("a", TokenPrompt(pack_ids([1])), SamplingParams(stop=("x",))), "stop"),
            (Tokenize("a", TextPrompt("Hi")), "prompt"),
            (Detokenize("a", pack_ids([1])), "tokens"),
        ):
            h.say(message)
            answer = await h.heard(Rejected)
            assert answer.field == field and "--skip-tokenizer-init" in answer.message

    told(story, codec=IdsOnly())


def test_a_failure_of_the_codec_is_that_requests_answer_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(IdsOnly):
        def render(self, prompt: ChatPrompt) -> str:  # it breaks before it returns
            raise ZeroDivisionError

    async def story(h: Harness) -> None:
        h.say(Generate("a", CHAT, SamplingParams()))
        assert (await h.heard(Rejected)).code is ErrorCode.FAILED
        h.generate([1])
        await h.admitted()

    told(story, codec=Broken())
    assert "ZeroDivisionError" in caplog.text
