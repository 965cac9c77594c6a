"""The kernels of mixtures of experts under the interpreter: the router's choice, and the experts' weighted sum."""

from collections.abc import Callable

import pytest
import torch
from overlap_spec_kernels.experts import experts_mlp, products, quantized_products
from overlap_spec_kernels.experts.best_of_groups import (
    Grouping,
    _best_of_groups_triton,
    best_of_groups_reference,
    sigmoid_scores,
    softmax_scores,
)
from overlap_spec_kernels.experts.experts_mlp import (
    Biases,
    _experts_add_triton,
    _experts_mlp_triton,
    experts_add_reference,
    experts_mlp_reference,
)
from overlap_spec_kernels.experts.products import Clamp, Places, places_of, tile_of
from overlap_spec_kernels.experts.route import (
    Common,
    Rows,
    _partial_logits,
    _route_triton,
    route_reference,
    router_logits_reference,
    row_parts,
)
from overlap_spec_kernels.experts.stacks import QuantizedStack
from overlap_spec_kernels.experts.sum_of_experts import Routing, expert_rows
from overlap_spec_kernels.norm.normed import Norm, Normed, Unscaled, _normalised_triton, normalised_reference
from overlap_spec_kernels.norm.silu_mul import gelu_mul
from support.dots_in_order import dots_in_order
from support.quantized_cases import Case, weight_of
from torch import Tensor
from triton.language.extra import cuda

# (rows, experts, experts of a row, H, I): sizes that fill no tile, one row, more rows of an expert than a tile has
SIZES = [(5, 6, 2, 40, 24), (1, 8, 8, 32, 16), (70, 5, 3, 33, 20), (19, 16, 4, 160, 136)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * shape[-1] ** -0.5).to(dtype)


def routing_of(num_rows: int, num_experts: int, top_k: int) -> Routing:
    """Experts of each row, the first of them chosen by all, the last by none."""
    random = torch.Generator().manual_seed(num_rows)
    others = torch.stack([torch.randperm(max(num_experts - 2, 1), generator=random) + 1 for _ in range(num_rows)])
    experts = torch.cat((torch.zeros(num_rows, 1, dtype=torch.int64), others), dim=1)[:, :top_k]
    if top_k == num_experts:
        experts = torch.stack([torch.randperm(num_experts, generator=random) for _ in range(num_rows)])
    return Routing(experts.contiguous(), torch.rand(experts.shape, generator=random).sort(descending=True).values)


