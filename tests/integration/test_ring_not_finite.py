"""NaN in a target's logits ends one request, and its neighbours get what they get without it; a draft's ends none.

A row of the target's embedding is NaN, so that whoever has its token has NaN for hidden states, keys and logits from
there on. What is expected are the answers of the same engine with sound weights.
"""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.ring import Answer, Ring, RingConfig, running, tiny_loaded
from support.speculation import check_report

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import ErrorCode, LogProbParams, MetricsLevel, SamplingParams, Speculative
from overlap_spec.models.work import tensors_in
from overlap_spec.worker.startup.geometry import LoadedModels

SEED = 10
LENGTH = 10
PROMPTS = [[(11 * i + 5 * j) % 90 + 20 for i in range(6 + 3 * j)] for j in range(4)]
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.7, "repetition_penalty": 1.2},
]
SHAPES = {
    "chain": RingConfig(),
    "chain, captured, any width": RingConfig(graph_batch_sizes=(1, 4), widths_seed=3),
    "tree": RingConfig(topk=3, num_draft_tokens=8),
    "small model": RingConfig(method="STANDALONE of fewer tokens", depth=1),
    "plain": RingConfig(num_steps=0),
}


def asked(index: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": LENGTH, "ignore_eos": True, "seed": 40 + index, **ASKED[index], **more})


def loaded(config: RingConfig) -> LoadedModels:
    return tiny_loaded(SEED, config.num_steps, method=config.method, topk=config.topk)


async def answers_of(ring: Ring, kinds: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, Answer]:
    answers = {name: ring.start(name, *asked) for name, asked in kinds.items()}
    await asyncio.wait_for(asyncio.gather(*(answer.done.wait() for answer in answers.values())), 30)
    await ring.idle()
    return answers


def run(config: RingConfig, models: LoadedModels, codec: TextCodec, *rounds: dict[str, Any]) -> list[dict[str, Answer]]:
    async def serve() -> list[dict[str, Answer]]:
        async with running(models, config, codec) as ring:
            return [await answers_of(ring, each) for each in rounds]

    return asyncio.run(serve())


def guessed_ids(models: LoadedModels) -> set[int]:
    draft = getattr(getattr(models.proposer, "chain", models.proposer), "draft", None)
    return set() if draft is None else set(draft.target_ids.tolist())


def victim_in(answers: dict[str, Answer], guessed: set[int]) -> tuple[str, int, int]:
    """An answer with a token that is nowhere else and that no draft guesses, that token, and where it is."""
    texts = {name: [*PROMPTS[int(name)], *answer.token_ids] for name, answer in answers.items()}
    for name, answer in answers.items():
        others = {token for other, text in texts.items() if other != name for token in text} | set(PROMPTS[int(name)])
        for place, token in enumerate(answer.token_ids[1:-2], 1):
            if token not in others | guessed | set(answer.token_ids[:place]):
                return name, token, place
    raise AssertionError("no token is fit")


@pytest.mark.full_but_every(4)
@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize("shape", SHAPES)
def test_who_meets_nan_ends_with_an_error_and_neighbours_get_their_tokens(codec: TextCodec, shape: str) -> None:
    config, models = replace(SHAPES[shape], num_pages=60), loaded(SHAPES[shape])
    kinds = {str(index): (prompt, asked(index)) for index, prompt in enumerate(PROMPTS)}
    (expected,) = run(config, models, codec, kinds)
    victim, token, place = victim_in(expected, guessed_ids(models))
    models.target.embedding.weight[token] = torch.nan
    prompted = {name: kind for name, kind in kinds.items() if name != victim}
    prompted["prompt"] = [30, token, 31], asked(0, log_probs=LogProbParams(top=1, prompt_from=0))
    first, second, third = run(config, models, codec, kinds, prompted, kinds)
    for found in (first, third):  # the second time on pages that have held NaN
        assert found[victim].token_ids == expected[victim].token_ids[: place + 1], "as far as plain decoding gets"
        rejected = found[victim].rejected
        assert rejected is not None and rejected.code is ErrorCode.NOT_FINITE
        assert f"after {len(PROMPTS[int(victim)]) + place + 1} tokens" in rejected.message
    rejected = second["prompt"].rejected
    assert rejected is not None and rejected.code is ErrorCode.NOT_FINITE and not second["prompt"].token_ids
    for found in (first, second, third):
        for name in kinds.keys() - {victim}:
            assert found[name].token_ids == expected[name].token_ids and found[name].rejected is None, name


@pytest.mark.full_but_every(4)
@pytest.mark.slow
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "plain"])
def test_a_guess_of_nan_ends_no_request(codec: TextCodec, shape: str, caplog: pytest.LogCaptureFixture) -> None:
    """Every token that no answer has is NaN in the embedding: wrong guesses make NaN of the rows before them too."""
    config, models = replace(SHAPES[shape], num_pages=60), loaded(SHAPES[shape])
    kinds = {str(index): (prompt, asked(index)) for index, prompt in enumerate(PROMPTS)}
    reports = Speculative(provenance=True, metrics=MetricsLevel.DETAILED)
    more = {"log_probs": LogProbParams(top=2), "speculative": reports}
    kinds |= {f"{index} again": (prompt, asked(index, **more)) for index, prompt in enumerate(PROMPTS)}
    (expected,) = run(config, models, codec, kinds)
    said = {token for name, (prompt, _) in kinds.items() for token in [*prompt, *expected[name].token_ids]}
    wrong = [token for token in range(1, len(models.target.embedding.weight)) if token not in said]
    models.target.embedding.weight[wrong] = torch.nan
    with caplog.at_level("WARNING"):
        found, again = run(config, models, codec, kinds, kinds)
    assert "nothing is guessed for this request any more" in caplog.text
    for name in kinds:
        for answer in (found[name], again[name]):
            assert answer.rejected is None, answer.rejected
            assert (answer.token_ids, answer.text) == (expected[name].token_ids, expected[name].text)
            assert [entry.token_id for entry in answer.log_probs] == [
                each.token_id for each in expected[name].log_probs
            ]
        check_report(kinds[name][1], found[name], config.num_steps, Counter())


@pytest.mark.full_but_every(5)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["EAGLE3", "EAGLE", "STANDALONE", "NEXTN"])
@pytest.mark.parametrize("topk", [1, 2])
def test_a_draft_of_nan_changes_no_token(codec: TextCodec, method: str, topk: int) -> None:
    config = RingConfig(method=method, topk=topk)
    kinds = {str(index): (prompt, asked(index)) for index, prompt in enumerate(PROMPTS)}
    kinds["4"] = PROMPTS[0], asked(0, log_probs=LogProbParams(top=2))
    (expected,) = run(config, loaded(config), codec, kinds)
    models = loaded(config)
    shared = {tensor.data_ptr() for tensor in tensors_in(models.target)}
    for tensor in tensors_in(models.proposer):
        if tensor.is_floating_point() and tensor.data_ptr() not in shared:
            tensor.fill_(torch.nan)
    (found,) = run(config, models, codec, kinds)
    assert {name: answer.token_ids for name, answer in found.items()} == {
        name: answer.token_ids for name, answer in expected.items()
    }
    usage = found["1"].usage
    assert usage is not None and usage.spec_verify_ct == LENGTH - 1, "no guess of its was accepted"
