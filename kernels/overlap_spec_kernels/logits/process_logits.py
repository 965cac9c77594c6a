"""What requests' parameters do to logits, for every row of a window, in one pass over them.

    logit > 0: logit / repetition, else logit * repetition      if the token is in the prompt or in the output
    less frequency * n                                          where it is n times in the output
    less presence                                               if it is in the output
    plus bias
    -inf                                                        the end of a bad word; stop ids before min_new_tokens
    0, and -inf for all others                                  a thinking budget's closing marker, where it is due

The output of a row is what is committed, and then its guesses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, require, runs_triton
from overlap_spec_kernels.logits.columns import columns_of, forbid_tokens
from overlap_spec_kernels.logits.count_tokens import IN_PROMPT
from overlap_spec_kernels.logits.guesses_before import RowHistory, token_before, tokens_before
from overlap_spec_kernels.logits.reasoning_end import BUDGET_WIDTH, MARKER, closing_token, closing_tokens
from overlap_spec_kernels.window.store_tokens import require_token_rows

_BLOCK = 2048  # columns per program
_PART = 1 << 22  # logits that the reference changes at once
_POSITIONS = 128  # of a history, that are read together


class LogitRules(NamedTuple):
    """What B requests ask for. The last five are tables, with a row for each slot; rows may be of any distance."""

    slots: Tensor  # [B] i64
    output_from: Tensor  # [B] i64, position of the first output token
    stop_from: Tensor  # [B] i64, the first position at which a stop id may be drawn
    stop_ids: Tensor  # [B, M] i64, padded with -1
    penalties: Tensor  # [S, 3] f64: repetition, presence, frequency
    has: Tensor  # [S, 2] i64: not 0 where the slot has biases; how many bad words it has
    bias: Tensor  # [S, V] f32
    words: Tensor  # [S, n, 2^k] i32: a word's last token is the last of its row, -1 is before its first
    budgets: Tensor  # [S, BUDGET_WIDTH] i64, as `closing_tokens` reads them


def neutral_rules(num_slots: int, vocab_size: int, device: torch.device | str) -> dict[str, Tensor]:
    """The tables of `LogitRules` that change no logit, by name: each is one row, which all slots read."""
    no_budget = [-1, *[0] * (BUDGET_WIDTH - 1)]
    rows = {
        "penalties": torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64),
        "has": torch.zeros(2, dtype=torch.int64),
        "bias": torch.zeros(vocab_size),
        "words": torch.full((1, 1), -1, dtype=torch.int32),
        "budgets": torch.tensor(no_budget),
    }
    return {name: row.to(device).expand(num_slots, *row.shape) for name, row in rows.items()}


def process_logits(logits: Tensor, rules: LogitRules, history: RowHistory, token_ids: Tensor) -> Tensor:
    """New logits, of rows that come after `history`. `token_ids`: of the columns.

    A closing marker that has no column is not forced: a draft without it guesses something else.
    Shapes: logits [B, R, N], token_ids [N] i64 -> [B, R, N]. Raises: ValueError naming the argument. Sync: never.
    """
    _require(logits, rules, history, token_ids)
    run = _process_logits_triton if runs_triton(logits) else process_logits_reference
    return run(logits, rules, history, token_ids)


def _require(logits: Tensor, rules: LogitRules, history: RowHistory, token_ids: Tensor) -> None:
    size, vocab_size = len(logits), rules.bias.shape[1]
    require(logits.dim() == 3 and logits.is_contiguous(), "logits", "[B, R, N], contiguous")
    require(token_ids.shape == logits.shape[2:] and token_ids.is_contiguous(), "token_ids", "[N], contiguous")
    require_token_rows(history.store, size)
    require(history.positions.shape == logits.shape[:2], "positions", "[B, R]")
    require(history.guesses.dim() == 3 and history.guesses.shape[:2] == logits.shape[:2], "guesses", "[B, R, D]")
    require(
        history.counts.shape == (size, vocab_size) and history.counts.dtype == torch.int32, "counts", "[B, V] int32"
    )
    require(history.counts.is_contiguous(), "counts", "contiguous")
    require(rules.penalties.shape[1:] == (3,) and rules.penalties.stride(1) == 1, "penalties", "[S, 3]")
    require(rules.penalties.dtype == torch.float64, "penalties", "float64")
    require(rules.has.shape[1:] == (2,) and rules.has.stride(1) == 1, "has", "[S, 2]")
    require(rules.stop_ids.dim() == 2 and rules.stop_ids.stride(1) == 1, "stop_ids", "[B, M], contiguous rows")
    require(rules.bias.stride(1) == 1 and rules.bias.dtype == torch.float32, "bias", "[S, V] float32")
    require(rules.words.dim() == 3 and rules.words[0].is_contiguous(), "words", "[S, n, M], contiguous rows")
    require(rules.words.shape[2].bit_count() == 1, "words", "[S, n, a power of two]")
    require(
        rules.budgets.shape[1:] == (BUDGET_WIDTH,) and rules.budgets.stride(1) == 1, "budgets", f"[S, {BUDGET_WIDTH}]"
    )
    ints = {"slots": rules.slots, "roots": history.roots, "positions": history.positions, "guesses": history.guesses}
    ints |= {"stop_from": rules.stop_from, "stop_ids": rules.stop_ids, "output_from": rules.output_from}
    for name, value in (ints | {"has": rules.has, "budgets": rules.budgets, "token_ids": token_ids}).items():
        require(value.dtype == torch.int64, name, "int64")


def process_logits_reference(logits: Tensor, rules: LogitRules, history: RowHistory, token_ids: Tensor) -> Tensor:
    new, size = torch.empty_like(logits), max(1, _PART // logits[0].numel())
    for first in range(0, len(logits), size):  # which bounds what the counts of all rows take
        part = slice(first, first + size)
        new[part] = _penalized(logits, rules, history, token_ids, part)
    positions, output_from, slots = history.positions, rules.output_from, rules.slots
    tokens = tokens_before(history, MARKER)
    words = rules.words[slots].long()
    absent = torch.arange(words.shape[1], device=slots.device) >= rules.has[slots, 1:]
    ends = last_tokens(tokens, positions, words.masked_fill(absent[:, :, None], -1), output_from)
    early = positions < rules.stop_from[:, None]
    stops = torch.where(early[:, :, None], rules.stop_ids[:, None], -1)
    vocab_size = rules.bias.shape[1]
    forbid_tokens(new, torch.cat((ends, stops), 2), token_ids, vocab_size)
    forced = columns_of(closing_tokens(tokens, positions, rules.budgets[slots], output_from), token_ids, vocab_size)
    return _force_columns(new, forced[:, :, None])


def _penalized(logits: Tensor, rules: LogitRules, history: RowHistory, token_ids: Tensor, part: slice) -> Tensor:
    """Penalties and biases of some requests' rows."""
    logits, slots, guesses = logits[part], rules.slots[part], history.guesses[part]
    counts = history.counts[part, None].repeat(1, logits.shape[1], 1)
    counts = counts.scatter_add_(2, guesses.clamp(min=0), (guesses >= 0).int())[:, :, token_ids]
    repetition, presence, frequency = rules.penalties[slots].to(logits.dtype)[:, :, None, None].unbind(1)
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    in_output = counts & (IN_PROMPT - 1)
    changed = torch.where(counts > 0, scaled, logits) - in_output * frequency - (in_output > 0) * presence
    bias = torch.where(rules.has[slots, :1] != 0, rules.bias[slots][:, token_ids], 0.0)
    return changed + bias[:, None]


