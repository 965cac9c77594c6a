"""Takes the scales of cached keys and values, which some checkpoints have for each layer.

They belong to a cache of 8 bits (`--kv-cache-dtype`). A cache in the model's dtype needs none, but they are read and
checked all the same: a checkpoint with a broken one is broken.
"""

import math
from dataclasses import replace

from overlap_spec_kernels.attention.kv_format import KVScales

from overlap_spec.errors import CheckpointError
from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.loading.checkpoint import Weights

BOTH = "kv_scale"  # one for keys and values, in older checkpoints
SCALARS = ((), (1,))


def with_kv_scales(checkpoint: Weights, attention: str, shape: AttentionShape) -> AttentionShape:
    """`shape` with the scales that the checkpoint has for this layer's attention; 1 where it has none.

    Raises: CheckpointError naming file, tensor, found and expected.
    """
    k, v = _found(checkpoint, attention, "k"), _found(checkpoint, attention, "v")
    if k is None and v is None:
        both = f"{attention}.{BOTH}"
        k = v = both if both in checkpoint else None
    if k is None and v is None:
        return shape
    if k is None or v is None:
        have, lack = (k, "v") if v is None else (v, "k")
        assert have is not None
        raise CheckpointError(
            f"{checkpoint.file_of(have)}: tensor {have} has no counterpart: expected {attention}.{lack}_scale"
        )
    return replace(shape, kv_scales=KVScales(_scale(checkpoint, k), _scale(checkpoint, v)))


def _found(checkpoint: Weights, attention: str, part: str) -> str | None:
    """The name of the scale of k or v: compressed-tensors', vLLM's, ModelOpt's or Quark's."""
    names = (f"{part}_scale", f"attn.{part}_scale", f"{part}_proj.{part}_scale", f"{part}_proj.output_scale")
    return next((name for name in (f"{attention}.{end}" for end in names) if name in checkpoint), None)


def _scale(checkpoint: Weights, name: str) -> float:
    shape, place = checkpoint.shape(name), f"{checkpoint.file_of(name)}: tensor {name}"
    stored = checkpoint.take_raw(name, shape if shape in SCALARS else ())
    if stored.is_meta:
        return 1.0
    scale = float(stored)
    if not (math.isfinite(scale) and scale > 0):
        raise CheckpointError(f"{place}: found {scale:g}, expected a positive finite number")
    return scale
