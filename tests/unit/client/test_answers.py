"""What a reader takes: nothing lost, nothing in another order, and as one delta what had come by then."""

import asyncio
import random
from collections.abc import Sequence

import pytest

from overlap_spec.client.answers import Answer, Answers, Delta
from overlap_spec.client.log_probs import TokenLogProb
from overlap_spec.errors import ActorDied
from overlap_spec.messages import Finish, FinishKind, Usage, Verified


def delta(index: int, verified: bool = False, finish: Finish | None = None) -> Delta:
    """What step `index` adds: two tokens."""
    ids = [2 * index, 2 * index + 1]
    log_probs = [TokenLogProb(token, -0.5, b"t", [], []) for token in ids]
    told = Verified(index, 3, 1) if verified else None
    prompt = [TokenLogProb(7, None, b"p", [], [])] if index == 0 else []
    return Delta(f"{index} ", ids, finish, Usage(5, 0, 2 * index + 2, index), told, log_probs, prompt)


async def taken(answers: Answers, until: int) -> list[Answer]:
    """Take until so many tokens have come."""
    found: list[Answer] = []
    while sum(len(each.token_ids) for each in found if isinstance(each, Delta)) < until:
        found.append(await answers.take())
    return found


def check_same(found: Sequence[Answer], sent: Sequence[Delta]) -> None:
    got = [each for each in found if isinstance(each, Delta)]
    assert "".join(each.text for each in got) == "".join(each.text for each in sent)
    for column in ("token_ids", "log_probs", "prompt_log_probs"):
        columns = [[item for each in side for item in getattr(each, column)] for side in (got, sent)]
        assert columns[0] == columns[1]
    assert (got[-1].usage, got[-1].finish) == (sent[-1].usage, sent[-1].finish)
    assert [each.verified for each in got if each.verified] == [each.verified for each in sent if each.verified]
    for each in got:
        assert each.verified is None or len(each.token_ids) == 2, "the tokens of one step"
        assert each.usage.completion_tokens == each.token_ids[-1] + 1, "counts of its last step"


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_however_late_it_is_taken(seed: int) -> None:
    draw = random.Random(seed)
    reports = draw.choice((0.0, 0.2, 1.0))
    done = Finish(FinishKind.LENGTH)
    sent = [delta(index, draw.random() < reports, done if index == 39 else None) for index in range(40)]

    async def story() -> list[Answer]:
        answers = Answers()
        reader = asyncio.create_task(taken(answers, 80))
        for each in sent:
            answers.put(each)
            if draw.random() < 0.3:
                await asyncio.sleep(0)
        return await reader

    check_same(asyncio.run(story()), sent)


def test_what_waits_is_one_delta_and_an_error_stays_behind_it() -> None:
    async def story() -> None:
        answers, error = Answers(), ActorDied("worker", "gone")
        for answer in (delta(0), delta(1), error, delta(2)):
            answers.put(answer)
        first = await answers.take()
        assert isinstance(first, Delta) and first.text == "0 1 "
        assert await answers.take() is error
        assert await answers.take() == delta(2)

    asyncio.run(story())


def test_a_step_that_is_reported_is_joined_to_no_other() -> None:
    async def story() -> None:
        answers = Answers()
        for index, verified in enumerate((False, False, True, True, False, False)):
            answers.put(delta(index, verified))
        texts = [answer.text for answer in await taken(answers, 12) if isinstance(answer, Delta)]
        assert texts == ["0 1 ", "2 ", "3 ", "4 5 "]

    asyncio.run(story())


def test_a_reader_that_gave_up_leaves_everything_to_the_next() -> None:
    async def story() -> None:
        answers = Answers()
        reader = asyncio.create_task(answers.take())
        await asyncio.sleep(0)
        answers.put(delta(0))
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        answers.put(delta(1))
        found = await answers.take()
        assert isinstance(found, Delta) and found.text == "0 1 "

    asyncio.run(story())
