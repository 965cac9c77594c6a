"""Models with latent attention on a GPU: random schedules get plain decoding's tokens, in graphs and without.

Its pass, with that of `test_latent_attention_cuda.py`, is what a start on a GPU waits for.
"""

from typing import Any

import pytest
import torch
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from support.eight_bits import E4M3
from support.paged_rows import Paged
from support.random_schedules import run_schedules
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import VOCAB, load_tiny_target, tiny_target
from torch import Tensor

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.models.interfaces import RowBatch, TargetModel
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice

PLACE = torch.device("cuda", 0)
FAMILIES = ("deepseek v3", "deepseek v2 lite", "glm 4.7 flash")
FLOAT, BFLOAT = torch.float32, torch.bfloat16
OWN_LAYER = "NEXTN in DeepSeek's layout"


def attached(
    family: str, dtype: torch.dtype, place: torch.device, choice: AttentionChoice
) -> tuple[TargetModel, Paged]:
    """Of the same weights on every place."""
    target, paged = load_tiny_target(tiny_target(1, **TINY_FAMILIES[family]), dtype, place), Paged(num_requests=2)
    cache = KVCache.allocate(target.kv_shape, paged.num_pages, paged.page_size, dtype, place)
    paged.page_table = paged.page_table.to(place)
    return target.attach(cache, 64, attention=choice), paged


def moved(rows: RowBatch, place: torch.device, window: bool) -> RowBatch:
    """A window leaves out what follows from the rest."""
    cache_rows = None if window or rows.cache_rows is None else rows.cache_rows.to(place)
    starts = None if window or rows.row_starts is None else rows.row_starts.to(place)
    return RowBatch(rows.positions.to(place), cache_rows, rows.page_table, starts, rows.max_rows, rows.uniform)


def hidden(family: str, dtype: torch.dtype, place: torch.device, choice: AttentionChoice = DEFAULT_ATTENTION) -> Tensor:
    """Of prompts of nine and of five tokens, then of windows of three."""
    model, paged = attached(family, dtype, place, choice)
    on_host = Paged(num_requests=2)
    tokens = torch.randint(6, VOCAB, (20,), generator=torch.Generator().manual_seed(3)).to(place)
    outputs = []
    for begin, counts, window in ((0, [9, 5], False), (14, [3, 3], True)):
        rows = on_host.rows(counts)
        there = RowBatch(rows.positions, rows.cache_rows, paged.page_table, rows.row_starts, max(counts), window)
        outputs.append(model.forward(tokens[begin : begin + sum(counts)], moved(there, place, window)).hidden)
    return torch.cat(outputs).float().cpu()


@pytest.mark.parametrize("choice", [DEFAULT_ATTENTION, AttentionChoice(torch_only=True), AttentionChoice(most_keys=4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_of_a_cpu(family: str, choice: AttentionChoice) -> None:
    expected = hidden(family, torch.float64, torch.device("cpu"), choice)
    torch.testing.assert_close(hidden(family, FLOAT, PLACE, choice), expected, rtol=1e-4, atol=1e-4)


@sync_mode_warns
@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_is_captured_and_asks_nothing_of_the_host(family: str) -> None:
    model, paged = attached(family, BFLOAT, PLACE, DEFAULT_ATTENTION)
    on_host = Paged(num_requests=2)
    places = on_host.rows([3, 3])
    rows = RowBatch(places.positions.to(PLACE), None, paged.page_table, None, 3, True)
    tokens = torch.randint(6, VOCAB, (4, 6), device=PLACE)
    given = tokens[0].clone()
    model.forward(given, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model.forward(given, rows).hidden
    with synchronization_is_an_error():
        eager = [model.forward(each, rows).hidden.clone() for each in tokens]
        replayed = []
        for each in tokens:
            given.copy_(each)
            graph.replay()
            replayed.append(out.clone())
    assert all(torch.equal(one, other) for one, other in zip(eager, replayed, strict=True))


SCHEDULES: list[dict[str, Any]] = [
    {"family": "deepseek v3", "method": OWN_LAYER},
    {"family": "deepseek v3", "method": "EAGLE3", "topk": 3},
    {"family": "deepseek v3", "method": OWN_LAYER, "kv_dtype": E4M3},
    {"family": "deepseek v2 lite", "method": "EAGLE3"},
    {"family": "deepseek v2 lite", "method": "NGRAM"},
    {"family": "glm 4.7 flash", "method": OWN_LAYER},
    {"family": "glm 4.7 flash", "method": OWN_LAYER, "topk": 3},
    {"family": "glm 4.7 flash", "method": "STANDALONE"},
]


@pytest.mark.parametrize("batch_sizes", [(), (1, 2, 4, 6)], ids=["eager", "graphs"])
@pytest.mark.parametrize("engine", SCHEDULES, ids=lambda engine: " ".join(map(str, engine.values())))
def test_random_schedules(codec: TextCodec, engine: dict[str, Any], batch_sizes: tuple[int, ...]) -> None:
    run_schedules(20, codec, dtype=FLOAT, place=PLACE, graph_batch_sizes=batch_sizes, **engine)