@pytest.mark.full_but_every(2)
@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", SIZES)
def test_the_sum(sizes: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    num_rows, num_experts, top_k, size, inner = sizes
    x = 4 * drawn(num_rows, size, dtype=dtype)
    gate_up, down = drawn(num_experts, 2 * inner, size, dtype=dtype), drawn(num_experts, size, inner, dtype=dtype)
    routing = routing_of(num_rows, num_experts, top_k)
    found = _experts_mlp_triton(x, gate_up, down, routing)
    expected = experts_mlp_reference(x, gate_up, down, routing)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("clamp", [None, Clamp(1.702, 0.6)])
def test_the_sum_with_biases(clamp: Clamp | None) -> None:
    num_rows, num_experts, top_k, size, inner = SIZES[2]
    x = 4 * drawn(num_rows, size, dtype=torch.float32)
    gate_up, down = (drawn(num_experts, *shape, dtype=torch.float32) for shape in ((2 * inner, size), (size, inner)))
    biases = Biases(
        3 * drawn(num_experts, 2 * inner, dtype=torch.float32), drawn(num_experts, size, dtype=torch.float32)
    )
    routing = routing_of(num_rows, num_experts, top_k)
    for gate in (clamp, gelu_mul):
        found, expected = (
            run(x, gate_up, down, routing, biases, gate) for run in (_experts_mlp_triton, experts_mlp_reference)
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_groups_of_more_places_than_a_program_looks_at_together() -> None:
    routing = routing_of(700, 9, 2)
    expected = dict(expert_rows(routing.experts, 9))
    found = places_of(routing.experts, 9)
    assert found.counts.tolist() == [len(expected.get(expert, ())) for expert in range(9)] and found.counts[8] == 0
    for expert, rows in expected.items():
        assert torch.equal(found.listed[expert, : len(rows)].long(), rows)


@pytest.mark.parametrize("num_rows", [80, 300])
def test_many_rows_of_an_expert_are_in_large_tiles(num_rows: int) -> None:
    num_experts, size, inner = 3, 80, 72
    routing, half = routing_of(num_rows, num_experts, 2), torch.float16
    assert tile_of(2 * num_rows, num_experts, True).rows == (64 if num_rows == 80 else 128)
    x = 4 * drawn(num_rows, size, dtype=half)
    gate_up, down = drawn(num_experts, 2 * inner, size, dtype=half), drawn(num_experts, size, inner, dtype=half)
    found = _experts_mlp_triton(x, gate_up, down, routing)
    torch.testing.assert_close(found, experts_mlp_reference(x, gate_up, down, routing), rtol=4e-3, atol=4e-3)


# (bits, columns of a group, rows of a scale, whether there are zero points): fp8 by tensor or row, by block; int4 as
# published by compressed-tensors, AWQ and GPTQ
FORMATS = [(8, 0, 1, False), (8, 128, 128, False), (4, 128, 1, False), (4, 64, 1, True), (4, 32, 1, True)]


def quantised(num_experts: int, rows: int, columns: int, bits: int, group: int, per_scale: int, zeros: bool):  # type: ignore[no-untyped-def]  # a stack
    case = Case(0, rows, columns, bits, group, per_scale, zeros)
    weights = [weight_of(case, torch.float32) for _ in range(num_experts)]
    return QuantizedStack.of([(weight.data, weight.packing) for weight in weights])


@pytest.mark.full_but_every(3)
@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize("num_rows", [3, 19, 200])
@pytest.mark.parametrize("stored", FORMATS)
def test_the_sum_of_experts_in_few_bits(stored: tuple[int, int, int, bool], num_rows: int) -> None:
    """Of few rows, of listed places, and of large tiles. In float16 tiles are as in bfloat16."""
    torch.manual_seed(num_rows)
    dtype = torch.float32 if num_rows == 19 else torch.float16
    routing = routing_of(num_rows, 3, 2)
    x = 4 * drawn(num_rows, 256, dtype=dtype)
    gate_up, down = quantised(3, 2 * 128, 256, *stored), quantised(3, 256, 128, *stored)
    found, expected = (run(x, gate_up, down, routing) for run in (_experts_mlp_triton, experts_mlp_reference))
    assert expected.std() > 1e-3
    bound = 1e-2 if dtype == torch.float16 else 1e-4
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound * float(expected.abs().max()))


@pytest.mark.parametrize(("stored", "size", "inner"), [(FORMATS[0], 192, 64), (FORMATS[1], 256, 128)])
def test_many_rows_of_an_expert_in_8_bits(stored: tuple[int, int, int, bool], size: int, inner: int) -> None:
    """Of 192 rows that a program has, one expert has more and others have less than 128; of W it has up to 128 rows."""
    routing, half = routing_of(200, 3, 2), torch.float16
    assert quantized_products.quantized_tile(400, 3, True, 8) == quantized_products.MANY
    x = 4 * drawn(200, size, dtype=half)
    gate_up, down = quantised(3, 2 * inner, size, *stored), quantised(3, size, inner, *stored)
    for clamp in (None, Clamp(1.702, 0.6)):
        given = x, gate_up, down, routing, None, clamp
        found, expected = (run(*given) for run in (_experts_mlp_triton, experts_mlp_reference))
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("stored", FORMATS)
def test_the_sum_of_experts_of_one_row_in_few_bits(stored: tuple[int, int, int, bool]) -> None:
    test_the_sum_of_experts_in_few_bits(stored, 1)


def test_the_first_product_waits_for_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice, or the list of it, comes when a kernel waits: the kernel that makes it runs at the same time."""
    late: list[tuple[Tensor, Tensor]] = []

    def come() -> None:
        while late:
            result, values = late.pop()
            result.copy_(values)

    def listed(experts: Tensor, num_experts: int) -> Places:
        with pytest.MonkeyPatch.context() as ordinary:
            ordinary.setattr(products, "dependent_launch", lambda *_: {"PDL": False})
            places = products.places_of(experts, num_experts)
        for each in places[1:] if places.are_listed else places[:1]:
            late.append((each, each.clone()))
            each.zero_()
        return places

    monkeypatch.setattr(cuda, "gdc_wait", come)
    monkeypatch.setattr(cuda, "gdc_launch_dependents", lambda: None)
    for module in (products, quantized_products, experts_mlp):
        monkeypatch.setattr(module, "dependent_launch", lambda *_: {"PDL": True})
    monkeypatch.setattr(experts_mlp, "places_of", listed)
    of_32_bits = drawn(3, 256, 128, dtype=torch.float32), drawn(3, 128, 128, dtype=torch.float32)
    of_8_bits = quantised(3, 256, 128, *FORMATS[0]), quantised(3, 128, 128, *FORMATS[0])
    cases = [(5, None, of_32_bits), (5, gelu_mul, of_8_bits), (19, None, of_8_bits)]
    cases += [(19, gelu_mul, of_32_bits), (19, gelu_mul, of_8_bits)]
    for num_rows, gate, weights in cases:
        inputs = (4 * drawn(num_rows, 128, dtype=torch.float32), *weights, routing_of(num_rows, 3, 2), None, gate)
        expected = experts_mlp_reference(*inputs)
        found = _experts_mlp_triton(*inputs)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("num_rows", [16, 1, 17])
def test_rows_have_their_bits_with_and_without_a_list_of_places(num_rows: int) -> None:
    gate_up, down = drawn(6, 48, 40, dtype=torch.float32), drawn(6, 40, 24, dtype=torch.float32)
    x, routing = drawn(17, 40, dtype=torch.float32), routing_of(17, 6, 3)
    some = Routing(*(each[17 - num_rows :].contiguous() for each in routing))
    with dots_in_order():
        whole = _experts_mlp_triton(x, gate_up, down, routing)
        found = _experts_mlp_triton(x[17 - num_rows :], gate_up, down, some)
    assert torch.equal(found, whole[17 - num_rows :])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_sum_with_a_residual_and_its_norm(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """In two blocks of columns, of which the second is not full."""
    monkeypatch.setattr(experts_mlp, "_SUM_BLOCK", 32)
    num_rows, num_experts, top_k, size, inner = SIZES[0]
    x, residual = 4 * drawn(num_rows, size, dtype=dtype), drawn(num_rows, size + 8, dtype=dtype)[:, :size]
    gate_up, down = drawn(num_experts, 2 * inner, size, dtype=dtype), drawn(num_experts, size, inner, dtype=dtype)
    norm, routing = Norm(1 + drawn(size, dtype=dtype), 0.1), routing_of(num_rows, num_experts, top_k)
    shared = drawn(num_rows, size, dtype=dtype)
    for beside in (None, shared):
        given = x, gate_up, down, routing, residual, norm, None, None, beside
        found, expected = _experts_add_triton(*given), experts_add_reference(*given)
        for one, other in ((found.values, expected.values), (found.normalised(), expected.weighted)):
            torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert found.squares is not None and len(found.squares) == 3  # of 16 columns each, and of 8
        routed = _experts_mlp_triton(x, gate_up, down, routing)
        assert torch.equal(found.values, residual + (routed if beside is None else routed + beside))


@pytest.mark.parametrize(("num_rows", "num_parts", "size"), [(5, 3, 40), (1, 1, 32)])
def test_the_scale_of_a_norm_is_applied(num_rows: int, num_parts: int, size: int) -> None:
    values, squares = drawn(num_rows, size, dtype=torch.float32), drawn(num_parts, num_rows, dtype=torch.float32).abs()
    x = Normed(values, 3 * values, squares, 0.1)
    torch.testing.assert_close(_normalised_triton(x, squares), normalised_reference(x, squares))


# (experts, of a row, groups, kept, experts that rate one): DeepSeek-V3's, V2's sizes of groups, one group
GROUPS = [(32, 4, 4, 2, 2), (30, 3, 5, 3, 1), (20, 5, 1, 1, 2)]


@pytest.mark.slow_but_every(1)
@pytest.mark.parametrize("score", [sigmoid_scores, softmax_scores])
@pytest.mark.parametrize("sizes", GROUPS)
def test_the_choice_of_groups(sizes: tuple[int, int, int, int, int], score: Callable[[Tensor], Tensor]) -> None:
    num_experts, top_k, groups, kept, rated_by = sizes
    logits, correction = 8 * drawn(9, num_experts, dtype=torch.float32), drawn(num_experts, dtype=torch.float32)
    logits[3], logits[4] = torch.nan, 0.0
    for normalised, moved in ((True, correction), (False, None)):
        given = logits, torch.eye(num_experts), top_k, normalised, Grouping(score, groups, kept, rated_by, 2.5), moved
        found, expected = _best_of_groups_triton(*given), best_of_groups_reference(*given)
        assert torch.equal(found.experts, expected.experts)
        torch.testing.assert_close(found.weights, expected.weights, equal_nan=True)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("num_rows", "num_experts", "top_k", "size"), [(1, 8, 2, 32), (19, 20, 5, 40), (3, 4, 4, 160)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_choice(num_rows: int, num_experts: int, top_k: int, size: int, normalised: bool, biased: bool) -> None:
    x, weight = 20 * drawn(num_rows, size, dtype=torch.float32), drawn(num_experts, size, dtype=torch.float32)
    bias = 3 * drawn(num_experts, dtype=torch.float32) if biased else None
    found, expected = (run(x, weight, top_k, normalised, bias) for run in (_route_triton, route_reference))
    assert torch.equal(found.experts, expected.experts)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.slow_but_every(1)
@pytest.mark.parametrize("copies", [5, 100])
def test_of_equal_experts_the_lower_ones_are_chosen_and_of_nan_the_first(copies: int) -> None:
    weight = drawn(3, 32, dtype=torch.float32).repeat(copies, 1)
    x = 20 * drawn(7, 32, dtype=torch.float32)
    x[3] = torch.nan
    found, expected = _route_triton(x, weight, 6, True), route_reference(x, weight, 6, True)
    assert torch.equal(found.experts, expected.experts) and found.experts[3].tolist() == list(range(6))
    torch.testing.assert_close(found.weights, expected.weights, equal_nan=True)


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("num_experts", [20, 300])
def test_a_row_has_its_choice_in_one_launch_and_in_two(num_experts: int) -> None:
    """In parts of K, of which the last is short; parts are absent again. More experts than are compared in pairs.

    Values are multiples of 1/128, whose sums are exact: NumPy adds the columns of rows that are alike in another order.
    """
    weight, x = (
        (128 * drawn(rows, 300, dtype=torch.float32)).round() / 128 * scale
        for rows, scale in ((num_experts, 1), (33, 16))
    )
    weight[3] = weight[7] = x[1] / 16  # which x[1] chooses, both
    two, expected = _route_triton(x, weight, 6, True), route_reference(x, weight, 6, True)
    assert torch.equal(two.experts, expected.experts)
    torch.testing.assert_close(two.weights, expected.weights, rtol=1e-5, atol=1e-6)
    for rows in (slice(0, 32), slice(4, 7), slice(32, 33)):
        one = _route_triton(x[rows], weight, 6, True)
        assert torch.equal(one.experts, two.experts[rows]) and torch.equal(one.weights, two.weights[rows])
        assert (row_parts(3 * num_experts, x.device).view(torch.int32) == -1).all()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("num_rows", [5, 33])
def test_an_expert_that_all_rows_have(num_rows: int, shared: bool) -> None:
    """Behind those of a row's choice, by each router."""
    x, weight = drawn(num_rows, 40, dtype=torch.float32), drawn(7, 40, dtype=torch.float32)
    common, grouping = Common(7, drawn(1, 40, dtype=torch.float32) if shared else None), Grouping(sigmoid_scores)
    for found, expected in (
        (run(x, weight, 3, True, common=common) for run in (_route_triton, route_reference)),
        (
            run(x, weight, 3, True, grouping, common=common)
            for run in (_best_of_groups_triton, best_of_groups_reference)
        ),
    ):
        assert torch.equal(found.experts, expected.experts) and found.experts.shape == (num_rows, 4)
        torch.testing.assert_close(found.weights, expected.weights)


@pytest.mark.parametrize("rated", [False, True])
@pytest.mark.parametrize(("size", "count"), [(160, 1), (256, 1), (160, 3)])
def test_a_router_scales_rows_and_writes_them(size: int, count: int, rated: bool) -> None:
    """Of an expert that all rows have, too; with the bits of the launch that scales rows."""
    num_experts, common = 12, Common(12, torch.randn(1, size).bfloat16())
    weight, weighted = torch.randn(num_experts, size).bfloat16(), torch.randn(count, size).bfloat16()
    x = Normed(weighted, weighted, torch.rand(9, count) * size, 0.1)
    rows = Unscaled(x, torch.full_like(weighted, torch.nan))

    def choose(given: Rows) -> Routing:
        if rated:
            return _best_of_groups_triton(given, weight, 3, True, Grouping(sigmoid_scores), common=common)
        return _route_triton(given, weight, 3, True, common=common)

    found, scaled = choose(rows), _normalised_triton(x, x.squares) if count == 1 else x.normalised()
    assert torch.equal(rows.rows, scaled)
    assert all(torch.equal(one, other) for one, other in zip(found, choose(scaled), strict=True))


@pytest.mark.parametrize("num_rows", [530, 4100])
def test_the_logits_of_many_rows(num_rows: int) -> None:
    """A program adds all parts, in tiles of more rows and experts."""
    weight, x = drawn(70, 300, dtype=torch.float16), 20 * drawn(num_rows, 300, dtype=torch.float16)
    found = _partial_logits(x, weight)
    assert len(found) == 1 and len(_partial_logits(x[:511], weight)) == 3
    torch.testing.assert_close(found[0], router_logits_reference(x, weight), rtol=1e-4, atol=1e-4)
