"""Models some of whose layers recur, on a GPU: a CPU's numbers, nothing asked of the host, plain decoding's tokens."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from overlap_spec_kernels import norm_heads, normalised
from overlap_spec_kernels.norm.norm_heads import norm_heads_reference
from overlap_spec_kernels.norm.silu_mul import (
    mul_by_gates,
    mul_by_gates_reference,
    mul_by_share,
    mul_by_share_reference,
)
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from support.paged_rows import Paged, rows_on
from support.random_schedules import run_schedules
from support.ring import Answer, RingConfig, running, tiny_loaded
from support.tiny.families import HYBRIDS, TINY_FAMILIES
from support.tiny.models import VOCAB, load_tiny_target, tiny_target
from torch import Tensor

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import SamplingParams
from overlap_spec.models.interfaces import RowBatch, StateRows, TargetModel
from overlap_spec.models.kv_cache import KVCache, SlotSizes
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice
from overlap_spec.models.layers.linear import Linear
from overlap_spec.models.layers.norm import WideRMSNorm
from overlap_spec.models.recurrent_state import RecurrentState
from overlap_spec.scheduler.snapshots import SnapshotStates

PLACE, CPU = torch.device("cuda", 0), torch.device("cpu")
FLOAT, BFLOAT = torch.float32, torch.bfloat16
WIDTH, SLOTS = 4, 3
GRANITE = ("granite 4", "granite 4 moe")
SHAPES: dict[str, dict[str, Any]] = {
    **{family: TINY_FAMILIES[family] for family in (*HYBRIDS, *GRANITE)},
    "heads of 256, states of 128": TINY_FAMILIES["qwen3 next"]
    | {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "hidden": 64},
    "mamba 2, states of 128": TINY_FAMILIES["granite 4 moe"]
    | {"hidden": 128, "head_dim": 64, "mamba_d_state": 128, "mamba_proj_bias": True, "mamba_d_conv": 3},
}


class Driven:
    """A model that is called by hand. Requests have the slots 2 and 0."""

    def __init__(
        self, shape: str, dtype: torch.dtype, place: torch.device, choice: AttentionChoice = DEFAULT_ATTENTION
    ) -> None:
        target, self.paged = load_tiny_target(tiny_target(1, **SHAPES[shape]), dtype, place), Paged(num_requests=2)
        sizes = SlotSizes(SLOTS, WIDTH, dtype)
        cache = KVCache.allocate(target.kv_shape, self.paged.num_pages, self.paged.page_size, dtype, place, slots=sizes)
        self.model: TargetModel = target.attach(cache, 64, attention=choice)
        self.state: RecurrentState = cache.state
        self.place, self.slots = place, torch.tensor([2, 0], device=place)

    def rows(self, counts: list[int], accepted: list[int] | None) -> RowBatch:
        """Of prompts; with `accepted` of windows, of which so many columns stay."""
        rows, is_window = self.paged.rows(counts, commit=accepted is None), accepted is not None
        if accepted is not None:
            lengths = zip(self.paged.lengths, accepted, strict=True)
            self.paged.lengths = [length + columns for length, columns in lengths]
        return rows_on(self.place, rows, is_window, StateRows(self.slots, are_final=not is_window))


# Prompts in two chunks, the second of one request alone, then windows of which some columns are rejected.
FORWARDS = (([9, 5], None), ([2, 3], None), ([4, 4], [2, 4]), ([4, 4], [1, 3]), ([1, 1], [1, 1]), ([3, 3], [3, 1]))


def hidden(shape: str, dtype: torch.dtype, place: torch.device, choice: AttentionChoice = DEFAULT_ATTENTION) -> Tensor:
    """Logits of all rows of `FORWARDS`. Shapes: -> [T, V]."""
    driven, draw = Driven(shape, dtype, place, choice), torch.Generator().manual_seed(3)
    outputs = []
    for counts, accepted in FORWARDS:
        tokens = torch.randint(6, VOCAB, (sum(counts),), generator=draw).to(place)
        output = driven.model.forward(tokens, driven.rows(counts, accepted))
        outputs.append(driven.model.logits(output.final).compute())
    return torch.cat(outputs).double().cpu()


@pytest.mark.parametrize("choice", [DEFAULT_ATTENTION, AttentionChoice(torch_only=True)], ids=["kernels", "torch"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_a_cpu(shape: str, choice: AttentionChoice) -> None:
    expected = hidden(shape, torch.float64, CPU)
    assert expected.std() > 0.5
    torch.testing.assert_close(hidden(shape, FLOAT, PLACE, choice), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_in_bfloat16_are_near(shape: str) -> None:
    expected, found = hidden(shape, torch.float64, CPU), hidden(shape, BFLOAT, PLACE)
    assert (found - expected).pow(2).mean().sqrt() < 0.1 * expected.std()


@sync_mode_warns
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_window_is_captured_and_asks_nothing_of_the_host(shape: str, dtype: torch.dtype) -> None:
    eager, captured = Driven(shape, dtype, PLACE), Driven(shape, dtype, PLACE)
    tokens = torch.randint(6, VOCAB, (4, 2 * WIDTH), device=PLACE)
    for driven in (eager, captured):
        driven.model.forward(tokens[0, : 5 + 3], driven.rows([5, 3], None))
    steps = [eager.rows([WIDTH, WIDTH], accepted) for accepted in ([1, 3], [4, 1], [2, 2], [1, 1])]
    given, rows = tokens[0].clone(), replace(steps[0], positions=steps[0].positions.clone())
    captured.model.forward(given, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.model.forward(given, rows).hidden
    with synchronization_is_an_error():
        expected = [eager.model.forward(each, step).hidden.clone() for each, step in zip(tokens, steps, strict=True)]
        replayed = []
        for each, step in zip(tokens, steps, strict=True):
            given.copy_(each)
            rows.positions.copy_(step.positions)
            graph.replay()
            replayed.append(out.clone())
    assert all(torch.equal(one, other) for one, other in zip(expected, replayed, strict=True))
    for one, other in zip(eager.state.stacks, captured.state.stacks, strict=True):
        assert torch.equal(one, other)


BATCH_SIZES = [pytest.param((), id="eager"), pytest.param((1, 2, 4, 6), id="graphs")]
SCHEDULES = [
    *(("qwen3 next", method) for method in ("EAGLE3", "NEXTN", "NGRAM of chains", "STANDALONE", "EAGLE")),
    *((family, "NEXTN") for family in HYBRIDS[1:]),
    *((GRANITE[0], method) for method in ("NGRAM of chains", "STANDALONE")),
    (GRANITE[1], "EAGLE3"),
]


@pytest.mark.parametrize("batch_sizes", BATCH_SIZES)
@pytest.mark.parametrize(("family", "method"), SCHEDULES)
def test_random_schedules(codec: TextCodec, family: str, method: str, batch_sizes: tuple[int, ...]) -> None:
    engine = {"family": family, "method": method, "graph_batch_sizes": batch_sizes}
    run_schedules(20, codec, dtype=FLOAT, place=PLACE, **engine)


GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0, seed=0, ignore_eos=True)
DRAWN = SamplingParams(max_new_tokens=24, temperature=0.9, seed=7, ignore_eos=True)
A = [(7 * i) % 100 + 10 for i in range(150)]
B = [(11 * i + 3) % 100 + 10 for i in range(140)]
TURNS = [(A, GREEDY), (B, DRAWN), (A, GREEDY), (B, DRAWN), ([*A, *B[:30]], GREEDY), (A[:70] + B[:30], GREEDY)]
CONFIG = RingConfig(
    family="qwen3 next",
    num_slots=2,
    page_size=16,
    num_pages=60,
    chunk_tokens=64,
    max_len=400,
    dtype=FLOAT,
    place=PLACE,
    num_snapshots=4,
)


def served(config: RingConfig, codec: TextCodec) -> tuple[list[list[int]], list[int], Counter[str]]:
    """The tokens of `TURNS`, one after another, and how many of each prompt were cached."""
    models = tiny_loaded(3, config.num_steps, FLOAT, config.place, config.method, config.family)
    counts: Counter[str] = Counter()

    async def ask_all() -> list[Answer]:
        async with running(models, config, codec) as ring:
            answers = [await ring.ask(prompt, sampling) for prompt, sampling in TURNS]
            states = ring.scheduler.queues.memory.states
            if isinstance(states, SnapshotStates):
                counts.update(begun=states.num_begun, restored=states.num_restored)
            return answers

    answers = asyncio.run(ask_all())
    return [answer.token_ids for answer in answers], [answer.usage.cached_tokens for answer in answers], counts


TURNING = [*((CONFIG.family, method) for method in ("NEXTN", "NGRAM of chains", "EAGLE3")), (GRANITE[0], "EAGLE3")]


@pytest.mark.parametrize("batch_sizes", BATCH_SIZES)
@pytest.mark.parametrize(("family", "method"), TURNING)
def test_a_then_b_then_a_answers_alike(
    codec: TextCodec, family: str, method: str, batch_sizes: tuple[int, ...]
) -> None:
    """Every answer is that of plain decoding without a cache."""
    config = replace(CONFIG, family=family, method=method)
    tokens, cached, counts = served(replace(config, graph_batch_sizes=batch_sizes), codec)
    cold, none, _ = served(replace(config, num_snapshots=0, num_steps=0), codec)
    assert tokens == cold and not any(none)
    assert cached == [0, 0, 128, 128, 128, 0]
    assert counts == {"begun": 6, "restored": 3}


@pytest.mark.parametrize("num_rows", [1, 4, 33, 300])
@pytest.mark.parametrize("dtype", [BFLOAT, torch.float16], ids=str)
def test_norms_with_weights_in_float32(dtype: torch.dtype, num_rows: int) -> None:
    """Against float64, rounded once; a linear in 16 bits leaves a part of the norm to the next one."""
    draw = torch.Generator(PLACE).manual_seed(num_rows)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device=PLACE).to(dtype)

    x, residual, matrix = drawn(num_rows, 1024), drawn(num_rows, 512), drawn(512, 1024) / 32
    weight = torch.rand(512, generator=draw, device=PLACE) + 0.5
    norm = WideRMSNorm(weight, 1e-6)
    exact = WideRMSNorm(weight.double(), 1e-6)
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(norm(residual).double(), exact(residual.double()), **close)
    for linear in (Linear(matrix), Linear(matrix, torch.zeros(512, dtype=dtype, device=PLACE))):
        found = norm.join(linear, x, residual)
        total = residual.double() + x.double() @ matrix.double().t()
        torch.testing.assert_close(found.values.double(), total, rtol=0.02, atol=0.05)
        torch.testing.assert_close(normalised(found).double(), exact(total), rtol=0.02, atol=0.05)
    qkv = drawn(num_rows, 6 * 64)
    heads = norm_heads_reference(qkv.double(), weight[:64].double(), weight[64:128].double(), 2, 1e-6)
    torch.testing.assert_close(
        norm_heads(qkv, weight[:64], weight[64:128].contiguous(), 2, 1e-6).double(), heads, **close
    )


@pytest.mark.parametrize("num_rows", [1, 4, 100])
@pytest.mark.parametrize("dtype", [BFLOAT, torch.float16, FLOAT], ids=str)
def test_a_shared_expert_has_its_share(dtype: torch.dtype, num_rows: int) -> None:
    draw = torch.Generator(PLACE).manual_seed(num_rows)
    values, x, weight = (
        torch.randn(rows, 2048, generator=draw, device=PLACE).to(dtype) for rows in (num_rows, num_rows, 1)
    )
    weight = weight / 32
    expected = mul_by_share_reference(values.double(), x.double(), weight.double())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(mul_by_share(values, x, weight).double(), expected, rtol=2 * eps, atol=1e-5)


@pytest.mark.parametrize("gates", [16, 4096], ids=["of heads", "of columns"])
@pytest.mark.parametrize("dtype", [BFLOAT, torch.float16, FLOAT], ids=str)
def test_what_heads_find_has_its_gates(dtype: torch.dtype, gates: int) -> None:
    """With the same bits in any number of rows."""
    draw = torch.Generator(PLACE).manual_seed(gates)
    values, of_rows = (torch.randn(100, size, generator=draw, device=PLACE).to(dtype) for size in (4096, gates))
    found, expected = mul_by_gates(values, of_rows), mul_by_gates_reference(values.double(), of_rows.double())
    torch.testing.assert_close(found.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    for count in (1, 8, 65):
        assert torch.equal(mul_by_gates(values[:count], of_rows[:count]), found[:count])