def _force_columns(logits: Tensor, columns: Tensor) -> Tensor:
    """0 in a row's column and -inf in all others, in place; N: none. Shapes: [B, R, N], columns [B, R, 1] i64."""
    num_columns = logits.shape[2]
    is_column = torch.arange(num_columns, device=logits.device) == columns
    return logits.masked_fill_(is_column, 0.0).masked_fill_((columns < num_columns) & ~is_column, -torch.inf)


def _process_logits_triton(logits: Tensor, rules: LogitRules, history: RowHistory, token_ids: Tensor) -> Tensor:
    new, (size, rows, columns) = torch.empty_like(logits), logits.shape
    (pool, page_table, page_size), roots, positions, guesses, counts = history
    _process_logits_kernel[(ceil_div(columns, _BLOCK), rows, size)](
        logits,
        new,
        token_ids,
        pool,
        page_table,
        roots.contiguous(),
        positions,
        guesses.contiguous(),
        counts,
        rules.slots.contiguous(),
        rules.output_from,
        rules.stop_from,
        rules.stop_ids,
        rules.penalties,
        rules.has,
        rules.bias,
        rules.words,
        rules.budgets,
        page_table.stride(0),
        *positions.stride(),
        rules.output_from.stride(0),
        rules.stop_from.stride(0),
        rules.stop_ids.stride(0),
        rules.penalties.stride(0),
        rules.has.stride(0),
        rules.bias.stride(0),
        rules.words.stride(0),
        rules.budgets.stride(0),
        rows,
        columns,
        counts.shape[1],
        rules.stop_ids.shape[1],
        DEPTH=guesses.shape[2],
        WORD=rules.words.shape[2],
        MARKER=MARKER,
        PAGE_SIZE=page_size,
        PROMPT=IN_PROMPT,
        BLOCK=_BLOCK,
        POSITIONS=_POSITIONS,
        num_warps=8,
        **dependent_launch(logits.device, size * rows),
    )
    return new


