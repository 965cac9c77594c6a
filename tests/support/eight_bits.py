"""Arguments of attention ops with caches of 8 bits, and how they are compared; answers over such pages."""

import asyncio
from dataclasses import replace
from typing import Any, TypeVar

import torch
from overlap_spec_kernels.attention.kv_format import KVScales, stored
from torch import Tensor

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import SamplingParams
from support.ring import RingConfig, running, tiny_loaded

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

PROMPTS = [[(7 * i) % 100 + 10 for i in range(length)] for length in (5, 40)]
SAMPLINGS = [
    SamplingParams(max_new_tokens=24, temperature=0.0, seed=0, ignore_eos=True),
    SamplingParams(max_new_tokens=24, temperature=0.9, top_p=0.9, seed=5, ignore_eos=True),
]
Tokens = list[list[int]]
Inputs = TypeVar("Inputs", bound=Any)  # one of the named tuples of `kernel_cases.inputs`


def in_8_bits(inputs: Inputs, kv_dtype: torch.dtype, scales: KVScales) -> Inputs:
    """The same arguments with caches of this format."""
    k, v = stored(inputs.k_cache, kv_dtype, scales.k), stored(inputs.v_cache, kv_dtype, scales.v)
    return inputs._replace(k_cache=k, v_cache=v)


def assert_close_in_8_bits(actual: Tensor, expected: Tensor) -> None:
    """The same values, but for one in a hundred that may be the next one of the format."""
    ours, theirs = (_in_order(tensor) for tensor in (actual, expected))
    assert torch.equal(actual.float().isnan(), expected.float().isnan())
    steps = (ours - theirs)[~actual.float().isnan()].abs()
    assert steps.max() <= 1 and (steps > 0).float().mean() <= 0.01, (steps.max(), (steps > 0).float().mean())


def _in_order(values: Tensor) -> Tensor:
    """Bytes as integers in the order of the values that they stand for."""
    bits = values.view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)


def answers(codec: TextCodec, config: RingConfig) -> tuple[Tokens, int]:
    """All tokens, and the number of verify steps."""

    async def main() -> tuple[Tokens, int]:
        shape = replace(config, kv_dtype=E4M3).shape  # the same checkpoint in every format
        models = tiny_loaded(
            3,
            config.num_steps,
            config.dtype,
            config.place,
            method=config.method,
            family=config.family,
            topk=config.topk,
            **shape,
        )
        async with running(models, config, codec) as ring:
            found = [await ring.ask(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS]
        return [answer.token_ids for answer in found], sum(answer.usage.spec_verify_ct for answer in found)

    return asyncio.run(main())
