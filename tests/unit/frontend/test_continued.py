"""A request that another frontend has begun: its text and its tokens go on where its client has them."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from support.frontend_harness import EOS, Harness, serving
from support.installed import needs_feature
from support.small_tokenizers import smollm2

from overlap_spec.client.link import pack_ids
from overlap_spec.config import RecoverySettings
from overlap_spec.features.recovery.frontend import Replay
from overlap_spec.messages import (
    ANY_TERMS,
    Continued,
    FinishKind,
    Generate,
    LogProbParams,
    Rejected,
    SamplingParams,
    TextDeltas,
    TextPrompt,
)

TEXT = "The sky 🌦️ is blue, über alles: the end of it, and more"
IDS = smollm2().encode(TEXT, False)


def run(story: Callable[[Harness], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with serving() as harness:
            await story(harness)

    asyncio.run(scenario())


def go_on(harness: Harness, num_tokens: int, num_chars: int, **sampling: object) -> None:
    given = Continued(pack_ids(IDS[:num_tokens]), num_chars, 1, 3)
    asked = SamplingParams(**{"max_new_tokens": len(IDS), "seed": 1} | sampling)
    harness.say(Generate("a", TextPrompt("Hi"), asked, ANY_TERMS, None, given))


async def given_out(harness: Harness, num_tokens: int, **sampling: object) -> str:
    """The text that a frontend sends with so many tokens, in runs of two."""
    harness.generate("Hi", "first", max_new_tokens=len(IDS), seed=1, **sampling)
    admit = await harness.admitted()
    text = ""
    for start in range(0, num_tokens, 2):
        harness.commit((admit.uid, IDS[start : min(start + 2, num_tokens)], None))
        text += (await harness.heard(TextDeltas)).texts[0]
    return text


@pytest.mark.full_but_every(3)
@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("sampling", [{}, {"stop": ("it, and less",)}], ids=["plain", "stop"])
@pytest.mark.parametrize("num_tokens", range(len(IDS)))
def test_text_and_tokens_go_on_wherever_they_were(num_tokens: int, sampling: dict[str, object]) -> None:
    """In the midst of a character, too, and of what might be a stop string."""

    async def story(harness: Harness) -> None:
        passed = await given_out(harness, num_tokens, **sampling)
        go_on(harness, num_tokens, len(passed), **sampling)
        admit = await harness.admitted()
        assert (admit.resumed is None) == (num_tokens == 0)
        if admit.resumed is not None:
            assert admit.resumed.output == pack_ids(IDS[:num_tokens])
            assert (admit.resumed.cached_tokens, admit.resumed.verify_steps) == (1, 3)
        harness.commit((admit.uid, IDS[num_tokens:], None))
        reply = await harness.heard(TextDeltas)
        assert passed + reply.texts[0] == TEXT
        assert reply.token_ids == [IDS[num_tokens:]]
        assert reply.usages[0].completion_tokens == len(IDS)
        assert reply.finishes[0] is not None and reply.finishes[0].kind is FinishKind.LENGTH

    run(story)


def test_a_stop_string_that_began_before_is_found() -> None:
    async def story(harness: Harness) -> None:
        stop = {"stop": (TEXT[-14:-4],)}
        most = len(smollm2().encode(TEXT[:-10], False))
        passed = await given_out(harness, most, **stop)
        go_on(harness, most, len(passed), **stop)
        admit = await harness.admitted()
        harness.commit((admit.uid, IDS[most:], None))
        reply = await harness.heard(TextDeltas)
        assert passed + reply.texts[0] == TEXT[:-14]
        assert reply.finishes[0] is not None and reply.finishes[0].kind is FinishKind.STOP

    run(story)


@needs_feature("log_probs")
def test_log_probs_of_the_prompt_are_not_sent_again() -> None:
    async def story(harness: Harness) -> None:
        go_on(harness, 4, 0, log_probs=LogProbParams(top=1, prompt_from=0))
        admit = await harness.admitted()
        harness.commit((admit.uid, IDS[4:6], None))
        reply = await harness.heard(TextDeltas)
        assert reply.log_probs.keys() == {"a"} and not reply.prompt_log_probs

    run(story)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (Continued(pack_ids(IDS), 0, 0, 0), "had ended before"),
        (Continued(pack_ids(IDS[:3]), 100, 0, 0), "characters, not 100"),
        (Continued(pack_ids([1 << 30]), 0, 0, 0), "outside the vocabulary"),
        (Continued(b"123", 0, 0, 0), "no whole number of int32"),
    ],
)
def test_what_no_frontend_has_given_out_is_refused(given: Continued, why: str) -> None:
    async def story(harness: Harness) -> None:
        asked = SamplingParams(max_new_tokens=len(IDS))
        harness.say(Generate("a", TextPrompt("Hi"), asked, ANY_TERMS, None, given))
        refused = await harness.heard(Rejected)
        assert why in refused.message and refused.field == "continued"
        harness.generate("Hi", "a")  # its id is free
        await harness.admitted()

    run(story)


def test_it_gives_its_place_to_no_other() -> None:
    """It has had its first token."""

    async def story(harness: Harness) -> None:
        go_on(harness, 3, 0)
        admit = await harness.admitted()
        request = harness.service._requests.by_uid(admit.uid)
        assert request is not None and not request.is_waiting
        assert EOS not in IDS

    run(story)


def test_it_goes_on_once_more_when_the_worker_dies() -> None:
    """Behind what came of it from both frontends."""

    async def story(harness: Harness) -> None:
        harness.attach(recovery=RecoverySettings(enabled=True))
        go_on(harness, 3, 0)
        admit = await harness.admitted()
        harness.commit((admit.uid, IDS[3:5], None))
        await harness.heard(TextDeltas)
        request = harness.service._requests.by_uid(admit.uid)
        assert request is not None
        replay = request.follower(Replay)
        assert replay is not None
        again = replay.admission(request.usage).resumed
        assert again is not None and again.output == pack_ids(IDS[:5])

    run(story)
