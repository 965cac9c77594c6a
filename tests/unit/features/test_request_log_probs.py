"""A prompt's log-probs leave in parts as chunks are computed; the first token's goes with the first of them."""

import math
import struct
from array import array

import pytest

from overlap_spec.errors import RequestError
from overlap_spec.features.log_probs.frontend import PART_PAIRS, RequestLogProbs, check_log_probs
from overlap_spec.frontend.request_checks import RequestChecks
from overlap_spec.messages import MAX_LOG_PROBS, EngineLimits, LogProbParams, LogProbs, SamplingParams

PROMPT = list(range(10, 1000))


def records(tokens: list[int], top: int) -> bytes:
    pairs = [pair for token in tokens for pair in [(-0.5, token), *[(-1.0, token + 1 + i) for i in range(top)]]]
    return struct.pack(f"<{2 * len(pairs)}d", *(float(number) for pair in pairs for number in pair))


def tokens_of(part: LogProbs) -> list[int]:
    return [int(token) for token in array("d", part.records)[1 :: 2 * (1 + part.top)]]


def request(top: int, prompt_from: int | None = 0) -> RequestLogProbs:
    asked = LogProbParams(top=top, prompt_from=prompt_from)
    return RequestLogProbs(asked, PROMPT[prompt_from or 0], lambda token: b"%d" % token)


def parts_of(scored: RequestLogProbs, chunk: bytes) -> list[LogProbs]:
    return [scored.part_of_prompt(piece) for piece in scored.pieces_of_prompt(chunk)]


@pytest.mark.parametrize("top", [0, 3, 20])
def test_parts_are_small_and_nothing_is_lost(top: int) -> None:
    scored = request(top)
    chunks = (PROMPT[1:400], PROMPT[400:401], PROMPT[401:])
    parts = [part for chunk in chunks for part in parts_of(scored, records(chunk, top))]
    assert [token for part in parts for token in tokens_of(part)] == PROMPT
    assert [part.first for part in parts] == [sum(len(tokens_of(p)) for p in parts[:i]) for i in range(len(parts))]
    for part in parts:
        assert len(part.records) <= PART_PAIRS * 16 and (part.top, part.listed) == (top, 0)
        ids = {int(token) for token in array("d", part.records)[1::2]} - {-1}
        assert part.names == {token: b"%d" % token for token in ids}
    assert math.isnan(struct.unpack_from("<d", parts[0].records)[0]), "nothing is before the first token"
    assert scored.first_of_prompt() is None


def test_a_prompt_of_one_token_has_it_beside_the_first_row() -> None:
    scored = request(2, prompt_from=len(PROMPT) - 1)
    part = scored.first_of_prompt()
    assert part is not None and tokens_of(part) == PROMPT[-1:] and part.names == {PROMPT[-1]: b"%d" % PROMPT[-1]}
    assert scored.first_of_prompt() is None, "once"
    assert request(2, prompt_from=None).first_of_prompt() is None


def test_a_prompt_that_is_computed_again_begins_anew() -> None:
    scored = request(1)
    (part,) = parts_of(scored, records(PROMPT[1:3], 1))
    scored.forget_prompt()
    (again,) = parts_of(scored, records(PROMPT[1:4], 1))
    assert (part.first, again.first) == (0, 0) and tokens_of(again) == PROMPT[:4]


def test_output_is_cut_to_the_tokens_that_are_served() -> None:
    assert tokens_of(request(3).of_output(records([1, 2, 3], 3), 2)) == [1, 2]


LIMITS = EngineLimits(1 << 17, 1 << 18, 64, 1000)


def settle(num_prompt: int, most: int | None, **asked: object) -> SamplingParams:
    sampling = SamplingParams(max_new_tokens=most, log_probs=LogProbParams(**asked))
    settled = RequestChecks((2,), 64, 0).settle(sampling, array("i", [5]) * num_prompt, LIMITS)
    check_log_probs(settled, num_prompt, LIMITS.vocab_size)
    return settled


def test_an_answer_with_too_many_log_probs_is_refused_by_field_limit_and_product() -> None:
    with pytest.raises(RequestError) as refused:
        settle(10, 100_000, top=20)
    assert refused.value.field == "log_probs"
    text = "log_probs: 100,000 tokens x 21 log-probs = 2,100,000: at most 2,097,152 are returned"
    assert str(refused.value).startswith(text)
    assert settle(10, 99_000, top=20).max_new_tokens == 99_000


@pytest.mark.parametrize("top", [0, 1, 5, 14])
def test_a_prompt_of_the_whole_context_has_its_log_probs(top: int) -> None:
    assert settle((1 << 17) - 1, 1, top=top, prompt_from=0).max_new_tokens == 1


def test_listed_tokens_count_too_and_prompts_only_from_their_start() -> None:
    listed = tuple(range(32))
    assert settle(100_000, 1, top=20, token_ids=listed, prompt_from=70_000)
    with pytest.raises(RequestError, match="40,001 tokens x 53 log-probs"):
        settle(100_000, 1, top=20, token_ids=listed, prompt_from=60_000)


def test_a_request_without_a_length_counts_what_the_context_leaves() -> None:
    assert settle(100_000, None, top=20).max_new_tokens == (1 << 17) - 100_000
    with pytest.raises(RequestError, match="or set max_tokens"):
        settle(10, None, top=20)
    assert MAX_LOG_PROBS == 1 << 21