@TritonKernel.with_options(do_not_specialize=("position_batch_stride", "position_row_stride"))
def _process_logits_kernel(
    logits_ptr: tl.tensor, new_ptr: tl.tensor, token_ids_ptr: tl.tensor, pool_ptr: tl.tensor, page_table_ptr: tl.tensor,
    roots_ptr: tl.tensor, positions_ptr: tl.tensor, guesses_ptr: tl.tensor, counts_ptr: tl.tensor, slots_ptr: tl.tensor,
    output_from_ptr: tl.tensor, stop_from_ptr: tl.tensor, stop_ids_ptr: tl.tensor, penalties_ptr: tl.tensor,
    has_ptr: tl.tensor, bias_ptr: tl.tensor, words_ptr: tl.tensor, budgets_ptr: tl.tensor,
    table_stride: int, position_batch_stride: int, position_row_stride: int, output_stride: int, stop_from_stride: int,
    stop_ids_stride: int, penalties_stride: int, has_stride: int, bias_stride: int, words_stride: int,
    budgets_stride: int, num_rows: int, num_columns: int, vocab_size: int, num_stop_ids: int,
    DEPTH: tl.constexpr, WORD: tl.constexpr, MARKER: tl.constexpr, PAGE_SIZE: tl.constexpr, PROMPT: tl.constexpr,
    BLOCK: tl.constexpr, POSITIONS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per block of columns, row and request. Each works out alone what its row has to draw: seldom much."""
    batch, row = tl.program_id(2).to(tl.int64), tl.program_id(1)
    row_of_all = batch * num_rows + row
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    token = tl.load(token_ids_ptr + column, mask=inside, other=-1)
    wait_for_inputs(PDL)
    slot = tl.load(slots_ptr + batch)
    own_guesses_ptr = guesses_ptr + row_of_all * DEPTH
    count = tl.load(counts_ptr + batch * vocab_size + token, mask=inside, other=0)
    for i in tl.static_range(DEPTH):
        count += (tl.load(own_guesses_ptr + i) == token).to(tl.int32)
    logit = tl.load(logits_ptr + row_of_all * num_columns + column, mask=inside, other=0.0).to(tl.float32)
    value = penalized(logit, count, penalties_ptr + slot * penalties_stride, PROMPT)
    has_bias = tl.load(has_ptr + slot * has_stride) != 0
    value += tl.load(bias_ptr + slot * bias_stride + token, mask=inside & has_bias, other=0.0)

    position = tl.load(positions_ptr + batch * position_batch_stride + row * position_row_stride)
    output_from, root = tl.load(output_from_ptr + batch * output_stride), tl.load(roots_ptr + batch)
    pages_ptr = page_table_ptr + batch * table_stride
    ends_ptr = own_guesses_ptr + DEPTH - position  # where the guess at position 0 would be
    own_words_ptr, num_words = words_ptr + slot * words_stride, tl.load(has_ptr + slot * has_stride + 1)
    value = forbid_last_tokens(
        value, token, own_words_ptr, num_words,
        pool_ptr, pages_ptr, ends_ptr, root, position, output_from, WORD, PAGE_SIZE,
    )  # fmt: skip
    if position < tl.load(stop_from_ptr + batch * stop_from_stride):
        for place in range(num_stop_ids):
            stop_id = tl.load(stop_ids_ptr + batch * stop_ids_stride + place)
            value = tl.where(token == stop_id, float("-inf"), value)
    budget_ptr = budgets_ptr + slot * budgets_stride
    forced = closing_token(
        budget_ptr, pool_ptr, pages_ptr, ends_ptr, root, position, output_from, MARKER, PAGE_SIZE, POSITIONS
    )
    forced = if_it_has_a_column(forced, token_ids_ptr, num_columns, BLOCK)
    if forced >= 0:
        value = tl.where(token == forced, 0.0, float("-inf"))
    tl.store(new_ptr + row_of_all * num_columns + column, value, mask=inside)


@TritonKernel
def penalized(logit: tl.tensor, count: tl.tensor, penalties_ptr: tl.tensor, PROMPT: tl.constexpr) -> tl.tensor:
    """Less the penalties of tokens that are counted so often."""
    repetition = tl.load(penalties_ptr).to(tl.float32)
    presence = tl.load(penalties_ptr + 1).to(tl.float32)
    frequency = tl.load(penalties_ptr + 2).to(tl.float32)
    scaled = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
    in_output = count & (PROMPT - 1)
    changed = tl.where(count > 0, scaled, logit) - in_output.to(tl.float32) * frequency
    return changed - tl.where(in_output > 0, presence, 0.0)


@TritonKernel
def if_it_has_a_column(forced: tl.tensor, token_ids_ptr: tl.tensor, num_columns: int, BLOCK: tl.constexpr) -> tl.tensor:
    """The token, or -1. Columns are read if there is one."""
    if forced >= 0:
        found = 0
        for start in range(0, num_columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            token = tl.load(token_ids_ptr + column, mask=column < num_columns, other=-1)
            found += tl.sum((token == forced).to(tl.int32))
        forced = tl.where(found > 0, forced, -1)
    return forced


def last_tokens(tokens: Tensor, positions: Tensor, words: Tensor, output_from: Tensor) -> Tensor:
    """The last token of each bad word that the next token could end; -1 of others. Sync: never.

    Shapes: tokens before each row by position [B, R, T] i64, words [B, n, M] i64, a word's last token at the end of its
    row and -1 before its first, output_from [B] i64 -> [B, R, n] i64.
    """
    most = words.shape[2] - 1
    here = positions[:, :, None] + torch.arange(-most, 0, device=tokens.device)
    output = tokens.gather(2, here.clamp(0, tokens.shape[2] - 1)).masked_fill(here < output_from[:, None, None], -1)
    words = words[:, None]
    begins = (words[..., :-1] < 0) | (words[..., :-1] == output[:, :, None])
    return torch.where(begins.all(-1), words[..., -1], -1)


@TritonKernel
def forbid_last_tokens(
    value: tl.tensor, token: tl.tensor, words_ptr: tl.tensor, num_words: tl.tensor, pool_ptr: tl.tensor,
    pages_ptr: tl.tensor, ends_ptr: tl.tensor, root: tl.tensor, position: tl.tensor, output_from: tl.tensor,
    WORD: tl.constexpr, PAGE_SIZE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The values of a row's columns, -inf for those tokens. WORD: M, a power of two."""
    if num_words > 0:
        each = tl.arange(0, WORD)
        here = position - (WORD - 1) + each
        before = token_before(pool_ptr, pages_ptr, ends_ptr, here, root, position, PAGE_SIZE)
        before = tl.where(here >= output_from, before, -1)
        for i in range(num_words):
            word = tl.load(words_ptr + i * WORD + each).to(tl.int64)
            others = (word >= 0) & (word != before) & (each < WORD - 1)
            last = tl.load(words_ptr + i * WORD + WORD - 1).to(tl.int64)
            ends = (tl.sum(others.to(tl.int32)) == 0) & (token == last)
            value = tl.where(ends, float("-inf"), value)
    return value
