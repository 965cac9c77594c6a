"""Attention of one forward on a CPU, which computes the data shared by all layers only once.

It computes what `rope_kv_write_reference` and `paged_attention_reference` do, layer after layer. Of the operations that
these take in each layer, half only look up angles, pages and visible keys, which are the same in all layers.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from overlap_spec_kernels.attention.kv_format import NO_SCALES, KVScales, write_rows
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch


@dataclass(frozen=True, slots=True)
class Request:
    """The rows and keys of one request."""

    begin: int
    end: int  # rows begin..end - 1
    first: int  # the first key in its rows' windows
    stop: int  # one past the last key
    pages: Tensor | None  # i32, the pages of its keys; None if they are consecutive
    mask: Tensor | None  # [rows, keys], added to scores; None: a single row attends to all


class Forward:
    """The data that the layers of one forward share."""

    def __init__(self, rows: RowBatch, cos_sin: Tensor, page_size: int) -> None:
        self.rows = rows
        self._page_size = page_size
        self._requests: dict[int | None, list[Request]] = {}
        cos, sin = cos_sin.index_select(0, rows.positions)[:, None, None].chunk(2, dim=-1)
        self._cos, self._sin = torch.cat((cos, cos), dim=2), torch.cat((-sin, sin), dim=2)  # [T, 1, 2, d / 2]

    def rotated(self, heads: Tensor) -> Tensor:
        """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin). Shapes: [T, n, d] -> the same."""
        halves = heads.unflatten(2, (2, -1))
        turned: Tensor = (halves * self._cos).add_(halves.flip(2) * self._sin)
        return turned.to(heads.dtype).view(heads.shape)

    def write(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, scales: KVScales = NO_SCALES) -> None:
        """Put K and V of the rows into the cache. Shapes: k, v [T, nkv, d]."""
        assert self.rows.cache_rows is not None
        write_rows(k_cache, self.rows.cache_rows, k, scales.k)
        write_rows(v_cache, self.rows.cache_rows, v, scales.v)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, window: int | None) -> Tensor:
        """Request by request. Shapes: q [T, n, d] -> [T, n, d]."""
        if window not in self._requests:
            self._requests[window] = list(self._requests_of(window, q.dtype))
        k_rows, v_rows = (cache.view(-1, *cache.shape[2:]) for cache in (k_cache, v_cache))
        outputs = []
        for request in self._requests[window]:
            k, v = _keys(request, k_rows, k_cache).to(q.dtype), _keys(request, v_rows, v_cache).to(q.dtype)
            heads, k, v = (rows.transpose(0, 1)[None] for rows in (q[request.begin : request.end], k, v))
            out = F.scaled_dot_product_attention(heads, k, v, attn_mask=request.mask, scale=scale, enable_gqa=True)
            outputs.append(out[0].transpose(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs) if outputs else torch.empty_like(q)

    def _requests_of(self, window: int | None, dtype: torch.dtype) -> Sequence[Request]:
        """Read the rows' positions and pages on the host, once per forward."""
        assert self.rows.row_starts is not None
        starts, size = list(self.rows.row_starts.numpy()), self._page_size
        spans = [(int(begin), int(end)) for begin, end in zip(starts, starts[1:], strict=False)]
        requests = []
        for index, (begin, end) in enumerate(spans):
            if begin == end:
                continue
            positions = self.rows.positions[begin:end]
            lowest, highest = int(positions[0]), int(positions[-1])
            earliest = 0 if window is None else max(lowest - window + 1, 0)
            pages = self.rows.page_table[index, earliest // size : highest // size + 1]
            page = int(pages[0])
            consecutive = torch.equal(pages, torch.arange(page, page + len(pages), dtype=pages.dtype))
            first = page * size + earliest % size if consecutive else earliest % size
            mask = None if end - begin == 1 else _mask(positions, earliest, highest + 1, window, dtype)
            stop = first + highest + 1 - earliest
            requests.append(Request(begin, end, first, stop, None if consecutive else pages, mask))
        return requests


def _keys(request: Request, rows: Tensor, cache: Tensor) -> Tensor:
    """Shapes: rows [pages * size, nkv, d], cache [pages, size, nkv, d] -> [keys, nkv, d]."""
    if request.pages is not None:
        rows = cache.index_select(0, request.pages).view(-1, *cache.shape[2:])
    return rows[request.first : request.stop]


def _mask(positions: Tensor, first: int, stop: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Zero where the row at a position attends to a key, else -inf. Shapes: positions [R] -> [R, keys]."""
    keys, ends = torch.arange(first, stop), positions[:, None]
    hidden = keys > ends if window is None else (keys > ends) | (keys <= ends - window)
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


class Forwards:
    """Caches the current forward: all its layers call with the same rows, or with the same two parts in turns."""

    def __init__(self) -> None:
        self._last: deque[Forward] = deque(maxlen=2)

    def of(self, rows: RowBatch, cos_sin: Tensor, page_size: int) -> Forward:
        """The shared data of these rows, computed at the first layer's call."""
        for known in self._last:
            if known.rows is rows:
                return known
        self._last.append(Forward(rows, cos_sin, page_size))
        return self._last[-1]
