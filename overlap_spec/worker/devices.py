"""The two devices that a step can run on: how inputs get there, how results come back, how time is measured.

On CUDA everything is enqueued on one stream. Inputs travel through a ring of pinned buffers, each guarded by an event,
so the host never waits while it launches. A step's integers are packed into one of them (`Packer`). A result buffer and
an event return to their pools when the last reference to them is gone. On a CPU nothing is copied, and work is done
when its call returns.
"""

import struct
import time
from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from overlap_spec_kernels import copy_out
from torch import Tensor

Ints = npt.NDArray[np.int64]

FIRST_BUFFER_INTS = 1 << 16  # of a pinned upload buffer: half a MiB
RESULT_INTS = 1 << 12  # of a pinned result buffer, at least


class DeviceEvent(Protocol):
    """A point in the device's own time."""

    def since(self, earlier: "DeviceEvent") -> float:
        """Seconds from `earlier` to this event; both must have passed."""

    def passed(self) -> bool:
        """Whether the device has come to it. Sync: never."""


class Download(Protocol):
    """A device-to-host copy under way. `done`: when it is through."""

    asynchronous: bool
    done: DeviceEvent

    def ready(self) -> bool:
        """Whether it is through. Sync: never."""

    def rows(self) -> list[list[int]]:
        """What was copied. Blocks until the copy is through; call it off the launch path."""

    def blocks(self) -> list[memoryview]:
        """The bytes of what was copied beside the rows. Blocks as `rows` does."""


class Mirror(Protocol):
    """The host's copy of a tensor [c, S, n] of 64-bit integers at a fixed address, made anew when asked for."""

    def refresh(self) -> None:
        """Start to copy the tensor as it is at this point of the stream, over the last copy. Sync: never."""

    def ready(self) -> bool:
        """Whether the copy is made. Sync: never."""

    def rows(self, indices: Sequence[int]) -> list[list[list[int]]]:
        """Some of S rows: of each, c runs of n. The copy must be made."""


class Device(Protocol):
    """Where the worker's tensors live."""

    torch_device: torch.device
    asynchronous: bool  # whether work is enqueued, and done later

    def upload(self, values: "array[int] | Tensor") -> Tensor:
        """Copy packed 64-bit integers in. Shapes: -> [n] i64. Sync: never."""

    def download(self, tensor: Tensor, *beside: Tensor) -> Download:
        """Start a copy out, of what is there at this point of the stream: what is enqueued later may write there.

        Shapes: [.., n] i64; beside it any, of 64-bit numbers; all contiguous. Sync: never.
        """

    def mirror(self, tensor: Tensor) -> Mirror:
        """What can be read on the host again and again."""

    def now(self) -> DeviceEvent:
        """Mark this point of the stream. Sync: never."""

    def finish(self) -> None:
        """Wait until everything that was enqueued is through. Sync: of course; not while steps are served."""


class CpuEvent:
    """A reading of the host's clock."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, CpuEvent)
        return self.at - earlier.at

    def passed(self) -> bool:
        return True


class CpuDownload:
    """Nothing to wait for."""

    asynchronous = False

    def __init__(self, tensor: Tensor, beside: tuple[Tensor, ...]) -> None:
        self._tensor = tensor
        self._beside = beside
        self.done: DeviceEvent = CpuEvent()

    def ready(self) -> bool:
        return True

    def rows(self) -> list[list[int]]:
        rows: list[list[int]] = self._tensor.tolist()
        return rows

    def blocks(self) -> list[memoryview]:
        return [_bytes_of(tensor) for tensor in self._beside]


class CpuMirror:
    """The tensor itself."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def refresh(self) -> None:
        """It is as new as can be."""

    def ready(self) -> bool:
        return True

    def rows(self, indices: Sequence[int]) -> list[list[list[int]]]:
        found: list[list[list[int]]] = self._tensor.numpy()[:, indices].swapaxes(0, 1).tolist()
        return found


class CpuDevice:
    """Plain torch on the host. Tests compare CUDA with it."""

    torch_device = torch.device("cpu")
    asynchronous = False

    def upload(self, values: "array[int] | Tensor") -> Tensor:
        return _as_tensor(values)

    def download(self, tensor: Tensor, *beside: Tensor) -> Download:
        return CpuDownload(tensor, beside)

    def mirror(self, tensor: Tensor) -> Mirror:
        return CpuMirror(tensor)

    def now(self) -> DeviceEvent:
        return CpuEvent()

    def finish(self) -> None:
        """Nothing is left to wait for."""


class CudaEvent:
    """A timing event on the stream, lent by `pool`; it goes back when the last reference to it is gone."""

    def __init__(self, pool: list[torch.cuda.Event]) -> None:
        self._pool = pool
        self.event = pool.pop() if pool else torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __del__(self) -> None:
        self._pool.append(self.event)

    def since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, CudaEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1000

    def passed(self) -> bool:
        return bool(self.event.query())


