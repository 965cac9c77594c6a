"""Requests of one batch that are speculated for as far as the engine can, less far, or not at all."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct
from support.ring import Answer, RingConfig, running, tiny_loaded
from support.speculation import check_report
from support.tiny.grammars import TINY_GRAMMARS
from support.tiny.methods import EVERY_METHOD

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import MetricsLevel, Origin, SamplingParams, Speculative, StepCosts

NUM_STEPS = 3
PROMPT = [5, 17, 42, 9, 80, 5, 17]
CONFIG = RingConfig(num_steps=NUM_STEPS, num_slots=8, num_pages=400)
CHEAP_WIDTHS = StepCosts((1,), (1, 2, 4), ((1.0, 1.01, 1.02),))


def asking(seed: int, temperature: float, **speculative: object) -> SamplingParams:
    report = Speculative(metrics=MetricsLevel.DETAILED, **speculative)
    return SamplingParams(max_new_tokens=40, temperature=temperature, seed=seed, ignore_eos=True, speculative=report)


def mixture() -> list[SamplingParams]:
    """Twice the same two requests for every limit."""
    limits = (None, 0, 1, NUM_STEPS)
    return [asking(7, temperature, num_steps=limit) for limit in limits for temperature in (0.0, 0.8)]


def answers(config: RingConfig, codec: TextCodec, requests: list[SamplingParams]) -> tuple[list[Answer], Counter[int]]:
    """The answers to the same prompt, and the widths of the decode steps."""

    async def main() -> tuple[list[Answer], Counter[int]]:
        models = tiny_loaded(3, config.num_steps, method=config.method, topk=config.topk)
        async with running(models, config, codec) as ring:
            answered = await asyncio.gather(*(ring.ask(PROMPT, sampling) for sampling in requests))
            assert all(answer.rejected is None for answer in answered), answered
            return answered, ring.plans.widths

    return asyncio.run(main())


@pytest.fixture(scope="module")
def plain(codec: TextCodec) -> list[list[int]]:
    """What plain decoding answers, greedy and drawn."""
    asked = [asking(7, temperature) for temperature in (0.0, 0.8)]
    return [answer.token_ids for answer in answers(replace(CONFIG, num_steps=0), codec, asked)[0]]


CASES = [(method, 1) for method in EVERY_METHOD] + [("EAGLE3", 3), ("STANDALONE", 2)]


@pytest.mark.full_but_every(10)
@pytest.mark.slow_but_every(40)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("method", "topk"), CASES)
def test_limits_hold_and_change_no_token(
    method: str, topk: int, depth: int, plain: list[list[int]], codec: TextCodec
) -> None:
    asked, seen = mixture(), Counter[str]()
    answered, _ = answers(replace(CONFIG, method=method, topk=topk, depth=depth), codec, asked)
    for sampling, answer in zip(asked, answered, strict=True):
        assert answer.token_ids == plain[sampling.temperature > 0]
        check_report(sampling, answer, NUM_STEPS, seen)
    deepest = [max(verified.proposed for verified, _ in answer.verified) for answer in answered]
    assert deepest[2:4] == [0, 0] and max(deepest[4:6]) == 1 and max(deepest[:2] + deepest[6:]) > 1


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("method", ["EAGLE3", "NGRAM"])
def test_a_batch_that_wants_no_guesses_takes_steps_of_width_1(
    method: str, plain: list[list[int]], codec: TextCodec
) -> None:
    config = replace(CONFIG, method=method, step_costs=CHEAP_WIDTHS)
    (greedy, drawn), widths = answers(config, codec, [asking(7, 0.0, num_steps=0), asking(7, 0.8, method="none")])
    assert [greedy.token_ids, drawn.token_ids] == plain
    assert set(widths) == {1}
    assert {verified.origin(0) for verified, _ in greedy.verified} == {Origin.PLAIN}


def test_steps_are_no_wider_than_the_limits_of_a_batch_need(plain: list[list[int]], codec: TextCodec) -> None:
    config = replace(CONFIG, step_costs=CHEAP_WIDTHS)
    (answer,), widths = answers(config, codec, [asking(7, 0.0, num_steps=1)])
    assert answer.token_ids == plain[0] and set(widths) == {2}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "topk"), [("EAGLE3", 1), ("EAGLE3", 3), ("NGRAM", 1)])
def test_limits_hold_for_what_a_grammar_forces(method: str, topk: int, codec: TextCodec) -> None:
    """A grammar's forced tokens are guesses too."""
    grammar, seen = TINY_GRAMMARS["compact schema"], Counter[str]()
    asked = [
        replace_struct(asking(7, 0.0, num_steps=limit), ignore_eos=False, grammar=grammar) for limit in (None, 0, 1)
    ]
    config = replace(CONFIG, method=method, topk=topk, grammars=True, max_len=200)
    answered, _ = answers(config, codec, asked)
    for sampling, answer in zip(asked, answered, strict=True):
        assert answer.token_ids == answered[0].token_ids
        check_report(sampling, answer, NUM_STEPS, seen)
    assert max(verified.accepted for verified, _ in answered[0].verified) > 1, "nothing was forced"


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (Speculative(method="NGRAM"), "'NGRAM' is not loaded: this engine has EAGLE3 with up to 3 steps"),
        (Speculative(num_steps=4), "num_steps 4 is out of range: this engine has EAGLE3 with up to 3 steps"),
    ],
)
def test_what_is_not_loaded_is_refused_by_name(asked: Speculative, text: str, codec: TextCodec) -> None:
    async def main() -> list[Answer]:
        async with running(tiny_loaded(3, NUM_STEPS), CONFIG, codec) as ring:
            refused = await ring.ask(PROMPT, SamplingParams(speculative=asked))
            return [refused, await ring.ask(PROMPT, SamplingParams(max_new_tokens=2))]

    refused, served = asyncio.run(main())
    assert refused.rejected is not None and refused.rejected.field == "speculative"
    assert text in refused.rejected.message
    assert served.finish is not None
