"""The ring in bfloat16 on a CPU: the oracle of 16-bit answers accepts what is right, and nothing else."""

import random

import torch
from near_oracle import NearOracle
from ring import Answer, RingConfig, tiny_loaded
from storm import random_requests, run_requests

from overlap_spec.messages import SamplingParams
from overlap_spec.tokenizer.codec import TextCodec

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


def test_answers_are_the_best_up_to_rounding(codec: TextCodec) -> None:
    oracle = NearOracle(0, codec, torch.bfloat16, MOST)
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
