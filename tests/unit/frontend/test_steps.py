"""A frontend that is behind sends what one that is not would have sent, in fewer messages."""

import asyncio
import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from support.frontend_harness import Harness, serving
from support.small_tokenizers import EOS, smollm2

from overlap_spec.client.log_probs import TokenLogProb, read_log_probs
from overlap_spec.features.audit.frontend import Served
from overlap_spec.features.audit.transcripts import Transcript
from overlap_spec.features.log_probs.frontend import PAIR
from overlap_spec.frontend.open_requests import OpenRequest, joined
from overlap_spec.frontend.overload import Backlog
from overlap_spec.messages import (
    Abort,
    Finish,
    FinishKind,
    LogProbParams,
    LogProbRows,
    Speculative,
    TextDeltas,
    TokenDeltas,
    Usage,
    Verified,
)

TEXT = "One two three. 🦙 four, five; six END seven eight nine. And so on until 漢字 the end of it all."
STOPPED = Finish(FinishKind.STOP, EOS)


@dataclass
class Heard:
    """All that a client was sent for one request."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    usage: Usage | None = None
    verified: list[Verified] = field(default_factory=list)
    log_probs: list[TokenLogProb] = field(default_factory=list)
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)


def hear(message: TextDeltas, heard: dict[str, Heard]) -> None:
    rows = zip(message.request_ids, message.texts, message.token_ids, message.finishes, message.usages, strict=True)
    for name, text, ids, finish, usage in rows:
        each = heard.setdefault(name, Heard())
        assert each.finish is None, "a row after the last one"
        each.text += text
        each.ids += ids
        each.finish, each.usage = finish, usage
        each.verified += [message.verified[name]] if name in message.verified else []
        each.log_probs += read_log_probs(message.log_probs.get(name))
        each.prompt_log_probs += read_log_probs(message.prompt_log_probs.get(name))
        if name in message.verified:
            assert len(ids) <= message.verified[name].accepted + 1, "the tokens of one step"


ASKED: dict[str, dict[str, object]] = {
    "plain": {},
    "stopped": {"stop": ("END",)},
    "pattern": {"stop_regex": ("n[a-z]ne",)},
    "short": {"max_new_tokens": 9},
    "reporting": {"speculative": Speculative(provenance=True), "stop": ("eight",)},
    "scored": {"log_probs": LogProbParams(prompt_from=0), "stop": ("nine",)},
}


def steps_of(draw: random.Random, uids: dict[str, int]) -> list[TokenDeltas]:
    """What a scheduler would send; requests that the frontend stops run on, as they do."""
    ids = smollm2().encode(TEXT, add_special_tokens=False)
    left = {name: list(ids) for name in uids}
    counts = dict.fromkeys(uids, 0)
    steps = []
    for step_id in range(1, 100):
        step = TokenDeltas([], [], [], [], step_id)
        for name, uid in uids.items():
            if not left[name] or draw.random() < 0.3:
                continue
            run, left[name] = left[name][: (count := draw.randint(1, 4))], left[name][count:]
            finish = STOPPED if not left[name] else None
            run += [EOS] if finish else []
            if not counts[name]:
                step.cached_tokens[uid] = 2
            counts[name] += len(run)
            step.uids.append(uid)
            step.tokens.append(run)
            step.finishes.append(finish)
            step.verify_steps.append(step_id)
            if name == "reporting":
                step.verified[uid] = Verified(step_id, 3, len(run) - 1)
            if name == "scored":
                records = b"".join(PAIR.pack(-token / 1e5, token) for token in run)
                of_prompt = [PAIR.pack(-0.25, 5)] if step_id == 1 else []
                step.extensions.append(LogProbRows([records], of_prompt))
                step.extended.append(uid)
        steps.append(step)
    return steps


async def play(seed: int, late: bool) -> tuple[dict[str, Heard], list[int], list[tuple[int, list[int]]], int]:
    """Returns what was heard, which requests were aborted, the transcript of one, and the number of messages."""
    draw, heard, num_messages = random.Random(seed), dict[str, Heard](), 0
    async with serving() as h:
        uids = {}
        for name, asked in ASKED.items():
            h.generate([5, 6, 7], name, **{"max_new_tokens": 90, **asked})
            uids[name] = (await h.admitted()).uid
        transcript = keep_transcript(h, uids["stopped"])
        for step in steps_of(draw, uids):
            h.inbox.send(step)
            if not late or draw.random() < 0.15:
                await h.settle()
        await h.settle()
        while not h.clients.heard.empty():
            _, message = h.clients.heard.get_nowait()
            assert isinstance(message, TextDeltas)
            hear(message, heard)
            num_messages += 1
        aborted = sorted(each.uid for each in h.scheduler.drain() if isinstance(each, Abort))
    tokens = iter(transcript.output)
    return heard, aborted, [(i, [next(tokens) for _ in range(n)]) for i, n in transcript.steps], num_messages


def keep_transcript(h: Harness, uid: int) -> Transcript:
    """As an audit that has chosen this request would."""
    request = h.service._requests.by_uid(uid)
    assert request is not None
    transcript = Transcript("t", None)  # its Admit is not read
    request.follow((Served(transcript, SimpleNamespace(finished=lambda transcript, finish: None)),))
    return transcript


@pytest.mark.full_but_every(4)
@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("seed", range(6))
def test_late_steps_say_what_prompt_ones_say(seed: int) -> None:
    expected, aborted, transcript, num_messages = asyncio.run(play(seed, late=False))
    assert {name for name, each in expected.items() if each.finish} == set(ASKED)
    assert len(aborted) == 5 and expected["short"].finish == Finish(FinishKind.LENGTH)
    assert expected["stopped"].text == TEXT.split("END", 1)[0]
    heard, aborted_late, kept, num_late = asyncio.run(play(seed, late=True))
    assert (heard, kept) == (expected, transcript)
    assert set(aborted_late) <= set(aborted), "those that ended at the scheduler by then need none"
    assert num_late < num_messages


def row(step_id: int, tokens: list[int], verified: bool = False) -> TokenDeltas:
    """A step of request 1."""
    step = TokenDeltas([1], [tokens], [None], [step_id], step_id)
    if verified:
        step.verified[1] = Verified(step_id, 3, len(tokens) - 1)
    return step


def test_a_run_knows_its_steps() -> None:
    (gains,) = joined([row(1, [10, 11]), row(2, [12]), row(3, [13, 14, 15])])
    run = gains.runs[1]
    assert run.tokens == [10, 11, 12, 13, 14, 15] and gains.step_id == 3
    assert [run.verify_steps(count) for count in range(1, 7)] == [1, 1, 2, 3, 3, 3]
    assert list(run.by_step([10, 11, 12, 13])) == [(1, [10, 11]), (2, [12]), (3, [13])]


def test_steps_that_are_reported_stay_apart() -> None:
    plain = TokenDeltas([2], [[20]], [None], [1], 2)
    found = list(joined([row(1, [10]), plain, row(3, [11], verified=True), row(4, [12], verified=True)]))
    assert [{uid: run.tokens for uid, run in gains.runs.items()} for gains in found] == [
        {1: [10], 2: [20]},
        {1: [11]},
        {1: [12]},
    ]


def test_what_an_answer_opens_with_comes_with_its_first_tokens() -> None:
    """Not with a part of the prompt's log-probs, whose row has no text; with the last row at the latest."""
    for rows in ([[], [5, 6], [7]], [[5], [6]], [[], []]):
        request, reply = OpenRequest(1, 1, "r", "owner", opening="<think>"), TextDeltas([], [], [], [], [])
        for i, tokens in enumerate(rows):
            finish = Finish(FinishKind.LENGTH) if i == len(rows) - 1 else None
            request.add_row(reply, "".join(f" {token}" for token in tokens), tokens, finish)
        assert "".join(reply.texts) == "<think>" + "".join(f" {token}" for tokens in rows for token in tokens)
        assert not any(text for text, tokens in zip(reply.texts[:-1], rows[:-1], strict=True) if not tokens)


