"""What answers say that they cost, against counts made by hand: by the tokenizers library, and by pages shared.

The tiny tokenizer has a token for each character; a chat's template is written out. A prompt's cached tokens are what
its first admission found, whatever a preemption left in the cache for its second.
"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from support.ring import CLIENT, TIMEOUT_S, Answer, Ring, RingConfig, running, tiny_loaded
from support.tiny.tokenizer import write_tokenizer
from tokenizers import Tokenizer

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import ChatPrompt, Generate, SamplingParams, TextPrompt

GREEDY = SamplingParams(max_new_tokens=20, temperature=0.0, seed=0, ignore_eos=True)
CHAT = [{"role": "user", "content": "Why is the sky blue?"}, {"role": "assistant", "content": "Dust."}]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = write_tokenizer(tmp_path_factory.mktemp("counted"))
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def with_ring(codec: TextCodec, config: RingConfig, use: Callable[[Ring], Awaitable[list[Answer]]]) -> list[Answer]:
    async def main() -> list[Answer]:
        async with running(tiny_loaded(7, config.num_steps, topk=config.topk), config, codec) as ring:
            return await use(ring)

    return asyncio.run(main())


async def ask(ring: Ring, prompt: TextPrompt | ChatPrompt, sampling: SamplingParams) -> Answer:
    request_id = f"r{len(ring.clients.answers)}"
    answer = ring.clients.answers[request_id] = Answer()
    ring.clients.said.put_nowait((CLIENT, Generate(request_id, prompt, sampling)))
    await asyncio.wait_for(answer.done.wait(), TIMEOUT_S)
    return answer


@pytest.mark.full_but_every(2)
@pytest.mark.slow
@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("num_steps", [0, 3])
def test_prompts_and_answers_are_as_long_as_the_tokenizer_says(
    codec: TextCodec, counted: Tokenizer, num_steps: int, topk: int
) -> None:
    texts = ["a", "The sky is", "One, two, three: " * 3]
    template = "<|user|>Why is the sky blue?</s><|assistant|>Dust.</s><|assistant|>"

    async def use(ring: Ring) -> list[Answer]:
        answers = [await ask(ring, TextPrompt(text), GREEDY) for text in texts]
        return [*answers, await ask(ring, ChatPrompt(CHAT), GREEDY)]

    config = RingConfig(num_steps=num_steps, topk=topk, prefix_cache=False)
    for text, answer in zip([*texts, template], with_ring(codec, config, use), strict=True):
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(counted.encode(text, add_special_tokens=False))
        assert answer.usage.completion_tokens == len(answer.token_ids) == 20
        assert answer.usage.cached_tokens == 0
        assert counted.decode(answer.token_ids) == answer.text


EARLIER = [(7 * i) % 100 + 10 for i in range(30)]
NEWCOMER = [*EARLIER[:19], *range(90, 96)]


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize(("num_steps", "lookahead"), [(0, 0), (3, 1)])
@pytest.mark.parametrize("page_size", [1, 4])
def test_cached_tokens_are_those_of_the_first_admission(
    codec: TextCodec, page_size: int, num_steps: int, lookahead: int
) -> None:
    """A newcomer shares 19 tokens with an earlier prompt; an older request takes its pages, and it comes back."""
    config = RingConfig(num_steps=num_steps, page_size=page_size, num_pages=1 + 112 // page_size, num_slots=2)
    long = SamplingParams(max_new_tokens=60, temperature=0.0, seed=0, ignore_eos=True)

    async def use(ring: Ring) -> list[Answer]:
        await ring.ask(EARLIER, SamplingParams(max_new_tokens=1, temperature=0.0, seed=0, ignore_eos=True))
        ring.scheduler.planner._admission.ratio.value = 0.0  # whoever fits now is let in
        older = ring.start("older", [5, 4, 3, 2], long)
        await asyncio.wait_for(older.grew.wait(), TIMEOUT_S)
        ring.scheduler.planner._admission.ratio.value = 0.0
        newcomer = ring.start("newcomer", NEWCOMER, long)
        await asyncio.gather(older.done.wait(), newcomer.done.wait())
        assert ring.scheduler.planner.counters.preempted > 0
        return [older, newcomer]

    older, newcomer = with_ring(codec, config, use)
    assert older.usage is not None and newcomer.usage is not None
    assert older.usage.cached_tokens == 0
    shared = 19 - lookahead  # a key depends on as many tokens more as the draft's rows do
    assert newcomer.usage.cached_tokens == shared - shared % page_size
    assert (newcomer.usage.prompt_tokens, newcomer.usage.completion_tokens) == (25, 60)
