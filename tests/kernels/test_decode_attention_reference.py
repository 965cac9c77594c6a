"""The reference of decode attention against its definition, key by key in float64, and arguments that are refused."""

import pytest
import torch
from kernel_cases.inputs import DecodeInputs, HeadShape, decode_inputs
from overlap_spec_kernels.attention.decode_attention import DecodeScratch, decode_attention
from torch import Tensor

CLOSE = {"rtol": 1e-12, "atol": 1e-13}
CPU = torch.device("cpu")


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Shapes: x [d], angles [d] (cos, then sin) -> [d]."""
    turned = torch.complex(*x.chunk(2)) * torch.complex(*angles.chunk(2))
    return torch.cat((turned.real, turned.imag))


def by_definition(
    inputs: DecodeInputs, heads: HeadShape, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Writes the new rows into the caches of `inputs`, then attends key by key."""
    page_size, group = inputs.k_cache.shape[1], heads.num_heads // heads.num_kv_heads
    width = len(inputs.positions) // len(inputs.page_table)
    rows = inputs.qkv.unflatten(1, (-1, heads.head_dim))
    out = torch.empty(len(rows), heads.num_heads, heads.head_dim, dtype=rows.dtype)
    for index, position in enumerate(inputs.positions.tolist()):
        pages = inputs.page_table[index // width].tolist()
        places = [(pages[key // page_size], key % page_size) for key in range(position + 1)]
        seen = places if window is None else places[-window:]
        q, k, v = rows[index].split((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads))
        inputs.k_cache[places[-1]] = torch.stack([rotated(head, inputs.cos_sin[position]) for head in k])
        inputs.v_cache[places[-1]] = v
        for head in range(heads.num_heads):
            keys = torch.stack([inputs.k_cache[place][head // group] for place in seen])
            scores = keys @ rotated(q[head], inputs.cos_sin[position]) * inputs.scale
            if sinks is not None:
                scores = torch.cat((scores, sinks[head, None]))
            weights = torch.softmax(scores, dim=0)[: len(seen)]
            out[index, head] = weights @ torch.stack([inputs.v_cache[place][head // group] for place in seen])
    return out.flatten(1)


@pytest.mark.slow_but_every(7)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("heads", [HeadShape(2, 2, 8), HeadShape(6, 2, 16)])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("window", [None, 1, 2, 8, 100])
def test_decode_attention(window: int | None, width: int, heads: HeadShape, page_size: int) -> None:
    inputs = decode_inputs(heads, width, [17, 0, 15], page_size, torch.float64)
    other = inputs._replace(k_cache=inputs.k_cache.clone(), v_cache=inputs.v_cache.clone())
    *tensors, scale = inputs
    out = decode_attention(*tensors, DecodeScratch.allocate(heads.head_dim, CPU), scale, window=window)
    torch.testing.assert_close(out, by_definition(other, heads, window), **CLOSE)
    torch.testing.assert_close(inputs.k_cache, other.k_cache, equal_nan=True, **CLOSE)
    torch.testing.assert_close(inputs.v_cache, other.v_cache, equal_nan=True, **CLOSE)


@pytest.mark.parametrize("window", [None, 8])
def test_sinks(window: int | None) -> None:
    heads = HeadShape(6, 2, 16)
    inputs, sinks = decode_inputs(heads, 3, [17, 0], 4, torch.float64), torch.linspace(-2, 3, 6, dtype=torch.float64)
    other = inputs._replace(k_cache=inputs.k_cache.clone(), v_cache=inputs.v_cache.clone())
    *tensors, scale = inputs
    out = decode_attention(*tensors, DecodeScratch.allocate(16, CPU), scale, window=window, sinks=sinks)
    torch.testing.assert_close(out, by_definition(other, heads, window, sinks), **CLOSE)


INPUTS = decode_inputs(HeadShape(6, 2, 32), 2, [9, 3], 4, torch.float32)


@pytest.mark.parametrize(
    ("argument", "replaced"),
    [
        ("qkv", {"qkv": INPUTS.qkv[:, 1:]}),
        ("qkv", {"qkv": INPUTS.qkv.t().contiguous().t()}),
        ("qkv", {"qkv": INPUTS.qkv[:, :128]}),  # k and v alone
        ("qkv", {"qkv": INPUTS.qkv[:, :32], "writes": False}),  # a head of queries for two of the cache
        ("cos_sin", {"cos_sin": INPUTS.cos_sin[:, :4]}),
        ("positions", {"positions": INPUTS.positions.int()}),
        ("page_table", {"page_table": INPUTS.page_table.long()}),
        ("page_table", {"qkv": INPUTS.qkv[:3], "positions": INPUTS.positions[:3]}),
        ("page_table", {"qkv": INPUTS.qkv.repeat(9, 1), "positions": INPUTS.positions.repeat(9)}),
        ("k_cache", {"k_cache": INPUTS.k_cache.half()}),
        ("v_cache", {"v_cache": INPUTS.v_cache[1:]}),
        ("scratch", {"scratch": DecodeScratch.allocate(4, CPU)}),
        ("window", {"window": 0}),
        ("sinks", {"sinks": torch.zeros(2)}),
    ],
)
def test_refused_arguments_are_named(argument: str, replaced: dict[str, Tensor | DecodeScratch | int]) -> None:
    arguments = {**INPUTS._asdict(), "scratch": DecodeScratch.allocate(32, CPU), **replaced}
    with pytest.raises(ValueError, match=f"^{argument}:"):
        decode_attention(**arguments)
