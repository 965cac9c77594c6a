"""What the scheduler needs to tell how far a step is from what the device could do (`messages.Roofline`).

A device that the table lacks is measured once, at start: a copy for bytes, a matrix product for operations.
"""

import time
from collections.abc import Callable

import torch

from overlap_spec.messages import ForwardShape, Roofline
from overlap_spec.metrics.step_floor import Ceiling, known_ceiling
from overlap_spec.models.kv_cache import KVShape
from overlap_spec.models.work import ForwardWork
from overlap_spec.worker.startup.geometry import LoadedModels

COPY_BYTES = 128 << 20  # more than caches hold
PRODUCT_SIZE = {"cpu": 512, "cuda": 4096}
REPEATS = 4


def roofline(
    models: LoadedModels,
    dtype: torch.dtype,
    place: torch.device,
    ceiling: Ceiling | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Roofline:
    """What forwards of the models need of this device. Without `ceiling`, the device's is looked up or measured.

    `kv_dtype`: of KV pages, if not that of the models.
    """
    ceiling, kv_dtype = ceiling or ceiling_of(place, dtype), kv_dtype or dtype
    target, draft = models.target, models.proposer.profile
    tree = draft.tree
    return Roofline(
        ceiling.bytes_per_s,
        ceiling.flop_per_s,
        target=_shape(target.work, target.kv_shape, kv_dtype),
        extend=_shape(draft.extend_work, draft.kv_shape, kv_dtype),
        draft=_shape(draft.work, draft.kv_shape, kv_dtype),
        longest=0 if tree is None else tree.num_levels + 1,
        draft_rows=1 if tree is None else tree.level_rows,
    )


def ceiling_of(place: torch.device, dtype: torch.dtype) -> Ceiling:
    """The ceiling of a device that the table has; else it is measured."""
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else place.type
    return known_ceiling(name, str(dtype).removeprefix("torch.")) or measure_ceiling(place, dtype)


def measure_ceiling(place: torch.device, dtype: torch.dtype) -> Ceiling:
    """The best of a few copies and matrix products. Sync: waits for the device; call it before it serves."""
    source = torch.ones(COPY_BYTES // dtype.itemsize, dtype=dtype, device=place)
    copy = torch.empty_like(source)
    copy_s = _best(lambda: copy.copy_(source), place)
    size = PRODUCT_SIZE[place.type]
    matrix = torch.ones(size, size, dtype=dtype, device=place)
    product_s = _best(lambda: matrix @ matrix, place)
    return Ceiling(2 * source.nbytes / copy_s, 2 * size**3 / product_s)


def _best(work: Callable[[], object], place: torch.device) -> float:
    seconds = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        work()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])  # the first one takes memory


def _shape(work: ForwardWork, kv_shape: KVShape, dtype: torch.dtype) -> ForwardShape:
    return ForwardShape(
        work.weight_bytes, kv_shape.bytes_per_token(dtype), work.row_flop, work.head_flop, work.pair_flop
    )
