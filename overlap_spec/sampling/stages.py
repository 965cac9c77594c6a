"""What features do to logits: each is one stage. The order of stages is the order in which they are applied."""

from typing import Protocol

from torch import Tensor

from overlap_spec.sampling.context import DrawContext


class LogitStage(Protocol):
    """Captured: tensor code of static shapes, which never asks the device for a value."""

    @property
    def name(self) -> str: ...

    @property
    def target_only(self) -> bool:
        """Whether it is for the target's rows alone: guesses are drawn without it."""
        ...

    def apply(self, logits: Tensor, context: DrawContext) -> Tensor:
        """May change the logits it is given. Sync: never. Shapes: [B, R, N] -> [B, R, N]."""
        ...
