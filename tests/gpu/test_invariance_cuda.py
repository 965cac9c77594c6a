"""On a GPU: a row of an op has the same bits whatever rows are beside it, and whatever their number.

Neighbours never matter: of each number of rows, a row at random places among random rows, NaN and the largest numbers.
Numbers of rows do matter where another one chooses another order of sums: `BY_ROWS` names those ops. An op that is
named and has one order, or has more and is not named, is a failure; --enable-deterministic-inference needs it empty.
"""

from collections.abc import Callable, Iterable

import pytest
import torch
from overlap_spec_kernels import (
    DenseWeight,
    Filters,
    Norm,
    Normed,
    OrderedQuantizedWeight,
    OrderedWeight,
    add_rms_norm,
    filter_cutoff,
    gelu_mul,
    gumbel_argmax,
    rms_norm,
    silu_mul,
    top_tokens,
)
from overlap_spec_kernels.attention.latent_heads import head_products
from overlap_spec_kernels.linear.float4 import Float4Matrices, Float4Weight
from overlap_spec_kernels.linear.operand import LinearOperand
from overlap_spec_kernels.linear.packing import Packing, packed, part_of
from overlap_spec_kernels.linear.quantized import QuantizedWeight, Scratch
from support.float4_weights import random_float4
from support.invariance import Op, bits_by_count, judge
from support.orders_of_sums import SHAPES
from torch import Tensor

COUNTS = (1, 2, 3, 4, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256)
TO_PROMPTS = (1, 2, 3, 5, 8, 9, 16, 17, 24, 32, 33, 48, 64, 65, 100, 128, 129, 192, 256, 257, 512, 1024, 2048)
BFLOAT, HALF = torch.bfloat16, torch.float16


