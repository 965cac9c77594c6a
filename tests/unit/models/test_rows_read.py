"""A forward whose last layer goes on with one row of each request: the same results, the same K and V."""

import pytest
import torch
from support.paged_rows import Paged
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import VOCAB, load_tiny_target, tiny_target

from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice
from overlap_spec.speculative.rows import reading_only

F64 = torch.float64
CLOSE = {"rtol": 1e-11, "atol": 1e-12}
COUNTS = [5, 1, 9]


@pytest.mark.slow_but_every(8)
@pytest.mark.parametrize("choice", [DEFAULT_ATTENTION, AttentionChoice(torch_only=True)], ids=str)
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_rows_that_are_read_are_those_of_a_whole_forward(family: str, choice: AttentionChoice) -> None:
    target, aux_layers = load_tiny_target(tiny_target(1, **TINY_FAMILIES[family])), (0,)
    tokens = torch.randint(6, VOCAB, (3 * sum(COUNTS),), generator=torch.Generator().manual_seed(3))
    last = torch.tensor(COUNTS).cumsum(0) - 1
    found = []
    for reads_last in (False, True):
        paged = Paged(num_requests=3)
        cache = paged.cache(target.kv_shape, F64)
        model = target.attach(cache, 64, aux_layers, choice)
        for chunk in tokens.view(3, -1):
            rows = paged.rows(COUNTS)
            output = model.forward(chunk, reading_only(rows, last) if reads_last else rows)
        found.append((output.hidden if reads_last else output.hidden[last], output.aux_hidden, *cache.stacked))
    for whole, read in zip(*found, strict=True):
        torch.testing.assert_close(read, whole, **CLOSE)