def test_cached_tokens_stay_counted_after_the_row_that_told_of_them() -> None:
    request = OpenRequest(1, 1, "r", "owner", usage=Usage(9, 0, 0, 0))
    request.output = SimpleNamespace(num_tokens=2)
    request.count(cached_tokens=4, verify_steps=1)
    request.count(cached_tokens=None, verify_steps=2)
    assert request.usage == Usage(9, 4, 2, 2)


def test_a_frame_of_several_requests_counts_in_equal_shares() -> None:
    backlog = Backlog()
    backlog.add(bytes(100), ["a", "b"])
    backlog.add(bytes(30), ["a"])
    assert (backlog.num_bytes, backlog.of("a"), backlog.of("b")) == (130, 80, 50)
    assert backlog.pop() == 100 and (backlog.of("a"), backlog.of("b")) == (30, 0)


def test_rows_of_features_are_of_the_requests_that_they_name() -> None:
    steps = [
        TokenDeltas([1, 2], [[5], [6]], [None, None], [1, 1], 1, extensions=[LogProbRows([b"x"])], extended=[2]),
        TokenDeltas(
            [1, 2], [[7], [8]], [None, None], [2, 2], 2, extensions=[LogProbRows([b"", b"y"])], extended=[1, 2]
        ),
        TokenDeltas([1], [[9]], [None], [3], 3, extensions=[LogProbRows([], [b"z"])], extended=[3]),
    ]
    (gains,) = joined(steps)
    assert gains.packed == {2: b"xy"}