def ops_of(weight: LinearOperand, dtype: torch.dtype) -> dict[str, tuple[Op, bool]]:
    """The linear with what is fused to it, and whether it is of gate and up."""
    size_n = weight.shape[0]
    norm = Norm(torch.rand(size_n, device="cuda").to(dtype) + 0.5, 1e-5)

    def added(x: Tensor) -> tuple[Tensor, ...]:
        residual = torch.linspace(-1, 1, size_n, device="cuda").to(x.dtype).expand(len(x), -1).contiguous()
        found = weight.add(x, residual, norm)
        return found.values, found.normalised()

    def scaled(x: Tensor) -> Tensor:
        squares = x.float().square().unflatten(1, (-1, max(16, x.shape[1] // 256))).sum(2).t().contiguous()
        return weight.product(Normed(x, x, squares, 1e-5))

    return {
        "product": (weight.product, False),
        "of a norm": (scaled, False),
        "logits": (weight.logits, False),
        "sum": (added, False),
        "argmax": (lambda x: weight.argmax(x, None), False),
        "gate": (weight.gated, True),
    }


def linears(
    make: Callable[[int, int], LinearOperand | None],
    dtype: torch.dtype = BFLOAT,
    heads: bool = False,
    counts: tuple[int, ...] = COUNTS,
    models: Iterable[str] = SHAPES,
    unrounded: bool = False,
) -> list[list[int]]:
    """Every linear of the three models, in one format; heads, which are in 16 bits, only where rows are few.

    `unrounded`: sums in float32 of all linears too, of which 16 bits hide most of what another order changes.
    """
    found = []
    for model in map(SHAPES.__getitem__, models):
        for linear, (size_n, size_k, gated) in model.items():
            if linear == "head" and not heads:
                continue
            if (weight := make(size_n, size_k)) is None:
                continue
            rows = torch.randn(300, size_k, device="cuda").to(dtype)
            some = tuple(count for count in counts if linear != "head" or count <= 64)
            for name, (op, of_gate) in ops_of(weight, dtype).items():
                is_head = linear == "head"
                wanted = of_gate == gated and is_head == (name in {"logits", "argmax"})
                if wanted or (unrounded and name == "logits" and not is_head):
                    found.append(bits_by_count(op, rows, some))
    return found


def dense(dtype: torch.dtype) -> Callable[[int, int], LinearOperand]:
    return lambda size_n, size_k: DenseWeight((torch.randn(size_n, size_k, device="cuda") * size_k**-0.5).to(dtype))


def ordered(dtype: torch.dtype, biased: bool = False) -> Callable[[int, int], OrderedWeight]:
    def made(size_n: int, size_k: int) -> OrderedWeight:
        matrix = (torch.randn(size_n, size_k, device="cuda") * size_k**-0.5).to(dtype)
        return OrderedWeight(matrix, torch.randn(size_n, device="cuda").to(dtype) if biased else None)

    return made


def quantized(bits: int, group: int, dtype: torch.dtype = BFLOAT) -> Callable[[int, int], LinearOperand | None]:
    def made(size_n: int, size_k: int) -> LinearOperand | None:
        if (part := part_of(bits, group, size_k)) is None:  # such a weight becomes a matrix in 16 bits
            return None
        scales = (torch.rand(size_k // group if group else 1, size_n, device="cuda") + 0.5) * size_k**-0.5
        scales = scales * 0.01 if bits == 8 else (scales * 0.2).to(dtype)
        data = torch.randint(0, 256, (size_n, size_k), dtype=torch.uint8, device="cuda")
        data = data.where(data & 127 != 127, 8) if bits == 8 else packed(data & 15, part)
        scratch = Scratch(torch.empty(size_n * size_k, dtype=dtype, device="cuda"))
        packing = Packing(scales, None, bits, part, group, 1)
        return QuantizedWeight(data, packing, dtype, scratch).in_order_of_device()

    return made


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
def test_linears_in_16_bits(dtype: torch.dtype, model: str) -> None:
    judge("linears in 16 bits", linears(dense(dtype), dtype, heads=True, models=[model]))


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
def test_linears_in_one_order(dtype: torch.dtype, model: str) -> None:
    """As --enable-deterministic-inference has them: whatever the number of rows, those of a prompt included."""
    judge("linears in one order", linears(ordered(dtype), dtype, True, TO_PROMPTS, [model], True))


@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
def test_biased_linears_in_one_order(dtype: torch.dtype) -> None:
    """Each kernel adds the bias to sums in float32; small weights, large ones, and one whose rows fill no stages."""
    judge("biased linears", linears(ordered(dtype, True), dtype, False, TO_PROMPTS, ["SmolLM2", "8B"], True))
    for size_n, size_k in ((5120, 2880), (2880, 4096), (1152, 896)):
        weight, rows = ordered(dtype, True)(size_n, size_k), torch.randn(300, size_k, device="cuda").to(dtype)
        judge(str((size_n, size_k)), [bits_by_count(op, rows, TO_PROMPTS) for op in (weight.product, weight.logits)])


IN_FEW_BITS = [*((bits, group, BFLOAT, model) for bits, group in ((8, 0), (4, 128)) for model in SHAPES)]
IN_FEW_BITS += [(8, 0, HALF, "1B"), (4, 128, HALF, "1B"), (8, 128, BFLOAT, "1B"), (4, 32, BFLOAT, "1B")]


@pytest.mark.parametrize(("bits", "group", "dtype", "model"), IN_FEW_BITS, ids=str)
def test_linears_of_few_bits_in_one_order(bits: int, group: int, dtype: torch.dtype, model: str) -> None:
    def made(size_n: int, size_k: int) -> LinearOperand | None:
        weight = quantized(bits, group, dtype)(size_n, size_k)
        return OrderedQuantizedWeight.of(weight) if isinstance(weight, QuantizedWeight) else None

    found = linears(made, dtype, counts=TO_PROMPTS, models=[model], unrounded=True)
    judge("linears of few bits in one order", found)


@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
def test_norms_between_small_linears(dtype: torch.dtype) -> None:
    """Their squares, and what is scaled by them, before 16 bits hide most of what another order changes."""
    weights = {name: ordered(dtype)(*shape[:2]) for name, shape in SHAPES["SmolLM2"].items() if name != "head"}
    most, size = max(TO_PROMPTS), SHAPES["SmolLM2"]["output"][0]
    norm = Norm((torch.rand(size, device="cuda") + 0.5).to(dtype), 1e-5)
    x, residual = torch.randn(2, most, size, device="cuda").to(dtype)

    def results(rows: slice) -> dict[str, Tensor]:
        added = weights["output"].add(x[rows], residual[rows], norm)
        after = weights["down"].add(weights["gate, up"].gated(added), added.values, norm)
        assert added.squares is not None and after.squares is not None
        return {
            "squares": added.squares.t(),
            "qkv": weights["qkv"].multiplied(added, False, torch.float32),
            "gate": weights["gate, up"].multiplied(added, True, torch.float32),
            "weighted": after.weighted,
            "squares after the gate": after.squares.t(),
            "normalised": after.normalised(),
        }

    expected = results(slice(0, most))
    for count in (*TO_PROMPTS, 1025):
        for first in (0, min(777, most - count)):
            rows = slice(first, first + count)
            for op, found in results(rows).items():
                assert torch.equal(found, expected[op][rows]), f"{op} of {count} rows"


@pytest.mark.parametrize("model", SHAPES)
def test_a_norm_between_linears_in_fp8(model: str) -> None:
    """Sums that large weights scale results by: those of few rows are those of 2,048, which another kernel adds."""
    shapes, weights = SHAPES[model], {}
    for linear in ("output", "down", "qkv", "gate, up"):
        weight = quantized(8, 0)(*shapes[linear][:2])
        assert isinstance(weight, QuantizedWeight)
        weights[linear] = OrderedQuantizedWeight.of(weight)
    size = shapes["output"][0]
    norm = Norm((torch.rand(size, device="cuda") + 0.5).to(BFLOAT), 1e-5)
    residual = torch.randn(max(TO_PROMPTS), size, device="cuda").to(BFLOAT)
    for first in ("output", "down"):
        x = torch.randn(max(TO_PROMPTS), shapes[first][1], device="cuda").to(BFLOAT)

        def results(count: int, first: str = first, x: Tensor = x) -> dict[str, Tensor]:
            added = weights[first].add(x[:count], residual[:count], norm)
            assert added.squares is not None
            found = {"sum": added.values, "weighted": added.weighted, "squares": added.squares.t()}
            found |= {"norm": added.normalised(), "qkv": weights["qkv"].product(added)}
            return found | {"logits": weights["qkv"].logits(added), "gate": weights["gate, up"].gated(added)}

        expected = results(len(x))
        for count in reversed(TO_PROMPTS):
            for name, found in results(count).items():
                assert torch.equal(found, expected[name][:count]), (first, name, count)


@pytest.mark.parametrize("model", ["1B", "8B"])
def test_a_layer_in_one_launch_in_fp8(model: str) -> None:
    """From its attention on: the bits of its linears one after another, again and again from one graph."""
    weights = {}
    for linear in ("output", "gate, up", "down"):
        weight = quantized(8, 0)(*SHAPES[model][linear][:2])
        assert isinstance(weight, QuantizedWeight)
        weights[linear] = OrderedQuantizedWeight.of(weight)
    output, gate_up, down = weights.values()
    size, heads = output.shape
    norms = [Norm((torch.rand(size, device="cuda") + 0.5).to(BFLOAT), 1e-5) for _ in range(2)]
    for rows in range(1, 9):
        x = torch.randn(rows, 2 * heads, device="cuda").to(BFLOAT)[:, heads:]
        residual = torch.randn(rows, size, device="cuda").to(BFLOAT)

        def chained(x: Tensor = x, residual: Tensor = residual) -> Normed:
            found = output.add_mlp(x, residual, norms[0], gate_up, down, norms[1])
            assert found is not None
            return found

        middle = output.add(x, residual, norms[0])
        expected = down.add(gate_up.gated(middle), middle.values, norms[1])
        chained()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [chained() for _ in range(4)]
        for _ in range(10):
            graph.replay()
            for found in results:
                assert torch.equal(found.values, expected.values), rows
                assert torch.equal(found.weighted, expected.weighted), rows
                assert found.squares is not None and expected.squares is not None
                assert torch.equal(found.squares, expected.squares), rows


@pytest.mark.parametrize(("name", "bits", "group"), [("fp8", 8, 0), ("int4", 4, 128)])
def test_linears_of_few_bits(name: str, bits: int, group: int) -> None:
    judge(f"linears in {name}", linears(quantized(bits, group)))


@pytest.mark.parametrize("group", [32, 16])
def test_linears_of_4_bit_floats(group: int) -> None:
    def made(size_n: int, size_k: int) -> LinearOperand:
        return Float4Weight(Float4Matrices.packed(*random_float4(size_n, size_k, group, "cuda"), 1, BFLOAT))

    judge("linears in fp4", linears(made))


ROWWISE: dict[str, tuple[Op, int]] = {
    "norm": (lambda x: rms_norm(x, torch.ones_like(x[0]), 1e-5), 4096),
    "norm of a head": (lambda x: rms_norm(x, torch.ones_like(x[0]).float(), 1e-5), 256),
    "gate of Gemma": (gelu_mul, 2 * 2560),
    "norm of a sum": (lambda x: add_rms_norm(x, (x * 0.5).to(x.dtype), torch.ones_like(x[0]), 1e-5), 4096),
    "gate": (silu_mul, 2 * 14336),
    "most probable tokens": (lambda x: tuple(top_tokens(x.float(), 8)), 128256),
    "filters": (lambda x: tuple(part.squeeze(1) for part in cutoffs(x.float())), 49152),
    "draw": (lambda x: drawn(x.float()), 49152),
}


def cutoffs(logits: Tensor) -> tuple[Tensor, ...]:
    wide = torch.full((len(logits),), 0.9, dtype=torch.float64, device="cuda")
    filters = Filters(torch.full((len(logits),), 50, device="cuda"), wide, 0.01 * wide)
    return tuple(filter_cutoff(logits[:, None].contiguous(), wide, filters))


def drawn(logits: Tensor) -> Tensor:
    count, size = logits.shape
    given = (torch.full((count, 1), 77, device="cuda"), torch.full((count,), 0.9, dtype=torch.float64, device="cuda"))
    ids = torch.arange(size, device="cuda")
    return gumbel_argmax(logits[:, None].contiguous(), *given, torch.full((count,), 5, device="cuda"), ids)


# (heads, I, O): DeepSeek-V2-Lite's keys and values, GLM-4.7-Flash's, and sizes that fill no tile.
@pytest.mark.parametrize("sizes", [(16, 128, 512), (16, 512, 128), (20, 192, 512), (20, 512, 256), (3, 24, 20)])
@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
def test_products_of_heads(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    heads, size_k, size_n = sizes
    weight = (torch.randn(heads, size_k, size_n, device="cuda") * size_k**-0.5).to(dtype)
    rows = torch.randn(300, heads * (size_k + 8), device="cuda").to(dtype)

    def op(x: Tensor) -> Tensor:
        return head_products(x.unflatten(1, (heads, -1))[:, :, 8:], weight).flatten(1)

    expected = torch.einsum("tnk,nko->tno", rows.unflatten(1, (heads, -1))[:, :, 8:].float(), weight.float())
    torch.testing.assert_close(op(rows).float(), expected.flatten(1), rtol=2e-2, atol=2e-2)
    judge("products of heads", [bits_by_count(op, rows, TO_PROMPTS)])


@pytest.mark.parametrize("name", ROWWISE)
def test_ops_on_rows(name: str) -> None:
    op, size = ROWWISE[name]
    judge(name, [bits_by_count(op, torch.randn(300, size, device="cuda").to(BFLOAT), COUNTS)])
