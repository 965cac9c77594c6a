"""Rows of layers that recur, by hand: prompts, windows, and requests that are decoded in windows of any width."""

import random
from typing import Any

import torch
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch, StateRows
from overlap_spec.models.layers.recurrent import RecurrentShape, recur
from overlap_spec.models.recurrent_state import LayerState, RecurrentState, StateShape

WIDTH, SLOTS = 4, 5


def state_of(shape: RecurrentShape, dtype: torch.dtype = torch.float32) -> LayerState:
    """As a predecessor may have left it: full of NaN."""
    (layer,) = RecurrentState.allocate(shape, SLOTS, WIDTH, dtype, torch.device("cpu")).layers
    for tensor in (layer.memory, layer.inputs, layer.window):
        tensor.fill_(torch.nan)
    return layer


def prompts(starts: list[int], counts: list[int], slots: list[int]) -> RowBatch:
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
    ends = torch.tensor([0, *counts]).cumsum(0).int()
    state = StateRows(torch.tensor(slots), are_final=True)
    return RowBatch(positions, None, torch.zeros(len(slots), 1), ends, max(counts), False, state=state)


def windows(starts: list[int], width: int, slots: list[int]) -> RowBatch:
    positions = (torch.tensor(starts)[:, None] + torch.arange(width)).flatten()
    state = StateRows(torch.tensor(slots), are_final=False)
    return RowBatch(positions, None, torch.zeros(len(slots), 1), None, width, True, state=state)


def rows_of(shape: StateShape, seed: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, shape.row_size, generator=draw).to(dtype)


def decoded(shape: RecurrentShape, state: LayerState, dtype: torch.dtype, rng: random.Random | None, batch: int) -> Any:
    """Requests of 7 prompt tokens each, then 40 tokens: plainly, or in random windows of which a part is accepted.

    Returns outputs by position of the first request, and its state with the last window's first row in it.
    """
    lengths, outputs = [7] * batch, dict[int, Tensor]()
    texts = [rows_of(shape, 20 + index, 60, dtype) for index in range(batch)]
    slots = list(range(batch))
    recur(shape, state, torch.cat([text[:7] for text in texts]), prompts([0] * batch, [7] * batch, slots))
    while min(lengths) < 47:
        width = 1 if rng is None else rng.randint(1, WIDTH)
        accepted = [0 if rng is None else min(rng.randrange(width), 47 - 1 - n) if n < 47 else 0 for n in lengths]
        columns = []
        for index, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            window = text[length : length + width].clone()
            window[accepted[index] + 1 :] = 9.0  # guesses that are wrong
            columns.append(window)
        out = recur(shape, state, torch.cat(columns), windows(lengths, width, slots)).view(batch, width, -1)
        for column in range(accepted[0] + 1 if lengths[0] < 47 else 0):
            outputs[lengths[0] + column] = out[0, column]
        lengths = [n if n >= 47 else n + 1 + a for n, a in zip(lengths, accepted, strict=True)]
    recur(shape, state, torch.zeros_like(columns[0][:1]).repeat(batch, 1), windows(lengths, 1, slots))
    return torch.stack([outputs[position] for position in sorted(outputs)]), state.memory[0], state.inputs[0]
