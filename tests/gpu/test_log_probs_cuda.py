"""Log-probs on a GPU: kernels against their references, and graphs against steps launched operation by operation."""

import asyncio

import pytest
import torch
from overlap_spec_kernels import log_prob_rows, top_tokens
from support.log_prob_oracle import LogProbOracle
from support.ring import Answer, RingConfig, running, tiny_loaded

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import LogProbParams, SamplingParams

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("given_rows", [False, True])
@pytest.mark.parametrize(("num_slots", "longest", "size"), [(1, 1, 49152), (3, 4, 128256), (64, 2, 1000)])
def test_log_prob_rows(num_slots: int, longest: int, size: int, given_rows: bool) -> None:
    torch.manual_seed(0)
    num_rows = num_slots * longest
    logits = torch.randn(num_rows, size, device="cuda") * 5
    top = top_tokens(logits, 20)
    tokens = torch.randint(size, (num_rows,), device="cuda")
    slots = torch.arange(num_slots, device="cuda")
    listed = torch.randint(size, (num_slots, 32), device="cuda")
    rows = torch.randperm(num_rows, device="cuda") if given_rows else None
    found = log_prob_rows(logits, top, tokens, slots, listed, rows)
    own = torch.arange(num_rows, device="cuda") if rows is None else rows
    expected = logits.double().log_softmax(1)[own, tokens]
    torch.testing.assert_close(found[:, 0], expected, rtol=1e-5, atol=2e-5)
    exact = logits[own, tokens] - top.log_totals[own]
    assert torch.equal(found[:, 0].float(), exact) and torch.equal(found[:, 1].long(), tokens)


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("graph_batch_sizes", [(), (1, 4)])
def test_a_ring(codec: TextCodec, topk: int, graph_batch_sizes: tuple[int, ...]) -> None:
    """The oracle's, which runs on a CPU in float64; so do steps without graphs."""
    place = torch.device("cuda")
    dtype, tolerance = (torch.float32, 1e-4) if graph_batch_sizes else (torch.float64, 1e-9)
    config = RingConfig(
        num_steps=3, topk=topk, num_pages=400, place=place, dtype=dtype, graph_batch_sizes=graph_batch_sizes
    )
    prompts = [[(7 * i + j) % 100 + 10 for i in range(5 + 3 * j)] for j in range(4)]
    asked = LogProbParams(top=20, token_ids=(3, 4), prompt_from=0), LogProbParams(top=1), None, LogProbParams()
    samplings = [
        SamplingParams(max_new_tokens=12, seed=3, ignore_eos=True, temperature=j % 2, log_probs=asked[j])
        for j in range(4)
    ]

    async def ask_all() -> list[Answer]:
        async with running(tiny_loaded(10, 3, dtype, place=place, topk=topk), config, codec) as ring:
            return await asyncio.gather(*map(ring.ask, prompts, samplings))

    oracle = LogProbOracle(10, tolerance=tolerance)
    for index, answer in enumerate(asyncio.run(ask_all())):
        oracle.check(prompts[index], samplings[index], answer, f"request {index}")
    oracle.close()
