"""NaN on a GPU: what draws marks its rows, columns exist, and in an engine one request ends and its neighbours do not.

Every way to find an argmax is met: few rows, tiles, many rows in 16 bits, int8.
"""

import asyncio

import pytest
import torch
from overlap_spec_kernels import NO_TOKEN, DenseWeight, gumbel_argmax, linear_argmax, top_tokens
from overlap_spec_kernels.logits.gumbel_argmax import gumbel_argmax_reference
from support.int8_linears import quantize
from support.not_finite import check_ranked, drawing_rows, ranked_rows
from support.ring import RingConfig, running, tiny_loaded

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import ErrorCode, SamplingParams
from overlap_spec.models.layers.linear import Linear

CUDA = torch.device("cuda")
PROMPTS = [[(11 * i + 5 * j) % 90 + 20 for i in range(6 + 3 * j)] for j in range(3)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("columns", [100, 128_256])
def test_nothing_is_drawn_from_what_is_no_number(columns: int, temperature: float) -> None:
    arguments, nothing = drawing_rows(columns, temperature, CUDA)
    found = gumbel_argmax(*arguments)
    assert torch.equal(found, gumbel_argmax_reference(*arguments))
    assert torch.equal(found[:, 0].cpu() == NO_TOKEN, nothing)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 16, 64, 256, 512])
def test_the_argmax_of_nan_is_nothing_and_a_guess_is_some_token(rows: int, dtype: torch.dtype) -> None:
    weight = torch.randn(32_000, 576, device=CUDA).to(dtype)
    x = torch.randn(rows, 576, device=CUDA).to(dtype)
    ids = torch.randperm(32_000, device=CUDA)
    clean = linear_argmax(x, DenseWeight(weight))
    x[rows // 2, 100] = torch.nan
    found, mapped = linear_argmax(x, DenseWeight(weight)), linear_argmax(x, DenseWeight(weight), ids)
    clean[rows // 2] = NO_TOKEN
    assert torch.equal(found, clean)
    sound = clean != NO_TOKEN
    assert torch.equal(mapped[sound], ids[clean[sound]]) and ((mapped >= 0) & (mapped < 32_000)).all()
    if dtype is torch.bfloat16:
        assert quantize(Linear(weight)).argmax(x)[rows // 2] == NO_TOKEN


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("columns", "k"), [(100, 8), (128_256, 20)])
def test_every_ranked_column_exists(columns: int, k: int, dtype: torch.dtype) -> None:
    found = top_tokens(ranked_rows(columns, dtype, CUDA), k)
    check_ranked(found.log_probs, found.columns, columns)


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_request_ends_and_its_neighbours_go_on(codec: TextCodec, topk: int, temperature: float) -> None:
    """In CUDA graphs, twice, so that the second time pages are those that have held NaN.

    The damaged token is one that no answer has and no draft guesses.
    """
    config = RingConfig(topk=topk, place=CUDA, dtype=torch.float32, graph_batch_sizes=(1, 4), num_pages=60, warm=True)
    sampling = SamplingParams(max_new_tokens=20, temperature=temperature, seed=5, ignore_eos=True)
    models = tiny_loaded(10, config.num_steps, config.dtype, CUDA, topk=topk)
    draft = models.proposer.chain.draft if topk > 1 else models.proposer.draft

    async def serve() -> None:
        async with running(models, config, codec) as ring:
            expected = [(await ring.ask(prompt, sampling)).token_ids for prompt in PROMPTS]
            used = {*sum(expected, []), *sum(PROMPTS, []), *draft.target_ids.tolist(), 0, 1}
            damaged = min(set(range(128)) - used)
            models.target.embedding.weight[damaged] = torch.nan
            for _ in range(2):
                prompts = [[*PROMPTS[0][:4], damaged, 30], *PROMPTS]
                first, *others = await asyncio.gather(*(ring.ask(prompt, sampling) for prompt in prompts))
                assert first.rejected is not None and first.rejected.code is ErrorCode.NOT_FINITE
                assert not first.token_ids
                assert [answer.token_ids for answer in others] == expected

    asyncio.run(serve())
