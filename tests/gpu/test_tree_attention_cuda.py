"""Tree attention on a GPU against its reference in float32 on the CPU.

Cache rows that no request owns, and extra keys that no row sees, hold NaN; the last row of a request sees only its
prefix, and that of an empty one nothing.
"""

import pytest
import torch
from kernel_cases.inputs import HeadShape, TreeInputs, to_device, tree_inputs
from overlap_spec_kernels.attention._tree_attention_gluon import tiles_for
from overlap_spec_kernels.attention.decode_attention import DecodeScratch
from overlap_spec_kernels.attention.tree_attention import tree_attention, tree_attention_reference
from support.attention_cases import BFLOAT, CLOSE, FLOAT, GROUPS, HALF, LLAMA, LONG, LONG_LENGTHS, SMOL, Case, name
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from support.poisoned_memory import NANS, poison_shared_memory
from torch import Tensor

PREFIXES = [300, 0, 15, 1, 17, 16, 700]
AROUND_BLOCKS = [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 400, 2000]  # of 16, 32 and 64 keys


def every_group() -> list[Case]:
    """Every group and head dim in both dtypes."""
    return [
        Case(heads, (8, 16)[index % 2], (16, 64)[(index + turn) % 2], dtype)
        for turn, dtype in enumerate((FLOAT, BFLOAT))
        for index, heads in enumerate(GROUPS)
    ]


def every_tile() -> list[Case]:
    """Tiles from one row to 128 rows and heads, rare head dims and pages."""
    widths = [Case(heads, width, 16, BFLOAT) for heads in (SMOL, LLAMA) for width in (1, 5, 32, 33, 64)]
    rare = [
        Case(HeadShape(2, 2, 8), 7, 1, FLOAT),
        Case(HeadShape(5, 1, 80), 3, 1, BFLOAT),
        Case(HeadShape(3, 1, 7), 12, 4, BFLOAT),
        Case(SMOL, 16, 16, HALF),
        Case(HeadShape(8, 1, 96), 64, 64, HALF),
    ]
    return [*widths, *rare]


def on_gpu(inputs: TreeInputs) -> TreeInputs:
    return TreeInputs(*(to_device(value, "cuda") for value in inputs))


def scratch_for(inputs: TreeInputs, num_programs: int | None = None) -> DecodeScratch:
    scratch = DecodeScratch.allocate(max(inputs.q.shape[2], 16), torch.device("cuda"), num_programs)
    scratch.outputs.fill_(torch.nan)
    return scratch


def expected_of(inputs: TreeInputs, window: int | None = None) -> Tensor:
    wide = {name: getattr(inputs, name).float() for name in ("q", "k_cache", "v_cache")}
    return tree_attention_reference(*inputs._replace(**wide), window)


def check(inputs: TreeInputs, num_programs: int | None = None, window: int | None = None) -> None:
    """By default as many splits as the op chooses for this GPU."""
    scratch = scratch_for(inputs, num_programs)
    actual = tree_attention(*on_gpu(inputs), window, scratch)
    assert actual.dtype == inputs.q.dtype and actual.shape == inputs.q.shape
    torch.testing.assert_close(actual.cpu().float(), expected_of(inputs, window), **CLOSE[inputs.q.dtype])
    assert not scratch.counters.any()


@pytest.mark.parametrize("case", every_group(), ids=name)
def test_heads(case: Case) -> None:
    check(tree_inputs(case.heads, case.width, case.width + 3, PREFIXES, case.page_size, case.dtype))


@pytest.mark.parametrize("case", every_tile(), ids=name)
def test_tiles(case: Case) -> None:
    """With the splits that the op chooses, and with as few and as many as there can be, in larger and smaller tiles."""
    inputs = tree_inputs(case.heads, case.width, min(case.width + 3, 64), PREFIXES, case.page_size, case.dtype)
    for num_programs in (None, 1, 1024):
        check(inputs, num_programs)


