"""A part of `process_logits`: the last token of each bad word whose others end the output."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel
from overlap_spec_kernels.logits.tokens_before import token_before


def last_tokens(tokens: Tensor, positions: Tensor, words: Tensor, output_from: Tensor) -> Tensor:
    """Of the words that the next token could end; -1 of others. Sync: never.

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
