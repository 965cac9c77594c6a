"""How a 16-bit weight is divided among programs and stages for few rows of x."""

import pytest
import torch
from overlap_spec_kernels.attention import large_heads
from overlap_spec_kernels.launch import assuming, runs_gluon, runs_warpgroups
from overlap_spec_kernels.linear import streamed_linear
from overlap_spec_kernels.linear.ordered import ordered_cut_for
from overlap_spec_kernels.linear.streamed_linear import Stream, stream_for
from overlap_spec_kernels.linear.warpgroup_linear import Tiles, tiles_for

MULTIPROCESSORS = 132


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_linear, "runs_gluon", lambda device: True)
    monkeypatch.setattr(streamed_linear, "num_multiprocessors", lambda device: MULTIPROCESSORS)


def weight_of(size_n: int, size_k: int) -> torch.Tensor:
    return torch.empty(size_n, size_k, dtype=torch.bfloat16, device="meta")


SMALL = Stream(16, 256, 4, 1, 6, late=True)


def division(rows: int, size_n: int, size_k: int, gated: bool = False) -> Stream | None:
    x = torch.empty(rows, size_k, dtype=torch.bfloat16, device="meta")
    return stream_for(x, weight_of(size_n, size_k), gated)


def test_a_large_weight_has_the_widest_stages_that_divide_it() -> None:
    """By layers of three shapes on an H200: benchmarks/results/choosing/layers_h200.txt."""
    assert division(1, 6144, 4096) == Stream(16, 1024, 4, 1, 4, per_sm=1)
    assert division(4, 4096, 3584) == Stream(16, 512, 4, 1, 7, per_sm=1)
    assert division(4, 4096, 18688) == Stream(16, 256, 4, 1, 12, per_sm=1)
    assert division(4, 28672, 4096, gated=True) == Stream(16, 512, 4, 1, 5, per_sm=1)
    assert division(4, 28672, 4096 + 256, gated=True) == Stream(16, 256, 4, 1, 8, per_sm=1)
    assert division(9, 6144, 4096) == Stream(16, 256, 4, 1, 12, per_sm=1)
    assert division(17, 4096, 4096) is None


def test_few_columns_ask_for_all_of_k_at_once() -> None:
    """Gates of a layer that recurs; several rows of x have programs of eight."""
    cut = division(1, 64, 2048)
    assert cut is not None and cut.block_k * (cut.stages - 1) >= 2048
    assert division(64, 128, 2048) == cut and cut.most_rows == 8
    assert division(1, 144, 2048) == division(1, 128, 2048, gated=True) == SMALL
    assert division(1, 64, 768) == SMALL, "whole stages"


def test_a_small_weight_is_asked_for_at_once_where_all_programs_have_room() -> None:
    """GLM-4.7-Flash's latents, its shared expert's second linear, and queries; all with one order of sums."""
    assert division(1, 1344, 2048) == division(16, 1344, 2048) == Stream(16, 256, 4, 1, 9)
    assert division(1, 2048, 1536) == Stream(16, 256, 4, 1, 7)
    assert division(8, 5120, 768) == Stream(32, 256, 4, 1, 4)
    others = division(17, 1344, 2048), division(9, 5120, 768), division(1, 576, 1536), division(1, 3072, 1280)
    assert set(others) == {division(1, 1344, 2048, gated=True), SMALL} == {SMALL}


def test_programs_share_multiprocessors_where_many_would_idle() -> None:
    """gpt-oss's queries, keys and values, its output and its head; what is added to K fills less than an eighth."""
    assert division(8, 5120, 2880) == division(1, 201088, 2880) == Stream(16, 512, 4, 1, 3, per_sm=3)
    assert division(1, 2880, 4096) == Stream(16, 512, 4, 1, 4, per_sm=2)
    assert division(9, 5120, 2880) == division(1, 5120, 2880, gated=True) == Stream(64, 64, 1, 4, 8, True, 1)
    assert division(1, 49152, 576) == Stream(64, 64, 1, 4, 8, True, 1), "most of its last stage would be empty"
    assert division(1, 7168, 5120) == Stream(16, 1024, 4, 1, 4, per_sm=1), "many rounds"
    assert division(1, 4608, 4096) == division(1, 7168, 5120), "few programs in the last round, which share nothing"


def test_k_that_fills_no_stages_in_one_order() -> None:
    """gpt-oss's queries, keys and values; a head whose last stage would be nearly empty."""

    def ordered(rows: int, size_n: int, size_k: int, gated: bool = False) -> Stream | Tiles | None:
        x = torch.empty(rows, size_k, dtype=torch.bfloat16, device="meta")
        return ordered_cut_for(x, weight_of(size_n, size_k), gated, 0)

    with assuming((9, 0)):
        assert ordered(8, 5120, 2880) == Stream(16, 512, 1, 1, 3, per_sm=3)
        assert ordered(9, 5120, 2880) == Tiles(64, 64, 12)
        x = torch.empty(24, 2880, dtype=torch.bfloat16, device="meta")
        assert tiles_for(x, weight_of(5120, 2880), True) is None
        assert ordered(64, 5120, 2880) == ordered(128, 5120, 2880) == Tiles(64, 64, 8)
        assert ordered(8, 49152, 576) == ordered(8, 5120, 2880, gated=True) == Stream(64, 64, 1, 4, 4, late=True)


@pytest.mark.parametrize(
    ("size_n", "programs"),
    [
        (4096, 132),  # 256 blocks: the second round is nearly full
        (6144, 132),  # 384
        (3072, 192),  # two on some multiprocessors
        (5120, 320),  # three on some
        (4608, 96),  # 288: three for each
        (1024, 64),
        (128256, 132),  # 8016: the last round is nearly full
    ],
)
def test_few_programs_do_not_end_alone(size_n: int, programs: int) -> None:
    cut = division(1, size_n, 8192)
    assert cut is not None and cut.num_programs(weight_of(size_n, 8192), gated=False) == programs


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_products_of_warpgroups_are_for_hopper_alone(capability: tuple[int, int]) -> None:
    """Later GPUs have none: the compiler ends the process. Kernels in Gluon without them run there."""
    x, weight = (torch.empty(count, 4096, dtype=torch.bfloat16, device="meta") for count in (24, 28672))
    rows, cache = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((8, 4096), (4, 16, 1, 512)))
    table = torch.empty(1, 8, dtype=torch.int32, device="meta")
    is_hopper = capability == (9, 0)
    with assuming(capability):
        assert runs_gluon(x.device) and runs_warpgroups(x.device) == is_hopper
        assert (tiles_for(x, weight, False) is not None) == is_hopper
        assert (ordered_cut_for(x, weight, False, 0) is not None) == is_hopper
        assert large_heads.takes(rows, table, cache, cache, 8, None, None) == is_hopper