@pytest.mark.parametrize(("heads", "width"), [(SMOL, 16), (LLAMA, 32), (LLAMA, 8)])
@pytest.mark.parametrize("num_requests", [1, 8, 33])
def test_shared_memory_full_of_nan(num_requests: int, heads: HeadShape, width: int) -> None:
    prefixes = torch.randint(600, (num_requests,)).tolist()
    poison_shared_memory(NANS["of all bits"])
    check(tree_inputs(heads, width, width + 5, prefixes, 16, BFLOAT, spare_pages=100))


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
@pytest.mark.parametrize(("heads", "width", "num_extra"), [(SMOL, 16, 16), (LLAMA, 32, 32), (LLAMA, 8, 24)])
@pytest.mark.parametrize("num_requests", [1, 8, 33])
def test_batches(num_requests: int, heads: HeadShape, width: int, num_extra: int, dtype: torch.dtype) -> None:
    prefixes = torch.randint(200, 600, (num_requests,)).tolist()
    check(tree_inputs(heads, width, num_extra, prefixes, 16, dtype, spare_pages=100))


@pytest.mark.parametrize(("heads", "width", "num_extra", "page_size", "dtype"), [
    (LLAMA, 32, 32, 16, BFLOAT), (LLAMA, 32, 1, 64, BFLOAT), (LLAMA, 64, 64, 16, HALF), (LLAMA, 33, 36, 32, BFLOAT),
    (LLAMA, 8, 32, 16, BFLOAT), (SMOL, 16, 16, 16, BFLOAT), (SMOL, 33, 64, 64, HALF),
])  # fmt: skip
def test_tails_of_every_size(heads: HeadShape, width: int, num_extra: int, page_size: int, dtype: torch.dtype) -> None:
    """With few programs it is Gluon's kernel, with its larger tiles where they are full; with many, Triton's."""
    inputs = tree_inputs(heads, width, num_extra, AROUND_BLOCKS, page_size, dtype)
    for num_programs in (1, None, 4096):
        check(inputs, num_programs)


def test_which_kernel() -> None:
    """That in Gluon takes what fills a Hopper, but no pages of one token, no float32, no negative scale."""
    many = on_gpu(tree_inputs(LLAMA, 32, 32, [40] * 8, 16, BFLOAT))
    is_hopper = torch.cuda.get_device_capability() >= (9, 0)

    def takes(inputs: TreeInputs, scale: float = 1.0, num_programs: int = 264) -> bool:
        shared = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.page_table, inputs.extra_rows.shape[1])
        return tiles_for(*shared, scale, num_programs) is not None

    assert takes(many) == is_hopper
    assert not takes(many, -1.0) and not takes(many, num_programs=4096)
    assert not takes(on_gpu(tree_inputs(LLAMA, 32, 32, [40] * 8, 1, BFLOAT)))
    assert not takes(on_gpu(tree_inputs(LLAMA, 32, 32, [40] * 8, 16, FLOAT)))
    assert not takes(on_gpu(tree_inputs(LLAMA, 8, 65, [40] * 16, 16, BFLOAT)))


def test_more_extra_keys_than_a_word_has_bits() -> None:
    check(tree_inputs(LLAMA, 8, 130, [90, 0], 16, BFLOAT))
    check(tree_inputs(SMOL, 4, 64, [90], 16, FLOAT))


