"""A language model as draft in a whole ring: what the prefix cache hands on is as good as what was just computed.

Guesses follow from the tokens alone where the draft's KV is right, so a request takes as many verify steps with cached
pages as without: pages of prompts, and pages that decode steps wrote.
"""

import asyncio
from dataclasses import replace

import pytest
from support.ring import Answer, RingConfig, running, tiny_loaded

from overlap_spec.config import AcceptSettings
from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import SamplingParams

PROMPT = [(7 * i) % 100 + 10 for i in range(45)]
GREEDY = SamplingParams(max_new_tokens=40, temperature=0.0, seed=0, ignore_eos=True)
BASE = RingConfig(method="STANDALONE", chunk_tokens=16)


def answers(config: RingConfig, codec: TextCodec, sampling: SamplingParams = GREEDY) -> list[Answer]:
    """To the prompt, to the prompt again, and to both with the answer's beginning behind it."""

    async def main() -> list[Answer]:
        models = tiny_loaded(7, config.num_steps, method=config.method)
        async with running(models, config, codec) as ring:
            first = await ring.ask(PROMPT, sampling)
            longer = PROMPT + first.token_ids[:33]
            return [first, await ring.ask(PROMPT, sampling), await ring.ask(longer, sampling)]

    return asyncio.run(main())


@pytest.mark.full_but_every(3)
@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_cached_pages_hold_the_drafts_kv_too(codec: TextCodec, depth: int, page_size: int) -> None:
    config = replace(BASE, depth=depth, page_size=page_size)
    cold = answers(replace(config, prefix_cache=False), codec)
    warm = answers(config, codec)
    assert [answer.usage.cached_tokens for answer in cold] == [0, 0, 0]
    assert warm[1].usage.cached_tokens >= len(PROMPT) - page_size, "the keys are single tokens"
    assert warm[2].usage.cached_tokens >= len(PROMPT) + 33 - page_size
    assert [answer.token_ids for answer in warm] == [answer.token_ids for answer in cold]
    steps = [answer.usage.spec_verify_ct for answer in warm]
    assert steps == [answer.usage.spec_verify_ct for answer in cold]
    assert all(count < 39 for count in steps), "some guess was right"


@pytest.mark.slow
def test_drawn_guesses_are_judged_by_what_they_were_drawn_from(codec: TextCodec) -> None:
    """At next to no temperature rejection sampling leaves the greedy tokens, though draft and target draw theirs."""
    cold = answers(BASE, codec)
    drawn = replace(BASE, accept=AcceptSettings(rejection=True))
    nearly = SamplingParams(max_new_tokens=40, temperature=1e-4, seed=3, ignore_eos=True)
    assert [a.token_ids for a in answers(drawn, codec, nearly)] == [a.token_ids for a in cold]
    assert [a.usage.spec_verify_ct for a in answers(drawn, codec)] == [a.usage.spec_verify_ct for a in cold]
