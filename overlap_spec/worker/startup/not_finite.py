"""Names where a target's hidden states become NaN or infinite, for the error that ends a start.

It runs one row again with the output of every layer kept, which costs nothing unless something is wrong.
"""

import torch
from torch import Tensor

from overlap_spec.models.interfaces import LoadedTarget, RowBatch
from overlap_spec.models.kv_cache import KVCache

TOKEN = 1  # what the prompts of the warm-up are made of


def first_not_finite(target: LoadedTarget, page_size: int) -> str:
    """The first part of the target whose output is not finite. Sync: waits for the device."""
    device, dtype = target.embedding.device, target.embedding.dtype
    cache = KVCache.allocate(target.kv_shape, 1, page_size, dtype, device)
    place = torch.zeros(1, dtype=torch.int64, device=device)
    rows = RowBatch(place, None, place.int()[None], None, 1, True).placed(page_size)
    with torch.inference_mode():
        model = target.attach(cache, page_size, tuple(range(target.num_layers)))
        tokens = torch.full_like(place, TOKEN)
        output = model.forward(tokens, rows)
        if not _is_finite(model.embed(tokens)):
            return "the embedding (embed_tokens)"
        for layer, hidden in enumerate(output.aux.chunk(target.num_layers, dim=1)):
            if not _is_finite(hidden):
                return f"layer {layer} of 0 to {target.num_layers - 1}"
        if not _is_finite(output.hidden):
            return "the final norm"
        return "the head (lm_head)" if not _is_finite(model.logits(output.hidden).compute()) else "no layer, run alone"


def _is_finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())