@pytest.mark.parametrize("case", LONG, ids=name)
@pytest.mark.parametrize("lengths", LONG_LENGTHS, ids=str)
def test_long_contexts(lengths: list[int], case: Case) -> None:
    spare_pages = (131072 - max(lengths)) // case.page_size
    inputs = tree_inputs(case.heads, 8, 16, [length - 16 for length in lengths[:1]], case.page_size, case.dtype)
    check(inputs)
    check(tree_inputs(case.heads, 8, 16, [60, 7], case.page_size, case.dtype, spare_pages), num_programs=4)


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
@pytest.mark.parametrize("window", [1, 30, 300])
def test_window(window: int, dtype: torch.dtype) -> None:
    """Pages before it may belong to others."""
    inputs = tree_inputs(LLAMA, 16, 16, [700, 0, 17], 16, dtype)
    for pages, at in zip(inputs.page_table, inputs.positions.view(3, -1), strict=True):
        pages[: min(max(int(at.min()) - window + 1, 0), 640) // 16] = 0  # a page of NaN
    for num_programs in (None, 1024):
        check(inputs, num_programs, window)


def test_without_scratch_it_brings_its_own() -> None:
    inputs = tree_inputs(SMOL, 16, 16, [600], 16, BFLOAT)
    actual = tree_attention(*on_gpu(inputs))
    torch.testing.assert_close(actual.cpu().float(), expected_of(inputs), **CLOSE[BFLOAT])


def test_rows_of_a_projection() -> None:
    """q as a view of q, k and v side by side."""
    inputs = tree_inputs(SMOL, 16, 16, [100, 3], 16, BFLOAT)
    for num_programs in (None, 1):
        check(inputs._replace(q=torch.cat((inputs.q, inputs.q), dim=1)[:, : SMOL.num_heads]), num_programs)


def test_float64_is_the_reference() -> None:
    inputs = tree_inputs(SMOL, 3, 5, [40, 7], 16, torch.float64)
    actual = tree_attention(*on_gpu(inputs))
    torch.testing.assert_close(actual.cpu(), tree_attention_reference(*inputs), rtol=1e-12, atol=1e-13)


def test_float32_products_are_ieee() -> None:
    """With TF32, the error of the scores alone would be about 1e-3."""
    inputs = tree_inputs(HeadShape(2, 2, 128), 8, 8, [300], 16, FLOAT)
    wide = {name: getattr(inputs, name).double() for name in ("q", "k_cache", "v_cache")}
    actual = tree_attention(*on_gpu(inputs)).cpu()
    assert (actual - tree_attention_reference(*inputs._replace(**wide))).abs().max() < 2e-6


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
@pytest.mark.parametrize(("heads", "prefixes"), [(SMOL, [2500]), (LLAMA, [1000]), (LLAMA, [1200] * 8)])
def test_200_launches_agree_bit_by_bit(heads: HeadShape, prefixes: list[int], dtype: torch.dtype) -> None:
    """Whichever split arrives last, and while other launches use the same scratch back to back."""
    inputs = on_gpu(tree_inputs(heads, 16, 16, prefixes, 16, dtype))
    other = on_gpu(tree_inputs(heads, 8, 20, [900, 30, 1500], 16, dtype))
    scratch = scratch_for(inputs)

    def both() -> tuple[Tensor, Tensor]:
        return tree_attention(*inputs, None, scratch), tree_attention(*other, None, scratch)

    first = both()
    for _ in range(200):
        assert all(torch.equal(out, wanted) for out, wanted in zip(both(), first, strict=True))
    assert all(bool(out.isfinite().all()) for out in first) and not scratch.counters.any()


@pytest.mark.parametrize("num_programs", [None, 1])
def test_a_row_does_not_depend_on_what_others_hold(num_programs: int | None) -> None:
    """Bit by bit: other requests' queries, keys and masks may be anything."""
    inputs = on_gpu(tree_inputs(LLAMA, 8, 8, [400, 300], 16, BFLOAT))
    scratch = scratch_for(inputs, num_programs)
    first = tree_attention(*inputs, None, scratch)[:8].clone()
    inputs.q[8:] *= 3
    inputs.mask[1] = -1 << 3
    inputs.prefix[1] = 16
    assert torch.equal(tree_attention(*inputs, None, scratch)[:8], first)


@sync_mode_warns
@pytest.mark.parametrize("num_programs", [None, 1])
def test_it_does_not_synchronize_and_can_be_captured(num_programs: int | None) -> None:
    inputs = on_gpu(tree_inputs(SMOL, 16, 16, [70, 600], 16, BFLOAT))
    scratch = scratch_for(inputs, num_programs)
    expected = tree_attention(*inputs, None, scratch)
    torch.cuda.synchronize()
    with synchronization_is_an_error():
        tree_attention(*inputs, None, scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tree_attention(*inputs, None, scratch)
    for _ in range(3):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
