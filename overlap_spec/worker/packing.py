"""One step's integers in one buffer, so that a step costs one host-to-device copy."""

from array import array
from collections.abc import Iterable

from torch import Tensor

from overlap_spec.worker.devices import Device


class Packer:
    """Collects named runs of integers and hands them back as views of one device tensor."""

    def __init__(self) -> None:
        self._values = array("q")
        self._bounds: list[tuple[int, int]] = []

    def add(self, values: Iterable[int]) -> int:
        """Append a run; returns its index.

        Every run starts at a multiple of 16 bytes, so that a kernel never meets a pointer less aligned than before:
        it would be compiled anew.
        """
        start = len(self._values)
        self._values.extend(values)
        self._bounds.append((start, len(self._values)))
        if len(self._values) % 2:
            self._values.append(0)
        return len(self._bounds) - 1

    def upload(self, device: Device) -> list[Tensor]:
        """The runs, in order, on the device. Shapes: each [n] i64. Sync: never."""
        # A trailing zero keeps the buffer non-empty, which torch.frombuffer insists on.
        self._values.append(0)
        packed = device.upload(self._values)
        return [packed[start:stop] for start, stop in self._bounds]
