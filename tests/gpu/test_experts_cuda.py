"""Mixtures of experts on a GPU: kernels against references, rows that do not depend on others, graphs, schedules.

Its pass is what a start on a GPU waits for (`load_target`).
"""

import pytest
import torch
from overlap_spec_kernels import Biases, Norm, Normed, Routing, experts_add, experts_mlp, route
from overlap_spec_kernels.experts.route import Common, takes_few, written
from overlap_spec_kernels.norm.normed import Unscaled
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from support.random_schedules import run_schedules
from torch import Tensor

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.models.layers.experts import MixtureMLP, MostProbable, Router, StackedExperts

PLACE = torch.device("cuda", 0)
BFLOAT, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
# (experts, experts of a row, H, I): Qwen3-30B-A3B, a Mixtral of an eighth of the columns, sizes that fill no tile
SIZES = [(128, 8, 2048, 768), (8, 2, 4096, 1792), (6, 3, 100, 40)]
ERROR = {BFLOAT: 1e-2, HALF: 2e-3, FLOAT: 1e-5}  # of the norm
ROWS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100, 128, 200, 255, 256)


def drawn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    random = torch.Generator(PLACE).manual_seed(sum(shape))
    return (torch.randn(*shape, device=PLACE, generator=random) * scale).to(dtype)


