"""Runs the parts of a step on the device: windows to verify, prompts to compute, or both in one run of the layers.

    layers    read windows and chunks, run the target once for all parts           x batch size, width, prompt rows
    decide    head, draw tokens, judge, commit, write what leaves; by part         x kind of sampling
    draft     absorb what was committed, propose the next windows; by part         x what a draft takes of that kind

A decode step reads all weights for few rows, a chunk multiplies many rows by them. Together they take little longer
than the chunk alone. All else stays apart: each part attends as in a step of its own, and what follows the layers is
what follows them there.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from overlap_spec_kernels import Published
from torch import Tensor

from overlap_spec.models.interfaces import TargetModel, TargetOutput
from overlap_spec.sampling.context import SamplingWork
from overlap_spec.speculative.interfaces import ABSORBED_ROWS
from overlap_spec.speculative.rows import concatenated
from overlap_spec.worker.decode import DecodeStep
from overlap_spec.worker.prefill import PrefillStep
from overlap_spec.worker.step import StepShape


class PartKind(Protocol):
    """What is done with one kind of part, operation by operation. What the layers gave is of a type of its own."""

    target: TargetModel

    def dummies(self, shape: StepShape) -> Tensor:
        """The inputs of a part that has nothing but padding. Shapes: -> i64."""

    def read(self, inputs: Tensor, shape: StepShape) -> Any:
        """What the target runs: `tokens` and `rows`. Shapes: inputs i64, the slots or integers of the part."""

    def ran(self, read: Any, output: TargetOutput) -> Any:
        """What the target gave for it, with memory for what is decided."""

    def decide(self, rows: Any, work: SamplingWork) -> Published:
        """Draw tokens, judge, commit, and write what leaves. `rows`: what `ran` returned."""

    def draft(self, rows: Any, work: SamplingWork, width: int) -> None:
        """Absorb what was committed and propose windows of `width` columns."""

    def proposed(self, width: int) -> int:
        """Columns of the windows that `draft` proposes where so many are asked for. Prompts are absorbed anyway."""


class Part:
    """A part of a step whose layers have run, operation by operation. `rows`: what they gave."""

    def __init__(self, kind: PartKind, rows: Any) -> None:
        self.kind = kind
        self.rows = rows

    def decide(self, work: SamplingWork) -> Published:
        """Draw tokens, judge, commit, and write what leaves. Sync: never."""
        return self.kind.decide(self.rows, work)

    def draft(self, work: SamplingWork, width: int) -> None:
        """Absorb what was committed and propose the next windows. Sync: never."""
        self.kind.draft(self.rows, work, width)


class Runner(Protocol):
    """Runs steps, launching each operation or replaying graphs. Sync: never."""

    def shape_for(self, exact: StepShape, most_pages: Callable[[], int]) -> StepShape | None:
        """What to lay a step out for. None: its parts run one after the other.

        `most_pages`: counts the pages of the windows' slot that has the most.
        """

    def replays(self, shape: StepShape) -> bool:
        """Whether a graph holds a step that was laid out so."""

    def forward(self, shape: StepShape, *inputs: Tensor) -> tuple[Part, ...]:
        """Run the target's layers once, over the rows of all parts. What is given back is windows, then prompts.

        Shapes: inputs i64, of each part; slots [B] of windows may be fewer than the shape's, whose first rows are
        theirs.
        """

    def absorb_missed(self, slots: Tensor, counts: Tensor, most: int) -> None:
        """Let the draft absorb the `counts` last rows of each slot, which it missed. `counts` may be written to.

        `most`: the largest of the counts. Shapes: [B] i64.
        """


class EagerRunner:
    """Launches steps operation by operation; nothing is padded."""

    def __init__(self, windows: DecodeStep, prompts: PrefillStep, placed: PartKind | None = None) -> None:
        """`placed`: windows at given places; None: there are no such steps."""
        self.windows = windows
        self.prompts = prompts
        self.placed = placed

    def shape_for(self, exact: StepShape, most_pages: Callable[[], int]) -> StepShape:
        return exact

    def replays(self, shape: StepShape) -> bool:
        """Nothing is captured."""
        return False

    def kinds(self, shape: StepShape) -> tuple[PartKind, ...]:
        """Of the parts of such a step, in order."""
        if shape.placed:
            assert self.placed is not None, "no windows are put at given places"
            return (self.placed,)
        if shape.prompts is None:
            return (self.windows,)
        return (self.windows, self.prompts) if shape.slots else (self.prompts,)

    def run_layers(self, shape: StepShape, *inputs: Tensor) -> tuple[Any, ...]:
        """What the layers give for each part."""
        kinds = self.kinds(shape)
        read = [kind.read(part, shape) for kind, part in zip(kinds, inputs, strict=True)]
        target = kinds[0].target
        if len(kinds) == 1:
            return (kinds[0].ran(read[0], target.forward(read[0].tokens, read[0].rows)),)
        tokens = torch.cat([part.tokens for part in read])
        outputs = target.forward(tokens, concatenated(*[part.rows for part in read])).split(len(read[0].tokens))
        return tuple(kind.ran(part, output) for kind, part, output in zip(kinds, read, outputs, strict=True))

    def forward(self, shape: StepShape, *inputs: Tensor) -> tuple[Part, ...]:
        return tuple(map(Part, self.kinds(shape), self.run_layers(shape, *inputs)))

    def absorb_missed(self, slots: Tensor, counts: Tensor, most: int) -> None:
        for _ in range(0, most, ABSORBED_ROWS):
            self.windows.absorb_missed(slots, counts)
