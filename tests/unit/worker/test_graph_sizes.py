"""Which shapes of steps are captured, in which order, and which of them holds a step."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from overlap_spec.messages import TwoPartSizes
from overlap_spec.sampling.context import COMMON_WORK
from overlap_spec.worker.graphs import GraphSizes, Reach, two_part_sizes
from overlap_spec.worker.startup.geometry import largest_batches, two_parts_of
from overlap_spec.worker.step import CHUNKS, ROWS, PromptShape, StepShape, captured_shapes

EIGHT_B = 14 * 10**9  # FLOP of a row
PAGES = 1000
REACH = Reach(PAGES, 4, 16)


def test_the_largest_steps_of_a_kind_are_captured_first() -> None:
    """They take the memory, in which the others fit. A batch is whole before the next."""
    sizes = GraphSizes(
        width=4,
        reach=REACH,
        batches=(2, 16),
        widths=(1, 4),
        absorbs_later=True,
        prompts=(PromptShape(16, 9, 16), PromptShape(32, 9, 32)),
        beside=TwoPartSizes(4, 8, (2, 8), ((64, 96), (32,))),
        placed=(1, 3),
    )
    shapes = list(sizes.shapes())
    large = [StepShape(16, width, PAGES) for width in (4, 1, 0)]
    small = [StepShape(2, width, columns) for width in (4, 1) for columns in (PAGES, 128)] + [StepShape(2, 0, PAGES)]
    assert shapes[:8] == large + small, "width 0: the draft catches up"
    assert shapes[8:10] == [StepShape(0, 4, 0, PromptShape(rows, 9, rows)) for rows in (32, 16)]
    both = [(shape.prompt_rows, shape.slots) for shape in shapes[10:13]]
    assert both == [(96, 2), (64, 2), (32, 8)]
    assert shapes[13:] == [StepShape(size, 1, PAGES, placed=True) for size in (3, 1)]


def test_wide_steps_that_cannot_pay_are_not_captured() -> None:
    """A batch of 64 is padded to 80 where that is the next size."""
    sizes = GraphSizes(8, Reach(PAGES, 8, 16, True), (16, 48, 80, 256), (1, 8), (256, 64))
    assert [(slots, width) for slots, width, *_ in sizes.shapes() if slots >= 16] == [
        *[(256, 1), (80, 8), (80, 1), (48, 8), (48, 1), (16, 8), (16, 1)]
    ]
    held = [sizes.holding(StepShape(slots, 8, PAGES), lambda: PAGES) for slots in (64, 81)]
    assert held == [StepShape(80, 8, PAGES), None]
    assert GraphSizes(8, REACH, (16, 64, 80), (1, 8), (80, 64)).batches_of(8) == (16, 64)
    assert sizes.holding(StepShape(81, 1, PAGES), lambda: PAGES) == StepShape(256, 1, PAGES)


def test_rare_kinds_of_sampling_after_prompts_of_a_large_model_have_no_graphs() -> None:
    sizes = GraphSizes(8, REACH, hides_rare=True)
    shapes = StepShape(0, 8, 0, PromptShape(16, 9, 16)), StepShape(8, 1, PAGES), StepShape(3, 1, PAGES, placed=True)
    assert [*map(sizes.kinds, shapes)] == [COMMON_WORK, (), ()]
    assert GraphSizes(8, REACH).kinds(shapes[0]) == ()


def held(shapes: list[PromptShape], exact: PromptShape) -> PromptShape | None:
    """What prompts alone are laid out for where these are captured."""
    shape = GraphSizes(4, REACH, prompts=tuple(shapes)).holding(StepShape(0, 1, 0, exact), lambda: 0)
    return shape and shape.prompts


def test_a_step_gets_the_smallest_size_that_holds_it() -> None:
    shapes = captured_shapes(160, 0, 10)
    assert held(shapes, PromptShape(17, 2, 9)) == PromptShape(32, CHUNKS + 1, 32)
    assert held(shapes, PromptShape(128, CHUNKS, 100)).rows == 128
    output, drawn = PromptShape(17, 1, 17, are_drawn=True), [replace(shape, are_drawn=True) for shape in shapes]
    assert held(shapes, output) is None, "windows' recurrence is not in it"
    assert held(drawn, PromptShape(17, 2, 9)) is None, "and it is not for several prompts"
    assert held([*drawn, *shapes], output) == PromptShape(32, CHUNKS + 1, 32, are_drawn=True)
    too_long, too_many = PromptShape(129, 1, 129), PromptShape(20, CHUNKS + 1, 3)
    assert held(shapes, too_long) is None, f"{ROWS}: more rows than positions are not captured"
    assert held(shapes, too_many) is None


def few(shapes: list[PromptShape]) -> list[int]:
    return [shape.rows for shape in shapes if shape.chunks == CHUNKS + 1]


def test_a_large_model_has_finer_sizes_up_to_what_is_captured_of_it() -> None:
    large, huge, small = 1400, 140, 80_000  # rows of steps that hide their launches
    assert few(captured_shapes(8192, large, 128)) == [16, 32, 64, 128, 256, 384, 512, 640, 768, 896, 1024]
    assert few(captured_shapes(8192, huge, 128)) == few(captured_shapes(8192, small, 128)) == list(ROWS)
    assert few(captured_shapes(700, large, 128))[-1] == 640


def test_large_steps_of_large_models_read_last_rows_alone() -> None:
    def size_for(num_rows: int, batch_rows: int, scored: bool) -> int | None:
        shapes = captured_shapes(8192, batch_rows, 10, reads_last=True)
        shape = held(shapes, PromptShape(num_rows, 2, num_rows, reads_last=not scored))
        return shape and shape.rows

    large, small = 1400, 80_000
    assert size_for(600, large, scored=False) == 640
    assert size_for(600, large, scored=True) is None, "not captured"
    assert size_for(200, large, scored=True) == 256
    assert size_for(500, small, scored=True) == 512


def test_a_step_of_many_requests_is_padded_further() -> None:
    shapes = captured_shapes(8192, 1400, 128)
    assert held(shapes, PromptShape(600, 4, 300)).rows == 640
    assert held(shapes, PromptShape(600, 20, 300)).rows == 1024


def test_a_page_table_reaches_as_far_as_a_step_can_read() -> None:
    """Windows of four columns: eight positions behind the last page, which are one page of 16, two of 4."""
    reach = Reach(num_pages=1000, width=4, page_size=16)
    assert reach.columns(1, 4) == reach.columns(8, 4) == [1000, 128]
    assert reach.columns(9, 4) == reach.columns(0, 4) == [1000]
    assert [reach.columns_for(1, 4, lambda pages=pages: pages) for pages in (1, 127, 128, 1000)] == [
        128,
        128,
        1000,
        1000,
    ]
    assert [Reach(1000, 4, 4).columns_for(1, 4, lambda pages=pages: pages) for pages in (510, 511)] == [512, 1000]
    assert Reach(100, 4, 16).columns(1, 4) == [100]


def test_of_trees_narrow_windows_alone_have_short_page_tables() -> None:
    reach = Reach(1000, 8, 16, is_tree=True)
    assert reach.columns(1, 1) == reach.columns(8, 1) == [1000, 128] and reach.columns(9, 1) == [1000]
    assert reach.columns(1, 4) == reach.columns(8, 2) == [1000, 128] and reach.columns(9, 4) == [1000]
    assert reach.columns(1, 5) == reach.columns(1, 8) == [1000]
    assert reach.columns_for(1, 4, lambda: 1) == 128 and reach.columns_for(1, 8, lambda: 1) == 1000
    captured = [shape[:3] for shape in GraphSizes(8, reach, batches=(1, 16), widths=(1, 8)).shapes()]
    assert captured == [(16, 8, 1000), (16, 1, 1000), (1, 8, 1000), (1, 1, 1000), (1, 1, 128)]


def test_pages_are_not_counted_where_all_steps_have_one_graph() -> None:
    def count() -> int:
        raise AssertionError

    assert Reach(1000, 4, 16).columns_for(9, 4, count) == 1000
    assert Reach(100, 4, 16).columns_for(1, 4, count) == 100


def test_a_pair_gets_the_smallest_size_that_holds_it() -> None:
    sizes = GraphSizes(4, REACH, beside=TwoPartSizes(4, CHUNKS, (2, 8), ((64, 96), (32,))))

    def both(slots: int, width: int, *prompts: int) -> StepShape | None:
        return sizes.holding(StepShape(slots, width, PAGES, PromptShape(*prompts)), lambda: PAGES)

    assert both(1, 4, 65, 2, 40) == StepShape(2, 4, PAGES, PromptShape(96, CHUNKS + 1, 96))
    assert both(3, 4, 20, 1, 20) == StepShape(8, 4, PAGES, PromptShape(32, CHUNKS + 1, 32))
    assert both(3, 4, 40, 1, 40) is None, "fewer rows beside more requests"
    assert both(9, 4, 20, 1, 20) is None
    assert both(1, 3, 20, 1, 20) is None, "of another width"
    assert both(1, 4, 20, CHUNKS + 1, 3) is None


def test_windows_and_prompts_together_fill_tiles() -> None:
    sizes = two_part_sizes(4, 128, 8192, EIGHT_B, 1400)
    assert sizes.batches == (8, 16, 24, 40, 64)
    for batch, rows in zip(sizes.batches, sizes.rows, strict=True):
        assert all((4 * batch + num_rows) % 128 == 0 for num_rows in rows)
        assert max(rows) + 4 * batch == 1024
    assert two_part_sizes(4, 20, 8192, EIGHT_B, 1400).batches == (8, 16, 20), "no more requests than run"


def test_a_small_model_has_none_and_wide_windows_leave_room_for_prompts() -> None:
    """SmolLM2's layers do not hide the launches of what follows them."""
    assert two_part_sizes(4, 128, 8192, 27 * 10**7, 74_000).batches == ()
    assert two_part_sizes(32, 128, 8192, EIGHT_B, 1400).batches == (8, 16, 24), "40 windows would be 1,280 rows"
    assert two_part_sizes(4, 128, 300, EIGHT_B, 1400).rows[0] == (224,)


