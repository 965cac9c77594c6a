"""Packed log-probs: read as they were written, grown in place, and a prompt's parts put together."""

import math
import struct

import pytest

from overlap_spec.client.answers import Delta
from overlap_spec.client.calls import Calls, completion_of
from overlap_spec.client.log_probs import (
    NONE,
    Candidate,
    TokenLogProb,
    TokenLogProbs,
    alone,
    extended,
    own_log_probs,
    read_log_probs,
)
from overlap_spec.messages import Finish, FinishKind, LogProbs, TextDeltas, Usage

NAMES = {token: b"t%d" % token for token in range(1000)}
USAGE = Usage(3, 0, 0, 0)


def packed(tokens: range, first: int = 0, top: int = 2) -> LogProbs:
    """Token t with log-prob -t, the best ones t + 1, .., and -1 where the vocabulary ends; one that was listed."""
    records = b""
    for token in tokens:
        own = math.nan if token == 0 else -float(token)
        others = [(-1.0 - each, token + 1 + each if token < 900 else -1) for each in range(top)]
        numbers = [own, token, *(number for pair in others for number in pair), -9.5, 7]
        records += struct.pack(f"<{len(numbers)}d", *numbers)
    return LogProbs(records, top, 1, NAMES, first)


def entry(token: int, top: int = 2) -> TokenLogProb:
    best = [Candidate(token + 1 + each, -1.0 - each, NAMES[token + 1 + each]) for each in range(top)]
    listed = [Candidate(7, -9.5, b"t7")]
    return TokenLogProb(token, None if token == 0 else -float(token), NAMES[token], best if token < 900 else [], listed)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 300])
def test_every_token_is_read_in_order(count: int) -> None:
    found = read_log_probs(packed(range(count)))
    assert len(found) == count and list(found) == [entry(token) for token in range(count)]
    assert found == [entry(token) for token in range(count)] and bool(found) == (count > 0)


def test_a_token_that_the_vocabulary_lacks_is_left_out() -> None:
    assert list(read_log_probs(packed(range(950, 951))))[0].top == []


def test_a_token_and_a_run_by_index() -> None:
    found = read_log_probs(packed(range(100)))
    assert found[99] == found[-1] == entry(99)
    assert found[10:13] == [entry(10), entry(11), entry(12)] and found[::50] == [entry(0), entry(50)]
    with pytest.raises(IndexError):
        found[100]


def test_alone_a_token_has_no_others() -> None:
    found = alone(read_log_probs(packed(range(70))))
    assert [(each.token_id, each.token, each.top, each.listed) for each in found] == [
        (token, NAMES[token], [], []) for token in range(70)
    ]


def test_own_log_probs() -> None:
    found = read_log_probs(packed(range(10)))
    for entries in (found, list(found)):
        assert own_log_probs(entries, 1, 4) == [-1.0, -2.0, -3.0]
        assert math.isnan(own_log_probs(entries, 0, 1)[0]) and own_log_probs(entries, 9, 100) == [-9.0]


def test_what_follows_is_added_and_left_as_it_was() -> None:
    first, second = read_log_probs(packed(range(3))), read_log_probs(packed(range(3, 5)))
    grown = extended(NONE, first)
    assert extended(extended(grown, second), NONE) is grown
    assert grown == [entry(token) for token in range(5)]
    assert len(first) == 3 and len(second) == 2
    assert extended(grown, [entry(5)])[-1] == entry(5), "of another kind"


def rows(*ids: list[int], finish: Finish | None = None, **more: object) -> TextDeltas:
    count = len(ids)
    return TextDeltas(["a"] * count, ["x"] * count, list(ids), [finish] * count, [USAGE] * count, **more)


def delivered(*messages: TextDeltas) -> list[Delta]:
    calls = Calls()
    answers = calls.open("a")
    found = []
    for message in messages:
        calls.deliver(message)
        found += list(answers.take_all())
    return [each for each in found if isinstance(each, Delta)]


def test_a_prompts_parts_come_with_the_first_delta() -> None:
    parts = [rows([], prompt_log_probs={"a": packed(range(2 * i, 2 * i + 2), 2 * i)}) for i in range(3)]
    own = {"log_probs": {"a": packed(range(8, 9))}}
    (first, second) = delivered(*parts, rows([8], **own), rows([8], **own))
    assert first.prompt_log_probs == [entry(token) for token in range(6)] and first.log_probs == [entry(8)]
    assert second.prompt_log_probs == [] and second.log_probs == [entry(8)]
    assert completion_of([first, finished(second)]).prompt_log_probs == first.prompt_log_probs


def finished(delta: Delta) -> Delta:
    return Delta(delta.text, delta.token_ids, Finish(FinishKind.LENGTH), delta.usage, None, delta.log_probs)


def test_a_part_that_begins_anew_takes_the_place_of_the_others() -> None:
    """As when the engine was started again."""
    parts = [packed(range(2)), packed(range(2, 3), 2), packed(range(1)), packed(range(1, 4), 1)]
    own = {"log_probs": {"a": packed(range(8, 9))}}
    (first,) = delivered(*(rows([], prompt_log_probs={"a": part}) for part in parts), rows([8], **own))
    assert first.prompt_log_probs == [entry(token) for token in range(4)]


def test_a_part_may_come_with_the_row_that_ends_a_request() -> None:
    (only,) = delivered(rows([], finish=Finish(FinishKind.LENGTH), prompt_log_probs={"a": packed(range(1))}))
    assert only.prompt_log_probs == [entry(0)] and only.finish is not None


def test_nothing_is_kept_of_a_request_that_is_left() -> None:
    calls = Calls()
    for end in (calls.close, calls.leave):
        calls.open("a")
        calls.deliver(rows([], prompt_log_probs={"a": packed(range(9))}))
        assert calls._of_prompts
        end("a")
        assert not calls._of_prompts
    calls.deliver(rows([], prompt_log_probs={"a": packed(range(9))}))
    assert not calls._of_prompts, "a late part"


def test_names_are_one_table() -> None:
    (first,) = delivered(rows([1], log_probs={"a": packed(range(2))}))
    (second,) = delivered(rows([1], log_probs={"a": packed(range(2))}))
    assert isinstance(first.log_probs, TokenLogProbs) and isinstance(second.log_probs, TokenLogProbs)
    calls = Calls()
    answers = calls.open("a")
    for _ in range(2):
        calls.deliver(rows([1], log_probs={"a": LogProbs(packed(range(1)).records, 2, 1, NAMES)}))
    (joined,) = answers.take_all()
    assert isinstance(joined, Delta) and joined.log_probs == [entry(0), entry(0)]
    assert joined.log_probs._names is calls._names
