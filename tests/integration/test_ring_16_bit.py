"""The ring in bfloat16 on a CPU: the oracle of 16-bit answers accepts what is right, and nothing else."""

import random

import pytest
import torch
from msgspec.structs import replace
from support.near_oracle import NearOracle, rounded_target
from support.random_schedules import random_requests, run_requests
from support.ring import Answer, RingConfig, tiny_loaded

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import Finish, FinishKind, SamplingParams, Usage

MOST = 0.15  # of logits with a deviation of 3
CONFIG = RingConfig(num_steps=3, num_pages=60, num_slots=5, dtype=torch.bfloat16, widths_seed=3, max_len=120)


class Recording:
    """Keeps what another oracle has accepted."""

    def __init__(self, oracle: NearOracle) -> None:
        self._oracle = oracle
        self.accepted: list[tuple[list[int], SamplingParams, Answer]] = []

    def check(self, prompt: list[int], sampling: SamplingParams, answer: Answer, what: str) -> None:
        self._oracle.check(prompt, sampling, answer, what)
        self.accepted.append((prompt, sampling, answer))


@pytest.mark.slow
def test_answers_are_the_best_up_to_rounding(codec: TextCodec) -> None:
    oracle = NearOracle(rounded_target(0, torch.bfloat16), codec, MOST)
    recording = Recording(oracle)
    requests = random_requests(random.Random(7), 30, filters=False)
    run_requests(requests, tiny_loaded(0, 3, torch.bfloat16), CONFIG, codec, recording, "16 bit")
    assert 0 < oracle.worst < MOST
    noticed = 0
    for prompt, sampling, answer in recording.accepted:
        for place, token in enumerate(answer.token_ids):
            answer.token_ids[place] = (token + 1) % 128
            try:
                oracle.check(prompt, sampling, answer, "another token")
            except AssertionError:
                noticed += 1
            answer.token_ids[place] = token
    assert noticed > 0.99 * sum(len(answer.token_ids) for _, _, answer in recording.accepted)


@pytest.mark.full
def test_the_bound_is_where_it_is_said_to_be(codec: TextCodec) -> None:
    """The last token is replaced by those whose shortfall lies next to the bound, below and above."""
    oracle = NearOracle(rounded_target(0, torch.bfloat16), codec, MOST)
    recording = Recording(oracle)
    requests = random_requests(random.Random(8), 160, filters=False)
    run_requests(requests, tiny_loaded(0, 3, torch.bfloat16), CONFIG, codec, recording, "16 bit")
    below, above = [], []
    for prompt, asked, answer in recording.accepted:
        for count in range(1, len(answer.token_ids) + 1) if asked.min_new_tokens == 0 else ():
            sampling = replace(asked, max_new_tokens=count, stop=(), stop_token_ids=(), ignore_eos=True)
            short = oracle.shortfalls(prompt, answer.token_ids[:count], sampling)[-1]
            for token in range(len(short)):
                if 0.5 * MOST < short[token] < 1.5 * MOST:
                    tokens = [*answer.token_ids[: count - 1], token]
                    (below if short[token] < MOST else above).append(accepts(oracle, codec, prompt, sampling, tokens))
    assert len(below) > 20 and all(below)
    assert len(above) > 20 and not any(above)


def accepts(
    oracle: NearOracle, codec: TextCodec, prompt: list[int], sampling: SamplingParams, tokens: list[int]
) -> bool:
    usage = Usage(len(prompt), 0, len(tokens), 1)
    answer = Answer(tokens, text=codec.decode(tokens, True), finish=Finish(FinishKind.LENGTH), usage=usage)
    try:
        oracle.check(prompt, sampling, answer, "near the bound")
    except AssertionError as error:
        assert "fall short" in str(error)
        return False
    return True
