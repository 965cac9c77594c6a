"""What runs attention changes no result, and the narrower of two windows counts."""

import pytest
import torch
from support.paged_rows import Paged
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import CPU, VOCAB, load_tiny_target, tiny_target
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice

F64 = torch.float64


def window_of(rows: RowBatch) -> RowBatch:
    """The same rows, as windows are on a GPU: what follows from the rest is left out."""
    return RowBatch(rows.positions, None, rows.page_table, None, rows.max_rows, True)


def hidden(choice: AttentionChoice, family: str = "llama") -> Tensor:
    """Of a window of three after a prompt of nine, for two requests."""
    target = load_tiny_target(tiny_target(1, **TINY_FAMILIES[family]))
    paged = Paged(num_requests=2)
    cache = KVCache.allocate(target.kv_shape, paged.num_pages, paged.page_size, F64, CPU)
    model = target.attach(cache, 64, attention=choice)
    tokens = torch.randint(6, VOCAB, (24,), generator=torch.Generator().manual_seed(3))
    model.forward(tokens[:18], paged.rows([9, 9]))
    return model.forward(tokens[18:], window_of(paged.rows([3, 3]))).hidden


@pytest.mark.parametrize("family", ["llama", "mistral with a window", "gpt oss", "deepseek v3"])
@pytest.mark.parametrize("choice", [AttentionChoice(torch_only=True), AttentionChoice(prefill_kernel=True)], ids=str)
def test_other_operations_give_the_same(choice: AttentionChoice, family: str) -> None:
    torch.testing.assert_close(hidden(choice, family), hidden(DEFAULT_ATTENTION, family), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "glm 4.7 flash"])
def test_torch_calls_no_kernel(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where a GPU would: the ops that choose by device are not asked."""

    def refuse(*args: object, **named: object) -> None:
        raise AssertionError("an op was called")

    for op in ("decode_attention", "paged_attention", "rope_kv_write", "tree_attention"):
        monkeypatch.setattr(f"overlap_spec.models.layers.attention.{op}", refuse)
    for op in ("latent_attention", "latent_tree_attention", "rope_latent_write"):
        monkeypatch.setattr(f"overlap_spec.models.layers.latent.{op}", refuse)
    hidden(AttentionChoice(torch_only=True), family)
    with pytest.raises(AssertionError, match="an op was called"):
        hidden(DEFAULT_ATTENTION, family)


@pytest.mark.parametrize("family", ["llama", "deepseek v3"])
def test_a_row_sees_no_more_keys_than_were_asked_for(family: str) -> None:
    windowed = hidden(AttentionChoice(most_keys=7), family)
    torch.testing.assert_close(windowed, hidden(AttentionChoice(torch_only=True, most_keys=7), family))
    torch.testing.assert_close(hidden(AttentionChoice(most_keys=12), family), hidden(DEFAULT_ATTENTION, family))
    assert (windowed - hidden(DEFAULT_ATTENTION, family)).abs().max() > 1e-3


def test_the_narrower_window_counts() -> None:
    assert AttentionChoice(most_keys=8).windows((None, 4, 16)) == (8, 4, 8)
    assert DEFAULT_ATTENTION.windows((None, 4)) == (None, 4)
