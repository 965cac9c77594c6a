"""How fast a decode step could be: known ceilings of devices, and the floor, the numerator of step efficiency.

    floor = sum over the step's forwards of max((weight + KV + state bytes) / bytes_per_s, FLOP / flop_per_s)

Activations, norms, sampling and the copies of a step are not counted, so no step reaches 1. The forwards of a decode
step of B slots at width W:

    target          B * W rows, logits on all of them
    draft extend    B * D rows, logits on B            (W > 1)
    draft step      B * k rows and logits; G - 1 times

D is what a step can commit, G what a draft guesses of it, and k the nodes of a tree's level that have children: W,
W - 1 and 1 of a chain. A draft that guesses at once has other forwards:

    of a block      the extend makes keys and values alone; one draft step of B * R rows, logits on B * G
    of masks        the extend has B * (2 * D - 2) rows, logits on B * G; no draft step

The state of a recurrent layer is read and written once for each of the B slots.
"""

from dataclasses import dataclass

from overlap_spec.messages import ForwardShape, Guessing, Roofline


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
    seconds = forward_floor(roofline, roofline.target, rows, rows, context, context * width, batch)
    if width > 1:
        seconds += _draft_floor(roofline, batch, min(roofline.longest or width, width), context)
    return seconds


def _draft_floor(roofline: Roofline, batch: int, longest: int, context: int) -> float:
    """Of a draft, where a step can commit `longest` tokens of a slot."""
    guesses = min(roofline.most_guesses or longest - 1, longest - 1)
    extend, draft, nodes = roofline.extend, roofline.draft, roofline.draft_rows
    if roofline.guessing is Guessing.BLOCK:
        absorbed = forward_floor(roofline, extend, batch * longest, 0, 0, 0)
        return absorbed + forward_floor(roofline, draft, batch * nodes, batch * guesses, context, context * nodes)
    if roofline.guessing is Guessing.MASKS:
        each = 2 * longest - 2
        return forward_floor(roofline, extend, batch * each, batch * guesses, context, context * each)
    absorbed = forward_floor(roofline, extend, batch * longest, batch, context, context * longest)
    level = forward_floor(roofline, draft, batch * nodes, batch * nodes, context, context * nodes)
    return absorbed + (guesses - 1) * level


def forward_floor(
    roofline: Roofline, shape: ForwardShape, rows: int, logits: int, keys: int, pairs: int, states: int = 0
) -> float:
    """Seconds of one forward: `logits` of its `rows` reach the head, `pairs` of (row, key) are attended.

    `states`: of slots, which a target with recurrent layers reads and writes.
    """
    moved = shape.weight_bytes + shape.kv_bytes * keys + 2 * shape.state_bytes * states
    computed = shape.row_flop * rows + shape.head_flop * logits + shape.pair_flop * pairs
    return max(_seconds(moved, roofline.bytes_per_s), _seconds(computed, roofline.flop_per_s))


def _seconds(amount: float, rate: float) -> float:
    return amount / rate if rate else 0.0
