"""The ops around a decode step's forwards on a GPU, against references on the CPU: alone, and chained in a graph."""

from typing import Any

import pytest
import torch
from kernel_cases.inputs import to_device
from overlap_spec_kernels import Normed, TokenRows
from overlap_spec_kernels.norm.draft_input import draft_input
from overlap_spec_kernels.norm.embed_norm import embed_norm
from overlap_spec_kernels.norm.rms_norm import rms_norm
from overlap_spec_kernels.norm.select_rows import select_rows
from overlap_spec_kernels.window.gather_window import gather_window
from overlap_spec_kernels.window.judge_chain import judge_chain
from overlap_spec_kernels.window.keep_row import keep_row, keep_states
from overlap_spec_kernels.window.place_guesses import place_guesses
from overlap_spec_kernels.window.synthetic_accept import synthetic_accept
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from support.step_inputs import (
    DRAWS,
    PAGE_SIZES,
    SHAPES,
    SHAPES_WITH_GUESSES,
    VOCABULARY,
    SlotState,
    covered_pages,
    draws,
    slot_state,
    step_limits,
    step_slots,
    token_rows,
)
from support.verdicts import assert_same
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]
CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 4e-3},
    torch.float16: {"rtol": 2**-10, "atol": 1e-3},
}
PAGE_SIZE = 16
every_shape = pytest.mark.parametrize("num_rows, width, columns", SHAPES)


def on_gpu(*values: Any) -> tuple[Any, ...]:
    return tuple(to_device(value, "cuda") for value in values)


def same(actual: Tensor, expected: Tensor, name: str) -> None:
    assert actual.dtype == expected.dtype and torch.equal(actual.cpu(), expected), name


@every_shape
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("longest", [200, 9000])
def test_gather_window(longest: int, page_size: int, num_rows: int, width: int, columns: int) -> None:
    state = slot_state(num_rows, columns, page_size, longest)
    state.window[::2, columns // 2 + 1 :] = -1
    slots = step_slots(state, num_rows)
    actual = gather_window(*on_gpu(slots, *state), width, page_size)
    expected = gather_window(slots, *state, width, page_size)
    covered = covered_pages(expected.lengths, columns, page_size, state.page_table.shape[1])
    same(actual.page_table.cpu()[covered], expected.page_table[covered], "page_table")
    for name in set(actual._fields) - {"page_table"}:
        same(getattr(actual, name), getattr(expected, name), name)


@every_shape
@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("given", [False, True])
def test_judge_chain(given: bool, kind: str, num_rows: int, width: int, columns: int) -> None:
    state = slot_state(num_rows, columns, PAGE_SIZE)
    slots = step_slots(state, num_rows)
    window, drawn = draws(kind, state.window[slots, :width])
    accept_len = torch.randint(0, columns, (num_rows,)) if given else None
    arguments = (drawn, window, slots, state.length[slots], state.length, state.window, state.dummy, accept_len)
    moved = on_gpu(*arguments)
    store = token_rows(slots, state)
    on_device = TokenRows(*on_gpu(store.pool, store.page_table), store.page_size)
    actual, expected = judge_chain(*moved, on_device), judge_chain(*arguments, store)
    same(on_device.pool[store.page_size :], store.pool[store.page_size :], "pool")
    assert_same(actual, expected)
    same(moved[4], state.length, "length")
    same(moved[5], state.window, "window")


@pytest.mark.parametrize("num_rows, width, columns", SHAPES_WITH_GUESSES)
def test_place_guesses(num_rows: int, width: int, columns: int) -> None:
    state = slot_state(num_rows, columns, PAGE_SIZE)
    guesses = torch.randint(-1, VOCABULARY, (width - 1, num_rows + 1))[:, :num_rows]
    arguments = state.window, step_slots(state, num_rows), guesses, step_limits(state, width), state.dummy
    moved = on_gpu(*arguments)
    place_guesses(*moved)
    place_guesses(*arguments)
    same(moved[0], state.window, "window")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 3, 64, 512])
@pytest.mark.parametrize("size", [60, 576, 4096])
def test_draft_input(size: int, num_rows: int, dtype: torch.dtype) -> None:
    tokens = torch.randint(0, 1000, (num_rows,))
    shapes = (1000, size), (size,), (num_rows, size), (size,)
    values = [torch.randn(shape).to(dtype) for shape in shapes]
    moved_tokens, embedding, embed_norm, features, feature_norm = on_gpu(tokens, *values)
    actual = draft_input(moved_tokens, embedding, embed_norm, features, feature_norm, 1e-5)
    assert actual.dtype == dtype
    expected = draft_input(tokens, *(value.float() for value in values), 1e-5)
    torch.testing.assert_close(actual.cpu().float(), expected, **CLOSE[dtype])
    assert torch.equal(actual[:, :size], rms_norm(embedding[moved_tokens], embed_norm, 1e-5))
    assert torch.equal(actual[:, size:], rms_norm(features, feature_norm, 1e-5))


@every_shape
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [60, 576, 4096])
def test_select_rows(size: int, dtype: torch.dtype, num_rows: int, width: int, columns: int) -> None:
    rows, index = on_gpu(torch.randn(num_rows, width, size + 7).to(dtype), torch.randint(0, width, (num_rows,)))
    for own in (rows, rows[..., :size], rows[..., 7:]):
        same(select_rows(own, index), select_rows(own.cpu(), index.cpu()), "selected")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [60, 576, 12288])
