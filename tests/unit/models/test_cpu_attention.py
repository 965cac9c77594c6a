"""Attention that looks things up once a forward is the references of the kernels, layer after layer, to the bit."""

import pytest
import torch
from overlap_spec_kernels.attention.paged_attention import paged_attention_reference
from overlap_spec_kernels.attention.rope_kv_write import rope_kv_write_reference

from overlap_spec.models.interfaces import RowBatch
from overlap_spec.models.layers.attention import Forward, Forwards

PAGE, NQ, NKV, D = 4, 6, 2, 8


def rows_of(page_table: list[list[int]], spans: list[range]) -> RowBatch:
    """Rows at those positions of each request."""
    table = torch.tensor(page_table, dtype=torch.int32)
    positions = torch.tensor([place for span in spans for place in span])
    owners = torch.tensor([owner for owner, span in enumerate(spans) for _ in span])
    cache_rows = table[owners, positions // PAGE].long() * PAGE + positions % PAGE
    starts = torch.tensor([0, *torch.tensor([len(span) for span in spans]).cumsum(0).tolist()], dtype=torch.int32)
    return RowBatch(positions, cache_rows, table, starts, max(map(len, spans)), False)


CASES = {
    "one row": rows_of([[3, 4, 5]], [range(9, 10)]),
    "a window of rows on consecutive pages": rows_of([[3, 4, 5]], [range(6, 10)]),
    "pages apart": rows_of([[7, 1, 4]], [range(6, 10)]),
    "requests of several lengths": rows_of([[7, 1, 4], [2, 3, 0], [5, 0, 0]], [range(6, 10), range(5, 6), range(0, 3)]),
    "a request without rows": rows_of([[7, 1, 4], [2, 3, 0]], [range(0), range(5, 7)]),
}


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rows", CASES.values(), ids=CASES)
def test_layers_are_the_references(rows: RowBatch, dtype: torch.dtype, window: int | None) -> None:
    torch.manual_seed(0)
    cos_sin, forwards = torch.randn(16, D, dtype=dtype), Forwards()
    for _ in range(2):
        k_cache, v_cache = (torch.randn(8, PAGE, NKV, D, dtype=dtype) for _ in range(2))
        other_k, other_v = k_cache.clone(), v_cache.clone()
        q, k, v = torch.randn(len(rows.positions), NQ + 2 * NKV, D, dtype=dtype).split((NQ, NKV, NKV), dim=1)
        assert rows.cache_rows is not None and rows.row_starts is not None
        turned = rope_kv_write_reference(q, k, v, cos_sin, rows.positions, rows.cache_rows, other_k, other_v)
        wanted = paged_attention_reference(
            turned, other_k, other_v, rows.page_table, rows.row_starts, rows.positions, 0.3, window
        )
        forward = forwards.of(rows, cos_sin, PAGE)
        rotated = forward.rotated(torch.cat((q, k), dim=1))
        forward.write(rotated[:, NQ:], v, k_cache, v_cache)
        found = forward.attend(rotated[:, :NQ], k_cache, v_cache, 0.3, window)
        assert torch.equal(rotated[:, :NQ], turned)
        assert torch.equal(k_cache, other_k) and torch.equal(v_cache, other_v)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-14)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("rows", CASES.values(), ids=CASES)
def test_sinks_are_the_references(rows: RowBatch, window: int | None) -> None:
    q, sinks = torch.randn(len(rows.positions), NQ, D), torch.linspace(-2, 3, NQ)
    k_cache, v_cache = (torch.randn(8, PAGE, NKV, D) for _ in range(2))
    assert rows.row_starts is not None
    places = (rows.page_table, rows.row_starts, rows.positions)
    wanted, plain = (
        paged_attention_reference(q, k_cache, v_cache, *places, 0.3, window, sinks=given) for given in (sinks, None)
    )
    found = Forward(rows, torch.randn(16, D), PAGE).attend(q, k_cache, v_cache, 0.3, window, sinks)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert not torch.allclose(found, plain)


def test_sixteen_bits_are_rotated_in_float32_and_rounded_once() -> None:
    rows, cos_sin = CASES["one row"], torch.randn(16, D)
    heads, cache = torch.randn(1, NQ + NKV, D).bfloat16(), torch.zeros(8, PAGE, NKV, D, dtype=torch.bfloat16)
    assert rows.cache_rows is not None
    wanted = rope_kv_write_reference(
        heads[:, :NQ], heads[:, NQ:], heads[:, NQ:], cos_sin, rows.positions, rows.cache_rows, cache, cache.clone()
    )
    assert torch.equal(Forward(rows, cos_sin, PAGE).rotated(heads)[:, :NQ], wanted)


def test_the_next_forward_looks_again() -> None:
    forwards, cos_sin = Forwards(), torch.randn(16, D)
    first = forwards.of(CASES["one row"], cos_sin, PAGE)
    assert forwards.of(CASES["one row"], cos_sin, PAGE) is first
    assert forwards.of(CASES["pages apart"], cos_sin, PAGE).rows is CASES["pages apart"]


def test_layers_with_other_windows_see_other_keys() -> None:
    """In one forward, as in models with windows in every other layer."""
    rows = CASES["a window of rows on consecutive pages"]
    forward, q = Forward(rows, torch.randn(16, D), PAGE), torch.randn(len(rows.positions), NQ, D)
    k_cache, v_cache = (torch.randn(8, PAGE, NKV, D) for _ in range(2))
    found = [forward.attend(q, k_cache, v_cache, 0.3, window) for window in (None, 2, None)]
    assert torch.equal(found[0], found[2])
    assert not torch.allclose(found[0], found[1])
