"""Random weights of a model's true shape, made on its device: `--load-format dummy`.

Speed depends on shapes, not on values, so a benchmark needs a config.json only. Values are seeded and small enough
that activations stay finite in 16 bits: linears are normal(0, 0.02) as before training, norms are 1, biases 0.
"""

import torch
from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.models.interfaces import Progress
from overlap_spec.models.loading.checkpoint import Shape

SEED = 1234
SCALE = 0.02  # what Llama models start training from


class DummyWeights:
    """`Weights` that holds whatever is asked for; tensors are made in the order of asking, which a loader fixes.

    `target_ids`: what a head's guesses stand for, where it guesses in a vocabulary of its own. Shapes: [Vd] i64.
    """

    def __init__(
        self,
        origin: str,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
        target_ids: Tensor | None = None,
    ) -> None:
        self.origin = f"{origin} (dummy weights)"
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._random = torch.Generator(device).manual_seed(SEED)
        self._num_taken = 0
        self._raw = {} if target_ids is None else {"d2t": target_ids - torch.arange(len(target_ids))}

    def __contains__(self, name: str) -> bool:
        return name in self._raw

    def names(self) -> frozenset[str]:
        """Only those that do not follow from the config: optional tensors are not there."""
        return frozenset(self._raw)

    def shape(self, name: str) -> Shape:
        """See `Weights`."""
        return tuple(self.take_raw(name).shape)

    def file_of(self, name: str) -> str:
        """See `Weights`."""
        return self.origin

    def take(self, name: str, shape: Shape) -> Tensor:
        """See `Weights`: a new tensor, made on the device without a copy on the host."""
        self._num_taken += 1
        self._progress(self._num_taken, 0)
        weight = torch.empty(shape, dtype=self._dtype, device=self._device)
        if name.endswith(".bias"):
            return weight.zero_()
        return weight.fill_(1.0) if len(shape) == 1 else weight.normal_(0.0, SCALE, generator=self._random)

    def take_raw(self, name: str, shape: Shape = ()) -> Tensor:
        """See `Weights`."""
        if name not in self._raw:
            raise CheckpointError(f"{self.origin}: tensor {name} is missing")
        return self._raw[name]

    def skip(self, *names: str) -> None:
        """Nothing is left over."""

    def finish(self) -> None:
        """Nothing is left over."""


def spread_target_ids(draft_vocab_size: int | None, vocab_size: int) -> Tensor | None:
    """Target ids of draft ids, ascending and spread over the vocabulary; None where both are the same.

    Shapes: -> [Vd] i64 on the CPU.
    """
    if draft_vocab_size is None or draft_vocab_size == vocab_size:
        return None
    return torch.arange(draft_vocab_size) * vocab_size // draft_vocab_size