def mixture_of(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> MixtureMLP:
    experts, top_k, hidden, inner = sizes
    stack = StackedExperts(
        drawn(experts, 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5),
        drawn(experts, hidden, inner, dtype=dtype, scale=inner**-0.5),
    )
    return MixtureMLP(
        Router(drawn(experts, hidden, dtype=dtype, scale=2 * hidden**-0.5), MostProbable(top_k, True)), stack
    )


def run(mixture: MixtureMLP, x: Tensor) -> Tensor:
    return mixture(Normed(x, x))


@pytest.mark.parametrize("num_rows", [1, 5, 33, 1500])
@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_experts(sizes: tuple[int, int, int, int], dtype: torch.dtype, num_rows: int) -> None:
    """Against the reference in float64, of the same choice: that is left to the router's test."""
    mixture, x = mixture_of(sizes, dtype), drawn(num_rows, sizes[2], dtype=dtype)
    stack, routing = mixture.experts, mixture.router(x)
    assert isinstance(stack, StackedExperts)
    exact = Routing(routing.experts, routing.weights.double())
    expected = experts_mlp(x.double(), stack.gate_up.double(), stack.down.double(), exact)
    found = stack(x, routing).double()
    assert float((found - expected).norm() / expected.norm()) < ERROR[dtype]


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("sizes", [*SIZES, (512, 10, 2048, 512)])
def test_routers(sizes: tuple[int, int, int, int], dtype: torch.dtype, normalised: bool) -> None:
    """Where probabilities are as far apart as rounding explains, the choice is that of float64."""
    experts, top_k, hidden, _ = sizes
    x, weight = drawn(300, hidden, dtype=dtype), drawn(experts, hidden, dtype=dtype, scale=2 * hidden**-0.5)
    found, exact = route(x, weight, top_k, normalised), route(x.double(), weight.double(), experts, False)
    gaps = exact.weights.log().diff(dim=1)[:, : min(top_k, experts - 1)].abs()  # to the first that is left out
    apart = gaps.amin(1) > 1e-4
    assert apart.sum() > 250
    assert torch.equal(found.experts[apart], exact.experts[apart, :top_k])
    total = exact.weights[:, :top_k].sum(1, keepdim=True) if normalised else 1.0
    torch.testing.assert_close(found.weights.double(), exact.weights[:, :top_k] / total, rtol=1e-4, atol=1e-6)
    assert (found.weights.diff(dim=1) <= 0).all()


def test_of_equal_experts_the_lower_ones_are_chosen() -> None:
    weight = drawn(4, 256, dtype=BFLOAT).repeat(16, 1)
    found = route(drawn(64, 256, dtype=BFLOAT), weight, 8, True).experts
    first = found[:, :1] % 4
    assert torch.equal(found, first + 4 * torch.arange(8, device=PLACE))


@pytest.mark.parametrize("kind", ["drawn", "alike", "steep", "zero", "not finite"])
@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (512, 10)])
def test_few_rows_have_the_bits_of_more(experts: int, top_k: int, kind: str) -> None:
    """Scaled by the router, or before. With ties, probabilities of 0, NaN; a bias, and an expert that all rows have."""
    weight, values = drawn(experts, 2048, dtype=BFLOAT, scale=0.05), drawn(48, 2048, dtype=BFLOAT, scale=4)
    if kind == "alike":
        weight[experts // 3 :: 3] = weight[5]
    weight *= {"steep": 40, "zero": 0}.get(kind, 1)
    weighted = values * drawn(2048, dtype=BFLOAT)
    if kind == "not finite":
        weighted[::2, 7] = torch.nan
        weighted[1::4, 9] = torch.inf
    squares = values.float().square().view(len(values), -1, 16).sum(2).t().contiguous()
    scaled = Normed(values, weighted, squares, 1e-6).normalised()
    own = drawn(1, 2048, dtype=BFLOAT, scale=0.1)
    for row, (bias, common, normalised) in enumerate(
        (bias, common, normalised)
        for bias in (None, drawn(experts, dtype=BFLOAT))
        for common in (None, Common(experts), Common(experts, own))
        for normalised in (True, True, False, False)
    ):
        count = (1, 7, 16, 30)[(row + row // 4) % 4]  # padded in all ways
        at = slice(row, row + count)
        unscaled = Unscaled(
            Normed(values[at], weighted[at], squares[:, at].contiguous(), 1e-6), torch.empty_like(values[at])
        )
        rows = scaled[at] if count > 8 else unscaled
        assert takes_few(rows, experts, top_k)
        found = route(rows, weight, top_k, normalised, bias, common)
        expected = route(scaled, weight, top_k, normalised, bias, common)
        assert torch.equal(found.experts, expected.experts[at])
        assert torch.equal(found.weights.view(torch.int32), expected.weights[at].view(torch.int32))
        assert torch.equal(written(rows).view(torch.int16), scaled[at].view(torch.int16))


@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_a_row_does_not_depend_on_its_neighbours(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """To the bit, for any number of rows, in tiles of any size."""
    mixture, x = mixture_of(sizes, dtype), drawn(256, sizes[2], dtype=dtype)
    alone = torch.cat([run(mixture, row[None]) for row in x])
    for num_rows in ROWS:
        order = torch.randperm(256, generator=torch.Generator().manual_seed(num_rows))[:num_rows].to(PLACE)
        assert torch.equal(run(mixture, x[order]), alone[order]), num_rows
    many = drawn(4096, sizes[2], dtype=dtype)
    many[1000:1256] = x
    assert torch.equal(run(mixture, many)[1000:1256], alone)


@pytest.mark.parametrize("hidden", [104, 2048])
def test_a_row_with_biases_does_not_depend_on_its_neighbours(hidden: int) -> None:
    """Where K is one step of the loop of small tiles, too: a product's sum does not begin with the bias."""
    stack = mixture_of((6, 3, hidden, 40), BFLOAT).experts
    assert isinstance(stack, StackedExperts)
    biases = Biases(drawn(6, 80, dtype=BFLOAT), drawn(6, hidden, dtype=BFLOAT))
    x, routing = (
        drawn(300, hidden, dtype=BFLOAT),
        route(drawn(300, 64, dtype=BFLOAT), drawn(6, 64, dtype=BFLOAT), 3, True),
    )
    whole = experts_mlp(x, stack.gate_up, stack.down, routing, biases)
    for num_rows in ROWS:
        some = Routing(*(each[:num_rows] for each in routing))
        assert torch.equal(experts_mlp(x[:num_rows], stack.gate_up, stack.down, some, biases), whole[:num_rows]), (
            num_rows
        )


# A ring that holds all columns, and one that is filled again; fewer experts than warps; half of the experts' columns
@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
@pytest.mark.parametrize(
    "sizes", [SIZES[0], (16, 4, 2048, 1536), (16, 8, 1024, 2048), (6, 3, 256, 128), (6, 1, 64, 384)]
)
def test_one_row_has_the_bits_of_two(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """The sum in one launch with the second product, and in a launch of its own; with what the next norm needs."""
    mixture, x = mixture_of(sizes, dtype), drawn(24, sizes[2], dtype=dtype)
    residual, shared = drawn(24, sizes[2] + 8, dtype=dtype)[:, : sizes[2]], drawn(24, sizes[2], dtype=dtype)
    stack, norm = mixture.experts, Norm(1 + drawn(sizes[2], dtype=dtype, scale=0.3), 1e-5)
    assert isinstance(stack, StackedExperts)
    for beside in (None, shared):

        def add(rows: slice, beside: Tensor | None = beside) -> Normed:
            own = None if beside is None else beside[rows]
            return experts_add(
                x[rows], stack.gate_up, stack.down, mixture.router(x[rows]), residual[rows], norm, shared=own
            )

        two = add(slice(0, 24))
        assert two.squares is not None
        for row in range(24):
            one = add(slice(row, row + 1))
            assert one.squares is not None and torch.equal(one.values[0], two.values[row]), row
            assert torch.equal(one.weighted[0], two.weighted[row]) and torch.equal(
                one.squares[:, 0], two.squares[:, row]
            )


@sync_mode_warns
@pytest.mark.parametrize("num_rows", [1, 32])
def test_it_is_captured_and_asks_nothing_of_the_host(num_rows: int) -> None:
    mixture, x = mixture_of(SIZES[0], BFLOAT), drawn(num_rows, 2048, dtype=BFLOAT)
    run(mixture, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(mixture, x)
    others = drawn(4, num_rows, 2048, dtype=BFLOAT)
    with synchronization_is_an_error():
        eager = [run(mixture, each) for each in others]
        replayed = []
        for each in others:
            x.copy_(each)
            graph.replay()
            replayed.append(out.clone())
    assert all(torch.equal(one, other) for one, other in zip(eager, replayed, strict=True))


def test_a_row_that_is_not_finite_stays_alone() -> None:
    mixture, x = mixture_of(SIZES[1], BFLOAT), drawn(40, 4096, dtype=BFLOAT)
    whole = run(mixture, x)
    x[7] = torch.nan
    spoilt, others = run(mixture, x), torch.arange(40, device=PLACE) != 7
    assert spoilt[7].isnan().all() and torch.equal(spoilt[others], whole[others])


@pytest.mark.parametrize("batch_sizes", [(), (1, 2, 4, 6)], ids=["eager", "graphs"])
@pytest.mark.parametrize("method", ["EAGLE3", "EAGLE", "STANDALONE", "NGRAM"])
@pytest.mark.parametrize("family", ["qwen3 moe", "mixtral"])
def test_random_schedules(codec: TextCodec, family: str, method: str, batch_sizes: tuple[int, ...]) -> None:
    graphs = {"place": PLACE, "graph_batch_sizes": batch_sizes}
    run_schedules(20, codec, dtype=torch.float32, family=family, method=method, **graphs)
