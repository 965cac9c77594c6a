"""Seeded random slot rows and draws for the ops around a decode step.

Tokens are few, so that guesses are right by chance, also after a wrong one. From three rows on, the last two of a
batch are the dummy slot.
"""

from typing import Any, NamedTuple

import torch
from overlap_spec_kernels import TokenRows
from torch import Tensor

VOCABULARY = 4
PAGE_SIZES = [1, 16, 64]
# (B, W, N): rows, width of the step, columns of the slots' windows
SHAPES = [(1, 1, 1), (1, 4, 4), (3, 2, 4), (3, 5, 8), (7, 3, 3), (64, 1, 4), (64, 6, 6), (64, 7, 8), (64, 8, 8)]
SHAPES_WITH_GUESSES = [(rows, width, columns) for rows, width, columns in SHAPES if width > 1]
DRAWS = ["by chance", "all accepted", "none accepted", "no guesses", "some guesses"]


class SlotState(NamedTuple):
    """What the engine keeps of its slots, the dummy last."""

    length: Tensor  # [S] i64
    window: Tensor  # [S, N] i64
    page_table: Tensor  # [S, P] i32

    def clone(self) -> "SlotState":
        return SlotState(*(tensor.clone() for tensor in self))

    @property
    def dummy(self) -> int:
        return self.length.shape[0] - 1


def slot_state(num_rows: int, columns: int, page_size: int, longest: int = 200) -> SlotState:
    """More slots than rows of a step. Some are at the start, some as long as the page table just allows."""
    num_slots = num_rows + 4
    length = torch.randint(0, longest + 1, (num_slots,))
    length[:: max(num_slots // 3, 1)] = longest
    length[1::5] = 0
    length[-1] = 0
    window = torch.randint(0, VOCABULARY, (num_slots, columns))
    num_pages = -(-(longest + 2 * columns - 1) // page_size)
    return SlotState(length, window, torch.randint(0, 1 << 20, (num_slots, num_pages), dtype=torch.int32))


def step_slots(state: SlotState, num_rows: int) -> Tensor:
    """Slots of a step, in random order, padded with the dummy."""
    slots = torch.randperm(state.dummy)[:num_rows]
    if num_rows >= 3:
        slots[-2:] = state.dummy
    return slots


def step_limits(state: Any, most: int) -> Tensor:
    """How many guesses in a row each slot takes: none, a few, as many as there are, any number.

    Shapes: -> [S] i64, a column of a wider table.
    """
    table = torch.randint(0, most + 1, (len(state.length), 3))
    table[::3, 1] = 1 << 62
    return table[:, 1]


def draws(kind: str, window: Tensor) -> tuple[Tensor, Tensor]:
    """A window to judge and what the target draws after its columns. Shapes: [B, W] i64 -> twice [B, W]."""
    num_rows, width = window.shape
    window, drawn = window.clone(), torch.randint(0, VOCABULARY, window.shape)
    if kind == "all accepted":
        drawn[:, :-1] = window[:, 1:]
    elif kind == "none accepted":
        drawn[:, :-1] = (window[:, 1:] + 1) % VOCABULARY
    elif kind == "no guesses":
        window[:, 1:] = -1
    elif kind == "some guesses":
        drawn[:, :-1] = window[:, 1:]
        window[torch.arange(width) > torch.randint(0, width, (num_rows, 1))] = -1
    return window, drawn


def token_rows(slots: Tensor, state: Any) -> TokenRows:
    """A token pool in which nothing is written (-1), and pages of 16 that no two slots share; the dummy's are page 0.

    `state`: a `SlotState`, or one of trees.
    """
    num_slots, num_pages = state.page_table.shape
    pages = (torch.randperm(num_slots * num_pages) + 1).view(num_slots, num_pages).int()
    pages[state.dummy] = 0
    return TokenRows(torch.full(((num_slots * num_pages + 1) * 16,), -1, dtype=torch.int32), pages[slots], 16)


def stored(store: TokenRows, row: int, length: int, count: int) -> list[int]:
    """The pool's tokens at positions length + 1, ..; before and after them nothing may be written."""
    pages = store.page_table[row].long()
    tokens = store.pool.view(-1, 16)[pages].flatten().tolist()
    assert set(tokens[: length + 1] + tokens[length + 1 + count :]) <= {-1}
    return tokens[length + 1 : length + 1 + count]


def covered_pages(lengths: Tensor, columns: int, page_size: int, num_pages: int) -> Tensor:
    """Which entries of a gathered page table must be there. Shapes: [B] -> bool [B, P]."""
    return torch.arange(num_pages) * page_size < (lengths + 2 * columns)[:, None]
