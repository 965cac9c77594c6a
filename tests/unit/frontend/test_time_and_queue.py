"""Time limits and the bound on waiting requests, at the service that owns every request."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from support.frontend_harness import Harness, serving

from overlap_spec.errors import RequestError
from overlap_spec.frontend.open_requests import OpenRequest
from overlap_spec.frontend.overload import QueueBound
from overlap_spec.frontend.request_checks import Refusal
from overlap_spec.messages import Abort, AbortReason, Admit, ErrorCode, Rejected, Terms, TextDeltas

Story = Callable[[Harness], Awaitable[None]]
SHORT_S, LONG_S = 0.05, 50.0


def told(story: Story, **options: object) -> None:
    async def inner() -> None:
        async with serving(**options) as harness:
            await story(harness)

    asyncio.run(inner())


# --- time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terms", "flags", "field", "said"),
    [
        (Terms(timeout_s=SHORT_S), Terms(), "timeout", "before its end: timeout is 0.05 s"),
        (Terms(first_token_timeout_s=SHORT_S), Terms(), "first_token_timeout", "before its first token: first_token"),
        (Terms(timeout_s=LONG_S), Terms(timeout_s=SHORT_S), "timeout", "--request-timeout is 0.05 s"),
        (Terms(timeout_s=SHORT_S), Terms(timeout_s=LONG_S), "timeout", "timeout is 0.05 s"),
        (Terms(), Terms(first_token_timeout_s=SHORT_S), "first_token_timeout", "--first-token-timeout is 0.05 s"),
        (Terms(timeout_s=LONG_S, age_s=LONG_S - SHORT_S), Terms(), "timeout", "timeout is 50 s"),
    ],
)
def test_a_request_whose_time_is_up_ends_with_an_error_and_is_aborted(
    terms: Terms, flags: Terms, field: str, said: str
) -> None:
    async def story(h: Harness) -> None:
        began = time.monotonic()
        h.generate(terms=terms)
        uid = (await h.admitted()).uid
        answer = await h.heard(Rejected)
        assert (answer.code, answer.field) == (ErrorCode.TIMEOUT, field) and said in answer.message
        assert SHORT_S * 0.9 < time.monotonic() - began < LONG_S / 2
        assert await h.aborted() == Abort(uid, AbortReason.TIMEOUT)
        h.commit((uid, [5], None))
        h.generate()  # its id is free again
        await h.admitted()
        assert h.nothing_more()

    told(story, flags=flags)


def test_the_first_token_ends_its_own_limit_and_no_other() -> None:
    async def story(h: Harness) -> None:
        first = 6 * SHORT_S  # in which even a busy machine sends the tokens
        h.generate(request_id="first", terms=Terms(first_token_timeout_s=first))
        h.generate(request_id="whole", terms=Terms(first_token_timeout_s=first, timeout_s=first + SHORT_S))
        h.generate(request_id="begun", terms=Terms(first_token_timeout_s=first, has_begun=True))
        uids = [(await h.admitted()).uid for _ in range(3)]
        h.commit(*((uid, [5], None) for uid in uids[:2]))
        await h.heard(TextDeltas)
        answer = await h.heard(Rejected)
        assert (answer.request_id, answer.field) == ("whole", "timeout")
        assert (await h.aborted()).uid == uids[1]
        await asyncio.sleep(2 * SHORT_S)
        assert h.nothing_more(), "the others go on"

    told(story)


def test_a_request_is_ended_while_its_prompt_is_read() -> None:
    async def story(h: Harness) -> None:
        h.generate("word " * 150_000, terms=Terms(timeout_s=0.001), truncate_prompt_tokens=5)
        assert (await h.heard(Rejected)).code is ErrorCode.TIMEOUT
        h.generate("short", request_id="b")
        assert isinstance((await h.admitted()), Admit)
        assert h.nothing_more()

    told(story)


def test_the_salt_of_a_request_goes_on_to_the_scheduler() -> None:
    async def story(h: Harness) -> None:
        for salt in ("", "pepper"):
            h.generate(request_id=f"of {salt}", terms=Terms(cache_salt=salt))
            assert (await h.admitted()).salt == salt

    told(story)


@pytest.mark.parametrize("salt", ["a\0b", "x" * 257, "\u00e9" * 129])
def test_a_salt_has_a_bound_and_no_nul(salt: str) -> None:
    with pytest.raises(RequestError) as caught:
        Terms(cache_salt=salt)
    assert caught.value.field == "cache_salt"


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e9])
@pytest.mark.parametrize("field", ["timeout", "first_token_timeout"])
def test_a_limit_is_a_time(field: str, seconds: float) -> None:
    with pytest.raises(RequestError) as caught:
        Terms(**{f"{field}_s": seconds})
    assert caught.value.field == field


# --- the queue --------------------------------------------------------------------------------------------


def test_a_client_with_fewer_takes_the_place_of_the_newest_of_one_with_more() -> None:
    """Four run and four wait: a flood has taken all. Another client's first two have places, whatever comes."""

    async def story(h: Harness) -> None:
        for number in range(9):
            h.generate(request_id=f"f{number}", client=1)
        refused = await h.heard(Rejected)
        assert (refused.request_id, refused.code) == ("f8", ErrorCode.OVERLOADED)
        assert refused.message.startswith("4 requests are waiting, and --max-queued-requests is 4")
        uids = [(await h.admitted()).uid for _ in range(8)]
        h.commit(*((uid, [5], None) for uid in uids[:4]))
        await h.heard(TextDeltas)
        for number, given_up in enumerate((7, 6)):
            h.generate(request_id=f"o{number}", client=2)
            answer = await h.heard(Rejected)
            assert (answer.request_id, answer.code) == (f"f{given_up}", ErrorCode.OVERLOADED)
            assert await h.aborted() == Abort(uids[given_up], AbortReason.OVERLOADED)
            await h.admitted()
        h.generate(request_id="o2", client=2)  # two wait of each client now
        assert (await h.heard(Rejected, client=2)).request_id == "o2"
        assert h.nothing_more()

    told(story, max_queued=4)


def test_a_gateway_names_its_clients() -> None:
    async def story(h: Harness) -> None:
        for number in range(6):
            h.generate(request_id=f"a{number}", terms=Terms(client="a"))
        assert {(await h.admitted()).client for _ in range(6)} == {"a"}
        h.generate(request_id="b", terms=Terms(client="b"))
        assert (await h.heard(Rejected)).request_id == "a5"
        await h.aborted()
        assert (await h.admitted()).client == "b"
        h.generate(request_id="c")
        await h.heard(Rejected)
        await h.aborted()
        assert (await h.admitted()).client == "link 1"

    told(story, max_queued=2)


def test_the_bound_holds_and_forgets_who_is_gone() -> None:
    bound = QueueBound(2)
    requests = [OpenRequest(uid, 1, str(uid), "a") for uid in range(3)]
    for request in requests:
        bound.add(request)
    assert bound.make_room("b", 2, 1) is None
    assert bound.make_room("b", 3, 1) is requests[2]
    bound.discard(requests[2])
    bound.discard(requests[2])
    assert bound.make_room("b", 3, 1) is requests[1]
    bound.discard(requests[1])
    with pytest.raises(Refusal, match="2 requests are waiting"):
        bound.make_room("b", 3, 1)
    bound.discard(requests[0])
    with pytest.raises(Refusal):
        bound.make_room("b", 3, 1)  # all have begun: none is displaced
