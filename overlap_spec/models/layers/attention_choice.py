"""The choices that flags make about attention: its kernels, and how far a row looks back."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The choices for one model. The defaults are the fastest on the device of its tensors."""

    torch_only: bool = False  # run the torch twins on a GPU too; they read requests' lengths on the host
    prefill_kernel: bool = False  # verify windows of chains take the prefill kernels
    most_keys: int | None = None  # most keys that a row attends to, its own included; None: the checkpoint's window

    @property
    def places_rows(self) -> bool:
        """Whether verify windows must give their rows' cache rows, as chunks of prompts do."""
        return self.torch_only or self.prefill_kernel

    def windows(self, of_layers: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """The narrower of each layer's own window and `most_keys`."""
        bounds = ([bound for bound in (window, self.most_keys) if bound is not None] for window in of_layers)
        return tuple(min(each, default=None) for each in bounds)


DEFAULT_ATTENTION = AttentionChoice()