class CudaDownload:
    """A copy into a pinned buffer lent by `pool`, and the event behind it. The first tensor is copied by a kernel.

    It is on the stream of the steps, because what is copied lies where the next step's graphs write. The next user of
    the buffer copies on the same stream, too, so a result that is never read is overwritten safely.
    """

    asynchronous = True

    def __init__(self, tensors: tuple[Tensor, ...], pool: list[Tensor], events: list[torch.cuda.Event]) -> None:
        self._pool = pool
        self._buffer = pool.pop() if pool else _pinned(RESULT_INTS)
        wanted = sum(tensor.numel() for tensor in tensors)
        if self._buffer.numel() < wanted:
            self._buffer = _pinned(2 * wanted)
        self._host, start = [], 0
        for tensor in tensors:
            part = self._buffer[start : start + tensor.numel()].view(tensor.shape)
            if start == 0:
                copy_out(tensor, part)
            else:
                part.copy_(tensor.view(torch.int64), non_blocking=True)
            self._host.append(part)
            start += tensor.numel()
        self._event = CudaEvent(events)
        self.done: DeviceEvent = self._event

    def __del__(self) -> None:
        self._pool.append(self._buffer)

    def ready(self) -> bool:
        return self._event.passed()

    def rows(self) -> list[list[int]]:
        self._event.event.synchronize()
        rows: list[list[int]] = self._host[0].tolist()
        return rows

    def blocks(self) -> list[memoryview]:
        self._event.event.synchronize()
        return [_bytes_of(part) for part in self._host[1:]]


class CudaMirror:
    """A pinned copy, and the event behind it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copied = torch.cuda.Event()

    def refresh(self) -> None:
        self._host.copy_(self._tensor, non_blocking=True)
        self._copied.record()

    def ready(self) -> bool:
        return bool(self._copied.query())

    def rows(self, indices: Sequence[int]) -> list[list[list[int]]]:
        found: list[list[list[int]]] = self._host.numpy()[:, indices].swapaxes(0, 1).tolist()
        return found


class CudaDevice:
    """One stream and a ring of pinned buffers; a buffer is reused `ring` uploads later, when its step is settled."""

    asynchronous = True

    def __init__(self, ring: int) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._staging = [_pinned(FIRST_BUFFER_INTS) for _ in range(ring)]
        self._copied = [torch.cuda.Event() for _ in range(ring)]
        self._next = 0
        self._events: list[torch.cuda.Event] = []
        self._results: list[Tensor] = []

    def upload(self, values: "array[int] | Tensor") -> Tensor:
        slot, self._next = self._next, (self._next + 1) % len(self._staging)
        if not self._copied[slot].query():  # an event that was never recorded has passed
            self._copied[slot].synchronize()  # only if more steps are in flight than the ring was made for
        if len(values) > len(self._staging[slot]):
            self._staging[slot] = _pinned(2 * len(values))  # rare: the first long prompts of a run
        staged = self._staging[slot][: len(values)]
        staged.copy_(_as_tensor(values))
        tensor = staged.to(self.torch_device, non_blocking=True)
        self._copied[slot].record()
        return tensor

    def download(self, tensor: Tensor, *beside: Tensor) -> Download:
        return CudaDownload((tensor, *beside), self._results, self._events)

    def mirror(self, tensor: Tensor) -> Mirror:
        return CudaMirror(tensor)

    def now(self) -> DeviceEvent:
        return CudaEvent(self._events)

    def finish(self) -> None:
        torch.cuda.synchronize(self.torch_device)


class Packer:
    """One step's integers in one buffer, so that a step costs one host-to-device copy.

    Collects runs of integers and returns them as views of one device tensor.
    """

    def __init__(self) -> None:
        self._values = array("q")
        self._bounds: list[tuple[int, int]] = []

    def add(self, values: "Iterable[int] | Ints | bytes") -> int:
        """Append a run, which may be packed already; returns its index.

        Every run starts at a multiple of 16 bytes, so that a kernel never meets a pointer less aligned than before:
        it would be compiled anew.
        """
        start = len(self._values)
        if isinstance(values, np.ndarray):
            values = values.tobytes()
        self._values.frombytes(values if isinstance(values, bytes) else pack_ints(values))
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


def pack_ints(values: Iterable[int]) -> bytes:
    """64-bit integers in the machine's order. Several times as fast as to extend an array."""
    items = tuple(values)
    return struct.pack(f"={len(items)}q", *items)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Of a contiguous tensor on the host."""
    return memoryview(tensor.view(torch.uint8).numpy().data).cast("B")


def _pinned(num_ints: int) -> Tensor:
    return torch.empty(num_ints, dtype=torch.int64, pin_memory=True)


def _as_tensor(values: "array[int] | Tensor") -> Tensor:
    return values if isinstance(values, Tensor) else torch.frombuffer(values, dtype=torch.int64)
