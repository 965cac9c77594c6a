"""The forms that linears in few bits take in memory."""

from dataclasses import dataclass, field

import torch
from overlap_spec_kernels import Scratch

from overlap_spec.models.quantization.stored import StoredWeight


@dataclass
class LinearForms:
    """Of one model. `kept`, `dequantised`: linears that stay as they are stored, or become matrices of `dtype`."""

    dtype: torch.dtype
    device: torch.device
    kept: int = 0
    dequantised: int = 0
    always_keeps: bool = False  # also where only the reference multiplies: tests
    _scratch: list[Scratch] = field(default_factory=list)

    def keeps(self, stored: StoredWeight) -> bool:
        """Whether a linear stays as it is stored: where a kernel multiplies by it."""
        keeps = self.always_keeps or stored.runs_on(self.device, self.dtype)
        self.kept, self.dequantised = self.kept + keeps, self.dequantised + (not keeps)
        return keeps

    def scratch_for(self, shape: tuple[int, int]) -> Scratch | None:
        """The buffer that all linears of the model share, with room for one of this shape; None on a CPU."""
        if self.device.type == "cpu":
            return None
        if not self._scratch:
            self._scratch.append(Scratch(torch.empty(0, dtype=self.dtype, device=self.device)))
        self._scratch[0].reserve(shape[0] * shape[1])
        return self._scratch[0]
