"""The choices that flags make about attention: its kernels, and how far a row looks back."""

from dataclasses import dataclass

from overlap_spec_kernels import RowAttention


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The choices for one model. The defaults are the fastest on the device of its tensors."""

    torch_only: bool = False  # the torch references, on a GPU too; they ask the device how long requests are
    prefill_kernel: bool = False  # windows of a chain take the operations of prefill
    most_keys: int | None = None  # a row sees no more, its own included; None: as in the checkpoint
    in_order: bool = False  # keys in parts by their positions, so that a row has the same bits in any company
    of_rows: RowAttention | None = None  # the kernel for rows of sequences on a CPU; None: torch

    @property
    def places_rows(self) -> bool:
        """Whether verify windows must give their rows' cache rows, as chunks of prompts do."""
        return self.torch_only or self.prefill_kernel or self.in_order

    def windows(self, of_layers: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """The narrower of each layer's own window and `most_keys`."""
        bounds = ([bound for bound in (window, self.most_keys) if bound is not None] for window in of_layers)
        return tuple(min(each, default=None) for each in bounds)


DEFAULT_ATTENTION = AttentionChoice()
