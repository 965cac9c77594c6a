"""The lower bound of a decode step's time: what its forwards move and compute, and the device's ceilings.

It travels in WorkerReady: the scheduler knows the sequence lengths, and computes how far a step is from its floor.
"""

import msgspec


class ForwardShape(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one forward of one model reads and computes.

    `weight_bytes`: read once, the head included, an embedding that is only gathered from left out. `head_flop`: per
    row that gets logits; `row_flop`: per row, everything else but attention; `pair_flop`: per (row, key) of attention.
    """

    weight_bytes: int = 0
    kv_bytes: int = 0  # per token of context
    row_flop: int = 0
    head_flop: int = 0
    pair_flop: int = 0


class Roofline(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A device's ceilings and the models that run on it. A rate of 0 is not known and bounds nothing.

    Where guesses are trees, a step absorbs `longest` rows of a slot and drafts one level fewer; a level runs
    `draft_rows` nodes of it.
    """

    bytes_per_s: float = 0.0
    flop_per_s: float = 0.0
    target: ForwardShape = ForwardShape()
    extend: ForwardShape = ForwardShape()  # the draft model absorbs what was committed
    draft: ForwardShape = ForwardShape()  # one draft step
    longest: int = 0  # tokens that a step can commit; 0: as many as it is wide
    draft_rows: int = 1
