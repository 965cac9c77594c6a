"""An engine of n-grams guesses from what requests of one salt have said: tokens are plain decoding's in any case."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct
from support.reference.ngram import Limits, runs
from support.ring import CLIENT, TIMEOUT_S, Answer, Ring, RingConfig, running, tiny_loaded
from support.small_tokenizers import smollm2

from overlap_spec.features.ngram.worker import NgramProposer
from overlap_spec.messages import (
    Admit,
    FlushCache,
    Generate,
    SamplingParams,
    Speculative,
    Terms,
    TokenPrompt,
    ToScheduler,
)

CHAINS = Limits(min_match=2, max_breadth=1, by_frequency=True)  # in a log of 256 pages
BASE = RingConfig(method="NGRAM of chains", num_steps=7, num_slots=4, page_size=4, num_pages=300)
GREEDY = SamplingParams(
    max_new_tokens=16, temperature=0.0, seed=0, ignore_eos=True, speculative=Speculative(provenance=True)
)
SALTS = ("", "mine", "yours", "aNUL", "aNULown", "bNUL")


def prompt_of(seed: int, length: int) -> list[int]:
    """Tokens that are all different: nothing is found in them."""
    return random.Random(seed).sample(range(10, 120), length)


def start(ring: Ring, salt: str, prompt: list[int], sampling: SamplingParams = GREEDY) -> Answer:
    """`NUL` in a salt is a NUL at the scheduler: names come from the server, behind what checks a client's salt."""
    request_id = f"r{len(ring.clients.answers)}"
    answer = ring.clients.answers[request_id] = Answer()
    ids = b"".join(token.to_bytes(4, "little") for token in prompt)
    ring.clients.said.put_nowait((CLIENT, Generate(request_id, TokenPrompt(ids), sampling, Terms(cache_salt=salt))))
    return answer


def with_names(ring: Ring) -> None:
    """Let the scheduler be told of NULs."""
    dispatch = ring.scheduler.dispatch

    def named(message: ToScheduler) -> None:
        is_admit = isinstance(message, Admit)
        dispatch(replace_struct(message, salt=message.salt.replace("NUL", "\0")) if is_admit else message)

    ring.scheduler.dispatch = named  # type: ignore[method-assign]  # the method of one object


async def ask(ring: Ring, salt: str, prompt: list[int]) -> Answer:
    answer = start(ring, salt, prompt)
    await asyncio.wait_for(answer.done.wait(), TIMEOUT_S)
    assert answer.rejected is None, answer.rejected
    return answer


def with_ring(config: RingConfig, use: Callable[[Ring], Awaitable[None]]) -> None:
    async def main() -> None:
        async with running(tiny_loaded(3, config.num_steps, method=config.method), config, smollm2()) as ring:
            with_names(ring)
            await use(ring)

    asyncio.run(main())


def plain_tokens(prompts: list[list[int]]) -> list[list[int]]:
    """What plain decoding says."""
    found: list[list[int]] = []

    async def use(ring: Ring) -> None:
        for prompt in prompts:
            found.append((await ask(ring, "", prompt)).token_ids)

    with_ring(replace(BASE, num_steps=0, method="EAGLE3"), use)
    return found


def told(answer: Answer) -> tuple[int, list[tuple[int, int, int]]]:
    """All that an answer tells of its guesses: numbers of those that were made and accepted, and of tokens."""
    assert answer.usage is not None and answer.verified
    return answer.usage.spec_verify_ct, [(each.proposed, each.accepted, count) for each, count in answer.verified]


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_second_owner_is_guessed_as_from_an_empty_log(depth: int) -> None:
    """By all that its answer tells; what the first owner says again is found."""
    prompt = prompt_of(1, 30)
    (plain,) = plain_tokens([prompt])
    alone = runs(prompt, plain, CHAINS, BASE.width)

    async def use(ring: Ring) -> None:
        first = await ask(ring, "mine", prompt)
        assert first.token_ids == plain and first.usage.spec_verify_ct == len(alone)
        for salt in SALTS:
            if salt != "mine":
                other = await ask(ring, salt, prompt)
                assert other.token_ids == plain
                assert told(other) == told(first), f"{salt!r} finds what 'mine' said"
        for salt in SALTS:
            again = await ask(ring, salt, prompt)
            assert again.token_ids == plain
            assert again.usage.spec_verify_ct < len(alone), f"{salt!r} finds nothing of what it said"

    with_ring(replace(BASE, depth=depth), use)


def test_guesses_of_another_owner_are_none_however_much_they_share() -> None:
    """A prompt that goes on as another's did: what follows is not guessed, until its owner has said it."""
    prompt = prompt_of(2, 40)

    async def use(ring: Ring) -> None:
        proposer = ring.executor.decode_step.method.proposer
        assert isinstance(proposer, NgramProposer)
        await ask(ring, "secret", prompt)
        one = replace_struct(GREEDY, max_new_tokens=2)
        for length in range(10, 40, 6):
            guess = await finished(start(ring, "thief", prompt[:length], one))
            unknown = await finished(start(ring, "stranger", prompt[:length], one))
            assert told(guess) == told(unknown)
        assert (proposer.memory.log.owners > 0).sum() >= 3

    with_ring(BASE, use)


async def finished(answer: Answer) -> Answer:
    await asyncio.wait_for(answer.done.wait(), TIMEOUT_S)
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.full), 2])
def test_owners_that_run_together_say_what_plain_decoding_does(depth: int) -> None:
    """Slots change owners, and requests wait for them."""
    prompts = [prompt_of(seed % 3, 20 + seed) for seed in range(5)]
    plain = plain_tokens(prompts)

    async def use(ring: Ring) -> None:
        answers = [start(ring, SALTS[i % len(SALTS)], prompts[i % 5]) for i in range(20)]
        for i, answer in enumerate(answers):
            await finished(answer)
            assert answer.token_ids == plain[i % 5]

    with_ring(replace(BASE, depth=depth, num_slots=3), use)


@pytest.mark.slow
def test_a_flush_forgets_all_owners() -> None:
    prompt = prompt_of(1, 30)

    async def use(ring: Ring) -> None:
        first = await ask(ring, "mine", prompt)
        await ring.idle()
        ring.to_worker.send(FlushCache())
        again = await ask(ring, "mine", prompt)
        assert told(again) == told(first)

    with_ring(replace(BASE, prefix_cache=False), use)
