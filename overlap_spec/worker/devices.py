"""The two machines a step can run on: how inputs get there, how results come back, what time it took.

Not here: what a step computes. On CUDA everything is enqueued on one stream; inputs travel through a ring of
pinned buffers and results through another, each guarded by an event, so the host never waits while it launches.
On a CPU a tensor is where it is and work is done when the call returns.
"""

import time
from array import array
from typing import Protocol

import torch
from torch import Tensor

FIRST_BUFFER_INTS = 1 << 16  # of a pinned upload buffer: half a MiB


class Download(Protocol):
    """A device-to-host copy under way."""

    def wait(self) -> Tensor:
        """The host tensor. Blocks the calling thread until the copy is done; call it off the launch path."""
        ...


class Moment(Protocol):
    """A point in the device's own time."""

    def since(self, earlier: "Moment") -> float:
        """Seconds from `earlier` to this moment; both must have passed."""
        ...


class Device(Protocol):
    """Where the worker's tensors live."""

    torch_device: torch.device

    def upload(self, values: "array[int]") -> Tensor:
        """Copy packed 64-bit integers in. Shapes: -> [n] i64. Sync: never."""
        ...

    def download(self, tensor: Tensor) -> Download:
        """Start a copy out. Sync: never."""
        ...

    def now(self) -> Moment:
        """Mark this point of the stream. Sync: never."""
        ...


class CpuDownload:
    """Nothing to wait for."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        return self._tensor


class CpuMoment:
    """A reading of the host's clock."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def since(self, earlier: Moment) -> float:
        assert isinstance(earlier, CpuMoment)
        return self.at - earlier.at


class CpuDevice:
    """Plain torch in memory: the oracle."""

    torch_device = torch.device("cpu")

    def upload(self, values: "array[int]") -> Tensor:
        return torch.frombuffer(values, dtype=torch.int64)

    def download(self, tensor: Tensor) -> Download:
        return CpuDownload(tensor)

    def now(self) -> Moment:
        return CpuMoment()


class CudaDownload:
    """A pinned copy and the event behind it."""

    def __init__(self, host: Tensor, done: torch.cuda.Event) -> None:
        self._host = host
        self._done = done

    def wait(self) -> Tensor:
        self._done.synchronize()
        return self._host


class CudaMoment:
    """A timing event on the stream."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def since(self, earlier: Moment) -> float:
        assert isinstance(earlier, CudaMoment)
        return float(earlier.event.elapsed_time(self.event)) / 1000


class CudaDevice:
    """One stream and a ring of pinned buffers; a buffer is reused `ring` uploads later, when its step is settled."""

    def __init__(self, ring: int) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._buffers = [_pinned(FIRST_BUFFER_INTS) for _ in range(ring)]
        self._copied: list[torch.cuda.Event | None] = [None] * ring
        self._next = 0

    def upload(self, values: "array[int]") -> Tensor:
        slot, self._next = self._next, (self._next + 1) % len(self._buffers)
        previous = self._copied[slot]
        if previous is not None and not previous.query():
            previous.synchronize()  # only if more steps are in flight than the ring was made for
        if len(values) > len(self._buffers[slot]):
            self._buffers[slot] = _pinned(2 * len(values))  # rare: the first long prompts of a run
        staged = self._buffers[slot][: len(values)]
        staged.copy_(torch.frombuffer(values, dtype=torch.int64))
        tensor = staged.to(self.torch_device, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._copied[slot] = copied
        return tensor

    def download(self, tensor: Tensor) -> Download:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return CudaDownload(host, done)

    def now(self) -> Moment:
        return CudaMoment()


def _pinned(num_ints: int) -> Tensor:
    return torch.empty(num_ints, dtype=torch.int64, pin_memory=True)
