"""Log-probs in the rows of a service: of what is served, named, and of a prompt from the token that was asked for."""

import asyncio
import struct

import pytest
from support.frontend_harness import serving
from support.installed import needs_feature
from support.small_tokenizers import smollm2

from overlap_spec.client.log_probs import read_log_probs
from overlap_spec.messages import Finish, FinishKind, LogProbParams, LogProbRows, Rejected, TextDeltas, TokenDeltas

pytestmark = needs_feature("log_probs")

IDS = smollm2().encode(" the sky is blue and so", False)
PROMPT = [50, 60, 70, 80]


def packed(tokens: list[int]) -> bytes:
    return b"".join(struct.pack("<2d", -token / 1e3, float(token)) for token in tokens)


def test_a_row_has_those_of_its_tokens_and_the_prompts_come_before_it() -> None:
    async def scenario() -> None:
        async with serving() as harness:
            harness.generate(PROMPT, max_new_tokens=3, log_probs=LogProbParams(prompt_from=1))
            uid = (await harness.admitted()).uid
            harness.inbox.send(
                TokenDeltas([], [], [], [], extensions=[LogProbRows([], [packed(PROMPT[2:])])], extended=[uid])
            )
            row = await harness.heard(TextDeltas)
            assert row.token_ids == [[]] and row.texts == [""] and not row.log_probs
            part = read_log_probs(row.prompt_log_probs["a"])
            assert [(each.token_id, each.log_prob) for each in part] == [(60, None), (70, -0.07), (80, -0.08)]
            harness.inbox.send(
                TokenDeltas([uid], [IDS], [None], [1], extensions=[LogProbRows([packed(IDS)])], extended=[uid])
            )
            last = await harness.heard(TextDeltas)
            assert last.finishes == [Finish(FinishKind.LENGTH)] and not last.prompt_log_probs
            served = read_log_probs(last.log_probs["a"])
            assert [each.token_id for each in served] == last.token_ids[0] == IDS[:3]
            assert "".join(each.text for each in served) == last.texts[0]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (LogProbParams(token_ids=(49152,)), "log_probs.token_ids"),
        (LogProbParams(prompt_from=4), "log_probs.prompt_from"),
    ],
)
def test_what_there_is_not_is_refused(asked: LogProbParams, field: str) -> None:
    async def scenario() -> None:
        async with serving() as harness:
            harness.generate(PROMPT, log_probs=asked)
            assert (await harness.heard(Rejected)).field == field

    asyncio.run(scenario())
