"""Row batches over page tables for tests that drive a model by hand."""

from dataclasses import dataclass, field, replace

import torch

from overlap_spec.models.interfaces import RowBatch, StateRows
from overlap_spec.models.kv_cache import KVCache, KVShape, SlotSizes


@dataclass
class Paged:
    """Requests side by side, each with pages scattered over the cache; page 0 is never used."""

    num_requests: int
    page_size: int = 4
    pages_each: int = 16
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lengths = [0] * self.num_requests
        order = torch.randperm(self.num_pages - 1, generator=torch.Generator().manual_seed(7)) + 1
        self.page_table = order.view(self.num_requests, self.pages_each).to(torch.int32)

    @property
    def num_pages(self) -> int:
        return self.num_requests * self.pages_each + 1

    def cache(self, shape: KVShape, dtype: torch.dtype, width: int = 1) -> KVCache:
        """For these pages; each request has a slot, too."""
        slots = SlotSizes(self.num_requests, width, dtype)
        return KVCache.allocate(shape, self.num_pages, self.page_size, dtype, torch.device("cpu"), slots=slots)

    def rows(self, counts: list[int], commit: bool = True, are_final: bool = True) -> RowBatch:
        """The next `counts[b]` rows of each request b; `commit=False` leaves them to be written again.

        `are_final`: of layers that recur, whose slots are the requests' numbers; False: they are windows.
        """
        spans = [torch.arange(start, start + count) for start, count in zip(self.lengths, counts, strict=True)]
        cache_rows = [
            self.page_table[b, span // self.page_size].long() * self.page_size + span % self.page_size
            for b, span in enumerate(spans)
        ]
        if commit:
            self.lengths = [start + count for start, count in zip(self.lengths, counts, strict=True)]
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        return RowBatch(
            positions=torch.cat(spans),
            cache_rows=torch.cat(cache_rows),
            page_table=self.page_table,
            row_starts=starts,
            max_rows=max(counts),
            uniform=len(set(counts)) == 1,
            state=StateRows(torch.arange(self.num_requests), are_final),
        )


def rows_on(place: torch.device, rows: RowBatch, is_window: bool, state: StateRows | None = None) -> RowBatch:
    """The rows where a model is. A window's have on a GPU only what its kernels do not find out by themselves."""
    leaves_out = is_window and place.type == "cuda"
    assert rows.cache_rows is not None and rows.row_starts is not None
    return replace(
        rows,
        positions=rows.positions.to(place),
        cache_rows=None if leaves_out else rows.cache_rows.to(place),
        page_table=rows.page_table.to(place),
        row_starts=None if leaves_out else rows.row_starts.to(place),
        uniform=is_window,
        state=state,
    )