def test_keep_row(size: int, dtype: torch.dtype) -> None:
    kept = torch.zeros(7, 16, size, dtype=dtype), torch.zeros(7, 16, dtype=torch.int64)
    there = on_gpu(*kept)
    rows = torch.randperm(7)[:5], torch.randint(0, 40, (5,)), torch.randn(5, size).to(dtype), torch.arange(5)
    keep_row(*there, *on_gpu(*rows))
    keep_row(*kept, *rows)
    assert all(torch.equal(found.cpu(), expected) for found, expected in zip(there, kept, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [60, 576, 4096])
def test_keep_states(size: int, dtype: torch.dtype) -> None:
    """Of a window, with a scale and without it."""
    kept = torch.zeros(41, 3 * size, dtype=dtype), torch.zeros(41, size, dtype=dtype)
    places, slots = torch.tensor([(0, 0, 40), (4, 9, -4), (100, 109, -90)]), torch.tensor([2, 1])
    positions, aux = torch.tensor([[104, 105, 106], [5, 6, 7]]), torch.randn(6, 3 * size).to(dtype)
    values = torch.randn(6, size).to(dtype)
    for final in (values, Normed(values, values * 2, torch.rand(9, 6) * size, 1e-5)):
        there = on_gpu(*kept)
        moved = Normed(*on_gpu(*final[:3]), final.eps) if isinstance(final, Normed) else final.cuda()
        keep_states(there, *on_gpu(places, slots, positions, aux), moved)
        keep_states(kept, places, slots, positions, aux, final)
        assert torch.equal(there[0].cpu(), kept[0])
        torch.testing.assert_close(there[1].cpu().float(), kept[1].float(), **CLOSE[dtype])


class Steps(tuple[Tensor, ...]):
    """What several steps in a row take: slots [B], drawn [n, B, W], guesses [n, K, B], rows [n, B, W, H]."""

    def run(self, state: SlotState) -> list[Tensor]:
        """Run them with nothing in between, which lets each kernel begin before the one before it has ended."""
        slots, drawn, guesses, rows = self
        published = []
        for step in range(drawn.shape[0]):
            gathered = gather_window(slots, *state, drawn.shape[2], PAGE_SIZE)
            judged = judge_chain(
                drawn[step],
                gathered.window_tokens,
                slots,
                gathered.lengths,
                state.length,
                state.window,
                state.dummy,
            )
            selected = select_rows(rows[step], judged.accept_len)
            place_guesses(state.window, slots, guesses[step], torch.full_like(state.length, 2), state.dummy)
            published += [judged.published.rows, judged.next_positions, gathered.positions, gathered.tokens, selected]
        return published


def draw_steps(slots: Tensor, width: int, count: int = 4, size: int = 576) -> Steps:
    """Tokens are 0 or 1: half of the guesses are right."""
    drawn = torch.randint(0, 2, (count, len(slots), width))
    guesses = torch.randint(0, 2, (count, width - 1, len(slots)))
    return Steps((slots, drawn, guesses, torch.randn(count, len(slots), width, size)))


@pytest.mark.parametrize("num_rows, width", [(1, 4), (3, 4), (64, 2), (64, 8)])
def test_steps_in_a_captured_graph_follow_their_inputs(num_rows: int, width: int) -> None:
    state = slot_state(num_rows, width, PAGE_SIZE)
    roomy = torch.randint(0, 1 << 20, (state.dummy + 1, 100), dtype=torch.int32)
    state = state._replace(page_table=roomy)
    moved_state = SlotState(*on_gpu(*state))
    static = Steps(on_gpu(*draw_steps(step_slots(state, num_rows), width)))
    static.run(SlotState(*(tensor.clone() for tensor in moved_state)))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        published = static.run(moved_state)
    for _ in range(5):
        steps = draw_steps(step_slots(state, num_rows), width)
        for target, value in zip(static, steps, strict=True):
            target.copy_(value)
        graph.replay()
        for index, (actual, expected) in enumerate(zip(published, steps.run(state), strict=True)):
            same(actual, expected, f"output {index}")
    same(moved_state.length, state.length, "length")
    same(moved_state.window, state.window, "window")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 4, 512])
@pytest.mark.parametrize("size", [60, 576, 4096])
def test_embed_norm(size: int, num_rows: int, dtype: torch.dtype) -> None:
    values = torch.randint(0, 1000, (num_rows,)), torch.randn(1000, size).to(dtype), torch.randn(size).to(dtype)
    tokens, embedding, weight = on_gpu(*values)
    rows, y = embed_norm(tokens, embedding, weight, 1e-5)
    assert torch.equal(rows, embedding[tokens])
    assert torch.equal(y, rms_norm(rows, weight, 1e-5))


@pytest.mark.parametrize("num_slots", [1, 5, 130])
def test_synthetic_accept(num_slots: int) -> None:
    table, seeds = torch.randint(0, 4, (256,)), torch.randint(-(1 << 62), 1 << 62, (200,))
    arguments = table, seeds, torch.randperm(200)[:num_slots], torch.randint(0, 1 << 20, (num_slots,))
    same(synthetic_accept(*on_gpu(*arguments)), synthetic_accept(*arguments), "accepted")


@sync_mode_warns
def test_no_op_synchronizes() -> None:
    state = slot_state(3, 4, PAGE_SIZE)
    steps, moved_state = Steps(on_gpu(*draw_steps(step_slots(state, 3), 4))), SlotState(*on_gpu(*state))
    embedding, norm = on_gpu(torch.randn(9, 576), torch.randn(576))

    def every_op() -> None:
        steps.run(moved_state)
        draft_input(steps[0], embedding, norm, steps[3][0, :, 0], norm, 1e-5)

    every_op()  # compiles
    with synchronization_is_an_error():
        every_op()
