"""How fast a decode step could be: known ceilings of devices, and the floor, the numerator of step efficiency.

    floor = sum over the step's forwards of max((weight + KV bytes) / bytes_per_s, FLOP / flop_per_s)

Activations, norms, sampling and the copies of a step are not counted, so no step reaches 1. The forwards of a decode
step of B slots at width W:

    target          B * W rows, logits on all of them
    draft extend    B * D rows, logits on B            (W > 1)
    draft step      B * k rows and logits; D - 2 times

D is what a step can commit, and k the nodes of a tree's level that have children: W and 1 of a chain.
"""

from dataclasses import dataclass

from overlap_spec.messages import ForwardShape, Roofline


@dataclass(frozen=True)
class Ceiling:
    """What a device can do at best. A rate of 0 is not known."""

    bytes_per_s: float  # copying, reads and writes counted
    flop_per_s: float  # matrix products


# Device name as its driver gives it, and dtype. H200: a device-to-device copy and a large GEMM, torch 2.11, CUDA 13.
H200 = "NVIDIA H200"
CEILINGS = {
    (H200, "bfloat16"): Ceiling(4.23e12, 790e12),
    (H200, "float16"): Ceiling(4.23e12, 0.0),
    (H200, "float32"): Ceiling(4.23e12, 0.0),
}


def known_ceiling(device_name: str, dtype: str) -> Ceiling | None:
    """Look a device up by its exact name; another of the same family has another memory."""
    return CEILINGS.get((device_name, dtype))


def step_floor(roofline: Roofline, batch: int, width: int, context: int) -> float:
    """Seconds that a decode step takes at least; 0 where no ceiling is known. `context`: tokens of all its slots."""
    rows = batch * width
    seconds = forward_floor(roofline, roofline.target, rows, rows, context, context * width)
    if width > 1:
        longest, nodes = min(roofline.longest or width, width), roofline.draft_rows
        seconds += forward_floor(roofline, roofline.extend, batch * longest, batch, context, context * longest)
        level = forward_floor(roofline, roofline.draft, batch * nodes, batch * nodes, context, context * nodes)
        seconds += (longest - 2) * level
    return seconds


def forward_floor(roofline: Roofline, shape: ForwardShape, rows: int, logits: int, keys: int, pairs: int) -> float:
    """Seconds of one forward: `logits` of its `rows` reach the head, `pairs` of (row, key) are attended."""
    moved = shape.weight_bytes + shape.kv_bytes * keys
    computed = shape.row_flop * rows + shape.head_flop * logits + shape.pair_flop * pairs
    return max(_seconds(moved, roofline.bytes_per_s), _seconds(computed, roofline.flop_per_s))


def _seconds(amount: float, rate: float) -> float:
    return amount / rate if rate else 0.0
