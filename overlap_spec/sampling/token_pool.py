"""The token of every row of the KV cache: each request's history, on the device, addressed as its KV is.

A request's token at position p is at the cache row of p, through the request's page table. So a prefix that was found
in the cache has its tokens here as well as its KV, a request that was preempted has its tokens again when its KV is
again computed, and nothing is copied when a slot changes hands. Every step writes what it commits: a prefill its chunks
and the tokens it draws, a decode step its committed run, whatever the method.

    positions   0 .. L-1        L           between two steps, at length L
    pool        committed       the root    later rows are stale
"""

from dataclasses import dataclass

import torch
from overlap_spec_kernels import TokenRows, cache_rows, store_tokens
from torch import Tensor

POOL_TOKEN_BYTES = torch.int32.itemsize


@dataclass(frozen=True)
class TokenPool:
    """R rows, as many as the KV cache has."""

    tokens: Tensor  # [R] i32
    page_size: int

    @staticmethod
    def allocate(num_pages: int, page_size: int, device: torch.device) -> "TokenPool":
        return TokenPool(torch.zeros(num_pages * page_size, dtype=torch.int32, device=device), page_size)

    def rows_of(self, page_table: Tensor) -> TokenRows:
        """What a kernel needs to write tokens of a batch. Shapes: page_table [B, P] i32."""
        return TokenRows(self.tokens, page_table, self.page_size)

    def write_chunks(self, rows: Tensor, tokens: Tensor) -> None:
        """Write prompt chunks. Sync: never. Shapes: rows (of the cache), tokens [T] i64."""
        self.tokens[rows] = tokens.int()

    def write(self, page_table: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Write a token of each request. Sync: never. Shapes: page_table [B, P] i32, positions, tokens [B] i64."""
        store_tokens(*self.rows_of(page_table), positions, tokens[:, None], torch.ones_like(positions))

    def read(self, page_table: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
        """Tokens at positions, -1 outside 0..ends - 1. Sync: never.

        Entries of the page table past a request's end may be unwritten memory, and are not followed.
        Shapes: page_table [B, P] i32, positions [B, n] i64, ends [B] i64 -> [B, n] i64.
        """
        inside = (positions >= 0) & (positions < ends[:, None])
        rows = cache_rows(page_table, positions.masked_fill(~inside, 0), self.page_size)
        return self.tokens[rows].long().masked_fill(~inside, -1)
