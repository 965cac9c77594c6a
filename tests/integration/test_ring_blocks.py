"""Drafts that guess a chain in one forward, in a whole ring: cached pages hold the context that their blocks see, and
drawn guesses are judged by what they were drawn from.

What a block or a mask row writes is no part of that context: a request takes as many verify steps with cached pages as
without. Beside any chain a window can have the guesses of n-grams.
"""

from dataclasses import replace

import pytest
from support.ring import RingConfig
from support.tiny.methods import BLOCKS, COPIED, FUSED
from test_ring_standalone import PROMPT, answers

from overlap_spec.config import AcceptSettings
from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import SamplingParams

FULL = pytest.mark.full


@pytest.mark.slow
@pytest.mark.full_but_every(3)
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("method", BLOCKS)
def test_cached_pages_hold_the_context(codec: TextCodec, method: str, page_size: int) -> None:
    config = RingConfig(method=method, chunk_tokens=16, page_size=page_size, num_steps=5)
    cold, warm = answers(replace(config, prefix_cache=False), codec), answers(config, codec)
    assert warm[2].usage.cached_tokens >= len(PROMPT) + 32 - page_size
    assert [answer.token_ids for answer in warm] == [answer.token_ids for answer in cold]
    steps = [answer.usage.spec_verify_ct for answer in warm]
    assert steps == [answer.usage.spec_verify_ct for answer in cold]
    assert all(count < 39 for count in steps), "some guess was right"


@pytest.mark.slow
@pytest.mark.full_but_every(2)
@pytest.mark.parametrize("method", BLOCKS)
def test_drawn_guesses_are_judged_by_what_they_were_drawn_from(codec: TextCodec, method: str) -> None:
    """At next to no temperature rejection sampling leaves the greedy tokens, though draft and target draw theirs."""
    config = RingConfig(method=method, chunk_tokens=16)
    cold, drawn = answers(config, codec), replace(config, accept=AcceptSettings(rejection=True))
    nearly = SamplingParams(max_new_tokens=40, temperature=1e-4, seed=3, ignore_eos=True)
    assert [a.token_ids for a in answers(drawn, codec, nearly)] == [a.token_ids for a in cold]
    assert [a.usage.spec_verify_ct for a in answers(drawn, codec)] == [a.usage.spec_verify_ct for a in cold]


@pytest.mark.parametrize("method", [next(iter(FUSED)), *(pytest.param(name, marks=FULL) for name in [*FUSED][1:])])
def test_a_copy_beside_the_chain_saves_steps(codec: TextCodec, method: str) -> None:
    """Answers repeat themselves, and the chain is shorter than what they repeat: the same tokens in fewer steps."""
    config = RingConfig(method=method, chunk_tokens=16, num_steps=3, num_draft_tokens=3 + 1 + COPIED)
    alone = replace(config, method=method.partition(" ")[0], num_draft_tokens=None)
    longer = SamplingParams(max_new_tokens=56, temperature=0.0, seed=0, ignore_eos=True)
    found, wanted = answers(config, codec, longer), answers(alone, codec, longer)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
    steps, without = ([answer.usage.spec_verify_ct for answer in some] for some in (found, wanted))
    assert all(fewer < more for fewer, more in zip(steps, without, strict=True)), (steps, without)
