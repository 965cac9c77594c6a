"""Answers to the last bit of their log-probs: plain decoding of each request alone, from an empty cache."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec
import torch

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import FinishKind, LogProbParams, SamplingParams
from overlap_spec.scheduler.planner import Planner
from overlap_spec.worker.startup.geometry import LoadedModels
from support.random_schedules import Request, random_config, random_requests, run_requests, with_room
from support.ring import Answer, RingConfig, running

Load = Callable[[RingConfig], LoadedModels]
Asked = tuple[list[int], SamplingParams]


def bitwise_requests(count: int, longer: int, max_new_tokens: int) -> list[Asked]:
    """Greedy and drawn, with log-probs, of some prompts too. Prompt j has 2 + `longer` j tokens."""
    return [
        (
            [(7 * i + 3 * j) % 100 + 10 for i in range(2 + longer * j)],
            SamplingParams(
                max_new_tokens=max_new_tokens,
                temperature=0.9 * (j % 2),
                top_p=0.9 if j % 4 == 1 else 1.0,
                seed=j,
                ignore_eos=True,
                log_probs=LogProbParams(top=5, prompt_from=None if j % 3 else 0),
            ),
        )
        for j in range(count)
    ]


def answers_of(
    requests: Sequence[Asked],
    config: RingConfig,
    codec: TextCodec,
    load: Load,
    together: bool = True,
) -> list[Answer]:
    """One ring's, all at once or one after another."""

    async def main() -> list[Answer]:
        async with running(load(config), config, codec) as ring:
            if together:
                return list(await asyncio.gather(*(ring.ask(*request) for request in requests)))
            return [await ring.ask(*request) for request in requests]

    return asyncio.run(main())


def alone(requests: Sequence[Asked], codec: TextCodec, load: Load, **engine: object) -> list[Answer]:
    """By plain decoding, each prompt in one chunk. `engine`: in another type than float32, or on a GPU."""
    config = replace(
        RingConfig(num_steps=0, num_slots=1, prefix_cache=False, depth=1, chunk_tokens=128, max_len=400),
        **({"dtype": torch.float32} | engine),
    )
    return answers_of(requests, config, codec, load, together=False)


def assert_same_bits(answer: Answer, expected: Answer, what: str) -> None:
    """Tokens and all log-probs; an answer that was aborted is the beginning of what is expected."""
    assert answer.finish is not None
    count = len(answer.token_ids)
    if answer.finish.kind is not FinishKind.ABORT:
        assert count == len(expected.token_ids), what
        assert answer.prompt_log_probs == expected.prompt_log_probs, what
    assert answer.token_ids == expected.token_ids[:count], what
    assert answer.log_probs == expected.log_probs[:count], what


def assert_bits_of_alone(
    requests: Sequence[Asked], ways: Mapping[str, RingConfig], codec: TextCodec, load: Load, **engine: object
) -> None:
    """`engine`: of all rings, those of `ways` too."""
    only = alone(requests, codec, load, **engine)
    for way, config in ways.items():
        for index, answer in enumerate(answers_of(requests, replace(config, **engine), codec, load)):
            assert_same_bits(answer, only[index], f"{way}, request {index}")


def preempting(every: int) -> tuple[type[Planner], str, Callable[..., object]]:
    """For `monkeypatch.setattr`: the youngest request is preempted before each such decode step."""
    decode, steps = Planner._decode, itertools.count(1)

    def after_preempting(planner: Planner, narrowing: int = 0) -> object:
        running = planner._queues.running
        if next(steps) % every == 0 and len(running) > 1:
            planner._preempt(running[-1])
        return decode(planner, narrowing)

    return Planner, "_decode", after_preempting


def turns_of(
    config: RingConfig, codec: TextCodec, load: Load, sizes: tuple[int, int], engine: Mapping[str, object]
) -> list[int]:
    """Turns of a conversation, each asked twice, then all of them at once, have the bits of each turn alone.

    `sizes`: tokens of the first prompt, and of what each later one adds to the answer before it. Returns how many
    tokens of those that were asked one after another were cached.
    """
    first, more = sizes
    text, sampling = [(7 * i) % 100 + 10 for i in range(first)], bitwise_requests(2, 0, 16)[1][1]
    asked: list[Asked] = []
    expected: list[Answer] = []
    config = replace(config, **engine)
    for turn in range(3):
        asked.append((text, sampling))
        expected += alone(asked[-1:], codec, load, **engine)
        text = [*text, *expected[-1].token_ids, *[(11 * i + turn) % 100 + 10 for i in range(more)]]

    async def main() -> list[Answer]:
        async with running(load(config), config, codec) as ring:
            after = [await ring.ask(*request) for request in asked for _ in range(2)]
            return after + list(await asyncio.gather(*(ring.ask(*request) for request in asked)))

    found = asyncio.run(main())
    for index, (answer, turn) in enumerate(zip(found, (0, 0, 1, 1, 2, 2, 0, 1, 2), strict=True)):
        assert_same_bits(answer, expected[turn], f"turn {turn}, answer {index}")
    return [answer.usage.cached_tokens for answer in found[:6]]


class BitwiseOracle:
    """Of requests that are known beforehand."""

    def __init__(self, requests: Sequence[Request], codec: TextCodec, load: Load, **engine: object) -> None:
        asked = [(request.prompt, request.sampling) for request in requests]
        keys = map(_key, *zip(*asked, strict=True))
        self._expected = dict(zip(keys, alone(asked, codec, load, **engine), strict=True))

    def check(self, prompt: list[int], sampling: SamplingParams, answer: Answer, what: str) -> None:
        """See `Oracle`."""
        assert_same_bits(answer, self._expected[_key(prompt, sampling)], what)


def _key(prompt: list[int], sampling: SamplingParams) -> tuple[tuple[int, ...], bytes]:
    return tuple(prompt), msgspec.msgpack.encode(sampling)


def run_bitwise_schedule(seed: int, codec: TextCodec, load: Load, **engine: object) -> Counter[str]:
    """A random schedule: arrivals, aborts, preemption, chunks, prefix hits, widths. Returns what happened."""
    rng, crowded = random.Random(f"bits {seed}"), seed % 2 == 0
    config = with_room(replace(random_config(rng, crowded), chunks_seed=seed if seed % 3 else None, **engine))
    requests = [with_log_probs(request, rng) for request in random_requests(rng, rng.randint(5, 9), crowded)]
    of_device = {name: engine[name] for name in ("dtype", "place", "attention", "kv_dtype", "warm") if name in engine}
    oracle = BitwiseOracle(requests, codec, load, **of_device)
    return run_requests(requests, load(config), config, codec, oracle, f"schedule {seed}")


def with_log_probs(request: Request, rng: random.Random) -> Request:
    """Of all tokens, for some requests of the prompt's too."""
    asked = LogProbParams(top=3, token_ids=(5, 77), prompt_from=rng.choice([None, None, 0]))
    return replace(request, sampling=msgspec.structs.replace(request.sampling, log_probs=asked))
