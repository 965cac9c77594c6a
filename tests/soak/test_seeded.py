"""Answers that differ are found, and the rounding of log-probs is no difference."""

import asyncio
from typing import Any

import pytest
from support.parameter_cases import CASES, CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES
from support.soak.deaths import is_near_tie
from support.soak.seeded import WHOLE_OF, ZMQ, Asked, EndedEarly, alike, asked

FOUND: dict[str, Any] = {"text": "abc", "logprobs": [-1.0, -2.5], "top_logprobs": [{"a": -1.0, "b": -1.0001}]}


@pytest.mark.parametrize(
    ("changes", "is_alike"),
    [
        ({}, True),
        ({"logprobs": [-1.00001, -2.5]}, True),
        ({"logprobs": [-1.1, -2.5]}, False),
        ({"logprobs": [-1.0]}, False),
        ({"text": "abd"}, False),
        ({"more": 1}, False),
        ({"top_logprobs": [{"c": -1.0001, "a": -1.0}]}, True),
        ({"top_logprobs": [{"a": -1.0, "b": -1.2}]}, False),
    ],
)
def test_answers_are_alike_up_to_the_rounding_of_log_probs(changes: dict[str, Any], is_alike: bool) -> None:
    assert alike(FOUND | changes, FOUND) is is_alike


class InBatches:
    """A plain server whose answer depends on how many requests it has."""

    def __init__(self, answers: dict[int, str]) -> None:
        self._answers = answers
        self._open = 0

    async def answer(self, request: Asked) -> str:
        self._open += 1
        await asyncio.sleep(0)
        found = self._answers.get(self._open, "one")
        await asyncio.sleep(0)
        self._open -= 1
        return found


@pytest.mark.parametrize(("answers", "is_one"), [({}, False), ({5: "other"}, True), ({16: "other"}, True)])
def test_a_near_tie_is_what_plain_decoding_says_too(answers: dict[int, str], is_one: bool) -> None:
    plain: Any = InBatches(answers)
    assert asyncio.run(is_near_tie(plain, asked(1, 0), "other")) is is_one


def test_requests_are_the_same_again_and_of_all_parameters_and_endpoints() -> None:
    requests = [asked(1, number) for number in range(20 * len(CASES))]
    assert requests == [asked(1, number) for number in range(len(requests))]
    assert {request.path for request in requests} == {ZMQ, COMPLETIONS, CHAT, GENERATE, MESSAGES, RESPONSES}
    sent = {name for request in requests for name in request.body | request.body.get("sampling_params", {})}
    assert CASES.keys() <= sent and {"cache_salt", "extra_key", "stream"} <= sent


CHOICE = {"index": 0, "text": "a", "finish_reason": None}
USAGE = {"prompt_tokens": 1, "completion_tokens": 1}


@pytest.mark.parametrize(
    ("path", "events"),
    [
        (COMPLETIONS, [{"choices": [CHOICE]}, {"choices": [], "usage": USAGE}]),
        (GENERATE, [{"index": 0, "text": "a", "meta_info": {"finish_reason": None}}]),
        (MESSAGES, [{"type": "message_start"}]),
        (RESPONSES, [{"type": "response.created"}]),
    ],
)
def test_a_stream_without_an_end_has_ended_early(path: str, events: list[dict[str, Any]]) -> None:
    with pytest.raises(EndedEarly):
        WHOLE_OF[path](events)