@pytest.mark.parametrize(("narrower", "width"), [((), 8), ((1, 2, 4), 1)])
def test_of_several_widths_the_narrowest_is_mixed(narrower: tuple[int, ...], width: int) -> None:
    """Plain steps of an engine with a draft wait no longer for prompts than those of one without."""
    spec = SimpleNamespace(narrower=narrower, width=8)
    scheduler = SimpleNamespace(windows_with_prompts=True, max_running_requests=128)
    settings: Any = SimpleNamespace(graph_batch_sizes=(1,), scheduler=scheduler, spec=spec)
    sizes = two_parts_of(settings, 8192, EIGHT_B)
    assert sizes is not None and sizes.width == width and sizes.batches == (8, 16, 24, 40, 64)


ANY, SOME = (), (200, 200, 200, 64)


@pytest.mark.parametrize(
    ("narrower", "levels", "branch", "keeps", "weight_bytes", "largest"),
    [
        ((1, 2, 4), 5, 0, False, 16 * 10**9, SOME),
        ((1, 2, 4), 5, 0, False, 8 * 10**9, SOME),  # 8 bits: products take half as long, too
        ((1, 2, 4), 5, 0, False, 40 * 10**9, (200, 200, 200, 128)),  # most are experts'
        ((1, 2, 4), 6, 0, False, 16 * 10**9, SOME),
        ((1, 2, 4), 7, 0, False, 16 * 10**9, (200, 200, 200, 200)),  # as long as the window
        ((1, 2, 4), 2, 0, False, 16 * 10**9, (200, 200, 128, 64)),
        ((), 5, 0, False, 16 * 10**9, ANY),
        ((1,), 5, 0, True, 16 * 10**9, ANY),  # explicit numbers
        ((1, 2, 4), 5, 4, False, 16 * 10**9, ANY),  # copied guesses
    ],
)
def test_trees_of_large_models_are_wide_for_small_batches(
    narrower: tuple[int, ...], levels: int, branch: int, keeps: bool, weight_bytes: int, largest: tuple[int, ...]
) -> None:
    settings: Any = SimpleNamespace(
        spec=SimpleNamespace(narrower=narrower, width=8),
        scheduler=SimpleNamespace(width_rules=(), keeps_width=keeps, max_running_requests=200),
        model=SimpleNamespace(device="cuda"),
    )
    work = SimpleNamespace(row_flop=EIGHT_B, weight_bytes=weight_bytes)
    profile = SimpleNamespace(tree=SimpleNamespace(num_levels=levels, branch=branch))
    models: Any = SimpleNamespace(target=SimpleNamespace(work=work), proposer=SimpleNamespace(profile=profile))
    assert largest_batches(settings, models) == largest
    work.row_flop = 2 * 10**9  # a small model's layers are not bound by products
    assert not largest or set(largest_batches(settings, models)) == {200}
    profile.tree = None
    assert largest_batches(settings, models) == ANY
