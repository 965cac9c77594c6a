"""Lists of tokens at the frontend: what cannot be followed is refused by its field, words go on as ids alone."""

import asyncio
from typing import Any

import pytest
from support.tokenizer_harness import serving

from overlap_spec.client.link import pack_ids
from overlap_spec.errors import RequestError
from overlap_spec.features.penalties.frontend import check_lists
from overlap_spec.messages import Rejected, SamplingParams

STOPS = (2, 3)


@pytest.mark.parametrize(
    ("asked", "field", "words"),
    [
        ({"logit_bias": {10: 1.0}}, "logit_bias", "token id 10 is outside"),
        ({"allowed_ids": pack_ids([1, 10])}, "allowed_token_ids", "token id 10 is outside"),
        ({"allowed_ids": pack_ids([1] * 11)}, "allowed_token_ids", "at most 10 token ids"),
        ({"bad_word_ids": ((1, 10),)}, "bad_words", "token id 10 is outside"),
        ({"allowed_ids": pack_ids([1]), "bad_word_ids": ((1,),)}, "allowed_token_ids", "forbid all"),
        ({"allowed_ids": pack_ids([2, 3]), "min_new_tokens": 1}, "allowed_token_ids", "forbid all"),
    ],
)
def test_lists_that_cannot_be_followed_name_their_field(asked: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        check_lists(SamplingParams(**asked), STOPS, 10)
    assert caught.value.field == field


def test_lists_that_leave_a_token_are_taken() -> None:
    check_lists(SamplingParams(allowed_ids=pack_ids([2, 3])), STOPS, 10)
    check_lists(SamplingParams(allowed_ids=pack_ids([1, 2]), bad_word_ids=((2,),), min_new_tokens=1), STOPS, 10)
    check_lists(SamplingParams(allowed_ids=pack_ids([1]), bad_word_ids=((1, 1),)), STOPS, 10)


def test_bad_words_are_ids_for_the_scheduler_and_a_bias_must_be_of_a_token() -> None:
    async def scenario() -> None:
        async with serving() as harness:
            harness.generate("Hi", bad_words=("cat",))
            sampling = (await harness.admitted()).sampling
            assert sampling.bad_words == () and len(sampling.bad_word_ids) == 2
            harness.generate("Hi", "b", logit_bias={49152: 1.0})
            assert (await harness.heard(Rejected)).field == "logit_bias"

    asyncio.run(scenario())
