"""What flags say of attention, through the whole ring: tokens stay plain decoding's, whatever the draft sees."""

import asyncio
from dataclasses import replace

import pytest
from support.random_schedules import run_schedules, run_seeds
from support.ring import RingConfig, running, tiny_loaded
from support.tiny.methods import TINY_METHODS

from overlap_spec.config import AcceptSettings, AttentionSettings
from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import SamplingParams

NARROW = AttentionSettings(draft_window=2)
PROMPT = [5, 17, 42, 9, 80, 33, 21, 64]


def answer(config: RingConfig, codec: TextCodec, temperature: float) -> tuple[list[int], int]:
    """Tokens, and the steps that they took."""
    sampling = SamplingParams(max_new_tokens=60, temperature=temperature, seed=4, ignore_eos=True)
    models = tiny_loaded(3, config.num_steps, method=config.method, topk=config.topk)

    async def ask() -> tuple[list[int], int]:
        async with running(models, config, codec) as ring:
            got = await ring.ask(PROMPT, sampling)
            assert got.usage is not None
            return got.token_ids, got.usage.spec_verify_ct

    return asyncio.run(ask())


@pytest.mark.full_but_every(5)
@pytest.mark.slow
@pytest.mark.parametrize("method", TINY_METHODS)
def test_a_draft_that_sees_two_keys_changes_no_token(method: str, codec: TextCodec) -> None:
    config = RingConfig(method=method)
    tokens, _ = answer(config, codec, 0.8)
    narrow, _ = answer(replace(config, attention=NARROW), codec, 0.8)
    assert narrow == tokens


@pytest.mark.slow
def test_nor_does_one_that_draws_trees(codec: TextCodec) -> None:
    config = RingConfig(topk=3)
    tokens, _ = answer(config, codec, 0.8)
    narrow, _ = answer(replace(config, attention=NARROW), codec, 0.8)
    assert narrow == tokens


@pytest.mark.slow
def test_it_does_change_what_is_guessed(codec: TextCodec) -> None:
    config = RingConfig(method="STANDALONE")
    _, steps = answer(config, codec, 0.0)
    _, narrow_steps = answer(replace(config, attention=AttentionSettings(draft_window=1)), codec, 0.0)
    assert narrow_steps != steps


@pytest.mark.slow
def test_2_schedules_with_a_narrow_draft(codec: TextCodec) -> None:
    """Too few for all that must happen; what does happen is plain decoding's."""
    seen = run_seeds(range(3, 5), codec, {"attention": NARROW})
    assert seen["finished"] > 5 and seen["accepted"] > 0, dict(seen)


@pytest.mark.full
def test_10_random_schedules_with_a_narrow_draft(codec: TextCodec) -> None:
    run_schedules(10, codec, attention=NARROW)


@pytest.mark.slow
def test_greedy_verification_is_the_greedy_answer_from_the_second_token_on(codec: TextCodec) -> None:
    """The first token is the prompt's, which is drawn as asked: at this temperature it is the argmax."""
    config = replace(RingConfig(), accept=AcceptSettings(ngram_force_greedy_verify=True))
    greedy, _ = answer(RingConfig(), codec, 0.0)
    assert answer(config, codec, 0.05)[0] == greedy
    hot, _ = answer(RingConfig(), codec, 1.5)
    forced, _ = answer(config, codec, 1.5)
    assert forced[0] == hot[0] and forced != hot
