"""How fast a decode step could be: the denominator of step efficiency is its time, this is the numerator.

    floor = sum over the step's forwards of max((weight + KV bytes) / bytes_per_s, FLOP / flop_per_s)

Activations, norms, sampling and the copies of a step are not counted, so no step reaches 1. The forwards of a decode
step of B slots at width W:

    target          B * W rows, logits on all of them
    draft extend    B * D rows, logits on B            (W > 1)
    draft step      B * k rows and logits; D - 2 times

D is what a step can commit, and k the nodes of a tree's level that have children: W and 1 of a chain.
"""

from overlap_spec.messages import ForwardShape, Roofline


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
